"""What a checkpoint is made of, as values that the caller fills."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import torch

from accelerate.checkpoint import names
from accelerate.checkpoint.manifest import PartEntry
from accelerate.core.errors import CheckpointError


@runtime_checkable
class Stateful(Protocol):
    """Anything with a state: a module, an optimizer, a scheduler, a scaler, an object of the user."""

    def state_dict(self) -> Any:
        """The state."""
        ...

    def load_state_dict(self, state_dict: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Takes a state back."""
        ...


@dataclass
class Part:
    """A Stateful made of two functions, for states that are got in a way of their own.

    Attributes:
        name: how errors call it.
        state_dict, load_state_dict: see Stateful. Both are called on every rank.
        spread: gives what saves and loads the same state in parts, always the same object; None where
            that is not possible.
        like: for a model, a state with its names and ties that costs nothing to make; ``state_dict`` if None.
        check: raises what stands against saving it, and looks at this rank only; None if nothing can.
    """

    name: str
    state_dict: Callable[[], Any]
    load_state_dict: Callable[..., Any]
    spread: Callable[[], Spread] | None = None
    like: Callable[[], Mapping[str, Any]] | None = None
    check: Callable[[], None] | None = None


class OwnFiles(Protocol):
    """A part that writes files of its own: sharded states, an engine's checkpoint.

    Both methods are called on every rank, with the same folder, and may be collective. Whatever ``save``
    writes below the folder is checked, committed and verified with the rest.
    """

    name: str

    def save(self, folder: Path, /) -> Iterable[str]:
        """Writes into ``folder``, which is not yet the final one.

        Returns the names, relative to it, of what this rank wrote: so each rank takes the digests of its own
        files. Rank 0 takes those of files that nobody names.
        """
        ...

    def load(self, folder: Path, /) -> None:
        """Reads from ``folder``."""
        ...


class Share(Protocol):
    """What one rank writes of a state that is spread over the ranks.

    Making it may be collective. Afterwards it stands alone: writing needs no other rank and no collective, so
    another thread may do it later. What each rank's ``fill`` returned is told to the rank that commits, which
    then writes one file more with ``finish``.

    Attributes:
        sort, entry: its line in the manifest, the same on all ranks.
        file: the file of this rank, below the checkpoint's folder; empty if it has nothing to write.
        tensors: what ``fill`` writes; an asynchronous save puts copies in their place.
    """

    sort: str
    entry: PartEntry
    file: str
    tensors: list[torch.Tensor]

    def fill(self, file: BinaryIO, /) -> Any:
        """Writes the file of this rank; returns what the rank that commits must know, to be pickled."""
        ...

    def finish(self, told: list[Any], /) -> tuple[str, bytes]:
        """(name, content) of the file that ties the shares together; ``told`` by rank, None for no file."""
        ...


@dataclass
class Reading:
    """How a load reads, and what it finds.

    Attributes:
        strict: what is missing is an error; otherwise it is listed in ``missing``.
        trusted: objects may be of any class, so reading them may run code.
        model_kwargs: more arguments of the models' ``load_state_dict``.
        missing: what stays as it is.
        notes: what comes back otherwise than it was saved.
    """

    strict: bool = True
    trusted: bool = False
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Spread(Protocol):
    """A state that can be saved spread over the ranks: each writes a part, into a folder that all share."""

    def plan(self, rank: int, /) -> Any:
        """What this rank has, to be told to all ranks; called on every rank, may be collective."""
        ...

    def share(self, plans: list[Any], index: int, rank: int, /) -> Share:
        """This rank's share of the object of that index; ``plans`` by rank. Not collective."""
        ...

    def prepare(self, folder: Path, reading: Reading, /) -> Callable[[], Any]:
        """Checks what was saved in ``folder`` against the object; what is returned puts it back.

        Not collective, but for what the object's own ``load_state_dict`` does.

        Raises:
            CheckpointError: it is not complete, or does not fit.
        """
        ...


class Rng(Protocol):
    """The random states of one rank; the module ``accelerate.world.rng`` is one."""

    def capture(self) -> Mapping[str, Any]:
        """All states, by the names of the public format."""
        ...

    def restore(self, state: Mapping[str, Any], /) -> Iterable[str]:
        """Puts them back; returns the generators of this process that ``state`` has nothing for."""
        ...

    def set_seed(self, seed: int, /) -> Any:
        """Starts every generator anew from one number of 63 bits."""
        ...


@dataclass
class Parts:
    """Everything one save writes or one load fills.

    Attributes:
        models: their state must be a mapping of names to tensors.
        optimizers, schedulers: one file each.
        scaler: of mixed precision, if there is one.
        custom: the user's registered objects.
        loaders: positions that are plain values (JSON) and the same on every rank, such as samples drawn so
            far; they go into the manifest.
        stateful_loaders: loaders with a state per rank, such as torchdata's.
        rng: how random states are got and put back; None leaves them out.
        sharded: a save writes models and optimizers in parts, where each has a ``spread``. A load goes by
            what is in the folder.
        own_files: parts that write files of their own.
        step: the accelerator's step counter.
        strategy: how the training is spread, for the record.
        metadata: plain values to get back: ``{"epoch": 3, ...}``.
    """

    models: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    scaler: Any = None
    custom: list[Any] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    stateful_loaders: list[Any] = field(default_factory=list)
    rng: Rng | None = None
    sharded: bool = False
    own_files: list[OwnFiles] = field(default_factory=list)
    step: int = 0
    strategy: str = "single"
    metadata: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Refuses objects that have no state.

        Raises:
            CheckpointError: names the object.
        """
        sorts = ("models", "optimizers", "schedulers", "custom", "loaders", "stateful_loaders")
        every = [(sort, index, item) for sort in sorts for index, item in enumerate(getattr(self, sort))]
        if self.scaler is not None:
            every.append(("scaler", 0, self.scaler))
        for sort, index, item in every:
            if not isinstance(item, Stateful):
                raise CheckpointError(
                    f"{label(sort, index)} cannot be saved: it is a {type(item).__name__} and has no "
                    "state_dict and load_state_dict",
                    fix="give the class these two methods",
                )

    def in_parts(self) -> list[tuple[str, int, Spread]]:
        """(sort, index, spread) of what a save writes in parts; the models all or none of them."""
        if not self.sharded:
            return []
        models = [(i, s) for i, model in enumerate(self.models) if (s := spread(model)) is not None]
        found = [("models", i, s) for i, s in models] if len(models) == len(self.models) else []
        every = enumerate(self.optimizers)
        return found + [("optimizers", i, s) for i, item in every if (s := spread(item)) is not None]


def spread(item: Any) -> Spread | None:
    """How an object is saved and loaded in parts, None if it cannot be."""
    return item.spread() if isinstance(item, Part) and item.spread is not None else None


def kind(item: Any) -> str:
    """How to call an object in the manifest and in errors."""
    return item.name if isinstance(item, Part) else type(item).__name__


def label(sort: str, index: int) -> str:
    """``label("optimizers", 1)`` is ``"optimizer 1"``."""
    word = {"custom": "registered object", "stateful_loaders": "loader", "rng": "random states of rank"}.get(
        sort
    )
    if sort == "scaler":
        return "the gradient scaler"
    return f"{word or sort.removesuffix('s')} {index}"


# sort -> file by index, for the sorts that are one torch file per object, in the order they are written
FILES: dict[str, Callable[[int], str]] = {
    "optimizers": names.optimizer_file,
    "schedulers": names.scheduler_file,
    "custom": names.custom_file,
}
