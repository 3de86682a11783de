"""Bad input to prepare, backward and step: said in the user's words, before anything is changed."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.core.errors import AccelerateError, DeviceError, PrepareError, SettingError
from accelerate.utils import AutocastKwargs, GradientAccumulationPlugin, GradScalerKwargs
from tests.support.devices import device_named


def parts(rate: float = 0.1) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("handlers", [[AutocastKwargs], [3], [GradScalerKwargs(), GradScalerKwargs()]])
def test_a_wrong_handler_is_named(handlers: list[Any]) -> None:
    with pytest.raises(SettingError, match=r"kwargs_handlers") as error:
        Accelerator(kwargs_handlers=handlers)
    assert error.value.fix


LOSSES: dict[str, Any] = {
    "a float, not a tensor": 1.5,
    "a NoneType, not a tensor": None,
    "a dict, not a tensor": {"loss": torch.ones(())},
    "does not depend on any trained parameter": torch.ones(()),
    "a loss of shape (2, 3), not a scalar": torch.ones(2, 3, requires_grad=True) * 1,
}


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("items", [{}, {"num_items": 2}])
@pytest.mark.parametrize("text", LOSSES)
def test_a_wrong_loss_is_named(text: str, items: dict[str, Any], precision: str) -> None:
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2)
    model, optimizer, _ = accelerator.prepare(*parts())
    with pytest.raises(PrepareError) as error:
        accelerator.backward(LOSSES[text], **items)
    assert text in error.value.what
    assert error.value.fix
    optimizer.zero_grad()
    step(accelerator, model, optimizer)


def test_errors_of_the_backward_itself_stay_what_they_are() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine") as error:
        Accelerator().backward(Fails.apply(torch.ones((), requires_grad=True)))
    assert not isinstance(error.value, AccelerateError)


def test_a_non_scalar_may_bring_its_gradient() -> None:
    accelerator = Accelerator()
    weight = torch.ones(2, requires_grad=True)
    accelerator.backward(weight * 2, gradient=torch.tensor([1.0, 3.0]))
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 6.0]


def test_the_same_object_twice_is_prepared_once() -> None:
    accelerator = Accelerator()
    model, optimizer, schedule = parts()
    first = accelerator.prepare(model, model, optimizer, optimizer, schedule, schedule)
    again = accelerator.prepare(model, optimizer, schedule)
    assert first[0] is first[1] is again[0]
    assert first[2] is first[3] is again[1]
    assert first[4] is first[5] is again[2]
    kinds = (accelerator._models, accelerator._optimizers, accelerator._schedulers)
    assert [len(kind) for kind in kinds] == [1, 1, 1]


def test_objects_may_be_prepared_in_any_order() -> None:
    """Also the schedule before its optimizer: it follows it from then on."""
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=2.0)])
    model, optimizer, schedule = parts()
    schedule = accelerator.prepare(schedule)
    with pytest.warns(UserWarning, match="whose optimizer was not prepared"):
        schedule.step()
    assert schedule.get_last_lr() == [0.05], "as in 1.15"
    optimizer = accelerator.prepare(optimizer)
    model = accelerator.prepare(model)
    assert schedule.optimizers == [optimizer]
    accelerator.backward(model(torch.ones(1, 3)).sum() * float("inf"))
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.05], "the step was skipped, and the schedule knows"
    optimizer.zero_grad()
    step(accelerator, model, optimizer)
    schedule.step()
    assert schedule.get_last_lr() == [0.025]


def test_a_schedule_may_go_by_itself() -> None:
    accelerator = Accelerator(step_scheduler_with_optimizer=False)
    schedule = accelerator.prepare(parts()[2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: the optimizer has not stepped
        schedule.step()
    assert schedule.get_last_lr() == [0.05]


def test_an_optimizer_that_trains_nothing_is_announced_once() -> None:
    accelerator = Accelerator()
    model, *_ = parts()
    other = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, other)
    with pytest.warns(UserWarning, match="no gradient for any of its 2 parameters, on cpu"):
        step(accelerator, model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(accelerator, model, optimizer)


def test_an_optimizer_of_free_tensors_is_fine_on_one_process() -> None:
    accelerator = Accelerator()
    weight = torch.ones(2, requires_grad=True)
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.backward(weight.sum())
        optimizer.step()
    assert weight.tolist() == [0.0, 0.0]


def scaled(strict: bool = False, **options: Any) -> Accelerator:
    return Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(**options)], strict=strict)


@pytest.mark.parametrize("call", ["step", "clip", "fused"])
def test_a_scaled_step_without_backward_is_an_error(call: str) -> None:
    accelerator = scaled()
    model, optimizer, _ = parts()
    if call == "fused":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    if call == "clip":
        assert float(accelerator.clip_grad_norm_(model.parameters(), 1.0)) == 0.0
        return
    accelerator.backward(torch.ones(1, requires_grad=True).sum())  # until then, as 1.x without a scaler
    with pytest.raises(PrepareError, match="none of whose parameters has a gradient"):
        optimizer.step()
    step(accelerator, model, optimizer)


def test_a_strict_run_refuses_float16_weights_before_anything_is_changed() -> None:
    accelerator = scaled(strict=True)
    good, optimizer, _ = parts()
    bad = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    for given, names in (
        ((good, optimizer, bad), "1.weight, 1.bias"),
        ((good, torch.optim.SGD([*good.parameters(), *bad.parameters()], lr=0.1)), "parameter 4 of group 0"),
    ):
        with pytest.raises(PrepareError, match="float16 already") as error:
            accelerator.prepare(*given)
        assert names in error.value.what
        assert "model.float()" in error.value.fix
    assert not good._forward_hooks
    assert accelerator._models == accelerator._optimizers == []
    accelerator.prepare(bad.requires_grad_(False))  # frozen weights need no gradient
    scaled(enabled=False).prepare(nn.Linear(2, 2).half())  # nothing is scaled


def test_float16_weights_are_warned_of_and_fail_at_the_first_step() -> None:
    accelerator, model = scaled(), nn.Linear(3, 1).half()
    with pytest.warns(UserWarning, match=r"are float16 already: weight, bias; the first step will fail"):
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 3)).sum())
    before = model.weight.detach().clone()
    for use in (optimizer.step, lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0)):
        with pytest.raises(PrepareError, match="float16 gradients cannot be unscaled"):
            use()
    assert torch.equal(model.weight, before)


def test_a_program_that_lets_the_scaler_take_float16_gradients_trains() -> None:
    """sd-scripts and others do so for --full_fp16: they replace a method of ``accelerator.scaler``."""

    def full_fp16(scaler: Any) -> None:
        own = scaler._unscale_grads_
        scaler._unscale_grads_ = lambda optimizer, inverse, overflow, _: own(
            optimizer, inverse, overflow, True
        )

    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1).half()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    accelerator, (plain, sgd) = scaled(init_scale=256.0), parts()
    with pytest.warns(UserWarning, match="float16 already"):
        model, optimizer = accelerator.prepare(*parts())
    full_fp16(accelerator.scaler)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    full_fp16(scaler)
    x = torch.randn(4, 3)
    for _ in range(3):
        accelerator.backward(model(x).pow(2).mean())
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = plain(x)
        scaler.scale(out.float().pow(2).mean()).backward()
        scaler.unscale_(sgd)
        assert torch.equal(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        scaler.step(sgd)
        scaler.update()
        sgd.zero_grad()
    assert torch.equal(model.weight, plain.weight)
    assert model.weight.dtype == torch.float16


def test_weights_made_float16_later_are_named_at_the_step() -> None:
    accelerator = scaled()
    model, optimizer, _ = accelerator.prepare(*parts())
    model.half()
    accelerator.backward(model(torch.ones(2, 3, dtype=torch.float16)).sum())
    for use in (optimizer.step, accelerator.unscale_gradients):
        with pytest.raises(PrepareError, match="float16 gradients cannot be unscaled"):
            use()


def test_a_scaler_that_is_switched_off_steps_plainly() -> None:
    accelerator = scaled(enabled=False)
    model, optimizer, _ = accelerator.prepare(*parts())
    before = model.weight.detach().clone()
    step(accelerator, model, optimizer)
    assert not torch.equal(before, model.weight)
    assert optimizer.skipped_steps == 0


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_a_format_that_the_device_cannot_do_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = device_named("cpu")
    monkeypatch.setattr(type(hardware), "supports", lambda self, dtype: dtype == "no")
    with pytest.raises(DeviceError, match=f"'{name}' does not work on cpu") as error:
        Accelerator(mixed_precision=name, cpu=True)
    assert "mixed_precision='no'" in error.value.fix


@pytest.mark.parametrize("name", ["no", *("bf16", "fp16")])
def test_the_cpu_trains_in_every_format_that_it_says_it_does(name: str) -> None:
    hardware = device_named("cpu")
    assert hardware.supports(name)
    accelerator = Accelerator(mixed_precision=name, cpu=True)
    model, optimizer, _ = accelerator.prepare(*parts())
    before = model.weight.detach().clone()
    for _ in range(4):  # the first scales of float16 are too great
        step(accelerator, model, optimizer)
    assert not torch.equal(before, model.weight)
    assert (optimizer.skipped_steps > 0) == (name == "fp16")


def test_a_model_of_another_accelerator_takes_the_precision_of_the_newest() -> None:
    """F11: one after the other on the same model."""
    model = nn.Linear(2, 2)
    Accelerator(mixed_precision="bf16").prepare(model)
    inside: list[bool] = []
    model.register_forward_pre_hook(lambda m, a: inside.append(torch.is_autocast_enabled("cpu")))
    assert model(torch.ones(1, 2)).dtype == torch.float32
    plain = Accelerator(mixed_precision="no")
    assert "format of its weights again" in str(plain.plan(model))
    with pytest.warns(UserWarning, match="mixed_precision='no' holds for it"):
        plain.prepare(model)
    assert model(torch.ones(1, 2)).dtype == torch.float32
    assert inside == [True, False]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keep = AutocastKwargs(upcast_outputs=False)
        Accelerator(mixed_precision="bf16", kwargs_handlers=[keep]).prepare(model)
        Accelerator(mixed_precision="bf16", kwargs_handlers=[keep]).prepare(model)
    assert model(torch.ones(1, 2)).dtype == torch.bfloat16


def test_accumulation_must_be_a_whole_number() -> None:
    for steps in (0, -2):
        with pytest.raises(SettingError, match="num_steps"):
            Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=steps))
