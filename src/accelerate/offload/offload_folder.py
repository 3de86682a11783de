"""The values of offloaded weights by name: in an offload folder, in memory, in checkpoints.

A folder holds ``NAME.dat`` for each tensor, its raw bytes in C order, and ``index.json``:
``{name: {"dtype": "float32", "shape": [2, 3]}}``. An entry ``{"safetensors_file", "weight_name", "dtype"}``
has no file of its own: it points into a checkpoint. Everything is read as a view of the mapped file.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from accelerate.core.errors import OffloadError, PrepareError, warn_user
from accelerate.offload.offloaded_tensor import (
    HostMemoryWeightSource,
    TensorSource,
    check_replacement,
    in_memory,
)

INDEX = "index.json"
Folder: TypeAlias = "str | os.PathLike[str]"


class MissingWeightFileError(OffloadError, FileNotFoundError):
    """Offloaded weights, or their index, have no file (a FileNotFoundError, as under 1.15)."""


# ------------------------------------------------------------------------------------------------ writing


def _write_file(path: Path, data: bytes | memoryview) -> None:
    """Write a file atomically; programs that have the old file mapped keep it.

    Raises:
        OffloadError: the folder cannot be written, or is full.
    """
    draft = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_bytes(data)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise OffloadError(
            f"{path.name} cannot be written to the offload folder {path.parent}",
            why=f"{type(error).__name__}: {error.strerror or error}",
            fix="give a folder that can be written and has room, as offload_folder or offload_dir",
        ) from error


def offload_weight(weight: Any, weight_name: str, offload_folder: Folder, index: Any = None) -> Any:
    """Write one tensor to a folder.

    Args:
        weight: the tensor, on any device.
        weight_name: its name; the file is ``weight_name.dat``.
        offload_folder: the folder; made if it is not there.
        index: gets the entry of the tensor.

    A model of this process that reads a weight of this name from the folder keeps the one that it has, and a
    warning says so.

    Returns:
        The index, None if none was given.

    Raises:
        OffloadError: the tensor has no values, or the folder cannot be written.
    """
    value = weight.detach()
    if value.is_meta:
        raise OffloadError(
            f"{weight_name} cannot be offloaded: it has no values",
            why="it is on the meta device",
            fix="load the weights first",
        )
    if keep_replaced_files(offload_folder, [weight_name], lambda _: value):
        warn_user(
            f"a model of this process reads weights of the same names from {os.fspath(offload_folder)}, and "
            "keeps those that it has: give each model a folder of its own"
        )
    _write_weight(value, weight_name, offload_folder, index)
    return index


def _write_weight(value: torch.Tensor, name: str, folder: Folder, index: Any) -> None:
    """Write one tensor to a folder, and its entry to the index, if there is one.

    Raises:
        OffloadError: the folder cannot be written, its class wraps other tensors, or its file is that of
            another name.
    """
    if hasattr(type(value), "__tensor_flatten__"):
        raise OffloadError(
            f"{name} cannot be offloaded to disk",
            why=f"it is a {type(value).__name__}, which has its values in several tensors",
            fix="place its module on a device or the CPU, or load the model without quantization",
        )
    array: Any = raw_bytes(value).numpy()
    path = Path(folder, f"{name}.dat")
    if _is_same_file(path, path.with_name(f"{name.swapcase()}.dat")):  # names are compared without case here
        other = next((each for each in index or () if each != name and each.lower() == name.lower()), None)
        if other is not None and _is_same_file(path, path.with_name(f"{other}.dat")):
            raise OffloadError(
                f"{other} and {name} cannot both be offloaded to {folder}",
                why="names of files there do not tell upper case from lower case, and the two share one file",
                fix="give a folder on a file system that does, or place one of the two in memory",
            )
    _write_file(path, memoryview(array))
    if index is not None:
        index[name] = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}


def _is_same_file(path: Path, other: Path) -> bool:
    return path.exists() and other.exists() and path.samefile(other)


def save_offload_index(index: Mapping[str, Any] | None, offload_folder: Folder) -> None:
    """Add entries to the index of a folder; an empty index writes nothing.

    Raises:
        OffloadError: the folder cannot be written, or the index that is there cannot be read.
    """
    if not index:
        return
    path = Path(offload_folder, INDEX)
    entries = {**(_read_index(path) if path.exists() else {}), **index}
    _write_file(path, json.dumps(entries, indent=2).encode())


def offload_state_dict(save_dir: Folder, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write all tensors of a state dict to a folder, with their index.

    Raises:
        OffloadError: a tensor has no values, or the folder cannot be written.
    """
    index: dict[str, Any] = {}
    for name, weight in state_dict.items():
        index = offload_weight(weight, name, save_dir, index)
    save_offload_index(index, save_dir)


# ---------------------------------------------------------------------------------------- replaced files

# The loaders (``OffloadedWeightsLoader``) that are alive, by identity.
LOADERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def keep_replaced_files(
    folder: Folder, names: Iterable[str], read: Callable[[str], torch.Tensor], own: Any = None
) -> bool:
    """Map the files of models of this process that others are about to replace: a mapping keeps its file.

    Args:
        folder: the offload folder.
        names: what will be written.
        read: returns the value of a name.
        own: a loader that is to read the new values.

    Returns:
        True when there was one to keep.

    Raises:
        OffloadError: a file is damaged.
    """

    def list_readers() -> list[Any]:
        path = os.path.realpath(folder)
        loaders = [each for each in list(LOADERS.values()) if each.is_read_by_model and each is not own]
        loaders = [each for each in loaders if each.save_folder is not None]
        return [each for each in loaders if os.path.realpath(each.save_folder) == path]

    readers = list_readers()
    replaced = [
        name
        for name in names
        if any(each.reads_file(name) for each in readers)
        and _is_file_of_others(Path(folder, f"{name}.dat"), raw_bytes(read(name)))
    ]
    if replaced and not all(each.has_survived for each in readers):
        readers.clear()
        gc.collect()  # models that nobody has any more need no files
        readers = list_readers()
        for each in readers:
            each.has_survived = True
    kept = [(name, each) for name in replaced for each in readers if each.reads_file(name)]
    for name, each in kept:
        value = load_offloaded_weight(Path(folder, f"{name}.dat"), each.index[name])
        each.sources[name] = HostMemoryWeightSource(name, value)
    return bool(kept)


def raw_bytes(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in C order, on the CPU."""
    value = value.detach().cpu().contiguous()
    return value.reshape(-1).view(torch.uint8) if value.numel() else value.new_empty(0, dtype=torch.uint8)


def _is_file_of_others(file: Path, raw: torch.Tensor) -> bool:
    """Return True when a file exists and holds other bytes than these."""
    if not file.exists():
        return False
    if file.stat().st_size != raw.numel():
        return True
    return raw.numel() > 0 and not torch.equal(
        raw, torch.from_file(str(file), size=raw.numel(), dtype=torch.uint8)
    )


# ------------------------------------------------------------------------------------------------ reading


def _read_index(path: Path) -> dict[str, Any]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        kind = MissingWeightFileError if isinstance(error, FileNotFoundError) else OffloadError
        raise kind(
            f"the index of the offload folder {path.parent} cannot be read",
            why=f"{type(error).__name__}: {error}",
            fix="offload the weights again",
        ) from error
    if not isinstance(entries, dict):
        raise OffloadError(f"{path} is no index", why="it does not map names to entries")
    return entries


def _dtype(name: str, of: str) -> torch.dtype:
    torch_dtype = getattr(torch, name, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise OffloadError(
            f"the index gives {of} the dtype {name!r}", why="torch has no such dtype"
        ) from None
    return torch_dtype


def load_offloaded_weight(weight_file: Folder, weight_info: Mapping[str, Any]) -> torch.Tensor:
    """Return the tensor in a ``.dat`` file: a view of the mapped file, which writing to does not change.

    Args:
        weight_file: the file.
        weight_info: its entry in the index: dtype and shape.

    Raises:
        OffloadError: the file is missing or of another size than the entry says.
    """
    shape, dtype = torch.Size(weight_info["shape"]), _dtype(weight_info["dtype"], str(weight_file))
    if not shape.numel():
        return torch.empty(shape, dtype=dtype, device="cpu")
    expected = shape.numel() * dtype.itemsize
    try:
        actual = os.path.getsize(weight_file)
    except FileNotFoundError as error:
        raise _missing_file_error(weight_file) from error
    if actual != expected:
        raise OffloadError(
            f"the offloaded weight {weight_file} is damaged",
            why=f"it has {actual} bytes, and {list(shape)} of {dtype} are {expected}",
            fix="offload the weights again",
        )
    flat = torch.from_file(str(weight_file), shared=False, size=shape.numel(), dtype=dtype)
    return flat.reshape(shape)


def _missing_file_error(file: Folder) -> OffloadError:
    return MissingWeightFileError(
        f"the offloaded weights in {file} are gone",
        why="the index names this file, and it does not exist",
        fix="put it back, or offload the weights again",
    )


class HostWeights(dict[str, torch.Tensor]):
    """Offloaded weights in host memory; assigning to an entry copies into its memory."""

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        """Set a new entry, or copy into the one that exists, in its dtype if both are floating point.

        Raises:
            OffloadError: the value has another shape than the entry, or is of another kind.
        """
        entry = self.get(name)
        if entry is None:
            super().__setitem__(name, value)
        else:
            check_replacement(name, entry, value)
            with torch.no_grad():
                entry.copy_(value)


class PrefixedDataset(Mapping[str, torch.Tensor]):
    """The entries of a mapping below a prefix: the weights of one module.

    An entry is looked up by the rest of its name; iterating yields full names.

    Attributes:
        dataset: the whole mapping.
        prefix: what the names begin with, the dot included.
    """

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset, self.prefix = dataset, prefix
        if isinstance(dataset, OffloadedWeightsLoader):
            dataset.is_read_by_model = True

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        """Return the full names, by which clients look an entry up in ``dataset``."""
        return (key for key in self.dataset if key.startswith(self.prefix))

    def items(self) -> Any:
        """Return (full name, value) of all entries."""
        return {key: self.dataset[key] for key in self}.items()

    def values(self) -> Any:
        """Return the values of all entries."""
        return {key: self.dataset[key] for key in self}.values()

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset

    def in_memory(self, key: str) -> bool:
        """Return True when the entry is in memory, and so can be changed."""
        return in_memory(self.dataset, f"{self.prefix}{key}")

    def __deepcopy__(self, memo: dict[int, Any]) -> PrefixedDataset:
        """Copy the weights of the module, not those of the whole model."""
        dataset = self.dataset
        is_loader = isinstance(dataset, OffloadedWeightsLoader)
        values = dataset.state_dict if is_loader else dataset
        kind = HostWeights if isinstance(values, HostWeights) else dict
        weights = copy.deepcopy(kind({k: values[k] for k in values if k.startswith(self.prefix)}), memo)
        if not is_loader:
            return PrefixedDataset(weights, self.prefix)
        if id(dataset) not in memo:  # one for all modules of a model
            memo[id(dataset)] = dataset.copy_files(weights)
        dict.update(memo[id(dataset)].state_dict, weights)
        return PrefixedDataset(memo[id(dataset)], self.prefix)


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Weights by name: first what is in memory, then what an index finds in files.

    Args:
        state_dict: weights in memory.
        save_folder: the folder of the ``.dat`` files; its ``index.json`` is read if no index is given.
        index: entries of weights in files.
        device: where what is read from files goes; None leaves it a view of the mapped file.

    Attributes:
        all_keys: every name, once.
        sources: name -> source, before the index: of what is mapped from a checkpoint without an entry, or
            from a file whose name another model has taken in the folder.
        is_read_by_model: a model has its weights here; it keeps them when others of these names are written.
        has_survived: it was not freed by a garbage collection.

    Raises:
        PrepareError: none of the three is given.
        OffloadError: a file that the index names does not exist.
    """

    def __init__(
        self,
        state_dict: dict[str, torch.Tensor] | None = None,
        save_folder: Folder | None = None,
        index: Mapping[str, Any] | None = None,
        device: Any = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise PrepareError(
                "there is nothing to read weights from", fix="give a state_dict, a save_folder or an index"
            )
        self.state_dict = {} if state_dict is None else state_dict
        if index is None:
            index = _read_index(Path(save_folder, INDEX)) if save_folder is not None else {}
        self.index, self.save_folder, self.device = index, save_folder, device
        # Entries in checkpoints come first: clients take the first name and look for its file in the index.
        linked = [name for name, entry in index.items() if entry.get("safetensors_file")]
        self.all_keys = list(dict.fromkeys((*linked, *self.state_dict, *index)))
        for file in {entry["safetensors_file"] for entry in index.values() if entry.get("safetensors_file")}:
            if not os.path.exists(file):
                raise _missing_file_error(file)
        self.sources: dict[str, TensorSource] = {}
        self.is_read_by_model = self.has_survived = False
        self._files: dict[str, Any] = {}
        self._opening = threading.Lock()
        LOADERS[id(self)] = self

    def add_sources(self, sources: Mapping[str, TensorSource]) -> None:
        """Add values that come before those of the index."""
        self.sources.update(sources)
        self.all_keys = list(dict.fromkeys((*self.all_keys, *sources)))

    def reads_file(self, name: str) -> bool:
        """Return True when the values of ``name`` are read from its file in the folder."""
        entry = self.index.get(name)
        is_elsewhere = name in self.state_dict or name in self.sources
        return entry is not None and not entry.get("safetensors_file") and not is_elsewhere

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        if key in self.sources:
            value = self.sources[key].host_tensor()
        elif (entry := self.index[key]).get("safetensors_file") is not None:
            value = self._from_checkpoint(key, entry)
        elif self.save_folder is None:
            raise OffloadError(
                f"{key} is in an offload folder that was not named", fix="give the save_folder"
            )
        else:
            value = load_offloaded_weight(Path(self.save_folder, f"{key}.dat"), entry)
        return value if self.device is None else value.to(self.device)

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        set_weight(self, key, value)

    def _from_checkpoint(self, key: str, entry: Mapping[str, Any]) -> torch.Tensor:
        path = os.fspath(entry["safetensors_file"])
        try:
            with self._opening:
                if path not in self._files:
                    self._files[path] = safe_open(path, framework="pt", device="cpu")
            value = self._files[path].get_tensor(entry.get("weight_name", key))
        except FileNotFoundError as error:
            raise _missing_file_error(path) from error
        except SafetensorError as error:
            raise OffloadError(
                f"{key} cannot be read from {path}",
                why=f"SafetensorError: {error}",
                fix="check that the checkpoint is complete, and that it is the one that was offloaded",
            ) from error
        dtype = entry.get("dtype")
        return value if dtype is None else value.to(_dtype(str(dtype).removeprefix("torch."), key))

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)

    def __contains__(self, key: object) -> bool:
        return any(key in each for each in (self.state_dict, self.sources, self.index))

    def in_memory(self, key: str) -> bool:
        """Return True when the entry is in memory, and so can be changed."""
        return key in self.state_dict

    def copy_files(self, state_dict: dict[str, torch.Tensor]) -> OffloadedWeightsLoader:
        """Return a loader of the same files with other weights in memory."""
        twin = copy.copy(self)
        twin.state_dict, twin.all_keys, twin.sources = state_dict, [*self.all_keys], {**self.sources}
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadedWeightsLoader:
        return self.copy_files(copy.deepcopy(self.state_dict, memo))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without open files; a copy opens its own."""
        return {**vars(self), "_files": {}, "_opening": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _opening=threading.Lock())
        LOADERS[id(self)] = self


def set_weight(weights: Mapping[str, Any], key: str, value: torch.Tensor) -> None:
    """Set an entry of a mapping of weights to a value in memory, if the mapping can be changed."""
    if isinstance(weights, PrefixedDataset):
        set_weight(weights.dataset, f"{weights.prefix}{key}", value)
    elif isinstance(weights, OffloadedWeightsLoader):
        weights.state_dict[key] = value
        if key not in weights.all_keys:
            weights.all_keys.append(key)
    elif isinstance(weights, MutableMapping):
        weights[key] = value


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Return the entries of a state dict that belong to some modules or tensors, with their full names."""
    return {
        key: value
        for name in submodule_names
        for key, value in state_dict.items()
        if key == name or key.startswith(f"{name}.")
    }
