"""The attempts of a job on this machine: its processes, how they ended, and starting them again.

On one machine nobody has to meet, so nothing but the processes is needed (``run_with_restarts``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from accelerate.core.errors import RankError
from accelerate.launch import rank_reports
from accelerate.launch.base import Variables
from accelerate.launch.launch_request import LaunchRequest
from accelerate.launch.logs import RankLogSettings
from accelerate.launch.rank_reports import JobOutcome, ProcessExit
from accelerate.launch.supervisor import GuardProcess, SignalAndChildExitWaiter, WorkerSupervisor


class LocalAttempt(WorkerSupervisor):
    """Processes that may be called off, because another machine says so.

    Args:
        should_cancel: asked again and again whether to stop all.
        arguments, options: those of ``WorkerSupervisor``.
    """

    keeps_leftovers: ClassVar[bool] = False

    def __init__(
        self, *arguments: Any, should_cancel: Callable[[LocalAttempt], bool], **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.should_cancel, self.was_cancelled = should_cancel, False

    @property
    def has_failed(self) -> bool:
        """Return whether a process has failed, or left a traceback and does not exit."""
        return self.stop_at is not None and not self.was_cancelled

    def seconds_since_failure(self) -> float:
        """Seconds since the first process failed by itself; 0 if all failed because of other machines."""
        now = time.monotonic_ns()
        ends = [end for end in self.outcome.exits if end.code]
        raised = [rank for rank in self.alive if rank_reports.error_file(self.folder, rank).is_file()]
        ends += [ProcessExit(rank, 1, now, was_asked_to_stop=False) for rank in raised]
        failures = (rank_reports.read_failure(end, self.folder) for end in ends)
        return max(
            ((now - each.failed_at) / 1e9 for each in failures if each.failed_rank is None), default=0.0
        )

    def _apply_deadlines(self) -> None:
        if not self.was_cancelled and self.should_cancel(self):
            self.was_cancelled, self.wake_fds = True, ()
            self.stop_at = time.monotonic()
        super()._apply_deadlines()

    def run_with(self, guard: GuardProcess, signals: SignalAndChildExitWaiter) -> JobOutcome:
        """Run the processes, then let the guard forget their ids, which may be reused."""
        outcome = super().run_with(guard, signals)
        for process in self.processes.values():
            guard.write_line(f"-{process.pid}")
        return outcome


class ElasticAttemptRunner:
    """Everything that all attempts of a job on this machine have in common.

    Args:
        request: what was asked.
        logs: where the output goes.
        folder: for what the processes leave; each attempt has its own inside.
        guard, signals: of the launcher.
    """

    def __init__(
        self,
        request: LaunchRequest,
        logs: RankLogSettings,
        folder: Path,
        guard: GuardProcess,
        signals: SignalAndChildExitWaiter,
    ) -> None:
        self.request, self.logs, self.folder = request, logs, folder
        self.guard, self.signals = guard, signals
        self.count = 0

    def run(
        self,
        variables: Sequence[Variables],
        *,
        size: int,
        first_rank: int = 0,
        should_cancel: Callable[[LocalAttempt], bool] = lambda attempt: False,
        wake_fds: Sequence[int] = (),
    ) -> tuple[LocalAttempt, RankError | None]:
        """Runs the processes of this machine to their end.

        Args:
            variables: the environment of each.
            size: of the world.
            first_rank: the rank of the first of them.
            should_cancel: see ``LocalAttempt``.
            wake_fds: descriptors to wake up for.

        Returns:
            the attempt with its outcome, and the error that says how it failed.
        """
        folder = self.folder / f"attempt_{self.count}"
        folder.mkdir()
        self.count += 1
        settings = self.request.settings
        attempt = LocalAttempt(
            [
                rank_reports.rank_process(self.request, folder, rank, rank_variables)
                for rank, rank_variables in enumerate(variables, first_rank)
            ],
            self.logs,
            folder,
            should_cancel=should_cancel,
            stop_timeout=settings.stop_timeout,
            grace_period=settings.preemption_grace,
            first_rank=first_rank,
            wake_fds=wake_fds,
        )
        outcome = attempt.run_with(self.guard, self.signals)
        return attempt, rank_reports.build_job_error(outcome, folder, size)


def run_with_restarts(
    attempts: ElasticAttemptRunner,
    size: int,
    max_restarts: int,
    variables_of_restart: Callable[[int], Sequence[Variables]],
    print_line: Callable[[str], None],
) -> None:
    """Runs the processes, again when they fail, until they end well.

    A signal that stops the job is no failure, and neither are ranks that stop to be resumed.

    Args:
        attempts: of this job.
        size: how many processes.
        max_restarts: how often they may be started again.
        variables_of_restart: the environment of each process, by how often they were started again.
        print_line: prints a line.

    Raises:
        RankError: a rank failed, and there is no restart left.
    """
    for restart in range(max_restarts + 1):
        attempt, error = attempts.run(variables_of_restart(restart), size=size)
        if error is None:
            return
        outcome = attempt.outcome
        if restart == max_restarts or outcome.stopped_by is not None or outcome.resumable:
            raise error
        print_line(f"{describe_failure(error)}; restart {restart + 1} of {max_restarts}")


def describe_failure(error: RankError) -> str:
    """The failure of an attempt, in one line: with the last line of the traceback, if there is one."""
    lines = error.traceback.strip().splitlines()
    return f"{error.what}: {lines[-1]}" if lines else error.what
