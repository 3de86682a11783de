"""Weights that rank 0 reads and broadcasts: a file of one machine, or one that is slow for many."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from accelerate.checkpoint.lazy_tensor import LazyTensor
from accelerate.checkpoint.lazy_weights import open_weights
from accelerate.core.errors import AccelerateError
from accelerate.world import collective

_TensorInfo = tuple[tuple[int, ...], torch.dtype, tuple[tuple[str, int, int], ...]]


def weights_from_rank0(path: Callable[[], Path], display_path: Path) -> tuple[Path, dict[str, LazyTensor]]:
    """Open weights on rank 0 for all ranks.

    All ranks must read the same tensors in the same order.

    Args:
        path: gives the files; called on rank 0 only.
        display_path: what the others call them in errors.

    Returns:
        (the files, tensors by all names); reading one is a broadcast.

    Raises:
        AccelerateError: what rank 0 found wrong, on all ranks.
    """
    lazy_tensors: Mapping[str, LazyTensor] = {}
    source, problem = display_path, None
    if collective.rank() == 0:
        try:
            source = path()
            lazy_tensors = open_weights(source).by_all_names()
        except AccelerateError as error:
            problem = error
    infos: list[tuple[str, _TensorInfo]] | AccelerateError = collective.broadcast_object(
        problem or [(name, (tuple(t.shape), t.dtype, t.file_ranges)) for name, t in lazy_tensors.items()]
    )
    if isinstance(infos, AccelerateError):  # raised on all ranks, so that none waits for another
        raise infos
    return source, {name: _broadcast_tensor(info, lazy_tensors.get(name)) for name, info in infos}


def _broadcast_tensor(info: _TensorInfo, saved: LazyTensor | None) -> LazyTensor:
    shape, dtype, file_ranges = info

    def read() -> torch.Tensor:
        value: Any = torch.empty(shape, dtype=dtype) if saved is None else saved.read()
        return collective.broadcast(value.contiguous())

    return LazyTensor(torch.Size(shape), dtype, file_ranges, read)
