"""A kind of launch: one file of this folder that takes some requests and runs them."""

from __future__ import annotations

import dataclasses
import sys
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

from accelerate.core.errors import SettingError
from accelerate.launch.job_scheduler import overridden_lines
from accelerate.launch.kinds import KINDS
from accelerate.launch.launch_request import LaunchRequest
from accelerate.launch.plan import LaunchPlan, origin_variables, requested_options
from accelerate.launch.request_checks import check_request

P = TypeVar("P", bound=LaunchPlan)


class LaunchKind(ABC, Generic[P]):
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
    def accepts(self, request: LaunchRequest) -> bool:
        """Return whether this kind of launch handles the request."""

    @abstractmethod
    def plan(self, request: LaunchRequest) -> P:
        """Plan the launch of a request. Nothing is started, reserved or written yet.

        Raises:
            AccelerateError: it cannot be done here as asked.
        """

    @abstractmethod
    def run(self, request: LaunchRequest, plan: P, *, replace: bool) -> None:
        """Starts the job and returns when it has ended well.

        Args:
            request: what was asked.
            plan: what ``plan`` made of it.
            replace: this process may be replaced by the script; then this call does not return.

        Raises:
            LaunchError: the job cannot be started, or a rank failed; it holds the exit code.
        """


def choose_kind(request: LaunchRequest) -> LaunchKind[Any]:
    """The kind of launch for a request; between them, the kinds of this package take every one."""
    return max((kind for kind in KINDS if kind.accepts(request)), key=lambda kind: kind.priority)


def launch(request: LaunchRequest, *, replace: bool = False) -> None:
    """Runs a request: checks it, chooses the kind of launch, starts it, and returns when it has ended well.

    With ``--dry_run`` the plan is printed, and nothing is started.

    Args:
        request: what was asked.
        replace: this process may be replaced by the script.

    Raises:
        AccelerateError: it cannot be started as asked, or a rank failed (``RankError`` holds the exit code).
    """
    check_request(request)
    kind = choose_kind(request)
    plan = kind.plan(request)
    lines = overridden_lines(request.scheduler, request.origins) if request.scheduler else ()
    plan = dataclasses.replace(
        plan, notes=(*lines, *plan.notes), variables={**plan.variables, **origin_variables(request)}
    )
    options = requested_options(request, kind, plan)
    unused = [] if request.file is None else [*request.file.problems]
    fix = f"accelerate config update --config_file {request.file.path}" if unused and request.file else ""
    unused += [option.unused_text for option in options if option.unused_reason and option.is_explicit]
    if request.settings.dry_run:
        from accelerate.launch import dry_run

        dry_run.print_plan(request, plan, options)
    if unused and "strict" in request.origins and request.get("strict"):
        raise SettingError(
            unused[0],
            why="; ".join([f"{request.origin('strict').where} asks for an error", *unused[1:]]),
            fix=fix or ("leave it out" if len(unused) == 1 else "leave them out"),
        )
    if request.settings.dry_run:
        if request.settings.dry_run_model:
            from accelerate.launch import dry_run

            dry_run.run_model_dry_run(request, plan)
        return
    if request.file is not None and not request.file.is_explicit:
        print_line(request, f"settings from {request.file.path} (--config_file names another)")
    for note in (*plan.notes, *unused):
        print_line(request, note)
    kind.run(request, plan, replace=replace)


def print_line(request: LaunchRequest, line: str) -> None:
    """Prints one line about the launch on stderr, unless asked to be quiet."""
    if not request.settings.quiet:
        print(f"accelerate launch: {line}", file=sys.stderr, flush=True)
