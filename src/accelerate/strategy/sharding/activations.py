"""Activations that wait for the backward on the host: the inputs of blocks that are computed again."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._composable.checkpoint_activation import checkpoint

from accelerate import device as devices
from accelerate.core import tree

# Where a block that is in its forward keeps the context it has entered.
_CONTEXT = "_accelerate_inputs_on_host"


def leave_cache_out(model: nn.Module) -> None:
    """A block that is computed again would put its keys and values into a cache a second time."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        model.register_forward_pre_hook(_without_cache, with_kwargs=True)


def _without_cache(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    if model.training and torch.is_grad_enabled():
        kwargs["use_cache"] = False
    return args, kwargs


def keep_on_host(block: nn.Module) -> None:
    """What ``checkpoint`` keeps of ``block``, its inputs, goes to the host; called before ``checkpoint``.

    Inputs that need no gradient stay: masks and positions are the same for all blocks, and kept once.
    """
    block.register_forward_pre_hook(_enter, with_kwargs=True)
    block.register_forward_hook(_leave, always_call=True)


def keeps_on_host(block: nn.Module) -> bool:
    """Whether the inputs of ``block`` go to the host."""
    return _enter in block._forward_pre_hooks.values()


def _enter(block: nn.Module, args: Any, kwargs: Any) -> None:
    # In the backward, ``checkpoint`` computes the block again, and takes all that it saves.
    if checkpoint.state(block).enable_hook and torch.is_grad_enabled():
        moved: set[int] = set()
        tree.map_tree(lambda leaf: _note(leaf, moved), (args, kwargs))
        context = saved_tensors_hooks(lambda tensor: _pack(tensor, moved), _unpack)
        context.__enter__()
        setattr(block, _CONTEXT, context)


def _leave(block: nn.Module, args: Any, output: Any) -> None:
    context = block.__dict__.pop(_CONTEXT, None)
    if context is not None:
        context.__exit__()


def _note(leaf: Any, found: set[int]) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.device.type != "cpu":
        found.add(leaf.data_ptr())
    return leaf


def _pack(tensor: torch.Tensor, moved: set[int]) -> Any:
    if tensor.data_ptr() not in moved or tensor.device.type == "cpu":
        return tensor
    host = devices.get(tensor.device.type).host_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    return tensor.device, host.copy_(tensor)


def _unpack(kept: Any) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    device, host = kept
    # Its work comes after the copy, on the same stream.
    return host.to(device, non_blocking=host.is_pinned())
