"""The placement of tensors while a checkpoint is loaded: in place, or by a device map.

On an accelerator a weight is read and copied, one at a time. On the CPU and on disk it is a view of its file,
which it refers to: ``dispatch_model`` does not write it to disk again, and replaces it by an offloaded
tensor where the model computes on an accelerator.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from accelerate.checkpoint.file_reads import FileRegion, LazyTensor, MappedFiles
from accelerate.checkpoint.state_dict_files import is_distributed
from accelerate.checkpoint.weight_loading import (
    CurrentDeviceWeightPlacer,
    ModelTensor,
    TensorMatch,
    copy_into,
    host_tensor,
)
from accelerate.core.errors import SettingError, UnknownNameError
from accelerate.offload.dispatch import resolve_home
from accelerate.offload.module_tensors import with_values
from accelerate.offload.offload_folder import offload_weight, save_offload_index
from accelerate.offload.offloaded_tensor import TensorSource, make_stand_in

Device = int | str | torch.device
Disk = Literal["disk"]
DISK: Disk = "disk"
PlacementDevice: TypeAlias = "torch.device | Disk"

_HOST = torch.device("cpu")
_SHOWN = 8


class MmapWeightSource(TensorSource):
    """The source of a weight in a memory-mapped file.

    Args:
        name: the weight's.
        view: the file's part, as a tensor.
        dtype: what it is read as.
    """

    def __init__(self, name: str, view: torch.Tensor, dtype: torch.dtype) -> None:
        self.name, self.view = name, view
        self.shape, self.dtype = view.shape, dtype

    def host_tensor(self) -> torch.Tensor:
        """Return the view of the file; a copy, if it has another dtype there."""
        return self.view.to(self.dtype)

    def read(self, device: torch.device) -> torch.Tensor:
        """Return the values on a device; copied in the file's dtype if that is smaller."""
        if self.view.dtype.itemsize <= self.dtype.itemsize:
            return self.view.to(device).to(self.dtype)
        return self.host_tensor().to(device)


class CurrentDevicePlacement(CurrentDeviceWeightPlacer):
    """A ``Home`` without a device map: tensors stay where they are, and views know their file."""

    def place_tensor(self, target: ModelTensor, saved: LazyTensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the present tensor with the values of the file, or a view of the file."""
        return _with_file_source(target, super().place_tensor(target, saved, dtype), saved, dtype)


class DeviceMapPlacement:
    """A ``Home`` by a device map.

    Args:
        model: the model.
        device_map: module name -> device.
        offload_folder: the folder for weights on disk that are in no file that can be mapped.
        offload_buffers: buffers of modules on disk stay there too.

    Attributes:
        execution_device: the device where offloaded modules compute: the map's first accelerator, or
            the CPU.

    Raises:
        UnknownNameError: the model has no such module.
        DeviceError: there is no such device.
    """

    def __init__(
        self,
        model: nn.Module,
        device_map: Mapping[str, Device],
        offload_folder: str | os.PathLike[str] | None = None,
        offload_buffers: bool = False,
    ) -> None:
        _refuse_unknown(model, device_map)
        self.devices: dict[str, PlacementDevice] = {
            name: _normalize_device(value) for name, value in device_map.items()
        }
        accelerators = [d for d in self.devices.values() if isinstance(d, torch.device) and d.type != "cpu"]
        self.execution_device = accelerators[0] if accelerators else _HOST
        self.folder = None if offload_folder is None else Path(offload_folder).expanduser()
        self.offload_buffers = offload_buffers
        self.maps = MappedFiles()

    def check(self, pairs: Sequence[TensorMatch]) -> None:
        """Refuse a map that leaves a weight out, and what cannot be on disk.

        Raises:
            SettingError: names the weights.
        """
        homeless = [pair.name for pair in pairs if self._target_device(pair.target) is None]
        if homeless:
            raise SettingError(
                f"device_map does not say where {_format_names(homeless)} goes",
                fix="add the module, or '' for all others",
            )
        if self.folder is None:
            self._refuse_unmapped(pairs)

    def _refuse_unmapped(self, pairs: Sequence[TensorMatch]) -> None:
        disk = [pair for pair in pairs if self._is_on_disk(pair.target)]
        whole = [p.name for p in disk if p.saved.region is None]
        cast = [p.name for p in disk if self.execution_device == _HOST and p.dtype != p.saved.dtype]
        for names, reason in (
            (whole, "only safetensors and torch files can be mapped as they are"),
            (cast, "they have another dtype in the file, so their values must be written somewhere"),
        ):
            if names:
                raise SettingError(
                    f"{_format_names(names)} cannot stay on disk in the loaded files, and there is no "
                    "folder to write to",
                    why=reason,
                    fix="offload_folder='some/folder', or leave dtype as it is in the file",
                )

    def place_tensor(self, target: ModelTensor, saved: LazyTensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor on its device, mapped to its file, or copied into the present one."""
        tensor, home = target.tensor, self._target_device(target)
        assert home is not None
        if is_distributed(tensor):
            return copy_into(tensor, saved, dtype, self.maps)
        if home == DISK:
            return self._place_on_disk(target, saved, dtype)
        if tensor.device == home and tensor.dtype == dtype:
            return copy_into(tensor, saved, dtype, self.maps)
        if home == _HOST:
            return _with_file_source(target, host_tensor(saved, dtype, self.maps), saved, dtype)
        value = saved.read()
        if dtype.itemsize < value.dtype.itemsize:
            value = value.to(dtype)
        return value.to(home).to(dtype)

    def device(self, name: str, current: torch.device) -> torch.device:
        """Return the device of a module that reads its weights itself; the CPU for disk."""
        home = self._find_device(name)
        return home if isinstance(home, torch.device) else _HOST

    def _is_on_disk(self, target: ModelTensor) -> bool:
        return self._target_device(target) == DISK and (target.is_parameter or self.offload_buffers)

    def _place_on_disk(self, target: ModelTensor, saved: LazyTensor, dtype: torch.dtype) -> torch.Tensor:
        if not self._is_on_disk(target):
            return host_tensor(saved, dtype, self.maps)
        if saved.region is None or (self.execution_device == _HOST and saved.dtype != dtype):
            saved = self._write_to_folder(target.names[0], host_tensor(saved, dtype, self.maps))
        view = host_tensor(saved, saved.dtype, self.maps)
        if view.dtype == dtype:
            return _with_file_source(target, view, saved, dtype)
        return make_stand_in(
            target.tensor, MmapWeightSource(target.names[0], view, dtype), self.execution_device
        )

    def _write_to_folder(self, name: str, value: torch.Tensor) -> LazyTensor:
        """Write the tensor to a file of the offload folder; return it as a lazy tensor."""
        assert self.folder is not None
        index: dict[str, Any] = {}
        offload_weight(value, name, self.folder, index)
        save_offload_index(index, self.folder)
        place = FileRegion(self.folder / f"{name}.dat", 0)
        return LazyTensor(value.shape, value.dtype, (), lambda: value, place)

    def _target_device(self, target: ModelTensor) -> PlacementDevice | None:
        """Return the device of a target; of a tied one, the fastest of its devices."""
        devices: list[PlacementDevice] = [
            home for name in target.names if (home := self._find_device(name)) is not None
        ]
        return min(devices, key=_device_tier, default=None)

    def _find_device(self, name: str) -> PlacementDevice | None:
        while name not in self.devices:
            if not name:
                return None
            name = name.rpartition(".")[0]
        return self.devices[name]


def _with_file_source(
    target: ModelTensor, value: torch.Tensor, saved: LazyTensor, dtype: torch.dtype
) -> torch.Tensor:
    """Attach the file source to a view of a file; return any other tensor as it is."""
    if value is target.tensor or saved.region is None or saved.dtype != dtype:
        return value
    return with_values(target.tensor, value, MmapWeightSource(target.names[0], value, dtype))


def _device_tier(home: PlacementDevice) -> int:
    return 2 if home == DISK else int(home == _HOST)


def _format_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _refuse_unknown(model: nn.Module, device_map: Mapping[str, Device]) -> None:
    module_names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    for name in device_map:
        owner, _, attribute = name.rpartition(".")
        if name in module_names or (owner in module_names and hasattr(model.get_submodule(owner), attribute)):
            continue
        raise UnknownNameError("module in device_map:", name, module_names - {""})


def _normalize_device(value: Device) -> PlacementDevice:
    home = resolve_home(value)
    return _HOST if home == "cpu" else home
