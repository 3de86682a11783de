"""Tensors in files, before they are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from accelerate.checkpoint.mapped import Place


@dataclass(frozen=True)
class LazyTensor:
    """A saved tensor that is not read yet.

    Attributes:
        shape, dtype: its own.
        places: where it lies; equal for tensors that are tied.
        read: gives it, on the CPU.
        place: where it can be mapped; None if it must be read.
    """

    shape: torch.Size
    dtype: torch.dtype
    places: tuple[tuple[str, int, int], ...]
    read: Callable[[], torch.Tensor]
    place: Place | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it will take."""
        return self.numel() * self.dtype.itemsize

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Bytes of one."""
        return self.dtype.itemsize

    def detach(self) -> torch.Tensor:
        """Reads it: so a writer takes it for a tensor, whose data it asks for once."""
        return self.read()
