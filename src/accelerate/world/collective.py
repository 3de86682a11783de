"""Collectives over trees of tensors, and over any objects. In a world of one they keep types and shapes.

Shapes are agreed before data moves: dimension 0 may differ between ranks (it is padded on the way), anything
else that differs is the same ``CollectiveError``, with a table of ranks, on every rank. Tensors are made
contiguous before they are sent, since gloo refuses others on one side only and the peer would wait for ever.
"""

# torch's signatures are partly untyped: what is unknown here is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from accelerate.core import tree
from accelerate.core.errors import CollectiveError, PrepareError, SettingError
from accelerate.world import world as worlds
from accelerate.world.tensors import CannotPadNestedTensorWarning, pad_tensor, recursively_apply

F = TypeVar("F", bound=Callable[..., Any])

DistributedOperationException = CollectiveError

# A letter is a head of int64s (dtype code, number of dimensions, the dimensions) and a body of bytes.
# The head keeps the body aligned for every dtype.
_MAX_DIMS = 14
_HEAD = 8 * (_MAX_DIMS + 2)
_LETTER = 4096
_DTYPES: tuple[torch.dtype, ...] = tuple(
    sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
)
_DTYPE_CODE = {dtype: code for code, dtype in enumerate(_DTYPES)}


def size() -> int:
    """Number of processes that take part; 1 when no world is open."""
    world = worlds.current()
    return 1 if world is None else world.size


def rank() -> int:
    """This process's rank; 0 when no world is open."""
    world = worlds.current()
    return 0 if world is None else world.rank


def barrier() -> None:
    """Waits until every rank is here.

    Raises:
        RuntimeError: torch's own, when the group's timeout passes.
    """
    world = worlds.current()
    if world is None or world.size == 1:
        return
    if world.device.type == "cpu":
        dist.barrier()
    else:
        dist.barrier(device_ids=[world.device.index or 0])


def gather(tensor: Any) -> Any:
    """Every rank's tensors, joined along dimension 0 in rank order, on every rank.

    Args:
        tensor: a tensor, or a tree of tensors with the same structure on all ranks. Scalars come back with
            shape ``(world size,)``. Dimension 0 may differ between ranks.

    Raises:
        CollectiveError: dtype, number of dimensions or a later dimension differ between ranks.
        PrepareError: a leaf is not a tensor.
    """
    return recursively_apply(_gather_one, tensor, error_on_other_type=True)


def _gather_one(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    if size() == 1:
        return tensor
    every = _exchange(tensor.detach())
    _check_agreement(every)
    if all(letter.body is not None for letter in every):
        return torch.cat([letter.tensor() for letter in every])
    lengths = [letter.shape[0] for letter in every]
    longest = max(lengths)
    joined = _all_gather(pad_tensor(tensor.detach(), 0, longest), len(every))
    if min(lengths) == longest:
        return joined
    return torch.cat([part[:n] for part, n in zip(joined.split(longest), lengths, strict=True)])


def _all_gather(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Equal shapes of all ranks joined along dimension 0."""
    send = tensor.contiguous()
    wire = _wire(send)
    out = wire.new_empty((count * wire.shape[0], *wire.shape[1:]))
    # Renamed in torch 2.13, where the old name warns.
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(out, wire)
    return out.view(send.dtype) if wire.dtype != send.dtype else out


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a dtype every back end can move: 8-bit floats travel as bytes."""
    return tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def gather_tensor_shape(tensor: torch.Tensor) -> list[tuple[int, ...]]:
    """The shapes that ``tensor`` has on the ranks, in rank order."""
    if size() == 1:
        return [tuple(tensor.shape)]
    return [letter.shape for letter in _exchange(tensor)]


@dataclass(frozen=True)
class _Letter:
    """What one rank says of its tensor, with the values when they are few."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    body: torch.Tensor | None

    def tensor(self) -> torch.Tensor:
        assert self.body is not None
        return self.body.view(self.dtype).view(self.shape)


def _exchange(tensor: torch.Tensor) -> list[_Letter]:
    """Every rank's letter. They have one size, so one collective tells shapes and carries small tensors."""
    if tensor.dim() > _MAX_DIMS:
        raise CollectiveError(
            f"a tensor of {tensor.dim()} dimensions cannot be sent; the limit is {_MAX_DIMS}"
        )
    device = _metadata_device()
    head = [_DTYPE_CODE[tensor.dtype], tensor.dim(), *tensor.shape]
    letter = torch.zeros(_LETTER, dtype=torch.uint8)
    letter[:_HEAD] = torch.tensor(head + [0] * (_MAX_DIMS + 2 - len(head))).view(torch.uint8)
    room = _LETTER - _HEAD
    if tensor.device == device and 0 < tensor.nbytes <= room:
        letter[_HEAD : _HEAD + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
    every = _all_gather(letter.to(device)[None], size())
    letters: list[_Letter] = []
    for row, said in zip(every, every[:, :_HEAD].contiguous().view(torch.int64).tolist(), strict=True):
        dtype, shape = _DTYPES[said[0]], tuple(said[2 : 2 + said[1]])
        bytes_ = math.prod(shape) * dtype.itemsize
        carried = tensor.device == device and bytes_ <= room
        letters.append(_Letter(dtype, shape, row[_HEAD : _HEAD + bytes_] if carried else None))
    return letters


def _metadata_device() -> torch.device:
    """Where small host values travel: the CPU when the group serves it, so that no device waits."""
    world = worlds.current()
    assert world is not None
    backend = dist.get_backend_config()
    return torch.device("cpu") if "cpu:" in backend or world.device.type == "cpu" else world.device


def _check_agreement(every: Sequence[_Letter]) -> None:
    if len({(letter.dtype, len(letter.shape), letter.shape[1:]) for letter in every}) > 1:
        raise CollectiveError(
            "the ranks do not agree about a tensor to gather",
            why="\n       ".join(
                f"rank {r}: {letter.dtype} {letter.shape}" for r, letter in enumerate(every)
            ),
            fix="make all dimensions but the first equal: accelerator.pad_across_processes(tensor, dim=1) "
            "before gather",
        )


def gather_object(object: Any) -> Any:
    """The lists of all ranks as one flat list, in rank order; in a world of one the object itself.

    Args:
        object: a list of picklable items (any iterable).
    """
    if size() == 1:
        return object
    return [item for part in all_objects(object) for item in part]


def all_objects(value: Any) -> list[Any]:
    """One picklable value per rank, in rank order."""
    if size() == 1:
        return [value]
    every: list[Any] = [None] * size()
    dist.all_gather_object(every, value)
    return every


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """``tensor`` (any tree) with the values of rank ``from_process``; shapes must agree."""
    return recursively_apply(_broadcast_one, tensor, from_process, error_on_other_type=True)


def _broadcast_one(tensor: torch.Tensor, source: int) -> torch.Tensor:
    if size() == 1:
        return tensor
    send = tensor.detach().contiguous()
    dist.broadcast(_wire(send), src=source)
    if send.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(send)
    return tensor


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replaces the items of ``object_list``, in place, by those of rank ``from_process``."""
    if size() > 1:
        dist.broadcast_object_list(object_list, src=from_process, device=_metadata_device())
    return object_list


def agree(value: Any, from_process: int = 0) -> Any:
    """One picklable value of rank ``from_process``, on every rank."""
    return broadcast_object_list([value], from_process)[0]


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """The element-wise sum or mean over ranks, times ``scale``, as new tensors.

    Args:
        tensor: a tensor or a tree of tensors with equal shapes on all ranks.
        reduction: ``"sum"``, ``"mean"`` or ``"none"`` (only scaled).
        scale: factor on the result.

    Raises:
        SettingError: another reduction.
    """
    if reduction not in ("sum", "mean", "none"):
        raise SettingError(f"reduction {reduction!r} is unknown", fix="use 'sum', 'mean' or 'none'")

    def one(leaf: torch.Tensor) -> torch.Tensor:
        total = leaf.detach().clone(memory_format=torch.contiguous_format)
        if reduction != "none" and size() > 1:
            dist.all_reduce(total)
        if reduction == "mean" and size() > 1:
            total = total / size()
        return total if scale == 1.0 else total * scale

    return recursively_apply(one, tensor, error_on_other_type=True)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """``tensor`` (any tree) with ``dim`` grown to its greatest length on any rank.

    Args:
        tensor: a tensor or a tree of tensors.
        dim: the dimension that may differ; tensors that do not have it are left alone.
        pad_index: the value that fills.
        pad_first: fill at the beginning instead of the end.
    """

    def one(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.is_nested:
            warnings.warn("a nested tensor is not padded", CannotPadNestedTensorWarning, stacklevel=2)
            return leaf
        place = dim + leaf.dim() if dim < 0 else dim
        if size() == 1 or not 0 <= place < leaf.dim():
            return leaf
        longest = max(letter.shape[place] for letter in _exchange(leaf))
        return pad_tensor(leaf, place, longest, pad_index, pad_first)

    return recursively_apply(one, tensor, error_on_other_type=True)


def verify_operation(function: F) -> F:
    """In debug mode, a collective that first compares the shapes of its tensors on all ranks."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        world = worlds.current()
        if world is not None and world.debug and world.size > 1:
            data = args[0] if args else kwargs.get("tensor", kwargs.get("object"))
            shapes = [(p, tuple(t.shape)) for p, t in tree.leaves(data) if isinstance(t, torch.Tensor)]
            _compare(function.__name__, all_objects(shapes))
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def _compare(name: str, every: Sequence[Any]) -> None:
    if any(row != every[0] for row in every):
        table = "\n       ".join(f"rank {index}: {row}" for index, row in enumerate(every))
        raise CollectiveError(f"{name} was called with other shapes on other ranks", why=table)


def chained_operation(function: F) -> F:
    """Marks a collective that calls another; an error of the inner one keeps the outer's name in front."""

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except CollectiveError as error:
            raise CollectiveError(
                f"{function.__name__}: {error.what}", why=error.why, fix=error.fix
            ) from error

    return named  # type: ignore[return-value]


def split(items: Any, *, apply_padding: bool = False) -> Any:
    """This rank's contiguous part of a list, tuple, dict of these, or tensor.

    The parts are disjoint, complete and in order, and their sizes differ by at most one, the first ranks
    holding more.

    Args:
        items: what to split; every rank passes the same.
        apply_padding: repeat the last item so that all parts have the same length (to gather them later).

    Raises:
        PrepareError: the values of a dict have different lengths.
    """
    count, mine = size(), rank()
    if tree.is_mapping(items):
        lengths = {len(value) for value in items.values()}
        if len(lengths) > 1:
            raise PrepareError(
                f"the values of the dict to split have different lengths: {sorted(lengths)}",
                why="each process takes the same positions of every value",
            )
        return {key: split(value, apply_padding=apply_padding) for key, value in items.items()}
    if count == 1:
        return items
    length = len(items)
    share, rest = divmod(length, count)
    start = mine * share + min(mine, rest)
    part = items[start : start + share + (mine < rest)]
    if not apply_padding or length == 0:
        return part
    missing = share + (rest > 0) - len(part)
    if missing == 0:
        return part
    if isinstance(items, torch.Tensor):
        return torch.cat([part, *[items[-1:]] * missing])
    return part + type(items)(items[-1:] * missing)
