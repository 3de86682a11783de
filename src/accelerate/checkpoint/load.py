"""Loading: from a checkpoint to parts. See ``state.py``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from accelerate.checkpoint import find, where
from accelerate.checkpoint.fetch import near
from accelerate.checkpoint.manifest import Manifest
from accelerate.checkpoint.parts import Parts
from accelerate.checkpoint.places import Address
from accelerate.checkpoint.project import ProjectConfiguration
from accelerate.checkpoint.ranks import Ranks
from accelerate.checkpoint.restore import Reader, verify
from accelerate.checkpoint.store import Store
from accelerate.core.errors import CheckpointError
from accelerate.world import world as worlds

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """What a load found.

    Attributes:
        path: the checkpoint; text if it is a URL.
        step: the step counter it was saved with.
        iteration: its number under automatic naming, else None.
        metadata: the plain values it was saved with.
        world_size: number of processes that saved it; None if unknown.
        manifest: None for a checkpoint of the public package.
        missing: parts that were asked for and are not in it (``strict=False`` only).
        ignored: folders that were passed over, with the reason.
        notes: what came back otherwise than it was saved; logged too.
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
    parts: Parts,
    directory: str | Path | None = None,
    *,
    project: ProjectConfiguration | None = None,
    strict: bool = True,
    map_location: Any = None,
    load_kwargs: Mapping[str, Any] | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    before: Callable[[Path], None] | None = None,
    check_digests: bool = True,
    ranks: Ranks | None = None,
) -> Loaded:
    """Puts a checkpoint back into ``parts`` on all ranks together.

    Everything is verified, looked up and compared before the first object is changed.

    Args:
        parts: the objects to fill, in the order they were saved. What was saved and is not asked for stays
            unread.
        directory: the checkpoint's folder or URL; None takes the newest committed one of ``project``
            (automatic naming).
        project: its ``iteration`` is set so that numbering continues after all checkpoints that are there.
        strict: a part that is missing is an error; otherwise it stays as it is and is listed.
        map_location: ``"cpu"``, ``"on_device"`` or what ``torch.load`` takes; None is this rank's device when
            there are several ranks, else the CPU. Models go to where they are, through mapped files.
        load_kwargs: more arguments of ``torch.load``.
        model_kwargs: more arguments of the models' ``load_state_dict``.
        before: called on every rank with the folder, before ``parts.models`` is read.
        check_digests: compare digests with the manifest; sizes are always compared.
        ranks: those that load together; the open world's by default.

    Raises:
        CheckpointError: on every rank, naming the rank and the file, and what was expected.
        CheckpointNotFoundError: there is no checkpoint.
    """
    ranks = ranks or Ranks.current()
    doing = "load a checkpoint" if directory is None else f"load the checkpoint {directory}"
    among = _everywhere(project, ranks, doing) if directory is None else None
    first, id_, ignored = ranks.lead(doing, lambda: _chosen(directory, project, among))
    with ranks.together(doing):
        store, name = where.place(where.here(first, directory, project))
        manifest = _same_manifest(store, name, id_)
    location = on_device(map_location, "on_device" if ranks.size > 1 else "cpu")
    with near(store, name, manifest, parts, ranks, doing) as (path, fetched):
        reader = Reader(path, manifest, ranks, strict, location, load_kwargs or {}, model_kwargs or {})
        with ranks.together(doing):
            if fetched is not None and check_digests:
                verify(path, fetched, ranks)
        with ranks.together(doing):
            if before is not None:
                before(path)
            parts.check()
            reader.count_custom(parts)
            reader.read(parts)
        with ranks.together(doing):
            reader.apply()
        with ranks.together(doing):
            reader.finish(parts)
    if project is not None and project.automatic_checkpoint_naming:
        with ranks.together(doing) as told:
            told.value = 0
            if ranks.writes(project.save_on_each_node):
                told.value = where.next_iteration(name, manifest, project)
        project.iteration = max(told.values)
    shown = store.local(name) or store.label(name)
    _tell(reader, shown)
    return _loaded(reader, shown, name, ignored)


def _everywhere(project: ProjectConfiguration | None, ranks: Ranks, doing: str) -> set[str] | None:
    """Ids of the checkpoints that all machines have, where each saves its own: a crash in the middle of a
    commit leaves the newest on some of them. None if that does not matter.
    """
    if project is None or not (project.save_on_each_node and project.automatic_checkpoint_naming):
        return None
    with ranks.together(doing) as told:
        told.value = where.committed(project) if ranks.writes(each_node=True) else None
    return set.intersection(*(ids for ids in told.values if ids is not None))


def _chosen(
    directory: str | Path | None, project: ProjectConfiguration | None, among: set[str] | None
) -> tuple[Address, str, tuple[str, ...]]:
    """(checkpoint, id of its save, what was passed over)."""
    candidate, ignored = where.chosen(directory, project, among)
    return candidate.path, candidate.manifest.id if candidate.manifest else "", ignored


def _same_manifest(store: Store, name: str, id_: str) -> Manifest | None:
    """This rank's view of the checkpoint that rank 0 has chosen."""
    manifest = find.read_manifest(store, name)
    found = manifest.id if manifest else ""
    if found != id_:
        raise CheckpointError(
            f"{store.label(name)} is another checkpoint here than on rank 0",
            why=f"its save has the id {found or '(none)'}, rank 0's {id_ or '(none)'}",
            fix="copy the same checkpoint to every machine",
        )
    return manifest


def on_device(map_location: Any, default: Any) -> Any:
    """``map_location`` for ``torch.load``: None is ``default``, ``"on_device"`` this rank's device."""
    place = default if map_location is None else map_location
    if not (isinstance(place, str) and place == "on_device"):
        return place
    world = worlds.current()
    return world.device if world is not None else torch.device("cpu")


def _tell(reader: Reader, shown: Address) -> None:
    if reader.ranks.rank > 0:
        return
    for note in reader.notes:
        logger.warning("%s: %s", shown, note)
    if reader.missing:
        logger.warning("%s lacks, and leaves as they are: %s", shown, ", ".join(reader.missing))


def _loaded(reader: Reader, shown: Address, name: str, ignored: tuple[str, ...]) -> Loaded:
    manifest = reader.manifest
    return Loaded(
        path=shown,
        step=manifest.step if manifest else reader.step or 0,
        iteration=manifest.iteration if manifest else find.automatic_number(name),
        metadata=manifest.metadata if manifest else {},
        world_size=manifest.world_size if manifest else None,
        manifest=manifest,
        missing=tuple(reader.missing),
        ignored=ignored,
        notes=tuple(reader.notes),
    )
