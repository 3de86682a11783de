"""A kind of launch, the plan that it makes of a request, and what each option does in that plan.

A kind is one file of ``kinds/``. ``--dry-run`` shows its plan, and otherwise the kind runs it. The script
learns by ``origin_variables`` what was asked, so that it can report the status of each option itself.
"""

from __future__ import annotations

import errno
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from typing import Any, ClassVar, Generic, TypeVar

from accelerate.core.errors import LaunchError
from accelerate.core.setting import Setting, SettingOrigin, declared_settings
from accelerate.core.units import QUIET_VARIABLE
from accelerate.core.value_types import frozen_dataclass
from accelerate.launch.kinds import KINDS
from accelerate.launch.launch_request import LaunchRequest, format_value, launcher_settings
from accelerate.world.network import LOOPBACK

Variables = Mapping[str, object | None]

# What the wizard and the files in the wild write down for every set-up: it asks for nothing here.
_USUAL_VALUES: dict[str, tuple[object, ...]] = {
    "gpu_ids": ("all",),
    "main_process_ip": (LOOPBACK, "localhost"),
    "main_training_function": ("main",),
    "rdzv_backend": ("static", "c10d"),
    "same_network": (True,),
}
SECRET = re.compile(r"secret|password|token|access_key", re.IGNORECASE)
# Settings that stay with the launcher and whose effect shows in the processes only; and, of those, what a
# process of several machines cannot judge, since machines may come and go.
_VISIBLE_IN_RANKS = ("num_processes", "num_cpu_threads_per_process", "gpu_ids")
_SINGLE_MACHINE_ONLY = ("num_processes",)


@frozen_dataclass
class PlannedCommand:
    """One command that a launch starts on this machine.

    Attributes:
        name: which one: ``"rank 0"``, ``"mpirun"``.
        program: the command and its arguments.
        variables: what it is told by its environment beyond what all are told; None takes a variable away.
    """

    name: str
    program: tuple[str, ...]
    variables: Variables = field(default_factory=dict)


@frozen_dataclass
class LaunchPlan:
    """The plan of a launch on this machine. A kind of launch may add fields of its own.

    Attributes:
        kind: the kind of launch.
        facts: (what, value) for people: processes, devices, machines.
        variables: what every command is told by its environment; None takes a variable away.
        commands: the commands, in order.
        notes: what is said on stderr when the launch begins, a line each.
        unused_settings: (setting, why) of settings that this kind reads but does not use in this job.
        setting_effects: (setting, what it does in this job) where that is more than its help says.
    """

    kind: str
    facts: tuple[tuple[str, str], ...]
    variables: Variables
    commands: tuple[PlannedCommand, ...]
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    unused_settings: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)
    setting_effects: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)


P = TypeVar("P", bound=LaunchPlan)


class LaunchKind(ABC, Generic[P]):
    """One way to start the processes of a job.

    Attributes:
        name: how it is called in plans.
        priority: of those that take a request, the highest runs it.
        asked_by: the settings of which one must be given for it to be asked; empty: every launch asks it.
        settings: classes of settings that only this kind reads; they are not handed on to the script.
        reads: settings of other classes that only this kind reads.
    """

    name: ClassVar[str]
    priority: ClassVar[int] = 0
    asked_by: ClassVar[tuple[str, ...]] = ()
    settings: ClassVar[tuple[type[Any], ...]] = ()
    reads: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def accepts(self, request: LaunchRequest) -> bool:
        """Return whether this kind of launch handles the request."""

    def passes_stdin(self, request: LaunchRequest) -> bool:
        """Return whether this process becomes the script where one is started, and so leaves it its input."""
        return False

    def check(self, request: LaunchRequest) -> None:
        """Refuse settings that contradict each other in this kind of launch, on any machine.

        What only this machine or this command line lacks is left to ``plan``.

        Raises:
            SettingError: two settings do not go together.
        """
        return

    @abstractmethod
    def plan(self, request: LaunchRequest) -> P:
        """Check and plan the launch of a request. Nothing is started, reserved or written yet.

        Raises:
            AccelerateError: it cannot be done here as asked.
        """

    @abstractmethod
    def run(self, request: LaunchRequest, plan: P, *, replace: bool) -> None:
        """Start the job and return when it has ended well.

        Args:
            request: what was asked.
            plan: what ``plan`` made of it.
            replace: this process may be replaced by the script; then this call does not return.

        Raises:
            LaunchError: the job cannot be started, or a rank failed; it holds the exit code.
        """


def print_line(request: LaunchRequest, line: str) -> None:
    """Print one line about the launch on stderr, unless asked to be quiet."""
    if not request.settings.quiet:
        print(f"accelerate launch: {line}", file=sys.stderr, flush=True)


@frozen_dataclass
class LaunchOptionOrigin:
    """One setting that some source gave a value.

    Attributes:
        setting: the setting.
        origin: its value, and the place that gave it.
        overridden: what it overrides, the default left out.
        unused_reason: why it does nothing; empty when it does something.
    """

    setting: Setting
    origin: SettingOrigin
    overridden: tuple[SettingOrigin, ...]
    unused_reason: str = ""

    @property
    def is_explicit(self) -> bool:
        """Return whether the user expects an effect; a file may describe more than one job needs."""
        ordinary = (self.setting.default, *_USUAL_VALUES.get(self.setting.name, ()))
        source, value = self.origin.source, self.origin.value
        return source == "flag" or (source != "scheduler" and bool(value) and value not in ordinary)

    @property
    def unused_text(self) -> str:
        """``--machine_rank has no effect: there is one machine``."""
        return f"{self.origin.where} has no effect: {self.unused_reason}"


def requested_options(request: LaunchRequest, kind: Any, plan: LaunchPlan) -> tuple[LaunchOptionOrigin, ...]:
    """Every setting that some source gave a value, in the order of the help.

    Args:
        request: what was asked.
        kind: the kind of launch that was chosen.
        plan: what it made of the request.
    """
    names_by_kind = {
        each: {row.name for cls in each.settings for row in declared_settings(cls)} | set(each.reads)
        for each in (kind, *KINDS)
    }
    readers: dict[str, list[str]] = {}
    for other, names in names_by_kind.items():
        for name in names - names_by_kind[kind]:
            readers.setdefault(name, []).append(repr(other.name))
    unused = {
        name: f"it is for launches of the kind {' or '.join(others)}; this one is {kind.name!r}"
        for name, others in readers.items()
    } | dict(plan.unused_settings)
    total = request.origin("num_processes")
    if total.source in ("flag", "environment") and request.origin("nproc_per_node").source == "scheduler":
        unused["nproc_per_node"] = f"{total.where} counts the processes"
    options: list[LaunchOptionOrigin] = []
    for cls, loaded in request.loaded.items():
        for row in declared_settings(cls):
            first, *rest = loaded.origins[row.name]
            if first.source == "default":
                continue
            reason = unused.get(row.name, "")
            if not request.is_asked_for(cls):
                reason = f"--{cls.__switch__} is not given"
            overridden = tuple(origin for origin in rest if origin.source != "default")
            options.append(LaunchOptionOrigin(row, first, overridden, reason))
    return tuple(options)


def display_value(name: str, value: object) -> str:
    """A value as text; of what must stay secret, only that it is there."""
    return "***" if SECRET.search(name) and value else format_value(value)


def origin_variables(request: LaunchRequest) -> dict[str, str]:
    """Variables of every process: what flags and files asked for and where, and to report it in a line.

    Empty when nothing was asked.
    """
    requested: dict[str, tuple[str, object]] = {}
    launcher_classes = launcher_settings()
    for cls in request.loaded:
        for row in declared_settings(cls):
            origin = request.origin(row.name)
            if origin.source in ("flag", "file") and (
                cls not in launcher_classes or row.name in _VISIBLE_IN_RANKS
            ):
                requested[row.name] = origin.where, origin.value
    if str(request.settings.num_machines) != "1":
        requested = {name: row for name, row in requested.items() if name not in _SINGLE_MACHINE_ONLY}
    for name, origin in request.strategy_switches.items():
        requested[name] = origin.where, True
    report = {QUIET_VARIABLE: "1"} if request.settings.quiet else {}
    if not requested:
        return report
    import json

    if request.settings.quiet and not request.get("effects"):
        report["ACCELERATE_EFFECTS"] = "none"
    return {"ACCELERATE_ASKED": json.dumps(requested), **report}


@contextmanager
def explain_start_error(program: str) -> Iterator[None]:
    """Say in words that a program is none."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR):
            raise
        fix = "with --no_python, name an executable file or a program on the PATH"
        if error.errno == errno.ENOEXEC:
            fix = "let its first line name the program that reads it: #!/bin/sh"
        raise LaunchError(
            f"the program {program} cannot be started", why=error.strerror or str(error), fix=fix
        ) from error
