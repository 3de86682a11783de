"""A kind of launch: one file of this folder that takes some requests and runs them."""

from __future__ import annotations

import dataclasses
import sys
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

from accelerate.launch import effects
from accelerate.launch.around import overruled
from accelerate.launch.check import check
from accelerate.launch.job import Job, Request
from accelerate.launch.kinds import KINDS
from accelerate.launch.plan import Plan
from accelerate.launch.told import told

P = TypeVar("P", bound=Plan)


class Kind(ABC, Generic[P]):
    """One way to start the processes of a job.

    Attributes:
        name: how it is called in plans.
        priority: of those that take a request, the highest runs it.
        settings: classes of settings that only this kind reads; they are not handed on to the script.
        reads: settings of other classes that only this kind reads.
    """

    name: ClassVar[str]
    priority: ClassVar[int] = 0
    settings: ClassVar[tuple[type[Any], ...]] = ()
    reads: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def takes(self, request: Request) -> bool:
        """Whether this kind is what the request asks for."""

    @abstractmethod
    def plan(self, request: Request) -> P:
        """What will be started for a request. Nothing is started, reserved or written yet.

        Raises:
            AccelerateError: it cannot be done here as asked.
        """

    @abstractmethod
    def run(self, request: Request, plan: P, *, replace: bool) -> None:
        """Starts the job and returns when it has ended well.

        Args:
            request: what was asked.
            plan: what ``plan`` made of it.
            replace: this process may be replaced by the script; then this call does not return.

        Raises:
            LaunchError: the job cannot be started, or a rank failed; it holds the exit code.
        """


def choose(request: Request) -> Kind[Any]:
    """The kind of launch for a request; between them, the kinds of this package take every one."""
    return max((kind for kind in KINDS if kind.takes(request)), key=lambda kind: kind.priority)


def launch(request: Request, *, replace: bool = False) -> None:
    """Runs a request: checks it, chooses the kind of launch, starts it, and returns when it has ended well.

    With ``--dry_run`` the plan is printed, and nothing is started.

    Args:
        request: what was asked.
        replace: this process may be replaced by the script.

    Raises:
        AccelerateError: it cannot be started as asked, or a rank failed (``RankError`` holds the exit code).
    """
    check(request)
    kind = choose(request)
    plan = kind.plan(request)
    lines = overruled(request.around, request.loaded[Job].origins) if request.around else ()
    plan = dataclasses.replace(
        plan, notes=(*lines, *plan.notes), variables={**plan.variables, **told(request)}
    )
    asked = effects.asked(request, kind, plan)
    idle = effects.idle_lines(asked)
    if request.settings.dry_run:
        from accelerate.launch import show

        show.show(request, plan, asked)
    effects.refuse_idle(request, idle)
    if request.settings.dry_run:
        if request.settings.dry_run_model:
            from accelerate.launch import show

            show.rehearse(request, plan)
        return
    if request.file is not None and not request.file.named:
        say(request, f"settings from {request.file.path} (--config_file names another)")
    for note in (*plan.notes, *idle):
        say(request, note)
    kind.run(request, plan, replace=replace)


def say(request: Request, line: str) -> None:
    """Prints one line about the launch on stderr, unless asked to be quiet."""
    if not request.settings.quiet:
        print(f"accelerate launch: {line}", file=sys.stderr, flush=True)
