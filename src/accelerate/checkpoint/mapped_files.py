"""Memory-mapped tensors: nothing is read before a page is touched, and nothing is ever written back.

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
class FileRegion:
    """The position of a tensor's values in a file, contiguous as they are in memory.

    Attributes:
        path: the file.
        offset: of the first byte.
        stride: in elements; None for row after row.
    """

    path: Path
    offset: int
    stride: tuple[int, ...] | None = None

    def is_aligned(self, dtype: torch.dtype) -> bool:
        """Return True if a tensor may begin at the offset: it must be a multiple of the element size."""
        return self.offset % dtype.itemsize == 0


class MappedFiles:
    """Memory-mapped files, each mapped once; tensors keep them mapped."""

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}

    def tensor(self, region: FileRegion, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor mapped from the file.

        Each one has a storage of its own, so no two of them seem to be tied.

        Raises:
            CheckpointError: the file cannot be mapped.
        """
        if shape.numel() == 0:
            return torch.empty(shape, dtype=dtype)
        tensor: Any = torch.empty(0, dtype=dtype)
        span = shape.numel()
        if region.stride is not None:
            span = 1 + sum((n - 1) * s for n, s in zip(shape, region.stride, strict=True))
        with file_errors("map", region.path):
            if region.path not in self._files:
                size = region.path.stat().st_size
                self._files[region.path] = torch.UntypedStorage.from_file(str(region.path), False, size)
            whole = self._files[region.path]
            storage: Any = whole[region.offset : region.offset + span * dtype.itemsize]
            if region.stride is None:
                return tensor.set_(storage, 0, shape)
            return tensor.set_(storage, 0, shape, region.stride)
