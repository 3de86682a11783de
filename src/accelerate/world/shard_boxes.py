"""The boxes of an unsharded tensor that the local shard of a ``DTensor`` holds.

Most local shards are one box. ``_StridedShard`` has two meanings:

- FSDP2 after tensor parallelism: a later mesh dimension shards the same dimension of the tensor. What that
  has sharded before is sharded further, into one contiguous box again.
- Fused weights, as gate and up projections of transformers' experts: no later mesh dimension shards that
  dimension. It is split into ``split_factor`` parts, and each rank holds its chunk of every one.

torch describes every local shard as one box, which begins where the first of several does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

# (start, length) of the rows that a shard holds along one dimension, in the order in which it holds them
_Runs = list[tuple[int, int]]


class ShardBox(NamedTuple):
    """A box of an unsharded tensor, and its place in the local shard; one number for each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that select the box in the unsharded tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """The slices that select the box in the local shard."""
        return tuple(slice(at, at + size) for at, size in zip(self.local_offsets, self.sizes, strict=True))


def is_sharded_placement(placement: Any) -> bool:
    """Return whether a placement shards a tensor; torch's ``is_shard`` leaves out strided shards."""
    return getattr(placement, "dim", None) is not None


def has_strided_shard(tensor: Any) -> bool:
    """Return whether a ``DTensor`` has a strided shard, which torch may describe by another box."""
    return any(hasattr(placement, "split_factor") for placement in tensor.placements)


def shard_mesh_dims(placements: Sequence[Any]) -> list[int]:
    """Return the mesh dimensions that shard a tensor, in the order in which it was sharded.

    FSDP shards what tensor parallelism has sharded before, though its mesh dimension comes first: its
    placement is a strided shard then.
    """
    axes = [axis for axis, placement in enumerate(placements) if is_sharded_placement(placement)]
    late = [axis for axis in axes if _is_second_sharding(placements, axis)]
    return [axis for axis in axes if axis not in late] + late[::-1]


def _is_second_sharding(placements: Sequence[Any], axis: int) -> bool:
    """Return whether a strided shard is FSDP's, of what a later mesh dimension has sharded before."""
    later = [getattr(placement, "dim", None) for placement in placements[axis + 1 :]]
    return hasattr(placements[axis], "split_factor") and placements[axis].dim in later


def shard_boxes(tensor: Any) -> list[ShardBox]:
    """Return the boxes of the local shard of a ``DTensor`` that is not empty."""
    if not has_strided_shard(tensor):
        (chunk,) = tensor.__create_chunk_list__()
        return [ShardBox(tuple(chunk.offsets), tuple(chunk.sizes), (0,) * tensor.dim())]
    spans: list[list[tuple[int, int, int]]] = []
    for runs in _shard_runs(tensor, tensor.shape):
        span, place = list[tuple[int, int, int]](), 0
        for start, length in runs:
            span.append((start, length, place))
            place += length
        spans.append(span)
    boxes: list[ShardBox] = []
    for box in product(*spans):
        starts, lengths = (start for start, _, _ in box), (length for _, length, _ in box)
        boxes.append(ShardBox(tuple(starts), tuple(lengths), tuple(place for _, _, place in box)))
    return boxes


def local_shard(value: torch.Tensor, like: Any) -> torch.Tensor:
    """Return this rank's shard of an unsharded tensor, a view where possible.

    Args:
        value: the unsharded tensor.
        like: a DTensor of the same shape, with the placements.
    """
    return _take_runs(value, _shard_runs(like, value.shape))


def shards_of_ranks(value: torch.Tensor, like: Any) -> list[torch.Tensor]:
    """Return the shards of an unsharded tensor, one for each rank of a mesh of one dimension."""
    ranks = range(like.device_mesh.size())
    return [_take_runs(value, _shard_runs(like, value.shape, (rank,))) for rank in ranks]


def _take_runs(value: torch.Tensor, every: list[_Runs]) -> torch.Tensor:
    for dim, runs in enumerate(every):
        if runs == [(0, value.shape[dim])]:
            continue
        # Fewer rows than ranks: the last ones have none.
        parts = [value.narrow(dim, start, length) for start, length in runs or [(0, 0)]]
        value = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return value


def _shard_runs(like: Any, shape: Sequence[int], place: Sequence[int] = ()) -> list[_Runs]:
    """Return the runs along each dimension of the rank at ``place`` in the mesh, or of this rank."""
    mesh, placements = like.device_mesh, like.placements
    every: list[_Runs] = [[(0, size)] for size in shape]
    for axis in shard_mesh_dims(placements):
        placement, ranks = placements[axis], mesh.size(axis)
        dim: int = placement.dim
        rank = place[axis] if place else mesh.get_local_rank(axis)
        is_fused = hasattr(placement, "split_factor") and not _is_second_sharding(placements, axis)
        parts: int = placement.split_factor if is_fused else 1
        held: _Runs = []
        for part in range(parts):
            for start, length in _chunk(_chunk(every[dim], parts, part), ranks, rank):
                if held and sum(held[-1]) == start:
                    held[-1] = held[-1][0], held[-1][1] + length
                else:
                    held.append((start, length))
        every[dim] = held
    return every


def _chunk(runs: _Runs, count: int, index: int) -> _Runs:
    """Return what ``torch.chunk`` into ``count`` would give as the chunk of this index; maybe nothing."""
    total = sum(length for _, length in runs)
    size = -(-total // count)
    begin, end = index * size, (index + 1) * size
    chunk, place = _Runs(), 0
    for start, length in runs:
        low, high = max(begin - place, 0), min(end - place, length)
        if low < high:
            chunk.append((start + low, high - low))
        place += length
    return chunk
