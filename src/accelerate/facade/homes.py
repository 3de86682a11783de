"""Where the tensors of a device map go when a checkpoint is loaded.

On an accelerator a weight is read and copied, one at a time. On the CPU and on disk it is a view of its file,
and knows it: ``dispatch_model`` writes no such weight to disk again, and replaces it by a stand-in
where the model computes on an accelerator.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from accelerate.checkpoint.into import Here, Pair, Target, into, on_host
from accelerate.checkpoint.lazy import LazyTensor
from accelerate.checkpoint.mapped import Maps, Place
from accelerate.checkpoint.tensors import is_distributed
from accelerate.core.errors import SettingError, UnknownNameError
from accelerate.offload.dispatch import home_of
from accelerate.offload.folder import offload_weight, save_offload_index
from accelerate.offload.source import Source
from accelerate.offload.tensor import offloaded
from accelerate.offload.values import real

Device = int | str | torch.device
Disk = Literal["disk"]
DISK: Disk = "disk"
Placed: TypeAlias = "torch.device | Disk"

_HOST = torch.device("cpu")
_SHOWN = 8


class FileSource(Source):
    """A weight that lies in a file, which is mapped.

    Args:
        name: the weight's.
        view: the file's part, as a tensor.
        dtype: what it is read as.
    """

    def __init__(self, name: str, view: torch.Tensor, dtype: torch.dtype) -> None:
        self.name, self.view = name, view
        self.shape, self.dtype = view.shape, dtype

    def host(self) -> torch.Tensor:
        """The view of the file; a copy, if it has another dtype there."""
        return self.view.to(self.dtype)

    def read(self, device: torch.device) -> torch.Tensor:
        """The values on a device; they cross in the file's dtype if that is smaller."""
        if self.view.dtype.itemsize <= self.dtype.itemsize:
            return self.view.to(device).to(self.dtype)
        return self.host().to(device)


class Resting(Here):
    """A ``Home`` without a device map: tensors stay where they are, and views know their file."""

    def bring(self, target: Target, saved: LazyTensor, dtype: torch.dtype) -> torch.Tensor:
        """As ``Here`` does."""
        return _known(target, super().bring(target, saved, dtype), saved, dtype)


class Spread:
    """A ``Home`` by a device map.

    Args:
        model: the model.
        device_map: module name -> device.
        offload_folder: where weights go that are to be on disk and are in no file that can be mapped.
        offload_buffers: buffers of modules on disk stay there too.

    Attributes:
        execution: the device that modules on the CPU and on disk compute on: the map's first accelerator, or
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
        self.homes: dict[str, Placed] = {name: _placed(value) for name, value in device_map.items()}
        accelerators = [d for d in self.homes.values() if isinstance(d, torch.device) and d.type != "cpu"]
        self.execution = accelerators[0] if accelerators else _HOST
        self.folder = None if offload_folder is None else Path(offload_folder).expanduser()
        self.offload_buffers = offload_buffers
        self.maps = Maps()

    def check(self, pairs: Sequence[Pair]) -> None:
        """Refuses a map that leaves a weight out, and what cannot be on disk.

        Raises:
            SettingError: names the weights.
        """
        homeless = [pair.name for pair in pairs if self._home(pair.target) is None]
        if homeless:
            raise SettingError(
                f"device_map does not say where {_shown(homeless)} goes",
                fix="add the module, or '' for all others",
            )
        if self.folder is None:
            self._refuse_unmapped(pairs)

    def _refuse_unmapped(self, pairs: Sequence[Pair]) -> None:
        disk = [pair for pair in pairs if self._on_disk(pair.target)]
        whole = [p.name for p in disk if p.saved.place is None]
        cast = [p.name for p in disk if self.execution == _HOST and p.dtype != p.saved.dtype]
        for names, why in (
            (whole, "only safetensors and torch files can be mapped as they are"),
            (cast, "they have another dtype in the file, so their values must be written somewhere"),
        ):
            if names:
                raise SettingError(
                    f"{_shown(names)} cannot stay on disk in the files that are loaded, and there is no "
                    "folder to write to",
                    why=why,
                    fix="offload_folder='some/folder', or leave dtype as it is in the file",
                )

    def bring(self, target: Target, saved: LazyTensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor on its device, in its file, or copied to where it is."""
        here, home = target.tensor, self._home(target)
        assert home is not None
        if is_distributed(here):
            return into(here, saved, dtype, self.maps)
        if home == DISK:
            return self._on_disk_now(target, saved, dtype)
        if here.device == home and here.dtype == dtype:
            return into(here, saved, dtype, self.maps)
        if home == _HOST:
            return _known(target, on_host(saved, dtype, self.maps), saved, dtype)
        value = saved.read()
        if dtype.itemsize < value.dtype.itemsize:
            value = value.to(dtype)
        return value.to(home).to(dtype)

    def device(self, name: str, here: torch.device) -> torch.device:
        """Where a module lies that reads its weights itself; not on disk."""
        home = self._by_name(name)
        return home if isinstance(home, torch.device) else _HOST

    def _on_disk(self, target: Target) -> bool:
        return self._home(target) == DISK and (target.weight or self.offload_buffers)

    def _on_disk_now(self, target: Target, saved: LazyTensor, dtype: torch.dtype) -> torch.Tensor:
        if not self._on_disk(target):
            return on_host(saved, dtype, self.maps)
        if saved.place is None or (self.execution == _HOST and saved.dtype != dtype):
            saved = self._written(target.names[0], on_host(saved, dtype, self.maps))
        view = on_host(saved, saved.dtype, self.maps)
        if view.dtype == dtype:
            return _known(target, view, saved, dtype)
        return offloaded(target.tensor, FileSource(target.names[0], view, dtype), self.execution)

    def _written(self, name: str, value: torch.Tensor) -> LazyTensor:
        """The tensor in a file of the offload folder."""
        assert self.folder is not None
        index: dict[str, Any] = {}
        offload_weight(value, name, self.folder, index)
        save_offload_index(index, self.folder)
        place = Place(self.folder / f"{name}.dat", 0)
        return LazyTensor(value.shape, value.dtype, (), lambda: value, place)

    def _home(self, target: Target) -> Placed | None:
        """Of a tied one, the home where it is used soonest."""
        found: list[Placed] = [home for name in target.names if (home := self._by_name(name)) is not None]
        return min(found, key=_distance, default=None)

    def _by_name(self, name: str) -> Placed | None:
        while name not in self.homes:
            if not name:
                return None
            name = name.rpartition(".")[0]
        return self.homes[name]


def _known(target: Target, value: torch.Tensor, saved: LazyTensor, dtype: torch.dtype) -> torch.Tensor:
    """A view of a file that knows its source; any other tensor as it is."""
    if value is target.tensor or saved.place is None or saved.dtype != dtype:
        return value
    return real(target.tensor, value, FileSource(target.names[0], value, dtype))


def _distance(home: Placed) -> int:
    return 2 if home == DISK else int(home == _HOST)


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _refuse_unknown(model: nn.Module, device_map: Mapping[str, Device]) -> None:
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    for name in device_map:
        owner, _, attribute = name.rpartition(".")
        if name in known or (owner in known and hasattr(model.get_submodule(owner), attribute)):
            continue
        raise UnknownNameError("module in device_map:", name, known - {""})


def _placed(value: Device) -> Placed:
    home = home_of(value)
    return _HOST if home == "cpu" else home
