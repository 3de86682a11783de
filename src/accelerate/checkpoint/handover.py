"""From a checkpoint to weights for other tools, in the layout of the model hub; a tensor at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from accelerate.checkpoint import names, overview
from accelerate.checkpoint.export import write_weights
from accelerate.checkpoint.find import Candidate
from accelerate.checkpoint.lazy import LazyTensor
from accelerate.checkpoint.tensors import as_dtype
from accelerate.checkpoint.weights import Weights, cast_to, files_of, found_in, untied, weights_of
from accelerate.core.errors import CheckpointError


@dataclass(frozen=True)
class HandedOver:
    """What was written.

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


def hand_over(
    found: Candidate,
    out: Path,
    *,
    model: int = 0,
    max_shard_size: int | str = "5GB",
    dtype: str | None = None,
    tell: Callable[[str], object] | None = None,
    own: Callable[[Path, int], tuple[Path, dict[str, LazyTensor]] | None] | None = None,
) -> HandedOver:
    """Writes the weights of a model of a checkpoint into a folder.

    Its files are verified first. Names lose what wrappers put in front; tied weights are written once.

    Args:
        found: the checkpoint, in a local folder.
        out: the folder to write to.
        model: which of the checkpoint's models.
        max_shard_size: of one file, ``"5GB"`` or bytes.
        dtype: what floating point weights become: ``"bf16"``, ``"float16"`` ...
        tell: called with a line of text for each step.
        own: finds the weights of a model in a checkpoint that an engine has written by itself.

    Raises:
        CheckpointError: a file is missing or damaged, or ``out`` is a checkpoint.
        SettingError: the dtype or the limit is none.
    """
    wanted = as_dtype(dtype)
    folder = found.store.local(found.folder)
    if folder is None:
        raise CheckpointError(
            f"{found.path} is not on this machine", fix="copy the checkpoint to a local folder"
        )
    if (out / names.MANIFEST_NAME).exists() or (out / names.rng_file(0)).exists():
        raise CheckpointError(
            f"{out} is a checkpoint",
            why="its weights would be replaced",
            fix="export into a folder of its own",
        )
    written = own(folder, model) if own is not None else None
    source = found_in(folder, model) if written is None else written[0]
    if found.manifest is not None:
        count = _verify(found, {p.relative_to(folder).as_posix() for p in files_of(source)})
        if tell is not None:
            tell(f"{count} file(s) of model {model} in {found.name} are as they were saved")
    spread = found.manifest is None or found.manifest.world_size > 1
    read = weights_of(source) if written is None else untied(written[1])
    weights = without_wrappers(read, spread=spread)
    files = write_weights(weights, out, max_shard_size=max_shard_size, dtype=wanted, tell=tell)
    size = sum(t.shape.numel() * cast_to(t.dtype, wanted).itemsize for t in weights.tensors.values())
    return HandedOver(source, files, len(weights.tensors), size, weights.others)


def _verify(found: Candidate, wanted: set[str]) -> int:
    problems = [checked for checked in overview.check(found, wanted) if checked.problem]
    if problems:
        first = problems[0]
        raise CheckpointError(
            f"{found.path}: {first.name} is damaged",
            why=first.problem,
            fix="export another checkpoint; nothing was written",
        )
    return len(wanted)


def without_wrappers(weights: Weights, *, spread: bool) -> Weights:
    """By the names of the user's module.

    Args:
        weights: as they were saved.
        spread: several processes may have trained: one ``module.`` that all names begin with goes.
    """
    weights = weights.renamed(lambda name: name.replace("_orig_mod.", ""))
    every = [*weights.tensors, *weights.aliases]
    if spread and every and all(name.startswith("module.") for name in every):
        weights = weights.renamed(lambda name: name.removeprefix("module."))
    return weights
