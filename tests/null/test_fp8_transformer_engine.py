"""B4: 8-bit floats by TransformerEngine, with a fake of the library; MS-AMP is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.core.errors import CheckpointError, DeviceError, PrepareError, SettingError
from accelerate.utils import FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accelerate.utils.transformer_engine import (
    apply_fp8_autowrap,
    contextual_fp8_autocast,
    convert_model,
    has_transformer_engine_layers,
)
from tests.support.parity import adamw, decoder, loader, loss_of, plain
from tests.support.transformer_engine import (
    RECIPES,
    DelayedScaling,
    Float8CurrentScaling,
    Format,
    Library,
    MXFP8BlockScaling,
    install,
)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Library:
    """The fake library."""
    return install(monkeypatch)


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


def test_layer_norms_that_the_library_does_not_have_stay(engine: Library) -> None:
    """One without weights, one over two dimensions, one without a bias; in ``prepare`` and by hand."""
    norms = [nn.LayerNorm(16, elementwise_affine=False), nn.LayerNorm((4, 16)), nn.LayerNorm(16, bias=False)]
    model = nn.Sequential(nn.Linear(16, 16), *norms, nn.LayerNorm(16))
    by_hand = copy.deepcopy(model)
    convert_model(by_hand)
    for converted in (fp8(TERecipeKwargs()).prepare(model), by_hand):
        assert [type(norm) for norm in converted[1:4]] == [nn.LayerNorm] * 3
        assert isinstance(converted[4], engine.LayerNorm)
        assert converted(torch.rand(2, 4, 16)).isfinite().all()


class ShiftedNorm(nn.LayerNorm):
    """Computes otherwise than its class."""


def test_a_program_that_converts_and_wraps_by_itself(
    engine: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its models have layers of the library already, and its recipe is another for each forward."""
    import accelerate.accelerator as public

    class Own(nn.Sequential):
        recipe: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with engine.fp8_autocast(True, self.recipe):
                return super().forward(x)

    def wrap(model: Own, handler: TERecipeKwargs) -> Own:
        model.recipe = ("own", handler.margin)
        return model

    def copy_values(model: Any) -> None:
        model[0].weight.copy_(torch.ones(4, 6))  # under no_grad, as in 1.x

    monkeypatch.setattr(public, "convert_model", copy_values)
    monkeypatch.setattr(public, "apply_fp8_autowrap", wrap)
    accelerator = fp8(TERecipeKwargs(margin=2))
    model: Any = Own(nn.Linear(6, 4), nn.Linear(4, 16))
    assert "0 of 2 linear layers compute in 8-bit floats" in str(accelerator.plan(model))
    with pytest.warns(UserWarning, match="none of 2 linear layers convert"):
        accelerator.prepare(model)
    assert type(model[1]) is nn.Linear
    assert model[0].weight.eq(1).all()
    model(torch.zeros(1, 6))
    assert engine.entered == [(True, ("own", 2))]
    monkeypatch.setattr(public, "apply_fp8_autowrap", lambda model, _: nn.Sequential(model))
    with pytest.raises(PrepareError, match="apply_fp8_autowrap returns another object than the Own"):
        accelerator.prepare(Own(nn.Linear(6, 4)))
    # One that only adds to the library's gets the same as without it.
    monkeypatch.setattr(public, "convert_model", convert_model)
    monkeypatch.setattr(public, "apply_fp8_autowrap", lambda *given: apply_fp8_autowrap(*given))
    model = accelerator.prepare(nn.Sequential(nn.Linear(16, 16), ShiftedNorm(16)))
    assert [type(layer) for layer in model] == [engine.Linear, ShiftedNorm]
    model(torch.zeros(1, 16))
    assert engine.entered[1:] == [(True, DelayedScaling(margin=2, amax_compute_algo="most_recent"))]


def test_another_precision_takes_the_place_of_8_bits(engine: Library) -> None:
    """Without their autocast, layers of the library compute in the format of their weights."""
    net, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(2, 16)
    expected = net(x)
    model = copy.deepcopy(fp8(TERecipeKwargs()).prepare(net))
    assert not torch.equal(model(x), expected)
    with pytest.warns(UserWarning, match="mixed_precision='fp8' holds for it$"):
        fp8(TERecipeKwargs(scaling="current")).prepare(model)
    model(x)
    assert [type(recipe) for _, recipe in engine.entered[-2:]] == [DelayedScaling, Float8CurrentScaling]
    other = Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.warns(UserWarning, match="mixed_precision='bf16' holds for it$"):
        other.prepare(model)
    model(x)
    assert len(engine.entered) == 2
    torch.testing.assert_close(other.unwrap_model(model, keep_fp32_wrapper=False)(x), expected)
    by_hand = apply_fp8_autowrap(other.unwrap_model(model), TERecipeKwargs())
    other.prepare(by_hand)(x)
    assert len(engine.entered) == 3, "the context of the program stays"


def test_a_checkpoint_of_another_precision_is_loaded_with_strict_off(
    engine: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Layers of the library have an extra state that other layers lack."""

    def run(precision: str) -> tuple[Accelerator, Any]:
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        return accelerator, accelerator.prepare(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))

    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    for saved_in, loaded_in in (("bf16", "fp8"), ("fp8", "bf16")):
        accelerator, saved = run(saved_in)
        saved(torch.zeros(1, 16))
        accelerator.save_state(str(tmp_path / saved_in))
        accelerator, model = run(loaded_in)
        with pytest.raises(CheckpointError, match="_extra_state"):
            accelerator.load_state(str(tmp_path / saved_in))
        accelerator.load_state(str(tmp_path / saved_in), strict=False)
        assert torch.equal(model[1].weight, saved[1].weight)


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


def asked_options(accelerator: Accelerator) -> list[tuple[str, str]]:
    """The options of the report, each with its source; without those of every test here."""
    rest = ("cpu", "mixed_precision")
    return [(each.option, each.where) for each in accelerator.effects() if each.option not in rest]


@pytest.mark.parametrize(
    ("scaling", "kind"), [*zip(("delayed", "current", "block", "mxfp8"), RECIPES, strict=True)]
)
def test_a_recipe_is_chosen_by_its_scaling(engine: Library, scaling: Any, kind: Any) -> None:
    recipe = TERecipeKwargs(scaling=scaling)
    accelerator = fp8(recipe)
    model = accelerator.prepare(nn.Sequential(nn.Linear(16, 16)))
    model(torch.zeros(16, 16)).sum().backward()
    entered = engine.entered[-1][1]
    assert type(entered) is kind
    assert entered.fp8_format is kind().fp8_format, "none was asked for: the recipe's own"
    assert asked_options(accelerator) == [("scaling", "TERecipeKwargs")]
    model = fp8(TERecipeKwargs(scaling=scaling, fp8_format="E4M3")).prepare(nn.Sequential(nn.Linear(16, 16)))
    model(torch.zeros(16, 16))
    assert engine.entered[-1][1].fp8_format is Format.E4M3


def test_a_scaling_that_is_not_to_be_had_is_refused(engine: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformer_engine.common.recipe as recipes  # the fake
    import transformer_engine.pytorch as te

    with pytest.raises(SettingError, match="scaling='block' and use_mxfp8_block_scaling=True"):
        TERecipeKwargs(scaling="block", use_mxfp8_block_scaling=True)
    monkeypatch.setenv("ACCELERATE_FP8_SCALING", "block")
    monkeypatch.setattr(
        te, "is_fp8_block_scaling_available", lambda return_reason: (False, "needs CUDA 12.9"), raising=False
    )
    with pytest.raises(DeviceError, match="scaling='block'") as error:
        fp8(TERecipeKwargs())
    assert error.value.why == "needs CUDA 12.9"
    monkeypatch.delattr(recipes, "Float8BlockScaling")
    with pytest.raises(SettingError, match="has no Float8BlockScaling") as missing:
        fp8(TERecipeKwargs())
    assert missing.value.why == "it has delayed, current, mxfp8"


def test_the_report_lists_only_options_that_were_asked_for(
    engine: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fallbacks fill the fields of a recipe; nobody asked for them."""
    from accelerate.utils import AORecipeKwargs

    def asked(recipe: Any) -> list[tuple[str, str]]:
        return asked_options(fp8(recipe))

    assert asked(TERecipeKwargs()) == []
    assert asked(TERecipeKwargs(margin=1)) == [("margin", "TERecipeKwargs")]
    assert asked(AORecipeKwargs()) == []
    assert asked(AORecipeKwargs(recipe_name="rowwise")) == [("recipe_name", "AORecipeKwargs")]
    config = AORecipeKwargs().config
    assert asked(AORecipeKwargs(config=config)) == [("config", "AORecipeKwargs")]
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "2")
    assert asked(TERecipeKwargs()) == [("margin", "the environment variable ACCELERATE_FP8_MARGIN")]


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
    with pytest.raises(SettingError) as error:
        fp8(MSAMPRecipeKwargs())
    assert "no longer maintained" in error.value.why
    assert "pip install torchao" in error.value.fix
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "MSAMP")
    with pytest.raises(SettingError, match="does not train by MSAMP"):
        Accelerator(cpu=True, mixed_precision="fp8")


def test_a_model_without_layers_to_convert_is_refused(engine: Library) -> None:
    """What says so names no filter, for the recipe has none."""
    models = {"3 x 5": nn.Sequential(nn.Linear(3, 5)), "no torch.nn.Linear": nn.Sequential(nn.Tanh())}
    for reason, model in {**models, "the model itself": nn.Linear(16, 16)}.items():
        accelerator = fp8(TERecipeKwargs())
        with pytest.raises(PrepareError, match="converts no layer") as error:
            accelerator.prepare(model)
        assert reason in error.value.why
        assert "bf16" in error.value.fix
        assert "filter" not in error.value.fix
