"""Weights and objects as single files: ``save``, ``load``, and the sharded layout of the model hub.

A file is written beside its name and renamed, so that a crash leaves the old one or the new one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path, PurePath
from typing import IO, Any, BinaryIO, cast

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from accelerate.checkpoint import commit, names, pickles, tensors
from accelerate.checkpoint.errors import file_errors
from accelerate.checkpoint.store import sync_file
from accelerate.checkpoint.swap import working
from accelerate.checkpoint.tensors import clean_state_dict_for_safetensors, id_tensor_storage
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
    """Saves an object on the main process only (or one process per machine); the others return at once.

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
            separate, aliases = tensors.separated(obj)
            tensors.write(separate, aliases, cast(BinaryIO, f))
        else:
            torch.save(obj, f)
        return
    path = Path(f).expanduser()
    if safe_serialization:
        separate, aliases = tensors.separated(obj)
        replace_file(path, partial(tensors.write, separate, aliases))
    else:
        replace_file(path, partial(pickles.write, obj))


def load(f: str | PurePath | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """``torch.load`` that runs no code (``weights_only=True``) and also accepts numpy data.

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
    """The tensors of one file of weights.

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
            state, _ = tensors.read(path)
    else:
        state = pickles.read(path, "cpu", "load(path, weights_only=False) of accelerate.utils")
    return {name: _placed(name, value, device_map or {}) for name, value in state.items()}


def _placed(name: str, value: Any, device_map: Mapping[str, Any]) -> Any:
    fitting = [
        module for module in device_map if not module or name == module or name.startswith(f"{module}.")
    ]
    device = device_map[max(fitting, key=len)] if fitting else "cpu"
    return value if device in ("cpu", "disk") or not isinstance(value, torch.Tensor) else value.to(device)


def replace_file(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Writes one file so that its name has the old content or the new one, never a part."""
    temp = path.with_name(working(path.name, "tmp", commit.new_id()))
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
    """Writes a model's state in the layout of the model hub; call it on the process that writes.

    One file if it fits into ``max_shard_size``, else shards ``model-00001-of-0000N.safetensors`` and an
    index. Shards and index of an earlier save into the same folder are removed after the new ones are there.

    Args:
        state: the model's state dict.
        directory: the folder; other files in it stay.
        max_shard_size: bytes, or text such as ``"5GB"``.
        safe_serialization: safetensors instead of torch files.

    Returns:
        Names of the files with weights, in order.

    Raises:
        CheckpointError: a tensor has no data, or a file cannot be written.
        SettingError: the limit is no size.
    """
    folder = Path(directory).expanduser()
    with file_errors("make the folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
    state = tensors.saved_names(state)
    separate, aliases = tensors.separated(state) if safe_serialization else (dict(state), {})
    pattern = names.SAFE_WEIGHTS_PATTERN_NAME if safe_serialization else names.WEIGHTS_PATTERN_NAME
    index_name = names.SAFE_WEIGHTS_INDEX_NAME if safe_serialization else names.WEIGHTS_INDEX_NAME
    split = split_torch_state_dict_into_shards(
        separate, filename_pattern=pattern, max_shard_size=parse_bytes(max_shard_size)
    )
    for file, members in split.filename_to_tensors.items():
        shard = {name: separate[name] for name in members}
        if safe_serialization:
            own = {alias: name for alias, name in aliases.items() if name in shard}
            replace_file(folder / file, partial(tensors.write, shard, own))
        else:
            replace_file(folder / file, partial(pickles.write, shard))
    written = list(split.filename_to_tensors)
    if split.is_sharded:
        index = {
            "metadata": {"total_size": split.metadata["total_size"]},
            "weight_map": dict(split.tensor_to_filename),
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        replace_file(folder / index_name, lambda file: file.write(text.encode()))
        written.append(index_name)
    _remove_stale(folder, pattern, index_name, written)
    return [name for name in written if name != index_name]


def _remove_stale(folder: Path, pattern: str, index_name: str, written: list[str]) -> None:
    """Removes weights of an earlier save in the same format: a loader would take them for current ones."""
    stem, _, extension = pattern.partition("{suffix}")
    family = re.compile(rf"{re.escape(stem)}({_SHARD})?{re.escape(extension)}|{re.escape(index_name)}")
    # The index goes first: without it, shards are not found by themselves.
    stale = [p for p in folder.iterdir() if family.fullmatch(p.name) and p.name not in written]
    for path in sorted(stale, key=lambda p: p.name != index_name):
        with file_errors("remove", path):
            path.unlink()
