"""``prepare_data_loader`` and its options: shards or dispatches a loader, unless it is sharded already."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from accelerate.core.argument_checks import check_arguments
from accelerate.core.errors import PrepareError, SettingError
from accelerate.core.value_types import Seed
from accelerate.data import sharding_detection
from accelerate.data.batch_sampler_shard import check_split, copy_loader, shard_by_index
from accelerate.data.dispatch import DataLoaderDispatcher
from accelerate.data.epoch_order import get_sampler
from accelerate.data.iterable_dataset import (
    CountingCollate,
    IterableDatasetShard,
    SkippedStream,
    SourceShard,
    can_split,
    supports_marks,
)
from accelerate.data.loader import DataLoaderShard, make_stateful
from accelerate.data.sample_order import SeedableRandomSampler, find_batch_sampler, is_torch_batch_sampler
from accelerate.data.skip_first_batches import SkipDataLoader
from accelerate.world import collective
from accelerate.world.mesh_layout import mesh_data_shard

_numbers = itertools.count()  # of loaders, which all ranks prepare in one order


@check_arguments
@dataclass
class DataLoaderConfiguration:
    """Options of every loader that is prepared after they are set.

    Attributes:
        split_batches: the loader's batch size is that of all processes together, and each takes a part of
            every batch; otherwise each process takes whole batches in turn.
        dispatch_batches: rank 0 reads and sends each process its part. None does so for an iterable dataset,
            unless it is sharded already. With False each process reads for itself: its own files of a stream
            of ``datasets`` whose ``num_shards`` is a multiple of their number, else the whole stream, of
            which it keeps its part.
        even_batches: the last step is filled from the beginning of the data, so that all processes have the
            same number of batches, of equal size; ``loader.real`` tells how many rows of the batch in hand
            are no fillers. Otherwise each process gets what there is for it, which may be no batch at all.
        use_seedable_sampler: the order is a function of ``data_seed`` and the epoch.
        data_seed: seed of that order; None takes torch's initial seed.
        non_blocking: copies to the device do not wait (needs pinned memory to have an effect).
        shard: share the data out over the processes: True always, False never; "auto" keeps what each process
            has where it is sharded already (by a ``DistributedSampler``, ``split_dataset_by_node``, a sampler
            or stream that knows its rank), and says so.
        use_stateful_dataloader: after a checkpoint is loaded, a loader goes on by itself where it was in its
            epoch, instead of beginning that epoch again for ``skip_first_batches``. Where torchdata is
            installed, loaders are instances of its ``StatefulDataLoader``, and ``state_dict`` has its form.
        legacy_random_numbers: the random numbers of Accelerate 1.x. On several processes, a sampler whose
            ``generator`` is None gets one, seeded by a draw in ``prepare``, but not with ``dispatch_batches``
            or ``use_seedable_sampler``. On one process, workers and streams draw what they draw in plain
            torch; after a resume inside an epoch they then draw other numbers. Persistent workers also serve
            ``skip_first_batches``: 1.x starts others for it, by one more draw.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: Seed | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    shard: bool | Literal["auto"] = "auto"
    legacy_random_numbers: bool = False


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
    legacy_random_numbers: bool = False,
    strict: bool = False,
) -> DataLoaderShard:
    """Prepare ``dataloader`` for this process; see ``DataLoaderConfiguration`` for the options.

    Args:
        dataloader: the user's loader over the whole data, the same on every process.
        device: the device to move batches to if ``put_on_device``.
        num_processes, process_index: number and index of the data shard; the world's when None. Beside a mesh
            those of the world are no choice: the mesh says them.
        rng_types: random generators that are broadcast from rank 0 at the start of every epoch.
        slice_fn_for_dispatch: slices a collated batch under dispatch; see ``DataLoaderDispatcher``.
        torch_device_mesh: the device mesh: ranks along ``dp_replicate`` and ``dp_shard`` (or ``dp``,
            ``fsdp``, ``data``) read different shards, along other dimensions the same.
        shard: shard the data; "auto" keeps each process's data if it is sharded already.
        strict: refuse a stream that knows its rank alone, of which a note is logged otherwise.

    Raises:
        PrepareError: the batch size cannot be split, the object is no loader, or detection of existing
            sharding failed.
        SettingError: ``shard=False`` and ``dispatch_batches=True``.
        WorldError: the dimensions of the mesh have no names.
    """
    if not isinstance(dataloader, DataLoader):
        raise PrepareError(f"a {type(dataloader).__name__} is not a torch.utils.data.DataLoader")
    world = collective.world_size(join=True), collective.rank()
    data_shard = world if torch_device_mesh is None else mesh_data_shard(torch_device_mesh)
    is_world = (num_processes, process_index) == world  # no choice beside a mesh
    count = data_shard[0] if is_world or num_processes is None else num_processes
    index = data_shard[1] if is_world or process_index is None else process_index
    target, skipped = device if put_on_device else None, 0
    if count > 1 and isinstance(dataloader, DataLoaderShard) and not dataloader._is_accelerate_prepared:
        dataloader, skipped = dataloader.base_dataloader, dataloader.skip_batches  # each rank reads all
    base = _with_seedable_sampler(dataloader, data_seed) if use_seedable_sampler else dataloader
    dispatch = dispatch_batches
    if dispatch is None:
        dispatch = count == world[0] and put_on_device and isinstance(dataloader.dataset, IterableDataset)
    if legacy_random_numbers and count > 1 and not (dispatch or use_seedable_sampler):
        base = _with_seeded_generator(base)
    if shard == "auto" and count < world[0]:
        sharding_detection.check_data_shard(dataloader, count, index)
    keeps_own = count > 1 and not shard
    if count > 1 and shard != "auto":
        _check_shard_option(shard, dispatch_batches)
    elif count > 1 and (why := sharding_detection.find_sharding(dataloader, count, index, dispatch, strict)):
        sharding_detection.log_not_sharded(dataloader, why)
        keeps_own = True
    if dispatch and not keeps_own:
        _check_world(count, index)
        prepared = DataLoaderDispatcher.wrap_for_dispatch(
            base,
            device=target,
            num_processes=count,
            process_index=index,
            split_batches=split_batches,
            even_batches=even_batches,
            slice_fn=slice_fn_for_dispatch,
            non_blocking=non_blocking,
        )
    else:
        shared = 1 if keeps_own else count
        if shared > 1 and isinstance(base.dataset, IterableDataset):
            base = _shard_stream(base, count, index, split_batches, even_batches)
        elif shared > 1:
            # Where all ranks take part, the first batch of indices is compared before it is used.
            unverified = dataloader if shard == "auto" and count == world[0] else None
            base = shard_by_index(base, count, index, split_batches, even_batches, unverified)
        prepared = DataLoaderShard.wrap(base, device=target, non_blocking=non_blocking, num_processes=shared)
    if shard == "auto":
        mode = "kept" if keeps_own else "dispatched" if dispatch else "sharded"
        reads_rank0, compare = bool(dispatch_batches) and not keeps_own, sharding_detection.compare_ranks
        prepared.comparison = partial(compare, dataloader, mode, reads_rank0, strict=strict)
        if 1 < count == world[0]:
            prepared.before_first_use = partial(prepared.comparison, number=next(_numbers))
    prepared.rng_types, prepared.skip_batches, prepared.position.is_per_rank = rng_types, skipped, keeps_own
    prepared.keeps_torch_numbers = legacy_random_numbers and world[0] == 1
    prepared.use_stateful_dataloader = use_stateful_dataloader
    if use_stateful_dataloader:
        make_stateful(prepared)
    if torch_device_mesh is not None and data_shard != world:
        prepared.set_data_shard(*data_shard)
    return prepared


def join_batches(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    """Return the loader with batches of ``count`` times its size; one whose batch size is not known stays."""
    batches = find_batch_sampler(loader)
    size = getattr(batches, "batch_size", None)
    if not isinstance(size, int):
        return loader
    if is_torch_batch_sampler(batches):
        twin = copy.copy(batches)
        twin.batch_size = size * count
    else:  # what it yields may not follow its attributes
        twin = JoinedBatchSampler(batches, count)
    sizes = {} if loader.batch_size is None else {"batch_size": size * count}
    return copy_loader(loader, batch_sampler=twin, **sizes)


class JoinedBatchSampler(BatchSampler):
    """Joins each so many batches of another batch sampler into one.

    Args:
        batches: the other one, which tells its batch size.
        count: the batches that are joined.
    """

    def __init__(self, batches: Any, count: int) -> None:
        super().__init__(batches, batches.batch_size * count, bool(getattr(batches, "drop_last", False)))
        self.count = count

    def __getattr__(self, name: str) -> Any:
        # `set_epoch` and whatever else a user's own batch sampler has.
        if name == "sampler":
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def __iter__(self) -> Iterator[list[Any]]:
        batches = iter(self.sampler)
        while joined := list(itertools.islice(batches, self.count)):
            if len(joined) == self.count or not self.drop_last:
                yield list(itertools.chain.from_iterable(joined))  # type: ignore[arg-type]

    def __len__(self) -> int:
        batches = len(self.sampler)  # type: ignore[arg-type]
        return batches // self.count if self.drop_last else -(-batches // self.count)


def _check_shard_option(shard: bool | str, dispatch: bool | None) -> None:
    if shard not in (True, False):
        raise SettingError(f"shard is {shard!r}", fix="use 'auto', True or False")
    if shard is False and dispatch:
        raise SettingError(
            "shard=False and dispatch_batches=True contradict each other",
            why="one keeps what each process reads, the other lets rank 0 read for all",
            fix="leave one of them out",
        )


def _check_world(count: int, index: int) -> None:
    if (count, index) != (collective.world_size(), collective.rank()):
        raise PrepareError(
            f"dispatch_batches=True needs all {collective.world_size()} processes, but {count} are to share "
            "the loader",
            why="rank 0 of the world reads and sends",
            fix="use dispatch_batches=False",
        )


def _with_seedable_sampler(loader: DataLoader[Any], seed: int | None) -> DataLoader[Any]:
    """Return the loader with a ``SeedableRandomSampler`` in place of its random sampler."""
    sampler = get_sampler(loader)
    if type(sampler) is not RandomSampler:
        return loader
    seeded = SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=torch.Generator(),
        data_seed=seed,
    )
    return _with_sampler(loader, seeded)


def _with_seeded_generator(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return the loader with a generator, seeded by a draw, for a sampler whose attribute for it is None."""
    sampler = get_sampler(loader)
    if sampler is find_batch_sampler(loader) or getattr(sampler, "generator", loader) is not None:
        return loader
    twin = copy.copy(sampler)
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
    twin.generator = torch.Generator().manual_seed(seed)
    return _with_sampler(loader, twin)


def _with_sampler(loader: DataLoader[Any], seeded: RandomSampler) -> DataLoader[Any]:
    batches = find_batch_sampler(loader)
    if not isinstance(batches, BatchSampler):
        return copy_loader(loader, sampler=seeded)
    twin = lowest = copy.copy(batches)
    while isinstance(lowest.sampler, BatchSampler):  # each sample is a batch of indices
        lowest.sampler = copy.copy(lowest.sampler)
        lowest = lowest.sampler
    lowest.sampler = seeded
    return copy_loader(loader, sampler=twin.sampler, batch_sampler=twin)


def _shard_stream(
    loader: DataLoader[Any], count: int, index: int, split: bool, even: bool
) -> DataLoader[Any]:
    size = loader.batch_size
    if isinstance(loader, SkipDataLoader):  # its own iteration would read the whole stream for each process
        rest = SkippedStream(loader.base_dataloader.dataset, size or 1)
        rest.skip_batches = loader.skip_batches + loader._skip.batches
        loader = copy_loader(loader.base_dataloader, dataset=rest)
    split = split and size is not None  # single samples cannot be split
    if split:
        check_split(size, count)
    marks = supports_marks(loader)
    whole_world = count == collective.world_size()
    by_files = whole_world and size is not None and marks and can_split(loader.dataset, count)
    stream = (SourceShard if by_files else IterableDatasetShard)(
        loader.dataset,  # type: ignore[arg-type]
        batch_size=size or 1,
        drop_last=loader.drop_last,
        num_processes=count,
        process_index=index,
        split_batches=split,
    )
    parts: dict[str, Any] = {"dataset": stream}
    stream.even_batches, stream.marks = even, marks
    if stream.marks:
        parts["collate_fn"] = CountingCollate(loader.collate_fn)
    if split:
        batches: Any = copy.copy(loader.batch_sampler)
        parts["batch_size"] = batches.batch_size = (size or 1) // count
        parts["batch_sampler"] = batches
    return copy_loader(loader, **parts)


def default_loader_options() -> dict[str, Any]:
    """Return the options of torch's ``DataLoader``, all but the dataset, with the defaults of 1.x."""
    parameters = inspect.signature(DataLoader.__init__).parameters.items()
    options = {name: each.default for name, each in parameters if each.default is not inspect.Parameter.empty}
    return {**options, "shuffle": False, "prefetch_factor": 2}
