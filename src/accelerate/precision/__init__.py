"""Precisions: the number formats in which models compute. A file of this folder is a precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.core.registry import Registry

if TYPE_CHECKING:  # the launcher asks for the names, and must not import torch
    from accelerate.precision.base import Precision

PRECISIONS: Registry[type[Precision]] = Registry(
    "precision", "accelerate.precision", "accelerate.precisions", exclude=("base", "autocast", "loss_scaling")
)
