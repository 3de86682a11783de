"""How many micro-batches make one optimizer step, as one says it. No torch: the launcher reads this."""

from __future__ import annotations

from accelerate.core.frozen import frozen
from accelerate.core.setting import setting


@frozen
class GradientSettings:
    """How gradients are accumulated."""

    __topic__ = "Training"

    gradient_accumulation_steps: int = setting(1, help="micro-batches per optimizer step")
