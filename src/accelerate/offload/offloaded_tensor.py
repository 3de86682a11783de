"""Offloaded weights: the stand-in of one, and the source of its values.

The parameter of an offloaded module is a stand-in between forwards: a tensor on the meta device that reads
its values when it is used. Code that reads it elsewhere (a parent that calls ``F.linear(x, child.weight)``,
a head that uses the embedding) calls ``__torch_dispatch__``, which reads the values onto the device of the
other operands. So an offloaded weight is never uninitialized memory. It reports ``device(type="meta")``, by
which existing code recognizes offloaded weights.

A source is asked for a tensor on the host or on a device, as often as somebody needs it. It keeps nothing.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from accelerate.core.errors import OffloadError
from accelerate.core.torch_internals import require

require("tensors that are offloaded")

from torch._compile import _disable_dynamo  # noqa: E402
from torch._utils import _rebuild_parameter  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: E402

F = TypeVar("F", bound=Callable[..., Any])

# The attribute of a tensor that is mapped from a file. It describes its memory: copies do not get it.
FILE_MAPPING = "_mapped_from"
_aten: Any = torch.ops.aten
_TENSOR_DATA: Any = torch.Tensor.data
_VIEWS_OF_ALL = (_aten.detach.default, _aten.alias.default)


# --------------------------------------------------------------------------------------------------- sources


class TensorSource:
    """The storage of one weight's values: memory or a file.

    Attributes:
        name: the weight's full name in its model, for errors.
        shape, dtype: of the whole tensor.
        whole: the source that has the values, of a view or a cast of it.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    whole: Any = None
    _changes = 0

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def in_memory(self) -> bool:
        """True when the values are in memory, and so can be changed."""
        return type(self).write is not TensorSource.write if self.whole is None else self.whole.in_memory

    @property
    def changes(self) -> Any:
        """The number of changes of the values, and where they are: a copy of others is out of date."""
        return self._changes if self.whole is None else self.whole.changes

    def count_change(self) -> None:
        """Record that the values were changed."""
        if self.whole is None:
            self._changes += 1
        else:
            self.whole.count_change()

    def host_tensor(self) -> torch.Tensor:
        """Return the values on the CPU: their own memory where there is one, else a new or mapped tensor."""
        raise NotImplementedError

    def read(self, device: torch.device) -> torch.Tensor:
        """Return the values on ``device``; on the CPU this may be ``host_tensor()`` itself."""
        return self.host_tensor().to(device)

    def write(self, value: torch.Tensor) -> None:
        """Replace the values.

        Raises:
            OffloadError: they are in a file, which is somebody's checkpoint.
        """
        raise OffloadError(
            f"{self.name} is offloaded to a file and cannot be changed in place",
            why="the file is a checkpoint, and other programs may be reading it",
            fix="bring the model to memory first: remove_hook_from_submodules(model)",
        )


def _fit_value(source: TensorSource, value: torch.Tensor) -> torch.Tensor:
    """Return a value that a program may have assigned, in the dtype of its source.

    Raises:
        OffloadError: it has another shape.
    """
    if value.shape != source.shape:
        raise OffloadError(
            f"the offloaded values of {source.name} have the shape {list(value.shape)}, "
            f"and the module expects {list(source.shape)}",
            why="they belong to another version of the model",
        )
    return value.to(source.dtype) if value.is_floating_point() else value


def check_replacement(name: str, old: TensorSource | torch.Tensor, new: torch.Tensor) -> None:
    """Raise OffloadError unless a weight can get the values of a tensor: of its shape and kind of numbers."""
    is_alike = old.dtype == new.dtype or (old.dtype.is_floating_point and new.is_floating_point())
    if old.shape != new.shape or not is_alike:
        raise OffloadError(
            f"{name} is offloaded as {old.dtype} of shape {list(old.shape)}, "
            f"and cannot become {new.dtype} of shape {list(new.shape)}",
            why="it has its place in memory that is copied to the device as one",
            fix="take the hooks off, change the weight, and dispatch the model again",
        )


class HostMemoryWeightSource(TensorSource):
    """A weight that lies in host memory, as a tensor of its own or as a view of a pinned block."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.tensor = name, tensor
        self.shape, self.dtype = tensor.shape, tensor.dtype

    @property
    def changes(self) -> Any:
        """The number of changes, and the memory of the tensor: programs assign ``tensor.data``."""
        return self._changes, self.tensor.data_ptr(), self.tensor.stride()

    def host_tensor(self) -> torch.Tensor:
        """Return the tensor itself; one that a program has given another dtype is cast.

        Raises:
            OffloadError: it has been given another shape.
        """
        return _fit_value(self, self.tensor)

    def write(self, value: torch.Tensor) -> None:
        """Copy ``value`` into the tensor."""
        if value is not self.tensor:
            with torch.no_grad():
                self.tensor.copy_(value)


class TensorViewSource(TensorSource):
    """A view of another source's values: what is written to it is written there.

    Args:
        whole: the other source; its values may be in other memory each time, as those that are cast are.
        make_view: makes the view of its values.
        like: a tensor of the view's shape and dtype.
    """

    def __init__(
        self, whole: TensorSource, make_view: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor
    ) -> None:
        self.name, self.make_view = whole.name, make_view
        self.whole = whole
        self.shape, self.dtype = like.shape, like.dtype

    def host_tensor(self) -> torch.Tensor:
        """Return the view of the values as they are now."""
        return self.make_view(self.whole.host_tensor())

    def write(self, value: torch.Tensor) -> None:
        """Copy ``value`` into the view.

        Raises:
            OffloadError: the whole is in a file.
        """
        values = self.whole.host_tensor()
        with torch.no_grad():
            if self.in_memory:
                self.make_view(values).copy_(value)
        self.whole.write(values)


class CastSource(TensorSource):
    """Another source's values in another dtype: they stay where they are, and are cast when they are read.

    Args:
        whole: the other source.
        dtype: of the values.
    """

    def __init__(self, whole: TensorSource, dtype: torch.dtype) -> None:
        self.name, self.shape, self.dtype, self.whole = whole.name, whole.shape, dtype, whole

    def host_tensor(self) -> torch.Tensor:
        """Return the values, cast."""
        return self.whole.host_tensor().detach().to(self.dtype)

    def write(self, value: torch.Tensor) -> None:
        """Replace the values, in the dtype that they are kept in.

        Raises:
            OffloadError: they are in a file.
        """
        self.whole.write(value)


def is_exact_cast(dtype: torch.dtype, wider: torch.dtype) -> bool:
    """Return True when ``wider`` has every value of ``dtype``."""
    if not (dtype.is_floating_point and wider.is_floating_point):
        return torch.promote_types(dtype, wider) == wider
    narrow, wide = torch.finfo(dtype), torch.finfo(wider)
    least = narrow.smallest_normal * narrow.eps, wide.smallest_normal * wide.eps
    return wide.eps <= narrow.eps and wide.max >= narrow.max and least[1] <= least[0]


def cast_source(source: TensorSource, dtype: torch.dtype) -> TensorSource:
    """Return a source of the same values in ``dtype``. A wider dtype that it had in between is left out."""
    if isinstance(source, CastSource) and is_exact_cast(source.whole.dtype, source.dtype):
        source = source.whole
    return source if source.dtype == dtype else CastSource(source, dtype)


def in_memory(weights: Mapping[str, Any], key: str) -> bool:
    """Return True when an entry of a mapping is in memory; of an unknown mapping, when it is one object."""
    ask = getattr(weights, "in_memory", None)
    return bool(ask(key)) if ask is not None else weights[key] is weights[key]


class MappingSource(TensorSource):
    """An entry of a mapping of tensors, the ``weights_map`` of a hook: read when it is asked for.

    Args:
        key: the name within the mapping.
        like: a tensor of the same shape and of the dtype that is wanted; its values do not matter.
    """

    def __init__(self, name: str, weights: Mapping[str, torch.Tensor], key: str, like: torch.Tensor) -> None:
        self.name, self.weights, self.key = name, weights, key
        self.shape, self.dtype = like.shape, like.dtype

    @property
    def in_memory(self) -> bool:
        """True when the mapping says that the entry is in memory, or returns the same tensor twice."""
        return in_memory(self.weights, self.key)

    def host_tensor(self) -> torch.Tensor:
        """Return the mapping's current value, in the dtype that is wanted.

        Raises:
            OffloadError: it has no such entry, or one of another shape.
        """
        return _fit_value(self, self._read_entry())

    def write(self, value: torch.Tensor) -> None:
        """Copy ``value`` into the mapping's tensor, if that is memory and not a file.

        Raises:
            OffloadError: the mapping reads it from a file.
        """
        if not self.in_memory:
            super().write(value)
        with torch.no_grad():
            self._read_entry().copy_(value)

    def _read_entry(self) -> torch.Tensor:
        try:
            value: Any = self.weights[self.key]
        except KeyError as error:
            raise OffloadError(
                f"the values of {self.name} are not there",
                why=f"the mapping of offloaded weights has no entry {self.key!r}",
                fix="dispatch the model again",
            ) from error
        return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")


# --------------------------------------------------------------------------------------------- mapped tensors

# A tensor that is mapped from a file knows its source. The mapping is private: what is written to the tensor
# stays in memory. Torch counts most writes as versions of the tensor, but none through ``.data``: a tensor is
# dropped for its file only after its bytes were compared.


def set_file_source(tensor: Any, source: TensorSource) -> None:
    """Record that a tensor on the CPU is mapped from a file."""
    setattr(tensor, FILE_MAPPING, (source, _memory_state(tensor)))


def mapped_source(tensor: torch.Tensor) -> TensorSource | None:
    """Return the source that a tensor is mapped from, unless it has other memory now, or a new version."""
    source, state = getattr(tensor, FILE_MAPPING, (None, None))
    is_host = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return source if source is not None and is_host and state == _memory_state(tensor) else None


def version_of(tensor: torch.Tensor) -> int | None:
    """Return how often torch has counted a write to a tensor; None for one made in inference mode."""
    if tensor.is_inference():
        return None
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode, and its data were set outside
        return None


def _memory_state(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the memory that a tensor has, and its version."""
    return version_of(tensor), tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def unchanged_source(tensor: torch.Tensor) -> TensorSource | None:
    """Return the source that a tensor is mapped from if the file has the same bytes, else None."""
    source = mapped_source(tensor)
    if source is None:
        return None
    values = source.host_tensor().detach()
    if values.data_ptr() == tensor.data_ptr():  # the source holds this memory, with what was written to it
        return source
    return source if has_same_bytes(values, tensor.detach()) else None


def has_same_bytes(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True when two tensors have the same bytes; NaN is equal to itself."""
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (value, other)))


# ------------------------------------------------------------------------------------------------- stand-ins


def _compiler_disable(fn: F) -> F:
    """Exclude a function from ``torch.compile``; outside of a compilation it costs one test."""
    break_graph: Any = _disable_dynamo(fn)  # imports the compiler when it is first called

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return break_graph(*args, **kwargs)
        return fn(*args, **kwargs)

    return wrapper  # pyright: ignore[reportReturnType]


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
    __torch_function__: Any = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]
    # Torch asks this one to learn whether there are values, as when it loads a state dict; there are.
    is_meta: Any = property(lambda _: False)  # pyright: ignore[reportAssignmentType]

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

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The weight without its history; the same values in another dtype can be set, or others.

        Where only the dtype differs, the values stay as they are and are cast when they are read. Others are
        written to where the weight is, in the dtype that it is kept in. A meta tensor sets the dtype alone.
        """
        return _TENSOR_DATA.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        own = self.source
        check_replacement(own.name, own, value)
        source = cast_source(own, value.dtype)
        if source_of(value) is not own and not value.is_meta:
            value = value.detach().cpu()
            if not has_same_bytes(value, source.host_tensor().detach()):
                source.write(value.clone())  # it may be a view of the values before
                source.count_change()
        _TENSOR_DATA.__set__(self, OffloadedTensor(source, self.execution_device))
        self.source = source

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"OffloadedTensor({self.source.name!r}, {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        # The memo keeps a hook's mapping and the stand-ins over it together; files are not copied.
        source = copy.deepcopy(self.source, memo)
        return memo.setdefault(id(self), make_stand_in(self, source, self.execution_device))

    def __setitem__(self, index: Any, value: Any) -> None:
        # Torch would make a tensor of a number on "this" device, where it has no value.
        device = value.device if isinstance(value, torch.Tensor) else "cpu"
        super().__setitem__(index, torch.as_tensor(value, dtype=self.dtype, device=device))

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
            return _stand_ins_for_views(args[0], lambda whole: func(whole, *args[1:], **kwargs))
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


def _stand_ins_for_views(whole: OffloadedTensor, make_views: Callable[[torch.Tensor], Any]) -> Any:
    """Return stand-ins for views of a weight, so that what is written to them is not lost.

    Args:
        whole: the weight.
        make_views: makes the views of its values: a tensor, or several in a list.
    """

    def stand_in(number: int, view: torch.Tensor) -> OffloadedTensor:
        source = TensorViewSource(whole.source, lambda values: tree_leaves(make_views(values))[number], view)
        return OffloadedTensor(source, whole.execution_device, view.stride())

    numbers = itertools.count()
    views = make_views(whole.source.host_tensor())
    return tree_map_only(torch.Tensor, lambda view: stand_in(next(numbers), view), views)


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
        source.count_change()
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
        if name not in ("source", "execution_device", FILE_MAPPING):
            # Values that a weight also has under another name (CB of 8-bit layers) are not held.
            setattr(stand_in, name, None if name == "CB" else value)
    if type(tensor) not in (torch.Tensor, nn.Parameter, OffloadedTensor):
        stand_in._kind = type(tensor)
    return stand_in


def source_of(tensor: torch.Tensor | None) -> TensorSource | None:
    """Return the source of an offloaded tensor; None for any other."""
    return tensor.source if isinstance(tensor, OffloadedTensor) else None
