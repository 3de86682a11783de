"""The parts of a checkpoint: its objects, the names of their files, and the manifest, which lists them.

    contents = CheckpointContents(models=[model], optimizers=[optimizer], schedulers=[scheduler],
                                  rng=True, loaders=[loader], step=12, metadata={"epoch": 3})

    path = save(contents, "runs/a/last")      # replaces the folder in one step
    path = save(contents, project=project)    # runs/a/checkpoints/checkpoint_<iteration>

    result = load(contents, "runs/a/last")    # verified against its manifest, then loaded
    result = load(contents, project=project)  # the newest committed one
    result.step, result.metadata["epoch"], result.missing, result.notes

Both are collective: every rank calls, and all succeed or all raise. Device-specific and sharded states come
in as ``StatefulAdapter`` or ``FolderStateful``. A ``before`` hook gets the folder: that of a save may write
files into it and take models out of its list; that of a load gets the manifest too, and may take models out
of ``contents.models``.

The names of files are a public format: other programs read and write them.

The manifest is the last file of a save. A folder with a valid manifest was complete and on the disk when the
manifest was written. It is JSON for people and other programs; ``digest`` at its top guards the manifest
itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol, runtime_checkable

import msgspec

from accelerate.checkpoint.file_access import HASHING, FileRecord
from accelerate.core.errors import CheckpointError

MODEL_NAME = "pytorch_model"
SAFE_MODEL_NAME = "model"
OPTIMIZER_NAME = "optimizer"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
SCALER_NAME = "scaler.pt"
RNG_STATE_NAME = "random_states"
WORKER_SEEDS = "worker_seeds"  # a key of its files; earlier versions ignore it
LOADER_NAME = "dl_state_dict"
GRADIENTS_NAME = "open_gradients"
CUSTOM_NAME = "custom_checkpoint"
RANK_STATE_NAME = "rank_state"

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
DAMAGE_FIX = (
    "load another checkpoint, or put the file back; if a program has replaced files on purpose, delete "
    f"{MANIFEST_NAME}: they are loaded unverified. Nothing was changed"
)
AUTOMATIC_FOLDER = "checkpoints"
AUTOMATIC_NAME = "checkpoint"


# By kind: {suffix} is empty for the first object and "_1" for the second, {rank_suffix} for the first rank.
_FILE_NAMES = {
    "models": f"{SAFE_MODEL_NAME}{{suffix}}.safetensors",
    "torch_models": f"{MODEL_NAME}{{suffix}}.bin",
    "sharded_models": f"{SHARDED_MODEL_NAME}_{{index}}",  # a folder
    "gathered_models": f"{SHARDED_MODEL_NAME}{{suffix}}.bin",  # of the public package, gathered from shards
    "rank_models": f"{SHARDED_MODEL_NAME}{{suffix}}_rank{{rank}}.bin",  # of it too: one rank's part
    "optimizers": f"{OPTIMIZER_NAME}{{suffix}}.bin",
    "sharded_optimizers": f"{OPTIMIZER_NAME}_{{index}}",
    "shards": "__{rank}_0.distcp",  # one rank's, in the folder of a sharded state
    "schedulers": f"{SCHEDULER_NAME}{{suffix}}.bin",
    "custom": f"{CUSTOM_NAME}_{{index}}.pkl",
    "rank_states": f"{RANK_STATE_NAME}_{{index}}_{{rank}}.bin",
    "scaler": SCALER_NAME,
    "rank_positions": f"{SAMPLER_NAME}{{suffix}}_rank{{rank}}.bin",
    "stateful_loaders": f"{LOADER_NAME}{{suffix}}{{rank_suffix}}.bin",  # rank 0 has the public name
    "gradients": f"{GRADIENTS_NAME}_{{rank}}.bin",  # of an accumulation window that is not complete
    "rng": f"{RNG_STATE_NAME}_{{rank}}.pkl",
}


def file_name(kind: str, index: int = 0, rank: int = 0) -> str:
    """Return the file or folder of an object; ``kind`` is a key of ``KINDS``, or another one of the table."""
    suffix, rank_suffix = f"_{index}" if index else "", f"_rank{rank}" if rank else ""
    return _FILE_NAMES[kind].format(index=index, suffix=suffix, rank=rank, rank_suffix=rank_suffix)


# Folders are those of sharded states, which have a number, and of DeepSpeed and Megatron-LM, named after the
# model. ``scheduler/`` is none: pipelines of diffusers have one.
_PART = re.compile(
    rf"{SAFE_MODEL_NAME}(_\d+)?\.safetensors|{MODEL_NAME}(_\d+)?(\.bin)?"
    rf"|{SHARDED_MODEL_NAME}_\d+|{SHARDED_MODEL_NAME}(_\d+)?(_rank\d+)?\.bin|{OPTIMIZER_NAME}_\d+"
    rf"|({OPTIMIZER_NAME}|{SCHEDULER_NAME}|{SAMPLER_NAME})(_\d+)?(_rank\d+)?\.bin"
    rf"|{LOADER_NAME}(_\d+)?(_rank\d+)?\.bin|{re.escape(SCALER_NAME)}"
    rf"|{RNG_STATE_NAME}_\d+\.pkl|{GRADIENTS_NAME}_\d+\.bin|{CUSTOM_NAME}_\d+\.pkl|{RANK_STATE_NAME}_\d+_\d+\.bin"
    rf"|{re.escape(MANIFEST_NAME)}"
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


# ---------------------------------------------------------------- objects


@runtime_checkable
class Stateful(Protocol):
    """Anything with a state: a module, an optimizer, a scheduler, a scaler, an object of the user."""

    def state_dict(self) -> Any:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Load a state."""
        ...


@runtime_checkable
class RankStateful(Protocol):
    """A registered object that has, besides its state, one on each rank: replicas that are trained apart."""

    def rank_state_dict(self) -> Any:
        """Return the state of this rank, None if there is none."""
        ...

    def load_rank_states(self, states: Sequence[Any], rank: int, /) -> None:
        """Load this rank's state from those of all ranks that saved; each is mapped when it is accessed."""
        ...


@dataclass
class StatefulAdapter:
    """A ``Stateful`` made of two functions, for states that are collected in a special way.

    Attributes:
        name: how errors call it.
        state_dict, load_state_dict: see Stateful. Both are called on every rank.
        sharded_state: returns the object that saves and loads the same state sharded, always the same one;
            None where that is not possible.
        template: for a model, returns a cheap state with its names and ties; ``state_dict`` if None.
        check: raises the reason why the state cannot be saved, for this rank only; None if there can be none.
        settle: called on every rank before the state is taken for a checkpoint; collective.
        compare: returns why a full state cannot be loaded, empty if it can; takes the state and the name of
            the class that was saved. It changes nothing. None if that is known only by loading.
        module: for a model, the user's own module.
        optimizer: for an optimizer, the torch optimizer that takes the state.
        keeps_shard: for an optimizer, that it copies this rank's shard of a full state: the state is mapped.
    """

    name: str
    state_dict: Callable[[], Any]
    load_state_dict: Callable[..., Any]
    sharded_state: Callable[[], ShardedState] | None = None
    template: Callable[[], Mapping[str, Any]] | None = None
    check: Callable[[], None] | None = None
    settle: Callable[[], None] | None = None
    compare: Callable[[Any, str], str] | None = None
    module: Any = None
    optimizer: Any = None
    keeps_shard: bool = False


class FolderStateful(Protocol):
    """An object that writes files of its own, such as a DeepSpeed checkpoint.

    Both methods are called on every rank, with the same folder, and may be collective. Whatever ``save``
    writes below the folder is checked, committed and verified with the rest. A method ``compare(folder)``, if
    there is one, returns why the files do not fit, empty if nothing speaks against them.
    """

    name: str

    def save(self, folder: Path, /) -> Iterable[str]:
        """Write into ``folder``, which is not yet the final one.

        Returns the names, relative to it, of what this rank wrote: so each rank takes the digests of its own
        files. Rank 0 takes those of files that nobody names.
        """
        ...

    def load(self, folder: Path, /) -> None:
        """Read from ``folder``."""
        ...


class StateWriter(Protocol):
    """The writer of one object's state on one rank: of a whole state, or of this rank's shard of it.

    Creating it may be collective. Afterwards writing needs no other rank and no collective, so another thread
    may do it later.

    Attributes:
        category, entry: its line in the manifest; whole on the rank that commits.
        content: what ``fill`` writes; an asynchronous save puts copies in its place.
    """

    category: str
    entry: ManifestEntry
    content: list[Any]

    @property
    def file(self) -> str:
        """The file of this rank, below the checkpoint's folder; empty if it has nothing to write."""
        ...

    def fill(self, file: BinaryIO, /) -> Any:
        """Write this rank's file; return what the rank that commits must know, a picklable value."""
        ...


class ShardWriter(StateWriter, Protocol):
    """The writer of this rank's shard of a state. The rank that commits writes one more file, the index."""

    def build_index(self, written: list[Any], /) -> tuple[str, bytes]:
        """Return (name, content) of the index; ``written`` by rank, None for no file."""
        ...


@dataclass
class CheckpointLoadContext:
    """The options of a load, and what it could not restore.

    Attributes:
        strict: a missing tensor is an error; otherwise it is listed in ``missing``.
        trusted: objects may be of any class, so reading them may run code.
        model_kwargs: more arguments of the models' ``load_state_dict``.
        missing: states that were not saved and stay as they are.
        notes: differences between the saved and the loaded state.
    """

    strict: bool = True
    trusted: bool = False
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class ShardedState(Protocol):
    """A state that can be saved sharded: each rank writes a shard into a folder that all share."""

    def local_plan(self, rank: int, size: int, /) -> tuple[Any, str]:
        """Return this rank's save plan for all ranks, and an id; called on every rank, may be collective.

        The id is equal on ranks that can write by the combined plans of the save before, of as many ranks;
        else it is empty.
        """
        ...

    def combine_plans(self, plans: list[Any], /) -> Any:
        """Return what the ranks must know of the plans of all; called on each rank that commits."""
        ...

    def shard_writer(self, combined: Any, index: int, rank: int, /) -> ShardWriter:
        """Return this rank's writer for the object of that index. Not collective.

        Args:
            combined: what ``combine_plans`` has returned on rank 0, or here; None for a known plan.
            index: of the object among those of its category.
            rank: this one.
        """
        ...

    def prepare_load(self, folder: Path, context: CheckpointLoadContext, /) -> Callable[[], Any]:
        """Check the state in ``folder`` against the object; return a function that loads it.

        Not collective, except for the object's own ``load_state_dict``.

        Raises:
            CheckpointError: the state is not complete, or does not fit.
        """
        ...


@dataclass(frozen=True)
class ContentKind:
    """The place of one kind of objects in a checkpoint.

    Attributes:
        label: how errors call such an object, before its index.
        per_rank: each rank writes a file of its own; otherwise one rank writes for all.
        is_users: the class may be the user's, so a log line says what loading will refuse.
    """

    label: str
    per_rank: bool = False
    is_users: bool = False


# In the order in which they are collected, written and read. A new kind is one line here, one in
# ``_FILE_NAMES``, and one field of ``CheckpointContents``.
KINDS = {
    "models": ContentKind("model"),
    "optimizers": ContentKind("optimizer"),
    "schedulers": ContentKind("scheduler"),
    "custom": ContentKind("registered object", is_users=True),
    "scaler": ContentKind("the gradient scaler"),
    "stateful_loaders": ContentKind("loader", per_rank=True, is_users=True),
    "rank_states": ContentKind("rank states of object", per_rank=True),
    "rank_positions": ContentKind("position on each rank of loader", per_rank=True),
    "loaders": ContentKind("loader"),  # their positions are in the manifest
    "gradients": ContentKind("open gradients of rank", per_rank=True),
    "rng": ContentKind("random states of rank", per_rank=True),
}


@dataclass(frozen=True)
class CheckpointObject:
    """One object of a checkpoint.

    Attributes:
        category: a key of ``KINDS``.
        index: its number among those of its kind.
        item: the object, a ``Stateful``.
        label: its name for errors: ``"optimizer 1"``.
        class_name: the name of its class, for the manifest and for errors.
    """

    category: str
    index: int
    item: Any
    label: str
    class_name: str

    @property
    def sharded_state(self) -> ShardedState | None:
        """Its sharded state, None if it has none."""
        get = self.item.sharded_state if isinstance(self.item, StatefulAdapter) else None
        return None if get is None else get()


@dataclass
class CheckpointContents:
    """Everything that one save writes or one load restores.

    Attributes:
        models: their state must be a mapping of names to tensors.
        optimizers, schedulers: one file each.
        scaler: of mixed precision, if there is one.
        custom: the user's registered objects.
        loaders: positions that are plain values (JSON) and the same on every rank, such as samples drawn so
            far; they go into the manifest.
        stateful_loaders: loaders with a state per rank, such as torchdata's.
        rank_positions: of the loaders whose data each rank keeps for itself, loaded after ``loaders`` from
            the states of all ranks.
        gradients: the gradients of an accumulation window that is not complete; None if there are none. Its
            ``load_state_dict`` takes the states of all ranks that were saved, and the rank.
        rng: the random states of each rank are among them, and with them
        worker_seeds: what a rank has of its own of the epoch that each loader is in: its number, and the seed
            of its fetches; None of a loader that is in none.
        sharded: a save writes models and optimizers sharded, where they have a ``sharded_state``. A load
            reads what is in the folder.
        own_files: objects that write files of their own.
        step: the accelerator's step counter.
        strategy: name of the training's strategy, for the record.
        metadata: the caller's plain values: ``{"epoch": 3, ...}``.
        rank_states: of registered objects, what each rank has of its own; None is not saved. Loaded after
            models and optimizers, as ``gradients`` are, from the states of all ranks.
    """

    models: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    scaler: Any = None
    custom: list[Any] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    stateful_loaders: list[Any] = field(default_factory=list)
    rank_positions: list[Any] = field(default_factory=list)
    gradients: Any = None
    rng: bool = False
    worker_seeds: list[tuple[int, int] | None] = field(default_factory=list[tuple[int, int] | None])
    sharded: bool = False
    own_files: list[FolderStateful] = field(default_factory=list)
    step: int = 0
    strategy: str = "single"
    metadata: dict[str, Any] = field(default_factory=dict)
    rank_states: list[Any] = field(default_factory=list)

    def objects(self) -> dict[str, CheckpointObject]:
        """Return all objects but ``own_files`` by their names, ``"optimizers/1"``, in the order of ``KINDS``.

        Raises:
            CheckpointError: one has no ``state_dict`` and ``load_state_dict``.
        """
        objects: dict[str, CheckpointObject] = {}
        random_states = None
        if self.rng:
            from accelerate.world import rng  # it imports torch, and manifests are read without

            own = {WORKER_SEEDS: self.worker_seeds} if any(self.worker_seeds) else {}
            random_states = StatefulAdapter(
                "random states", lambda: {"step": self.step, **rng.capture(), **own}, rng.restore
            )
        for category, kind in KINDS.items():
            items = random_states if category == "rng" else getattr(self, category)
            if not isinstance(items, list):
                items = [] if items is None else [items]
            for index, item in enumerate(items):
                label = kind.label if category == "scaler" else f"{kind.label} {index}"
                class_name = item.name if isinstance(item, StatefulAdapter) else type(item).__name__
                objects[f"{category}/{index}"] = CheckpointObject(category, index, item, label, class_name)
                if not isinstance(item, Stateful):
                    raise CheckpointError(
                        f"{label} cannot be saved: it is a {type(item).__name__} and "
                        "has no state_dict and load_state_dict",
                        fix="give the class these two methods",
                    )
        return objects
