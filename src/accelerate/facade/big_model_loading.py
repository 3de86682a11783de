"""Load checkpoints into models larger than memory, distributed over devices, CPU memory and disk.

A placement says where a tensor goes: it stays in place, or goes by a device map. On an accelerator a weight
is read and copied, one at a time. On the CPU and on disk it is a view of its file, which it refers to:
``dispatch_model`` does not write it to disk again, and replaces it by an offloaded tensor where the model
computes on an accelerator.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import nn

from accelerate.checkpoint.file_reads import DeviceUploads, FileRegion
from accelerate.checkpoint.lazy_weights import open_weights, weights_from_rank0
from accelerate.checkpoint.model_tensors import LazyTensor, SavedTensors
from accelerate.checkpoint.state_dict_files import as_dtype, is_distributed
from accelerate.checkpoint.weight_loading import (
    MappedFiles,
    MismatchedKeys,
    ModelTensor,
    TensorMatch,
    WeightPlacer,
    copy_into,
    host_tensor,
    load_weights,
    upload,
)
from accelerate.core.errors import (
    CheckpointError,
    PrepareError,
    SettingError,
    UnknownNameError,
    warn_user,
)
from accelerate.offload.device_maps import (
    describe_unmatched_names,
    device_of,
    get_balanced_memory,
    infer_auto_device_map,
    join_names,
)
from accelerate.offload.dispatch import dispatch_model, resolve_home
from accelerate.offload.module_sizes import Dtype
from accelerate.offload.module_tensors import with_values
from accelerate.offload.offload_folder import offload_weight, save_offload_index
from accelerate.offload.offloaded_tensor import TensorSource, make_stand_in
from accelerate.offload.quantization.base import Quantizer
from accelerate.offload.quantization.bitsandbytes import find_8bit_layers

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Device = int | str | torch.device
Disk = Literal["disk"]
DISK: Disk = "disk"
PlacementDevice: TypeAlias = "torch.device | Disk"

_HOST = torch.device("cpu")
# What a linear layer has in full precision too.
_LAYER_TENSORS = ("weight", "bias")
_AUTOMATIC_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".json", ".pt", ".pth")


@torch.inference_mode(False)  # weights that are made in it could not be trained later
@torch.no_grad()
def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: dict[str, Device] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    allow_missing: bool = False,
) -> MismatchedKeys:
    """Load weights into a model; what has none yet (on the meta device) gets them on its device.

    On the CPU a weight without memory becomes a view of its file, if it has the right dtype there: nothing is
    read before it is used, and what is written to it never reaches the file.

    Args:
        model: the model.
        checkpoint: a file of weights, the index of its shards, a folder that holds them, or the id of a model
            on the hub: safetensors, torch files, a checkpoint of ``save_state``, a sharded model.
        device_map: module name -> device, ``"cpu"`` or ``"disk"``; the longest name that fits counts, and
            ``{"": 0}`` puts all on one. Names that the model does not have are told in a warning. None leaves
            everything in place, and puts tensors on the meta device on the CPU.
        offload_folder: where weights of modules on disk are written that lie in no file that can be mapped.
            Safetensors and torch files are used as they are, and nothing is written.
        dtype: what floating point weights become; None keeps the model's.
        offload_state_dict: has nothing to do: one tensor is in memory besides the model.
        offload_buffers: buffers of modules on disk stay there too.
        keep_in_fp32_modules: names of modules, at any depth, whose floating point weights become float32.
        offload_8bit_bnb: quantize the weights of 8-bit layers (``replace_with_bnb_layers``) while
            they are read; on disk they are in 8 bits too.
        strict: names that only the model or only the files have are an error, not a warning.
        full_state_dict: files hold full tensors; False: they hold this rank's local shards of tensors
            that are sharded.
        broadcast_from_rank0: rank 0 reads, the others receive, and keep their shards.
        allow_missing: accept files that hold nothing of the model, too. What no file holds stays as it is in
            any case, with a warning that lists it.

    Returns:
        Names that did not meet.

    Raises:
        WeightsMismatchError: no name meets, or shapes or kinds differ; the model is unchanged.
        CheckpointError: a file is missing, damaged, would run code, or leads out of its folder.
        SettingError: the map leaves a weight out.
        DeviceError: the map names a device that is not here.
    """
    path, weights = find_weights(checkpoint, broadcast_from_rank0)
    home: WeightPlacer = CurrentDevicePlacement()
    if offload_8bit_bnb:
        quantizer, layers = find_8bit_layers(model)
        home = QuantizedPlacement(model, device_map or {"": "cpu"}, offload_folder, quantizer, layers)
        weights = home.take_saved_states(weights)
    elif device_map is not None:
        home = DeviceMapPlacement(model, device_map, offload_folder, offload_buffers)
    return load_placed_weights(
        model, weights, path, home, dtype=dtype, keep_in_fp32=keep_in_fp32_modules or (), strict=strict,
        allow_missing=allow_missing, local_shards=not full_state_dict,
    )  # fmt: skip


def load_placed_weights(
    model: nn.Module, weights: SavedTensors, path: Path, placer: WeightPlacer, **options: Any
) -> MismatchedKeys:
    """Load weights; in the end, also after an error, write the index of those in the offload folder.

    Args:
        model, weights, path, placer, options: the arguments of ``load_weights``.
    """
    try:
        differences = load_weights(model, weights, path, placer, **options)
        if isinstance(placer, QuantizedPlacement):
            placer.quantize_present_weights(differences.missing)
        return differences
    finally:
        if isinstance(placer, DeviceMapPlacement) and placer.folder is not None:
            save_offload_index(placer.index, placer.folder)


@torch.inference_mode(False)  # weights that are made in it could not be trained later
@torch.no_grad()
def load_checkpoint_and_dispatch(
    model: ModuleT,
    checkpoint: str | os.PathLike[str],
    device_map: str | dict[str, int | str | torch.device] | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    allow_missing: bool = False,
) -> ModuleT:
    """Load a checkpoint into a model, and dispatch it to the devices of its weights.

    Args:
        model: the model, usually made under ``init_empty_weights``.
        checkpoint: see ``load_checkpoint_in_model``.
        device_map: see there; or ``"auto"`` (the same as ``"balanced"``), ``"balanced_low_0"``,
            ``"sequential"``, which make one from the memory that there is.
        max_memory: device -> bytes or text such as ``"10GB"``, for a map that is made.
        no_split_module_classes: classes of modules that stay on one device, likewise.
        offload_folder: see ``load_checkpoint_in_model``.
        offload_buffers: buffers of offloaded modules are offloaded too.
        dtype: what floating point weights become.
        offload_state_dict: has nothing to do.
        skip_keys: arguments that are not moved between devices.
        preload_module_classes: classes of modules whose weights are all loaded when their forward begins.
        force_hooks: hooks also where everything is on one device.
        strict: see ``load_checkpoint_in_model``.
        full_state_dict: likewise.
        broadcast_from_rank0: likewise.
        allow_missing: likewise; with a device map also accept weights that are still on the meta device.

    Raises:
        PrepareError: the model has been dispatched already.
        WeightsMismatchError: a weight would stay on the meta device; and see ``load_checkpoint_in_model``.
        CheckpointError: see there.
    """
    refuse_dispatched(model)
    dtype = as_dtype(dtype)
    if isinstance(device_map, str):
        device_map = make_device_map(
            model, device_map, max_memory, no_split_module_classes, dtype=dtype, buffers=offload_buffers
        )
    path, weights = find_weights(checkpoint, broadcast_from_rank0)
    placer: WeightPlacer = CurrentDevicePlacement()
    if device_map is not None:
        placer = DeviceMapPlacement(model, device_map, offload_folder, offload_buffers)
    load_placed_weights(
        model, weights, path, placer, dtype=dtype, strict=strict, allow_missing=allow_missing,
        before_dispatch=device_map is not None, local_shards=not full_state_dict,
    )  # fmt: skip
    if device_map is None:
        return model
    return dispatch_model(
        model, device_map, offload_dir=offload_folder, offload_buffers=offload_buffers, skip_keys=skip_keys,
        preload_module_classes=preload_module_classes, force_hooks=force_hooks,
    )  # fmt: skip


def make_device_map(
    model: nn.Module,
    strategy: str,
    max_memory: Any,
    no_split: list[str] | None,
    *,
    dtype: str | torch.dtype | None,
    buffers: bool,
    special: Mapping[str, Dtype] | None = None,
) -> dict[str, Device]:
    """Return the device map of an automatic strategy.

    Args:
        model, strategy, max_memory, no_split, dtype: see ``load_checkpoint_and_dispatch``.
        buffers: buffers of offloaded modules are offloaded too.
        special: name of a weight -> its own format.

    Raises:
        UnknownNameError: there is no such strategy.
    """
    if strategy not in _AUTOMATIC_MAPS:
        raise UnknownNameError("device_map", strategy, _AUTOMATIC_MAPS)
    sizes = {"dtype": dtype, "special_dtypes": special}
    if strategy != "sequential":
        max_memory = get_balanced_memory(
            model, max_memory, no_split, low_zero=strategy == "balanced_low_0", **sizes
        )
    return dict(infer_auto_device_map(model, max_memory, no_split, offload_buffers=buffers, **sizes))


def find_weights(checkpoint: str | os.PathLike[str], broadcast_from_rank0: bool) -> tuple[Path, SavedTensors]:
    """Return (checkpoint path, its tensors, lazy); file headers are read and checked, no tensor is."""
    if broadcast_from_rank0:
        return weights_from_rank0(lambda: _resolve_checkpoint(checkpoint), Path(checkpoint))
    path = _resolve_checkpoint(checkpoint)
    return path, open_weights(path).by_all_names()


def _resolve_checkpoint(checkpoint: str | os.PathLike[str]) -> Path:
    """Return a local path; download the model if ``checkpoint`` is an id on the Hugging Face hub."""
    path = Path(checkpoint).expanduser()
    text = os.fspath(checkpoint)
    if (
        path.exists()
        or not _HUB_ID.fullmatch(text)
        or path.suffix in _WEIGHT_SUFFIXES
        or path.parent.exists()
    ):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(text, allow_patterns=["*.safetensors", "*.safetensors.index.json"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(text, allow_patterns=["*.bin", "*.bin.index.json"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{text} is no file or folder here, and no model that the hub gives",
            why=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
            fix="look for a typing error, or fetch it first and name the folder",
        ) from error
    return folder


def refuse_dispatched(model: nn.Module) -> None:
    """Raise PrepareError for a model that has been dispatched."""
    hooked = next((name for name, module in model.named_modules() if hasattr(module, "_hf_hook")), None)
    if hooked is not None:
        raise PrepareError(
            f"the model has been dispatched already ({hooked or 'it'} has a hook)",
            fix="first remove_hook_from_submodules(model)",
        )


# ------------------------------------------------------------------------------------------------ placements


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


class CurrentDevicePlacement:
    """A ``WeightPlacer`` without a device map: tensors stay on their devices, and views know their file."""

    loads_by_hooks = True

    def __init__(self) -> None:
        self.maps, self.uploads = MappedFiles(), DeviceUploads()

    def check(self, pairs: Sequence[TensorMatch]) -> None:
        """Accept everything."""

    def place_tensor(self, target: ModelTensor, saved: LazyTensor, dtype: torch.dtype) -> torch.Tensor:
        """Copy into memory that there is; return a view of the file for a tensor on the meta device."""
        current = target.tensor
        if current.device.type != "meta" or is_distributed(current):
            value = copy_into(current, saved, dtype, self.maps, self.uploads)
        else:
            value = host_tensor(saved, dtype, self.maps)
        return _with_file_source(target, value, saved, dtype)

    def device(self, name: str, current: torch.device) -> torch.device:
        """Return the current device; the CPU for the meta device."""
        return _HOST if current.type == "meta" else current


class DeviceMapPlacement:
    """A ``WeightPlacer`` by a device map.

    Args:
        model: the model.
        device_map: module name -> device.
        offload_folder: the folder for weights on disk that are in no file that can be mapped.
        offload_buffers: buffers of modules on disk stay there too.

    Attributes:
        execution_device: the device where offloaded modules compute: the map's first accelerator, or
            the CPU.
        index: the entries of the tensors written to the offload folder.

    Raises:
        DeviceError: there is no such device.
    """

    loads_by_hooks = False

    def __init__(
        self,
        model: nn.Module,
        device_map: Mapping[str, Device],
        offload_folder: str | os.PathLike[str] | None = None,
        offload_buffers: bool = False,
    ) -> None:
        self._unmatched = describe_unmatched_names(model, device_map)
        self.devices: dict[str, PlacementDevice] = {}
        for name, value in device_map.items():
            home = resolve_home(value)
            self.devices[name] = _HOST if home == "cpu" else home
        accelerators = [d for d in self.devices.values() if isinstance(d, torch.device) and d.type != "cpu"]
        self.execution_device = accelerators[0] if accelerators else _HOST
        self.folder = None if offload_folder is None else Path(offload_folder).expanduser()
        self.offload_buffers, self.index = offload_buffers, dict[str, Any]()
        self.maps, self.uploads = MappedFiles(), DeviceUploads()

    def check(self, pairs: Sequence[TensorMatch]) -> None:
        """Refuse a map that leaves a weight out, and what cannot be on disk.

        Raises:
            SettingError: names the weights.
        """
        homeless = [pair.name for pair in pairs if self._target_device(pair.target) is None]
        if homeless:
            raise SettingError(
                f"device_map does not say where {join_names(homeless)} goes",
                why=self._unmatched,
                fix="add the module, or '' for all others",
            )
        if self._unmatched:
            warn_user(self._unmatched)
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
                    f"{join_names(names)} cannot stay on disk in the loaded files, and there is no "
                    "folder to write to",
                    why=reason,
                    fix="offload_folder='some/folder', or leave dtype as it is in the file",
                )

    def place_tensor(self, target: ModelTensor, saved: LazyTensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor on its device, mapped to its file, or copied into the present one."""
        tensor, home = target.tensor, self._target_device(target)
        assert home is not None
        if is_distributed(tensor):
            return copy_into(tensor, saved, dtype, self.maps, self.uploads)
        if home == DISK:
            return self._place_on_disk(target, saved, dtype)
        if tensor.device == home and tensor.dtype == dtype:
            return copy_into(tensor, saved, dtype, self.maps, self.uploads)
        if home == _HOST:
            return _with_file_source(target, host_tensor(saved, dtype, self.maps), saved, dtype)
        if self.uploads.accepts(saved.region, home):
            return upload(saved, torch.empty(saved.shape, dtype=dtype, device=home), self.uploads)
        value = saved.read()
        if dtype.itemsize < value.dtype.itemsize:
            value = value.to(dtype)
        return value.to(home).to(dtype)

    def device(self, name: str, current: torch.device) -> torch.device:
        """Return the device of a module that reads its weights itself, or of a weight that is quantized; the
        CPU for what is there or on disk.
        """
        home: PlacementDevice | None = device_of(name, self.devices)
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
        offload_weight(value, name, self.folder, self.index)
        place = FileRegion(self.folder / f"{name}.dat", 0)
        return LazyTensor(value.shape, value.dtype, (), lambda: value, place)

    def _target_device(self, target: ModelTensor) -> PlacementDevice | None:
        """Return the device of a target; of a tied one, the fastest of its devices."""
        devices: list[PlacementDevice] = [
            home for name in target.names if (home := device_of(name, self.devices)) is not None
        ]
        return min(devices, key=lambda home: (home == DISK, home == _HOST), default=None)


class QuantizedPlacement(DeviceMapPlacement):
    """A ``WeightPlacer`` by a device map that quantizes the weights of some layers.

    Args:
        model: the model.
        device_map: module name -> device.
        offload_folder: the folder for weights on disk.
        quantizer: converts the layers.
        layers: these, by name; their weights are not quantized yet.
    """

    def __init__(
        self,
        model: nn.Module,
        device_map: Mapping[str, Device],
        offload_folder: str | os.PathLike[str] | None,
        quantizer: Quantizer,
        layers: Mapping[str, nn.Module],
    ) -> None:
        super().__init__(model, device_map, offload_folder)
        self.quantizer = quantizer
        self.layers = dict(layers)
        self.names = {id(layer): name for name, layer in layers.items()}
        self.states: dict[int, dict[str, torch.Tensor]] = {}

    def check(self, pairs: Sequence[TensorMatch]) -> None:
        """Refuse what cannot be placed, and quantized weights on disk without a folder for them."""
        super().check(pairs)
        written = (name for name, layer in self.layers.items() if id(layer) not in self.states)
        on_disk = next((n for n in written if device_of(f"{n}.weight", self.devices) == DISK), None)
        if on_disk is not None and self.folder is None:
            raise PrepareError(
                f"{on_disk} is to be on disk, and there is no folder for it",
                why="its weight is quantized, and the checkpoint does not hold it in that form",
                fix="offload_folder='a folder with room'",
            )

    def quantize_present_weights(self, only: Sequence[str] | None = None) -> None:
        """Quantize the weights that the layers have, each on its device.

        Args:
            only: names of weights; of these, those that are in no layer, have no values or are quantized
                already are left out. A shared layer may have any of its names here.
        """
        missing = {id(layer) for name, layer in self.layers.items() if f"{name}.weight" in (only or ())}
        for name in self.names.values():
            layer: Any = self.layers[name]
            is_plain = layer.weight.is_floating_point() and not layer.weight.is_meta
            if only is not None and not (id(layer) in missing and is_plain):
                continue
            device = self.device(f"{name}.weight", _HOST)
            layer.weight = self.quantizer.quantize(layer, layer.weight.data, device)

    def take_saved_states(self, saved: SavedTensors) -> SavedTensors:
        """Return the saved tensors without those of quantization states, which are kept for their layers."""
        remaining = SavedTensors(saved)
        for name, layer in self.layers.items():
            weight = saved.get(f"{name}.weight")
            if weight is None or weight.dtype.is_floating_point:
                continue
            state = [
                n for n in remaining if n.startswith(f"{name}.") and n[len(name) + 1 :] not in _LAYER_TENSORS
            ]
            self.states[id(layer)] = {n.removeprefix(f"{name}."): remaining.pop(n).read() for n in state}
            empty = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            layer.weight = nn.Parameter(empty, requires_grad=False)
        return remaining

    def place_tensor(self, target: ModelTensor, saved: LazyTensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor on its device, quantized if it is the weight of a layer that is."""
        owner, attribute = target.owners[0]
        if attribute != "weight" or id(owner) not in self.names:
            return super().place_tensor(target, saved, dtype)
        name = target.names[0]
        device, state = self.device(name, _HOST), self.states.get(id(owner))
        if state is None:
            weight = self.quantizer.quantize(owner, host_tensor(saved, dtype, self.maps), device)
            if device_of(name, self.devices) != DISK:
                return weight
            values = self._write_to_folder(name, weight.data)
            view = host_tensor(values, values.dtype, self.maps)
        else:
            view = host_tensor(saved, saved.dtype, self.maps)
            weight = self.quantizer.restore(owner, view, state, device)
            if device != _HOST or saved.region is None or not self.quantizer.can_offload:
                return weight
        return with_values(weight, view, MmapWeightSource(name, view, view.dtype))

    def is_offloaded(self, name: str) -> bool:
        """Return True for a weight that is on disk, or on the CPU while it computes on an accelerator."""
        home: Any = device_of(name, self.devices)
        return home == DISK or (home == _HOST and self.execution_device != _HOST)


def _with_file_source(
    target: ModelTensor, value: torch.Tensor, saved: LazyTensor, dtype: torch.dtype
) -> torch.Tensor:
    """Attach the file source to a view of a file; return any other tensor as it is."""
    if value is target.tensor or saved.region is None or saved.dtype != dtype:
        return value
    return with_values(target.tensor, value, MmapWeightSource(target.names[0], value, dtype))
