"""Folders of checkpoints for people who list, verify and prune them. Nothing here imports torch.

folder = open_checkpoints("runs/a")   # a checkpoint, a folder of them, or a project's folder
for candidate in folder.candidates: ...
for damage in check_files(candidate): ...   # every file against its size and digest
removals, kept_reasons = plan_removal(folder, keep=3)
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path, PurePosixPath

from accelerate.checkpoint import discovery
from accelerate.checkpoint.discovery import CheckpointCandidate
from accelerate.checkpoint.file_access import PIECE, CheckpointNotFoundError, FileDamage, find_damage
from accelerate.checkpoint.layout import AUTOMATIC_FOLDER, SHARDED_INDEX
from accelerate.checkpoint.storage import CheckpointStorage, parse_working_name
from accelerate.core.errors import CheckpointError

# A running save writes all the time; one that has not written for this long counts as dead.
QUIET = timedelta(minutes=10)


@dataclass(frozen=True)
class CheckpointCollection:
    """A folder of checkpoints.

    Attributes:
        store: of that folder.
        candidates: what looks like a checkpoint in it, oldest first.
        single: one checkpoint was named, not a folder of them.
    """

    store: CheckpointStorage
    candidates: list[CheckpointCandidate]
    single: bool = False

    @property
    def newest(self) -> CheckpointCandidate | None:
        """The newest complete checkpoint."""
        complete = [candidate for candidate in self.candidates if not candidate.problem]
        return complete[-1] if complete else None


def open_checkpoints(text: str) -> CheckpointCollection:
    """Open a checkpoint, a folder of checkpoints, or a project's folder, by path or URL.

    Raises:
        CheckpointNotFoundError: there is no such folder, or nothing in it looks like a checkpoint.
    """
    address = discovery.parse_address(text)
    above, name = discovery.split_address(address)
    store = discovery.open_store(above)
    if not store.is_folder(name):
        raise discovery.missing_folder(store, name)
    candidate = discovery.inspect_folder(store, name)
    if candidate is not None and (candidate.manifest is not None or not candidate.problem):
        return CheckpointCollection(store, [candidate], single=True)
    folder_address, collections = discovery.join_address(above, name), list[CheckpointCollection]()
    for folder in (folder_address, discovery.join_address(folder_address, AUTOMATIC_FOLDER)):
        inner_store = discovery.open_store(folder)
        if candidates := discovery.candidates(inner_store):
            collections.append(CheckpointCollection(inner_store, candidates))
    if collections:
        return next((each for each in collections if each.newest is not None), collections[0])
    if candidate is not None:
        return CheckpointCollection(store, [candidate], single=True)
    raise CheckpointNotFoundError(
        f"there is no checkpoint in {address}",
        why=f"nothing in it or in its folder {AUTOMATIC_FOLDER} looks like one",
        fix="name a checkpoint, a folder of checkpoints, or the project_dir of a run",
    )


def file_sizes(checkpoint: CheckpointCandidate) -> dict[str, int]:
    """Return the bytes of every file of a checkpoint, by name."""
    if checkpoint.manifest is not None:
        return {name: record.size for name, record in checkpoint.manifest.files.items()}
    return checkpoint.store.files(checkpoint.name)


def weight_layout(checkpoint: CheckpointCandidate) -> str:
    """Return ``"full"`` or ``"sharded"``; with ``"no manifest"`` if another library saved the checkpoint."""
    if parse_working_name(PurePosixPath(checkpoint.name).name) is not None:
        return ""
    is_sharded = any(PurePosixPath(name).name == SHARDED_INDEX for name in file_sizes(checkpoint))
    form = "sharded" if is_sharded else "full"
    return form if checkpoint.manifest is not None else f"{form}, no manifest"


def check_files(
    checkpoint: CheckpointCandidate, on_read: Callable[[int], object] | None = None
) -> Iterator[FileDamage]:
    """Compare every file of a checkpoint with its manifest; yield those that are not as they were saved.

    Those of a remote store are fetched, large ones one at a time.

    Args:
        checkpoint: the checkpoint.
        on_read: called with the bytes that were read, by several threads.

    Raises:
        CheckpointError: the checkpoint has no manifest, or a file cannot be read.
    """
    manifest, store = checkpoint.manifest, checkpoint.store
    if manifest is None:
        raise CheckpointError(
            f"{checkpoint.path} has no manifest that could be read",
            why=checkpoint.problem or "another library saved it: sizes and digests are not known",
        )
    local = store.local_path(checkpoint.folder)
    if local is not None:
        yield from find_damage(local, manifest.files, manifest.hashing, on_read)
        return
    sizes = store.files(checkpoint.folder)

    def check_remote(name: str) -> list[FileDamage]:
        with tempfile.TemporaryDirectory(prefix="accelerate-fetch-") as folder:
            path = Path(folder, name)
            if name in sizes:
                path.parent.mkdir(parents=True, exist_ok=True)
                store.fetch(f"{checkpoint.folder}/{name}", path)
            return list(find_damage(Path(folder), {name: manifest.files[name]}, manifest.hashing, on_read))

    large = [name for name, record in manifest.files.items() if record.size > PIECE]
    for name in large:
        yield from check_remote(name)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for damages in pool.map(check_remote, manifest.files.keys() - large):
            yield from damages


@dataclass(frozen=True)
class RemovalCandidate:
    """A folder that may be removed.

    Attributes:
        name: the folder.
        why: in words.
        size: bytes.
        leftover: of an interrupted save, not a checkpoint.
    """

    name: str
    why: str
    size: int
    leftover: bool


def plan_removal(
    folder_of_checkpoints: CheckpointCollection, keep: int, now: datetime | None = None
) -> tuple[list[RemovalCandidate], list[str]]:
    """Return (folders that may be removed, folders that must stay, each with the reason).

    The oldest complete checkpoints beyond ``keep``; and what interrupted saves have left, if a checkpoint was
    committed since and nothing in it has changed for ``QUIET``: a save that is going on is neither. What is
    damaged stays: a person may want to look at it.
    """
    now = now or datetime.now(timezone.utc)
    complete = [candidate for candidate in folder_of_checkpoints.candidates if not candidate.problem]
    removals = [
        RemovalCandidate(
            candidate.name,
            f"older than the newest {keep}",
            sum(file_sizes(candidate).values()),
            leftover=False,
        )
        for candidate in complete[: max(0, len(complete) - keep)]
    ]
    kept_reasons: list[str] = []
    folders = {leftover.folder: leftover.is_removable for leftover in folder_of_checkpoints.store.leftovers()}
    for folder, is_removable in sorted(folders.items()):
        changed = _last_write(folder_of_checkpoints.store, folder)
        if not is_removable:
            kept_reasons.append(f"{folder}: the next save or load of it decides")
        elif not complete or changed >= complete[-1].saved_at:
            kept_reasons.append(f"{folder}: nothing was committed since, so a save may be going on")
        elif now - changed < QUIET:
            kept_reasons.append(f"{folder}: changed just now, so a save may be going on")
        else:
            size = sum(folder_of_checkpoints.store.files(folder).values())
            removals.append(RemovalCandidate(folder, "an interrupted save", size, leftover=True))
    return removals, kept_reasons


def _last_write(store: CheckpointStorage, folder: str) -> datetime:
    """Return the time when anything in a folder was last written."""
    path = store.local_path(folder)
    if path is None:
        return store.modified_at(folder)
    times = [p.stat().st_mtime for p in (path, *path.rglob("*"))]
    return datetime.fromtimestamp(max(times), timezone.utc)


def remove_candidate(folder: CheckpointCollection, candidate: RemovalCandidate, id: str) -> None:
    """Remove a folder that ``plan_removal`` named; ``id`` is a new one.

    Raises:
        CheckpointError: it cannot be removed.
    """
    if candidate.leftover:
        folder.store.remove(candidate.name)
    else:
        folder.store.retire(candidate.name, id)


def select_checkpoint(folder: CheckpointCollection, name: str | None = None) -> CheckpointCandidate:
    """Return the checkpoint of that name, or the newest complete one.

    Raises:
        CheckpointNotFoundError: there is none.
    """
    if name is not None:
        candidate = next((candidate for candidate in folder.candidates if candidate.name == name), None)
        if candidate is None:
            names = ", ".join(candidate.name for candidate in folder.candidates)
            raise CheckpointNotFoundError(
                f"there is no checkpoint {name} in {folder.store.label()}", why=f"it holds: {names}"
            )
        return candidate
    newest = folder.candidates[0] if folder.single else folder.newest
    if newest is None:
        problems = "; ".join(f"{candidate.name}: {candidate.problem}" for candidate in folder.candidates)
        raise CheckpointNotFoundError(
            f"there is no complete checkpoint in {folder.store.label()}", why=problems
        )
    return newest
