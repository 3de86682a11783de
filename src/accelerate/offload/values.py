"""Where the values of a model's tensors are when it is dispatched: here, in a state dict, or in files."""

# torch's signatures are partly untyped: what is unknown here is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.offload.assign import as_parameter
from accelerate.offload.folder import INDEX, Folder, OffloadedWeightsLoader, offload_state_dict
from accelerate.offload.source import HostSource, MapSource, OffloadError, Source
from accelerate.offload.tensor import OffloadedTensor


class Held(dict[str, torch.Tensor]):
    """Weights that a device is fed from: another value for one is copied into its memory."""

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        """Sets a new entry, or the values of one that is there.

        Raises:
            OffloadError: the value has another shape or dtype than the entry.
        """
        held = self.get(name)
        if held is None:
            super().__setitem__(name, value)
        elif (held.shape, held.dtype) == (value.shape, value.dtype):
            with torch.no_grad():
                held.copy_(value)
        else:
            raise OffloadError(
                f"{name} is offloaded as {held.dtype} of shape {list(held.shape)}, "
                f"and cannot become {value.dtype} of shape {list(value.shape)}",
                why="it has its place in memory that is copied to the device as one",
                fix="take the hooks off, change the weight, and dispatch the model again",
            )


class Values:
    """The values of a model's tensors, by their full names.

    Args:
        state_dict: values of tensors on the meta device.
        folder: an offload folder; read if it has an index, and written to.
        index: entries of values in files, which come first for what is to be on disk.

    Attributes:
        in_memory: name -> tensor, of what is offloaded to memory; filled while the model is dispatched.

    Raises:
        OffloadError: a file that an index names does not exist.
    """

    def __init__(
        self, state_dict: Mapping[str, Any] | None, folder: Folder | None, index: Mapping[str, Any] | None
    ) -> None:
        self.given = state_dict or {}
        self.folder = folder
        self.explicit = index or {}
        self.in_memory: dict[str, torch.Tensor] = Held()
        self.loader = self._open()

    def _open(self) -> OffloadedWeightsLoader:
        entries: dict[str, Any] = {}
        if self.folder is not None and Path(self.folder, INDEX).exists():
            entries.update(OffloadedWeightsLoader(save_folder=self.folder).index)
        entries.update(self.explicit)
        return OffloadedWeightsLoader(self.in_memory, self.folder, entries)

    def refreshed(self) -> OffloadedWeightsLoader:
        """The mapping of all offloaded values, as the hooks show it."""
        self.loader = self._open()
        return self.loader

    def missing(self, names: Mapping[str, torch.Tensor]) -> list[str]:
        """Those without values anywhere."""
        known = (self.given, self.loader.index)
        return [n for n, t in names.items() if t.is_meta and not any(n in place for place in known)]

    def source(self, name: str, tensor: torch.Tensor, disk: bool = False) -> Source:
        """Where the values of a tensor are.

        Args:
            disk: it is to be on disk: what the caller's index says of it comes first.
        """
        if disk and name in self.explicit:
            return MapSource(name, self.loader, name, tensor)
        mapped = mapped_from(tensor)
        if disk and mapped is not None:
            return mapped
        if isinstance(tensor, OffloadedTensor):
            return tensor.source
        if not tensor.is_meta:
            return HostSource(name, tensor.detach().to("cpu"))
        if name in self.given:
            return HostSource(name, torch.as_tensor(self.given[name]).detach().to("cpu", tensor.dtype))
        return MapSource(name, self.loader, name, tensor)

    def to_write(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Those for the disk whose values are in no file yet."""
        return [name for name, tensor in tensors.items() if self.source(name, tensor, disk=True).in_memory]

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes values to the offload folder, one tensor at a time.

        Raises:
            PrepareError: there is no folder.
            OffloadError: it cannot be written.
        """
        if not tensors:
            return
        if self.folder is None:
            shown = ", ".join([*tensors][:5]) + (" ..." if len(tensors) > 5 else "")
            raise PrepareError(
                f"an offload folder is needed for {shown}",
                why="the device map puts them on disk, and their values are in no file yet",
                fix="give offload_dir='some/folder' (offload_folder in load_checkpoint_and_dispatch)",
            )
        try:
            os.makedirs(self.folder, exist_ok=True)
        except OSError as error:
            raise OffloadError(
                f"{os.fspath(self.folder)} cannot be used as an offload folder",
                why=f"{type(error).__name__}: {error.strerror}",
                fix="give another offload_dir",
            ) from error
        offload_state_dict(self.folder, {n: self.source(n, t).host() for n, t in tensors.items()})
        self.refreshed()

    def in_files(self, name: str, tensor: torch.Tensor) -> Source:
        """The source of a tensor on disk, after ``write``."""
        source = self.source(name, tensor, disk=True)
        return MapSource(name, self.loader, name, tensor) if source.in_memory else source


def mapped_from(tensor: torch.Tensor) -> Source | None:
    """The file that a tensor is mapped from, if it was not changed since."""
    source, version = getattr(tensor, "_mapped_from", (None, None))
    return source if source is not None and tensor._version == version else None


def real(old: torch.Tensor, value: torch.Tensor, source: Source | None = None) -> torch.Tensor:
    """A parameter or buffer with other values.

    Args:
        old: what it takes the place of.
        value: its values, which it shares.
        source: the file that they are mapped from.
    """
    made: Any = as_parameter(value, old) if isinstance(old, nn.Parameter) else value.detach()
    if source is not None and not source.in_memory:
        made._mapped_from = (source, made._version)
    return made
