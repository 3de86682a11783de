"""Cutting a collated batch into rows, where no one can say better."""

from __future__ import annotations

from typing import Any

import torch

from accelerate.core import tree
from accelerate.core.errors import PrepareError
from accelerate.world.tensors import ignorant_find_batch_size

_FIX = (
    "give prepare_data_loader a slice_fn_for_dispatch that knows this batch, or use split_batches=False, "
    "which sends whole batches"
)


def rows_of(batch: Any) -> int:
    """How many samples a collated batch holds.

    By its first tensor with a first dimension; without one, by its innermost lists that hold no lists.

    Raises:
        PrepareError: nothing in it has a length.
    """
    rows = ignorant_find_batch_size(batch)
    if rows is None:
        rows = next((len(item) for item in _columns(batch)), None)
    if rows is None:
        raise PrepareError(
            f"a batch of type {type(batch).__name__} cannot be split over the processes",
            why="no tensor with a first dimension and no list of samples is in it",
            fix=_FIX,
        )
    return rows


def _columns(batch: Any) -> list[Any]:
    """The lists in ``batch`` that stand for samples."""
    if tree.is_mapping(batch):
        return [column for value in batch.values() for column in _columns(value)]
    if tree.is_sequence(batch):
        inner = [column for value in batch for column in _columns(value)]
        lengths = {len(column) for column in inner}
        # Lists of one length are columns; of several, each of them belongs to one sample.
        return inner if len(lengths) == 1 and all(map(tree.is_container, batch)) else [batch]
    return []


def take(batch: Any, rows: int, wanted: list[int]) -> Any:
    """The ``wanted`` rows of a collated batch of ``rows`` samples; its structure stays.

    Tensors are cut along dimension 0, and lists of as many items as the batch has samples. Numbers, texts
    and None stand for the whole batch and stay.

    Raises:
        PrepareError: a tensor has another first dimension, or none, or a list has another length.
    """
    return _take(batch, rows, wanted, "batch")


def _take(value: Any, rows: int, wanted: list[int], path: str) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dim() == 0 or value.shape[0] != rows:
            raise _odd(f"{path} has shape {tuple(value.shape)}", rows)
        contiguous = wanted == list(range(wanted[0], wanted[0] + len(wanted)))
        return value[wanted[0] : wanted[0] + len(wanted)] if contiguous else value[torch.tensor(wanted)]
    if tree.is_mapping(value):
        parts = {key: _take(item, rows, wanted, f"{path}[{key!r}]") for key, item in value.items()}
        return tree.like_mapping(value, parts)
    if not tree.is_sequence(value):
        return value
    if tree.find(lambda leaf: isinstance(leaf, torch.Tensor), value) is None and value not in ([], ()):
        columns = _columns(value)
        if len(columns) == 1 and columns[0] is value:
            if len(value) != rows:
                raise _odd(f"{path} has {len(value)} items", rows)
            return tree.same_type(value, [value[index] for index in wanted])
    items = [_take(item, rows, wanted, f"{path}[{index}]") for index, item in enumerate(value)]
    return tree.same_type(value, items)


def _odd(what: str, rows: int) -> PrepareError:
    return PrepareError(
        f"a batch of {rows} samples cannot be split over the processes: {what}",
        why="its first dimension does not count samples",
        fix=_FIX,
    )
