"""Loading: from a checkpoint to objects. See ``state.py``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from accelerate.checkpoint import checkpoint_location, discovery
from accelerate.checkpoint.checkpoint_fetch import local_checkpoint
from accelerate.checkpoint.manifest import Manifest
from accelerate.checkpoint.project import ProjectConfiguration
from accelerate.checkpoint.rank_group import CheckpointRankGroup
from accelerate.checkpoint.state_reader import TrainingStateReader, verify_files
from accelerate.checkpoint.stateful_protocols import CheckpointContents
from accelerate.checkpoint.storage import CheckpointStorage
from accelerate.checkpoint.storage_urls import Address
from accelerate.core.errors import CheckpointError
from accelerate.world import world as worlds

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointLoadResult:
    """The outcome of a load.

    Attributes:
        path: the checkpoint; text if it is a URL.
        step: the step counter it was saved with.
        iteration: its number under automatic naming, else None.
        metadata: the plain values it was saved with.
        world_size: number of processes that saved it; None if unknown.
        manifest: None for a checkpoint of the public package.
        missing: states that were asked for and are not in it (``strict=False`` only).
        ignored: folders that were passed over, with the reason.
        notes: differences between the saved and the loaded state; logged too.
    """

    path: Address
    step: int
    iteration: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    world_size: int | None = None
    manifest: Manifest | None = None
    missing: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def load(
    train_state: CheckpointContents,
    directory: str | Path | None = None,
    *,
    project: ProjectConfiguration | None = None,
    strict: bool = True,
    map_location: Any = None,
    load_kwargs: Mapping[str, Any] | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    before: Callable[[Path], None] | None = None,
    check_digests: bool = True,
    ranks: CheckpointRankGroup | None = None,
) -> CheckpointLoadResult:
    """Load a checkpoint into ``train_state`` on all ranks together.

    Everything is verified, looked up and compared before the first object is changed.

    Args:
        train_state: the objects to fill, in the order they were saved. Other saved objects stay unread.
        directory: the checkpoint's folder or URL; None takes the newest committed one of ``project``
            (automatic naming).
        project: its ``iteration`` is set so that numbering continues after all checkpoints that are there.
        strict: a missing state is an error; otherwise its object stays as it is and is listed.
        map_location: ``"cpu"``, ``"on_device"`` or what ``torch.load`` takes; None is this rank's device when
            there are several ranks, else the CPU. Models go to where they are, through mapped files.
        load_kwargs: more arguments of ``torch.load``.
        model_kwargs: more arguments of the models' ``load_state_dict``.
        before: called on every rank with the folder, before ``train_state.models`` is read.
        check_digests: compare digests with the manifest; sizes are always compared.
        ranks: those that load together; the open world's by default.

    Raises:
        CheckpointError: on every rank, naming the rank and the file, and what was expected.
        CheckpointNotFoundError: there is no checkpoint.
    """
    ranks = ranks or CheckpointRankGroup.current()
    action = "load a checkpoint" if directory is None else f"load the checkpoint {directory}"
    common_ids = _ids_on_all_machines(project, ranks, action) if directory is None else None
    rank0_address, id_, ignored = ranks.run_on_rank0(action, lambda: _choose(directory, project, common_ids))
    with ranks.collective_section(action):
        store, name = checkpoint_location.locate(
            checkpoint_location.local_address(rank0_address, directory, project)
        )
        manifest = _same_manifest(store, name, id_)
    location = resolve_map_location(map_location, "on_device" if ranks.size > 1 else "cpu")
    with local_checkpoint(store, name, manifest, train_state, ranks, action) as (path, fetched):
        reader = TrainingStateReader(
            path, manifest, ranks, strict, location, load_kwargs or {}, model_kwargs or {}
        )
        with ranks.collective_section(action):
            if fetched is not None and check_digests:
                verify_files(path, fetched, ranks)
        with ranks.collective_section(action):
            if before is not None:
                before(path)
            train_state.check()
            reader.check_custom_count(train_state)
            reader.read(train_state)
        with ranks.collective_section(action):
            reader.apply()
        with ranks.collective_section(action):
            reader.finish(train_state)
    if project is not None and project.automatic_checkpoint_naming:
        with ranks.collective_section(action) as section:
            section.value = 0
            if ranks.is_writer(project.save_on_each_node):
                section.value = checkpoint_location.next_iteration(name, manifest, project)
        project.iteration = max(section.values)
    address = store.local_path(name) or store.label(name)
    _log_notes(reader, address)
    return _build_result(reader, address, name, ignored)


def _ids_on_all_machines(
    project: ProjectConfiguration | None, ranks: CheckpointRankGroup, action: str
) -> set[str] | None:
    """Return the ids of the checkpoints that all machines have, where each saves its own.

    A crash in the middle of a commit leaves the newest on some of them. None if that does not matter.
    """
    if project is None or not (project.save_on_each_node and project.automatic_checkpoint_naming):
        return None
    with ranks.collective_section(action) as section:
        section.value = (
            checkpoint_location.committed_ids(project) if ranks.is_writer(each_node=True) else None
        )
    return set.intersection(*(ids for ids in section.values if ids is not None))


def _choose(
    directory: str | Path | None, project: ProjectConfiguration | None, common_ids: set[str] | None
) -> tuple[Address, str, tuple[str, ...]]:
    """Return (checkpoint, id of its save, folders passed over)."""
    candidate, ignored = checkpoint_location.choose_checkpoint(directory, project, common_ids)
    return candidate.path, candidate.manifest.id if candidate.manifest else "", ignored


def _same_manifest(store: CheckpointStorage, name: str, id_: str) -> Manifest | None:
    """Read this rank's manifest, and raise if it is not that of the checkpoint that rank 0 chose."""
    manifest = discovery.read_manifest(store, name)
    own_id = manifest.id if manifest else ""
    if own_id != id_:
        raise CheckpointError(
            f"{store.label(name)} is another checkpoint here than on rank 0",
            why=f"its save has the id {own_id or '(none)'}, rank 0's {id_ or '(none)'}",
            fix="copy the same checkpoint to every machine",
        )
    return manifest


def resolve_map_location(map_location: Any, default: Any) -> Any:
    """Return ``map_location`` for ``torch.load``; ``"on_device"`` is this rank's device, None ``default``."""
    place = default if map_location is None else map_location
    if not (isinstance(place, str) and place == "on_device"):
        return place
    world = worlds.current()
    return world.device if world is not None else torch.device("cpu")


def _log_notes(reader: TrainingStateReader, address: Address) -> None:
    if reader.ranks.rank > 0:
        return
    for note in reader.notes:
        logger.warning("%s: %s", address, note)
    if reader.missing:
        logger.warning("%s lacks, and leaves as they are: %s", address, ", ".join(reader.missing))


def _build_result(
    reader: TrainingStateReader, address: Address, name: str, ignored: tuple[str, ...]
) -> CheckpointLoadResult:
    manifest = reader.manifest
    return CheckpointLoadResult(
        path=address,
        step=manifest.step if manifest else reader.step or 0,
        iteration=manifest.iteration if manifest else discovery.automatic_number(name),
        metadata=manifest.metadata if manifest else {},
        world_size=manifest.world_size if manifest else None,
        manifest=manifest,
        missing=tuple(reader.missing),
        ignored=ignored,
        notes=tuple(reader.notes),
    )
