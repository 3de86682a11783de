"""Layerwise casting: weights are stored in a small dtype and computed with in a larger one."""

from __future__ import annotations

import re
import threading
from typing import Any

import torch
from torch import nn

from accelerate.offload.hooks import ModelHook, add_hook_to_module, walk_modules
from accelerate.offload.offloaded_tensor import HostMemoryWeightSource, OffloadedTensor, make_stand_in

# Layers whose weights can be stored in another dtype without losing accuracy elsewhere.
CASTABLE_LAYERS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)


class LayerwiseCastingHook(ModelHook):
    """Cast a module's weights before its forward, and put the stored ones back afterwards.

    Args:
        storage_dtype: how weights are kept.
        compute_dtype: how they compute.
        non_blocking: do not wait for copies.
    """

    _is_stateful = False

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype, self.compute_dtype = storage_dtype, compute_dtype
        self.non_blocking = non_blocking
        self._reset_forward_state()

    def _reset_forward_state(self) -> None:
        self._users = 0
        self._stored_weights: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]] = []
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without that of a running forward: a copy starts between two forwards."""
        passing = ("_users", "_stored_weights", "_lock")
        return {name: value for name, value in vars(self).items() if name not in passing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset_forward_state()

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Cast the weights to the storage dtype; offloaded ones in host memory."""
        for owner in module.modules():
            for table in (owner._parameters, owner._buffers):
                for name, tensor in table.items():
                    if isinstance(tensor, OffloadedTensor) and tensor.is_floating_point():
                        table[name] = self._cast_stand_in(tensor)
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def _cast_stand_in(self, tensor: OffloadedTensor) -> Any:
        value = tensor.source.host_tensor().detach().to(self.storage_dtype)
        return make_stand_in(
            tensor, HostMemoryWeightSource(tensor.source.name, value), tensor.execution_device
        )

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Cast the weights to the compute dtype; the stored ones are kept beside them."""
        with self._lock:
            self._users += 1
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.is_floating_point() and tensor.dtype != self.compute_dtype:
                    stored = tensor.data
                    tensor.data = stored.to(self.compute_dtype, non_blocking=self.non_blocking)
                    self._stored_weights.append((tensor, stored, tensor.data, tensor._version))
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Put the stored weights back; those that the forward has changed in place are cast."""
        self.abort(module)
        return output

    def abort(self, module: nn.Module) -> None:
        """Put the stored weights back."""
        with self._lock:
            self._users = max(self._users - 1, 0)
            if self._users:
                return
            for tensor, stored, cast, version in self._stored_weights:
                if tensor._version != version or tensor.data_ptr() != cast.data_ptr():
                    tensor.data = tensor.data.to(self.storage_dtype)
                else:
                    tensor.data = stored
            self._stored_weights.clear()


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of linear and convolution layers in one dtype and compute in another.

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

    def is_skipped(inner: nn.Module, path: str) -> bool:
        named = (re.search(pattern, path) for pattern in patterns or ())
        return isinstance(inner, skip_modules_classes or ()) or any(named)

    def ends_here(inner: nn.Module, path: str) -> bool:
        return isinstance(inner, CASTABLE_LAYERS) or is_skipped(inner, path)

    for path, layer in walk_modules(module, is_closed=ends_here):
        if isinstance(layer, CASTABLE_LAYERS) and not is_skipped(layer, path):
            hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(layer, hook, append=True)
