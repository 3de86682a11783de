"""Prepared loaders: a view of the user's loader that shards, moves batches and knows its last batch.

The user's loader is wrapped, never rebuilt: its class, attributes, workers and collate function stay. To
shard it, a shallow copy gets another batch sampler; nothing is iterated or drawn before the first batch.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from accelerate.data.active import UNOWNED, ActiveLoaders
from accelerate.data.epoch import Readers
from accelerate.data.order import chain_of, inner_sampler
from accelerate.data.position import Epoch, Given, Position, Skip
from accelerate.data.reading import (
    Feed,
    by_index,
    feeding,
    generators_of,
    pick,
    read,
    sampler_of,
    shard_of,
    with_parts,
)
from accelerate.data.shard import SkipBatchSampler, cut_of
from accelerate.data.stream import CountingCollate, IterableDatasetShard, StepCollate, unmark
from accelerate.world.rng import synchronize_rng_states
from accelerate.world.tensors import ignorant_find_batch_size, send_to_device


class DataLoaderStateMixin:
    """What a loop can ask its loader.

    Attributes:
        end_of_dataloader: the batch in hand is the last one.
        remainder: how many samples of the last step are real when it was filled, all ranks together;
            -1 when unknown or when nothing is filled.
        real: how many rows of the batch in hand, on this process, are no fillers; None when unknown, or all.
        filled: the step of the batch in hand may hold fillers, on some process.
        micro_steps: accumulation steps since the batch in hand was given.
        micro_steps_before: the same of the batch before, 0 before there was one.
    """

    end_of_dataloader: bool = False
    remainder: int = -1
    real: int | None = None
    filled: bool = False
    micro_steps: int = 0
    micro_steps_before: int = 0
    active: ActiveLoaders = UNOWNED
    gradient_state: Any = None  # that of the Accelerator that prepared it

    def reset(self) -> None:
        """Before an epoch."""
        self.end_of_dataloader = False
        self.remainder = -1
        self.real, self.filled = None, False

    def begin(self) -> None:
        """An epoch begins."""
        self.reset()
        self.active.add(self)

    def end(self) -> None:
        """An epoch ended or was broken off."""
        self.active.remove(self)


class DataLoaderAdapter(DataLoader[Any]):
    """A loader that stands before another one and passes on everything it does not know."""

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        self._wrap(DataLoader(dataset, batch_sampler=batch_sampler, **kwargs))
        self.use_stateful_dataloader = use_stateful_dataloader

    def _wrap(self, base: DataLoader[Any]) -> None:
        # Straight into __dict__: torch's loader guards its attributes, and they all live in the base.
        self.__dict__["base_dataloader"] = base

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader" or name.startswith("_DataLoader__"):
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    # Torch's own guards attributes that live in the base, and costs as much as moving a batch.
    __setattr__ = object.__setattr__  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self.base_dataloader)

    @property
    def collate_fn(self) -> Any:  # type: ignore[override]
        """The user's."""
        found = self.base_dataloader.collate_fn
        return found.collate if isinstance(found, CountingCollate | StepCollate) else found

    @property
    def multiprocessing_context(self) -> Any:  # type: ignore[override]
        """The base loader's."""
        return self.base_dataloader.multiprocessing_context

    @property
    def _iterator(self) -> Any:  # type: ignore[override]
        return self.base_dataloader._iterator


class DataLoaderShard(DataLoaderAdapter, DataLoaderStateMixin):
    """One process's part of a loader, on its device.

    Args:
        dataset, kwargs: those of ``torch.utils.data.DataLoader``.
        device: where batches go; None leaves them.
        rng_types, synchronized_generator: random streams that all processes take over from rank 0 at the
            start of every epoch; the order of the samples is agreed without them.
        skip_batches: leave out so many batches of the first epoch.
        iteration: number of the next epoch.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: Any = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self._set_up(device, _drop_last, _non_blocking, iteration, skip_batches)
        self.use_stateful_dataloader = use_stateful_dataloader
        self.rng_types, self.synchronized_generator = rng_types, synchronized_generator

    def _set_up(
        self,
        device: torch.device | None,
        drop_last: bool,
        non_blocking: bool,
        iteration: int = 0,
        skip: int = 0,
    ) -> None:
        self.device, self.skip_batches = device, skip
        self.position = Position(iteration)
        # What a twin that skips leaves out of every epoch, and the loader it leaves it out of.
        self._skip: Skip = Skip()
        self._unskipped: DataLoader[Any] | None = None
        # A list, so that twins share its one item, and with it workers that persist.
        self._fed: list[tuple[Any, DataLoader[Any], Feed]] = []
        self._drop_last, self._non_blocking = drop_last, non_blocking
        self.rng_types = self.synchronized_generator = None
        self._noted: dict[str, Any] | None = None
        # What this process computes of a batch, where processes share sequences.
        self.own_part: Callable[[Any], Any] | None = None
        # How the data are shared out, where the strategy has said so.
        self.data_share: Any = None
        # What all processes do together once, when the first of all batches is asked for.
        self.before_first_use: Callable[[], None] | None = None
        self.comparison: Callable[[], None] | None = None
        self._num_processes = 1
        self._is_accelerate_prepared = True
        self.use_stateful_dataloader = False

    @property
    def _whole(self) -> DataLoader[Any]:
        return self.base_dataloader if self._unskipped is None else self._unskipped

    @property
    def iteration(self) -> int:
        """Number of the next epoch, or of the one in progress."""
        return self.position.iteration

    @iteration.setter
    def iteration(self, iteration: int) -> None:
        self.position.iteration = iteration

    @classmethod
    def around(
        cls,
        base: DataLoader[Any],
        *,
        device: torch.device | None,
        non_blocking: bool = False,
        num_processes: int = 1,
        skip_batches: int = 0,
        iteration: int = 0,
    ) -> DataLoaderShard:
        """A prepared view of ``base``, which yields this process's part already."""
        shard = cls.__new__(cls)
        shard._wrap(base)
        shard._set_up(device, bool(getattr(base, "drop_last", False)), non_blocking, iteration, skip_batches)
        shard._num_processes = num_processes
        return shard

    def among(self, parts: int, index: int) -> None:
        """Several processes read the same part of the data: they get the same batches in the same order.

        Their random numbers are then a function of the part, in workers and without; the program's own stay
        as they are.

        Args:
            parts: into how many the data are shared out.
            index: which one this process reads.
        """
        self.position.readers = Readers(parts, index, apart=parts > 1 and self._num_processes == 1)
        self.before_first_use = self.comparison

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is that of ``epoch``: told to every sampler and dataset that wants to know."""
        self.iteration = epoch
        self._tell(epoch)

    def _tell(self, epoch: int) -> None:
        told: list[Any] = []
        base = self.base_dataloader
        for item in (*chain_of(base.batch_sampler), *chain_of(base.sampler), self.dataset):
            tell: Any = getattr(item, "set_epoch", None)
            # A shard passes it on by itself, and does not have it if the sampler below has not.
            if tell is not None and not any(tell == other for other in told):
                told.append(tell)
                tell(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.active.asked is not None:
            self.active.asked(self)
        skip, inside = self._skip.plus(self.skip_batches, self.total_batch_size), bool(self._skip)
        record = self.position.record
        if record is not None and record.complete and skip.samples is not None:
            self.position.close()
            return
        if record is not None and self.use_stateful_dataloader and not (inside or record.complete):
            skip, inside = Skip(record.batches, record.samples), True
        epoch = self.position.begin(skip, isolated=inside)
        self._tell(epoch.number)
        self.begin()
        if self.rng_types is not None and not (inside and epoch.again):
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        try:
            yield from self._batches(epoch)
            epoch.complete = True
        finally:
            self.position.end(epoch)
            self.end()
        self.iteration += 1
        self.skip_batches = 0

    def begin(self) -> None:
        """An epoch begins: how many samples of its last step will be real."""
        if self.before_first_use is not None:
            check, self.before_first_use = self.before_first_use, None
            check()
        super().begin()
        if not self._drop_last:
            try:
                self.remainder = self.total_dataset_length % self.total_batch_size
            except TypeError:  # a stream without a length
                self.remainder = -1

    def _batches(self, epoch: Epoch) -> Iterator[Any]:
        """Each batch on the device."""
        device, non_blocking, step = self.device, self._non_blocking, self.total_batch_size
        epoch.samples = epoch.skip.batches * step if epoch.skip.samples is None else epoch.skip.samples
        empty = True
        for batch, last, samples, remainder, real in self._source(epoch.skip):
            empty = False
            self.active.touch(self)
            if device is not None:
                batch = send_to_device(batch, device, non_blocking)
            if self.own_part is not None:
                batch = self.own_part(batch)
            epoch.batches += 1
            epoch.samples += step if samples is None else samples
            self.real, self.filled = real, remainder != 0
            if last:
                self.end_of_dataloader, self.remainder, epoch.complete = True, remainder, True
            self.micro_steps_before, self.micro_steps = self.micro_steps or self.micro_steps_before, 0
            yield batch
            if self.active.asked is not None:
                self.active.asked(self)
        if empty and not epoch.skip:
            self._warn_if_empty()

    def _source(self, skip: Skip) -> Iterator[Given]:
        """This process's batches of one epoch, on the host, with what is known of each.

        The seam between what a loader is for its user and where its batches come from: a loader that is fed
        otherwise (by another process, say) overrides this alone. It is called when the first batch of an
        epoch is asked for, on every process. Moving to the device, the marks of the last batch
        (``end_of_dataloader``, ``remainder``, ``real``) and the position are made of what it yields; the
        last batch must say that it is the last.

        Args:
            skip: what to leave out at the beginning of the epoch.
        """
        base, epoch = self._whole, self.position.current
        assert epoch is not None
        if by_index(base):
            return pick(base, *self._feeding(base), epoch)
        return self._read(base, epoch)

    def _feeding(self, base: DataLoader[Any]) -> tuple[DataLoader[Any], Feed]:
        """The loader with a feed in place of its sampler; one for all epochs, since workers may persist."""
        sampler = sampler_of(base)
        if not self._fed or self._fed[0][0] is not sampler:
            self._fed[:] = [(sampler, *feeding(base))]
        return self._fed[0][1:]

    def _read(self, base: DataLoader[Any], epoch: Epoch) -> Iterator[Given]:
        for batch, last in read(base, epoch, self.total_batch_size, self._feeding(base)):
            batch, real, total = unmark(batch)
            if not last:
                yield Given(batch, samples=total, real=real)
            elif total is not None:
                yield Given(batch, True, total, total, real)
            else:
                yield Given(batch, True, remainder=self._filled(batch))

    def _filled(self, batch: Any) -> int:
        if self._num_processes == 1 and self.remainder < 0:
            # A lone process fills nothing, but a loss repeated to the full batch size counts like its batch.
            rows, full = ignorant_find_batch_size(batch) or 0, self.batch_size or 0
            return rows if rows < full else 0
        # What was sharded knows how its last step was filled; a stream that workers read has ended in them.
        stream, shard = self.dataset, shard_of(self._whole)
        if shard is not None:
            return shard.remainder
        if isinstance(stream, IterableDatasetShard) and self.num_workers == 0 and not self._drop_last:
            return stream.remainder
        return self.remainder

    def _warn_if_empty(self) -> None:
        if self._drop_last and self._num_processes > 1 and len(self) == 0:
            warnings.warn(
                f"this epoch has 0 batches: drop_last=True leaves out the last incomplete step, and "
                f"{self.total_dataset_length} samples do not fill one of {self._num_processes} processes x "
                f"{self.batch_size} samples",
                stacklevel=3,
            )

    @property
    def total_batch_size(self) -> int:
        """Samples of one step, all processes together."""
        if isinstance(self.dataset, IterableDatasetShard):
            return self.dataset.step_size
        sampler = getattr(self.base_dataloader, "batch_sampler", None)
        size = getattr(sampler, "batch_size", None) or self.base_dataloader.batch_size or 1
        if getattr(sampler, "split_batches", False):
            return size
        return size * self._num_processes

    @property
    def total_dataset_length(self) -> int:
        """Samples of one epoch, all processes together."""
        sampler = getattr(self.base_dataloader, "batch_sampler", None)
        inner = inner_sampler(sampler) if sampler is not None else self.base_dataloader.sampler
        data: Any = self.dataset
        if hasattr(data, "total_length"):
            return data.total_length
        return len(inner) if isinstance(inner, Sampler) and sampler is not None else len(data)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, as plain values (JSON's); those of rank 0 hold for all processes.

        The position is counted in samples of all processes together, up to the batch in hand, whatever
        workers have read ahead.
        """
        return self.position.state_dict(generators_of(self._whole), self.total_batch_size)

    @property
    def dl_state_dict(self) -> dict[str, Any]:
        """The position as ``adjust_state_dict_for_prefetch`` left it, else as it is now."""
        return self.state_dict() if self._noted is None else self._noted

    def adjust_state_dict_for_prefetch(self) -> None:
        """Notes the position of the batch in hand in ``dl_state_dict``; what is read ahead does not count."""
        self._noted = self.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there.

        A plain iteration then gives the epoch that was in progress from its beginning, in the same order, or
        the next epoch if that one had come to its end. ``skip_first_batches`` goes on inside of it, and so
        does a plain iteration with ``use_stateful_dataloader=True``.

        Raises:
            ValueError: the loader and its samplers hold other random generators than the saved ones.
        """
        self.position.load_state_dict(state_dict, generators_of(self._whole))
        self._tell(self.iteration)

    def get_sampler(self) -> Any:
        """The sampler of single indices."""
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Replaces the sampler of single indices."""
        holder = self.base_dataloader.batch_sampler
        while hasattr(holder, "batch_sampler"):
            holder = holder.batch_sampler
        if holder is None:
            self.base_dataloader.__dict__["sampler"] = sampler
        else:
            holder.sampler = sampler


def get_sampler(dataloader: Any) -> Any:
    """The sampler of single indices at the bottom of a loader, or None."""
    sampler = getattr(dataloader, "batch_sampler", None)
    return inner_sampler(sampler) if sampler is not None else getattr(dataloader, "sampler", None)


class SkipDataLoader(DataLoaderShard):
    """A loader that leaves out its first ``skip_batches`` batches.

    Args:
        dataset, kwargs: those of ``torch.utils.data.DataLoader``.
        skip_batches: how many.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(
            dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs
        )

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int | None = 0) -> DataLoader[Any]:
    """A loader without its first ``num_batches`` batches; of map-style data none of them is read.

    Args:
        dataloader: a prepared loader, or any other.
        num_batches: how many. After ``load_state``, the number that the checkpoint was saved after goes on
            at exactly the next sample of the recorded epoch, also on another number of processes; there it
            may be given as either world counts. None: the recorded number; the whole next epoch if the
            checkpoint was saved after the loop over an epoch.

    Returns:
        A twin that shares its progress with the loader: when it comes to its end, the loader's next epoch
        follows. The loader itself, if there is nothing to leave out.
    """
    if not isinstance(dataloader, DataLoaderShard):
        return _skipping(dataloader, num_batches or 0)
    step = dataloader.total_batch_size
    skip = dataloader.position.skip(num_batches, step, _length(dataloader))
    if not skip:
        return dataloader
    twin = copy.copy(dataloader)
    twin._skip = Skip(dataloader._skip.batches + skip.batches, skip.samples)
    if dataloader._skip:
        twin._skip = dataloader._skip.plus(skip.batches, step)
    if by_index(dataloader._whole) and dataloader._whole.batch_sampler is not None:
        twin._unskipped = whole = dataloader._whole
        gone = SkipBatchSampler(whole.batch_sampler, _gone(whole.batch_sampler, twin._skip))  # type: ignore[arg-type]
        twin._wrap(with_parts(whole, batch_sampler=gone))
    return twin


def _gone(sampler: Any, skip: Skip) -> int:
    """By how many batches a loader gets shorter."""
    cut = cut_of(sampler)
    if cut is None or skip.samples is None:
        return skip.batches
    return len(sampler) - cut.count(len(inner_sampler(sampler)) - skip.samples)


def _length(loader: DataLoader[Any]) -> int | None:
    try:
        return len(loader)
    except TypeError:  # a stream without a length
        return None


def _skipping(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    """For loaders that are not prepared."""
    if count == 0:
        return loader
    if by_index(loader) and loader.batch_sampler is not None:
        return with_parts(loader, batch_sampler=SkipBatchSampler(loader.batch_sampler, count))  # type: ignore[arg-type]
    twin = DataLoaderShard.around(loader, device=None)
    twin._skip = Skip(count)
    return twin
