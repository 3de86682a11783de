"""Weights and objects in single files: ``save``, ``load``, the shards of the model hub, merge, export.

A file is written beside its name and renamed, so that a crash leaves the old one or the new one.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from accelerate.checkpoint import layout, lazy_weights, state_dict_files, torch_files
from accelerate.checkpoint.discovery import CheckpointCandidate
from accelerate.checkpoint.file_access import file_errors, find_damage, make_folder
from accelerate.checkpoint.lazy_weights import (
    LazyWeights,
    cast_to,
    files_of,
    find_weights,
    group_ties,
    open_weights,
)
from accelerate.checkpoint.model_tensors import LazyTensor
from accelerate.checkpoint.rank_group import CheckpointRankGroup
from accelerate.checkpoint.save_lock import LocalSaveLock
from accelerate.checkpoint.state_dict_files import (
    as_dtype,
    clean_state_dict_for_safetensors,
    id_tensor_storage,
)
from accelerate.checkpoint.storage import new_id, parse_working_name, sync_file, working_name
from accelerate.core.errors import CheckpointError, SettingError
from accelerate.core.units import ProgressBar, parse_bytes
from accelerate.world import world as worlds

LIMIT = "10GB"
_SHOWN = 50  # characters of a file's name that its working file's name has: the system limits these

__all__ = [
    "TORCH_SAFE_GLOBALS",
    "clean_state_dict_for_safetensors",
    "id_tensor_storage",
    "load",
    "load_state_dict",
    "save",
    "save_weights",
]

TORCH_SAFE_GLOBALS = torch_files.safe_globals()

_SHARD = r"-\d{5}-of-\d{5}"

logger = logging.getLogger(__name__)


def save(
    obj: Any,
    f: str | os.PathLike[str] | IO[bytes],
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
    if safe_serialization:
        fill = partial(state_dict_files.write_safetensors, *state_dict_files.untie(obj))
    else:
        fill = partial(torch_files.write, obj)
    if not isinstance(f, str | os.PathLike):
        fill(cast(BinaryIO, f))
        return
    path = Path(f).expanduser()
    if not safe_serialization and path.is_symlink():
        path = path.resolve()  # as torch.save does
    replace_file(path, fill)


def load(f: str | os.PathLike[str] | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """Load an object by ``torch.load`` with ``weights_only=True``, which also accepts numpy data.

    Args:
        f: path, or file open for reading bytes; a path that ends in ``.safetensors`` gives its tensors.
        map_location: as ``torch.load`` takes it.
        kwargs: more arguments of ``torch.load``.

    Raises:
        CheckpointError: the file is missing, damaged, or would run code.
    """
    source = Path(f).expanduser() if isinstance(f, str | os.PathLike) else f
    if isinstance(source, Path) and source.suffix == ".safetensors":
        from safetensors.torch import load_file

        with file_errors("read", source):
            return {name: _relocate(value, map_location) for name, value in load_file(source).items()}
    return torch_files.read(source, map_location, "load(..., weights_only=False)", **kwargs)


def _relocate(tensor: torch.Tensor, map_location: Any) -> torch.Tensor:
    """Return a tensor where ``torch.load`` would put it, had it been saved from the CPU."""
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu")
    elif callable(map_location):
        storage: Any = map_location(tensor.untyped_storage(), "cpu")
        map_location = None if storage is None else storage.device
    return tensor if map_location is None else tensor.to(map_location)


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, Any] | None = None
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
        state = torch_files.read(path, "cpu", "load(path, weights_only=False) of accelerate.utils")
    return {name: _place_tensor(name, value, device_map or {}) for name, value in state.items()}


def _place_tensor(name: str, value: Any, device_map: Mapping[str, Any]) -> Any:
    matches = [m for m in device_map if not m or name == m or name.startswith(f"{m}.")]
    device = device_map[max(matches, key=len)] if matches else "cpu"
    return value if device in ("cpu", "disk") or not isinstance(value, torch.Tensor) else value.to(device)


def replace_file(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Write one file so that its name has the old content or the new one, never a part.

    A file that exists keeps its mode, and a pipe or a device is written to, not replaced.
    """
    temp = path.parent / working_name(path.name[:_SHOWN], "tmp", new_id())
    with file_errors("write", path):
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                fill(file)
            return
        try:
            with temp.open("wb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                shutil.copymode(path, temp)
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
        weights = lazy_weights.weights_from_state(state)
        for alias, name in weights.aliases.items():
            logger.warning(
                "%s shares memory with %s: it is not saved, and loading ties it again", alias, name
            )
        return write_weights(weights, folder, max_shard_size=max_shard_size)
    return _write_shards(
        dict(state),
        folder,
        lambda names: partial(torch_files.write, {name: state[name] for name in names}),
        max_shard_size=max_shard_size,
        safe=False,
    )


def write_weights(
    weights: lazy_weights.LazyWeights,
    folder: Path,
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    safe: bool = True,
    on_file: Callable[[str], object] | None = None,
    action: str = "saving",
) -> list[str]:
    """Write weights like ``save_weights``, but read one tensor at a time: never more is in memory.

    Args:
        weights: the weights; tied ones are written once, their other names into the file's metadata.
        folder: see ``save_weights``.
        max_shard_size: likewise.
        dtype: what floating point weights become.
        safe: as safetensors, otherwise as torch files.
        on_file: called with the name of each file when it is written.
        action: for the progress bar.
    """
    casts = lazy_weights.lazy_casts(weights.tensors, dtype)

    def fill(names: list[str]) -> Callable[[BinaryIO], object]:
        if not safe:
            return lambda file: torch_files.write({name: casts[name].read() for name in names}, file)
        aliases = {alias: name for alias, name in weights.aliases.items() if name in names}
        # The writer asks a tensor for its size and then, once, for its data: a lazy one is read there.
        shard = cast("dict[str, torch.Tensor]", {name: casts[name] for name in names})
        return partial(state_dict_files.write_safetensors, shard, aliases)

    state, limit = lazy_weights.outline(casts), max_shard_size
    return _write_shards(state, folder, fill, max_shard_size=limit, safe=safe, on_file=on_file, action=action)


def _write_shards(
    state: dict[str, torch.Tensor],
    folder: Path,
    fill: Callable[[list[str]], Callable[[BinaryIO], object]],
    *,
    max_shard_size: int | str,
    safe: bool = True,
    on_file: Callable[[str], object] | None = None,
    action: str = "saving",
) -> list[str]:
    """Split tensors into shards and write them with their index; return the names of the files.

    Args:
        state: the tensors, of which sizes and ties count.
        folder: see ``save_weights``.
        fill: returns the function that writes the tensors of these names.
        max_shard_size: see ``save_weights``.
        safe: safetensors, otherwise torch files.
        on_file: called with the name of each file when it is written.
        action: for the progress bar.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    pattern = layout.SAFE_WEIGHTS_PATTERN_NAME if safe else layout.WEIGHTS_PATTERN_NAME
    split = split_torch_state_dict_into_shards(
        state,
        filename_pattern=pattern,
        # A file has no bits, so "1kb" are kilobytes, as in 1.15.
        max_shard_size=parse_bytes(
            max_shard_size.upper() if isinstance(max_shard_size, str) else max_shard_size
        ),
    )
    fills = {file: fill(names) for file, names in split.filename_to_tensors.items()}
    size = split.metadata["total_size"]
    body = {"metadata": {"total_size": size}, "weight_map": dict(split.tensor_to_filename)}
    index = (json.dumps(body, indent=2, sort_keys=True) + "\n").encode() if split.is_sharded else b""
    index_name = layout.SAFE_WEIGHTS_INDEX_NAME if safe else layout.WEIGHTS_INDEX_NAME
    make_folder(folder)
    id, names = new_id(), _name_pattern(pattern, index_name)
    with LocalSaveLock(folder, "weights", id):
        _replace_files(folder, id, names, index_name, fills, index, size, on_file, action)
    for name in () if safe else (layout.file_name("models"), layout.SAFE_WEIGHTS_INDEX_NAME):
        if (folder / name).exists():
            logger.warning(
                "%s holds %s of another save too, which loading takes first: remove it, or name the file",
                folder,
                name,
            )
    return list(fills)


def _replace_files(
    folder: Path,
    id: str,
    pattern_of_names: re.Pattern[str],
    index_name: str,
    fills: Mapping[str, Callable[[BinaryIO], object]],
    index: bytes,
    size: int,
    on_file: Callable[[str], object] | None,
    action: str,
) -> None:
    """Replace all weights of one format in a locked folder by new ones, of about ``size`` bytes together.

    Everything is written under other names first. Then an old index goes, so that it never names new shards;
    the shards get their names; the new index comes last; what is left of the old weights is removed.
    """
    _remove(
        p for p in folder.iterdir() if (h := parse_working_name(p.name)) and pattern_of_names.fullmatch(h[0])
    )
    temps = {file: folder / working_name(file, "tmp", id) for file in fills}
    try:
        with ProgressBar(f"{action} weights", size) as progress:
            for file, fill in fills.items():
                with file_errors("write", folder / file), temps[file].open("xb") as handle:
                    progress.count_fill(fill)(handle)
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


def merge_fsdp_weights(
    checkpoint_dir: str,
    output_path: str,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Merge a sharded model: one file, or the hub's shards of 10 GB with an index.

    Of safetensors, no more than one tensor is in memory at a time. In a world of several processes all call
    it, and the main one does it.

    Args:
        checkpoint_dir: a sharded checkpoint, or the folder of its model, ``pytorch_model_fsdp_0``.
        output_path: the folder to write to.
        safe_serialization: safetensors, otherwise torch files.
        remove_checkpoint_dir: removes ``checkpoint_dir`` afterwards, with all that is in it.

    Raises:
        CheckpointError: there is no such model, shards of it are missing, or a file cannot be written.
        SettingError: the output would be removed with the checkpoint.
    """
    from accelerate.checkpoint.dcp_files import lazy_tensors

    merge(lazy_tensors, checkpoint_dir, output_path, safe_serialization, remove_checkpoint_dir)


def merge(
    find: Callable[[Path], Mapping[str, LazyTensor]],
    checkpoint_dir: str,
    output_path: str,
    safe: bool = True,
    remove: bool = False,
) -> ExportResult:
    """Merge with another function to find the tensors of a folder; see ``merge_fsdp_weights``."""
    source, target = Path(checkpoint_dir).expanduser(), Path(output_path).expanduser()
    if remove and source.resolve() in (target.resolve(), *target.resolve().parents):
        raise SettingError(
            f"{target} is inside of {source}, which is to be removed",
            fix="choose another output_path, or leave out remove_checkpoint_dir",
        )

    def join() -> ExportResult:
        tensors = find(source)
        # Tied tensors are written under each name: readers may not know of the ties.
        weights = LazyWeights(dict(tensors), {})
        files = write_weights(weights, target, max_shard_size=LIMIT, safe=safe, action="merging")
        if remove:
            with file_errors("remove", source):
                shutil.rmtree(source)
        return ExportResult(source, files, len(tensors), sum(each.nbytes for each in tensors.values()), ())

    return CheckpointRankGroup.current().run_on_rank0(f"merge the weights of {source}", join)


@dataclass(frozen=True)
class ExportResult:
    """The outcome of an export or a merge.

    Attributes:
        source: the file or folder that was read.
        files: names of the files with weights.
        tensors: how many.
        size: bytes of all tensors.
        left_out: names of what a checkpoint's model file holds beside tensors.
    """

    source: Path
    files: list[str]
    tensors: int
    size: int
    left_out: tuple[str, ...]


def export_weights(
    checkpoint: CheckpointCandidate,
    out: Path,
    *,
    model: int = 0,
    max_shard_size: int | str = "5GB",
    dtype: str | None = None,
    on_progress: Callable[[str], object] | None = None,
    find_engine_weights: Callable[[Path, int], tuple[Path, dict[str, LazyTensor]] | None] | None = None,
) -> ExportResult:
    """Write the weights of a model of a checkpoint into a folder.

    Its files are verified first. Names lose what wrappers put in front; tied weights are written once.

    Args:
        checkpoint: the checkpoint, in a local folder.
        out: the folder to write to.
        model: which of the checkpoint's models.
        max_shard_size: of one file, ``"5GB"`` or bytes.
        dtype: what floating point weights become: ``"bf16"``, ``"float16"`` ...
        on_progress: called with a line of text for each step.
        find_engine_weights: finds the weights of a model in a checkpoint of DeepSpeed or Megatron-LM.

    Raises:
        CheckpointError: a file is missing or damaged, or ``out`` is a checkpoint.
        SettingError: the dtype or the limit is none.
    """
    target_dtype = as_dtype(dtype)
    folder = checkpoint.store.local_path(checkpoint.folder)
    if folder is None:
        raise CheckpointError(
            f"{checkpoint.path} is not on this machine", fix="copy the checkpoint to a local folder"
        )
    if (out / layout.MANIFEST_NAME).exists() or (out / layout.file_name("rng", rank=0)).exists():
        raise CheckpointError(
            f"{out} is a checkpoint",
            why="its weights would be replaced",
            fix="export into a folder of its own",
        )
    engine_weights = find_engine_weights(folder, model) if find_engine_weights is not None else None
    source = find_weights(folder, model) if engine_weights is None else engine_weights[0]
    if checkpoint.manifest is not None:
        manifest, names = checkpoint.manifest, {p.relative_to(folder).as_posix() for p in files_of(source)}
        records = {name: record for name, record in manifest.files.items() if name in names}
        for damage in find_damage(folder, records, manifest.hashing):
            raise CheckpointError(
                f"{checkpoint.path}: {damage.name} is {damage.state}",
                why=damage.why,
                fix="export another checkpoint; nothing was written",
            )
        if on_progress is not None:
            on_progress(f"{len(names)} file(s) of model {model} in {checkpoint.name} are as they were saved")
    read = open_weights(source) if engine_weights is None else group_ties(engine_weights[1])
    weights = strip_wrappers(read, has_prefix=checkpoint.manifest is None)
    files = write_weights(
        weights, out, max_shard_size=max_shard_size, dtype=target_dtype, on_file=on_progress
    )
    size = sum(t.shape.numel() * cast_to(t.dtype, target_dtype).itemsize for t in weights.tensors.values())
    return ExportResult(source, files, len(weights.tensors), size, tuple(weights.others))


def strip_wrappers(weights: LazyWeights, *, has_prefix: bool) -> LazyWeights:
    """Rename the weights to the names of the user's module.

    Args:
        weights: as they were saved.
        has_prefix: older versions of 1.x may have saved them: one ``module.`` that all names begin with goes.
    """
    weights = weights.rename(lambda name: name.replace("_orig_mod.", ""))
    weight_names = [*weights.tensors, *weights.aliases]
    if has_prefix and weight_names and all(name.startswith("module.") for name in weight_names):
        weights = weights.rename(lambda name: name.removeprefix("module."))
    return weights
