"""Attaching hooks to the modules of a model."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from accelerate.offload.align_hook import AlignDevicesHook, Keys
from accelerate.offload.hooks import add_hook_to_module, walk_modules
from accelerate.offload.module_tensors import DeviceLike, TiedMap
from accelerate.offload.offload_folder import PrefixedDataset

ClassNames = Sequence[str] | None


def has_own_tensors(module: nn.Module) -> bool:
    """Return True when the module itself, not a submodule, holds a parameter or buffer."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None for tensor in tensors)


def _has_state(module: nn.Module) -> bool:
    """Return True when a state dict of the module would hold anything."""
    return any(
        tensor is not None
        for part in module.modules()
        for tensor in (
            *part._parameters.values(),
            *(b for name, b in part._buffers.items() if name not in part._non_persistent_buffers_set),
        )
    )


def _is_preloaded(module: nn.Module, preload_module_classes: ClassNames) -> bool:
    """Return True when the module's weights are materialized together with those of its children."""
    return type(module).__name__ in (preload_module_classes or ())


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: DeviceLike,
    skip_keys: Keys = None,
    preload_module_classes: ClassNames = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Attach hooks that run a module and its submodules on one device; modules that have a hook keep it.

    Args:
        module: the module; its weights move to the device.
        execution_device: the device.
        skip_keys: names of arguments that are not moved.
        preload_module_classes: names of classes whose inner modules get no hooks.
        tied_params_map: see ``AlignDevicesHook``.
    """
    for _, each in walk_modules(module, is_closed=lambda m, _: _is_preloaded(m, preload_module_classes)):
        if "_hf_hook" not in vars(each) and _has_state(each):
            hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
            add_hook_to_module(each, hook)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: DeviceLike | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Keys = None,
    preload_module_classes: ClassNames = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Attach an ``AlignDevicesHook`` to every module that holds tensors itself.

    Args:
        module: the module.
        execution_device: where they compute.
        offload: whether weights are kept elsewhere between forwards.
        weights_map: where offloaded weights are, by their full names.
        offload_buffers: offload buffers too.
        module_name: the module's own full name.
        skip_keys: names of arguments that are not moved.
        preload_module_classes: names of classes whose weights, and those of all modules inside, come in
            together.
        tied_params_map: see ``AlignDevicesHook``.
    """
    make_hook = functools.partial(
        AlignDevicesHook,
        execution_device,
        offload,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        tied_params_map=tied_params_map,
    )

    def loads_all(inner: nn.Module, _: str = "") -> bool:
        return offload and _is_preloaded(inner, preload_module_classes)

    for path, each in walk_modules(module, module_name, loads_all):
        place_submodules = loads_all(each)
        if not place_submodules and not has_own_tensors(each):
            continue
        weights = weights_map
        if weights is not None:
            weights = PrefixedDataset(weights, f"{path}." if path else "")
        hook = make_hook(weights_map=weights, place_submodules=place_submodules)
        add_hook_to_module(each, hook, append=True)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: DeviceLike | Mapping[str, Any] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Keys = None,
    preload_module_classes: ClassNames = None,
    tied_params_map: TiedMap | None = None,
) -> None:
    """Attach hooks by block, each with its own device and its own setting of offloading.

    Args:
        module: the model, or a part of it.
        execution_device: name of a block -> its device; or one device for the whole module.
        offload: name of a block -> whether it is offloaded; or one word for all blocks.
        weights_map, offload_buffers, module_name, skip_keys, preload_module_classes, tied_params_map: as for
            ``attach_align_device_hook``.
    """
    rest: dict[str, Any] = {
        "weights_map": weights_map,
        "offload_buffers": offload_buffers,
        "skip_keys": skip_keys,
        "preload_module_classes": preload_module_classes,
        "tied_params_map": tied_params_map,
    }
    named = [value for value in (execution_device, offload) if isinstance(value, Mapping)]
    blocks = named[0] if named else (module_name,)
    devices, offloaded = (
        value if isinstance(value, Mapping) else dict.fromkeys(blocks, value)
        for value in (execution_device, offload)
    )
    for path, each in walk_modules(module, module_name, lambda *_: not named):
        _attach_block(each, path, devices, offloaded, rest, whole=not named)


def _attach_block(
    module: nn.Module,
    name: str,
    devices: Mapping[str, Any],
    offload: Mapping[str, bool],
    rest: dict[str, Any],
    *,
    whole: bool = False,
) -> None:
    """Attach the hooks of one module, if it is a block or the model itself."""
    is_block = name in devices and name in offload
    common = {key: rest[key] for key in ("skip_keys", "tied_params_map")}
    aligned = whole or name == ""
    if is_block and offload[name]:
        attach_align_device_hook(
            module, execution_device=devices[name], offload=True, module_name=name, **rest
        )
        if whole:
            return
        if "_hf_hook" not in vars(module):
            add_hook_to_module(module, AlignDevicesHook(devices[name], io_same_device=aligned, **common))
        attach_execution_device_hook(
            module, devices[name], preload_module_classes=rest["preload_module_classes"], **common
        )
    elif is_block:
        hook = AlignDevicesHook(
            devices[name],
            io_same_device=aligned,
            place_submodules=True,
            offload_buffers=rest["offload_buffers"],
            **common,
        )
        add_hook_to_module(module, hook)
        if not whole:
            attach_execution_device_hook(module, devices[name], **common)
    elif aligned:
        add_hook_to_module(module, AlignDevicesHook(devices.get(""), io_same_device=True, **common))
