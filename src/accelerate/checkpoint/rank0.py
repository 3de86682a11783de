"""Weights that one process reads and all get: a file of one machine, or one that is slow for many."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from accelerate.checkpoint.lazy import LazyTensor
from accelerate.checkpoint.weights import weights_of
from accelerate.core.errors import AccelerateError
from accelerate.world import collective

_Row = tuple[tuple[int, ...], torch.dtype, tuple[tuple[str, int, int], ...]]


def from_rank0(path: Callable[[], Path], shown: Path) -> tuple[Path, dict[str, LazyTensor]]:
    """What files hold, as rank 0 sees them; all processes must read the same tensors in the same order.

    Args:
        path: gives the files; called on rank 0 only.
        shown: what the others call them in errors.

    Returns:
        (the files, tensors by all names); reading one is a broadcast.

    Raises:
        AccelerateError: what rank 0 found wrong, on all ranks.
    """
    found: Mapping[str, LazyTensor] = {}
    where, problem = shown, None
    if collective.rank() == 0:
        try:
            where = path()
            found = weights_of(where).every()
        except AccelerateError as error:
            problem = error
    rows: list[tuple[str, _Row]] | AccelerateError = collective.agree(
        problem or [(name, (tuple(t.shape), t.dtype, t.places)) for name, t in found.items()]
    )
    if isinstance(rows, AccelerateError):  # on all ranks, so that none waits for another
        raise rows
    return where, {name: _sent(row, found.get(name)) for name, row in rows}


def _sent(row: _Row, saved: LazyTensor | None) -> LazyTensor:
    shape, dtype, places = row

    def read() -> torch.Tensor:
        value: Any = torch.empty(shape, dtype=dtype) if saved is None else saved.read()
        return collective.broadcast(value.contiguous())

    return LazyTensor(torch.Size(shape), dtype, places, read)
