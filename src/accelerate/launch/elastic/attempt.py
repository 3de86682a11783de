"""One attempt of a job on this machine: its processes, and how they ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accelerate.core import environ
from accelerate.launch import report
from accelerate.launch.errors import RankError
from accelerate.launch.job import Request
from accelerate.launch.kinds.local import startable
from accelerate.launch.logs import Logs
from accelerate.launch.plan import Variables
from accelerate.launch.ranks import Command, End, Guard, Outcome, Ranks, Signals
from accelerate.launch.watched import watched


class Attempt(Ranks):
    """Processes that may be called off, because another machine says so.

    Args:
        commands: one per rank of this machine.
        folder: where they leave their tracebacks.
        called_off: asked again and again whether to stop all.
        options: those of ``Ranks``.
    """

    def __init__(
        self,
        commands: Sequence[Command],
        folder: Path,
        called_off: Callable[[Attempt], bool],
        **options: Any,
    ) -> None:
        super().__init__(commands, **options)
        self.folder, self.called_off, self.was_called_off = folder, called_off, False

    @property
    def failing(self) -> bool:
        """Whether a process has failed, or left a traceback and does not end."""
        return self.stop_at is not None and not self.was_called_off

    def age(self) -> float:
        """Seconds since the first process failed."""
        now = time.monotonic_ns()
        ends = [end for end in self.outcome.ends if end.code]
        raised = [rank for rank in self.alive if report.error_file(self.folder, rank).is_file()]
        ends += [End(rank, 1, now, asked=False) for rank in raised]
        return max(((now - report.failure_of(end, self.folder).at) / 1e9 for end in ends), default=0.0)

    def _advance(self) -> None:
        if not self.was_called_off and self.called_off(self):
            self.was_called_off, self.listen = True, ()
            self.stop_at = time.monotonic()
        super()._advance()

    def run_under(self, guard: Guard, signals: Signals) -> Outcome:
        """See ``Ranks.run_under``. The guard forgets processes that are gone: their ids may be used again."""
        outcome = super().run_under(guard, signals)
        self._sweep()
        for process in self.processes.values():
            guard.tell(f"-{process.pid}")
        return outcome


class Attempts:
    """Everything that all attempts of a job on this machine have in common.

    Args:
        request: what was asked.
        logs: where the output goes.
        folder: for what the processes leave; each attempt has its own inside.
        guard, signals: of the launcher.
    """

    def __init__(self, request: Request, logs: Logs, folder: Path, guard: Guard, signals: Signals) -> None:
        self.request, self.logs, self.folder = request, logs, folder
        self.guard, self.signals = guard, signals
        self.count = 0

    def run(
        self,
        owns: Sequence[Variables],
        *,
        size: int,
        first: int = 0,
        called_off: Callable[[Attempt], bool] = lambda attempt: False,
        listen: Sequence[int] = (),
    ) -> tuple[Attempt, RankError | None]:
        """Runs the processes of this machine to their end.

        Args:
            owns: the environment of each.
            size: of the world.
            first: the rank of the first of them.
            called_off: see ``Attempt``.
            listen: descriptors to wake up for.

        Returns:
            the attempt with its outcome, and the error that says how it failed.
        """
        folder = self.folder / f"attempt_{self.count}"
        folder.mkdir()
        self.count += 1
        settings = self.request.settings
        commands = [
            Command(
                watched(self.request, folder, rank),
                environ.child({**own, "ACCELERATE_STOP_FOLDER": folder}),
                *self.logs.pipes(rank),
            )
            for rank, own in enumerate(owns, first)
        ]
        attempt = Attempt(
            commands,
            folder,
            called_off,
            stop_timeout=settings.stop_timeout,
            raised=lambda rank, pid: report.raised(folder, rank, pid),
            armed=lambda pid: report.armed(folder, pid),
            grace=settings.preemption_grace,
            started=self.logs.read,
            first=first,
            listen=listen,
        )
        with startable(commands[0].program[0]):
            outcome = attempt.run_under(self.guard, self.signals)
        self.logs.finish()
        return attempt, report.failure(outcome, folder, size)
