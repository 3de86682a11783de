"""The places of checkpoints: their addresses, which folders are complete ones, which is the newest.

An address is the path of a local folder or the URL of a remote one. A committed checkpoint has a manifest and
every file of it, with its size. Folders of the public package have no manifest; they count only if nothing in
them is torn, as far as that can be seen without one.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import zipfile
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path, PurePosixPath

from safetensors import SafetensorError, safe_open

from accelerate.checkpoint.file_access import CheckpointExistsError, CheckpointNotFoundError
from accelerate.checkpoint.layout import (
    AUTOMATIC_FOLDER,
    AUTOMATIC_NAME,
    DAMAGE_FIX,
    MANIFEST_NAME,
    MODEL_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    Manifest,
    file_name,
    is_checkpoint_name,
)
from accelerate.checkpoint.remote import RemoteCheckpointStorage
from accelerate.checkpoint.storage import (
    INTERRUPTED,
    ROLES,
    CheckpointStorage,
    LocalCheckpointStorage,
    parse_working_name,
    read_manifest,
)
from accelerate.core.argument_checks import check_arguments
from accelerate.core.errors import CheckpointError, SettingError, list_first, nearest, warn_user
from accelerate.core.value_types import NonNegativeInt, PathText, PositiveInt

logger = logging.getLogger(__name__)

Address = Path | str  # a str is the URL of a remote place
_FILE = re.compile(r"(file|local)://")

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
        """The number at the end of its name: 10 for ``"checkpoint_10"``, None for ``"best"``."""
        match = _NUMBERED.fullmatch(self.name)
        return int(match["number"]) if match else None

    @property
    def saved_at(self) -> datetime:
        """The time of saving; the folder's time if it has no manifest."""
        if self.manifest is not None:
            return datetime.fromisoformat(self.manifest.saved)
        return self.store.modified_at(self.name)


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
        sizes, folder = store.files(candidate.folder), store.local_path(candidate.folder)
        for file, record in manifest.files.items():
            if file not in sizes:
                if file.startswith(f"{RNG_STATE_NAME}_"):
                    continue  # the training goes on without; each rank says so
                return replace(candidate, problem=f"{file} is missing")
            if sizes[file] != record.size and not is_rewritten(folder, file, manifest):
                problem = f"{file} has {sizes[file]} bytes, expected {record.size}"
                return replace(candidate, problem=problem)
        return candidate
    entries = store.entries(name)
    if any((parsed := parse_working_name(entry)) and parsed[1] == "new" for entry in entries):
        return CheckpointCandidate(
            store, name, None, "its save was committed, and load_state of it finishes it"
        )
    if any(is_checkpoint_name(entry) for entry in entries):
        return CheckpointCandidate(store, name, None, _find_damage(store, name))
    if automatic_number(name) is not None:
        unfinished = any(leftover.folder.startswith(f"{name}/") for leftover in store.leftovers(name))
        return CheckpointCandidate(
            store, name, None, INTERRUPTED if unfinished else "it holds no part of a checkpoint"
        )
    return None


def _find_damage(store: CheckpointStorage, folder: str) -> str:
    """Return what is visibly incomplete in a folder without manifest; empty if nothing is.

    Random states are written after models, optimizers and schedulers, so they must be there.
    """
    entries = store.entries(folder)
    if file_name("rng") not in entries:
        return f"no {MANIFEST_NAME} and no {file_name('rng')}: the save was not complete"
    for name in filter(is_checkpoint_name, entries):
        path = store.local_path(f"{folder}/{name}")
        if path is None:
            return f"no {MANIFEST_NAME}, without which it is not known to be whole before it is fetched"
        if problem := _file_damage(path):
            return f"no {MANIFEST_NAME}, and {name} {problem}"
    return ""


def _file_damage(path: Path) -> str:
    if not (path.is_file() or path.is_dir()):
        return "is no file"
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="numpy"):  # framework="pt" would import torch
                return ""
        except (SafetensorError, OSError) as error:
            return f"is damaged ({error})"
    return "is not a whole torch file" if path.is_file() and not zipfile.is_zipfile(path) else ""


def is_rewritten(folder: Path | None, file: str, manifest: Manifest) -> bool:
    """Return True for weights or a schedule's state that a program has written anew, whole, after the save.

    Such a file is newer than all that the save wrote. What a disk damages keeps its time, and a copy of a
    folder gives the files theirs in another order. In a remote store (None, or no manifest) that is unknown.
    """
    rewritable = {each.file for kind in ("models", "schedulers") for each in manifest.parts.get(kind, ())}
    if folder is None or file not in rewritable or not (folder / MANIFEST_NAME).is_file():
        return False
    path, saved = folder / file, {MANIFEST_NAME, *filter(is_checkpoint_name, manifest.files)} - rewritable
    times = (each.stat().st_mtime_ns for name in saved if (each := folder / name).exists())
    return path.is_file() and not _file_damage(path) and path.stat().st_mtime_ns > max(times)


def candidates(store: CheckpointStorage, folder: str = "") -> list[CheckpointCandidate]:
    """Return everything directly in ``folder`` that looks like a checkpoint, oldest first.

    By the number in the names if these differ in nothing else (9 before 10), by the time of saving otherwise.
    """
    inside = [f"{folder}/{name}" if folder else name for name in store.entries(folder)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        inspected = list(pool.map(partial(inspect_folder, store), inside))
    matches = [
        candidate for candidate in inspected if candidate is not None and not _has_weights_alone(candidate)
    ]
    names = [c.name for c in matches if parse_working_name(c.name) is None]
    stems = {match["stem"] if (match := _NUMBERED.fullmatch(name)) else None for name in names}
    if len(stems) == 1 and None not in stems:
        return sorted(matches, key=lambda c: -1 if c.number is None else c.number)
    return sorted(matches, key=lambda c: c.saved_at)


def _has_weights_alone(candidate: CheckpointCandidate) -> bool:
    """Return True for weights that ``save_model`` or ``save_pretrained`` put under a name of the user's."""
    name = PurePosixPath(candidate.name).name
    if candidate.manifest is not None or automatic_number(name) is not None or parse_working_name(name):
        return False
    parts = [entry for entry in candidate.store.entries(candidate.name) if is_checkpoint_name(entry)]
    return bool(parts) and all(part.startswith((SAFE_MODEL_NAME, MODEL_NAME)) for part in parts)


def latest_checkpoint(
    folder: str | Path, allowed_ids: Container[str] | None = None
) -> tuple[CheckpointCandidate, tuple[str, ...]]:
    """Return (the newest usable checkpoint directly in a folder, the ones passed over with the reason).

    Args:
        folder: a local one or a URL.
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
    return usable[-1], ignored


def named_checkpoint(store: CheckpointStorage, name: str) -> CheckpointCandidate:
    """Return the checkpoint at the path that the user gave.

    Raises:
        CheckpointNotFoundError: there is no such folder, or it is no checkpoint.
        CheckpointError: it is damaged.
    """
    path = store.label(name)
    if not store.is_folder(name):
        raise missing_folder(store, name)
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
            fix=DAMAGE_FIX,
        )
    return candidate


def missing_folder(store: CheckpointStorage, name: str) -> CheckpointNotFoundError:
    """Return the error of a name in ``store`` that is no folder; it lists the newest checkpoints first."""
    try:
        usable = {c.name: c.path for c in reversed(candidates(store)) if not c.problem}
    except CheckpointError:
        usable = {}  # this user may not read a folder beside it
    entries = [*usable, *(entry for entry in store.entries() if entry not in usable)]
    fix = "give the folder that save_state wrote"
    if near := nearest(name, usable):
        fix = f"did you mean {usable[near]}?"
    elif usable:
        fix = f"the newest checkpoint there is {next(iter(usable.values()))}"
    return CheckpointNotFoundError(
        f"there is no folder {store.label(name)}",
        why=f"{store.label()} holds: {list_first(entries, 12)}" if entries else "",
        fix=fix,
    )


def parse_address(text: PathText | None) -> Address:
    """Return a local path with ``~`` expanded, or a URL without its last slash; ``file://`` is local.

    Raises:
        CheckpointNotFoundError: none is given.
        SettingError: a URL has gone through ``Path``, which changes it.
    """
    if text is None or str(text) == "":
        raise CheckpointNotFoundError(
            "no folder is given for the checkpoint",
            fix="pass one, or use ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)",
        )
    address = os.fspath(text)
    if isinstance(text, os.PathLike) and re.match(r"[A-Za-z][\w+.-]+:[/\\]", address):
        raise SettingError(
            f"{address} is a URL that has become a path",
            why="Path joins the slashes of a URL, so it would be a local folder of that name",
            fix="give the URL as text: 's3://bucket/run', not Path('s3://bucket/run')",
        )
    if file := _FILE.match(address):
        path = address[file.end() :]
        # The third slash of file:///C:/runs is none of the path.
        has_drive = os.name == "nt" and re.match(r"/[A-Za-z]:", path)
        return Path(path[1:] if has_drive else path).expanduser()
    if "://" in address:
        scheme, _, rest = address.partition("://")
        return f"{scheme}://{rest.rstrip('/')}"
    return Path(address).expanduser()


def join_address(folder: Address, name: str) -> Address:
    """Return the address of ``name`` in ``folder``."""
    if isinstance(folder, Path):
        return folder / name
    return f"{folder}{'' if folder.endswith('/') else '/'}{name}"


def split_address(place: Address) -> tuple[Address, str]:
    """Split a checkpoint's address into (the folder above, name).

    Raises:
        CheckpointNotFoundError: a URL that names no folder.
    """
    if isinstance(place, Path):
        path = place.resolve()
        return path.parent, path.name
    scheme, _, rest = place.partition("://")
    above, _, name = rest.strip("/").rpartition("/")
    if not name:
        raise CheckpointNotFoundError(f"{place} names no folder", fix=f"{scheme}://bucket/run/last")
    return f"{scheme}://{above}", name


def open_store(root: Address) -> CheckpointStorage:
    """Return the store of the folder above a checkpoint.

    Raises:
        MissingExtraError: a remote one needs a package that is not installed.
        CheckpointError: a remote one cannot be opened.
    """
    return LocalCheckpointStorage(root) if isinstance(root, Path) else RemoteCheckpointStorage(root)


def locate(text: PathText | None) -> tuple[CheckpointStorage, str]:
    """Return (store, name in it) of the checkpoint that a path or URL names."""
    root, name = split_address(parse_address(text))
    return open_store(root), name


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
    return join_address(parse_address(project.project_dir), AUTOMATIC_FOLDER)


def save_address(directory: PathText | None, project: ProjectConfiguration) -> Address:
    """Return the address to save to."""
    if project.automatic_checkpoint_naming:
        return join_address(automatic_folder(project), f"{AUTOMATIC_NAME}_{project.iteration}")
    return parse_address(directory)


def first_iteration(project: ProjectConfiguration) -> int:
    """Return the number of the first checkpoint of a run that has loaded none.

    It follows those that another run has left. From 0 on, ``total_limit`` would delete each new one, and
    the newest by number would be the other run's. Not with ``save_on_each_node``: the machines may differ.
    """
    store = open_store(automatic_folder(project))
    complete = (automatic_number(each.name) for each in candidates(store) if not each.problem)
    numbers = [number for number in complete if number is not None]
    if not numbers or 0 in numbers:
        return 0
    first = _next_free_number(store, 0)
    warn_user(
        f"{store.label()} has checkpoints of another run, {AUTOMATIC_NAME}_{max(numbers)} the newest: those "
        f"of this run begin at {AUTOMATIC_NAME}_{first}. To continue that run, call load_state() before "
        "training or launch with --resume auto; else choose another project_dir"
    )
    return first


def refuse_existing_number(store: CheckpointStorage, name: str) -> None:
    """Raise if the number of the next checkpoint is taken; an interrupted save does not count.

    Raises:
        CheckpointExistsError: the number is taken.
    """
    candidate = inspect_folder(store, name)
    if candidate is None or candidate.problem:
        return
    raise CheckpointExistsError(
        f"{store.label(name)} exists already",
        why="the numbering of this run starts where another run has saved",
        fix="call load_state() before training, or launch with --resume auto, to continue that run; choose "
        "another project_dir or remove this folder; or set "
        f"ProjectConfiguration(iteration={_next_free_number(store, 0)})",
    )


def _next_free_number(store: CheckpointStorage, wanted: int) -> int:
    """Return ``wanted``, or the number after the highest automatically named checkpoint in the store."""
    numbers = [n for entry in store.entries() if (n := automatic_number(entry)) is not None]
    return max([wanted, *(n + 1 for n in numbers)])


def committed_ids(project: ProjectConfiguration) -> set[str]:
    """Return the ids of this machine's numbered checkpoints; recover interrupted replacements first."""
    store = open_store(automatic_folder(project))
    _recover_all(store)
    return {candidate.id for candidate in candidates(store) if not candidate.problem}


def choose_checkpoint(
    directory: PathText | None,
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
        candidate, ignored = latest_checkpoint(folder, allowed_ids)
        for name in ignored:
            logger.warning("not a complete checkpoint, ignored: %s", name)
    else:
        store, name = locate(directory)
        recover(store, name)
        candidate = named_checkpoint(store, name)
    if candidate.manifest is None:
        logger.warning("%s has no manifest, so another library saved it: loaded unverified", candidate.path)
    return candidate, ignored


def local_address(
    rank0_address: Address, directory: PathText | None, project: ProjectConfiguration | None
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
        else parse_address(directory)
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
    # In a remote store there is nothing to recover, and looking lists all files of all checkpoints.
    for leftover in () if store.is_shared else store.leftovers():
        if leftover.role == "old":
            recover(store, leftover.name)


def recover(store: CheckpointStorage, name: str) -> None:
    """Finish an interrupted replacement; if that is not permitted, a checkpoint that is there is enough."""
    try:
        store.recover(name)
    except CheckpointError as error:
        if not store.is_folder(name):
            raise
        logger.warning("what %s replaced could not be cleared: %s", store.label(name), error)


def next_iteration(name: str, manifest: Manifest | None, project: ProjectConfiguration) -> int:
    """Return the number of the next save after ``name`` was loaded: above every checkpoint that is there."""
    loaded = manifest.iteration if manifest is not None else automatic_number(name)
    iteration = project.iteration if loaded is None else max(project.iteration, loaded + 1)
    return _next_free_number(open_store(automatic_folder(project)), iteration)


@check_arguments
@dataclass
class ProjectConfiguration:
    """Folders of a project and the naming of its checkpoints.

    Attributes:
        project_dir: where everything of the project goes.
        logging_dir: where trackers log; ``project_dir`` when None.
        automatic_checkpoint_naming: ``save_state`` writes ``project_dir/checkpoints/checkpoint_<iteration>``.
        total_limit: how many of these to keep; the oldest go after a newer one is committed. None keeps all.
        iteration: number of the next one; ``load_state`` sets it so that numbering continues.
        save_on_each_node: each machine writes a whole checkpoint to a disk of its own; for folders that the
            machines do not share.
        async_save: ``save_state`` copies the state and returns; the copy is written while training goes on.
        replica_check_interval: at each so many ``save_state`` the learning rates of the ranks are compared,
            and under DDP their replicas; the first that differs is named. 0 never compares.

    Raises:
        SettingError: ``total_limit`` is below 1 (the newest checkpoint is always kept), or ``iteration``
            below 0.
    """

    project_dir: PathText | None = None
    logging_dir: PathText | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: PositiveInt | None = None
    iteration: NonNegativeInt = 0
    save_on_each_node: bool = False
    async_save: bool = False
    replica_check_interval: int = 1

    def set_directories(self, project_dir: PathText | None = None) -> None:
        """Set ``project_dir``, and ``logging_dir`` if it has none yet."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir

    def __post_init__(self) -> None:
        if self.logging_dir is None:
            self.logging_dir = self.project_dir
