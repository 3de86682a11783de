"""Export of a checkpoint's weights for other tools, in the layout of the model hub; a tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from accelerate.checkpoint import checkpoint_maintenance, names
from accelerate.checkpoint.discovery import CheckpointCandidate
from accelerate.checkpoint.lazy_tensor import LazyTensor
from accelerate.checkpoint.lazy_weights import (
    LazyWeights,
    cast_to,
    files_of,
    find_weights,
    group_ties,
    open_weights,
)
from accelerate.checkpoint.state_dict_files import as_dtype
from accelerate.checkpoint.weight_file_io import write_weights
from accelerate.core.errors import CheckpointError


@dataclass(frozen=True)
class ExportResult:
    """The outcome of an export.

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
    if (out / names.MANIFEST_NAME).exists() or (out / names.rng_file(0)).exists():
        raise CheckpointError(
            f"{out} is a checkpoint",
            why="its weights would be replaced",
            fix="export into a folder of its own",
        )
    engine_weights = find_engine_weights(folder, model) if find_engine_weights is not None else None
    source = find_weights(folder, model) if engine_weights is None else engine_weights[0]
    if checkpoint.manifest is not None:
        count = _verify_files(checkpoint, {p.relative_to(folder).as_posix() for p in files_of(source)})
        if on_progress is not None:
            on_progress(f"{count} file(s) of model {model} in {checkpoint.name} are as they were saved")
    multi_process = checkpoint.manifest is None or checkpoint.manifest.world_size > 1
    read = open_weights(source) if engine_weights is None else group_ties(engine_weights[1])
    weights = strip_wrappers(read, multi_process=multi_process)
    files = write_weights(
        weights, out, max_shard_size=max_shard_size, dtype=target_dtype, on_file=on_progress
    )
    size = sum(t.shape.numel() * cast_to(t.dtype, target_dtype).itemsize for t in weights.tensors.values())
    return ExportResult(source, files, len(weights.tensors), size, weights.others)


def _verify_files(checkpoint: CheckpointCandidate, file_names: set[str]) -> int:
    problems = [
        checked for checked in checkpoint_maintenance.check_files(checkpoint, file_names) if checked.problem
    ]
    if problems:
        first = problems[0]
        raise CheckpointError(
            f"{checkpoint.path}: {first.name} is damaged",
            why=first.problem,
            fix="export another checkpoint; nothing was written",
        )
    return len(file_names)


def strip_wrappers(weights: LazyWeights, *, multi_process: bool) -> LazyWeights:
    """Rename the weights to the names of the user's module.

    Args:
        weights: as they were saved.
        multi_process: several processes may have trained: one ``module.`` that all names begin with goes.
    """
    weights = weights.rename(lambda name: name.replace("_orig_mod.", ""))
    weight_names = [*weights.tensors, *weights.aliases]
    if multi_process and weight_names and all(name.startswith("module.") for name in weight_names):
        weights = weights.rename(lambda name: name.removeprefix("module."))
    return weights
