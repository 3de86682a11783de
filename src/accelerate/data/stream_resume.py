"""Resuming a stream at a sample that is no step boundary, for checkpoints of another world size.

The samples before are read and dropped one by one, and not batch by batch, with the same random numbers as
when they were read first.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accelerate.core.errors import PrepareError
from accelerate.data.iterable_dataset import STATE_METHODS, IterableDatasetShard
from accelerate.data.position import Epoch, FetchLayout
from accelerate.data.sample_order import END


class RemainingStream(IterableDataset[Any]):
    """The rest of a stream after a number of samples.

    Args:
        stream: the whole stream; its attributes are visible here.
        skip_counts: how many samples each worker skips.
        fetch_samples: samples of one fetch, of which only the last one of a worker may have had fewer.
    """

    def __init__(self, stream: Any, skip_counts: list[int], fetch_samples: int) -> None:
        self.stream, self.skip_counts, self.fetch_samples = stream, skip_counts, fetch_samples
        # The iterator of the stream, if it has been started already.
        self.stream_iterator: Iterator[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        own = ("stream", "skip_counts", "fetch_samples", "stream_iterator", *STATE_METHODS)
        if name in own or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.stream, name)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        stream_iterator = iter(self.stream) if self.stream_iterator is None else self.stream_iterator
        count = self.skip_counts[0 if worker is None else worker.id]
        if _discard(stream_iterator, count) <= count - self.fetch_samples:
            raise PrepareError(
                f"worker {worker.id if worker else 0} has fewer samples than the checkpoint counts",
                why="the workers' parts of the stream are of different length, so what each of them has read "
                "is known only for the number of processes and the batch size that it was saved with",
                fix="resume with those, or save between two epochs",
            )
        yield from stream_iterator


def resume_stream(base: DataLoader[Any], epoch: Epoch, fetches: FetchLayout) -> Any:
    """Return an iterable over the remaining batches of a stream, for one use; its first item is a dummy.

    Args:
        base: the sharded loader of a stream, with the workers that read it when it was saved.
        epoch: with a skip that counts samples.
        fetches: how it was read.
    """
    total = epoch.skip.samples or 0
    if base.num_workers == 0:
        epoch.skipped = [total]
        return _resume_in_process(base, total, fetches.samples)
    epoch.skipped = fetches.samples_per_worker(base.num_workers)
    return _resume_in_workers(_replace_stream(base, epoch.skipped, fetches.samples)[0])


def _resume_in_workers(loader: DataLoader[Any]) -> Iterator[Any]:
    batches = iter(loader)
    first = next(batches, END)
    yield None
    if first is not END:
        yield first
        yield from batches


def _resume_in_process(base: DataLoader[Any], total: int, step: int) -> Iterator[Any]:
    """Yield a dummy after the random draws of the start and the first step, then the remaining batches."""
    loader, rest = _replace_stream(base, [0], step)
    batches = iter(loader)
    rest.stream_iterator = iter(rest.stream)
    _discard(rest.stream_iterator, min(step, total))
    yield None
    _discard(rest.stream_iterator, total - step)
    yield from batches


def _discard(samples: Iterator[Any], count: int) -> int:
    """Discard up to ``count`` samples; return how many there were."""
    return sum(1 for _ in islice(samples, max(count, 0)))


def _replace_stream(
    base: DataLoader[Any], skip_counts: list[int], fetch_samples: int
) -> tuple[DataLoader[Any], RemainingStream]:
    """Return a copy of the loader over the rest of its stream, and that rest."""
    stream: Any = base.dataset
    shared = isinstance(stream, IterableDatasetShard)
    rest = RemainingStream(stream.dataset if shared else stream, skip_counts, fetch_samples)
    loader, dataset = copy.copy(base), rest
    if shared:
        dataset = copy.copy(stream)
        dataset.dataset = rest
    loader.__dict__.update(dataset=dataset, _iterator=None)
    return loader, rest


def restore_loader_state(loader: Any, epoch: Epoch) -> bool:
    """Let torchdata restore the states of the data, if there are any; return whether there are."""
    state, epoch.restored_state = epoch.restored_state, None
    if state is not None:
        loader.load_state_dict(state)
    return state is not None


def read_loader_state(*loaders: Any) -> dict[str, Any] | None:
    """Return the state of the first loader of torchdata that is being iterated, or None."""
    for loader in loaders:
        if hasattr(loader, "next_iter_state") and loader._iterator is not None:
            return loader._iterator.state_dict()
    return None
