"""From files to objects: everything is checked first, then put back."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.checkpoint import loan, names, pickles, reading, tensors
from accelerate.checkpoint.digest import digest, digests
from accelerate.checkpoint.errors import file_errors
from accelerate.checkpoint.manifest import Manifest
from accelerate.checkpoint.parts import FILES, Part, Parts, Reading, Rng, kind, label, spread
from accelerate.checkpoint.ranks import Ranks
from accelerate.core.errors import CheckpointError

# What objects raise when a state does not fit them.
_REFUSALS = (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError)


def verify(folder: Path, manifest: Manifest, ranks: Ranks) -> None:
    """Compares size and digest of this rank's share of the files with the manifest.

    The ranks of one machine share the work: each machine reads a checkpoint once, whatever disk it is on.

    Raises:
        CheckpointError: a file is missing or differs; names it and what was expected.
    """
    by_size = sorted(manifest.files.items(), key=lambda item: (-item[1].size, item[0]))
    share = {folder / name: record for name, record in by_size[ranks.local_rank :: ranks.local_size]}
    for path, record in share.items():
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing", why=f"it was saved by rank {record.rank} with {record.size} bytes"
            )
        size = path.stat().st_size
        if size != record.size:
            raise CheckpointError(f"{path} is damaged", why=f"it has {size} bytes, expected {record.size}")
    with file_errors("read", folder):
        found = digests(list(share), manifest.hashing)
    for (path, record), own in zip(share.items(), found, strict=True):
        if own != record.digest:
            raise CheckpointError(
                f"{path} is damaged",
                why=f"its digest is {own[:16]}..., expected {record.digest[:16]}... ({manifest.hashing})",
                fix="load another checkpoint; nothing was changed",
            )


@dataclass
class Reader:
    """Reads the parts of one checkpoint for one rank.

    Attributes:
        folder: the checkpoint.
        manifest: None for one of the public package.
        ranks: those that load together.
        strict: a missing part is an error; otherwise it is listed in ``missing``.
        map_location: where torch files are loaded to.
        load_kwargs: more arguments of ``torch.load``.
        model_kwargs: more arguments of the models' ``load_state_dict``.
        ready: what is read and not yet put back: (what, function).
        last: the same for random states, which come back after all else has.
        missing, notes: what the caller should know.
        step: the step counter beside the random states.
    """

    folder: Path
    manifest: Manifest | None
    ranks: Ranks
    strict: bool = True
    map_location: Any = "cpu"
    load_kwargs: Mapping[str, Any] = field(default_factory=dict)
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    ready: list[tuple[str, Callable[[], Any]]] = field(default_factory=list)
    last: list[tuple[str, Callable[[], Any]]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    step: int | None = None

    def read(self, parts: Parts) -> None:
        """Reads everything that ``parts`` asks for; changes nothing yet.

        Raises:
            CheckpointError: a file is missing or cannot be read.
        """
        for index, model in enumerate(parts.models):
            if not self._in_parts("models", model, index):
                self._model(model, index)
        for sort, file in FILES.items():
            for index, item in enumerate(getattr(parts, sort)):
                if sort != "optimizers" or not self._in_parts(sort, item, index):
                    self._torch_file(sort, index, item, file(index))
        if parts.scaler is not None:
            self._torch_file("scaler", 0, parts.scaler, names.SCALER_NAME)
        for index, loader in enumerate(parts.stateful_loaders):
            self._torch_file("stateful_loaders", index, loader, self._loader_file(index))
        self._positions(parts)
        self._rng(parts)

    def apply(self) -> None:
        """Puts back what was read, except for own files and random states.

        Raises:
            CheckpointError: an object refuses its state; those before it have theirs already.
        """
        for what, function in self.ready:
            _attempt(what, function)

    def finish(self, parts: Parts) -> None:
        """Lets parts read folders of their own, then restores random states: nothing draws after."""
        for part in parts.own_files:
            _attempt(f"load {part.name} from {self.folder}", partial(part.load, self.folder))
        for what, function in self.last:
            _attempt(what, function)

    def _absent(self, file: str, what: str) -> None:
        if not self.strict:
            self.missing.append(f"{file} ({what})")
            return
        held = ", ".join(sorted(p.name for p in self.folder.iterdir()))
        raise CheckpointError(
            f"{self.folder / file} is missing",
            why=f"{what} was to be loaded from it; this checkpoint holds: {held}",
            fix="prepare the objects that were saved, or pass strict=False to leave this one as it is",
        )

    def _in_parts(self, sort: str, item: Any, index: int) -> bool:
        """Whether the object was saved in parts; reads what is needed of them then."""
        folder = self.folder / names.sharded_folder(sort, index)
        if not folder.is_dir():
            return False
        what, one = f"{label(sort, index)} ({kind(item)})", spread(item)
        if one is None:
            raise CheckpointError(
                f"{what} cannot be loaded from {folder}",
                why="it was saved in parts, by parameter names",
                fix="save it whole, which every strategy reads: save_state(folder, sharded=False)",
            )
        trusted = not self.load_kwargs.get("weights_only", True)
        reading = Reading(self.strict, trusted, self.model_kwargs, self.missing, self.notes)
        with file_errors("read", folder):
            self.ready.append((f"load {what} from {folder}", one.prepare(folder, reading)))
        return True

    def _model(self, model: Any, index: int) -> None:
        what = f"{label('models', index)} ({kind(model)})"
        safe = self.folder / names.model_file(index, safe=True)
        other = (names.model_file(index, safe=False), names.whole_file(index))
        path = next((p for p in (safe, *(self.folder / name for name in other)) if p.is_file()), safe)
        if not path.is_file():
            self._absent(safe.name, what)
            return
        if path is safe:
            with file_errors("read", safe):
                state, aliases = tensors.read(safe)
                files = [reading.Mapped.of(safe, state)]
        else:
            kwargs = {"map_location": "cpu", "mmap": True, **self.load_kwargs}
            state, aliases, files = pickles.read(path, **kwargs), {}, []
        if self.model_kwargs.get("assign"):  # the model keeps them: then they must not stay mapped
            state = {name: copy.deepcopy(value) for name, value in state.items()}
        like = model.like() if isinstance(model, Part) and model.like else model.state_dict()
        for alias, name in tensors.untied(aliases, like).items():
            self.notes.append(f"{path.name} has {alias} tied to {name}; in this model they are two tensors")
        state = tensors.fitted(state, aliases, like)
        function = partial(reading.fill, files, model.load_state_dict, state, **self.model_kwargs)
        self.ready.append((f"load {what} from {path}", function))

    def _torch_file(self, sort: str, index: int, item: Any, file: str) -> None:
        what = f"{label(sort, index)} ({kind(item)})"
        path = self.folder / file
        if not path.is_file():
            self._absent(file, what)
            return
        kwargs = {"map_location": self.map_location, **self.load_kwargs}
        if sort == "optimizers" and "mmap" not in kwargs and loan.can_map(path, kwargs["map_location"]):
            load = partial(loan.Loan(path, **kwargs).into, item.load_state_dict)
        else:
            load = partial(item.load_state_dict, pickles.read(path, **kwargs))
        self.ready.append((f"load {what} from {path}", load))

    def count_custom(self, parts: Parts) -> None:
        """Refuses a number of registered objects that differs from what was saved.

        Raises:
            CheckpointError: it differs, and loading is strict.
        """
        saved, now = len(list(self.folder.glob(f"{names.CUSTOM_NAME}_*.pkl"))), len(parts.custom)
        if saved != now and self.strict:
            raise CheckpointError(
                f"{self.folder} holds {saved} registered object(s), but {now} are registered now",
                fix="register the same objects, in the same order, with register_for_checkpointing, or pass "
                "strict=False",
            )

    def _loader_file(self, index: int) -> str:
        own = names.loader_file(index, self.ranks.rank)
        return own if (self.folder / own).is_file() else names.loader_file(index)

    def _positions(self, parts: Parts) -> None:
        saved = self.manifest.loaders if self.manifest else []
        for index, loader in enumerate(parts.loaders):
            if index < len(saved):
                what = f"put {label('loaders', index)} to its position"
                self.ready.append((what, partial(loader.load_state_dict, saved[index])))
            elif self.manifest is None:
                self.notes.append(f"the position of {label('loaders', index)} is not saved: it starts anew")
            else:
                self._absent(names.MANIFEST_NAME, f"the position of {label('loaders', index)}")

    def _rng(self, parts: Parts) -> None:
        rng, rank = parts.rng, self.ranks.rank
        if rng is None:
            return
        path = self.folder / names.rng_file(rank)
        count = self.manifest.world_size if self.manifest else self._rng_count()
        if path.is_file():
            # Generators take their states from the host, whatever device they are of.
            state = dict(pickles.read(path, **{**self.load_kwargs, "map_location": "cpu"}))
            self.step = state.pop("step", None)
            self.last.append((f"restore the random states of {path}", partial(self._restore_rng, rng, state)))
        elif rank >= count > 0:
            self.last.append((f"seed rank {rank}", partial(rng.set_seed, self._derived(rank))))
        else:
            self._absent(path.name, label("rng", rank))
        if self.ranks.size != count > 0:
            self.notes.append(_other_size(count, self.ranks.size))

    def _restore_rng(self, rng: Rng, state: Mapping[str, Any]) -> None:
        for name in rng.restore(state):
            self.notes.append(f"no random state is saved for the generator {name}: it stays as it is")

    def _rng_count(self) -> int:
        return len(list(self.folder.glob(f"{names.RNG_STATE_NAME}_*.pkl")))

    def _derived(self, rank: int) -> int:
        """A seed that depends on the saved state of rank 0, this rank and the number of ranks alone."""
        text = f"{digest(self.folder / names.rng_file(0))}:{rank}:{self.ranks.size}"
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


def _other_size(saved: int, now: int) -> str:
    text = f"saved by {saved} process(es), loaded by {now}: random states of "
    if now < saved:
        return text + f"rank {now} and above are not used"
    return text + f"rank {saved} and above are derived from those of rank 0"
