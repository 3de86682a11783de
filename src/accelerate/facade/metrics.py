"""Metrics over all ranks: outputs per sample, each sample once, and the mean loss.

Each rank drops the rows that only filled its own batch before the all-gather. So it does not
matter where in the step they are, nor how many rows the others have.
"""

from __future__ import annotations

from typing import Any

import torch

from accelerate.core import tree
from accelerate.core.errors import PrepareError
from accelerate.strategy.base import DataSharding, Strategy
from accelerate.world import collective


def gather_for_metrics(data: Any, loader: Any, strategy: Strategy, *, as_objects: bool = False) -> Any:
    """Gather the outputs of all ranks for the samples of a step, in dataset order, without fillers.

    Args:
        data: rows of this process's batch: a tensor with one row per sample (a scalar counts for the whole
            batch), a list with any object per sample, or a dict of these, or a sequence of these that has a
            tensor among them.
        loader: the one whose batch it is, or None.
        strategy: says which ranks have computed the same samples: they count once.
        as_objects: a list, or each value of a dict, is one of objects, whatever is in it.

    Returns:
        The same structure. Objects come as a flat list, also on one process.
    """
    share, world_size = getattr(loader, "data_shard", None) or strategy.data_shard, strategy.world.size
    several_read_alike = share.count == strategy.data_shard.count < world_size
    if several_read_alike and isinstance(strategy, DataSharding) and not as_objects:
        data = strategy.merge_model_parallel(data)
    real = last = None
    filled = False
    if loader is not None and loader.has_fillers:
        filled = True
        real = loader.real
        if real is None and loader.end_of_dataloader and loader.remainder > 0:
            last = loader.remainder  # where only the whole step is known
    if share.count != world_size:
        filled, real = True, real if share.counts_samples else 0
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


def mean_loss(loss: Any, num_items: Any, device: torch.device) -> torch.Tensor:
    """Return the mean over all items of all ranks; see ``Accelerator.mean_loss``.

    Raises:
        PrepareError: there are more or fewer numbers than losses.
    """
    losses = _flatten_numbers(loss)
    items = torch.ones_like(losses) if num_items is None else _flatten_numbers(num_items)
    if items.shape != losses.shape:
        raise PrepareError(
            f"mean_loss of {len(losses)} losses with {len(items)} numbers of items",
            fix="give as many: of how many items each loss is the mean",
        )
    # Model-parallel ranks have the same loss: they count alike in both sums.
    total = torch.stack((torch.where(items > 0, losses * items, 0.0).sum(), items.sum()))
    value, count = collective.reduce(total, "sum").tolist()
    return torch.tensor(value / count if count else float("nan"), device=device)


def _flatten_numbers(values: Any) -> torch.Tensor:
    """Return a number, a tensor, or a list of them as one flat float64 tensor on the host."""
    listed = values if isinstance(values, list | tuple) else [values]
    flat = [torch.as_tensor(value).detach().reshape(-1).cpu().double() for value in listed]
    return torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float64)


def _has_rows(item: Any) -> bool:
    """Return whether an item of a sequence is itself a column: a tensor with a row per sample."""
    return isinstance(item, torch.Tensor) and item.dim() > 0
