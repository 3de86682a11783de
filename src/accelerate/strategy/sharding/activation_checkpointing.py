"""Activation checkpointing; with offload, the inputs of blocks wait on the host for the backward."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from accelerate import device as devices
from accelerate.core import tree
from accelerate.core.errors import PrepareError
from accelerate.core.torch_internals import require

require("activation checkpointing")

from torch.distributed._composable import checkpoint_activation  # noqa: E402
from torch.distributed._composable.checkpoint_activation import checkpoint  # noqa: E402

# The attribute in which a block keeps the context that it has entered in its forward.
_CONTEXT = "_accelerate_inputs_on_host"


class _Recomputation:
    """Compute a block again without the hooks of ``checkpoint``.

    torch's own context is a generator, so the second backward through a graph (``retain_graph=True``, the
    gradient of an input) could not enter it.
    """

    def __init__(self, block: nn.Module, context: AbstractContextManager[Any] | None = None) -> None:
        self.state, self.context = checkpoint.state(block), context or nullcontext()

    def __enter__(self) -> None:
        self.context.__enter__()
        self.before, self.state.enable_hook = self.state.enable_hook, False

    def __exit__(self, *error: Any) -> None:
        self.state.enable_hook = self.before
        self.context.__exit__(*error)


checkpoint_activation._no_hook = _Recomputation  # type: ignore[assignment]


def checkpoint_activations(model: nn.Module, blocks: list[nn.Module], offload: bool = False) -> None:
    """Apply activation checkpointing to each block; names stay as they are.

    Args:
        model: the model around the blocks; ``use_cache`` is turned off while it trains.
        blocks: the blocks; one inside another is left out.
        offload: keep the inputs of each block on the host until the backward.

    Raises:
        PrepareError: there is no block.
    """
    if not blocks:
        raise PrepareError(
            "activation_checkpointing, but no module of the model is wrapped",
            why="the activations of each FSDP unit are computed again in the backward",
            fix="set auto_wrap_policy, for example 'transformer_based_wrap'",
        )
    inside = {part for block in blocks for part in block.modules() if part is not block}
    for block in blocks:
        if block not in inside:
            hooks = list(block._forward_pre_hooks)
            if offload:
                offload_inputs(block)
            _keep_statistics(block)
            checkpoint(block)
            # It computes the block again from what its hook sees, and so calls the program's hooks again.
            for hook in hooks:
                block._forward_pre_hooks[hook] = block._forward_pre_hooks.pop(hook)
    # A recomputed block would put its keys and values into the cache twice. The model that makes the cache
    # may be inside of others that know none, such as PEFT's.
    for module in model.modules():
        names = list(inspect.signature(module.forward).parameters)
        if "use_cache" in names and (module is model or module not in inside.union(blocks)):
            hook = partial(_without_cache, names.index("use_cache"))
            module.register_forward_pre_hook(hook, with_kwargs=True)


def _keep_statistics(block: nn.Module) -> None:
    """Let a batch norm count a batch once: the backward computes the block again, and would count it too."""
    norms = [m for m in block.modules() if isinstance(getattr(m, "running_mean", None), torch.Tensor)]
    if not norms:
        return
    kept: list[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def keep(block: nn.Module, args: Any) -> None:
        if not checkpoint.state(block).enable_hook:  # in the backward
            kept.append([(b, b.clone()) for norm in norms for b in norm.buffers(recurse=False)])

    def restore(block: nn.Module, args: Any, output: Any) -> None:
        with torch.no_grad():
            for buffer, value in kept.pop() if kept else ():
                buffer.copy_(value)

    block.register_forward_pre_hook(keep)
    block.register_forward_hook(restore, always_call=True)


def _without_cache(place: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if module.training and torch.is_grad_enabled():
        if place < len(args):
            args = (*args[:place], False, *args[place + 1 :])
        else:
            kwargs["use_cache"] = False
    return args, kwargs


def offload_inputs(block: nn.Module) -> None:
    """Move the inputs that ``checkpoint`` keeps of ``block`` to the host; called before ``checkpoint``.

    Inputs that need no gradient stay: masks and positions are the same for all blocks, and kept once.
    """
    block.register_forward_pre_hook(_enter, with_kwargs=True)
    block.register_forward_hook(_leave, always_call=True)


def offloads_inputs(block: nn.Module) -> bool:
    """Return whether the inputs of ``block`` go to the host."""
    return _enter in block._forward_pre_hooks.values()


def _enter(block: nn.Module, args: Any, kwargs: Any) -> None:
    # In the backward, ``checkpoint`` computes the block again, and takes all that it saves.
    if checkpoint.state(block).enable_hook and torch.is_grad_enabled():
        moved = {
            leaf.data_ptr()
            for _, leaf in tree.iterate_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.device.type != "cpu"
        }
        context = saved_tensors_hooks(lambda tensor: _pack(tensor, moved), _unpack)
        context.__enter__()
        setattr(block, _CONTEXT, context)


def _leave(block: nn.Module, args: Any, output: Any) -> None:
    context = block.__dict__.pop(_CONTEXT, None)
    if context is not None:
        context.__exit__()


def _pack(tensor: torch.Tensor, moved: set[int]) -> Any:
    if tensor.data_ptr() not in moved or tensor.device.type == "cpu":
        return tensor
    host = devices.get(tensor.device.type).host_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    # Nobody reads it on the host. Torch keeps pinned memory until the copy is over, and changes of the
    # tensor come after the copy, on the same stream.
    return tensor.device, host.copy_(tensor, non_blocking=host.is_pinned())


def _unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    device, host = packed
    # Its work comes after the copy, on the same stream.
    return host.to(device, non_blocking=host.is_pinned())
