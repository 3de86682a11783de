"""What is said when a job has failed: which rank was first, and its own traceback, last and whole."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

from accelerate.core.frozen import frozen
from accelerate.launch.errors import RankError
from accelerate.launch.ranks import Armed, End, Outcome

# A process that dies without a word is noticed a moment later, when its peers may have complained already.
UNNOTICED = 100_000_000  # ns
# What starts the script in each rank; the frames of these two files are no part of the script's stack.
CHILD = str(Path(__file__).with_name("child.py"))
RUNNER = str(Path(__file__).with_name("accelerate_rank.py"))

_HINTS: dict[int, str] = {
    signal.SIGKILL: "nothing in the job sends it; the system does when memory runs out",
    signal.SIGSEGV: "native code crashed",
    signal.SIGBUS: "native code crashed, often because /dev/shm is full",
    signal.SIGILL: "native code uses instructions that this processor does not have",
    signal.SIGABRT: "native code gave up",
}


@frozen
class Failure:
    """How one rank failed.

    Attributes:
        rank: its rank.
        code: its exit code; -n when signal n killed it.
        at: when, in ns of the monotonic clock.
        summary: one line: ``ValueError: no data``.
        text: its traceback, or the stack of its crashed interpreter; may be empty.
        known: it left a word about its failure.
    """

    rank: int
    code: int
    at: int
    summary: str
    text: str = ""
    known: bool = True


def error_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its traceback."""
    return folder / f"rank_{rank}.error"


def fault_file(folder: Path, rank: int) -> Path:
    """Where a rank's interpreter leaves its stack when it crashes."""
    return folder / f"rank_{rank}.fault"


def code_file(folder: Path) -> Path:
    """Where the ranks find the compiled script, if the launcher has compiled it."""
    return folder / "script.code"


def armed(folder: Path, pid: int) -> Armed | None:
    """What a process said in ``folder`` of stopping by itself when it is asked; None when it said nothing.

    The other side is ``world/stop.py``, which gets the folder as ``ACCELERATE_STOP_FOLDER``.
    """
    file = folder / f"armed_{pid}"
    if not file.is_file():
        return None
    code, *signals = map(int, file.read_text(encoding="utf-8").split())
    return Armed(code, tuple(signals))


def raised(folder: Path, rank: int, pid: int) -> bool:
    """Whether a rank left a word about a failure; leaving with the code to be started again is none."""
    file = error_file(folder, rank)
    if not file.is_file():
        return False
    said, words = armed(folder, pid), file.read_text(encoding="utf-8", errors="replace").split(" ", 2)
    return said is None or len(words) < 3 or int(words[1]) != said.code


def failure_of(end: End, folder: Path) -> Failure:
    """How a rank failed, by its exit code and what it left."""
    error, fault = error_file(folder, end.rank), fault_file(folder, end.rank)
    head, _, text = error.read_text(encoding="utf-8").partition("\n") if error.is_file() else ("", "", "")
    if head.count(" ") > 1:  # not killed while it wrote
        at, code, summary = head.split(" ", 2)
        # It was about to end with that code. What its libraries did while it shut down is not the news.
        return Failure(end.rank, int(code) if end.code < 0 else end.code, int(at), summary, text)
    # Giving up is what a communication library does when a peer is gone: a consequence, not a cause.
    at = end.at if end.code == -signal.SIGABRT else end.at - UNNOTICED
    crash = fault.read_text(encoding="utf-8", errors="replace") if fault.is_file() else ""
    stack = "\n".join(line for line in crash.splitlines() if CHILD not in line and RUNNER not in line)
    return Failure(end.rank, end.code, at, _code(end.code), stack, known=bool(stack))


def failure(outcome: Outcome, folder: Path, size: int | None = None) -> RankError | None:
    """The error that says how a job failed, or that it is to be started again; None when it ended well.

    Args:
        outcome: how it ended.
        folder: where the ranks left their tracebacks.
        size: of the world, where some of its ranks are on other machines.
    """
    if not outcome.failed:
        return None
    if outcome.resumable:
        return _resumable(outcome)
    found = {end: failure_of(end, folder) for end in outcome.ends if end.code}
    if outcome.stopped_by is not None and not outcome.heeded:
        return _stopped(outcome.stopped_by, found.values())
    # Whoever ended after it was asked to is a cause only if it had raised before, and left a word.
    causes = [each for end, each in found.items() if each.known or not end.asked] or list(found.values())
    causes.sort(key=lambda each: each.at)
    first = causes[0]
    same = [each for each in causes if each is first or (each.text and each.summary == first.summary)]
    stopped = len(outcome.ends) > len(causes)
    error = RankError(_sentence(first, same, size or len(outcome.ends), stopped), why=_hint(first))
    error.code = _shell(first.code)
    error.others = _lines(each for each in causes if each not in same)
    error.traceback = first.text
    return error


def _resumable(outcome: Outcome) -> RankError:
    code = next(end.code for end in outcome.ends if end.resumable)
    error = RankError(
        f"stopped to be resumed (exit code {code}): start the job again, with --resume auto if the script "
        "reads accelerator.resume_from"
    )
    error.code = code
    return error


def _stopped(number: int, found: Iterable[Failure]) -> RankError:
    name = "Ctrl-C" if number == signal.SIGINT else _name(number)
    left = min((each for each in found if each.text), key=lambda each: each.rank, default=None)
    error = RankError(f"stopped by {name}" + (f"; rank {left.rank} was here:" if left else ""))
    error.code = _shell(-number)
    error.traceback = left.text if left else ""
    return error


def _shell(code: int) -> int:
    """The exit code as a shell gives it: 128 + n for signal n."""
    return code if code > 0 else 128 - code


def _code(code: int) -> str:
    return f"exit code {code}" if code > 0 else _name(-code)


def _name(number: int) -> str:
    """``SIGTERM``; real-time signals have no name."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _sentence(first: Failure, same: Sequence[Failure], count: int, stopped: bool) -> str:
    were = "was" if len(same) == 1 else "were"
    how = f"failed ({_code(first.code)})" if first.code > 0 else f"{were} killed by {_code(first.code)}"
    ranks = sorted(each.rank for each in same)
    if count == 1:
        return f"the script {how}"
    if len(ranks) == count:
        return f"all {count} ranks {how}, in the same way"
    who = f"rank {first.rank}" if len(ranks) == 1 else f"ranks {_numbers(ranks)}"
    alike = ", in the same way" if len(ranks) > 1 else ""
    return f"{who} of {count} {how}{alike}" + (", the others were stopped" if stopped else "")


def _hint(first: Failure) -> str:
    if first.code < 0:
        return _HINTS.get(-first.code, "")
    if not first.known:
        return "it left no traceback: it called os._exit, or printed its error itself"
    return "" if first.text else f"it called {first.summary}"


def _lines(others: Iterable[Failure]) -> list[str]:
    """One line per way in which ranks ended after the first, with the ranks that ended so."""
    ways: dict[str, list[int]] = {}
    for each in others:
        ways.setdefault(each.summary, []).append(each.rank)
    return [
        f"rank{'s' if len(ranks) > 1 else ''} {_numbers(sorted(ranks))} stopped after it: {way}"
        for way, ranks in ways.items()
    ]


def _numbers(ranks: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"0-2, 5"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
