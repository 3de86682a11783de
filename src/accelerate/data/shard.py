"""Which samples each process sees: views of batch samplers and of streams. Nothing is drawn here.

Order of the samples of one global step: rank 0's batch, then rank 1's, ... which is the order of the
unsharded sampler. The last step is filled by going round to the first samples, so the fillers are the tail
of that step, and dropping them needs only a count.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, cycle, islice
from typing import Any

from torch.utils.data import BatchSampler

from accelerate.core.errors import PrepareError
from accelerate.data.epoch import ending, open_order, open_walk
from accelerate.data.order import Cut, SeedableRandomSampler, Step, chain_of, inner_sampler, is_known
from accelerate.data.states import owned
from accelerate.data.stream import IterableDatasetShard
from accelerate.world import collective

__all__ = ["BatchSamplerShard", "IterableDatasetShard", "SeedableRandomSampler", "SkipBatchSampler", "cut_of"]


class BatchSamplerShard(BatchSampler):
    """One process's batches of a batch sampler that every process iterates alike.

    Args:
        batch_sampler: the unsharded one; kept under this name and read afresh in each epoch.
        num_processes: how many processes share it.
        process_index: this process's rank.
        split_batches: each process takes a part of every batch, instead of whole batches in turn.
        even_batches: fill the last step from the beginning, so that all processes have as many full batches.

    Raises:
        PrepareError: ``split_batches`` and the batch size does not divide by the number of processes.
    """

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
        # The loader in words, as long as nobody has seen that all ranks begin with one order.
        self.unproved: str | None = None
        # How many samples of the last step are real, once it was given out; 0 when all are.
        self.remainder = -1
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last: bool = getattr(batch_sampler, "drop_last", False)
        if split_batches and self.batch_size is not None and self.batch_size % num_processes:
            raise PrepareError(
                f"a batch of {self.batch_size} samples cannot be split over {num_processes} processes",
                why="split_batches=True cuts every batch into equal parts",
                fix=f"use a batch size that is a multiple of {num_processes}",
            )

    def __getattr__(self, name: str) -> Any:
        # `sampler` and whatever else a user's own batch sampler has.
        if name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    @property
    def total_length(self) -> int:
        """Number of batches of the unsharded sampler."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        batches = len(self.batch_sampler)
        if self.split_batches or self.num_processes == 1:
            return batches
        whole, rest = divmod(batches, self.num_processes)
        if rest == 0 or self.drop_last:
            return whole
        return whole + 1 if self.even_batches else whole + (self.process_index < rest)

    def __iter__(self) -> Iterator[list[Any]]:
        self.remainder = 0
        if self.num_processes == 1:
            return iter(self.batch_sampler)
        return self._noted()

    def _noted(self) -> Iterator[list[Any]]:
        cut, sampler = cut_of(self), inner_sampler(self)
        generators = owned(*chain_of(self))
        if cut is not None:
            order, _ = open_order(sampler, generators, agree=collective.agree)
            steps = ending(cut.steps(order, 0), sampler, False)
        else:
            steps = self.steps(open_walk(self.batch_sampler, generators, agree=collective.agree)[0], 0, [])
        for step in steps:
            self.remainder = step.remainder
            yield step.indices

    def steps(self, batches: Iterator[list[Any]], taken: int, head: list[Any]) -> Iterator[Step]:
        """This process's part of every step, from the batches of all.

        Args:
            batches: of the unsharded batch sampler.
            taken: samples before them that were left out, and
            head: the first batches of those, at most ``num_processes``, to fill the last step from.
        """
        return (
            self._split(batches, taken, head) if self.split_batches else self._in_turn(batches, taken, head)
        )

    def _in_turn(self, batches: Iterator[list[Any]], taken: int, head: list[Any]) -> Iterator[Step]:
        first = list(head)
        group: list[list[Any]] = []
        for batch in batches:
            # A complete group is handed out only when more follows: the last one may need filling.
            if len(group) == self.num_processes:
                yield self._whole(group, taken)
                taken += sum(map(len, group))
                group = []
            if len(first) < self.num_processes:
                first.append(batch)
            group.append(batch)
        if len(group) == self.num_processes and all(map(self._is_full, group)):
            yield self._whole(group, taken)
        elif group and (len(group) == self.num_processes or not self.drop_last):
            yield from self._last(group, first, taken)

    def _is_full(self, batch: list[Any]) -> bool:
        return self.batch_size is None or len(batch) >= self.batch_size

    def _whole(self, group: list[list[Any]], taken: int, remainder: int = 0) -> Step:
        mine = group[self.process_index]
        before = sum(map(len, group[: self.process_index]))
        return Step(mine, False, sum(map(len, group)), remainder, len(mine), taken + before)

    def _last(self, group: list[list[Any]], first: list[list[Any]], taken: int) -> Iterator[Step]:
        """The incomplete last step."""
        real = sum(map(len, group))
        if not self.even_batches:
            if self.process_index < len(group):
                yield self._whole(group, taken, real)
            return
        if self.batch_size is None:
            # Batches of varying size cannot be cut anew: whole ones are repeated.
            if self.process_index < len(group):
                yield self._whole(group, taken, real)
            else:
                filler = list(islice(chain(group, cycle(first)), self.num_processes))[self.process_index]
                yield Step(filler, False, real, real, 0, taken + real)
            return
        samples = chain(chain.from_iterable(group), cycle(list(chain.from_iterable(first))))
        start = self.process_index * self.batch_size
        mine = list(islice(samples, start, start + self.batch_size))
        yield Step(mine, False, real, real, _between(real - start, self.batch_size), taken + start)

    def _split(self, batches: Iterator[list[Any]], taken: int, head: list[Any]) -> Iterator[Step]:
        first: list[Any] = head[0] if head else []
        for batch in batches:
            first = first or batch
            real = len(batch)
            size = self.batch_size or real + -real % self.num_processes
            if real < size:
                if self.drop_last:
                    continue
                if self.even_batches:
                    batch = list(islice(chain(batch, cycle(first)), size))
            share = size // self.num_processes
            start = self.process_index * share
            part = batch[start : start + share]
            if part:
                yield Step(part, False, real, real % size, _between(real - start, share), taken + start)
            taken += real


def _between(value: int, most: int) -> int:
    return min(max(value, 0), most)


def cut_of(sampler: Any) -> Cut | None:
    """How the order below a sampler is cut, if it is one of torch's in one of torch's batch samplers.

    Args:
        sampler: a batch sampler, a ``BatchSamplerShard`` over one, or a sampler of single indices.
    """
    if is_known(sampler):
        return Cut(1, single=True)
    shard = sampler if type(sampler) is BatchSamplerShard else None
    batches = sampler if shard is None else shard.batch_sampler
    if type(batches) is not BatchSampler or not is_known(batches.sampler):
        return None
    if shard is None or shard.num_processes == 1:
        return Cut(batches.batch_size, drop=batches.drop_last)
    share = shard.batch_size or 1
    if shard.split_batches:
        share //= shard.num_processes
    return Cut(
        share,
        shard.num_processes,
        shard.process_index,
        drop=shard.drop_last,
        fill=shard.even_batches,
    )


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first ``skip_batches`` batches; no sample of those is loaded."""

    def __init__(self, batch_sampler: BatchSampler, skip_batches: int = 0) -> None:
        self.batch_sampler, self.skip_batches = batch_sampler, skip_batches

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def __iter__(self) -> Iterator[Any]:
        cut = cut_of(self.batch_sampler)
        if cut is None:
            return islice(iter(self.batch_sampler), self.skip_batches, None)
        return self._rest(cut)

    def _rest(self, cut: Cut) -> Iterator[list[Any]]:
        """From where the order is cut; nothing is made of what is left out."""
        sampler = inner_sampler(self)
        order, _ = open_order(
            sampler, owned(*chain_of(self)), agree=collective.agree if cut.size > 1 else None
        )
        for step in ending(cut.steps(order, self.skip_batches * cut.step), sampler, False):
            yield step.indices

    @property
    def total_length(self) -> int:
        """Number of batches with the skipped ones."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)
