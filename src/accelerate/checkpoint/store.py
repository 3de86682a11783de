"""Where checkpoints lie. ``Store`` is all that saving and loading ask of a place; ``LocalStore`` is a folder.

Names are relative to the store's root and use ``/``: ``"checkpoint_3/model.safetensors"``. A store makes a
file durable before it says so: what ``write`` and ``seal`` return describes bytes that survive a crash.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from accelerate.checkpoint.digest import DigestingFile, digest
from accelerate.checkpoint.errors import file_errors


@dataclass(frozen=True)
class Record:
    """One durable file.

    Attributes:
        size: bytes.
        digest: see ``digest.py``.
        rank: the rank that wrote it.
    """

    size: int
    digest: str
    rank: int = 0


class Store(Protocol):
    """A place for checkpoints. Every method raises CheckpointError, which names the file and the reason."""

    @property
    def root(self) -> Path:
        """The folder that names are relative to."""
        ...

    def path(self, name: str) -> Path:
        """A local path with the content of ``name``, or to put it in before ``seal``."""
        ...

    def make(self, folder: str) -> None:
        """Makes a folder and those above it; one that exists is fine."""
        ...

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> Record:
        """Makes a file: ``fill`` writes it, from its beginning to its end, to the file it is given."""
        ...

    def seal(self, name: str) -> Record:
        """Makes a file durable that something else wrote to ``path(name)``."""
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

    def rename(self, source: str, target: str) -> None:
        """Moves a file or folder in one step; ``target`` may be an empty folder, else must not exist."""
        ...

    def sync(self, folder: str) -> None:
        """Makes the list of names inside a folder durable."""
        ...

    def remove(self, name: str) -> None:
        """Removes a file, or a folder with all it holds."""
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
    def root(self) -> Path:
        return self._root

    def path(self, name: str) -> Path:
        return self._root / name

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

    def rename(self, source: str, target: str) -> None:
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
