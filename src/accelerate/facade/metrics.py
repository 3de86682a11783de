"""Metrics over all ranks: outputs per sample, each sample once, and the mean loss.

Each rank drops the rows that only filled its own batch before the all-gather. So it does not
matter where in the step they are, nor how many rows the others have. Rows that cannot be assigned to
samples are an error, never cut at a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from accelerate.core import tree
from accelerate.core.errors import PrepareError
from accelerate.strategy.base import DataSharding, Strategy
from accelerate.world import collective


def gather_for_metrics(
    data: Any,
    loader: Any,
    strategy: Strategy,
    *,
    as_objects: bool = False,
    rows_per_sample: int | Sequence[int] | torch.Tensor | None = None,
    gather: Callable[[Any], Any] | None = None,
) -> Any:
    """Gather the outputs of all ranks for the samples of a step, in dataset order, without fillers.

    Args:
        data: rows of this process's batch: a tensor with as many rows for each sample (a scalar, or a single
            row, counts for the whole batch), a list with any object per sample, or a dict of these, or a
            sequence of these that has a tensor among them.
        loader: the one whose batch it is, or None.
        strategy: says which ranks have computed the same samples: they count once.
        as_objects: a list, or each value of a dict, is one of objects, whatever is in it. On one
            process a tensor stays one.
        rows_per_sample: see ``Accelerator.gather_for_metrics``.
        gather: a program's own, for a tree of tensors. What it returns has the rows of all ranks in rank
            order, so the fillers of the last step are its last rows.

    Returns:
        The same structure. Objects come as a flat list; on one process, one that is no list comes as it is.
        Arrays of numpy come as an array.

    Raises:
        PrepareError: the step has fillers, and which rows are theirs is not known.
    """
    left = loader.remainder if loader is not None and loader.end_of_dataloader else 0
    if (
        gather is not None
        and not as_objects
        and all(isinstance(leaf, torch.Tensor) for _, leaf in tree.iterate_leaves(data))
    ):
        gathered = gather(data)
        return tree.map_tree(lambda rows: rows[:left], gathered) if left > 0 else gathered
    share, world_size = getattr(loader, "data_shard", None) or strategy.data_shard, strategy.world.size
    several_read_alike = share.count == strategy.data_shard.count < world_size
    if several_read_alike and isinstance(strategy, DataSharding):
        data = strategy.merge_model_parallel(data, as_objects=as_objects)
    repeated = share.count != world_size
    filled = repeated or (loader is not None and loader.has_fillers)
    keep: _RowCounter = _all_rows
    if repeated and not share.counts_samples:
        keep = _no_rows
    elif loader is not None and loader.batch_samples:
        keep = _RealRowCounter(loader, rows_per_sample)
    # A custom loader tells no more than its remainder.
    is_custom_loader = loader is not None and not hasattr(loader, "position")
    return _SampleGatherer(filled, keep, left if is_custom_loader else 0).gather(data, as_objects)


_RowCounter = Callable[[Sequence[int], Any], int]


def _all_rows(shape: Sequence[int], rows: Any) -> int:
    return shape[0] if shape else 1


def _no_rows(shape: Sequence[int], rows: Any) -> int:
    return 0


class _RealRowCounter:
    """Counts the rows of an output that belong to real samples; those of fillers are the last ones.

    Args:
        loader: the one whose batch is in hand.
        per_sample: rows of a sample, or of each; None: deduced from the outputs of earlier steps.
    """

    def __init__(self, loader: Any, per_sample: int | Sequence[int] | torch.Tensor | None) -> None:
        self.loader, self.epoch, self.size = loader, loader.position.current, loader.batch_samples
        self.fillers = self.size - loader.real if loader.has_fillers and loader.real is not None else 0
        counts: Any = per_sample.tolist() if isinstance(per_sample, torch.Tensor) else per_sample
        self.per_sample: int | list[int] | None = list(counts) if hasattr(counts, "__iter__") else counts

    def __call__(self, shape: Sequence[int], output: Any) -> int:
        """Return how many of the first rows of an output count.

        Args:
            shape: that of the output; a scalar has the shape ().
            output: a tensor, an array or a list.
        """
        rows = shape[0] if shape else 1
        multiple, rest = divmod(rows, self.size)
        earlier = self._note_output(0 if rest else multiple)
        of_batch = not shape or (shape[0] == 1 and self.size > 1 and tuple(shape[1:2]) != (self.size,))
        if of_batch and not (shape and isinstance(self.per_sample, list)):
            return self._count_batch_value()
        if self.per_sample is not None:
            return rows - self._count_filler_rows(shape, self.per_sample)
        # Where this output had a row for each sample, another one of several rows tells nothing of it.
        is_known = not rest and earlier != 1 and self._is_known(multiple)
        steps = self._steps_of_rows(multiple) if multiple > 1 and not rest else 1
        if not is_known and (repeats := self._repeats_for_full_batch(output, rows)):
            return repeats * (self.size - self.fillers)
        if not self.fillers or rows == 0:
            return rows
        if rest:
            raise self._error(shape, f"{rows} is no multiple of {self.size}")
        if multiple > 1 and tuple(shape[1:2]) == (self.size,):
            raise self._error(shape, "the batch may be the second dimension")
        if not steps or multiple % steps:
            raise self._error(shape, "these may be rows of several steps, or several rows of each sample")
        return rows - multiple // steps * self.fillers

    def _count_batch_value(self) -> int:
        """Return 1 where this rank's value of its whole batch counts, else 0.

        Programs stack such values over steps, so the last step has one of each rank, as in 1.x; of fewer
        samples than ranks, those of as many ranks.
        """
        if not self.fillers or not self.loader.end_of_dataloader or self.loader.remainder <= 0:
            return min(1, self.size - self.fillers)
        share = self.loader.data_shard
        return int((collective.rank() if share is None else share.index) < self.loader.remainder)

    def _note_output(self, multiple: int) -> int | None:
        """Return the multiple of the same output of an earlier step, and note that of this one."""
        step, (last, count) = self.epoch.batches - self.epoch.skip.batches, self.epoch.outputs
        place = count if last == step else 0
        self.epoch.outputs, earlier = (step, place + 1), self.epoch.output_multiples.get(place)
        self.epoch.output_multiples[place] = multiple
        return earlier

    def _is_known(self, multiple: int) -> bool:
        """Return whether an earlier step had such an output: one of this step has it as last and interval."""
        step = self.epoch.batches - self.epoch.skip.batches
        return self.epoch.row_multiples.get(multiple, (step, step)) != (step, step)

    def _repeats_for_full_batch(self, output: Any, rows: int) -> int:
        """Return the rows of a sample where a shorter batch has as many rows as a full one; 0: it has not.

        It is padded, or ``loss.repeat(batch_size)``: several rows of each sample where batches are split.
        Unless all are alike, it may have several rows of each sample in the first step of an epoch, and of a
        step without fillers all rows count.
        """
        share = self.loader.data_shard
        count = self.loader._num_processes if share is None else share.count  # None: it was made by hand
        repeats, rest = divmod(rows * count, self.loader.total_batch_size or rows)
        if rows <= self.size or rest or not (repeats == 1 or self._is_known(repeats)):
            return 0
        # The ranks of a filled step that have no filler must cut as the others do.
        is_filled = self.fillers or 0 < self.loader.remainder < count * self.size
        if is_filled and self.epoch.batches - self.epoch.skip.batches > 1:
            return repeats
        is_array = isinstance(output, torch.Tensor | np.ndarray) and output.ndim == 1
        is_alike = is_array and "float" in str(output.dtype) and bool((output == output[0]).all())
        return repeats if is_alike else 0

    def _steps_of_rows(self, multiple: int) -> int:
        """Return of how many steps an output holds rows, by how regularly such outputs came; 0: unknown."""
        seen, step = self.epoch.row_multiples, self.epoch.batches - self.epoch.skip.batches
        last, interval = seen.get(multiple, (0, step))
        if last != step:
            interval = interval if step - last == interval else 0
            seen[multiple] = (step, interval)
        return interval if step == 1 or step > interval else 0

    def _count_filler_rows(self, shape: Sequence[int], per_sample: int | list[int]) -> int:
        if isinstance(per_sample, int):
            if per_sample < 1 or shape[0] % per_sample or shape[0] < per_sample * self.size:
                raise self._error(shape, f"{shape[0]} rows are not {per_sample} for each sample")
            return per_sample * self.fillers
        if sum(per_sample) != shape[0] or len(per_sample) < self.size:
            text = f"rows_per_sample has {len(per_sample)} numbers with the sum {sum(per_sample)}"
            raise self._error(shape, text)
        return sum(per_sample[len(per_sample) - self.fillers :])

    def _error(self, shape: Sequence[int], reason: str) -> PrepareError:
        return PrepareError(
            f"gather_for_metrics of an output of shape {tuple(shape)}, for a batch of {self.size} samples of "
            f"which {self.fillers} only fill the step",
            why=f"{reason}, so the rows that must not count are not known",
            fix="pass rows_per_sample=N, the rows of one sample (1 for rows of several steps), or a list of "
            "the rows of each sample; put the batch into the first dimension; gather() keeps all rows",
        )


class _SampleGatherer:
    """Gathers as many of the first rows of this process as ``keep`` says; ``filled`` is alike on all.

    Of the rows of all ranks the first ``left`` count, unless that is 0.
    """

    def __init__(self, filled: bool, keep: _RowCounter, left: int) -> None:
        self.filled, self.keep, self.left = filled and collective.world_size() > 1, keep, left

    def gather(self, data: Any, as_objects: bool, *, is_inside: bool = False) -> Any:
        if data is None and is_inside:  # a field or key without a value
            return None
        # transformers' Trainer concatenates the tensors of batches, and takes a list for several outputs.
        if isinstance(data, torch.Tensor) and (not as_objects or collective.world_size() == 1):
            return self._cut(collective.gather(self._own_rows(data)))
        kinds = set() if as_objects else {_kind(leaf) for _, leaf in tree.iterate_leaves(data)}
        if not as_objects and (kinds == {"tensor", "none"} or kinds <= {"tensor"}):
            # All tensors in one all-gather, however many they are.
            return tree.map_tree(self._cut, collective.gather(tree.map_tree(self._own_rows, data)))
        if is_dataclass(data) and not isinstance(data, type) and "tensor" in kinds:
            named = {
                each.name: self.gather(getattr(data, each.name), as_objects, is_inside=True)
                for each in fields(data)
            }
            return replace(data, **named)
        if tree.is_mapping(data):
            parts = {key: self.gather(value, as_objects, is_inside=True) for key, value in data.items()}
            return tree.make_mapping_like(data, parts)
        if tree.is_sequence(data) and not as_objects and any(map(_has_rows, data)):
            return tree.make_same_type(data, [self.gather(item, as_objects) for item in data])
        return self._gather_objects(data)

    def _own_rows(self, rows: Any) -> Any:
        if rows is None:
            return None
        if rows.dim() == 0 and not self.filled:
            return rows
        # A value of fillers alone does not count; its shape must be the same on all ranks.
        count, listed = self.keep(rows.shape, rows), rows if rows.dim() else rows.reshape(1)
        return listed if count == len(listed) else listed[:count]

    def _gather_objects(self, rows: Any) -> Any:
        is_array = isinstance(rows, np.ndarray)
        if is_array and rows.ndim:
            parts = collective.gather_object([rows[: self.keep(rows.shape, rows)]])
            return self._cut(np.concatenate(parts))
        if collective.world_size() == 1 and not isinstance(rows, list):
            return rows
        single = is_array or isinstance(rows, str | bytes) or not hasattr(rows, "__iter__")
        listed = [rows] if single else list(rows)
        return self._cut(list(collective.gather_object(listed[: self.keep((len(listed),), listed)])))

    def _cut(self, rows: Any) -> Any:
        return rows[: self.left] if self.left > 0 and rows is not None else rows


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
    flat = [torch.as_tensor(value, device="cpu").detach().reshape(-1).double() for value in listed]
    return torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float64, device="cpu")


def _kind(leaf: Any) -> str:
    return "tensor" if isinstance(leaf, torch.Tensor) else "none" if leaf is None else "object"


def _has_rows(item: Any) -> bool:
    """Return whether an item of a sequence is itself a column: a tensor with a row per sample."""
    return isinstance(item, torch.Tensor) and item.dim() > 0
