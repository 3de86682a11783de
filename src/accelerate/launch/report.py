"""What is said when a job has failed: which rank was first, and its own traceback, last and whole."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from accelerate.launch.errors import RankError
from accelerate.launch.ranks import End, Outcome

# A process that dies without a word is noticed a moment later, when its peers may have complained already.
UNNOTICED = 100_000_000  # ns
# What starts the script in each rank; its frames are no part of the script's stack.
CHILD = str(Path(__file__).with_name("child.py"))

_HINTS = {
    signal.SIGKILL: "nothing in the job sends it; the system does when memory runs out",
    signal.SIGSEGV: "native code crashed",
    signal.SIGBUS: "native code crashed, often because /dev/shm is full",
    signal.SIGILL: "native code uses instructions that this processor does not have",
    signal.SIGABRT: "native code gave up",
}


@dataclass(frozen=True)
class Record:
    """What a rank left when it failed.

    Attributes:
        at: when, in ns of the monotonic clock; 0 for a crash of the interpreter.
        summary: one line: ``ValueError: no data``.
        text: the traceback.
    """

    at: int
    summary: str
    text: str


def error_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its traceback."""
    return folder / f"rank_{rank}.error"


def fault_file(folder: Path, rank: int) -> Path:
    """Where a rank's interpreter leaves its stack when it crashes."""
    return folder / f"rank_{rank}.fault"


def record(folder: Path, rank: int) -> Record | None:
    """What a rank left, or None."""
    error, fault = error_file(folder, rank), fault_file(folder, rank)
    if error.is_file():
        head, _, text = error.read_text(encoding="utf-8").partition("\n")
        at, _, summary = head.partition(" ")
        if at.isdigit():  # not killed while it wrote
            return Record(int(at), summary, text)
    crash = fault.read_text(encoding="utf-8", errors="replace") if fault.is_file() else ""
    lines = [line for line in crash.splitlines() if CHILD not in line]
    return Record(0, lines[0], "\n".join(lines)) if lines else None


def failure(outcome: Outcome, folder: Path) -> RankError | None:
    """The error that says how a job failed; None when it ended well.

    Args:
        outcome: how it ended.
        folder: where the ranks left their tracebacks.
    """
    if not outcome.failed:
        return None
    records = {end.rank: record(folder, end.rank) for end in outcome.ends}
    if outcome.stopped_by is not None:
        return _stopped(outcome.stopped_by, records)
    count = len(outcome.ends)
    # Whoever ended after it was asked to is a cause only if it had raised before: it left a record.
    failed = [end for end in outcome.ends if end.code and (records[end.rank] or not end.asked)]
    first = min(failed, key=lambda end: _time(end, records[end.rank]))
    mine = records[first.rank]
    same = [first.rank]
    if mine is not None:
        same += [
            end.rank
            for end in failed
            if end is not first and (theirs := records[end.rank]) and theirs.summary == mine.summary
        ]
    others = [end for end in failed if end.rank not in same]
    error = RankError(_sentence(first, sorted(same), count, count > len(failed)), why=_hint(first, mine))
    error.code = first.code if first.code > 0 else 128 - first.code
    error.others = _lines(others, records)
    error.traceback = mine.text if mine else ""
    return error


def _time(end: End, mine: Record | None) -> int:
    if mine is not None and mine.at:
        return mine.at
    # Giving up is what a communication library does when a peer is gone: a consequence, not a cause.
    return end.at if end.code == -signal.SIGABRT else end.at - UNNOTICED


def _stopped(number: int, records: dict[int, Record | None]) -> RankError:
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    left = [(rank, mine) for rank, mine in sorted(records.items()) if mine is not None]
    error = RankError(f"stopped by {name}" + (f"; rank {left[0][0]} was here:" if left else ""))
    error.code = 128 + number
    error.traceback = left[0][1].text if left else ""
    return error


def _sentence(first: End, same: list[int], count: int, stopped: bool) -> str:
    how = f"failed ({_code(first)})" if first.code > 0 else f"was killed by {_code(first)}"
    if count == 1:
        return f"the script {how}"
    if len(same) == count:
        return f"all {count} ranks {how}, in the same way"
    rest = ", the others were stopped" if stopped else ""
    if len(same) > 1:
        return f"ranks {_numbers(same)} of {count} {how}, in the same way{rest}".replace(" was ", " were ")
    return f"rank {first.rank} of {count} {how}{rest}"


def _code(end: End) -> str:
    return f"exit code {end.code}" if end.code > 0 else signal.Signals(-end.code).name


def _hint(end: End, mine: Record | None) -> str:
    if end.code < 0:
        return _HINTS.get(signal.Signals(-end.code), "")
    if mine is None:
        return "it left no traceback: it called os._exit, or printed its error itself"
    return "" if mine.text else f"it called {mine.summary}"


def _lines(ends: Iterable[End], records: dict[int, Record | None]) -> list[str]:
    """One line per way in which ranks ended after the first, with the ranks that ended so."""
    ways: dict[str, list[int]] = {}
    for end in ends:
        mine = records[end.rank]
        ways.setdefault(mine.summary if mine else _code(end), []).append(end.rank)
    return [
        f"rank{'s' if len(ranks) > 1 else ''} {_numbers(sorted(ranks))} stopped after it: {way}"
        for way, ranks in ways.items()
    ]


def _numbers(ranks: list[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"0-2, 5"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
