"""The lock on a place while it is saved to: the second of two trainings that save there is refused by name.

In a folder it is a file beside the checkpoint (in a mounted volume, inside of it), ``.<name>.lock``, which
exists while a save is going on: a hard link, or exclusive creation where there are none, lets one process
win, on network file systems too. Its owner touches it every few seconds.

Remote stores have neither. There each save puts an object of its own, ``.<name>.lock-<save>``, and only then
looks for others: of two that begin at once, at least one sees the other. Who sees one gives way, and tries
again after a random pause. The owner writes its object anew every few seconds. Where the object cannot be
written or listed, the save goes on without a lock, and says so.

A lock says host, process, save and time. It is stale, and is taken over,

- on the same host since it was booted, as soon as its process is gone: a training that was killed can be
  restarted at once;
- from another host or boot, when it has not been touched for a minute, and is not while one looks: clocks
  differ.

The ranks of one training have one owner, the rank that commits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from accelerate.checkpoint.file_access import file_errors
from accelerate.core.errors import CheckpointError
from accelerate.world.peers import process_namespace

logger = logging.getLogger(__name__)

HEARTBEAT = 5.0  # seconds between two touches of a lock
DEAD_AFTER = 60.0  # seconds without one after which a lock of another host is stale
_ATTEMPTS = 4  # of two saves that begin at once in a remote store


class PlaceInUseError(CheckpointError):
    """Another training is saving to the same place."""


@dataclass(frozen=True)
class LockOwner:
    """The process that holds a lock.

    Attributes:
        host: its name, and its namespace of process ids: machines and containers may share a name.
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
        return cls(process_namespace(), os.getpid(), save, now)

    @classmethod
    def read(cls, path: Path) -> LockOwner | None:
        """Return the owner of a lock; None if there is no lock, or it is not written yet."""
        try:
            return cls.parse(path.read_bytes())
        except OSError:
            return None

    @classmethod
    def parse(cls, content: bytes) -> LockOwner | None:
        """Return the owner that a lock names, whatever its heartbeat; None if it is not written yet."""
        try:
            facts = json.loads(content)
            return cls(*(facts[name] for name in ("host", "pid", "save", "since")))
        except (ValueError, TypeError, KeyError):
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

    Attributes:
        target: the place, for errors.
        owner: this process.

    Raises:
        PlaceInUseError: on ``acquire``, another training holds it.
        CheckpointError: the lock cannot be written.
    """

    target: str
    owner: LockOwner
    _released: threading.Event | None = None
    _heartbeat: threading.Thread

    def __enter__(self) -> SaveLock:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lock, or raise; where another machine of the same save has it, do nothing."""
        if self._take():
            self._released = threading.Event()
            self._heartbeat = threading.Thread(target=self._touch, name="accelerate-lock", daemon=True)
            self._heartbeat.start()

    def release(self) -> None:
        """Give the lock back; nothing happens if it is not held."""
        if self._released is None:
            return
        self._released.set()
        self._released = None
        self._heartbeat.join()  # a heartbeat under way would put the lock back after it is removed
        try:
            self._remove()
        except (OSError, CheckpointError) as error:
            logger.warning("the lock on %s stays until this process ends: %s", self.target, error)

    def _take(self) -> bool:
        """Take the lock, or raise; return False where another machine of the same save has it."""
        raise NotImplementedError

    def _refresh(self) -> bool:
        """Show that the owner is alive; return False if the lock is not its own any more."""
        raise NotImplementedError

    def _remove(self) -> None:
        """Remove the lock, if it is its own."""
        raise NotImplementedError

    def _touch(self) -> None:
        released = self._released
        while released is not None and not released.wait(HEARTBEAT) and self._refresh():
            pass

    def _is_held(self, holder: LockOwner | None, observe: Callable[[], Any], quiet: float = 0.0) -> bool:
        """Return True unless a lock is stale.

        Args:
            holder: its owner; None if that cannot be read.
            observe: returns what a heartbeat changes; None once the lock is gone.
            quiet: for how many seconds it has not been touched, as far as clocks agree.
        """
        if holder is not None and holder.host == self.owner.host:
            return holder.pid != self.owner.pid and holder.is_running()
        first = observe()
        end = time.monotonic() + max(2 * HEARTBEAT, DEAD_AFTER - quiet)
        while (now := observe()) is not None and time.monotonic() < end:
            if now != first:
                return True
            time.sleep(min(1.0, HEARTBEAT / 5))
        return False

    def _in_use_error(self, holder: LockOwner | None, lock: object) -> PlaceInUseError:
        owner = "another machine"
        if holder is not None:
            owner = f"process {holder.pid} on {holder.host.partition(' ')[0]} since {holder.since}"
        return PlaceInUseError(
            f"another training is saving to {self.target}",
            why=f"{owner} holds {lock}",
            fix="save to another folder or project_dir; each training needs one of its own",
        )


class LocalSaveLock(SaveLock):
    """The lock on a place in a folder.

    Args:
        folder: the folder above, which exists.
        name: what is saved.
        save: the id of the save.
        inside: the lock is in the folder that is saved, not beside it.
    """

    def __init__(self, folder: Path, name: str, save: str, *, inside: bool = False) -> None:
        self.target, self.owner = str(folder / name), LockOwner.current(save)
        self.path = (folder / name if inside else folder) / f".{name}.lock"
        self._content = json.dumps(asdict(self.owner)).encode()

    def _take(self) -> bool:
        while not self._create():
            holder = LockOwner.read(self.path)
            if holder is not None and holder.save == self.owner.save:
                return False
            touched = self._touched_at()
            if self._is_held(holder, self._touched_at, 0.0 if touched is None else time.time() - touched):
                raise self._in_use_error(holder, self.path)
            self._take_away(holder)
        # What a process was putting there, or taking away, when it was killed.
        for entry in self.path.parent.iterdir():
            if entry.name.startswith(f"{self.path.name}."):
                with file_errors("remove", entry):
                    entry.unlink(missing_ok=True)
        return True

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self.path.read_bytes() == self._content:
                self.path.unlink()

    def _create(self) -> bool:
        """Create the lock with its owner in it; return False if there is one.

        It appears whole: one without an owner, of a process that was killed between creating and writing it,
        would count as another host's for a minute.
        """
        draft = self.path.with_name(f"{self.path.name}.{secrets.token_hex(6)}")
        with file_errors("write", self.path):
            try:
                draft.write_bytes(self._content)
                os.link(draft, self.path)
            except FileExistsError:
                return False
            except OSError:  # no hard links here, or another owner has removed the draft
                return self._create_in_place()
            finally:
                draft.unlink(missing_ok=True)
        return True

    def _create_in_place(self) -> bool:
        try:
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        try:
            os.write(handle, self._content)
        finally:
            os.close(handle)
        return True

    def _refresh(self) -> bool:
        try:
            if self.path.read_bytes() != self._content:
                return False
            os.utime(self.path)
        except FileNotFoundError:
            return False
        except OSError as error:
            logger.debug("%s cannot be touched: %s", self.path, error)
        return True

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


class LockStore(Protocol):
    """The part of a remote ``CheckpointStorage`` that a lock needs."""

    def label(self, name: str = "") -> str: ...

    def entries(self, folder: str = "") -> list[str]: ...

    def read(self, name: str) -> bytes | None: ...

    def put(self, name: str, data: bytes) -> None: ...

    def remove(self, name: str) -> None: ...


class RemoteSaveLock(SaveLock):
    """The lock on a place in a remote store.

    Args:
        store: the store.
        name: what is saved.
        save: the id of the save.
    """

    def __init__(self, store: LockStore, name: str, save: str) -> None:
        self.target, self.owner = store.label(name), LockOwner.current(save)
        self.store, self._prefix = store, f".{name}.lock-"
        self.name = f"{self._prefix}{save}"
        self._beats = 0

    def _take(self) -> bool:
        try:
            for _ in range(_ATTEMPTS):
                self._clear_stale()
                self._put()
                if not self._others():
                    return True
                self._remove()
                time.sleep(random.uniform(0, HEARTBEAT / 2))
        except PlaceInUseError:
            raise
        except CheckpointError as error:  # the store may give rights to the checkpoint's own folder alone
            logger.warning("%s is saved to without a lock against other trainings: %s", self.target, error)
            return False
        raise self._in_use_error(None, f"{self.store.label(self._prefix)}...")

    def _clear_stale(self) -> None:
        """Remove the locks of saves that are gone; raise if one is not."""
        for other in self._others():
            content = self.store.read(other)
            if content is None:
                continue
            holder = LockOwner.parse(content)
            if self._is_held(holder, partial(self.store.read, other)):
                raise self._in_use_error(holder, self.store.label(other))
            # One that gave way meanwhile may be there again, with another heartbeat.
            if self.store.read(other) == content:
                self.store.remove(other)

    def _others(self) -> list[str]:
        names = (name for name in self.store.entries() if name.startswith(self._prefix))
        return [name for name in names if name != self.name]

    def _put(self) -> None:
        self.store.put(self.name, json.dumps({**asdict(self.owner), "beat": self._beats}).encode())
        self._beats += 1

    def _refresh(self) -> bool:
        try:
            if LockOwner.parse(self.store.read(self.name) or b"") != self.owner:
                return False
            self._put()
        except CheckpointError as error:
            logger.debug("%s cannot be touched: %s", self.name, error)
        return True

    def _remove(self) -> None:
        self.store.remove(self.name)
