"""Where the values of an offloaded weight lie, and how they are read.

A source is asked for a tensor on the host or on a device, as often as somebody needs it. It keeps nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accelerate.core.errors import AccelerateError


class OffloadError(AccelerateError, RuntimeError):
    """A weight that is offloaded cannot be read or changed as asked."""


class Source:
    """The values of one weight, wherever they are.

    Attributes:
        name: the weight's full name in its model, for errors.
        shape, dtype: of the whole tensor.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def host(self) -> torch.Tensor:
        """The values on the CPU: the memory they lie in where there is one, else a fresh or mapped tensor."""
        raise NotImplementedError

    def read(self, device: torch.device) -> torch.Tensor:
        """The values on ``device``; on the CPU this may be ``host()`` itself."""
        return self.host().to(device)

    def write(self, value: torch.Tensor) -> None:
        """Puts other values in their place.

        Raises:
            OffloadError: they are in a file, which is somebody's checkpoint.
        """
        raise OffloadError(
            f"{self.name} is offloaded to a file and cannot be changed in place",
            why="the file is a checkpoint, and other programs may be reading it",
            fix="bring the model to memory first: remove_hook_from_submodules(model)",
        )


class HostSource(Source):
    """A weight that lies in host memory, as a tensor of its own or as a view of a pinned block."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.tensor = name, tensor
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def host(self) -> torch.Tensor:
        """The very tensor."""
        return self.tensor

    def write(self, value: torch.Tensor) -> None:
        """Copies ``value`` into it."""
        if value is not self.tensor:
            self.tensor.copy_(value)


class MapSource(Source):
    """An entry of a mapping of tensors, the ``weights_map`` of a hook: read when it is asked for.

    Args:
        key: the name within the mapping.
        like: a tensor of the same shape and dtype; its values do not matter.
    """

    def __init__(self, name: str, weights: Mapping[str, torch.Tensor], key: str, like: torch.Tensor) -> None:
        self.name, self.weights, self.key = name, weights, key
        self.shape, self.dtype = like.shape, like.dtype

    def host(self) -> torch.Tensor:
        """What the mapping holds now."""
        value: Any = self.weights[self.key]
        return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)

    def write(self, value: torch.Tensor) -> None:
        """Copies ``value`` into the mapping's tensor, if that is memory and not a file.

        Raises:
            OffloadError: the mapping reads it from a file.
        """
        now = self.host()
        if self.host() is not now:  # made anew at each look
            super().write(value)
        now.copy_(value)
