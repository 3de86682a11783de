"""Asking: one question after another on a terminal, with arrow keys, until a file was agreed on."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate.cli.config_classes import BaseConfig, ClusterConfig, SageMakerConfig
from accelerate.cli.wizard.config_editor import find_refusal
from accelerate.cli.wizard.questions import (
    GATE,
    SAGEMAKER,
    QuestionFlow,
    WizardAnswers,
    WizardQuestion,
    all_classes,
    ask_cluster,
    ask_everything,
    ask_sagemaker,
    asked_settings,
    environment_question,
    setting_path,
    strategy_sections,
)
from accelerate.core.errors import AccelerateError, SettingError
from accelerate.launch import config_writer
from accelerate.launch.config_files import KeyPath, apply_changes

if TYPE_CHECKING:
    import questionary
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

C = TypeVar("C", bound=BaseConfig)
DIM_STYLE, ERROR_STYLE = "fg:ansibrightblack", "fg:ansired"
KEYS = "(Use arrow keys)"


class StepBack(Exception):  # noqa: N818 - no error
    """Esc was pressed, or the left arrow where something is chosen: the question before is asked again."""


def run_wizard(path: Path, before: Mapping[str, Any]) -> dict[str, Any] | None:
    """Ask everything, show the file, and ask whether it is right.

    Args:
        path: the file that will be written.
        before: what it says now; offered as answers, and kept where nothing is asked.

    Returns:
        The values to write; None to leave everything as it is.

    Raises:
        KeyboardInterrupt: Ctrl-C; nothing was written.
    """
    answers_by_name: dict[str, int | str] = {}
    print_plain("Enter takes an answer, Esc goes back to the question before, Ctrl-C ends.", DIM_STYLE)
    while True:
        questions, answers = ask_questions(ask_everything, before, answers_by_name)
        values = merge_answers(before, questions, answers, answers_by_name)
        print_plain(f"\n{path}:\n\n{config_writer.format_config(values, Path('x.yaml'))}")
        problem = find_refusal(values, path, on_this_machine=True)
        if problem is not None:
            print_plain(f"accelerate launch would refuse this file here: {problem}\n", ERROR_STYLE)
        decisions = ["yes", "change an answer", "throw it away"]
        # What only this machine lacks is no reason to change an answer: the file may be for another one.
        refused, changed = _find_new_refusal(values, before, path), questions[-1]
        with suppress(StepBack):
            closed = {} if refused is None else {0: "accelerate launch refuses it"}
            decision = _select_option("Write this file?", decisions, len(closed), closed)
            if decision == 0:
                return values
            if decision == 2:
                return None
            changed = _select_question(questions, answers_by_name, _find_cause(problem, questions))
        _ask_again(changed, answers_by_name)


def ask_questions(
    way: Callable[[WizardAnswers], QuestionFlow],
    before: Mapping[str, Any],
    given: dict[str, int | str],
    known: Mapping[KeyPath, Any] | None = None,
) -> tuple[list[WizardQuestion], WizardAnswers]:
    """Go through questions; those that were answered before are not asked again.

    Args:
        way: the questions.
        before: what the file says now.
        given: the answers by name of the question; new ones are added.
        known: what is so without being asked.

    Returns:
        The questions on the way, and what their answers write.
    """
    while True:
        answers = WizardAnswers(before)
        answers.written |= known or {}
        questions: list[WizardQuestion] = []
        try:
            _go_through(way(answers), answers, questions, given)
        except StepBack:
            # The flow starts anew, and stops at the question whose answer is taken away.
            if questions:
                _ask_again(questions[-1], given)
        else:
            return questions, answers


def _go_through(
    steps: QuestionFlow,
    answers: WizardAnswers,
    questions: list[WizardQuestion],
    given: dict[str, int | str],
) -> None:
    question = next(steps, None)
    while question is not None:
        if question.name not in given:
            offered = given.pop(f"was {question.name}", question.default)
            if question.options and int(offered) >= len(question.options):
                offered = question.default  # other answers have changed its options
            try:
                given[question.name] = ask_question(question, offered)
            except StepBack:
                given[f"was {question.name}"] = offered
                raise
        questions.append(question)
        answers.written |= question.writes(given[question.name])
        try:
            question = steps.send(given[question.name])
        except StopIteration:
            question = None


def _ask_again(question: WizardQuestion, given: dict[str, int | str]) -> None:
    """Take an answer away, so that its question is asked again and offers it."""
    given[f"was {question.name}"] = given.pop(question.name)


def merge_answers(
    before: Mapping[str, Any],
    questions: Sequence[WizardQuestion],
    answers: WizardAnswers,
    given: Mapping[str, int | str],
) -> dict[str, Any]:
    """The values to write: those of the old file, with what other answers than the offered ones change.

    Args:
        before: the values of the old file; empty if there is none, then every answer is written.
        questions: those that were asked.
        answers: what their answers write.
        given: the answers by name of the question.
    """
    written = answers.nested_values()
    if not before:
        return dict(sorted(written.items()))
    changed = {question.name: question for question in questions if given[question.name] != question.default}
    paths = {path for question in changed.values() for path in question.paths}
    gates = {name.removeprefix(GATE) for name in changed if name.startswith(GATE)}
    if ("distributed_type",) in paths:
        gates |= strategy_sections()
    for section in gates:
        # The page of a strategy or of a gate comes and goes as a whole.
        if section not in written or section not in before:
            paths |= {(section,), *((section, key) for key in written.get(section, {}))}
    names = {path[-1] for path in paths}
    paths |= {
        setting_path(row)
        for cls in all_classes()
        for row in asked_settings(cls)
        if names & row.when.keys() and not answers.matches(row.when)
    }
    changes = {path: answers.written.get(path) for path in sorted(paths, key=len)}
    return dict(sorted(apply_changes(before, changes).items()))


def ask_question(question: WizardQuestion, offered: Any) -> int | str:
    """One question on the terminal: the number of the chosen option, or the text that was typed."""
    if question.options:
        labels = [option.label for option in question.options]
        return _select_option(question.text, labels, offered, help=question.help)
    return _ask_text(question, str(offered))


def _find_new_refusal(
    values: Mapping[str, Any], before: Mapping[str, Any], path: Path
) -> AccelerateError | None:
    """Return the error of a launch with these values, unless the file before met the same one."""
    error, previous = find_refusal(values, path), find_refusal(before, path) if before else None
    return None if error is None or (previous is not None and error.what == previous.what) else error


def _find_cause(problem: AccelerateError | None, questions: Sequence[WizardQuestion]) -> int:
    """Return the number of the question to answer otherwise: one that the error's fix names, or the error."""
    for text in (problem.fix, problem.what) if problem else ():
        words = re.findall(r"\w+", text)
        named = [n for n, question in enumerate(questions) if question.name in words]
        if named:
            return min(named, key=lambda n: words.index(questions[n].name))
    return 0


def _answer_text(question: WizardQuestion, answer: Any) -> str:
    return question.options[answer].label if question.options else str(answer) or "-"


def _select_question(
    questions: Sequence[WizardQuestion], given: Mapping[str, int | str], offered: int
) -> WizardQuestion:
    """Ask which question is to be answered otherwise."""
    width = shutil.get_terminal_size().columns - 6
    texts: list[str] = []
    for question in questions:
        answer = _answer_text(question, given[question.name])
        text = textwrap.shorten(question.text, max(20, width - len(answer)), placeholder="...")
        texts.append(f"{text}  {answer}")
    return questions[_select_option("Which one?", texts, offered=offered)]


def _wrap(text: str) -> str:
    """Break lines between words at the edge of the terminal."""
    width = shutil.get_terminal_size().columns - 1
    return "\n".join(textwrap.fill(line, width, break_long_words=False) for line in text.splitlines())


def _run_prompt(prompt: questionary.Question, bindings: KeyBindings, *keys: str) -> Any:
    """Ask a question of questionary; these keys go back.

    Raises:
        StepBack: one of them was pressed; the question is no longer on the screen.
    """

    def step_back(event: KeyPressEvent) -> None:
        event.app.erase_when_done = True
        event.app.exit(exception=StepBack())

    for key in keys:
        bindings.add(key, eager=True)(step_back)
    # An arrow key begins with the character of Esc: more of it follows at once, or never.
    prompt.application.ttimeoutlen = 0.05
    return prompt.unsafe_ask()


def _select_option(
    text: str, labels: list[str], offered: int = 0, closed: Mapping[int, str] | None = None, help: str = ""
) -> int:
    """The number of the label that was chosen with the arrow keys; ``help`` stands below the question."""
    import questionary
    from prompt_toolkit.key_binding import KeyBindings

    choices = [
        questionary.Choice(label, value=number, disabled=(closed or {}).get(number))
        for number, label in enumerate(labels)
    ]
    lines = [questionary.Separator(line) for line in _wrap(help).splitlines()]
    prompt = questionary.select(text, [*lines, *choices], default=choices[offered], instruction=KEYS)
    bindings = prompt.application.key_bindings
    assert isinstance(bindings, KeyBindings)
    number: int = _run_prompt(prompt, bindings, "escape", "left")
    return number


def _ask_text(question: WizardQuestion, offered: str) -> str:
    """A line that was typed and that fits the setting."""
    import questionary
    from prompt_toolkit.key_binding import KeyBindings

    lines = (question.text, _wrap(question.help), ">") if question.help else (question.text,)
    while True:
        bindings = KeyBindings()
        prompt = questionary.text("\n".join(lines), default=offered, key_bindings=bindings)
        typed: str = _run_prompt(prompt, bindings, "escape")
        try:
            question.writes(typed)
        except SettingError as error:
            # Not in the line of questionary, which ends at the right edge of the terminal.
            print_plain(_wrap(" - ".join(part for part in (error.what, error.fix) if part)), ERROR_STYLE)
            offered = typed
        else:
            return typed


def print_plain(text: str, style: str = "") -> None:
    """A line between two questions."""
    import questionary

    questionary.print(text, style=style)


# --- public functions of 1.x: they ask, and write nothing


def get_cluster_input() -> ClusterConfig:
    """Ask about a job on machines of one's own; nothing is written."""
    return _ask_config(ask_cluster, ClusterConfig, {("compute_environment",): "LOCAL_MACHINE"})


def get_sagemaker_input() -> SageMakerConfig:
    """Ask about a job on Amazon SageMaker; nothing is written."""
    return _ask_config(ask_sagemaker, SageMakerConfig, {("compute_environment",): SAGEMAKER})


def get_user_input() -> ClusterConfig | SageMakerConfig:
    """Ask where the job runs, and then about it; nothing is written."""
    answers = WizardAnswers({})
    environment_number = ask_question(environment_question(answers), 0)
    return get_sagemaker_input() if environment_number else get_cluster_input()


def _ask_config(way: Any, kind: type[C], known: dict[tuple[str, ...], Any]) -> C:
    _, answers = ask_questions(way, {}, {}, known)
    return kind.of_values(answers.nested_values())
