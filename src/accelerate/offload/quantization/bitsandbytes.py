"""Linear layers in 8 bits (LLM.int8()) and 4 bits (nf4, fp4) by bitsandbytes.

``BnbQuantizationConfig`` and the functions of ``accelerate.utils.bnb``. The weights of a layer are quantized
row by row (8 bits: int8 values, and one scale per row, ``SCB``) or in blocks of 64 (4 bits: two values per
byte, and a ``QuantState`` with one scale per block).
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from accelerate import device as devices
from accelerate.core import packages
from accelerate.core.errors import CheckpointError, MissingExtraError, SettingError, UnknownNameError
from accelerate.core.value_types import CustomDtype
from accelerate.offload.module_tensors import owner_of, set_module_tensor_to_device
from accelerate.offload.offload_folder import offload_weight
from accelerate.offload.offloaded_tensor import source_of
from accelerate.offload.quantization.base import (
    DTYPES,
    Quantizer,
    check_module_names,
    read_dtype,
    replace_layers,
)

logger = logging.getLogger(__name__)

FORMATS_4BIT = ("fp4", "nf4")
# The key of a saved 4-bit state that holds what is no tensor; it ends with the format.
_STATE_4BIT = "quant_state.bitsandbytes__"
# The weights of a scale in 4 bits, and the scales that double quantization quantizes together: the library's.
_BLOCK, _NESTED_BLOCK = 64, 256
# The weights that are quantized together on the CPU, whose kernels need several times their memory.
_CPU_PIECE = 2**18
# The layers that have a hook of ``accept_saved_states``.
_loadable_layers: WeakSet[nn.Module] = WeakSet()


@dataclass
class BnbQuantizationConfig:
    """The options of a model quantized by bitsandbytes; exactly one of the two ``load_in`` is True.

    Attributes:
        load_in_8bit: int8 weights, LLM.int8().
        llm_int8_threshold: columns of the input with a value above it are multiplied in 16 bits; 0 for none.
        load_in_4bit: weights in 4 bits.
        bnb_4bit_quant_type: ``"fp4"``, or ``"nf4"``, whose 16 values suit normally distributed weights.
        bnb_4bit_use_double_quant: quantize the scales too, which saves 0.37 bits per weight.
        bnb_4bit_compute_dtype: the dtype of the matrix products: ``"fp32"``, ``"fp16"``, ``"bf16"`` or a
            dtype of torch.
        torch_dtype: what everything becomes that is not quantized, given likewise; None: fp16 for 8 bits, the
            compute dtype for 4 bits.
        skip_modules: names of modules that are not quantized; None: the output layer and tied modules.
        keep_in_fp32_modules: names of modules that are not quantized and become float32.
        target_dtype: the format of quantized weights, for sizes in memory.

    Raises:
        SettingError: a value is wrong, or both or none of the two formats are chosen.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str | torch.dtype = "fp16"
    torch_dtype: torch.dtype | str | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            if not isinstance(value := getattr(self, name), bool):
                raise SettingError(f"{name} is {value!r}, and is to be True or False")
        threshold: Any = self.llm_int8_threshold
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not threshold >= 0:
            raise SettingError(
                f"llm_int8_threshold is {threshold!r}, and is to be a number, 0 or more",
                why="0 computes every column in 8 bits",
                fix="leave it out: the default is 6.0",
            )
        if self.bnb_4bit_quant_type not in FORMATS_4BIT:
            raise UnknownNameError("bnb_4bit_quant_type", str(self.bnb_4bit_quant_type), FORMATS_4BIT)
        check_module_names("skip_modules", self.skip_modules)
        check_module_names("keep_in_fp32_modules", self.keep_in_fp32_modules)
        self.bnb_4bit_compute_dtype = read_dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        default = self.bnb_4bit_compute_dtype if self.load_in_4bit else DTYPES["fp16"]
        given = self.torch_dtype
        self.torch_dtype = default if given is None else read_dtype("torch_dtype", given)
        if self.load_in_8bit == self.load_in_4bit:
            both = "both" if self.load_in_8bit else "neither"
            raise SettingError(
                f"{both} of load_in_8bit and load_in_4bit is chosen",
                why="a weight is quantized to one format",
                fix="set one of them to True",
            )
        self.target_dtype = CustomDtype.INT4 if self.load_in_4bit else torch.int8

    def make_quantizer(self) -> Quantizer:
        """Return the quantizer of the chosen format.

        Raises:
            MissingExtraError: bitsandbytes is not installed.
        """
        return Bnb4bitQuantizer(self) if self.load_in_4bit else Bnb8bitQuantizer(self)


def _import_bitsandbytes() -> Any:
    if not packages.is_installed("bitsandbytes"):
        raise MissingExtraError("bitsandbytes", "a model in 8 or 4 bits")
    return importlib.import_module("bitsandbytes")


class BnbQuantizer(Quantizer):
    """The part that both formats share.

    Args:
        config: the options.
    """

    library = "bitsandbytes"

    def __init__(self, config: BnbQuantizationConfig) -> None:
        self.config = config
        library = _import_bitsandbytes()
        self.nn, self.functional = library.nn, library.functional
        self.model_attributes = {
            "is_loaded_in_8bit": config.load_in_8bit,
            "is_loaded_in_4bit": config.load_in_4bit,
        }

    def is_quantized_layer(self, module: nn.Module) -> bool:
        """Return True for a linear layer of bitsandbytes, of either format."""
        return isinstance(module, (self.nn.Linear4bit, self.nn.Linear8bitLt))


def _with_tensors(layer: Any, weight: nn.Parameter, bias: torch.Tensor | None) -> nn.Module:
    """Give a layer its weight and bias, frozen."""
    layer.weight, layer.bias = weight, bias
    accept_saved_states(layer)
    return layer.requires_grad_(False)


def _piece_size(device: torch.device) -> int:
    return _CPU_PIECE if device.type == "cpu" else sys.maxsize


class Bnb8bitQuantizer(BnbQuantizer):
    """Layers in 8 bits: ``bitsandbytes.nn.Linear8bitLt``."""

    def make_layer(self, linear: nn.Linear) -> nn.Module:
        """Return a layer with the weight and bias of ``linear``, frozen."""
        layer = self.nn.Linear8bitLt(
            linear.in_features, linear.out_features, bias=False, has_fp16_weights=False,
            threshold=self.config.llm_int8_threshold, device="meta",
        )  # fmt: skip
        weight = self.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
        return _with_tensors(layer, weight, linear.bias)

    def quantize(self, layer: nn.Module, weight: torch.Tensor, device: torch.device) -> nn.Parameter:
        """Return the int8 weight; its scales are ``SCB``, a float32 for each row."""
        weight = weight.detach().to(device)
        values = torch.empty(weight.shape, dtype=torch.int8, device=device)
        scales = torch.empty(len(weight), dtype=torch.float32, device=device)
        rows = max(1, _piece_size(device) // weight.shape[1])
        for start in range(0, len(weight), rows):
            piece = slice(start, start + rows)
            half = weight[piece].to(torch.float16).contiguous()
            values[piece], scales[piece], _ = self.functional.int8_vectorwise_quant(half)
        return self._parameter(values, scales)

    def _parameter(self, values: torch.Tensor, scales: torch.Tensor) -> nn.Parameter:
        return self.nn.Int8Params(values, requires_grad=False, has_fp16_weights=False, CB=values, SCB=scales)

    def restore(
        self, layer: nn.Module, weight: torch.Tensor, state: Mapping[str, torch.Tensor], device: torch.device
    ) -> nn.Parameter:
        """Return the weight of saved int8 values and scales."""
        if "weight_format" in state and state["weight_format"].item() != 0:
            raise CheckpointError(
                "8-bit weights are not saved row by row",
                why="older versions of bitsandbytes wrote layouts of single GPU families",
                fix="quantize the original weights again",
            )
        if weight.dtype != torch.int8 or "SCB" not in state:
            raise CheckpointError(
                f"the file holds no 8-bit weights, but {weight.dtype}", fix="load it as it was quantized"
            )
        return self._parameter(weight.to(device), state["SCB"].to(device))

    def prepare_offloaded(self, layer: nn.Module) -> None:
        """Release the values on the accelerator after each forward that no backward follows."""
        layer.register_forward_hook(_release_state)


def _release_state(layer: Any, args: Any, output: torch.Tensor) -> None:
    """Undo what the forward of an 8-bit layer does to its weight: its values and scales move to ``state``."""
    if output.requires_grad:
        return
    state, weight = layer.state, layer.weight
    if source_of(weight) is None:
        weight.CB, weight.SCB = state.CB, state.SCB
    state.CB = state.SCB = None


class Bnb4bitQuantizer(BnbQuantizer):
    """Layers in 4 bits: ``bitsandbytes.nn.Linear4bit``."""

    def make_layer(self, linear: nn.Linear) -> nn.Module:
        """Return a layer with the weight and bias of ``linear``, frozen."""
        config = self.config
        layer = self.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=config.bnb_4bit_compute_dtype,
            compress_statistics=config.bnb_4bit_use_double_quant, quant_type=config.bnb_4bit_quant_type,
            device="meta",
        )  # fmt: skip
        return _with_tensors(layer, self._parameter(layer, linear.weight.data), linear.bias)

    def _parameter(self, layer: nn.Module, weight: torch.Tensor, **state: Any) -> Any:
        return self.nn.Params4bit(
            weight, requires_grad=False, compress_statistics=self.config.bnb_4bit_use_double_quant,
            quant_type=self.config.bnb_4bit_quant_type, module=layer, **state,
        )  # fmt: skip

    def quantize(self, layer: nn.Module, weight: torch.Tensor, device: torch.device) -> nn.Parameter:
        """Return the packed weight, with its ``quant_state``, which the layer has too."""
        weight = weight.detach().to(device).contiguous()
        state: Any = None
        flat, size = weight.view(-1), _piece_size(device)
        # Before the pieces: memory between two results that is freed again would stay with the process.
        values = torch.empty((flat.numel() + 1) // 2, 1, dtype=torch.uint8, device=device)
        scales = torch.empty(-(-flat.numel() // _BLOCK), dtype=torch.float32, device=device)
        for start in range(0, flat.numel(), size):
            piece, state = self.functional.quantize_4bit(
                flat[start : start + size], blocksize=_BLOCK, quant_type=self.config.bnb_4bit_quant_type
            )
            values[start // 2 :][: len(piece)] = piece
            scales[start // _BLOCK :][: len(state.absmax)] = state.absmax
        state.absmax = scales
        state.shape = weight.shape
        if self.config.bnb_4bit_use_double_quant:
            state.offset, state.nested = state.absmax.mean(), True
            state.absmax, state.state2 = self.functional.quantize_blockwise(
                state.absmax - state.offset, blocksize=_NESTED_BLOCK
            )
        vars(layer)["quant_state"] = state
        return self._parameter(layer, values, quant_state=state, bnb_quantized=True)

    def restore(
        self, layer: nn.Module, weight: torch.Tensor, state: Mapping[str, torch.Tensor], device: torch.device
    ) -> nn.Parameter:
        """Return the weight of a saved packed one; its format is to be that of the configuration."""
        parts = {name.removeprefix("weight."): value for name, value in state.items()}
        saved = next((name.removeprefix(_STATE_4BIT) for name in parts if name.startswith(_STATE_4BIT)), None)
        if saved != self.config.bnb_4bit_quant_type:
            raise CheckpointError(
                f"the weights were quantized to {saved or 'no 4-bit format'}, and "
                f"{self.config.bnb_4bit_quant_type} is requested",
                fix=f"bnb_4bit_quant_type={saved!r}" if saved else "load the file as it was quantized",
            )
        return self.nn.Params4bit.from_prequantized(
            data=weight, quantized_stats=parts, requires_grad=False, device=device, module=layer
        )


def accept_saved_states(model: nn.Module) -> None:
    """Let the layers of a model load the state dicts that they save, as those of bitsandbytes 0.50 do not.

    A 4-bit layer calls the scales that it saves unexpected. An 8-bit one does not find its own scales after
    the first forward.

    Args:
        model: a model with layers of bitsandbytes, whoever has made them. A second call changes nothing.
    """
    library = _import_bitsandbytes().nn
    for module in model.modules():
        if module in _loadable_layers:
            continue
        if isinstance(module, library.Linear4bit):
            module.register_load_state_dict_pre_hook(_load_scales_4bit)
        elif isinstance(module, library.Linear8bitLt):
            module.register_load_state_dict_pre_hook(_find_scales_8bit)
        else:
            continue
        _loadable_layers.add(module)


def _load_scales_4bit(
    layer: Any, state: dict[str, Any], prefix: str, metadata: Any, strict: bool,
    missing: list[str], unexpected: list[str], errors: list[str],
) -> None:  # fmt: skip
    """Take from a state dict what belongs to a packed 4-bit weight, which torch itself then copies."""
    start = f"{prefix}weight."
    parts = {name.removeprefix(start): state.pop(name) for name in [*state] if name.startswith(start)}
    if not parts or f"{prefix}weight" not in state:
        return
    own = layer.weight.quant_state
    if own is None:
        errors.append(
            f"{prefix}weight is quantized in the file, and not yet in the model: load it after .to(device)"
        )
        return
    saved = type(own).from_dict(qs_dict=parts, device=layer.weight.device)
    if (saved.quant_type, saved.shape) != (own.quant_type, own.shape):
        errors.append(
            f"{prefix}weight was quantized to {saved.quant_type} of {tuple(saved.shape)}, the model has "
            f"{own.quant_type} of {tuple(own.shape)}"
        )
        state.pop(f"{prefix}weight")
    elif (
        state[f"{prefix}weight"].shape == layer.weight.shape
    ):  # else torch refuses it, and nothing is changed
        layer.weight.quant_state = layer.quant_state = saved


def _find_scales_8bit(layer: Any, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Give the weight of an 8-bit layer the scales that its first forward has moved away."""
    if f"{prefix}SCB" in state and layer.weight.SCB is None:
        layer.weight.SCB = layer.state.SCB


def find_8bit_layers(model: nn.Module) -> tuple[Quantizer, dict[str, nn.Module]]:
    """Return a quantizer, and the 8-bit layers of a model by name.

    Raises:
        MissingExtraError: bitsandbytes is not installed.
    """
    quantizer = Bnb8bitQuantizer(BnbQuantizationConfig(load_in_8bit=True))
    kind = quantizer.nn.Linear8bitLt
    layers = {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, kind)}
    return quantizer, layers


# ------------------------------------------------------------------------------- functions of the public API


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: list[str] | None = None,
    current_key_name: list[str] | None = None,
) -> nn.Module:
    """Replace the linear layers of a model by those of bitsandbytes, which ``to(device)`` quantizes.

    Args:
        model: the model; it may be on the meta device.
        bnb_quantization_config: the options.
        modules_to_not_convert: names of modules that stay as they are, at any depth.
        current_key_name: has nothing to do; 1.x called itself with it.

    Returns:
        The same model. A warning says when it has no linear layer.

    Raises:
        MissingExtraError: bitsandbytes is not installed.
    """
    quantizer = bnb_quantization_config.make_quantizer()
    if not replace_layers(model, quantizer, modules_to_not_convert or ()):
        logger.warning(
            "%s has no linear layer to quantize: nn.Linear is converted, and no other class, such as the "
            "Conv1D of GPT-2",
            type(model).__name__,
        )
    return model


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Return True when a module of the model is a 4-bit linear layer of bitsandbytes."""
    if not packages.is_installed("bitsandbytes"):
        return False
    linear4bit = _import_bitsandbytes().nn.Linear4bit
    return any(isinstance(module, linear4bit) for module in model.modules())


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """Return the device of the first parameter of a module.

    Raises:
        StopIteration: it has no parameters.
    """
    return next(parameter.parameters()).device


def quantize_and_offload_8bit(
    model: nn.Module,
    param: torch.Tensor,
    param_name: str,
    new_dtype: torch.dtype,
    offload_folder: str | os.PathLike[str],
    offload_index: dict[str, Any],
    fp16_statistics: torch.Tensor | None,
) -> None:
    """Write a weight to an offload folder in 8 bits, and leave it on the meta device.

    Values and scales are two files: ``<param_name>.dat`` and the same with ``SCB`` for ``weight``. A tensor
    that does not belong to an 8-bit layer is written as it is.

    Args:
        model: the model.
        param: the values: those to quantize, or int8 ones, with ``fp16_statistics``.
        param_name: the name in the model.
        new_dtype: the dtype that it has on the meta device.
        offload_folder: the folder.
        offload_index: gets the entries of the files.
        fp16_statistics: the scales of ``param``; None quantizes it, on this machine's device.
    """
    owner, name = owner_of(model, param_name)
    values, scales = param, fp16_statistics
    if scales is None and type(owner._parameters.get(name)).__name__ == "Int8Params":
        driver = devices.detect()
        device = torch.device("cpu") if driver.type == "cpu" else driver.torch_device(driver.current())
        half = param.detach().to(device=device, dtype=torch.float16).contiguous()
        values, scales, _ = _import_bitsandbytes().functional.int8_vectorwise_quant(half)
    offload_weight(values.cpu(), param_name, offload_folder, index=offload_index)
    if scales is not None:
        offload_weight(scales.cpu(), param_name.replace("weight", "SCB"), offload_folder, index=offload_index)
    empty = torch.empty(param.shape, dtype=new_dtype, device="meta")
    set_module_tensor_to_device(model, param_name, "meta", dtype=new_dtype, value=empty)
