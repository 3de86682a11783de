"""Loading: from a checkpoint to objects. Everything is checked first, then loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from accelerate.checkpoint import async_save, discovery
from accelerate.checkpoint.checkpoint_fetch import local_checkpoint
from accelerate.checkpoint.discovery import Address, ProjectConfiguration
from accelerate.checkpoint.durable_file import file_digests
from accelerate.checkpoint.errors import file_errors
from accelerate.checkpoint.layout import Manifest
from accelerate.checkpoint.rank_group import CheckpointRankGroup
from accelerate.checkpoint.state_reader import TrainingStateReader
from accelerate.checkpoint.stateful import CheckpointContents
from accelerate.checkpoint.storage import CheckpointStorage, read_manifest
from accelerate.core.errors import CheckpointError
from accelerate.core.value_types import PathText
from accelerate.world import world as worlds

logger = logging.getLogger(__name__)


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
    check_digests: bool = True,
    ranks: CheckpointRankGroup | None = None,
) -> CheckpointLoadResult:
    """Load a checkpoint into ``contents`` on all ranks together.

    Everything is verified, looked up and compared before the first object is changed.

    Args:
        contents: the objects to fill, in the order they were saved. Other saved objects stay unread.
        directory: the checkpoint's folder or URL; None takes the newest committed one of ``project``
            (automatic naming).
        project: its ``iteration`` is set so that numbering continues after all checkpoints that are there.
        strict: a missing state is an error; otherwise its object stays as it is and is listed.
        map_location: ``"cpu"``, ``"on_device"`` or what ``torch.load`` takes; None is this rank's device when
            there are several ranks, else the CPU. Models go to where they are, through mapped files.
        load_kwargs: more arguments of ``torch.load``.
        model_kwargs: more arguments of the models' ``load_state_dict``.
        before: called on every rank with the folder and its manifest, before ``contents.models`` is read.
        check_digests: compare digests with the manifest; sizes are always compared.
        ranks: those that load together; the open world's by default.

    Raises:
        CheckpointError: on every rank, naming the rank and the file, and what was expected.
        CheckpointNotFoundError: there is no checkpoint.
    """
    ranks = ranks or CheckpointRankGroup.current()
    action = "load a checkpoint" if directory is None else f"load the checkpoint {directory}"
    common_ids = _ids_on_all_machines(project, ranks, action) if directory is None else None
    with ranks.collective_section(action) as section:
        async_save.wait()
        if ranks.rank == 0:
            chosen, ignored = discovery.choose_checkpoint(directory, project, common_ids)
            section.value = chosen.path, chosen.manifest.id if chosen.manifest else "", ignored
    rank0_address, id_, ignored = section.values[0]
    with ranks.collective_section(action):
        store, name = discovery.locate(discovery.local_address(rank0_address, directory, project))
        manifest = _same_manifest(store, name, id_)
    ranks.log("accelerator", "loading the checkpoint %s", store.label(name))
    location = resolve_map_location(map_location, "on_device" if ranks.size > 1 else "cpu")
    with (
        local_checkpoint(store, name, manifest, contents, ranks, action) as (path, fetched),
        closing(
            TrainingStateReader(
                path, manifest, ranks, strict, location, load_kwargs or {}, model_kwargs or {}
            )
        ) as reader,
    ):
        with ranks.collective_section(action):
            if fetched is not None and check_digests:
                verify_files(path, fetched, ranks)
        with ranks.collective_section(action):
            if before is not None:
                before(path, manifest)
            reader.check_custom_count(contents)
            reader.read(contents)
        with reader.undone_on_error(), ranks.collective_section(action):
            reader.try_to_apply()
        with ranks.collective_section(action):
            reader.apply()
        with ranks.collective_section(action):
            reader.finish(contents)
    for each in contents.objects().values():
        is_missing = any(text.endswith(f"({each.label})") for text in reader.missing)
        if not is_missing and each.category != "gradients":
            ranks.log("checkpointing", "loaded %s (%s)", each.label, each.class_name)
    if project is not None and project.automatic_checkpoint_naming:
        with ranks.collective_section(action) as section:
            section.value = 0
            if ranks.is_writer(project.save_on_each_node):
                section.value = discovery.next_iteration(name, manifest, project)
        project.iteration = max(section.values)
    address = store.local_path(name) or store.label(name)
    return _report_result(reader, address, name, ignored)


def _ids_on_all_machines(
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


def _same_manifest(store: CheckpointStorage, name: str, id_: str) -> Manifest | None:
    """Read this rank's manifest, and raise if it is not that of the checkpoint that rank 0 chose."""
    manifest = read_manifest(store, name)
    own_id = manifest.id if manifest else ""
    if own_id != id_:
        raise CheckpointError(
            f"{store.label(name)} is another checkpoint here than on rank 0",
            why=f"its save has the id {own_id or '(none)'}, rank 0's {id_ or '(none)'}",
            fix="copy the same checkpoint to every machine",
        )
    return manifest


def resolve_map_location(map_location: Any, default: Any) -> Any:
    """Return ``map_location`` for ``torch.load``; ``"on_device"`` is this rank's device, None ``default``."""
    place = default if map_location is None else map_location
    if not (isinstance(place, str) and place == "on_device"):
        return place
    world = worlds.current()
    return world.device if world is not None else torch.device("cpu")


def _report_result(
    reader: TrainingStateReader, address: Address, name: str, ignored: tuple[str, ...]
) -> CheckpointLoadResult:
    """Return the outcome of the load; rank 0 logs what differed."""
    if reader.ranks.rank == 0:
        for note in reader.notes:
            logger.warning("%s: %s", address, note)
        if reader.missing:
            logger.warning("%s lacks, and leaves as they are: %s", address, ", ".join(reader.missing))
    manifest = reader.manifest
    return CheckpointLoadResult(
        path=address,
        step=manifest.step if manifest else reader.step or 0,
        iteration=manifest.iteration if manifest else discovery.automatic_number(name),
        metadata=manifest.metadata if manifest else {},
        world_size=manifest.world_size if manifest else None,
        manifest=manifest,
        missing=tuple(reader.missing),
        ignored=ignored,
        notes=tuple(reader.notes),
    )


def verify_files(folder: Path, manifest: Manifest, ranks: CheckpointRankGroup) -> None:
    """Compare size and digest of this rank's share of the files with the manifest.

    The ranks of one machine share the work: each machine reads a checkpoint once, whatever disk it is on.

    Raises:
        CheckpointError: a file is missing or differs; names it and what was expected.
    """
    by_size = sorted(manifest.files.items(), key=lambda item: (-item[1].size, item[0]))
    local_share = {folder / name: record for name, record in by_size[ranks.local_rank :: ranks.local_size]}
    for path, record in local_share.items():
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing", why=f"it was saved by rank {record.rank} with {record.size} bytes"
            )
        size = path.stat().st_size
        if size != record.size:
            raise CheckpointError(f"{path} is damaged", why=f"it has {size} bytes, expected {record.size}")
    with file_errors("read", folder):
        actual_digests = file_digests(list(local_share), manifest.hashing)
    for (path, record), actual in zip(local_share.items(), actual_digests, strict=True):
        if actual != record.digest:
            raise CheckpointError(
                f"{path} is damaged",
                why=f"its digest is {actual[:16]}..., expected {record.digest[:16]}... ({manifest.hashing})",
                fix="load another checkpoint; nothing was changed",
            )
