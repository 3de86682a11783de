"""Quantized weights whose bits are kept in a tensor of another type: a cast would not keep them."""

from __future__ import annotations

import torch
from torch import nn

from accelerate.core.errors import PrepareError


def check_packed(model: nn.Module, compute: torch.dtype | None) -> None:
    """Refuses quantized weights in a floating point storage that is not the type that is computed in.

    Sharded parameters are cast when they are gathered. Numbers survive it, packed bits do not.

    Args:
        model: the model.
        compute: the type that parameters are cast to; None casts nothing.

    Raises:
        PrepareError: names the first such weight.
    """
    for name, parameter in model.named_parameters():
        packed = getattr(parameter, "quant_state", None) is not None
        if packed and compute not in (None, parameter.dtype) and parameter.dtype.is_floating_point:
            word = str(compute).removeprefix("torch.")
            raise PrepareError(
                f"the quantized weight {name} is stored as {parameter.dtype}, and computed in {compute}",
                why="weights are cast when they are gathered, and its packed bits would not survive that",
                fix=f"quantize with bnb_4bit_quant_storage='uint8', or '{word}', as it is computed",
            )
