"""Sharded saves in the format of ``torch.distributed.checkpoint``: each rank writes one file.

torch's planner says which rank writes what: of a DTensor each rank its own shard, of a replicated tensor one
of the ranks, so that the files have similar sizes. The plans travel in an all-gather that all ranks of a save
make anyway; after it each rank can write, and the index can be built, without communication.

Tied tensors are written once: in the index, both names have the same file ranges.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from accelerate.checkpoint import names, pickles
from accelerate.checkpoint.manifest import ManifestEntry
from accelerate.core.errors import CheckpointError

# (entry of the index, offset, bytes) of each tensor or object in a file
WrittenItems = list[tuple[MetadataIndex, int, int]]
# the keys of a value in a nested state: ("model", "layer.weight")
KeyPath = tuple[Any, ...]


@dataclass
class LocalSavePlan:
    """This rank's save plan of one state, before the plans of all ranks are known.

    Attributes:
        state: nested; tensors may be distributed.
        local_plan: its items; all ranks gather the plans.
    """

    state: dict[str, Any]
    local_plan: SavePlan
    _planner: DefaultSavePlanner

    @classmethod
    def create(cls, state: dict[str, Any], *, dedup_to_lowest_rank: bool) -> LocalSavePlan:
        """Plan to save ``state``.

        Args:
            state: nested dicts and lists.
            dedup_to_lowest_rank: replicated tensors are written by the lowest rank, not by the one that
                writes least.
        """
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=dedup_to_lowest_rank)
        planner.set_up_planner(state)
        return cls(state, planner.create_local_plan(), planner)

    def shard_file(
        self,
        plans: list[SavePlan],
        rank: int,
        category: str,
        entry: ManifestEntry,
        ties: Mapping[KeyPath, KeyPath],
    ) -> RankShardFile:
        """Return the writer of this rank's shard file.

        Args:
            plans: those of all ranks, in rank order.
            rank: this one.
            category, entry: see ``ShardWriter``.
            ties: keys that lead to what other keys have.
        """
        try:
            global_plans, index = self._planner.create_global_plan(plans)
        except (ValueError, AssertionError) as error:
            raise CheckpointError(
                f"the ranks' shards of {entry.kind} do not make a whole", why=str(error)
            ) from error
        plan = self._planner.finish_plan(global_plans[rank])
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        objects = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        return RankShardFile(
            category=category,
            entry=entry,
            file=f"{entry.file}/{names.shard_file(rank)}" if plan.items else "",
            tensors=[_local_tensor(self._planner.lookup_object(item.index)) for item in tensors],
            items=tensors,
            objects=[
                (item.index, _pickle_bytes(self._planner.lookup_object(item.index))) for item in objects
            ],
            index=index,
            ties=dict(ties),
        )


def _join_keys(keys: KeyPath) -> str:
    return ".".join(map(str, keys))


def only_distributed(state: Any) -> Any:
    """Return ``state`` with its DTensors only: the rest is saved by another rank."""
    if isinstance(state, Mapping):
        distributed = {key: only_distributed(value) for key, value in state.items()}
        return {key: value for key, value in distributed.items() if value is not None} or None
    if isinstance(state, list) and state and all(isinstance(item, DTensor) for item in state):
        return state
    return state if isinstance(state, DTensor) else None


def _local_tensor(value: torch.Tensor) -> torch.Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def _pickle_bytes(value: Any) -> bytes:
    stream = io.BytesIO()
    pickles.write(value, stream)
    return stream.getvalue()


@dataclass
class RankShardFile:
    """A ``ShardWriter``: this rank's shard file, and the index of all.

    Attributes:
        category, entry, file, tensors: see there.
        items: what torch's planner calls each of the tensors.
        objects: what is no tensor, as bytes.
        index: of all ranks, without the positions in files.
        ties: keys that lead to what other keys have.
    """

    category: str
    entry: ManifestEntry
    file: str
    tensors: list[torch.Tensor]
    items: list[WriteItem]
    objects: list[tuple[MetadataIndex, bytes]]
    index: Metadata
    ties: dict[KeyPath, KeyPath]

    def fill(self, file: BinaryIO, /) -> WrittenItems:
        """Write this rank's file; return the index entry, offset and length of everything in it."""
        written: WrittenItems = []
        for index, content in self.objects:
            written.append((index, file.tell(), len(content)))
            file.write(content)
        for item, tensor in zip(self.items, self.tensors, strict=True):
            start = file.tell()
            value = tensor.cpu()
            # A view would be saved with all of the memory behind it.
            whole = value.untyped_storage().nbytes() == value.nbytes
            pickles.write(value if whole else value.clone(), file)
            written.append((item.index, start, file.tell() - start))
        return written

    def build_index(self, written: list[WrittenItems | None], /) -> tuple[str, bytes]:
        """Return (name, content) of the index."""
        stored: dict[MetadataIndex, Any] = {}
        for rank, things in enumerate(written):
            for index, offset, length in things or []:
                stored[index] = filesystem._StorageInfo(names.shard_file(rank), offset, length)
        entries = dict(self.index.state_dict_metadata)
        paths = dict(self.index.planner_data)
        for keys, owner in self.ties.items():
            alias, name = _join_keys(keys), _join_keys(owner)
            if not isinstance(entry := entries.get(name), TensorStorageMetadata):
                continue
            entries[alias], paths[alias] = entry, keys
            for chunk in entry.chunks:
                stored[MetadataIndex(alias, chunk.offsets)] = stored[MetadataIndex(name, chunk.offsets)]
        index = replace(
            self.index,
            state_dict_metadata=entries,
            planner_data=paths,
            storage_data=stored,
            storage_meta=StorageMeta(),
        )
        if "version" in {field.name for field in fields(Metadata)}:
            index.version = filesystem.CURRENT_DCP_VERSION
        return f"{self.entry.file}/{names.SHARDED_INDEX}", pickle.dumps(index)

    def table(self) -> dict[str, tuple[str, list[int]]]:
        """Return (dtype, shape) of the tensors, by their names below the first key."""
        return {
            _join_keys(self.index.planner_data[name][1:]): (
                str(entry.properties.dtype).removeprefix("torch."),
                list(entry.size),
            )
            for name, entry in self.index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
