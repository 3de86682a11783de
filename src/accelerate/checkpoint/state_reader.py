"""From files to objects: everything is checked first, then loaded."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.checkpoint import (
    mapped_optimizer_state,
    names,
    parallel_file_reads,
    pickles,
    state_dict_files,
)
from accelerate.checkpoint.digest import file_digest, file_digests
from accelerate.checkpoint.errors import file_errors
from accelerate.checkpoint.manifest import Manifest
from accelerate.checkpoint.rank_group import CheckpointRankGroup
from accelerate.checkpoint.stateful_protocols import (
    OBJECT_FILES,
    CheckpointContents,
    CheckpointLoadContext,
    RNGStates,
    StatefulAdapter,
    class_name,
    describe_object,
    sharded_state_of,
)
from accelerate.core.errors import CheckpointError

# Errors that objects raise when a state does not fit them.
_REFUSALS = (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError)


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

    def read(self, train_state: CheckpointContents) -> None:
        """Read everything that ``train_state`` asks for; change nothing yet.

        Raises:
            CheckpointError: a file is missing or cannot be read.
        """
        for index, model in enumerate(train_state.models):
            if not self._read_sharded("models", model, index):
                self._read_model(model, index)
        for category, file in OBJECT_FILES.items():
            for index, item in enumerate(getattr(train_state, category)):
                if category != "optimizers" or not self._read_sharded(category, item, index):
                    self._read_torch_file(category, index, item, file(index))
        if train_state.scaler is not None:
            self._read_torch_file("scaler", 0, train_state.scaler, names.SCALER_NAME)
        for index, loader in enumerate(train_state.stateful_loaders):
            self._read_torch_file("stateful_loaders", index, loader, self._loader_file(index))
        self._read_positions(train_state)
        self._read_rng(train_state)

    def apply(self) -> None:
        """Load the states that were read, except for own files and random states.

        Raises:
            CheckpointError: an object refuses its state; those before it have theirs already.
        """
        for action, function in self.pending:
            _attempt(action, function)

    def finish(self, train_state: CheckpointContents) -> None:
        """Load folders of own files, then random states: nothing draws a number after."""
        for part in train_state.own_files:
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

    def _read_sharded(self, category: str, item: Any, index: int) -> bool:
        """Return True if the object was saved sharded, after preparing its load."""
        folder = self.folder / names.sharded_folder(category, index)
        if not folder.is_dir():
            return False
        label, sharded = f"{describe_object(category, index)} ({class_name(item)})", sharded_state_of(item)
        if sharded is None:
            raise CheckpointError(
                f"{label} cannot be loaded from {folder}",
                why="it was saved sharded, by parameter names",
                fix="save it whole, which every strategy reads: save_state(folder, sharded=False)",
            )
        trusted = not self.load_kwargs.get("weights_only", True)
        context = CheckpointLoadContext(self.strict, trusted, self.model_kwargs, self.missing, self.notes)
        with file_errors("read", folder):
            self.pending.append((f"load {label} from {folder}", sharded.prepare_load(folder, context)))
        return True

    def _read_model(self, model: Any, index: int) -> None:
        label = f"{describe_object('models', index)} ({class_name(model)})"
        safe = self.folder / names.model_file(index, safe=True)
        other = (names.model_file(index, safe=False), names.gathered_file(index))
        path = next((p for p in (safe, *(self.folder / name for name in other)) if p.is_file()), safe)
        if not path.is_file():
            self._report_missing(safe.name, label)
            return
        if path is safe:
            with file_errors("read", safe):
                state, aliases = state_dict_files.read_safetensors(safe)
                files = [parallel_file_reads.MappedTensorAddresses.create(safe, state)]
        else:
            kwargs = {"map_location": "cpu", "mmap": True, **self.load_kwargs}
            state, aliases, files = pickles.read(path, **kwargs), {}, []
        if self.model_kwargs.get("assign"):  # the model keeps them: then they must not stay mapped
            state = {name: copy.deepcopy(value) for name, value in state.items()}
        template = (
            model.template() if isinstance(model, StatefulAdapter) and model.template else model.state_dict()
        )
        for alias, name in state_dict_files.find_untied(aliases, template).items():
            self.notes.append(f"{path.name} has {alias} tied to {name}; in this model they are two tensors")
        state = state_dict_files.fit_names(state, aliases, template)
        function = partial(
            parallel_file_reads.load_from_mapped, files, model.load_state_dict, state, **self.model_kwargs
        )
        self.pending.append((f"load {label} from {path}", function))

    def _read_torch_file(self, category: str, index: int, item: Any, file: str) -> None:
        label = f"{describe_object(category, index)} ({class_name(item)})"
        path = self.folder / file
        if not path.is_file():
            self._report_missing(file, label)
            return
        kwargs = {"map_location": self.map_location, **self.load_kwargs}
        if (
            category == "optimizers"
            and "mmap" not in kwargs
            and mapped_optimizer_state.can_map(path, kwargs["map_location"])
        ):
            load = partial(
                mapped_optimizer_state.MappedOptimizerState(path, **kwargs).load_into, item.load_state_dict
            )
        else:
            load = partial(item.load_state_dict, pickles.read(path, **kwargs))
        self.pending.append((f"load {label} from {path}", load))

    def check_custom_count(self, train_state: CheckpointContents) -> None:
        """Refuse a number of registered objects that differs from the saved number.

        Raises:
            CheckpointError: it differs, and loading is strict.
        """
        saved, now = len(list(self.folder.glob(f"{names.CUSTOM_NAME}_*.pkl"))), len(train_state.custom)
        if saved != now and self.strict:
            raise CheckpointError(
                f"{self.folder} holds {saved} registered object(s), but {now} are registered now",
                fix="register the same objects, in the same order, with register_for_checkpointing, or pass "
                "strict=False",
            )

    def _loader_file(self, index: int) -> str:
        file = names.loader_file(index, self.ranks.rank)
        return file if (self.folder / file).is_file() else names.loader_file(index)

    def _read_positions(self, train_state: CheckpointContents) -> None:
        saved = self.manifest.loaders if self.manifest else []
        for index, loader in enumerate(train_state.loaders):
            if index < len(saved):
                action = f"put {describe_object('loaders', index)} to its position"
                self.pending.append((action, partial(loader.load_state_dict, saved[index])))
            elif self.manifest is None:
                self.notes.append(
                    f"the position of {describe_object('loaders', index)} is not saved: it starts anew"
                )
            else:
                self._report_missing(
                    names.MANIFEST_NAME, f"the position of {describe_object('loaders', index)}"
                )

    def _read_rng(self, train_state: CheckpointContents) -> None:
        rng, rank = train_state.rng, self.ranks.rank
        if rng is None:
            return
        path = self.folder / names.rng_file(rank)
        count = self.manifest.world_size if self.manifest else self._rng_count()
        if path.is_file():
            # Generators take their states from the host, whatever device they are of.
            state = dict(pickles.read(path, **{**self.load_kwargs, "map_location": "cpu"}))
            self.step = state.pop("step", None)
            self.pending_rng.append(
                (f"restore the random states of {path}", partial(self._restore_rng, rng, state))
            )
        elif rank >= count > 0:
            self.pending_rng.append((f"seed rank {rank}", partial(rng.set_seed, self._derive_seed(rank))))
        else:
            self._report_missing(path.name, describe_object("rng", rank))
        if self.ranks.size != count > 0:
            self.notes.append(_describe_world_size(count, self.ranks.size))

    def _restore_rng(self, rng: RNGStates, state: Mapping[str, Any]) -> None:
        for name in rng.restore(state):
            self.notes.append(f"no random state is saved for the generator {name}: it stays as it is")

    def _rng_count(self) -> int:
        return len(list(self.folder.glob(f"{names.RNG_STATE_NAME}_*.pkl")))

    def _derive_seed(self, rank: int) -> int:
        """Return a seed from the saved state of rank 0, this rank and the world size alone."""
        text = f"{file_digest(self.folder / names.rng_file(0))}:{rank}:{self.ranks.size}"
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
