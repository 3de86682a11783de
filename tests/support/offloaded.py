"""Dispatched models: which weights are offloaded, what copies and moves them, the errors about them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate.offload.dispatch import offload_stats
from accelerate.offload.dispatch_hook import hook_of
from accelerate.offload.offloaded_tensor import (
    HostMemoryWeightSource,
    OffloadedTensor,
    OffloadError,
    make_stand_in,
)
from accelerate.offload.quantization.base import check_trainable


def is_offloaded(weight: torch.Tensor) -> bool:
    """Return whether the values of ``weight`` are elsewhere."""
    return isinstance(weight, OffloadedTensor)


def offload_fails(match: str) -> Any:
    """The context of a call that is refused because of an offloaded weight."""
    return pytest.raises(OffloadError, match=match)


def is_dispatched(model: nn.Module) -> bool:
    """Return whether a dispatch has added its hook to the module."""
    return hook_of(model) is not None


def copies_weights(model: nn.Module) -> bool:
    """Return whether a dispatched model brings weights to its device when it runs."""
    return offload_stats(model) is not None


def offload_to_memory(model: nn.Module, name: str) -> None:
    """Let the parameter ``name`` of the module be a stand-in for its values in this process's memory."""
    weight = getattr(model, name)
    source = HostMemoryWeightSource(name, weight.detach())
    model._parameters[name] = make_stand_in(weight, source, torch.device("cpu"))


def prepare_dispatched(model: nn.Module, *, processes: int, trained: bool) -> None:
    """Check a dispatched model as prepare does on so many processes, with an optimizer for it or without."""
    check_trainable(model, several=processes > 1, trained=trained)


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
