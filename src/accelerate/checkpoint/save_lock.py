"""A lock on the place of a save: of two trainings that save there at once, the second is refused by name.

The lock is a file beside the checkpoint, ``.<name>.lock``, which exists while a save is going on: a hard
link, or exclusive creation where there are none, lets one process win, on network file systems too. It says
host, process, save and time, and its owner touches it every few seconds. A lock is stale, and is taken over,

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
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType

from accelerate.checkpoint.errors import file_errors
from accelerate.core.errors import CheckpointError

logger = logging.getLogger(__name__)

HEARTBEAT = 5.0  # seconds between two touches of a lock
DEAD_AFTER = 60.0  # seconds without one after which a lock of another host is stale


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
        return cls(_host(), os.getpid(), save, now)

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


def _host() -> str:
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


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
        self._remove_leftovers()
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

    def _remove_leftovers(self) -> None:
        """Remove what a process was putting there, or taking away, when it was killed."""
        for entry in self.path.parent.iterdir():
            if entry.name.startswith(f"{self.path.name}."):
                with file_errors("remove", entry):
                    entry.unlink(missing_ok=True)

    def _in_use_error(self, holder: LockOwner | None) -> PlaceInUseError:
        owner = "another machine"
        if holder is not None:
            owner = f"process {holder.pid} on {holder.host.partition(' ')[0]} since {holder.since}"
        return PlaceInUseError(
            f"another training is saving to {self.target}",
            why=f"{owner} holds {self.path}",
            fix="save to another folder or project_dir; each training needs one of its own",
        )
