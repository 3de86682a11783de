"""Models without weights: ``init_empty_weights`` and ``init_on_device``.

A parameter is created on the meta device at once: no memory is allocated, filled and freed. A tensor from
``torch.empty``, ``zeros``, ``ones`` ... may become a parameter, a buffer or an operand; which one is known
later. So it is a meta tensor with a record of how to create it. A parameter never needs the record. For
everything else, a buffer or an operand of any torch function, the tensor is created as it was asked for, in
the same Python object, before anybody can see the difference. So buffers are those of normal construction.
A few zeros, ones or equal numbers are created at once: a parameter of them has values until a module gets it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from accelerate.core import environ

_META = torch.device("meta")
_DETERMINISTIC = (torch.empty, torch.zeros, torch.ones, torch.full)
# Random numbers are generated at once, unless there are so many that it takes time.
_RANDOM = (torch.rand, torch.randn)
_LARGE = 2**20
# So are a few zeros, ones or equal numbers: a script may read a parameter before a module has it.
_SMALL = 2**12
# In-place initializers: a tensor without memory needs none.
_FILL_NAMES = "normal uniform zero fill exponential erfinv mul add sub div clamp"
_FILLS = (getattr(torch.Tensor, f"{name}_") for name in _FILL_NAMES.split())
_MAKE, _FILL = 1, 2
_KINDS: dict[Any, int] = dict.fromkeys(_DETERMINISTIC + _RANDOM, _MAKE) | dict.fromkeys(_FILLS, _FILL)
# Functions of torch.nn.init are recognized by these names, and called with keywords only.
_INITS = frozenset({"normal_", "uniform_", "constant_", "kaiming_uniform_"})
_SIMPLE_ARGUMENTS = frozenset({"size", "fill_value", "dtype", "device"})
_NUMBERS = frozenset({int, float, bool, str, type(None)})


class _ThreadEmptyInitContexts(threading.local):
    """The contexts that this thread is in; the innermost one is last and is the active one."""

    def __init__(self) -> None:
        self.contexts: list[_InitContext] = []


_thread = _ThreadEmptyInitContexts()


class _DeferredInitTensor:
    """A tensor that is created later: by a function of its shape and dtype, and then filled.

    Attributes:
        tensor: the one on the meta device, weakly: parameters and intermediate values end.
        function: makes it.
        extra_args: its arguments after the shape.
        device: where.
        fills: functions with the arguments that follow the tensor.
    """

    __slots__ = ("device", "extra_args", "fills", "function", "tensor")

    def __init__(self, tensor: torch.Tensor, function: Any, rest: tuple[Any, ...], device: Any) -> None:
        self.tensor = weakref.ref(tensor)
        self.function, self.extra_args, self.device = function, rest, device
        self.fills: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = ()

    def build(self, like: torch.Tensor) -> torch.Tensor:
        """Return the tensor as it was asked for."""
        value = self.function(like.shape, *self.extra_args, dtype=like.dtype, device=self.device)
        for fill, rest, named in self.fills:
            fill(value, *rest, **named)
        return value


class _InitContext(TorchFunctionMode):
    """The context of one ``with`` block.

    Args:
        device: of parameters.
        buffers: buffers go there too.
    """

    def __init__(self, device: torch.device, buffers: bool) -> None:
        super().__init__()
        self.device, self.buffers = device, buffers
        self.deferred: dict[int, _DeferredInitTensor] = {}
        self.cleanup_threshold = 64
        self.is_paused = False  # a deferred tensor is being materialized
        self.device_copies: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle every torch function of this thread, thousands for a model: each test here costs time."""
        kind = _KINDS.get(func)
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        if kind is None:
            if not args and func.__name__ in _INITS:
                return self._fill(func, (kwargs.pop("tensor"),), kwargs)
            if self.deferred:
                self._materialize_operands(args)
                if kwargs:
                    self._materialize_operands(kwargs.values())
            return func(*args, **kwargs)
        return self._defer(func, args, kwargs) if kind == _MAKE else self._fill(func, args, kwargs)

    def _defer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """Defer the creation of a tensor; create it at once where its arguments do not allow that."""
        device = kwargs.get("device")
        extra_args: tuple[Any, ...] | None = ()
        if func is torch.full:
            value = args[1] if len(args) == 2 else kwargs.get("fill_value")
            extra_args = (value,) if type(value) in _NUMBERS else None
        waits = kwargs.keys() <= _SIMPLE_ARGUMENTS and _thread.contexts[-1] is self
        if extra_args is None or not waits or (device is not None and torch.device(device) == _META):
            self._materialize_operands((*args, *kwargs.values()))
            return func(*args, **kwargs)
        kwargs["device"] = _META
        tensor = func(*args, **kwargs)
        # One without elements is created at once, even by torch.empty: pickle gives it a storage.
        at_once = _LARGE if func in _RANDOM else 1 if func is torch.empty else _SMALL
        if type(tensor) is not torch.Tensor or tensor.numel() < at_once:
            kwargs["device"] = device
            return func(*args, **kwargs)
        if len(self.deferred) >= self.cleanup_threshold:
            self._drop_dead()
            self.cleanup_threshold = 64 + 2 * len(self.deferred)
        self.deferred[id(tensor)] = _DeferredInitTensor(tensor, func, extra_args, device)
        return tensor

    def _drop_dead(self) -> None:
        """Drop records of tensors that were freed."""
        for key in [key for key, record in self.deferred.items() if record.tensor() is None]:
            del self.deferred[key]

    def _materialize_operands(self, args: Iterable[Any]) -> None:
        """Materialize the deferred tensors among a function's arguments."""
        for leaf in args:
            record = self.deferred.get(id(leaf))
            if record is not None and record.tensor() is leaf:
                self.materialize(leaf)
            elif isinstance(leaf, list | tuple):
                self._materialize_operands(leaf)

    def _fill(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Fill a tensor: nothing to do without memory; the fill of a large deferred one is deferred too."""
        tensor = args[0]
        record = self.deferred.get(id(tensor))
        if record is None or record.tensor() is not tensor:
            if tensor.is_meta:
                return tensor
        elif tensor.numel() >= _LARGE and _NUMBERS.issuperset(map(type, (*args[1:], *kwargs.values()))):
            record.fills += ((func, args[1:], kwargs),)
            return tensor
        if self.deferred:
            self._materialize_operands((*args, *kwargs.values()))
        return func(*args, **kwargs)

    def materialize(self, tensor: torch.Tensor) -> None:
        """Materialize a deferred tensor; the object stays, with its attributes and weak references to it."""
        record = self.deferred.get(id(tensor))
        if record is None or record.tensor() is not tensor:
            return
        del self.deferred[id(tensor)]
        with _pause_contexts():
            # torch.utils.swap_tensors would refuse weak references, and lose attributes that others have set.
            torch._C._swap_tensor_impl(tensor, record.build(tensor))

    def materialize_all(self) -> None:
        """Materialize the other deferred tensors: plain attributes, list items, variables of the caller."""
        for tensor in [record.tensor() for record in self.deferred.values()]:
            if tensor is not None:
                self.materialize(tensor)

    def register_parameter(self, module: nn.Module, name: str, param: nn.Parameter | None) -> Any:
        """Handle the registration of a parameter (a hook of torch)."""
        inside = _thread.contexts
        if param is None or not inside or inside[-1] is not self:
            return None
        if self.deferred and len(self.deferred) < 4:  # so that most functions find none
            self._drop_dead()
        with torch._C.DisableTorchFunction():
            if param.is_meta if self.device is _META else param.device == self.device:
                return None
        with _pause_contexts():
            return None if is_lazy(param) else self._move_once(param, _move_parameter)

    def register_buffer(self, module: nn.Module, name: str, buffer: torch.Tensor | None) -> Any:
        """Handle the registration of a buffer (a hook of torch)."""
        if buffer is None or self not in _thread.contexts:
            return None
        if _thread.contexts[-1] is not self or not self.buffers:
            self.materialize(buffer)
            return None
        self.deferred.pop(id(buffer), None)
        with _pause_contexts():
            return None if buffer.device == self.device else self._move_once(buffer, torch.Tensor.to)

    def _move_once(self, tensor: Any, move: Callable[[Any, torch.device], torch.Tensor]) -> torch.Tensor:
        """Return the tensor on the device; a tied one is moved once."""
        moved_before = self.device_copies.get(id(tensor))
        if moved_before is not None and moved_before[0]() is tensor:
            return moved_before[1]
        moved = move(tensor, self.device)
        self.device_copies[id(tensor)] = weakref.ref(tensor), moved
        return moved


@contextmanager
def _pause_contexts() -> Generator[None]:
    """Disable all contexts of this thread."""
    active_contexts = [context for context in _thread.contexts if not context.is_paused]
    for context in active_contexts:
        context.is_paused = True
    try:
        yield
    finally:
        for context in active_contexts:
            context.is_paused = False


def _move_parameter(param: Any, device: torch.device) -> torch.Tensor:
    """Return a parameter on another device, of the same class and with the attributes set by others."""
    value: torch.Tensor = param.to(device)
    kind: Any = type(param)
    if nn.Parameter not in kind.__mro__:  # a tensor with tensors inside, which is marked as a parameter
        return nn.Parameter(value, requires_grad=param.requires_grad)
    if kind is nn.Parameter:
        moved: Any = nn.Parameter(value.detach(), requires_grad=param.requires_grad)
        moved.__dict__.update(param.__dict__)
        return moved
    return kind(value, requires_grad=param.requires_grad, **param.__dict__)


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Generator[None]:
    """Create models with parameters on the meta device in this block: they take no memory and no time.

    Buffers are real and have the values that normal construction gives them, unless they are asked to be
    empty too. What is computed from parameters stays on the meta device. The weights are filled in by
    ``load_checkpoint_in_model`` or ``load_checkpoint_and_dispatch``. Other threads are not concerned.

    Args:
        include_buffers: buffers are on the meta device too; None is what ``ACCELERATE_INIT_INCLUDE_BUFFERS``
            says, and otherwise False.

    Example::

        with init_empty_weights():
            decoder = AutoModelForCausalLM.from_config(config)  # takes no memory
    """
    with init_on_device(_META, include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device, include_buffers: bool | None = None) -> Generator[None]:
    """Create models with their parameters on a device in this block.

    Args:
        device: the device; on any but the meta device each parameter is moved when a module gets it.
        include_buffers: see ``init_empty_weights``.
    """
    if include_buffers is None:
        include_buffers = environ.get_flag("ACCELERATE_INIT_INCLUDE_BUFFERS")
    device = torch.device(device)
    context = _InitContext(_META if device == _META else device, include_buffers)
    hooks = (
        modules.register_module_parameter_registration_hook(context.register_parameter),
        modules.register_module_buffer_registration_hook(context.register_buffer),
    )
    _thread.contexts.append(context)
    try:
        if context.device.type == "meta":
            with context:
                yield
            context.materialize_all()
        else:
            yield
    finally:
        _thread.contexts.remove(context)
        for hook in hooks:
            hook.remove()
