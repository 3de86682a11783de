"""Weights and objects in single files: ``save``, ``load``, and the sharded layout of the model hub.

A file is written beside its name and renamed, so that a crash leaves the old one or the new one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path, PurePath
from typing import IO, Any, BinaryIO, cast

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards

from accelerate.checkpoint import commit, lazy_weights, names, pickles, state_dict_files
from accelerate.checkpoint.atomic_replace import parse_working_name, working_name
from accelerate.checkpoint.errors import file_errors
from accelerate.checkpoint.state_dict_files import clean_state_dict_for_safetensors, id_tensor_storage
from accelerate.checkpoint.storage import sync_file
from accelerate.core.units import parse_bytes
from accelerate.world import world as worlds

__all__ = [
    "TORCH_SAFE_GLOBALS",
    "clean_state_dict_for_safetensors",
    "id_tensor_storage",
    "load",
    "load_state_dict",
    "save",
    "save_weights",
]

TORCH_SAFE_GLOBALS = pickles.safe_globals()

_SHARD = r"-\d{5}-of-\d{5}"


def save(
    obj: Any,
    f: str | PurePath | IO[bytes],
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Save an object on the main process only (or one process per machine); the others return at once.

    Args:
        obj: the object; a state dict for safetensors.
        f: path, or file open for writing bytes.
        save_on_each_node: also on the other machines, one process each.
        safe_serialization: as safetensors instead of ``torch.save``.

    Raises:
        CheckpointError: the file cannot be written.
    """
    world = worlds.current() or worlds.open()
    if not (world.is_local_main if save_on_each_node else world.is_main):
        return
    if not isinstance(f, str | PurePath):
        if safe_serialization:
            separate, aliases = state_dict_files.untie(obj)
            state_dict_files.write_safetensors(separate, aliases, cast(BinaryIO, f))
        else:
            torch.save(obj, f)
        return
    path = Path(f).expanduser()
    if safe_serialization:
        separate, aliases = state_dict_files.untie(obj)
        replace_file(path, partial(state_dict_files.write_safetensors, separate, aliases))
    else:
        replace_file(path, partial(pickles.write, obj))


def load(f: str | PurePath | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """Load an object by ``torch.load`` with ``weights_only=True``, which also accepts numpy data.

    Args:
        f: path, or file open for reading bytes.
        map_location: as ``torch.load`` takes it.
        kwargs: more arguments of ``torch.load``.

    Raises:
        CheckpointError: the file is missing, damaged, or would run code.
    """
    source = Path(f).expanduser() if isinstance(f, str | PurePath) else f
    return pickles.read(source, map_location, "load(..., weights_only=False)", **kwargs)


def load_state_dict(
    checkpoint_file: str | PurePath, device_map: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the tensors of one file of weights.

    Args:
        checkpoint_file: a safetensors or torch file.
        device_map: module name -> device, the longest name that fits counts; ``"disk"`` leaves tensors mapped
            from the file. None leaves all on the CPU.

    Raises:
        CheckpointError: the file is missing, damaged, or would run code.
    """
    path = Path(checkpoint_file).expanduser()
    if path.suffix == ".safetensors":
        with file_errors("read", path):
            state, _ = state_dict_files.read_safetensors(path)
    else:
        state = pickles.read(path, "cpu", "load(path, weights_only=False) of accelerate.utils")
    return {name: _place_tensor(name, value, device_map or {}) for name, value in state.items()}


def _place_tensor(name: str, value: Any, device_map: Mapping[str, Any]) -> Any:
    matches = [
        module for module in device_map if not module or name == module or name.startswith(f"{module}.")
    ]
    device = device_map[max(matches, key=len)] if matches else "cpu"
    return value if device in ("cpu", "disk") or not isinstance(value, torch.Tensor) else value.to(device)


def replace_file(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Write one file so that its name has the old content or the new one, never a part."""
    temp = path.with_name(working_name(path.name, "tmp", commit.new_id()))
    try:
        with file_errors("write", path):
            with temp.open("wb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            temp.replace(path)
            sync_file(path.parent)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise


def save_weights(
    state: Mapping[str, Any],
    directory: str | Path,
    *,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> list[str]:
    """Write a model's state in the layout of the model hub; call it on the process that writes.

    One file if it fits into ``max_shard_size``, else shards ``model-00001-of-0000N.safetensors`` and an
    index. A tensor is made contiguous or fetched from its device when it is written, not before.

    Args:
        state: the model's state dict.
        directory: the folder; other files in it stay, weights of an earlier save are replaced by the new ones
            or stay whole.
        max_shard_size: bytes, or text such as ``"5GB"``.
        safe_serialization: safetensors instead of torch files.

    Returns:
        Names of the files with weights, in order.

    Raises:
        CheckpointError: a tensor has no data, or a file cannot be written.
        SettingError: the limit is no size.
    """
    folder = Path(directory).expanduser()
    state = state_dict_files.strip_compile_prefix(state)
    if safe_serialization:
        return write_weights(lazy_weights.weights_from_state(state), folder, max_shard_size=max_shard_size)
    split = split_torch_state_dict_into_shards(
        dict(state), filename_pattern=names.WEIGHTS_PATTERN_NAME, max_shard_size=parse_bytes(max_shard_size)
    )
    fills = {
        file: partial(pickles.write, {name: state[name] for name in members})
        for file, members in split.filename_to_tensors.items()
    }
    _replace_files(folder, names.WEIGHTS_PATTERN_NAME, names.WEIGHTS_INDEX_NAME, fills, _encode_index(split))
    return list(fills)


def write_weights(
    weights: lazy_weights.LazyWeights,
    folder: Path,
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    on_file: Callable[[str], object] | None = None,
) -> list[str]:
    """Write weights like ``save_weights``, but read one tensor at a time: never more is in memory.

    Args:
        weights: the weights; tied ones are written once, their other names into the file's metadata.
        folder: see ``save_weights``.
        max_shard_size: likewise.
        dtype: what floating point weights become.
        on_file: called with the name of each file when it is written.
    """
    casts = lazy_weights.lazy_casts(weights.tensors, dtype)
    split = split_torch_state_dict_into_shards(
        {name: tensor.meta() for name, tensor in casts.items()},
        filename_pattern=names.SAFE_WEIGHTS_PATTERN_NAME,
        max_shard_size=parse_bytes(max_shard_size),
    )
    fills: dict[str, Callable[[BinaryIO], object]] = {}
    for file, members in split.filename_to_tensors.items():
        file_aliases = {alias: name for alias, name in weights.aliases.items() if name in members}
        shard = cast(dict[str, torch.Tensor], {name: casts[name] for name in members})
        fills[file] = partial(state_dict_files.write_safetensors, shard, file_aliases)
    index = names.SAFE_WEIGHTS_INDEX_NAME
    _replace_files(folder, names.SAFE_WEIGHTS_PATTERN_NAME, index, fills, _encode_index(split), on_file)
    return list(fills)


def _encode_index(split: StateDictSplit) -> bytes:
    """Return the index of the shards as JSON; empty if there is one file only."""
    if not split.is_sharded:
        return b""
    body = {
        "metadata": {"total_size": split.metadata["total_size"]},
        "weight_map": dict(split.tensor_to_filename),
    }
    return (json.dumps(body, indent=2, sort_keys=True) + "\n").encode()


def _replace_files(
    folder: Path,
    pattern: str,
    index_name: str,
    fills: Mapping[str, Callable[[BinaryIO], object]],
    index: bytes,
    on_file: Callable[[str], object] | None = None,
) -> None:
    """Replace all weights of one format in a folder by new ones.

    Everything is written under other names first. Then an old index goes, so that it never names new shards;
    the shards get their names; the new index comes last; what is left of the old weights is removed.
    """
    with file_errors("make the folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
    pattern_of_names = _name_pattern(pattern, index_name)
    _remove(
        p for p in folder.iterdir() if (h := parse_working_name(p.name)) and pattern_of_names.fullmatch(h[0])
    )
    id = commit.new_id()
    temps = {file: folder / working_name(file, "tmp", id) for file in fills}
    try:
        for file, fill in fills.items():
            with file_errors("write", folder / file), temps[file].open("xb") as handle:
                fill(handle)
                handle.flush()
                os.fsync(handle.fileno())
            if on_file is not None:
                on_file(file)
        if any((folder / file).exists() for file in fills):
            _remove([folder / index_name])
        for file, temp in temps.items():
            with file_errors("write", folder / file):
                temp.replace(folder / file)
        with file_errors("write", folder):
            sync_file(folder)
    except BaseException:
        for temp in temps.values():
            temp.unlink(missing_ok=True)
        raise
    if index:
        replace_file(folder / index_name, lambda file: file.write(index))
    current = {*fills, index_name} if index else {*fills}
    stale = [p for p in folder.iterdir() if pattern_of_names.fullmatch(p.name) and p.name not in current]
    # The index goes first: without it, no reader takes the shards for weights.
    _remove(sorted(stale, key=lambda p: p.name != index_name))


def _name_pattern(pattern: str, index_name: str) -> re.Pattern[str]:
    """Return a pattern of all names of weights in one format."""
    stem, _, extension = pattern.partition("{suffix}")
    return re.compile(rf"{re.escape(stem)}({_SHARD})?{re.escape(extension)}|{re.escape(index_name)}")


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with file_errors("remove", path):
            path.unlink(missing_ok=True)
