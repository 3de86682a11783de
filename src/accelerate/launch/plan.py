"""What a launch will do, before it does it: the value that ``--dry-run`` shows and that a kind runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from accelerate.core.frozen import frozen

Variables = Mapping[str, object | None]


@frozen
class Start:
    """One command that a launch starts on this machine.

    Attributes:
        name: which one: ``"rank 0"``, ``"mpirun"``.
        program: the command and its arguments.
        variables: what it is told by its environment beyond what all are told; None takes a variable away.
    """

    name: str
    program: tuple[str, ...]
    variables: Variables = field(default_factory=dict)


@frozen
class Plan:
    """What a launch will do on this machine. A kind of launch may add what it needs to do it.

    Attributes:
        kind: the kind of launch.
        facts: (what, value) for people: processes, devices, machines.
        variables: what every command is told by its environment; None takes a variable away.
        starts: the commands, in order.
        notes: what is said on stderr when the launch begins, a line each.
        unused: (setting, why) of what this kind reads and has no use for in this job, asked for or not.
        effects: (setting, what it does in this job) where that is more than its help says.
    """

    kind: str
    facts: tuple[tuple[str, str], ...]
    variables: Variables
    starts: tuple[Start, ...]
    notes: tuple[str, ...]
    unused: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)
    effects: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)
