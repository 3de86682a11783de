"""The reader of one checkpoint on one rank: it reads and compares everything, and then loads it."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import logging
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from accelerate.checkpoint import file_reads, layout, mapped_state, state_dict_files, torch_files
from accelerate.checkpoint.file_access import MissingFileError, file_digest, file_errors
from accelerate.checkpoint.layout import (
    KINDS,
    CheckpointContents,
    CheckpointLoadContext,
    CheckpointObject,
    Manifest,
    RankStateful,
    StatefulAdapter,
)
from accelerate.checkpoint.rank_group import CheckpointRankGroup
from accelerate.checkpoint.registered_objects import load_copy, select_rank_shards, writes_into
from accelerate.checkpoint.state_dict_files import (
    converts_states,
    copy_state,
    describe_model,
    describe_optimizer,
    describe_other_schedule,
    model_differences,
)
from accelerate.core import tree
from accelerate.core.errors import CheckpointError
from accelerate.core.units import ProgressBar
from accelerate.world import rng

logger = logging.getLogger(__name__)
# Errors that objects raise when a state does not fit them.
_REFUSALS = (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError)


@dataclass
class LoadStep:
    """The load of one state that was read.

    Attributes:
        action: in words, for errors.
        run: loads the state.
        phase: ``"trial"`` where an object may still refuse it: it is loaded first, and taken back if one is
            refused, on this rank or another. ``"load"`` where it fits, or is too large to be taken back.
            ``"last"`` for open gradients, which own files would clear, and then random states.
        source: its file or folder, whose size the progress bar counts.
        item, copy_of: the object of a trial, and the function that copies its state.
        writes_into_others: of a trial, the object may write into a model, which is loaded after it; once it
            was run, that it has done so, and is to be run again.
    """

    action: str
    run: Callable[[], Any]
    phase: Literal["trial", "load", "last"] = "load"
    source: Path | None = None
    item: Any = None
    copy_of: Callable[[Any], Any] = copy_state
    writes_into_others: bool = False


@dataclass
class TrainingStateReader:
    """A reader of one checkpoint for one rank.

    Attributes:
        folder: the checkpoint.
        manifest: None for one of the public package.
        ranks: those that load together.
        strict: a missing state is an error; otherwise it is listed in ``missing``.
        map_location: where torch files are loaded to, and
        optimizer_location: where those of optimizers are.
        load_kwargs: more arguments of ``torch.load``.
        model_kwargs: more arguments of the models' ``load_state_dict``.
        steps: what is to be loaded.
        missing, notes: what the caller should know.
        absent: the objects that are not in the checkpoint, by category and index.
        step: the step counter beside the random states.
    """

    folder: Path
    manifest: Manifest | None
    ranks: CheckpointRankGroup
    strict: bool = True
    map_location: Any = "cpu"
    load_kwargs: Mapping[str, Any] = field(default_factory=dict)
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    optimizer_location: Any = "cpu"
    steps: list[LoadStep] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    absent: set[tuple[str, int]] = field(default_factory=set)
    step: int | None = None
    worker_seeds: list[tuple[int, int] | None] = field(default_factory=list[tuple[int, int] | None])
    _saved_ranks: int = field(default=0, init=False)
    _undoing: ExitStack = field(default_factory=ExitStack, init=False)  # takes trials back

    def read(self, contents: CheckpointContents) -> None:
        """Read everything that ``contents`` asks for; change nothing yet.

        Raises:
            CheckpointError: a file is missing or cannot be read.
        """
        public_files = self.folder.glob(f"{layout.RNG_STATE_NAME}_*.pkl")  # of each rank that saved
        self._saved_ranks = self.manifest.world_size if self.manifest else len(list(public_files))
        for each in contents.objects().values():
            if self._read_sharded(each):
                continue
            if each.category == "models":
                self._read_model(each)
            elif each.category == "loaders":
                self._read_position(each, len(contents.stateful_loaders))
            elif each.category == "rng":
                self._read_rng(each)
            elif each.category in ("gradients", "rank_states", "rank_positions"):
                self._read_rank_files(each)
            else:
                self._read_torch_file(each)
        unread = self.manifest.loaders[len(contents.loaders) :] if self.manifest else []
        # A script that only evaluates prepares no optimizer.
        if contents.optimizers and any(_is_inside_epoch(position) for position in unread):
            self.notes.append(
                f"{len(unread)} loader(s) that were prepared when it was saved are not prepared now, so "
                "their positions inside of an epoch are not restored; prepare them before load_state"
            )
        for part in contents.own_files:
            compare = getattr(part, "compare", None)
            why = compare(self.folder) if compare is not None else ""
            if why:
                raise _refusal(f"load {part.name} from {self.folder}", why)

    @contextmanager
    def undone_on_error(self) -> Generator[None]:
        """Give the objects of trials their states back after an error, also if one refuses its own."""
        with self._undoing:  # calls all, whatever one of them raises
            yield
            self._undoing.pop_all()

    def try_to_apply(self, contents: CheckpointContents) -> None:
        """Load the states that can be taken back: of schedules, the scaler, loaders, the user's objects.

        Raises:
            CheckpointError: an object refuses its state.
        """
        for step in self.steps:
            if step.phase != "trial":
                continue
            with suppress(AttributeError, LookupError):  # it may have no state before it is loaded
                undo = partial(step.item.load_state_dict, step.copy_of(step.item.state_dict()))
                self._undoing.callback(_take_back, f"take back: {step.action}", undo)
            if step.writes_into_others:
                step.writes_into_others = writes_into(contents, partial(_attempt, step.action, step.run))
            else:
                _attempt(step.action, step.run)

    def apply(self) -> None:
        """Load the other states that were read, except for own files, open gradients and random states.

        Raises:
            CheckpointError: a file cannot be read any more.
        """
        shows_progress = getattr(sys.stderr, "isatty", bool)()
        steps = [step for step in self.steps if step.phase == "load"]
        steps += [step for step in self.steps if step.writes_into_others]
        sizes = [_size_of(step.source) if shows_progress and step.source else 0 for step in steps]
        with (
            ProgressBar("loading the checkpoint", sum(sizes)) if shows_progress else nullcontext()
        ) as progress:
            for step, size in zip(steps, sizes, strict=True):
                _attempt(step.action, step.run)
                if progress is not None:
                    progress.advance(size)

    def finish(self, contents: CheckpointContents) -> None:
        """Load folders of own files, then open gradients, which DeepSpeed would clear, and random states."""
        for part in contents.own_files:
            _attempt(f"load {part.name} from {self.folder}", partial(part.load, self.folder))
        for step in self.steps:
            if step.phase == "last":
                _attempt(step.action, step.run)

    def _report_missing(self, each: CheckpointObject, file: str, what: str) -> None:
        self.absent.add((each.category, each.index))
        if not self.strict:
            self.missing.append(f"{file} ({what})")
            return
        present = ", ".join(sorted(p.name for p in self.folder.iterdir()))
        raise MissingFileError(
            f"{self.folder / file} is missing",
            why=f"{what} was to be loaded from it; this checkpoint holds: {present}",
            fix="prepare the objects that were saved, or pass strict=False to leave this one as it is",
        )

    def _read_sharded(self, each: CheckpointObject) -> bool:
        """Return True if the object was saved sharded, after preparing its load."""
        if each.category not in ("models", "optimizers"):
            return False
        folder = self.folder / layout.file_name(f"sharded_{each.category}", each.index)
        if not folder.is_dir():
            return False
        label, sharded = f"{each.label} ({each.class_name})", each.sharded_state
        trusted = not self.load_kwargs.get("weights_only", True)
        context = CheckpointLoadContext(self.strict, trusted, self.model_kwargs, self.missing, self.notes)
        with file_errors("read", folder):
            if sharded is None:
                self._read_unsharded(each, folder, context)
            else:
                load = sharded.prepare_load(folder, context)
                self.steps.append(LoadStep(f"load {label} from {folder}", load, source=folder))
        return True

    def _read_unsharded(self, each: CheckpointObject, folder: Path, context: CheckpointLoadContext) -> None:
        """Add the load of a sharded state into an object that takes full states only (DeepSpeed)."""
        if not isinstance(each.item, StatefulAdapter):
            raise CheckpointError(
                f"{each.label} ({each.class_name}) cannot be loaded from {folder}",
                why="it was saved sharded, by parameter names",
                fix="save it whole, which every strategy reads: save_state(folder, sharded=False)",
            )
        item, template = each.item, each.item.template
        outline, read = _read_full_state(folder, each.category, context)
        if each.category == "optimizers":
            self._add_optimizer(each, folder, outline, lambda: item.load_state_dict(read()))
            return
        names = template() if template is not None else item.state_dict()
        outline = state_dict_files.fit_names(outline, {}, names)

        def load(**options: Any) -> Any:
            return item.load_state_dict(state_dict_files.fit_names(read(), {}, names), **options)

        self._add_model(each, folder, outline, names, load)

    def _read_model(self, each: CheckpointObject) -> None:
        model, index, label = each.item, each.index, f"{each.label} ({each.class_name})"
        safe = self.folder / layout.file_name("models", index)
        other = (layout.file_name("torch_models", index), layout.file_name("gathered_models", index))
        path = next((p for p in (safe, *(self.folder / name for name in other)) if p.is_file()), safe)
        if not path.is_file():
            self._report_missing(each, safe.name, label)
            return
        if self.manifest is not None and path.name not in self.manifest.files:
            self.notes.append(f"{path.name} was written after save_state; loaded without verification")
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
        untied = state_dict_files.find_untied(aliases, template) if aliases else {}
        for alias, name in untied.items():
            self.notes.append(f"{path.name} has {alias} tied to {name}; in this model they are two tensors")
        state = state_dict_files.fit_names(state, aliases, template)
        load = partial(file_reads.load_from_mapped, files, model.load_state_dict, state)
        self._add_model(each, path, state, template, load)

    def _add_model(
        self,
        each: CheckpointObject,
        source: Path,
        state: Mapping[str, Any],
        template: Mapping[str, Any],
        load: Callable[..., Any],
    ) -> None:
        """Compare a full state with the model that it is for, then add its load.

        Raises:
            CheckpointError: it does not fit.
        """
        item, action = each.item, f"load {each.label} ({each.class_name}) from {source}"
        options = dict(self.model_kwargs) if self.strict else {"strict": False, **self.model_kwargs}
        strict = options.get("strict", True)
        missing, surplus, shapes = model_differences(state, template)
        differs = missing or surplus or shapes
        why = describe_model(missing, surplus, shapes, strict=strict) if differs else ""
        adapted = isinstance(item, StatefulAdapter)
        if why and not converts_states(item.module if adapted else item):
            raise _refusal(action, why)
        if not strict:
            self.missing += [f"{name} (in {source.name})" for name in missing]
            self.notes += [f"{name} is in {source.name}, and not in this model" for name in surplus]
        phase = "trial" if why and not (adapted and item.template) else "load"
        self.steps.append(LoadStep(action, partial(load, **options), phase, source, item))

    def _read_torch_file(self, each: CheckpointObject) -> None:
        item, label = each.item, f"{each.label} ({each.class_name})"
        file = layout.file_name(each.category, each.index, self.ranks.rank)
        if KINDS[each.category].per_rank and not (self.folder / file).is_file():
            file = layout.file_name(each.category, each.index, 0)
        path = self.folder / file
        if not path.is_file():
            if each.category != "stateful_loaders":  # the position of the loader may be saved alone
                self._report_missing(each, file, label)
            return
        is_optimizer = each.category == "optimizers"
        keeps_shard = is_optimizer and isinstance(item, StatefulAdapter) and item.keeps_shard
        device = self.optimizer_location if is_optimizer and not keeps_shard else self.map_location
        if isinstance(each.item, RankStateful):  # earlier files have the states of all ranks in them
            device = "cpu"
        kwargs = {"map_location": device, **self.load_kwargs}
        may_map = is_optimizer and "mmap" not in kwargs
        inner = item.optimizer if isinstance(item, StatefulAdapter) else item
        load = getattr(inner, "load_state_dict", None)
        if may_map and mapped_state.can_map(path, kwargs["map_location"], load):
            mapped = mapped_state.MappedOptimizerState(path, **{**kwargs, "map_location": "cpu"})
            state, load = mapped.state, partial(mapped.load_into, item.load_state_dict, inner)
        elif may_map and keeps_shard:
            state = torch_files.read(path, mmap=True, **kwargs)
            load = partial(mapped_state.load_shard, item.load_state_dict, inner, state)
        else:
            state = torch_files.read(path, **kwargs)
            load = partial(item.load_state_dict, state)
            if each.category == "custom":
                state = select_rank_shards(state, self.ranks, f"{path} ({label})", item)
                load = partial(load_copy, item.load_state_dict, state)
        if each.category == "schedulers" and (other := describe_other_schedule(item, state)):
            self.notes.append(f"{label} takes the state of another kind of schedule: {other}")
        action = f"load {label} from {path}"
        if each.category == "custom" and isinstance(item, StatefulAdapter) and item.module is not None:
            item = item.module  # what a refused load gets back is its own state, which is not gathered
            each = dataclasses.replace(each, item=item)
        if each.category == "custom" and isinstance(item, nn.Module) and tree.is_mapping(state):
            self._add_model(each, path, state, item.state_dict(), load)
        elif is_optimizer or isinstance(item, torch.optim.Optimizer | StatefulAdapter):
            self._add_optimizer(each, path, state, load)
        else:
            # Asking a loader for its state, to take it back, may start its workers.
            phase = "load" if each.category == "stateful_loaders" else "trial"
            is_custom = each.category == "custom"
            self.steps.append(LoadStep(action, load, phase, path, item, writes_into_others=is_custom))

    def _add_optimizer(
        self, each: CheckpointObject, source: Path, state: Any, load: Callable[[], Any]
    ) -> None:
        """Compare a full state with the optimizer that it is for, then add its load.

        Raises:
            CheckpointError: it does not fit.
        """
        item, entries = each.item, self.manifest.parts.get(each.category, []) if self.manifest else []
        saved_class = entries[each.index].kind if each.index < len(entries) else ""
        why = ""
        if isinstance(item, torch.optim.Optimizer):
            sizes = [len(group["params"]) for group in item.param_groups]
            shapes = [p.shape for group in item.param_groups for p in group["params"]]
            why = describe_optimizer(item, sizes, state, saved_class=saved_class, shapes=shapes)
        elif isinstance(item, StatefulAdapter) and item.compare is not None:
            why = item.compare(state, saved_class)
        action = f"load {each.label} ({each.class_name}) from {source}"
        if why:
            raise _refusal(action, why)
        self.steps.append(LoadStep(action, load, source=source))

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

    def _read_position(self, each: CheckpointObject, stateful_count: int) -> None:
        saved = self.manifest.loaders if self.manifest else []
        if each.index < len(saved):
            load = partial(each.item.load_state_dict, saved[each.index])
            copy_of = partial(layout.to_plain, where=f"the position of {each.label}")
            action = f"put {each.label} to its position"
            self.steps.append(LoadStep(action, load, "trial", item=each.item, copy_of=copy_of))
        elif self.manifest is None:
            self.absent.add((each.category, each.index))
            file = layout.file_name("stateful_loaders", each.index)
            if not (self.folder / file).is_file():
                self.notes.append(f"the position of {each.label} is not saved: it starts anew")
            elif each.index >= stateful_count:
                self.notes.append(
                    f"{each.label} starts anew: its position is in {file}, which is loaded with "
                    "DataLoaderConfiguration(use_stateful_dataloader=True)"
                )
        else:
            self._report_missing(each, layout.MANIFEST_NAME, f"the position of {each.label}")

    def _read_rank_files(self, each: CheckpointObject) -> None:
        """Add the load of what each rank has saved; the object takes what this rank needs of it."""
        name_of = partial(layout.file_name, each.category, each.index)
        paths = [self.folder / name_of(rank) for rank in range(self._saved_ranks)]
        states: Sequence[Any] = ()
        # A machine with a checkpoint of its own has the files of its own ranks only.
        if any(path.is_file() for path in paths):
            states = torch_files.MappedStates(paths, self.load_kwargs)
            states[min(self.ranks.rank, len(paths) - 1)]  # may be damaged
        load = partial(each.item.load_state_dict, states, self.ranks.rank)
        phase = "last" if each.category == "gradients" else "load"
        self.steps.append(LoadStep(f"load the {each.label} from {self.folder}", load, phase))

    def _read_rng(self, each: CheckpointObject) -> None:
        rank, count = self.ranks.rank, self._saved_ranks
        path = self.folder / layout.file_name("rng", rank=rank)
        if path.exists():  # what is no file is refused
            # Generators take their states from the host, whatever device they are of.
            state = dict(torch_files.read(path, **{**self.load_kwargs, "map_location": "cpu"}))
            self.step, self.worker_seeds = state.pop("step", None), state.pop(layout.WORKER_SEEDS, [])
            note = "no random state is saved for the generator {}: it stays as it is"
            action = f"restore the random states of {path}"
            self.steps.append(
                LoadStep(action, lambda: self.notes.extend(map(note.format, rng.restore(state))), "last")
            )
        elif rank >= count > 0 and (self.folder / layout.file_name("rng", rank=0)).is_file():
            seed = partial(rng.set_seed, self._derive_seed(rank))
            self.steps.append(LoadStep(f"seed rank {rank}", seed, "last"))
        else:
            self.absent.add((each.category, each.index))
            self.missing.append(f"{path.name} ({KINDS['rng'].label} {rank})")
            if rank:  # rank 0 logs what is missing when all is loaded
                logger.warning("%s is missing: the random states of rank %d stay as they are", path, rank)
        if self.ranks.size != count > 0:
            self.notes.append(_describe_world_size(count, self.ranks.size))

    def _derive_seed(self, rank: int) -> int:
        """Return a seed from the saved state of rank 0, this rank and the world size alone."""
        text = f"{file_digest(self.folder / layout.file_name('rng', rank=0))}:{rank}:{self.ranks.size}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _is_inside_epoch(position: Mapping[str, Any]) -> bool:
    progress = position.get("in_progress")
    return bool(progress) and progress["active"] and not progress["complete"]


def _size_of(path: Path) -> int:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(file.stat().st_size for file in files)


def _attempt(what: str, function: Callable[[], Any]) -> None:
    try:
        function()
    except CheckpointError:
        raise
    except _REFUSALS as error:
        raise _refusal(what, f"{type(error).__name__}: {error}") from error


def _take_back(action: str, undo: Callable[[], Any]) -> None:
    try:
        _attempt(action, undo)
    except CheckpointError as refusal:
        logger.warning("%s: %s", refusal.what, refusal.why)


def _refusal(action: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"could not {action}",
        why=why,
        fix="prepare the same objects, in the same order, as when it was saved",
    )


def _describe_world_size(saved: int, now: int) -> str:
    text = f"saved by {saved} process(es), loaded by {now}: random states of "
    if now < saved:
        return text + f"rank {now} and above are not used"
    return text + f"rank {saved} and above are derived from those of rank 0"


def _read_full_state(
    folder: Path, category: str, context: CheckpointLoadContext
) -> tuple[dict[str, Any], Callable[[], Any]]:
    """Return (outline, function that reads a sharded state as a full one, on the host).

    For what takes no shards (DeepSpeed). The outline is the same state dict, of a model on the meta device,
    of an optimizer without its ``state``.

    Args:
        folder: the folder of the shards.
        category: ``"models"``, or ``"optimizers"``: then the state dict goes by parameter names, and the
            state of a parameter is read whenever it is asked for.
        context: whether reading may run code.

    Raises:
        CheckpointError: shards are missing.
    """
    from accelerate.checkpoint.dcp_files import (
        ShardFolderReader,
        lazy_param_state,
        optimizer_entries,
        read_nested,
    )
    from accelerate.checkpoint.sharded_state import entries_by_model_name

    shards = ShardFolderReader(folder, trusted=context.trusted)
    shards.check_files(shards.paths)
    if category == "models":
        entries = entries_by_model_name(shards, {})
        metadata = {name: shards.tensors.get(group[0]) for name, group in entries.items()}
        outline: dict[str, Any] = {
            name: None if entry is None else torch.empty(entry.size, device="meta")
            for name, entry in metadata.items()
        }
        return outline, lambda: {name: read_nested(shards, group, 2) for name, group in entries.items()}
    states, other = optimizer_entries(shards)
    outline = {**{key: read_nested(shards, group, 2) for key, group in other.items()}, "state": {}}
    by_name = {name: lazy_param_state(shards, group) for name, group in states.items()}
    return outline, lambda: {**outline, "state": by_name}
