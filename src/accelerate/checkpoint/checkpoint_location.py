"""The folder that a save goes to and a load comes from. Rank 0 decides for all ranks."""

from __future__ import annotations

import logging
import socket
from collections.abc import Container
from pathlib import Path

from accelerate.checkpoint import discovery
from accelerate.checkpoint.discovery import CheckpointCandidate
from accelerate.checkpoint.errors import CheckpointExistsError, CheckpointNotFoundError
from accelerate.checkpoint.manifest import Manifest
from accelerate.checkpoint.names import AUTOMATIC_FOLDER, AUTOMATIC_NAME
from accelerate.checkpoint.project import ProjectConfiguration
from accelerate.checkpoint.storage import CheckpointStorage
from accelerate.checkpoint.storage_urls import Address, join_address, open_store, parse_address, split_address
from accelerate.core.errors import CheckpointError, SettingError

logger = logging.getLogger(__name__)


def locate(text: str | Path) -> tuple[CheckpointStorage, str]:
    """Return (store, name in it) of the checkpoint that a path or URL names."""
    root, name = split_address(parse_address(text))
    return open_store(root), name


def requested_address(directory: str | Path | None) -> Address:
    """Return the folder that the caller named, ``~`` expanded, or the URL.

    Raises:
        CheckpointNotFoundError: none is named.
    """
    if directory is None or str(directory) == "":
        raise CheckpointNotFoundError(
            "no folder is given for the checkpoint",
            fix="pass one, or use ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)",
        )
    return parse_address(directory)


def automatic_folder(project: ProjectConfiguration) -> Address:
    """Return the folder in which automatic naming puts the checkpoints of a project.

    Raises:
        SettingError: the project has no folder.
    """
    if project.project_dir is None:
        raise SettingError(
            "automatic_checkpoint_naming needs a project_dir",
            fix="ProjectConfiguration(project_dir='runs/a', automatic_checkpoint_naming=True)",
        )
    return join_address(requested_address(project.project_dir), AUTOMATIC_FOLDER)


def save_address(directory: str | Path | None, project: ProjectConfiguration) -> Address:
    """Return the address to save to."""
    if project.automatic_checkpoint_naming:
        return join_address(automatic_folder(project), f"{AUTOMATIC_NAME}_{project.iteration}")
    return requested_address(directory)


def refuse_existing_number(store: CheckpointStorage, name: str) -> None:
    """Raise if the number of the next checkpoint is taken; an interrupted save does not count.

    Raises:
        CheckpointExistsError: the number is taken.
    """
    candidate = discovery.inspect_folder(store, name)
    if candidate is None or candidate.problem:
        return
    raise CheckpointExistsError(
        f"{store.label(name)} exists already",
        why="the numbering of this run starts where another run has saved",
        fix="call load_state() before training to continue that run, choose another project_dir, or set "
        f"ProjectConfiguration(iteration={_next_free_number(store, 0)})",
    )


def _next_free_number(store: CheckpointStorage, wanted: int) -> int:
    """Return ``wanted``, or the number after the highest automatically named checkpoint in the store."""
    numbers = [n for entry in store.entries() if (n := discovery.automatic_number(entry)) is not None]
    return max([wanted, *(n + 1 for n in numbers)])


def committed_ids(project: ProjectConfiguration) -> set[str]:
    """Return the ids of this machine's numbered checkpoints; recover interrupted replacements first."""
    store = open_store(automatic_folder(project))
    _recover_all(store)
    return {candidate.id for candidate in discovery.candidates(store) if not candidate.problem}


def choose_checkpoint(
    directory: str | Path | None,
    project: ProjectConfiguration | None,
    allowed_ids: Container[str] | None = None,
) -> tuple[CheckpointCandidate, tuple[str, ...]]:
    """Return (the checkpoint to load, the ones passed over with the reason), and log both.

    Of those that are numbered only the saves ``allowed_ids`` count, if given.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointError: the one that was named is damaged.
    """
    ignored: tuple[str, ...] = ()
    if directory is None and project is not None and project.automatic_checkpoint_naming:
        folder = automatic_folder(project)
        folder = folder.resolve() if isinstance(folder, Path) else folder
        _recover_all(open_store(folder))
        newest = discovery.latest_checkpoint(folder, allowed_ids)
        candidate, ignored = newest.candidate, newest.ignored
        for name in ignored:
            logger.warning("not a complete checkpoint, ignored: %s", name)
    else:
        store, name = locate(requested_address(directory))
        _recover(store, name)
        candidate = discovery.named_checkpoint(store, name)
    if candidate.manifest is None:
        logger.warning("%s has no manifest, so another library saved it: loaded unverified", candidate.path)
    return candidate, ignored


def local_address(
    rank0_address: Address, directory: str | Path | None, project: ProjectConfiguration | None
) -> Address:
    """Return this machine's address of the checkpoint that rank 0 chose.

    It follows this machine's own arguments first, then rank 0's path.

    Raises:
        CheckpointNotFoundError: it is not on this machine.
    """
    if not isinstance(rank0_address, Path):
        return rank0_address
    address = (
        join_address(automatic_folder(project), rank0_address.name)
        if directory is None and project
        else requested_address(directory)
    )
    for path in (address.resolve() if isinstance(address, Path) else rank0_address, rank0_address):
        if path.is_dir():
            return path
    raise CheckpointNotFoundError(
        f"there is no folder {rank0_address} on {socket.gethostname()}",
        why="rank 0 loads from it, so every machine needs it",
        fix="use a folder that all machines share, or copy the checkpoint to each",
    )


def _recover_all(store: CheckpointStorage) -> None:
    for leftover in store.leftovers():
        if leftover.role == "old":
            _recover(store, leftover.name)


def _recover(store: CheckpointStorage, name: str) -> None:
    """Finish an interrupted replacement; if that is not permitted, a checkpoint that is there is enough."""
    try:
        store.recover(name)
    except CheckpointError as error:
        if not store.is_folder(name):
            raise
        logger.warning("what %s replaced could not be cleared: %s", store.label(name), error)


def next_iteration(name: str, manifest: Manifest | None, project: ProjectConfiguration) -> int:
    """Return the number of the next save after ``name`` was loaded: above every checkpoint that is there."""
    loaded = manifest.iteration if manifest is not None else discovery.automatic_number(name)
    iteration = project.iteration if loaded is None else max(project.iteration, loaded + 1)
    return _next_free_number(open_store(automatic_folder(project)), iteration)
