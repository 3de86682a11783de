"""Splitting a collated batch by rows, without a slice function of the user."""

from __future__ import annotations

from typing import Any

import torch

from accelerate.core import tree
from accelerate.core.errors import PrepareError
from accelerate.world.local_tensor_trees import ignorant_find_batch_size

_FIX = (
    "give prepare_data_loader a slice_fn_for_dispatch that knows this batch, or use split_batches=False, "
    "which sends whole batches"
)


def count_rows(batch: Any) -> int:
    """Count the samples of a collated batch.

    They are counted in the first tensor with a first dimension; without one, in the innermost lists.

    Raises:
        PrepareError: nothing in it has a length.
    """
    rows = ignorant_find_batch_size(batch)
    if rows is None:
        rows = next((len(item) for item in _sample_lists(batch)), None)
    if rows is None:
        raise PrepareError(
            f"a batch of type {type(batch).__name__} cannot be split over the processes",
            why="no tensor with a first dimension and no list of samples is in it",
            fix=_FIX,
        )
    return rows


def _sample_lists(batch: Any) -> list[Any]:
    """Return the lists in ``batch`` whose items are samples."""
    if tree.is_mapping(batch):
        return [column for value in batch.values() for column in _sample_lists(value)]
    if tree.is_sequence(batch):
        inner = [column for value in batch for column in _sample_lists(value)]
        lengths = {len(column) for column in inner}
        # Lists of one length are columns; of several, each of them belongs to one sample.
        return inner if len(lengths) == 1 and all(map(tree.is_container, batch)) else [batch]
    return []


def take_rows(batch: Any, rows: int, wanted: list[int]) -> Any:
    """Return the ``wanted`` rows of a collated batch of ``rows`` samples, in the same structure.

    Tensors are sliced along dimension 0, and lists with one item per sample too. Numbers, texts
    and None stand for the whole batch and stay.

    Raises:
        PrepareError: a tensor has another first dimension, or none, or a list has another length.
    """
    return _take_rows(batch, rows, wanted, "batch")


def _take_rows(value: Any, rows: int, wanted: list[int], path: str) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dim() == 0 or value.shape[0] != rows:
            raise _row_count_error(f"{path} has shape {tuple(value.shape)}", rows)
        contiguous = wanted == list(range(wanted[0], wanted[0] + len(wanted)))
        return value[wanted[0] : wanted[0] + len(wanted)] if contiguous else value[torch.tensor(wanted)]
    if tree.is_mapping(value):
        parts = {key: _take_rows(item, rows, wanted, f"{path}[{key!r}]") for key, item in value.items()}
        return tree.make_mapping_like(value, parts)
    if not tree.is_sequence(value):
        return value
    if tree.find_leaf(lambda leaf: isinstance(leaf, torch.Tensor), value) is None and value not in ([], ()):
        columns = _sample_lists(value)
        if len(columns) == 1 and columns[0] is value:
            if len(value) != rows:
                raise _row_count_error(f"{path} has {len(value)} items", rows)
            return tree.make_same_type(value, [value[index] for index in wanted])
    items = [_take_rows(item, rows, wanted, f"{path}[{index}]") for index, item in enumerate(value)]
    return tree.make_same_type(value, items)


def _row_count_error(what: str, rows: int) -> PrepareError:
    return PrepareError(
        f"a batch of {rows} samples cannot be split over the processes: {what}",
        why="its first dimension does not count samples",
        fix=_FIX,
    )
