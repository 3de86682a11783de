"""How strict a run is about options, and where the launcher heard of each. No torch: the launcher reads this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from accelerate.core.setting import setting


@dataclass(frozen=True)
class EffectsSettings:
    """What is said about options that were asked for, once ``prepare`` has been called."""

    __topic__ = "Output"

    strict: bool = setting(
        False, help="an option that is asked for and cannot be applied is an error instead of a warning"
    )
    effects: Literal["line", "table", "none"] | None = setting(
        None, help="how to report on stderr what was applied of all that was asked; a launch prints a line"
    )
