"""Sharding of batch samplers over the processes. No random numbers are drawn here.

A global step holds rank 0's batch, then rank 1's and so on, in the order of the unsharded sampler. The last
step is filled with the first samples again, so the fillers are the tail of that step, and dropping them needs
only a count.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, cycle, islice
from typing import Any, TypeGuard

from torch.utils.data import BatchSampler, DataLoader, Sampler

from accelerate.core.errors import PrepareError
from accelerate.data.epoch_order import (
    find_generators,
    finish_at_end,
    inner_sampler,
    open_order,
    open_walk,
    sampler_chain,
)
from accelerate.data.sample_order import (
    RankSampleOrderSlicer,
    StepSampleIndices,
    is_known,
    is_torch_batch_sampler,
)
from accelerate.world import collective


class BatchSamplerShard(BatchSampler):
    """One process's shard of a batch sampler that every process iterates in the same order.

    Args:
        batch_sampler: the unsharded one; kept under this name and iterated anew in each epoch.
        num_processes: number of shards.
        process_index: the index of this process's shard.
        split_batches: each process takes a part of every batch, instead of whole batches in turn.
        even_batches: fill the last step from the beginning, so that all processes have as many full batches.

    Raises:
        PrepareError: ``split_batches`` and the batch size does not divide by the number of processes.
    """

    num_processes: int
    process_index: int
    split_batches: bool
    even_batches: bool

    def __init__(
        self,
        batch_sampler: BatchSampler,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes, self.process_index = num_processes, process_index
        self.split_batches, self.even_batches = split_batches, even_batches
        # The user's loader, until the ranks have verified that all begin with the same order.
        self.unverified: DataLoader[Any] | None = None
        # The steps that a loader with its own iteration has taken the indices of, in order.
        self.taken_steps: deque[StepSampleIndices] = deque()
        self.is_opened: bool = False  # by such a loader
        if split_batches:
            check_split(self.batch_size, num_processes)

    def __getattr__(self, name: str) -> Any:
        # `sampler` and whatever else a user's own batch sampler has.
        if name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    @property
    def batch_size(self) -> int | None:  # type: ignore[override]
        """The batch size of the sampler now; None if it has none."""
        return getattr(self.batch_sampler, "batch_size", None)

    @batch_size.setter
    def batch_size(self, batch_size: int) -> None:
        if self.split_batches:
            check_split(batch_size, self.num_processes)
        self.batch_sampler.batch_size = batch_size

    @property
    def drop_last(self) -> bool:  # type: ignore[override]
        """The option of the sampler now."""
        return getattr(self.batch_sampler, "drop_last", False)

    @drop_last.setter
    def drop_last(self, drop_last: bool) -> None:
        self.batch_sampler.drop_last = drop_last

    @property
    def total_length(self) -> int:
        """The number of batches of the unsharded sampler."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        batches = len(self.batch_sampler)
        if self.num_processes == 1:
            return batches
        if is_torch_batch_sampler(self.batch_sampler):
            return self.slicer.count_steps(len(self.batch_sampler.sampler))  # type: ignore[arg-type]
        if self.split_batches:
            if self.batch_size is None and not self.even_batches:
                raise TypeError("the parts of batches of unknown size are not known before they are drawn")
            return batches
        return self.count_steps(batches)

    def count_steps(self, batches: int) -> int:
        """Count the steps of this process in so many whole batches, which the processes take in turn."""
        return replace(self.slicer, rank_samples=1).count_steps(batches)

    @property
    def slicer(self) -> RankSampleOrderSlicer:
        """The slicer of the order of one of torch's batch samplers."""
        share = (self.batch_size or 1) // (self.num_processes if self.split_batches else 1)
        return RankSampleOrderSlicer(
            share,
            self.num_processes,
            self.process_index,
            drop_last=self.drop_last,
            fill_last=self.even_batches,
        )

    def __iter__(self) -> Iterator[list[Any]]:
        if self.num_processes == 1:
            return iter(self.batch_sampler)
        self.taken_steps.clear()
        self.is_opened = True
        return self._iter_with_split() if self.split_batches else self._iter_with_no_split()

    # Subclasses of programs override one of the two.
    def _iter_with_split(self) -> Iterator[list[Any]]:
        return self._record_steps()

    def _iter_with_no_split(self) -> Iterator[list[Any]]:
        return self._record_steps()

    def _record_steps(self) -> Iterator[list[Any]]:
        slicer, sampler = slicer_for(self), inner_sampler(self)
        generators = find_generators(*sampler_chain(self))
        if slicer is not None:
            order, _ = open_order(sampler, generators, broadcast=collective.broadcast_object)
            steps = finish_at_end(slicer.steps(order, 0), sampler, False)
        else:
            steps = self.steps(
                open_walk(self.batch_sampler, generators, broadcast=collective.broadcast_object)[0], 0, []
            )
        for step in steps:
            self.taken_steps.append(step)
            yield step.indices

    def steps(
        self, batches: Iterator[list[Any]], skipped: int, first_batches: list[Any]
    ) -> Iterator[StepSampleIndices]:
        """Return this process's part of every step, from the unsharded batches.

        Args:
            batches: those of the unsharded batch sampler.
            skipped: number of samples skipped before them, and
            first_batches: at most ``num_processes`` of the skipped batches, to fill the last step from.
        """
        return (
            self._split_each(batches, skipped, first_batches)
            if self.split_batches
            else self._take_whole(batches, skipped, first_batches)
        )

    def _take_whole(
        self, batches: Iterator[list[Any]], skipped: int, first_batches: list[Any]
    ) -> Iterator[StepSampleIndices]:
        first = list(first_batches)
        group: list[list[Any]] = []
        for batch in batches:
            # Yield a complete group only when another batch follows: the last one may need filling.
            if len(group) == self.num_processes:
                yield self._take_batch(group, skipped)
                skipped += sum(map(len, group))
                group = []
            if len(first) < self.num_processes:
                first.append(batch)
            group.append(batch)
        size = self.batch_size
        if len(group) == self.num_processes and all(size is None or len(batch) >= size for batch in group):
            yield self._take_batch(group, skipped)
        elif group and (len(group) == self.num_processes or not self.drop_last):
            yield from self._fill_last_step(group, first, skipped)

    def _take_batch(self, group: list[list[Any]], skipped: int, remainder: int = 0) -> StepSampleIndices:
        batch = group[self.process_index]
        before = sum(map(len, group[: self.process_index]))
        return StepSampleIndices(batch, False, sum(map(len, group)), remainder, len(batch), skipped + before)

    def _fill_last_step(
        self, group: list[list[Any]], first: list[list[Any]], skipped: int
    ) -> Iterator[StepSampleIndices]:
        """Yield the incomplete last step."""
        real = sum(map(len, group))
        if not self.even_batches:
            if self.process_index < len(group):
                yield self._take_batch(group, skipped, real)
            return
        if self.batch_size is None or any(len(batch) > self.batch_size for batch in group):
            # Batches of varying size cannot be divided anew: repeat whole ones.
            if self.process_index < len(group):
                yield self._take_batch(group, skipped, real)
            else:
                filler = list(islice(chain(group, cycle(first)), self.num_processes))[self.process_index]
                yield StepSampleIndices(filler, False, real, real, 0, skipped + real)
            return
        samples = chain(chain.from_iterable(group), cycle(list(chain.from_iterable(first))))
        start = self.process_index * self.batch_size
        indices = list(islice(samples, start, start + self.batch_size))
        yield StepSampleIndices(
            indices, False, real, real, _clamp(real - start, self.batch_size), skipped + start
        )

    def _split_each(
        self, batches: Iterator[list[Any]], skipped: int, first_batches: list[Any]
    ) -> Iterator[StepSampleIndices]:
        first: list[Any] = first_batches[0] if first_batches else []
        for batch in batches:
            first = first if len(first) else batch  # the batches of a sampler may be arrays
            real = len(batch)
            size = max(self.batch_size or 0, real + -real % self.num_processes)
            if real < size:
                if self.drop_last and real < (self.batch_size or size):
                    continue
                if self.even_batches:
                    batch = list(islice(chain(batch, cycle(first)), size))
            share = size // self.num_processes
            start = self.process_index * share
            part = batch[start : start + share]
            if len(part):
                yield StepSampleIndices(
                    part, False, real, real % size, _clamp(real - start, share), skipped + start
                )
            skipped += real


_ITERATE = BatchSamplerShard.__iter__


def shards_batches(sampler: Any) -> TypeGuard[BatchSamplerShard]:
    """Return True if a sampler takes this process's part of batches that all processes draw.

    False for one process, and where a program has put a function of its own in place of
    ``BatchSamplerShard.__iter__`` because its sampler gives each process its part already: what that yields
    is fetched as it is.
    """
    return (
        isinstance(sampler, BatchSamplerShard)
        and sampler.num_processes > 1
        and type(sampler).__iter__ is _ITERATE
    )


def check_split(batch_size: int | None, count: int) -> None:
    """Check that ``split_batches`` can cut batches of this size into ``count`` equal parts.

    Raises:
        PrepareError: the size is known, and no multiple of ``count``.
    """
    if batch_size is not None and batch_size % count:
        raise PrepareError(
            f"a batch of {batch_size} samples cannot be split over {count} processes",
            why="split_batches=True cuts every batch into equal parts",
            fix=f"use a batch size that is a multiple of {count}",
        )


def _clamp(value: int, most: int) -> int:
    return min(max(value, 0), most)


def slicer_for(sampler: Any) -> RankSampleOrderSlicer | None:
    """Return the slicer of a sampler, if it is one of torch's in one of torch's batch samplers, else None.

    Args:
        sampler: a batch sampler, a ``BatchSamplerShard`` over one, or a sampler of single indices.
    """
    if is_known(sampler):
        return RankSampleOrderSlicer(1, single=True)
    own = type(sampler) is BatchSamplerShard and type(sampler).__iter__ is _ITERATE
    shard: BatchSamplerShard | None = sampler if own else None
    batches = sampler if shard is None else shard.batch_sampler
    if not is_torch_batch_sampler(batches) or not is_known(batches.sampler):
        return None
    if shard is None or shard.num_processes == 1:
        return RankSampleOrderSlicer(batches.batch_size, drop_last=batches.drop_last)
    return shard.slicer


class SingleIndexSampler(Sampler[Any]):
    """A sampler of single indices from a shard with batches of one, for loaders that do not collate."""

    def __init__(self, shard: BatchSamplerShard) -> None:
        self.batch_sampler = shard

    def __iter__(self) -> Iterator[Any]:
        return (batch[0] for batch in self.batch_sampler)

    def __len__(self) -> int:
        return len(self.batch_sampler)


def shard_by_index(
    loader: DataLoader[Any],
    count: int,
    index: int,
    split: bool,
    even: bool,
    unverified: DataLoader[Any] | None = None,
) -> DataLoader[Any]:
    """Return a copy of a loader of map-style data whose sampler is a ``BatchSamplerShard``.

    Args:
        loader: the user's; the single indices of one that does not collate are not split.
        count, index, split, even: see ``BatchSamplerShard``.
        unverified: see there.
    """
    batches: Any = loader.batch_sampler
    if batches is None and isinstance(loader.sampler, BatchSampler):
        batches = loader.sampler
    is_single = batches is None
    if is_single:
        batches, split = BatchSampler(loader.sampler, batch_size=1, drop_last=False), False
    shard = BatchSamplerShard(batches, count, index, split, even)
    shard.unverified = unverified
    return copy_loader(loader, batch_sampler=SingleIndexSampler(shard) if is_single else shard)


def copy_loader(loader: DataLoader[Any], **parts: Any) -> DataLoader[Any]:
    """Return a shallow copy of a loader with other ``parts``, such as a shard of its batch sampler.

    Its class and all other attributes stay. Where a loader does not collate, what gives it its batches, or
    single indices, is its ``sampler``.
    """
    if loader.batch_sampler is None and "batch_sampler" in parts:
        parts["sampler"] = parts.pop("batch_sampler")
    loader_copy = copy.copy(loader)
    # Torch forbids assigning these after construction; the copy has not been iterated yet.
    loader_copy.__dict__.update(parts)
    loader_copy.__dict__["_iterator"] = None
    return loader_copy
