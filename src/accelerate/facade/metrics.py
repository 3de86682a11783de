"""Gather outputs per sample over all ranks, each sample once.

Each rank drops the rows that only filled its own batch before the all-gather. So it does not
matter where in the step they are, nor how many rows the others have.
"""

from __future__ import annotations

from typing import Any

import torch

from accelerate.core import tree
from accelerate.world import collective


def gather_for_metrics(
    data: Any,
    loader: Any,
    *,
    as_objects: bool = False,
    counts_samples: bool = True,
    all_ranks_count: bool = True,
) -> Any:
    """Gather the outputs of all ranks for the samples of a step, in dataset order, without fillers.

    Args:
        data: rows of this process's batch: a tensor with one row per sample (a scalar counts for the whole
            batch), a list with any object per sample, or a dict of these, or a sequence of these that has a
            tensor among them.
        loader: the one whose batch it is, or None.
        as_objects: a list, or each value of a dict, is one of objects, whatever is in it.
        counts_samples: whether the rows of this process count: others may have computed the same.
        all_ranks_count: whether the rows of every process count.

    Returns:
        The same structure. Objects come as a flat list, also on one process.
    """
    real = last = None
    filled = False
    if loader is not None and loader.has_fillers:
        filled = True
        real = loader.real
        if real is None and loader.end_of_dataloader and loader.remainder > 0:
            last = loader.remainder  # where only the whole step is known
    if not all_ranks_count:
        filled, real = True, real if counts_samples else 0
    return _SampleGatherer(filled, real, last).gather(data, as_objects)


class _SampleGatherer:
    """Gathers ``real`` rows of this process's, or (``last``) so many of all; ``filled`` is alike on all."""

    def __init__(self, filled: bool, real: int | None, last: int | None) -> None:
        self.filled, self.real, self.last = filled and collective.world_size() > 1, real, last

    def gather(self, data: Any, as_objects: bool) -> Any:
        if isinstance(data, torch.Tensor) and not as_objects:
            return self._drop_filler(collective.gather(self._own_rows(data)))
        if not as_objects and all(isinstance(leaf, torch.Tensor) for _, leaf in tree.iterate_leaves(data)):
            # All tensors in one all-gather, however many they are.
            return tree.map_tree(self._drop_filler, collective.gather(tree.map_tree(self._own_rows, data)))
        if tree.is_mapping(data):
            parts = {key: self.gather(value, as_objects) for key, value in data.items()}
            return tree.make_mapping_like(data, parts)
        if tree.is_sequence(data) and not as_objects and any(map(_has_rows, data)):
            return tree.make_same_type(data, [self.gather(item, as_objects) for item in data])
        return self._gather_objects(data)

    def _own_rows(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.dim() > 0:
            return rows if self.real is None else rows[: self.real]
        # A value of fillers alone does not count; its shape must be the same on all ranks.
        return rows.reshape(1)[: self.real] if self.filled else rows

    def _drop_filler(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.last is None or rows.dim() == 0 else rows[: self.last]

    def _gather_objects(self, rows: Any) -> list[Any]:
        single = isinstance(rows, str | bytes) or not hasattr(rows, "__iter__")
        listed = [rows] if single else list(rows)
        return list(collective.gather_object(listed[: self.real]))[: self.last]


def _has_rows(item: Any) -> bool:
    """Return whether an item of a sequence is itself a column: a tensor with a row per sample."""
    return isinstance(item, torch.Tensor) and item.dim() > 0
