"""Loading: from a checkpoint to objects. Everything is checked first, then loaded.

Files are read where they are; those of a remote store are fetched to a temporary folder first.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from accelerate.checkpoint import async_save, discovery, layout
from accelerate.checkpoint.discovery import Address, CheckpointCandidate, ProjectConfiguration
from accelerate.checkpoint.file_access import MissingFileError, file_errors, find_damage, make_folder
from accelerate.checkpoint.layout import CheckpointContents, Manifest
from accelerate.checkpoint.rank_group import CheckpointRankGroup
from accelerate.checkpoint.state_reader import TrainingStateReader
from accelerate.checkpoint.storage import CheckpointStorage, read_manifest
from accelerate.core.errors import AccelerateError, CheckpointError
from accelerate.core.units import ProgressBar, show_bytes
from accelerate.core.value_types import PathText
from accelerate.world import world as worlds

logger = logging.getLogger(__name__)

_AT_ONCE = 8
_OF_RANK = re.compile(rf"{layout.RNG_STATE_NAME}_(\d+)\.pkl|{layout.LOADER_NAME}(?:_\d+)?_rank(\d+)\.bin")
_RANK_STATE = re.compile(rf"{layout.RANK_STATE_NAME}_\d+_(\d+)\.bin")


@dataclass(frozen=True)
class CheckpointLoadResult:
    """The outcome of a load.

    Attributes:
        path: the checkpoint; text if it is a URL.
        step: the step counter it was saved with.
        iteration: its number under automatic naming, else None.
        metadata: the plain values it was saved with.
        world_size: number of processes that saved it; None if unknown.
        manifest: None for a checkpoint of the public package.
        missing: states that were asked for and are not in it (``strict=False`` only).
        ignored: folders that were passed over, with the reason.
        notes: differences between the saved and the loaded state; logged too.
        worker_seeds: see ``CheckpointContents``; empty where this rank has saved none.
    """

    path: Address
    step: int
    iteration: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    world_size: int | None = None
    manifest: Manifest | None = None
    missing: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    worker_seeds: tuple[tuple[int, int] | None, ...] = ()


def load(
    contents: CheckpointContents,
    directory: PathText | None = None,
    *,
    project: ProjectConfiguration | None = None,
    strict: bool = True,
    map_location: Any = None,
    load_kwargs: Mapping[str, Any] | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    before: Callable[[Path, Manifest | None], None] | None = None,
    ranks: CheckpointRankGroup | None = None,
    refuses_rewritten: bool = False,
) -> CheckpointLoadResult:
    """Load a checkpoint into ``contents`` on all ranks together.

    Everything is verified, looked up and compared before the first object is changed.

    Args:
        contents: the objects to fill, in the order they were saved. Other saved objects stay unread.
        directory: the checkpoint's folder or URL; None takes the newest committed one of ``project``
            (automatic naming).
        project: its ``iteration`` is set so that numbering continues after all checkpoints that are there.
        strict: a missing state is an error; otherwise its object stays as it is and is listed.
        map_location: ``"cpu"``, ``"on_device"`` or what ``torch.load`` takes; None is the CPU, but for
            optimizers this rank's device when there are several ranks. Models go to where they are, through
            mapped files.
        load_kwargs: more arguments of ``torch.load``.
        model_kwargs: more arguments of the models' ``load_state_dict``.
        before: called on every rank with the folder and its manifest, before ``contents.models`` is read.
        ranks: those that load together; the open world's by default.
        refuses_rewritten: weights that a program wrote anew after the save are an error, as damage is.

    Raises:
        CheckpointError: on every rank, naming the rank and the file, and what was expected.
        CheckpointNotFoundError: there is no checkpoint.
    """
    ranks = ranks or CheckpointRankGroup.current()
    action = "load a checkpoint" if directory is None else f"load the checkpoint {directory}"
    common_ids = ids_on_all_machines(project, ranks, action) if directory is None else None
    has_own_disk = project is not None and project.save_on_each_node
    chosen: CheckpointCandidate | None = None
    with ranks.collective_section(action) as section:
        async_save.wait()
        if ranks.rank == 0 or ranks.is_alone:
            chosen, ignored = discovery.choose_checkpoint(directory, project, common_ids)
            section.value = chosen.path, chosen.manifest.id if chosen.manifest else "", ignored
        elif directory is not None and has_own_disk and ranks.is_writer(each_node=True):
            discovery.recover(*discovery.locate(directory))  # a crash may have stopped its save alone
    rank0_address, id_, ignored = section.values[0]
    with ranks.collective_section(action):
        if chosen is None:
            store, name = discovery.locate(discovery.local_address(rank0_address, directory, project))
            chosen = CheckpointCandidate(store, name, read_manifest(store, name))
        own_id = chosen.manifest.id if chosen.manifest else ""
        if own_id != id_:
            raise CheckpointError(
                f"{chosen.path} is another checkpoint here than on rank 0",
                why=f"its save has the id {own_id or '(none)'}, rank 0's {id_ or '(none)'}",
                fix="copy the same checkpoint to every machine",
            )
    ranks.log("accelerator", "loading the checkpoint %s", chosen.path)
    location = resolve_map_location(map_location, "cpu")
    optimizer_location = resolve_map_location(map_location, "on_device" if ranks.size > 1 else "cpu")
    with (
        local_checkpoint(chosen, contents, ranks, action) as (path, fetched),
        ExitStack() as read_states,
    ):
        options = load_kwargs or {}, model_kwargs or {}, optimizer_location
        reader = TrainingStateReader(path, chosen.manifest, ranks, strict, location, *options)
        read_states.callback(reader.steps.clear)  # files are mapped until nothing refers to their states
        with ranks.collective_section(action) as section:
            section.value = [] if fetched is None else verify_files(path, fetched, ranks, refuses_rewritten)
        reader.notes += sorted(set(chain(*section.values)))
        with ranks.collective_section(action):
            if before is not None:
                before(path, chosen.manifest)
            reader.check_custom_count(contents)
            reader.read(contents)
        with reader.undone_on_error(), ranks.collective_section(action):
            reader.try_to_apply(contents)
        with ranks.collective_section(action):
            reader.apply()
        with ranks.collective_section(action):
            reader.finish(contents)
    if project is not None and project.automatic_checkpoint_naming:
        with ranks.collective_section(action) as section:
            section.value = 0
            if ranks.is_writer(project.save_on_each_node):
                section.value = discovery.next_iteration(chosen.name, chosen.manifest, project)
        project.iteration = max(section.values)
    return _report_result(reader, contents, chosen, ignored)


def ids_on_all_machines(
    project: ProjectConfiguration | None, ranks: CheckpointRankGroup, action: str
) -> set[str] | None:
    """Return the ids of the checkpoints that all machines have, where each saves its own.

    A crash in the middle of a commit leaves the newest on some of them. None if that does not matter.
    """
    if project is None or not (project.save_on_each_node and project.automatic_checkpoint_naming):
        return None
    with ranks.collective_section(action) as section:
        async_save.wait()
        section.value = discovery.committed_ids(project) if ranks.is_writer(each_node=True) else None
    return set.intersection(*(ids for ids in section.values if ids is not None))


def resolve_map_location(map_location: Any, default: Any) -> Any:
    """Return ``map_location`` for ``torch.load``; ``"on_device"`` is this rank's device, None ``default``."""
    place = default if map_location is None else map_location
    if not (isinstance(place, str) and place == "on_device"):
        return place
    world = worlds.current()
    return world.device if world is not None else torch.device("cpu")


def _report_result(
    reader: TrainingStateReader,
    contents: CheckpointContents,
    chosen: CheckpointCandidate,
    ignored: tuple[str, ...],
) -> CheckpointLoadResult:
    """Return the outcome of the load; rank 0 logs what was loaded, and what differed."""
    for each in contents.objects().values():
        if (each.category, each.index) not in reader.absent and each.category != "gradients":
            reader.ranks.log("checkpointing", "loaded %s (%s)", each.label, each.class_name)
    if reader.ranks.rank == 0:
        for note in reader.notes:
            logger.warning("%s: %s", chosen.path, note)
        if reader.missing:
            logger.warning("%s lacks, and leaves as they are: %s", chosen.path, ", ".join(reader.missing))
    manifest = reader.manifest
    return CheckpointLoadResult(
        path=chosen.path,
        step=manifest.step if manifest else reader.step or 0,
        worker_seeds=tuple(reader.worker_seeds),
        iteration=manifest.iteration if manifest else discovery.automatic_number(chosen.name),
        metadata=manifest.metadata if manifest else {},
        world_size=manifest.world_size if manifest else None,
        manifest=manifest,
        missing=tuple(reader.missing),
        ignored=ignored,
        notes=tuple(reader.notes),
    )


def verify_files(
    folder: Path, manifest: Manifest, ranks: CheckpointRankGroup, refuses_rewritten: bool = False
) -> list[str]:
    """Compare size and digest of this rank's share of the files with the manifest.

    The ranks of one machine share the work: each machine reads a checkpoint once, whatever disk it is on.
    Return a note on each file that a program wrote anew after the save, see ``discovery.is_rewritten``.

    Raises:
        CheckpointError: a file differs, or one other than random states is missing; names it and what was
            expected.
    """
    files = {
        name: record
        for name, record in manifest.files.items()
        if not name.startswith(f"{layout.RNG_STATE_NAME}_") or (folder / name).exists()
    }
    by_size = sorted(files.items(), key=lambda item: (-item[1].size, item[0]))
    local_share = dict(by_size[ranks.local_rank :: ranks.local_size])
    shows_progress = getattr(sys.stderr, "isatty", bool)()
    size = sum(record.size for record in local_share.values())
    notes: list[str] = []
    with ProgressBar("verifying the checkpoint", size) if shows_progress else nullcontext() as progress:
        on_read = None if progress is None else progress.advance
        for damage in find_damage(folder, local_share, manifest.hashing, on_read):
            if not refuses_rewritten and discovery.is_rewritten(folder, damage.name, manifest):
                notes.append(f"{damage.name} was written anew after save_state; loaded without verification")
                continue
            kind = MissingFileError if damage.size is None else CheckpointError
            raise kind(
                f"{folder / damage.name} is {damage.state}",
                why=damage.why,
                fix=layout.DAMAGE_FIX,
            )
    return notes


@contextmanager
def local_checkpoint(
    chosen: CheckpointCandidate, train_state: CheckpointContents, ranks: CheckpointRankGroup, action: str
) -> Generator[tuple[Path, Manifest | None]]:
    """Yield the checkpoint's files as a local folder, and the manifest of these files; all ranks call.

    The ranks of one machine fetch into one folder of it, each a share of the files. It is gone afterwards.

    Raises:
        CheckpointError: on every rank; a file cannot be fetched, or the local disk is too small.
    """
    store, folder, manifest = chosen.store, chosen.folder, chosen.manifest
    local = store.local_path(folder)
    if local is not None:
        yield local, manifest
        return
    target: Path | None = None
    nodes: list[tuple[int, Path | None]] = []
    try:
        with ranks.collective_section(action) as section:
            if ranks.local_rank == 0:
                target = Path(tempfile.mkdtemp(prefix="accelerate-fetch-"))
            section.value = ranks.node, target
        nodes = section.values
        first = ranks.rank if ranks.is_alone else 0
        ranks_here = [rank for rank, (node, _) in enumerate(nodes, first) if node == ranks.node]
        folder_here = next(path for node, path in nodes if node == ranks.node and path is not None)
        with ranks.collective_section(action):
            if manifest is None:
                file_sizes = store.files(folder)
            else:
                file_sizes = {file: record.size for file, record in manifest.files.items()}
            file_sizes = _needed_files(file_sizes, manifest, train_state, ranks_here, ranks.size)
            _refuse_too_large(store.label(chosen.name), file_sizes, folder_here)
            largest_first = sorted(file_sizes, key=lambda file: (-file_sizes[file], file))
            local_share = largest_first[ranks.local_rank :: ranks.local_size]
            _fetch(store, folder, local_share, folder_here, file_sizes)
        if manifest is not None:  # without the files that are not fetched
            manifest = replace(manifest, files={file: manifest.files[file] for file in file_sizes})
        yield folder_here, manifest
    except CheckpointError as error:
        message, reason = error.what, error.why
        for fetched_path in (str(path) for _, path in nodes if path is not None):
            message, reason = (text.replace(fetched_path, store.label(folder)) for text in (message, reason))
        AccelerateError.__init__(error, message, why=reason, fix=error.fix)
        raise
    finally:
        if target is not None:
            shutil.rmtree(target, ignore_errors=True)


def _needed_files(
    sizes: dict[str, int],
    manifest: Manifest | None,
    train_state: CheckpointContents,
    ranks_here: Iterable[int],
    size: int,
) -> dict[str, int]:
    """Return name and size of the files that a load by the ranks ``ranks_here`` of ``size`` may read."""
    wanted_ranks = {*ranks_here, 0}  # the random states of new ranks are derived from those of rank 0
    unrequested = set[str]()
    if manifest is not None and not train_state.own_files:  # these may read any file
        for category in ("models", "optimizers"):
            entries = manifest.parts.get(category, [])[len(getattr(train_state, category)) :]
            unrequested |= {entry.file for entry in entries}
    file_sizes: dict[str, int] = {}
    for file, file_size in sizes.items():
        match = _OF_RANK.fullmatch(file)
        if manifest is not None and manifest.world_size == size:  # others need the states of all ranks
            match = match or _RANK_STATE.fullmatch(file)
        top = file.partition("/")[0]  # the entry of a sharded state is its folder
        if top not in unrequested and (match is None or int(match[1] or match[2]) in wanted_ranks):
            file_sizes[file] = file_size
    return file_sizes


def _refuse_too_large(label: str, needed: dict[str, int], target: Path) -> None:
    with file_errors("look at", target):
        free = shutil.disk_usage(target).free
    size = sum(needed.values())
    if size > free:
        raise CheckpointError(
            f"cannot fetch {label}: {show_bytes(size)} are needed in {target.parent}",
            why=f"{show_bytes(free)} are free there",
            fix="set TMPDIR to a folder of a larger disk",
        )


def _fetch(
    store: CheckpointStorage, folder: str, files: list[str], target: Path, sizes: Mapping[str, int]
) -> None:
    for parent in {PurePosixPath(file).parent for file in files}:
        make_folder(target / parent)
    total = sum(sizes[file] for file in files)
    with ProgressBar("fetching the checkpoint", total) as progress, ThreadPoolExecutor(_AT_ONCE) as pool:
        fetched = [pool.submit(store.fetch, f"{folder}/{file}", target / file) for file in files]
        for future, file in zip(fetched, files, strict=True):
            future.result()
            progress.advance(sizes[file])
