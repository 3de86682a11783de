"""States of registered objects in which each rank has its own shards of parameters as plain tensors.

An average of the local values of FSDP1's parameters has such a state, or one that keeps ``to_local()`` of
DTensors. Nothing in a plain tensor says what it is a shard of. So the file has the shards of all ranks, by
rank, and each rank gets its own back; other numbers of ranks are refused.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from accelerate.checkpoint.rank_group import CheckpointRankGroup
from accelerate.core import tree
from accelerate.core.errors import CheckpointError
from accelerate.world import collective

_SHARDS, _STATE = "accelerate_rank_shards", "state"


def gather_rank_shards(state: Any, shapes: Collection[torch.Size], name: str) -> Any:
    """Return the state with the shards of all ranks, on rank 0, if there are any; collective.

    Args:
        state: nested data without DTensors.
        shapes: those of this rank's shards of parameters: other tensors are no shards.
        name: of the object, for errors.
    """
    tensors = {
        path: leaf
        for path, leaf in tree.iterate_leaves(state)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.shape in shapes
    }
    # A tensor that all ranks have alike may have the shape of a shard by chance.
    prints = {path: _fingerprint(leaf) for path, leaf in tensors.items()}
    by_rank = collective.all_gather_object(prints, f"the state of {name}")
    common = [path for path in by_rank[0] if all(path in each for each in by_rank)]
    differing = [path for path in common if any(each[path] != by_rank[0][path] for each in by_rank)]
    if not differing:
        return state
    own = [tensors[path].detach().to("cpu", copy=True) for path in differing]
    shards: list[list[torch.Tensor]] = []
    collective.combine_objects(own, shards.extend, f"the shards of {name}")
    return {_STATE: state, _SHARDS: dict(zip(differing, map(list, zip(*shards, strict=True)), strict=False))}


def _fingerprint(tensor: torch.Tensor) -> tuple[Any, ...]:
    values = tensor.detach()
    sums = values.sum(dtype=torch.float64), torch.linalg.vector_norm(values, dtype=torch.float64)
    return tuple(values.shape), *(str(each.item()) for each in sums)


def select_rank_shards(state: Any, ranks: CheckpointRankGroup, label: str) -> Any:
    """Return the state with this rank's shards, where ``gather_rank_shards`` put those of all ranks into it.

    Raises:
        CheckpointError: another number of ranks saved it.
    """
    if not (tree.is_mapping(state) and state.keys() == {_STATE, _SHARDS}):
        return state
    shards = state[_SHARDS]
    count = len(next(iter(shards.values())))
    if count != ranks.size:
        raise CheckpointError(
            f"{label} has shards of {count} processes, and {ranks.size} load it",
            why="its state_dict() returned plain tensors with the shards of each process, which cannot be "
            "cut anew",
            fix="load it with as many processes; or keep full tensors or DTensors (fsdp_version=2) in it",
        )
    leaves = (
        shards[path][ranks.rank] if path in shards else leaf
        for path, leaf in tree.iterate_leaves(state[_STATE])
    )
    return tree.replace_leaves(state[_STATE], leaves)
