"""From the user's loader to this process's part of it: what each option does, and what is sharded already."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from accelerate.core.errors import NotBuiltError, PrepareError
from accelerate.data.loader import DataLoaderShard, get_sampler, with_parts
from accelerate.data.shard import BatchSamplerShard, IterableDatasetShard, SeedableRandomSampler
from accelerate.world import collective


class _OneByOne(Sampler[Any]):
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


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> DataLoaderShard:
    """One process's part of ``dataloader``; see ``DataLoaderConfiguration`` for the options.

    Args:
        dataloader: the user's loader over the whole data, the same on every process.
        device: where batches go if ``put_on_device``.
        num_processes, process_index: the shard; the world's when None.
        rng_types: random streams that are taken over from rank 0 at the start of every epoch.

    Raises:
        PrepareError: the batch size cannot be split, or the object is no loader.
        NotBuiltError: an option that is not built yet.
    """
    if not isinstance(dataloader, DataLoader):
        raise PrepareError(f"a {type(dataloader).__name__} is not a torch.utils.data.DataLoader")
    count = collective.size() if num_processes is None else num_processes
    index = collective.rank() if process_index is None else process_index
    check_options(dispatch_batches, use_stateful_dataloader, count)
    base = _seedable(dataloader, data_seed) if use_seedable_sampler else dataloader
    if count > 1 and not is_sharded(base):
        base = _shard(base, count, index, split_batches, even_batches)
        shared = count
    else:
        shared = 1
    prepared = DataLoaderShard.around(
        base, device=device if put_on_device else None, non_blocking=non_blocking, num_processes=shared
    )
    prepared.rng_types = rng_types
    prepared.synchronized_generator = getattr(get_sampler(base), "generator", None)
    return prepared


def check_options(dispatch_batches: bool | None, stateful: bool, count: int) -> None:
    """Refuses what is not built.

    Raises:
        NotBuiltError: names the option.
    """
    if dispatch_batches and count > 1:
        raise NotBuiltError(
            "dispatch_batches=True is not built yet",
            why="rank 0 reading for all processes will come; until then every process reads its own part",
            fix="use DataLoaderConfiguration(dispatch_batches=False)",
        )
    if stateful:
        raise NotBuiltError(
            "use_stateful_dataloader=True is not built yet",
            why="saving the position inside an epoch will come with exact resume, for every loader",
        )


def is_sharded(loader: DataLoader[Any]) -> bool:
    """Whether the loader's sampler already gives each process its own part."""
    sampler = get_sampler(loader)
    return hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")


def _seedable(loader: DataLoader[Any], seed: int | None) -> DataLoader[Any]:
    """The loader with its random sampler replaced by one that is a function of seed and epoch."""
    sampler, batches = get_sampler(loader), loader.batch_sampler
    if type(sampler) is not RandomSampler:
        return loader
    seeded = SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=torch.Generator(),
        data_seed=seed,
    )
    if not isinstance(batches, BatchSampler):
        return with_parts(loader, sampler=seeded)
    twin = copy.copy(batches)
    twin.sampler = seeded
    return with_parts(loader, sampler=seeded, batch_sampler=twin)


def _shard(loader: DataLoader[Any], count: int, index: int, split: bool, even: bool) -> DataLoader[Any]:
    if isinstance(loader.dataset, IterableDataset):
        stream = IterableDatasetShard(
            loader.dataset,
            batch_size=loader.batch_size or 1,
            drop_last=loader.drop_last,
            num_processes=count,
            process_index=index,
            split_batches=split,
        )
        size = (loader.batch_size or 1) // count if split else loader.batch_size
        if split and loader.batch_size is not None:
            batches = copy.copy(loader.batch_sampler)
            batches.batch_size = size  # type: ignore[union-attr]
            return with_parts(loader, dataset=stream, batch_size=size, batch_sampler=batches)
        return with_parts(loader, dataset=stream)
    if loader.batch_sampler is None:
        ones = BatchSampler(loader.sampler, batch_size=1, drop_last=False)
        shard = BatchSamplerShard(ones, count, index, split_batches=False, even_batches=even)
        return with_parts(loader, sampler=_OneByOne(shard))
    shard = BatchSamplerShard(loader.batch_sampler, count, index, split, even)  # type: ignore[arg-type]
    return with_parts(loader, batch_sampler=shard)
