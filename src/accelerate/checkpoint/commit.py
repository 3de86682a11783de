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

Of two trainings that save to one place at once, the second is refused by name. The lock is a file beside the
checkpoint, ``.<name>.lock``, which exists while a save is going on: a hard link, or exclusive creation where
there are none, lets one process win, on network file systems too. It says host, process, save and time, and
its owner touches it every few seconds. A lock is stale, and is taken over,

- on the same host, as soon as its process is gone: a training that was killed can be restarted at once;
- from another host, when it has not been touched for a minute, and is not while one looks: clocks differ.

The ranks of one training have one owner, the rank that commits. Remote stores have no exclusive creation, and
so no lock.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from accelerate.checkpoint.discovery import automatic_number, inspect_folder
from accelerate.checkpoint.errors import file_errors
from accelerate.checkpoint.layout import MANIFEST_NAME, encode_manifest
from accelerate.checkpoint.storage import CheckpointStorage, FileRecord, new_id, parse_working_name
from accelerate.core.errors import CheckpointError

if TYPE_CHECKING:
    from accelerate.checkpoint.layout import Manifest
    from accelerate.checkpoint.rank_group import CheckpointRankGroup

logger = logging.getLogger(__name__)

HEARTBEAT = 5.0  # seconds between two touches of a lock
DEAD_AFTER = 60.0  # seconds without one after which a lock of another host is stale


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
            root = store.local_path("")
            if root is not None:
                store.make_folder(self.temp)  # and the folders above, which it flushes
                self._lock = SaveLock(root, self._lock_name, self.id)
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


class PlaceInUseError(CheckpointError):
    """Another training is saving to the same place."""


@dataclass(frozen=True)
class LockOwner:
    """The process that holds a lock.

    Attributes:
        host: its name, and its namespace of process ids: containers may share a name.
        pid: its id there.
        save: the id of the save, the same on all machines.
        since: when it took the lock, UTC, ISO 8601.
    """

    host: str
    pid: int
    save: str
    since: str

    @classmethod
    def current(cls, save: str) -> LockOwner:
        """Return this process."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        try:
            namespace = os.readlink("/proc/self/ns/pid")
        except OSError:
            namespace = ""
        return cls(f"{socket.gethostname()} {namespace}".rstrip(), os.getpid(), save, now)

    @classmethod
    def read(cls, path: Path) -> LockOwner | None:
        """Return the owner of a lock; None if there is no lock, or it is not written yet."""
        try:
            return cls(**json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def is_running(self) -> bool:
        """Return True if it runs on this host, and is not a later process of the same id."""
        import psutil

        try:
            started = psutil.Process(self.pid).create_time()
        except psutil.Error:
            return False
        return started <= datetime.fromisoformat(self.since).timestamp() + 1


class SaveLock:
    """The lock on a place while it is saved to; usable as a context.

    Args:
        folder: the folder above, which exists.
        name: what is saved.
        save: the id of the save.

    Raises:
        PlaceInUseError: on ``acquire``, another training holds it.
        CheckpointError: the file cannot be written.
    """

    def __init__(self, folder: Path, name: str, save: str) -> None:
        self.path = folder / f".{name}.lock"
        self.target, self.owner = folder / name, LockOwner.current(save)
        self._released: threading.Event | None = None

    def __enter__(self) -> SaveLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lock, or raise; where another machine of the same save has it, do nothing."""
        while not self._create():
            holder = LockOwner.read(self.path)
            if holder is not None and holder.save == self.owner.save:
                return
            if self._is_held(holder):
                raise self._in_use_error(holder)
            self._take_away(holder)
        # What a process was putting there, or taking away, when it was killed.
        for entry in self.path.parent.iterdir():
            if entry.name.startswith(f"{self.path.name}."):
                with file_errors("remove", entry):
                    entry.unlink(missing_ok=True)
        self._released = threading.Event()
        threading.Thread(target=self._touch, name="accelerate-lock", daemon=True).start()

    def release(self) -> None:
        """Give the lock back; nothing happens if it is not held."""
        if self._released is None:
            return
        self._released.set()
        self._released = None
        if LockOwner.read(self.path) == self.owner:
            try:
                self.path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning(
                    "%s cannot be removed (%s): it is stale when this process ends", self.path, error
                )

    def _create(self) -> bool:
        """Create the lock with its owner in it; return False if there is one.

        It appears whole: one without an owner, of a process that was killed between creating and writing it,
        would count as another host's for a minute.
        """
        content = json.dumps(asdict(self.owner)).encode()
        draft = self.path.with_name(f"{self.path.name}.{secrets.token_hex(6)}")
        with file_errors("write", self.path):
            try:
                draft.write_bytes(content)
                os.link(draft, self.path)
            except FileExistsError:
                return False
            except OSError:  # no hard links here, or another owner has removed the draft
                return self._create_in_place(content)
            finally:
                draft.unlink(missing_ok=True)
        return True

    def _create_in_place(self, content: bytes) -> bool:
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        try:
            os.write(handle, content)
        finally:
            os.close(handle)
        return True

    def _touch(self) -> None:
        released = self._released
        while released is not None and not released.wait(HEARTBEAT) and self._refresh():
            pass

    def _refresh(self) -> bool:
        """Show that the owner is alive; return False if the lock is not its own any more."""
        try:
            if LockOwner(**json.loads(self.path.read_bytes())) != self.owner:
                return False
            os.utime(self.path)
        except FileNotFoundError:
            return False
        except (OSError, ValueError, TypeError) as error:
            logger.debug("%s cannot be touched: %s", self.path, error)
        return True

    def _is_held(self, holder: LockOwner | None) -> bool:
        if holder is not None and holder.host == self.owner.host:
            return holder.pid != self.owner.pid and holder.is_running()
        first = self._touched_at()
        quiet = time.time() - first if first is not None else 0.0
        end = time.monotonic() + max(2 * HEARTBEAT, DEAD_AFTER - quiet)
        while (now := self._touched_at()) is not None and time.monotonic() < end:
            if now != first:
                return True
            time.sleep(min(1.0, HEARTBEAT / 5))
        return False

    def _touched_at(self) -> float | None:
        try:
            return self.path.stat().st_mtime
        except OSError:
            return None

    def _take_away(self, holder: LockOwner | None) -> None:
        """Remove a stale lock, but not one that somebody else has put in its place meanwhile."""
        aside = self.path.with_name(f"{self.path.name}.{self.owner.save}")
        with file_errors("remove", self.path), contextlib.suppress(FileNotFoundError):
            self.path.rename(aside)
            if LockOwner.read(aside) != holder:
                aside.rename(self.path)
            else:
                aside.unlink()

    def _in_use_error(self, holder: LockOwner | None) -> PlaceInUseError:
        owner = "another machine"
        if holder is not None:
            owner = f"process {holder.pid} on {holder.host.partition(' ')[0]} since {holder.since}"
        return PlaceInUseError(
            f"another training is saving to {self.target}",
            why=f"{owner} holds {self.path}",
            fix="save to another folder or project_dir; each training needs one of its own",
        )
