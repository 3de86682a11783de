"""Lazy access to weights in files, whatever wrote them: one tensor is read at a time.

    weights = open_weights(Path("run/checkpoint_3"))
    for name, tensor in weights.tensors.items():
        print(name, tensor.dtype, tensor.shape)
        tensor.read()                     # this one alone

Files are read, not mapped: what is mapped and touched counts as memory of the process for as long as the
system likes. A tensor's ``region`` says where it can be mapped, see ``file_reads.py``.
"""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from safetensors import safe_open
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from accelerate.checkpoint import layout, state_dict_files, torch_files
from accelerate.checkpoint.file_access import CheckpointNotFoundError, MissingFileError, file_errors
from accelerate.checkpoint.file_reads import FileRegion, read_exactly
from accelerate.checkpoint.model_tensors import LazyTensor, SavedTensors
from accelerate.core.errors import AccelerateError, CheckpointError
from accelerate.world import collective

_DTYPES = {code: dtype for dtype, code in state_dict_files._CODES.items()}
# Functions in the pickle of a torch file that make a tensor of its values.
_NEED_DATA = (b"_rebuild_sparse_tensor", b"_rebuild_qtensor", b"_rebuild_nested_tensor")


@dataclass(frozen=True)
class LazyWeights:
    """The weights of one model, not read yet.

    Attributes:
        tensors: by name; none is read yet.
        aliases: names that share the tensor of another name.
        others: what is saved beside the tensors and is none: name -> the function that reads it.
        metadata: path of a module -> what its state dict notes of it, such as its version.
    """

    tensors: dict[str, LazyTensor]
    aliases: dict[str, str]
    others: dict[str, Callable[[], Any]] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def rename(self, function: Callable[[str], str]) -> LazyWeights:
        """Return the weights by other names, without metadata; unchanged if two names would become one."""
        all_names = [*self.tensors, *self.aliases, *self.others]
        if len({function(name) for name in all_names}) < len(all_names):
            return self
        return LazyWeights(
            {function(name): tensor for name, tensor in self.tensors.items()},
            {function(alias): function(name) for alias, name in self.aliases.items()},
            {function(name): read for name, read in self.others.items()},
        )

    def by_all_names(self) -> SavedTensors:
        """Return the tensors by all names, aliases included."""
        ties = {alias: self.tensors[name] for alias, name in self.aliases.items()}
        return SavedTensors({**self.tensors, **ties}, self.others, self.metadata)


def open_weights(path: Path) -> LazyWeights:
    """Open the weights in a file, behind an index, or in a folder.

    Args:
        path: a safetensors or torch file; an index of shards; or a folder with one of these, a checkpoint, or
            the folder of a sharded model.

    Raises:
        CheckpointNotFoundError: there are none.
        CheckpointError: a file is missing, damaged, would run code, or leads out of its folder.
    """
    if path.is_dir():
        path = find_weights(path)
    if path.is_dir():
        from accelerate.checkpoint.dcp_files import lazy_tensors

        return group_ties(lazy_tensors(path))
    if not path.is_file():
        raise CheckpointNotFoundError(
            f"there is no file or folder {path}",
            fix="name a file of weights, the index of its shards, or the folder that holds them",
        )
    if path.name.endswith(".json"):
        return _join_shards(shards_of(path))
    return _open_safetensors(path) if path.suffix == ".safetensors" else _open_torch_file(path)


def find_weights(folder: Path, model: int = 0) -> Path:
    """Return the file, index or sub-folder of a folder that holds the weights of a model.

    Raises:
        CheckpointNotFoundError: it holds none, or several and it is not clear which.
    """
    file_names = [layout.file_name("models", model), layout.file_name("torch_models", model)]
    file_names += [layout.file_name("sharded_models", model), layout.file_name("gathered_models", model)]
    if model == 0:
        file_names[1:1] = [layout.SAFE_WEIGHTS_INDEX_NAME]
        file_names += [layout.WEIGHTS_INDEX_NAME, layout.SHARDED_INDEX]
    for name in file_names:
        if (folder / name).exists():
            return folder if name == layout.SHARDED_INDEX else folder / name
    entries = sorted(p.name for p in folder.iterdir())
    for ending in (".index.json", ".safetensors", ".bin"):
        matches = [name for name in entries if name.endswith(ending)] if model == 0 else []
        if len(matches) == 1:
            return folder / matches[0]
        if matches:
            break
    raise CheckpointNotFoundError(
        f"{folder} is not a folder with the weights of model {model}",
        why=f"it holds: {', '.join(entries[:12]) or 'nothing'}",
        fix="name a file of weights or the index of its shards",
    )


def files_of(path: Path) -> list[Path]:
    """Return the files that ``open_weights`` reads of a file, an index or the folder of a sharded model."""
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.is_file())
    return [path, *shards_of(path)] if path.name.endswith(".json") else [path]


def shards_of(index: Path) -> dict[Path, list[str]]:
    """Return the shards that an index names, with the names of the tensors in them.

    Raises:
        CheckpointError: see ``read_weight_map``.
    """
    shards: dict[Path, list[str]] = {}
    for name, file in read_weight_map(index).items():
        shards.setdefault(index.parent / file, []).append(name)
    return shards


def read_weight_map(index: Path) -> dict[str, str]:
    """Return tensor -> file of an index of shards: its table ``weight_map``, or all of it where it has none.

    Raises:
        CheckpointError: it is no index, or leads out of its folder.
    """
    with file_errors("read", index):
        body = json.loads(index.read_text(encoding="utf-8"))
    table = body.get("weight_map", body) if isinstance(body, dict) else None
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{index} is no index of shards", why="it has no table 'weight_map'")
    for name, file in table.items():
        if not isinstance(file, str) or not _is_inside(file):
            raise CheckpointError(
                f"{index} cannot be used", why=f"{name} would be read from {file!r}, outside of the folder"
            )
    return table


def _is_inside(file: str) -> bool:
    """Return True for the relative path of a file in the index's folder or in a folder below it."""
    path = PurePosixPath(file)
    leads_away = path.is_absolute() or ".." in path.parts or "\\" in file or PureWindowsPath(file).drive
    return bool(path.parts) and not leads_away


def _join_shards(shards: Mapping[Path, Iterable[str]]) -> LazyWeights:
    """Open the shards of an index; a name that several hold comes from the one that the index says."""
    owners = {name: path for path, members in shards.items() for name in members}
    lazy_tensors: dict[str, LazyTensor] = {}
    aliases: dict[str, str] = {}
    others: dict[str, Callable[[], Any]] = {}
    metadata: dict[str, Any] = {}
    for path, members in shards.items():
        if not path.is_file():
            raise MissingFileError(f"{path} is missing", why="the index names it")
        if path.suffix == ".json":
            raise CheckpointError(f"{path} is no file of weights", why="an index names it as one")
        shard = open_weights(path)
        absent = [name for name in members if name not in shard.by_all_names() and name not in shard.others]
        if absent:
            raise CheckpointError(f"{path} does not hold {absent[0]}", why="the index says that it does")
        own = {n: t for n, t in shard.by_all_names().items() if owners.get(n, path) == path}
        ties = {alias: name for alias, name in shard.aliases.items() if alias in own and name in own}
        lazy_tensors |= {name: tensor for name, tensor in own.items() if name not in ties}
        aliases |= ties
        others |= {name: read for name, read in shard.others.items() if owners.get(name, path) == path}
        metadata |= shard.metadata
    aliases = {alias: name for alias, name in aliases.items() if alias not in lazy_tensors}
    return LazyWeights(lazy_tensors, aliases, others, metadata)


def group_ties(lazy_tensors: Mapping[str, LazyTensor]) -> LazyWeights:
    """Group tied tensors: those with the same file ranges keep one name, the others become aliases."""
    first: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in lazy_tensors.items():
        owner = first.setdefault((tensor.file_ranges, tensor.dtype, tensor.shape), name)
        if owner != name and tensor.nbytes and tensor.file_ranges:
            aliases[name] = owner
    return LazyWeights({name: t for name, t in lazy_tensors.items() if name not in aliases}, aliases)


def _open_safetensors(path: Path) -> LazyWeights:
    with file_errors("read", path):
        with safe_open(path, framework="pt"):
            pass  # the library has checked the header: names, sizes and places fit together
        entries, start, metadata = state_dict_files.read_safetensors_header(path)
        lazy_tensors: dict[str, LazyTensor] = {}
        for name, entry in entries.items():
            begin, end = (start + offset for offset in entry["data_offsets"])
            if entry["dtype"] not in _DTYPES:
                raise CheckpointError(f"{name} in {path} is of {entry['dtype']}, which is not known here")
            dtype = _DTYPES[entry["dtype"]]
            shape = state_dict_files.shape_in_torch(entry["shape"], dtype)
            lazy_tensors[name] = _tensor_in_file(path, begin, end - begin, shape, dtype)
    aliases = {
        alias: name for alias, name in metadata.items() if name in lazy_tensors and alias not in lazy_tensors
    }
    return LazyWeights(lazy_tensors, aliases)


def _tensor_in_file(
    path: Path,
    offset: int,
    size: int,
    shape: torch.Size,
    dtype: torch.dtype,
    stride: tuple[int, ...] | None = None,
) -> LazyTensor:
    """Return the tensor whose values take ``size`` bytes of a file from an offset on."""
    region, read = FileRegion(path, offset, stride), partial(_read_tensor, path, offset, shape, dtype, stride)
    mappable = region if offset % dtype.itemsize == 0 else None  # a tensor begins at whole elements
    return LazyTensor(shape, dtype, ((path.name, offset, size),), read, mappable)


def _read_tensor(
    path: Path, offset: int, shape: torch.Size, dtype: torch.dtype, stride: tuple[int, ...] | None = None
) -> torch.Tensor:
    span = shape if stride is None else (1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)),)
    with file_errors("read", path):
        tensor = torch.empty(span, dtype=dtype, device="cpu")
        read_exactly(path, offset, state_dict_files.raw_bytes(tensor))
    return tensor if stride is None else tensor.as_strided(shape, stride)


def _open_torch_file(path: Path) -> LazyWeights:
    """Open a torch file: unpickle it without its data, which gives the file ranges of all plain tensors.

    Of a file that holds others too (views with other signs, tensor subclasses), these are mapped.
    """
    outline = state = _read_outline(path)
    tensors = {str(n): v for n, v in state.items() if isinstance(v, torch.Tensor) and not v.is_nested}
    odd_names = {name for name, value in tensors.items() if not _is_in_file(value)}
    if any(isinstance(tensors[name], FakeTensor) or _is_tensor_subclass(tensors[name]) for name in odd_names):
        state = _read_state(path, mmap=True)
        tensors |= {str(name): value for name, value in state.items() if str(name) in odd_names}
    first: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, value in tensors.items():
        owner = first.setdefault(_tie_key(value) or name, name)
        if owner != name and value.numel():
            aliases[name] = owner
    lazy_tensors = {name: _lazy_tensor(path, value) for name, value in tensors.items() if name not in aliases}
    others = {str(key): partial(_read_entry, path, key) for key in outline if str(key) not in tensors}
    return LazyWeights(lazy_tensors, aliases, others, dict(getattr(outline, "_metadata", None) or {}))


def _read_outline(path: Path) -> Mapping[Any, Any]:
    """Return the state dict in a file with tensors that have no data; with data where torch cannot do it."""
    if not zipfile.is_zipfile(path):  # before torch 1.6: can only be read whole
        return _read_state(path)
    if _needs_data(path):
        return _read_state(path, mmap=True)
    try:
        with FakeTensorMode():
            return _read_state(path)
    except CheckpointError:  # what cannot be read at all fails again
        return _read_state(path, mmap=True)


def _needs_data(path: Path) -> bool:
    """Return True for a file of other byte order, or with tensors that torch cannot make without data."""
    with file_errors("read", path), zipfile.ZipFile(path) as archive:
        # A larger one is packed, which ``read`` refuses if it is too much.
        names = [each.filename for each in archive.infolist() if each.file_size <= path.stat().st_size]
        for name in names:
            if name.endswith("/byteorder") and archive.read(name).decode() != sys.byteorder:
                return True
            if name.endswith("/data.pkl") and any(call in archive.read(name) for call in _NEED_DATA):
                return True
    return False


def _read_state(path: Path, **options: Any) -> Mapping[Any, Any]:
    """Return the state dict in a file: its object, or the only entry of a dict."""
    trust = "load(path, weights_only=False) of accelerate.utils"
    state = torch_files.read(path, "cpu", trust, **options)
    if isinstance(state, Mapping) and len(state) == 1 and isinstance(next(iter(state.values())), Mapping):
        state = next(iter(state.values()))
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} holds no weights", why=f"it holds a {type(state).__name__}")
    return state


def _read_entry(path: Path, key: Any) -> Any:
    return _read_state(path, mmap=True)[key]


def _is_tensor_subclass(value: object) -> bool:
    """Return True for tensor subclasses, which may hold other tensors and must be read to know."""
    plain = (torch.Tensor, torch.nn.Parameter, FakeTensor)
    return isinstance(value, torch.Tensor) and type(value) not in plain


def _is_in_file(value: torch.Tensor) -> bool:
    """Return True for a tensor that was read without its data and whose values lie in the file as they are.

    Torch 2.6 does not say where. Conjugate and negative views have other signs in the file.
    """
    if _is_tensor_subclass(value) or value.layout is not torch.strided or value.is_quantized:
        return False
    if value.numel() == 0:
        return True
    return _storage_start(value) is not None and not (value.is_conj() or value.is_neg())


def _storage_start(value: torch.Tensor) -> int | None:
    """Return the offset in the file of a storage that was read without its data."""
    return getattr(value.untyped_storage(), "_checkpoint_offset", None)


def _tie_key(value: torch.Tensor) -> Any:
    """Return what is equal for tied tensors; None for a tensor that is never tied."""
    if _is_tensor_subclass(value) or value.layout is not torch.strided or value.is_quantized:
        return None
    start, bits = _storage_start(value), (value.is_conj(), value.is_neg())
    at = ("memory", value.untyped_storage()._cdata) if start is None else ("file", start)
    return at, value.storage_offset(), value.shape, value.stride(), value.dtype, bits


def _lazy_tensor(path: Path, value: torch.Tensor) -> LazyTensor:
    start = _storage_start(value) if _is_in_file(value) else None
    if start is None or value.numel() == 0:
        return in_memory(value)
    begin = start + int(value.storage_offset()) * value.element_size()
    stride = None if value.is_contiguous() else value.stride()
    return _tensor_in_file(path, begin, value.nbytes, value.shape, value.dtype, stride)


def in_memory(value: torch.Tensor) -> LazyTensor:
    """Wrap a tensor in memory as a lazy tensor."""
    shape, dtype = value.shape, value.dtype
    if value.numel() == 0 and value.layout is torch.strided:
        return LazyTensor(shape, dtype, (), lambda: torch.empty(shape, dtype=dtype, device="cpu"))
    return LazyTensor(
        shape, dtype, (), lambda: value.detach().resolve_conj().resolve_neg(), layout=value.layout
    )


_CASTABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def cast_to(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return ``wanted`` for the usual floating point dtypes, ``own`` for all others."""
    return wanted if wanted is not None and own in _CASTABLE else own


def lazy_casts(weights: Mapping[str, LazyTensor], dtype: torch.dtype | None) -> dict[str, LazyTensor]:
    """Return the weights as lazy tensors of another dtype, by name."""

    def read_as(tensor: LazyTensor, new: torch.dtype) -> torch.Tensor:
        return tensor.read().to(new)

    news = {name: cast_to(tensor.dtype, dtype) for name, tensor in weights.items()}
    return {
        name: replace(tensor, dtype=news[name], read=partial(read_as, tensor, news[name]), region=None)
        for name, tensor in weights.items()
    }


def outline(tensors: Mapping[str, LazyTensor]) -> dict[str, torch.Tensor]:
    """Return tensors of the same shapes and dtypes on the meta device."""
    return {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}


def weights_from_state(state: Mapping[str, Any]) -> LazyWeights:
    """Return a model's state dict as lazy weights: tied tensors once, other views on their own.

    Raises:
        CheckpointError: a value is no tensor, or has no data.
    """
    aliases = state_dict_files.find_ties(state)
    own = {name: value for name, value in state.items() if name not in aliases}
    for name, value in own.items():
        dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
        if not dense or value.device.type == "meta":
            state_dict_files.untie({name: value})  # raises the error
    return LazyWeights({name: in_memory(value) for name, value in own.items()}, aliases)


_TensorInfo = tuple[tuple[int, ...], torch.dtype, tuple[tuple[str, int, int], ...]]


def weights_from_rank0(path: Callable[[], Path], display_path: Path) -> tuple[Path, SavedTensors]:
    """Open weights on rank 0 for all ranks.

    All ranks must read the same tensors in the same order.

    Args:
        path: gives the files; called on rank 0 only.
        display_path: what the others call them in errors.

    Returns:
        (the files, tensors by all names); reading one is a broadcast.

    Raises:
        AccelerateError: what rank 0 found wrong, on all ranks.
    """
    saved = SavedTensors({})
    source, problem = display_path, None
    if collective.rank() == 0:
        try:
            source = path()
            saved = open_weights(source).by_all_names()
        except AccelerateError as error:
            problem = error
    infos: list[tuple[str, _TensorInfo]] | AccelerateError
    listed = [(name, (tuple(t.shape), t.dtype, t.file_ranges)) for name, t in saved.items()]
    infos, metadata = collective.broadcast_object((problem or listed, saved.metadata))
    if isinstance(infos, AccelerateError):  # raised on all ranks, so that none waits for another
        raise infos
    tensors = {name: _broadcast_tensor(info, saved.get(name)) for name, info in infos}
    return source, SavedTensors(tensors, metadata=metadata)


def _broadcast_tensor(info: _TensorInfo, saved: LazyTensor | None) -> LazyTensor:
    shape, dtype, file_ranges = info

    def read() -> torch.Tensor:
        value: Any = torch.empty(shape, dtype=dtype, device="cpu") if saved is None else saved.read()
        return collective.broadcast(value.contiguous())

    return LazyTensor(torch.Size(shape), dtype, file_ranges, read)
