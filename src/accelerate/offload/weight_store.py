"""The values of a model's tensors during a dispatch: in the model, in a state dict, or in files."""

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
from accelerate.offload.module_tensors import as_parameter
from accelerate.offload.offload_folder import INDEX, Folder, OffloadedWeightsLoader, offload_state_dict
from accelerate.offload.offloaded_tensor import (
    HostMemoryWeightSource,
    MappingSource,
    OffloadedTensor,
    OffloadError,
    TensorSource,
)


class HostWeights(dict[str, torch.Tensor]):
    """Offloaded weights in host memory; assigning to an entry copies into its memory."""

    def __setitem__(self, name: str, value: torch.Tensor) -> None:
        """Set a new entry, or copy into the one that exists.

        Raises:
            OffloadError: the value has another shape or dtype than the entry.
        """
        entry = self.get(name)
        if entry is None:
            super().__setitem__(name, value)
        elif (entry.shape, entry.dtype) == (value.shape, value.dtype):
            with torch.no_grad():
                entry.copy_(value)
        else:
            raise OffloadError(
                f"{name} is offloaded as {entry.dtype} of shape {list(entry.shape)}, "
                f"and cannot become {value.dtype} of shape {list(value.shape)}",
                why="it has its place in memory that is copied to the device as one",
                fix="take the hooks off, change the weight, and dispatch the model again",
            )


class WeightStore:
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
        self.state_dict = state_dict or {}
        self.folder = folder
        self.index = index or {}
        self.in_memory: dict[str, torch.Tensor] = HostWeights()
        self.loader = self._open_loader()

    def _open_loader(self) -> OffloadedWeightsLoader:
        entries: dict[str, Any] = {}
        if self.folder is not None and Path(self.folder, INDEX).exists():
            entries.update(OffloadedWeightsLoader(save_folder=self.folder).index)
        entries.update(self.index)
        return OffloadedWeightsLoader(self.in_memory, self.folder, entries)

    def refresh_loader(self) -> OffloadedWeightsLoader:
        """Read the index again, and return the mapping of all offloaded values."""
        self.loader = self._open_loader()
        return self.loader

    def names_without_values(self, names: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names that have values nowhere."""
        mappings = (self.state_dict, self.loader.index)
        return [n for n, t in names.items() if t.is_meta and not any(n in mapping for mapping in mappings)]

    def find_source(self, name: str, tensor: torch.Tensor, disk: bool = False) -> TensorSource:
        """Return the source of a tensor's values.

        Args:
            disk: it is to be on disk: what the caller's index says of it comes first.
        """
        if disk and name in self.index:
            return MappingSource(name, self.loader, name, tensor)
        mapped = mapped_source(tensor)
        if disk and mapped is not None:
            return mapped
        if isinstance(tensor, OffloadedTensor):
            return tensor.source
        if not tensor.is_meta:
            return HostMemoryWeightSource(name, tensor.detach().to("cpu"))
        if name in self.state_dict:
            return HostMemoryWeightSource(
                name, torch.as_tensor(self.state_dict[name]).detach().to("cpu", tensor.dtype)
            )
        return MappingSource(name, self.loader, name, tensor)

    def names_to_write(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names whose values are in no file yet."""
        return [
            name for name, tensor in tensors.items() if self.find_source(name, tensor, disk=True).in_memory
        ]

    def write_to_folder(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write values to the offload folder, one tensor at a time.

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
        offload_state_dict(self.folder, {n: self.find_source(n, t).host_tensor() for n, t in tensors.items()})
        self.refresh_loader()

    def file_source(self, name: str, tensor: torch.Tensor) -> TensorSource:
        """Return the source of a tensor on disk, after ``write_to_folder``."""
        source = self.find_source(name, tensor, disk=True)
        return MappingSource(name, self.loader, name, tensor) if source.in_memory else source


def mapped_source(tensor: torch.Tensor) -> TensorSource | None:
    """Return the file source that a tensor is mapped from, if it was not changed since."""
    source, version = getattr(tensor, "_mapped_from", (None, None))
    return source if source is not None and tensor._version == version else None


def with_values(old: torch.Tensor, value: torch.Tensor, source: TensorSource | None = None) -> torch.Tensor:
    """Return a parameter or buffer like ``old`` with other values.

    Args:
        old: the tensor that it replaces.
        value: its values, which it shares.
        source: the file that they are mapped from.
    """
    tensor: Any = as_parameter(value, old) if isinstance(old, nn.Parameter) else value.detach()
    if source is not None and not source.in_memory:
        tensor._mapped_from = (source, tensor._version)
    return tensor
