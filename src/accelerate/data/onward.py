"""A loader that tells nothing of its order, begun at a sample where none of its steps begins.

That happens when a checkpoint was saved by another number of processes. What was given is read and dropped,
sample by sample and not batch by batch, under the random numbers under which it was read then.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accelerate.data.order import END
from accelerate.data.position import Epoch
from accelerate.data.stream import IterableDatasetShard


class Rest(IterableDataset[Any]):
    """What is left of a stream.

    Args:
        stream: the whole; attributes are its own.
        counts: how many samples each worker leaves out.
    """

    def __init__(self, stream: Any, counts: list[int]) -> None:
        self.stream, self.counts = stream, counts
        # The stream's iterator, if it is begun already.
        self.begun: Iterator[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name in ("stream", "counts", "begun") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.stream, name)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        begun = iter(self.stream) if self.begun is None else self.begun
        yield from islice(begun, self.counts[0 if worker is None else worker.id], None)


def onward(base: DataLoader[Any], epoch: Epoch) -> Any:
    """What gives the batches that are left of a stream: to be iterated once, its first item to be dropped.

    Args:
        base: the loader of a stream, sharded.
        epoch: with a skip that counts samples.
    """
    total, (_, step) = epoch.skip.samples or 0, epoch.cut_by or (1, 1)
    if base.num_workers == 0:
        return _stages(base, total, step)
    # The batches of all processes came from the workers in turn.
    done = [len(range(worker, epoch.given, base.num_workers)) * step for worker in range(base.num_workers)]
    return _after_nothing(_with(base, done)[0])


def _after_nothing(loader: DataLoader[Any]) -> Iterator[Any]:
    batches = iter(loader)
    first = next(batches, END)
    yield None
    if first is not END:
        yield first
        yield from batches


def _stages(base: DataLoader[Any], total: int, step: int) -> Iterator[Any]:
    """Up to its first item it draws what the first step drew, with the loader's own start before."""
    loader, rest = _with(base, [0])
    batches = iter(loader)
    rest.begun = iter(rest.stream)
    _drop(rest.begun, min(step, total))
    yield None
    _drop(rest.begun, total - step)
    yield from batches


def _drop(samples: Iterator[Any], count: int) -> None:
    for _ in islice(samples, max(count, 0)):
        pass


def _with(base: DataLoader[Any], counts: list[int]) -> tuple[DataLoader[Any], Rest]:
    """The loader over what is left of its stream."""
    stream: Any = base.dataset
    shared = isinstance(stream, IterableDatasetShard)
    rest = Rest(stream.dataset if shared else stream, counts)
    loader, held = copy.copy(base), rest
    if shared:
        held = copy.copy(stream)
        held.dataset = rest
    loader.__dict__.update(dataset=held, _iterator=None)
    return loader, rest
