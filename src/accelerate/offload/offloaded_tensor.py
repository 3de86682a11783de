"""The stand-in for an offloaded weight: a tensor on the meta device that reads its values when it is used.

The parameter of an offloaded module is a stand-in between forwards. Code that reads it elsewhere (a parent
that calls ``F.linear(x, child.weight)``, a head that uses the embedding) calls ``__torch_dispatch__``, which
reads the values onto the device of the other operands. So an offloaded weight is never uninitialized memory.

It reports ``device(type="meta")``, by which existing code recognizes offloaded weights.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch._utils import _rebuild_parameter
from torch.utils._pytree import tree_leaves, tree_map_only

from accelerate.offload.hooks import _compiler_disable
from accelerate.offload.tensor_source import TensorSource, TensorViewSource

_aten: Any = torch.ops.aten
_VIEWS_OF_ALL = (_aten.detach.default, _aten.alias.default)


class OffloadedTensor(torch.Tensor):
    """The stand-in for a weight.

    Args:
        source: where the values are.
        device: where they are brought when no operand says so: the device that its module computes on.
        strides: of the values, if they are not contiguous.
    """

    source: TensorSource
    execution_device: torch.device
    # Results are plain tensors: torch must not make them look like their operands.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]
    # Torch asks this one to learn whether there are values, as when it loads a state dict; there are.
    is_meta = property(lambda _: False)  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(
        cls, source: TensorSource, device: torch.device, strides: tuple[int, ...] | None = None
    ) -> OffloadedTensor:
        meta = torch.device("meta")
        with torch.inference_mode(False):  # views of an ordinary tensor are ordinary tensors
            stand_in: Any = torch.Tensor._make_wrapper_subclass(
                cls, source.shape, strides, dtype=source.dtype, device=meta
            )
        stand_in.source, stand_in.execution_device = source, device
        return stand_in

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"OffloadedTensor({self.source.name!r}, {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        # The memo keeps a hook's mapping and the stand-ins over it together; files are not copied.
        stand_in = memo[id(self)] = make_stand_in(
            self, copy.deepcopy(self.source, memo), self.execution_device
        )
        return stand_in

    def __setitem__(self, index: Any, value: Any) -> None:
        # Torch would make a tensor of a number on "this" device, where it has no value.
        super().__setitem__(index, torch.as_tensor(value, dtype=self.dtype))

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array."""
        return self.source.host_tensor().detach().numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as numbers."""
        return self.source.host_tensor().tolist()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle an ordinary tensor: values are read when it is written, one tensor at a time."""
        value = self.source.host_tensor().detach()
        if isinstance(self, nn.Parameter):
            return _rebuild_parameter, (value, self.requires_grad, OrderedDict())
        return value.__reduce_ex__(protocol)

    @classmethod
    @_compiler_disable
    def __torch_dispatch__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on stand-ins, below autograd."""
        kwargs = kwargs or {}
        if func in _VIEWS_OF_ALL:
            return OffloadedTensor(args[0].source, args[0].execution_device)
        if func is _aten._to_copy.default and kwargs.get("device") is not None:
            return func(args[0].source.host_tensor(), **kwargs)  # straight to where it is wanted
        if _returns_views(func) and isinstance(args[0], OffloadedTensor):
            return _stand_ins_for_views(args[0], func(args[0].source.host_tensor(), *args[1:], **kwargs))
        if func._schema.is_mutable and any(map(_is_offloaded, _written_arguments(func, args, kwargs))):
            return _run_in_place(func, args, kwargs)
        device = _operand_device(args, kwargs)

        def real(tensor: OffloadedTensor) -> torch.Tensor:
            return tensor.source.read(device or tensor.execution_device)

        return func(
            *tree_map_only(OffloadedTensor, real, args), **tree_map_only(OffloadedTensor, real, kwargs)
        )


def _is_offloaded(value: object) -> bool:
    return isinstance(value, OffloadedTensor)


def _operand_device(args: Any, kwargs: Any) -> torch.device | None:
    """Return the device of the first real operand that has dimensions; scalars go anywhere."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and not _is_offloaded(leaf) and leaf.ndim:
            return leaf.device
    return None


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes to."""
    arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    return [arguments[a.name] for a in func._schema.arguments if a.is_write and a.name in arguments]


@functools.cache
def _returns_views(func: Any) -> bool:
    """Return True when an operation always returns views; one that may also copy does not count."""
    aliases = [result.alias_info for result in func._schema.returns]
    views = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
    return views and not torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )


def _stand_ins_for_views(whole: OffloadedTensor, views: Any) -> Any:
    """Return stand-ins for views of a weight, so that what is written to them is not lost."""

    def stand_in(view: torch.Tensor) -> OffloadedTensor:
        return OffloadedTensor(TensorViewSource(whole.source, view), whole.execution_device, view.stride())

    return tree_map_only(torch.Tensor, stand_in, views)


def _run_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an in-place operation on the host, and write back; weights in files are refused."""
    changed = {id(t): (t, t.source) for t in _written_arguments(func, args, kwargs) if _is_offloaded(t)}
    if func is _aten.copy_.default and source_of(args[1]) is args[0].source:
        return args[0]
    values: dict[int, torch.Tensor] = {}
    for key, (_, source) in changed.items():
        if not source.in_memory:
            source.write(torch.empty(0))  # says why not
        values[key] = source.host_tensor()

    def host(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in values:
            return values[id(tensor)]
        return tensor.source.host_tensor() if isinstance(tensor, OffloadedTensor) else tensor.cpu()

    result = func(*tree_map_only(torch.Tensor, host, args), **tree_map_only(torch.Tensor, host, kwargs))
    for key, (target, source) in changed.items():
        if source.host_tensor() is not values[key]:
            source.write(values[key])
        if result is values[key]:
            result = target
    return result


def make_stand_in(tensor: torch.Tensor, source: TensorSource, device: torch.device) -> OffloadedTensor:
    """Return a stand-in for a parameter or buffer; attributes that others have set on it stay.

    Args:
        tensor: the one to replace.
        source: where its values are now.
        device: where its module computes.
    """
    stand_in: Any = OffloadedTensor(source, device)
    if isinstance(tensor, nn.Parameter):
        stand_in = nn.Parameter(stand_in, requires_grad=tensor.requires_grad)
    for name, value in vars(tensor).items():
        if name not in ("source", "execution_device"):
            setattr(stand_in, name, value)
    if type(tensor) not in (torch.Tensor, nn.Parameter, OffloadedTensor):
        stand_in._kind = type(tensor)
    return stand_in


def source_of(tensor: torch.Tensor | None) -> TensorSource | None:
    """Return the source of an offloaded tensor; None for any other."""
    return tensor.source if isinstance(tensor, OffloadedTensor) else None
