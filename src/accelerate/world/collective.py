"""Collectives over trees of tensors, and over any objects. In a world of one they keep types and shapes.

Each starts with an exchange of control messages (``control_channel.py``), which hold small values inline;
large values follow in an all-gather, all-reduce or broadcast. If operations, structures, dtypes or shapes do
not match, every rank raises the same ``CollectiveError`` with a table of ranks. Dimension 0 may differ in
``gather``. Where tensors on an accelerator must be equal in shape on all ranks (``reduce``, ``broadcast``,
``gather`` of scalars), the host waits for nothing: the ranks agree on the device (``deferred_agreement.py``).
"""

# torch's signatures are partly untyped: what is unknown here is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import functools
import hashlib
import pickle
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ContextDecorator
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from accelerate.core import tree
from accelerate.core.errors import CollectiveError, PeerError, SettingError, warn_user
from accelerate.world import control_channel
from accelerate.world import world as worlds
from accelerate.world.control_channel import GatheredControlMessages
from accelerate.world.local_tensor_trees import (
    CannotPadNestedTensorWarning,
    TensorInformation,
    pad_tensor,
    recursively_apply,
)
from accelerate.world.packed_tree import PackedTree
from accelerate.world.rank_failure_report import FailureReport, rank_table
from accelerate.world.reduction import (
    check_order,
    finish_reduction,
    merge_values,
    reduce_leaves,
    reduce_stacked,
    scale_tensor,
)

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

DistributedOperationException = CollectiveError


def world_size(join: bool = False) -> int:
    """Return the world size; 1 when no world is open.

    Args:
        join: open the world of a rank that has none yet, as ``PartialState()`` does: else each rank of a
            launcher would silently get its own values back.
    """
    world = worlds.current() or (_join_ranks() if join else None)
    return 1 if world is None else world.size


def _join_ranks() -> worlds.World | None:
    """Open the world if a launcher or the program has started several ranks, and this process is one.

    A worker of a loader has the variables of its rank.
    """
    if torch.utils.data.get_worker_info() is not None:
        return None
    has_group = dist.is_available() and dist.is_initialized()
    size = dist.get_world_size() if has_group else worlds.get_rank_info()[2]
    return worlds.open() if size > 1 else None


def rank() -> int:
    """Return the rank of this process; 0 when no world is open."""
    world = worlds.current()
    return 0 if world is None else world.rank


def barrier() -> None:
    """Wait until every rank has called this, and for the queued work of this rank's device.

    Does nothing once the process group is closed: scripts that end the training first save their model then.

    Raises:
        CollectiveError: a rank failed, ended, called another collective, or the timeout passed.
    """
    world = worlds.current() or _join_ranks()
    if world is None or world.size == 1:
        return
    if world.is_closed:
        warn_user("wait_for_everyone() after end_training() waits for nobody: the process group is closed")
        return
    if world.device.type != "cpu":
        world.hardware.synchronize()
    if FirstProcessBlock.open_count:
        _exchange_first_error(world.rank, "wait_for_everyone")
        return
    channel = control_channel.channel()
    with channel.lock:
        channel.exchange("wait_for_everyone")


class FirstProcessBlock(ContextDecorator, AbstractContextManager[None]):
    """The block that some ranks run before the others; its error is raised on the others too.

    As in 1.x, its entry, its exit and a barrier in it are one exchange: a barrier of the ranks that run it
    first meets the entry of the others, whose barrier meets the exit.

    Attributes:
        open_count: blocks that this process is in: what it calls there, but barriers, must wait for no rank.
    """

    open_count: ClassVar[int] = 0

    def __init__(self, rank: int, first: bool) -> None:
        self.rank, self.first = rank, first

    def __enter__(self) -> None:
        if not self.first:
            _exchange_first_error(self.rank)
        FirstProcessBlock.open_count += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        FirstProcessBlock.open_count -= 1
        # The others have no block to fail in yet. An exit or Ctrl-C ends this process, and they see it go.
        # An error of another rank is known to all.
        if (
            self.first
            and not isinstance(error, PeerError)
            and (error is None or isinstance(error, Exception))
        ):
            _exchange_first_error(self.rank, error=error)


def _exchange_first_error(rank: int, label: str = "", error: Exception | None = None) -> None:
    """Raise the error of a rank that runs a block first on the others."""
    report = None
    if error is not None:
        what = f"rank {rank} failed in a block that it ran first"
        report = FailureReport.from_exception(rank, error, what, why="the others wait for it")
    for failed in compare_objects(report, "main_process_first", label):
        if failed is not None and error is None:
            raise failed.error(rank)


def gather(tensor: T) -> T:
    """All-gather tensors: concatenate those of all ranks along dimension 0, in rank order.

    Args:
        tensor: a tensor, or a tree of tensors with the same structure on all ranks. Scalars come back with
            shape ``(world size,)``. Dimension 0 may differ between ranks.

    Raises:
        CollectiveError: structure, dtype, number of dimensions or a later dimension differ between ranks.
        PrepareError: a leaf is not a tensor, on several ranks; alone it is returned as it is.
    """
    if world_size(join=True) == 1:
        return recursively_apply(_at_least_1d, tensor)
    packed = PackedTree.pack("gather", tensor)
    with packed.channel.lock:
        # Only scalars are known to be as long on all ranks.
        if all(leaf.dim() == 0 for leaf in packed.leaves) and packed.agree_on_device():
            return packed.rebuild([_all_gather(_at_least_1d(leaf), packed.channel) for leaf in packed.leaves])
        messages = packed.exchange()
        packed.check_agreement(messages, ragged=True)
        return packed.rebuild(_gather_leaves(packed, messages))


def _at_least_1d(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def _gather_leaves(packed: PackedTree, messages: GatheredControlMessages) -> list[torch.Tensor]:
    if messages.inline and messages.same:
        stacked = packed.stacked_values(messages)  # of a buffer that nothing else uses
        return [(each.flatten(0, 1) if each.dim() > 1 else each).contiguous() for each in stacked]
    if messages.inline:
        by_rank = [packed.rank_values(messages, rank) for rank in range(packed.channel.size)]
        return [torch.cat([_at_least_1d(part) for part in parts]) for parts in zip(*by_rank, strict=True)]
    leaves = [_at_least_1d(leaf) for leaf in packed.leaves]
    if messages.same:
        return [_all_gather(leaf, packed.channel) for leaf in leaves]
    by_leaf = packed.descriptions_by_leaf(messages)
    lengths = [[(*each.shape, 1)[0] for each in descriptions] for descriptions in by_leaf]
    return [_gather_ragged(*each, packed.channel) for each in zip(leaves, lengths, strict=True)]


def _gather_ragged(
    leaf: torch.Tensor, lengths: list[int], channel: control_channel.ControlChannel
) -> torch.Tensor:
    longest = max(lengths)
    joined = _all_gather(pad_tensor(leaf, 0, longest), channel)
    if min(lengths) == longest:
        return joined
    return torch.cat([part[:n] for part, n in zip(joined.split(longest), lengths, strict=True)])


def _all_gather(tensor: torch.Tensor, channel: control_channel.ControlChannel) -> torch.Tensor:
    """All-gather tensors of equal shapes along dimension 0."""
    send = tensor.resolve_conj().resolve_neg().contiguous()  # bytes travel, and no bit that changes them
    out = send.new_empty((channel.size * send.shape[0], *send.shape[1:]))
    if send.numel() == 0:
        return out
    if send.device.type == "cpu":
        channel.all_gather(out.view(-1).view(torch.uint8), send.view(-1).view(torch.uint8), "gather")
        return out
    # Renamed in torch 2.13, where the old name warns.
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, name)(_as_transfer_dtype(out), _as_transfer_dtype(send))
    return out


def _as_transfer_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """View 8-bit floats as bytes, since not every back end can send them."""
    return tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def gather_tensor_shape(tensor: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the shapes of ``tensor`` on all ranks, in rank order."""
    if world_size(join=True) == 1:
        return [tuple(tensor.shape)]
    packed = PackedTree.pack("gather_tensor_shape", tensor)
    with packed.channel.lock:
        messages = packed.exchange(values=False)
        return [each.shape for each in packed.descriptions_by_leaf(messages)[0]]


def gather_to_first(own: Mapping[Any, Any], group: Any, device: torch.device) -> dict[Any, Any]:
    """Gather tensors of all ranks of a group on the host of the first one; the others get nothing.

    Args:
        own: tensors and plain values, by names that no other rank gives; the first rank's stay as they are.
        group: the process group.
        device: over which tensors travel.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    metas = {key: torch.empty_like(v, device="meta") if torch.is_tensor(v) else v for key, v in own.items()}
    listed: list[Any] = [None] * size
    dist.all_gather_object(listed, metas, group=group)
    gathered = dict(own) if rank == 0 else {}
    for place in range(1, size):
        for key, meta in listed[place].items():
            if not torch.is_tensor(meta):
                gathered.update({key: meta} if rank == 0 else {})
            elif rank == place:
                dist.send(own[key].to(device).contiguous(), dist.get_global_rank(group, 0), group)
            elif rank == 0:
                tensor = torch.empty(meta.shape, dtype=meta.dtype, device=device)
                dist.recv(tensor, dist.get_global_rank(group, place), group)
                gathered[key] = tensor.cpu()
    return gathered


def gather_object(object: Any) -> Any:
    """Gather the lists of all ranks into one flat list, in rank order; in a world of one the object itself.

    Args:
        object: a list of picklable items (any iterable).
    """
    if world_size(join=True) == 1:
        return object
    return [item for part in all_gather_object(object, "gather_object") for item in part]


def all_gather_object(value: Any, operation: str = "all_gather_object", label: str = "") -> list[Any]:
    """All-gather one picklable value per rank, in rank order.

    Args:
        value: the value of this rank.
        operation: name shown in error texts; it must be the same on all ranks.
        label: shown in error texts in place of the operation; it may differ between ranks.

    Raises:
        CollectiveError: a rank's value cannot be pickled; and see ``barrier``.
    """
    world = worlds.current()
    if world is None or world.size == 1:
        return [value]
    channel = control_channel.channel()
    with channel.lock:
        messages = channel.exchange_objects(operation, value, label=label)
        return [pickle.loads(messages.body(rank)) for rank in range(channel.size)]


def compare_objects(value: T, operation: str, label: str = "") -> list[T]:
    """Compare one value per rank by its digest, and send the values only where they differ.

    Where all ranks have the same, what a rank sends and receives does not depend on the world size.

    Args:
        value: of plain types; values are the same where their pickles are.
        operation: name shown in error texts; it must be the same on all ranks.
        label: shown in error texts in place of the operation; it may differ between ranks.

    Returns:
        ``[value]`` where all ranks have the same, as in a world of one. Otherwise the value of each rank, in
        rank order; equal ones are one object.

    Raises:
        CollectiveError: see ``barrier``.
    """
    world = worlds.current()
    if world is None or world.size == 1:
        return [value]
    channel = control_channel.channel()
    digest = hashlib.blake2b(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), digest_size=16).digest()
    with channel.lock:
        messages = channel.exchange(operation, description=digest, label=label)
        if messages.same:
            return [value]
        digests = messages.descriptions
        own = {digest: value} if digests.index(digest) == channel.rank else {}
        distinct: dict[bytes, T] = channel.combine_objects(own, _unite, operation, label or operation)
        return [distinct[each] for each in digests]


def _unite(tables: list[dict[bytes, Any]]) -> dict[bytes, Any]:
    return {key: value for table in tables for key, value in table.items()}


def combine_objects(value: Any, combine: Callable[[list[Any]], T], operation: str, label: str = "") -> T:
    """Return on every rank what rank 0 makes of one picklable value per rank.

    See ``ControlChannel.combine_objects``.
    """
    world = worlds.current()
    if world is None or world.size == 1:
        return combine([value])
    return control_channel.channel().combine_objects(value, combine, operation, label)


def broadcast(tensor: T, from_process: int = 0) -> T:
    """Broadcast ``tensor`` (any tree) from rank ``from_process``, in place.

    Raises:
        CollectiveError: structure, dtypes or shapes differ between ranks.
        PrepareError: a leaf is not a tensor, on several ranks.
        SettingError: there is no such rank.
    """
    if world_size(join=True) == 1:
        return tensor
    _check_source(from_process)
    packed = PackedTree.pack("broadcast", tensor)
    with packed.channel.lock:
        values = None
        if not packed.agree_on_device(f" from rank {from_process}"):
            messages = packed.exchange(source=from_process)
            packed.check_agreement(messages)
            values = packed.rank_values(messages, from_process) if messages.inline else None
        for index, leaf in enumerate(packed.leaves):
            if values is not None:
                leaf.copy_(values[index])
            elif leaf.numel():
                _broadcast_large(packed.channel, leaf, from_process)
    return tensor


def _check_source(from_process: int) -> None:
    if from_process not in range(world_size()):
        raise SettingError(
            f"from_process is {from_process}, but there is no such rank",
            why=f"the world has {world_size()} ranks",
            fix=f"use 0 to {world_size() - 1}",
        )


def _broadcast_large(channel: control_channel.ControlChannel, leaf: torch.Tensor, source: int) -> None:
    send = leaf.resolve_conj().resolve_neg().contiguous()
    if leaf.device.type == "cpu":
        channel.broadcast(send.view(-1).view(torch.uint8), source, "broadcast")
    else:
        dist.broadcast(_as_transfer_dtype(send), src=source)
    if send.data_ptr() != leaf.data_ptr():
        leaf.copy_(send)


def broadcast_from(data: T, src: int = 0) -> T:
    """Broadcast ``data`` (any tree) from rank ``src``, in place: the ``_gpu_broadcast`` of other programs."""
    return broadcast(data, src)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Broadcast the items of ``object_list`` from ``from_process``, in place; that rank keeps its objects.

    Raises:
        CollectiveError: it is a tuple.
        SettingError: there is no such rank.
    """
    if world_size(join=True) > 1:
        if isinstance(object_list, tuple):
            raise CollectiveError(
                "broadcast_object_list of a tuple",
                why="the items are replaced in place, and a tuple cannot be changed",
                fix="pass a list, or take what broadcast_object_list(list(values)) returns",
            )
        object_list[:] = broadcast_object(list(object_list), from_process, "broadcast_object_list")
    return object_list


def broadcast_object(value: Any, from_process: int = 0, operation: str = "broadcast_object") -> Any:
    """Broadcast one picklable value from rank ``from_process``, which gets that very object.

    Raises:
        SettingError: there is no such rank.
    """
    if world_size() == 1:
        return value
    _check_source(from_process)
    channel = control_channel.channel()
    with channel.lock:
        messages = channel.exchange_objects(operation, value, source=from_process)
        return value if channel.rank == from_process else pickle.loads(messages.body(from_process))


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Broadcast the tensor of the one rank that has it to the devices of all ranks.

    Args:
        tensor: the tensor on one rank, None on the others. A single process gets its tensor back.

    Returns:
        A new tensor of the same shape, dtype and values; on the rank that had it, that very tensor.

    Raises:
        CollectiveError: no rank has one, or several have; on all ranks.
    """
    local_info = None if tensor is None else TensorInformation(tensor.shape, tensor.dtype)
    world_size(join=True)  # the objects are exchanged in an open world only
    owners: list[tuple[int, TensorInformation]] = combine_objects(
        local_info,
        lambda infos: [(owner, info) for owner, info in enumerate(infos) if info is not None],
        "copy_tensor_to_devices",
    )
    if len(owners) != 1:
        raise CollectiveError(
            f"one rank has the tensor to copy to all devices, but {len(owners)} of {world_size()} have one",
            why="the tensor of that rank is what all the others get",
            fix="pass None on all ranks but one",
        )
    owner, information = owners[0]
    if tensor is None:
        world = worlds.current()
        tensor = torch.empty(
            information.shape, dtype=information.dtype, device=world.device if world else "cpu"
        )
    return broadcast(tensor, from_process=owner)


def reduce(tensor: T, reduction: str = "mean", scale: float = 1.0) -> T:
    """All-reduce tensors: combine them element by element over ranks, times ``scale``, to new tensors.

    Integers and bools are combined in int64, floats narrower than float32 in float32, so that nothing
    overflows on the way but a sum that int64 cannot hold. Results have the dtype of the tensor, but integers
    and bools give int64 sums, as in ``torch.sum``, and means of the default floating dtype, as a division
    does. A result can be differentiated with respect to the tensor of this rank alone.

    Args:
        tensor: a tensor or a tree of tensors with equal shapes on all ranks.
        reduction: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, or ``"none"`` (only scaled). NaN on a rank
            gives NaN in all of them.
        scale: factor on the result.

    Raises:
        SettingError: another reduction.
        CollectiveError: reduction, structure, dtypes or shapes differ between ranks.
        PrepareError: a leaf is not a tensor, or is complex where a maximum or minimum is asked for.
    """
    return all_reduce(tensor, reduction, scale)


def all_reduce(tensor: T, reduction: str, scale: float, *, strict: bool = False) -> T:
    """Run ``reduce``, with an option that its signature in Accelerate 1.x does not have.

    Args:
        tensor: see ``reduce``, as for the next two.
        reduction: the operation.
        scale: factor on the result.
        strict: on the CPU, refuse scalars whose dtypes differ between ranks. Else they are promoted, with a
            warning: evaluations give a float on rank 0 and the integer 0 on the others.
    """
    if reduction not in ("sum", "mean", "max", "min", "none"):
        raise SettingError(
            f"reduction {reduction!r} is unknown", fix="use 'sum', 'mean', 'max', 'min' or 'none'"
        )
    if isinstance(tensor, torch.Tensor) and tensor.layout == torch.sparse_coo:
        total = all_reduce(tensor.to_dense(), reduction, scale, strict=strict)
        return total.to_sparse()  # pyright: ignore[reportReturnType]
    if reduction == "none":
        return recursively_apply(
            lambda leaf: scale_tensor(leaf.clone(), scale), tensor, error_on_other_type=True
        )
    if world_size(join=True) == 1:

        def reduce_alone(leaf: torch.Tensor) -> torch.Tensor:
            check_order(leaf, reduction)
            total = reduce_stacked(leaf.detach().unsqueeze(0), reduction)
            return finish_reduction(total, leaf, reduction, scale, world_size())

        return recursively_apply(reduce_alone, tensor, error_on_other_type=True)
    packed = PackedTree.pack(f"reduce({reduction})", tensor)
    with packed.channel.lock:
        messages = None
        if not packed.agree_on_device():
            messages = packed.exchange(merge=functools.partial(merge_values, packed, reduction))
            if messages.same or strict or not packed.promote_scalars(messages):
                packed.check_agreement(messages)
        totals = reduce_leaves(packed, messages, reduction)
    leaves = zip(totals, packed.sources, strict=True)
    return packed.rebuild(
        [finish_reduction(total, leaf, reduction, scale, world_size()) for total, leaf in leaves]
    )


def pad_across_processes(tensor: T, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> T:
    """Pad ``dim`` of ``tensor`` (any tree) to its greatest length on any rank.

    Args:
        tensor: a tensor or a tree of tensors.
        dim: the dimension that may differ; tensors that do not have it are left alone.
        pad_index: the padding value.
        pad_first: pad at the beginning instead of the end.

    Raises:
        CollectiveError: structure or numbers of dimensions differ between ranks.
    """
    if world_size(join=True) == 1:
        return recursively_apply(_note_nested, tensor, error_on_other_type=True)
    packed = PackedTree.pack("pad_across_processes", tensor)
    with packed.channel.lock:
        messages = packed.exchange(values=False)
        by_leaf = packed.descriptions_by_leaf(messages)
    padded: list[torch.Tensor] = []
    for index, (leaf, descriptions) in enumerate(zip(packed.sources, by_leaf, strict=True)):
        if len({len(each.shape) for each in descriptions}) > 1:
            raise packed.tensor_mismatch(index, descriptions, "give as many dimensions on every rank")
        place = dim + leaf.dim() if dim < 0 else dim
        if not _note_nested(leaf).is_nested and 0 <= place < leaf.dim():
            longest = max(each.shape[place] for each in descriptions)
            leaf = pad_tensor(leaf, place, longest, pad_index, pad_first)
        padded.append(leaf)
    return packed.rebuild(padded)


def _note_nested(leaf: torch.Tensor) -> torch.Tensor:
    """Warn about a nested tensor, and return the tensor."""
    if leaf.is_nested:
        warn_user("a nested tensor is not padded", CannotPadNestedTensorWarning)
    return leaf


def verify_operation(function: F) -> F:
    """Decorate a collective: in debug mode it first compares the shapes of its tensors on all ranks."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        world = worlds.current()
        if world is not None and world.debug and world.size > 1:
            data = args[0] if args else kwargs.get("tensor", kwargs.get("object"))
            shapes = [
                (p, tuple(t.shape)) for p, t in tree.iterate_leaves(data) if isinstance(t, torch.Tensor)
            ]
            every = compare_objects(shapes, f"shapes for {function.__name__}")
            if any(row != every[0] for row in every):
                raise CollectiveError(
                    f"{function.__name__} was called with other shapes on other ranks", why=rank_table(every)
                )
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def chained_operation(function: F) -> F:
    """Decorate a collective that calls another: errors of the inner one start with the outer's name."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except CollectiveError as error:
            raise CollectiveError(
                f"{function.__name__}: {error.what}", why=error.why, fix=error.fix
            ) from error

    return wrapper  # type: ignore[return-value]
