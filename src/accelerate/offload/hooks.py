"""Hooks around a module's forward: their interface, how they are added and removed, and layerwise casting.

A hooked module carries ``_hf_hook`` (the hook), ``_old_forward`` (what it computed before) and a ``forward``
of its own that calls both. Libraries bring hooks of their own classes and call hooks by hand, so a hook is
whatever has ``init_hook``, ``pre_forward``, ``post_forward``, ``detach_hook`` and ``no_grad``. The
hooks of offloading are in ``align_hook.py`` and ``dispatch_hook.py``.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from accelerate.device import DEVICES
from accelerate.offload.module_tensors import address_of, tensor_slots
from accelerate.offload.offloaded_tensor import (
    HostMemoryWeightSource,
    OffloadedTensor,
    is_exact_cast,
    make_stand_in,
    version_of,
)

# What dispatching a model sets on it beside its hooks: `to`, and `cuda` and its like.
_accelerate_added_attributes = ["to", *DEVICES.names()]


class MoveGuard(functools.partial[Any]):
    """A call that takes the place of a method of a dispatched model that moves it."""


class ModelHook:
    """A base for hooks that are called around the forward of a module. This one does nothing.

    Attributes:
        no_grad: whether the forward runs without gradients; read at each forward.

    A hook may also have ``abort(module)``: it is called in place of ``post_forward`` when the forward raises,
    and the error goes on.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Handle that the hook is added, and return the module that gets it."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Take the arguments of the forward, and return those that it gets."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Take the output of the forward, and return the one that the caller gets."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Handle that the hook is removed, and return the module."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one, in this order before the forward and after it.

    Attributes:
        hooks: the hooks.
    """

    def __init__(self, *hooks: Any) -> None:
        self.hooks = hooks

    @property
    def no_grad(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True when one of them wants no gradients."""
        return any(hook.no_grad for hook in self.hooks)

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Add each hook to the module that the one before it returned."""
        return functools.reduce(lambda latest, hook: hook.init_hook(latest), self.hooks, module)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Call each hook with the arguments that the one before it returned."""
        call, entered = (args, kwargs), []
        try:
            for hook in self.hooks:
                call = hook.pre_forward(module, *call[0], **call[1])
                entered.append(hook)
        except BaseException:
            _abort(module, entered)
            raise
        return call

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Call each hook with the output that the one before it returned."""
        waiting = iter(self.hooks)
        try:
            for hook in waiting:
                output = hook.post_forward(module, output)
        except BaseException:
            _abort(module, waiting)
            raise
        return output

    def abort(self, module: nn.Module) -> None:
        """Call ``abort`` of the hooks that have it after a forward that raised."""
        _abort(module, self.hooks)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Remove each hook from the module that the one before it returned."""
        return functools.reduce(lambda latest, hook: hook.detach_hook(latest), self.hooks, module)


def _abort(module: nn.Module, hooks: Iterable[Any]) -> None:
    for hook in hooks:
        abort = getattr(hook, "abort", None)
        if abort is not None:
            abort(module)


def _hooked_forward(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a hooked module. Hooks are read each time: clients change them in place."""
    hook = module._hf_hook
    positional, named = hook.pre_forward(module, *args, **kwargs)
    try:
        with torch.no_grad() if hook.no_grad else nullcontext():
            computed = module._old_forward(*positional, **named)
    except BaseException:
        _abort(module, (hook,))
        raise
    return hook.post_forward(module, computed)


def _forward_of_graph(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run the current forward of a traced module: editing its graph makes another."""
    return type(module).forward(module, *args, **kwargs)


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module; a traced one (TorchScript) keeps those that are set in another."""
    return vars(vars(module).get("_actual_script_module", module))


def add_hook_to_module(module: nn.Module, hook: Any, append: bool = False) -> nn.Module:
    """Call ``hook`` around every forward of ``module``.

    Args:
        module: gets ``_hf_hook``, ``_old_forward`` and a ``forward`` of its own.
        hook: a ``ModelHook``, or any object with its methods.
        append: keep the hook that the module has and call this one after it, both as a ``SequentialHook``;
            otherwise the new one takes its place.

    Returns:
        What ``hook.init_hook(module)`` returned, hooked.
    """
    attributes = attributes_of(module)
    if append and "_hf_hook" in attributes:
        before = attributes["_hf_hook"]
        remove_hook_from_module(module)
        hook = SequentialHook(before, hook)
    if "_hf_hook" in attributes and "_old_forward" in attributes:
        old_forward = attributes["_old_forward"]
    else:
        old_forward = module.forward
        if isinstance(module, GraphModule) and "forward" not in vars(module):
            call = functools.partial(_forward_of_graph, module)
            old_forward = functools.update_wrapper(call, module.forward)
    hooked: Any = hook.init_hook(module)
    hooked._hf_hook = hook
    hooked._old_forward = old_forward
    forward = functools.partial(_hooked_forward, hooked)
    hooked.forward = functools.update_wrapper(forward, old_forward)
    return hooked


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove the hook of a module, and restore its own forward, ``to`` and ``cuda``.

    Args:
        module: any module; without a hook nothing changes but ``to`` and its like.
        recurse: also from all modules in it.

    Returns:
        The module.
    """
    attributes = attributes_of(module)
    if "_hf_hook" in attributes:
        attributes["_hf_hook"].detach_hook(module)
        del attributes["_hf_hook"]
    if "_old_forward" in attributes:
        old = attributes["_old_forward"]
        attributes.pop("forward", None)
        if not _is_own_forward(module, old):
            module.forward = old
        del attributes["_old_forward"]
    for name in ("_apply", *_accelerate_added_attributes):
        if isinstance(attributes.get(name), MoveGuard):  # models have attributes of such names, too
            del attributes[name]
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def _is_own_forward(module: nn.Module, forward: Any) -> bool:
    """Return True when ``forward`` is that of the module's class, so that the instance needs none."""
    if isinstance(forward, functools.partial) and forward.func is _forward_of_graph:
        return True
    class_forward = getattr(type(module), "forward", None)
    return (
        getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) is class_forward
    )


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and all its submodules."""
    remove_hook_from_module(module, recurse=True)


def walk_modules(
    root: nn.Module, name: str = "", is_closed: Callable[[nn.Module, str], bool] = lambda _, __: False
) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and those in it with their full names, each before its children.

    Args:
        root: the first one.
        name: its own full name.
        is_closed: called with a module and its name after its turn; True leaves those in it out.
    """
    waiting = [(name, root)]
    while waiting:
        path, module = waiting.pop()
        yield path, module
        if not is_closed(module, path):
            prefix = f"{path}." if path else ""
            waiting += [(prefix + child, below) for child, below in module.named_children()][::-1]


# ---------------------------------------------------------------------------------------- layerwise casting

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
    storage_dtype: torch.dtype
    compute_dtype: torch.dtype

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype, self.compute_dtype = storage_dtype, compute_dtype
        self.non_blocking = non_blocking
        self._reset_forward_state()

    def _reset_forward_state(self) -> None:
        self._users = 0
        # (the weight, what it had before, the state of what it was cast to)
        self._stored_weights: list[tuple[torch.Tensor, torch.Tensor, tuple[int | None, int]]] = []
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
        for table, name, tensor in tensor_slots(module.modules()):
            if isinstance(tensor, OffloadedTensor) and tensor.is_floating_point():
                value = tensor.source.host_tensor().detach().to(self.storage_dtype)
                source = HostMemoryWeightSource(tensor.source.name, value)
                table[name] = make_stand_in(tensor, source, tensor.execution_device)
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Cast the weights to the compute dtype; the stored ones are kept beside them."""
        with self._lock:
            self._users += 1
            try:
                for tensor in (*module.parameters(), *module.buffers()):
                    if tensor.is_floating_point() and tensor.dtype != self.compute_dtype:
                        stored = tensor.data
                        tensor.data = stored.to(self.compute_dtype, non_blocking=self.non_blocking)
                        self._stored_weights.append((tensor, stored, _counted_state(tensor)))
            except BaseException:  # the device may be full
                self.abort(module)
                raise
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Store the weights again, with what the forward has changed in them."""
        self.abort(module)
        return output

    def abort(self, module: nn.Module) -> None:
        """Store the weights again; those that somebody has cast meanwhile, as by ``model.to``, are cast."""
        with self._lock:
            self._users = max(self._users - 1, 0)
            if self._users:
                return
            is_torch_layer = type(module) in CASTABLE_LAYERS
            for tensor, stored, state in self._stored_weights:
                # Other layers may have written to the memory of ``.data``, which torch does not count.
                if is_torch_layer and _counted_state(tensor) == state:
                    tensor.data = stored
                else:
                    self._store(tensor, stored)
            self._stored_weights.clear()
            for tensor in (*module.parameters(), *module.buffers()):
                is_cast = tensor.is_floating_point() and tensor.dtype != self.storage_dtype
                if is_cast and not isinstance(tensor, OffloadedTensor):
                    tensor.data = tensor.data.to(self.storage_dtype)

    def _store(self, tensor: torch.Tensor, stored: torch.Tensor) -> None:
        """Put the values into the stored memory again, where they have changed."""
        data = tensor.data
        expected = (stored.shape, stored.device, stored.dtype)
        if (data.shape, data.device, self.storage_dtype) != expected or stored.is_inference():
            tensor.data = data.to(self.storage_dtype)
            return
        # On the CPU the memory may be that of a file: it is written to only where something has changed.
        if data.device.type != "cpu" or not torch.equal(stored.to(data.dtype), data):
            if not is_exact_cast(stored.dtype, data.dtype):  # what has not changed keeps its accuracy
                data = torch.where(stored.to(data.dtype) == data, stored, data.to(stored.dtype))
            stored.copy_(data)
        tensor.data = stored


def _counted_state(tensor: torch.Tensor) -> tuple[int | None, int]:
    """Return the number of changes that torch has counted, and the address of the memory."""
    return version_of(tensor), address_of(tensor)


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
