"""Loaders that rank 0 reads for all: it sends each rank its batch of every step.

The batches are those that sharding would give each rank, made on rank 0: of map-style data its order of
indices is cut into the ranks' parts before anything is read, of a stream its samples before they are
collated. So a batch may be anything that can be pickled, and nothing is joined or cut after collating. Where
a loader makes its batches itself, each rank gets whole ones in turn.

Rank 0 reads in the thread of its training loop, as any loader without workers does: an augmentation that
draws from the global random numbers draws the same in every run. Use workers to read beside the training.
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
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accelerate.core.errors import PrepareError
from accelerate.data.cut import rows_of, take
from accelerate.data.loader import DataLoaderShard, with_parts
from accelerate.data.position import Epoch, Given, Skip
from accelerate.data.reading import by_index, pick, read, shard_of
from accelerate.data.shard import BatchSamplerShard
from accelerate.data.steps import AllRanks, OneByOne
from accelerate.data.stream import StepCollate, counts
from accelerate.data.wire import DATA, Receiver, Sender, pack, unpack
from accelerate.world import collective
from accelerate.world.tensors import concatenate, ignorant_find_batch_size, slice_tensors

Slice = Callable[..., Any]
Step = list[Given | None]
# Steps that rank 0 reads ahead: one to know the last one, one to be on its way while the other is trained on.
_AHEAD = 2


class DataLoaderDispatcher(DataLoaderShard):
    """A loader that rank 0 reads for all.

    Args:
        dataset, kwargs: those of ``torch.utils.data.DataLoader``.
        split_batches: the loader's batch size is that of all processes together.
        skip_batches: leave out so many batches of the first epoch.
        slice_fn: cuts a collated batch: ``slice_fn(batch, slice, process_index=..., num_processes=...)``.
            The batches of a step are joined for it first, unless ``split_batches``.
        iteration: number of the next epoch.
    """

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
        world = collective.size(), collective.rank()
        self._wrap(steps_of(self.base_dataloader, *world, split_batches, True, slice_fn))
        self._dispatch(*world, split_batches, True, slice_fn)

    def _dispatch(self, count: int, index: int, split: bool, even: bool, slice_fn: Slice | None) -> None:
        self._num_processes, self._index = count, index
        self.split_batches, self.even_batches, self.slice_fn = split, even, slice_fn
        base = self.base_dataloader
        kind = f"{type(self.dataset).__module__}.{type(self.dataset).__qualname__}"
        self._name = f"{type(base).__name__}({kind}, batch_size={base.batch_size})"

    @classmethod
    def over(
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
        """A prepared view of the user's ``base``, which rank 0 will read for all."""
        base = steps_of(base, num_processes, process_index, split_batches, even_batches, slice_fn)
        loader: Any = cls.around(base, device=device, non_blocking=non_blocking, num_processes=num_processes)
        loader._dispatch(num_processes, process_index, split_batches, even_batches, slice_fn)
        return loader

    def __len__(self) -> int:
        base = self.base_dataloader
        sampler = base.sampler if base.batch_sampler is None else base.batch_sampler
        if shard_of(base) is not None:
            return len(sampler)  # type: ignore[arg-type]
        batches = len(base)
        if self.split_batches:
            return batches
        whole, rest = divmod(batches, self._num_processes)
        if rest == 0 or self._drop_last:
            return whole
        return whole + 1 if self.even_batches else whole + (self._index < rest)

    @property
    def total_batch_size(self) -> int:
        """Samples of one step, all processes together."""
        base = self.base_dataloader
        if isinstance(base.collate_fn, StepCollate):
            return base.collate_fn.share * self._num_processes
        size = getattr(base.batch_sampler, "batch_size", None) or base.batch_size or 1
        return size if self.split_batches else size * self._num_processes

    def _source(self, skip: Skip) -> Iterator[Given]:
        if self._num_processes == 1:
            return super()._source(skip)
        return self._lead() if self._index == 0 else self._follow()

    @property
    def _code(self) -> int:
        return zlib.crc32(self._name.encode())

    def _follow(self) -> Iterator[Given]:
        """What rank 0 sends, one ahead."""
        pin = bool(self.base_dataloader.pin_memory) and self.device is not None and self.device.type != "cpu"
        messages = Receiver(self._code, self._name, pin)
        try:
            upcoming = next(messages, None)
            while upcoming is not None:
                given, upcoming = upcoming, next(messages, None)
                yield given._replace(last=upcoming is None)
        finally:
            messages.close()

    def _lead(self) -> Iterator[Given]:
        """Rank 0's batches; each step is sent when it is read, some steps before the loop takes it."""
        sender, mine = Sender(self._code), deque[Given]()
        try:
            try:
                for step in self._steps():
                    _send(sender, step)
                    mine.extend(given for given in step[:1] if given is not None)
                    if len(mine) > _AHEAD:
                        yield mine.popleft()
            except Exception as error:
                # All ranks first take what was read before, and fail in the same step.
                sender.fail(error)
                yield from mine
                sender.drain()
                raise
            for rank in range(1, self._num_processes):
                sender.end(rank)
            while mine:
                given = mine.popleft()
                yield given._replace(last=not mine)
            sender.drain()
        finally:
            sender.close()

    def _steps(self) -> Iterator[Step]:
        """Every rank's batch of each step. A rank that gets none has ended."""
        base, epoch = self._whole, self.position.current
        assert epoch is not None
        shard, collate = shard_of(base), base.collate_fn
        if shard is not None:
            return self._by_index(base, shard, epoch)
        group = 1
        if isinstance(collate, StepCollate):
            collate.first = []
        elif not self.split_batches:
            group = self._num_processes
        # A step is of one item, or of several.
        inner = replace(epoch, skip=replace(epoch.skip, batches=epoch.skip.batches * group))
        found = read(base, inner, self.total_batch_size // group, self._feeding(base))
        batches = (batch for batch, _ in found)
        if isinstance(collate, StepCollate):
            steps = map(self._collated, batches)
        elif self.slice_fn is not None:
            steps = self._sliced(batches, self.slice_fn)
        else:
            steps = self._cut(batches) if self.split_batches else self._in_turn(batches)
        return _noting(steps, inner, epoch)

    def _by_index(self, base: DataLoader[Any], shard: BatchSamplerShard, epoch: Epoch) -> Iterator[Step]:
        """The ranks' batches of map-style data, as its order was cut."""
        opened = AllRanks(shard, single=base.batch_sampler is None)
        step: Step = []
        for given in pick(base, *self._feeding(base), epoch, opened):
            rank = opened.ranks.popleft()
            if rank == 0 and step:
                yield self._padded(step)
                step = []
            step.append(given._replace(last=False))
        if step:
            yield self._padded(step)

    def _padded(self, step: Step) -> Step:
        return step + [None] * (self._num_processes - len(step))

    def _collated(self, step: Any) -> Step:
        """The ranks' batches of a stream, as they were collated."""
        whole = step[0].total == self.total_batch_size
        filled = not whole and self.even_batches
        return [
            part and Given(part.batch, False, part.total, part.total * filled, part.real if filled else None)
            for part in step
        ]

    def _in_turn(self, batches: Iterable[Any]) -> Iterator[Step]:
        """Whole batches; the last step is filled by repeating the first one."""
        step: Step = []
        first: torch.Tensor | None = None
        for batch in batches:
            if len(step) == self._num_processes:
                yield step
                step = []
            step.append(Given(batch))
            # Packed, since the loop may change what it is given.
            first = pack(DATA, batch) if first is None else first
        missing = self._num_processes - len(step)
        if not step or not missing:
            yield from [step] if step else []
        elif not self._drop_last:
            yield self._repeated(step, first, missing) if self.even_batches else self._padded(step)

    def _repeated(self, step: Step, first: torch.Tensor | None, missing: int) -> Step:
        rows = [_rows(given.batch) for given in step if given is not None]
        one_by_one = self.base_dataloader.batch_size is None
        total = len(rows) if one_by_one else sum(rows)
        filled = step + [Given(unpack(first), real=0) for _ in range(missing)]  # type: ignore[arg-type]
        remainder = -1 if one_by_one else total
        return [item and item._replace(samples=total, remainder=remainder) for item in filled]

    def _cut(self, batches: Iterable[Any]) -> Iterator[Step]:
        """Each collated batch cut into equal parts; what is missing are its first rows again."""
        count = self._num_processes
        for batch in batches:
            rows = rows_of(batch)
            share = -(-rows // count)
            step: Step = []
            for start in range(0, share * count, share):
                wanted = range(start, start + share) if self.even_batches else range(start, rows)[:share]
                real = len(range(start, rows)[:share])
                part = take(batch, rows, [row % rows for row in wanted]) if wanted else None
                filled = self.even_batches and rows % count
                given = Given(part, False, rows, rows if filled else 0, real if filled else None)
                step.append(given if wanted else None)
            yield step

    def _sliced(self, batches: Iterable[Any], slice_fn: Slice) -> Iterator[Step]:
        """Each batch, or the joined batches of a step, cut by the user's function."""
        count, group = self._num_processes, 1 if self.split_batches else self._num_processes
        iterator, first = iter(batches), None
        while joined := list(islice(iterator, group)):
            if self._drop_last and len(joined) < group:
                return
            whole = joined[0] if len(joined) == 1 else concatenate(joined)
            first = pack(DATA, whole) if first is None else first
            rows = ignorant_find_batch_size(whole) or (self.base_dataloader.batch_size or 1) * len(joined)
            share = -(-rows // count)
            missing = share * count - rows
            while self.even_batches and missing > 0:
                more = slice_tensors(unpack(first), slice(0, missing))
                whole = concatenate([whole, more])
                missing -= ignorant_find_batch_size(more) or missing
            step: Step = []
            for rank in range(count):
                cut = slice(rank * share, (rank + 1) * share)
                part = slice_fn(whole, cut, process_index=rank, num_processes=count)
                filled = self.even_batches and rows % count
                real = min(share, max(0, rows - cut.start)) if filled else None
                step.append(Given(part, False, rows, rows if filled else 0, real))
            yield step


def _send(sender: Sender, step: Step) -> None:
    # Packed for all before any is sent: what cannot be packed fails on all ranks in the same step.
    blocks = [None if given is None else sender.pack(given) for given in step[1:]]
    for rank, block in enumerate(blocks, 1):
        if block is None:
            sender.end(rank)
        else:
            sender.send(rank, block)


def _rows(batch: Any) -> int:
    rows = ignorant_find_batch_size(batch)
    return len(batch) if rows is None and hasattr(batch, "__len__") else rows or 0


def _noting(steps: Iterable[Step], inner: Epoch, epoch: Epoch) -> Iterator[Step]:
    """The same steps; what the inner epoch found out is told to the outer one."""
    for step in steps:
        epoch.start = inner.start
        yield step


def steps_of(
    base: DataLoader[Any], count: int, index: int, split: bool, even: bool, slice_fn: Slice | None
) -> DataLoader[Any]:
    """The user's loader with the parts that make it give every rank's batches, where it has such parts.

    Raises:
        PrepareError: ``split`` and the batch size does not divide by the number of ranks.
    """
    size = base.batch_size
    if split and size is not None and size % count:
        raise PrepareError(
            f"a batch of {size} samples cannot be split over {count} processes",
            why="split_batches=True cuts every batch into equal parts",
            fix=f"use a batch size that is a multiple of {count}",
        )
    if count == 1 or slice_fn is not None:
        return base
    if by_index(base) and base.batch_sampler is not None:
        whole: Any = base.batch_sampler
        return with_parts(base, batch_sampler=BatchSamplerShard(whole, count, index, split, even))
    if by_index(base) and not split:
        ones = BatchSampler(base.sampler, 1, drop_last=False)
        return with_parts(base, sampler=OneByOne(BatchSamplerShard(ones, count, index, False, even)))
    if isinstance(base.dataset, IterableDataset) and size is not None and counts(base):
        step = size if split else size * count
        batches: Any = copy.copy(base.batch_sampler)
        batches.batch_size = step
        collate = StepCollate(base.collate_fn, count, step // count, even)
        return with_parts(base, batch_sampler=batches, collate_fn=collate)
    return base
