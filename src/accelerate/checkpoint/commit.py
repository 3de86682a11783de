"""The commit protocol: a checkpoint is whole and on the disk, or it is not there.

    0. the rank that commits takes the lock of the place, and gives it back at the end.
    1. rank 0 draws an id; all ranks write into a folder of that id (``CheckpointStorage.temp``), which is no
       checkpoint yet. Every file is made durable and its digest taken as soon as it is written.
    2. the ranks gather their reports. If one failed, all raise the same error and the folder is removed.
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
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

from accelerate.checkpoint.discovery import automatic_number, inspect_folder
from accelerate.checkpoint.layout import MANIFEST_NAME, encode_manifest
from accelerate.checkpoint.storage import CheckpointStorage, FileRecord, new_id, parse_working_name
from accelerate.core.errors import CheckpointError

if TYPE_CHECKING:
    from accelerate.checkpoint.layout import Manifest
    from accelerate.checkpoint.rank_group import CheckpointRankGroup
    from accelerate.checkpoint.save_lock import SaveLock

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WrittenFilesReport:
    """The files that one rank wrote, its machine, and what its shard writers returned, by folder."""

    node: int
    host: str
    files: dict[str, FileRecord]
    shard_infos: dict[str, Any] = field(default_factory=dict)


class CommitTransaction:
    """One save that is not committed yet, as one rank sees it.

    Args:
        store, name: the target.
        id: the same on all ranks.
        ranks: those that save together.
        each_node: every machine has a target of its own.
        lock_name: what is locked; the same for all checkpoints of automatic naming, since they go together.

    Attributes:
        temp: the folder that is written to.
        target: the final address of the checkpoint, for errors.
        is_committer: True on the rank that commits: one per target.
        records: what this rank wrote.
    """

    def __init__(
        self,
        store: CheckpointStorage,
        name: str,
        id: str,
        ranks: CheckpointRankGroup,
        each_node: bool = False,
        lock_name: str = "",
    ) -> None:
        self.store, self.name, self.id, self.ranks, self.each_node = store, name, id, ranks, each_node
        self.temp = store.temp(name, id) + (f"-n{ranks.node}" if each_node else "")
        self.target = store.label(name)
        self.is_committer = ranks.is_writer(each_node)
        self.records: dict[str, FileRecord] = {}
        self._lock_name = lock_name or name
        self._lock: SaveLock | None = None

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
            store.refuse_target(self.name)
            store.make_folder(self.temp)  # and the folders above, which it flushes
            self._lock = store.lock(self._lock_name, self.id)
            self._lock.acquire()
            store.recover(self.name)
            for leftover in store.leftovers(self.name):
                if leftover.role != "old" and leftover.id != self.id:
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
                        fix="save to a folder that all machines share, or use "
                        "ProjectConfiguration(save_on_each_node=True)",
                    )
                other = records.setdefault(name, record)
                if other.digest != record.digest:
                    raise CheckpointError(
                        f"rank {other.rank} and rank {record.rank} both wrote {name}, with different content",
                        why="only one of the two is in the checkpoint",
                        fix="write it on the main process only, or under a name with the rank in it",
                    )
            records.update(report.files)
        # Hooks and objects that write files of their own do not report: their files are sealed here.
        for name in sizes.keys() - records.keys():
            records[name] = replace(self.store.seal(f"{self.temp}/{name}"), rank=self.ranks.rank)
        if self.each_node:
            self._refuse_shared_folder()
        data = encode_manifest(describe(dict(sorted(records.items()))))
        self.store.write(f"{self.temp}/{MANIFEST_NAME}", lambda file: file.write(data))
        for folder in {Path(name).parent.as_posix() for name in records} | {"."}:
            self.store.sync(self.temp if folder == "." else f"{self.temp}/{folder}")

    def close(self) -> None:
        """Give the lock back, after the last change of the place."""
        if self._lock is not None:
            self._lock.release()

    @contextlib.contextmanager
    def discarded_on_error(self) -> Generator[None]:
        """Remove all files if the block fails. What cannot be removed is left for the next save."""
        try:
            yield
        except BaseException:
            if self.is_committer:
                with contextlib.suppress(CheckpointError):
                    self.store.remove(self.temp)
            self.close()
            raise

    def _refuse_shared_folder(self) -> None:
        of_this_save = [leftover for leftover in self.store.leftovers(self.name) if leftover.id == self.id]
        others = [leftover for leftover in of_this_save if leftover.folder != self.temp]
        if others:
            raise CheckpointError(
                f"save_on_each_node=True, but the machines share {self.store.label()}",
                why="each would replace the other's checkpoint",
                fix="leave out save_on_each_node, or save to a disk of each machine",
            )


def remove_old_checkpoints(store: CheckpointStorage, committed: str, limit: int | None) -> list[str]:
    """Remove the oldest numbered checkpoints beyond ``limit``, and leftovers of interrupted saves.

    Call it after ``committed`` is committed; that one is never removed. Returns the names of the checkpoints.
    """
    newest = automatic_number(committed)
    assert newest is not None
    excess = _list_excess(store, limit) if limit is not None else []
    removed = [entry for entry in excess if entry != committed]
    for entry in removed:
        store.retire(entry, new_id())
    for leftover in store.leftovers():
        number = automatic_number(leftover.name)
        if number is not None and number <= newest and leftover.role != "old":
            store.remove(leftover.folder)
    return removed


def _list_excess(store: CheckpointStorage, limit: int) -> list[str]:
    """Return the oldest complete numbered checkpoints, all but ``limit`` of them."""
    numbered = sorted((n, entry) for entry in store.entries() if (n := automatic_number(entry)) is not None)
    complete = [entry for _, entry in numbered if (c := inspect_folder(store, entry)) and not c.problem]
    return complete[: max(0, len(complete) - limit)]
