"""Save and load a training state. Both are collective: every rank calls, and all succeed or all raise.

    parts = Parts(models=[model], optimizers=[optimizer], schedulers=[scheduler], rng=rng,
                  loaders=[loader], step=12, strategy="ddp", metadata={"epoch": 3})

    path = state.save(parts, "runs/a/last")                  # replaces the folder in one step
    path = state.save(parts, project=project_configuration)  # runs/a/checkpoints/checkpoint_<iteration>

    loaded = state.load(parts, "runs/a/last")                # verified against its manifest, then put back
    loaded = state.load(parts, project=project_configuration)  # the newest committed one
    loaded.step, loaded.metadata["epoch"], loaded.missing, loaded.notes

What the parts are is in ``parts.py``, the protocol that makes a save whole or absent in ``commit.py``, the
file names in ``names.py``, the manifest in ``manifest.py``. Device-specific and sharded states come in as
``Part`` or ``OwnFiles``. A ``before`` hook sees the folder: that of a save may write files into it and take
models out of its list, that of a load may take models out of ``parts.models``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from accelerate.checkpoint import collect, commit, find, where
from accelerate.checkpoint import manifest as manifests
from accelerate.checkpoint.manifest import Manifest, PartEntry
from accelerate.checkpoint.parts import OwnFiles, Part, Parts, Rng, Stateful
from accelerate.checkpoint.project import ProjectConfiguration
from accelerate.checkpoint.ranks import Ranks
from accelerate.checkpoint.restore import Reader, verify
from accelerate.checkpoint.store import LocalStore, Record, Store
from accelerate.core.errors import CheckpointError
from accelerate.world import world as worlds

__all__ = ["Loaded", "OwnFiles", "Part", "Parts", "Rng", "Stateful", "latest", "load", "save"]

logger = logging.getLogger(__name__)
latest = find.latest

Table = dict[str, list[PartEntry]]


@dataclass(frozen=True)
class Loaded:
    """What a load found.

    Attributes:
        path: the checkpoint.
        step: the step counter it was saved with.
        iteration: its number under automatic naming, else None.
        metadata: the plain values it was saved with.
        world_size: number of processes that saved it; None if unknown.
        manifest: None for a checkpoint of the public package.
        missing: parts that were asked for and are not in it (``strict=False`` only).
        ignored: folders that were passed over, with the reason.
        notes: what came back otherwise than it was saved; logged too.
    """

    path: Path
    step: int
    iteration: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    world_size: int | None = None
    manifest: Manifest | None = None
    missing: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def save(
    parts: Parts,
    directory: str | Path | None = None,
    *,
    project: ProjectConfiguration | None = None,
    safe_serialization: bool = True,
    before: Callable[[collect.Weights, Path], None] | None = None,
    ranks: Ranks | None = None,
    store: Callable[[Path], Store] = LocalStore,
) -> Path:
    """Saves ``parts`` on all ranks together; returns the folder, as rank 0 named it.

    Args:
        parts: what to save.
        directory: the checkpoint's folder, as rank 0 gives it; one that exists is replaced. Automatic naming
            does not use it.
        project: naming, retention, and whether each machine has its own disk. Its ``iteration`` grows by one.
        safe_serialization: models as safetensors; otherwise as torch files.
        before: called on every rank with the models' states and the folder that is being written.
        ranks: those that save together; the open world's by default.
        store: makes the place to save in from the folder above the checkpoint.

    Raises:
        CheckpointError: on every rank, naming the rank that failed and its file; what was there is untouched.
        CheckpointExistsError: automatic naming has come to a number that is taken.
    """
    ranks = ranks or Ranks.current()
    project = project or ProjectConfiguration()
    doing = "save the checkpoint" if directory is None else f"save the checkpoint {directory}"
    each_node = project.save_on_each_node
    with ranks.together(doing) as plan:
        if each_node or ranks.rank == 0:
            shown = where.target(directory, project)
            target = shown.resolve()
            if ranks.writes(each_node) and project.automatic_checkpoint_naming:
                where.refuse_taken(store(target.parent), target.name)
            plan.value = shown, target, commit.new_id()
    shown, target, _ = plan.values[ranks.rank if each_node else 0]
    stage = commit.Stage(store(target.parent), target.name, plan.values[0][2], ranks, each_node)
    number = project.iteration if project.automatic_checkpoint_naming else None
    try:
        _staged(stage, parts, doing, safe_serialization, before, number)
        with ranks.together(doing):
            if stage.commits:
                stage.publish()
    except BaseException:
        stage.discard()
        raise
    if project.automatic_checkpoint_naming:
        project.iteration += 1
        if stage.commits:
            _retain(stage, project)
    return shown


def _staged(
    stage: commit.Stage,
    parts: Parts,
    doing: str,
    safe: bool,
    before: Callable[[collect.Weights, Path], None] | None,
    iteration: int | None,
) -> None:
    """Everything before the commit: all files and the manifest, durable and checked."""
    together = stage.ranks.together
    table: Table = {}
    with together(doing):
        parts.check()
        stage.open()
        found = collect.states(parts, stage.ranks.rank)
        if before is not None:
            before(found.weights, stage.folder)
        for item in collect.items(found, shared=stage.commits, safe=safe):
            stage.write(item.entry.file, item.fill)
            table.setdefault(item.sort, []).append(item.entry)
    with together(doing) as told:
        # May be collective, so no rank begins before all have come this far.
        for part in parts.own_files:
            stage.seal(part.save(stage.folder))
            table.setdefault("own_files", []).append(PartEntry("", part.name))
        told.value = stage.report()
    with together(doing):
        if stage.commits:
            stage.close(told.values, lambda files: _manifest(parts, found, stage, files, table, iteration))


def _manifest(
    parts: Parts,
    found: collect.States,
    stage: commit.Stage,
    files: dict[str, Record],
    table: Table,
    iteration: int | None,
) -> Manifest:
    return Manifest(
        id=stage.id,
        step=parts.step,
        world_size=stage.ranks.size,
        files=files,
        parts=table,
        loaders=found.positions,
        metadata=found.metadata,
        iteration=iteration,
        strategy=parts.strategy,
        each_node=stage.each_node,
        library=f"accelerate {_version()}",
        torch=str(torch.__version__),
    )


@cache
def _version() -> str:
    return version("accelerate")


def _retain(stage: commit.Stage, project: ProjectConfiguration) -> None:
    """The checkpoint is committed: what cannot be removed now must not stop the training."""
    try:
        commit.retain(stage.store, stage.name, project.total_limit)
    except CheckpointError as error:
        logger.warning("%s is committed, but an older one could not be removed: %s", stage.target, error)


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

    Everything is verified and read before the first object is changed.

    Args:
        parts: the objects to fill, in the order they were saved. What was saved and is not asked for stays
            unread.
        directory: the checkpoint; None takes the newest committed one of ``project`` (automatic naming).
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
    first, id_, ignored = ranks.lead(doing, lambda: _chosen(directory, project))
    with ranks.together(doing):
        path = where.here(first, directory, project)
        manifest = _same_manifest(path, id_)
        if manifest is not None and check_digests:
            verify(path, manifest, ranks)
    location = on_device(map_location, "on_device" if ranks.size > 1 else "cpu")
    reader = Reader(path, manifest, ranks, strict, location, load_kwargs or {}, model_kwargs or {})
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
        project.iteration = ranks.lead(doing, lambda: where.next_iteration(path, manifest, project))
    _tell(reader)
    return _loaded(reader, ignored)


def _chosen(
    directory: str | Path | None, project: ProjectConfiguration | None
) -> tuple[Path, str, tuple[str, ...]]:
    """(checkpoint, id of its save, what was passed over)."""
    candidate, ignored = where.chosen(directory, project)
    return candidate.path, candidate.manifest.id if candidate.manifest else "", ignored


def _same_manifest(path: Path, id_: str) -> Manifest | None:
    """This rank's view of the checkpoint that rank 0 has chosen."""
    manifest = manifests.read(path)
    found = manifest.id if manifest else ""
    if found != id_:
        raise CheckpointError(
            f"{path} is another checkpoint here than on rank 0",
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


def _tell(reader: Reader) -> None:
    if reader.ranks.rank > 0:
        return
    for note in reader.notes:
        logger.warning("%s: %s", reader.folder, note)
    if reader.missing:
        logger.warning("%s lacks, and leaves as they are: %s", reader.folder, ", ".join(reader.missing))


def _loaded(reader: Reader, ignored: tuple[str, ...]) -> Loaded:
    manifest = reader.manifest
    return Loaded(
        path=reader.folder,
        step=manifest.step if manifest else reader.step or 0,
        iteration=manifest.iteration if manifest else find.automatic_number(reader.folder.name),
        metadata=manifest.metadata if manifest else {},
        world_size=manifest.world_size if manifest else None,
        manifest=manifest,
        missing=tuple(reader.missing),
        ignored=ignored,
        notes=tuple(reader.notes),
    )
