"""Local files of a checkpoint: its own folder, or a temporary folder with the files that a load needs."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

from accelerate.checkpoint import layout
from accelerate.checkpoint.errors import file_errors
from accelerate.checkpoint.layout import Manifest
from accelerate.checkpoint.rank_group import CheckpointRankGroup
from accelerate.checkpoint.stateful import CheckpointContents
from accelerate.checkpoint.storage import CheckpointStorage
from accelerate.core.errors import AccelerateError, CheckpointError
from accelerate.core.units import show_bytes

_AT_ONCE = 8
_OF_RANK = re.compile(rf"{layout.RNG_STATE_NAME}_(\d+)\.pkl|{layout.LOADER_NAME}(?:_\d+)?_rank(\d+)\.bin")


@contextmanager
def local_checkpoint(
    store: CheckpointStorage,
    name: str,
    manifest: Manifest | None,
    train_state: CheckpointContents,
    ranks: CheckpointRankGroup,
    action: str,
) -> Generator[tuple[Path, Manifest | None]]:
    """Yield the checkpoint's files as a local folder, and the manifest of these files; all ranks call.

    The ranks of one machine fetch into one folder of it, each a share of the files. It is gone afterwards.

    Raises:
        CheckpointError: on every rank; a file cannot be fetched, or the local disk is too small.
    """
    folder = f"{name}/{manifest.folder}" if manifest is not None and manifest.folder else name
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
        ranks_here = [rank for rank, (node, _) in enumerate(nodes) if node == ranks.node]
        folder_here = next(path for node, path in nodes if node == ranks.node and path is not None)
        with ranks.collective_section(action):
            file_sizes = _needed_files(_sizes(store, folder, manifest), manifest, train_state, ranks_here)
            _refuse_too_large(store.label(name), file_sizes, folder_here)
            _fetch(store, folder, _local_share(file_sizes, ranks), folder_here)
        yield folder_here, _narrow_manifest(manifest, file_sizes)
    except CheckpointError as error:
        message, reason = error.what, error.why
        for fetched_path in (str(path) for _, path in nodes if path is not None):
            message, reason = (text.replace(fetched_path, store.label(folder)) for text in (message, reason))
        AccelerateError.__init__(error, message, why=reason, fix=error.fix)
        raise
    finally:
        if target is not None:
            shutil.rmtree(target, ignore_errors=True)


def _sizes(store: CheckpointStorage, folder: str, manifest: Manifest | None) -> dict[str, int]:
    """Return the size of every file of the checkpoint, by its name."""
    if manifest is None:
        return store.files(folder)
    return {file: record.size for file, record in manifest.files.items()}


def _needed_files(
    sizes: dict[str, int],
    manifest: Manifest | None,
    train_state: CheckpointContents,
    ranks_here: Iterable[int],
) -> dict[str, int]:
    """Return name and size of the files that a load by the ranks ``ranks_here`` may read."""
    wanted_ranks = {*ranks_here, 0}  # the random states of new ranks are derived from those of rank 0
    unrequested = _unrequested_files(manifest, train_state) if manifest is not None else set[str]()
    file_sizes: dict[str, int] = {}
    for file, size in sizes.items():
        match = _OF_RANK.fullmatch(file)
        if file not in unrequested and (match is None or int(match[1] or match[2]) in wanted_ranks):
            file_sizes[file] = size
    return file_sizes


def _unrequested_files(manifest: Manifest, train_state: CheckpointContents) -> set[str]:
    """Return files of models and optimizers that the load does not ask for."""
    if train_state.own_files:
        return set()  # these may read any file
    return {
        entry.file
        for category in ("models", "optimizers")
        for entry in manifest.parts.get(category, [])[len(getattr(train_state, category)) :]
    }


def _narrow_manifest(manifest: Manifest | None, needed: dict[str, int]) -> Manifest | None:
    """Return the manifest without the files that are not fetched."""
    if manifest is None:
        return None
    return replace(manifest, files={file: manifest.files[file] for file in needed})


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


def _local_share(needed: dict[str, int], ranks: CheckpointRankGroup) -> list[str]:
    """Return the files that this rank fetches for its machine, the largest first."""
    by_size = sorted(needed, key=lambda file: (-needed[file], file))
    return by_size[ranks.local_rank :: ranks.local_size]


def _fetch(store: CheckpointStorage, folder: str, files: list[str], target: Path) -> None:
    for parent in {PurePosixPath(file).parent for file in files}:
        with file_errors("make the folder", target / parent):
            (target / parent).mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(partial(_fetch_one, store, folder, target), files):
            pass


def _fetch_one(store: CheckpointStorage, folder: str, target: Path, file: str) -> None:
    store.fetch(f"{folder}/{file}", target / file)
