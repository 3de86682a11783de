"""Weights in files, whatever wrote them, read one tensor at a time.

    weights = weights_of(Path("run/checkpoint_3"))
    for name, tensor in weights.tensors.items():
        print(name, tensor.dtype, tensor.shape)
        tensor.read()                     # this one alone

Files are read, not mapped: what is mapped and touched counts as memory of the process for as long as the
system likes. Who wants a tensor mapped (``mapped.py``) is told where it lies.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import safe_open
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from accelerate.checkpoint import names, pickles, tensors
from accelerate.checkpoint.errors import CheckpointNotFoundError, file_errors
from accelerate.checkpoint.lazy import LazyTensor
from accelerate.checkpoint.mapped import Place
from accelerate.core.errors import CheckpointError

_DTYPES = {code: dtype for dtype, code in tensors._CODES.items()}


@dataclass(frozen=True)
class Weights:
    """The weights of one model.

    Attributes:
        tensors: by name; none is read yet.
        aliases: names that share the tensor of another name.
        others: names of what is saved beside the tensors and is none.
    """

    tensors: dict[str, LazyTensor]
    aliases: dict[str, str]
    others: tuple[str, ...] = ()

    def renamed(self, function: Callable[[str], str]) -> Weights:
        """With other names; as they are if two would become one."""
        every = [*self.tensors, *self.aliases, *self.others]
        if len({function(name) for name in every}) < len(every):
            return self
        return Weights(
            {function(name): tensor for name, tensor in self.tensors.items()},
            {function(alias): function(name) for alias, name in self.aliases.items()},
            tuple(map(function, self.others)),
        )

    def every(self) -> dict[str, LazyTensor]:
        """By all names, aliases too."""
        return {**self.tensors, **{alias: self.tensors[name] for alias, name in self.aliases.items()}}


def weights_of(path: Path) -> Weights:
    """The weights in a file, behind an index, or in a folder.

    Args:
        path: a safetensors or torch file; an index of shards; or a folder with one of these, a checkpoint, or
            the folder of a sharded model.

    Raises:
        CheckpointNotFoundError: there are none.
        CheckpointError: a file is missing, damaged, would run code, or leads out of its folder.
    """
    if path.is_dir():
        path = found_in(path)
    if path.is_dir():
        return _sharded(path)
    if not path.is_file():
        raise CheckpointNotFoundError(
            f"there is no file or folder {path}",
            fix="name a file of weights, the index of its shards, or the folder that holds them",
        )
    if path.name.endswith(".json"):
        return _joined(shards_of(path))
    return _safetensors(path) if path.suffix == ".safetensors" else _torch_file(path)


def found_in(folder: Path, model: int = 0) -> Path:
    """The file, index or sub-folder of a folder that holds the weights of a model.

    Raises:
        CheckpointNotFoundError: it holds none, or several and it is not clear which.
    """
    usual = [names.model_file(model, safe=True), names.model_file(model, safe=False)]
    usual += [names.sharded_folder("models", model), names.whole_file(model)]
    if model == 0:
        usual[1:1] = [names.SAFE_WEIGHTS_INDEX_NAME]
        usual += [names.WEIGHTS_INDEX_NAME, names.SHARDED_INDEX]
    for name in usual:
        if (folder / name).exists():
            return folder if name == names.SHARDED_INDEX else folder / name
    held = sorted(p.name for p in folder.iterdir())
    for ending in (".index.json", ".safetensors", ".bin"):
        fitting = [name for name in held if name.endswith(ending)] if model == 0 else []
        if len(fitting) == 1:
            return folder / fitting[0]
        if fitting:
            break
    raise CheckpointNotFoundError(
        f"{folder} is not a folder with the weights of model {model}",
        why=f"it holds: {', '.join(held[:12]) or 'nothing'}",
        fix="name a file of weights or the index of its shards",
    )


def files_of(path: Path) -> list[Path]:
    """The files that ``weights_of`` a file, an index or the folder of a sharded model reads."""
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.is_file())
    return [path, *shards_of(path)] if path.name.endswith(".json") else [path]


def shards_of(index: Path) -> dict[Path, list[str]]:
    """The shards that an index names, with the names of the tensors in them.

    Raises:
        CheckpointError: it is no index, or leads out of its folder.
    """
    with file_errors("read", index):
        body = json.loads(index.read_text(encoding="utf-8"))
    table = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(table, dict):
        raise CheckpointError(f"{index} is no index of shards", why="it has no table 'weight_map'")
    shards: dict[Path, list[str]] = {}
    for name, file in table.items():
        if not isinstance(file, str) or PurePosixPath(file).name != file or "\\" in file:
            raise CheckpointError(
                f"{index} cannot be used", why=f"{name} would be read from {file!r}, outside of the folder"
            )
        shards.setdefault(index.parent / file, []).append(name)
    return shards


def _joined(shards: Mapping[Path, Iterable[str]]) -> Weights:
    found: dict[str, LazyTensor] = {}
    aliases: dict[str, str] = {}
    others: list[str] = []
    for path, members in shards.items():
        if not path.is_file():
            raise CheckpointError(f"{path} is missing", why="the index names it")
        shard = weights_of(path)
        absent = [name for name in members if name not in shard.every() and name not in shard.others]
        if absent:
            raise CheckpointError(f"{path} does not hold {absent[0]}", why="the index says that it does")
        found |= shard.tensors
        aliases |= shard.aliases
        others += shard.others
    return Weights(found, {a: n for a, n in aliases.items() if a not in found}, tuple(others))


def _sharded(folder: Path) -> Weights:
    from accelerate.checkpoint.sharded import tensors_of

    return untied(tensors_of(folder))


def untied(found: Mapping[str, LazyTensor]) -> Weights:
    """Tensors by name; those that lie in one place are told by one name, and the others lead to it."""
    first: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in found.items():
        owner = first.setdefault((tensor.places, tensor.dtype, tensor.shape), name)
        if owner != name and tensor.nbytes:
            aliases[name] = owner
    return Weights({name: t for name, t in found.items() if name not in aliases}, aliases)


def _safetensors(path: Path) -> Weights:
    with file_errors("read", path):
        with safe_open(path, framework="pt"):
            pass  # the library has checked the header: names, sizes and places fit together
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        found: dict[str, LazyTensor] = {}
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            if entry["dtype"] not in _DTYPES:
                raise CheckpointError(f"{name} in {path} is of {entry['dtype']}, which is not known here")
            dtype, shape = _DTYPES[entry["dtype"]], torch.Size(entry["shape"])
            read = partial(_read, path, begin, shape, dtype)
            places = ((path.name, begin, end - begin),)
            found[name] = LazyTensor(shape, dtype, places, read, _place(path, begin, dtype))
    aliases = {alias: name for alias, name in metadata.items() if name in found and alias not in found}
    return Weights(found, aliases)


def _place(
    path: Path, offset: int, dtype: torch.dtype, stride: tuple[int, ...] | None = None
) -> Place | None:
    place = Place(path, offset, stride)
    return place if place.fits(dtype) else None


def _read(
    path: Path, offset: int, shape: torch.Size, dtype: torch.dtype, stride: tuple[int, ...] | None = None
) -> torch.Tensor:
    """A tensor from its place in a file."""
    span = shape if stride is None else (1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)),)
    tensor = torch.empty(span, dtype=dtype)
    target = tensors.raw(tensor)
    done = 0
    with file_errors("read", path), path.open("rb", buffering=0) as file:
        file.seek(offset)
        while done < len(target):
            got = file.readinto(target[done:])
            if not got:
                raise CheckpointError(f"{path} is damaged", why=f"it ends at {offset + done} bytes")
            done += got
    return tensor if stride is None else tensor.as_strided(shape, stride)


def _torch_file(path: Path) -> Weights:
    """Those of a torch file: it is read without its data, which gives the places of all tensors."""
    trust = "load(path, weights_only=False) of accelerate.utils"
    if zipfile.is_zipfile(path):
        with FakeTensorMode():
            state = pickles.read(path, "cpu", trust)
    else:  # of torch before 1.6: only read whole
        state = pickles.read(path, "cpu", trust)
    state = _state_in(path, state)
    if any(map(_is_special, state.values())):
        state = _state_in(path, pickles.read(path, "cpu", trust, mmap=True))
    held = {str(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}
    first: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, value in held.items():
        if _is_special(value):
            continue
        start = _start(value)
        at = start if start is not None else value.untyped_storage()._cdata
        key = (at, value.storage_offset(), value.shape, value.stride(), value.dtype)
        owner = first.setdefault(key, name)
        if owner != name and value.numel():
            aliases[name] = owner
    found = {name: _lazy(path, value) for name, value in held.items() if name not in aliases}
    return Weights(found, aliases, tuple(str(name) for name in state if name not in held))


def _state_in(path: Path, state: Any) -> Mapping[Any, Any]:
    """The state dict in what a file holds: it, or the only entry of a dict."""
    if isinstance(state, Mapping) and len(state) == 1 and isinstance(next(iter(state.values())), Mapping):
        state = next(iter(state.values()))
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} holds no weights", why=f"it holds a {type(state).__name__}")
    return state


def _is_special(value: object) -> bool:
    """A tensor of a class of its own, which may hold others: only known when it is read."""
    plain = (torch.Tensor, torch.nn.Parameter, FakeTensor)
    return isinstance(value, torch.Tensor) and type(value) not in plain


def _start(value: torch.Tensor) -> int | None:
    """Where the storage of a tensor that was read without its data begins in the file."""
    return getattr(value.untyped_storage(), "_checkpoint_offset", None)


def _lazy(path: Path, value: torch.Tensor) -> LazyTensor:
    start = None if _is_special(value) else _start(value)
    if start is None or value.numel() == 0:
        return in_memory(value)
    begin = start + int(value.storage_offset()) * value.element_size()
    stride = None if value.is_contiguous() else value.stride()
    read = partial(_read, path, begin, value.shape, value.dtype, stride)
    places = ((path.name, begin, value.nbytes),)
    return LazyTensor(value.shape, value.dtype, places, read, _place(path, begin, value.dtype, stride))


def in_memory(value: torch.Tensor) -> LazyTensor:
    """A tensor that is there already."""
    shape, dtype = value.shape, value.dtype
    if value.numel() == 0:
        return LazyTensor(shape, dtype, (), lambda: torch.empty(shape, dtype=dtype))
    return LazyTensor(shape, dtype, (), value.detach)


class Late:
    """Stands for a tensor in ``tensors.write``, and is read when its bytes are asked for."""

    def __init__(self, tensor: LazyTensor, dtype: torch.dtype | None = None) -> None:
        self.tensor = tensor
        self.shape = tensor.shape
        self.dtype = cast_to(tensor.dtype, dtype)

    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def detach(self) -> torch.Tensor:
        """The tensor."""
        return self.tensor.read().to(self.dtype)

    def meta(self) -> torch.Tensor:
        """One of the same shape and dtype, without data."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


_CASTABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def cast_to(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """``wanted`` for weights in the usual floating point formats, their own for all else."""
    return wanted if wanted is not None and own in _CASTABLE else own


def late(weights: Mapping[str, LazyTensor], dtype: torch.dtype | None = None) -> dict[str, Late]:
    """Stand-ins by name."""
    return {name: Late(tensor, dtype) for name, tensor in weights.items()}


def of_state(state: Mapping[str, Any]) -> Weights:
    """A model's state: tied tensors once, whatever else shares memory as tensors of their own.

    Raises:
        CheckpointError: a value is no tensor, or has no data.
    """
    aliases = tensors.tied(state)
    return Weights(dict(_checked(state, aliases)), aliases)


def _checked(state: Mapping[str, Any], aliases: Mapping[str, str]) -> Iterator[tuple[str, LazyTensor]]:
    for name, value in state.items():
        if name in aliases:
            continue
        if not isinstance(value, torch.Tensor) or value.device.type == "meta":
            tensors.separated({name: value})  # refuses it in words
        yield name, in_memory(value)
