"""Where a sharded loader's batches come from: indices picked for torch's loader, or a stream that is read on.

Map-style data is read by index. Torch's loader gets its batches of indices from a ``Feed``, which knows what
each is and which is the last, so that no batch is fetched before it is asked for. A stream, or a loader that
iterates in a way of its own, tells its end only when it has come to it: one batch is read ahead, under random
numbers of its own.
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from accelerate.data.epoch import Agree, Start, ending, open_order, open_walk
from accelerate.data.onward import onward
from accelerate.data.order import (
    END,
    Cut,
    Step,
    behind,
    chain_of,
    inner_sampler,
    marked,
    seed_for,
    single_steps,
)
from accelerate.data.position import Epoch, Given
from accelerate.data.shard import BatchSamplerShard, cut_of
from accelerate.data.sharded import compared
from accelerate.data.states import Hosts, owned, put_back, states_of
from accelerate.data.stream import IterableDatasetShard
from accelerate.world import collective
from accelerate.world.rng import derive, seed_host

Opener = Callable[[Any, list[Any], Epoch, bool], Iterator[Step]]


def by_index(loader: DataLoader[Any]) -> bool:
    """Whether torch's own loop fetches what a sampler tells it to."""
    return torchs_own(loader) and not isinstance(loader.dataset, IterableDataset)


def torchs_own(loader: DataLoader[Any]) -> bool:
    """Whether a loader iterates as torch's own does."""
    kind = type(loader)
    return kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator


def generators_of(loader: DataLoader[Any]) -> list[Any]:
    """The random generators that a loader's order may be made of: its own, its samplers', its stream's."""
    holders: list[Any] = [loader, *chain_of(sampler_of(loader))]
    if not by_index(loader):
        stream: Any = loader.dataset
        while stream is not None and not any(stream is holder for holder in holders):
            holders.append(stream)
            stream = getattr(stream, "dataset", None)
    return owned(*holders)


def sampler_of(loader: DataLoader[Any]) -> Any:
    """What gives a loader its batches of indices, or single ones."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def with_parts(loader: DataLoader[Any], **parts: Any) -> DataLoader[Any]:
    """A shallow copy of a loader with other parts: its class and every attribute stay."""
    twin = copy.copy(loader)
    # Torch forbids assigning these after construction; the copy has not been iterated yet.
    twin.__dict__.update(parts)
    twin.__dict__["_iterator"] = None
    return twin


def feeding(loader: DataLoader[Any]) -> tuple[DataLoader[Any], Feed]:
    """The loader with a feed in place of its sampler, and the feed."""
    feed = Feed(sampler_of(loader))
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    return with_parts(loader, **{name: feed}), feed


class Feed(Sampler[Any]):
    """Stands in for a loader's sampler; what it gives out is decided for every epoch.

    Args:
        shown: the sampler it stands for.
    """

    def __init__(self, shown: Any) -> None:
        self.shown = shown
        self.upcoming: Iterator[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "shown":
            raise AttributeError(name)
        return getattr(self.shown, name)

    def __iter__(self) -> Iterator[Any]:
        # Torch asks twice for one epoch when it has workers.
        return iter(self.shown) if self.upcoming is None else self.upcoming

    def __len__(self) -> int:
        return len(self.shown)


@dataclass(frozen=True)
class _Seeded:
    """Indices on their way to a worker; unpacking them there seeds it for this fetch."""

    indices: Any
    seed: int

    def __reduce__(self) -> Any:
        return _begin_fetch, (self.indices, self.seed)


def _begin_fetch(indices: Any, seed: int) -> Any:
    seed_host(seed)
    return indices


def pick(
    base: DataLoader[Any], fed: DataLoader[Any], feed: Feed, epoch: Epoch, opener: Opener | None = None
) -> Iterator[Given]:
    """The batches of map-style data, from where ``epoch`` is to begin.

    Args:
        base: the loader, sharded.
        fed: the same with ``feed`` in place of its sampler.
        epoch: what to leave out, and how to begin; what the order is made of is noted there.
        opener: gives the steps instead of ``open_steps``.
    """
    known: deque[Step] = deque()
    held: list[Hosts] = []
    generators = generators_of(base)
    outside = torch.default_generator.get_state()
    inside = epoch.again and not epoch.natural
    # Torch draws a seed for workers when it starts them: here and now, but not where the epoch began.
    started = base.persistent_workers and epoch.warm and fed._iterator is None
    epoch.now = states_of(generators) if inside or started else None

    def issued() -> Iterator[Any]:
        if started and not inside:
            torch.default_generator.set_state(outside)
            put_back(generators, epoch.now or [])
            epoch.now = None
        # What several processes read alike is drawn alike in this process too, not only in workers.
        seeded, workers = base.num_workers > 0 or epoch.readers is not None, base.num_workers > 0
        steps = (opener or open_steps)(sampler_of(base), generators, epoch, seeded)
        issue = _issued(base, epoch, steps, known) if seeded else _noted(epoch, steps, known)
        yield from issue if workers or not seeded else _beginning(issue, held)

    feed.upcoming = issued()
    iterator = iter(fed)
    if inside:
        torch.default_generator.set_state(outside)
    single = base.batch_sampler is None
    for batch in _putting_back(iterator, held):
        step = known.popleft()
        remainder, real = step.remainder, step.real
        if single and remainder:
            # An item that the data makes itself may have any number of rows: all of them count, or none.
            remainder, real = -1, None if real else 0
        yield Given(batch, step.last, step.samples, remainder, real)


def _noted(epoch: Epoch, steps: Iterator[Step], known: deque[Step]) -> Iterator[Any]:
    """The indices of each step, which is noted in ``known``."""
    for step in steps:
        known.append(step)
        epoch.exhausted = epoch.exhausted or step.last
        yield step.indices


def _issued(base: DataLoader[Any], epoch: Epoch, steps: Iterator[Step], known: deque[Step]) -> Iterator[Any]:
    """The same for workers, with the seed of what they draw."""
    readers = epoch.readers
    alone = collective.rank() if readers is None else readers.index if readers.apart else 0
    part = 0 if shard_of(base) is not None else alone
    for indices in _noted(epoch, steps, known):
        assert epoch.start is not None
        assert epoch.start.data is not None
        # A function of the place in the order: what was skipped, and how many workers read, do not count.
        seed = derive(epoch.start.data, "data", epoch.number, part, known[-1].offset)
        yield _Seeded(indices, seed)


def _beginning(issued: Iterator[_Seeded], held: list[Hosts]) -> Iterator[Any]:
    """The indices of each fetch in this process, which begins with its seed; ``held`` gets what was."""
    for item in issued:
        held.append(Hosts.capture())
        yield _begin_fetch(item.indices, item.seed)


def _putting_back(batches: Iterator[Any], held: list[Hosts]) -> Iterator[Any]:
    """The same batches; after each fetch the program's generators are as they were before it."""
    while True:
        try:
            batch = next(batches, END)
        finally:
            if held:
                held.pop().restore()
        if batch is END:
            return
        yield batch


def _agreement(epoch: Epoch, shared: bool) -> Agree:
    """How this process's order is agreed on."""
    if epoch.readers is not None:
        return epoch.readers.agree
    return collective.agree if shared else None


def shard_of(base: DataLoader[Any]) -> BatchSamplerShard | None:
    """The sampler that shares out a loader's batches to several processes, if there is one."""
    for item in chain_of(sampler_of(base))[:2]:
        if isinstance(item, BatchSamplerShard) and item.num_processes > 1:
            return item
    return None


def open_steps(sampler: Any, generators: list[Any], epoch: Epoch, workers: bool) -> Iterator[Step]:
    """This process's steps of an epoch; its order is drawn, or made again, at once.

    Args:
        sampler: a batch sampler, one of single indices, or a shard of either.
        generators: those that the loader and its samplers hold.
        epoch: see ``pick``.
        workers: batches are fetched by workers.
    """
    below = getattr(sampler, "batch_sampler", None)
    single = isinstance(below, BatchSamplerShard) and not isinstance(sampler, BatchSamplerShard)
    holder = below if single else sampler
    shard = holder if isinstance(holder, BatchSamplerShard) and holder.num_processes > 1 else None
    start = epoch.start if epoch.again else None
    cut = cut_of(holder)
    if cut is not None:
        steps = _cut(cut, holder, generators, epoch, start, _agreement(epoch, shard is not None), workers)
    else:
        steps = _walked(holder, shard, generators, epoch, start)
    return (step._replace(indices=step.indices[0]) for step in steps) if single else steps


def _cut(
    cut: Cut,
    holder: Any,
    generators: list[Any],
    epoch: Epoch,
    start: Start | None,
    agree: Agree,
    workers: bool,
) -> Iterator[Step]:
    sampler, skip = inner_sampler(holder), epoch.skip
    if epoch.natural:
        seed_for(sampler)
    always = epoch.readers is not None
    order, epoch.start = open_order(
        sampler, generators, agree=agree, start=start, now=epoch.now, data=workers, always=always
    )
    offset = skip.batches * cut.step if skip.samples is None else skip.samples
    if epoch.again and epoch.length not in (None, len(order)):
        warnings.warn(
            f"the data has {len(order)} samples, but the checkpoint was saved with {epoch.length}: the order "
            "of the samples is another one, so some are repeated and others are left out",
            stacklevel=2,
        )
    epoch.length, epoch.samples = len(order), min(offset, len(order))
    return ending(cut.steps(order, offset), sampler, epoch.again and epoch.exhausted)


def _walked(
    holder: Any, shard: BatchSamplerShard | None, generators: list[Any], epoch: Epoch, start: Start | None
) -> Iterator[Step]:
    items = holder if shard is None else shard.batch_sampler
    found, epoch.start = open_walk(items, generators, agree=_agreement(epoch, shard is not None), start=start)
    if shard is not None and shard.unproved is not None:
        found, shard.unproved = compared(found, shard.unproved), None
    group = 1 if shard is None or shard.split_batches else shard.num_processes
    skip = epoch.skip
    rest, epoch.samples, head = behind(found, skip.batches * group, skip.samples, group)
    if shard is not None:
        return marked(shard.steps(rest, epoch.samples, head))
    return marked(single_steps(rest, epoch.samples, getattr(holder, "batch_size", None) or 1))


class _Persisting:
    """A stream that persistent workers read; each begins every epoch with random numbers of that epoch.

    They would go on with what the epoch before left, which a new process cannot know.
    """

    def __init__(self, base: DataLoader[Any], fed: DataLoader[Any], feed: Feed, epoch: Epoch) -> None:
        self.base, self.fed, self.feed, self.epoch = base, fed, feed, epoch

    def __iter__(self) -> Iterator[Any]:
        hosts, generators = Hosts.capture(), generators_of(self.base)
        started, now = self.epoch.warm and self.fed._iterator is None, states_of(generators)
        # It must not hold what holds the workers: they would outlive their loader until garbage is collected.
        self.feed.upcoming = _fresh(self.base, hosts.digest(), self.epoch.number)
        iterator = iter(self.fed)
        if started:  # torch has drawn a seed for them, which it did not where the epoch began
            hosts.restore()
            put_back(generators, now)
        return iterator


def _fresh(base: DataLoader[Any], seed: int, epoch: int) -> Iterator[Any]:
    """What each worker is asked for, the first time with a seed."""
    for number, item in enumerate(sampler_of(base)):
        # They are asked in turn.
        yield _Seeded(item, derive(seed, "data", epoch, number)) if number < base.num_workers else item


def read(
    base: DataLoader[Any], epoch: Epoch, step: int, feeding: tuple[DataLoader[Any], Feed] | None = None
) -> Iterator[tuple[Any, bool]]:
    """Each batch of a stream, or of a loader that iterates in its own way, and whether it is the last.

    Args:
        base: the loader, sharded.
        epoch: see ``pick``; what it leaves out is read and dropped, so that all draws are as they were.
        step: samples of all processes in a step.
        feeding: the loader with a feed in place of its sampler, for workers that persist.
    """
    generators = generators_of(base)
    if epoch.natural:  # torch's loader draws a seed for workers
        torch.empty((), dtype=torch.int64).random_(generator=base.generator)
    stream = isinstance(base.dataset, IterableDataset)
    agree = _agreement(epoch, type(base.dataset) is IterableDatasetShard and base.dataset.num_processes > 1)
    start = epoch.start if epoch.again else None
    items, count = _behind(base, generators, epoch, step)
    if items is base and feeding and base.persistent_workers and stream and torchs_own(base):
        items = _Persisting(base, *feeding, epoch)
    aside = base.num_workers == 0 or not stream
    batches, epoch.start = open_walk(items, generators, agree=agree, start=start, aside=aside)
    upcoming = next(islice(batches, count, None), END)
    while upcoming is not END:
        batch, upcoming = upcoming, next(batches, END)
        yield batch, upcoming is END


def _behind(
    base: DataLoader[Any], generators: list[Any], epoch: Epoch, step: int
) -> tuple[Iterable[Any], int]:
    """What to iterate, and how many items of it to leave out."""
    skip = epoch.skip
    epoch.samples = skip.batches * step if skip.samples is None else skip.samples
    if epoch.samples == skip.batches * step and epoch.cut_by in (None, (epoch.parts, step)):
        return base, skip.batches
    if isinstance(base.dataset, IterableDataset):
        return onward(base, epoch), 1
    # The loader's own batches cannot be cut, but its sampler's can.
    fed, feed = feeding(base)
    part = Epoch(epoch.number, skip)
    feed.upcoming = _later(base, generators, part)
    return fed, 0


def _later(base: DataLoader[Any], generators: list[Any], epoch: Epoch) -> Iterator[Any]:
    shard = shard_of(base)
    for step in open_steps(sampler_of(base), generators, epoch, workers=False):
        if shard is not None:
            shard.remainder = step.remainder
        yield step.indices
