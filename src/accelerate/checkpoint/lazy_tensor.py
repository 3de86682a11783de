"""Saved tensors that are read later."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from accelerate.checkpoint.mapped_files import FileRegion


@dataclass(frozen=True)
class LazyTensor:
    """A saved tensor that is not read yet.

    Attributes:
        shape, dtype: its own.
        file_ranges: (file, offset, bytes) of its values; equal for tied tensors.
        read: gives it, on the CPU.
        region: where it can be mapped; None if it must be read.
    """

    shape: torch.Size
    dtype: torch.dtype
    file_ranges: tuple[tuple[str, int, int], ...]
    read: Callable[[], torch.Tensor]
    region: FileRegion | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that the tensor takes."""
        return self.numel() * self.dtype.itemsize

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Return the bytes of one element."""
        return self.dtype.itemsize

    def detach(self) -> torch.Tensor:
        """Read the tensor: so a writer, which calls this once, can use it like a tensor."""
        return self.read()
