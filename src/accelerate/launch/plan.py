"""The launch plan: what ``--dry-run`` shows and what a kind of launch runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from accelerate.core.frozen_dataclass import frozen_dataclass

Variables = Mapping[str, object | None]


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
    notes: tuple[str, ...]
    unused_settings: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)
    setting_effects: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)
