"""The report of all options of a launch: what each does, or why it has no effect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from accelerate.core.errors import SettingError
from accelerate.core.frozen_dataclass import frozen_dataclass
from accelerate.core.setting import Setting, SettingOrigin, declared_settings
from accelerate.launch.kinds import KINDS
from accelerate.launch.launch_request import LaunchRequest, format_value, launcher_settings
from accelerate.launch.plan import LaunchPlan

# What the wizard and the files in the wild write down for every set-up: it asks for nothing here.
_USUAL_VALUES: dict[str, tuple[object, ...]] = {
    "gpu_ids": ("all",),
    "main_training_function": ("main",),
    "rdzv_backend": ("static", "c10d"),
    "same_network": (True,),
}
_SECRET = re.compile(r"secret|password|token|access_key", re.IGNORECASE)


@frozen_dataclass
class LaunchOptionOrigin:
    """One setting that some source gave a value.

    Attributes:
        setting: the setting.
        origin: its value, and the place that gave it.
        overridden: what it overrides, the default left out.
        effect: what it does in this job.
        unused_reason: why it does nothing; empty when it does something.
    """

    setting: Setting
    origin: SettingOrigin
    overridden: tuple[SettingOrigin, ...]
    effect: str
    unused_reason: str = ""

    @property
    def is_explicit(self) -> bool:
        """Return whether the user expects an effect; a file may describe more than one job needs."""
        ordinary = (self.setting.default, *_USUAL_VALUES.get(self.setting.name, ()))
        return self.origin.source == "flag" or bool(self.origin.value and self.origin.value not in ordinary)

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
    idle = {**dict(_settings_of_other_kinds(kind)), **dict(plan.unused_settings)}
    effects = dict(plan.setting_effects)
    options: list[LaunchOptionOrigin] = []
    for cls, loaded in request.loaded.items():
        for row in declared_settings(cls):
            first, *rest = loaded.origins[row.name]
            if first.source == "default":
                continue
            missing = request.missing_switch(cls)
            unused_reason = f"--{missing} is not given" if missing else idle.get(row.name, "")
            others = tuple(origin for origin in rest if origin.source != "default")
            effect = effects.get(row.name) or _describe_effect(
                row, first.value, handed=cls not in launcher_settings()
            )
            options.append(LaunchOptionOrigin(row, first, others, effect, unused_reason))
    return tuple(options)


def _settings_of_other_kinds(kind: Any) -> Iterator[tuple[str, str]]:
    """The settings that other kinds of launch read."""
    setting_names = _settings_read_by(kind)
    for other in KINDS:
        for name in _settings_read_by(other) - setting_names:
            yield name, f"it is for launches of the kind {other.name!r}; this one is {kind.name!r}"


def _settings_read_by(kind: Any) -> set[str]:
    return {row.name for cls in kind.settings for row in declared_settings(cls)} | set(kind.reads)


def _describe_effect(row: Setting, value: object, *, handed: bool) -> str:
    script_note = (
        f"; the script is told {row.variable}={display_value(row.name, value)}"
        if handed and row.variable
        else ""
    )
    return row.help + script_note


def display_value(name: str, value: object) -> str:
    """A value as text; of what must stay secret, only that it is there."""
    return "***" if _SECRET.search(name) and value else format_value(value)


def unused_option_lines(settings: tuple[LaunchOptionOrigin, ...]) -> list[str]:
    """One line for each setting that was asked for and does nothing."""
    return [option.unused_text for option in settings if option.unused_reason and option.is_explicit]


def refuse_unused_options(request: LaunchRequest, lines: list[str]) -> None:
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
