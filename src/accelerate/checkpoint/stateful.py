"""The objects that a checkpoint is made of, and the protocols for their states.

    contents = CheckpointContents(models=[model], optimizers=[optimizer], schedulers=[scheduler],
                                  rng=rng, loaders=[loader], step=12, metadata={"epoch": 3})

    path = save(contents, "runs/a/last")      # replaces the folder in one step
    path = save(contents, project=project)    # runs/a/checkpoints/checkpoint_<iteration>

    result = load(contents, "runs/a/last")    # verified against its manifest, then loaded
    result = load(contents, project=project)  # the newest committed one
    result.step, result.metadata["epoch"], result.missing, result.notes

Both are collective: every rank calls, and all succeed or all raise. Device-specific and sharded states come
in as ``StatefulAdapter`` or ``FolderStateful``. A ``before`` hook gets the folder: that of a save may write
files into it and take models out of its list, that of a load may take models out of ``contents.models``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

from accelerate.checkpoint import layout
from accelerate.checkpoint.layout import ManifestEntry
from accelerate.core.errors import CheckpointError


@runtime_checkable
class Stateful(Protocol):
    """Anything with a state: a module, an optimizer, a scheduler, a scaler, an object of the user."""

    def state_dict(self) -> Any:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Load a state."""
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
        compare: returns why a full state cannot be loaded, empty if it can; takes the state and the name of
            the class that was saved. It changes nothing. None if that is known only by loading.
        module: for a model, the user's own module.
    """

    name: str
    state_dict: Callable[[], Any]
    load_state_dict: Callable[..., Any]
    sharded_state: Callable[[], ShardedState] | None = None
    template: Callable[[], Mapping[str, Any]] | None = None
    check: Callable[[], None] | None = None
    compare: Callable[[Any, str], str] | None = None
    module: Any = None


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
    may do it later. The rank that commits gets what ``fill`` returned on each rank, and writes one more file,
    the index of the shards, with ``build_index``.

    Attributes:
        category, entry: its line in the manifest, the same on all ranks.
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

    def build_index(self, written: list[Any], /) -> tuple[str, bytes] | None:
        """Return (name, content) of the index of all shards; ``written`` by rank, None for no file.

        None if the state is in one file.
        """
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

    def local_plan(self, rank: int, /) -> Any:
        """Return this rank's save plan for all ranks; called on every rank, may be collective."""
        ...

    def shard_writer(self, plans: list[Any], index: int, rank: int, /) -> StateWriter:
        """Return this rank's writer for the object of that index; ``plans`` by rank. Not collective."""
        ...

    def prepare_load(self, folder: Path, context: CheckpointLoadContext, /) -> Callable[[], Any]:
        """Check the state in ``folder`` against the object; return a function that loads it.

        Not collective, except for the object's own ``load_state_dict``.

        Raises:
            CheckpointError: the state is not complete, or does not fit.
        """
        ...


class RNGStates(Protocol):
    """The random states of one rank; the module ``accelerate.world.rng`` is one."""

    def capture(self) -> Mapping[str, Any]:
        """Return all states, by the names of the public format."""
        ...

    def restore(self, state: Mapping[str, Any], /) -> Iterable[str]:
        """Restore states; return the generators of this process that ``state`` has nothing for."""
        ...

    def set_seed(self, seed: int, /) -> Any:
        """Seed every generator from one number of 63 bits."""
        ...


def _one_file(name: str) -> Callable[[int, int], str]:
    return lambda index, rank: name


def _same_on_all_ranks(name: Callable[[int], str]) -> Callable[[int, int], str]:
    return lambda index, rank: name(index)


@dataclass(frozen=True)
class ContentKind:
    """The place of one kind of objects in a checkpoint.

    Attributes:
        label: how errors call such an object, before its index.
        file: the torch file of one object, by its index and the rank; None for what is in the manifest, and
            for models, whose files have formats of their own.
        per_rank: each rank writes a file of its own; otherwise one rank writes for all.
        is_users: the class may be the user's, so a log line says what loading will refuse.
    """

    label: str
    file: Callable[[int, int], str] | None = None
    per_rank: bool = False
    is_users: bool = False


# In the order in which they are collected, written and read. A new kind is one line here, and one field of
# ``CheckpointContents``.
KINDS = {
    "models": ContentKind("model"),
    "optimizers": ContentKind("optimizer", _same_on_all_ranks(layout.optimizer_file)),
    "schedulers": ContentKind("scheduler", _same_on_all_ranks(layout.scheduler_file)),
    "custom": ContentKind("registered object", _same_on_all_ranks(layout.custom_file), is_users=True),
    "scaler": ContentKind("the gradient scaler", _one_file(layout.SCALER_NAME)),
    "stateful_loaders": ContentKind("loader", layout.loader_file, per_rank=True, is_users=True),
    "loaders": ContentKind("loader"),
    "gradients": ContentKind(
        "open gradients of rank", lambda index, rank: layout.gradients_file(rank), per_rank=True
    ),
    "rng": ContentKind("random states of rank", lambda index, rank: layout.rng_file(rank), per_rank=True),
}


@dataclass(frozen=True)
class CheckpointObject:
    """One object of a checkpoint.

    Attributes:
        category, kind: a key of ``KINDS``, and what it says.
        index: its number among those of its kind.
        item: the object, a ``Stateful``.
        label: its name for errors: ``"optimizer 1"``.
        class_name: the name of its class, for the manifest and for errors.
    """

    category: str
    kind: ContentKind
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
        gradients: the gradients of an accumulation window that is not complete; None if there are none. Its
            ``load_state_dict`` takes the states of all ranks that were saved, and the rank.
        rng: captures and restores random states; None leaves them out.
        sharded: a save writes models and optimizers sharded, where they have a ``sharded_state``. A load
            reads what is in the folder.
        own_files: objects that write files of their own.
        step: the accelerator's step counter.
        strategy: name of the training's strategy, for the record.
        metadata: the caller's plain values: ``{"epoch": 3, ...}``.
    """

    models: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    scaler: Any = None
    custom: list[Any] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    stateful_loaders: list[Any] = field(default_factory=list)
    gradients: Any = None
    rng: RNGStates | None = None
    sharded: bool = False
    own_files: list[FolderStateful] = field(default_factory=list)
    step: int = 0
    strategy: str = "single"
    metadata: dict[str, Any] = field(default_factory=dict)

    def objects(self) -> dict[str, CheckpointObject]:
        """Return all objects but ``own_files`` by their names, ``"optimizers/1"``, in the order of ``KINDS``.

        Raises:
            CheckpointError: one has no ``state_dict`` and ``load_state_dict``.
        """
        objects: dict[str, CheckpointObject] = {}
        for category, kind in KINDS.items():
            items = getattr(self, category)
            if category == "rng" and items is not None:
                items = StatefulAdapter("random states", self._random_states, items.restore)
            if not isinstance(items, list):
                items = [] if items is None else [items]
            for index, item in enumerate(items):
                label = kind.label if category == "scaler" else f"{kind.label} {index}"
                class_name = item.name if isinstance(item, StatefulAdapter) else type(item).__name__
                objects[f"{category}/{index}"] = CheckpointObject(
                    category, kind, index, item, label, class_name
                )
                if not isinstance(item, Stateful):
                    raise CheckpointError(
                        f"{label} cannot be saved: it is a {type(item).__name__} and "
                        "has no state_dict and load_state_dict",
                        fix="give the class these two methods",
                    )
        return objects

    def _random_states(self) -> dict[str, Any]:
        assert self.rng is not None
        return {"step": self.step, **self.rng.capture()}

    def sharded_states(self) -> dict[str, ShardedState]:
        """Return the states that a save writes sharded, by name; of the models all or none."""
        sharded: dict[str, ShardedState] = {}
        for name, each in self.objects().items() if self.sharded else ():
            if (state := each.sharded_state) is not None:
                sharded[name] = state
        whole_models = any(f"models/{index}" not in sharded for index in range(len(self.models)))
        return {name: s for name, s in sharded.items() if not (whole_models and name.startswith("models/"))}
