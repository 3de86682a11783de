"""Sharding of iterable datasets (streams), by samples or by files, and the marking of fillers.

The length of a stream is known only at its end, and with workers it ends inside them. So each sample of an
incomplete step is marked where it is read; the mark passes through collating, and the collated batch holds
the number of real samples.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterator
from itertools import chain, cycle, islice
from typing import Any, ClassVar, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accelerate.data.batch_sampler_shard import check_split
from accelerate.data.batches import FetchedBatch
from accelerate.data.position import Epoch, StreamSplit
from accelerate.world import collective
from accelerate.world.local_tensor_trees import send_to_device

_logger = logging.getLogger(__name__)

# By these torchdata knows data with a state of its own.
STATE_METHODS = ("state_dict", "load_state_dict")


class FillerMarkedSample(NamedTuple):
    """A sample of an incomplete step.

    Attributes:
        sample: the sample of the stream.
        real: False for a repeated one.
        total: real samples of the step, of all processes.
    """

    sample: Any
    real: bool
    total: int


class PartialGlobalBatch(NamedTuple):
    """A batch of an incomplete step.

    Attributes:
        batch: the result of the loader's collate function.
        real: samples that are not fillers; None for one real sample that was not collated.
        total: real samples of the step, of all processes.
        size: samples with fillers; None for one that was not collated.
    """

    batch: Any
    real: int | None
    total: int
    size: int | None = None


class CountingCollate:
    """A collate function that removes the marks of samples and counts the real ones.

    Args:
        collate: the loader's own collate function.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        """Collate the samples; return a ``PartialGlobalBatch`` if they were marked."""
        if type(samples) is FillerMarkedSample:
            return PartialGlobalBatch(
                self.collate(samples.sample), None if samples.real else 0, samples.total
            )
        if not (type(samples) is list and samples and type(samples[0]) is FillerMarkedSample):
            return self.collate(samples)
        real = sum(tail.real for tail in samples)
        batch = self.collate([tail.sample for tail in samples])
        return PartialGlobalBatch(batch, real, samples[0].total, len(samples))


class StreamView(IterableDataset[Any]):
    """A stream around another one: attributes that are none of its own are those of the other one.

    So a worker's init function works unchanged. The other one may be ahead: its state is none of this one.

    Attributes:
        dataset: the other one.
    """

    _own: ClassVar[tuple[str, ...]] = ("dataset",)
    dataset: Any

    def __getattr__(self, name: str) -> Any:
        if name in self._own or name.startswith("__") or name in STATE_METHODS:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A worker's init function may shard the stream by assigning to it.
        if name in self._own or "dataset" not in self.__dict__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.dataset, name, value)


class IterableDatasetShard(StreamView):
    """One process's samples of a stream that every process reads alike.

    Args:
        dataset: the stream.
        batch_size: samples of a batch, of one process or (``split_batches``) of all processes.
        drop_last: drop an incomplete last step instead of filling it from the first samples.
        num_processes, process_index: number of shards, and the index of this one.
        split_batches: whether ``batch_size`` is that of all processes together.

    Raises:
        PrepareError: ``split_batches`` and the batch size does not divide by the number of processes.
    """

    _own = (
        *(*StreamView._own, "batch_size", "drop_last", "num_processes", "process_index", "split_batches"),
        *("even_batches", "marks", "epoch", "remainder", "last_real"),
    )
    batch_size: int
    drop_last: bool
    num_processes: int
    process_index: int
    split_batches: bool
    even_batches: bool
    marks: bool
    epoch: int
    remainder: int

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches and batch_size > 1:
            check_split(batch_size, num_processes)
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.num_processes, self.process_index = num_processes, process_index
        self.split_batches = split_batches
        # Fill an incomplete last step, and mark its samples for `CountingCollate`.
        self.even_batches, self.marks = True, False
        self.epoch = 0
        # How many samples of the last step are real, once the stream has ended; 0 when none is a filler;
        # and how many of this process's, None when all are.
        self.remainder = -1
        self.last_real: int | None = None

    @property
    def epoch_holder(self) -> Any:
        """The stream, if it has an epoch of its own, which a script may set; else this object."""
        stream = getattr(self.dataset, "epoch_holder", self.dataset)
        tells = hasattr(stream, "epoch") or hasattr(stream, "_epoch")
        return stream if tells and hasattr(stream, "set_epoch") else self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also of a stream that shuffles by epoch."""
        self.epoch = epoch
        set_epoch: Any = getattr(self.dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)

    @property
    def total_length(self) -> int:
        """The samples of the whole stream, if it has a length."""
        return len(self.dataset)

    @property
    def step_size(self) -> int:
        """The samples that all processes take in one step."""
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    @property
    def _rank_slice(self) -> slice:
        """The slice of a step that this process takes."""
        share = self.step_size // self.num_processes
        return slice(self.process_index * share, (self.process_index + 1) * share)

    @property
    def _source(self) -> Any:
        """The stream that is read."""
        return self.dataset

    @property
    def _group_size(self) -> int:
        """The samples that are read in one step."""
        return self.step_size

    def __len__(self) -> int:
        whole, rest = divmod(self.total_length, self.step_size)
        last = 0 if self.drop_last else self.step_size if self.even_batches else rest
        part = range(self.step_size)[self._rank_slice]
        return whole * len(part) + (len(range(last)[self._rank_slice]) if rest else 0)

    def __iter__(self) -> Iterator[Any]:
        rank_slice, size = self._rank_slice, self._group_size
        first: list[Any] = []
        group: list[Any] = []
        self.remainder, self.last_real = -1, None
        for sample in self._source:
            group.append(sample)
            if len(group) == size:
                yield from group[rank_slice]
                first = first or group
                group = []
        self.remainder = 0
        if group and not self.drop_last:
            if self.even_batches:
                self.remainder = len(group)
                self.last_real = len(range(len(group))[rank_slice])
                yield from self._fill_step(group, first or group)[rank_slice]
            else:
                yield from group[rank_slice]

    def _fill_step(self, group: list[Any], first: list[Any]) -> list[Any]:
        """Fill the last step."""
        real = len(group)
        filled = islice(chain(group, cycle(first)), self._group_size)
        if not self.marks:
            return list(filled)
        return [FillerMarkedSample(sample, place < real, real) for place, sample in enumerate(filled)]


def can_split(stream: Any, count: int) -> bool:
    """Return True if a stream of ``datasets`` can be split by files, as many for each of ``count`` ranks."""
    datasets = sys.modules.get("datasets")
    if datasets is None or not isinstance(stream, datasets.IterableDataset):
        return False
    return stream.num_shards >= count and stream.num_shards % count == 0


class SourceShard(IterableDatasetShard):
    """One rank's files of a stream of ``datasets``; no rank reads all rows.

    Which rows a rank gets is ``split_dataset_by_node``'s. The ranks' parts may differ in length: they tell
    each other with every step whether they have a batch of it, so all of them end with the same step. The
    arguments are those of ``IterableDatasetShard``.
    """

    _own = (*IterableDatasetShard._own, "part")

    def __init__(self, dataset: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(dataset, *args, **kwargs)
        self.part = split_stream(dataset, self.process_index, self.num_processes)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also of this rank's part."""
        super().set_epoch(epoch)
        self.part.set_epoch(epoch)

    # The state of the part is that of this object: it is read for this rank alone.
    def state_dict(self) -> dict[str, Any]:
        """Return where this rank's part is."""
        return self.part.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore where this rank's part was."""
        self.part.load_state_dict(state_dict)

    @property
    def split(self) -> StreamSplit:
        """How the ranks share the stream."""
        return StreamSplit(self.num_processes, self._group_size)

    @property
    def _source(self) -> Any:
        return self.part

    @property
    def _group_size(self) -> int:
        return self.step_size // self.num_processes

    @property
    def _rank_slice(self) -> slice:
        return slice(0, self._group_size)

    def align(self, batches: Iterator[FetchedBatch], epoch: Epoch) -> Iterator[FetchedBatch]:
        """Yield this rank's batches, with fillers while other ranks have more; collective in every step.

        With ``drop_last``, the epoch ends before the first step in which a rank has no batch.

        Args:
            batches: of this rank; one is fetched ahead.
            epoch: the epoch, which has the state of torchdata's loader for the batch in hand.
        """
        if not (self.even_batches or self.drop_last):
            yield from batches
            return
        upcoming = next(batches, None)
        # Of the host: a rank may have none, and get it in a message.
        first = None if upcoming is None else send_to_device(copy.deepcopy(upcoming.batch), "cpu")
        step = self._exchange(upcoming)
        enough = self.num_processes if self.drop_last else 1
        if enough <= step.ranks < self.num_processes:
            # A rank may have no file with a row, or have come to its end before the checkpoint.
            sent = collective.broadcast_object(first, step.first_rank, "prepare")
            first = sent if first is None else first
        while step.ranks >= enough:
            fetched, state = upcoming, epoch.loader_state
            upcoming = None if upcoming is None else next(batches, None)
            following = self._exchange(upcoming)
            batch = copy.deepcopy(first) if fetched is None else fetched.batch
            remainder = step.samples if step.samples < self.step_size else 0
            last, real = following.ranks < enough, self._count_real(fetched)
            epoch.loader_state, ahead = state, epoch.loader_state
            yield FetchedBatch(batch, last, step.samples, remainder, real, self._group_size)
            step, epoch.loader_state = following, ahead
        if step.ranks and self.process_index == 0:
            _logger.warning(
                "drop_last=True ends this epoch where a process has no full batch; others still have some. "
                "Files of equal length, or drop_last=False, use all rows."
            )

    def _exchange(self, fetched: FetchedBatch | None) -> StepContributions:
        """Return what all ranks have for the next step. Collective."""
        real, label = self._count_real(fetched), "the next step of a stream"
        return collective.combine_objects(real, StepContributions.of, "all_gather_object", label)

    def _count_real(self, fetched: FetchedBatch | None) -> int:
        return 0 if fetched is None else self._group_size if fetched.real is None else fetched.real


class StepContributions(NamedTuple):
    """The samples that all ranks have for a step.

    Attributes:
        samples: how many they are.
        ranks: how many ranks have some.
        first_rank: the first of these ranks; 0 without one.
    """

    samples: int
    ranks: int
    first_rank: int

    @classmethod
    def of(cls, counts: list[int]) -> StepContributions:
        """Sum up the samples of each rank."""
        owners = [rank for rank, count in enumerate(counts) if count]
        return cls(sum(counts), len(owners), owners[0] if owners else 0)


def split_stream(stream: Any, rank: int, count: int) -> Any:
    """Return the files of a stream of ``datasets`` that one of ``count`` ranks reads."""
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(stream, rank=rank, world_size=count)


class DataPipeStream(IterableDatasetShard):
    """A data pipe that one rank reads for all, as a plain stream.

    Where torch's loader sees a data pipe, it broadcasts a seed, and shards the pipe over all ranks.
    """

    def __iter__(self) -> Iterator[Any]:
        from torch.utils.data import graph_settings

        worker, pipe = get_worker_info(), self.dataset
        if worker is None:
            seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        else:  # the same in all workers, another one in the next epoch of persistent workers
            seed, self.epoch = worker.seed - worker.id + self.epoch, self.epoch + 1
            graph_settings.apply_sharding(pipe, worker.num_workers, worker.id)  # type: ignore[arg-type]
        graph_settings.apply_random_seed(pipe, torch.Generator().manual_seed(seed))  # type: ignore[arg-type]
        return super().__iter__()


class SkippedStream(IterableDatasetShard):
    """A stream without the samples of its first batches, as its workers give these in turn.

    Attributes:
        skip_batches: number of these batches, each of ``batch_size`` samples.
    """

    _own = (*IterableDatasetShard._own, "skip_batches")
    skip_batches: int

    def __len__(self) -> int:
        return max(0, self.total_length - self.skip_batches * self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        count = len(range(first, self.skip_batches, step)) * self.batch_size
        return islice(self.dataset, count, None)


class GlobalBatchCollate:
    """A collate function for a whole step of a stream: it makes the batches of all ranks.

    An incomplete step is divided equally and filled with the first samples again.

    Args:
        collate: the loader's own collate function.
        count: number of ranks.
        share: samples of one rank in a complete step.
        even_batches: fill an incomplete step; otherwise the last ranks get less, or nothing.
    """

    def __init__(self, collate: Callable[[Any], Any], count: int, share: int, even_batches: bool) -> None:
        self.collate, self.count, self.share = collate, count, share
        self.even_batches = even_batches
        self.first: list[Any] = []

    def __call__(self, samples: list[Any]) -> list[PartialGlobalBatch | None]:
        """Collate the batches of all ranks; None for a rank that gets nothing."""
        real, share = len(samples), self.share
        # Fewer fillers than ranks are ever needed.
        self.first = self.first or samples[: self.count - 1]
        if real < share * self.count:
            if self.even_batches:
                share = -(-real // self.count)
                samples = list(islice(chain(samples, cycle(self.first)), share * self.count))
            self.first = []  # an incomplete step is the last of a stream; the next one begins anew
        return [
            self._collate_part(samples, start, share, real) for start in range(0, share * self.count, share)
        ]

    def _collate_part(
        self, samples: list[Any], start: int, share: int, real: int
    ) -> PartialGlobalBatch | None:
        part = samples[start : start + share]
        part_real = min(len(part), max(0, real - start))
        return PartialGlobalBatch(self.collate(part), part_real, real, len(part)) if part else None


def supports_marks(loader: DataLoader[Any]) -> bool:
    """Return True if marks pass through the loader: it collates as torch's own does."""
    kind = type(loader)
    return kind.__iter__ is DataLoader.__iter__ or kind.__module__.startswith("torchdata.")


def get_collate_fn(loader: DataLoader[Any]) -> Any:
    """Return the user's collate function of a loader, without the wrapper for fillers."""
    collate = loader.collate_fn
    return collate.collate if isinstance(collate, CountingCollate | GlobalBatchCollate) else collate


def set_collate_fn(loader: DataLoader[Any], collate_fn: Any) -> None:
    """Set the user's collate function of a loader, inside the wrapper for fillers."""
    if isinstance(loader.collate_fn, CountingCollate | GlobalBatchCollate):
        loader.collate_fn.collate = collate_fn
    else:
        loader.collate_fn = collate_fn
