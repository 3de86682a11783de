"""Linear layers in 8 and 4 bits by torchao: weights only, or with inputs quantized as they come.

A layer stays an ``nn.Linear``; its weight is a tensor subclass of torchao. A state dict holds the plain
tensors that the weight is made of, so that every kind of file can hold it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate import device as devices
from accelerate.core import packages
from accelerate.core.errors import (
    CheckpointError,
    DeviceError,
    MissingExtraError,
    SettingError,
    UnknownNameError,
)
from accelerate.core.value_types import CustomDtype
from accelerate.offload.quantization.base import Quantizer, check_module_names, read_dtype

INT8_WEIGHT_ONLY, INT8_DYNAMIC, INT4_WEIGHT_ONLY = "int8_weight_only", "int8_dynamic", "int4_weight_only"
SCHEMES = (INT8_WEIGHT_ONLY, INT8_DYNAMIC, INT4_WEIGHT_ONLY)


@dataclass
class TorchAOQuantizationConfig:
    """The options of a model quantized by torchao, for ``load_and_quantize_model``.

    Attributes:
        scheme: ``"int8_weight_only"``; ``"int8_dynamic"``, which quantizes inputs row by row as they come,
            and which has no backward pass; ``"int4_weight_only"``, in groups.
        group_size: the weights that share a scale in 4 bits; it divides the input size of every layer.
        torch_dtype: what everything becomes that is not quantized, and what quantized layers compute in:
            ``"fp32"``, ``"fp16"``, ``"bf16"`` or a dtype of torch.
        skip_modules: names of modules that are not quantized; None: the output layer and tied modules.
        keep_in_fp32_modules: names of modules that are not quantized and become float32.
        target_dtype: the format of quantized weights, for sizes in memory.

    Raises:
        SettingError: a value is wrong.
    """

    scheme: str = INT8_WEIGHT_ONLY
    group_size: int = 32
    torch_dtype: torch.dtype | str = "bf16"
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise UnknownNameError("scheme", str(self.scheme), SCHEMES)
        size: Any = self.group_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise SettingError(f"group_size is {size!r}, and is to be 1 or more", fix="group_size=32")
        check_module_names("skip_modules", self.skip_modules)
        check_module_names("keep_in_fp32_modules", self.keep_in_fp32_modules)
        self.torch_dtype = read_dtype("torch_dtype", self.torch_dtype)
        # Without kernels for packed values, torchao holds 4-bit values in a byte each.
        self.target_dtype: torch.dtype | CustomDtype = torch.int8

    def make_quantizer(self) -> Quantizer:
        """Return the quantizer of the chosen scheme, or raise what it raises."""
        return TorchAOQuantizer(self)


class TorchAOQuantizer(Quantizer):
    """Quantizes the weights of ``nn.Linear`` by ``torchao.quantization.quantize_``.

    Args:
        config: the options.

    Raises:
        DeviceError: the model would compute on this processor, and wrong in this scheme.
        MissingExtraError: torchao is not installed.
    """

    library = "torchao"
    can_offload = False

    def __init__(self, config: TorchAOQuantizationConfig) -> None:
        if not packages.is_installed("torchao"):
            raise MissingExtraError("torchao", "TorchAOQuantizationConfig")
        self.config = config
        self.quantization: Any = importlib.import_module("torchao.quantization")
        self.weight_class: type[Any] = importlib.import_module("torchao.utils").TorchAOBaseTensor
        self.model_attributes = {}
        if config.scheme == INT8_DYNAMIC and devices.detect().type == "cpu" and self.saturates():
            raise DeviceError(
                f"scheme={INT8_DYNAMIC!r} gives wrong results on this processor",
                why="it has no VNNI instructions, without which sums of products of 8-bit numbers saturate",
                fix=f"use scheme={INT8_WEIGHT_ONLY!r}",
            )

    def saturates(self) -> bool:
        """Return whether a layer in ``int8_dynamic`` computes wrong products on this processor.

        oneDNN sums pairs of products in 16 bits where the processor has no instruction for it.

        Source: oneDNN Developer Guide, "Nuances of int8 Computations".
        """
        probe = nn.Linear(64, 32, bias=False, device="cpu")
        probe.weight = nn.Parameter(torch.ones(32, 64, device="cpu"), requires_grad=False)
        self.quantization.quantize_(probe, self.quantization.Int8DynamicActivationInt8WeightConfig())
        with torch.no_grad():
            products = probe(torch.ones(32, 64, device="cpu"))
        return not torch.allclose(products, torch.full_like(products, 64.0), rtol=0.02)

    def _scheme(self) -> Any:
        library = self.quantization
        if self.config.scheme == INT8_WEIGHT_ONLY:
            return library.Int8WeightOnlyConfig()
        if self.config.scheme == INT8_DYNAMIC:
            return library.Int8DynamicActivationInt8WeightConfig()
        granularity = importlib.import_module("torchao.quantization.granularity")
        int4: Any = getattr(torch, "int4")  # noqa: B009 - torch's stubs do not have it
        groups = granularity.PerGroup(self.config.group_size)
        return library.IntxWeightOnlyConfig(weight_dtype=int4, granularity=groups)

    def make_layer(self, linear: nn.Linear) -> nn.Module:
        """Return ``linear`` itself, frozen, with hooks that make its weight plain tensors in state dicts.

        Raises:
            SettingError: groups do not divide its input size.
        """
        if self.config.scheme == INT4_WEIGHT_ONLY and linear.in_features % self.config.group_size:
            raise SettingError(
                f"group_size is {self.config.group_size}, and a layer has {linear.in_features} inputs",
                why="a row of weights is divided into groups of equal size",
                fix="choose a divisor of it, or name the layer in skip_modules",
            )
        linear.register_state_dict_post_hook(_flatten_weight)
        linear.register_load_state_dict_pre_hook(_unflatten_weight)
        return linear.requires_grad_(False)

    def quantize(self, layer: nn.Module, weight: torch.Tensor, device: torch.device) -> nn.Parameter:
        """Return the weight as a tensor subclass of torchao."""
        rows, columns = weight.shape
        holder = nn.Linear(columns, rows, bias=False, device="meta")
        holder.weight = nn.Parameter(weight.detach().to(device), requires_grad=False)
        self.quantization.quantize_(holder, self._scheme())
        return holder.weight

    def restore(
        self, layer: nn.Module, weight: torch.Tensor, state: Mapping[str, torch.Tensor], device: torch.device
    ) -> nn.Parameter:
        """Return the weight of the plain tensors that were saved of one, in the same scheme."""
        dtype: Any = self.config.torch_dtype
        zeros = torch.zeros(weight.shape, dtype=dtype, device="cpu")
        pattern = self.quantize(layer, zeros, torch.device("cpu"))
        parts = {_PARTS + name: value for name, value in _list_parts(pattern).items()}
        saved = {"weight": weight, **state}
        fits = {n: (t.shape, t.dtype) for n, t in saved.items()} == {
            "weight" if n == f"{_PARTS}qdata" else n: (t.shape, t.dtype) for n, t in parts.items()
        }
        if not fits:
            raise CheckpointError(
                f"the weights were not quantized by torchao to {self.config.scheme} in {dtype}",
                fix="load the file with the options with which it was quantized",
            )
        saved[f"{_PARTS}qdata"] = saved.pop("weight")
        values = {name.removeprefix(_PARTS): value.to(device) for name, value in saved.items()}
        return nn.Parameter(_with_parts(pattern, values), requires_grad=False)

    def is_quantized_layer(self, module: nn.Module) -> bool:
        """Return True for a linear layer whose weight is a tensor subclass of torchao."""
        return isinstance(module, nn.Linear) and isinstance(module.weight, self.weight_class)


# ------------------------------------------------------------------------------------------------ state dicts

# The parts of a weight in a state dict, but for its integers, which have the weight's own name.
_PARTS = "weight_"


def _list_parts(weight: Any) -> dict[str, torch.Tensor]:
    """Return the plain tensors of a weight, by torch's protocol of traceable tensor subclasses."""
    names, _ = weight.__tensor_flatten__()
    return {name: getattr(weight, name) for name in names}


def _with_parts(weight: Any, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a weight of the same kind and options, made of other tensors."""
    _, options = weight.__tensor_flatten__()
    kind: Any = type(weight)
    return kind.__tensor_unflatten__(dict(parts), options, weight.shape, weight.stride())


def _flatten_weight(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    weight: Any = module._parameters["weight"]
    if f"{prefix}weight" not in state or not hasattr(weight, "__tensor_flatten__"):
        return
    parts = _list_parts(weight)
    state[f"{prefix}weight"] = parts.pop("qdata")
    state.update({f"{prefix}{_PARTS}{name}": value for name, value in parts.items()})


def _unflatten_weight(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    weight: Any = module._parameters["weight"]
    if f"{prefix}weight" not in state or not hasattr(weight, "__tensor_flatten__"):
        return
    names = [name for name in _list_parts(weight) if name != "qdata"]
    if all(f"{prefix}{_PARTS}{name}" in state for name in names):
        parts = {name: state.pop(f"{prefix}{_PARTS}{name}") for name in names}
        state[f"{prefix}weight"] = _with_parts(weight, {"qdata": state[f"{prefix}weight"], **parts})
