"""Load models whose linear layers are quantized, a layer at a time.

The weight of a layer is read, quantized on its device and dropped before the next one is read: the model
never exists in full precision. A file that holds quantized weights is read as it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from accelerate import device as devices
from accelerate.core.errors import PrepareError, SettingError
from accelerate.facade.big_model_loading import (
    Device,
    QuantizedPlacement,
    find_weights,
    load_placed_weights,
    make_device_map,
    refuse_dispatched,
)
from accelerate.offload.dispatch import dispatch_model
from accelerate.offload.hooks import remove_hook_from_submodules
from accelerate.offload.module_sizes import Dtype
from accelerate.offload.module_tensors import has_offloaded_params
from accelerate.offload.quantization.base import (
    QuantizationConfig,
    Quantizer,
    list_convertible_layers,
    matches_module,
    record_trainable,
    replace_layers,
    restore_linear_layers,
    unquantized_modules,
)

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@torch.inference_mode(False)  # weights that are made in it could not be trained later
@torch.no_grad()
def load_and_quantize_model(
    model: ModuleT,
    bnb_quantization_config: QuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: str | dict[str, Device] | None = None,
    no_split_module_classes: list[str] | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> ModuleT:
    """Quantize the linear layers of a model, with the weights that it has or those of a checkpoint.

    Args:
        model: the model, usually made under ``init_empty_weights``; it is changed. One that this library has
            quantized takes the weights of ``weights_location`` instead of its own.
        bnb_quantization_config: the options, ``BnbQuantizationConfig`` or those of another library.
        weights_location: see ``load_checkpoint_in_model``; None takes the weights that the model has. Weights
            that were saved in the same format are loaded as they are.
        device_map: module name -> device, ``"cpu"`` or ``"disk"``, or the name of a strategy, see
            ``load_checkpoint_and_dispatch``; None puts all on the current device.
        no_split_module_classes: classes of modules that stay on one device, for a map that is made.
        max_memory: device -> bytes or text such as ``"10GB"``, likewise.
        offload_folder: where quantized weights on disk are written.
        offload_state_dict: has nothing to do: one layer is in memory in full precision.

    Returns:
        The same model, dispatched by the map, with ``is_loaded_in_8bit`` or its like.

    Raises:
        MissingExtraError: the library is not installed.
        SettingError: the model has no weights and none are given; the map leaves a module out.
        PrepareError: the model is dispatched already, is quantized and no weights are given, or has no layer
            to quantize.
        CheckpointError: see ``load_checkpoint_in_model``.
    """
    config = bnb_quantization_config
    quantizer = config.make_quantizer()
    # Before the model is taken apart: there may be none.
    weights = None if weights_location is None else find_weights(weights_location, broadcast_from_rank0=False)
    _make_unquantized(model, quantizer, weights_location)
    unquantized = unquantized_modules(model, config)
    places = get_quantized_model_device_map(model, config, device_map, max_memory, no_split_module_classes)
    layers = replace_layers(model, quantizer, unquantized)
    if not layers:
        raise PrepareError(
            f"{type(model).__name__} has no layer to quantize",
            why=f"only nn.Linear is quantized, and these modules are not: {', '.join(unquantized) or '-'}",
            fix="look at skip_modules and keep_in_fp32_modules; skip_modules=[] takes the last layer too",
        )
    placement = QuantizedPlacement(model, places, offload_folder, quantizer, layers)
    _refuse_offload(quantizer, placement)
    fp32 = config.keep_in_fp32_modules or ()
    if weights is None:
        placement.quantize_present_weights()
        _cast_unquantized(model, config.torch_dtype, fp32, layers)
    else:
        path, saved = weights[0], placement.take_saved_states(weights[1])
        load_placed_weights(
            model, saved, path, placement, dtype=config.torch_dtype, keep_in_fp32=fp32, before_dispatch=True
        )
    for name, value in quantizer.model_attributes.items():
        setattr(model, name, value)
    record_trainable(model)
    dispatch_model(model, places, offload_dir=offload_folder)
    for layer in layers.values():
        if has_offloaded_params(layer):
            quantizer.prepare_offloaded(layer)
    return model


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: QuantizationConfig,
    device_map: str | dict[str, Device] | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
) -> dict[str, Device]:
    """Return the device map of a model that is quantized, or will be.

    Args:
        model: the model.
        bnb_quantization_config: the options.
        device_map: a map, which is returned; a strategy, which makes one with the sizes of quantized weights;
            None puts all on the current device.
        max_memory: device -> bytes or text, for a map that is made.
        no_split_module_classes: classes of modules that stay on one device, likewise.
    """
    if device_map is None:
        driver = devices.detect()
        return {"": "cpu" if driver.type == "cpu" else driver.torch_device(driver.current())}
    if not isinstance(device_map, str):
        return device_map
    special = _weight_formats(model, bnb_quantization_config)
    dtype = bnb_quantization_config.torch_dtype
    return make_device_map(
        model, device_map, max_memory, no_split_module_classes, dtype=dtype, buffers=False, special=special
    )


def _weight_formats(model: nn.Module, config: QuantizationConfig) -> dict[str, Dtype]:
    """Return the formats of the weights that do not become ``torch_dtype``, for sizes."""
    quantizer = config.make_quantizer()
    unquantized = unquantized_modules(model, config)
    quantized = {name for name, _ in list_convertible_layers(model, unquantized)}
    quantized |= {name for name, module in model.named_modules() if quantizer.is_quantized_layer(module)}
    formats: dict[str, Dtype] = {f"{name}.weight": config.target_dtype for name in quantized}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if tensor.is_floating_point() and matches_module(name, config.keep_in_fp32_modules or ()):
            formats[name] = torch.float32
    return formats


def _make_unquantized(
    model: nn.Module, quantizer: Quantizer, weights_location: str | os.PathLike[str] | None
) -> None:
    """Undo an earlier quantization if weights are given; refuse a model that has none or is dispatched."""
    quantized = next((n for n, module in model.named_modules() if quantizer.is_quantized_layer(module)), None)
    if quantized and weights_location is not None:
        remove_hook_from_submodules(model)
        restore_linear_layers(model, quantizer)
    elif quantized is not None:
        raise PrepareError(
            f"the model is quantized already: {quantized or 'it'} is a layer of {quantizer.library}",
            fix="give the model as it is defined, with layers of nn.Linear, or weights_location as well",
        )
    refuse_dispatched(model)
    empty = next((name for name, p in model.named_parameters() if p.device.type == "meta"), None)
    if empty is not None and weights_location is None:
        raise SettingError(
            f"weights_location is not given, and {empty} has no values",
            why="it is on the meta device",
            fix="weights_location='folder of the checkpoint'",
        )


def _refuse_offload(quantizer: Quantizer, placement: QuantizedPlacement) -> None:
    """Refuse a map that offloads layers of a library whose weights cannot be copied as ranges of bytes."""
    if quantizer.can_offload:
        return
    offloaded = next((name for name in placement.layers if placement.is_offloaded(f"{name}.weight")), None)
    if offloaded is not None:
        raise PrepareError(
            f"{offloaded} cannot be offloaded: its weight is quantized by {quantizer.library}",
            why="such a weight is no plain range of bytes that could be paged",
            fix="put it on a device, skip it with skip_modules, or take BnbQuantizationConfig",
        )


def _cast_unquantized(
    model: nn.Module, dtype: torch.dtype, fp32: Sequence[str], layers: Mapping[str, nn.Module]
) -> None:
    """Convert everything of floating point that is not quantized, in place."""
    quantized = {id(layer.weight) for layer in layers.values()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in quantized and parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32 if matches_module(name, fp32) else dtype)
    for path, module in model.named_modules():
        lasting = (name for name in module._buffers if name not in module._non_persistent_buffers_set)
        for name in lasting:
            buffer = module._buffers[name]
            if buffer is not None and buffer.is_floating_point():
                wanted = torch.float32 if matches_module(f"{path}.{name}", fp32) else dtype
                module._buffers[name] = buffer.to(wanted)
