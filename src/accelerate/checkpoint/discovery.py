"""The search for checkpoints: which folders are complete ones, and which is the newest.

A committed checkpoint has a manifest and every file of it, with its size. Folders of the public package have
no manifest; they count only if nothing in them is torn, as far as that can be seen without one.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path, PurePosixPath

from safetensors import SafetensorError, safe_open

from accelerate.checkpoint import manifest as manifests
from accelerate.checkpoint.atomic_replace import INTERRUPTED, ROLES, parse_working_name
from accelerate.checkpoint.errors import CheckpointNotFoundError
from accelerate.checkpoint.manifest import Manifest
from accelerate.checkpoint.names import AUTOMATIC_NAME, MANIFEST_NAME, is_checkpoint_name, rng_file
from accelerate.checkpoint.storage import CheckpointStorage
from accelerate.checkpoint.storage_urls import Address, open_store, parse_address
from accelerate.core.errors import CheckpointError

_AT_ONCE = 16  # folders that are inspected at once: a remote store answers slowly
_NUMBERED = re.compile(r"(?P<stem>.*?)(?P<number>\d+)")


NOT_ON_ALL_MACHINES = "not every machine has it: its save was interrupted, or a machine is new"


@dataclass(frozen=True)
class CheckpointCandidate:
    """A folder that looks like a checkpoint.

    Attributes:
        store, name: where it is.
        manifest: None for a folder of the public package.
        problem: why it cannot be used; empty if it can.
    """

    store: CheckpointStorage
    name: str
    manifest: Manifest | None
    problem: str = ""

    @property
    def path(self) -> Address:
        """The folder's path, or its URL."""
        return self.store.local_path(self.name) or self.store.label(self.name)

    @property
    def folder(self) -> str:
        """The folder of the store that holds its files."""
        inner = self.manifest.folder if self.manifest is not None else ""
        return f"{self.name}/{inner}" if inner else self.name

    @property
    def id(self) -> str:
        """The id of its save, equal on all machines; the name if there is no manifest."""
        return self.manifest.id if self.manifest is not None else self.name

    @property
    def number(self) -> int | None:
        """The number at the end of its name."""
        return trailing_number(self.name)

    @property
    def saved_at(self) -> datetime:
        """The time of saving; the folder's time if it has no manifest."""
        if self.manifest is not None:
            return datetime.fromisoformat(self.manifest.saved)
        return self.store.modified_at(self.name)


@dataclass(frozen=True)
class CheckpointSearchResult:
    """The newest usable checkpoint of a folder.

    Attributes:
        candidate: the checkpoint.
        ignored: newer or older folders that look like one and cannot be used, with the reason.
    """

    candidate: CheckpointCandidate
    ignored: tuple[str, ...]


def trailing_number(name: str) -> int | None:
    """Return the number at the end of a name: 10 for ``"checkpoint_10"``, None for ``"best"``."""
    match = _NUMBERED.fullmatch(name)
    return int(match["number"]) if match else None


def automatic_number(name: str) -> int | None:
    """Return the number of a folder that automatic naming made, None for any other folder."""
    match = re.fullmatch(rf"{AUTOMATIC_NAME}_(\d+)", name)
    return int(match[1]) if match else None


def inspect_folder(store: CheckpointStorage, name: str) -> CheckpointCandidate | None:
    """Inspect one folder; return None if it is no checkpoint. Only its manifest is read."""
    if not store.is_folder(name):
        return None
    parsed = parse_working_name(PurePosixPath(name).name)
    if parsed is not None:
        return CheckpointCandidate(store, name, None, ROLES[parsed[1]])
    try:
        manifest = read_manifest(store, name)
    except CheckpointError as error:
        return CheckpointCandidate(
            store, name, None, f"{error.what}: {error.why}" if error.why else error.what
        )
    if manifest is not None:
        candidate = CheckpointCandidate(store, name, manifest)
        return replace(candidate, problem=_find_missing_file(store.files(candidate.folder), manifest))
    if any(is_checkpoint_name(entry) for entry in store.entries(name)):
        return CheckpointCandidate(store, name, None, _find_damage(store, name))
    if automatic_number(name) is not None:
        unfinished = any(leftover.folder.startswith(f"{name}/") for leftover in store.leftovers(name))
        return CheckpointCandidate(
            store, name, None, INTERRUPTED if unfinished else "it holds no part of a checkpoint"
        )
    return None


def read_manifest(store: CheckpointStorage, name: str) -> Manifest | None:
    """Read the manifest of a checkpoint; return None if it has none.

    Raises:
        CheckpointError: it cannot be read, is damaged, or of a newer format.
    """
    file = f"{name}/{MANIFEST_NAME}"
    data = store.read(file)
    return None if data is None else manifests.decode(data, store.label(file))


def _find_missing_file(sizes: dict[str, int], manifest: Manifest) -> str:
    """Return the problem of the first file that is missing or has another size; empty if none."""
    for name, record in manifest.files.items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != record.size:
            return f"{name} has {sizes[name]} bytes, expected {record.size}"
    return ""


def _find_damage(store: CheckpointStorage, folder: str) -> str:
    """Return what is visibly incomplete in a folder without manifest; empty if nothing is.

    Random states are written after models, optimizers and schedulers, so they must be there.
    """
    entries = store.entries(folder)
    if rng_file(0) not in entries:
        return f"no {MANIFEST_NAME} and no {rng_file(0)}: the save was not complete"
    for name in filter(is_checkpoint_name, entries):
        path = store.local_path(f"{folder}/{name}")
        if path is None:
            return f"no {MANIFEST_NAME}, without which it is not known to be whole before it is fetched"
        if path.suffix == ".safetensors":
            problem = _safetensors_damage(path)
        elif path.is_file() and not zipfile.is_zipfile(path):
            problem = "is not a whole torch file"
        else:
            problem = ""
        if problem:
            return f"no {MANIFEST_NAME}, and {name} {problem}"
    return ""


def _safetensors_damage(path: Path) -> str:
    try:
        with safe_open(path, framework="numpy"):  # framework="pt" would import torch
            return ""
    except (SafetensorError, OSError) as error:
        return f"is damaged ({error})"


def candidates(store: CheckpointStorage, folder: str = "") -> list[CheckpointCandidate]:
    """Return everything directly in ``folder`` that looks like a checkpoint, oldest first.

    By the number in the names if these differ in nothing else (9 before 10), by the time of saving otherwise.
    """
    inside = [f"{folder}/{name}" if folder else name for name in store.entries(folder)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        inspected = list(pool.map(partial(inspect_folder, store), inside))
    matches = [candidate for candidate in inspected if candidate is not None]
    names = [c.name for c in matches if parse_working_name(c.name) is None]
    stems = {match["stem"] if (match := _NUMBERED.fullmatch(name)) else None for name in names}
    if len(stems) == 1 and None not in stems:
        return sorted(matches, key=lambda c: -1 if c.number is None else c.number)
    return sorted(matches, key=lambda c: c.saved_at)


def latest_checkpoint(
    folder: str | Path, allowed_ids: Container[str] | None = None
) -> CheckpointSearchResult:
    """Return the newest usable checkpoint directly in ``folder``, a local one or a URL.

    Args:
        folder: where.
        allowed_ids: ids of the saves that may be taken; None for all.

    Raises:
        CheckpointNotFoundError: there is none; says what was found instead.
    """
    store = open_store(parse_address(folder))
    checkpoints = candidates(store)
    if allowed_ids is not None:
        checkpoints = [
            c if c.problem or c.id in allowed_ids else replace(c, problem=NOT_ON_ALL_MACHINES)
            for c in checkpoints
        ]
    ignored = tuple(f"{c.name} ({c.problem})" for c in checkpoints if c.problem)
    usable = [c for c in checkpoints if not c.problem]
    if not usable:
        reason = "; ".join(ignored) if ignored else "it has no folder that looks like one"
        raise CheckpointNotFoundError(f"there is no complete checkpoint in {folder}", why=reason)
    return CheckpointSearchResult(usable[-1], ignored)


def named_checkpoint(store: CheckpointStorage, name: str) -> CheckpointCandidate:
    """Return the checkpoint at the path that the user gave.

    Raises:
        CheckpointNotFoundError: there is no such folder, or it is no checkpoint.
        CheckpointError: it is damaged.
    """
    path = store.label(name)
    if not store.is_folder(name):
        near = ", ".join(store.entries()[:12])
        raise CheckpointNotFoundError(
            f"there is no folder {path}", why=f"{store.label()} holds: {near}" if near else ""
        )
    candidate = inspect_folder(store, name)
    if candidate is None:
        inside = [c.path for c in candidates(store, name) if not c.problem]
        raise CheckpointNotFoundError(
            f"{path} is not a checkpoint",
            why=f"it has no {MANIFEST_NAME} and none of the files of a checkpoint",
            fix=f"its newest checkpoint is {inside[-1]}" if inside else "",
        )
    if candidate.problem and MANIFEST_NAME in store.entries(name):
        raise CheckpointError(
            f"the checkpoint {path} is damaged",
            why=candidate.problem,
            fix="load another one, or put the file back; nothing was changed",
        )
    return candidate
