"""What becomes of everything that was asked of a launch: what it does, or why it does nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from accelerate.core.errors import SettingError
from accelerate.core.frozen import frozen
from accelerate.core.setting import Origin, Setting, declared
from accelerate.launch.job import Request, as_text, kept
from accelerate.launch.kinds import KINDS
from accelerate.launch.plan import Plan

# What the wizard and the files in the wild write down for every set-up: it asks for nothing here.
_ORDINARY: dict[str, tuple[object, ...]] = {
    "gpu_ids": ("all",),
    "main_training_function": ("main",),
    "rdzv_backend": ("static", "c10d"),
    "same_network": (True,),
}
_SECRET = re.compile(r"secret|password|token|access_key", re.IGNORECASE)


@frozen
class Asked:
    """One setting that some source gave a value.

    Attributes:
        row: the setting.
        origin: its value, and the place that gave it.
        others: what it overrides, the default left out.
        effect: what it does in this job.
        idle: why it does nothing; empty when it does something.
    """

    row: Setting
    origin: Origin
    others: tuple[Origin, ...]
    effect: str
    idle: str = ""

    @property
    def insists(self) -> bool:
        """Whether somebody waits for an effect; a file may describe more than one job needs."""
        ordinary = (self.row.default, *_ORDINARY.get(self.row.name, ()))
        return self.origin.source == "flag" or bool(self.origin.value and self.origin.value not in ordinary)

    @property
    def line(self) -> str:
        """``--machine_rank has no effect: there is one machine``."""
        return f"{self.origin.where} has no effect: {self.idle}"


def asked(request: Request, kind: Any, plan: Plan) -> tuple[Asked, ...]:
    """Every setting that some source gave a value, in the order of the help.

    Args:
        request: what was asked.
        kind: the kind of launch that was chosen.
        plan: what it made of the request.
    """
    idle = {**dict(_of_others(kind)), **dict(plan.unused)}
    effects = dict(plan.effects)
    found: list[Asked] = []
    for cls, loaded in request.loaded.items():
        for row in declared(cls):
            first, *rest = loaded.origins[row.name]
            if first.source == "default":
                continue
            missing = request.missing(cls)
            why = f"--{missing} is not given" if missing else idle.get(row.name, "")
            others = tuple(origin for origin in rest if origin.source != "default")
            effect = effects.get(row.name) or _effect(row, first.value, handed=cls not in kept())
            found.append(Asked(row, first, others, effect, why))
    return tuple(found)


def _of_others(kind: Any) -> Iterator[tuple[str, str]]:
    """The settings that other kinds of launch read."""
    own = _read_by(kind)
    for other in KINDS:
        for name in _read_by(other) - own:
            yield name, f"it is for launches of the kind {other.name!r}; this one is {kind.name!r}"


def _read_by(kind: Any) -> set[str]:
    return {row.name for cls in kind.settings for row in declared(cls)} | set(kind.reads)


def _effect(row: Setting, value: object, *, handed: bool) -> str:
    told = f"; the script is told {row.variable}={shown(row.name, value)}" if handed and row.variable else ""
    return row.help + told


def shown(name: str, value: object) -> str:
    """A value as text; of what must stay secret, only that it is there."""
    return "***" if _SECRET.search(name) and value else as_text(value)


def idle_lines(settings: tuple[Asked, ...]) -> list[str]:
    """One line for each setting that was asked for and does nothing."""
    return [one.line for one in settings if one.idle and one.insists]


def refuse_idle(request: Request, lines: list[str]) -> None:
    """Under ``--strict``, what does nothing is an error.

    Raises:
        SettingError: there is something; the error names all of it.
    """
    if lines and "strict" in request and request.get("strict"):
        raise SettingError(
            lines[0],
            why="; ".join([f"{request.origin('strict').where} asks for an error", *lines[1:]]),
            fix="leave it out" if len(lines) == 1 else "leave them out",
        )
