"""Rank, device, barriers and rank-dependent blocks; the base of ``Accelerator`` and the states."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from accelerate.core import tree
from accelerate.core.errors import PrepareError, warn_user
from accelerate.world import collective
from accelerate.world.world import World

Function = Callable[..., Any]


class ProcessMixin:
    """The rank and device of this process, barriers, and decorators; needs a ``world``."""

    @property
    def world(self) -> World:
        """The open world."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.world.device

    @property
    def num_processes(self) -> int:
        """The world size."""
        return self.world.reported.get("num_processes", self.world.size)

    @property
    def process_index(self) -> int:
        """The rank."""
        return self.world.reported.get("process_index", self.world.rank)

    @property
    def local_process_index(self) -> int:
        """The rank on this machine."""
        return self.world.reported.get("local_process_index", self.world.local_rank)

    @property
    def use_distributed(self) -> bool:
        """Return whether there are several processes."""
        return self.world.size > 1

    @property
    def is_main_process(self) -> bool:
        """Return whether this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Return whether this is the first process of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Return whether this is the last rank."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Wait until every process is here."""
        collective.barrier()

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Generator[Any]:
        """Yield this rank's contiguous part of a list, tuple, tensor or dataset, or of each value of a dict.

        Args:
            inputs: the whole, the same on every process. A text is not split, nor is what has a length and no
                positions, such as a ``DataLoader``; of that, a warning says so.
            apply_padding: repeat the last item so that all parts have one length.

        Raises:
            PrepareError: on several processes, the values of a dict have different lengths, or something has
                no length, or is a set. One process has the whole, whatever it is.
        """
        yield _split(inputs, apply_padding=apply_padding)

    def _first_block(self, is_main: bool) -> AbstractContextManager[None]:
        return collective.FirstProcessBlock(self.world.rank, is_main)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on rank 0 first, then on the others.

        Raises:
            PeerError: on the others, which have not begun, when rank 0 raised in its block; with its
                traceback.
        """
        return self._first_block(self.world.is_main)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on the first process of each machine first, then on the others.

        Raises:
            PeerError: on all the others, when one of those that go first raised in its block.
        """
        return self._first_block(self.world.is_local_main)

    def on_main_process(self, function: Function | None = None) -> Function:
        """Decorate a function to run on rank 0 only; it returns None elsewhere."""
        return _run_if(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Function | None = None) -> Function:
        """Decorate a function to run on the first process of each machine only."""
        return _run_if(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Function) -> Function:
        """Decorate a function to run on the last rank only."""
        return _run_if(lambda: self.is_last_process, function)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Function:
        """Decorate a function to run on one rank only. A single process always runs it."""
        if function is None:
            return partial(self.on_process, process_index=process_index)
        return _run_if(lambda: self._is_rank(process_index, self.process_index), function)

    def on_local_process(
        self, function: Function | None = None, local_process_index: int | None = None
    ) -> Function:
        """Decorate a function to run on one local rank per machine only. A single process always runs it."""
        if function is None:
            return partial(self.on_local_process, local_process_index=local_process_index)
        return _run_if(lambda: self._is_rank(local_process_index, self.local_process_index), function)

    def _is_rank(self, wanted: int | None, own: int) -> bool:
        return wanted is None or wanted == own or not self.use_distributed

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first process of each machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)


def _run_if(condition: Callable[[], bool], function: Function | None) -> Function:
    if function is None:
        return partial(_run_if, condition)

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if condition() else None

    return wrapper


def _split(items: Any, *, apply_padding: bool = False) -> Any:
    """Return this rank's contiguous part of a list, tuple, range, tensor, or of each value of a dict.

    The parts are disjoint, complete and in order, and their sizes differ by at most one, the first ranks
    holding more. A mapping, an array, a table of pandas, pyarrow or polars, or a ``datasets.Dataset`` gives a
    part of its own kind, another map-style dataset a ``Subset``. A text is one thing: every rank gets all of
    it. So it does of what has no positions, with a warning.

    Args:
        items: what to split; every rank passes the same.
        apply_padding: repeat the last item so that all parts have the same length (to gather them later).

    Raises:
        PrepareError: the values of a dict have different lengths, or something has no length or no order.
    """
    size, rank = collective.world_size(), collective.rank()
    if size == 1 or isinstance(items, str | bytes):
        return items
    if tree.is_mapping(items):
        lengths = set(_value_lengths(items))
        if len(lengths) > 1:
            raise PrepareError(
                f"the values of the dict to split have different lengths: {sorted(lengths)}",
                why="each process takes the same positions of every value",
            )
        parts = {key: _split(value, apply_padding=apply_padding) for key, value in items.items()}
        return tree.make_mapping_like(items, parts)
    length = _split_length(items)
    if not hasattr(items, "__getitem__") or isinstance(items, IterableDataset):
        if rank == 0 and not getattr(items, "_is_accelerate_prepared", False):
            _warn_unsplit(items)
        return items
    share, rest = divmod(length, size)
    start = rank * share + min(rank, rest)
    stop = start + share + (rank < rest)
    missing = share + (rest > 0) - (stop - start) if apply_padding and length else 0
    return _take(items, start, stop, missing)


def _value_lengths(items: Mapping[Any, Any]) -> Iterator[int]:
    """Yield the length of each value, and of each value of nested mappings; texts have none."""
    for value in items.values():
        if tree.is_mapping(value):
            yield from _value_lengths(value)
        elif not isinstance(value, str | bytes):
            yield _split_length(value)


def _take(items: Any, start: int, stop: int, missing: int) -> Any:
    """Return items ``start`` to ``stop``, and the last item ``missing`` times more."""
    indices = [*range(start, stop), *[len(items) - 1] * missing]
    if isinstance(items, torch.Tensor):
        return torch.cat([items[start:stop], *[items[-1:]] * missing]) if missing else items[start:stop]
    if isinstance(items, np.ndarray):
        return items[indices] if missing else items[start:stop]
    if hasattr(items, "iloc"):
        return items.iloc[indices]
    # One of the library ``datasets``; ``select`` of other tables takes columns.
    if isinstance(items, getattr(sys.modules.get("datasets"), "Dataset", ())):
        return items.select(indices)
    if hasattr(items, "columns"):  # a table of pyarrow or polars, whose items are columns
        return items.take(indices) if hasattr(items, "take") else items[indices]
    if isinstance(items, Dataset):
        return Subset(items, indices)
    if isinstance(items, deque):
        return deque(items[index] for index in indices)
    part = items[start:stop]
    if missing == 0:
        return part
    filled = [*part, *[items[-1]] * missing]
    return tuple(filled) if isinstance(items, tuple) else filled


def _warn_unsplit(items: Any) -> None:
    kind = type(items).__name__
    effect = f"each process has the whole {kind}; to split it, pass a list of it"
    if isinstance(items, DataLoader):
        effect = f"each process reads all of the {kind}, unless its sampler shares the data out; "
        effect += "accelerator.prepare(loader) splits it"
    warn_user(f"split_between_processes: {effect}")


def _split_length(items: Any) -> int:
    if not hasattr(items, "__len__") or isinstance(items, set | frozenset):
        why = "it has no order" if hasattr(items, "__len__") else "it has no length"
        raise PrepareError(
            f"an object of type {type(items).__name__} cannot be split between processes",
            why=why,
            fix="pass a list, tuple, tensor or dataset, or a dict of these",
        )
    return len(items)
