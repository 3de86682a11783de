"""Where checkpoints lie. ``Store`` is all that saving and loading ask of a place; ``LocalStore`` is a folder.

Names are relative to the store's root and use ``/``: ``"checkpoint_3/model.safetensors"``. A store makes a
file durable before it says so: what ``write`` and ``seal`` return describes bytes that survive a crash. How a
save becomes visible in one step is the store's own affair: see ``swap.py`` and ``remote.py``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, cast

from accelerate.checkpoint import swap
from accelerate.checkpoint.digest import DigestingFile, Record, digest
from accelerate.checkpoint.errors import file_errors

__all__ = ["Leftover", "LocalStore", "Record", "Store", "sync_file"]


class Leftover(NamedTuple):
    """A folder that a save is writing, or that one left when it was interrupted.

    Attributes:
        name: the checkpoint it belongs to.
        role: see ``swap.ROLES``.
        id: of the save.
        folder: its name.
    """

    name: str
    role: str
    id: str
    folder: str


class Store(Protocol):
    """A place for checkpoints. Every method raises CheckpointError, which names the file and the reason."""

    @property
    def shared(self) -> bool:
        """Whether it is one place, whatever machine asks."""
        ...

    def label(self, name: str = "") -> str:
        """How errors and callers call a file or folder; without a name, the root."""
        ...

    def path(self, name: str) -> Path:
        """The local folder in which code that writes files by itself puts them, before ``seal``."""
        ...

    def local(self, name: str) -> Path | None:
        """A local path with the content of ``name``; None if it must be fetched."""
        ...

    def fetch(self, name: str, target: Path) -> None:
        """Copies one file to a local one, whose folder exists."""
        ...

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None if there is none."""
        ...

    def make(self, folder: str) -> None:
        """Makes a folder and those above it; one that exists is fine."""
        ...

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> Record:
        """Makes a file: ``fill`` writes it, from its beginning to its end, to the file it is given."""
        ...

    def seal(self, name: str) -> Record:
        """Makes a file durable that something else wrote to ``path``."""
        ...

    def loose(self, folder: str) -> list[str]:
        """Files in ``path(folder)``, relative to it, that other machines cannot see before ``seal``."""
        ...

    def entries(self, folder: str = "") -> list[str]:
        """Names directly inside a folder, sorted; none if there is no such folder."""
        ...

    def files(self, folder: str) -> dict[str, int]:
        """Size in bytes of every file below a folder, by its name relative to that folder."""
        ...

    def is_folder(self, name: str) -> bool:
        """Whether there is a folder of that name."""
        ...

    def modified(self, name: str) -> datetime:
        """When a folder was last changed, as far as the place tells."""
        ...

    def sync(self, folder: str) -> None:
        """Makes the list of names inside a folder durable."""
        ...

    def remove(self, name: str) -> None:
        """Removes a file, or a folder with all it holds."""
        ...

    def temp(self, name: str, id: str) -> str:
        """The folder that a save of ``name`` writes to."""
        ...

    def refuse(self, name: str) -> None:
        """Refuses a target that cannot be replaced in one step."""
        ...

    def publish(self, temp: str, name: str, id: str) -> None:
        """Makes ``temp`` the checkpoint ``name`` in one step; of one that is there, the user's files stay."""
        ...

    def heal(self, name: str) -> None:
        """Finishes or undoes a ``publish`` that a crash interrupted; does nothing otherwise."""
        ...

    def leftovers(self, name: str | None = None) -> list[Leftover]:
        """What saves of ``name``, or of anything, are writing or have left."""
        ...

    def retire(self, name: str, id: str) -> None:
        """Removes a checkpoint; what a crash leaves of it is not taken for one. ``id`` is a new one."""
        ...


def sync_file(path: Path) -> None:
    """Waits until a file, or the list of names of a folder, is on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows has no handle for this; its renames are journaled
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class LocalStore:
    """A folder of this machine's file systems, network file systems included.

    Args:
        root: the folder; it is made when something is written.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def shared(self) -> bool:
        return False

    @property
    def root(self) -> Path:
        """The folder that names are relative to."""
        return self._root

    def label(self, name: str = "") -> str:
        return str(self.path(name))

    def path(self, name: str) -> Path:
        return self._root / name

    def local(self, name: str) -> Path | None:
        return self.path(name)

    def fetch(self, name: str, target: Path) -> None:
        with file_errors(f"copy {self.path(name)} to", target):
            shutil.copyfile(self.path(name), target)

    def read(self, name: str) -> bytes | None:
        path = self.path(name)
        with file_errors("read", path):
            return path.read_bytes() if path.is_file() else None

    def make(self, folder: str) -> None:
        path = self.path(folder)
        with file_errors("make the folder", path):
            new = [above for above in path.parents if not above.exists()]
            path.mkdir(parents=True, exist_ok=True)
            for above in new:  # a commit flushes what is in the store, not the way to it
                sync_file(above.parent)

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> Record:
        path = self.path(name)
        with file_errors("write", path), DigestingFile(path) as file:
            fill(cast(BinaryIO, file))
            file.sync()
            return Record(file.digester.size, file.digester.hexdigest())

    def seal(self, name: str) -> Record:
        path = self.path(name)
        with file_errors("write", path):
            sync_file(path)
            return Record(path.stat().st_size, digest(path))

    def loose(self, folder: str) -> list[str]:
        return []

    def entries(self, folder: str = "") -> list[str]:
        path = self.path(folder)
        with file_errors("list", path):
            return sorted(p.name for p in path.iterdir()) if path.is_dir() else []

    def files(self, folder: str) -> dict[str, int]:
        base = self.path(folder)
        with file_errors("list", base):
            found = (p for p in base.rglob("*") if p.is_file())
            return {p.relative_to(base).as_posix(): p.stat().st_size for p in sorted(found)}

    def is_folder(self, name: str) -> bool:
        return self.path(name).is_dir()

    def modified(self, name: str) -> datetime:
        path = self.path(name)
        with file_errors("look at", path):
            return datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)

    def rename(self, source: str, target: str) -> None:
        """Moves a file or folder in one step; ``target`` may be an empty folder, else must not exist."""
        with file_errors(f"rename {self.path(source)} to", self.path(target)):
            self.path(source).rename(self.path(target))

    def sync(self, folder: str) -> None:
        path = self.path(folder)
        with file_errors("write", path):
            sync_file(path)

    def remove(self, name: str) -> None:
        path = self.path(name)
        with file_errors("remove", path):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def temp(self, name: str, id: str) -> str:
        return swap.working(name, "tmp", id)

    def refuse(self, name: str) -> None:
        swap.refuse_unmovable(self.path(name))

    def publish(self, temp: str, name: str, id: str) -> None:
        swap.swap(self, temp, name, id)

    def heal(self, name: str) -> None:
        swap.heal(self, name)

    def leftovers(self, name: str | None = None) -> list[Leftover]:
        found = [Leftover(*parts, entry) for entry in self.entries() if (parts := swap.hidden(entry))]
        return [leftover for leftover in found if name in (None, leftover.name)]

    def retire(self, name: str, id: str) -> None:
        # It vanishes by one rename before its files are deleted.
        gone = swap.working(name, "gone", id)
        self.rename(name, gone)
        self.remove(gone)
