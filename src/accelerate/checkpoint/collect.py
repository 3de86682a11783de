"""From objects to files: who writes which file, and with what in it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO

from accelerate.checkpoint import names, pickles, tensors
from accelerate.checkpoint.manifest import PartEntry, plain
from accelerate.checkpoint.parts import FILES, Parts, Share, kind
from accelerate.checkpoint.ranks import Ranks

Weights = list[dict[str, Any]]


@dataclass(frozen=True)
class Item:
    """One file to write.

    Attributes:
        sort: ``"models"``, ``"optimizers"`` ...
        entry: its line in the manifest.
        fill: writes it; what it returns is told to the rank that commits.
        own: its file, where the entry names another.
    """

    sort: str
    entry: PartEntry
    fill: Callable[[BinaryIO], Any]
    own: str = ""

    @property
    def file(self) -> str:
        """Where it goes, below the checkpoint's folder."""
        return self.own or self.entry.file


@dataclass
class States:
    """The states of all parts at one moment, as this rank has them.

    Attributes:
        weights: one state dict per model; hooks may take some away.
        shared: (sort, file, kind, state) that one rank writes for all.
        own: the same that every rank writes for itself.
        positions: of the loaders, and
        metadata: of the caller, as plain values.
        kinds: class of the model by the ``id`` of its state.
        plans: what this rank tells all others of states that are spread over the ranks, and
        shares: what it writes of them, once all have told.
    """

    weights: Weights
    shared: list[tuple[str, str, str, Any]] = field(default_factory=list)
    own: list[tuple[str, str, str, Any]] = field(default_factory=list)
    positions: list[Any] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)
    plans: list[Any] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)


def states(parts: Parts, ranks: Ranks) -> States:
    """Asks every part for its state. Every rank asks, since a state may be gathered from all of them."""
    rank = ranks.rank
    spread = {(sort, index): spread for sort, index, spread in parts.in_parts()}
    models = [model for index, model in enumerate(parts.models) if ("models", index) not in spread]
    weights = [model.state_dict() for model in models]
    found = States(weights, plans=[one.plan(rank) for one in spread.values()])
    found.kinds = {id(state): kind(model) for state, model in zip(weights, models, strict=True)}
    for sort, file in FILES.items():
        items = [(i, item) for i, item in enumerate(getattr(parts, sort)) if (sort, i) not in spread]
        for index, item in items:
            found.shared.append((sort, file(index), kind(item), item.state_dict()))
    if parts.scaler is not None:
        found.shared.append(("scaler", names.SCALER_NAME, kind(parts.scaler), parts.scaler.state_dict()))
    for index, loader in enumerate(parts.stateful_loaders):
        file = names.loader_file(index, rank)
        found.own.append(("stateful_loaders", file, kind(loader), loader.state_dict()))
    for index, loader in enumerate(parts.loaders):
        found.positions.append(plain(loader.state_dict(), f"the position of loader {index}"))
    found.metadata = plain(parts.metadata, "metadata")
    if parts.rng is not None:
        value = {"step": parts.step, **parts.rng.capture()}
        found.own.append(("rng", names.rng_file(rank), "random states", value))
    return found


def shares(parts: Parts, plans: list[list[Any]], rank: int) -> list[Share]:
    """What this rank writes of the states that are spread; ``plans`` are those of all ranks."""
    return [
        spread.share([told[position] for told in plans], index, rank)
        for position, (_, index, spread) in enumerate(parts.in_parts())
    ]


def items(found: States, *, shared: bool, safe: bool) -> Iterator[Item]:
    """The files that this rank writes.

    Args:
        found: the states.
        shared: this rank also writes what is the same on all ranks.
        safe: models as safetensors instead of torch files.
    """
    if shared:
        for index, state in enumerate(found.weights):
            yield _model(state, index, found.kinds.get(id(state), ""), safe)
    for sort, file, name, state in [*(found.shared if shared else []), *found.own]:
        looked_at = f"{file} ({name})" if sort in ("custom", "stateful_loaders") else ""
        yield Item(sort, PartEntry(file, name), partial(pickles.write, state, what=looked_at))
    for share in found.shares:
        if share.file:
            yield Item(share.sort, share.entry, share.fill, share.file)


def _model(state: dict[str, Any], index: int, name: str, safe: bool) -> Item:
    file = names.model_file(index, safe=safe)
    state = tensors.saved_names(state)
    if not safe:
        entry = PartEntry(file, name, tensors.table(state))
        return Item("models", entry, partial(pickles.write, OrderedDict(state)))
    separate, aliases = tensors.separated(state)
    entry = PartEntry(file, name, tensors.table(separate), aliases)
    return Item("models", entry, partial(tensors.write, separate, aliases))
