"""What lies in a folder of checkpoints: for people who look at it, check it and clear it. No torch here.

place = look("runs/a")                    # a checkpoint, a folder of them, or a project's folder
for found in place.candidates: ...
for checked in check(found): ...          # every file against its size and digest
for going in beyond(place, keep=3): ...   # what may be removed
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path, PurePosixPath

from accelerate.checkpoint import find, places
from accelerate.checkpoint.digest import PIECE, digest
from accelerate.checkpoint.errors import CheckpointNotFoundError, file_errors
from accelerate.checkpoint.find import Candidate
from accelerate.checkpoint.names import AUTOMATIC_FOLDER, SHARDED_INDEX
from accelerate.checkpoint.store import Record, Store
from accelerate.checkpoint.swap import hidden
from accelerate.core.errors import CheckpointError

# A save that is going on writes all the time; one that has not for this long is taken for dead.
QUIET = timedelta(minutes=10)


@dataclass(frozen=True)
class Place:
    """A folder of checkpoints.

    Attributes:
        store: of that folder.
        candidates: what looks like a checkpoint in it, oldest first.
        single: one checkpoint was named, not a folder of them.
    """

    store: Store
    candidates: list[Candidate]
    single: bool = False

    @property
    def newest(self) -> Candidate | None:
        """The newest complete one."""
        usable = [found for found in self.candidates if not found.problem]
        return usable[-1] if usable else None


def look(text: str) -> Place:
    """What there is in a folder or URL: a checkpoint, a folder of them, or a project's folder.

    Raises:
        CheckpointNotFoundError: there is no such folder, or nothing in it looks like a checkpoint.
    """
    address = places.address(text)
    above, name = places.split(address)
    store = places.open_store(above)
    if not store.is_folder(name):
        near = ", ".join(store.entries()[:12])
        raise CheckpointNotFoundError(
            f"there is no folder {address}", why=f"{store.label()} holds: {near}" if near else ""
        )
    own = find.inspect(store, name)
    if own is not None and (own.manifest is not None or not own.problem):
        return Place(store, [own], single=True)
    here = places.join(above, name)
    for folder in (here, places.join(here, AUTOMATIC_FOLDER)):
        inside = places.open_store(folder)
        found = find.candidates(inside)
        if found:
            return Place(inside, found)
    if own is not None:
        return Place(store, [own], single=True)
    raise CheckpointNotFoundError(
        f"there is no checkpoint in {address}",
        why=f"nothing in it or in its folder {AUTOMATIC_FOLDER} looks like one",
        fix="name a checkpoint, a folder of checkpoints, or the project_dir of a run",
    )


def files(found: Candidate) -> dict[str, int]:
    """Bytes of every file of a checkpoint, by name."""
    if found.manifest is not None:
        return {name: record.size for name, record in found.manifest.files.items()}
    return found.store.files(found.name)


def layout(found: Candidate) -> str:
    """How the weights lie: ``"full"``, ``"sharded"``; with ``"no manifest"`` if another library saved it."""
    if hidden(PurePosixPath(found.name).name) is not None:
        return ""
    parts = any(PurePosixPath(name).name == SHARDED_INDEX for name in files(found))
    form = "sharded" if parts else "full"
    return form if found.manifest is not None else f"{form}, no manifest"


@dataclass(frozen=True)
class Checked:
    """What was found of one file.

    Attributes:
        name: of the file.
        size: bytes that it has; None if it is missing.
        problem: what was expected and what was found; empty if they agree.
    """

    name: str
    size: int | None
    problem: str = ""


def check(found: Candidate, only: Collection[str] | None = None) -> Iterator[Checked]:
    """Compares every file of a checkpoint with its manifest, on all cores; large files first.

    Args:
        found: the checkpoint.
        only: names of the files to look at; all when None.

    Raises:
        CheckpointError: the checkpoint has no manifest, or a file cannot be read.
    """
    if found.manifest is None:
        raise CheckpointError(
            f"{found.path} has no manifest that could be read",
            why=found.problem or "another library saved it: sizes and digests are not known",
        )
    hashing, sizes = found.manifest.hashing, found.store.files(found.folder)
    wanted = [item for item in found.manifest.files.items() if only is None or item[0] in only]
    by_size = sorted(wanted, key=lambda item: (-item[1].size, item[0]))
    one = partial(_checked, found, hashing, sizes)
    large = [item for item in by_size if item[1].size > PIECE]
    yield from (one(item, None) for item in large)  # each by all cores
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(partial(one, threads=1), by_size[len(large) :])


def _checked(
    found: Candidate, hashing: str, sizes: dict[str, int], item: tuple[str, Record], threads: int | None
) -> Checked:
    name, record = item
    if name not in sizes:
        return Checked(name, None, f"it is missing; rank {record.rank} saved it with {record.size} bytes")
    if sizes[name] != record.size:
        return Checked(name, sizes[name], f"it has {sizes[name]} bytes, expected {record.size}")
    digest_found = _digest(found.store, f"{found.folder}/{name}", hashing, threads)
    if digest_found != record.digest:
        return Checked(name, record.size, f"its digest is {digest_found}, expected {record.digest}")
    return Checked(name, record.size)


def _digest(store: Store, name: str, hashing: str, threads: int | None) -> str:
    path = store.local(name)
    if path is not None:
        with file_errors("read", path):
            return digest(path, hashing, threads)
    with tempfile.TemporaryDirectory(prefix="accelerate-fetch-") as folder:
        path = Path(folder, "file")
        store.fetch(name, path)
        return digest(path, hashing, threads)


@dataclass(frozen=True)
class Going:
    """Something that may be removed.

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


def beyond(place: Place, keep: int, now: datetime | None = None) -> tuple[list[Going], list[str]]:
    """(what may be removed, what is left alone although it is no checkpoint, with the reason).

    The oldest complete checkpoints beyond ``keep``; and what interrupted saves have left, if a checkpoint was
    committed since and nothing in it has changed for ``QUIET``: a save that is going on is neither. What is
    damaged stays: a person may want to look at it.
    """
    now = now or datetime.now(timezone.utc)
    usable = [found for found in place.candidates if not found.problem]
    going = [
        Going(found.name, f"older than the newest {keep}", sum(files(found).values()), leftover=False)
        for found in usable[: max(0, len(usable) - keep)]
    ]
    stays: list[str] = []
    folders = {left.folder: left.role for left in place.store.leftovers()}
    for folder, role in sorted(folders.items()):
        changed = _changed(place.store, folder)
        if role == "old":
            stays.append(f"{folder}: the next save or load of it decides")
        elif not usable or changed >= usable[-1].saved:
            stays.append(f"{folder}: nothing was committed since, so a save may be going on")
        elif now - changed < QUIET:
            stays.append(f"{folder}: changed just now, so a save may be going on")
        else:
            size = sum(place.store.files(folder).values())
            going.append(Going(folder, "an interrupted save", size, leftover=True))
    return going, stays


def _changed(store: Store, folder: str) -> datetime:
    """When anything in a folder was last written."""
    path = store.local(folder)
    if path is None:
        return store.modified(folder)
    times = [p.stat().st_mtime for p in (path, *path.rglob("*"))]
    return datetime.fromtimestamp(max(times), timezone.utc)


def remove(place: Place, going: Going, id: str) -> None:
    """Removes it; ``id`` is a new one.

    Raises:
        CheckpointError: it cannot be removed.
    """
    if going.leftover:
        place.store.remove(going.name)
    else:
        place.store.retire(going.name, id)


def chosen(place: Place, name: str | None = None) -> Candidate:
    """The checkpoint of that name, or the newest complete one.

    Raises:
        CheckpointNotFoundError: there is none.
    """
    if name is not None:
        found = next((found for found in place.candidates if found.name == name), None)
        if found is None:
            held = ", ".join(found.name for found in place.candidates)
            raise CheckpointNotFoundError(
                f"there is no checkpoint {name} in {place.store.label()}", why=f"it holds: {held}"
            )
        return found
    newest = place.candidates[0] if place.single else place.newest
    if newest is None:
        problems = "; ".join(f"{found.name}: {found.problem}" for found in place.candidates)
        raise CheckpointNotFoundError(
            f"there is no complete checkpoint in {place.store.label()}", why=problems
        )
    return newest
