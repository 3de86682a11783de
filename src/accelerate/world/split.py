"""Splitting a value that every rank has: each rank takes its part, without communication."""

from __future__ import annotations

from typing import Any

import torch

from accelerate.core import tree
from accelerate.core.errors import PrepareError
from accelerate.world.collective import rank, world_size


def split(items: Any, *, apply_padding: bool = False) -> Any:
    """Return this rank's contiguous part of a list, tuple, range, tensor, or of each value of a dict.

    The parts are disjoint, complete and in order, and their sizes differ by at most one, the first ranks
    holding more. What has a ``select`` method (a ``datasets.Dataset``) gives a part of its own kind. A text
    is one thing: every rank gets the whole.

    Args:
        items: what to split; every rank passes the same.
        apply_padding: repeat the last item so that all parts have the same length (to gather them later).

    Raises:
        PrepareError: the values of a dict have different lengths, or something has no length.
    """
    if isinstance(items, str | bytes):
        return items
    if tree.is_mapping(items):
        lengths = {_length(value) for value in items.values() if not isinstance(value, str | bytes)}
        if len(lengths) > 1:
            raise PrepareError(
                f"the values of the dict to split have different lengths: {sorted(lengths)}",
                why="each process takes the same positions of every value",
            )
        return {key: split(value, apply_padding=apply_padding) for key, value in items.items()}
    length = _length(items)
    if world_size() == 1:
        return items
    share, rest = divmod(length, world_size())
    start = rank() * share + min(rank(), rest)
    stop = start + share + (rank() < rest)
    missing = share + (rest > 0) - (stop - start) if apply_padding and length else 0
    return _slice_items(items, start, stop, missing)


def _slice_items(items: Any, start: int, stop: int, missing: int) -> Any:
    """Return items ``start`` to ``stop``, and the last item ``missing`` times more."""
    if callable(getattr(items, "select", None)) and not isinstance(items, torch.Tensor):
        return items.select([*range(start, stop), *[len(items) - 1] * missing])
    part = items[start:stop]
    if missing == 0:
        return part
    if isinstance(items, torch.Tensor):
        return torch.cat([part, *[items[-1:]] * missing])
    filled = [*part, *[items[-1]] * missing]
    return filled if isinstance(items, range) else type(items)(filled)


def _length(items: Any) -> int:
    if not hasattr(items, "__len__"):
        raise PrepareError(
            f"an object of type {type(items).__name__} cannot be split between processes",
            why="it has no length",
            fix="pass a list, tuple, tensor or dataset, or a dict of these",
        )
    return len(items)
