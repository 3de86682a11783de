"""Saving: from parts to a committed checkpoint. See ``state.py``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import torch

from accelerate.checkpoint import background, collect, commit, snapshot, where
from accelerate.checkpoint.mailbox import Mailbox, opened
from accelerate.checkpoint.manifest import Manifest, PartEntry
from accelerate.checkpoint.parts import Part, Parts
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
    in_background: bool = False,
) -> Address:
    """Saves ``parts`` on all ranks together; returns the folder or URL, as rank 0 named it.

    The save before is waited for, if it is still written in the background.

    Args:
        parts: what to save.
        directory: the checkpoint's folder or URL, as rank 0 gives it; one that exists is replaced. Automatic
            naming does not use it.
        project: naming, retention, and whether each machine has its own disk. Its ``iteration`` grows by one.
        safe_serialization: models as safetensors; otherwise as torch files.
        before: called on every rank with the models' states and the folder that is being written.
        ranks: those that save together; the open world's by default.
        store: makes the place to save in from the folder above the checkpoint.
        in_background: returns as soon as the states are copied; see ``background.py``.

    Raises:
        CheckpointError: on every rank, naming the rank that failed and its file; what was there is untouched.
        CheckpointExistsError: automatic naming has come to a number that is taken.
        BackgroundSaveError: the save before failed in the background, and this one has not begun.
    """
    ranks = ranks or Ranks.current()
    project = project or ProjectConfiguration()
    doing = "save the checkpoint" if directory is None else f"save the checkpoint {directory}"
    shown, stage = _opened(ranks, directory, project, doing, store)
    number = project.iteration if project.automatic_checkpoint_naming else None
    going = _Save(stage, parts, doing, safe_serialization, number, project.total_limit)
    mailbox = _mailbox(stage) if in_background else None
    copies = in_background and (mailbox is not None or ranks.size == 1)
    with going.discarded():
        going.collect(before, copies=copies)
    if copies:
        if mailbox is not None:
            stage.ranks = replace(ranks, channel=mailbox.exchange)
        background.begin(shown, going.finish, mailbox or nullcontext())
    else:
        going.finish()
    if number is not None:
        project.iteration = number + 1
    return shown


def _opened(
    ranks: Ranks,
    directory: str | Path | None,
    project: ProjectConfiguration,
    doing: str,
    store: Callable[[Any], Store],
) -> tuple[Address, commit.Stage]:
    """(the checkpoint's folder, where it is written); nothing is made yet."""
    each_node = project.save_on_each_node
    with ranks.together(doing) as plan:
        background.wait()
        if each_node or ranks.rank == 0:
            shown = where.target(directory, project)
            root, name = split(shown)
            if ranks.writes(each_node) and project.automatic_checkpoint_naming:
                where.refuse_taken(store(root), name)
            plan.value = shown, root, name, commit.new_id()
    shown, root, name, _ = plan.values[ranks.rank if each_node else 0]
    return shown, commit.Stage(store(root), name, plan.values[0][3], ranks, each_node)


def _mailbox(stage: commit.Stage) -> Mailbox | None:
    """How the ranks talk from the background, None where they cannot."""
    ranks = stage.ranks
    if ranks.size == 1:
        return None
    found = opened(ranks.rank, ranks.size, stage.id)
    if found is None:
        logger.warning("%s is not saved in the background: the ranks share no store", stage.target)
    return found


@dataclass
class _Save:
    """One save on its way.

    Attributes:
        stage: where it is written.
        parts: what is saved.
        doing: for errors.
        safe: models as safetensors.
        iteration: its number under automatic naming, else None.
        limit: how many numbered checkpoints to keep.
        found: the states, after ``collect``, or copies of them.
        own: names of the files that parts wrote by themselves.
    """

    stage: commit.Stage
    parts: Parts
    doing: str
    safe: bool
    iteration: int | None
    limit: int | None
    own: list[str] = field(default_factory=list)

    @contextmanager
    def discarded(self) -> Generator[None]:
        """After a failure, takes away what was written."""
        try:
            yield
        except BaseException:
            self.stage.discard()
            raise

    def collect(self, before: Callable[[collect.Weights, Path], None] | None, *, copies: bool) -> None:
        """Gets the states; with ``copies``, nothing that is done to the objects afterwards changes them."""
        together, stage = self.stage.ranks.together, self.stage
        with together(self.doing):
            self.parts.check()
            for model in self.parts.models:
                if isinstance(model, Part) and model.check is not None:
                    model.check()
            stage.open()
        with together(self.doing) as planned:
            # May be collective, so no rank begins before all have come this far.
            found = collect.states(self.parts, stage.ranks)
            planned.value = found.plans
        with together(self.doing):
            found.shares = collect.shares(self.parts, planned.values, stage.ranks.rank)
            if before is not None:
                before(found.weights, stage.folder)
        with together(self.doing):
            # May be collective too.
            for part in self.parts.own_files:
                self.own += part.save(stage.folder)
            self._taken = snapshot.take(found, shared=stage.commits) if copies else None
        self.found = found if self._taken is None else self._taken.states

    def finish(self) -> None:
        """Writes and commits; needs the objects no more."""
        stage, together = self.stage, self.stage.ranks.together
        with self.discarded():
            self._write()
            with together(self.doing):
                if stage.commits:
                    stage.publish()
        if self.iteration is not None and stage.commits:
            _retain(stage, self.limit)

    def _write(self) -> None:
        """Everything before the commit: all files and the manifest, durable and checked."""
        stage, together = self.stage, self.stage.ranks.together
        told: dict[str, Any] = {}
        with together(self.doing) as shared:
            if self._taken is not None:
                self._taken.wait()
            written = list(collect.items(self.found, shared=stage.commits, safe=self.safe))
            for item in written:
                returned = stage.write(item.file, item.fill)
                if returned is not None:
                    told[item.entry.file] = returned
            stage.seal(self.own)
            shared.value = stage.report(told)
        with together(self.doing):
            if not stage.commits:
                return
            reports: list[commit.Report] = shared.values
            for share in self.found.shares:
                name, content = share.finish([report.told.get(share.entry.file) for report in reports])
                stage.write(name, content_writer(content))
            # This rank's own records have grown by the files that tie shares together.
            reports[stage.ranks.rank] = stage.report(told)
            table = _table(self.parts, self.found, written)
            stage.close(reports, lambda files: self._manifest(files, table))

    def _manifest(self, files: dict[str, Record], table: Table) -> Manifest:
        return Manifest(
            id=self.stage.id,
            step=self.parts.step,
            world_size=self.stage.ranks.size,
            files=files,
            parts=table,
            loaders=self.found.positions,
            metadata=self.found.metadata,
            iteration=self.iteration,
            strategy=self.parts.strategy,
            each_node=self.stage.each_node,
            library=f"accelerate {_version()}",
            torch=str(torch.__version__),
        )


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


@cache
def _version() -> str:
    return version("accelerate")


def _retain(stage: commit.Stage, limit: int | None) -> None:
    """The checkpoint is committed: what cannot be removed now must not stop the training."""
    try:
        commit.retain(stage.store, stage.name, limit)
    except CheckpointError as error:
        logger.warning("%s is committed, but an older one could not be removed: %s", stage.target, error)
