"""From the user's loader to this process's part of it: what each option does, and what is sharded already."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from accelerate.core.errors import PrepareError, SettingError
from accelerate.data import sharded
from accelerate.data.dispatch import DataLoaderDispatcher
from accelerate.data.loader import DataLoaderShard, get_sampler, with_parts
from accelerate.data.reading import shard_of
from accelerate.data.shard import BatchSamplerShard, SeedableRandomSampler
from accelerate.data.steps import OneByOne
from accelerate.data.stream import CountingCollate, IterableDatasetShard, counts
from accelerate.world import collective
from accelerate.world.layout import parts_of


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
    shard: bool | str = "auto",
) -> DataLoaderShard:
    """One process's part of ``dataloader``; see ``DataLoaderConfiguration`` for the options.

    Args:
        dataloader: the user's loader over the whole data, the same on every process.
        device: where batches go if ``put_on_device``.
        num_processes, process_index: the shard; the world's when None.
        rng_types: random streams that are taken over from rank 0 at the start of every epoch.
        slice_fn_for_dispatch: cuts a collated batch under dispatch; see ``DataLoaderDispatcher``.
        torch_device_mesh: the processes, by dimensions: along ``dp_replicate`` and ``dp_shard`` they read
            different parts, along the others the same.
        shard: share the data out; "auto" keeps what each process has when it is sharded already.

    Raises:
        PrepareError: the batch size cannot be split, the object is no loader, or it cannot be told whether
            it is sharded already.
        SettingError: ``shard=False`` and ``dispatch_batches=True``.
    """
    if not isinstance(dataloader, DataLoader):
        raise PrepareError(f"a {type(dataloader).__name__} is not a torch.utils.data.DataLoader")
    world = collective.size(), collective.rank()
    parts = world if torch_device_mesh is None else parts_of(torch_device_mesh)
    count = parts[0] if num_processes is None else num_processes
    index = parts[1] if process_index is None else process_index
    where = device if put_on_device else None
    base = _seedable(dataloader, data_seed) if use_seedable_sampler else dataloader
    dispatch = dispatch_batches
    if dispatch is None:
        whole = count == collective.size()
        dispatch = whole and put_on_device and isinstance(dataloader.dataset, IterableDataset)
    if shard == "auto" and count < collective.size():
        sharded.check_parts(dataloader, count, index)
    kept = count > 1 and _is_kept(dataloader, shard, count, index, dispatch_batches)
    prepared: DataLoaderShard
    if dispatch and not kept:
        _check_world(count, index)
        prepared = DataLoaderDispatcher.over(
            base,
            device=where,
            num_processes=count,
            process_index=index,
            split_batches=split_batches,
            even_batches=even_batches,
            slice_fn=slice_fn_for_dispatch,
            non_blocking=non_blocking,
        )
    else:
        shared = 1 if kept else count
        base = _shard(base, shared, index, split_batches, even_batches) if shared > 1 else base
        prepared = DataLoaderShard.around(base, device=where, non_blocking=non_blocking, num_processes=shared)
    how = "kept" if kept else "dispatched" if dispatch else "shared out"
    if shard == "auto":
        prepared.comparison = partial(sharded.compare_ranks, dataloader, how)
    if count > 1 and count == collective.size() and shard == "auto":
        prepared.before_first_use = prepared.comparison
        cut = shard_of(base)
        if cut is not None and how == "shared out":
            cut.unproved = sharded.name_of(dataloader)
    prepared.rng_types = rng_types
    prepared.use_stateful_dataloader = use_stateful_dataloader
    if torch_device_mesh is not None and parts != world:
        prepared.among(*parts)
    prepared.synchronized_generator = getattr(get_sampler(base), "generator", None)
    return prepared


def _is_kept(
    loader: DataLoader[Any], shard: bool | str, count: int, index: int, dispatch: bool | None
) -> bool:
    """Whether each process keeps what the loader gives it."""
    if shard not in ("auto", True, False):
        raise SettingError(f"shard is {shard!r}", fix="use 'auto', True or False")
    if shard is False and dispatch:
        raise SettingError(
            "shard=False and dispatch_batches=True contradict each other",
            why="one keeps what each process reads, the other lets rank 0 read for all",
            fix="leave one of them out",
        )
    if shard != "auto":
        return not shard
    why = sharded.recognise(loader, count, index) or sharded.by_code(loader)
    if why is not None:
        sharded.say_kept(loader, why)
    return why is not None


def _check_world(count: int, index: int) -> None:
    if (count, index) != (collective.size(), collective.rank()):
        raise PrepareError(
            f"dispatch_batches=True needs all {collective.size()} processes, a part of {count} was asked for",
            why="rank 0 of the world reads and sends",
            fix="use dispatch_batches=False",
        )


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
        return _shard_stream(loader, count, index, split, even)
    if loader.batch_sampler is None:
        ones = BatchSampler(loader.sampler, batch_size=1, drop_last=False)
        shard = BatchSamplerShard(ones, count, index, split_batches=False, even_batches=even)
        return with_parts(loader, sampler=OneByOne(shard))
    shard = BatchSamplerShard(loader.batch_sampler, count, index, split, even)  # type: ignore[arg-type]
    return with_parts(loader, batch_sampler=shard)


def _shard_stream(
    loader: DataLoader[Any], count: int, index: int, split: bool, even: bool
) -> DataLoader[Any]:
    size = loader.batch_size
    split = split and size is not None  # what is not collated cannot be cut
    stream = IterableDatasetShard(
        loader.dataset,  # type: ignore[arg-type]
        batch_size=size or 1,
        drop_last=loader.drop_last,
        num_processes=count,
        process_index=index,
        split_batches=split,
    )
    parts: dict[str, Any] = {"dataset": stream}
    stream.even_batches, stream.marks = even, counts(loader)
    if stream.marks:
        parts["collate_fn"] = CountingCollate(loader.collate_fn)
    if split:
        batches: Any = copy.copy(loader.batch_sampler)
        parts["batch_size"] = batches.batch_size = (size or 1) // count
        parts["batch_sampler"] = batches
    return with_parts(loader, **parts)
