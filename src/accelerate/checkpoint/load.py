"""Loading: from a checkpoint to objects. Everything is checked first, then loaded."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accelerate.checkpoint import discovery, file_reads, layout, state_dict_files, torch_files
from accelerate.checkpoint.checkpoint_fetch import local_checkpoint
from accelerate.checkpoint.discovery import Address, ProjectConfiguration
from accelerate.checkpoint.durable_file import file_digest, file_digests
from accelerate.checkpoint.errors import file_errors
from accelerate.checkpoint.layout import Manifest
from accelerate.checkpoint.rank_group import CheckpointRankGroup
from accelerate.checkpoint.stateful import (
    KINDS,
    CheckpointContents,
    CheckpointLoadContext,
    CheckpointObject,
    RNGStates,
    StatefulAdapter,
)
from accelerate.checkpoint.storage import CheckpointStorage, read_manifest
from accelerate.core.errors import CheckpointError
from accelerate.world import world as worlds

# Errors that objects raise when a state does not fit them.
_REFUSALS = (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError)

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
    directory: str | Path | None = None,
    *,
    project: ProjectConfiguration | None = None,
    strict: bool = True,
    map_location: Any = None,
    load_kwargs: Mapping[str, Any] | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    before: Callable[[Path], None] | None = None,
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
        before: called on every rank with the folder, before ``contents.models`` is read.
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
        if ranks.rank == 0:
            chosen, ignored = discovery.choose_checkpoint(directory, project, common_ids)
            section.value = chosen.path, chosen.manifest.id if chosen.manifest else "", ignored
    rank0_address, id_, ignored = section.values[0]
    with ranks.collective_section(action):
        store, name = discovery.locate(discovery.local_address(rank0_address, directory, project))
        manifest = _same_manifest(store, name, id_)
    location = resolve_map_location(map_location, "on_device" if ranks.size > 1 else "cpu")
    with local_checkpoint(store, name, manifest, contents, ranks, action) as (path, fetched):
        reader = TrainingStateReader(
            path, manifest, ranks, strict, location, load_kwargs or {}, model_kwargs or {}
        )
        with ranks.collective_section(action):
            if fetched is not None and check_digests:
                verify_files(path, fetched, ranks)
        with ranks.collective_section(action):
            if before is not None:
                before(path)
            reader.check_custom_count(contents)
            reader.read(contents)
        with ranks.collective_section(action):
            reader.apply()
        with ranks.collective_section(action):
            reader.finish(contents)
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


@dataclass
class TrainingStateReader:
    """A reader of one checkpoint for one rank.

    Attributes:
        folder: the checkpoint.
        manifest: None for one of the public package.
        ranks: those that load together.
        strict: a missing state is an error; otherwise it is listed in ``missing``.
        map_location: where torch files are loaded to.
        load_kwargs: more arguments of ``torch.load``.
        model_kwargs: more arguments of the models' ``load_state_dict``.
        pending: states that are read and not yet loaded: (description, function).
        pending_rng: the same for random states, which are loaded last.
        missing, notes: what the caller should know.
        step: the step counter beside the random states.
    """

    folder: Path
    manifest: Manifest | None
    ranks: CheckpointRankGroup
    strict: bool = True
    map_location: Any = "cpu"
    load_kwargs: Mapping[str, Any] = field(default_factory=dict)
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    pending: list[tuple[str, Callable[[], Any]]] = field(default_factory=list)
    pending_rng: list[tuple[str, Callable[[], Any]]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    step: int | None = None

    def read(self, contents: CheckpointContents) -> None:
        """Read everything that ``contents`` asks for; change nothing yet.

        Raises:
            CheckpointError: a file is missing or cannot be read.
        """
        for each in contents.objects().values():
            if self._read_sharded(each):
                continue
            if each.category == "models":
                self._read_model(each)
            elif each.category == "loaders":
                self._read_position(each)
            elif each.category == "rng":
                self._read_rng(contents.rng)
            else:
                self._read_torch_file(each)

    def apply(self) -> None:
        """Load the states that were read, except for own files and random states.

        Raises:
            CheckpointError: an object refuses its state; those before it have theirs already.
        """
        for action, function in self.pending:
            _attempt(action, function)

    def finish(self, contents: CheckpointContents) -> None:
        """Load folders of own files, then random states: nothing draws a number after."""
        for part in contents.own_files:
            _attempt(f"load {part.name} from {self.folder}", partial(part.load, self.folder))
        for action, function in self.pending_rng:
            _attempt(action, function)

    def _report_missing(self, file: str, what: str) -> None:
        if not self.strict:
            self.missing.append(f"{file} ({what})")
            return
        present = ", ".join(sorted(p.name for p in self.folder.iterdir()))
        raise CheckpointError(
            f"{self.folder / file} is missing",
            why=f"{what} was to be loaded from it; this checkpoint holds: {present}",
            fix="prepare the objects that were saved, or pass strict=False to leave this one as it is",
        )

    def _read_sharded(self, each: CheckpointObject) -> bool:
        """Return True if the object was saved sharded, after preparing its load."""
        if each.category not in ("models", "optimizers"):
            return False
        folder = self.folder / layout.sharded_folder(each.category, each.index)
        if not folder.is_dir():
            return False
        label, sharded = f"{each.label} ({each.class_name})", each.sharded_state
        trusted = not self.load_kwargs.get("weights_only", True)
        context = CheckpointLoadContext(self.strict, trusted, self.model_kwargs, self.missing, self.notes)
        with file_errors("read", folder):
            load = (
                self._read_unsharded(each, folder, context)
                if sharded is None
                else sharded.prepare_load(folder, context)
            )
            self.pending.append((f"load {label} from {folder}", load))
        return True

    def _read_unsharded(
        self, each: CheckpointObject, folder: Path, context: CheckpointLoadContext
    ) -> Callable[[], Any]:
        """Return a function that loads a sharded state into what takes full states only (DeepSpeed)."""
        if not isinstance(each.item, StatefulAdapter):
            raise CheckpointError(
                f"{each.label} ({each.class_name}) cannot be loaded from {folder}",
                why="it was saved sharded, by parameter names",
                fix="save it whole, which every strategy reads: save_state(folder, sharded=False)",
            )
        from accelerate.checkpoint.sharded_state import read_full_state

        read, item, template = read_full_state(folder, each.category, context), each.item, each.item.template
        if each.category == "optimizers":
            return lambda: item.load_state_dict(read())
        names = template() if template is not None else item.state_dict()
        return lambda: item.load_state_dict(
            state_dict_files.fit_names(read(), {}, names), **self.model_kwargs
        )

    def _read_model(self, each: CheckpointObject) -> None:
        model, index, label = each.item, each.index, f"{each.label} ({each.class_name})"
        safe = self.folder / layout.model_file(index, safe=True)
        other = (layout.model_file(index, safe=False), layout.gathered_file(index))
        path = next((p for p in (safe, *(self.folder / name for name in other)) if p.is_file()), safe)
        if not path.is_file():
            self._report_missing(safe.name, label)
            return
        if path is safe:
            with file_errors("read", safe):
                state, aliases = state_dict_files.read_safetensors(safe)
                files = [file_reads.MappedTensorAddresses.create(safe, state)]
        else:
            kwargs = {"map_location": "cpu", "mmap": True, **self.load_kwargs}
            state, aliases, files = torch_files.read(path, **kwargs), {}, []
        if self.model_kwargs.get("assign"):  # the model keeps them: then they must not stay mapped
            state = {name: copy.deepcopy(value) for name, value in state.items()}
        template = (
            model.template() if isinstance(model, StatefulAdapter) and model.template else model.state_dict()
        )
        for alias, name in state_dict_files.find_untied(aliases, template).items():
            self.notes.append(f"{path.name} has {alias} tied to {name}; in this model they are two tensors")
        state = state_dict_files.fit_names(state, aliases, template)
        function = partial(
            file_reads.load_from_mapped, files, model.load_state_dict, state, **self.model_kwargs
        )
        self.pending.append((f"load {label} from {path}", function))

    def _read_torch_file(self, each: CheckpointObject) -> None:
        assert each.kind.file is not None
        item, label = each.item, f"{each.label} ({each.class_name})"
        file = each.kind.file(each.index, self.ranks.rank)
        if each.kind.per_rank and not (self.folder / file).is_file():
            file = each.kind.file(each.index, 0)
        path = self.folder / file
        if not path.is_file():
            self._report_missing(file, label)
            return
        kwargs = {"map_location": self.map_location, **self.load_kwargs}
        if (
            each.category == "optimizers"
            and "mmap" not in kwargs
            and torch_files.can_map(path, kwargs["map_location"])
        ):
            load = partial(torch_files.MappedOptimizerState(path, **kwargs).load_into, item.load_state_dict)
        else:
            load = partial(item.load_state_dict, torch_files.read(path, **kwargs))
        self.pending.append((f"load {label} from {path}", load))

    def check_custom_count(self, contents: CheckpointContents) -> None:
        """Refuse a number of registered objects that differs from the saved number.

        Raises:
            CheckpointError: it differs, and loading is strict.
        """
        saved, now = len(list(self.folder.glob(f"{layout.CUSTOM_NAME}_*.pkl"))), len(contents.custom)
        if saved != now and self.strict:
            raise CheckpointError(
                f"{self.folder} holds {saved} registered object(s), but {now} are registered now",
                fix="register the same objects, in the same order, with register_for_checkpointing, or pass "
                "strict=False",
            )

    def _read_position(self, each: CheckpointObject) -> None:
        saved = self.manifest.loaders if self.manifest else []
        if each.index < len(saved):
            load = partial(each.item.load_state_dict, saved[each.index])
            self.pending.append((f"put {each.label} to its position", load))
        elif self.manifest is None:
            self.notes.append(f"the position of {each.label} is not saved: it starts anew")
        else:
            self._report_missing(layout.MANIFEST_NAME, f"the position of {each.label}")

    def _read_rng(self, rng: RNGStates | None) -> None:
        assert rng is not None
        rank = self.ranks.rank
        path = self.folder / layout.rng_file(rank)
        count = self.manifest.world_size if self.manifest else self._rng_count()
        if path.is_file():
            # Generators take their states from the host, whatever device they are of.
            state = dict(torch_files.read(path, **{**self.load_kwargs, "map_location": "cpu"}))
            self.step = state.pop("step", None)
            self.pending_rng.append(
                (f"restore the random states of {path}", partial(self._restore_rng, rng, state))
            )
        elif rank >= count > 0:
            self.pending_rng.append((f"seed rank {rank}", partial(rng.set_seed, self._derive_seed(rank))))
        else:
            self._report_missing(path.name, f"{KINDS['rng'].label} {rank}")
        if self.ranks.size != count > 0:
            self.notes.append(_describe_world_size(count, self.ranks.size))

    def _restore_rng(self, rng: RNGStates, state: Mapping[str, Any]) -> None:
        for name in rng.restore(state):
            self.notes.append(f"no random state is saved for the generator {name}: it stays as it is")

    def _rng_count(self) -> int:
        return len(list(self.folder.glob(f"{layout.RNG_STATE_NAME}_*.pkl")))

    def _derive_seed(self, rank: int) -> int:
        """Return a seed from the saved state of rank 0, this rank and the world size alone."""
        text = f"{file_digest(self.folder / layout.rng_file(0))}:{rank}:{self.ranks.size}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _attempt(what: str, function: Callable[[], Any]) -> None:
    try:
        function()
    except CheckpointError:
        raise
    except _REFUSALS as error:
        raise CheckpointError(
            f"could not {what}",
            why=f"{type(error).__name__}: {error}",
            fix="prepare the same objects, in the same order, as when it was saved",
        ) from error


def _describe_world_size(saved: int, now: int) -> str:
    text = f"saved by {saved} process(es), loaded by {now}: random states of "
    if now < saved:
        return text + f"rank {now} and above are not used"
    return text + f"rank {saved} and above are derived from those of rank 0"
