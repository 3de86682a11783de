"""A checkpoint as files of this machine: where it lies, or what is needed of it in a temporary folder."""

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

from accelerate.checkpoint import names
from accelerate.checkpoint.errors import file_errors
from accelerate.checkpoint.manifest import Manifest
from accelerate.checkpoint.parts import Parts
from accelerate.checkpoint.ranks import Ranks
from accelerate.checkpoint.store import Store
from accelerate.core.errors import AccelerateError, CheckpointError
from accelerate.core.units import show_bytes

_AT_ONCE = 8
_OF_RANK = re.compile(rf"{names.RNG_STATE_NAME}_(\d+)\.pkl|{names.LOADER_NAME}(?:_\d+)?_rank(\d+)\.bin")


@contextmanager
def near(
    store: Store, name: str, manifest: Manifest | None, parts: Parts, ranks: Ranks, doing: str
) -> Generator[tuple[Path, Manifest | None]]:
    """The checkpoint's files as a local folder, and the manifest of those that are in it; all ranks call.

    The ranks of one machine fetch into one folder of it, each a share of the files. It is gone afterwards.

    Raises:
        CheckpointError: on every rank; a file cannot be fetched, or the local disk is too small.
    """
    folder = f"{name}/{manifest.folder}" if manifest is not None and manifest.folder else name
    local = store.local(folder)
    if local is not None:
        yield local, manifest
        return
    target: Path | None = None
    nodes: list[tuple[int, Path | None]] = []
    try:
        with ranks.together(doing) as shared:
            if ranks.local_rank == 0:
                target = Path(tempfile.mkdtemp(prefix="accelerate-fetch-"))
            shared.value = ranks.node, target
        nodes = shared.values
        here = [rank for rank, (node, _) in enumerate(nodes) if node == ranks.node]
        folder_here = next(path for node, path in nodes if node == ranks.node and path is not None)
        with ranks.together(doing):
            needed = _needed(_sizes(store, folder, manifest), manifest, parts, here)
            _refuse_too_large(store.label(name), needed, folder_here)
            _fetch(store, folder, _share(needed, ranks), folder_here)
        yield folder_here, _narrowed(manifest, needed)
    except CheckpointError as error:
        what, why = error.what, error.why
        for fetched in (str(path) for _, path in nodes if path is not None):
            what, why = (text.replace(fetched, store.label(folder)) for text in (what, why))
        AccelerateError.__init__(error, what, why=why, fix=error.fix)
        raise
    finally:
        if target is not None:
            shutil.rmtree(target, ignore_errors=True)


def _sizes(store: Store, folder: str, manifest: Manifest | None) -> dict[str, int]:
    """Size of every file of the checkpoint, by its name."""
    if manifest is None:
        return store.files(folder)
    return {file: record.size for file, record in manifest.files.items()}


def _needed(
    sizes: dict[str, int], manifest: Manifest | None, parts: Parts, here: Iterable[int]
) -> dict[str, int]:
    """Name and size of what a load of ``parts`` by the ranks ``here`` may read."""
    wanted = {*here, 0}  # the random states of new ranks are derived from those of rank 0
    unasked = _unasked(manifest, parts) if manifest is not None else set[str]()
    needed: dict[str, int] = {}
    for file, size in sizes.items():
        match = _OF_RANK.fullmatch(file)
        if file not in unasked and (match is None or int(match[1] or match[2]) in wanted):
            needed[file] = size
    return needed


def _unasked(manifest: Manifest, parts: Parts) -> set[str]:
    """Files of models and optimizers that nobody asks for: who loads weights alone fetches weights alone."""
    if parts.own_files:
        return set()  # these read what they like
    return {
        entry.file
        for sort in ("models", "optimizers")
        for entry in manifest.parts.get(sort, [])[len(getattr(parts, sort)) :]
    }


def _narrowed(manifest: Manifest | None, needed: dict[str, int]) -> Manifest | None:
    """The manifest without files that are not fetched."""
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


def _share(needed: dict[str, int], ranks: Ranks) -> list[str]:
    """What this rank fetches for its machine, the largest first."""
    by_size = sorted(needed, key=lambda file: (-needed[file], file))
    return by_size[ranks.local_rank :: ranks.local_size]


def _fetch(store: Store, folder: str, files: list[str], target: Path) -> None:
    for parent in {PurePosixPath(file).parent for file in files}:
        with file_errors("make the folder", target / parent):
            (target / parent).mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(partial(_fetch_one, store, folder, target), files):
            pass


def _fetch_one(store: Store, folder: str, target: Path, file: str) -> None:
    store.fetch(f"{folder}/{file}", target / file)
