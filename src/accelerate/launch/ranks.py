"""The processes of a job on this machine: started, watched, and ended together.

The first that fails ends the job: the others get a moment to fail by themselves (what they say helps), are
asked to stop, and killed after ``stop_timeout``. A signal to the launcher goes on to them. Nothing outlives
``run``, and when the launcher itself is killed, its guard (guard.py) ends them.

A rank may say that it stops in good order when it is asked (``Armed``). If all do, they get the time that
they need; a second signal ends them at once. A failing job does not ask them, for it would end too late.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from accelerate.core import environ
from accelerate.core.frozen import frozen

LINGER = 1.0  # seconds that the others have to fail by themselves after the first failure
PATROL = 0.5  # seconds between looks for a rank that has raised and does not end
SAME = 2.0  # seconds in which another signal is the same one, sent by several ways

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass
class Command:
    """One process to start: what, with which environment, and where its output goes (as in ``Popen``)."""

    program: Sequence[str]
    env: dict[str, str]
    stdout: int | None = None
    stderr: int | None = None


@frozen
class Armed:
    """What a rank said of itself: it stops in good order when it is asked.

    Attributes:
        code: its exit code when the job is to be started again.
        signals: by which it can be asked.
    """

    code: int
    signals: tuple[int, ...]


@frozen
class End:
    """How one process ended.

    Attributes:
        rank: its rank.
        code: its exit code; -n when signal n killed it.
        at: when that was seen, in ns of the monotonic clock.
        asked: the launcher had asked it to stop before.
        resumable: it has saved its work, and said by its code that the job is to be started again.
    """

    rank: int
    code: int
    at: int
    asked: bool
    resumable: bool = False


@dataclass
class Outcome:
    """How a job ended: the end of each process, in the order it was seen, and the signal that stopped it.

    Attributes:
        heeded: all ranks had said that they would stop by themselves on that signal, and were not killed.
    """

    ends: list[End] = field(default_factory=list)
    stopped_by: int | None = None
    heeded: bool = False

    @property
    def resumable(self) -> bool:
        """Whether the job is to be started again."""
        ends = self.ends
        return any(end.resumable for end in ends) and all(end.resumable or end.code == 0 for end in ends)

    @property
    def failed(self) -> bool:
        """Whether the job did not end well. Ranks that stop by themselves say so by their codes."""
        stopped = self.stopped_by is not None and not self.heeded
        return stopped or any(end.code != 0 for end in self.ends)


class Ranks:
    """The processes of one job.

    Args:
        commands: one per rank.
        stop_timeout: seconds between asking to stop and killing.
        raised: whether the rank, with its process id, has left a traceback; one that then does not end counts
            as failed.
        armed: what the process of this id has said of stopping by itself.
        grace: seconds that ranks which stop by themselves have; None for as long as they need.
        started: called with each process once it runs, to read its output.
        first: the rank of the first process; those before it are on other machines.
        listen: descriptors to wake up for.
    """

    def __init__(
        self,
        commands: Sequence[Command],
        *,
        stop_timeout: float,
        raised: Callable[[int, int], bool] = lambda rank, pid: False,
        armed: Callable[[int], Armed | None] = lambda pid: None,
        grace: float | None = None,
        started: Callable[[int, subprocess.Popen[bytes]], None] = lambda rank, process: None,
        first: int = 0,
        listen: Sequence[int] = (),
    ) -> None:
        self.commands, self.stop_timeout = commands, stop_timeout
        self.raised, self.armed, self.grace, self.started = raised, armed, grace, started
        self.first, self.listen = first, listen
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.alive: dict[int, subprocess.Popen[bytes]] = {}
        self.outcome = Outcome()
        self.stop_at: float | None = None
        self.kill_at: float | None = None
        self.heeded_at, self.gave_up = 0.0, False

    def run(self) -> Outcome:
        """Starts all, and returns when none is left.

        Raises:
            OSError: a program cannot be started.
        """
        with Guard(self.stop_timeout) as guard, Signals() as signals:
            return self.run_under(guard, signals)

    def run_under(self, guard: Guard, signals: Signals) -> Outcome:
        """Likewise, for a launcher that has more to watch than one set of processes."""
        try:
            self._start(guard)
            while self.alive:
                for number in signals.wait(self._seconds_to_next(), *self.listen):
                    self._signalled(number)
                self._reap(guard)
                self._advance()
        finally:
            if self.alive or self.outcome.failed:
                self._sweep()
        return self.outcome

    def _start(self, guard: Guard) -> None:
        for rank, command in enumerate(self.commands, self.first):
            process = subprocess.Popen(
                command.program,
                env=command.env,
                # One reader is right for a terminal; the others would steal its lines.
                stdin=None if rank == 0 else subprocess.DEVNULL,
                stdout=command.stdout,
                stderr=command.stderr,
                start_new_session=True,
            )
            self.processes[rank] = self.alive[rank] = process
            guard.tell(f"+{process.pid}")
            self.started(rank, process)

    def _reap(self, guard: Guard) -> None:
        for rank, process in list(self.alive.items()):
            code = process.poll()
            if code is None:
                continue
            del self.alive[rank]
            asked, armed = self.kill_at is not None, self.armed(process.pid)
            resumable = code != 0 and armed is not None and code == armed.code
            self.outcome.ends.append(End(rank, code, time.monotonic_ns(), asked, resumable))
            if code == 0:
                guard.tell(f"-{process.pid}")
            elif self.stop_at is None and not resumable:
                self.stop_at = time.monotonic() + LINGER

    def _advance(self) -> None:
        """Moves on from running to stopping to killing when its time has come."""
        now = time.monotonic()
        if self.stop_at is None and any(self.raised(r, p.pid) for r, p in self.alive.items()):
            self.stop_at = now + max(LINGER, self.stop_timeout)
        asked = self.gave_up or (self.kill_at is not None and not self.outcome.heeded)
        if self.stop_at is not None and now >= self.stop_at and not asked:
            self._give_up()
        if self.kill_at is not None and now >= self.kill_at:
            self.outcome.heeded = self.outcome.heeded and self.gave_up
            _send(os.killpg, self.alive.values(), signal.SIGKILL)

    def _signalled(self, number: int) -> None:
        if number in PASSED_ON:
            _send(os.kill, self.alive.values(), number)
        elif number in STOPS and self.outcome.stopped_by is None:
            self.outcome.stopped_by = number
            if self._heed(number):
                return
            # A terminal's Ctrl-C reaches a whole group; `kill` reaches one process.
            from_keyboard = number in (signal.SIGINT, signal.SIGQUIT)
            self._stop(os.killpg if from_keyboard else os.kill, number)
        elif number in STOPS and not (
            number == self.outcome.stopped_by and time.monotonic() - self.heeded_at < SAME
        ):
            self.kill_at = time.monotonic()

    def _heed(self, number: int) -> bool:
        """Passes a signal on to ranks that all stop by themselves on it, and gives them time; whether so."""
        said = [self.armed(process.pid) for process in self.alive.values()]
        if not said or not all(armed is not None and number in armed.signals for armed in said):
            return False
        self.outcome.heeded, self.heeded_at = True, time.monotonic()
        self.kill_at = None if self.grace is None else self.heeded_at + self.grace
        _send(os.kill, self.alive.values(), number)
        return True

    def _give_up(self) -> None:
        """The job fails. Ranks that would take the question for the end of a good job are not asked."""
        self.gave_up = True
        unasked = [process for process in self.alive.values() if self.armed(process.pid) is not None]
        _send(os.kill, unasked, signal.SIGKILL)
        self._stop(os.kill, signal.SIGTERM)

    def _stop(self, send: Callable[[int, int], None], number: int) -> None:
        self.kill_at = time.monotonic() + self.stop_timeout
        _send(send, self.alive.values(), number)

    def _seconds_to_next(self) -> float:
        due = self.kill_at if self.kill_at is not None else self.stop_at
        return PATROL if due is None else min(PATROL, max(0.01, due - time.monotonic()))

    def _sweep(self) -> None:
        """Kills every process that is left, and what the ranks of a failed job have started."""
        _send(os.killpg, self.processes.values(), signal.SIGKILL)
        for process in self.alive.values():
            process.wait()


def _send(
    send: Callable[[int, int], None], processes: Iterable[subprocess.Popen[bytes]], number: int
) -> None:
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):  # it has ended, or has changed its user
            send(process.pid, number)


class Guard:
    """The process that ends the ranks when this one dies."""

    def __init__(self, seconds: float) -> None:
        path = str(Path(__file__).with_name("guard.py"))
        # It inherits what is blocked. Signals to this process that come meanwhile are delivered afterwards.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", path, str(seconds)],
                env=environ.child({}),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # somebody killed it; the kernel's own arrangement stands
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tell("done")
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Signals:
    """Signals to this process, and ends of its children, as something to wait for.

    Only the main thread may handle signals; in another one this waits in small steps.
    """

    def __enter__(self) -> Signals:
        self.before: dict[int, Any] = {}
        self.main = threading.current_thread() is threading.main_thread()
        if self.main:
            self.reader, writer = os.pipe()
            os.set_blocking(self.reader, False)
            os.set_blocking(writer, False)
            self.writer = writer
            self.wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            for number in (*STOPS, *PASSED_ON, signal.SIGCHLD):
                handler = signal.getsignal(number)
                # What was ignored on purpose (nohup, a background job) stays ignored; ends of children
                # must be heard, or their exit codes are lost.
                if handler is not signal.SIG_IGN or number == signal.SIGCHLD:
                    self.before[number] = signal.SIG_DFL if handler is None else handler
                    signal.signal(number, _note)
        return self

    def wait(self, seconds: float, *also: int) -> bytes:
        """The numbers of the signals that came; empty after ``seconds``, or when ``also`` can be read."""
        if not self.main:
            time.sleep(min(seconds, 0.05))
            return b""
        ready, _, _ = select.select([self.reader, *also], [], [], seconds)
        return os.read(self.reader, 4096) if self.reader in ready else b""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.main:
            for number, handler in self.before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self.wakeup)
            os.close(self.reader)
            os.close(self.writer)


def _note(number: int, frame: FrameType | None) -> None:
    """Its number is in the pipe already."""
