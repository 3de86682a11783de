"""How strict a run is about options, and what the launcher was asked. No torch: the launcher reads this."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from accelerate.core import environ
from accelerate.core.frozen import frozen
from accelerate.core.setting import setting

if TYPE_CHECKING:
    from accelerate.core.effects import Option


@frozen
class EffectsSettings:
    """What is said about options that were asked for, once ``prepare`` has been called."""

    __topic__ = "Output"

    strict: bool = setting(
        False, help="an option that is asked for and cannot be applied is an error instead of a warning"
    )
    effects: Literal["line", "table", "none"] | None = setting(
        None, help="how to report on stderr what was applied of all that was asked; a launch prints a line"
    )


def launched() -> dict[str, Option]:
    """What the launcher of this process was asked for, by name; empty without a launcher of ours."""
    import json

    from accelerate.core.effects import Option

    text = environ.get("ACCELERATE_ASKED")
    rows: dict[str, list[object]] = json.loads(text) if text else {}
    return {name: Option(name, value, str(where)) for name, (where, value) in rows.items()}
