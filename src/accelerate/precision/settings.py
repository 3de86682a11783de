"""The setting of the precision."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.core.setting import setting
from accelerate.precision import PRECISIONS


@dataclass(frozen=True)
class PrecisionSettings:
    """In which number format models compute."""

    __topic__ = "Precision"

    mixed_precision: str | None = setting(
        None,
        help="number format of the forward pass; no: as the weights are",
        choices=PRECISIONS.names(),
        question="Mixed precision?",
    )
