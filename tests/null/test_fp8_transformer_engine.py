"""B4: 8-bit floats by TransformerEngine, with a fake of the library; MS-AMP is refused."""

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
from accelerate.core.errors import DeviceError, FeatureNotBuiltError, SettingError
from accelerate.utils import FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accelerate.utils.transformer_engine import (
    apply_fp8_autowrap,
    contextual_fp8_autocast,
    convert_model,
    has_transformer_engine_layers,
)
from tests.support.parity import adamw, decoder, loader, loss_of, plain


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

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                weight, bias = self.weight, self.bias if self.bias.numel() else None
                if library.active and library.active[-1]:
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


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Library:
    """The fake library, on a device that is said to have 8-bit floats."""
    library = Library()
    contents: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {
            name: getattr(library, name)
            for name in ("Linear", "LayerNorm", "TransformerLayer", "fp8_autocast")
        },
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": {
            each.__name__: each for each in (Format, DelayedScaling, MXFP8BlockScaling)
        },
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


def fp8(recipe: Any) -> Accelerator:
    return Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[recipe])


def test_it_trains_as_bf16_does(engine: Library) -> None:
    accelerator = fp8(TERecipeKwargs(amax_history_len=16))
    model = decoder()
    before = dict(model.named_parameters())
    text = str(accelerator.plan(model))
    assert "25 of 25 linear layers compute in 8-bit floats by TransformerEngine, delayed scaling" in text
    model, optimizer, batches = accelerator.prepare(model, adamw(model), loader())
    assert isinstance(model.layers[0].first, engine.LayerNorm)
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(p is before[name] for name, p in model.named_parameters())
    losses = []
    for batch in batches:
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    theirs = plain(1, half=True)[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(theirs), rtol=3e-2, atol=3e-2)
    assert losses != theirs
    recipe = DelayedScaling(amax_history_len=16, amax_compute_algo="most_recent")
    assert engine.entered == [(True, recipe)] * len(losses)
    assert accelerator.fp8_backend == "TE"
    assert accelerator.te_recipe_handler.amax_history_len == 16


def test_evaluation_computes_in_8_bits_only_if_asked(engine: Library) -> None:
    for asked in (False, True):
        model = fp8(TERecipeKwargs(use_autocast_during_eval=asked)).prepare(decoder()).eval()
        with pytest.raises(TypeError):
            model()  # an error inside leaves the context
        assert not engine.active
        model(torch.zeros(1, 4, dtype=torch.long))
        assert engine.entered[-1][0] is asked


def test_block_scaling_and_fields_that_a_version_lacks(engine: Library) -> None:
    accelerator = fp8(TERecipeKwargs(use_mxfp8_block_scaling=True, fp8_format="E4M3", interval=2))
    model = accelerator.prepare(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 15)))
    model(torch.zeros(16, 16))
    assert engine.entered[-1] == (True, MXFP8BlockScaling(fp8_format=Format.E4M3))
    (status,) = (each for each in accelerator.effects() if each.option == "interval")
    assert status.not_applied
    assert status.why == "the MXFP8BlockScaling of this TransformerEngine does not have it"


def test_a_device_without_8_bit_floats_is_refused(engine: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Accelerator(cpu=True, mixed_precision="no").precision.device
    monkeypatch.setattr(type(device), "supports", lambda self, dtype: dtype != "fp8")
    with pytest.raises(DeviceError, match="no units for 8-bit floats"):
        fp8(TERecipeKwargs())


def test_layers_are_converted_by_hand_and_back(engine: Library) -> None:
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.LayerNorm(16), nn.Linear(16, 15))
    before, x = dict(model.named_parameters()), torch.randn(4, 16)
    expected = model(x)
    assert not has_transformer_engine_layers(model)
    convert_model(model)
    assert [type(part).__name__ for part in model] == ["Linear", "LayerNorm", "Linear"]
    assert [isinstance(part, nn.Linear) for part in model] == [False, False, True]
    assert has_transformer_engine_layers(model)
    torch.testing.assert_close(model(x), expected)
    convert_model(model, to_transformer_engine=False)
    assert not has_transformer_engine_layers(model)
    assert all(p is before[name] for name, p in model.named_parameters())
    torch.testing.assert_close(model(x), expected)
    convert_model(model, _convert_linear=False)
    assert [isinstance(part, nn.Linear) for part in model] == [True, False, True]


def test_forwards_are_wrapped_by_hand(engine: Library) -> None:
    model = nn.Linear(16, 16)
    forward = contextual_fp8_autocast(model.forward, "recipe")
    forward(model, torch.zeros(1, 16))
    model.eval()
    forward(model, torch.zeros(1, 16))
    assert engine.entered == [(True, "recipe"), (False, "recipe")]
    assert apply_fp8_autowrap(model, TERecipeKwargs(margin=2)) is model
    model.train()(torch.zeros(1, 16))
    assert engine.entered[-1] == (True, DelayedScaling(margin=2, amax_compute_algo="most_recent"))


def test_one_recipe_of_one_library(engine: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils import AORecipeKwargs

    both = [AORecipeKwargs(), TERecipeKwargs()]
    with pytest.raises(SettingError, match="AORecipeKwargs and TERecipeKwargs"):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=both)
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    assert Accelerator(cpu=True, mixed_precision="fp8").fp8_backend == "TE"
    with pytest.warns(FutureWarning):
        assert fp8(FP8RecipeKwargs(backend="TE")).fp8_backend == "TE"


def test_ms_amp_is_refused_with_what_would_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FeatureNotBuiltError) as error:
        fp8(MSAMPRecipeKwargs())
    assert "no longer maintained" in error.value.why
    assert "pip install torchao" in error.value.fix
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "MSAMP")
    with pytest.raises(FeatureNotBuiltError, match="does not train by MSAMP"):
        Accelerator(cpu=True, mixed_precision="fp8")
