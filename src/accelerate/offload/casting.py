"""Weights that are kept in a small number format and computed with in a larger one, layer by layer."""

from __future__ import annotations

import re
import threading
from typing import Any

import torch
from torch import nn

from accelerate.offload.hooks import ModelHook, add_hook_to_module
from accelerate.offload.source import HostSource
from accelerate.offload.tensor import OffloadedTensor, offloaded

# Layers that change of themselves to another number format without losing what makes them work.
LAYERS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)


class LayerwiseCastingHook(ModelHook):
    """Casts a module's weights before its forward, and afterwards takes the stored ones again.

    Args:
        storage_dtype: how weights are kept.
        compute_dtype: how they compute.
        non_blocking: do not wait for copies.
    """

    _is_stateful = False

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype, self.compute_dtype = storage_dtype, compute_dtype
        self.non_blocking = non_blocking
        self._begin()

    def _begin(self) -> None:
        self._users = 0
        self._kept: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]] = []
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """What is going on now stays here: a copy begins between two forwards."""
        passing = ("_users", "_kept", "_lock")
        return {name: value for name, value in vars(self).items() if name not in passing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def init_hook(self, module: nn.Module) -> nn.Module:
        """The weights take the format in which they are kept; offloaded ones where they are."""
        for owner in module.modules():
            for table in (owner._parameters, owner._buffers):
                for name, tensor in table.items():
                    if isinstance(tensor, OffloadedTensor) and tensor.is_floating_point():
                        table[name] = self._stored(tensor)
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def _stored(self, tensor: OffloadedTensor) -> Any:
        value = tensor.source.host().detach().to(self.storage_dtype)
        return offloaded(tensor, HostSource(tensor.source.name, value), tensor.execution)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The weights in the format in which they compute; the stored ones are kept beside them."""
        with self._lock:
            self._users += 1
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.is_floating_point() and tensor.dtype != self.compute_dtype:
                    stored = tensor.data
                    tensor.data = stored.to(self.compute_dtype, non_blocking=self.non_blocking)
                    self._kept.append((tensor, stored, tensor.data, tensor._version))
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """The stored weights again; those that the forward has changed in place are cast."""
        self.abort(module)
        return output

    def abort(self, module: nn.Module) -> None:
        """The stored weights again."""
        with self._lock:
            self._users = max(self._users - 1, 0)
            if self._users:
                return
            for tensor, stored, cast, version in self._kept:
                if tensor._version != version or tensor.data_ptr() != cast.data_ptr():
                    tensor.data = tensor.data.to(self.storage_dtype)
                else:
                    tensor.data = stored
            self._kept.clear()


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Keeps the weights of linear and convolution layers in one number format and computes in another.

    Args:
        module: the model.
        storage_dtype: how weights are kept, for example ``torch.float8_e4m3fn``.
        compute_dtype: how they compute, for example ``torch.bfloat16``.
        skip_modules_pattern: regular expressions; modules whose full names they find are left alone, with
            all that is in them.
        skip_modules_classes: classes of modules that are left alone, with all that is in them.
        non_blocking: do not wait for copies.
    """
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else skip_modules_pattern
    _attach(
        module, "", patterns or (), skip_modules_classes or (), storage_dtype, compute_dtype, non_blocking
    )


def _attach(
    module: nn.Module,
    path: str,
    patterns: tuple[str, ...],
    classes: tuple[type[nn.Module], ...],
    storage: torch.dtype,
    compute: torch.dtype,
    non_blocking: bool,
) -> None:
    if isinstance(module, classes) or any(re.search(pattern, path) for pattern in patterns):
        return
    if isinstance(module, LAYERS):
        add_hook_to_module(module, LayerwiseCastingHook(storage, compute, non_blocking), append=True)
        return
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        _attach(child, inner, patterns, classes, storage, compute, non_blocking)
