"""Load checkpoints into models larger than memory, distributed over devices, CPU memory and disk."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate.checkpoint.file_reads import LazyTensor
from accelerate.checkpoint.lazy_weights import open_weights, weights_from_rank0
from accelerate.checkpoint.weight_loading import MismatchedKeys, WeightPlacer, load_weights
from accelerate.core import packages
from accelerate.core.errors import (
    CheckpointError,
    FeatureNotBuiltError,
    MissingExtraError,
    PrepareError,
    UnknownNameError,
)
from accelerate.facade.checkpoint_tensor_placement import CurrentDevicePlacement, Device, DeviceMapPlacement
from accelerate.offload.device_maps import get_balanced_memory, infer_auto_device_map
from accelerate.offload.dispatch import dispatch_model

_AUTOMATIC_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".json", ".pt", ".pth")


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
            ``{"": 0}`` puts all on one. None leaves everything in place, and puts tensors on the meta
            device on the CPU.
        offload_folder: where weights of modules on disk are written that lie in no file that can be mapped.
            Safetensors and torch files are used as they are, and nothing is written.
        dtype: what floating point weights become; None keeps the model's.
        offload_state_dict: has nothing to do: one tensor is in memory besides the model.
        offload_buffers: buffers of modules on disk stay there too.
        keep_in_fp32_modules: names of modules, at any depth, whose floating point weights become float32.
        offload_8bit_bnb: not built yet.
        strict: names that the model does not have are an error, not a warning; so are missing buffers.
        full_state_dict: files hold full tensors; False: they hold this rank's local shards of tensors
            that are sharded.
        broadcast_from_rank0: rank 0 reads, the others receive, and keep their shards.
        allow_missing: weights that no file holds stay as they are, with a warning that lists them. Otherwise
            they are an error: they would be random, or stay on the meta device.

    Returns:
        Names that did not meet.

    Raises:
        WeightsMismatchError: names are missing, or shapes or kinds differ; the model is unchanged.
        CheckpointError: a file is missing, damaged, would run code, or leads out of its folder.
        SettingError: the map leaves a weight out, or names a module that the model does not have.
        DeviceError: the map names a device that is not here.
    """
    _refuse_bnb(offload_8bit_bnb)
    home: WeightPlacer = CurrentDevicePlacement()
    if device_map is not None:
        home = DeviceMapPlacement(model, device_map, offload_folder, offload_buffers)
    path, weights = _find_weights(checkpoint, broadcast_from_rank0)
    return load_weights(
        model, weights, path, home, dtype=dtype, keep_in_fp32=keep_in_fp32_modules or (), strict=strict,
        allow_missing=allow_missing, local_shards=not full_state_dict,
    )  # fmt: skip


def load_checkpoint_and_dispatch(
    model: nn.Module,
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
) -> nn.Module:
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
        allow_missing: likewise.

    Raises:
        PrepareError: the model has been dispatched already.
        As ``load_checkpoint_in_model``.
    """
    _refuse_dispatched(model)
    path, weights = _find_weights(checkpoint, broadcast_from_rank0)
    if isinstance(device_map, str):
        device_map = _make_device_map(
            model, device_map, max_memory, no_split_module_classes, dtype=dtype, buffers=offload_buffers
        )
    home: WeightPlacer = CurrentDevicePlacement()
    if device_map is not None:
        home = DeviceMapPlacement(model, device_map, offload_folder, offload_buffers)
    load_weights(
        model, weights, path, home, dtype=dtype, strict=strict, allow_missing=allow_missing,
        local_shards=not full_state_dict,
    )  # fmt: skip
    if device_map is None:
        return model
    return dispatch_model(
        model, device_map, offload_dir=offload_folder, offload_buffers=offload_buffers, skip_keys=skip_keys,
        preload_module_classes=preload_module_classes, force_hooks=force_hooks,
    )  # fmt: skip


def _make_device_map(
    model: nn.Module,
    strategy: str,
    max_memory: Any,
    no_split: list[str] | None,
    *,
    dtype: str | torch.dtype | None,
    buffers: bool,
) -> dict[str, Device]:
    """Return the device map of an automatic strategy."""
    if strategy not in _AUTOMATIC_MAPS:
        raise UnknownNameError("device_map", strategy, _AUTOMATIC_MAPS)
    if strategy != "sequential":
        max_memory = get_balanced_memory(
            model, max_memory, no_split, dtype=dtype, low_zero=strategy == "balanced_low_0"
        )
    return dict(infer_auto_device_map(model, max_memory, no_split, dtype=dtype, offload_buffers=buffers))


def _find_weights(
    checkpoint: str | os.PathLike[str], broadcast_from_rank0: bool
) -> tuple[Path, dict[str, LazyTensor]]:
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


def _refuse_bnb(offload_8bit_bnb: bool) -> None:
    if not offload_8bit_bnb:
        return
    if not packages.is_installed("bitsandbytes"):
        raise MissingExtraError("bitsandbytes", "offload_8bit_bnb=True")
    raise FeatureNotBuiltError(
        "offload_8bit_bnb=True is not built yet", why="models quantized by bitsandbytes"
    )


def _refuse_dispatched(model: nn.Module) -> None:
    hooked = next((name for name, module in model.named_modules() if hasattr(module, "_hf_hook")), None)
    if hooked is not None:
        raise PrepareError(
            f"the model has been dispatched already ({hooked or 'it'} has a hook)",
            fix="first remove_hook_from_submodules(model)",
        )
