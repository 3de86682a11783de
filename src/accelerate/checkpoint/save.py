"""Saving: from the objects' states to a committed checkpoint, which is whole and on the disk, or not there.

    0. the rank that commits takes the lock of the place, and gives it back at the end.
    1. rank 0 draws an id; all ranks write into a folder of that id, which is no checkpoint yet. Every file is
       made durable and its digest taken as soon as it is written.
    2. rank 0 gathers the ranks' reports. If one failed, all raise the same error and the folder is removed.
    3. rank 0 checks that it sees all files, and writes the manifest, last.
    4. all agree; then one step of the store makes the folder the checkpoint.
    5. only now older checkpoints may go.

On a file system step 4 is a rename, see ``storage.py``; in a remote store it writes the manifest under
the checkpoint's name, see ``remote.py``.

With ``each_node`` every machine does this on its own disk, and step 4 waits for all machines.

Of two trainings that save to one place at once, the second is refused by name, see ``save_lock.py``.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch

from accelerate.checkpoint import async_save, discovery, state_dict_files, torch_files
from accelerate.checkpoint.discovery import Address, ProjectConfiguration, open_store
from accelerate.checkpoint.layout import (
    AUTOMATIC_NAME,
    KINDS,
    MANIFEST_NAME,
    CheckpointContents,
    CheckpointObject,
    Manifest,
    ManifestEntry,
    ShardedState,
    ShardWriter,
    StatefulAdapter,
    StateWriter,
    encode_manifest,
    file_name,
    to_plain,
)
from accelerate.checkpoint.rank_group import CheckpointRankGroup, WrittenFilesReport
from accelerate.checkpoint.storage import CheckpointStorage, FileRecord, new_id, parse_working_name
from accelerate.core import tree
from accelerate.core.errors import CheckpointError
from accelerate.core.units import ProgressBar
from accelerate.core.value_types import PathText

logger = logging.getLogger(__name__)

_VERSION = version("accelerate")

ModelStates = list[dict[str, Any]]

# The folders of numbered checkpoints in which no save has left anything: this process has removed what others
# had left, and none of its own has failed since.
_cleared: set[str] = set()


def save(
    contents: CheckpointContents,
    directory: PathText | None = None,
    *,
    project: ProjectConfiguration | None = None,
    safe_serialization: bool = True,
    before: Callable[[ModelStates, Path], None] | None = None,
    ranks: CheckpointRankGroup | None = None,
    store: Callable[[Any], CheckpointStorage] = open_store,
    in_background: bool = False,
) -> Address:
    """Save ``contents`` on all ranks together; return the folder or URL, as rank 0 named it.

    The save before is waited for, if it is still written in the background.

    Args:
        contents: what to save.
        directory: the checkpoint's folder or URL, as rank 0 gives it; one that exists is replaced. Automatic
            naming does not use it.
        project: naming, retention, and whether each machine has its own disk. Its ``iteration`` becomes rank
            0's, plus one, also where ``directory`` names the checkpoint.
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
    each_node, numbered = project.save_on_each_node, project.automatic_checkpoint_naming
    action = "save the checkpoint" if directory is None else f"save the checkpoint {directory}"
    with ranks.collective_section(action) as section:
        async_save.wait()
        if numbered and project.iteration == 0 and ranks.rank == 0 and not each_node:
            project.iteration = discovery.first_iteration(project)
        if each_node or ranks.rank == 0:
            address = discovery.save_address(directory, project)
            root, name = discovery.split_address(address)
            if numbered and ranks.is_writer(each_node):
                discovery.refuse_existing_number(store(root), name)
            section.value = address, root, name, store(root).temp_prefix(name), new_id(), project.iteration
    address, root, name, prefix, *_ = section.values[ranks.rank if each_node else 0]
    *_, id_, iteration = section.values[0]
    ranks.log("accelerator", "saving a checkpoint in %s", address)
    lock_name = AUTOMATIC_NAME if numbered else name
    transaction = CommitTransaction(store(root), name, prefix, id_, ranks, each_node, lock_name)
    number = iteration if numbered else None
    run = _SaveRun(
        transaction, contents, action, number, project.total_limit, before, safe=safe_serialization
    )
    channel = ranks.open_channel(id_, transaction.target) if in_background else None
    copy_states = run.in_background = in_background and (channel is not None or ranks.size == 1)
    with transaction.discarded_on_error():
        run.collect(copy_states=copy_states)
    if copy_states:
        if channel is not None:
            run.channel, transaction.ranks = channel, replace(ranks, channel=channel.combine)
        async_save.start(address, run.finish)
    else:
        run.finish()
    project.iteration = iteration + 1
    return address


class WholeStateFile:
    """A ``StateWriter`` of an object's whole state: one file.

    Args:
        category, index, class_name: see ``CheckpointObject``.
        state: what it has returned.
        rank: this one.
        safe: a model goes into a safetensors file, otherwise into a torch file.

    Attributes:
        category, file, entry, content: see ``StateWriter``; the content is the state alone.
        log_name: how a log line calls the object if loading will refuse it; empty to not look.
    """

    def __init__(
        self, category: str, index: int, class_name: str, state: Any, rank: int, *, safe: bool
    ) -> None:
        self.category, self.safe = category, safe
        self.file = file_name("torch_models" if category == "models" and not safe else category, index, rank)
        self.entry, self.content = ManifestEntry(self.file, class_name), [state]
        self.log_name = f"{self.file} ({class_name})" if KINDS[category].is_users else ""

    def fill(self, file: BinaryIO, /) -> None:
        """Write the state; of a model, put its tensors into the manifest's line too."""
        (state,) = self.content
        if self.category != "models":
            torch_files.write(state, file, what=self.log_name)
            return
        versions = getattr(state, "_metadata", None)
        state = state_dict_files.strip_compile_prefix(state)
        if self.safe:
            state, aliases = state_dict_files.untie(state)
            self.entry.aliases.update(aliases)
            state_dict_files.write_safetensors(state, aliases, file)
        else:
            content: Any = OrderedDict(state)
            if versions is not None:  # modules convert what older versions of them have saved
                paths = {path: f"{path}.".replace("_orig_mod.", "")[:-1] for path in versions}
                content._metadata = {paths[path]: note for path, note in versions.items()}
            torch_files.write(content, file)
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                self.entry.tensors[name] = str(value.dtype).removeprefix("torch."), list(value.shape)


@dataclass
class _SaveRun:
    """One save, from the collected states to the commit.

    Attributes:
        transaction: where it is written.
        contents: what is saved.
        action: for errors.
        iteration: its number under automatic naming, else None.
        limit: how many numbered checkpoints to keep.
        before, safe: see ``save``.
        writers: of the states as ``collect`` found them, or of copies; those of this rank.
        shards: those of them that write a shard of a state.
        positions: of the loaders, and
        metadata: of the caller, as plain values.
        own_files: names of the files that objects wrote on their own.
        waits: functions that wait for devices that may still be copying states.
        in_background: a thread writes the states, and
        channel: opened by it, if there are several ranks.
    """

    transaction: CommitTransaction
    contents: CheckpointContents
    action: str
    iteration: int | None
    limit: int | None
    before: Callable[[ModelStates, Path], None] | None
    safe: bool
    writers: list[StateWriter] = field(default_factory=list)
    shards: list[ShardWriter] = field(default_factory=list)
    positions: list[Any] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    own_files: list[str] = field(default_factory=list)
    waits: list[Callable[[], None]] = field(default_factory=list)
    in_background: bool = False
    channel: contextlib.AbstractContextManager[object] = field(default_factory=contextlib.nullcontext[Any])

    def collect(self, *, copy_states: bool) -> None:
        """Collect the states; with ``copy_states``, later changes of the objects do not change them."""
        collective_section, transaction = self.transaction.ranks.collective_section, self.transaction
        contents, rank = self.contents, transaction.ranks.rank
        with collective_section(self.action):
            objects = contents.objects()
            for each in objects.values():
                if isinstance(each.item, StatefulAdapter) and each.item.check is not None:
                    each.item.check()
            transaction.open()
        sharded: dict[str, ShardedState] = {}
        # All learn the names of the states of which not all ranks know the same plan.
        with collective_section(
            self.action,
            lambda ids: [name for name, id in ids[0].items() if not id or any(o[name] != id for o in ids)],
        ) as section:
            # May be collective, so no rank begins before all have come this far.
            for each in objects.values():
                if isinstance(each.item, StatefulAdapter) and each.item.settle is not None:
                    each.item.settle()
            if contents.sharded:  # of the models all, or none
                sharded |= {name: state for name, each in objects.items() if (state := each.sharded_state)}
            if any(name.startswith("models/") and name not in sharded for name in objects):
                sharded = {name: state for name, state in sharded.items() if not name.startswith("models/")}
            size = transaction.ranks.size
            plans = {name: state.local_plan(rank, size) for name, state in sharded.items()}
            section.value = {name: known_id for name, (_, known_id) in plans.items()}
            states = {
                name: each.item.state_dict()
                for name, each in objects.items()
                if name not in sharded and each.category != "rng"
            }
            self.positions = [
                to_plain(states[name], f"the position of {each.label}")
                for name, each in objects.items()
                if each.category == "loaders"
            ]
            self.metadata = to_plain(contents.metadata, "metadata")
        combined: dict[str, Any] = {}
        if new := section.values:
            # Rank 0 alone keeps the index that the plans make.
            assert not (transaction.each_node and transaction.ranks.node), "refused by the caller"
            with collective_section(
                self.action,
                lambda ranks: {name: sharded[name].combine_plans([r[name] for r in ranks]) for name in new},
            ) as section:
                section.value = {name: plans[name][0] for name in new}
            combined = section.values
        with collective_section(self.action):
            for name, state in sharded.items():
                self.shards.append(state.shard_writer(combined.get(name), objects[name].index, rank))
            self.writers += self.shards
            self._add_whole_states(objects, states)
            if copy_states:
                self.waits = async_save.take_snapshot([writer.content for writer in self.writers])
        if contents.own_files:
            with collective_section(self.action):
                # May be collective too.
                for own_files in contents.own_files:
                    self.own_files += own_files.save(transaction.folder)

    def _add_whole_states(self, objects: dict[str, CheckpointObject], states: dict[str, Any]) -> None:
        """Add the writers of whole states, after hooks have taken or changed those of models."""
        models = [name for name in states if objects[name].category == "models"]
        class_names = {id(states[name]): objects[name].class_name for name in models}
        model_states = [states[name] for name in models]
        if self.before is not None:
            self.before(model_states, self.transaction.folder)
        whole = [
            ("models", index, class_names.get(id(state), ""), state)
            for index, state in enumerate(model_states)
        ]
        for name, each in objects.items():
            # A hook may draw random numbers, for instance to build a model: the run goes on after these.
            if each.category == "rng":
                states[name] = each.item.state_dict()
            absent = each.category == "rank_states" and states[name] is None
            if name in states and not absent and each.category not in ("models", "loaders"):
                whole.append((each.category, each.index, each.class_name, states[name]))
        self.writers += [
            WholeStateFile(*each, self.transaction.ranks.rank, safe=self.safe)
            for each in whole
            if self.transaction.is_committer or KINDS[each[0]].per_rank
        ]

    def finish(self) -> None:
        """Write and commit the states; the objects are needed no more."""
        transaction, collective_section = self.transaction, self.transaction.ranks.collective_section
        shard_infos, reports = dict[str, Any](), list[WrittenFilesReport]()
        # A save in the background shows nothing: the training goes on meanwhile, and has output of its own.
        shows_progress = getattr(sys.stderr, "isatty", bool)() and not self.in_background
        with transaction.discarded_on_error(), self.channel:
            collect = list if transaction.each_node else reports.extend
            with collective_section(self.action, collect) as section:
                for wait in self.waits:
                    wait()
                with self._show_progress() if shows_progress else contextlib.nullcontext() as progress:
                    for writer in self.writers:
                        if writer.file:
                            fill = writer.fill if progress is None else progress.count_fill(writer.fill)
                            shard_infos[writer.entry.file] = transaction.write(writer.file, fill)
                section.value = transaction.report(self.own_files, shard_infos)
            with collective_section(self.action):
                if transaction.is_committer:
                    reports = section.values or reports
                    for shard in self.shards:
                        infos = [report.shard_infos.get(shard.entry.file) for report in reports]
                        name, content = shard.build_index(infos)
                        transaction.write(name, lambda file, content=content: file.write(content))
                    transaction.write_manifest(reports, self._manifest)
            with collective_section(self.action):
                if transaction.is_committer:
                    transaction.store.publish(transaction.temp, transaction.name, transaction.id)
        for writer in self.writers:
            if writer.file:
                saved = writer.category, writer.entry.kind, f"{transaction.target}/{writer.file}"
                transaction.ranks.log("checkpointing", "saved %s (%s) in %s", *saved)
        if self.iteration is not None and transaction.is_committer:
            self._remove_old_checkpoints()
        transaction.lock.release()

    def _show_progress(self) -> ProgressBar:
        leaves = (leaf for _, leaf in tree.iterate_leaves([w.content for w in self.writers if w.file]))
        return ProgressBar(
            "saving the checkpoint", sum(x.nbytes for x in leaves if isinstance(x, torch.Tensor))
        )

    def _manifest(self, files: dict[str, FileRecord]) -> Manifest:
        """Return the manifest; all shards of an object are one entry of its table of objects."""
        parts: dict[str, list[ManifestEntry]] = {}
        for writer in self.writers:
            parts.setdefault(writer.category, []).append(writer.entry)
        for own_files in self.contents.own_files:
            parts.setdefault("own_files", []).append(ManifestEntry("", own_files.name))
        return Manifest(
            id=self.transaction.id,
            step=self.contents.step,
            world_size=self.transaction.ranks.size,
            files=files,
            parts=parts,
            loaders=self.positions,
            metadata=self.metadata,
            iteration=self.iteration,
            strategy=self.contents.strategy,
            each_node=self.transaction.each_node,
            library=f"accelerate {_VERSION}",
            torch=str(torch.__version__),
        )

    def _remove_old_checkpoints(self) -> None:
        """Remove the oldest numbered checkpoints beyond the limit, and leftovers of interrupted saves.

        A failure must not stop the training, since the new one is committed.
        """
        store, transaction = self.transaction.store, self.transaction
        newest = discovery.automatic_number(transaction.name) or 0
        # To look for them in a remote store is to list all files of all checkpoints.
        has_leftovers = store.label() not in _cleared
        _cleared.discard(store.label())
        try:
            if self.limit is not None:
                numbered = sorted(
                    (n, name)
                    for name in store.entries()
                    if (n := discovery.automatic_number(name)) is not None
                )
                complete = [
                    name
                    for _, name in numbered
                    if (c := discovery.inspect_folder(store, name)) and not c.problem
                ]
                for name in complete[: max(0, len(complete) - self.limit)]:
                    if name != transaction.name:
                        store.retire(name, new_id())
                        transaction.ranks.log(
                            "accelerator", "removed %s: total_limit is %s", name, self.limit
                        )
            for leftover in store.leftovers() if has_leftovers else ():
                number = discovery.automatic_number(leftover.name)
                if number is not None and number <= newest and leftover.is_removable:
                    store.remove(leftover.folder)
            _cleared.add(store.label())
        except CheckpointError as error:
            logger.warning(
                "%s is committed, but an older one could not be removed: %s", transaction.target, error
            )


class CommitTransaction:
    """One save that is not committed yet, as one rank sees it.

    Args:
        store, name: the target.
        prefix: how the folder that is written to begins, see ``CheckpointStorage.temp_prefix``.
        id: the same on all ranks.
        ranks: those that save together.
        each_node: every machine has a target of its own.
        lock_name: what is locked; the same for all checkpoints of automatic naming, since they go together.

    Attributes:
        temp: the folder that is written to.
        target: the final address of the checkpoint, for errors.
        is_committer: True on the rank that commits: one per target.
        records: what this rank wrote.
        lock: on the place; taken by the committer, and given back after the last change of the place.
    """

    def __init__(
        self,
        store: CheckpointStorage,
        name: str,
        prefix: str,
        id: str,
        ranks: CheckpointRankGroup,
        each_node: bool = False,
        lock_name: str = "",
    ) -> None:
        self.store, self.name, self.id, self.ranks, self.each_node = store, name, id, ranks, each_node
        self.temp = f"{prefix}{id}" + (f"-n{ranks.node}" if each_node else "")
        self.target = store.label(name)
        self.is_committer = ranks.is_writer(each_node)
        self.records: dict[str, FileRecord] = {}
        self.lock = store.lock(lock_name or name, id)

    @property
    def folder(self) -> Path:
        """The path of ``temp``, for code that writes files of its own; such files are committed too."""
        return self.store.path(self.temp)

    def open(self) -> None:
        """Make the folder to write to; the rank that commits locks, recovers and clears the target first."""
        store = self.store
        if self.each_node and store.is_shared:
            raise CheckpointError(
                f"save_on_each_node=True, but {store.label()} is one place for all machines",
                why="each would replace the other's checkpoint",
                fix="leave out save_on_each_node",
            )
        if self.is_committer:
            for part in PurePosixPath(self.target.replace("\\", "/")).parts:
                if working_folder := parse_working_name(part):
                    raise CheckpointError(
                        f"{self.target} cannot be a checkpoint",
                        why=f"{part} is a working folder's name; the next save of {working_folder[0]} "
                        "removes it",
                        fix="choose another name",
                    )
            store.make_folder(self.temp)  # and the folders above, which it flushes
            self.lock.acquire()
            store.recover(self.name)
            for leftover in store.leftovers(self.name):
                if leftover.id != self.id and leftover.is_removable:
                    store.remove(leftover.folder)
        store.make_folder(self.temp)

    def write(self, name: str, fill: Callable[[BinaryIO], Any]) -> Any:
        """Write one file of the checkpoint; return what ``fill`` returns."""
        folder = Path(name).parent
        if folder.name:
            self.store.make_folder(f"{self.temp}/{folder.as_posix()}")
        returned: list[Any] = []
        record = self.store.write(f"{self.temp}/{name}", lambda file: returned.append(fill(file)))
        self.records[name] = replace(record, rank=self.ranks.rank)
        return returned[0]

    def report(
        self, own_files: Iterable[str] = (), shard_infos: dict[str, Any] | None = None
    ) -> WrittenFilesReport:
        """Return this rank's report for the others, after it has written all of its files.

        Args:
            own_files: files that other code has written to ``folder``; they are made durable here.
            shard_infos: see ``WrittenFilesReport``.
        """
        unsealed = self.store.unsealed_files(self.temp) if self.store.is_shared else ()
        for name in dict.fromkeys((*own_files, *unsealed)):
            record = self.store.seal(f"{self.temp}/{name}")
            self.records[name] = replace(record, rank=self.ranks.rank)
        return WrittenFilesReport(self.ranks.node, socket.gethostname(), self.records, shard_infos or {})

    def write_manifest(
        self, reports: Iterable[WrittenFilesReport], describe: Callable[[dict[str, FileRecord]], Manifest]
    ) -> None:
        """Check that all files are there and write the manifest; nothing is visible yet."""
        reports_here = [r for r in reports if not self.each_node or r.node == self.ranks.node]
        sizes = self.store.files(self.temp)
        records: dict[str, FileRecord] = {}
        for report in reports_here:
            for name, record in report.files.items():
                if sizes.get(name) != record.size:
                    seen = f"sees {sizes[name]} bytes" if name in sizes else "does not see it"
                    raise CheckpointError(
                        f"rank {record.rank} wrote {name} ({record.size} bytes) on {report.host}, but rank "
                        f"{self.ranks.rank} on {socket.gethostname()} {seen} in "
                        f"{self.store.label(self.temp)}",
                        why="the machines do not share this folder, or its file system is late",
                        fix="save to a folder or an address ('s3://bucket/run') that all machines share, or, "
                        "where no model is sharded, use ProjectConfiguration(save_on_each_node=True)",
                    )
                other = records.setdefault(name, record)
                if other.digest != record.digest:
                    raise CheckpointError(
                        f"rank {other.rank} and rank {record.rank} both wrote {name}, with different content",
                        why="only one of the two is in the checkpoint",
                        fix="write it on the main process only, or under a name with the rank in it",
                    )
            records.update(report.files)
        records.update(self.records)  # with the indices of shards, which this rank has written since
        # Hooks and objects that write files of their own do not report: their files are sealed here.
        for name in sizes.keys() - records.keys():
            records[name] = replace(self.store.seal(f"{self.temp}/{name}"), rank=self.ranks.rank)
        for leftover in self.store.leftovers(self.name) if self.each_node else ():
            if leftover.id == self.id and leftover.folder != self.temp:  # another machine's
                raise CheckpointError(
                    f"save_on_each_node=True, but the machines share {self.store.label()}",
                    why="each would replace the other's checkpoint",
                    fix="leave out save_on_each_node, or save to a disk of each machine",
                )
        data = encode_manifest(describe(dict(sorted(records.items()))))
        self.store.write(f"{self.temp}/{MANIFEST_NAME}", lambda file: file.write(data))
        for folder in {Path(name).parent.as_posix() for name in records} | {"."}:
            self.store.sync(self.temp if folder == "." else f"{self.temp}/{folder}")

    @contextlib.contextmanager
    def discarded_on_error(self) -> Generator[None]:
        """Remove all files if the block fails. What cannot be removed is left for the next save."""
        try:
            yield
        except BaseException:
            _cleared.discard(self.store.label())
            if self.is_committer:
                with contextlib.suppress(CheckpointError):
                    self.store.remove(self.temp)
            self.lock.release()
            raise
