"""Which folder a save goes to and a load comes from. Rank 0 decides for all."""

from __future__ import annotations

import logging
import socket
from collections.abc import Container
from pathlib import Path

from accelerate.checkpoint import find
from accelerate.checkpoint.errors import CheckpointExistsError, CheckpointNotFoundError
from accelerate.checkpoint.find import Candidate
from accelerate.checkpoint.manifest import Manifest
from accelerate.checkpoint.names import AUTOMATIC_FOLDER, AUTOMATIC_NAME
from accelerate.checkpoint.places import Address, address, join, open_store, split
from accelerate.checkpoint.project import ProjectConfiguration
from accelerate.checkpoint.store import Store
from accelerate.core.errors import CheckpointError, SettingError

logger = logging.getLogger(__name__)


def place(text: str | Path) -> tuple[Store, str]:
    """(store, name in it) of the checkpoint that a path or URL names."""
    root, name = split(address(text))
    return open_store(root), name


def given(directory: str | Path | None) -> Address:
    """The folder that the caller named, ``~`` expanded, or the URL.

    Raises:
        CheckpointNotFoundError: none is named.
    """
    if directory is None or str(directory) == "":
        raise CheckpointNotFoundError(
            "no folder is given for the checkpoint",
            fix="pass one, or use ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)",
        )
    return address(directory)


def automatic_folder(project: ProjectConfiguration) -> Address:
    """Where automatic naming puts the checkpoints of a project.

    Raises:
        SettingError: the project has no folder.
    """
    if project.project_dir is None:
        raise SettingError(
            "automatic_checkpoint_naming needs a project_dir",
            fix="ProjectConfiguration(project_dir='runs/a', automatic_checkpoint_naming=True)",
        )
    return join(given(project.project_dir), AUTOMATIC_FOLDER)


def target(directory: str | Path | None, project: ProjectConfiguration) -> Address:
    """Where to save."""
    if project.automatic_checkpoint_naming:
        return join(automatic_folder(project), f"{AUTOMATIC_NAME}_{project.iteration}")
    return given(directory)


def refuse_taken(store: Store, name: str) -> None:
    """Refuses to number over a checkpoint that is there; what an interrupted save left is no checkpoint.

    Raises:
        CheckpointExistsError: the number is taken.
    """
    candidate = find.inspect(store, name)
    if candidate is None or candidate.problem:
        return
    raise CheckpointExistsError(
        f"{store.label(name)} exists already",
        why="the numbering of this run starts where another run has saved",
        fix="call load_state() before training to continue that run, choose another project_dir, or set "
        f"ProjectConfiguration(iteration={_after_all(store, 0)})",
    )


def _after_all(store: Store, wanted: int) -> int:
    """``wanted``, or the number after the highest checkpoint that automatic naming made here."""
    numbers = [n for entry in store.entries() if (n := find.automatic_number(entry)) is not None]
    return max([wanted, *(n + 1 for n in numbers)])


def committed(project: ProjectConfiguration) -> set[str]:
    """Ids of the numbered checkpoints that this machine has; ends replacements that were interrupted."""
    store = open_store(automatic_folder(project))
    _heal_all(store)
    return {candidate.id for candidate in find.candidates(store) if not candidate.problem}


def chosen(
    directory: str | Path | None, project: ProjectConfiguration | None, among: Container[str] | None = None
) -> tuple[Candidate, tuple[str, ...]]:
    """(the checkpoint to load, what was passed over and why); logs both when there is something to say.

    Of those that are numbered only the saves ``among`` count, if given.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointError: the one that was named is damaged.
    """
    ignored: tuple[str, ...] = ()
    if directory is None and project is not None and project.automatic_checkpoint_naming:
        folder = automatic_folder(project)
        folder = folder.resolve() if isinstance(folder, Path) else folder
        _heal_all(open_store(folder))
        found = find.latest(folder, among)
        candidate, ignored = found.candidate, found.ignored
        for name in ignored:
            logger.warning("not a complete checkpoint, ignored: %s", name)
    else:
        store, name = place(given(directory))
        _heal(store, name)
        candidate = find.explicit(store, name)
    if candidate.manifest is None:
        logger.warning("%s has no manifest, so another library saved it: loaded unverified", candidate.path)
    return candidate, ignored


def here(first: Address, directory: str | Path | None, project: ProjectConfiguration | None) -> Address:
    """Where this machine has the checkpoint that rank 0 chose: by its own arguments, else at the same place.

    Raises:
        CheckpointNotFoundError: it is not on this machine.
    """
    if not isinstance(first, Path):
        return first
    own = join(automatic_folder(project), first.name) if directory is None and project else given(directory)
    for path in (own.resolve() if isinstance(own, Path) else first, first):
        if path.is_dir():
            return path
    raise CheckpointNotFoundError(
        f"there is no folder {first} on {socket.gethostname()}",
        why="rank 0 loads from it, so every machine needs it",
        fix="use a folder that all machines share, or copy the checkpoint to each",
    )


def _heal_all(store: Store) -> None:
    for leftover in store.leftovers():
        if leftover.role == "old":
            _heal(store, leftover.name)


def _heal(store: Store, name: str) -> None:
    """Finishes an interrupted replacement; where that is not allowed, a checkpoint that is there will do."""
    try:
        store.heal(name)
    except CheckpointError as error:
        if not store.is_folder(name):
            raise
        logger.warning("what %s replaced could not be cleared: %s", store.label(name), error)


def next_iteration(name: str, manifest: Manifest | None, project: ProjectConfiguration) -> int:
    """The number of the next save after ``name`` was loaded: after it and after all that are there."""
    loaded = manifest.iteration if manifest is not None else find.automatic_number(name)
    wanted = project.iteration if loaded is None else max(project.iteration, loaded + 1)
    return _after_all(open_store(automatic_folder(project)), wanted)
