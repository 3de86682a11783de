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

from accelerate.core.argument_checks import check_arguments
from accelerate.core.kwargs_handler import KwargsHandler
from accelerate.core.setting import describe_fields, load_fields, load_settings
from accelerate.precision.float8.library import FITTING_SHAPE, MULTIPLE, Float8Library
from accelerate.precision.recipes.fp8 import FP8Settings, TEOptions, require_library

_PARAMETERS = ("weight", "bias")


@check_arguments
@describe_fields
@dataclass
class TERecipeKwargs(TEOptions, KwargsHandler):
    """A recipe for TransformerEngine: its ``DelayedScaling``, or ``MXFP8BlockScaling``.

    Raises:
        MissingExtraError: TransformerEngine is not installed.
        UnknownNameError: a format or algorithm that does not exist.
    """

    def __post_init__(self) -> None:
        require_library("TE", "TERecipeKwargs")
        load_fields(self, TEOptions)
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
        scaling = "MXFP8 block scaling" if self.recipe.use_mxfp8_block_scaling else "delayed scaling"
        return f"TransformerEngine, {scaling}, {self.recipe.fp8_format}"

    def is_converted(self, module: nn.Module) -> bool:
        """Return whether a module is a linear layer of TransformerEngine."""
        import transformer_engine.pytorch as te

        return isinstance(module, te.Linear)

    def explain_skipped(self, model: nn.Module, name: str, module: nn.Module) -> str:
        """Return why a layer is not converted: by its class or its shape."""
        if not name:
            return "the model itself cannot be replaced in place"
        return _explain_skipped(module)

    def explain_unused(self, option: str) -> str:
        """Return why a field of the recipe is not passed on: the library's recipe does not have it."""
        fields = {field.name for field in dataclasses.fields(TEOptions)} - {
            "use_autocast_during_eval",
            "use_mxfp8_block_scaling",
        }
        taken = {field.name for field in dataclasses.fields(_recipe_class(self.recipe))}
        if option in fields - taken:
            return f"the {_recipe_class(self.recipe).__name__} of this TransformerEngine does not have it"
        return ""

    def convert_layers(self, model: nn.Module, names: frozenset[str]) -> None:
        """Replace the layers and all layer norms; parameters stay the same objects."""
        _replace_layers(model, lambda name, module: name in names or type(module) is nn.LayerNorm)

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

    return recipes.MXFP8BlockScaling if recipe.use_mxfp8_block_scaling else recipes.DelayedScaling


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

    def chosen(name: str, module: nn.Module) -> bool:
        if isinstance(module, norm):
            return _convert_ln
        fits = not to_transformer_engine or not _explain_skipped(module)
        return _convert_linear and isinstance(module, linear) and fits

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
    library.attach_context(model)
    return model


def _explain_skipped(module: nn.Module) -> str:
    if type(module) is not nn.Linear:
        return f"a {type(module).__name__} may compute otherwise than torch.nn.Linear"
    if module.in_features % MULTIPLE or module.out_features % MULTIPLE:
        return f"{module.in_features} x {module.out_features}, and {FITTING_SHAPE}"
    return ""


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
