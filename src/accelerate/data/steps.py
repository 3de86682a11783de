"""Every rank's samples of every step, cut on one process from the order of map-style data."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice
from typing import Any

from torch.utils.data import Sampler

from accelerate.data.epoch import ending, open_order, open_walk
from accelerate.data.order import Cut, Step, behind, inner_sampler, marked, seed_for
from accelerate.data.position import Epoch
from accelerate.data.shard import BatchSamplerShard, cut_of

# A rank's samples of a step, and how many of them are real.
Share = tuple[list[Any], int]


class AllRanks:
    """Opens the steps of all ranks, one after the other, in place of ``reading.open_steps``.

    An incomplete step is shared equally, and what is missing are the first samples again.

    Args:
        shard: how the loader's sampler is shared out.
        single: the loader does not collate, so a batch is one index.

    Attributes:
        ranks: whose the batches are that were given out and not yet come back from the loader.
    """

    def __init__(self, shard: BatchSamplerShard, single: bool) -> None:
        self.shard, self.single = shard, single
        self.ranks: deque[int] = deque()

    def __call__(self, sampler: Any, generators: list[Any], epoch: Epoch, workers: bool) -> Iterator[Step]:
        """Every rank's batches in turn; the arguments are those of ``reading.open_steps``."""
        items: Any = self.shard.batch_sampler
        start = epoch.start if epoch.again else None
        cut = cut_of(items)
        if cut is not None:
            inner, skip = inner_sampler(items), epoch.skip
            if epoch.natural:
                seed_for(inner)
            order, epoch.start = open_order(
                inner, generators, agree=None, start=start, now=epoch.now, data=workers
            )
            size = cut.share * (1 if self.shard.split_batches else self.shard.num_processes)
            offset = skip.batches * size if skip.samples is None else skip.samples
            epoch.length, epoch.samples = len(order), min(offset, len(order))
            first = [int(index) for index in order[: self.shard.num_processes]]
            whole = Cut(size, drop=cut.drop).steps(order, offset)
            steps = self._known(ending(whole, inner, epoch.again and epoch.exhausted), first, cut.share)
        else:
            found, epoch.start = open_walk(items, generators, agree=None, start=start)
            group = 1 if self.shard.split_batches else self.shard.num_processes
            rest, epoch.samples, head = behind(found, epoch.skip.batches * group, epoch.skip.samples, group)
            steps = self._cut_each(rest, head) if self.shard.split_batches else self._in_turn(rest, head)
        return marked(self._told(steps, epoch.samples))

    def _told(self, steps: Iterable[list[Share]], taken: int) -> Iterator[Step]:
        for step in steps:
            real = sum(count for _, count in step)
            filled = real < sum(len(part) for part, _ in step)
            offset = taken
            for rank, (part, count) in enumerate(step):
                if part:
                    self.ranks.append(rank)
                    mine = part[0] if self.single else part
                    yield Step(mine, False, real, real if filled else 0, count, offset)
                offset += len(part)
            taken += real

    def _known(self, steps: Iterable[Step], first: list[Any], share: int) -> Iterator[list[Share]]:
        for step in steps:
            if step.remainder and self.shard.even_batches:
                yield shares(step.indices, first, self.shard.num_processes)
            else:
                part = share // self.shard.num_processes if self.shard.split_batches else share
                starts = range(0, part * self.shard.num_processes, part)
                yield [(mine, len(mine)) for start in starts for mine in [step.indices[start : start + part]]]

    def _in_turn(self, batches: Iterable[list[Any]], head: list[list[Any]]) -> Iterator[list[Share]]:
        """Whole batches; of a known size, those of the last step are cut anew."""
        count, first, group = self.shard.num_processes, list(head), list[list[Any]]()
        for batch in batches:
            if len(group) == count:
                yield [(whole, len(whole)) for whole in group]
                group = []
            if len(first) < count:
                first.append(batch)
            group.append(batch)
        if not group or (self.shard.drop_last and len(group) < count):
            return
        size, missing = self.shard.batch_size, count - len(group)
        short = missing or (size is not None and any(len(whole) < size for whole in group))
        if short and self.shard.even_batches and size is not None:
            yield shares(chain.from_iterable(group), chain.from_iterable(first), count)
        else:
            # Batches of varying size cannot be cut anew: whole ones are repeated.
            repeated = islice(cycle(first), missing) if self.shard.even_batches else [[]] * missing
            yield [(whole, len(whole)) for whole in group] + [(whole, 0) for whole in repeated]

    def _cut_each(self, batches: Iterable[list[Any]], head: list[list[Any]]) -> Iterator[list[Share]]:
        first: list[Any] = head[0] if head else []
        for batch in batches:
            first = first or batch
            if not (self.shard.drop_last and len(batch) < (self.shard.batch_size or 0)):
                yield shares(batch, first if self.shard.even_batches else [], self.shard.num_processes)


def shares(samples: Iterable[Any], first: Iterable[Any], count: int) -> list[Share]:
    """``samples``, filled by going round in ``first``, cut into ``count`` equal parts."""
    whole = list(samples)
    real, share = len(whole), -(-len(whole) // count)
    whole = list(islice(chain(whole, cycle(first)), share * count))
    starts = range(0, share * count, share)
    parts = [whole[start : start + share] for start in starts]
    return [(part, min(len(part), max(0, real - start))) for start, part in zip(starts, parts, strict=True)]


class OneByOne(Sampler[Any]):
    """Single indices of a sharded sampler of batches of one, for loaders that do not collate."""

    def __init__(self, shard: BatchSamplerShard) -> None:
        self.batch_sampler = shard

    @property
    def remainder(self) -> int:
        """The shard's."""
        return self.batch_sampler.remainder

    def __iter__(self) -> Iterator[Any]:
        return (batch[0] for batch in self.batch_sampler)

    def __len__(self) -> int:
        return len(self.batch_sampler)
