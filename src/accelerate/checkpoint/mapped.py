"""Tensors that are views of a file: nothing is read until somebody looks, and nothing is ever written back.

A file is mapped privately. What is written to such a tensor goes to memory of this process, page by page. Who
replaces the file by renaming another one to its name leaves the mapping alone, and that is how everything
here saves. Who writes into the file, or cuts it, changes the tensors, or ends the process with SIGBUS.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accelerate.checkpoint.errors import file_errors


@dataclass(frozen=True)
class Place:
    """Where the values of a tensor lie, one after the other, as they are in memory.

    Attributes:
        path: the file.
        offset: of the first byte.
        stride: in elements; None for row after row.
    """

    path: Path
    offset: int
    stride: tuple[int, ...] | None = None

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether a tensor may begin there: processors want numbers at multiples of their size."""
        return self.offset % dtype.itemsize == 0


class Maps:
    """Files that are mapped, each once; tensors keep them mapped."""

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}

    def tensor(self, place: Place, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the file; its memory is its own part of the file, so no two of them seem to be tied.

        Raises:
            CheckpointError: the file cannot be mapped.
        """
        if shape.numel() == 0:
            return torch.empty(shape, dtype=dtype)
        made: Any = torch.empty(0, dtype=dtype)
        span = shape.numel()
        if place.stride is not None:
            span = 1 + sum((n - 1) * s for n, s in zip(shape, place.stride, strict=True))
        with file_errors("map", place.path):
            if place.path not in self._files:
                size = place.path.stat().st_size
                self._files[place.path] = torch.UntypedStorage.from_file(str(place.path), False, size)
            whole = self._files[place.path]
            part: Any = whole[place.offset : place.offset + span * dtype.itemsize]
            if place.stride is None:
                return made.set_(part, 0, shape)
            return made.set_(part, 0, shape, place.stride)
