"""The samples of every rank in every step, cut on one process from the order of map-style data."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler

from accelerate.data.shard import BatchSamplerShard

Share = tuple[list[Any], int]


class Mark(NamedTuple):
    """What is known of a batch before it is read.

    Attributes:
        rank: whose it is.
        real: rows that are no fillers; None: all.
        samples: real samples of its step, all ranks together; None: all of a full one.
        remainder: the same where the step was filled, else 0; -1 when samples are not rows.
    """

    rank: int
    real: int | None
    samples: int | None
    remainder: int


class StepSampler(BatchSamplerShard):
    """The batches of all ranks, step by step in rank order, of a batch sampler that rank 0 alone iterates.

    Args:
        batch_sampler: the unsharded one.
        num_processes, process_index: how many ranks there are, and this one's, for its number of batches.
        split_batches, even_batches: see ``BatchSamplerShard``.
        single: the sampler gives single indices, for loaders that do not collate.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int,
        process_index: int,
        split_batches: bool,
        even_batches: bool,
        single: bool = False,
    ) -> None:
        if single:
            batch_sampler = BatchSampler(batch_sampler, 1, drop_last=False)
        super().__init__(batch_sampler, num_processes, process_index, split_batches, even_batches)
        self.single = single
        # Steps that the next iteration leaves out.
        self.skip = 0
        # The marks of the newest iteration; batches come out of the loader in the order they went in.
        self.marks: deque[Mark] = deque()

    def __iter__(self) -> Iterator[Any]:
        self.marks = marks = deque[Mark]()
        skip, self.skip = self.skip, 0
        return self._all(marks, skip)

    def _all(self, marks: deque[Mark], skip: int) -> Iterator[Any]:
        for step in islice(self._steps(), skip, None):
            real = sum(count for _, count in step)
            filled = real < sum(len(part) for part, _ in step)
            for rank, (part, count) in enumerate(step):
                if not part:
                    continue
                if not filled:
                    marks.append(Mark(rank, None, real, 0))
                elif self.single:
                    marks.append(Mark(rank, None if count else 0, real, -1))
                else:
                    marks.append(Mark(rank, count, real, real))
                yield part[0] if self.single else part

    def _steps(self) -> Iterator[list[Share]]:
        """For each step, every rank's samples and how many of them are real."""
        if self.split_batches:
            yield from self._cut_each()
            return
        first: list[list[Any]] = []
        group: list[list[Any]] = []
        for batch in self.batch_sampler:
            if len(group) == self.num_processes:
                yield [(whole, len(whole)) for whole in group]
                group = []
            if len(first) < self.num_processes:
                first.append(batch)
            group.append(batch)
        if len(group) == self.num_processes and (self.drop_last or all(map(self._is_full, group))):
            yield [(whole, len(whole)) for whole in group]
        elif group and not self.drop_last:
            yield self._last_step(group, first)

    def _last_step(self, group: list[list[Any]], first: list[list[Any]]) -> list[Share]:
        if not self.even_batches:
            missing = self.num_processes - len(group)
            return [(whole, len(whole)) for whole in group] + [([], 0)] * missing
        if self.batch_size is None:
            # Batches of varying size cannot be cut anew: whole ones are repeated.
            repeated = islice(cycle(first), self.num_processes - len(group))
            return [(whole, len(whole)) for whole in group] + [(whole, 0) for whole in repeated]
        return _shares(chain.from_iterable(group), chain.from_iterable(first), self.num_processes)

    def _cut_each(self) -> Iterator[list[Share]]:
        first: list[Any] = []
        for batch in self.batch_sampler:
            first = first or batch
            if not (self.drop_last and len(batch) < (self.batch_size or 0)):
                yield _shares(batch, first if self.even_batches else [], self.num_processes)


def _shares(samples: Iterable[Any], first: Iterable[Any], count: int) -> list[Share]:
    """``samples``, filled by going round in ``first``, cut into ``count`` equal parts."""
    whole = list(samples)
    real, share = len(whole), -(-len(whole) // count)
    whole = list(islice(chain(whole, cycle(first)), share * count))
    starts = range(0, share * count, share)
    parts = [whole[start : start + share] for start in starts]
    return [(part, min(len(part), max(0, real - start))) for start, part in zip(starts, parts, strict=True)]
