"""Dispatched loaders: rank 0 reads the data of all ranks, and sends each rank its batch of every step.

The batches are those that sharding would give each rank, made on rank 0: of map-style data the order of
indices is sliced per rank before anything is read, of a stream the samples before they are collated. So a
batch may be anything that can be pickled, and nothing is concatenated or sliced after collating. If a loader
makes its batches itself, the ranks get whole ones in turn.

Rank 0 reads in the thread of its training loop, as any loader without workers does, some steps ahead of the
batch in hand. So each fetch has random numbers of its own, a function of its place in the order; the global
generators stay as they are: an augmentation draws the same in every run, resumed or not. Use workers to read
in parallel to the training.
"""

from __future__ import annotations

import copy
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from accelerate.data.batch_channel import DATA, BatchReceiver, BatchSender, pack, unpack
from accelerate.data.batch_sampler_shard import BatchSamplerShard, check_split, shard_by_index
from accelerate.data.batch_source import fetch_batches, find_shard
from accelerate.data.batches import FetchedBatch, count_rows, divide_rows, take_rows
from accelerate.data.epoch_order import fetches_by_index, outer_sampler
from accelerate.data.iterable_dataset import DataPipeStream, GlobalBatchCollate, supports_marks
from accelerate.data.loader import DataLoaderShard, copy_loader
from accelerate.data.position import Epoch, EpochSkip
from accelerate.data.rank_batches import AllRankBatchSteps
from accelerate.data.sample_order import RankSampleOrderSlicer, find_batch_sampler
from accelerate.data.stream_source import stream_batches, with_saved_split
from accelerate.world import collective
from accelerate.world.local_tensor_trees import concatenate, ignorant_find_batch_size, slice_tensors

Slice = Callable[..., Any]
RankBatches = list[FetchedBatch | None]
# Steps that rank 0 prefetches: one to know the last one, one to be in flight while the other is trained on.
_READ_AHEAD = 2


class DataLoaderDispatcher(DataLoaderShard):
    """A prepared loader whose batches rank 0 reads and sends to all ranks.

    Args:
        dataset, kwargs: those of ``torch.utils.data.DataLoader``.
        split_batches: the loader's batch size is that of all processes.
        skip_batches: number of batches to skip in every epoch.
        slice_fn: slices a collated batch: ``slice_fn(batch, slice, process_index=..., num_processes=...)``.
            The batches of a step are concatenated for it first, unless ``split_batches``.
        iteration: number of the next epoch.
    """

    split_batches: bool
    even_batches: bool
    slice_fn: Slice | None

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Slice | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
            iteration=iteration,
            **kwargs,
        )
        world = collective.world_size(join=True), collective.rank()
        self.base_dataloader = with_rank_batches(self.base_dataloader, *world, split_batches, True, slice_fn)
        self._initialize_dispatch(*world, split_batches, True, slice_fn)

    def _initialize_dispatch(
        self, count: int, index: int, split: bool, even: bool, slice_fn: Slice | None
    ) -> None:
        self._num_processes, self._index, self._is_accelerate_prepared = count, index, True
        self.split_batches, self.even_batches, self.slice_fn = split, even, slice_fn
        base = self.base_dataloader
        kind = f"{type(self.dataset).__module__}.{type(self.dataset).__qualname__}"
        self._name = f"{type(base).__name__}({kind}, batch_size={base.batch_size})"

    @classmethod
    def wrap_for_dispatch(
        cls,
        base: DataLoader[Any],
        *,
        device: torch.device | None,
        num_processes: int,
        process_index: int,
        split_batches: bool = False,
        even_batches: bool = True,
        slice_fn: Slice | None = None,
        non_blocking: bool = False,
    ) -> DataLoaderDispatcher:
        """Wrap the user's ``base``, which rank 0 will read for all ranks."""
        base = with_rank_batches(base, num_processes, process_index, split_batches, even_batches, slice_fn)
        loader: Any = cls.wrap(base, device=device, non_blocking=non_blocking, num_processes=num_processes)
        loader._initialize_dispatch(num_processes, process_index, split_batches, even_batches, slice_fn)
        return loader

    def __len__(self) -> int:
        base, share, even = self.base_dataloader, 1, self.even_batches
        if find_shard(base) is not None:
            return len(outer_sampler(base))
        if isinstance(base.collate_fn, GlobalBatchCollate):
            items, share = len(self.dataset), base.collate_fn.share  # type: ignore[arg-type]
        else:
            items = len(base)
            if self.split_batches:
                return items
        slicer = RankSampleOrderSlicer(
            share, self._num_processes, self._index, drop_last=self._drop_last, fill_last=even
        )
        return slicer.count_steps(items)

    @property
    def total_batch_size(self) -> int:
        """The samples of one step, of all processes."""
        base = self.base_dataloader
        if isinstance(base.collate_fn, GlobalBatchCollate):
            return base.collate_fn.share * self._num_processes
        size = getattr(find_batch_sampler(base), "batch_size", None) or base.batch_size or 1
        return size if self.split_batches else size * self._num_processes

    def _fetch(self, skip: EpochSkip) -> Iterator[FetchedBatch]:
        if self._num_processes == 1:
            return super()._fetch(skip)
        return self._send_batches() if self._index == 0 else self._receive_batches()

    @property
    def _fetches_per_step(self) -> int:  # type: ignore[override]
        base = self._full_base
        whole = isinstance(base.collate_fn, GlobalBatchCollate) or find_shard(base) is not None
        return 1 if whole or self.split_batches else self._num_processes

    @property
    def _has_equal_batches(self) -> bool:
        base = self._full_base
        if self._num_processes == 1 or find_shard(base) is not None:
            return super()._has_equal_batches
        is_divided = self.split_batches or self.slice_fn is not None
        return self.even_batches and (is_divided or isinstance(base.collate_fn, GlobalBatchCollate))

    @property
    def reads_ahead(self) -> bool:
        """True where rank 0 sends: it reads some steps ahead."""
        return self._num_processes > 1

    @property
    def _loader_id(self) -> int:
        # Without the dataset's class: ranks that read nothing may have an empty dataset of another one.
        return zlib.crc32(f"{type(self.base_dataloader).__name__} {self.base_dataloader.batch_size}".encode())

    def _receive_batches(self) -> Iterator[FetchedBatch]:
        """Yield the batches that rank 0 sends, with one prefetched."""
        pin = bool(self.base_dataloader.pin_memory) and self.device is not None and self.device.type != "cpu"
        messages = BatchReceiver(self._loader_id, self._name, pin)
        try:
            upcoming = next(messages, None)
            while upcoming is not None:
                fetched, upcoming = upcoming, next(messages, None)
                yield fetched._replace(last=upcoming is None)
        finally:
            messages.close()

    def _send_batches(self) -> Iterator[FetchedBatch]:
        """Yield rank 0's batches; send each step when it is read, some steps before the loop takes it."""
        sender, rank0_batches = BatchSender(self._loader_id), deque[FetchedBatch]()
        try:
            try:
                for step in self._steps():
                    _send(sender, step)
                    rank0_batches.extend(fetched for fetched in step[:1] if fetched is not None)
                    if len(rank0_batches) > _READ_AHEAD:
                        yield rank0_batches.popleft()
            except Exception as error:
                # All ranks first get the batches read before, and fail in the same step.
                sender.fail(error)
                yield from rank0_batches
                sender.drain()
                raise
            for rank in range(1, self._num_processes):
                sender.end(rank)
            while rank0_batches:
                fetched = rank0_batches.popleft()
                yield fetched._replace(last=not rank0_batches)
            sender.drain()
        finally:
            sender.close()

    def _steps(self) -> Iterator[RankBatches]:
        """Yield the batches of all ranks for each step, None for a rank that gets nothing in it."""
        epoch = self.position.current
        assert epoch is not None
        base = with_saved_split(self._full_base, epoch)
        if isinstance(base.dataset, IterDataPipe):
            base = copy_loader(base, dataset=DataPipeStream(base.dataset))
        shard, collate = find_shard(base), base.collate_fn
        if shard is not None:
            return self._index_steps(base, shard, epoch)
        if isinstance(collate, GlobalBatchCollate):
            collate.first = []
        group = self._fetches_per_step
        skip = replace(epoch.skip, batches=epoch.skip.batches * group, further=epoch.skip.further * group)
        inner = replace(epoch, skip=skip, copy_to_device=None)  # parts of it are sent
        marked_batches = stream_batches(
            base, inner, self.total_batch_size // group, self._indexed_loader(base), group
        )
        batches = (batch for batch, _, _ in marked_batches)
        if isinstance(collate, GlobalBatchCollate):
            steps = map(self._unpack_collated, batches)
        elif self.slice_fn is not None:
            steps = self._slice_batches(batches, self.slice_fn, inner)
        else:
            steps = self._split_rows(batches) if self.split_batches else self._group_batches(batches, inner)
        return _propagate_order(steps, inner, epoch)

    def _index_steps(
        self, base: DataLoader[Any], shard: BatchSamplerShard, epoch: Epoch
    ) -> Iterator[RankBatches]:
        """Yield the ranks' batches of map-style data, sliced by index."""
        opener = AllRankBatchSteps(shard, single=find_batch_sampler(base) is None)
        step: RankBatches = []
        for fetched in fetch_batches(base, *self._indexed_loader(base), epoch, opener):
            rank = opener.ranks.popleft()
            if rank == 0 and step:
                yield self._pad_step(step)
                step = []
            step.append(fetched._replace(last=False))
        if step:
            yield self._pad_step(step)

    def _pad_step(self, step: RankBatches) -> RankBatches:
        return step + [None] * (self._num_processes - len(step))

    def _unpack_collated(self, step: Any) -> RankBatches:
        """Return the ranks' batches of a step of a stream."""
        whole = step[0].total == self.total_batch_size
        filled = not whole and self.even_batches
        return [
            part
            and FetchedBatch(
                part.batch, False, part.total, part.total * filled, part.real if filled else None, part.size
            )
            for part in step
        ]

    def _group_batches(self, batches: Iterable[Any], epoch: Epoch) -> Iterator[RankBatches]:
        """Group whole batches into steps; fill the last step by repeating the first batch."""
        step: RankBatches = []
        first: torch.Tensor | None = None
        for batch in batches:
            if len(step) == self._num_processes:
                yield step
                step = []
            step.append(FetchedBatch(batch))
            # Serialized, since the loop may change the batch in place.
            first = pack(DATA, [*epoch.first_batches, batch][0]) if first is None else first
        missing = self._num_processes - len(step)
        if not step or not missing:
            yield from [step] if step else []
        elif not self._drop_last:
            yield self._fill_step(step, first, missing) if self.even_batches else self._pad_step(step)

    def _fill_step(self, step: RankBatches, first: torch.Tensor | None, missing: int) -> RankBatches:
        rows = [_count_batch_rows(fetched.batch) for fetched in step if fetched is not None]
        one_by_one = self.base_dataloader.batch_size is None
        total = len(rows) if one_by_one else sum(rows)
        filler: Any = [unpack(first) for _ in range(missing)]  # type: ignore[arg-type]
        filled = step + [FetchedBatch(batch, real=0, size=_count_batch_rows(batch) or 1) for batch in filler]
        remainder = -1 if one_by_one else total
        return [item and item._replace(samples=total, remainder=remainder) for item in filled]

    def _split_rows(self, batches: Iterable[Any]) -> Iterator[RankBatches]:
        """Split the rows of each collated batch equally; fill up with its first rows again."""
        count = self._num_processes
        for batch in batches:
            rows = count_rows(batch)
            share = divide_rows(rows, count)
            step: RankBatches = []
            for start in range(0, share * count, share):
                row_numbers = range(start, start + share) if self.even_batches else range(start, rows)[:share]
                real = len(range(start, rows)[:share])
                part = take_rows(batch, rows, [row % rows for row in row_numbers]) if row_numbers else None
                filled = self.even_batches and rows % count
                remainder, own = (rows, real) if filled else (0, None)
                fetched = FetchedBatch(part, False, rows, remainder, own, len(row_numbers))
                step.append(fetched if row_numbers else None)
            yield step

    def _slice_batches(self, batches: Iterable[Any], slice_fn: Slice, epoch: Epoch) -> Iterator[RankBatches]:
        """Slice each batch, or the concatenated batches of a step, by the user's function."""
        count, group = self._num_processes, 1 if self.split_batches else self._num_processes
        iterator, first = iter(batches), None
        while joined := list(islice(iterator, group)):
            if self._drop_last and len(joined) < group:
                return
            whole = joined[0] if len(joined) == 1 else concatenate(joined)
            if first is None:
                kept = epoch.first_batches
                first = pack(DATA, concatenate(kept) if kept else whole)
            rows = ignorant_find_batch_size(whole) or (self.base_dataloader.batch_size or 1) * len(joined)
            share = -(-rows // count)
            missing = share * count - rows
            while self.even_batches and missing > 0:
                more = slice_tensors(unpack(first), slice(0, missing))
                whole = concatenate([whole, more])
                missing -= ignorant_find_batch_size(more) or missing
            step: RankBatches = []
            for rank in range(count):
                cut = slice(rank * share, (rank + 1) * share)
                part = slice_fn(whole, cut, process_index=rank, num_processes=count)
                filled = self.even_batches and rows % count
                real = min(share, max(0, rows - cut.start)) if filled else None
                step.append(FetchedBatch(part, False, rows, rows if filled else 0, real, share))
            yield step


def _send(sender: BatchSender, step: RankBatches) -> None:
    # Serialize all before any is sent: a batch that cannot be pickled fails on all ranks in the same step.
    blocks = [None if fetched is None else sender.pack(fetched) for fetched in step[1:]]
    for rank, block in enumerate(blocks, 1):
        if block is not None:
            sender.send(rank, block)


def _count_batch_rows(batch: Any) -> int:
    rows = ignorant_find_batch_size(batch)
    if rows is None and hasattr(batch, "__len__") and getattr(batch, "ndim", 1):
        rows = len(batch)
    return rows or 0


def _propagate_order(steps: Iterable[RankBatches], inner: Epoch, epoch: Epoch) -> Iterator[RankBatches]:
    """Yield the same steps; copy the order state of the inner epoch, and its skip, to the outer one."""
    for step in steps:
        epoch.order_state, epoch.skipped = inner.order_state, inner.skipped
        yield step


def with_rank_batches(
    base: DataLoader[Any], count: int, index: int, split: bool, even: bool, slice_fn: Slice | None
) -> DataLoader[Any]:
    """Return the user's loader with a sampler or collate function for the batches of all ranks, if possible.

    Raises:
        PrepareError: ``split`` and the batch size does not divide by the number of ranks.
    """
    size = base.batch_size
    if split and size == 1:  # of one item the collate function may make a batch of all ranks
        return base
    if split:
        check_split(size, count)
    if count == 1 or slice_fn is not None:
        return base
    if fetches_by_index(base) and not (split and find_batch_sampler(base) is None):
        return shard_by_index(base, count, index, split, even)
    if isinstance(base.dataset, IterableDataset) and size is not None and supports_marks(base):
        step = size if split else size * count
        batches: Any = copy.copy(base.batch_sampler)
        batches.batch_size = step
        collate = GlobalBatchCollate(base.collate_fn, count, step // count, even)
        return copy_loader(base, batch_sampler=batches, collate_fn=collate)
    return base
