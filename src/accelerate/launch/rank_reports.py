"""Ranks that report to their launcher: their command, the folder for what they leave, the error made of it.

The error of a failed job says which rank failed first, and its whole traceback is printed last.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from accelerate.core import environ
from accelerate.core.errors import UNKNOWN_RANK, LaunchError, RankError, name_ranks
from accelerate.core.value_types import frozen_dataclass
from accelerate.launch.base import Variables
from accelerate.launch.launch_request import LaunchRequest

# A process that dies without a word is noticed a moment later, when its peers may have complained already.
DETECTION_DELAY = 100_000_000  # ns
# What starts the script in each rank; the frames of these two files are no part of the script's stack.
RANK_SCRIPT = str(Path(__file__).with_name("rank_entry_point.py"))
RUNNER = str(Path(__file__).with_name("accelerate_rank.py"))

_HINTS = {
    "SIGKILL": "nothing in the job sends it; the system does when memory runs out",
    "SIGSEGV": "native code crashed",
    "SIGBUS": "native code crashed, often because /dev/shm is full",
    "SIGILL": "native code uses instructions that this processor does not have",
    "SIGABRT": "native code gave up",
}


@dataclass
class ProcessSpec:
    """One process to start: what, with which environment, and what it reads (as in ``Popen``)."""

    program: Sequence[str]
    env: dict[str, str]
    stdin: int | None = None


@frozen_dataclass
class GracefulStopRegistration:
    """The announcement of a rank that it stops gracefully on some signals.

    Attributes:
        code: its exit code when the job is to be started again.
        signals: by which it can be asked.
    """

    code: int
    signals: tuple[int, ...]


@frozen_dataclass
class ProcessExit:
    """The end of one process.

    Attributes:
        rank: its rank.
        code: its exit code; -n when signal n killed it.
        seen_at: when that was seen, in ns of the monotonic clock.
        was_asked_to_stop: the launcher had asked it to stop before.
        resumable: it has saved its work, and said by its code that the job is to be started again.
    """

    rank: int
    code: int
    seen_at: int
    was_asked_to_stop: bool
    resumable: bool = False


@dataclass
class JobOutcome:
    """The end of a job: that of each process, in the order it was seen, and the signal that stopped it.

    Attributes:
        exits: of its processes, in the order in which they were seen.
        stopped_by: the number of the signal.
        stopped_gracefully: all ranks had announced a graceful stop on that signal, and none was killed.
    """

    exits: list[ProcessExit] = field(default_factory=list)
    stopped_by: int | None = None
    stopped_gracefully: bool = False

    @property
    def resumable(self) -> bool:
        """Return whether the job is to be started again."""
        ends = self.exits
        return any(end.resumable for end in ends) and all(end.resumable or end.code == 0 for end in ends)

    @property
    def has_failed(self) -> bool:
        """Return whether the job failed. After a graceful stop, the exit codes of the ranks decide."""
        stopped = self.stopped_by is not None and not self.stopped_gracefully
        return stopped or any(end.code != 0 for end in self.exits)


@frozen_dataclass
class RankFailure:
    """The failure of one rank.

    Attributes:
        rank: its rank.
        code: its exit code; -n when signal n killed it.
        failed_at: when, in ns of the monotonic clock.
        summary: one line: ``ValueError: no data``.
        text: its traceback, or the stack of its crashed interpreter; may be empty.
        has_report: it left a word about its failure.
        failed_rank: the other rank whose failure led to this one, ``UNKNOWN_RANK`` where nobody knows which;
            None for a failure of its own. Whatever a peer's failure leads to is never the cause.
    """

    rank: int
    code: int
    failed_at: int
    summary: str
    text: str = ""
    has_report: bool = True
    failed_rank: int | None = None

    @property
    def blame_order(self) -> tuple[bool, int]:
        """Sort key: the cause comes first."""
        return self.failed_rank is not None, self.failed_at


def rank_file(folder: Path, rank: int, kind: str) -> Path:
    """Return the path of a file that a rank leaves.

    The kinds are ``"error"``, its traceback; ``"fault"``, the stack of a crashed interpreter; and of a rank
    of a function also ``"result"`` and ``"exception"``, both pickled.
    """
    return folder / f"rank_{rank}.{kind}"


def rank_process(
    request: LaunchRequest, folder: Path, rank: int, variables: Variables, *, reads_stdin: bool
) -> ProcessSpec:
    """One rank of the script, which leaves its traceback in ``folder``."""
    program = request.program
    if not request.settings.no_python:
        kind = "module" if request.settings.module else "script"
        files = (str(rank_file(folder, rank, "fault")), str(rank_file(folder, rank, "error")))
        program = (sys.executable, RANK_SCRIPT, *files, kind, *program)
    own: Variables = {"ACCELERATE_STOP_FOLDER": folder, "ACCELERATE_ERROR_FILE": None}
    env = environ.make_child_environment({**variables, **own})
    # One reader is right for a terminal: more would steal each other's lines.
    return ProcessSpec(program, env, stdin=None if reads_stdin else subprocess.DEVNULL)


@contextmanager
def report_folder() -> Iterator[Path]:
    """Provide a temporary folder in which ranks leave their tracebacks while the job runs."""
    try:
        temporary_folder = tempfile.TemporaryDirectory(prefix="accelerate-")
    except OSError as error:
        raise LaunchError(
            "no folder for temporary files can be made", why=str(error), fix="set TMPDIR to one with space"
        ) from error
    with temporary_folder as name:
        if sys.platform == "win32":
            yield Path(name)
            return
        import fcntl

        descriptor = os.open(name, os.O_RDONLY)
        try:
            # systemd-tmpfiles, which removes what is ten days old, passes over a locked folder.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):  # NFS without locks
                raise
        try:
            yield Path(name)
        finally:
            os.close(descriptor)


def read_graceful_stop(
    folder: Path, pid: int, known: dict[int, GracefulStopRegistration]
) -> GracefulStopRegistration | None:
    """Read the graceful stop that a process has announced in ``folder``; None without one.

    The other side is ``world/preemption.py``, which gets the folder as ``ACCELERATE_STOP_FOLDER``.

    Args:
        folder: where it was announced.
        pid: the process.
        known: what was read before, by process, which is kept here: the announcement is made once, and
            folders for temporary files are cleaned after some days.
    """
    file = folder / f"armed_{pid}"
    if file.is_file():
        code, *signals = map(int, file.read_text(encoding="utf-8").split())
        known[pid] = GracefulStopRegistration(code, tuple(signals))
    return known.get(pid)


def has_traceback(folder: Path, rank: int, graceful_stop: GracefulStopRegistration | None) -> bool:
    """Return whether a rank has reported a failure; exiting with the resume code is none."""
    file = rank_file(folder, rank, "error")
    if not file.is_file():
        return False
    failure = read_error_file(folder, rank)
    return graceful_stop is None or failure is None or failure.code != graceful_stop.code


def read_error_file(folder: Path, rank: int) -> RankFailure | None:
    """Read what ``accelerate_rank.RankErrorFile`` wrote; None without it."""
    file = rank_file(folder, rank, "error")
    if not file.is_file():
        return None
    head, _, text = file.read_text(encoding="utf-8", errors="replace").partition("\n")
    fields = head.split(" ", 3)
    if len(fields) < 4:
        return None
    failed_at, code, origin, summary = fields
    failed_rank = None if origin == "own" else int(origin)
    return RankFailure(rank, int(code), int(failed_at), summary, text, failed_rank=failed_rank)


def read_failure(end: ProcessExit, folder: Path) -> RankFailure:
    """Read the failure of a rank from its exit code and what it left."""
    failure, fault = read_error_file(folder, end.rank), rank_file(folder, end.rank, "fault")
    if failure is not None:
        # It was about to end with that code. What its libraries did while it shut down is not the news.
        return replace(failure, code=failure.code if end.code < 0 else end.code)
    # Giving up is what a communication library does when a peer is gone: a consequence, not a cause.
    at = end.seen_at if end.code == -signal.SIGABRT else end.seen_at - DETECTION_DELAY
    crash = fault.read_text(encoding="utf-8", errors="replace") if fault.is_file() else ""
    stack = "\n".join(line for line in crash.splitlines() if RANK_SCRIPT not in line and RUNNER not in line)
    return RankFailure(end.rank, end.code, at, code_text(end.code), stack, has_report=bool(stack))


def build_job_error(outcome: JobOutcome, folder: Path, size: int | None = None) -> RankError | None:
    """The error that says how a job failed, or that it is to be started again; None when it ended well.

    Args:
        outcome: how it ended.
        folder: where the ranks left their tracebacks.
        size: of the world, where some of its ranks are on other machines.
    """
    if not outcome.has_failed:
        return None
    if outcome.resumable:
        return _resumable_error(outcome)
    failures = {end: read_failure(end, folder) for end in outcome.exits if end.code}
    if outcome.stopped_by is not None and not outcome.stopped_gracefully:
        return stopped_error(outcome.stopped_by, failures.values())
    # Whoever ended after it was asked to is a cause only if it had raised before, and left a word.
    causes = [each for end, each in failures.items() if each.has_report or not end.was_asked_to_stop]
    causes = causes or list(failures.values())
    causes.sort(key=lambda each: each.blame_order)
    first = causes[0]
    if first.failed_rank not in (None, UNKNOWN_RANK):
        # The rank that it names was stopped before it could report, and told its peers.
        first = replace(first, rank=first.failed_rank)
    same = [each for each in causes if each is first or (each.text and each.summary == first.summary)]
    if first is not causes[0]:
        same = [first]
    stopped = len([end for end in outcome.exits if end.code]) > len(causes)
    left = [end.rank for end in outcome.exits if end.code == 0 and end.seen_at < first.failed_at]
    error = RankError(
        _describe_failures(first, same, size or len(outcome.exits), stopped),
        why=_failure_hint(first) or _early_end_hint(left),
    )
    error.code = shell_code(first.code)
    error.others = _later_failure_lines(each for each in causes if each not in same)
    error.traceback = first.text
    return error


def _resumable_error(outcome: JobOutcome) -> RankError:
    code = next(end.code for end in outcome.exits if end.resumable)
    error = RankError(
        f"stopped to be resumed (exit code {code}): start the job again, with --resume auto if the script "
        "reads accelerator.resume_from"
    )
    error.code = code
    return error


def stopped_error(number: int, failures: Iterable[RankFailure] = ()) -> RankError:
    """Return the error of a job that a signal has stopped; ``failures`` say where its ranks were."""
    name = "Ctrl-C" if number == signal.SIGINT else _signal_name(number)
    left = min((each for each in failures if each.text), key=lambda each: each.rank, default=None)
    error = RankError(f"stopped by {name}" + (f"; rank {left.rank} was here:" if left else ""))
    error.code = shell_code(-number)
    error.traceback = left.text if left else ""
    return error


def shell_code(code: int) -> int:
    """The exit code as a shell gives it: 128 + n for signal n."""
    return code if code > 0 else 128 - code


def code_text(code: int) -> str:
    """The exit code in words; the name of the signal where one has ended the process."""
    return f"exit code {code}" if code > 0 else _signal_name(-code)


def _signal_name(number: int) -> str:
    """``SIGTERM``; real-time signals have no name."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _describe_failures(first: RankFailure, same: Sequence[RankFailure], count: int, stopped: bool) -> str:
    were = "was" if len(same) == 1 else "were"
    code = code_text(first.code)
    ending = f"failed ({code})" if first.code > 0 else f"{were} killed by {code}"
    ranks = sorted(each.rank for each in same)
    if count == 1:
        return f"the script {ending}"
    if len(ranks) == count:
        return f"all {count} ranks {ending}, in the same way"
    alike = ", in the same way" if len(ranks) > 1 else ""
    return f"{name_ranks(ranks)} of {count} {ending}{alike}" + (
        ", the others were stopped" if stopped else ""
    )


def _early_end_hint(ranks: list[int]) -> str:
    """Name the ranks that ended well while another still worked, which may have waited for them."""
    return f"{name_ranks(ranks)} had ended before, with exit code 0" if ranks else ""


def _failure_hint(first: RankFailure) -> str:
    if first.code < 0:
        return _HINTS.get(_signal_name(-first.code), "")
    if not first.has_report:
        return "it left no traceback: it called os._exit, or printed its error itself"
    if first.failed_rank == first.rank:
        return f"rank {first.rank} was stopped before it could report; this is what it told another rank"
    return "" if first.text else f"it called {first.summary}"


def _later_failure_lines(others: Iterable[RankFailure]) -> list[str]:
    """One line per way in which ranks ended after the first, with the ranks that ended so."""
    ways: dict[str, list[int]] = {}
    for each in others:
        ways.setdefault(each.summary, []).append(each.rank)
    return [f"{name_ranks(ranks)} stopped after it: {way}" for way, ranks in ways.items()]
