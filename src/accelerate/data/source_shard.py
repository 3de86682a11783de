"""Streams of ``datasets`` with several files: each rank reads its own files, and no rank reads all rows.

Which rows a rank gets is ``split_dataset_by_node``'s. The ranks' parts may differ in length: they tell each
other with every step whether they have a batch of it, so all of them end with the same step.

The order of all ranks together is the one in which a step takes a batch of each rank's part in turn. A run
that is continued by another number of ranks reads the rest of the epoch in that order, by ``SplitOrder``.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from accelerate.data.batch_sampler_shard import copy_loader
from accelerate.data.batches import FetchedBatch
from accelerate.data.iterable_dataset import IterableDatasetShard
from accelerate.data.position import Epoch, StreamSplit
from accelerate.world import collective

_logger = logging.getLogger(__name__)


def can_split(stream: Any, count: int) -> bool:
    """Return True if a stream of ``datasets`` can be split by files, as many for each of ``count`` ranks."""
    datasets = sys.modules.get("datasets")
    if datasets is None or not isinstance(stream, datasets.IterableDataset):
        return False
    return stream.num_shards >= count and stream.num_shards % count == 0


class SourceShard(IterableDatasetShard):
    """One rank's files of a stream; the arguments are those of ``IterableDatasetShard``."""

    _own = (*IterableDatasetShard._own, "part")

    def __init__(self, dataset: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(dataset, *args, **kwargs)
        self.part = _split(dataset, self.process_index, self.num_processes)

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
        first = None if upcoming is None else copy.deepcopy(upcoming.batch)
        counts = self._exchange(upcoming)
        if any(counts) and not all(counts) and not self.drop_last:
            # A rank may have no file with a row, or have come to its end before the checkpoint.
            owners = collective.all_gather_object(first if counts[self.process_index] else None, "prepare")
            first = next(batch for batch in owners if batch is not None) if first is None else first
        while all(counts) if self.drop_last else any(counts):
            fetched, real, state = upcoming, counts[self.process_index], epoch.loader_state
            upcoming = None if upcoming is None else next(batches, None)
            following = self._exchange(upcoming)
            last = not (all(following) if self.drop_last else any(following))
            total = sum(counts)
            batch = copy.deepcopy(first) if fetched is None else fetched.batch
            filled, epoch.loader_state, ahead = total < self.step_size, state, epoch.loader_state
            yield FetchedBatch(batch, last, total, total if filled else 0, real, self._group_size)
            counts, epoch.loader_state = following, ahead
        if any(counts) and self.process_index == 0:
            _logger.warning(
                "drop_last=True ends this epoch where a process has no full batch; others still have some. "
                "Files of equal length, or drop_last=False, use all rows."
            )

    def _exchange(self, fetched: FetchedBatch | None) -> list[int]:
        """Return how many samples of its batch each rank has, 0 after its end."""
        own = 0 if fetched is None else self._group_size if fetched.real is None else fetched.real
        return collective.all_gather_object(own, label="the next step of a stream")


class SplitOrder(IterableDataset[Any]):
    """All rows of a stream, in the order in which the ranks of an earlier run shared them.

    Args:
        stream: the whole stream; its attributes are visible here.
        split: how those ranks shared it.
    """

    def __init__(self, stream: Any, split: StreamSplit) -> None:
        self.stream, self.samples = stream, split.samples
        self.parts = [_split(stream, rank, split.ranks) for rank in range(split.ranks)]

    def __getattr__(self, name: str) -> Any:
        if name in ("stream", "samples", "parts", "state_dict", "load_state_dict") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.stream, name)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of all parts."""
        for part in (self.stream, *self.parts):
            part.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        parts = [iter(part) for part in self.parts]
        while parts:
            for part in list(parts):
                batch = list(islice(part, self.samples))
                yield from batch
                if len(batch) < self.samples:
                    parts.remove(part)


def with_saved_split(base: DataLoader[Any], epoch: Epoch) -> DataLoader[Any]:
    """Return the loader of a stream in the order that the epoch had when it was saved.

    Args:
        base: the sharded loader.
        epoch: the epoch that begins.
    """
    stream: Any = base.dataset
    saved = None if epoch.fetches is None else epoch.fetches.split
    now = stream.split if isinstance(stream, SourceShard) else None
    if epoch.fetches is None or saved == now:
        return base
    whole = stream.dataset if isinstance(stream, IterableDatasetShard) else stream
    ordered = whole if saved is None else SplitOrder(whole, saved)
    if isinstance(ordered, SplitOrder):
        ordered.set_epoch(epoch.number)
    parts: dict[str, Any] = {"dataset": ordered}
    if isinstance(stream, IterableDatasetShard):
        options = (stream.batch_size, stream.drop_last, stream.num_processes, stream.process_index)
        shard = IterableDatasetShard(ordered, *options, stream.split_batches)
        shard.even_batches, shard.marks = stream.even_batches, stream.marks
        parts["dataset"] = shard
    if base.batch_sampler is not None:
        parts["batch_sampler"] = copy.copy(base.batch_sampler)  # another loader, by its sampler
    return copy_loader(base, **parts)


def _split(stream: Any, rank: int, count: int) -> Any:
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(stream, rank=rank, world_size=count)
