"""Streams: which samples of an iterable dataset each process sees, and which of them only fill.

A stream tells only at its end how long it was, and with workers it ends inside them. So a sample of an
incomplete step is marked where it is read, the mark goes through collating, and what comes out says how many
samples are real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from accelerate.core.errors import PrepareError


class Tail(NamedTuple):
    """A sample of an incomplete step.

    Attributes:
        sample: as the stream gave it.
        real: False for a repeated one.
        total: how many samples of the step are real, all processes together.
    """

    sample: Any
    real: bool
    total: int


class Counted(NamedTuple):
    """A batch of an incomplete step.

    Attributes:
        batch: as the loader's collate function made it.
        real: rows that are no fillers; None when the batch is one sample that was not collated, and is real.
        total: how many samples of the step are real, all processes together.
    """

    batch: Any
    real: int | None
    total: int


class CountingCollate:
    """A loader's collate function that takes the marks off and counts them.

    Args:
        collate: the loader's own.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        """What the loader's own function makes of the samples; ``Counted`` if they were marked."""
        if type(samples) is Tail:
            return Counted(self.collate(samples.sample), None if samples.real else 0, samples.total)
        if not (type(samples) is list and samples and type(samples[0]) is Tail):
            return self.collate(samples)
        real = sum(tail.real for tail in samples)
        return Counted(self.collate([tail.sample for tail in samples]), real, samples[0].total)


class IterableDatasetShard(IterableDataset[Any]):
    """One process's samples of a stream that every process reads alike.

    What it does not know is the stream's, so that a worker's set-up finds what it is used to.

    Args:
        dataset: the stream.
        batch_size: samples of a batch, of one process or (``split_batches``) of all together.
        drop_last: leave out an incomplete last step instead of filling it from the first samples.
        num_processes, process_index: how many processes share it, and this one's rank.
        split_batches: whether ``batch_size`` is that of all processes together.

    Raises:
        PrepareError: ``split_batches`` and the batch size does not divide by the number of processes.
    """

    _own = (
        *("dataset", "batch_size", "drop_last", "num_processes", "process_index", "split_batches"),
        *("even_batches", "marks", "epoch", "remainder"),
    )

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1 and batch_size % num_processes:
            raise PrepareError(
                f"a batch of {batch_size} samples cannot be split over {num_processes} processes",
                fix=f"use a batch size that is a multiple of {num_processes}",
            )
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.num_processes, self.process_index, self.split_batches = (
            num_processes,
            process_index,
            split_batches,
        )
        # Fill an incomplete last step, and mark its samples for `CountingCollate`.
        self.even_batches, self.marks = True, False
        self.epoch = 0
        # How many samples of the last step are real, once the stream has ended; 0 when none is a filler.
        self.remainder = -1

    def __getattr__(self, name: str) -> Any:
        if name in self._own or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A worker's set-up may cut the stream by assigning to it.
        target = (
            self if name in self._own or not hasattr(self.__dict__.get("dataset"), name) else self.dataset
        )
        object.__setattr__(target, name, value)

    def set_epoch(self, epoch: int) -> None:
        """Passed on to a stream that shuffles by epoch."""
        self.epoch = epoch
        tell: Any = getattr(self.dataset, "set_epoch", None)
        if tell is not None:
            tell(epoch)

    @property
    def total_length(self) -> int:
        """Samples of the whole stream, if it has a length."""
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def step_size(self) -> int:
        """Samples that all processes consume together in one step."""
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    @property
    def _mine(self) -> slice:
        """This process's part of a step."""
        share = self.step_size // self.num_processes
        return slice(self.process_index * share, (self.process_index + 1) * share)

    def __len__(self) -> int:
        whole, rest = divmod(self.total_length, self.step_size)
        last = 0 if self.drop_last else self.step_size if self.even_batches else rest
        part = range(self.step_size)[self._mine]
        return whole * len(part) + (len(range(last)[self._mine]) if rest else 0)

    def __iter__(self) -> Iterator[Any]:
        mine, size = self._mine, self.step_size
        first: list[Any] = []
        group: list[Any] = []
        self.remainder = -1
        for sample in self.dataset:
            group.append(sample)
            if len(group) == size:
                yield from group[mine]
                first = first or group
                group = []
        self.remainder = 0
        if group and not self.drop_last:
            if self.even_batches:
                self.remainder = len(group)
                yield from self._fill(group, first or group)[mine]
            else:
                yield from group[mine]

    def _fill(self, group: list[Any], first: list[Any]) -> list[Any]:
        """The last step, complete."""
        real = len(group)
        filled = islice(chain(group, cycle(first)), self.step_size)
        if not self.marks:
            return list(filled)
        return [Tail(sample, place < real, real) for place, sample in enumerate(filled)]


class StepCollate:
    """A loader's collate function for a whole step of a stream: it makes every rank's batch.

    An incomplete step is shared equally; what is missing are the first samples again.

    Args:
        collate: the loader's own.
        count: how many ranks there are.
        share: samples of one rank in a complete step.
        even_batches: fill an incomplete step; otherwise the last ranks get less, or nothing.
    """

    def __init__(self, collate: Callable[[Any], Any], count: int, share: int, even_batches: bool) -> None:
        self.collate, self.count, self.share = collate, count, share
        self.even_batches = even_batches
        self.first: list[Any] = []

    def __call__(self, samples: list[Any]) -> list[Counted | None]:
        """Every rank's batch; None for a rank that gets nothing."""
        real, share = len(samples), self.share
        # Fewer fillers than ranks are ever needed.
        self.first = self.first or samples[: self.count - 1]
        if real < share * self.count:
            if self.even_batches:
                share = -(-real // self.count)
                samples = list(islice(chain(samples, cycle(self.first)), share * self.count))
            self.first = []  # a stream ends with its incomplete step, and begins anew
        return [self._part(samples, start, share, real) for start in range(0, share * self.count, share)]

    def _part(self, samples: list[Any], start: int, share: int, real: int) -> Counted | None:
        part = samples[start : start + share]
        mine = min(len(part), max(0, real - start))
        return Counted(self.collate(part), mine, real) if part else None


def counts(loader: DataLoader[Any]) -> bool:
    """Whether marks go through the loader: it makes its batches as torch's own does."""
    kind = type(loader)
    return kind.__iter__ is DataLoader.__iter__ or kind.__module__.startswith("torchdata.")


def unmark(batch: Any) -> tuple[Any, int | None, int | None]:
    """A batch of a loader with its real rows and the real samples of its step; None: all."""
    return batch if type(batch) is Counted else (batch, None, None)
