"""The questions of the wizard, in their order: pages made of the declared settings.

A setting is asked about if its declaration has a ``question``, so a new one needs no line here. Settings
without a table of their own come first. A class with a ``__section__`` is a page: the options of a strategy
(``__switch__``) if that strategy was chosen, any other if its gate is answered with yes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, get_args

import accelerate.device as devices
from accelerate.cli.options import SCRIPT_SETTINGS
from accelerate.cli.wizard.config_editor import file_value
from accelerate.core.setting import Setting, convert_value, declared_settings
from accelerate.launch.config_files import CPU_GROUP, NOT_DISTRIBUTED, KeyPath, get_nested
from accelerate.launch.launch_request import launcher_settings

# Asked at the end: they depend on everything else.
ASKED_LAST = ("num_processes", "mixed_precision")
_COUNTS = ("num_processes", "num_machines")
SAGEMAKER = "AMAZON_SAGEMAKER"
GATE = "gate "  # name of a question that opens a page, with the page's section


@dataclass(frozen=True)
class AnswerOption:
    """One answer to choose.

    Attributes:
        label: what is shown.
        writes: what it puts into the file.
    """

    label: str
    writes: Mapping[KeyPath, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WizardQuestion:
    """One question.

    Attributes:
        name: of the setting, or of the decision.
        text: what is asked.
        help: one more line about it; may be empty.
        options: what can be chosen; empty where something is typed.
        setting: the setting that checks what is typed.
        default: the option (its number), or the text, that is offered.
    """

    name: str
    text: str
    help: str = ""
    options: Sequence[AnswerOption] = ()
    setting: Setting | None = None
    default: Any = 0

    @property
    def paths(self) -> set[KeyPath]:
        """Return the key paths that one of its answers writes."""
        if self.setting is not None:
            return {setting_path(self.setting)}
        return {path for option in self.options for path in option.writes}

    def writes(self, answer: Any) -> Mapping[KeyPath, Any]:
        """Return the values that an answer (the number of an option, or a text) writes into the file.

        Raises:
            SettingError: the text does not fit the setting.
        """
        if self.setting is None or self.options:
            return self.options[answer].writes
        text = str(answer).strip()
        value = convert_value(self.setting, text, "the answer", text=True) if text else None
        return {setting_path(self.setting): file_value(value)}


QuestionFlow: TypeAlias = Generator[WizardQuestion, int | str, None]


def setting_path(row: Setting) -> KeyPath:
    """Return the key path of a setting."""
    return (row.section, row.name) if row.section else (row.name,)


class WizardAnswers:
    """The answers so far, and the values of the file before.

    Attributes:
        before: the values of the file that is changed, nested; empty for a new one.
        written: what the answers so far put into the file, by path.
    """

    def __init__(self, before: Mapping[str, Any]) -> None:
        self.before = before
        self.written: dict[KeyPath, Any] = {}

    def value(self, name: str) -> Any:
        """The value of a setting so far, else its default."""
        for cls in all_classes():
            for row in declared_settings(cls):
                if row.name == name:
                    return self.written.get(setting_path(row), row.default)
        raise KeyError(name)

    def previous_value(self, path: KeyPath) -> Any:
        """The value of the file that is changed; None where there is none."""
        return get_nested(self.before, path)

    def matches(self, when: Mapping[str, Any]) -> bool:
        """Return whether the named settings have one of these values."""
        return all(self.value(name) in allowed for name, allowed in when.items())

    def nested_values(self) -> dict[str, Any]:
        """Return the written values, nested as in a file."""
        nested: dict[str, Any] = {}
        for path, value in self.written.items():
            if value is not None:
                table = nested if len(path) == 1 else nested.setdefault(path[0], {})
                table[path[-1]] = value
        return nested


def all_classes() -> tuple[type[Any], ...]:
    """Every class of settings of a launch."""
    return (*launcher_settings(), *SCRIPT_SETTINGS)


def asked_settings(cls: type[Any]) -> tuple[Setting, ...]:
    """The settings of a class that are asked about."""
    return tuple(row for row in declared_settings(cls) if row.question and row.in_file)


def ask_everything(answers: WizardAnswers) -> QuestionFlow:
    """All questions, one after another; it is sent the answer to each."""
    yield environment_question(answers)
    if answers.value("compute_environment") == SAGEMAKER:
        yield from ask_sagemaker(answers)
    else:
        yield from ask_cluster(answers)


def environment_question(answers: WizardAnswers) -> WizardQuestion:
    """Return the question where the job runs."""
    options = (
        AnswerOption(
            "on this machine, or on several of your own", {("compute_environment",): "LOCAL_MACHINE"}
        ),
        AnswerOption("on Amazon SageMaker", {("compute_environment",): SAGEMAKER}),
    )
    return _choice_question("compute_environment", "Where will you run it?", options, answers)


def ask_sagemaker(answers: WizardAnswers) -> QuestionFlow:
    """A job on somebody else's machines: the settings that only it has, and what every job has."""
    from accelerate.facade.enums import SageMakerDistributedType  # not before the first question

    options = [
        AnswerOption(kind.value.lower().replace("_", " "), {("distributed_type",): kind.value})
        for kind in SageMakerDistributedType
    ]
    yield _choice_question("distributed_type", "How do its processes work together?", options, answers)
    yield from _ask_settings(answers, ("num_machines",))
    for cls in filter(_is_sagemaker_only, all_classes()):
        yield from _ask_page(cls, answers)
    yield from _ask_settings(answers, ("mixed_precision",))


def ask_cluster(answers: WizardAnswers) -> QuestionFlow:
    """A job on machines of one's own."""
    yield _machine_question(answers)
    local = [cls for cls in all_classes() if asked_settings(cls) and not _is_sagemaker_only(cls)]
    for cls in (cls for cls in local if not _is_page(cls) and _applies(cls, answers)):
        yield from _ask_page(cls, answers, leave=ASKED_LAST)
    pages = [cls for cls in local if _is_page(cls) and not hasattr(cls, "__when__")]
    engines = {row.name for cls in _strategy_classes() for row in declared_settings(cls)}
    for cls in (cls for cls in pages if getattr(cls, "__switch__", "") not in engines):
        yield from _ask_gated_page(cls, answers)
    yield from _ask_strategy(pages, answers)
    yield from _ask_settings(answers, ASKED_LAST)
    for cls in (cls for cls in local if _is_page(cls) and hasattr(cls, "__when__")):
        if _applies(cls, answers):
            yield from _ask_page(cls, answers)


def _is_sagemaker_only(cls: type[Any]) -> bool:
    only: Mapping[str, Any] = getattr(cls, "__only_with__", {})
    return only.get("compute_environment") == SAGEMAKER


def _applies(cls: type[Any], answers: WizardAnswers) -> bool:
    """Return whether a class applies after the answers so far, by its ``__when__``."""
    when: Any = getattr(cls, "__when__", {})
    return bool(when(answers.value)) if callable(when) else answers.matches(when)


def _strategy_classes() -> list[type[Any]]:
    """Return the classes of settings that select a strategy."""
    return [cls for cls in all_classes() if getattr(cls, "__distributed_type__", "")]


def strategy_sections() -> set[str]:
    """Return the sections of the options of strategies: one of them has an effect."""
    names = {row.name for cls in _strategy_classes() for row in declared_settings(cls)}
    return {cls.__section__ for cls in all_classes() if getattr(cls, "__switch__", "") in names}


def _is_page(cls: type[Any]) -> bool:
    return bool(getattr(cls, "__section__", ""))


def _machine_question(answers: WizardAnswers) -> WizardQuestion:
    """Return the question for the devices. A file that names a strategy says only whether it is for CPUs."""
    options = tuple(_device_options())
    question = _choice_question("machine", "On which devices?", options, answers)
    previous = {name: answers.previous_value((name,)) for name in (*_COUNTS, "distributed_type", "use_cpu")}
    kind = previous["distributed_type"]
    if not answers.before or any(option.writes.get(("distributed_type",)) == kind for option in options):
        kinds = {kind or NOT_DISTRIBUTED}
    else:
        several = kind is not None or any(previous[name] not in (None, 1) for name in _COUNTS)
        kinds = {option.writes[("distributed_type",)] for option in options}
        kinds = kinds - {NOT_DISTRIBUTED} if several else {NOT_DISTRIBUTED}
    fitting = [
        number
        for number, option in enumerate(options)
        if option.writes[("distributed_type",)] in kinds
        and option.writes[("use_cpu",)] == bool(previous["use_cpu"])
    ]
    return replace(question, default=fitting[0]) if answers.before and fitting else question


def _device_options() -> Iterator[AnswerOption]:
    """Devices found here, one process, several on the CPU; then other devices, the most common first."""
    device, count = devices.probe_devices()
    kind, use_cpu = ("distributed_type",), ("use_cpu",)
    if count > 1:
        each = f"several processes, one {device.type} device each ({count} found here)"
        yield AnswerOption(each, {kind: device.distributed_type, use_cpu: False})
    alone = {kind: NOT_DISTRIBUTED, ("num_processes",): 1, ("num_machines",): 1}
    single_label = (
        f"one process, on the {device.type} device" if count else "one process, on a device if there is one"
    )
    yield AnswerOption(single_label, {**alone, use_cpu: False})
    yield AnswerOption("one process, on the CPU", {**alone, use_cpu: True})
    yield AnswerOption("several processes, on the CPU", {kind: CPU_GROUP, use_cpu: True})
    elsewhere = sorted(devices.accelerators(), key=lambda each: not each.is_most_common)
    others = {each.distributed_type: each.type for each in elsewhere}
    for name, device_type in others.items():
        if name != NOT_DISTRIBUTED and not (name == device.distributed_type and count > 1):
            yield AnswerOption(
                f"several processes, one {device_type} device each", {kind: name, use_cpu: False}
            )


def _ask_strategy(pages: Sequence[type[Any]], answers: WizardAnswers) -> QuestionFlow:
    """The way of training, and the page of the chosen one."""
    options = [AnswerOption("a copy of the model on every process")]
    for cls in _strategy_classes():
        kind: str = getattr(cls, "__distributed_type__", "")
        label = f"{getattr(cls, '__topic__', kind)} ({kind})"
        options.append(AnswerOption(label, {("distributed_type",): kind}))
    yield _choice_question("engine", "How is the model trained?", options, answers)
    chosen = answers.written.get(("distributed_type",))
    for switch in (cls for cls in _strategy_classes() if getattr(cls, "__distributed_type__", "") == chosen):
        names = {row.name for row in declared_settings(switch)}
        for cls in pages:
            if getattr(cls, "__switch__", "") in names:
                yield from _ask_page(cls, answers)


def _ask_gated_page(cls: type[Any], answers: WizardAnswers) -> QuestionFlow:
    """A page that is asked only after a yes, unless its first question can be answered with no."""
    if "no" in map(_display_word, asked_settings(cls)[0].choices):
        yield from _ask_page(cls, answers)
        return
    text = getattr(cls, "__question__", "") or f"Set up: {cls.__topic__.lower()}?"
    previous = answers.previous_value((cls.__section__,))
    name = f"{GATE}{cls.__section__}"
    yes = yield WizardQuestion(name, text, options=_YES_NO, default=int(bool(previous)))
    if yes:
        yield from _ask_page(cls, answers)


def _ask_page(cls: type[Any], answers: WizardAnswers, leave: Sequence[str] = ()) -> QuestionFlow:
    for row in asked_settings(cls):
        # What follows from an answer is not asked.
        if row.name not in leave and setting_path(row) not in answers.written and answers.matches(row.when):
            yield question_of(row, answers)


def _ask_settings(answers: WizardAnswers, names: Sequence[str]) -> QuestionFlow:
    rows = {row.name: row for cls in all_classes() for row in asked_settings(cls)}
    for name in names:
        if name in rows and setting_path(rows[name]) not in answers.written:
            question = question_of(rows[name], answers)
            if name == "num_processes" and not question.default:
                question = replace(question, default=_default_processes(answers))
            yield question


def _default_processes(answers: WizardAnswers) -> str:
    """The number of processes to offer: two on a CPU, else one per device; "" where none is known."""
    if answers.value("use_cpu"):
        return "2"
    fewest = str(answers.value("num_machines")).partition(":")[0]
    count = devices.probe_devices()[1] * (int(fewest) if fewest.isdigit() else 1)
    return str(count) if count else ""


_YES_NO = (AnswerOption("no"), AnswerOption("yes"))


def question_of(row: Setting, answers: WizardAnswers) -> WizardQuestion:
    """The question of a setting: its words to choose from, yes or no, or a line to type."""
    path, previous = setting_path(row), answers.previous_value(setting_path(row))
    default_text = _default_text(row)
    question = f"{row.question} [{row.name}]" + (f" (default: {default_text})" if default_text else "")
    ordered = sorted(row.choices, key=lambda choice: row.offered is not None and choice != row.offered)
    choices: Sequence[Any] = ordered or ((False, True) if _is_switch(row) else ())
    if not choices:
        default = previous if previous is not None else row.default
        text = "" if default is None or not isinstance(default, str | int | float) else str(default)
        return WizardQuestion(row.name, question, row.help, (), row, text)
    options = [AnswerOption(_display_word(choice), {path: choice}) for choice in choices]
    if previous is not None and str(previous).lower() not in (str(choice).lower() for choice in choices):
        options.insert(0, AnswerOption(f"{previous} (as in the file)", {path: previous}))
    no = next((choice for choice in row.choices if _display_word(choice) == "no"), None)
    if row.default is None and no is None:
        label = f"default: {default_text}" if default_text else "not set"
        options.insert(0, AnswerOption(label, {path: None}))
    start = previous if previous is not None else no if row.default is None else row.default
    if row.offered is not None and not answers.before:
        start = row.offered
    writes = [option.writes[path] for option in options]
    at = next((i for i, value in enumerate(writes) if str(value).lower() == str(start).lower()), 0)
    return WizardQuestion(row.name, question, row.help, options, row, at)


def _default_text(row: Setting) -> str:
    """Return what applies when a setting is left out; empty where that is told by nothing."""
    value = row.fallback if row.default is None else row.default
    return "" if value is None or isinstance(value, tuple | list | dict) else _display_word(value)


def _is_switch(row: Setting) -> bool:
    return set(get_args(row.type) or (row.type,)) <= {bool, type(None)}


def _display_word(word: Any) -> str:
    """A word as it is shown."""
    return ("yes" if word else "no") if isinstance(word, bool) else "no" if word == "NO" else str(word)


def _choice_question(
    name: str, text: str, options: Sequence[AnswerOption], answers: WizardAnswers
) -> WizardQuestion:
    """A decision that is no single setting; the answer that the old file fits is offered."""
    best, most = 0, 0
    for number, option in enumerate(options):
        same = sum(answers.previous_value(path) == value for path, value in option.writes.items())
        if same == len(option.writes) > 0 and same > most:
            best, most = number, same
    return WizardQuestion(name, text, options=options, default=best)
