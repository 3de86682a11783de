"""The settings of strategies, which a launch hands on to the script. No torch here: the launcher reads them.

A file of this folder belongs to the strategy of the same name. Its ``PLUGIN`` is a tuple of two classes of
settings: the switch by which one asks for the strategy, and its options.
"""

from __future__ import annotations

from typing import Any

from accelerate.core.registry import Registry

SETTINGS: Registry[tuple[type[Any], ...]] = Registry(
    "settings of a strategy", "accelerate.strategy.settings", "accelerate.strategy_settings"
)
