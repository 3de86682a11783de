"""Casts of float32 inputs at the layers of a model that DeepSpeed trains in 16 bits.

The inputs of the model itself stay as they are: it may compute in float32 before its first layer, such as
statistics, a Fourier transform (which has no bf16) or embeddings of coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accelerate.core import tree

_FLOAT32_OR_WIDER = (torch.float32, torch.float64)
# The layers of which torch refuses float32 inputs beside 16-bit weights. RMSNorm takes them.
_CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
_INSTANCE_NORMS = nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d
_NORMS = *_BATCH_NORMS, *_INSTANCE_NORMS, nn.LayerNorm, nn.GroupNorm
_RECURRENT = nn.RNNBase, nn.RNNCellBase
_LAYERS = *_CONVOLUTIONS, *_NORMS, *_RECURRENT, nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.PReLU
# A hook costs microseconds in each call: a layer whose first calls have no float32 input loses its own.
_CALLS = 8


def cast_layer_inputs(model: nn.Module, dtype: torch.dtype) -> list[Any]:
    """Let layers cast float32 inputs to the dtype of their weights; the outputs are float32 then.

    Outputs keep ``dtype`` where no layer has cast, as with token ids: programs give them to layers of that
    dtype, and a copy of the logits may take more memory than there is.

    A layer with a ``forward`` of its own is left alone, for it may compute in float32 (``FP32LayerNorm``).
    Convolutions are not, with which models begin (``Conv2dSame``).

    Returns:
        The hooks.
    """
    has_cast = False

    def begin(_: nn.Module, __: Any) -> None:
        nonlocal has_cast
        has_cast = False

    def note_cast() -> None:
        nonlocal has_cast
        has_cast = True

    def to_float32(leaf: Any) -> Any:
        return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype is dtype else leaf

    def end(_: nn.Module, __: Any, outputs: Any) -> Any:
        return tree.map_tree(to_float32, outputs) if has_cast else outputs

    hooks = [_add_hook(layer, note_cast) for layer in model.modules() if _refuses_float32(layer)]
    return [*hooks, model.register_forward_pre_hook(begin, prepend=True), model.register_forward_hook(end)]


def _refuses_float32(layer: nn.Module) -> bool:
    is_own = not type(layer).forward.__module__.startswith("torch.nn.")
    is_taken = isinstance(layer, _CONVOLUTIONS if is_own else _LAYERS)
    return is_taken and next(layer.parameters(recurse=False), None) is not None


def _add_hook(layer: nn.Module, note_cast: Callable[[], None]) -> Any:
    calls = 0.0

    def cast_inputs(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal calls
        uncast = tree.find_leaf(_is_float32_or_wider, (args, kwargs))
        if not torch.compiler.is_compiling():  # compiled code pays nothing for it
            calls = calls + 1 if uncast is None else -math.inf
            if calls == _CALLS:
                handle.remove()
        # Autocast casts by its own rules, as in 1.x.
        if uncast is None or torch.is_autocast_enabled(uncast.device.type):
            return None
        dtype = next(layer.parameters(recurse=False)).dtype
        if dtype in _FLOAT32_OR_WIDER:  # a copy of the layer that is float32 again
            return None
        note_cast()
        return tree.map_tree(
            lambda leaf: leaf.to(dtype) if _is_float32_or_wider(leaf) else leaf, (args, kwargs)
        )

    handle = layer.register_forward_pre_hook(cast_inputs, with_kwargs=True)
    return handle


def _is_float32_or_wider(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in _FLOAT32_OR_WIDER
