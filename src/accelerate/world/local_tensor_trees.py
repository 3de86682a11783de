"""Trees of tensors: move, measure, slice, join, pad. No communication here."""

# torch's signatures are partly untyped: what is unknown here is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import update_wrapper
from types import MethodType
from typing import Any

import torch

from accelerate.core import tree
from accelerate.core.errors import PrepareError
from accelerate.core.tree import is_namedtuple as is_namedtuple

_HALF_PRECISION = (torch.float16, torch.bfloat16)


@dataclass
class TensorInformation:
    """Shape and dtype of a tensor that lives in another process."""

    shape: torch.Size
    dtype: torch.dtype


class CannotPadNestedTensorWarning(UserWarning):
    """A nested (jagged) tensor was left as it is where padding was asked for."""


def is_torch_tensor(tensor: Any) -> bool:
    """Return True for a tensor."""
    return isinstance(tensor, torch.Tensor)


def local_tensor(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a ``DTensor``, any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def is_tensor_information(tensor_info: Any) -> bool:
    """Return True for a ``TensorInformation``."""
    return isinstance(tensor_info, TensorInformation)


def honor_type(obj: Any, generator: Iterator[Any]) -> Any:
    """Return a list, tuple or named tuple of ``obj``'s type with the items of ``generator``."""
    return tree.make_same_type(obj, generator)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply ``func(leaf, *args, **kwargs)`` to every leaf of ``data`` that passes ``test_type``.

    Raises:
        PrepareError: ``error_on_other_type`` and a leaf is of another type; None is always left alone.
    """

    def visit(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type and leaf is not None:
            raise unsupported_leaf_error(getattr(func, "__name__", "this operation"), leaf)
        return leaf

    return tree.map_tree(visit, data)


def unsupported_leaf_error(operation: str, leaf: Any) -> PrepareError:
    """Return the error for a leaf that an operation on tensors cannot take."""
    if isinstance(leaf, torch.Tensor):
        return PrepareError(
            f"a tensor of layout {leaf.layout} cannot go through {operation}",
            why="what is sent is the memory of dense tensors",
            fix="give tensor.to_dense()",
        )
    return PrepareError(
        f"a {type(leaf).__name__} cannot go through {operation}",
        why="it works on tensors, and on lists, tuples, dicts and dataclasses of tensors",
        fix="for any other object use gather_object or broadcast_object_list",
    )


def send_to_device(
    tensor: Any,
    device: torch.device | str | int | None,
    non_blocking: bool = False,
    skip_keys: str | list[str] | None = None,
) -> Any:
    """Move ``tensor`` (any tree) to ``device``; other objects with a ``to`` method are moved by it.

    Args:
        tensor: a tensor or a tree of tensors.
        device: the target device; a ``to`` method gets it as it is. None leaves tensors where they are.
        non_blocking: do not wait for the copy (needs pinned host memory to have an effect).
        skip_keys: keys of mappings, at any depth, whose values stay where they are.
    """
    skipped_keys = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())
    return _move(tensor, device, non_blocking, skipped_keys)


def _move(value: Any, device: Any, non_blocking: bool, kept: tuple[str, ...]) -> Any:
    if isinstance(value, torch.Tensor):
        # Comparing devices costs a tenth of a call that then moves nothing.
        return value if value.device == device else value.to(device, non_blocking=non_blocking)
    if type(value) in (list, tuple):
        return type(value)([_move(item, device, non_blocking, kept) for item in value])
    if hasattr(value, "to") and not isinstance(value, type):
        try:
            return value.to(device, non_blocking=non_blocking)
        except TypeError:  # its `to` takes only the device
            return value.to(device)
    if tree.is_mapping(value):
        moved = {
            key: item if key in kept else _move(item, device, non_blocking, kept)
            for key, item in value.items()
        }
        return tree.make_mapping_like(value, moved)
    if tree.is_sequence(value):
        return tree.make_same_type(value, [_move(item, device, non_blocking, kept) for item in value])
    return value


def get_data_structure(data: Any) -> Any:
    """Return ``data`` with every tensor replaced by its ``TensorInformation``."""
    return recursively_apply(lambda t: TensorInformation(shape=t.shape, dtype=t.dtype), data)


def get_shape(data: Any) -> Any:
    """Return ``data`` with every tensor replaced by its shape as a list."""
    return recursively_apply(lambda t: list(t.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Create uninitialized tensors for a tree of ``TensorInformation``."""

    def make(information: TensorInformation) -> torch.Tensor:
        return torch.empty(*information.shape, dtype=information.dtype)

    # TensorInformation is a dataclass: it is a leaf here, not a container.
    if is_tensor_information(data_structure):
        return make(data_structure)
    if isinstance(data_structure, Mapping):
        tensors = {key: initialize_tensors(value) for key, value in data_structure.items()}
        return tree.make_mapping_like(data_structure, tensors)
    if isinstance(data_structure, list | tuple):
        return tree.make_same_type(data_structure, [initialize_tensors(v) for v in data_structure])
    return data_structure


def find_batch_size(data: Any) -> int:
    """Return the length of dimension 0 of the first tensor in ``data``.

    Raises:
        PrepareError: no tensor with a first dimension is in it.
    """
    size = ignorant_find_batch_size(data)
    if size is None:
        raise PrepareError(
            f"no batch size can be found in a {type(data).__name__}",
            why="no tensor with a first dimension is in it",
        )
    return size


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return ``find_batch_size``, or None where it raises."""
    first = tree.find_leaf(lambda leaf: isinstance(leaf, torch.Tensor) and leaf.dim() > 0, data)
    return None if first is None else first.shape[0]


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in ``data``, None without one."""
    first = tree.find_leaf(is_torch_tensor, data)
    return None if first is None else first.device


def listify(data: Any) -> Any:
    """Return ``data`` with every tensor as a (nested) list of Python numbers."""

    def plain(tensor: torch.Tensor) -> Any:
        host = tensor.detach().cpu()
        return (host.float() if host.dtype == torch.bfloat16 else host).tolist()

    return recursively_apply(plain, data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Concatenate a sequence of equal trees, tensor by tensor, along ``dim``.

    A single item that is no tensor is returned as it is.

    Raises:
        PrepareError: several items are not tensors, lists, tuples or mappings of tensors.
    """
    first = data[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(data), dim=dim)
    if isinstance(first, list | tuple):
        return tree.make_same_type(
            first, [concatenate([d[i] for d in data], dim=dim) for i in range(len(first))]
        )
    if isinstance(first, Mapping):
        return tree.make_mapping_like(
            first, {key: concatenate([d[key] for d in data], dim=dim) for key in first}
        )
    if len(data) == 1:
        return first
    raise PrepareError(
        f"values of type {type(first).__name__} cannot be concatenated", why="only tensors can"
    )


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Slice every tensor of ``data`` along dimension 0 (the two last arguments are not used)."""
    return recursively_apply(lambda t: t[tensor_slice], data)


def convert_to_fp32(tensor: Any) -> Any:
    """Convert the half precision tensors of ``tensor`` (any tree) to float32."""

    if isinstance(tensor, torch.Tensor):  # most models give one: no walk for it
        return tensor.float() if tensor.dtype in _HALF_PRECISION else tensor
    return recursively_apply(convert_to_fp32, tensor)


class ConvertOutputsToFp32:
    """A forward whose half precision outputs come out in float32; can be pickled."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward, ("__name__", "__doc__", "__module__"), ())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward and upcast its outputs."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        """Bind to an instance, as a function in the body of a class does."""
        return self if instance is None else MethodType(self, instance)

    def __getstate__(self) -> dict[str, Any]:
        """Return the argument of ``__init__``."""
        return {"model_forward": self.model_forward}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the object by ``__init__``."""
        self.__init__(state["model_forward"])


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``model_forward`` so that its half precision outputs become float32; the result can be pickled."""
    return ConvertOutputsToFp32(model_forward)


def pad_tensor(
    tensor: torch.Tensor, dim: int, length: int, value: float = 0, first: bool = False
) -> torch.Tensor:
    """Pad ``dim`` of ``tensor`` to ``length`` with ``value``, at the end or (``first``) the beginning."""
    missing = length - tensor.shape[dim]
    if missing <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    filler = tensor.new_full(shape, value)
    return torch.cat([filler, tensor] if first else [tensor, filler], dim=dim)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Pad a batch along ``dim`` with zeros to a multiple of ``num_processes``."""
    missing = -batch_size % num_processes

    def grow(leaf: torch.Tensor) -> torch.Tensor:
        if missing == 0 or leaf.dim() == 0 or leaf.shape[dim] != batch_size:
            return leaf
        return pad_tensor(leaf, dim, batch_size + missing)

    return recursively_apply(grow, tensor)
