"""Plans of sharded saves and loads: what all ranks write, and the chunks of shards that are several boxes.

torch plans one chunk for each local shard, which is not what the rank holds of a fused weight. Here each box
is saved, and read, as a chunk of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from accelerate.world.shard_boxes import ShardBox, has_strided_shard, shard_boxes


class CombinedPlans(NamedTuple):
    """The plans of all ranks.

    Attributes:
        id: equal on all ranks.
        size: number of ranks.
        masks: by rank which items of its plan it writes, a bit each; nothing for a rank that writes all.
    """

    id: str
    size: int
    masks: dict[int, int]


@dataclass
class KnownPlan:
    """The plan of the save before, of one object on this rank.

    Attributes:
        digest: of this rank's plan, and of the option that decides which replica is written.
        combined: with the mask of this rank alone.
        index: on a rank that commits.
    """

    digest: bytes
    combined: CombinedPlans
    index: Metadata | None


def split_save_plan(
    plan: SavePlan, state: Mapping[str, Any]
) -> tuple[SavePlan, dict[MetadataIndex, ShardBox]]:
    """Return a plan with an item for each box of the strided shards in ``state``, and the boxes of these."""
    items, boxes = list[WriteItem](), dict[MetadataIndex, ShardBox]()
    for item in plan.items:
        value: Any = state[item.index.fqn]
        if item.tensor_data is None or not hasattr(value, "placements") or not has_strided_shard(value):
            items.append(item)
            continue
        for box in shard_boxes(value) if value.to_local().numel() else ():
            index = MetadataIndex(item.index.fqn, box.offsets)
            data = replace(item.tensor_data, chunk=_chunk(box))
            items.append(replace(item, index=index, tensor_data=data))
            boxes[index] = box
    return replace(plan, items=items), boxes


def local_chunks(target: Any) -> Iterator[tuple[torch.Tensor, ChunkStorageMetadata]]:
    """Yield (view of the local shard, chunk of the unsharded tensor) of each box of a strided shard."""
    local = target.to_local()
    for box in shard_boxes(target):
        yield local[box.local_slices], _chunk(box)


def _chunk(box: ShardBox) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
