"""The protocol of a library for 8-bit floats, and the report on the layers that it converts."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from accelerate.core.errors import DeviceError, PrepareError
from accelerate.device.base import Device
from accelerate.precision.base import FORWARD_CONTEXTS, LibraryContextHook
from accelerate.precision.recipes.fp8 import require_library

# The sides of a matrix that the units for 8-bit floats take.
MULTIPLE = 16


@dataclass(frozen=True)
class ConversionReport:
    """The linear layers of a model that are converted to 8-bit floats, and why the others are not.

    Attributes:
        library: the library and its recipe, as text.
        converted: names of the layers that are or will be converted.
        skipped: the reason for each other layer, by name.
        filters_layers: the recipe of the library can say which layers are converted.
        program_converts: a function of the program converts the layers that it chooses, if any.
    """

    library: str
    converted: tuple[str, ...]
    skipped: dict[str, str]
    filters_layers: bool = True
    program_converts: bool = False

    @property
    def counts(self) -> str:
        """``22 of 26 linear layers``."""
        return f"{len(self.converted)} of {len(self.converted) + len(self.skipped)} linear layers"

    @property
    def reasons(self) -> str:
        """Each reason once, with the layers that it holds for."""
        names: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():
            names.setdefault(reason, []).append(name or "the model itself")
        return "; ".join(f"not {', '.join(layers)}: {reason}" for reason, layers in names.items())

    def __str__(self) -> str:
        rest = f" ({self.reasons})" if self.skipped else ""
        return f"{self.counts} compute in 8-bit floats by {self.library}{rest}"

    def check(self) -> None:
        """Raise PrepareError when no layer is converted, unless the program chooses the layers."""
        if self.converted or self.program_converts:
            return
        chosen = "that module_filter_func takes, " if self.filters_layers else ""
        raise PrepareError(
            "mixed_precision='fp8' converts no layer of the model",
            why=self.reasons or "it has no torch.nn.Linear",
            fix=f"use mixed_precision='bf16', or give the model linear layers {chosen}with sides that are "
            f"multiples of {MULTIPLE}",
        )


class Float8Library(ABC):
    """A library that computes matrix products of linear layers in 8-bit floats.

    Args:
        recipe: its kwargs handler.
        device: the device it runs on.

    Attributes:
        backend: its name in ``fp8_backend``.
        supports_tensor_parallel: its layers compute on tensor parallel shards of their weights.
        filters_layers: its recipe can say which layers are converted.
        has_context: forwards run in ``forward_context``.
        gathers_float8: the strategy all-gathers weights through the extension of a tensor subclass.
    """

    backend: ClassVar[str]
    supports_tensor_parallel: ClassVar[bool] = True
    filters_layers: ClassVar[bool] = True
    has_context: ClassVar[bool] = False
    gathers_float8: bool = False

    def __init__(self, recipe: Any, device: Device) -> None:
        self.recipe, self.device = recipe, device

    def check(self) -> None:
        """Refuse a machine without the library, or a device without units for 8-bit floats.

        Raises:
            MissingExtraError: the library is not installed.
            DeviceError: the device lacks this format.
        """
        require_library(self.backend, "mixed_precision='fp8'")
        if not self.device.supports("fp8") and not self.emulates:
            raise DeviceError(
                f"mixed_precision='fp8' does not work on {self.device.type} here",
                why="the device has no units for 8-bit floats",
                fix="use mixed_precision='bf16', or another device",
            )

    @property
    def emulates(self) -> bool:
        """Return whether products are emulated, which is no faster."""
        return False

    @property
    def program_converts(self) -> bool:
        """Return whether a function of the program converts the layers that it chooses."""
        return False

    @abstractmethod
    def describe(self) -> str:
        """Return the library and its recipe, as text."""

    @abstractmethod
    def is_converted(self, module: nn.Module) -> bool:
        """Return whether a module is one of the library's layers."""

    @abstractmethod
    def skip_rule(self, model: nn.Module) -> Callable[[str, nn.Linear], str]:
        """Return a function of the name and a fitting layer: why it is not converted; empty when it is."""

    @abstractmethod
    def convert_layers(self, model: nn.Module, names: frozenset[str]) -> None:
        """Replace the linear layers with these names."""

    def explain_unused(self, option: str) -> str:
        """Return why an option of the recipe makes no difference here; empty if it is used."""
        return ""

    def forward_context(self, training: bool) -> AbstractContextManager[Any]:
        """Return the context of a forward, entered inside of autocast."""
        return nullcontext()

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow the steps of a prepared optimizer."""
        return

    def attach_context(self, model: nn.Module) -> None:
        """Run every forward of ``model`` in ``forward_context``, once."""
        if any(isinstance(hook, _ContextEntry) for hook in model._forward_pre_hooks.values()):
            return
        entry = _ContextEntry(self)
        model.register_forward_pre_hook(entry)
        model.register_forward_hook(entry.leave, always_call=True)

    def report(self, model: nn.Module) -> ConversionReport:
        """Return which layers are converted, or will be."""
        converted, skipped, explain = [], {}, self.skip_rule(model)
        for name, module in self.layers(model):
            reason = "" if self.is_converted(module) else explain_unfit(module) or explain(name, module)
            if reason:
                skipped[name] = reason
            else:
                converted.append(name)
        facts = self.filters_layers, self.program_converts
        return ConversionReport(self.describe(), tuple(converted), skipped, *facts)

    def layers(self, model: nn.Module) -> Iterator[tuple[str, Any]]:
        """Yield the linear layers of a model by name, converted or not."""
        return (
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) or self.is_converted(module)
        )

    def convert(self, model: nn.Module) -> None:
        """Convert the layers of ``model`` that the recipe takes, in place; those converted stay.

        Raises:
            PrepareError: there is none.
        """
        report = self.report(model)
        report.check()
        names = {name for name, module in self.layers(model) if not self.is_converted(module)}
        self.convert_layers(model, frozenset(names & {*report.converted}))


class _ContextEntry(LibraryContextHook):
    """The forward pre-hook that enters the context of a library; ``leave`` is the hook that exits it."""

    def __init__(self, library: Float8Library) -> None:
        self.library = library

    def __call__(self, module: nn.Module, args: Any) -> None:
        context = self.library.forward_context(module.training)
        FORWARD_CONTEXTS.enter(context, self, None if is_dynamo_compiling() else sys._getframe(1))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        FORWARD_CONTEXTS.exit(self)


def tied_parameters(model: nn.Module) -> set[int]:
    """Return the ids of parameters that several modules hold."""
    holders = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    return {key for key, count in holders.items() if count > 1}


def is_misfit(layer: nn.Linear) -> bool:
    """Return whether the units for 8-bit floats do not take the sides of a layer."""
    return bool(layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)


def explain_unfit(layer: nn.Linear) -> str:
    """Return why no library converts a linear layer: its class or its shape; empty if one may."""
    if type(layer) is not nn.Linear:
        return f"a {type(layer).__name__} may compute otherwise than torch.nn.Linear"
    if is_misfit(layer):
        return f"{layer.in_features} x {layer.out_features}, and both sides must be multiples of {MULTIPLE}"
    return ""
