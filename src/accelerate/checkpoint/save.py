"""Saving: from parts to a committed checkpoint. See ``state.py``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import torch

from accelerate.checkpoint import collect, commit, where
from accelerate.checkpoint.manifest import Manifest, PartEntry
from accelerate.checkpoint.parts import Parts
from accelerate.checkpoint.places import Address, open_store, split
from accelerate.checkpoint.project import ProjectConfiguration
from accelerate.checkpoint.ranks import Ranks
from accelerate.checkpoint.store import Record, Store
from accelerate.core.errors import CheckpointError

logger = logging.getLogger(__name__)

Table = dict[str, list[PartEntry]]


def save(
    parts: Parts,
    directory: str | Path | None = None,
    *,
    project: ProjectConfiguration | None = None,
    safe_serialization: bool = True,
    before: Callable[[collect.Weights, Path], None] | None = None,
    ranks: Ranks | None = None,
    store: Callable[[Any], Store] = open_store,
) -> Address:
    """Saves ``parts`` on all ranks together; returns the folder or URL, as rank 0 named it.

    Args:
        parts: what to save.
        directory: the checkpoint's folder or URL, as rank 0 gives it; one that exists is replaced. Automatic
            naming does not use it.
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
            root, name = split(shown)
            if ranks.writes(each_node) and project.automatic_checkpoint_naming:
                where.refuse_taken(store(root), name)
            plan.value = shown, root, name, commit.new_id()
    shown, root, name, _ = plan.values[ranks.rank if each_node else 0]
    stage = commit.Stage(store(root), name, plan.values[0][3], ranks, each_node)
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
    told: dict[str, Any] = {}
    with together(doing):
        parts.check()
        stage.open()
    with together(doing) as planned:
        # May be collective, so no rank begins before all have come this far.
        found = collect.states(parts, stage.ranks)
        planned.value = found.plans
    with together(doing):
        found.shares = collect.shares(parts, planned.values, stage.ranks.rank)
        if before is not None:
            before(found.weights, stage.folder)
        written = list(collect.items(found, shared=stage.commits, safe=safe))
        for item in written:
            returned = stage.write(item.file, item.fill)
            if returned is not None:
                told[item.entry.file] = returned
    with together(doing) as shared:
        # May be collective too.
        for part in parts.own_files:
            stage.seal(part.save(stage.folder))
        shared.value = stage.report(told)
    with together(doing):
        if stage.commits:
            reports: list[commit.Report] = shared.values
            for share in found.shares:
                name, content = share.finish([report.told.get(share.entry.file) for report in reports])
                stage.write(name, content_writer(content))
            # This rank's own records have grown by the files that tie shares together.
            reports[stage.ranks.rank] = stage.report(told)
            table = _table(parts, found, written)
            stage.close(reports, lambda files: _manifest(parts, found, stage, files, table, iteration))


def content_writer(content: bytes) -> Callable[[BinaryIO], None]:
    """Writes ``content`` to a file."""

    def fill(file: BinaryIO) -> None:
        file.write(content)

    return fill


def _table(parts: Parts, found: collect.States, written: list[collect.Item]) -> Table:
    """What is saved, by sort; the shares of a part are one entry."""
    table: Table = {}
    for item in written:
        if not item.own:
            table.setdefault(item.sort, []).append(item.entry)
    for share in found.shares:
        table.setdefault(share.sort, []).append(share.entry)
    for part in parts.own_files:
        table.setdefault("own_files", []).append(PartEntry("", part.name))
    return table


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
