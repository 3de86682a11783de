"""Prepared loaders: views of the user's loader that shard the data, move batches and know the last batch.

The user's loader is wrapped, never rebuilt: its class, attributes, workers and collate function stay. To
shard it, a shallow copy gets another batch sampler; nothing is iterated or drawn before the first batch.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from accelerate.core.errors import CheckpointError
from accelerate.data.active_loaders import DataLoaderStateMixin
from accelerate.data.batch_sampler_shard import copy_loader
from accelerate.data.batch_source import (
    PresetIndexSampler,
    copy_in_order,
    describe_batch,
    fetch_batches,
    find_shard,
    single_item,
    with_index_sampler,
)
from accelerate.data.batches import BatchCopier, FetchedBatch
from accelerate.data.epoch_order import (
    DataShard,
    fetches_by_index,
    get_sampler,
    loader_generators,
    outer_sampler,
    sampler_chain,
)
from accelerate.data.iterable_dataset import (
    IterableDatasetShard,
    PartialGlobalBatch,
    SourceShard,
    get_collate_fn,
    set_collate_fn,
)
from accelerate.data.position import (
    Epoch,
    EpochSkip,
    FetchLayout,
    LoaderPosition,
    find_new_epoch,
    set_epochs,
)
from accelerate.data.sample_order import find_batch_sampler, is_torch_batch_sampler
from accelerate.data.sharding_detection import shuffle_facts
from accelerate.data.stream_source import stream_batches, with_saved_split
from accelerate.world import collective
from accelerate.world.local_tensor_trees import ignorant_find_batch_size
from accelerate.world.rng import synchronize_rng_states

_logger = logging.getLogger(__name__)


class DataLoaderAdapter(DataLoader[Any]):
    """A loader that wraps another one and delegates unknown attributes to it."""

    base_dataloader: Any
    use_stateful_dataloader: bool = False

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        self.base_dataloader = DataLoader(dataset, batch_sampler=batch_sampler, **kwargs)
        self.use_stateful_dataloader = use_stateful_dataloader
        if use_stateful_dataloader:
            make_stateful(self)

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader" or name.startswith("_DataLoader__"):
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    # Torch's own guards attributes that live in the base, and costs as much as moving a batch.
    __setattr__: Callable[[str, Any], None] = object.__setattr__  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self.base_dataloader)

    @property
    def collate_fn(self) -> Any:  # type: ignore[override]
        """The user's collate function."""
        return get_collate_fn(self.base_dataloader)

    @collate_fn.setter
    def collate_fn(self, collate_fn: Any) -> None:
        copies = [vars(self).get("_unskipped"), *(each[1] for each in vars(self).get("_indexed", ()))]
        for loader in (self.base_dataloader, *filter(None, copies)):
            set_collate_fn(loader, collate_fn)

    @property
    def multiprocessing_context(self) -> Any:  # type: ignore[override]
        """The context of the base loader."""
        return self.base_dataloader.multiprocessing_context

    @property
    def _iterator(self) -> Any:  # type: ignore[override]
        return self.base_dataloader._iterator


def make_stateful(loader: DataLoaderAdapter) -> None:
    """Make a loader, and its base, instances of torchdata's ``StatefulDataLoader``, if that is installed."""
    try:
        from accelerate.data import stateful_loader
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torchdata":
            raise
        _logger.warning(
            "torchdata is not installed: loaders go on where they were saved all the same, but are no "
            "StatefulDataLoader of torchdata and have no state_dict in its form (pip install torchdata)"
        )
        return
    stateful_loader.convert(loader)


class DataLoaderShard(DataLoaderAdapter, DataLoaderStateMixin):
    """A prepared loader: one process's part of the data, on its device.

    Args:
        dataset, kwargs: those of ``torch.utils.data.DataLoader``.
        device: the device to move batches to; None leaves them.
        rng_types, synchronized_generator: random generators whose states are broadcast from rank 0 at the
            start of every epoch; the order of the samples does not need them.
        skip_batches: number of batches to skip in every epoch.
        iteration: number of the next epoch.
    """

    # Fetches of the process that reads in which a step is read.
    _fetches_per_step: int = 1

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
        self._initialize(device, _drop_last, _non_blocking, iteration, skip_batches)
        self.rng_types, self.synchronized_generator = rng_types, synchronized_generator

    def _initialize(
        self,
        device: torch.device | None,
        drop_last: bool,
        non_blocking: bool,
        iteration: int = 0,
        skip: int = 0,
    ) -> None:
        base, self.device, self.skip_batches = self.base_dataloader, device, skip
        if base.num_workers and not getattr(base, "in_order", True):
            self.base_dataloader = copy_in_order(base)
        data = base.dataset
        while isinstance(data, IterableDatasetShard):
            data = data.dataset
        kind = "a stream" if isinstance(data, IterableDataset) else "data by index"
        self.position: LoaderPosition = LoaderPosition(iteration, data=f"{kind} ({type(data).__qualname__})")
        # For a twin of ``skip_first_batches``: what every epoch skips, and the loader without the skip.
        self._skip: EpochSkip = EpochSkip()
        self._unskipped: DataLoader[Any] | None = None
        # For such a twin: the loader that it was made of, which shows the same batch.
        self._original: DataLoaderShard | None = None
        # A list, so that twins share its one item, and with it persistent workers.
        self._indexed: list[tuple[Any, DataLoader[Any], PresetIndexSampler]] = []
        self._drop_last, self._non_blocking = drop_last, non_blocking
        self.rng_types = self._synchronized_generator = None
        self._prefetch_state: dict[str, Any] | None = None
        # What this process computes of a batch, where processes share sequences.
        self.slice_batch: Callable[[Any], Any] | None = None
        # How the data are sharded, if the strategy has set it.
        self.data_shard: Any = None
        # A check, once, when the first batch of all is requested.
        self.before_first_use: Callable[[], None] | None = None
        self.comparison: Callable[[], None] | None = None
        self._num_processes = 1
        self._is_accelerate_prepared = False

    @property
    def synchronized_generator(self) -> Any:
        """The generator whose state ``rng_types`` may broadcast: the given one, or that of the sampler."""
        given = self._synchronized_generator
        return getattr(get_sampler(self.base_dataloader), "generator", None) if given is None else given

    @synchronized_generator.setter
    def synchronized_generator(self, generator: Any) -> None:
        self._synchronized_generator = generator

    @property
    def _full_base(self) -> DataLoader[Any]:
        return self.base_dataloader if self._unskipped is None else self._unskipped

    @property
    def iteration(self) -> int:
        """The number of the next epoch, or of the one in progress."""
        return self.position.iteration

    @iteration.setter
    def iteration(self, iteration: int) -> None:
        self.position.iteration = iteration

    @classmethod
    def wrap(
        cls,
        base: DataLoader[Any],
        *,
        device: torch.device | None,
        non_blocking: bool = False,
        num_processes: int = 1,
    ) -> DataLoaderShard:
        """Wrap ``base``, which yields this process's part already."""
        shard = cls.__new__(cls)
        shard.base_dataloader = base
        shard._initialize(device, bool(getattr(base, "drop_last", False)), non_blocking)
        shard._num_processes, shard._is_accelerate_prepared = num_processes, True
        return shard

    def bind(self, gradient_state: Any, device: torch.device | None) -> bool:
        """Count for an ``Accelerator`` that gets a loader which is prepared; return whether this one is.

        Args:
            gradient_state: that of the ``Accelerator``.
            device: where it moves batches to, None: where they go already.
        """
        if self._is_accelerate_prepared and self.gradient_state is not gradient_state:
            self.active, self.gradient_state = gradient_state.loaders, gradient_state
            self.device = self.device if device is None else device
        return self._is_accelerate_prepared

    def set_data_shard(self, num_shards: int, index: int) -> None:
        """Set the data shard of this process: all processes of a shard get the same batches in order.

        Random numbers drawn while reading are then a function of the shard, with and without workers; the
        global generators stay as they are.

        Args:
            num_shards: number of data shards.
            index: the shard that this process reads.
        """
        self.position.data_shard = DataShard(
            num_shards, index, has_own_order=num_shards > 1 and self._num_processes == 1
        )
        self.before_first_use = self.comparison

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, on every sampler and dataset with ``set_epoch`` too."""
        self.iteration = epoch
        set_epochs(self.base_dataloader, self.dataset, epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.active.on_request is not None:
            self.active.on_request(self)
        # A script may set the epoch of its sampler itself: for the rest of an epoch, for example.
        new_epoch = find_new_epoch(self.base_dataloader, self.dataset)
        if new_epoch is not None:
            self.iteration = new_epoch
        skip, inside = self._skip.add(self.skip_batches), bool(self._skip)
        current = self.position.current
        record = None if current is not None and current.active else self.position.record
        if record is not None and record.complete and skip.samples is not None:
            self.position.finish_record()
            return
        if record is not None and self.use_stateful_dataloader and not (inside or record.complete):
            skip, inside = EpochSkip(record.batches, record.samples), True
        skip = skip or EpochSkip(self.position.counted_batches)
        epoch = self.position.begin(skip, isolated=inside)
        set_epochs(self.base_dataloader, self.dataset, epoch.number)
        self.begin()
        if self.rng_types is not None and not (inside and epoch.is_resumed):
            generator = self.synchronized_generator
            kinds = (kind for kind in self.rng_types if generator is not None or kind != "generator")
            synchronize_rng_states(kinds, generator)
        try:
            yield from self._batches(epoch)
            epoch.complete = True
        finally:
            self.position.end(epoch)
            self.end_epoch(epoch)

    def begin(self) -> None:
        """Begin an epoch, after the check of the first one."""
        # Once for a loader and its twins: what rank 0 reads for all may change the data there.
        owner = self if self._original is None else self._original
        if owner.before_first_use is not None:
            check, owner.before_first_use = owner.before_first_use, None
            check()
        super().begin()
        if self._original is not None:
            self._original.reset()

    def _batches(self, epoch: Epoch) -> Iterator[Any]:
        """Yield each batch on the device."""
        step, pins = self.total_batch_size, bool(self.base_dataloader.pin_memory)
        epoch.copy_to_device = BatchCopier(self.device, self._non_blocking, pins).copy
        epoch.samples = epoch.skip.count_samples(step)
        empty, source = True, self
        if epoch.outer is not None and self._full_base.persistent_workers:  # in use: torch has one iterator
            source = copy.copy(self)
            source._unskipped, source._indexed = copy_loader(self._full_base, persistent_workers=False), []
        for fetched in self.time_fetches(source._fetch(epoch.skip), step):
            empty = False
            self.active.touch(self)
            batch = epoch.copy_to_device(fetched.batch)
            if self.slice_batch is not None:
                batch = self.slice_batch(batch)
            epoch.batches += 1
            epoch.samples += step if fetched.samples is None else fetched.samples
            epoch.complete = fetched.last
            self.show_batch(fetched)
            if self._original is not None:
                self._original.show_batch(fetched)
            yield batch
            if self.position.current is not epoch:
                self.resume(epoch)
            if self.active.on_request is not None:
                self.active.on_request(self)
        if empty and not epoch.skip and self._drop_last and self._num_processes > 1:
            warnings.warn(
                f"this epoch has 0 batches: drop_last=True leaves out the last incomplete step, and "
                f"{self._count_text} samples do not fill one of {self._num_processes} "
                f"processes x {step // self._num_processes} samples",
                stacklevel=3,
            )

    def _fetch(self, skip: EpochSkip) -> Iterator[FetchedBatch]:
        """Yield this process's batches of one epoch, on the host.

        A loader with another source of batches (another process for example) overrides this method alone. It
        is called when the first batch of an epoch is requested, on every process. The device transfer, the
        attributes of the last batch (``end_of_dataloader``, ``remainder``, ``real``) and the position are
        derived from what it yields; the last batch must have ``last`` set.

        Args:
            skip: the batches or samples to skip at the beginning of the epoch.
        """
        base, epoch = self._full_base, self.position.current
        assert epoch is not None
        if fetches_by_index(base):
            return fetch_batches(base, *self._indexed_loader(base), epoch)
        base = with_saved_split(base, epoch)
        batches = self._stream_batches(base, epoch)
        return base.dataset.align(batches, epoch) if isinstance(base.dataset, SourceShard) else batches

    def _indexed_loader(self, base: DataLoader[Any]) -> tuple[DataLoader[Any], PresetIndexSampler]:
        """Return the loader with an index sampler, the same for all epochs, as workers may persist."""
        sampler = outer_sampler(base)
        if not self._indexed or self._indexed[0][0] is not sampler:
            self._indexed[:] = [(sampler, *with_index_sampler(base))]
        return self._indexed[0][1:]

    def _stream_batches(self, base: DataLoader[Any], epoch: Epoch) -> Iterator[FetchedBatch]:
        sampler = find_batch_sampler(base)
        single = base.batch_size is None and sampler is None
        whole, known = self.total_batch_size, getattr(sampler, "batch_size", None) is not None
        share = whole // self._num_processes if known else None
        for batch, last, step in stream_batches(base, epoch, whole, self._indexed_loader(base)):
            if type(batch) is PartialGlobalBatch:
                item, real, total, size = batch
                fetched = FetchedBatch(item, last, total, total, real, size)
            elif step is not None:
                fetched = describe_batch(batch, last, step)
            elif last:
                fetched = self._describe_last(batch, share)
            else:
                fetched = FetchedBatch(batch, size=share)
            yield single_item(fetched) if single else fetched

    def _describe_last(self, batch: Any, share: int | None) -> FetchedBatch:
        """Describe the last batch of a stream without marks."""
        stream: Any = self.dataset
        if self._num_processes == 1 and self.remainder < 0:
            # A single process fills nothing, but a loss repeated to the full batch size counts as its batch.
            rows, full = ignorant_find_batch_size(batch) or 0, self.batch_size or 0
            return FetchedBatch(batch, True, remainder=rows if rows < full else 0, size=rows or None)
        if isinstance(stream, IterableDatasetShard) and self.num_workers == 0 and not self._drop_last:
            return FetchedBatch(batch, True, None, stream.remainder, stream.last_real, share)
        return FetchedBatch(batch, True, remainder=self.remainder, size=share)  # it has ended in a worker

    @property
    def _has_equal_batches(self) -> bool:
        base, shard = self._full_base, find_shard(self._full_base)
        if shard is None or self._num_processes == 1 or not shard.even_batches:
            return self._num_processes == 1
        is_batched = find_batch_sampler(base) is not None  # else an item may be any number of rows
        return is_batched and (shard.split_batches or is_torch_batch_sampler(shard.batch_sampler))

    @property
    def reads_ahead(self) -> bool:
        """True if the data is read ahead of the batch in hand by this object, beside its workers."""
        return False

    @property
    def _count_text(self) -> str:
        try:
            return str(self.total_dataset_length)
        except (TypeError, NotImplementedError):  # a stream without a length
            return "the"

    @property
    def total_batch_size(self) -> int:
        """The samples of one step, of all processes."""
        dataset = self.base_dataloader.dataset
        if isinstance(dataset, IterableDatasetShard):
            return dataset.step_size
        sampler: Any = self.base_dataloader.batch_sampler
        if sampler is None and isinstance(self.base_dataloader.sampler, BatchSampler):
            sampler = self.base_dataloader.sampler
        size = getattr(sampler, "batch_size", None) or self.base_dataloader.batch_size or 1
        if getattr(sampler, "split_batches", False):
            return size
        return size * self._num_processes

    @property
    def total_dataset_length(self) -> int:
        """The samples of one epoch, of all processes."""
        data: Any = self.dataset
        if hasattr(data, "total_length"):
            return data.total_length
        sampler = find_batch_sampler(self.base_dataloader)
        chain = [] if sampler is None or isinstance(data, IterableDataset) else sampler_chain(sampler)
        # At the bottom may be a batch sampler of the user's, which counts batches.
        is_of_samples = len(chain) > 1 and getattr(chain[-2], "batch_sampler", None) is not chain[-1]
        inner: Any = chain[-1] if is_of_samples else None
        return len(inner if isinstance(inner, Sampler) else data)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader as JSON types; that of rank 0 holds for all processes.

        The position counts samples of all processes up to the current batch; what workers have prefetched
        does not count.
        """
        base, step = self._full_base, self.total_batch_size
        split = base.dataset.split if isinstance(base.dataset, SourceShard) else None
        fetches = FetchLayout(
            base.num_workers, base.persistent_workers, step // self._fetches_per_step, [], 0, split
        )
        state = self.position.state_dict(loader_generators(base), sampler_chain(base)[-1], step, fetches)
        if isinstance(base.dataset, IterableDataset):
            state["shuffles"] = shuffle_facts(base.dataset)
        return state

    @property
    def dl_state_dict(self) -> dict[str, Any]:
        """The position recorded by ``adjust_state_dict_for_prefetch``, else the current one."""
        return self.state_dict() if self._prefetch_state is None else self._prefetch_state

    def adjust_state_dict_for_prefetch(self) -> None:
        """Record the position of the current batch in ``dl_state_dict``; prefetched batches do not count."""
        self._prefetch_state = self.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> bool:
        """Restore the position of a ``state_dict``; warn and return False if it is of another kind of loader.

        The next iteration then yields the epoch that was in progress from its beginning, in the same order,
        or the next epoch if that one was complete. ``skip_first_batches`` continues inside of it, and so does
        an iteration with ``use_stateful_dataloader=True``.

        Raises:
            CheckpointError: it is a state of torchdata's loader.
        """
        if "epoch" not in state_dict:
            raise CheckpointError(
                "this is no position of a prepared loader: it has no epoch",
                why=f"it has {', '.join(map(str, list(state_dict)[:4])) or 'nothing'}",
                fix="of a loader of torchdata: DataLoaderConfiguration(use_stateful_dataloader=True)",
            )
        base = self._full_base
        generators, sampler = loader_generators(base), sampler_chain(base)[-1]
        is_loaded = self.position.load_state_dict(state_dict, generators, sampler)
        set_epochs(self.base_dataloader, base.dataset, self.position.iteration)
        saved, record = state_dict.get("shuffles"), self.position.record
        is_inside = is_loaded and record is not None and not record.complete
        if saved and is_inside and collective.rank() == 0 and saved != shuffle_facts(base.dataset):
            warnings.warn(
                "a stream that shuffles itself has another seed than when it was saved: samples of the epoch "
                "are repeated, and others left out; give its shuffle() a seed",
                stacklevel=2,
            )
        return is_loaded

    # For loaders of torchdata, whose state_dict has another form.
    position_state, load_position = state_dict, load_state_dict

    def get_sampler(self) -> Any:
        """Return the sampler of single indices."""
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler of single indices."""
        holder = find_batch_sampler(self.base_dataloader)
        while hasattr(holder, "batch_sampler"):
            holder = holder.batch_sampler
        while isinstance(getattr(holder, "sampler", None), BatchSampler):
            holder = holder.sampler
        if holder is None:
            self.base_dataloader.__dict__["sampler"] = sampler
        else:
            holder.sampler = sampler
