"""The collection of the objects' states, and the files that each rank writes of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO

from accelerate.checkpoint import names, pickles, state_dict_files
from accelerate.checkpoint.manifest import ManifestEntry, to_plain
from accelerate.checkpoint.rank_group import CheckpointRankGroup
from accelerate.checkpoint.stateful_protocols import OBJECT_FILES, CheckpointContents, ShardWriter, class_name

ModelStates = list[dict[str, Any]]


@dataclass(frozen=True)
class CheckpointFileWrite:
    """One file to write.

    Attributes:
        category: ``"models"``, ``"optimizers"`` ...
        entry: its line in the manifest.
        fill: writes it; the rank that commits gets what it returns.
        own_name: its file, where the entry names another.
    """

    category: str
    entry: ManifestEntry
    fill: Callable[[BinaryIO], Any]
    own_name: str = ""

    @property
    def file(self) -> str:
        """The path below the checkpoint's folder."""
        return self.own_name or self.entry.file


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


def collect_states(train_state: CheckpointContents, ranks: CheckpointRankGroup) -> CollectedStates:
    """Call ``state_dict`` of every object, on every rank, since a state may be gathered from all of them."""
    rank = ranks.rank
    sharded = {(category, index): sharded for category, index, sharded in train_state.sharded_states()}
    models = [model for index, model in enumerate(train_state.models) if ("models", index) not in sharded]
    weights = [model.state_dict() for model in models]
    states = CollectedStates(weights, local_plans=[state.local_plan(rank) for state in sharded.values()])
    states.model_classes = {
        id(state): class_name(model) for state, model in zip(weights, models, strict=True)
    }
    for category, file in OBJECT_FILES.items():
        items = [
            (i, item) for i, item in enumerate(getattr(train_state, category)) if (category, i) not in sharded
        ]
        for index, item in items:
            states.replicated.append((category, file(index), class_name(item), item.state_dict()))
    if train_state.scaler is not None:
        states.replicated.append(
            ("scaler", names.SCALER_NAME, class_name(train_state.scaler), train_state.scaler.state_dict())
        )
    for index, loader in enumerate(train_state.stateful_loaders):
        file = names.loader_file(index, rank)
        states.per_rank.append(("stateful_loaders", file, class_name(loader), loader.state_dict()))
    for index, loader in enumerate(train_state.loaders):
        states.positions.append(to_plain(loader.state_dict(), f"the position of loader {index}"))
    states.metadata = to_plain(train_state.metadata, "metadata")
    if train_state.rng is not None:
        value = {"step": train_state.step, **train_state.rng.capture()}
        states.per_rank.append(("rng", names.rng_file(rank), "random states", value))
    return states


def shard_writers(train_state: CheckpointContents, plans: list[list[Any]], rank: int) -> list[ShardWriter]:
    """Return this rank's writers of the sharded states; ``plans`` are the local plans of all ranks."""
    return [
        sharded.shard_writer([rank_plans[position] for rank_plans in plans], index, rank)
        for position, (_, index, sharded) in enumerate(train_state.sharded_states())
    ]


def files_to_write(states: CollectedStates, *, replicated: bool, safe: bool) -> Iterator[CheckpointFileWrite]:
    """Yield the files that this rank writes.

    Args:
        states: the states.
        replicated: this rank also writes what is the same on all ranks.
        safe: models as safetensors instead of torch files.
    """
    if replicated:
        for index, state in enumerate(states.model_states):
            yield _model_file(state, index, states.model_classes.get(id(state), ""), safe)
    for category, file, name, state in [*(states.replicated if replicated else []), *states.per_rank]:
        description = f"{file} ({name})" if category in ("custom", "stateful_loaders") else ""
        yield CheckpointFileWrite(
            category, ManifestEntry(file, name), partial(pickles.write, state, what=description)
        )
    for share in states.shard_writers:
        if share.file:
            yield CheckpointFileWrite(share.category, share.entry, share.fill, share.file)


def _model_file(state: dict[str, Any], index: int, name: str, safe: bool) -> CheckpointFileWrite:
    file = names.model_file(index, safe=safe)
    state = state_dict_files.strip_compile_prefix(state)
    if not safe:
        entry = ManifestEntry(file, name, state_dict_files.dtypes_and_shapes(state))
        return CheckpointFileWrite("models", entry, partial(pickles.write, OrderedDict(state)))
    separate, aliases = state_dict_files.untie(state)
    entry = ManifestEntry(file, name, state_dict_files.dtypes_and_shapes(separate), aliases)
    return CheckpointFileWrite(
        "models", entry, partial(state_dict_files.write_safetensors, separate, aliases)
    )
