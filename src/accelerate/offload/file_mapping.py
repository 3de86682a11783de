"""Tensors that are mapped from a file: their source, and when their values still are those of the file.

A mapping is private: what is written to the tensor stays in memory. Torch counts most writes as versions of
the tensor, but none through ``.data``: a tensor is dropped for its file only after its bytes were compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from accelerate.offload.offloaded_tensor import FILE_MAPPING, TensorSource


@dataclass(frozen=True, eq=False)
class FileMapping:
    """The file that a tensor was mapped from, with the memory that it had then.

    Attributes:
        source: the file's values.
        version: of the tensor.
        address: of its data.
        dtype, shape, stride: of the tensor.
    """

    source: TensorSource
    version: int
    address: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def describes(self, tensor: torch.Tensor) -> bool:
        """Return True while the tensor has this memory, and torch has counted no write to it."""
        return (
            tensor.device.type == "cpu"
            and tensor.layout == torch.strided
            and (self.version, self.dtype, self.shape) == (tensor._version, tensor.dtype, tensor.shape)
            and (self.address, self.stride) == (tensor.data_ptr(), tensor.stride())
        )


def set_file_source(tensor: Any, source: TensorSource) -> None:
    """Record that a tensor on the CPU is mapped from a file."""
    mapping = FileMapping(
        source, tensor._version, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    )
    setattr(tensor, FILE_MAPPING, mapping)


def mapped_source(tensor: torch.Tensor) -> TensorSource | None:
    """Return the source that a tensor is mapped from, unless it has other memory now, or a new version."""
    mapping = getattr(tensor, FILE_MAPPING, None)
    return mapping.source if mapping is not None and mapping.describes(tensor) else None


def unchanged_source(tensor: torch.Tensor) -> TensorSource | None:
    """Return the source that a tensor is mapped from if the file has the same bytes, else None."""
    source = mapped_source(tensor)
    if source is None:
        return None
    values = source.host_tensor().detach()
    if values.data_ptr() == tensor.data_ptr():  # the source holds this memory, with what was written to it
        return source
    return source if has_same_bytes(values, tensor.detach()) else None


def has_same_bytes(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True when two tensors have the same bytes; NaN is equal to itself."""
    return torch.equal(_bytes_of(value), _bytes_of(other))


def _bytes_of(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)
