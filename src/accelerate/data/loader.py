"""Prepared loaders: a view of the user's loader that shards, moves batches and knows its last batch.

The user's loader is wrapped, never rebuilt: its class, attributes, workers and collate function stay. To
shard it, a shallow copy gets another batch sampler; nothing is iterated or drawn before the first batch.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from accelerate.core.errors import NotBuiltError
from accelerate.data.active import UNOWNED, ActiveLoaders
from accelerate.data.order import inner_sampler
from accelerate.data.position import Given, Skip
from accelerate.data.shard import (
    IterableDatasetShard,
    SkipBatchSampler,
)
from accelerate.world.rng import synchronize_rng_states
from accelerate.world.tensors import ignorant_find_batch_size, send_to_device


class DataLoaderStateMixin:
    """What a loop can ask its loader.

    Attributes:
        end_of_dataloader: the batch in hand is the last one.
        remainder: how many samples of the last step are real when it was filled, all ranks together;
            -1 when unknown or when nothing is filled.
        real: how many rows of the batch in hand, on this process, are no fillers; None when unknown.
        micro_steps: accumulation steps since the batch in hand was given.
        micro_steps_before: the same of the batch before, 0 before there was one.
    """

    end_of_dataloader: bool = False
    remainder: int = -1
    real: int | None = None
    micro_steps: int = 0
    micro_steps_before: int = 0
    active: ActiveLoaders = UNOWNED

    def reset(self) -> None:
        """Before an epoch."""
        self.end_of_dataloader = False
        self.remainder = -1
        self.real = None

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
        if use_stateful_dataloader:
            raise NotBuiltError(
                "use_stateful_dataloader=True is not built yet",
                why="saving the position inside an epoch will come with exact resume, for every loader",
            )
        self._wrap(DataLoader(dataset, batch_sampler=batch_sampler, **kwargs))

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
        self.rng_types, self.synchronized_generator = rng_types, synchronized_generator

    def _set_up(
        self,
        device: torch.device | None,
        drop_last: bool,
        non_blocking: bool,
        iteration: int = 0,
        skip: int = 0,
    ) -> None:
        self.device, self.iteration, self.skip_batches = device, iteration, skip
        self._drop_last, self._non_blocking = drop_last, non_blocking
        self.rng_types = self.synchronized_generator = None
        self._num_processes = 1
        self._is_accelerate_prepared = True
        self.use_stateful_dataloader = False

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

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is that of ``epoch``: told to every sampler and dataset that wants to know."""
        self.iteration = epoch
        batch_sampler = getattr(self.base_dataloader, "batch_sampler", None)
        told: list[Any] = []
        for item in (batch_sampler, inner_sampler(batch_sampler), self.base_dataloader.sampler, self.dataset):
            tell: Any = getattr(item, "set_epoch", None)
            if tell is not None and not any(item is other for other in told):
                told.append(item)
                tell(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.begin()
        if self.rng_types is not None:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        try:
            yield from self._batches()
        finally:
            self.end()
        self.iteration += 1
        self.skip_batches = 0

    def begin(self) -> None:
        """An epoch begins: how many samples of its last step will be real."""
        super().begin()
        if not self._drop_last:
            try:
                self.remainder = self.total_dataset_length % self.total_batch_size
            except TypeError:  # a stream without a length
                self.remainder = -1

    def _batches(self) -> Iterator[Any]:
        """Each batch on the device."""
        device, non_blocking = self.device, self._non_blocking
        empty = True
        for given in self._source(Skip(self.skip_batches)):
            empty = False
            batch = given.batch if device is None else send_to_device(given.batch, device, non_blocking)
            self.real = given.real
            if given.last:
                self.end_of_dataloader, self.remainder = True, given.remainder
            self.micro_steps_before, self.micro_steps = self.micro_steps or self.micro_steps_before, 0
            yield batch
        if empty:
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
        iterator = iter(self.base_dataloader)
        for _ in range(skip.batches):
            if next(iterator, _END) is _END:
                return
        upcoming = next(iterator, _END)
        while upcoming is not _END:
            batch = upcoming
            upcoming = next(iterator, _END)
            if upcoming is _END:
                yield Given(batch, last=True, remainder=self._filled(batch))
            else:
                yield Given(batch)

    def _filled(self, batch: Any) -> int:
        if self._num_processes == 1 and self.remainder < 0:
            # A lone process fills nothing, but a loss repeated to the full batch size counts like its batch.
            rows, full = ignorant_find_batch_size(batch) or 0, self.batch_size or 0
            return rows if rows < full else 0
        # What was sharded knows how its last step was filled; a stream that workers read has ended in them.
        stream = self.dataset
        if not isinstance(stream, IterableDatasetShard):
            base = self.base_dataloader
            sampler: Any = base.sampler if base.batch_sampler is None else base.batch_sampler
            return getattr(sampler, "remainder", self.remainder)
        if self.num_workers == 0 and not self._drop_last:
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
        """Where the loader is, as plain values that are equal on all processes."""
        return {"epoch": self.iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there: the next iteration is that epoch's."""
        self.set_epoch(state_dict["epoch"])

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


_END = object()


def get_sampler(dataloader: Any) -> Any:
    """The sampler of single indices at the bottom of a loader, or None."""
    sampler = getattr(dataloader, "batch_sampler", None)
    return inner_sampler(sampler) if sampler is not None else getattr(dataloader, "sampler", None)


def with_parts(loader: DataLoader[Any], **parts: Any) -> DataLoader[Any]:
    """A shallow copy of a loader with other parts: its class and every attribute stay."""
    twin = copy.copy(loader)
    # Torch forbids assigning these after construction; the copy has not been iterated yet.
    twin.__dict__.update(parts)
    twin.__dict__["_iterator"] = None
    return twin


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


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """A loader without its first ``num_batches`` batches; of map-style data none of them is read."""
    if num_batches == 0:
        return dataloader
    base = dataloader.base_dataloader if isinstance(dataloader, DataLoaderShard) else dataloader
    if base.batch_sampler is None or isinstance(base.dataset, IterableDataset):
        skipped, rest = base, num_batches
    else:
        skipped, rest = with_parts(base, batch_sampler=SkipBatchSampler(base.batch_sampler, num_batches)), 0  # type: ignore[arg-type]
    if isinstance(dataloader, DataLoaderShard):
        twin = copy.copy(dataloader)
        twin._wrap(skipped)
        twin.skip_batches = rest
        return twin
    if rest == 0:
        return skipped
    return DataLoaderShard.around(skipped, device=None, skip_batches=rest)
