"""The position of a loader: the epoch, the samples given in it, and the state of its order.

The samples of all processes together are counted, so a position means the same on any number of processes.
One position is shared by a prepared loader and by the twins that ``skip_first_batches`` makes of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from accelerate.data.epoch_order import (
    DataShard,
    OrderState,
    capture_generators,
    from_plain,
    restore_generators,
    sampler_chain,
    to_plain,
)
from accelerate.data.sample_order import SeedableRandomSampler, known_epochs
from accelerate.world import world as worlds


@dataclass(frozen=True)
class EpochSkip:
    """The batches or samples that an epoch skips at its beginning.

    Attributes:
        batches: batches of this process, as the current world counts them.
        samples: samples of the order, of all processes, that are skipped before the last ``further`` batches;
            None: all are counted as batches.
        further: how many of the last ``batches`` are not counted in ``samples``.
    """

    batches: int = 0
    samples: int | None = None
    further: int = 0

    def __bool__(self) -> bool:
        return bool(self.batches or self.samples)

    def add(self, batches: int) -> EpochSkip:
        """Return a skip of ``batches`` more batches."""
        return EpochSkip(self.batches + batches, self.samples, self.further + batches)

    def count_samples(self, step: int) -> int:
        """Count the skipped samples where every batch is one of a step of ``step`` samples."""
        return self.batches * step if self.samples is None else self.samples + self.further * step


class StreamSplit(NamedTuple):
    """How ranks shared a stream of which each reads a part: see ``SourceShard``.

    Attributes:
        ranks: number of ranks.
        samples: samples that each takes in a step.
    """

    ranks: int
    samples: int


class FetchLayout(NamedTuple):
    """The way in which the batches of a loader are read: the order of a stream depends on it.

    Attributes:
        workers: number of worker processes.
        persistent: they are kept from epoch to epoch.
        samples: samples of one fetch, of all processes.
        skipped: see ``Epoch``.
        fetch_count: fetches after those.
        split: how ranks share a stream of which each reads a part, else None.
    """

    workers: int
    persistent: bool
    samples: int
    skipped: list[int]
    fetch_count: int
    split: StreamSplit | None = None

    def samples_per_worker(self, workers: int) -> list[int]:
        """Return the samples that each worker has read: the fetches come from the workers in turn."""
        skipped = self.skipped or [0] * workers
        return [
            skipped[worker] + len(range(worker, self.fetch_count, workers)) * self.samples
            for worker in range(workers)
        ]


@dataclass
class Epoch:
    """One iteration of a loader, and how far it has come.

    Attributes:
        number: number of the epoch.
        skip: the batches or samples that it skips.
        samples, batches: given so far, with the skipped ones: of all processes, and of this one.
        complete: the last batch was given.
        active: the iteration has neither ended nor been broken off.
        order_state: the state of its order, set when the first batch is fetched, unless
        is_resumed: the order is that of a checkpoint. The global generators then stay as they are.
        previous_order: the state of the order of the iteration before this one.
        exhausted: the sampler has come to its end.
        workers_started: an earlier epoch, here or before a checkpoint, has started persistent workers.
        later_states: generator states of the loader and its samplers to restore, if the order is reproduced.
        saved_world: number of data shards and samples of a step when it was saved, if it is resumed,
        saved_samples: the samples given until then, and
        fetches: how its batches were read then.
        skipped: samples of a stream that each worker skipped at the beginning, where that was no whole
            number of batches.
        length: samples of the whole order, where known.
        data_shard: the data shard that this process reads, where several read the same.
        keeps_torch_numbers: workers and streams draw as in torch's own loader, so a resume inside an epoch
            does not repeat their random numbers.
        records_loader_state: record the state of torchdata's loader for each batch, in
        loader_state: that of the batch in hand, of a stream or a loader with its own iteration.
        restored_state: a state for torchdata's iterator to begin with, if data or samplers have their own.
        row_multiples: for outputs with a multiple of the batch's rows that were gathered for metrics: the
            last step in which there was one, and the steps between them, 0 if these differ.
        output_multiples: that multiple of each output of a step, by its place in the order of their gathers.
        outputs: the last step in which outputs were gathered, and how many.
        outer: the iteration of the same loader that was not over when this one began;
        loader: the loader that iterates, while it does;
        shown: its attributes, and those of the one that it is a twin of, when an inner one began; and
        backwards_before: how many backwards there had been when this one began.
        copy_to_device: copies a batch there; what reads ahead does so first, for the loader's data may use
            the memory again.
        inner_epochs: complete iterations inside of this one, before it was saved: they have numbers, too.
        first_batches: of a stream that is read again up to its skip, to fill its last step.
    """

    number: int
    skip: EpochSkip = EpochSkip()
    samples: int = 0
    batches: int = 0
    complete: bool = False
    active: bool = True
    order_state: OrderState | None = None
    is_resumed: bool = False
    previous_order: OrderState | None = None
    exhausted: bool = False
    workers_started: bool = False
    later_states: list[Any] | None = None
    saved_world: tuple[int, int] | None = None
    saved_samples: int = 0
    fetches: FetchLayout | None = None
    skipped: list[int] = field(default_factory=list)
    length: int | None = None
    data_shard: DataShard | None = None
    keeps_torch_numbers: bool = False
    records_loader_state: bool = False
    loader_state: dict[str, Any] | None = None
    restored_state: dict[str, Any] | None = None
    row_multiples: dict[int, tuple[int, int]] = field(default_factory=dict)
    output_multiples: dict[int, int] = field(default_factory=dict)
    outputs: tuple[int, int] = 0, 0
    outer: Epoch | None = None
    loader: Any = None
    shown: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    backwards_before: int = 0
    copy_to_device: Callable[[Any], Any] | None = None
    inner_epochs: int = 0
    first_batches: list[Any] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "copy_to_device": None}  # it may hold a stream, which cannot be copied


@dataclass(eq=False)
class LoaderPosition:
    """The progress of one prepared loader.

    Attributes:
        iteration: number of the next epoch, or of the one in progress.
        current: the newest iteration, or None.
        record: the epoch of a loaded checkpoint, as long as the loader has not come further.
        data_shard: see ``Epoch``.
        data: the kind and the class of the data, in words; or empty.
        is_per_rank: each process keeps data of its own, and its position counts these alone.
        torchdata_state: a loaded state of torchdata's loader, until an epoch begins;
        counted_batches: how many batches it counts, where it is no position; and
        restored_state: see ``Epoch``.
    """

    iteration: int = 0
    current: Epoch | None = None
    record: Epoch | None = None
    data_shard: DataShard | None = None
    data: str = ""
    is_per_rank: bool = False
    torchdata_state: dict[str, Any] | None = None
    counted_batches: int = 0
    restored_state: dict[str, Any] | None = None
    _workers_started: bool = False
    _is_split_anew: bool = False
    _loaded_state: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def num_shards(self) -> int:
        """The number of data shards: one for each process, unless several read the same."""
        world = worlds.current()
        return self.data_shard.num_shards if self.data_shard is not None else world.size if world else 1

    def begin(self, skip: EpochSkip, *, isolated: bool) -> Epoch:
        """Begin an iteration; it resumes the recorded epoch if that has the same number.

        Args:
            skip: the batches or samples that it skips.
            isolated: it continues inside the recorded epoch. Else one that was broken off before it was
                saved is over: the run that went on began a new one there, too.
        """
        outer = self.current if self.current is not None and self.current.active else None
        if outer is not None:  # a pass inside of a resumed epoch resumes nothing, and follows those before it
            self.record = None
            self.iteration, outer.inner_epochs = self.iteration + outer.inner_epochs, 0
        record = self.record
        previous = self.current or record
        epoch = Epoch(
            self.iteration,
            skip,
            batches=skip.batches,
            previous_order=None if previous is None else previous.order_state,
            workers_started=self._workers_started,
            data_shard=self.data_shard,
            outer=outer,
        )
        if record is not None and (
            record.complete or record.number != self.iteration or not (record.active or isolated)
        ):
            self.record = None
        elif record is not None:
            epoch = replace(
                epoch,
                order_state=record.order_state,
                is_resumed=True,
                exhausted=record.exhausted,
                saved_world=record.saved_world,
                saved_samples=record.samples,
                fetches=record.fetches,
                length=record.length,
                inner_epochs=record.inner_epochs,
            )
        saved_batches = self.counted_batches if record is None else record.batches
        if skip.batches == saved_batches:
            epoch.restored_state = self.restored_state
        self.torchdata_state, self.counted_batches, self.restored_state = None, 0, None
        self.current, self._workers_started = epoch, True
        return epoch

    def end(self, epoch: Epoch) -> None:
        """End an iteration, complete or broken off.

        One that gave its last batch counts, also if the loop did not ask for more. After its last batch a
        checkpoint may have been loaded, or another iteration begun: then it changes nothing.
        """
        epoch.active = False
        if self.current is not epoch:
            return
        if epoch.complete:
            self.iteration += 1 + epoch.inner_epochs
        record = self.record
        has_given = epoch.batches > epoch.skip.batches
        if record is not None and (epoch.complete or (has_given and epoch.samples >= record.samples)):
            self.record = None

    def finish_record(self) -> None:
        """Drop the record of a complete epoch and move to the next one."""
        record = self.record
        assert record is not None
        self.record, self.current = None, replace(record, active=False)
        self.iteration = record.number + 1

    def state_dict(
        self, generators: list[Any], sampler: Any, step: int, fetches: FetchLayout
    ) -> dict[str, Any]:
        """Return the position as JSON types.

        Args:
            generators: those of the loader and its samplers.
            sampler: of single indices.
            step: samples of a step.
            fetches: how the loader reads its batches; the number of fetches is filled in here.
        """
        current = self.current
        if self.record is not None and (current is None or not current.active):
            return dict(self._loaded_state)
        state = {
            "epoch": self.iteration,
            "data": self.data,
            "world_size": self.num_shards,
            "step": step,
            "per_rank": self.is_per_rank,
            "warm": self._workers_started,
            "now": capture_generators(generators),
            "in_progress": None,
        }
        if isinstance(sampler, SeedableRandomSampler):
            state["seed"] = to_plain(sampler.initial_seed)
        if current is not None:
            state["in_progress"] = {
                "epoch": current.number,
                "samples": current.samples,
                "batches": current.batches,
                "complete": current.complete,
                "active": current.active,
                "exhausted": current.exhausted,
                "length": current.length,
                "start": None if current.order_state is None else current.order_state.state_dict(),
            }
            begun = current.fetches or fetches
            skip = current.skip
            done = current.batches - (skip.batches - skip.further if current.skipped else 0)
            layout = fetches._replace(
                workers=begun.workers,
                persistent=begun.persistent,
                split=begun.split,
                skipped=current.skipped,
                fetch_count=done * (step // fetches.samples),
            )
            state["fetches"] = [*layout[:-1], None if begun.split is None else list(begun.split)]
            state["epoch"] = max(self.iteration, current.number + current.complete)
        return state

    def load_state_dict(self, state: dict[str, Any], generators: list[Any], sampler: Any) -> bool:
        """Restore the position of a ``state_dict`` of this or another process.

        A seed that the sampler has from the program, and not from the user, is restored too. A position of
        a loader of other data, or with another number of generators, is not loaded, and False returned: an
        evaluation, for instance, loads the checkpoint of a training whose loader is another one.
        """
        world, saved_data = worlds.current(), state.get("data", self.data)
        states, reason = state.get("now", generators), ""
        if saved_data != self.data:
            reason = f"it is that of {saved_data}, but this loader has {self.data}"
        elif len(states) != len(generators):
            reason = (
                f"{len(states)} random generators were saved with it, but this loader and its samplers hold "
                f"{len(generators)}"
            )
        if reason:
            if world is None or world.is_main:
                warnings.warn(
                    f"the position of a loader is not loaded, so it begins anew: {reason}", stacklevel=3
                )
            return False
        self.iteration, self.current, self.record = state["epoch"], None, None
        self.torchdata_state, self.counted_batches, self.restored_state = None, 0, None
        if "in_progress" not in state:
            return True
        self._workers_started = state["warm"]
        restore_generators(generators, state["now"])
        if isinstance(sampler, SeedableRandomSampler) and not sampler.has_given_seed and "seed" in state:
            sampler.initial_seed = from_plain(state["seed"])
        saved = state["in_progress"]
        # A rank that rank 0 sends its batches has no order, and is inside of the epoch like rank 0.
        if saved is None or (saved["start"] is None and not saved["batches"]):
            return True
        if not saved["complete"]:
            self.iteration = saved["epoch"]
        self._loaded_state = state
        layout = FetchLayout(*state["fetches"])
        shares = state["world_size"] if state.get("per_rank", self.is_per_rank) else 1
        shares_now = self.num_shards if self.is_per_rank else 1
        self._is_split_anew = shares != shares_now
        self.record = Epoch(
            saved["epoch"],
            samples=saved["samples"] * shares // shares_now,
            batches=saved["batches"],
            complete=saved["complete"],
            active=saved["active"],
            order_state=None if saved["start"] is None else OrderState.from_state_dict(saved["start"]),
            exhausted=saved["exhausted"],
            saved_world=(state["world_size"], state["step"]),
            fetches=layout._replace(split=None if layout.split is None else StreamSplit(*layout.split)),
            length=saved["length"],
            inner_epochs=0 if saved["complete"] else state["epoch"] - saved["epoch"],
        )
        return True

    def resolve_skip(self, batches: int | None, step: int, count: int | None) -> EpochSkip:
        """Resolve a number of batches to skip: the recorded position, if it matches that number.

        Args:
            batches: as counted by the world that saved the checkpoint, or by this one; None: the recorded
                number, which is none if the loop over the epoch had ended.
            step: samples of a step now.
            count: batches of a whole epoch now, if known.
        """
        record = self.record
        is_over = record is not None and record.complete and (not record.active or batches == 0)
        if record is None or (is_over and not batches):
            return EpochSkip(batches or 0)  # saved between two epochs: the next one is whole
        shards = self.num_shards
        has_world_changed = record.saved_world != (shards, step)
        matches_record = record.complete and batches == count
        if batches is None:
            batches = record.samples // step if has_world_changed else record.batches
            matches_record = True
        if not (matches_record or batches == record.batches or batches * step == record.samples):
            warnings.warn(
                f"{batches} batches are left out, but the checkpoint was saved after {record.batches} "
                f"({record.samples} samples): samples are repeated or lost; "
                "skip_first_batches(loader, None) continues at the saved position",
                stacklevel=4,
            )
            return EpochSkip(batches)
        world = worlds.current()
        if has_world_changed and (world is None or world.is_main):
            size, saved = record.saved_world or (1, step)
            effect = "the remaining samples are the same, but other processes get them"
            if self._is_split_anew:
                effect = (
                    "each keeps data of its own, so the remaining samples are the same under a "
                    "DistributedSampler only; else samples may be repeated or lost"
                )
            warnings.warn(
                f"the checkpoint was saved by {size} process(es) with steps of {saved} samples and is "
                f"continued by {shards} with steps of {step}: {effect}",
                stacklevel=4,
            )
        return EpochSkip(batches, record.samples)


def set_epochs(loader: Any, dataset: Any, epoch: int) -> None:
    """Set the epoch of every sampler of a loader and of its data set, where they have a ``set_epoch``.

    One that a script has restored in this epoch is left alone: to set it again may lose its place there.
    """
    holders: list[Any] = []
    for item in (*sampler_chain(loader.batch_sampler), *sampler_chain(loader.sampler), dataset):
        setter: Any = getattr(item, "set_epoch", None)
        # A shard has that of the sampler below, or none.
        holder = getattr(setter, "__self__", item)
        if setter is not None and not any(holder is other for other in holders):
            holders.append(holder)
            is_restorable = hasattr(holder, "load_state_dict") and holder not in known_epochs
            if not is_restorable or _read_epoch(holder) != epoch:
                setter(epoch)
            holder = getattr(holder, "epoch_holder", holder)
            if hasattr(holder, "__weakref__"):
                now = getattr(holder, "epoch", None)
                known_epochs[holder] = now if type(now) is int else epoch


def find_new_epoch(loader: Any, dataset: Any) -> int | None:
    """Return the epoch that a script has set on a sampler or the data set itself, after ``set_epochs``.

    A script that resumes does so for the rest of an epoch, and before the first one: they begin with 0.
    """
    for item in (*sampler_chain(loader.batch_sampler), *sampler_chain(loader.sampler), dataset):
        holder = getattr(getattr(item, "set_epoch", None), "__self__", None)
        holder = getattr(holder, "epoch_holder", holder)
        epoch = _read_epoch(holder) if hasattr(holder, "__weakref__") else None
        if epoch is not None and epoch != known_epochs.get(holder, 0):
            return max(epoch, 0)
    return None


def _read_epoch(holder: Any) -> int | None:
    """Return the epoch that a sampler or a data set is in, or None.

    One that it keeps private counts until a loader sets it: later it may have advanced by itself.
    """
    epochs = [getattr(holder, "epoch", None)]
    if holder not in known_epochs:
        epochs.append(getattr(holder, "_epoch", None))
        if all(type(epoch) is not int for epoch in epochs) and hasattr(holder, "load_state_dict"):
            try:
                state: Any = holder.state_dict()
            except (AttributeError, NotImplementedError, TypeError, ValueError):  # it has no state yet
                state = None
            epochs.append(state.get("epoch") if isinstance(state, dict) else None)
    return max((epoch for epoch in epochs if type(epoch) is int), default=None)
