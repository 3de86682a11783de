"""Attributes of Accelerator and states that programs assign: a gradient scaler, options, the device."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, PartialState
from accelerate.core.errors import PrepareError, SettingError
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import AutocastKwargs, ProfileKwargs

PRECISIONS = ["no", "bf16", "fp16"]


def make(precision: str, **options: Any) -> tuple[Accelerator, nn.Module, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, **options)
    model = nn.Linear(2, 1)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def train_step(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, value: float
) -> tuple[float, float]:
    """Take a step; return the norm of the gradient after backward, and what clipping returns."""
    accelerator.backward(model(torch.full((1, 2), value)).square().mean())
    after_backward = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return float(after_backward), float(norm)


@pytest.mark.parametrize("sets_optimizers", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_assigned_scaler_scales_and_steps(precision: str, sets_optimizers: bool) -> None:
    """It is used by backward, clipping, which sees unscaled gradients, and the step, which it may skip."""
    plain = make("no" if precision == "fp16" else precision)
    _, norm = train_step(*plain, 1.0)
    accelerator, model, optimizer = make(precision)
    scaler = GradScaler("cpu", init_scale=8.0)
    accelerator.scaler = scaler
    for each in accelerator._optimizers if sets_optimizers else []:  # as imagen-pytorch does
        each.scaler = scaler
        each._accelerate_step_called = False  # type: ignore[attr-defined]
    assert accelerator.scaler is scaler
    scaled, unscaled = train_step(accelerator, model, optimizer, 1.0)
    assert (scaled, unscaled) == pytest.approx((8 * norm, norm), rel=1e-2)
    torch.testing.assert_close(model.weight, plain[1].weight, rtol=1e-3, atol=1e-3)
    assert not accelerator.optimizer_step_was_skipped
    before = model.weight.detach().clone()  # type: ignore[operator]
    train_step(accelerator, model, optimizer, float("inf"))
    assert accelerator.optimizer_step_was_skipped
    assert torch.equal(model.weight, before)  # type: ignore[arg-type]
    assert scaler.get_scale() == 4.0
    train_step(accelerator, model, optimizer, 2.0)
    assert not accelerator.optimizer_step_was_skipped
    assert not torch.equal(model.weight, before)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("scaler", [None, GradScaler("cpu", enabled=False)], ids=["None", "disabled"])
def test_a_scaler_that_is_off_scales_nothing(precision: str, scaler: GradScaler | None) -> None:
    accelerator, model, optimizer = make(precision)
    accelerator.scaler = scaler
    assert accelerator.scaler is scaler
    after_backward, norm = train_step(accelerator, model, optimizer, 1.0)
    assert after_backward == norm
    assert not accelerator.optimizer_step_was_skipped
    accelerator.backward(model(torch.ones(1, 2)).mean())
    optimizer.step(lambda: 1.0)
    assert not copy.deepcopy(optimizer).step_was_skipped
    accelerator.free_memory()


def test_an_assigned_scaler_is_unscaled_once() -> None:
    """Also when the user's own call came first."""
    accelerator, model, optimizer = make("no")
    accelerator.scaler = scaler = GradScaler("cpu", init_scale=8.0)
    accelerator.backward(model(torch.ones(1, 2)).mean())
    scaler.unscale_(optimizer.optimizer)
    accelerator.unscale_gradients()
    accelerator.unscale_gradients(optimizer)
    assert torch.equal(model.weight.grad, torch.ones(1, 2))  # type: ignore[union-attr,arg-type]
    optimizer.step()
    assert scaler.state_dict()["_growth_tracker"] == 1


def test_an_assigned_scaler_serves_several_optimizers() -> None:
    """The scale changes after all steps: the gradients of all are divided by the one of the backward."""
    accelerator, model, optimizer = make("no")
    other = nn.Linear(2, 1)
    other, second = accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=1.0))
    accelerator.scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    x = torch.ones(1, 2)
    accelerator.backward((model(x) + other(x)).mean())
    before = other.weight.detach().clone()
    optimizer.step()
    second.step()
    torch.testing.assert_close(other.weight, before - 1)
    assert accelerator.scaler.get_scale() == 16.0


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_the_program_steps_by_unscales_and_skips(fused: bool) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    model, optimizer = Accelerator(cpu=True).prepare(model, optimizer)
    scaler = GradScaler("cpu", init_scale=8.0)
    for factor in (1.0, float("inf")):
        before = model.weight.detach().clone()
        scaler.scale(model(torch.ones(1, 2)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        torch.testing.assert_close(model.weight, before - float(factor == 1))
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_assigned_scaler_is_in_checkpoints(precision: str, tmp_path: Path) -> None:
    accelerator, model, optimizer = make(precision)
    accelerator.scaler = GradScaler("cpu", init_scale=8.0)
    train_step(accelerator, model, optimizer, float("inf"))
    accelerator.save_state(tmp_path / "state")
    assert (tmp_path / "state/scaler.pt").exists()
    resumed, *_ = make(precision)
    resumed.scaler = scaler = GradScaler("cpu", init_scale=64.0)
    resumed.load_state(tmp_path / "state")
    assert scaler.get_scale() == 4.0


def test_what_is_no_scaler_is_refused() -> None:
    accelerator, *_ = make("no")
    with pytest.raises(PrepareError, match="it is no gradient scaler"):
        accelerator.scaler = 8.0  # type: ignore[assignment]
    assert accelerator.scaler is None


# --- options


def computes_in(model: nn.Module) -> torch.dtype:
    dtypes: list[torch.dtype] = []
    hook = model.register_forward_hook(
        lambda module, inputs, output: dtypes.append(output.dtype), prepend=True
    )
    model(torch.ones(1, 2))
    hook.remove()
    return dtypes[0]


def test_autocast_options_that_are_assigned_are_used() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.autocast_handler = handler = AutocastKwargs(enabled=False)
    assert accelerator.autocast_handler is handler
    assert computes_in(accelerator.prepare(nn.Linear(2, 1))) == torch.float32
    with accelerator.autocast():
        assert not torch.is_autocast_enabled("cpu")
    accelerator.autocast_handler = None
    assert computes_in(accelerator.prepare(nn.Linear(2, 1))) == torch.bfloat16
    with pytest.raises(SettingError, match="ProfileKwargs"):
        accelerator.autocast_handler = ProfileKwargs()  # type: ignore[assignment]


def test_native_amp_is_turned_off() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.native_amp = False
    assert not accelerator.native_amp
    with pytest.warns(UserWarning, match="native_amp = True changes nothing"):
        accelerator.native_amp = True
    half = Accelerator(cpu=True, mixed_precision="bf16")
    assert half.native_amp
    half.native_amp = False
    assert not half.native_amp
    assert computes_in(half.prepare(nn.Linear(2, 1))) == torch.float32
    half.native_amp = True
    assert computes_in(half.prepare(nn.Linear(2, 1))) == torch.bfloat16


def test_an_assigned_profiler_is_used(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.profile_handler = ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path))
    with accelerator.profile():
        torch.ones(1).add(1)
    assert (tmp_path / "profile_0.json").exists()


@pytest.mark.parametrize(
    "name",
    [
        *("init_handler", "scaler_handler", "fp8_recipe_handler", "ao_recipe_handler", "te_recipe_handler"),
        *("msamp_recipe_handler", "fp8_enabled", "has_fp8_handler", "has_lomo_optimizer"),
        "delayed_fp8_autocast",
    ],
)
def test_an_assignment_without_effect_is_refused(name: str) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(SettingError, match=rf"Accelerator\(\)\.{name} cannot be assigned") as caught:
        setattr(accelerator, name, None)
    assert isinstance(caught.value, AttributeError)
    assert caught.value.why
    assert caught.value.fix


def test_states_refuse_what_they_only_show() -> None:
    Accelerator(cpu=True)
    for name in ("backend", "fork_launched"):
        with pytest.raises(SettingError, match=f"{name} cannot be assigned"):
            setattr(PartialState(), name, None)
    with pytest.raises(SettingError, match="dataloader_references cannot be assigned"):
        GradientState().dataloader_references = []  # type: ignore[misc]


@pytest.mark.parametrize("state_class", [PartialState, AcceleratorState])
def test_assigned_ranks_are_read_and_nothing_else_follows(state_class: Any) -> None:
    """Tests of programs replace them, as transformers' do: mock.patch deletes them at its end."""
    accelerator, data = Accelerator(cpu=True), TensorDataset(torch.ones(4))
    state = state_class()
    replaced = mock.patch.object(state, "num_processes", 3)
    with pytest.warns(UserWarning, match=r"num_processes was set to 3: .* go on with 1"):
        replaced.start()
    assert accelerator.num_processes == accelerator.state.num_processes == PartialState().num_processes == 3
    assert accelerator.is_main_process
    assert not accelerator.is_last_process
    replaced.stop()
    assert accelerator.num_processes == 1
    with pytest.warns(UserWarning, match="num_processes was set to 3"):
        state.num_processes = 3
    with pytest.warns(UserWarning, match=r"_index was set to 2"):
        state.process_index = state.local_process_index = 2
    assert (accelerator.process_index, PartialState().local_process_index) == (2, 2)
    assert accelerator.is_last_process
    assert not accelerator.is_main_process
    assert not accelerator.is_local_main_process
    with accelerator.main_process_first(), accelerator.split_between_processes([1, 2, 3]) as part:
        assert part == [1, 2, 3]
    assert len(accelerator.prepare(DataLoader(data))) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.num_processes = 1
        del state.process_index, state.local_process_index
    for name, value in (("num_processes", 1), ("process_index", 0), ("local_process_index", 0)):
        assert getattr(accelerator, name) == getattr(PartialState(), name) == value


def test_a_replaced_distributed_type_is_read_until_it_is_put_back() -> None:
    Accelerator(cpu=True)
    with mock.patch.object(PartialState(), "distributed_type", "MULTI_GPU"):
        assert PartialState().distributed_type == "MULTI_GPU"
    assert PartialState().distributed_type == "NO"
    PartialState().distributed_type = "MULTI_GPU"  # type: ignore[assignment]
    PartialState().destroy_process_group()
    assert PartialState(cpu=True).distributed_type == "NO", "of the world that is gone"


def test_the_assigned_device_is_used() -> None:
    accelerator = Accelerator(cpu=True)
    try:
        PartialState().device = torch.device("meta")
        assert accelerator.device.type == AcceleratorState().device.type == "meta"
        model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(TensorDataset(torch.ones(1))))
        assert model.weight.is_meta
        assert next(iter(loader))[0].is_meta
        AcceleratorState().device = "cpu"  # type: ignore[assignment]
        assert PartialState().device == torch.device("cpu")
    finally:
        PartialState._reset_state()


def test_debug_is_assigned() -> None:
    state = PartialState(cpu=True)
    try:
        state.debug = True
        assert PartialState().debug
        assert Accelerator(cpu=True).world.debug
    finally:
        PartialState._reset_state()


def test_rng_types_read_as_what_is_alike() -> None:
    accelerator = Accelerator(cpu=True)
    assert "generator" in accelerator.rng_types
    accelerator.rng_types = accelerator.rng_types
    assert len(list(accelerator.prepare(DataLoader(TensorDataset(torch.ones(2)))))) == 2
    accelerator.rng_types = ["torch"]
    loader: Any = accelerator.prepare(DataLoader(TensorDataset(torch.ones(2))))
    assert accelerator.rng_types == loader.rng_types == ["torch"]


def test_the_flag_of_triggers() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.flag_tensor is None
    accelerator.set_trigger()
    assert accelerator.flag_tensor == torch.tensor(1)
    assert accelerator.check_trigger()
    assert accelerator.flag_tensor == torch.tensor(0)
    assert not accelerator.check_trigger()
    accelerator.flag_tensor = torch.tensor(1)
    assert accelerator.check_trigger()
    assert accelerator.delayed_fp8_autocast is False
