"""The layout of a checkpoint's folder: the names of its files, and the manifest, which lists them.

The names are a public format: other programs read and write them.

The manifest is the last file of a save. A folder with a valid manifest was complete and on the disk when the
manifest was written. It is JSON for people and other programs; ``digest`` at its top guards the manifest
itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from accelerate.checkpoint.durable_file import HASHING, FileRecord
from accelerate.core.errors import CheckpointError

MODEL_NAME = "pytorch_model"
SAFE_MODEL_NAME = "model"
OPTIMIZER_NAME = "optimizer"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
SCALER_NAME = "scaler.pt"
RNG_STATE_NAME = "random_states"
LOADER_NAME = "dl_state_dict"
GRADIENTS_NAME = "open_gradients"
CUSTOM_NAME = "custom_checkpoint"

WEIGHTS_NAME = f"{MODEL_NAME}.bin"
WEIGHTS_PATTERN_NAME = "pytorch_model{suffix}.bin"
WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_NAME = f"{SAFE_MODEL_NAME}.safetensors"
SAFE_WEIGHTS_PATTERN_NAME = "model{suffix}.safetensors"
SAFE_WEIGHTS_INDEX_NAME = f"{SAFE_WEIGHTS_NAME}.index.json"
PROFILE_PATTERN_NAME = "profile_{suffix}.json"

SHARDED_MODEL_NAME = "pytorch_model_fsdp"
SHARDED_INDEX = ".metadata"

MANIFEST_NAME = "manifest.json"
AUTOMATIC_FOLDER = "checkpoints"
AUTOMATIC_NAME = "checkpoint"


def indexed_name(stem: str, index: int, extension: str) -> str:
    """Return a file name with its index: ``optimizer.bin`` for 0, ``optimizer_1.bin`` for 1."""
    return f"{stem}{extension}" if index == 0 else f"{stem}_{index}{extension}"


def model_file(index: int, *, safe: bool) -> str:
    """Return the file of the model of that index."""
    return (
        indexed_name(SAFE_MODEL_NAME, index, ".safetensors")
        if safe
        else indexed_name(MODEL_NAME, index, ".bin")
    )


def optimizer_file(index: int) -> str:
    """Return the file of the optimizer of that index."""
    return indexed_name(OPTIMIZER_NAME, index, ".bin")


def sharded_folder(category: str, index: int) -> str:
    """Return the folder of the sharded model or optimizer of that index."""
    stem = {"models": SHARDED_MODEL_NAME, "optimizers": OPTIMIZER_NAME}[category]
    return f"{stem}_{index}"


def gathered_file(index: int) -> str:
    """Return the file in which the public package keeps a sharded model that it has gathered."""
    return indexed_name(SHARDED_MODEL_NAME, index, ".bin")


def rank_file(index: int, rank: int) -> str:
    """Return the file in which the public package keeps one rank's part of a sharded model."""
    return indexed_name(SHARDED_MODEL_NAME, index, f"_rank{rank}.bin")


def shard_file(rank: int) -> str:
    """Return the file of one rank in the folder of a sharded state."""
    return f"__{rank}_0.distcp"


def scheduler_file(index: int) -> str:
    """Return the file of the scheduler of that index."""
    return indexed_name(SCHEDULER_NAME, index, ".bin")


def loader_file(index: int, rank: int = 0) -> str:
    """Return the file of a stateful loader; rank 0 has the public name, other ranks add theirs."""
    stem = indexed_name(LOADER_NAME, index, "")
    return f"{stem}.bin" if rank == 0 else f"{stem}_rank{rank}.bin"


def rng_file(rank: int) -> str:
    """Return the file of one rank's random states."""
    return f"{RNG_STATE_NAME}_{rank}.pkl"


def gradients_file(rank: int) -> str:
    """Return the file of one rank's gradients of an accumulation window that is not complete."""
    return f"{GRADIENTS_NAME}_{rank}.bin"


def custom_file(index: int) -> str:
    """Return the file of the registered object of that index."""
    return f"{CUSTOM_NAME}_{index}.pkl"


# Sharded, DeepSpeed and Megatron-LM checkpoints add files and folders named after the model or optimizer.
_PART = re.compile(
    rf"{SAFE_MODEL_NAME}(_\d+)?\.safetensors|{MODEL_NAME}\w*(\.bin)?"
    rf"|({OPTIMIZER_NAME}|{SCHEDULER_NAME}|{SAMPLER_NAME})(_\d+)?(_rank\d+)?(\.bin)?"
    rf"|{LOADER_NAME}(_\d+)?(_rank\d+)?\.bin|{re.escape(SCALER_NAME)}"
    rf"|{RNG_STATE_NAME}_\d+\.pkl|{GRADIENTS_NAME}_\d+\.bin|{CUSTOM_NAME}_\d+\.pkl|{re.escape(MANIFEST_NAME)}"
)


def is_checkpoint_name(name: str) -> bool:
    """Return True for names of a checkpoint's files and folders, False for the user's own."""
    return _PART.fullmatch(name) is not None


FORMAT = 1
_GUARD = "sha256"


@dataclass(frozen=True)
class ManifestEntry:
    """One saved object in the manifest.

    Attributes:
        file: its file; empty for an object that wrote files of its own.
        kind: class of the object.
        tensors: for a model, dtype and shape by name.
        aliases: for a model, names that share the tensor of another name, which alone is in the file.
    """

    file: str
    kind: str
    tensors: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint: its files, objects and metadata.

    Attributes:
        id: drawn by rank 0 for this save; the same on all machines.
        step: the accelerator's step counter.
        world_size: number of processes that saved.
        files: size and digest of every file.
        folder: the folder of the files, below the manifest's own; empty for the same folder.
        parts: the saved objects by category: ``models``, ``optimizers``, ``schedulers``, ``custom`` ...
        loaders: positions of the data loaders, in global samples, the same on every rank.
        metadata: the caller's own plain values, such as ``epoch``.
        iteration: number of the checkpoint under automatic naming.
        strategy: name of the training's strategy.
        each_node: every machine has a folder of its own.
        saved: when, UTC, ISO 8601.
        library, torch: versions that wrote it.
        hashing: how digests are made.
        format: version of this format.
    """

    id: str
    step: int
    world_size: int
    files: dict[str, FileRecord]
    parts: dict[str, list[ManifestEntry]] = field(default_factory=dict)
    loaders: list[Any] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    iteration: int | None = None
    strategy: str = ""
    each_node: bool = False
    saved: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="milliseconds"))
    library: str = ""
    torch: str = ""
    folder: str = ""
    hashing: str = HASHING
    format: int = FORMAT


# At import: threads that read the first manifests of a process at once would build msgspec's description of
# the class at once, and that crashes the interpreter (msgspec 0.22).
msgspec.json.Decoder(Manifest)


def _manifest_digest(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.new(_GUARD, text.encode()).hexdigest()


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode the manifest as JSON."""
    body = json.loads(json.dumps(asdict(manifest)))
    return (json.dumps({"digest": _manifest_digest(body), **body}, indent=1) + "\n").encode()


def decode_manifest(data: bytes, path: Path | str) -> Manifest:
    """Decode the manifest of a file; ``path`` is its name for errors.

    Raises:
        CheckpointError: it is damaged, or of a newer format.
    """
    try:
        body = json.loads(data)
        expected = body.pop("digest")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged", why="it is not a manifest that was written whole"
        ) from error
    if body.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {body.get('format')!r}, this version reads {FORMAT}",
            fix="install the version of accelerate that wrote it, see 'library' in that file",
        )
    if _manifest_digest(body) != expected:
        raise CheckpointError(f"{path} is damaged", why="its content does not have the digest it states")
    try:
        manifest = msgspec.convert(body, Manifest)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path} is damaged", why=str(error)) from error
    entries = (entry.file for of_category in manifest.parts.values() for entry in of_category)
    for name in (*manifest.files, *entries, manifest.folder):
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            raise CheckpointError(
                f"{path} cannot be used",
                why=f"it names {name!r}, which is outside of the checkpoint's folder",
            )
    return manifest


def to_plain(value: Any, where: str) -> Any:
    """Return ``value`` as it will come back from JSON; tuples become lists.

    Raises:
        CheckpointError: it holds something else than dict (with text keys), list, tuple, text, number,
            yes/no or None; ``where`` and the path inside it say what.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, list | tuple):
        return [to_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: to_plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    kind = "a dict with keys that are not text" if isinstance(value, dict) else f"a {type(value).__name__}"
    raise CheckpointError(
        f"{where} is {kind}, which a manifest cannot hold",
        why="it holds plain values only: dict, list, str, int, float, bool, None",
        fix="convert it (for a tensor or numpy number: .item() or .tolist()), or register an object that has "
        "state_dict and load_state_dict",
    )
