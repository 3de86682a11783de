"""``skip_first_batches``: a loader without its first batches, or the rest of a saved epoch.

Of a prepared loader it is a twin that shares its progress; any other loader is not prepared by it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from accelerate.data.batch_sampler_shard import (
    BatchSamplerShard,
    copy_loader,
    shards_batches,
    slicer_for,
)
from accelerate.data.epoch_order import fetches_by_index, inner_sampler
from accelerate.data.loader import DataLoaderShard
from accelerate.data.position import EpochSkip, LoaderPosition
from accelerate.data.sample_order import find_batch_sampler


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first ``skip_batches`` batches; none of their samples is loaded."""

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
        """The number of batches including the skipped ones."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)


class SkippedBatches:
    """An object around a loader, such as one that repeats each batch, without its first batches."""

    def __init__(self, loader: Any, count: int) -> None:
        self.loader, self.count = loader, count

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.count)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.loader), self.count, None)


class SkipDataLoader(DataLoaderShard):
    """A loader that skips its first ``skip_batches`` batches.

    Args:
        dataset, kwargs: those of ``torch.utils.data.DataLoader``.
        skip_batches: the number of batches to skip.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(
            dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs
        )

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches - self._skip.batches)

    def bind(self, gradient_state: Any, device: torch.device | None) -> bool:
        """Return False: each process would iterate all of it."""
        return False


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int | None = 0) -> DataLoader[Any]:
    """Return a loader without its first ``num_batches`` batches; of map-style data none of them is read.

    Args:
        dataloader: a prepared loader, or any other.
        num_batches: how many to skip, none if negative. After ``load_state``, the number after which the
            checkpoint was saved continues at exactly the next sample of the recorded epoch, also with another
            world size; then the number may be that of either world. None: the recorded number; the whole
            next epoch if the checkpoint was saved after the loop over an epoch.

    Returns:
        A twin that shares its progress with the loader: at its end the loader's next epoch follows. If there
        is nothing to skip, the loader itself.
    """
    num_batches = None if num_batches is None else max(0, -int(-num_batches // 1))  # it may be a float
    if not isinstance(dataloader, DataLoaderShard):
        return _skip_unprepared(dataloader, num_batches or 0)
    step = dataloader.total_batch_size
    skip = dataloader.position.resolve_skip(num_batches, step, _length_or_none(dataloader))
    if not skip:
        return dataloader
    twin = copy.copy(dataloader)
    twin._original = dataloader if dataloader._original is None else dataloader._original
    twin._skip = dataloader._skip.add(skip.batches) if dataloader._skip else skip
    batches = find_batch_sampler(dataloader._full_base)
    if fetches_by_index(dataloader._full_base) and batches is not None:
        twin._unskipped = whole = dataloader._full_base
        sampler = SkipBatchSampler(batches, _count_skipped(batches, twin._skip, dataloader.position))
        twin.base_dataloader = copy_loader(whole, batch_sampler=sampler)
    return twin


def _count_skipped(sampler: Any, skip: EpochSkip, position: LoaderPosition) -> int:
    """Count the batches that a skip removes from a loader."""
    slicer, record = slicer_for(sampler), position.record
    if skip.samples is None:
        return skip.batches
    if slicer is not None:
        skipped = skip.count_samples(slicer.step_samples)
        return len(sampler) - slicer.count_steps(len(inner_sampler(sampler)) - skipped)
    saved_shards = position.num_shards if record is None or not record.saved_world else record.saved_world[0]
    is_split = isinstance(sampler, BatchSamplerShard) and sampler.split_batches
    if record is None or is_split or saved_shards == position.num_shards:
        return skip.batches
    # Whole batches in turn, of which the world that saved took others in a step.
    taken = record.batches * saved_shards + skip.further * position.num_shards
    if not shards_batches(sampler):
        return taken // position.num_shards
    return len(sampler) - sampler.count_steps(len(sampler.batch_sampler) - taken)


def _length_or_none(loader: DataLoader[Any]) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # a stream without a length
        return None


def _skip_unprepared(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    """Skip batches of a loader that is not prepared."""
    if count == 0:
        return loader
    if not isinstance(loader, DataLoader):
        return SkippedBatches(loader, count)
    batches = find_batch_sampler(loader)
    if fetches_by_index(loader) and batches is not None:
        return copy_loader(loader, batch_sampler=SkipBatchSampler(batches, count))
    twin = SkipDataLoader.wrap(loader, device=None)
    twin.skip_batches = count
    return twin
