"""Merging of a sharded model into files that every library reads, tensor by tensor, without the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from accelerate.checkpoint import names, pickles, state_dict_files
from accelerate.checkpoint.dcp_shard_reader import lazy_tensors
from accelerate.checkpoint.errors import file_errors
from accelerate.checkpoint.lazy_tensor import LazyTensor
from accelerate.checkpoint.rank_group import CheckpointRankGroup
from accelerate.checkpoint.weight_file_io import replace_file
from accelerate.core.errors import SettingError
from accelerate.core.units import parse_bytes

LIMIT = "10GB"


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
    merge(lazy_tensors, checkpoint_dir, output_path, safe_serialization, remove_checkpoint_dir)


def merge(
    find: Callable[[Path], Mapping[str, LazyTensor]],
    checkpoint_dir: str,
    output_path: str,
    safe: bool = True,
    remove: bool = False,
) -> None:
    """Merge with another function to find the tensors of a folder; see ``merge_fsdp_weights``."""
    source, target = Path(checkpoint_dir).expanduser(), Path(output_path).expanduser()
    if remove and source.resolve() in (target.resolve(), *target.resolve().parents):
        raise SettingError(
            f"{target} is inside of {source}, which is to be removed",
            fix="choose another output_path, or leave out remove_checkpoint_dir",
        )

    def join() -> None:
        write_merged(find(source), target, safe=safe)
        if remove:
            with file_errors("remove", source):
                shutil.rmtree(source)

    CheckpointRankGroup.current().run_on_rank0(f"merge the weights of {source}", join)


def write_merged(
    lazy_tensors: Mapping[str, LazyTensor], folder: Path, *, safe: bool = True, limit: int | str = LIMIT
) -> list[str]:
    """Write tensors in the layout of the model hub, reading them one by one; return the files' names.

    Tied tensors are written under each name, since who reads the files may not know of the ties.

    Args:
        lazy_tensors: the tensors by name.
        folder: where to; it is made.
        safe: as safetensors, otherwise as torch files.
        limit: of one file, in bytes or as text.
    """
    with file_errors("make the folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
    shards = _split_shards(lazy_tensors, parse_bytes(limit))
    pattern = names.SAFE_WEIGHTS_PATTERN_NAME if safe else names.WEIGHTS_PATTERN_NAME
    file_of_tensor: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        suffix = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file = pattern.format(suffix=suffix)
        file_of_tensor.update(dict.fromkeys(shard, file))
        # The writer asks a tensor for its size and then, once, for its data: a lazy one is read there.
        shard_tensors = cast("Mapping[str, torch.Tensor]", shard)
        replace_file(
            folder / file,
            partial(state_dict_files.write_safetensors, shard_tensors, {})
            if safe
            else partial(_write_torch, shard),
        )
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in lazy_tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": file_of_tensor}
        text = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
        index_name = names.SAFE_WEIGHTS_INDEX_NAME if safe else names.WEIGHTS_INDEX_NAME
        replace_file(folder / index_name, lambda file: file.write(text))
    return sorted(set(file_of_tensor.values()))


def _split_shards(lazy_tensors: Mapping[str, LazyTensor], limit: int) -> list[dict[str, LazyTensor]]:
    shards: list[dict[str, LazyTensor]] = [{}]
    size = 0
    for name, tensor in lazy_tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _write_torch(shard: Mapping[str, LazyTensor], file: Any) -> None:
    pickles.write({name: tensor.read() for name, tensor in shard.items()}, file)
