"""Reading sharded states, in the format of ``torch.distributed.checkpoint``.

    for name, tensor in tensors_of("run/checkpoint_3/pytorch_model_fsdp_0").items():
        print(name, tensor.dtype, tensor.shape)
        tensor.read()                     # this one alone

A folder holds an index, ``.metadata``, and shard files, ``__<rank>_<n>.distcp``. The index says where each
chunk of a tensor lies, so any rank reads the chunks that overlap its own, whoever saved them. It is a pickle:
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
from accelerate.checkpoint.lazy_tensor import LazyTensor
from accelerate.checkpoint.tensor_read_plan import FileRangeReader, FileSlice, ReadPlan, TensorLocator
from accelerate.core.errors import CheckpointError

PathKey = tuple[Any, ...]

_METADATA = "torch.distributed.checkpoint.metadata"
_OLDER = "torch.distributed._shard.sharded_tensor.metadata"  # before torch 2.4
# module -> the classes and functions that an index may use; they hold values or look one up in torch
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


class _UnsafePickleClassError(pickle.UnpicklingError):
    """An index names a class that it has no need of."""


class _ShardIndexUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name in _CLASSES.get(module_name, ()):
            return super().find_class(module_name, global_name)
        dtype = vars(torch).get(global_name) if module_name == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if module_name.partition(".")[0] == "pathlib" and global_name.endswith("Path"):
            return PurePosixPath  # the path where it was saved, of any operating system
        raise _UnsafePickleClassError(f"{module_name}.{global_name}")


def read_index(folder: Path, *, trusted: bool = False) -> Metadata:
    """Read the index of a folder of shards.

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
            index = pickle.load(file) if trusted else _ShardIndexUnpickler(file).load()
        except _UnsafePickleClassError as error:
            raise CheckpointError(
                f"{path} holds more than an index, and reading it could run code",
                why=f"it names {error}",
                fix="if you trust whoever wrote the file: load_kwargs={'weights_only': False}",
            ) from error
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise CheckpointError(f"{path} is not the index of a sharded checkpoint")
    return index


class ShardFolderReader:
    """A folder of shards, open for reading.

    Args:
        folder: the folder.
        trusted: objects may be of any class, so reading them may run code.

    Attributes:
        folder: the same.
        index: the position of each chunk.
        paths: the keys that lead to each entry, by the entry's name:
            ``{"model.layer.weight": ("model", "layer.weight")}``.

    Raises:
        CheckpointError: the index is missing, damaged, would run code, or leads out of the folder.
    """

    def __init__(self, folder: Path, *, trusted: bool = False) -> None:
        self.folder, self.trusted, self._files = folder, trusted, TensorLocator()
        self.index = read_index(folder, trusted=trusted)
        nested = self.index.planner_data if isinstance(self.index.planner_data, dict) else {}
        self.paths: dict[str, PathKey] = {
            name: tuple(nested.get(name, (name,))) for name in self.index.state_dict_metadata
        }
        for key, info in self.index.storage_data.items():
            self._refuse_unreadable(key.fqn, info)

    def tensor_metadata(self, name: str) -> TensorStorageMetadata | None:
        """Return size, dtype and chunks of a tensor; None for other objects."""
        entry = self.index.state_dict_metadata[name]
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def file_ranges(self, name: str) -> tuple[tuple[str, int, int], ...]:
        """Return (file, offset, bytes) of every chunk of an entry; equal for tied tensors.

        Raises:
            CheckpointError: the index does not say where a chunk lies.
        """
        return tuple((info.relative_path, info.offset, info.length) for info in self._storage_infos(name))

    def check_files(self, entry_names: Iterable[str]) -> None:
        """Refuse a folder in which shards are missing, without reading them.

        Raises:
            CheckpointError: names the file, or the tensor that is not complete.
        """
        sizes: dict[str, int] = {}
        for name in entry_names:
            entry = self.tensor_metadata(name)
            if entry is not None and sum(math.prod(c.sizes) for c in entry.chunks) != math.prod(entry.size):
                raise self._damage_error(f"the chunks of {name} do not make up its shape {tuple(entry.size)}")
            for file, offset, length in self.file_ranges(name):
                path = self.folder / file
                if file not in sizes and not path.is_file():
                    raise CheckpointError(f"{path} is missing", why=f"a chunk of {name} was saved in it")
                size = sizes.setdefault(file, path.stat().st_size)
                if offset + length > size:
                    raise CheckpointError(
                        f"{path} is damaged",
                        why=f"it has {size} bytes, and {name} lies at {offset} to {offset + length}",
                    )

    @torch.no_grad()
    def add_reads(self, name: str, target: torch.Tensor, read_plan: ReadPlan) -> None:
        """Add the reads that fill ``target`` with a tensor to ``read_plan``.

        Args:
            name: of the entry.
            target: of its shape. Of a DTensor, this process's local shard is filled.
            read_plan: nothing is changed before they run.

        Raises:
            CheckpointError: a file is damaged.
        """
        entry = self.tensor_metadata(name)
        assert entry is not None
        assert entry.size == target.shape
        if isinstance(target, DTensor):
            local, boxes = target.to_local(), target.__create_chunk_list__()
        else:
            local, boxes = target, [ChunkStorageMetadata(torch.Size([0] * target.dim()), target.shape)]
        if local.numel() == 0:
            return
        for item in create_read_items_for_chunk_list(name, entry, boxes):
            target_box = _narrow_to_box(local, item.dest_offsets, item.lengths)
            source = self._file_slice(self.index.storage_data[item.storage_index])
            location = self._files.locate(source)
            box = partial(_narrow_to_box, offsets=item.storage_offsets, lengths=item.lengths)
            if location is None or not read_plan.add(location, box(location.meta_tensor), target_box):
                read_plan.fallback_reads.append(partial(self._copy, name, source, box, target_box))

    @torch.no_grad()
    def _copy(
        self, name: str, source: FileSlice, box: Callable[[torch.Tensor], torch.Tensor], target: torch.Tensor
    ) -> None:
        whole = self._read(source)
        if not isinstance(whole, torch.Tensor):
            raise self._damage_error(f"a chunk of {name} is no tensor")
        target.copy_(box(whole))

    def read(self, name: str) -> Any:
        """Read a whole tensor to the CPU, or an object."""
        entry = self.tensor_metadata(name)
        if entry is None:
            return self._read(
                *map(self._file_slice, self._storage_infos(name)), weights_only=not self.trusted
            )
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        read_plan = ReadPlan()
        self.add_reads(name, whole, read_plan)
        read_plan.run()
        return whole

    def _read(self, source: FileSlice, **kwargs: Any) -> Any:
        with file_errors("read", source.path), source.path.open("rb", buffering=0) as file:
            return pickles.read(
                cast(BinaryIO, FileRangeReader(file, source.offset, source.length)), "cpu", **kwargs
            )

    def _file_slice(self, info: Any) -> FileSlice:
        return FileSlice(self.folder / info.relative_path, info.offset, info.length)

    def _storage_infos(self, name: str) -> list[Any]:
        entry, stored = self.tensor_metadata(name), self.index.storage_data
        chunks = [None] if entry is None else [chunk.offsets for chunk in entry.chunks]
        try:
            return [stored[MetadataIndex(name, offsets)] for offsets in chunks]
        except KeyError as error:
            raise self._damage_error(f"it does not say where {name} lies") from error

    def _refuse_unreadable(self, name: str, info: Any) -> None:
        path = info.relative_path
        if not isinstance(path, str) or PurePosixPath(path).name != path or "\\" in path:
            raise self._damage_error(f"{name} would be read from {path!r}, outside of the folder")
        if getattr(info, "transform_descriptors", None):
            raise self._damage_error(f"{name} is stored with {', '.join(info.transform_descriptors)}")

    def _damage_error(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.folder / names.SHARDED_INDEX} cannot be used", why=why)


def _narrow_to_box(tensor: torch.Tensor, offsets: Iterable[int], lengths: Iterable[int]) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def find_model_folder(folder: str | os.PathLike[str]) -> Path:
    """Return the folder of a sharded model: ``folder`` itself, or the first model's in a checkpoint.

    Raises:
        CheckpointNotFoundError: there is none.
    """
    base = Path(folder).expanduser()
    for path in (base, base / names.sharded_folder("models", 0)):
        if (path / names.SHARDED_INDEX).is_file():
            return path
    raise CheckpointNotFoundError(
        f"there is no sharded model in {base}",
        why=f"neither it nor {names.sharded_folder('models', 0)} in it has a {names.SHARDED_INDEX}",
        fix="name a sharded checkpoint, or the folder of its model",
    )


def lazy_tensors(folder: str | os.PathLike[str]) -> Mapping[str, LazyTensor]:
    """Return the tensors of a sharded model by the model's names; none is read yet.

    A single key above all names (``model``) is left out. Objects that are no tensors are too.

    Args:
        folder: the folder of shards, or a checkpoint that holds one.

    Raises:
        CheckpointError: shards are missing, or the index cannot be read.
    """
    shards = ShardFolderReader(find_model_folder(folder))
    entries = {name: entry for name in shards.paths if (entry := shards.tensor_metadata(name)) is not None}
    shards.check_files(entries)
    tops = {shards.paths[name][0] for name in entries}
    below = len(tops) == 1 and all(len(shards.paths[name]) > 1 for name in entries)
    tensors: dict[str, LazyTensor] = {}
    for name, entry in entries.items():
        short = ".".join(map(str, shards.paths[name][1 if below else 0 :]))
        read = _read_later(shards, name)
        tensors[short] = LazyTensor(entry.size, entry.properties.dtype, shards.file_ranges(name), read)
    return tensors


def _read_later(shards: ShardFolderReader, name: str) -> Callable[[], torch.Tensor]:
    return lambda: shards.read(name)
