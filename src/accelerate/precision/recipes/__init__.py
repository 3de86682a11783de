"""The settings of precisions that have options, which a launch passes to the script. No torch here.

A file of this folder belongs to the precision of the same name. Its ``PLUGIN`` is a class of settings.
"""

from __future__ import annotations

from typing import Any

from accelerate.core.registry import Registry

RECIPES: Registry[type[Any]] = Registry(
    "settings of a precision", "accelerate.precision.recipes", "accelerate.precision_recipes"
)
