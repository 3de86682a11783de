"""Reading states that were saved in parts, in the format of ``torch.distributed.checkpoint``.

    for name, tensor in tensors_of("run/checkpoint_3/pytorch_model_fsdp_0").items():
        print(name, tensor.dtype, tensor.shape)
        tensor.read()                     # this one alone

A folder holds an index, ``.metadata``, and files of parts, ``__<rank>_<n>.distcp``. The index says which box
of which tensor lies where, so any rank reads the boxes that meet its own, whoever saved them. It is a pickle:
here it is read with the few classes that such an index is made of, and can run nothing.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from accelerate.checkpoint import names, pickles
from accelerate.checkpoint.errors import CheckpointNotFoundError, file_errors
from accelerate.checkpoint.lazy import LazyTensor
from accelerate.checkpoint.moves import Files, Moves, Slice, Source
from accelerate.core.errors import CheckpointError

PathKey = tuple[Any, ...]

_METADATA = "torch.distributed.checkpoint.metadata"
_OLDER = "torch.distributed._shard.sharded_tensor.metadata"  # before torch 2.4
# module -> what an index may name of it; each only holds values, or looks one up in a table of torch
_CLASSES = {
    _METADATA: [
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "ChunkStorageMetadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    ],
    _OLDER: ["TensorProperties", "MEM_FORMAT_ENCODING"],
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
    "torch": ["Size"],
    "torch.serialization": ["_get_layout"],
    "collections": ["OrderedDict"],
}


class _RefusedError(pickle.UnpicklingError):
    """An index names what it has no need of."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name in _CLASSES.get(module_name, ()):
            return super().find_class(module_name, global_name)
        dtype = vars(torch).get(global_name) if module_name == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if module_name.partition(".")[0] == "pathlib" and global_name.endswith("Path"):
            return PurePosixPath  # where it was saved, of whatever system
        raise _RefusedError(f"{module_name}.{global_name}")


def read_index(folder: Path, *, trusted: bool = False) -> Metadata:
    """The index of a folder of parts.

    Args:
        folder: the folder.
        trusted: it may be made of any class, so reading it may run code.

    Raises:
        CheckpointNotFoundError: the folder has none.
        CheckpointError: it is damaged, or would run code.
    """
    path = folder / names.SHARDED_INDEX
    if not path.is_file():
        raise CheckpointNotFoundError(
            f"{path} is missing", why="it says where each tensor lies, and is written last"
        )
    with file_errors("read", path), path.open("rb") as file:
        try:
            found = pickle.load(file) if trusted else _IndexUnpickler(file).load()
        except _RefusedError as error:
            raise CheckpointError(
                f"{path} holds more than an index, and reading it could run code",
                why=f"it names {error}",
                fix="if you trust whoever wrote the file: load_kwargs={'weights_only': False}",
            ) from error
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise CheckpointError(f"{path} is not the index of a sharded checkpoint")
    return found


class Shards:
    """A folder of parts, open for reading.

    Args:
        folder: the folder.
        trusted: objects may be of any class, so reading them may run code.

    Attributes:
        folder: the same.
        index: what lies where.
        paths: the keys that lead to each entry, by the entry's name:
            ``{"model.layer.weight": ("model", "layer.weight")}``.

    Raises:
        CheckpointError: the index is missing, damaged, would run code, or leads out of the folder.
    """

    def __init__(self, folder: Path, *, trusted: bool = False) -> None:
        self.folder, self.trusted, self._files = folder, trusted, Files()
        self.index = read_index(folder, trusted=trusted)
        nested = self.index.planner_data if isinstance(self.index.planner_data, dict) else {}
        self.paths: dict[str, PathKey] = {
            name: tuple(nested.get(name, (name,))) for name in self.index.state_dict_metadata
        }
        for key, info in self.index.storage_data.items():
            self._refuse_unreadable(key.fqn, info)

    def tensor(self, name: str) -> TensorStorageMetadata | None:
        """Size, dtype and boxes of a tensor; None for an object that is none."""
        entry = self.index.state_dict_metadata[name]
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def places(self, name: str) -> tuple[tuple[str, int, int], ...]:
        """(file, offset, bytes) of everything that belongs to an entry; tied tensors lie in the same places.

        Raises:
            CheckpointError: the index does not say where a part lies.
        """
        return tuple((info.relative_path, info.offset, info.length) for info in self._infos(name))

    def check(self, wanted: Iterable[str]) -> None:
        """Refuses a folder in which parts are missing, without reading them.

        Raises:
            CheckpointError: names the file, or the tensor that is not complete.
        """
        sizes: dict[str, int] = {}
        for name in wanted:
            entry = self.tensor(name)
            if entry is not None and sum(math.prod(c.sizes) for c in entry.chunks) != math.prod(entry.size):
                raise self._damaged(f"the parts of {name} do not make up its shape {tuple(entry.size)}")
            for file, offset, length in self.places(name):
                path = self.folder / file
                if file not in sizes and not path.is_file():
                    raise CheckpointError(f"{path} is missing", why=f"a part of {name} was saved in it")
                size = sizes.setdefault(file, path.stat().st_size)
                if offset + length > size:
                    raise CheckpointError(
                        f"{path} is damaged",
                        why=f"it has {size} bytes, and {name} lies at {offset} to {offset + length}",
                    )

    @torch.no_grad()
    def route(self, name: str, target: torch.Tensor, moves: Moves) -> None:
        """Adds to ``moves`` what fills ``target`` with a tensor.

        Args:
            name: of the entry.
            target: of its shape. Of a distributed tensor, this process's part is filled.
            moves: nothing is changed before they run.

        Raises:
            CheckpointError: a file is damaged.
        """
        entry = self.tensor(name)
        assert entry is not None
        assert entry.size == target.shape
        if isinstance(target, DTensor):
            local, boxes = target.to_local(), target.__create_chunk_list__()
        else:
            local, boxes = target, [ChunkStorageMetadata(torch.Size([0] * target.dim()), target.shape)]
        if local.numel() == 0:
            return
        for item in create_read_items_for_chunk_list(name, entry, boxes):
            part = _box(local, item.dest_offsets, item.lengths)
            source = self._source(self.index.storage_data[item.storage_index])
            found = self._files.find(source)
            box = partial(_box, offsets=item.storage_offsets, lengths=item.lengths)
            if found is None or not moves.add(found, box(found.like), part):
                moves.other.append(partial(self._copy, name, source, box, part))

    @torch.no_grad()
    def _copy(
        self, name: str, source: Source, box: Callable[[torch.Tensor], torch.Tensor], target: torch.Tensor
    ) -> None:
        whole = self._read(source)
        if not isinstance(whole, torch.Tensor):
            raise self._damaged(f"a part of {name} is no tensor")
        target.copy_(box(whole))

    def read(self, name: str) -> Any:
        """A whole tensor on the CPU, or an object."""
        entry = self.tensor(name)
        if entry is None:
            return self._read(*map(self._source, self._infos(name)), weights_only=not self.trusted)
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        moves = Moves()
        self.route(name, whole, moves)
        moves.run()
        return whole

    def _read(self, source: Source, **kwargs: Any) -> Any:
        with file_errors("read", source.path), source.path.open("rb", buffering=0) as file:
            return pickles.read(cast(BinaryIO, Slice(file, source.offset, source.length)), "cpu", **kwargs)

    def _source(self, info: Any) -> Source:
        return Source(self.folder / info.relative_path, info.offset, info.length)

    def _infos(self, name: str) -> list[Any]:
        entry, stored = self.tensor(name), self.index.storage_data
        chunks = [None] if entry is None else [chunk.offsets for chunk in entry.chunks]
        try:
            return [stored[MetadataIndex(name, offsets)] for offsets in chunks]
        except KeyError as error:
            raise self._damaged(f"it does not say where {name} lies") from error

    def _refuse_unreadable(self, name: str, info: Any) -> None:
        path = info.relative_path
        if not isinstance(path, str) or PurePosixPath(path).name != path or "\\" in path:
            raise self._damaged(f"{name} would be read from {path!r}, outside of the folder")
        if getattr(info, "transform_descriptors", None):
            raise self._damaged(f"{name} is stored with {', '.join(info.transform_descriptors)}")

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.folder / names.SHARDED_INDEX} cannot be used", why=why)


def _box(tensor: torch.Tensor, offsets: Iterable[int], lengths: Iterable[int]) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def model_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder of a model's parts: ``folder`` itself, or the first model's in a checkpoint.

    Raises:
        CheckpointNotFoundError: there is none.
    """
    given = Path(folder).expanduser()
    for path in (given, given / names.sharded_folder("models", 0)):
        if (path / names.SHARDED_INDEX).is_file():
            return path
    raise CheckpointNotFoundError(
        f"there is no sharded model in {given}",
        why=f"neither it nor {names.sharded_folder('models', 0)} in it has a {names.SHARDED_INDEX}",
        fix="name a checkpoint that was saved in parts, or the folder of its model",
    )


def tensors_of(folder: str | os.PathLike[str]) -> Mapping[str, LazyTensor]:
    """The tensors of a model that was saved in parts, by the model's names; none is read yet.

    A single key above all names (``model``) is left out. Objects that are no tensors are too.

    Args:
        folder: the folder of parts, or a checkpoint that holds one.

    Raises:
        CheckpointError: parts are missing, or the index cannot be read.
    """
    shards = Shards(model_folder(folder))
    found = {name: entry for name in shards.paths if (entry := shards.tensor(name)) is not None}
    shards.check(found)
    tops = {shards.paths[name][0] for name in found}
    below = len(tops) == 1 and all(len(shards.paths[name]) > 1 for name in found)
    lazy: dict[str, LazyTensor] = {}
    for name, entry in found.items():
        short = ".".join(map(str, shards.paths[name][1 if below else 0 :]))
        read = _reader(shards, name)
        lazy[short] = LazyTensor(entry.size, entry.properties.dtype, shards.places(name), read)
    return lazy


def _reader(shards: Shards, name: str) -> Callable[[], torch.Tensor]:
    return lambda: shards.read(name)
