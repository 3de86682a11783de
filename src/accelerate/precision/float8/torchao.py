"""8-bit floats by torchao: linear layers whose products scale their operands as they come (dynamic scaling).

Run here: torchao 0.18 by emulation, which rounds as the hardware does. Source: torchao's ``float8`` module.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate.core.argument_checks import KwargsHandler, check_arguments
from accelerate.core.errors import SettingError
from accelerate.core.lazy_names import get_override
from accelerate.core.option_report import keep_requests
from accelerate.core.setting import describe_fields, load_fields, load_settings
from accelerate.device.base import Device
from accelerate.precision.float8.library import Float8Library, is_misfit, tied_parameters
from accelerate.precision.recipes.fp8 import TENSORWISE, AOOptions, require_library

LayerFilter = Callable[[nn.Module, str], bool]


@check_arguments
@describe_fields
@dataclass
class AORecipeKwargs(AOOptions, KwargsHandler):
    """A recipe for torchao.

    Attributes:
        config: a ``torchao.float8.Float8LinearConfig``; None makes one from the other fields.
        module_filter_func: ``(module, name) -> bool`` says which linear layers are converted; None takes all
            but the first and the last.

    Raises:
        MissingExtraError: torchao is not installed.
        SettingError: ``config`` is given together with fields that would be put into it, or two fields
            contradict each other.
    """

    def __post_init__(self) -> None:
        require_library("AO", "AORecipeKwargs")
        fields = (self.recipe_name, self.pad_inner_dim, self.enable_fsdp_float8_all_gather)
        if self.config is not None:
            if any(field is not None for field in fields):
                raise SettingError(
                    "config is given, and so are fields that belong into it", fix="set them in config"
                )
            own = ("config", "module_filter_func")
            keep_requests(self, load_settings(AOOptions, container=SimpleNamespace), *own)
            return
        from torchao.float8 import Float8LinearConfig

        keep_requests(self, load_fields(self), "module_filter_func")
        if self.recipe_name != TENSORWISE:
            if fields[2]:
                raise SettingError(
                    f"recipe_name={self.recipe_name!r} and enable_fsdp_float8_all_gather=True",
                    why="an all-gather in 8 bits needs one scale for the whole weight",
                    fix=f"leave one of them out; the all-gather goes with recipe_name={TENSORWISE!r}",
                )
            self.enable_fsdp_float8_all_gather = False
        self.config = dataclasses.replace(
            Float8LinearConfig.from_recipe_name(self.recipe_name or TENSORWISE),
            pad_inner_dim=bool(self.pad_inner_dim),
            enable_fsdp_float8_all_gather=bool(self.enable_fsdp_float8_all_gather),
        )


class TorchAO(Float8Library):
    """Layers of torchao, which keep the weights in their dtype and cast them at each product."""

    backend: ClassVar[str] = "AO"

    def __init__(self, recipe: Any, device: Device) -> None:
        super().__init__(recipe, device)
        # In the order of ``prepare``, which all ranks share.
        self._models: list[weakref.ref[nn.Module]] = []

    @property
    def emulates(self) -> bool:
        """Return whether the config asks for it, or the device is a CPU."""
        return bool(self.recipe.config.emulate) or self.device.type == "cpu"

    def describe(self) -> str:
        """Return the recipe, and whether it is emulated."""
        recipe = f" {self.recipe.recipe_name}" if self.recipe.recipe_name else ""
        emulated = f", emulated on {self.device.type}: no faster" if self.emulates else ""
        return f"torchao{recipe}{emulated}"

    def is_converted(self, module: nn.Module) -> bool:
        """Return whether a module is a ``Float8Linear``."""
        return is_ao_layer(module)

    def skip_rule(self, model: nn.Module) -> Callable[[str, nn.Linear], str]:
        """Return why a layer is not converted: by what else uses it, or by the filter."""
        chosen, tied = self.recipe.module_filter_func, tied_parameters(model)
        ends = find_first_last_linear_layers(model)

        def explain(name: str, layer: nn.Linear) -> str:
            if id(layer.weight) in tied:
                return "its weight is tied"
            if chosen is not None:
                return "" if chosen(layer, name) else "module_filter_func leaves it out"
            return "the first or last layer" if name in ends else ""

        return explain

    def explain_unused(self, option: str) -> str:
        """Return why weights are not all-gathered in 8 bits, where that was asked for."""
        asked = option == "enable_fsdp_float8_all_gather" and self.recipe.enable_fsdp_float8_all_gather
        return "no weights are all-gathered by FSDP2 alone" if asked and not self.gathers_float8 else ""

    def convert_layers(self, model: nn.Module, names: frozenset[str]) -> None:
        """Convert the layers in place; parameters stay the same objects."""
        gathers = self.gathers_float8 and self.recipe.config.enable_fsdp_float8_all_gather
        config = dataclasses.replace(
            self.recipe.config, emulate=self.emulates, enable_fsdp_float8_all_gather=gathers
        )
        # Some programs replace this public function, so as to leave out more layers: call theirs then.
        convert = get_override("accelerate.accelerator", "convert_model_to_fp8_ao", convert_model_to_fp8_ao)
        convert(model, config=config, module_filter_func=lambda _, name: name in names)
        if gathers:
            self._models = [known for known in self._models if known() not in (None, model)]
            self._models.append(weakref.ref(model))

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Compute the scales of all weights that are all-gathered in 8 bits after each step: one all-reduce.

        Without it, each weight takes an all-reduce of its own in the forward pass.
        """
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        models = [
            known
            for known in self._models
            if (model := known()) is not None and any(id(p) in stepped for p in model.parameters())
        ]
        if models:
            optimizer.register_step_post_hook(partial(_compute_scales, models))


def convert_model_to_fp8_ao(
    model: nn.Module, config: Any = None, module_filter_func: LayerFilter | None = None
) -> nn.Module:
    """Convert linear layers of a model to 8-bit floats of torchao, in place.

    Args:
        model: the model.
        config: a ``torchao.float8.Float8LinearConfig``; None takes torchao's default.
        module_filter_func: ``(module, name) -> bool`` says which linear layers are converted; None takes all
            but the first and the last whose sides are multiples of 16.

    Returns:
        The model.

    Raises:
        MissingExtraError: torchao is not installed.
    """
    require_library("AO", "convert_model_to_fp8_ao()")
    from torchao.float8 import Float8LinearConfig

    ends = find_first_last_linear_layers(model)
    default: LayerFilter = partial(filter_linear_layers, layers_to_filter=[*filter(None, ends)])
    takes = module_filter_func or default
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not is_ao_layer(module) and takes(module, name):
            _convert_layer(module, config or Float8LinearConfig())
    return model


def has_ao_layers(model: nn.Module) -> bool:
    """Return whether a model has layers of torchao for 8-bit floats.

    Raises:
        MissingExtraError: torchao is not installed.
    """
    require_library("AO", "has_ao_layers()")
    return any(map(is_ao_layer, model.modules()))


def is_ao_layer(module: nn.Module) -> bool:
    """Return whether a module is a ``Float8Linear``."""
    from torchao.float8.float8_linear import Float8Linear

    return isinstance(module, Float8Linear)


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and the last linear layer, in the order of ``named_modules``."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: list[str]) -> bool:
    """Return whether a layer is to be converted: not among ``layers_to_filter``, and of a fitting shape."""
    fits = not isinstance(module, nn.Linear) or not is_misfit(module)
    return fits and fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Return whether ``fqn`` is a linear layer in ``module`` of a fitting shape, not the first or last one.

    A layer itself, as torchao passes it to a filter, has no others to be the first of: its shape decides.
    """
    if isinstance(module, nn.Linear):
        return not is_misfit(module)
    return filter_linear_layers(
        module.get_submodule(fqn), fqn, [*filter(None, find_first_last_linear_layers(module))]
    )


def _convert_layer(layer: Any, config: Any) -> None:
    """Make ``layer`` a layer of torchao in place: plans, hooks and other modules refer to it already."""
    from torchao.float8 import convert_to_float8_training

    weight = layer.weight
    converted: Any = convert_to_float8_training(layer, config=config)
    if converted.weight is not weight:
        # The parameter stays the same object, which optimizers hold: it becomes the subclass.
        converted.weight._tensor = weight.detach()
        torch.utils.swap_tensors(weight, converted.weight)
        layer.register_state_dict_post_hook(_unwrap_weight)
    layer.__class__ = type(converted)
    vars(layer).update({name: value for name, value in vars(converted).items() if name not in vars(layer)})
    layer.register_forward_pre_hook(_cast_input, with_kwargs=True)


def _compute_scales(models: list[weakref.ref[nn.Module]], *step: Any) -> None:
    """Compute the scales of the weights of these models; the hook after a step of their optimizer."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    for model in filter(None, (known() for known in models)):
        precompute_float8_dynamic_scale_for_fsdp(model)
        for module in model.modules():
            if is_ao_layer(module) and isinstance(module.weight, DTensor):
                _bind_scale(module.weight)


def _bind_scale(weight: Any) -> None:
    """Make the scale of a weight hold for its present values alone.

    A weight that is written otherwise, by loading a checkpoint for example, is scaled in the next forward.
    """
    local, parameter = weight._local_tensor, weakref.ref(weight)
    scale, version = local._precomputed_scale, weight._version

    def fsdp_pre_all_gather(mesh: Any) -> Any:
        now = parameter()
        if local._precomputed_scale is scale and (now is None or now._version != version):
            local._precomputed_scale = None
        return type(local).fsdp_pre_all_gather(local, mesh)

    local.fsdp_pre_all_gather = fsdp_pre_all_gather


def _unwrap_weight(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put the shard itself into a state dict, not the subclass that all-gathers it in 8 bits."""
    value = state.get(name := f"{prefix}weight")
    local: Any = getattr(value, "_local_tensor", value)
    if hasattr(local, "_linear_mm_config"):
        local = local._tensor
        state[name] = (
            local
            if not isinstance(value, DTensor)
            else DTensor.from_local(
                local, value.device_mesh, value.placements, shape=value.shape, stride=value.stride()
            )
        )


def _cast_input(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Cast the input to the dtype of autocast: torchao's layer does that for CUDA only."""
    (value,) = args or kwargs.values()
    kind = value.device.type
    return ((value.to(torch.get_autocast_dtype(kind)),), {}) if torch.is_autocast_enabled(kind) else None
