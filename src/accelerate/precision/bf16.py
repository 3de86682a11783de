"""bfloat16 autocast: the range of float32, so losses need no scaling."""

from __future__ import annotations

from typing import ClassVar

import torch

from accelerate.precision.autocast import HalfPrecisionAutocast


class BFloat16(HalfPrecisionAutocast):
    """Autocast to bfloat16; the weights keep their dtype."""

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16


PLUGIN = BFloat16
