"""The check of quantized weights that are stored in a tensor of another dtype: a cast would destroy them."""

from __future__ import annotations

import torch
from torch import nn

from accelerate.core.errors import PrepareError


def check_packed(model: nn.Module, compute: torch.dtype | None) -> None:
    """Refuse quantized weights in a floating point storage that is not the compute dtype.

    Sharded parameters are cast before the all-gather. Numbers survive it, packed bits do not.

    Args:
        model: the model.
        compute: the dtype that parameters are cast to; None casts nothing.

    Raises:
        PrepareError: names the first such weight.
    """
    for name, parameter in model.named_parameters():
        packed = getattr(parameter, "quant_state", None) is not None
        if packed and compute not in (None, parameter.dtype) and parameter.dtype.is_floating_point:
            dtype_name = str(compute).removeprefix("torch.")
            raise PrepareError(
                f"the quantized weight {name} is stored as {parameter.dtype}, and computed in {compute}",
                why="weights are cast before the all-gather, and its packed bits would not survive that",
                fix=f"quantize with bnb_4bit_quant_storage='uint8', or '{dtype_name}', as it is computed",
            )
