"""How a folder becomes the checkpoint on a file system: by renaming.

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
from accelerate.checkpoint.names import is_part
from accelerate.core.errors import CheckpointError

logger = logging.getLogger(__name__)

INTERRUPTED = "a save that was interrupted before it was committed"
ROLES = {
    "tmp": INTERRUPTED,
    "old": "an older state that a newer one was replacing",
    "gone": "being removed",
}
_HIDDEN = re.compile(rf"\.(?P<name>.+)\.(?P<role>{'|'.join(ROLES)})-(?P<id>[0-9a-f]+)(-n\d+)?")


def hidden(name: str) -> tuple[str, str, str] | None:
    """(checkpoint's name, role, id) of a working folder of a save; None for any other name."""
    match = _HIDDEN.fullmatch(name)
    return (match["name"], match["role"], match["id"]) if match else None


def working(name: str, role: str, id: str) -> str:
    """Name of a working folder: ``".checkpoint_3.tmp-5f0c"``."""
    return f".{name}.{role}-{id}"


class Folders(Protocol):
    """The folders of a file system, as ``store.LocalStore`` has them."""

    def path(self, name: str) -> Path:
        """Where it lies."""
        ...

    def entries(self, folder: str = "") -> list[str]:
        """Names directly inside a folder."""
        ...

    def is_folder(self, name: str) -> bool:
        """Whether there is a folder of that name."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Moves in one step."""
        ...

    def sync(self, folder: str) -> None:
        """Makes the list of names inside a folder durable."""
        ...

    def remove(self, name: str) -> None:
        """Removes with all it holds."""
        ...


def refuse_unmovable(target: Path) -> None:
    """Refuses a target that no rename can replace.

    Raises:
        CheckpointError: it is a file, a mount point, or holds the current directory.
    """
    if not target.exists():
        return
    why = ""
    if not target.is_dir():
        why = "it is a file"
    elif os.path.ismount(target):
        why = "it is the root of a file system, which cannot be renamed"
    elif target in (Path.cwd(), *Path.cwd().parents):
        why = "it holds the current directory, which would vanish under this process"
    if why:
        raise CheckpointError(
            f"{target} cannot be replaced by a new checkpoint in one step",
            why=why,
            fix=f"save into a folder of its own, for example {target / 'checkpoint'}",
        )


def swap(store: Folders, temp: str, name: str, id: str) -> None:
    """Makes ``temp`` the folder ``name``; of one that exists, only the user's own files stay.

    Raises:
        CheckpointError: a rename failed, or cannot be made durable; everything is where it was.
    """
    aside = working(name, "old", id)
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
        _settle(store, name, aside)
    except CheckpointError as error:  # the checkpoint is committed; the next load or save tries again
        logger.warning("%s is committed, but what it replaced is still in %s: %s", name, aside, error)


def _settle(store: Folders, name: str, aside: str) -> None:
    """Moves the user's own files from the replaced folder to the new one, and removes the rest."""
    try:
        old = manifests.read(store.path(aside))
    except CheckpointError:
        old = None
    owned = {name.partition("/")[0] for name in (*old.files, old.folder)} if old else set[str]()
    present = set(store.entries(name))
    for entry in store.entries(aside):
        if entry not in owned and entry not in present and not is_part(entry):
            store.rename(f"{aside}/{entry}", f"{name}/{entry}")
    store.sync(name)
    # Without its manifest what is left of it would look like the user's own files.
    gone = aside.replace(working(name, "old", ""), working(name, "gone", ""), 1)
    store.rename(aside, gone)
    store.remove(gone)


def heal(store: Folders, name: str) -> None:
    """Finishes a replacement of ``name`` that a crash interrupted; does nothing otherwise."""
    working_folders = [(entry, h) for entry in store.entries() if (h := hidden(entry)) and h[0] == name]
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
            _settle(store, name, aside)


def _has_manifest(store: Folders, name: str) -> bool:
    try:
        return manifests.read(store.path(name)) is not None
    except CheckpointError:
        return False
