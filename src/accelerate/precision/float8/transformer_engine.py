"""8-bit floats by TransformerEngine: its linear layers and layer norms, under its own autocast.

Not run here, for the library needs CUDA: tested with a fake of the library. Source: its documentation,
"transformer_engine.pytorch" and "transformer_engine.common.recipe".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from accelerate.core.argument_checks import KwargsHandler, check_arguments
from accelerate.core.errors import DeviceError, PrepareError, SettingError
from accelerate.core.lazy_names import get_override
from accelerate.core.option_report import keep_requests
from accelerate.core.setting import describe_fields, load_fields, load_settings
from accelerate.precision.float8.library import Float8Library, explain_unfit
from accelerate.precision.recipes.fp8 import FP8Settings, TEOptions, require_library

_PARAMETERS = ("weight", "bias")
DELAYED, MXFP8 = "delayed", "mxfp8"
_IN_BLOCKS = ("block", MXFP8)
# By the value of ``scaling``: the class of the recipe, and the function that tells whether a device has it.
_RECIPES = {
    DELAYED: ("DelayedScaling", "is_fp8_available"),
    "current": ("Float8CurrentScaling", "is_fp8_available"),
    "block": ("Float8BlockScaling", "is_fp8_block_scaling_available"),
    MXFP8: ("MXFP8BlockScaling", "is_mxfp8_available"),
}


@check_arguments
@describe_fields
@dataclass
class TERecipeKwargs(TEOptions, KwargsHandler):
    """A recipe for TransformerEngine, whose class ``scaling`` chooses.

    ``delayed``, the default, is its ``DelayedScaling``; ``current`` its ``Float8CurrentScaling``; ``block``
    its ``Float8BlockScaling``; ``mxfp8``, or ``use_mxfp8_block_scaling``, its ``MXFP8BlockScaling``. Without
    ``fp8_format`` the last two compute in E4M3, as they do by themselves.

    Raises:
        MissingExtraError: TransformerEngine is not installed.
        SettingError: ``scaling`` and ``use_mxfp8_block_scaling`` contradict each other.
        UnknownNameError: a format or algorithm that does not exist.
    """

    def __post_init__(self) -> None:
        require_library("TE", "TERecipeKwargs")
        loaded = load_fields(self, TEOptions)
        keep_requests(self, loaded)
        if self.use_mxfp8_block_scaling and self.scaling not in (None, MXFP8):
            raise SettingError(
                f"scaling={self.scaling!r} and use_mxfp8_block_scaling=True contradict each other",
                fix=f"leave one of them out; use_mxfp8_block_scaling=True is scaling={MXFP8!r}",
            )
        self.scaling = MXFP8 if self.use_mxfp8_block_scaling else self.scaling or DELAYED
        if self.scaling in _IN_BLOCKS and loaded.origins["fp8_format"][0].source == "default":
            self.fp8_format = "E4M3"
        if self.override_linear_precision is None:
            settings = load_settings(FP8Settings).value
            self.override_linear_precision = (
                bool(settings.override_fprop),
                bool(settings.override_dgrad),
                bool(settings.override_wgrad),
            )


class TransformerEngine(Float8Library):
    """Layers of TransformerEngine, which take the place of torch's and keep their parameters."""

    backend: ClassVar[str] = "TE"
    supports_tensor_parallel: ClassVar[bool] = False
    filters_layers: ClassVar[bool] = False
    has_context: ClassVar[bool] = True

    def describe(self) -> str:
        """Return the recipe."""
        scaling = "MXFP8 block" if self.recipe.scaling == MXFP8 else self.recipe.scaling
        return f"TransformerEngine, {scaling} scaling, {self.recipe.fp8_format}"

    def check(self) -> None:
        """Refuse a device without 8-bit floats, and a recipe that the library or the device does not have.

        Raises:
            MissingExtraError: the library is not installed.
            DeviceError: the device lacks this format, or the scaling factors of this recipe.
            SettingError: this version of the library does not have the recipe.
        """
        super().check()
        import transformer_engine.pytorch as te

        _recipe_class(self.recipe)
        # Versions before 2.9 do not have these functions; their autocast checks the device.
        probe = getattr(te, _RECIPES[self.recipe.scaling][1], None)
        available, why = probe(return_reason=True) if probe is not None else (True, "")
        if not available:
            raise DeviceError(
                f"TERecipeKwargs(scaling={self.recipe.scaling!r}) does not work on {self.device.type} here",
                why=why,
                fix="use another scaling, delayed or current for example, or mixed_precision='bf16'",
            )

    def is_converted(self, module: nn.Module) -> bool:
        """Return whether a module is a linear layer of TransformerEngine."""
        import transformer_engine.pytorch as te

        return isinstance(module, te.Linear)

    @property
    def program_converts(self) -> bool:
        """Return whether the program has replaced ``convert_model``."""
        return get_override("accelerate.accelerator", "convert_model", convert_model) is not convert_model

    def skip_rule(self, model: nn.Module) -> Callable[[str, nn.Linear], str]:
        """Return why the model itself is not converted, or any layer where the program converts."""
        if self.program_converts:
            return lambda *_: "left to the convert_model of the program"
        return lambda name, _: "" if name else "the model itself cannot be replaced in place"

    def explain_unused(self, option: str) -> str:
        """Return why a field of the recipe is not passed on: the library's recipe does not have it."""
        fields = {field.name for field in dataclasses.fields(TEOptions)} - {
            "use_autocast_during_eval",
            "use_mxfp8_block_scaling",
            "scaling",
        }
        taken = {field.name for field in dataclasses.fields(_recipe_class(self.recipe))}
        if option in fields - taken:
            return f"the {_recipe_class(self.recipe).__name__} of this TransformerEngine does not have it"
        return ""

    def convert_layers(self, model: nn.Module, names: frozenset[str]) -> None:
        """Replace the layers and the layer norms; parameters stay the same objects."""
        # Some programs replace this public function, as their models have layers of the library already.
        convert = get_override("accelerate.accelerator", "convert_model", convert_model)
        with torch.no_grad():  # theirs may copy values
            convert(model)

    def attach_context(self, model: nn.Module) -> None:
        """Run every forward of ``model`` in ``forward_context``, or in what the program replaces it by."""
        wrap = get_override("accelerate.accelerator", "apply_fp8_autowrap", apply_fp8_autowrap)
        if wrap is apply_fp8_autowrap:
            super().attach_context(model)
        elif wrap(model, self.recipe) is not model:
            raise PrepareError(
                f"the program's apply_fp8_autowrap returns another object than the {type(model).__name__}",
                why="models are prepared in place",
                fix="change model.forward, or register hooks, and return the model",
            )

    def forward_context(self, training: bool) -> AbstractContextManager[Any]:
        """Return TransformerEngine's autocast, off in evaluation unless the recipe says otherwise."""
        import transformer_engine.pytorch as te

        enabled = training or bool(self.recipe.use_autocast_during_eval)
        return te.fp8_autocast(enabled=enabled, fp8_recipe=make_te_recipe(self.recipe))


def make_te_recipe(recipe: TERecipeKwargs) -> Any:
    """Return the recipe as an object of TransformerEngine, with the fields that its version has."""
    from transformer_engine.common import recipe as recipes

    recipe_class = _recipe_class(recipe)
    taken = {field.name for field in dataclasses.fields(recipe_class)}
    values = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(TEOptions)}
    values["fp8_format"] = getattr(recipes.Format, str(recipe.fp8_format))
    return recipe_class(**{name: value for name, value in values.items() if name in taken})


def _recipe_class(recipe: TERecipeKwargs) -> Any:
    from transformer_engine.common import recipe as recipes

    names = {scaling: name for scaling, (name, _) in _RECIPES.items() if hasattr(recipes, name)}
    if recipe.scaling not in names:
        raise SettingError(
            f"scaling={recipe.scaling!r}: this TransformerEngine has no {_RECIPES[str(recipe.scaling)][0]}",
            why=f"it has {', '.join(names)}",
            fix="upgrade transformer_engine, or use one of these",
        )
    return getattr(recipes, names[recipe.scaling])


def convert_model(
    model: nn.Module,
    to_transformer_engine: bool = True,
    _convert_linear: bool = True,
    _convert_ln: bool = True,
) -> None:
    """Replace linear layers and layer norms inside ``model`` by those of TransformerEngine, or back.

    Args:
        model: the model; parameters stay the same objects.
        to_transformer_engine: False puts torch's layers back.

    Raises:
        MissingExtraError: TransformerEngine is not installed.
    """
    require_library("TE", "convert_model()")
    import transformer_engine.pytorch as te

    linear, norm = (nn.Linear, nn.LayerNorm) if to_transformer_engine else (te.Linear, te.LayerNorm)

    def chosen(name: str, module: Any) -> bool:
        if isinstance(module, norm):
            return _convert_ln and _has_counterpart(module)
        fits = isinstance(module, linear) and not (to_transformer_engine and explain_unfit(module))
        return _convert_linear and fits

    _replace_layers(model, chosen)


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Return whether a model has layers of TransformerEngine.

    Raises:
        MissingExtraError: TransformerEngine is not installed.
    """
    require_library("TE", "has_transformer_engine_layers()")
    import transformer_engine.pytorch as te

    kinds = (te.Linear, te.LayerNorm, te.TransformerLayer)
    return any(isinstance(module, kinds) for module in model.modules())


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """Return a forward under TransformerEngine's autocast, which is off in evaluation.

    Args:
        model_forward: the bound forward of a model.
        fp8_recipe: a recipe of TransformerEngine.
        use_during_eval: compute in 8 bits in evaluation too.

    Raises:
        MissingExtraError: TransformerEngine is not installed.
    """
    require_library("TE", "contextual_fp8_autocast()")
    import transformer_engine.pytorch as te

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with te.fp8_autocast(enabled=use_during_eval or self.training, fp8_recipe=fp8_recipe):
            return model_forward(*args, **kwargs)

    forward.__wrapped__ = model_forward  # type: ignore[attr-defined]
    return forward


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: TERecipeKwargs | None) -> nn.Module:
    """Run every forward of ``model`` under TransformerEngine's autocast, by hooks.

    Args:
        model: the model.
        fp8_recipe_handler: the recipe; None takes one from variables and defaults.

    Raises:
        MissingExtraError: TransformerEngine is not installed.
    """
    from accelerate import device

    require_library("TE", "apply_fp8_autowrap()")
    library = TransformerEngine(fp8_recipe_handler or TERecipeKwargs(), device.detect())
    Float8Library.attach_context(library, model)  # the program's own function may call this one
    return model


def _has_counterpart(norm: Any) -> bool:
    """Return whether the other library has such a layer norm: one of torch is no subclass, and has a bias."""
    is_plain = type(norm) is nn.LayerNorm or not isinstance(norm, nn.LayerNorm)
    return is_plain and norm.weight is not None and norm.bias is not None and norm.weight.dim() == 1


def _replace_layers(model: nn.Module, chosen: Callable[[str, nn.Module], bool]) -> None:
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if name and chosen(name, module):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, _counterpart(module))


def _counterpart(module: Any) -> nn.Module:
    """Return the layer of the other library, with the parameters of this one."""
    import transformer_engine.pytorch as te

    options = {"device": module.weight.device}
    if isinstance(module, nn.Linear | te.Linear):
        kind = nn.Linear if isinstance(module, te.Linear) else te.Linear
        has_bias = isinstance(module.bias, nn.Parameter) and module.bias.numel() > 0
        other = kind(module.in_features, module.out_features, bias=has_bias, **options)
    else:
        kind = nn.LayerNorm if isinstance(module, te.LayerNorm) else te.LayerNorm
        other = kind(module.weight.shape[0], eps=module.eps, **options)
    for name in _PARAMETERS:
        if isinstance(getattr(other, name), torch.Tensor) and getattr(other, name).numel():
            setattr(other, name, getattr(module, name))
    return other.train(module.training)
