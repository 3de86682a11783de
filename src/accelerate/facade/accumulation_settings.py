"""The setting of gradient accumulation. Imports no torch: the launcher reads it."""

from __future__ import annotations

from accelerate.core.frozen_dataclass import frozen_dataclass
from accelerate.core.setting import setting


@frozen_dataclass
class GradientAccumulationSettings:
    """The settings of gradient accumulation."""

    __topic__ = "Training"

    gradient_accumulation_steps: int = setting(1, help="micro-batches per optimizer step")
