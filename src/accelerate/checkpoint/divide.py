"""Writing a state in parts, in the format of ``torch.distributed.checkpoint``: each rank one file.

torch's planner says which rank writes what: of a distributed tensor each rank its own box, of one that all
ranks have one of them, so that the files are of like size. The plans travel in the exchange that all ranks of
a save make anyway; after it a rank can write, and the index can be made, without a word between them.

Tied tensors are written once: in the index, both names lead to the same place.
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
from accelerate.checkpoint.manifest import PartEntry
from accelerate.core.errors import CheckpointError

# (entry of the index, offset, bytes) of each thing in a file
Told = list[tuple[MetadataIndex, int, int]]
# What leads to a thing in a nested state: ("model", "layer.weight")
Keys = tuple[Any, ...]


@dataclass
class Division:
    """What this rank has of a state, before all ranks have told what they have.

    Attributes:
        state: nested; tensors may be distributed.
        plan: its items, to be told to all.
    """

    state: dict[str, Any]
    plan: SavePlan
    _planner: DefaultSavePlanner

    @classmethod
    def of(cls, state: dict[str, Any], *, alone: bool) -> Division:
        """Plans ``state``.

        Args:
            state: nested dicts and lists.
            alone: what all ranks have is written by the first of them, not by whoever has least to write.
        """
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=alone)
        planner.set_up_planner(state)
        return cls(state, planner.create_local_plan(), planner)

    def share(
        self, plans: list[SavePlan], rank: int, sort: str, entry: PartEntry, ties: Mapping[Keys, Keys]
    ) -> Parts:
        """What this rank writes.

        Args:
            plans: those of all ranks, in rank order.
            rank: this one.
            sort, entry: see ``Share``.
            ties: keys that lead to what other keys have.
        """
        try:
            every, index = self._planner.create_global_plan(plans)
        except (ValueError, AssertionError) as error:
            raise CheckpointError(
                f"the ranks' parts of {entry.kind} do not make a whole", why=str(error)
            ) from error
        plan = self._planner.finish_plan(every[rank])
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        objects = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        return Parts(
            sort=sort,
            entry=entry,
            file=f"{entry.file}/{names.shard_file(rank)}" if plan.items else "",
            tensors=[_local(self._planner.lookup_object(item.index)) for item in tensors],
            items=tensors,
            objects=[(item.index, _pickled(self._planner.lookup_object(item.index))) for item in objects],
            index=index,
            ties=dict(ties),
        )


def _dotted(keys: Keys) -> str:
    return ".".join(map(str, keys))


def only_distributed(state: Any) -> Any:
    """``state`` with nothing but its distributed tensors: of the rest, another rank's counts."""
    if isinstance(state, Mapping):
        kept = {key: only_distributed(value) for key, value in state.items()}
        return {key: value for key, value in kept.items() if value is not None} or None
    if isinstance(state, list) and state and all(isinstance(item, DTensor) for item in state):
        return state
    return state if isinstance(state, DTensor) else None


def _local(value: torch.Tensor) -> torch.Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def _pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    pickles.write(value, stream)
    return stream.getvalue()


@dataclass
class Parts:
    """A ``Share``: this rank's file of parts, and the index of all.

    Attributes:
        sort, entry, file, tensors: see there.
        items: what torch's planner calls each of the tensors.
        objects: what is no tensor, as bytes.
        index: of all ranks, but for where things lie.
        ties: keys that lead to what other keys have.
    """

    sort: str
    entry: PartEntry
    file: str
    tensors: list[torch.Tensor]
    items: list[WriteItem]
    objects: list[tuple[MetadataIndex, bytes]]
    index: Metadata
    ties: dict[Keys, Keys]

    def fill(self, file: BinaryIO, /) -> Told:
        """Writes the file of this rank; returns what lies where in it."""
        told: Told = []
        for index, content in self.objects:
            told.append((index, file.tell(), len(content)))
            file.write(content)
        for item, tensor in zip(self.items, self.tensors, strict=True):
            start = file.tell()
            value = tensor.cpu()
            # A view would be saved with all of the memory behind it.
            whole = value.untyped_storage().nbytes() == value.nbytes
            pickles.write(value if whole else value.clone(), file)
            told.append((item.index, start, file.tell() - start))
        return told

    def finish(self, told: list[Told | None], /) -> tuple[str, bytes]:
        """The index."""
        stored: dict[MetadataIndex, Any] = {}
        for rank, things in enumerate(told):
            for index, offset, length in things or []:
                stored[index] = filesystem._StorageInfo(names.shard_file(rank), offset, length)
        known = dict(self.index.state_dict_metadata)
        paths = dict(self.index.planner_data)
        for keys, owner in self.ties.items():
            alias, name = _dotted(keys), _dotted(owner)
            if not isinstance(entry := known.get(name), TensorStorageMetadata):
                continue
            known[alias], paths[alias] = entry, keys
            for chunk in entry.chunks:
                stored[MetadataIndex(alias, chunk.offsets)] = stored[MetadataIndex(name, chunk.offsets)]
        index = replace(
            self.index,
            state_dict_metadata=known,
            planner_data=paths,
            storage_data=stored,
            storage_meta=StorageMeta(),
        )
        if "version" in {field.name for field in fields(Metadata)}:
            index.version = filesystem.CURRENT_DCP_VERSION
        return f"{self.entry.file}/{names.SHARDED_INDEX}", pickle.dumps(index)

    def table(self) -> dict[str, tuple[str, list[int]]]:
        """(dtype, shape) of the tensors, by their names below the first key."""
        return {
            _dotted(self.index.planner_data[name][1:]): (
                str(entry.properties.dtype).removeprefix("torch."),
                list(entry.size),
            )
            for name, entry in self.index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
