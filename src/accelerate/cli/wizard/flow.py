"""Which questions the wizard asks, in which order: pages made of the declared settings.

A setting is asked about if its declaration has a ``question``, so a new one needs no line here. Settings
without a table of their own come first. A class with a ``__section__`` is a page: the options of a strategy
(``__switch__``) if that strategy was chosen, any other if its gate is answered with yes.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, get_args

from accelerate import device as devices
from accelerate.cli.options import HANDED
from accelerate.cli.wizard.keys import plain
from accelerate.core.setting import Setting, checked, declared
from accelerate.launch.check import ALONE, CPU_GROUP
from accelerate.launch.job import kept
from accelerate.launch.writing import Keys

# Asked at the end: they depend on everything else.
LAST = ("num_processes", "mixed_precision")
CLOUD = "AMAZON_SAGEMAKER"


@dataclass(frozen=True)
class Option:
    """One answer to choose.

    Attributes:
        label: what is shown.
        writes: what it puts into the file.
    """

    label: str
    writes: Mapping[Keys, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        name: of the setting, or of the decision.
        text: what is asked.
        help: one more line about it; may be empty.
        options: what can be chosen; empty where something is typed.
        row: the setting that checks what is typed.
        default: the option (its number), or the text, that is offered.
    """

    name: str
    text: str
    help: str = ""
    options: Sequence[Option] = ()
    row: Setting | None = None
    default: Any = 0

    def writes(self, answer: Any) -> Mapping[Keys, Any]:
        """What an answer puts into the file: the number of an option, or the text that was typed.

        Raises:
            SettingError: the text does not fit the setting.
        """
        if self.row is None or self.options:
            return self.options[answer].writes
        text = str(answer).strip()
        value = checked(self.row, text, "the answer", text=True) if text else None
        return {keys(self.row): plain(value)}


Flow: TypeAlias = Generator[Question, int | str, None]


def keys(row: Setting) -> Keys:
    """Where a setting stands in a file."""
    return (row.section, row.name) if row.section else (row.name,)


class Answers:
    """What was answered on this way through the questions, and what stood in the file before.

    Attributes:
        before: the values of the file that is changed, nested; empty for a new one.
        written: what the answers so far put into the file, by path.
    """

    def __init__(self, before: Mapping[str, Any]) -> None:
        self.before = before
        self.written: dict[Keys, Any] = {}

    def value(self, name: str) -> Any:
        """The value of a setting so far, else its default."""
        for cls in classes():
            for row in declared(cls):
                if row.name == name:
                    return self.written.get(keys(row), row.default)
        raise KeyError(name)

    def old(self, path: Keys) -> Any:
        """The value of the file that is changed; None where there is none."""
        found: Any = self.before
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def wanted(self, when: Mapping[str, Any]) -> bool:
        """Whether the settings named have one of these values."""
        return all(self.value(name) in allowed for name, allowed in when.items())

    def table(self) -> dict[str, Any]:
        """What was written, nested as in a file."""
        nested: dict[str, Any] = {}
        for path, value in self.written.items():
            if value is not None:
                table = nested if len(path) == 1 else nested.setdefault(path[0], {})
                table[path[-1]] = value
        return nested


def classes() -> tuple[type[Any], ...]:
    """Every class of settings of a launch."""
    return (*kept(), *HANDED)


def asked(cls: type[Any]) -> tuple[Setting, ...]:
    """The settings of a class that are asked about."""
    return tuple(row for row in declared(cls) if row.question and row.in_file)


def flow(answers: Answers) -> Flow:
    """All questions, one after another; it is sent the answer to each."""
    yield environment(answers)
    if answers.value("compute_environment") == CLOUD:
        yield from cloud(answers)
    else:
        yield from cluster(answers)


def environment(answers: Answers) -> Question:
    """Where the job runs."""
    options = (
        Option("on this machine, or on several of your own", {("compute_environment",): "LOCAL_MACHINE"}),
        Option("on Amazon SageMaker", {("compute_environment",): CLOUD}),
    )
    return _choice("compute_environment", "Where will you run it?", options, answers)


def cloud(answers: Answers) -> Flow:
    """A job on somebody else's machines: the settings that only it has, and what every job has."""
    from accelerate.facade.enums import SageMakerDistributedType  # not before the first question

    options = [
        Option(kind.value.lower().replace("_", " "), {("distributed_type",): kind.value})
        for kind in SageMakerDistributedType
    ]
    yield _choice("distributed_type", "How do its processes work together?", options, answers)
    yield from _rest(answers, ("num_machines",))
    for cls in filter(_is_of_cloud, classes()):
        yield from _page(cls, answers)
    yield from _rest(answers, ("mixed_precision",))


def cluster(answers: Answers) -> Flow:
    """A job on machines of one's own."""
    yield _choice("machine", "On which devices?", tuple(_machines()), answers)
    local = [cls for cls in classes() if asked(cls) and not _is_of_cloud(cls)]
    for cls in (cls for cls in local if not _is_page(cls) and _wanted(cls, answers)):
        yield from _page(cls, answers, leave=LAST)
    pages = [cls for cls in local if _is_page(cls) and not hasattr(cls, "__when__")]
    engines = {row.name for cls in _switches() for row in declared(cls)}
    for cls in (cls for cls in pages if getattr(cls, "__switch__", "") not in engines):
        yield from _gated(cls, answers)
    yield from _engines(pages, answers)
    yield from _rest(answers, LAST)
    for cls in (cls for cls in local if _is_page(cls) and hasattr(cls, "__when__")):
        if _wanted(cls, answers):
            yield from _page(cls, answers)


def _is_of_cloud(cls: type[Any]) -> bool:
    only: Mapping[str, Any] = getattr(cls, "__only_with__", {})
    return only.get("compute_environment") == CLOUD


def _wanted(cls: type[Any], answers: Answers) -> bool:
    """Whether the answers so far lead to a class: ``__when__`` is as a setting's ``when``, or a function."""
    when: Any = getattr(cls, "__when__", {})
    return bool(when(answers.value)) if callable(when) else answers.wanted(when)


def _switches() -> list[type[Any]]:
    """What says which strategy trains, one class each."""
    return [cls for cls in classes() if getattr(cls, "__distributed_type__", "")]


def _is_page(cls: type[Any]) -> bool:
    return bool(getattr(cls, "__section__", ""))


def _machines() -> Iterator[Option]:
    """All devices found here, one process, several on the CPU, and the types of devices not found here."""
    found, count = devices.probe()
    kind, use_cpu = ("distributed_type",), ("use_cpu",)
    if count > 1:
        each = f"several processes, one {found.type} device each ({count} found here)"
        yield Option(each, {kind: found.distributed_type, use_cpu: False})
    alone = {kind: ALONE, ("num_processes",): 1, ("num_machines",): 1}
    one = f"one process, on the {found.type} device" if count else "one process, on a device if there is one"
    yield Option(one, {**alone, use_cpu: False})
    yield Option("one process, on the CPU", {**alone, use_cpu: True})
    yield Option("several processes, on the CPU", {kind: CPU_GROUP, use_cpu: True})
    others = {each.distributed_type: each.type for each in devices.accelerators()}
    for name, device in others.items():
        if name != ALONE and not (name == found.distributed_type and count > 1):
            yield Option(f"several processes, one {device} device each", {kind: name, use_cpu: False})


def _engines(pages: Sequence[type[Any]], answers: Answers) -> Flow:
    """The way of training, and the page of the chosen one."""
    options = [Option("a copy of the model on every process")]
    for cls in _switches():
        kind: str = getattr(cls, "__distributed_type__", "")
        label = f"{getattr(cls, '__topic__', kind)} ({kind})"
        options.append(Option(label, {("distributed_type",): kind}))
    yield _choice("engine", "How is the model trained?", options, answers)
    chosen = answers.written.get(("distributed_type",))
    for switch in (cls for cls in _switches() if getattr(cls, "__distributed_type__", "") == chosen):
        names = {row.name for row in declared(switch)}
        for cls in pages:
            if getattr(cls, "__switch__", "") in names:
                yield from _page(cls, answers)


def _gated(cls: type[Any], answers: Answers) -> Flow:
    """A page that is asked only after a yes, unless its first question can be answered with no."""
    if "no" in map(_word, asked(cls)[0].choices):
        yield from _page(cls, answers)
        return
    text = getattr(cls, "__question__", "") or f"Set up: {cls.__topic__.lower()}?"
    known = answers.old((cls.__section__,))
    name = f"gate {cls.__section__}"
    yes = yield Question(name, text, options=_YES_NO, default=int(bool(known)))
    if yes:
        yield from _page(cls, answers)


def _page(cls: type[Any], answers: Answers, leave: Sequence[str] = ()) -> Flow:
    for row in asked(cls):
        # What follows from an answer is not asked.
        if row.name not in leave and keys(row) not in answers.written and answers.wanted(row.when):
            yield of(row, answers)


def _rest(answers: Answers, names: Sequence[str]) -> Flow:
    rows = {row.name: row for cls in classes() for row in asked(cls)}
    for name in names:
        if name in rows and keys(rows[name]) not in answers.written:
            question = of(rows[name], answers)
            if name == "num_processes" and not question.default:
                question = replace(question, default=_processes(answers))
            yield question


def _processes(answers: Answers) -> str:
    """How many processes to offer: two on a CPU, else one per device; "" where none is known."""
    if answers.value("use_cpu"):
        return "2"
    fewest = str(answers.value("num_machines")).partition(":")[0]
    count = devices.probe()[1] * (int(fewest) if fewest.isdigit() else 1)
    return str(count) if count else ""


_YES_NO = (Option("no"), Option("yes"))


def of(row: Setting, answers: Answers) -> Question:
    """The question of a setting: its words to choose from, yes or no, or a line to type."""
    path, known = keys(row), answers.old(keys(row))
    words: Sequence[Any] = row.choices or ((False, True) if _is_switch(row) else ())
    if not words:
        default = known if known is not None else row.default
        text = "" if default is None or not isinstance(default, str | int | float) else str(default)
        return Question(row.name, row.question, row.help, (), row, text)
    options = [Option(_word(word), {path: word}) for word in words]
    no = next((word for word in row.choices if _word(word) == "no"), None)
    if row.default is None and no is None:
        options.insert(0, Option("as by default", {path: None}))
    start = known if known is not None else no if row.default is None else row.default
    writes = [option.writes[path] for option in options]
    at = next((i for i, value in enumerate(writes) if str(value).lower() == str(start).lower()), 0)
    return Question(row.name, row.question, row.help, options, row, at)


def _is_switch(row: Setting) -> bool:
    return set(get_args(row.type) or (row.type,)) <= {bool, type(None)}


def _word(word: Any) -> str:
    """A word as it is shown."""
    return ("yes" if word else "no") if isinstance(word, bool) else "no" if word == "NO" else str(word)


def _choice(name: str, text: str, options: Sequence[Option], answers: Answers) -> Question:
    """A decision that is no single setting; the answer that the old file fits is offered."""
    best, most = 0, 0
    for number, option in enumerate(options):
        same = sum(answers.old(path) == value for path, value in option.writes.items())
        if same == len(option.writes) > 0 and same > most:
            best, most = number, same
    return Question(name, text, options=options, default=best)
