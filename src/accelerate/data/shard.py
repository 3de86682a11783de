"""Which samples each process sees: views of batch samplers and of streams. Nothing is drawn here.

Order of the samples of one global step: rank 0's batch, then rank 1's, ... which is the order of the
unsharded sampler. The last step is filled by going round to the first samples, so the fillers are the tail
of that step, and dropping them needs only a count.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from accelerate.core.errors import PrepareError
from accelerate.data.order import shared_order


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
        return self._split() if self.split_batches else self._in_turn()

    def _in_turn(self) -> Iterator[list[Any]]:
        first: list[list[Any]] = []
        group: list[list[Any]] = []
        for batch in shared_order(self.batch_sampler, self.num_processes):
            # A complete group is handed out only when more follows: the last one may need filling.
            if len(group) == self.num_processes:
                yield group[self.process_index]
                group = []
            if len(first) < self.num_processes:
                first.append(batch)
            group.append(batch)
        if len(group) == self.num_processes and all(map(self._is_full, group)):
            yield group[self.process_index]
        elif group and (len(group) == self.num_processes or not self.drop_last):
            yield from self._last(group, first)

    def _is_full(self, batch: list[Any]) -> bool:
        return self.batch_size is None or len(batch) >= self.batch_size

    def _last(self, group: list[list[Any]], first: list[list[Any]]) -> Iterator[list[Any]]:
        """The incomplete last step."""
        self.remainder = sum(map(len, group))
        if not self.even_batches:
            if self.process_index < len(group):
                yield group[self.process_index]
            return
        if self.batch_size is None:
            # Batches of varying size cannot be cut anew: whole ones are repeated.
            yield list(islice(chain(group, cycle(first)), self.num_processes))[self.process_index]
            return
        samples = chain(chain.from_iterable(group), cycle(list(chain.from_iterable(first))))
        start = self.process_index * self.batch_size
        yield list(islice(samples, start, start + self.batch_size))

    def _split(self) -> Iterator[list[Any]]:
        first: list[Any] = []
        for batch in shared_order(self.batch_sampler, self.num_processes):
            first = first or batch
            size = self.batch_size or len(batch) + -len(batch) % self.num_processes
            self.remainder = len(batch) % size
            if len(batch) < size:
                if self.drop_last:
                    continue
                if self.even_batches:
                    batch = list(islice(chain(batch, cycle(first)), size))
            share = size // self.num_processes
            part = batch[self.process_index * share : (self.process_index + 1) * share]
            if part:
                yield part


class IterableDatasetShard(IterableDataset[Any]):
    """One process's samples of a stream that every process reads alike.

    Args:
        dataset: the stream.
        batch_size: samples of a batch, of one process or (``split_batches``) of all together.
        drop_last: leave out an incomplete last step instead of filling it from the first samples.
        num_processes, process_index: how many processes share it, and this one's rank.
        split_batches: whether ``batch_size`` is that of all processes together.

    Raises:
        PrepareError: ``split_batches`` and the batch size does not divide by the number of processes.
    """

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
        self.epoch = 0
        # How many samples of the last step are real, once the stream has ended; 0 when it was full.
        self.remainder = -1

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

    def __len__(self) -> int:
        step = self.step_size
        samples = self.total_length
        steps = samples // step if self.drop_last else -(-samples // step)
        return steps * (step // self.num_processes)

    @property
    def step_size(self) -> int:
        """Samples that all processes consume together in one step."""
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    def __iter__(self) -> Iterator[Any]:
        share = self.step_size // self.num_processes
        mine = slice(self.process_index * share, (self.process_index + 1) * share)
        first: list[Any] = []
        group: list[Any] = []
        self.remainder = -1
        for sample in self.dataset:
            group.append(sample)
            if len(group) == self.step_size:
                yield from group[mine]
                first = first or group
                group = []
        self.remainder = len(group)
        if group and not self.drop_last:
            filled = list(islice(chain(group, cycle(first or group)), self.step_size))
            yield from filled[mine]


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


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first ``skip_batches`` batches; no sample of those is loaded."""

    def __init__(self, batch_sampler: BatchSampler, skip_batches: int = 0) -> None:
        self.batch_sampler, self.skip_batches = batch_sampler, skip_batches

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    @property
    def total_length(self) -> int:
        """Number of batches with the skipped ones."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)
