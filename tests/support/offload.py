"""What a dispatch of a model has made of it: stand-ins for its weights, and what copies and moves them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelerate.offload.dispatch_hook import hook_of
from accelerate.offload.offloaded_tensor import OffloadedTensor


def is_stand_in(tensor: torch.Tensor) -> bool:
    """Return True when a weight is offloaded: it has its values elsewhere, and reads them when it is used."""
    return isinstance(tensor, OffloadedTensor)


def pager_of(model: nn.Module) -> Any:
    """Return what copies the offloaded weights of a dispatched model to its device and back."""
    hook = hook_of(model)
    assert hook is not None
    assert hook._pager is not None
    return hook._pager


def mover_of(model: nn.Module) -> Any:
    """Return what moves the inputs of a dispatched model's modules to their devices."""
    hook = hook_of(model)
    assert hook is not None
    return hook._mover
