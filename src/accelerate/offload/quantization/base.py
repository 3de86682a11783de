"""The interface of quantization libraries, the layers that they convert, and models that cannot be trained.

A ``QuantizationConfig`` is what users write. It makes a ``Quantizer``, which converts one linear layer at a
time, so that a model never exists in full precision beside its quantized form.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from accelerate.core.errors import PrepareError, SettingError
from accelerate.core.value_types import CustomDtype
from accelerate.offload.dispatch_hook import hook_of
from accelerate.offload.module_sizes import find_tied_parameters
from accelerate.offload.offloaded_tensor import OffloadedTensor

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def read_dtype(name: str, value: Any) -> torch.dtype:
    """Return a floating point dtype, given as such or as ``"fp32"``, ``"fp16"`` or ``"bf16"``.

    Args:
        name: the option, for errors.
        value: its value.

    Raises:
        SettingError: it is no such dtype.
    """
    dtype = DTYPES.get(value) if isinstance(value, str) else value
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    raise SettingError(
        f"{name} is {value!r}, and is to be a floating point dtype",
        why=f"known by name: {', '.join(DTYPES)}",
        fix=f"{name}='bf16', or torch.bfloat16",
    )


def check_module_names(name: str, value: Any) -> None:
    """Refuse anything but None and a list of texts.

    Raises:
        SettingError: it is something else.
    """
    if value is None or (isinstance(value, list) and all(isinstance(each, str) for each in value)):  # pyright: ignore[reportUnknownVariableType]
        return
    raise SettingError(
        f"{name} is {value!r}, and is to be a list of module names", fix=f"{name}=['lm_head'], for example"
    )


class QuantizationConfig(Protocol):
    """The options of a quantization, which choose its library.

    Attributes:
        torch_dtype: what everything becomes that is not quantized.
        skip_modules: names of modules that are not quantized; None chooses the output layer and tied ones.
        keep_in_fp32_modules: names of modules that are not quantized and become float32.
        target_dtype: the format of quantized weights, for sizes.
    """

    torch_dtype: Any
    skip_modules: list[str] | None
    keep_in_fp32_modules: list[str] | None
    target_dtype: torch.dtype | CustomDtype

    def make_quantizer(self) -> Quantizer:
        """Return what converts the layers.

        Raises:
            MissingExtraError: the library is not installed.
        """
        ...


class Quantizer(ABC):
    """Converts the linear layers of a model, one at a time.

    Attributes:
        library: the name of the package.
        can_offload: its layers run on an accelerator while their weights are elsewhere.
        model_attributes: what a model gets that it has converted.
    """

    library: ClassVar[str]
    can_offload: ClassVar[bool] = True
    model_attributes: Mapping[str, bool]

    @abstractmethod
    def make_layer(self, linear: nn.Linear) -> nn.Module:
        """Return the layer that takes the place of ``linear``, not yet quantized."""

    @abstractmethod
    def quantize(self, layer: nn.Module, weight: torch.Tensor, device: torch.device) -> nn.Parameter:
        """Return the quantized weight of a layer, on a device.

        Args:
            layer: from ``make_layer``.
            weight: in full precision, on any device; it is not changed.
            device: where the result is.
        """

    @abstractmethod
    def restore(
        self, layer: nn.Module, weight: torch.Tensor, state: Mapping[str, torch.Tensor], device: torch.device
    ) -> nn.Parameter:
        """Return the weight of a layer, made from what was saved of a quantized one.

        Args:
            layer: from ``make_layer``.
            weight: the saved values.
            state: everything else that was saved of the layer but its bias, by the names in it.
            device: where the result is.

        Raises:
            CheckpointError: it was quantized in another way.
        """

    def prepare_offloaded(self, layer: nn.Module) -> None:
        """Make a layer release what it holds of its weight between forwards; it is offloaded."""

    @abstractmethod
    def is_quantized_layer(self, module: nn.Module) -> bool:
        """Return True for a layer that a quantizer of this library has made, in any format."""


# ------------------------------------------------------------------------------------------------ selection


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Return the names of the modules that are to keep full precision: the output layer and tied ones.

    A model without an output layer (transformers' base models) and without tied weights has none.

    Args:
        model: the model; it may be on the meta device.
    """
    tie = getattr(model, "tie_weights", None)
    if callable(tie):
        tie()
    tied = [name for group in find_tied_parameters(model) for name in group]
    base: Any = getattr(model, "base_model_prefix", None)
    if not tied and isinstance(base, str) and not hasattr(model, base):
        return []
    last = [name for name, _ in model.named_children()][-1:]
    names = (name.removesuffix(".weight").removesuffix(".bias") for name in (*tied, *last))
    return list(dict.fromkeys(names))


def matches_module(name: str, patterns: Iterable[str]) -> bool:
    """Return True when ``name`` is, or is inside, a module of one of these names, at any depth."""
    return any(f".{pattern}." in f".{name}." for pattern in patterns)


def unquantized_modules(model: nn.Module, config: QuantizationConfig) -> list[str]:
    """Return the names of the modules that keep full precision by a configuration; unknown ones warn."""
    skipped = config.skip_modules
    skip = get_keys_to_not_convert(model) if skipped is None else list(skipped)
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    asked = [*(skipped or ()), *(config.keep_in_fp32_modules or ())]
    unknown = [each for each in asked if not any(matches_module(name, [each]) for name in names)]
    if unknown:
        logger.warning(
            "%s has no module %s, which is to keep its precision", type(model).__name__, ", ".join(unknown)
        )
    return [*skip, *(config.keep_in_fp32_modules or ())]


def list_convertible_layers(model: nn.Module, unquantized: Sequence[str]) -> Iterator[tuple[str, nn.Linear]]:
    """Yield (name, layer) of the linear layers of a model that are to be quantized, shared ones by all names.

    A layer whose weight is tied to another module's keeps full precision: quantized, it would be untied.
    """
    uses = Counter(id(tensor) for module in model.modules() for tensor in module._parameters.values())
    for name, module in model.named_modules(remove_duplicate=False):
        # Subclasses compute something else with the weight, or are converted already.
        if type(module) is not nn.Linear or not name or uses[id(module.weight)] > 1:
            continue
        if not matches_module(name, unquantized):
            yield name, module


def replace_layers(
    model: nn.Module, quantizer: Quantizer, unquantized: Sequence[str]
) -> dict[str, nn.Module]:
    """Replace the linear layers of a model by layers that are not quantized yet; return them by name."""
    made: dict[int, nn.Module] = {}
    replaced: dict[str, nn.Module] = {}
    for name, linear in list(list_convertible_layers(model, unquantized)):
        layer = made.get(id(linear)) or quantizer.make_layer(linear).train(linear.training)
        made[id(linear)] = layer
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._modules[attribute] = layer
        replaced[name] = layer
    return replaced


def restore_linear_layers(model: nn.Module, quantizer: Quantizer) -> None:
    """Replace the quantized layers of a model by ``nn.Linear`` without values, shared ones by one."""
    made: dict[int, nn.Module] = {}
    for name, layer in list[tuple[str, Any]](model.named_modules(remove_duplicate=False)):
        if quantizer.is_quantized_layer(layer):
            bias = layer.bias is not None
            linear = nn.Linear(layer.in_features, layer.out_features, bias, device="meta")
            owner, _, attribute = name.rpartition(".")
            model.get_submodule(owner)._modules[attribute] = made.setdefault(id(layer), linear)
            made[id(layer)].train(layer.training)


# ------------------------------------------------------------------------------------------------- training

# Each quantized model, with the names of the parameters that require gradients as it is loaded.
quantized_models: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def record_trainable(model: nn.Module) -> None:
    """Note which parameters of a model that was just quantized require gradients."""
    quantized_models[model] = frozenset(name for name, p in model.named_parameters() if p.requires_grad)


def keeps_placement(model: nn.Module) -> bool:
    """Return True for a dispatched model, with hooks on it or in 8 or 4 bits, that must not be moved.

    One whose device map only says where it was loaded (``from_pretrained(device_map="cpu")``) is moved.
    """
    quantized = any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (8, 4))
    return quantized or hook_of(model) is not None


def check_trainable(
    model: nn.Module, *, several: bool, trained: bool, can_train_on_cpu: Callable[[], bool] | None = None
) -> None:
    """Raise when a model with offloaded weights, or in 8 or 4 bits, cannot be trained as asked.

    Args:
        model: the model.
        several: several processes will train it.
        trained: an optimizer is prepared with it.
        can_train_on_cpu: whether bitsandbytes computes on the CPU too; None where nothing is to be trained.

    Raises:
        PrepareError: weights that are offloaded cannot be trained, or not by several processes.
    """
    offloaded = [(name, p) for name, p in model.named_parameters() if isinstance(p, OffloadedTensor)]
    if offloaded and several:
        raise PrepareError(
            "a model whose weights are offloaded cannot be trained by several processes",
            why="each process would hold its own copy of the weights in memory, and exchange them all",
            fix="start one process, or load the model without device_map and let the launcher shard it",
        )
    learning = [name for name, p in offloaded if p.requires_grad]
    if trained and learning:
        raise PrepareError(
            f"{learning[0]} is offloaded and cannot be trained"
            + (f", nor can {len(learning) - 1} more" if len(learning) > 1 else ""),
            why="offloaded weights are dropped after each forward: their gradients have nowhere to go",
            fix="freeze them, model.requires_grad_(False), and train adapters beside them that are smaller, "
            "or name the modules that are trained in the device map with an accelerator",
        )
    bits = next((bits for bits in (8, 4) if getattr(model, f"is_loaded_in_{bits}bit", False)), None)
    if bits is not None and can_train_on_cpu is not None:
        _check_quantized(model, bits, can_train_on_cpu)


def _check_quantized(model: nn.Module, bits: int, can_train_on_cpu: Callable[[], bool]) -> None:
    """Raise when a model in 8 or 4 bits is to be trained while its device map offloads parts of it.

    Args:
        model: the model; one that transformers has quantized says so by ``is_loaded_in_8bit`` or
            ``is_loaded_in_4bit``, and where its parts are by ``hf_device_map``.
        bits: 8 or 4.
        can_train_on_cpu: whether bitsandbytes computes on the CPU too.

    Raises:
        PrepareError: a part is on the disk, or on the CPU where bitsandbytes does not compute there.
    """
    places: Mapping[str, Any] = getattr(model, "hf_device_map", None) or {}
    refused = {name: place for name, place in places.items() if place in ("cpu", "disk")}
    if not refused or ("disk" not in refused.values() and can_train_on_cpu()):
        return
    name, place = next(iter(refused.items()))
    raise PrepareError(
        f"a model in {bits} bits cannot be trained with {name or 'all of it'} on the {place}",
        why="bitsandbytes keeps what the backward of a layer needs on the accelerator that computes it",
        fix='load it with device_map={"": accelerator.device}; to evaluate it, '
        "accelerator.prepare_model(model, evaluation_mode=True)",
    )


def check_adapters(models: Iterable[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse optimizers over a quantized model that was given no adapters, and of which nothing is frozen.

    One that trains some of the unquantized parameters alone, such as the head, is meant so.

    Args:
        models: the models; those that ``load_and_quantize_model`` has not made are not looked at.
        optimizers: the optimizers that are prepared with them.

    Raises:
        PrepareError: they train none of the model's parameters, or just all that are not quantized.
    """
    bases = [part for model in models for part in model.modules() if part in quantized_models]
    if not bases or not optimizers:
        return
    params = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    trained = {id(p) for p in params if p.requires_grad}
    for base in bases:
        names = quantized_models[base]
        unquantized = {id(p) for name, p in base.named_parameters() if name in names}
        if trained and (trained != unquantized or len(unquantized) != len(names)):
            continue
        rest = "all but its quantized linear layers" if trained else "nothing"
        raise PrepareError(
            f"the {type(base).__name__} is quantized and has no adapters: its optimizer would train {rest}",
            why="weights in 8 or 4 bits get no gradients",
            fix="add adapters (peft.get_peft_model(model, LoraConfig(...))), load the model unquantized, or "
            "give the optimizer only those parameters that you mean to train",
        )
