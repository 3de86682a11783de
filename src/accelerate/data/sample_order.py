"""The order of the samples, and how it is sliced into steps and divided among the ranks.

A step is one batch of every process. The order of torch's own samplers is kept as one tensor and sliced on
demand, so an epoch can start anywhere at no cost; any other sampler is iterated from its beginning.

Random numbers are drawn as torch's loader draws them in one process; with several processes, those of rank 0
are broadcast. So the order on N processes is the one that rank 0 alone would see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.weak import WeakIdKeyDictionary

END: Any = object()
# The epochs of samplers and data sets that no script has set: those by loaders, and by the end of an order.
known_epochs: Any = WeakIdKeyDictionary()
# Samples converted to Python numbers at a time.
_CHUNK = 4096


class StepSampleIndices(NamedTuple):
    """The indices of one process in one step.

    Attributes:
        indices: those of its batch, or a single index for a loader that does not collate.
        last: True for the last step of this process.
        samples: samples of the order in this step, on all processes, without fillers.
        remainder: the same for an incomplete step, else 0.
        real: how many of ``indices`` are not fillers.
        offset: position of ``indices`` in the order.
    """

    indices: Any
    last: bool
    samples: int
    remainder: int
    real: int
    offset: int


class SeedableRandomSampler(RandomSampler):
    """A sampler whose random order is a function of a seed and the epoch, the same on every process.

    Args:
        args, kwargs: those of ``torch.utils.data.RandomSampler``, and ``data_seed`` (None takes
            ``torch.initial_seed()``).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given_seed: int | None = kwargs.pop("data_seed", None)
        self.initial_seed: int = torch.initial_seed() if given_seed is None else given_seed
        self.has_given_seed: bool = given_seed is not None
        self.epoch = 0
        super().__init__(*args, **kwargs)

    def __iter__(self) -> Iterator[int]:
        generator = self.seed_generator(self.initial_seed)
        yield from _draw_indices(self, generator).tolist()
        self.advance()

    def seed_generator(self, seed: int) -> torch.Generator:
        """Return the sampler's generator in the state from which ``seed`` draws the present epoch."""
        self.generator = (self.generator or torch.Generator()).manual_seed(seed + self.epoch)
        return self.generator

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def advance(self) -> None:
        """Go on to the next epoch, at the end of an order; a loader that is left early sets it back."""
        self.set_epoch(self.epoch + 1)
        known_epochs[self] = self.epoch


def is_known(sampler: Any) -> bool:
    """Return True if ``draw`` can compute the order of a sampler without iterating it."""
    return type(sampler) in (RandomSampler, SequentialSampler, SeedableRandomSampler)


def is_torch_batch_sampler(sampler: Any) -> TypeGuard[BatchSampler]:
    """Return True if a batch sampler only cuts its ``sampler`` into batches: torch's own, or torchdata's."""
    kind = type(sampler)
    return kind is BatchSampler or (
        issubclass(kind, BatchSampler)
        and (kind.__module__, kind.__qualname__) == ("torchdata.stateful_dataloader.sampler", "BatchSampler")
    )


def find_batch_sampler(dataloader: Any) -> Any:
    """Return the batch sampler of a loader, which may be the ``sampler`` of one that does not collate."""
    batches, sampler = (getattr(dataloader, name, None) for name in ("batch_sampler", "sampler"))
    return sampler if batches is None and isinstance(sampler, BatchSampler) else batches


def is_random(sampler: Any) -> bool:
    """Return True if a known sampler draws random numbers."""
    return type(sampler) is not SequentialSampler


def draw_seed(sampler: Any) -> int | None:
    """Draw the seed of the next order of a known sampler, as torch does; None if it needs none."""
    if type(sampler) is SeedableRandomSampler:
        return sampler.initial_seed
    if type(sampler) is RandomSampler and sampler.generator is None:
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
    return None


def draw(sampler: Any, seed: int | None) -> torch.Tensor | range:
    """Compute the order of a known sampler from the seed of ``draw_seed``; equal to ``list(sampler)``."""
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    if type(sampler) is SeedableRandomSampler:
        return _draw_indices(sampler, sampler.seed_generator(sampler.initial_seed if seed is None else seed))
    return _draw_indices(sampler, sampler.generator if seed is None else torch.Generator().manual_seed(seed))


def _draw_indices(sampler: RandomSampler, generator: torch.Generator | None) -> torch.Tensor:
    """Draw what ``RandomSampler`` draws from a generator, at once; on the host."""
    total, count = sampler.num_samples, len(sampler.data_source)
    # Not on torch's default device, which may be another one than the generator's.
    device = "cpu" if generator is None else generator.device
    if sampler.replacement:
        # One call for all whole blocks draws what torch's sampler draws in blocks of 32.
        parts = [
            torch.randint(count, (size,), dtype=torch.int64, generator=generator, device=device)
            for size in (total // 32 * 32, total % 32)
        ]
    else:
        parts = [torch.randperm(count, generator=generator, device=device) for _ in range(total // count)]
        if total % count:
            parts.append(torch.randperm(count, generator=generator, device=device)[: total % count])
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).cpu()


def finish(sampler: Any, exhausted: bool = False) -> None:
    """Advance a known sampler as at its end; draw nothing if it is ``exhausted`` already."""
    if type(sampler) is SeedableRandomSampler:
        sampler.advance()
    elif type(sampler) is RandomSampler and not exhausted and not sampler.replacement and sampler.generator:
        count = len(sampler.data_source)
        if sampler.num_samples % count == 0:  # torch's sampler draws once more and uses none of it
            torch.randperm(count, generator=sampler.generator, device=sampler.generator.device)


@dataclass(frozen=True)
class RankSampleOrderSlicer:
    """Slices a known order into the steps of one process.

    Attributes:
        rank_samples: samples of one process in a step.
        size, rank: number of processes, and the index of this one.
        drop_last: leave out an incomplete last step, else
        fill_last: fill it from the beginning of the order; otherwise each process gets what is left for it.
        single: a step is one index instead of a list.
    """

    rank_samples: int
    size: int = 1
    rank: int = 0
    drop_last: bool = False
    fill_last: bool = False
    single: bool = False

    @property
    def step_samples(self) -> int:
        """The samples of all processes in a step."""
        return self.rank_samples * self.size

    def count_steps(self, samples: int) -> int:
        """Count the steps of this process when ``samples`` are left."""
        whole, rest = divmod(max(samples, 0), self.step_samples)
        return whole + (
            rest > 0 and not self.drop_last and (self.fill_last or self.rank * self.rank_samples < rest)
        )

    def lacks_step(self, samples: int, rank: int | None = None) -> bool:
        """Return True if this process, or ``rank``, has no part of the last step of ``samples``."""
        own = self if rank is None else replace(self, rank=rank)
        return own.count_steps(samples) < replace(self, rank=0).count_steps(samples)

    def steps(self, order: torch.Tensor | range, offset: int) -> Iterator[StepSampleIndices]:
        """Yield the steps of this process from ``offset`` samples into the order."""
        total, step, rank_samples = len(order), self.step_samples, self.rank_samples
        count = self.count_steps(total - offset)
        whole, rest = divmod(max(total - offset, 0), step)
        begin = self.rank * rank_samples
        chunk = max(1, _CHUNK // rank_samples)
        at = offset + begin
        for first in range(0, whole, chunk):
            until = min(first + chunk, whole)
            rows = _slice_order(order, offset + first * step, offset + until * step).view(-1, step)
            for number, row in enumerate(rows[:, begin : begin + rank_samples].tolist(), first + 1):
                yield StepSampleIndices(
                    row[0] if self.single else row, number == count, step, 0, rank_samples, at
                )
                at += step
        if count > whole:
            indices = _slice_order(order, offset + whole * step, total).tolist()
            if self.fill_last:
                fillers = _slice_order(order, 0, min(step, total)).tolist()
                indices += [fillers[i % len(fillers)] for i in range(step - rest)]
            rank_indices = indices[begin : begin + rank_samples]
            real = min(max(rest - begin, 0), rank_samples)
            yield StepSampleIndices(
                rank_indices[0] if self.single else rank_indices, True, rest, rest, real, at
            )


def _slice_order(order: torch.Tensor | range, start: int, stop: int) -> torch.Tensor:
    return torch.arange(start, stop, device="cpu") if isinstance(order, range) else order[start:stop]


def count_samples(item: Any) -> int:
    """Count the samples of an item of a sampler: a batch of indices, or one."""
    return len(item) if hasattr(item, "__len__") else 1


def skip_items(
    items: Iterator[Any], count: int, samples: int | None, keep_first: int, further: int = 0
) -> tuple[Iterator[Any], int, list[Any]]:
    """Skip the first items of a sampler.

    Args:
        items: batches of indices, or single ones.
        count: number of items to skip, or
        samples: number of samples to skip, if given; a batch that this ends in is cut.
        keep_first: how many of the first items to return.
        further: number of items to skip after these samples.

    Returns:
        The rest, the number of skipped samples, and the first ``keep_first`` items of those.
    """
    skipped, number, first_items = 0, 0, list[Any]()
    while skipped < samples if samples is not None else number < count:
        item = next(items, END)
        if item is END:
            break
        if len(first_items) < keep_first:
            first_items.append(item)
        if samples is not None and skipped + count_samples(item) > samples:
            items = chain([item[samples - skipped :]], items)
            skipped = samples
            break
        skipped, number = skipped + count_samples(item), number + 1
    if samples is not None and further:
        items, more, others = skip_items(items, further, None, keep_first - len(first_items))
        return items, skipped + more, first_items + others
    return items, skipped, first_items


def single_steps(items: Iterator[Any], skipped: int, full: int) -> Iterator[StepSampleIndices]:
    """Yield the steps of one process that has the whole order; a complete one has ``full`` samples."""
    for item in items:
        size = count_samples(item)
        yield StepSampleIndices(item, False, size, size if size < full else 0, size, skipped)
        skipped += size


def mark_last(steps: Iterator[StepSampleIndices]) -> Iterator[StepSampleIndices]:
    """Yield the same steps, with ``last`` set on the last one."""
    step = next(steps, None)
    while step is not None:
        upcoming = next(steps, None)
        yield step if upcoming is not None else step._replace(last=True)
        step = upcoming
