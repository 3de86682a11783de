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

import torch

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
    """

    name: str
    state_dict: Callable[[], Any]
    load_state_dict: Callable[..., Any]
    sharded_state: Callable[[], ShardedState] | None = None
    template: Callable[[], Mapping[str, Any]] | None = None
    check: Callable[[], None] | None = None


class FolderStateful(Protocol):
    """An object that writes files of its own, such as a DeepSpeed checkpoint.

    Both methods are called on every rank, with the same folder, and may be collective. Whatever ``save``
    writes below the folder is checked, committed and verified with the rest.
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


class ShardWriter(Protocol):
    """The writer of one rank's shard of a sharded state.

    Creating it may be collective. Afterwards writing needs no other rank and no collective, so another thread
    may do it later. The rank that commits gets what ``fill`` returned on each rank, and writes one more file,
    the index, with ``build_index``.

    Attributes:
        category, entry: its line in the manifest, the same on all ranks.
        file: the file of this rank, below the checkpoint's folder; empty if it has nothing to write.
        tensors: what ``fill`` writes; an asynchronous save puts copies in their place.
    """

    category: str
    entry: ManifestEntry
    file: str
    tensors: list[torch.Tensor]

    def fill(self, file: BinaryIO, /) -> Any:
        """Write this rank's file; return what the rank that commits must know, a picklable value."""
        ...

    def build_index(self, written: list[Any], /) -> tuple[str, bytes]:
        """Return (name, content) of the index of all shards; ``written`` by rank, None for no file."""
        ...


ModelStates = list[dict[str, Any]]


@dataclass
class CollectedStates:
    """The states of all objects at one moment, as this rank has them.

    Attributes:
        model_states: one state dict per model; hooks may take some away.
        replicated: (sort, file, kind, state) that one rank writes for all.
        own_name: the same that every rank writes for itself.
        positions: of the loaders, and
        metadata: of the caller, as plain values.
        model_classes: class of the model by the ``id`` of its state.
        local_plans: this rank's save plans of the sharded states.
        shard_writers: this rank's writers of them, once the plans of all ranks are known.
    """

    model_states: ModelStates
    replicated: list[tuple[str, str, str, Any]] = field(default_factory=list)
    per_rank: list[tuple[str, str, str, Any]] = field(default_factory=list)
    positions: list[Any] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    model_classes: dict[int, str] = field(default_factory=dict)
    local_plans: list[Any] = field(default_factory=list)
    shard_writers: list[ShardWriter] = field(default_factory=list)


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

    def shard_writer(self, plans: list[Any], index: int, rank: int, /) -> ShardWriter:
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
    rng: RNGStates | None = None
    sharded: bool = False
    own_files: list[FolderStateful] = field(default_factory=list)
    step: int = 0
    strategy: str = "single"
    metadata: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse objects that have no ``state_dict`` and ``load_state_dict``.

        Raises:
            CheckpointError: names the object.
        """
        categories = ("models", "optimizers", "schedulers", "custom", "loaders", "stateful_loaders")
        objects = [
            (category, index, item)
            for category in categories
            for index, item in enumerate(getattr(self, category))
        ]
        if self.scaler is not None:
            objects.append(("scaler", 0, self.scaler))
        for category, index, item in objects:
            if not isinstance(item, Stateful):
                raise CheckpointError(
                    f"{describe_object(category, index)} cannot be saved: it is a {type(item).__name__} and "
                    "has no state_dict and load_state_dict",
                    fix="give the class these two methods",
                )

    def sharded_states(self) -> list[tuple[str, int, ShardedState]]:
        """Return (category, index, state) of all sharded saves; the models all or none of them."""
        if not self.sharded:
            return []
        models = [(i, s) for i, model in enumerate(self.models) if (s := sharded_state_of(model)) is not None]
        entries = [("models", i, s) for i, s in models] if len(models) == len(self.models) else []
        optimizers = enumerate(self.optimizers)
        return entries + [
            ("optimizers", i, s) for i, item in optimizers if (s := sharded_state_of(item)) is not None
        ]


def sharded_state_of(item: Any) -> ShardedState | None:
    """Return the sharded state of an object, None if it has none."""
    return (
        item.sharded_state() if isinstance(item, StatefulAdapter) and item.sharded_state is not None else None
    )


def class_name(item: Any) -> str:
    """Return the name of an object for the manifest and for errors."""
    return item.name if isinstance(item, StatefulAdapter) else type(item).__name__


def describe_object(category: str, index: int) -> str:
    """Return an object's name for errors: ``"optimizer 1"`` for ``("optimizers", 1)``."""
    label = {"custom": "registered object", "stateful_loaders": "loader", "rng": "random states of rank"}.get(
        category
    )
    if category == "scaler":
        return "the gradient scaler"
    return f"{label or category.removesuffix('s')} {index}"


# category -> file by index, for the categories with one torch file per object, in the order they are written
OBJECT_FILES: dict[str, Callable[[int], str]] = {
    "optimizers": layout.optimizer_file,
    "schedulers": layout.scheduler_file,
    "custom": layout.custom_file,
}
