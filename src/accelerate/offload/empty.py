"""Models without weights: ``init_empty_weights`` and ``init_on_device``.

A parameter is made on the meta device at once: no memory is asked for, filled and thrown away. What is asked
of ``torch.empty``, ``zeros``, ``ones`` ... may become a parameter, a buffer or an operand; which one, only
shows later. So it is a tensor on the meta device and a note of how it was to be made. A parameter never needs
the note. For everything else, a buffer or an operand of any function of torch, the tensor is made as it was
asked for, in the same Python object, before anybody can see the difference. So buffers are those of normal
construction.
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
from torch.utils import swap_tensors

from accelerate.core import environ

_META = torch.device("meta")
_EXACT = (torch.empty, torch.zeros, torch.ones, torch.full)
# Random numbers are drawn when they are asked for, unless there are so many that it takes time.
_DRAWN = (torch.rand, torch.randn)
_MANY = 2**20
# What fills a tensor: for one without memory there is nothing to do.
_FILLS = (
    getattr(torch.Tensor, f"{name}_")
    for name in [
        "normal",
        "uniform",
        "zero",
        "fill",
        "exponential",
        "erfinv",
        "mul",
        "add",
        "sub",
        "div",
        "clamp",
    ]
)
_MAKE, _FILL = 1, 2
_KINDS: dict[Any, int] = dict.fromkeys(_EXACT + _DRAWN, _MAKE) | dict.fromkeys(_FILLS, _FILL)
# Those of torch.nn.init come here as such, whatever function has that name there, with keywords only.
_INITS = frozenset({"normal_", "uniform_", "constant_", "kaiming_uniform_"})
_PLAIN = frozenset({"size", "fill_value", "dtype", "device"})
_NUMBERS = frozenset({int, float, bool, str, type(None)})


class _Thread(threading.local):
    """What this thread is in: the contexts, the innermost last; it alone decides."""

    def __init__(self) -> None:
        self.inside: list[_Context] = []


_here = _Thread()


class _Note:
    """How a tensor was to be made: by a function of its shape and dtype, and then filled.

    Attributes:
        tensor: the one on the meta device, weakly: parameters and intermediate values end.
        function: makes it.
        rest: its arguments after the shape.
        device: where.
        fills: functions with the arguments that follow the tensor.
    """

    __slots__ = ("device", "fills", "function", "rest", "tensor")

    def __init__(self, tensor: torch.Tensor, function: Any, rest: tuple[Any, ...], device: Any) -> None:
        self.tensor = weakref.ref(tensor)
        self.function, self.rest, self.device = function, rest, device
        self.fills: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = ()

    def make(self, like: torch.Tensor) -> torch.Tensor:
        """The tensor as it was asked for."""
        value = self.function(like.shape, *self.rest, dtype=like.dtype, device=self.device)
        for fill, rest, named in self.fills:
            fill(value, *rest, **named)
        return value


class _Context(TorchFunctionMode):
    """One ``with`` block.

    Args:
        device: of parameters.
        buffers: buffers go there too.
    """

    def __init__(self, device: torch.device, buffers: bool) -> None:
        super().__init__()
        self.device, self.buffers = device, buffers
        self.notes: dict[int, _Note] = {}
        self.full = 64
        self.making = False  # a tensor is being made for real
        self.moved: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every function of torch in this thread, thousands for a model: each test here is counted."""
        kind = _KINDS.get(func)
        kwargs = kwargs or {}
        if self.making:
            return func(*args, **kwargs)
        if kind is None:
            if not args and func.__name__ in _INITS:
                return self._fill(func, (kwargs.pop("tensor"),), kwargs)
            if self.notes:
                self._need(args)
                if kwargs:
                    self._need(kwargs.values())
            return func(*args, **kwargs)
        return self._later(func, args, kwargs) if kind == _MAKE else self._fill(func, args, kwargs)

    def _later(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """A tensor that is made when it is needed; at once where that cannot be told from its arguments."""
        device = kwargs.get("device")
        rest = _rest(args, kwargs) if func is torch.full else ()
        waits = kwargs.keys() <= _PLAIN and _here.inside[-1] is self
        if rest is None or not waits or (device is not None and torch.device(device) == _META):
            return func(*args, **kwargs)
        kwargs["device"] = _META
        made = func(*args, **kwargs)
        if type(made) is not torch.Tensor or (func in _DRAWN and made.numel() < _MANY):
            kwargs["device"] = device
            return func(*args, **kwargs)
        if len(self.notes) >= self.full:
            self._forget()
            self.full = 64 + 2 * len(self.notes)
        self.notes[id(made)] = _Note(made, func, rest, device)
        return made

    def _forget(self) -> None:
        """Drops notes of tensors that are no more."""
        for key in [key for key, note in self.notes.items() if note.tensor() is None]:
            del self.notes[key]

    def _need(self, args: Iterable[Any]) -> None:
        """Makes what a function is about to use."""
        for leaf in args:
            note = self.notes.get(id(leaf))
            if note is not None and note.tensor() is leaf:
                del note
                self.make(leaf)
            elif isinstance(leaf, list | tuple):
                self._need(leaf)

    def _fill(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A tensor is filled: there is nothing to do without memory; one that waits and is large goes on."""
        tensor = args[0]
        note = self.notes.get(id(tensor))
        if note is None or note.tensor() is not tensor:
            if tensor.is_meta:
                return tensor
        elif tensor.numel() >= _MANY and _NUMBERS.issuperset(map(type, (*args[1:], *kwargs.values()))):
            note.fills += ((func, args[1:], kwargs),)
            return tensor
        del note
        if self.notes:
            self._need((*args, *kwargs.values()))
        return func(*args, **kwargs)

    def make(self, tensor: torch.Tensor) -> None:
        """Makes a tensor as it was asked for, if that has waited; the object stays the same."""
        note = self.notes.get(id(tensor))
        if note is None or note.tensor() is not tensor:
            return
        del self.notes[id(tensor)]
        with _making():
            real = note.make(tensor)
            del note  # torch swaps only what nobody refers to weakly
            swap_tensors(tensor, real)

    def make_rest(self) -> None:
        """Makes what is still there: plain attributes, entries of lists, what the caller holds."""
        for tensor in [note.tensor() for note in self.notes.values()]:
            if tensor is not None:
                self.make(tensor)

    def parameter(self, module: nn.Module, name: str, param: nn.Parameter | None) -> Any:
        """A hook of torch: a parameter is registered."""
        inside = _here.inside
        if param is None or not inside or inside[-1] is not self:
            return None
        if self.notes and len(self.notes) < 4:  # so that most functions find none
            self._forget()
        with torch._C.DisableTorchFunction():
            if param.is_meta if self.device is _META else param.device == self.device:
                return None
        with _making():
            return None if is_lazy(param) else self._there(param, _parameter)

    def buffer(self, module: nn.Module, name: str, buffer: torch.Tensor | None) -> Any:
        """A hook of torch: a buffer is registered."""
        if buffer is None or self not in _here.inside:
            return None
        if _here.inside[-1] is not self or not self.buffers:
            self.make(buffer)
            return None
        self.notes.pop(id(buffer), None)
        with _making():
            return None if buffer.device == self.device else self._there(buffer, _buffer)

    def _there(self, tensor: Any, move: Callable[[Any, torch.device], torch.Tensor]) -> torch.Tensor:
        """The tensor on the device; a tied one is moved once."""
        found = self.moved.get(id(tensor))
        if found is not None and found[0]() is tensor:
            return found[1]
        moved = move(tensor, self.device)
        self.moved[id(tensor)] = weakref.ref(tensor), moved
        return moved


@contextmanager
def _making() -> Generator[None]:
    """No context of this thread looks."""
    every = [context for context in _here.inside if not context.making]
    for context in every:
        context.making = True
    try:
        yield
    finally:
        for context in every:
            context.making = False


def _rest(args: Any, kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """What follows the size in a call of ``torch.full``; None if it is no number."""
    value = args[1] if len(args) == 2 else kwargs.get("fill_value")
    return (value,) if type(value) in _NUMBERS else None


def _parameter(param: Any, device: torch.device) -> torch.Tensor:
    """A parameter on another device, of the same class and with what others have set on it."""
    value: torch.Tensor = param.to(device)
    kind: Any = type(param)
    if nn.Parameter not in kind.__mro__:  # a tensor with tensors inside, which is marked as a parameter
        return nn.Parameter(value, requires_grad=param.requires_grad)
    if kind is nn.Parameter:
        made: Any = nn.Parameter(value.detach(), requires_grad=param.requires_grad)
        made.__dict__.update(param.__dict__)
        return made
    return kind(value, requires_grad=param.requires_grad, **param.__dict__)


def _buffer(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    return buffer.to(device)


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Generator[None]:
    """Models made in this block have parameters on the meta device: they take no memory and no time.

    Buffers are real and have the values that normal construction gives them, unless they are asked to be
    empty too. What is computed from parameters stays on the meta device. The weights are filled in by
    ``load_checkpoint_in_model`` or ``load_checkpoint_and_dispatch``. Other threads are not concerned.

    Args:
        include_buffers: buffers are on the meta device too; None is what ``ACCELERATE_INIT_INCLUDE_BUFFERS``
            says, and otherwise False.

    Example::

        with init_empty_weights():
            model = nn.Sequential(*[nn.Linear(10000, 10000) for _ in range(1000)])
    """
    with init_on_device(_META, include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device, include_buffers: bool | None = None) -> Generator[None]:
    """Models made in this block have their parameters on a device.

    Args:
        device: the device; on any but the meta device each parameter is moved when a module gets it.
        include_buffers: see ``init_empty_weights``.
    """
    if include_buffers is None:
        include_buffers = environ.flag("ACCELERATE_INIT_INCLUDE_BUFFERS")
    device = torch.device(device)
    context = _Context(_META if device == _META else device, include_buffers)
    hooks = (
        modules.register_module_parameter_registration_hook(context.parameter),
        modules.register_module_buffer_registration_hook(context.buffer),
    )
    _here.inside.append(context)
    try:
        if context.device.type == "meta":
            with context:
                yield
            context.make_rest()
        else:
            yield
    finally:
        _here.inside.remove(context)
        for hook in hooks:
            hook.remove()
