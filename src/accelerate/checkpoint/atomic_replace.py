"""Atomic replacement of a checkpoint's folder on a file system: by renaming.

A target that exists is renamed aside (``.<name>.old-<id>``) just before, and removed after. A crash between
the two renames is mended by the next load or save: forward if the new folder has its manifest, which it has,
backward otherwise. What the user keeps in the target folder besides the checkpoint moves along.

Working folders of a save lie beside its target and are hidden: ``.checkpoint_3.tmp-<id of the save>``.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Protocol

from accelerate.checkpoint import manifest as manifests
from accelerate.checkpoint.names import is_checkpoint_name
from accelerate.core.errors import CheckpointError

logger = logging.getLogger(__name__)

INTERRUPTED = "a save that was interrupted before it was committed"
ROLES = {
    "tmp": INTERRUPTED,
    "old": "an older state that a newer one was replacing",
    "gone": "being removed",
}
_HIDDEN = re.compile(rf"\.(?P<name>.+)\.(?P<role>{'|'.join(ROLES)})-(?P<id>[0-9a-f]+)(-n\d+)?")


def parse_working_name(name: str) -> tuple[str, str, str] | None:
    """Return (checkpoint's name, role, id) of a save's working folder; None for any other name."""
    match = _HIDDEN.fullmatch(name)
    return (match["name"], match["role"], match["id"]) if match else None


def working_name(name: str, role: str, id: str) -> str:
    """Return the name of a working folder: ``".checkpoint_3.tmp-5f0c"``."""
    return f".{name}.{role}-{id}"


class FilesystemFolderOperations(Protocol):
    """The folders of a file system, as ``store.LocalCheckpointStorage`` has them."""

    def path(self, name: str) -> Path:
        """Return the path of ``name``."""
        ...

    def entries(self, folder: str = "") -> list[str]:
        """Return the names directly inside a folder."""
        ...

    def is_folder(self, name: str) -> bool:
        """Return True if there is a folder of that name."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Move a file or folder in one step."""
        ...

    def sync(self, folder: str) -> None:
        """Make the list of names inside a folder durable."""
        ...

    def remove(self, name: str) -> None:
        """Remove a folder with all it holds."""
        ...


def refuse_unmovable(target: Path) -> None:
    """Refuse a target that no rename can replace.

    Raises:
        CheckpointError: it is a file, a mount point, or holds the current directory.
    """
    if not target.exists():
        return
    reason = ""
    if not target.is_dir():
        reason = "it is a file"
    elif os.path.ismount(target):
        reason = "it is the root of a file system, which cannot be renamed"
    elif target in (Path.cwd(), *Path.cwd().parents):
        reason = "it holds the current directory, which would vanish under this process"
    if reason:
        raise CheckpointError(
            f"{target} cannot be replaced by a new checkpoint in one step",
            why=reason,
            fix=f"save into a folder of its own, for example {target / 'checkpoint'}",
        )


def replace_folder(store: FilesystemFolderOperations, temp: str, name: str, id: str) -> None:
    """Rename ``temp`` to ``name``; of a folder that exists, only the user's own files stay.

    Raises:
        CheckpointError: a rename failed, or cannot be made durable; everything is where it was.
    """
    aside = working_name(name, "old", id)
    steps = [(temp, name)]
    if store.entries(name):
        steps.insert(0, (name, aside))
    done: list[tuple[str, str]] = []
    try:
        for source, target in steps:
            store.rename(source, target)
            done.append((source, target))
        store.sync("")
    except CheckpointError:
        for source, target in reversed(done):
            store.rename(target, source)
        raise
    if len(steps) == 1:
        return
    try:
        _finish_replace(store, name, aside)
    except CheckpointError as error:  # the checkpoint is committed; the next load or save tries again
        logger.warning("%s is committed, but what it replaced is still in %s: %s", name, aside, error)


def _finish_replace(store: FilesystemFolderOperations, name: str, aside: str) -> None:
    """Move the user's own files from the replaced folder to the new one, and remove the rest."""
    try:
        old = manifests.read(store.path(aside))
    except CheckpointError:
        old = None
    owned = {name.partition("/")[0] for name in (*old.files, old.folder)} if old else set[str]()
    present = set(store.entries(name))
    for entry in store.entries(aside):
        if entry not in owned and entry not in present and not is_checkpoint_name(entry):
            store.rename(f"{aside}/{entry}", f"{name}/{entry}")
    store.sync(name)
    # Renamed first: without its manifest, files left by a crash would look like the user's own.
    removed_name = aside.replace(working_name(name, "old", ""), working_name(name, "gone", ""), 1)
    store.rename(aside, removed_name)
    store.remove(removed_name)


def recover(store: FilesystemFolderOperations, name: str) -> None:
    """Finish or undo a replacement of ``name`` that a crash interrupted; otherwise do nothing."""
    working_folders = [
        (entry, h) for entry in store.entries() if (h := parse_working_name(entry)) and h[0] == name
    ]
    for aside, (_, role, id_) in working_folders:
        if role != "old":
            continue
        if not store.is_folder(name):
            ready = [e for e, h in working_folders if h[1:] == ("tmp", id_) and _has_manifest(store, e)]
            result = "finished" if ready else "undone"
            logger.warning("the save of %s was interrupted; it is %s now", store.path(name), result)
            store.rename(ready[0] if ready else aside, name)
            store.sync("")
        if store.is_folder(aside):
            _finish_replace(store, name, aside)


def _has_manifest(store: FilesystemFolderOperations, name: str) -> bool:
    try:
        return manifests.read(store.path(name)) is not None
    except CheckpointError:
        return False
