"""Precisions: the number formats in which models compute. A file of this folder is a precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.core.frozen_dataclass import frozen_dataclass
from accelerate.core.registry import Registry
from accelerate.core.setting import setting

if TYPE_CHECKING:  # the launcher asks for the names, and must not import torch
    from accelerate.precision.base import Precision

PRECISIONS: Registry[type[Precision]] = Registry(
    "precision", "accelerate.precision", "accelerate.precisions", exclude=("base", "autocast")
)


@frozen_dataclass
class PrecisionSettings:
    """The number format in which models compute."""

    __topic__ = "Precision"

    mixed_precision: str | None = setting(
        None,
        help="number format of the forward pass; no: as the weights are",
        choices=PRECISIONS.names(),
        question="Mixed precision?",
    )
