"""Division of every step of map-style data into the samples of all ranks, on one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice
from typing import Any

from accelerate.data.batch_sampler_shard import BatchSamplerShard, slicer_for
from accelerate.data.batch_source import slice_steps
from accelerate.data.batches import divide_rows
from accelerate.data.epoch_order import has_known_seed, open_walk, opened_by_loader
from accelerate.data.position import Epoch
from accelerate.data.sample_order import RankSampleOrderSlicer, StepSampleIndices, mark_last, skip_items

# A rank's samples of a step, and the number of real ones.
RankSamples = tuple[list[Any], int]


class AllRankBatchSteps:
    """Opens the steps of all ranks, rank after rank, in place of ``batch_source.open_steps``.

    An incomplete step is divided equally and filled with the first samples again.

    Args:
        shard: the options of the loader's sharding.
        single: the loader does not collate, so a batch is one index.

    Attributes:
        ranks: ranks of the batches that the loader is fetching, in order.
    """

    def __init__(self, shard: BatchSamplerShard, single: bool) -> None:
        self.shard, self.single = shard, single
        self.ranks: deque[int] = deque()

    def __call__(self, sampler: Any, generators: list[Any], epoch: Epoch) -> Iterator[StepSampleIndices]:
        """Open the batches of all ranks in turn; the arguments are those of ``batch_source.open_steps``."""
        items: Any = self.shard.batch_sampler
        order_state = epoch.order_state if epoch.is_resumed else None
        slicer = slicer_for(items) if has_known_seed(items, order_state) else None
        if slicer is not None:
            size = slicer.rank_samples * (1 if self.shard.split_batches else self.shard.num_processes)
            whole = RankSampleOrderSlicer(size, drop_last=slicer.drop_last)
            order, whole_steps = slice_steps(whole, items, generators, epoch, None)
            first = [int(index) for index in order[: self.shard.num_processes]]
            steps = self._divide_known(whole_steps, first, slicer.rank_samples)
        else:
            batches, epoch.order_state = open_walk(
                opened_by_loader(items, generators, order_state),
                generators,
                broadcast=None,
                order_state=order_state,
            )
            group = 1 if self.shard.split_batches else self.shard.num_processes
            skip = epoch.skip
            rest, epoch.samples, head = skip_items(
                batches, skip.batches * group, skip.samples, group, skip.further * group
            )
            divide = self._divide_each if self.shard.split_batches else self._group_batches
            steps = divide(rest, head)
        return mark_last(self._flatten_ranks(steps, epoch.samples))

    def _flatten_ranks(self, steps: Iterable[list[RankSamples]], taken: int) -> Iterator[StepSampleIndices]:
        for step in steps:
            real = sum(count for _, count in step)
            filled = real < sum(len(part) for part, _ in step)
            offset = taken
            for rank, (part, count) in enumerate(step):
                if len(part):
                    self.ranks.append(rank)
                    indices = part[0] if self.single else part
                    yield StepSampleIndices(indices, False, real, real if filled else 0, count, offset)
                offset += len(part)
            taken += real

    def _divide_known(
        self, steps: Iterable[StepSampleIndices], first: list[Any], share: int
    ) -> Iterator[list[RankSamples]]:
        for step in steps:
            if step.remainder and self.shard.even_batches:
                yield divide_step(step.indices, first, self.shard.num_processes)
            else:
                part = share // self.shard.num_processes if self.shard.split_batches else share
                starts = range(0, part * self.shard.num_processes, part)
                yield [
                    (indices, len(indices))
                    for start in starts
                    for indices in [step.indices[start : start + part]]
                ]

    def _group_batches(
        self, batches: Iterable[list[Any]], head: list[list[Any]]
    ) -> Iterator[list[RankSamples]]:
        """Group whole batches into steps; divide an incomplete last step anew if the batch size is known."""
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
            yield divide_step(chain.from_iterable(group), chain.from_iterable(first), count)
        else:
            # Batches of varying size cannot be divided anew: repeat whole ones.
            repeated = islice(cycle(first), missing) if self.shard.even_batches else [[]] * missing
            yield [(whole, len(whole)) for whole in group] + [(whole, 0) for whole in repeated]

    def _divide_each(
        self, batches: Iterable[list[Any]], head: list[list[Any]]
    ) -> Iterator[list[RankSamples]]:
        first: list[Any] = head[0] if head else []
        for batch in batches:
            first = first if len(first) else batch  # the batches of a sampler may be arrays
            if not (self.shard.drop_last and len(batch) < (self.shard.batch_size or 0)):
                yield divide_step(batch, first if self.shard.even_batches else [], self.shard.num_processes)


def divide_step(samples: Iterable[Any], first: Iterable[Any], count: int) -> list[RankSamples]:
    """Divide ``samples`` into ``count`` equal parts, filled by repeating ``first``."""
    whole = list(samples)
    real, share = len(whole), divide_rows(len(whole), count)
    whole = list(islice(chain(whole, cycle(first)), share * count))
    starts = range(0, share * count, share)
    parts = [whole[start : start + share] for start in starts]
    return [(part, min(len(part), max(0, real - start))) for start, part in zip(starts, parts, strict=True)]
