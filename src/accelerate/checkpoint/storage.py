"""Checkpoint storage: the protocol ``CheckpointStorage``, and a local folder, ``LocalCheckpointStorage``.

Names are relative to the store's root and use ``/``: ``"checkpoint_3/model.safetensors"``. A store makes a
file durable before it says so: what ``write`` and ``seal`` return describes bytes that survive a crash. How a
save becomes visible in one step is the store's own affair: see ``remote.py``, and for a file system here.

On a file system a checkpoint's folder is replaced by renaming. A target that exists is renamed aside
(``.<name>.old-<id>``) just before, and removed after. A crash between the two renames is mended by the next
load or save: forward if the new folder has its manifest, which it has, backward otherwise. What the user
keeps in the target folder besides the checkpoint moves along.

Working folders of a save lie beside its target and are hidden: ``.checkpoint_3.tmp-<id of the save>``.

A folder that cannot be renamed (a mounted volume, one in a folder that is not writable, one that holds the
current directory) has them inside: ``/output/.output.tmp-<id>``. A rename to ``.output.new-<id>`` commits
there; then its files are moved into ``/output``, the manifest last. A crash in between is mended by the next
load or save, which goes on with moving.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import BinaryIO, ClassVar, NamedTuple, Protocol, cast

from accelerate.checkpoint.file_access import DurableFile, FileRecord, file_digest, file_errors
from accelerate.checkpoint.layout import MANIFEST_NAME, Manifest, decode_manifest, is_checkpoint_name
from accelerate.checkpoint.save_lock import LocalSaveLock, SaveLock
from accelerate.core.errors import CheckpointError

logger = logging.getLogger(__name__)

INTERRUPTED = "a save that was interrupted before it was committed"
ROLES = {
    "tmp": INTERRUPTED,
    "old": "an older state that a newer one was replacing",
    "new": "committed, and being moved into the folder that holds it",
    "gone": "being removed",
}
_HIDDEN = re.compile(rf"\.(?P<name>.+)\.(?P<role>{'|'.join(ROLES)})-(?P<id>[0-9a-f]+)(-n\d+)?")


def parse_working_name(name: str) -> tuple[str, str, str] | None:
    """Return (checkpoint's name, role, id) of a save's working folder; None for any other name."""
    match = _HIDDEN.fullmatch(name)
    return (match["name"], match["role"], match["id"]) if match else None


def new_id() -> str:
    """Return the id of one save; rank 0 draws it."""
    return uuid.uuid4().hex[:12]


def working_name(name: str, role: str, id: str) -> str:
    """Return the name of a working folder: ``".checkpoint_3.tmp-5f0c"``."""
    return f".{name}.{role}-{id}"


class WorkingFolder(NamedTuple):
    """A working folder of a save that is running or was interrupted.

    Attributes:
        name: the checkpoint it belongs to.
        role: see ``ROLES``.
        id: of the save.
        folder: its name.
    """

    name: str
    role: str
    id: str
    folder: str

    @property
    def is_removable(self) -> bool:
        """True unless a load or save of the place still needs what it holds."""
        return self.role in ("tmp", "gone")


class CheckpointStorage(Protocol):
    """A store of checkpoints. Every method raises CheckpointError, which names the file and the reason.

    Attributes:
        is_shared: all machines see the same store.
    """

    is_shared: ClassVar[bool]

    def label(self, name: str = "") -> str:
        """Return the name of a file or folder for errors and callers; without a name, the root."""
        ...

    def path(self, name: str) -> Path:
        """Return the local folder in which other code writes its own files before ``seal``."""
        ...

    def local_path(self, name: str) -> Path | None:
        """Return a local path with the content of ``name``; None if it must be fetched."""
        ...

    def fetch(self, name: str, target: Path) -> None:
        """Copy one file to a local one, whose folder exists."""
        ...

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if there is none."""
        ...

    def make_folder(self, folder: str) -> None:
        """Make a folder and its parents; one that exists is fine."""
        ...

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> FileRecord:
        """Create a file: ``fill`` writes it, from its beginning to its end, to the file it is given."""
        ...

    def seal(self, name: str) -> FileRecord:
        """Make a file durable that other code wrote to ``path``."""
        ...

    def unsealed_files(self, folder: str) -> list[str]:
        """Return files in ``path(folder)``, relative to it, that other machines cannot see yet."""
        ...

    def entries(self, folder: str = "") -> list[str]:
        """Return the names directly inside a folder, sorted; none if there is no such folder."""
        ...

    def files(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of every file below a folder, by its name relative to it."""
        ...

    def is_folder(self, name: str) -> bool:
        """Return True if there is a folder of that name."""
        ...

    def modified_at(self, name: str) -> datetime:
        """Return the time when a folder was last changed, as far as the store knows."""
        ...

    def sync(self, folder: str) -> None:
        """Make the list of names inside a folder durable."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all it holds."""
        ...

    def temp_prefix(self, name: str) -> str:
        """Return how the folder that a save of ``name`` writes to begins; its id follows.

        Raises:
            CheckpointError: nothing can be saved there.
        """
        ...

    def publish(self, temp: str, name: str, id: str) -> None:
        """Make ``temp`` the checkpoint ``name`` in one step; an older one's user files stay."""
        ...

    def recover(self, name: str) -> None:
        """Finish or undo a ``publish`` that a crash interrupted; otherwise do nothing."""
        ...

    def leftovers(self, name: str | None = None) -> list[WorkingFolder]:
        """Return the working folders of saves of ``name``, or of all saves."""
        ...

    def lock(self, name: str, save: str) -> SaveLock:
        """Return the lock on a place for a save of that id; it is not taken yet."""
        ...

    def retire(self, name: str, id: str) -> None:
        """Remove a checkpoint; a crash leaves nothing that looks like one. ``id`` is a new one."""
        ...


def read_manifest(store: CheckpointStorage, name: str) -> Manifest | None:
    """Read the manifest of a checkpoint; return None if it has none.

    Raises:
        CheckpointError: it cannot be read, is damaged, or of a newer format.
    """
    file = f"{name}/{MANIFEST_NAME}"
    data = store.read(file)
    return None if data is None else decode_manifest(data, store.label(file))


def sync_file(path: Path) -> None:
    """Wait until a file, or the list of names of a folder, is on the disk."""
    is_folder = path.is_dir()
    if is_folder and os.name == "nt":
        return  # Windows has no handle for this; its renames are journaled
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    except OSError as error:  # some network file systems know no such request for folders
        if not is_folder or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


@dataclass(eq=False)
class LocalCheckpointStorage:
    """A folder of this machine's file systems, network file systems included.

    Attributes:
        root: the folder; it is made when something is written.
    """

    is_shared: ClassVar[bool] = False
    root: Path

    def label(self, name: str = "") -> str:
        return str(self.root / name)

    def path(self, name: str) -> Path:
        return self.root / name

    def local_path(self, name: str) -> Path | None:
        return self.root / name

    def fetch(self, name: str, target: Path) -> None:
        with file_errors(f"copy {self.root / name} to", target):
            shutil.copyfile(self.root / name, target)

    def read(self, name: str) -> bytes | None:
        path = self.root / name
        with file_errors("read", path):
            return path.read_bytes() if path.is_file() else None

    def make_folder(self, folder: str) -> None:
        path = self.root / folder
        with file_errors("make the folder", path):
            new = [above for above in path.parents if not above.exists()]
            path.mkdir(parents=True, exist_ok=True)
            for above in new:  # a commit flushes what is in the store, not the folders above it
                sync_file(above.parent)

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> FileRecord:
        path = self.root / name
        with file_errors("write", path), DurableFile(path) as file:
            fill(cast(BinaryIO, file))
            file.sync()
            return FileRecord(file.digester.size, file.digester.hexdigest())

    def seal(self, name: str) -> FileRecord:
        path = self.root / name
        with file_errors("write", path):
            sync_file(path)
            return FileRecord(path.stat().st_size, file_digest(path))

    def unsealed_files(self, folder: str) -> list[str]:
        return []

    def entries(self, folder: str = "") -> list[str]:
        path = self.root / folder
        with file_errors("list", path):
            return sorted(p.name for p in path.iterdir()) if path.is_dir() else []

    def files(self, folder: str) -> dict[str, int]:
        base = self.root / folder
        with file_errors("list", base):
            paths = (p for p in base.rglob("*") if p.is_file())
            return {p.relative_to(base).as_posix(): p.stat().st_size for p in sorted(paths)}

    def is_folder(self, name: str) -> bool:
        return (self.root / name).is_dir()

    def modified_at(self, name: str) -> datetime:
        path = self.root / name
        with file_errors("look at", path):
            return datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)

    def rename(self, source: str, target: str) -> None:
        """Move a file or folder in one step; ``target`` may be an empty folder, else must not exist."""
        old, new = self.root / source, self.root / target
        with file_errors(f"rename {old} to", new):
            try:
                old.rename(new)
            except FileExistsError:  # Windows renames onto no folder
                new.rmdir()
                old.rename(new)

    def sync(self, folder: str) -> None:
        path = self.root / folder
        with file_errors("write", path):
            sync_file(path)

    def remove(self, name: str) -> None:
        path = self.root / name
        with file_errors("remove", path):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def temp_prefix(self, name: str) -> str:
        target, prefix = self.root / name, f".{name}.tmp-"  # of a ``working_name``
        if not target.exists():
            return prefix
        if not target.is_dir() or not name:
            raise CheckpointError(
                f"{target} cannot be a checkpoint",
                why="it is a file" if name else "it is the root of the file system",
                fix="save into a folder of its own",
            )
        try:
            holds_current = target in (Path.cwd(), *Path.cwd().parents)
        except FileNotFoundError:  # somebody has removed it
            holds_current = False
        # Under a renamed current directory, relative paths of this process would lead nowhere.
        return f"{name}/{prefix}" if holds_current or self._is_fixed(name) else prefix

    def _is_fixed(self, name: str) -> bool:
        """Return True for a folder that no process can rename, but that can be written to."""
        target = self.root / name
        return os.path.ismount(target) or (target.is_dir() and not os.access(self.root, os.W_OK))

    def publish(self, temp: str, name: str, id: str) -> None:
        """Rename ``temp`` to ``name``; of a folder that exists, only the user's own files stay.

        Raises:
            CheckpointError: a rename failed, or cannot be made durable; everything is where it was.
        """
        steps, aside, inside = [(temp, name)], "", temp.startswith(f"{name}/")
        if inside:
            committed = temp.replace(working_name(name, "tmp", ""), working_name(name, "new", ""), 1)
            steps = [(temp, committed)]
        elif self.entries(name):
            aside = working_name(name, "old", id)
            steps.insert(0, (name, aside))
        done: list[tuple[str, str]] = []
        try:
            for source, target in steps:
                self.rename(source, target)
                done.append((source, target))
            self.sync(name if inside else "")
        except CheckpointError:
            for source, target in reversed(done):
                self.rename(target, source)
            raise
        try:
            if inside:
                self._move_into(name, steps[0][1])
            elif aside:
                self._finish_replace(name, aside)
        except CheckpointError as error:  # the checkpoint is committed; the next load or save tries again
            unfinished = f"its files are still in {steps[0][1]}" if inside else f"{aside} is still there"
            logger.warning("%s is committed, but %s: %s", self.root / name, unfinished, error)

    def _move_into(self, name: str, committed: str) -> None:
        """Move a committed checkpoint into the folder around it; what a crash has stopped goes on."""
        new, old = read_manifest(self, committed), self._manifest_if_whole(name)
        if new is not None:  # the manifest goes last
            waiting = set(self.entries(committed))
            moved = {file.partition("/")[0] for file in new.files} - waiting
            owned = {file.partition("/")[0] for file in old.files} if old else set[str]()
            # The old manifest goes after its files: until then it says which are the user's own.
            for entry in sorted(set(self.entries(name)) - moved, key=lambda entry: entry == MANIFEST_NAME):
                if entry in owned or entry in waiting or is_checkpoint_name(entry):
                    self.remove(f"{name}/{entry}")
            for entry in sorted(waiting - {MANIFEST_NAME}):
                self.rename(f"{committed}/{entry}", f"{name}/{entry}")
            self.sync(name)
            self.rename(f"{committed}/{MANIFEST_NAME}", f"{name}/{MANIFEST_NAME}")
        self.remove(committed)
        self.sync(name)

    def _finish_replace(self, name: str, aside: str) -> None:
        """Move the user's own files from the replaced folder to the new one, and remove the rest."""
        old = self._manifest_if_whole(aside)
        owned = {name.partition("/")[0] for name in (*old.files, old.folder)} if old else set[str]()
        present = set(self.entries(name))
        for entry in self.entries(aside):
            if entry not in owned and entry not in present and not is_checkpoint_name(entry):
                self.rename(f"{aside}/{entry}", f"{name}/{entry}")
        self.sync(name)
        # Renamed first: without its manifest, files left by a crash would look like the user's own.
        removed_name = aside.replace(working_name(name, "old", ""), working_name(name, "gone", ""), 1)
        self.rename(aside, removed_name)
        self.remove(removed_name)

    def _manifest_if_whole(self, name: str) -> Manifest | None:
        try:
            return read_manifest(self, name)
        except CheckpointError:
            return None

    def recover(self, name: str) -> None:
        """Finish or undo a replacement of ``name`` that a crash interrupted; otherwise do nothing."""
        working_folders = self.leftovers(name)
        for _, role, id, aside in working_folders:
            if role == "new":
                logger.warning("the save of %s was interrupted; it is finished now", self.root / name)
                self._move_into(name, aside)
            if role != "old":
                continue
            if not self.is_folder(name):
                written = [other.folder for other in working_folders if other[1:3] == ("tmp", id)]
                ready = [folder for folder in written if self._manifest_if_whole(folder) is not None]
                result = "finished" if ready else "undone"
                logger.warning("the save of %s was interrupted; it is %s now", self.root / name, result)
                self.rename(ready[0] if ready else aside, name)
                self.sync("")
            if self.is_folder(aside):
                self._finish_replace(name, aside)

    def leftovers(self, name: str | None = None) -> list[WorkingFolder]:
        inside = [f"{name}/{entry}" for entry in self.entries(name)] if name else []
        return [
            WorkingFolder(*parts, entry)
            for entry in [*self.entries(), *inside]
            if (parts := parse_working_name(entry.rpartition("/")[2])) and name in (None, parts[0])
        ]

    def lock(self, name: str, save: str) -> SaveLock:
        return LocalSaveLock(self.root, name, save, inside=self._is_fixed(name))

    def retire(self, name: str, id: str) -> None:
        # It vanishes by one rename before its files are deleted.
        removed_name = working_name(name, "gone", id)
        self.rename(name, removed_name)
        self.remove(removed_name)
