"""The order of the samples, and how it is cut into steps and shared by processes.

A step is one batch of every process. The order of torch's own samplers is kept as one tensor and cut where it
is needed, so an epoch can begin anywhere at no cost; any other sampler is walked from its beginning.

The numbers are those that torch's loader draws in one process, where and as it draws them; of several
processes, rank 0's count. So the order on N processes is the one that rank 0 alone would see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from accelerate.data.states import Apart, Hosts, begin

END: Any = object()
# Samples that are turned into Python numbers at a time.
_CHUNK = 4096


class Step(NamedTuple):
    """What one process gets in one step.

    Attributes:
        indices: its batch, or a single index for a loader that does not collate.
        last: no step follows for this process.
        samples: how many samples of the order all processes take in this step; fillers do not count.
        remainder: the same if the step is not a full one, else 0.
        real: how many of ``indices`` are no fillers.
        offset: where ``indices`` begin in the order.
    """

    indices: Any
    last: bool
    samples: int
    remainder: int
    real: int
    offset: int


class SeedableRandomSampler(RandomSampler):
    """A random order that is a function of a seed and the epoch, the same on every process.

    Args:
        args, kwargs: those of ``torch.utils.data.RandomSampler``, and ``data_seed`` (None takes
            ``torch.initial_seed()``).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        seed = kwargs.pop("data_seed", None)
        super().__init__(*args, **kwargs)
        self.epoch = 0
        self.initial_seed: int = torch.random.initial_seed() if seed is None else seed

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is that of ``epoch``."""
        self.epoch = epoch


def inner_sampler(sampler: Any) -> Any:
    """The sampler of single indices at the bottom of a batch sampler."""
    return chain_of(sampler)[-1]


def chain_of(sampler: Any) -> list[Any]:
    """A batch sampler and every sampler below it, down to that of single indices."""
    seen: list[Any] = [sampler]
    while True:
        below = getattr(seen[-1], "batch_sampler", None) or getattr(seen[-1], "sampler", None)
        if below is None or any(below is item for item in seen):
            return seen
        seen.append(below)


def is_known(sampler: Any) -> bool:
    """Whether ``draw`` knows the order of a sampler without walking it."""
    return type(sampler) in (RandomSampler, SequentialSampler, SeedableRandomSampler)


def is_drawn(sampler: Any) -> bool:
    """Whether a known sampler draws random numbers."""
    return type(sampler) is not SequentialSampler


def seed_for(sampler: Any) -> int | None:
    """The seed of the next order of a known sampler, drawn as torch draws it; None: it needs none."""
    if type(sampler) is SeedableRandomSampler:
        return sampler.initial_seed
    if type(sampler) is RandomSampler and sampler.generator is None:
        return int(torch.empty((), dtype=torch.int64).random_().item())
    return None


def draw(sampler: Any, seed: int | None) -> torch.Tensor | range:
    """The order of a known sampler, ``seed`` being what ``seed_for`` gave; equal to ``list(sampler)``."""
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    if type(sampler) is SeedableRandomSampler:
        sampler.generator = generator = sampler.generator or torch.Generator()
        generator.manual_seed((sampler.initial_seed if seed is None else seed) + sampler.epoch)
    else:
        generator = torch.Generator().manual_seed(seed) if seed is not None else sampler.generator
    total, count = sampler.num_samples, len(sampler.data_source)
    if sampler.replacement:
        # One call for all whole blocks draws what torch's sampler draws in blocks of 32.
        parts = [
            torch.randint(high=count, size=(size,), dtype=torch.int64, generator=generator)
            for size in (total // 32 * 32, total % 32)
        ]
    else:
        parts = [torch.randperm(count, generator=generator) for _ in range(total // count)]
        if total % count:
            parts.append(torch.randperm(count, generator=generator)[: total % count])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def finish(sampler: Any, exhausted: bool = False) -> None:
    """What a known sampler does when it comes to its end; nothing is drawn if it is ``exhausted`` already."""
    if type(sampler) is SeedableRandomSampler:
        sampler.set_epoch(sampler.epoch + 1)
    elif type(sampler) is RandomSampler and not exhausted and not sampler.replacement and sampler.generator:
        count = len(sampler.data_source)
        if sampler.num_samples % count == 0:  # torch's draws once more, and takes none of it
            torch.randperm(count, generator=sampler.generator)


@dataclass(frozen=True)
class Cut:
    """How a known order is cut.

    Attributes:
        share: samples of one process in a step.
        size, rank: number of processes, and which one.
        drop: leave out a last step that is not full, else
        fill: fill it from the beginning of the order; otherwise each process gets what is left for it.
        single: a step is one index instead of a list.
    """

    share: int
    size: int = 1
    rank: int = 0
    drop: bool = False
    fill: bool = False
    single: bool = False

    @property
    def step(self) -> int:
        """Samples of all processes in a step."""
        return self.share * self.size

    def count(self, samples: int) -> int:
        """Steps of this process when so many samples are left."""
        whole, rest = divmod(max(samples, 0), self.step)
        return whole + (rest > 0 and not self.drop and (self.fill or self.rank * self.share < rest))

    def steps(self, order: torch.Tensor | range, offset: int) -> Iterator[Step]:
        """The steps of this process, beginning ``offset`` samples into the order."""
        total, step, share = len(order), self.step, self.share
        count = self.count(total - offset)
        whole, rest = divmod(max(total - offset, 0), step)
        begin = self.rank * share
        chunk = max(1, _CHUNK // share)
        at = offset + begin
        for first in range(0, whole, chunk):
            until = min(first + chunk, whole)
            rows = _piece(order, offset + first * step, offset + until * step).view(-1, step)
            for number, row in enumerate(rows[:, begin : begin + share].tolist(), first + 1):
                yield Step(row[0] if self.single else row, number == count, step, 0, share, at)
                at += step
        if count > whole:
            indices = _piece(order, offset + whole * step, total).tolist()
            if self.fill:
                fillers = _piece(order, 0, min(step, total)).tolist()
                indices += [fillers[i % len(fillers)] for i in range(step - rest)]
            mine = indices[begin : begin + share]
            real = min(max(rest - begin, 0), share)
            yield Step(mine[0] if self.single else mine, True, rest, rest, real, at)


def _piece(order: torch.Tensor | range, start: int, stop: int) -> torch.Tensor:
    return torch.arange(start, stop) if isinstance(order, range) else order[start:stop]


def walk(
    items: Any, start: Hosts | None, agree: Callable[[Any], Any] | None, aside: bool = True
) -> tuple[Iterator[Any], Hosts]:
    """What a sampler of any kind yields, in a repeatable order; the first item is drawn at once.

    Args:
        items: the sampler, of batches or of single indices.
        start, agree: see ``states.begin``.
        aside: later items are drawn under random numbers of their own.
    """

    def opened() -> tuple[Iterator[Any], Any]:
        iterator = iter(items)
        return iterator, next(iterator, END)

    (iterator, first), hosts, apart = begin(opened, start, agree)
    return following(first, lambda: next(iterator, END), apart if aside else None), hosts


def following(first: Any, fetch: Callable[[], Any], apart: Apart | None) -> Iterator[Any]:
    """``first``, and then whatever ``fetch`` gives, until one of them is ``END``."""
    item = first
    while item is not END:
        yield item
        item = fetch() if apart is None else apart(fetch)


def size_of(item: Any) -> int:
    """Samples of what a sampler yields: a batch of indices, or one."""
    return len(item) if isinstance(item, list | tuple) or hasattr(item, "__len__") else 1


def behind(
    items: Iterator[Any], count: int, samples: int | None, keep: int
) -> tuple[Iterator[Any], int, list[Any]]:
    """Leaves out the beginning of what a sampler yields.

    Args:
        items: batches of indices, or single ones.
        count: leave out so many, or
        samples: exactly so many samples, if given; a batch that the end falls into is cut.
        keep: how many first items to give back.

    Returns:
        The rest, how many samples were left out, and the first ``keep`` items of those.
    """
    taken, number, head = 0, 0, list[Any]()
    while taken < samples if samples is not None else number < count:
        item = next(items, END)
        if item is END:
            break
        if len(head) < keep:
            head.append(item)
        if samples is not None and taken + size_of(item) > samples:
            items = chain([item[samples - taken :]], items)
            taken = samples
            break
        taken, number = taken + size_of(item), number + 1
    return items, taken, head


def single_steps(items: Iterator[Any], taken: int, full: int) -> Iterator[Step]:
    """The steps of one process that has the whole order; a complete one has ``full`` samples."""
    for item in items:
        size = size_of(item)
        yield Step(item, False, size, size if size < full else 0, size, taken)
        taken += size


def marked(steps: Iterator[Step]) -> Iterator[Step]:
    """The same steps, the last one marked as such."""
    held = next(steps, None)
    while held is not None:
        upcoming = next(steps, None)
        yield held if upcoming is not None else held._replace(last=True)
        held = upcoming
