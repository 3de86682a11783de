"""The registries of plug-ins, by the names that the documentation gives them."""

from __future__ import annotations

from accelerate.cli.main import COMMANDS
from accelerate.core.registry import Registry
from accelerate.core.setting import declared_settings
from accelerate.device import DEVICES
from accelerate.launch.kinds import KINDS
from accelerate.precision import PRECISIONS
from accelerate.precision.recipes import RECIPES
from accelerate.strategy import STRATEGIES
from accelerate.strategy.launch_settings import SETTINGS
from accelerate.track import TRACKERS

REGISTRIES: dict[str, Registry] = {
    "DEVICES": DEVICES,
    "STRATEGIES": STRATEGIES,
    "PRECISIONS": PRECISIONS,
    "TRACKERS": TRACKERS,
    "KINDS": KINDS,
    "COMMANDS": COMMANDS,
}
# The settings of the plug-ins of a registry, each in a file of the plug-in's name.
SETTINGS_OF: dict[str, Registry] = {"STRATEGIES": SETTINGS, "PRECISIONS": RECIPES}


def declared_variables() -> set[str]:
    """The environment variables that settings of strategies and of recipes for precisions declare."""
    classes = [cls for classes in SETTINGS for cls in classes] + list(RECIPES)
    return {row.variable for cls in classes for row in declared_settings(cls) if row.variable}
