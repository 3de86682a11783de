"""The values of a model's tensors while it is dispatched: in a state dict, in memory, in a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate.core.errors import OffloadError, PrepareError
from accelerate.offload.device_maps import join_names
from accelerate.offload.offload_folder import (
    INDEX,
    Folder,
    HostWeights,
    OffloadedWeightsLoader,
    _write_weight,
    keep_replaced_files,
    save_offload_index,
)
from accelerate.offload.offloaded_tensor import (
    HostMemoryWeightSource,
    MappingSource,
    OffloadedTensor,
    TensorSource,
    has_same_bytes,
    mapped_source,
    unchanged_source,
)


class WeightStore:
    """The values of a model's tensors, by their full names.

    Args:
        state_dict: values, which come before those that the model has.
        folder: an offload folder; read if it has an index, and written to.
        index: entries of values in files, which come first for what is to be on disk.

    Attributes:
        in_memory: name -> tensor, of what is offloaded to memory; filled while the model is dispatched.
        own_files: name -> source, of what stays in another file, as in a checkpoint; filled likewise.

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
        self.own_files: dict[str, TensorSource] = {}
        self.refresh_loader()

    def refresh_loader(self) -> OffloadedWeightsLoader:
        """Read the index of the folder, and return the mapping of all offloaded values."""
        entries: dict[str, Any] = {}
        if self.folder is not None and Path(self.folder, INDEX).exists():
            entries.update(OffloadedWeightsLoader(save_folder=self.folder).index)
        entries.update(self.index)
        entries = {name: entry for name, entry in entries.items() if name not in self.own_files}
        self.loader = OffloadedWeightsLoader(self.in_memory, self.folder, entries)
        self.loader.add_sources(self.own_files)
        self.loader.is_read_by_model = True
        return self.loader

    def check_complete(self, model: nn.Module) -> None:
        """Raise OffloadError for weights that have no values anywhere."""
        missing = [
            name
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if tensor.is_meta and name not in self.state_dict and name not in self.loader.index
        ]
        if missing:
            raise OffloadError(
                f"there are no values for {join_names(missing)}",
                why="they are on the meta device, and neither state_dict, offload_index nor offload_dir "
                "has them",
                fix="load the weights: load_checkpoint_and_dispatch(model, checkpoint, device_map=...)",
            )

    def find_source(self, name: str, tensor: torch.Tensor, disk: bool = False) -> TensorSource:
        """Return the source of a tensor's values.

        Args:
            disk: what the caller's index says of it comes first.
        """
        if disk and name in self.index:
            return MappingSource(name, self.loader, name, tensor)
        if name in self.state_dict:
            return HostMemoryWeightSource(
                name, torch.as_tensor(self.state_dict[name], device="cpu").detach().to(tensor.dtype)
            )
        if isinstance(tensor, OffloadedTensor):
            return tensor.source
        if not tensor.is_meta:
            return HostMemoryWeightSource(name, tensor.detach().to("cpu"))
        return MappingSource(name, self.loader, name, tensor)

    def check_shape(self, name: str, tensor: torch.Tensor) -> None:
        """Check the shape of the values that the state dict has for a tensor.

        Raises:
            OffloadError: it is not that of the tensor.
        """
        if name not in self.state_dict or hasattr(tensor, "quant_state"):
            return
        shape = torch.as_tensor(self.state_dict[name]).shape
        if shape != tensor.shape:
            raise OffloadError(
                f"the values of {name} in the state_dict have the shape {list(shape)}, "
                f"and the module expects {list(tensor.shape)}",
                why="they belong to another model, or to another size of it",
            )

    def file_sources(
        self, tensors: Mapping[str, torch.Tensor], in_place: bool = False
    ) -> dict[str, TensorSource]:
        """Return the sources of tensors that are to be on disk; values that are in no file are written.

        Args:
            tensors: name -> tensor.
            in_place: those that are mapped from a file stay in use; otherwise they are dropped for it.

        Raises:
            PrepareError: there is no folder to write to.
            OffloadError: it cannot be written.
        """
        unwritten: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if name in self.index:
                continue
            if name in self.state_dict:
                source = None
            elif isinstance(tensor, OffloadedTensor):
                source = None if tensor.source.in_memory else tensor.source
            else:
                source = mapped_source(tensor) if in_place else unchanged_source(tensor)
            if source is not None:
                self.own_files[name] = source
            elif (name in self.state_dict or not tensor.is_meta) and not self._is_written(name, tensor):
                unwritten[name] = tensor
        self._write_to_folder(unwritten)
        return {
            name: self.own_files.get(name) or MappingSource(name, self.loader, name, tensor)
            for name, tensor in tensors.items()
        }

    def _is_written(self, name: str, tensor: torch.Tensor) -> bool:
        """Return True when the folder has the values of a tensor already, also in a file of safetensors."""
        if name not in self.loader.index:
            return False
        try:
            written = self.loader[name]
        except OffloadError:  # damaged
            return False
        value = self.find_source(name, tensor).host_tensor().detach()
        is_alike = (value.dtype, value.shape) == (written.dtype, written.shape)
        return is_alike and has_same_bytes(value, written)

    def _write_to_folder(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write values to the offload folder, one tensor at a time.

        Raises:
            PrepareError: there is no folder.
            OffloadError: it cannot be written.
        """
        if not tensors:
            return
        if self.folder is None:
            raise PrepareError(
                f"an offload folder is needed for {join_names([*tensors])}",
                why="the device map puts them on disk, and their values are in no file yet",
                fix="give offload_dir='some/folder' (offload_folder in load_checkpoint_and_dispatch)",
            )
        try:
            os.makedirs(self.folder, exist_ok=True)
        except (OSError, ValueError) as error:  # a ValueError: a NUL character
            raise OffloadError(
                f"{os.fspath(self.folder)} cannot be used as an offload folder",
                why=f"{type(error).__name__}: {getattr(error, 'strerror', error)}",
                fix="give another offload_dir",
            ) from error

        def read(name: str) -> torch.Tensor:
            return self.find_source(name, tensors[name]).host_tensor()

        keep_replaced_files(self.folder, tensors, read, own=self.loader)
        index: dict[str, Any] = {}
        for name in tensors:
            _write_weight(read(name), name, self.folder, index)
        save_offload_index(index, self.folder)
        self.refresh_loader()
