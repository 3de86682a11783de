"""The processes of a job on this machine: started, watched, and ended together.

The first that fails ends the job: the others get a moment to fail by themselves (what they say helps), are
asked to stop, and killed after ``stop_timeout``. A signal to the launcher goes on to them. Nothing outlives
``run``, and when the launcher itself is killed, its guard (orphan_guard.py) ends them.

A rank may announce that it stops gracefully on a signal (``GracefulStopRegistration``). If all do, they get
the time that they need; a second signal ends them at once. A failing job does not ask them, for it would
end too late.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from accelerate.core import environ
from accelerate.core.errors import LaunchError, RankError, name_ranks
from accelerate.launch.base import Variables, explain_start_error
from accelerate.launch.launch_request import LaunchRequest
from accelerate.launch.logs import RankLogSettings
from accelerate.launch.rank_reports import (
    JobOutcome,
    ProcessExit,
    ProcessSpec,
    build_job_error,
    has_traceback,
    rank_process,
    read_failure,
    read_graceful_stop,
    report_folder,
)

LINGER_SECONDS = 1.0  # seconds that the others have to fail by themselves after the first failure
POLL_SECONDS = 0.5  # seconds between looks for a rank that has raised and does not end
STOP_SECONDS = 3.0  # that ranks have before they are killed, when the job fails
SIGNAL_STOP_SECONDS = 30.0  # when a signal or Ctrl-C ends it: ranks may save; torchrun waits so long
REPEAT_SECONDS = 2.0  # seconds in which another signal is the same one, sent by several ways

# By name: Windows, where nothing is started here, has the first two alone.
STOP_SIGNALS, FORWARDED_SIGNALS = (
    tuple(signal.Signals[name] for name in names if hasattr(signal, name))
    for names in (("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"), ("SIGUSR1", "SIGUSR2", "SIGXCPU"))
)
# Schedulers send one after the other, or one to each process and to the group.
REPEATED_SIGNALS = {number for number in STOP_SIGNALS if number.name in ("SIGTERM", "SIGHUP")}


class WorkerSupervisor:
    """The processes of one job.

    Args:
        commands: one per rank.
        logs: where their output goes.
        folder: where they leave tracebacks, and announce graceful stops; a rank that has left a traceback and
            does not exit counts as failed.
        stop_timeout: seconds between asking to stop and killing; None: ``SIGNAL_STOP_SECONDS`` on a signal,
            ``STOP_SECONDS`` on a failure.
        grace_period: seconds for a graceful stop before ranks are killed; None for as long as they need.
        first_rank: the rank of the first process; lower ranks are on other machines.
        wake_fds: file descriptors that interrupt the wait.
        keeps_leftovers: processes that the ranks of a good job have left behind live on.
    """

    def __init__(
        self,
        commands: Sequence[ProcessSpec],
        logs: RankLogSettings,
        folder: Path,
        *,
        stop_timeout: float | None,
        grace_period: float | None = None,
        first_rank: int = 0,
        wake_fds: Sequence[int] = (),
        keeps_leftovers: bool = True,
    ) -> None:
        self.commands, self.logs, self.folder = commands, logs, folder
        self.stop_timeout = STOP_SECONDS if stop_timeout is None else stop_timeout
        self.signal_timeout = SIGNAL_STOP_SECONDS if stop_timeout is None else stop_timeout
        self.grace_period = grace_period
        self.first_rank, self.wake_fds, self.keeps_leftovers = first_rank, wake_fds, keeps_leftovers
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.alive: dict[int, subprocess.Popen[bytes]] = {}
        self.outcome = JobOutcome()
        self.read_graceful_stop = partial(read_graceful_stop, folder, known={})
        self.stop_at: float | None = None
        self.kill_at: float | None = None
        self.hint_at: float | None = None
        self.stopped_at, self.is_aborting = 0.0, False  # when the first signal to stop came

    def run(self) -> JobOutcome:
        """Start all, and return when none is left.

        Raises:
            LaunchError: a program cannot be started, or none on Windows.
        """
        with GuardProcess(self.stop_timeout) as guard, SignalAndChildExitWaiter() as signals:
            return self.run_with(guard, signals)

    def run_with(self, guard: GuardProcess, signals: SignalAndChildExitWaiter) -> JobOutcome:
        """Run all processes under a guard and a listener that the launcher shares between attempts."""
        try:
            for rank, command in enumerate(self.commands, self.first_rank):
                process = self._create_process(rank, command, guard)
                self.processes[rank] = self.alive[rank] = process
                guard.write_line(f"+{process.pid}")
                self.logs.read(rank, process)
            while self.alive:
                due = self.stop_at if self.kill_at is None else self.kill_at
                seconds = POLL_SECONDS if due is None else max(0.01, due - time.monotonic())
                for number in signals.wait(min(POLL_SECONDS, seconds), *self.wake_fds):
                    self._handle_signal(number)
                self._reap_processes(guard)
                self._apply_deadlines()
        finally:
            if self.alive or self.outcome.has_failed or not self.keeps_leftovers:
                # Also what the ranks of a failed job have started.
                _send_signal(os.killpg, self.processes.values(), signal.SIGKILL)
                for process in self.alive.values():
                    process.wait()
                for process in self.processes.values():  # another attempt may run when their ids are reused
                    guard.write_line(f"-{process.pid}")
        if self.logs.finish(partial(self._asks_to_end_output, signals)) and self.logs.sinks:
            exits = self.outcome.exits
            self.logs.append_tracebacks({end.rank: read_failure(end, self.folder).text for end in exits})
        return self.outcome

    def _asks_to_end_output(self, signals: SignalAndChildExitWaiter) -> bool:
        """Return whether somebody does not want to wait until the output of the processes is passed on."""
        return any(number in STOP_SIGNALS and not self._is_repeat(number) for number in signals.wait(0))

    def _create_process(
        self, rank: int, command: ProcessSpec, guard: GuardProcess
    ) -> subprocess.Popen[bytes]:
        """Start one process, with pipes for the output that is to be read."""
        stdout, stderr = self.logs.pipes(rank)
        with explain_start_error(command.program[0]):
            return subprocess.Popen(
                command.program,
                env=command.env,
                stdin=command.stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def _reap_processes(self, guard: GuardProcess) -> None:
        for rank, process in list(self.alive.items()):
            code = process.poll()
            if code is None:
                continue
            del self.alive[rank]
            stop_requested, armed = self.kill_at is not None, self.read_graceful_stop(process.pid)
            resumable = code != 0 and armed is not None and code == armed.code
            self.outcome.exits.append(ProcessExit(rank, code, time.monotonic_ns(), stop_requested, resumable))
            if code == 0:
                guard.write_line(f"-{process.pid}")
            elif self.stop_at is None and not resumable:
                self.stop_at = time.monotonic() + LINGER_SECONDS

    def _apply_deadlines(self) -> None:
        """Move on from running to stopping to killing when its time has come."""
        now = time.monotonic()
        if self.stop_at is None and any(
            has_traceback(self.folder, rank, self.read_graceful_stop(process.pid))
            for rank, process in self.alive.items()
        ):
            self.stop_at = now + max(LINGER_SECONDS, self.stop_timeout)
        is_ending = self.is_aborting or (self.kill_at is not None and not self.outcome.stopped_gracefully)
        if self.stop_at is not None and now >= self.stop_at and not is_ending:
            self._abort_job()
        if self.hint_at is not None and now >= self.hint_at and self.alive:
            self.hint_at, waits = None, f"waiting for {name_ranks(self.alive)} to end"
            print(f"accelerate launch: {waits}; Ctrl-C once more does not wait", file=sys.stderr, flush=True)
        if self.kill_at is not None and now >= self.kill_at:
            self.outcome.stopped_gracefully = self.outcome.stopped_gracefully and self.is_aborting
            _send_signal(os.killpg, self.alive.values(), signal.SIGKILL)

    def _handle_signal(self, number: int) -> None:
        if number in FORWARDED_SIGNALS:
            _send_signal(os.kill, self.alive.values(), number)
        elif number in STOP_SIGNALS and self.outcome.stopped_by is None:
            self.outcome.stopped_by, self.stopped_at = number, time.monotonic()
            if self._stop_gracefully(number):
                return
            # A terminal's Ctrl-C reaches a whole group; `kill` reaches one process.
            from_keyboard = number in (signal.SIGINT, signal.SIGQUIT)
            self._ask_to_stop(os.killpg if from_keyboard else os.kill, number, self.signal_timeout)
            self.hint_at = time.monotonic() + STOP_SECONDS if number == signal.SIGINT else None
        elif number in STOP_SIGNALS and not self._is_repeat(number):
            self.kill_at = time.monotonic()

    def _is_repeat(self, number: int) -> bool:
        """Return whether a signal is the one that stops the job, sent by another way."""
        is_alike = {number, self.outcome.stopped_by} <= REPEATED_SIGNALS
        return is_alike and time.monotonic() - self.stopped_at < REPEAT_SECONDS

    def _stop_gracefully(self, number: int) -> bool:
        """Pass a signal on to ranks that all stop by themselves on it, and give them time; whether so."""
        graceful_stops = [self.read_graceful_stop(process.pid) for process in self.alive.values()]
        if not graceful_stops or not all(
            armed is not None and number in armed.signals for armed in graceful_stops
        ):
            return False
        self.outcome.stopped_gracefully = True
        self.kill_at = None if self.grace_period is None else self.stopped_at + self.grace_period
        _send_signal(os.kill, self.alive.values(), number)
        return True

    def _abort_job(self) -> None:
        """The job fails. Ranks that would take the question for the end of a good job are not asked."""
        self.is_aborting = True
        ranks = self.alive.values()
        unasked = [process for process in ranks if self.read_graceful_stop(process.pid)]
        _send_signal(os.kill, unasked, signal.SIGKILL)
        self._ask_to_stop(os.kill, signal.SIGTERM, self.stop_timeout)

    def _ask_to_stop(self, send: Callable[[int, int], None], number: int, timeout: float) -> None:
        self.kill_at = time.monotonic() + timeout
        _send_signal(send, self.alive.values(), number)


def _send_signal(
    send: Callable[[int, int], None], processes: Iterable[subprocess.Popen[bytes]], number: int
) -> None:
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):  # it has ended, or has changed its user
            send(process.pid, number)


class GuardProcess(AbstractContextManager["GuardProcess"]):
    """The process that ends the ranks when this one dies, after so many seconds to end by themselves.

    Raises:
        LaunchError: on Windows.
    """

    def __init__(self, seconds: float | None) -> None:
        if sys.platform == "win32":
            raise LaunchError(
                "on Windows no processes can be started that the launcher watches",
                why="it stops them by sessions and signals, which only other systems have",
                fix="start one process, -n 1 without --tee and --log_dir, or launch in WSL",
            )
        seconds = STOP_SECONDS if seconds is None else seconds
        path = str(Path(__file__).with_name("orphan_guard.py"))
        # It inherits what is blocked: schedulers signal every process of a job, and it outlives this one.
        # Signals to this process that come meanwhile are delivered afterwards.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", path, str(seconds)],
                env=environ.make_child_environment({}),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def write_line(self, line: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # somebody killed it: the job goes on unguarded
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def __exit__(self, *error: object) -> None:
        self.write_line("done")
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


class SignalAndChildExitWaiter:
    """Signals to this process, and ends of its children, as something to wait for.

    Only the main thread may handle signals; in another one this waits in small steps.
    """

    def __enter__(self) -> SignalAndChildExitWaiter:
        self.before: dict[int, Any] = {}
        self.main = threading.current_thread() is threading.main_thread()
        if self.main:
            self.reader, self.writer = os.pipe()
            os.set_blocking(self.reader, False)
            os.set_blocking(self.writer, False)
            self.wakeup = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
            for number in (*STOP_SIGNALS, *FORWARDED_SIGNALS, signal.SIGCHLD):
                handler = signal.getsignal(number)
                # What was ignored on purpose (nohup, a background job) stays ignored; ends of children
                # must be heard, or their exit codes are lost.
                if handler is not signal.SIG_IGN or number == signal.SIGCHLD:
                    self.before[number] = signal.SIG_DFL if handler is None else handler
                    signal.signal(number, lambda *_: None)  # its number is in the pipe already
        return self

    def wait(self, seconds: float, *also: int) -> bytes:
        """The numbers of the signals that came; empty after ``seconds``, or when ``also`` can be read."""
        if not self.main:
            time.sleep(min(seconds, 0.05))
            return b""
        poll = select.poll()  # select.select takes no descriptor above 1023
        for descriptor in (self.reader, *also):
            poll.register(descriptor, select.POLLIN)
        ready = dict(poll.poll(1000 * seconds))
        return os.read(self.reader, 4096) if self.reader in ready else b""

    def __exit__(self, *error: object) -> None:
        if self.main:
            for number, handler in self.before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self.wakeup)
            os.close(self.reader)
            os.close(self.writer)


S = TypeVar("S", bound=WorkerSupervisor)


@dataclass
class AttemptRunner:
    """The attempts of a job on this machine, with what they have in common.

    Attributes:
        request: what was asked.
        logs: where the output goes.
        folders: holds the folder of the attempt, and removes it at the end.
        folder: for what the processes of the attempt leave.
        guard, signals: of the launcher.
        count: how many attempts there were.
    """

    request: LaunchRequest
    logs: RankLogSettings
    folders: ExitStack
    folder: Path
    guard: GuardProcess
    signals: SignalAndChildExitWaiter
    count: int = 0

    def run(
        self,
        create: Callable[..., S],
        variables: Sequence[Variables],
        *,
        size: int,
        first_rank: int = 0,
        reads_stdin: bool = False,
    ) -> tuple[S, RankError | None]:
        """Run the processes of this machine to their end.

        Args:
            create: makes their supervisor, of the arguments of ``WorkerSupervisor``.
            variables: the environment of each.
            size: of the world.
            first_rank: the rank of the first of them.
            reads_stdin: every process has the input of this one, and not rank 0 alone.

        Returns:
            the supervisor with the outcome, and the error that says how the attempt failed.
        """
        if self.count:  # a fresh one: somebody may have cleaned up since the last attempt began
            self.folders.close()
            self.folder = self.folders.enter_context(report_folder())
        self.count, folder = self.count + 1, self.folder
        settings = self.request.settings
        ranks = create(
            [
                rank_process(self.request, folder, rank, own, reads_stdin=reads_stdin or rank == 0)
                for rank, own in enumerate(variables, first_rank)
            ],
            self.logs,
            folder,
            stop_timeout=settings.stop_timeout,
            grace_period=settings.preemption_grace,
            first_rank=first_rank,
        )
        return ranks, build_job_error(ranks.run_with(self.guard, self.signals), folder, size)


@contextmanager
def open_attempts(request: LaunchRequest, logs: RankLogSettings) -> Iterator[AttemptRunner]:
    """Provide the runner of the attempts of a job, of which nothing is left afterwards."""
    with (
        ExitStack() as folders,
        GuardProcess(request.settings.stop_timeout) as guard,
        SignalAndChildExitWaiter() as signals,
    ):
        folder = folders.enter_context(report_folder())
        yield AttemptRunner(request, logs, folders, folder, guard, signals)


def describe_failure(error: RankError) -> str:
    """The failure of an attempt, in one line: with the last line of the traceback, if there is one."""
    lines = error.traceback.strip().splitlines()
    return f"{error.what}: {lines[-1]}" if lines else error.what


def print_restart(line: str, traceback: str, print_line: Callable[[str], None]) -> None:
    """Print why all processes start again: a line, after the traceback of the attempt if it has one."""
    if traceback:
        print_line(f"the attempt that failed ended in\n{traceback.rstrip()}")
    print_line(line)
