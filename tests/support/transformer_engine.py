"""A fake of TransformerEngine, which needs CUDA: its linear layers round to e4m3 inside of its autocast."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator


class Format(Enum):
    """The formats of the library, by name."""

    HYBRID, E4M3, E5M2 = range(3)


@dataclass
class DelayedScaling:
    """As in version 2: without ``interval``."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)


@dataclass
class MXFP8BlockScaling:
    """A recipe without a history."""

    margin: int = 0
    fp8_format: Format = Format.E4M3


@dataclass
class Float8CurrentScaling:
    """Scaling factors of the tensor as it is."""

    fp8_format: Format = Format.HYBRID


@dataclass
class Float8BlockScaling:
    """Scaling factors of blocks."""

    fp8_format: Format = Format.E4M3


RECIPES = (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling)


def round_to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Round, with the gradient of the identity."""
    return values + (values.to(torch.float8_e4m3fn).to(values.dtype) - values).detach()


class Library:
    """The fake: its layers round to e4m3 inside of its autocast, and it notes each autocast."""

    def __init__(self) -> None:
        self.entered: list[tuple[bool, Any]] = []
        self.active: list[bool] = []
        library = self

        class Linear(nn.Module):
            def __init__(self, in_features: int, out_features: int, bias: bool = True, device: Any = "cuda"):
                super().__init__()
                self.in_features, self.out_features = in_features, out_features
                self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device))
                # Without a bias the library holds an empty tensor.
                self.bias: Any = nn.Parameter(torch.empty(out_features)) if bias else torch.empty(0)
                self.history = b""

            def get_extra_state(self) -> torch.Tensor:
                """The history of largest values: empty before the first forward in 8 bits."""
                return torch.tensor(list(self.history), dtype=torch.uint8)

            def set_extra_state(self, state: torch.Tensor | None) -> None:
                self.history = self.history if state is None else bytes(state.tolist())

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                weight, bias = self.weight, self.bias if self.bias.numel() else None
                if library.active and library.active[-1]:
                    self.history += b"1"
                    x, weight = (
                        v + (v.to(torch.float8_e4m3fn).to(v.dtype) - v).detach() for v in (x, weight)
                    )
                return nn.functional.linear(x, weight, bias)

        class LayerNorm(nn.Module):
            def __init__(self, normalized_shape: int, eps: float = 1e-5, device: Any = "cuda"):
                super().__init__()
                self.eps = eps
                self.weight, self.bias = (
                    nn.Parameter(torch.empty(normalized_shape, device=device)) for _ in range(2)
                )

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

        class TransformerLayer(nn.Module):
            pass

        self.Linear, self.LayerNorm, self.TransformerLayer = Linear, LayerNorm, TransformerLayer

    @contextmanager
    def fp8_autocast(self, enabled: bool, fp8_recipe: Any) -> Iterator[None]:
        """The library's context manager."""
        self.entered.append((enabled, fp8_recipe))
        self.active.append(enabled)
        try:
            yield
        finally:
            self.active.pop()


def install(monkeypatch: pytest.MonkeyPatch) -> Library:
    """Put the fake library where Python finds it, on a device that is said to have 8-bit floats."""
    library = Library()
    contents: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {
            name: getattr(library, name)
            for name in ("Linear", "LayerNorm", "TransformerLayer", "fp8_autocast")
        },
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": {each.__name__: each for each in (Format, *RECIPES)},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    device = Accelerator(cpu=True, mixed_precision="no").precision.device
    supports = device.supports
    monkeypatch.setattr(type(device), "supports", lambda self, dtype: dtype == "fp8" or supports(dtype))
    return library
