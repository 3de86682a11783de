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

    @property
    def in_memory(self) -> bool:
        """Whether the values lie in memory, and so can be changed."""
        return type(self).write is not Source.write

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
            with torch.no_grad():
                self.tensor.copy_(value)


class ViewSource(HostSource):
    """A view of another source's values: what is written to it is written there.

    Args:
        whole: the other source.
        view: a view of ``whole.host()``.
    """

    def __init__(self, whole: Source, view: torch.Tensor) -> None:
        super().__init__(whole.name, view)
        self.whole = whole

    @property
    def in_memory(self) -> bool:
        """As the whole."""
        return self.whole.in_memory

    def write(self, value: torch.Tensor) -> None:
        """Copies ``value`` into the view.

        Raises:
            OffloadError: the whole is in a file.
        """
        if not self.in_memory:
            self.whole.write(value)
        super().write(value)


class MapSource(Source):
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
        """What the mapping says of the entry; any other mapping is asked twice for it."""
        ask = getattr(self.weights, "in_memory", None)
        return bool(ask(self.key)) if ask is not None else self.weights[self.key] is self.weights[self.key]

    def host(self) -> torch.Tensor:
        """What the mapping holds now, in the dtype that is wanted.

        Raises:
            OffloadError: it has no such entry, or one of another shape.
        """
        value = self._entry()
        if value.shape != self.shape:
            raise OffloadError(
                f"the offloaded values of {self.name} have the shape {list(value.shape)}, "
                f"and the module expects {list(self.shape)}",
                why="they belong to another version of the model",
            )
        same = value.dtype == self.dtype or not value.is_floating_point()
        return value if same else value.to(self.dtype)

    def write(self, value: torch.Tensor) -> None:
        """Copies ``value`` into the mapping's tensor, if that is memory and not a file.

        Raises:
            OffloadError: the mapping reads it from a file.
        """
        if not self.in_memory:
            super().write(value)
        with torch.no_grad():
            self._entry().copy_(value)

    def _entry(self) -> torch.Tensor:
        try:
            value: Any = self.weights[self.key]
        except KeyError as error:
            raise OffloadError(
                f"the values of {self.name} are not there",
                why=f"the mapping of offloaded weights has no entry {self.key!r}",
                fix="dispatch the model again",
            ) from error
        return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
