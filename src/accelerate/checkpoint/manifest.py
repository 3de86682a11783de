"""The manifest: the last file of a save, which says what a complete checkpoint holds.

A folder with a valid manifest was complete and on the disk when the manifest was written. It is JSON for
people and other programs; ``digest`` at its top guards the manifest itself.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec

from accelerate.checkpoint.digest import HASHING, FileRecord
from accelerate.checkpoint.names import MANIFEST_NAME
from accelerate.core.errors import CheckpointError

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


def encode(manifest: Manifest) -> bytes:
    """Encode the manifest as JSON."""
    body = json.loads(json.dumps(asdict(manifest)))
    return (json.dumps({"digest": _manifest_digest(body), **body}, indent=1) + "\n").encode()


def decode(data: bytes, path: Path | str) -> Manifest:
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
        return msgspec.convert(body, Manifest)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path} is damaged", why=str(error)) from error


def read(folder: Path) -> Manifest | None:
    """Read the manifest of a checkpoint folder; return None if it has none.

    Raises:
        CheckpointError: it is damaged, or of a newer format.
    """
    path = folder / MANIFEST_NAME
    if not path.is_file():
        return None
    return decode(path.read_bytes(), path)


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
