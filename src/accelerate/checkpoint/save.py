"""Saving: from the objects' states to a committed checkpoint."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import torch

from accelerate.checkpoint import (
    async_save,
    commit,
    discovery,
    layout,
    state_dict_files,
    storage,
    torch_files,
)
from accelerate.checkpoint.discovery import Address, ProjectConfiguration, open_store, split_address
from accelerate.checkpoint.layout import Manifest, ManifestEntry, to_plain
from accelerate.checkpoint.rank_group import CheckpointRankGroup, CheckpointStoreChannel, open_channel
from accelerate.checkpoint.stateful import (
    OBJECT_FILES,
    CheckpointContents,
    CollectedStates,
    ModelStates,
    ShardWriter,
    StatefulAdapter,
    class_name,
)
from accelerate.checkpoint.storage import CheckpointStorage, FileRecord
from accelerate.core.errors import CheckpointError

logger = logging.getLogger(__name__)

PartTable = dict[str, list[ManifestEntry]]


def save(
    train_state: CheckpointContents,
    directory: str | Path | None = None,
    *,
    project: ProjectConfiguration | None = None,
    safe_serialization: bool = True,
    before: Callable[[ModelStates, Path], None] | None = None,
    ranks: CheckpointRankGroup | None = None,
    store: Callable[[Any], CheckpointStorage] = open_store,
    in_background: bool = False,
) -> Address:
    """Save ``train_state`` on all ranks together; return the folder or URL, as rank 0 named it.

    The save before is waited for, if it is still written in the background.

    Args:
        train_state: what to save.
        directory: the checkpoint's folder or URL, as rank 0 gives it; one that exists is replaced. Automatic
            naming does not use it.
        project: naming, retention, and whether each machine has its own disk. Its ``iteration`` grows by one.
        safe_serialization: models as safetensors; otherwise as torch files.
        before: called on every rank with the models' states and the folder that is being written.
        ranks: those that save together; the open world's by default.
        store: makes the place to save in from the folder above the checkpoint.
        in_background: returns as soon as the states are copied; see ``async_save.py``.

    Raises:
        CheckpointError: on every rank, naming the rank that failed and its file; what was there is untouched.
        CheckpointExistsError: automatic naming has come to a number that is taken.
        BackgroundSaveError: the save before failed in the background, and this one has not begun.
    """
    ranks = ranks or CheckpointRankGroup.current()
    project = project or ProjectConfiguration()
    action = "save the checkpoint" if directory is None else f"save the checkpoint {directory}"
    address, transaction = _open_transaction(ranks, directory, project, action, store)
    number = project.iteration if project.automatic_checkpoint_naming else None
    run = _SaveRun(transaction, train_state, action, safe_serialization, number, project.total_limit)
    channel = _open_channel(transaction) if in_background else None
    copy_states = in_background and (channel is not None or ranks.size == 1)
    with run.discard_on_error():
        run.collect(before, copy_states=copy_states)
    if copy_states:
        if channel is not None:
            transaction.ranks = replace(ranks, channel=channel.all_gather)
        async_save.start(address, run.finish, channel or nullcontext())
    else:
        run.finish()
    if number is not None:
        project.iteration = number + 1
    return address


def _open_transaction(
    ranks: CheckpointRankGroup,
    directory: str | Path | None,
    project: ProjectConfiguration,
    action: str,
    store: Callable[[Any], CheckpointStorage],
) -> tuple[Address, commit.CommitTransaction]:
    """Return (the checkpoint's address, its transaction); nothing is written yet."""
    each_node = project.save_on_each_node
    with ranks.collective_section(action) as section:
        async_save.wait()
        if each_node or ranks.rank == 0:
            address = discovery.save_address(directory, project)
            root, name = split_address(address)
            if ranks.is_writer(each_node) and project.automatic_checkpoint_naming:
                discovery.refuse_existing_number(store(root), name)
            section.value = address, root, name, storage.new_id()
    address, root, name, _ = section.values[ranks.rank if each_node else 0]
    return address, commit.CommitTransaction(store(root), name, section.values[0][3], ranks, each_node)


def _open_channel(transaction: commit.CommitTransaction) -> CheckpointStoreChannel | None:
    """Return the channel of a save in the background; None where the ranks share no store."""
    ranks = transaction.ranks
    if ranks.size == 1:
        return None
    channel = open_channel(ranks.rank, ranks.size, transaction.id)
    if channel is None:
        logger.warning("%s is not saved in the background: the ranks share no store", transaction.target)
    return channel


@dataclass
class _SaveRun:
    """One save, from the collected states to the commit.

    Attributes:
        transaction: where it is written.
        train_state: what is saved.
        action: for errors.
        safe: models as safetensors.
        iteration: its number under automatic naming, else None.
        limit: how many numbered checkpoints to keep.
        states: the states, after ``collect``, or copies of them.
        written_files: names of the files that objects wrote on their own.
    """

    transaction: commit.CommitTransaction
    train_state: CheckpointContents
    action: str
    safe: bool
    iteration: int | None
    limit: int | None
    written_files: list[str] = field(default_factory=list)

    @contextmanager
    def discard_on_error(self) -> Generator[None]:
        """Remove the files that were written, if the block fails."""
        try:
            yield
        except BaseException:
            self.transaction.discard()
            raise

    def collect(self, before: Callable[[ModelStates, Path], None] | None, *, copy_states: bool) -> None:
        """Collect the states; with ``copy_states``, later changes of the objects do not change them."""
        collective_section, transaction = self.transaction.ranks.collective_section, self.transaction
        with collective_section(self.action):
            self.train_state.check()
            for model in self.train_state.models:
                if isinstance(model, StatefulAdapter) and model.check is not None:
                    model.check()
            transaction.open()
        with collective_section(self.action) as section:
            # May be collective, so no rank begins before all have come this far.
            states = collect_states(self.train_state, transaction.ranks)
            section.value = states.local_plans
        with collective_section(self.action):
            states.shard_writers = shard_writers(self.train_state, section.values, transaction.ranks.rank)
            if before is not None:
                before(states.model_states, transaction.folder)
        with collective_section(self.action):
            # May be collective too.
            for own_files in self.train_state.own_files:
                self.written_files += own_files.save(transaction.folder)
            self._snapshot = (
                async_save.take_snapshot(states, replicated=transaction.is_committer) if copy_states else None
            )
        self.states = states if self._snapshot is None else self._snapshot.states

    def finish(self) -> None:
        """Write and commit the states; the objects are needed no more."""
        transaction, collective_section = self.transaction, self.transaction.ranks.collective_section
        with self.discard_on_error():
            self._write()
            with collective_section(self.action):
                if transaction.is_committer:
                    transaction.publish()
        if self.iteration is not None and transaction.is_committer:
            _remove_old(transaction, self.limit)

    def _write(self) -> None:
        """Write all files and the manifest, durable and checked, but not committed."""
        transaction, collective_section = self.transaction, self.transaction.ranks.collective_section
        shard_infos: dict[str, Any] = {}
        with collective_section(self.action) as section:
            if self._snapshot is not None:
                self._snapshot.wait()
            files = list(files_to_write(self.states, replicated=transaction.is_committer, safe=self.safe))
            for item in files:
                returned = transaction.write(item.file, item.fill)
                if returned is not None:
                    shard_infos[item.entry.file] = returned
            transaction.seal(self.written_files)
            section.value = transaction.rank_report(shard_infos)
        with collective_section(self.action):
            if not transaction.is_committer:
                return
            reports: list[commit.WrittenFilesReport] = section.values
            for shard_writer in self.states.shard_writers:
                name, content = shard_writer.build_index(
                    [report.shard_infos.get(shard_writer.entry.file) for report in reports]
                )
                transaction.write(name, content_writer(content))
            # This rank's own records have grown by the indices of the shards.
            reports[transaction.ranks.rank] = transaction.rank_report(shard_infos)
            table = _manifest_table(self.train_state, self.states, files)
            transaction.write_manifest(reports, lambda files: self._manifest(files, table))

    def _manifest(self, files: dict[str, FileRecord], table: PartTable) -> Manifest:
        return Manifest(
            id=self.transaction.id,
            step=self.train_state.step,
            world_size=self.transaction.ranks.size,
            files=files,
            parts=table,
            loaders=self.states.positions,
            metadata=self.states.metadata,
            iteration=self.iteration,
            strategy=self.train_state.strategy,
            each_node=self.transaction.each_node,
            library=f"accelerate {_version()}",
            torch=str(torch.__version__),
        )


def content_writer(content: bytes) -> Callable[[BinaryIO], None]:
    """Return a function that writes ``content`` to a file."""

    def fill(file: BinaryIO) -> None:
        file.write(content)

    return fill


def _manifest_table(
    train_state: CheckpointContents,
    states: CollectedStates,
    files: list[CheckpointFileWrite],
) -> PartTable:
    """Return the saved objects by category; all shards of an object are one entry."""
    table: PartTable = {}
    for item in files:
        if not item.own_name:
            table.setdefault(item.category, []).append(item.entry)
    for share in states.shard_writers:
        table.setdefault(share.category, []).append(share.entry)
    for part in train_state.own_files:
        table.setdefault("own_files", []).append(ManifestEntry("", part.name))
    return table


@cache
def _version() -> str:
    return version("accelerate")


def _remove_old(transaction: commit.CommitTransaction, limit: int | None) -> None:
    """Remove old checkpoints; a failure must not stop the training, since the new one is committed."""
    try:
        commit.remove_old_checkpoints(transaction.store, transaction.name, limit)
    except CheckpointError as error:
        logger.warning(
            "%s is committed, but an older one could not be removed: %s", transaction.target, error
        )


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
            ("scaler", layout.SCALER_NAME, class_name(train_state.scaler), train_state.scaler.state_dict())
        )
    for index, loader in enumerate(train_state.stateful_loaders):
        file = layout.loader_file(index, rank)
        states.per_rank.append(("stateful_loaders", file, class_name(loader), loader.state_dict()))
    for index, loader in enumerate(train_state.loaders):
        states.positions.append(to_plain(loader.state_dict(), f"the position of loader {index}"))
    states.metadata = to_plain(train_state.metadata, "metadata")
    if train_state.rng is not None:
        value = {"step": train_state.step, **train_state.rng.capture()}
        states.per_rank.append(("rng", layout.rng_file(rank), "random states", value))
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
            category, ManifestEntry(file, name), partial(torch_files.write, state, what=description)
        )
    for share in states.shard_writers:
        if share.file:
            yield CheckpointFileWrite(share.category, share.entry, share.fill, share.file)


def _model_file(state: dict[str, Any], index: int, name: str, safe: bool) -> CheckpointFileWrite:
    file = layout.model_file(index, safe=safe)
    state = state_dict_files.strip_compile_prefix(state)
    if not safe:
        entry = ManifestEntry(file, name, state_dict_files.dtypes_and_shapes(state))
        return CheckpointFileWrite("models", entry, partial(torch_files.write, OrderedDict(state)))
    separate, aliases = state_dict_files.untie(state)
    entry = ManifestEntry(file, name, state_dict_files.dtypes_and_shapes(separate), aliases)
    return CheckpointFileWrite(
        "models", entry, partial(state_dict_files.write_safetensors, separate, aliases)
    )
