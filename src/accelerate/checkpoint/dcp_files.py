"""Sharded states in files, in the format of ``torch.distributed.checkpoint`` (DCP).

A folder holds an index, ``.metadata``, and shard files, ``__<rank>_<n>.distcp``. The index says where each
chunk of a tensor lies.

Writing: each rank writes one file. torch's planner says which rank writes what: of a DTensor each rank its
own shard, of a replicated tensor one of the ranks, so that files have similar sizes. The plans travel in an
all-gather that all ranks of a save make anyway; after it each rank can write, and the index can be built,
without communication. Tied tensors are written once: in the index, both names have the same file ranges.

Reading: any rank reads the chunks that overlap its own, whoever saved them. The index is a pickle: here it is
read with the few classes that such an index is made of, and can run nothing and change nothing.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from accelerate.checkpoint import layout, torch_files
from accelerate.checkpoint.file_access import CheckpointNotFoundError, MissingFileError, file_errors
from accelerate.checkpoint.file_reads import FileRangeReader, ReadPlan, TensorLocation
from accelerate.checkpoint.layout import ManifestEntry
from accelerate.checkpoint.model_tensors import LazyTensor
from accelerate.checkpoint.shard_plans import local_chunks
from accelerate.core.errors import CheckpointError
from accelerate.core.pickle_scan import paused_gc, scan_pickle
from accelerate.core.tree import LazyMapping

# (entry of the index, offset, bytes) of each tensor or object in a file
WrittenItems = list[tuple[MetadataIndex, int, int]]
# the keys of a value in a nested state: ("model", "layer.weight")
KeyPath = tuple[Any, ...]


def filter_tensors(state: Any, kind: type[torch.Tensor]) -> Any:
    """Return what a nested state has of tensors of a class, and of lists of them; None if it has none."""
    if isinstance(state, Mapping):
        tensors = {key: filter_tensors(value, kind) for key, value in state.items()}
        return {key: value for key, value in tensors.items() if value is not None} or None
    items = state if isinstance(state, list) and state else [state]
    return state if all(isinstance(item, kind) for item in items) else None


@dataclass
class RankShardFile:
    """A ``ShardWriter``: this rank's shard file, and the index of all.

    Attributes:
        category, entry, file, content: see there.
        items: what torch's planner calls each tensor of ``content``.
        objects: what is no tensor, as bytes.
        index: of all ranks, without the positions in files; on a rank that commits.
        ties: keys that lead to what other keys have.
    """

    category: str
    entry: ManifestEntry
    file: str
    content: list[torch.Tensor]
    items: list[WriteItem]
    objects: list[tuple[MetadataIndex, bytes]]
    index: Metadata | None
    ties: dict[KeyPath, KeyPath]

    def fill(self, file: BinaryIO, /) -> WrittenItems:
        """Write this rank's file; return the index entry, offset and length of everything in it."""
        written: WrittenItems = []
        for index, content in self.objects:
            written.append((index, file.tell(), len(content)))
            file.write(content)
        for item, tensor in zip(self.items, self.content, strict=True):
            start = file.tell()
            value = tensor.cpu()
            # A view would be saved with all of the memory behind it.
            whole = value.untyped_storage().nbytes() == value.nbytes
            torch_files.write(value if whole else value.clone(), file)
            written.append((item.index, start, file.tell() - start))
        return written

    def build_index(self, written: list[WrittenItems | None], /) -> tuple[str, bytes]:
        """Return (name, content) of the index."""
        assert self.index is not None
        stored: dict[MetadataIndex, Any] = {}
        for rank, things in enumerate(written):
            for index, offset, length in things or []:
                stored[index] = filesystem._StorageInfo(layout.file_name("shards", rank=rank), offset, length)
        entries = dict(self.index.state_dict_metadata)
        paths = dict(self.index.planner_data)
        for keys, owner in self.ties.items():
            alias, name = (".".join(map(str, path)) for path in (keys, owner))
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
        if "version" in {each.name for each in fields(Metadata)}:
            index.version = filesystem.CURRENT_DCP_VERSION
        return f"{self.entry.file}/{layout.SHARDED_INDEX}", pickle.dumps(index)


_SMALL_INDEX = 2**20  # bytes
_ZIP = b"PK\x03\x04"
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
    path = folder / layout.SHARDED_INDEX
    if not path.is_file():
        raise CheckpointNotFoundError(
            f"{path} is missing", why="it says where each tensor lies, and is written last"
        )
    with file_errors("read", path), paused_gc():
        size, others = path.stat().st_size, (file for file in path.parent.iterdir() if file != path)
        if size > _SMALL_INDEX:  # an entry is shorter than the torch file that it stands for
            shards = sum(file.stat().st_size for file in others if file.is_file())
            if size > shards:
                raise CheckpointError(
                    f"cannot read {path}",
                    why=f"it has {size:,} bytes, more than all shards ({shards:,} bytes)",
                )
        data = path.read_bytes()
        try:
            if not trusted:
                scan_pickle(data, opcodes=None)
            index = pickle.loads(data) if trusted else _ShardIndexUnpickler(io.BytesIO(data)).load()
        except _UnsafePickleClassError as error:
            raise CheckpointError(
                f"{path} holds more than an index, and reading it could run code",
                why=f"it names {error}",
                fix="if you trust whoever wrote the file: load_kwargs={'weights_only': False}",
            ) from error
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise CheckpointError(f"{path} is not the index of a sharded checkpoint")
    return index


@dataclass(frozen=True)
class FileSlice:
    """A torch file inside a file.

    Attributes:
        path: the file.
        offset, length: of the torch file, in bytes.
    """

    path: Path
    offset: int
    length: int


def locate_tensor(source: FileSlice, unpickled: dict[bytes, Any]) -> TensorLocation | None:
    """Return the position of a plain tensor in a torch file, in this machine's byte order; None for others.

    Args:
        source: the torch file.
        unpickled: pickles of torch files and what they hold: those of many are equal, and read once.

    Raises:
        CheckpointError: the file is damaged, or would run code.
    """
    with (
        file_errors("read", source.path),
        FileRangeReader(source.path, source.offset, source.length) as reader_of_range,
    ):
        torch_file = cast(BinaryIO, reader_of_range)
        if torch_file.read(len(_ZIP)) != _ZIP:
            return None  # before torch 1.6
        torch_file.seek(0)
        reader: Any = torch._C.PyTorchFileReader(torch_file)
        if not reader.has_record("data/0") or reader.has_record("data/1"):
            return None
        if reader.has_record("byteorder") and reader.get_record("byteorder").decode() != sys.byteorder:
            return None
        pickled = reader.get_record("data.pkl")
        if pickled not in unpickled:
            torch_file.seek(0)
            unpickled[pickled] = torch_files.read(torch_file, "meta")
        like = unpickled[pickled]
        if type(like) is not torch.Tensor or like.layout is not torch.strided:
            return None
        start = source.offset + reader.get_record_offset("data/0")
    return TensorLocation(source.path, start, like)


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
        tensors: size, dtype and chunks of each entry that is a tensor, by its name.

    Raises:
        CheckpointError: the index is missing, damaged, would run code, or leads out of the folder.
    """

    def __init__(self, folder: Path, *, trusted: bool = False) -> None:
        self.folder, self.trusted, self.index = folder, trusted, read_index(folder, trusted=trusted)
        self._unpickled: dict[bytes, Any] = {}
        with file_errors("read", folder / layout.SHARDED_INDEX):
            for key, info in self.index.storage_data.items():
                path = info.relative_path
                if not isinstance(path, str) or path in ("", ".", "..") or "/" in path or "\\" in path:
                    raise self._damage_error(f"{key.fqn} would be read from {path!r}, outside of the folder")
                if transforms := getattr(info, "transform_descriptors", None):
                    raise self._damage_error(f"{key.fqn} is stored with {', '.join(transforms)}")
            nested = self.index.planner_data if isinstance(self.index.planner_data, dict) else {}
            entries = self.index.state_dict_metadata
            self.paths: dict[str, KeyPath] = {name: tuple(nested.get(name, (name,))) for name in entries}
            self.tensors = {n: e for n, e in entries.items() if isinstance(e, TensorStorageMetadata)}

    def file_ranges(self, name: str) -> tuple[tuple[str, int, int], ...]:
        """Return (file, offset, bytes) of every chunk of an entry; equal for tied tensors.

        Raises:
            CheckpointError: the index does not say where a chunk lies.
        """
        entry, stored = self.tensors.get(name), self.index.storage_data
        chunks = [None] if entry is None else [chunk.offsets for chunk in entry.chunks]
        try:
            infos = [stored[MetadataIndex(name, offsets)] for offsets in chunks]
        except KeyError as error:
            raise self._damage_error(f"it does not say where {name} lies") from error
        return tuple((info.relative_path, info.offset, info.length) for info in infos)

    def check_files(self, entry_names: Iterable[str]) -> None:
        """Refuse a folder in which shards are missing, without reading them.

        Raises:
            CheckpointError: names the file, or the tensor that is not complete.
        """
        sizes: dict[str, int] = {}
        for name in entry_names:
            with file_errors("read", self.folder / layout.SHARDED_INDEX):
                entry = self.tensors.get(name)
                if entry is not None and sum(math.prod(c.sizes) for c in entry.chunks) != math.prod(
                    entry.size
                ):
                    raise self._damage_error(
                        f"the chunks of {name} do not make up its shape {tuple(entry.size)}"
                    )
                for file, offset, length in self.file_ranges(name):
                    if file not in sizes:  # asked once: there may be a million chunks in a few files
                        path = self.folder / file
                        if not path.is_file():
                            why = f"a chunk of {name} was saved in it"
                            raise MissingFileError(f"{path} is missing", why=why)
                        sizes[file] = path.stat().st_size
                    size, end = sizes[file], offset + length
                    if not 0 <= offset <= end <= size:
                        raise CheckpointError(
                            f"{self.folder / file} is damaged",
                            why=f"it has {size} bytes, and {name} lies at {offset} to {end}",
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
        entry = self.tensors[name]
        assert entry.size == target.shape
        if isinstance(target, DTensor):
            local, boxes = target.to_local(), target.__create_chunk_list__()
        else:
            local, boxes = target, [ChunkStorageMetadata(torch.Size([0] * target.dim()), target.shape)]
        if local.numel() == 0:
            return
        pairs = [(local, box) for box in boxes]
        if any(hasattr(placement, "split_factor") for placement in getattr(target, "placements", ())):
            pairs = list(local_chunks(target))
        for part, chunk in pairs:
            for item in create_read_items_for_chunk_list(name, entry, [chunk]):
                target_box = _narrow_to_box(part, item.dest_offsets, item.lengths)
                info = self.index.storage_data[item.storage_index]
                source = FileSlice(self.folder / info.relative_path, info.offset, info.length)
                location = locate_tensor(source, self._unpickled)
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
        entry = self.tensors.get(name)
        if entry is None:
            ((file, offset, length),) = self.file_ranges(name)
            source = FileSlice(self.folder / file, offset, length)
            return self._read(source, weights_only=not self.trusted)
        with file_errors("read", self.folder):
            whole = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
            read_plan = ReadPlan()
            self.add_reads(name, whole, read_plan)
            read_plan.run()
        return whole

    def _read(self, source: FileSlice, **kwargs: Any) -> Any:
        with (
            file_errors("read", source.path),
            FileRangeReader(source.path, source.offset, source.length) as file,
        ):
            return torch_files.read(cast(BinaryIO, file), "cpu", **kwargs)

    def _damage_error(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.folder / layout.SHARDED_INDEX} cannot be used", why=why)


def _narrow_to_box(tensor: torch.Tensor, offsets: Iterable[int], lengths: Iterable[int]) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def optimizer_entries(shards: ShardFolderReader) -> tuple[dict[Any, list[str]], dict[Any, list[str]]]:
    """Return the entries of an optimizer's index: (by parameter name, by other keys of its state dict)."""
    states: dict[Any, list[str]] = {}
    other: dict[Any, list[str]] = {}
    for name, path in shards.paths.items():
        if len(path) > 2 and path[1] == "state":
            states.setdefault(path[2], []).append(name)
        elif len(path) > 1 and path[1] != "state":
            other.setdefault(path[1], []).append(name)
    return states, other


def read_nested(
    shards: ShardFolderReader,
    group: Iterable[str],
    depth: int,
    make_tensor: Callable[[ShardFolderReader, str, Sequence[Any]], Any] | None = None,
) -> Any:
    """Read the value below the first ``depth`` keys from its entries."""
    values: dict[Any, Any] = {}
    for name in group:
        path = shards.paths[name][depth:]
        if make_tensor is None or name not in shards.tensors:
            values[path] = shards.read(name)
        else:
            values[path] = make_tensor(shards, name, path)
    if () in values:
        return values[()]
    root: dict[Any, Any] = {}
    for path, value in values.items():
        holder = root
        for key in path[:-1]:
            holder = holder.setdefault(key, {})
        holder[path[-1]] = value
    return _restore_lists(root)


def _restore_lists(value: Any) -> Any:
    """Convert dicts with the keys 0, 1, 2 ... back to lists."""
    if not isinstance(value, dict):
        return value
    inner = {key: _restore_lists(item) for key, item in value.items()}
    if inner and set(inner) == set(range(len(inner))):
        return [inner[index] for index in range(len(inner))]
    return inner


def find_model_folder(folder: str | os.PathLike[str]) -> Path:
    """Return the folder of a sharded model: ``folder`` itself, or the first model's in a checkpoint.

    Raises:
        CheckpointNotFoundError: there is none.
    """
    base, name = Path(folder).expanduser(), layout.file_name("sharded_models")
    for path in (base, base / name):
        if (path / layout.SHARDED_INDEX).is_file():
            return path
    what, why = f"there is no sharded model in {base}", f"it has no {layout.SHARDED_INDEX}, nor {name} in it"
    fix = "name a sharded checkpoint, or the folder of its model"
    whole_names = [layout.file_name(kind) for kind in ("models", "torch_models", "gathered_models")]
    whole_names += [layout.SAFE_WEIGHTS_INDEX_NAME, layout.WEIGHTS_INDEX_NAME]
    if not base.is_dir():
        what, why = f"there is no folder {base}", ""
    elif whole := next((each for each in whole_names if (base / each).is_file()), None):
        why, fix = f"it holds {whole}: the model is whole already", f"load {base / whole} as it is"
    elif inner := [
        *base.glob(f"*/{name}/{layout.SHARDED_INDEX}"),
        *base.glob(f"{layout.AUTOMATIC_FOLDER}/*/{name}/{layout.SHARDED_INDEX}"),
    ]:
        newest = max(inner, key=lambda index: index.stat().st_mtime_ns)
        fix = f"name a checkpoint in it: {newest.parent.parent}"
    raise CheckpointNotFoundError(what, why=why, fix=fix)


def lazy_tensors(folder: str | os.PathLike[str]) -> Mapping[str, LazyTensor]:
    """Return the tensors of a sharded model by the model's names; none is read yet.

    A single key above all names (``model``) is left out. Objects that are no tensors are too.

    Args:
        folder: the folder of shards, or a checkpoint that holds one.

    Raises:
        CheckpointError: shards are missing, or the index cannot be read.
    """
    shards = ShardFolderReader(find_model_folder(folder))
    shards.check_files(shards.tensors)
    tops = {shards.paths[name][0] for name in shards.tensors}
    below = len(tops) == 1 and all(len(shards.paths[name]) > 1 for name in shards.tensors)
    tensors: dict[str, LazyTensor] = {}
    for name, entry in shards.tensors.items():
        short = ".".join(map(str, shards.paths[name][1 if below else 0 :]))
        ranges, read = shards.file_ranges(name), partial(shards.read, name)
        tensors[short] = LazyTensor(entry.size, entry.properties.dtype, ranges, read)
    return tensors


def lazy_param_state(shards: ShardFolderReader, group: Iterable[str]) -> Mapping[str, Any]:
    """Return the state of one parameter in the shards of an optimizer; values are read at each access."""
    entries: dict[str, list[str]] = {}
    for name in group:
        entries.setdefault(shards.paths[name][3], []).append(name)
    return LazyMapping({key: partial(read_nested, shards, names, 4) for key, names in entries.items()})
