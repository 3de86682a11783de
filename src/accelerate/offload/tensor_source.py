"""The sources of offloaded weights: host memory, a view of another source, or an entry of a mapping.

A source is asked for a tensor on the host or on a device, as often as somebody needs it. It keeps nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accelerate.core.errors import AccelerateError


class OffloadError(AccelerateError, RuntimeError):
    """A weight that is offloaded cannot be read or changed as asked."""


class TensorSource:
    """The storage of one weight's values: memory or a file.

    Attributes:
        name: the weight's full name in its model, for errors.
        shape, dtype: of the whole tensor.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def in_memory(self) -> bool:
        """True when the values are in memory, and so can be changed."""
        return type(self).write is not TensorSource.write

    def host_tensor(self) -> torch.Tensor:
        """Return the values on the CPU: their own memory where there is one, else a new or mapped tensor."""
        raise NotImplementedError

    def read(self, device: torch.device) -> torch.Tensor:
        """Return the values on ``device``; on the CPU this may be ``host_tensor()`` itself."""
        return self.host_tensor().to(device)

    def write(self, value: torch.Tensor) -> None:
        """Replace the values.

        Raises:
            OffloadError: they are in a file, which is somebody's checkpoint.
        """
        raise OffloadError(
            f"{self.name} is offloaded to a file and cannot be changed in place",
            why="the file is a checkpoint, and other programs may be reading it",
            fix="bring the model to memory first: remove_hook_from_submodules(model)",
        )


class HostMemoryWeightSource(TensorSource):
    """A weight that lies in host memory, as a tensor of its own or as a view of a pinned block."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.tensor = name, tensor
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def host_tensor(self) -> torch.Tensor:
        """Return the tensor itself."""
        return self.tensor

    def write(self, value: torch.Tensor) -> None:
        """Copy ``value`` into the tensor."""
        if value is not self.tensor:
            with torch.no_grad():
                self.tensor.copy_(value)


class TensorViewSource(HostMemoryWeightSource):
    """A view of another source's values: what is written to it is written there.

    Args:
        whole: the other source.
        view: a view of ``whole.host_tensor()``.
    """

    def __init__(self, whole: TensorSource, view: torch.Tensor) -> None:
        super().__init__(whole.name, view)
        self.whole = whole

    @property
    def in_memory(self) -> bool:
        """True when the whole is in memory."""
        return self.whole.in_memory

    def write(self, value: torch.Tensor) -> None:
        """Copy ``value`` into the view.

        Raises:
            OffloadError: the whole is in a file.
        """
        if not self.in_memory:
            self.whole.write(value)
        super().write(value)


class MappingSource(TensorSource):
    """An entry of a mapping of tensors, the ``weights_map`` of a hook: read when it is asked for.

    Args:
        key: the name within the mapping.
        like: a tensor of the same shape and of the dtype that is wanted; its values do not matter.
    """

    def __init__(self, name: str, weights: Mapping[str, torch.Tensor], key: str, like: torch.Tensor) -> None:
        self.name, self.weights, self.key = name, weights, key
        self.shape, self.dtype = like.shape, like.dtype

    @property
    def in_memory(self) -> bool:
        """True when the mapping says that the entry is in memory, or returns the same tensor twice."""
        ask = getattr(self.weights, "in_memory", None)
        return bool(ask(self.key)) if ask is not None else self.weights[self.key] is self.weights[self.key]

    def host_tensor(self) -> torch.Tensor:
        """Return the mapping's current value, in the dtype that is wanted.

        Raises:
            OffloadError: it has no such entry, or one of another shape.
        """
        value = self._read_entry()
        if value.shape != self.shape:
            raise OffloadError(
                f"the offloaded values of {self.name} have the shape {list(value.shape)}, "
                f"and the module expects {list(self.shape)}",
                why="they belong to another version of the model",
            )
        same = value.dtype == self.dtype or not value.is_floating_point()
        return value if same else value.to(self.dtype)

    def write(self, value: torch.Tensor) -> None:
        """Copy ``value`` into the mapping's tensor, if that is memory and not a file.

        Raises:
            OffloadError: the mapping reads it from a file.
        """
        if not self.in_memory:
            super().write(value)
        with torch.no_grad():
            self._read_entry().copy_(value)

    def _read_entry(self) -> torch.Tensor:
        try:
            value: Any = self.weights[self.key]
        except KeyError as error:
            raise OffloadError(
                f"the values of {self.name} are not there",
                why=f"the mapping of offloaded weights has no entry {self.key!r}",
                fix="dispatch the model again",
            ) from error
        return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
