"""B4: 8-bit floats by torchao: a small decoder, the report on its layers, recipes, and bad input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.core.errors import DeviceError, MissingExtraError, PrepareError, SettingError
from accelerate.utils import AORecipeKwargs, TERecipeKwargs, convert_model_to_fp8_ao, has_ao_layers
from accelerate.utils.ao import (
    filter_first_and_last_linear_layers,
    filter_linear_layers,
    find_first_last_linear_layers,
)
from tests.support.parity import adamw, decoder, loader, loss_of, plain

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
FIRST = "layers.0.attention.q_proj"


def fp8(**recipe: Any) -> Accelerator:
    return Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(**recipe)])


def float8_names(model: nn.Module) -> list[str]:
    """The names of layers that are torchao's."""
    from torchao.float8.float8_linear import Float8Linear

    return [name for name, part in model.named_modules() if isinstance(part, Float8Linear)]


def trained(
    accelerator: Accelerator, model: nn.Module, steps: int = 99, after: Callable[[], object] = lambda: None
) -> list[float]:
    """The losses of a prepared training; ``after`` is called after the first half."""
    model, optimizer, batches = accelerator.prepare(model, adamw(model), loader())
    losses = []
    for number, batch in enumerate(batches):
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if number == 3:
            after()
    return losses


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_trains_as_bf16_does(recipe: str) -> None:
    """The loss falls as in bfloat16, within the noise of 8 bits, and not with the same numbers."""
    model = decoder()
    ours, theirs = torch.tensor(trained(fp8(recipe_name=recipe), model)), torch.tensor(plain(1, half=True)[0])
    assert len(float8_names(model)) == 23
    assert not torch.equal(ours, theirs)
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_a_converted_layer_rounds_to_8_bits() -> None:
    """Its output is that of operands rounded to e4m3 with a scale each; far from float32, near by the sum."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 64, bias=False), nn.Linear(64, 16))
    weight, x = model[1].weight.detach().clone(), torch.randn(8, 32)
    fp8().prepare(model)

    def rounded(values: torch.Tensor) -> torch.Tensor:
        scale = 448 / values.abs().max()
        return (values * scale).to(torch.float8_e4m3fn).float() / scale

    ours = model.get_submodule("1")(x).float()
    assert (ours - x @ weight.T).abs().max() > 1e-2
    with fp8().autocast():
        torch.testing.assert_close(model[1](input=x), model[1](x))
    torch.testing.assert_close(ours, rounded(x) @ rounded(weight).T, rtol=1e-2, atol=1e-2)


def test_weights_and_names_stay(tmp_path: Path) -> None:
    """Parameters are the same objects in float32, also for an optimizer that was made before."""
    model = decoder()
    before, names = list(model.parameters()), [*model.state_dict()]
    prepared = fp8().prepare(model)
    assert prepared is model
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    assert {p.dtype for p in before} == {torch.float32}
    assert [*model.state_dict()] == names
    layer = model.get_submodule("layers.1.up")
    assert not layer.weight.requires_grad  # type: ignore[union-attr]
    model.eval()
    assert fp8().prepare(model) is model
    assert not any(part.training for part in model.modules())


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    first = fp8()
    model = decoder()
    whole = trained(first, model, after=lambda: first.save_state(str(tmp_path / "middle")))
    second = fp8()
    model, optimizer, batches = second.prepare(again := decoder(5), adamw(again), loader())
    second.load_state(str(tmp_path / "middle"))
    rest = []
    for batch in second.skip_first_batches(batches, 4):
        loss = loss_of(model, batch)
        second.backward(loss)
        second.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        rest.append(loss.item())
    assert rest == pytest.approx(whole[4:], abs=1e-6)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_another_precision_says_that_converted_layers_stay(precision: str) -> None:
    model = fp8().prepare(decoder())
    second = Accelerator(cpu=True, mixed_precision=precision)
    stays = "its layers in 8-bit floats by torchao tensorwise, emulated on cpu: no faster stay so"
    assert (stays in str(second.plan(model))) == (precision == "no")
    with pytest.warns(UserWarning, match=f"mixed_precision='{precision}' holds for it, but {stays}"):
        second.prepare(model)
    assert float8_names(model)
    fp8().prepare(model)
    with pytest.warns(UserWarning, match="layers in 8-bit floats by torchao tensorwise"):
        fp8(recipe_name="rowwise").prepare(model)


# ---------------------------------------------------------------- which layers


def test_the_plan_says_which_layers_convert_and_why_the_others_do_not() -> None:
    model = decoder()
    model.layers[2].up = nn.Linear(16, 24)
    text = str(fp8().plan(model, adamw(model)))
    assert "22 of 25 linear layers compute in 8-bit floats by torchao tensorwise, emulated on cpu" in text
    assert f"not {FIRST}: the first or last layer" in text
    assert "not layers.2.up: 16 x 24, and both sides must be multiples of 16" in text
    assert "not head: its weight is tied" in text
    assert not float8_names(model)


def test_the_plan_walks_the_model_as_often_whatever_the_number_of_layers() -> None:
    class Counted(nn.Sequential):
        walks = 0

        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            Counted.walks += 1
            return super().named_modules(*args, **kwargs)

    counts = []
    for layers in (4, 12):
        Counted.walks = 0
        text = str(fp8().plan(Counted(*(nn.Linear(16, 16) for _ in range(layers)))))
        assert f"{layers - 2} of {layers} linear layers compute in 8-bit floats" in text
        counts.append(Counted.walks)
    assert counts[0] == counts[1]


def test_the_report_counts_the_prepared_layers() -> None:
    accelerator = fp8()
    accelerator.prepare(decoder())
    (status,) = (each for each in accelerator.effects() if each.option == "mixed_precision")
    assert status.applied
    assert status.why.startswith("23 of 25 linear layers convert: ")


def test_the_users_filter_decides() -> None:
    model = decoder()
    accelerator = fp8(module_filter_func=lambda _, name: name.endswith(("up", FIRST)))
    text = str(accelerator.plan(model))
    assert "layers.3.attention.o_proj, layers.3.down: module_filter_func leaves it out" in text
    accelerator.prepare(model)
    assert float8_names(model) == [FIRST, *(f"layers.{n}.up" for n in range(4))]


def test_layers_that_may_compute_otherwise_stay() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model = nn.Sequential(nn.Linear(16, 16), Doubled(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    seen, third = [], model[2]
    third.register_forward_hook(lambda *_: seen.append("hook"))
    accelerator = fp8(module_filter_func=lambda *_: True)
    text = str(accelerator.plan(model))
    assert "not 1: a Doubled may compute otherwise" in text
    accelerator.prepare(model)
    assert float8_names(model) == ["0", "2", "3"]
    model(torch.randn(16, 16))
    assert (seen, model[2]) == (["hook"], third), "a converted layer is the same object, with its hooks"


def test_nothing_converted_is_an_error_before_anything_changes() -> None:
    model = nn.Sequential(nn.Linear(15, 15), nn.Linear(15, 15), nn.Linear(15, 15))
    for call in (fp8().plan, fp8().prepare):
        with pytest.raises(PrepareError) as error:
            call(model)
        assert "converts no layer of the model" in str(error.value)
        assert "not 0, 1, 2: 15 x 15" in str(error.value)
        assert "mixed_precision='bf16'" in error.value.fix
    assert not model._forward_hooks


# ---------------------------------------------------------------- recipes


def test_a_recipe_makes_the_config_of_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.config import ScalingGranularity, ScalingType

    config = AORecipeKwargs().config
    assert (config.pad_inner_dim, config.enable_fsdp_float8_all_gather) == (True, True)
    monkeypatch.setenv("ACCELERATE_FP8_PAD_INNER_DIM", "false")
    monkeypatch.setenv("ACCELERATE_FP8_RECIPE_NAME", "rowwise_with_gw_hp")
    recipe = AORecipeKwargs()
    assert (recipe.config.pad_inner_dim, recipe.config.enable_fsdp_float8_all_gather) == (False, False)
    assert recipe.config.cast_config_weight.scaling_granularity is ScalingGranularity.AXISWISE
    assert recipe.config.cast_config_input_for_grad_weight.scaling_type is ScalingType.DISABLED
    own = Float8LinearConfig(round_scales_to_power_of_2=True)
    assert AORecipeKwargs(config=own).config is own
    with pytest.raises(SettingError, match="config is given"):
        AORecipeKwargs(config=own, pad_inner_dim=True)
    with pytest.raises(SettingError, match="and enable_fsdp_float8_all_gather=True"):
        AORecipeKwargs(recipe_name="rowwise", enable_fsdp_float8_all_gather=True)
    with pytest.raises(SettingError, match="rowwise"):
        AORecipeKwargs(recipe_name="columnwise")  # type: ignore[arg-type]


def test_without_a_recipe_the_installed_library_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    accelerator = Accelerator(cpu=True)
    assert (accelerator.fp8_enabled, accelerator.has_fp8_handler) == (True, True)
    assert accelerator.fp8_backend == "AO"
    assert isinstance(accelerator.ao_recipe_handler, AORecipeKwargs)
    assert (accelerator.te_recipe_handler, accelerator.msamp_recipe_handler) == (None, None)
    plainly = Accelerator(cpu=True, mixed_precision="no")
    assert (plainly.fp8_enabled, plainly.fp8_backend, plainly.fp8_recipe_handler) == (False, "NO", None)


# ---------------------------------------------------------------- bad input


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingExtraError, match="pip install transformer_engine") as error:
        TERecipeKwargs()
    assert error.value.why == "it is NVIDIA's and needs CUDA; other devices take AORecipeKwargs()"
    monkeypatch.setattr("accelerate.core.packages.is_installed", lambda name: False)
    for call in (AORecipeKwargs, lambda: Accelerator(cpu=True, mixed_precision="fp8")):
        with pytest.raises(MissingExtraError, match="pip install torchao"):
            call()


def test_a_launch_without_a_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher says it, before the script starts."""
    from tests.support import launch_plans

    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("accelerate.core.packages.is_installed", lambda name: False)
    for flags, text in (
        ({}, "--mixed_precision is fp8, but none of its libraries is installed: torchao, "),
        ({"fp8_backend": "te"}, "and --fp8_backend TE needs the package 'transformer_engine'"),
    ):
        with pytest.raises(SettingError) as error:
            launch_plans.check(launch_plans.request(mixed_precision="fp8", **flags))
        assert text in str(error.value)
        assert "pip install " in error.value.fix
    launch_plans.check(launch_plans.request(mixed_precision="bf16"))
    monkeypatch.setattr("accelerate.core.packages.is_installed", lambda name: name == "torchao")
    launch_plans.check(launch_plans.request(mixed_precision="fp8"))


def test_an_accelerator_without_8_bit_units_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU products are emulated; on a GPU that would hide that nothing gets faster."""
    precision = fp8().precision
    monkeypatch.setattr(precision.device, "type", "cuda")
    with pytest.raises(DeviceError, match="no units for 8-bit floats"):
        precision.check()
    monkeypatch.setattr(precision.device, "supports", lambda dtype: True)
    precision.check()


# ---------------------------------------------------------------- functions of 1.x


def test_the_functions_by_hand() -> None:
    model = decoder()
    assert find_first_last_linear_layers(model) == (FIRST, "head")
    assert find_first_last_linear_layers(nn.ReLU()) == (None, None)
    assert filter_linear_layers(nn.Linear(16, 32), "a", ["b"])
    assert not filter_linear_layers(nn.Linear(16, 32), "b", ["b"])
    assert not filter_linear_layers(nn.Linear(16, 30), "a", ["b"])
    assert filter_first_and_last_linear_layers(model, "layers.1.up")
    assert not filter_first_and_last_linear_layers(model, FIRST)
    assert not filter_first_and_last_linear_layers(nn.Linear(16, 30), "a")
    assert not has_ao_layers(model)
    assert convert_model_to_fp8_ao(model) is model
    assert has_ao_layers(model)
    assert not {FIRST, "head"} & {*float8_names(model)}
    model = convert_model_to_fp8_ao(decoder(), module_filter_func=lambda _, name: name == FIRST)
    assert float8_names(model) == [FIRST]


def test_a_program_that_replaces_the_conversion_keeps_routers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Axolotl wraps the function that ``Accelerator`` calls, with a filter around the one it is given."""
    import accelerate.accelerator as public

    own = public.convert_model_to_fp8_ao

    def without_gates(model: nn.Module, config: Any = None, module_filter_func: Any = None) -> nn.Module:
        return own(model, config, lambda part, name: name != "gate" and module_filter_func(part, name))

    monkeypatch.setattr(public, "convert_model_to_fp8_ao", without_gates)
    model = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("first", "gate", "up", "last")})
    weights = {name: module.weight for name, module in model.items()}
    fp8().prepare(model)
    assert float8_names(model) == ["up"]
    assert all(model[name].weight is weight for name, weight in weights.items())
