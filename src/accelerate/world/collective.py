"""Collectives over trees of tensors, and over any objects. In a world of one they keep types and shapes.

Each is one exchange of letters (``letters.py``), which also carries small values; large ones follow in a
transfer of their own. Whatever the ranks disagree about is the same ``CollectiveError``, with a table of
ranks, on every rank: other operations, structures, dtypes, shapes. Dimension 0 may differ in ``gather``.
"""

# torch's signatures are partly untyped: what is unknown here is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import functools
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from accelerate.core import tree
from accelerate.core.errors import CollectiveError, SettingError
from accelerate.world import letters
from accelerate.world import world as worlds
from accelerate.world.parcel import Parcel
from accelerate.world.tensors import CannotPadNestedTensorWarning, pad_tensor, recursively_apply

F = TypeVar("F", bound=Callable[..., Any])

DistributedOperationException = CollectiveError


def size() -> int:
    """Number of processes that take part; 1 when no world is open."""
    world = worlds.current()
    return 1 if world is None else world.size


def rank() -> int:
    """This process's rank; 0 when no world is open."""
    world = worlds.current()
    return 0 if world is None else world.rank


def barrier() -> None:
    """Waits until every rank is here, and for the work that this rank gave to its device.

    Raises:
        CollectiveError: a rank failed, ended, went elsewhere, or did not come within the timeout.
    """
    world = worlds.current()
    if world is None or world.size == 1:
        return
    if world.device.type != "cpu":
        world.hardware.synchronize()
    office = letters.office()
    with office.lock:
        office.exchange("wait_for_everyone", 0, b"", 0, _nothing)


def gather(tensor: Any) -> Any:
    """Every rank's tensors, joined along dimension 0 in rank order, on every rank.

    Args:
        tensor: a tensor, or a tree of tensors with the same structure on all ranks. Scalars come back with
            shape ``(world size,)``. Dimension 0 may differ between ranks.

    Raises:
        CollectiveError: structure, dtype, number of dimensions or a later dimension differ between ranks.
        PrepareError: a leaf is not a tensor.
    """
    if size() == 1:
        return recursively_apply(_at_least_1d, tensor, error_on_other_type=True)
    parcel = Parcel.of("gather", tensor)
    with parcel.office.lock:
        form = parcel.repeat()
        if form is not None:
            return parcel.rebuilt([_joined(parts) for parts in form.parts])
        mail = parcel.send()
        parcel.check(mail, ragged=True)
        return parcel.rebuilt([_gathered(parcel, mail, index) for index in range(len(parcel.leaves))])


def _at_least_1d(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def _joined(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The ranks' values as a new tensor."""
    return torch.cat(parts) if parts[0].dim() else torch.stack(parts)


def _gathered(parcel: Parcel, mail: letters.Mail, index: int) -> torch.Tensor:
    if mail.carried:
        return _joined(parcel.values(mail, index))
    leaf = _at_least_1d(parcel.leaves[index])
    lengths = [(*parcel.shape(mail, rank, index), 1)[0] for rank in range(parcel.office.size)]
    longest = max(lengths)
    joined = _all_gather(pad_tensor(leaf, 0, longest), parcel.office)
    if min(lengths) == longest:
        return joined
    return torch.cat([part[:n] for part, n in zip(joined.split(longest), lengths, strict=True)])


def _all_gather(tensor: torch.Tensor, office: letters.Office) -> torch.Tensor:
    """Equal shapes of all ranks joined along dimension 0."""
    send = tensor.contiguous()
    out = send.new_empty((office.size * send.shape[0], *send.shape[1:]))
    if send.numel() == 0:
        return out
    if send.device.type == "cpu":
        office.all_gather(out.view(-1).view(torch.uint8), send.view(-1).view(torch.uint8), "gather")
        return out
    # Renamed in torch 2.13, where the old name warns.
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(_wire(out), _wire(send))
    return out


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a dtype every back end can move: 8-bit floats travel as bytes."""
    return tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def gather_tensor_shape(tensor: torch.Tensor) -> list[tuple[int, ...]]:
    """The shapes that ``tensor`` has on the ranks, in rank order."""
    if size() == 1:
        return [tuple(tensor.shape)]
    parcel = Parcel.of("gather_tensor_shape", tensor)
    with parcel.office.lock:
        mail = parcel.send(values=False)
        return [parcel.shape(mail, rank, 0) for rank in range(parcel.office.size)]


def gather_object(object: Any) -> Any:
    """The lists of all ranks as one flat list, in rank order; in a world of one the object itself.

    Args:
        object: a list of picklable items (any iterable).
    """
    if size() == 1:
        return object
    return [item for part in all_objects(object, "gather_object") for item in part]


def all_objects(value: Any, operation: str = "all_objects", label: str = "") -> list[Any]:
    """One picklable value per rank, in rank order.

    Args:
        value: this rank's.
        operation: what it is for; the ranks must agree.
        label: what errors call the operation; it may differ between ranks.

    Raises:
        CollectiveError: a rank's value cannot be pickled; and see ``barrier``.
    """
    if size() == 1:
        return [value]
    office = letters.office()
    with office.lock:
        mail = _send_object(office, operation, value, label=label)
        return [pickle.loads(mail.body(rank)) for rank in range(office.size)]


def _send_object(
    office: letters.Office, operation: str, value: Any, *, sends: bool = True, label: str = ""
) -> letters.Mail:
    """An exchange of pickled values, of which some ranks may send none."""
    problem, data = None, b""
    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL) if sends else b""
    except Exception as error:
        # Whatever the classes of the user raise: the others must not wait for it.
        _say_why(office, operation, label, f"{type(error).__name__}: {error}")
        raise

    def fill(letter: bytearray, start: int) -> None:
        letter[start : start + len(data)] = data

    mail = office.exchange(operation, 0, b"", len(data), fill, any_size=True, label=label)
    problem = next((r for r in range(office.size) if mail.lengths[r]), None)
    if problem is not None:
        raise CollectiveError(
            f"rank {problem} cannot send its object in {operation}", why=mail.description(problem).decode()
        )
    return mail


def _say_why(office: letters.Office, operation: str, label: str, why: str) -> None:
    office.exchange(operation, 0, why[:1000].encode(), 0, _nothing, any_size=True, label=label)


def _nothing(letter: bytearray, start: int) -> None:
    """No values."""


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """``tensor`` (any tree) with the values of rank ``from_process``, in place.

    Raises:
        CollectiveError: structure, dtypes or shapes differ between ranks.
        PrepareError: a leaf is not a tensor.
    """
    if size() == 1:
        return recursively_apply(lambda leaf: leaf, tensor, error_on_other_type=True)
    parcel = Parcel.of("broadcast", tensor)
    with parcel.office.lock:
        mail = parcel.send(values=parcel.office.rank == from_process)
        parcel.check(mail)
        for index, leaf in enumerate(parcel.leaves):
            if mail.carried:
                leaf.copy_(parcel.unpacked(mail, from_process, index))
            elif leaf.numel():
                _broadcast_large(parcel.office, leaf, from_process)
    return tensor


def _broadcast_large(office: letters.Office, leaf: torch.Tensor, source: int) -> None:
    send = leaf.contiguous()
    if leaf.device.type == "cpu":
        office.broadcast(send.view(-1).view(torch.uint8), source, "broadcast")
    else:
        dist.broadcast(_wire(send), src=source)
    if send.data_ptr() != leaf.data_ptr():
        leaf.copy_(send)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replaces the items of ``object_list``, in place, by those of rank ``from_process``."""
    if size() > 1:
        object_list[:] = agree(list(object_list), from_process, "broadcast_object_list")
    return object_list


def agree(value: Any, from_process: int = 0, operation: str = "agree") -> Any:
    """One picklable value of rank ``from_process``, on every rank."""
    if size() == 1:
        return value
    office = letters.office()
    with office.lock:
        mail = _send_object(office, operation, value, sends=office.rank == from_process)
        return pickle.loads(mail.body(from_process))


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """The element-wise sum or mean over ranks, times ``scale``, as new tensors.

    Args:
        tensor: a tensor or a tree of tensors with equal shapes on all ranks.
        reduction: ``"sum"``, ``"mean"`` or ``"none"`` (only scaled).
        scale: factor on the result.

    Raises:
        SettingError: another reduction.
        CollectiveError: structure, dtypes or shapes differ between ranks.
    """
    if reduction not in ("sum", "mean", "none"):
        raise SettingError(f"reduction {reduction!r} is unknown", fix="use 'sum', 'mean' or 'none'")

    def finished(total: torch.Tensor) -> torch.Tensor:
        if reduction == "mean" and size() > 1:
            total = total / size()
        return total if scale == 1.0 else total * scale

    if reduction == "none" or size() == 1:
        return recursively_apply(
            lambda leaf: finished(leaf.detach().clone()), tensor, error_on_other_type=True
        )
    parcel = Parcel.of("reduce", tensor)
    with parcel.office.lock:
        form = parcel.repeat()
        if form is not None:
            return parcel.rebuilt([finished(_total(parts)) for parts in form.parts])
        mail = parcel.send()
        parcel.check(mail)
        return parcel.rebuilt([finished(_summed(parcel, mail, index)) for index in range(len(parcel.leaves))])


def _total(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The sum in rank order, so that it is the same on all ranks and in every run."""
    return torch.stack(parts).sum(0, dtype=parts[0].dtype)


def _summed(parcel: Parcel, mail: letters.Mail, index: int) -> torch.Tensor:
    leaf = parcel.leaves[index]
    if mail.carried:
        return _total(parcel.values(mail, index))
    total = leaf.clone(memory_format=torch.contiguous_format)
    if total.device.type == "cpu":
        parts = torch.view_as_real(total) if total.is_complex() else total
        if parts.numel():
            parcel.office.all_reduce(parts, "reduce")
    else:
        dist.all_reduce(total)
    return total


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """``tensor`` (any tree) with ``dim`` grown to its greatest length on any rank.

    Args:
        tensor: a tensor or a tree of tensors.
        dim: the dimension that may differ; tensors that do not have it are left alone.
        pad_index: the value that fills.
        pad_first: fill at the beginning instead of the end.

    Raises:
        CollectiveError: structure or numbers of dimensions differ between ranks.
    """
    if size() == 1:
        return recursively_apply(lambda leaf: leaf, tensor, error_on_other_type=True)
    parcel = Parcel.of("pad_across_processes", tensor)
    with parcel.office.lock:
        mail = parcel.send(values=False)
        every = [
            [parcel.shape(mail, r, i) for r in range(parcel.office.size)] for i in range(len(parcel.leaves))
        ]
    padded: list[torch.Tensor] = []
    for leaf, shapes in zip(parcel.leaves, every, strict=True):
        place = dim + leaf.dim() if dim < 0 else dim
        if leaf.is_nested:
            warnings.warn("a nested tensor is not padded", CannotPadNestedTensorWarning, stacklevel=2)
        elif 0 <= place < leaf.dim():
            longest = max(shape[place] if place < len(shape) else 0 for shape in shapes)
            leaf = pad_tensor(leaf, place, longest, pad_index, pad_first)
        padded.append(leaf)
    return parcel.rebuilt(padded)


def verify_operation(function: F) -> F:
    """In debug mode, a collective that first compares the shapes of its tensors on all ranks."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        world = worlds.current()
        if world is not None and world.debug and world.size > 1:
            data = args[0] if args else kwargs.get("tensor", kwargs.get("object"))
            shapes = [(p, tuple(t.shape)) for p, t in tree.leaves(data) if isinstance(t, torch.Tensor)]
            _compare(function.__name__, all_objects(shapes, f"shapes for {function.__name__}"))
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
