"""8-bit floats: products of linear layers by torchao, TransformerEngine or MS-AMP, the rest in bfloat16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

from accelerate.core import packages
from accelerate.core.argument_checks import KwargsHandler, check_arguments
from accelerate.core.errors import SettingError, UnknownNameError, warn_user
from accelerate.core.option_report import OptionStatus, RequestedOption, keep_requests
from accelerate.core.setting import declared_settings, describe_fields, load_fields, load_settings
from accelerate.precision.autocast import AutocastKwargs, HalfPrecisionAutocast
from accelerate.precision.base import LayerConversion
from accelerate.precision.float8.library import ConversionReport, Float8Library
from accelerate.precision.float8.torchao import AORecipeKwargs, TorchAO
from accelerate.precision.float8.transformer_engine import TERecipeKwargs, TransformerEngine
from accelerate.precision.recipes.fp8 import (
    MSAMP_REFUSAL,
    FP8Settings,
    MSAMPOptions,
    choose_backend,
    require_library,
)


@check_arguments
@describe_fields
@dataclass
class MSAMPRecipeKwargs(MSAMPOptions, KwargsHandler):
    """A recipe for MS-AMP; training by it is refused: see ``MSAMP_REFUSAL``.

    Raises:
        UnknownNameError: another level.
    """

    def __post_init__(self) -> None:
        keep_requests(self, load_fields(self, MSAMPOptions))

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from MS-AMP's own defaults, also where a variable set them."""
        defaults = {row.field: row.fallback for row in declared_settings(MSAMPOptions)}
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}


@check_arguments
@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The recipe of either library in one class; deprecated for the classes above.

    Attributes:
        backend: ``TE`` or ``MSAMP``; None takes ``ACCELERATE_FP8_BACKEND``, then the one installed.

    Raises:
        UnknownNameError: another library.
        MissingExtraError: the library is not installed.
    """

    backend: str | None = None

    def __post_init__(self) -> None:
        warn_user(
            "FP8RecipeKwargs is deprecated: use TERecipeKwargs, MSAMPRecipeKwargs or AORecipeKwargs",
            FutureWarning,
        )
        backend = load_settings(FP8Settings, code={"fp8_backend": self.backend}).value.backend
        if backend is None:
            backend = "MSAMP" if packages.is_installed("msamp") else "TE"
        if backend not in ("MSAMP", "TE"):
            raise UnknownNameError("value of backend", str(backend), ("MSAMP", "TE"))
        self.backend = backend
        if self.backend == "TE":
            TERecipeKwargs.__post_init__(self)
        else:
            MSAMPRecipeKwargs.__post_init__(self)

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of the recipe class of its library, see there."""
        recipe = TERecipeKwargs if self.backend == "TE" else MSAMPRecipeKwargs
        return recipe(**{field.name: getattr(self, field.name) for field in fields(recipe)}).to_kwargs()


_LIBRARIES: Mapping[str, type[Float8Library]] = {"AO": TorchAO, "TE": TransformerEngine}
# The library of each recipe; the class that derives from two others comes before them.
_RECIPES: Mapping[type[KwargsHandler], str] = {
    FP8RecipeKwargs: "",
    AORecipeKwargs: "AO",
    TERecipeKwargs: "TE",
    MSAMPRecipeKwargs: "MSAMP",
}


class FP8MixedPrecision(HalfPrecisionAutocast):
    """Linear layers converted to 8-bit floats, under bfloat16 autocast; the weights keep their dtype."""

    name: ClassVar[str] = "fp8"
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    autocast_format: ClassVar[str | None] = "bf16"
    handler_classes: ClassVar[tuple[type[KwargsHandler], ...]] = (AutocastKwargs, *_RECIPES)

    def check(self) -> None:
        """Refuse a missing library, two recipes, and a device without 8-bit floats.

        Raises:
            MissingExtraError: no library is installed, or not the chosen one.
            SettingError: two recipes are given, or MS-AMP is asked for.
            DeviceError: the device lacks this format.
        """
        self.library.check()

    @cached_property
    def library(self) -> Float8Library:
        """The library of the recipe that was given, else of ``fp8_backend``, else one that is installed."""
        given = [kind for kind in _RECIPES if kind in self.handlers]
        if len(given) > 1:
            raise SettingError(
                f"two recipes for fp8 are given: {' and '.join(kind.__name__ for kind in given)}",
                fix="keep the one of the library that is to compute",
            )
        recipe = self.handlers[given[0]] if given else None
        backend = (_RECIPES[given[0]] or getattr(recipe, "backend", "")) if given else ""
        backend = backend or choose_backend(load_settings(FP8Settings).value.backend)
        if backend not in _LIBRARIES:
            raise SettingError(
                f"mixed_precision='fp8' does not train by {backend}",
                why=MSAMP_REFUSAL,
                fix="use AORecipeKwargs() or --fp8_backend AO: pip install torchao",
            )
        require_library(backend, "mixed_precision='fp8'")
        if recipe is None:
            recipe = next(kind for kind, name in _RECIPES.items() if name == backend)()
        return _LIBRARIES[backend](recipe, self.device)

    @property
    def recipe(self) -> Any:
        """The recipe, as given or made from variables."""
        return self.library.recipe

    @property
    def fp8_backend(self) -> str:
        """The library by its name in ``fp8_backend``."""
        return self.library.backend

    def set_gather_extension(self, supported: bool) -> None:
        """Let the library cast weights before they are all-gathered, where the strategy can."""
        self.library.gathers_float8 = supported

    def check_tensor_parallel(self, size: int) -> None:
        """Refuse tensor parallelism where the layers of the library cannot compute on shards.

        Raises:
            SettingError: they cannot.
        """
        if not self.library.supports_tensor_parallel:
            raise SettingError(
                f"mixed_precision='fp8' by {self.library.describe()} does not go with tp_size={size}",
                why="its layers cannot compute on tensor parallel shards of their weights",
                fix="use AORecipeKwargs() or --fp8_backend AO (pip install torchao), or leave tp_size out",
            )

    @property
    def conversion(self) -> LayerConversion:  # type: ignore[override]
        """The library; without its context, layers of TransformerEngine compute in ordinary formats."""
        return LayerConversion(self.library.describe(), is_permanent=not self.library.has_context)

    def attach(self, model: nn.Module) -> None:
        """Convert the layers, and attach bfloat16 autocast by hooks."""
        self.library.convert(model)
        super().attach(model)
        if self.library.has_context:
            self.library.attach_context(model)

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the library follow the steps of a prepared optimizer."""
        self.library.attach_optimizer(optimizer)

    def report_conversion(self, model: nn.Module) -> ConversionReport:
        """Return which linear layers of a model are converted, or will be, and why the others are not."""
        return self.library.report(model)

    def describe_attachment(self, models: Sequence[nn.Module]) -> str:
        """Return the clause for the plan: the layers of each model.

        Raises:
            PrepareError: a model has no layer that is converted.
        """
        reports = list(map(self.report_conversion, models))
        for report in reports:
            report.check()
        return f"{'; '.join(map(str, reports))}; {self.describe_conversion()}"

    def describe_conversion(self) -> str:
        """Return the clause on all that is not converted."""
        return f"the rest: {super().describe_conversion()}"

    def explain_missing(self, model: nn.Module) -> str:
        """Return why no layer of ``model`` computes in 8-bit floats; empty if some do."""
        converted = any(map(self.library.is_converted, model.modules()))
        return "" if converted else f"the {type(model).__name__} has no layer in 8-bit floats"

    def explain_unused(self, option: str) -> str:
        """Return why an option of the recipe makes no difference here; empty if it is used."""
        return self.library.explain_unused(option)

    def report_option(self, option: RequestedOption, models: Sequence[nn.Module]) -> OptionStatus:
        """Report the layers of the prepared models that are converted, counted on the models."""
        done = {id(m): sum(self.library.is_converted(part) for part in m.modules()) for m in models}
        reports = [self.report_conversion(model) for model in models]
        total = sum(len(report.converted) + len(report.skipped) for report in reports)
        why = "; ".join(report.reasons for report in reports if report.skipped)
        return option.report_count(sum(done.values()), total, "linear layers convert", why)


PLUGIN = FP8MixedPrecision
