"""Batches of a stream, or of a loader with its own iteration; also from the middle of an epoch.

Such a source shows its end only when it is reached: one batch is prefetched, under isolated random numbers.
A checkpoint of another world size may end at a sample that is no step boundary. The samples before it are
then read and dropped one by one, and not batch by batch, with the random numbers of the first time.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accelerate.core.errors import PrepareError
from accelerate.data.batch_sampler_shard import BatchSamplerShard, copy_loader
from accelerate.data.batch_source import (
    PresetIndexSampler,
    WorkerSeedingIndices,
    agree_on_order,
    find_shard,
    open_steps,
    read_loader_state,
    restore_loader_state,
    with_index_sampler,
)
from accelerate.data.epoch_order import (
    LoaderDraws,
    OrderState,
    RNGSnapshot,
    capture_generators,
    loader_generators,
    open_walk,
    outer_sampler,
    restore_generators,
    uses_torch_iterator,
)
from accelerate.data.iterable_dataset import IterableDatasetShard, SourceShard, StreamView, split_stream
from accelerate.data.position import Epoch, FetchLayout, StreamSplit
from accelerate.data.sample_order import END, StepSampleIndices
from accelerate.world import collective
from accelerate.world.rng import derive


def _batches_with_steps(
    items: Iterable[Any], shard: BatchSamplerShard | None, read_state: Callable[[], Any] | None
) -> Iterator[tuple[Any, StepSampleIndices | None, Any]]:
    """Yield the batches of a loader with its own iteration, each with the step that its indices are of.

    With ``read_state``, also with the state of torchdata's loader after it.

    Raises:
        PrepareError: the loader takes its indices from elsewhere than the shard.
    """
    for batch in items:
        if shard is not None and not shard.is_opened:
            raise PrepareError(
                "a loader with an iteration of its own does not ask its sampler for batches, so each of "
                f"{shard.num_processes} processes would read the whole data",
                why="it opened the sampler before prepare put the shard of this process in its place, for "
                "example, or reads the data without one",
                fix="prepare a plain torch DataLoader (persistent_workers=True keeps its workers), "
                "let rank 0 read for all (dispatch_batches=True), or keep all data on each: shard=False",
            )
        taken = None if shard is None else shard.taken_steps
        state = None if read_state is None else read_state()
        yield batch, taken.popleft() if taken else None, state


class _EpochSeedingWorkerStream:
    """A stream that persistent workers read; it seeds each worker at the begin of every epoch.

    Without that they would continue with the states of the epoch before, which a new process cannot know.
    """

    def __init__(
        self, base: DataLoader[Any], indexed: DataLoader[Any], index_sampler: PresetIndexSampler, epoch: Epoch
    ) -> None:
        self.base, self.indexed, self.index_sampler, self.epoch = base, indexed, index_sampler, epoch

    def __iter__(self) -> Iterator[Any]:
        rng_snapshot, generators = RNGSnapshot.capture(), loader_generators(self.base)
        started = self.epoch.workers_started and self.indexed._iterator is None
        later_states = capture_generators(generators)
        # A reference to the workers' owner here would keep them alive until the next garbage collection.
        self.index_sampler.upcoming = _seed_first_fetches(self.base, rng_snapshot.digest(), self.epoch.number)
        iterator = iter(self.indexed)
        if started:  # torch has drawn a seed to start them, but did not where the epoch began
            rng_snapshot.restore()
            restore_generators(generators, later_states)
        return iterator


def _seed_first_fetches(base: DataLoader[Any], seed: int, epoch: int) -> Iterator[Any]:
    """Yield the requests to the workers, the first one of each with a seed."""
    for number, item in enumerate(outer_sampler(base)):
        # Workers get requests in turn.
        yield (
            WorkerSeedingIndices(item, derive(seed, "data", epoch, number))
            if number < base.num_workers
            else item
        )


def stream_batches(
    base: DataLoader[Any],
    epoch: Epoch,
    step: int,
    index_loader: tuple[DataLoader[Any], PresetIndexSampler] | None = None,
    keep: int = 0,
) -> Iterator[tuple[Any, bool, StepSampleIndices | None]]:
    """Yield each batch of a stream, or of a loader with its own iteration; whether it is the last; its step.

    Args:
        base: the sharded loader.
        epoch: see ``fetch_batches``; skipped batches are read and dropped, to repeat all random draws.
        step: samples of one fetch, of all processes.
        index_loader: the loader with an index sampler, and that sampler, for persistent workers.
        keep: how many of the first batches to keep in the epoch where they are skipped.
    """
    generators = loader_generators(base)
    stream = isinstance(base.dataset, IterableDataset)
    if epoch.fetches is not None:
        base, index_loader = _with_saved_workers(base, epoch.fetches, index_loader)
    shard = base.dataset if type(base.dataset) is IterableDatasetShard else None
    is_uneven = shard is not None and not (shard.even_batches or shard.drop_last)
    shared = shard is not None and shard.num_processes > 1
    broadcast = agree_on_order(epoch, shared, is_uneven, generators)
    items, count = _select_items(base, generators, epoch, step)
    # The loader of torchdata that has the state of the data; another one has an iterator of an earlier epoch.
    source = base if items is base else None
    seeds_workers = base.persistent_workers and stream and not epoch.keeps_torch_numbers
    if items is base and index_loader and seeds_workers and uses_torch_iterator(base):
        items, source = _EpochSeedingWorkerStream(base, *index_loader, epoch), index_loader[0]
    if source is not None and restore_loader_state(source, epoch):
        count = 0
    isolate = (base.num_workers == 0 or not stream) and not epoch.keeps_torch_numbers
    records_state = epoch.records_loader_state and source is not None
    read_state = partial(read_loader_state, source) if records_state else None
    order_state, own_state = epoch.order_state, torch.default_generator.get_state()
    batches, epoch.order_state = open_walk(
        _batches_with_steps(items, None if stream else find_shard(base), read_state),
        generators,
        broadcast=broadcast,
        order_state=order_state,
        isolate=isolate,
    )
    starts_workers = not epoch.is_resumed and not (base.persistent_workers and epoch.workers_started)
    draws_seed = broadcast is not None and starts_workers and base.generator is None
    # Opened with the states of another rank: torch's loader draws a seed for workers on each of them.
    if draws_seed and torch.equal(torch.default_generator.get_state(), own_state):
        torch.empty((), dtype=torch.int64, device="cpu").random_()
    if not stream:
        index = next((i for i, each in enumerate(generators) if each is base.generator), None)
        # A resumed order is opened as when it was drawn, whoever reads the rest of it.
        is_late = _is_late(order_state, find_shard(base) is not None)
        draws = LoaderDraws(base.num_workers, index, is_late)
        epoch.order_state = replace(epoch.order_state, loader=draws)
    first = list(islice(batches, 0 if source is None else min(keep, count)))
    epoch.first_batches = [batch for batch, _, _ in first]
    upcoming = next(islice(batches, count - len(first), None), END)
    while upcoming is not END:
        batch, taken, epoch.loader_state = upcoming
        if epoch.copy_to_device is not None:
            batch = epoch.copy_to_device(batch)
        upcoming = next(batches, END)
        yield batch, upcoming is END, taken


def _select_items(
    base: DataLoader[Any], generators: list[Any], epoch: Epoch, step: int
) -> tuple[Iterable[Any], int]:
    """Return the object to iterate, and the number of its items to skip."""
    skip, fetches = epoch.skip, epoch.fetches
    epoch.samples = skip.count_samples(step)
    if fetches is None or skip.samples is None:
        return base, skip.batches
    # Fillers and incomplete steps: a batch may have given fewer samples.
    missing = epoch.saved_samples - fetches.fetch_count * step
    order_state = epoch.order_state if epoch.is_resumed else None
    is_sharded = find_shard(base) is not None
    is_late = _is_late(order_state, is_sharded)
    same_layout = (fetches.samples, fetches.skipped, is_late) == (step, [], is_sharded)
    if same_layout and epoch.samples == skip.batches * step + missing:
        return base, skip.batches
    if isinstance(base.dataset, IterableDataset):
        return resume_stream(base, epoch, fetches), 1 + skip.further
    epoch.skipped = [skip.samples]
    # The loader's own batches cannot be cut, but its sampler's can.
    indexed, index_sampler = with_index_sampler(base)
    part = Epoch(epoch.number, replace(skip, further=0))
    index_sampler.upcoming = _RemainingIndices(base, generators, part, is_late)
    return indexed, skip.further


def _is_late(order_state: OrderState | None, is_sharded: bool) -> bool:
    """Return whether the sampler is opened for the first batch, as a shard of several processes does."""
    loader = None if order_state is None else order_state.loader
    return is_sharded if loader is None else loader.is_late


def _with_saved_workers(
    base: DataLoader[Any],
    fetches: FetchLayout,
    index_loader: tuple[DataLoader[Any], PresetIndexSampler] | None,
) -> tuple[DataLoader[Any], tuple[DataLoader[Any], PresetIndexSampler] | None]:
    """Return the loader of a stream, or one with its own iteration, with the workers of the saved epoch.

    Each worker reads a part of the stream, or draws from a generator of its own, and torchdata's loader draws
    another order with workers. So no other number of them could give exactly the samples that are left.
    """
    workers, persistent = fetches.workers, fetches.persistent
    if (workers, persistent) == (base.num_workers, base.persistent_workers):
        return base, index_loader
    if workers != base.num_workers and collective.rank() == 0:
        kind = "stream" if isinstance(base.dataset, IterableDataset) else type(base).__name__
        warnings.warn(
            f"the checkpoint was saved inside an epoch of a {kind} that {workers} worker(s) read. The order "
            f"depends on them: the rest of that epoch is read by as many, later epochs by {base.num_workers}",
            stacklevel=2,
        )
    parts: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent}
    if workers == 0:
        parts.update(timeout=0, prefetch_factor=None)
    elif base.num_workers == 0:
        parts["prefetch_factor"] = 2
    loader = copy_loader(base, **parts)
    return loader, with_index_sampler(loader)


class _RemainingIndices:
    """The indices that are left in an epoch, cut from those that a loader's own sampler gives.

    The sampler is opened whenever the loader asks, as it would be without this: torchdata's draw then. One
    that is late is opened for the first index.
    """

    def __init__(self, base: DataLoader[Any], generators: list[Any], epoch: Epoch, is_late: bool) -> None:
        self.sampler, self.shard = outer_sampler(base), find_shard(base)
        self.generators, self.epoch, self.is_late = generators, epoch, is_late

    def __iter__(self) -> Iterator[Any]:
        return self._cut(None if self.is_late else self._open())

    def _open(self) -> Iterator[Any]:
        return iter(self.sampler if self.shard is None else self.shard.batch_sampler)

    def _cut(self, opened: Iterator[Any] | None) -> Iterator[Any]:
        opened = opened or self._open()
        if self.shard is not None:
            self.shard.taken_steps.clear()
            self.shard.is_opened = True
        for step in open_steps(self.sampler, self.generators, self.epoch, opened):
            if self.shard is not None:
                self.shard.taken_steps.append(step)
            yield step.indices


class RemainingStream(StreamView):
    """The rest of a stream after a number of samples.

    Args:
        dataset: the whole stream.
        skip_counts: how many samples each worker skips.
        fetch_samples: samples of one fetch, of which only the last one of a worker may have had fewer.
    """

    _own = (*StreamView._own, "skip_counts", "fetch_samples", "stream_iterator")

    def __init__(self, dataset: Any, skip_counts: list[int], fetch_samples: int) -> None:
        self.dataset, self.skip_counts, self.fetch_samples = dataset, skip_counts, fetch_samples
        # The iterator of the stream, if it has been started already.
        self.stream_iterator: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        stream_iterator = iter(self.dataset) if self.stream_iterator is None else self.stream_iterator
        count = self.skip_counts[0 if worker is None else worker.id]
        if _discard(stream_iterator, count) <= count - self.fetch_samples:
            raise PrepareError(
                f"worker {worker.id if worker else 0} has fewer samples than the checkpoint counts",
                why="the workers' parts of the stream are of different length, so what each of them has read "
                "is known only for the number of processes and the batch size that it was saved with",
                fix="resume with those, or save between two epochs",
            )
        yield from stream_iterator


def resume_stream(base: DataLoader[Any], epoch: Epoch, fetches: FetchLayout) -> Any:
    """Return an iterable over the remaining batches of a stream, for one use; its first item is a dummy.

    Args:
        base: the sharded loader of a stream, with the workers that read it when it was saved.
        epoch: with a skip that counts samples; its further batches are not left out here.
        fetches: how it was read.
    """
    total = epoch.skip.samples or 0
    if base.num_workers == 0:
        epoch.skipped = [total]
        return _resume_in_process(base, total, fetches.samples)
    epoch.skipped = fetches.samples_per_worker(base.num_workers)
    return _resume_in_workers(_replace_stream(base, epoch.skipped, fetches.samples)[0])


def _resume_in_workers(loader: DataLoader[Any]) -> Iterator[Any]:
    batches = iter(loader)
    first = next(batches, END)
    yield None
    if first is not END:
        yield first
        yield from batches


def _resume_in_process(base: DataLoader[Any], total: int, step: int) -> Iterator[Any]:
    """Yield a dummy after the random draws of the start and the first step, then the remaining batches."""
    loader, rest = _replace_stream(base, [0], step)
    batches = iter(loader)
    rest.stream_iterator = iter(rest.dataset)
    _discard(rest.stream_iterator, min(step, total))
    yield None
    _discard(rest.stream_iterator, total - step)
    yield from batches


def _discard(samples: Iterator[Any], count: int) -> int:
    """Discard up to ``count`` samples; return how many there were."""
    return sum(1 for _ in islice(samples, max(count, 0)))


def _replace_stream(
    base: DataLoader[Any], skip_counts: list[int], fetch_samples: int
) -> tuple[DataLoader[Any], RemainingStream]:
    """Return a copy of the loader over the rest of its stream, and that rest."""
    stream: Any = base.dataset
    shared = isinstance(stream, IterableDatasetShard)
    rest = RemainingStream(stream.dataset if shared else stream, skip_counts, fetch_samples)
    loader, dataset = copy.copy(base), rest
    if shared:
        dataset = copy.copy(stream)
        dataset.dataset = rest
    loader.__dict__.update(dataset=dataset, _iterator=None)
    return loader, rest


# --- streams of which each rank reads its own files


class SplitOrder(StreamView):
    """All rows of a stream, in the order in which the ranks of an earlier run shared them.

    That is the one in which a step takes a batch of each rank's part in turn.

    Args:
        dataset: the whole stream.
        split: how those ranks shared it.
    """

    _own = (*StreamView._own, "samples", "parts")

    def __init__(self, dataset: Any, split: StreamSplit) -> None:
        self.dataset, self.samples = dataset, split.samples
        self.parts = [split_stream(dataset, rank, split.ranks) for rank in range(split.ranks)]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of all parts."""
        for part in (self.dataset, *self.parts):
            part.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        parts = [iter(part) for part in self.parts]
        while parts:
            for part in list(parts):
                batch = list(islice(part, self.samples))
                yield from batch
                if len(batch) < self.samples:
                    parts.remove(part)


def with_saved_split(base: DataLoader[Any], epoch: Epoch) -> DataLoader[Any]:
    """Return the loader of a stream in the order that the epoch had when it was saved.

    Args:
        base: the sharded loader.
        epoch: the epoch that begins.
    """
    stream: Any = base.dataset
    saved = None if epoch.fetches is None else epoch.fetches.split
    now = stream.split if isinstance(stream, SourceShard) else None
    if epoch.fetches is None or saved == now:
        return base
    whole = stream.dataset if isinstance(stream, IterableDatasetShard) else stream
    ordered = whole if saved is None else SplitOrder(whole, saved)
    if isinstance(ordered, SplitOrder):
        ordered.set_epoch(epoch.number)
    parts: dict[str, Any] = {"dataset": ordered}
    if isinstance(stream, IterableDatasetShard):
        options = (stream.batch_size, stream.drop_last, stream.num_processes, stream.process_index)
        shard = IterableDatasetShard(ordered, *options, stream.split_batches)
        shard.even_batches, shard.marks = stream.even_batches, stream.marks
        parts["dataset"] = shard
    if base.batch_sampler is not None:
        parts["batch_sampler"] = copy.copy(base.batch_sampler)  # another loader, by its sampler
    return copy_loader(base, **parts)
