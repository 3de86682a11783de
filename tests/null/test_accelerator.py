"""The Accelerator on one process: prepare, precision, accumulation, errors, views."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration, PartialState, init_empty_weights
from accelerate.core.errors import (
    AccelerateError,
    CheckpointError,
    PrepareError,
    SettingError,
    WorldError,
)
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    find_executable_batch_size,
)


def parts(rate: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def test_prepare_gives_back_the_same_objects_in_order() -> None:
    accelerator = Accelerator()
    model, optimizer, schedule = parts()
    loader = DataLoader(TensorDataset(torch.ones(4, 3)))
    prepared = accelerator.prepare(loader, schedule, None, model, optimizer)
    assert prepared[3] is model
    assert prepared[2] is None
    assert prepared[4].optimizer is optimizer
    assert prepared[1].scheduler is schedule
    assert prepared[1].optimizers == [prepared[4]]
    assert isinstance(prepared[0], DataLoader)
    assert accelerator.prepare(model) is model
    assert accelerator.prepare(optimizer) is prepared[4], "prepared once, whoever asks again"
    assert len(accelerator._models) == len(accelerator._optimizers) == 1


def test_prepare_calls_methods_that_a_program_has_put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in 1.15: unsloth replaces them on the class, others override them in a subclass."""
    seen: list[str] = []

    class Counting(Accelerator):
        def prepare_data_loader(self, data_loader: Any, **options: Any) -> Any:
            seen.append(f"loader {options}")
            return super().prepare_data_loader(data_loader, **options)

        def prepare_scheduler(self, scheduler: Any) -> Any:
            seen.append("scheduler")
            return super().prepare_scheduler(scheduler)

    own_model, own_optimizer = Accelerator.prepare_model, Accelerator.prepare_optimizer

    def prepare_model(self: Accelerator, model: Any, device_placement: Any = None) -> Any:
        seen.append("model")
        return own_model(self, model, device_placement=device_placement)

    def prepare_optimizer(self: Accelerator, optimizer: Any, device_placement: Any = None) -> Any:
        seen.append("optimizer")
        return own_optimizer(self, optimizer, device_placement=device_placement)

    monkeypatch.setattr(Accelerator, "prepare_model", prepare_model)
    monkeypatch.setattr(Accelerator, "prepare_optimizer", prepare_optimizer)
    accelerator = Counting()
    model, optimizer, schedule = parts()
    loader = DataLoader(TensorDataset(torch.ones(4, 3)))
    prepared = accelerator.prepare(schedule, optimizer, model, loader, None, device_placement=[True] * 5)
    assert seen == ["scheduler", "optimizer", "model", "loader {'device_placement': True}"]
    assert (prepared[2], prepared[4]) == (model, None)
    assert prepared[0].optimizers == [prepared[1]]
    assert prepared[1].optimizer is optimizer
    lists = accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders
    assert [len(each) for each in lists] == [1, 1, 1, 1]
    for (x,) in prepared[3]:
        accelerator.backward(model(x).sum())
        prepared[1].step()
        prepared[0].step()
        prepared[1].zero_grad()
    assert schedule.last_epoch == 4
    assert accelerator.prepare(model) is model
    assert len(accelerator._models) == 1


def test_a_program_may_prepare_single_objects_its_own_way() -> None:
    """As in 1.15, where ``prepare`` goes twice over its objects, and schedulers are of the second time."""
    accelerator: Any = Accelerator()
    model, optimizer, schedule = parts()
    assert accelerator._prepare_one(schedule, first_pass=True) is schedule
    assert accelerator._prepare_one(optimizer) is optimizer
    own, seen = accelerator._prepare_one, list[Any]()

    def prepare_one(obj: Any, *args: Any, **options: Any) -> Any:
        seen.append(obj)
        return obj if obj is optimizer else own(obj, *args, **options)

    accelerator._prepare_one = prepare_one
    loader = DataLoader(TensorDataset(torch.ones(4, 3)))
    prepared = accelerator.prepare(model, optimizer, loader, schedule, 5)
    assert all(obj is given for obj, given in zip(seen, (model, optimizer, loader, schedule, 5), strict=True))
    assert prepared[1] is optimizer
    assert prepared[4] == 5
    assert (prepared[2], prepared[3]) == (accelerator._dataloaders[0], accelerator._schedulers[0])
    assert accelerator._models == [model]
    assert accelerator._optimizers == []


def test_saves_call_a_get_state_dict_that_a_program_has_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in 1.15: unsloth's gathers the models that it has sharded."""
    own = Accelerator.get_state_dict

    def doubled(self: Accelerator, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        return {name: 2 * value for name, value in own(self, model, unwrap).items()}

    monkeypatch.setattr(Accelerator, "get_state_dict", doubled)
    accelerator, model = Accelerator(), nn.Linear(3, 1)
    accelerator.save_model(accelerator.prepare(model), tmp_path)
    accelerator.save_state(tmp_path / "state")
    for folder in (tmp_path, tmp_path / "state"):
        assert torch.equal(load_file(folder / "model.safetensors")["weight"], 2 * model.weight)


class OnlyTheHead(Accelerator):
    """accel-hydra's: frozen parts of a model are in no checkpoint."""

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        state = super().get_state_dict(model, unwrap)
        return {name: value for name, value in state.items() if name.startswith("1.")}


@pytest.mark.parametrize("sharded", [None, True])
def test_save_state_writes_what_a_get_state_dict_of_a_subclass_gives(
    tmp_path: Path, sharded: bool | None
) -> None:
    accelerator = OnlyTheHead()
    model: Any = accelerator.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    accelerator.save_state(tmp_path, sharded=sharded)
    assert load_file(tmp_path / "model.safetensors").keys() == {"1.weight", "1.bias"}
    nn.init.zeros_(model[0].weight)
    kept = model[1].weight.clone()
    nn.init.zeros_(model[1].weight)
    accelerator.load_state(tmp_path, strict=False)
    assert torch.equal(model[1].weight, kept)
    assert not model[0].weight.any()


def test_programs_that_write_checkpoints_themselves_find_the_hooks(tmp_path: Path) -> None:
    accelerator: Any = Accelerator()
    model = accelerator.prepare(nn.Linear(3, 1))
    called: list[tuple[int, str]] = []
    saving = accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: called.append((len(weights), folder))
    )
    accelerator.register_load_state_pre_hook(lambda models, folder: called.append((len(models), folder)))
    for hook in accelerator._save_model_state_pre_hook.values():
        hook(accelerator._models, [accelerator.get_state_dict(model)], "mine")
    for hook in accelerator._load_model_state_pre_hook.values():
        hook([], "mine")
    assert called == [(1, "mine"), (0, "mine")]
    saving.remove()
    assert not accelerator._save_model_state_pre_hook
    accelerator._load_model_state_pre_hook.clear()
    accelerator.load_state(accelerator.save_state(tmp_path / "state"))
    assert len(called) == 2


def test_parameters_by_name_for_programs_that_send_them_elsewhere() -> None:
    accelerator: Any = Accelerator()
    model: Any = nn.Linear(3, 1)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    named = accelerator._get_named_parameters(prepared, optimizer)
    assert named == {"weight": model.weight, "bias": model.bias}
    assert accelerator._get_named_parameters(prepared, drop_refs=True)["bias"] == model.bias.data_ptr()


def test_parameters_by_name_without_an_accelerator() -> None:
    """Tests of axolotl 0.19 call the method on a stand-in."""
    stand_in: Any = SimpleNamespace(fp8_backend=None)
    model = nn.Linear(3, 1)
    named = Accelerator._get_named_parameters(stand_in, model, drop_refs=True)
    assert named == {"weight": model.weight.data_ptr(), "bias": model.bias.data_ptr()}


def test_a_program_with_a_step_of_its_own_says_when_it_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def skip(self: Any, closure: Any = None) -> None:
        self._is_overflow = True

    accelerator = Accelerator()
    model, optimizer, schedule = accelerator.prepare(*parts())
    monkeypatch.setattr(type(optimizer), "step", skip)
    accelerator.backward(model(torch.ones(1, 3)).sum())
    before = schedule.get_last_lr()
    optimizer.step()
    schedule.step()
    assert optimizer.step_was_skipped
    assert accelerator.optimizer_step_was_skipped
    assert schedule.get_last_lr() == before


def test_accumulate_enters_a_no_sync_that_a_program_has_put_in_place() -> None:
    """As in 1.15: programs replace it, to reduce in every backward, or where an engine has none."""
    accelerator: Any = Accelerator(gradient_accumulation_steps=2)
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    first, second = accelerator.prepare(model, other)
    entered: list[nn.Module] = []

    @contextmanager
    def no_sync(model: nn.Module) -> Iterator[None]:
        entered.append(model)
        try:
            yield
        finally:
            entered.append(model)

    accelerator.no_sync = no_sync
    with accelerator.accumulate(first, second):
        assert entered == [first, second]
    assert entered == [first, second, second, first]
    with accelerator.accumulate(first, second):
        assert accelerator.sync_gradients
    assert len(entered) == 4
    accelerator.no_sync = lambda model: {id(first): no_sync(model)}[id(model)]
    with pytest.raises(KeyError), accelerator.accumulate(first, second):
        pass
    assert entered[4:] == [first, first], "the first is left, too"


class OwnNoSync(Accelerator):
    """Accelerator with ``no_sync`` of its own, which goes on to the one that it overrides."""

    entered = 0

    def no_sync(self, model: nn.Module) -> Any:
        self.entered += 1
        return super().no_sync(model)


def test_a_subclass_may_override_no_sync() -> None:
    accelerator = OwnNoSync(gradient_accumulation_steps=3)
    model = accelerator.prepare(nn.Linear(3, 1))
    for _ in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 3)).sum())
    assert accelerator.entered == 4


def test_outputs_stay_as_they_are_where_a_program_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs replace the conversion to float32, since logits in it take twice the memory."""
    model = Accelerator(mixed_precision="bf16").prepare(nn.Linear(3, 1))
    for place in ("utils.operations.convert_to_fp32", "accelerator.convert_outputs_to_fp32"):
        assert model(torch.ones(1, 3)).dtype == torch.float32
        with monkeypatch.context() as patch:
            patch.setattr(f"accelerate.{place}", lambda argument: argument)
            prepared_later = Accelerator(mixed_precision="bf16").prepare(nn.Linear(3, 1))
            assert prepared_later(torch.ones(1, 3)).dtype == torch.bfloat16
            if place.startswith("utils"):  # some do so around one forward
                assert model(torch.ones(1, 3)).dtype == torch.bfloat16


class DuckScheduler:
    """Not torch's: prepare leaves it alone, prepare_scheduler takes it."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class KeyedOptimizers:
    """Several optimizers in one, as StyleTTS2 has them: not torch's, and stepped by name."""

    def __init__(self, **optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        self.param_groups = [group for each in optimizers.values() for group in each.param_groups]

    def step(self, key: str) -> None:
        self.optimizers[key].step()

    def zero_grad(self) -> None:
        for each in self.optimizers.values():
            each.zero_grad()


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_an_optimizer_of_another_class_is_prepared_by_name(
    precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As in 1.15, where ``prepare`` gives it back as it is."""
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model: Any
    model, optimizer, _ = parts()
    keyed = KeyedOptimizers(first=optimizer)
    prepared_model, same = accelerator.prepare(model, keyed)
    assert same is keyed
    assert accelerator._optimizers == []
    assert "prepare_optimizer() takes an optimizer of any class" in caplog.text
    with pytest.raises(PrepareError, match="use prepare_optimizer"):
        Accelerator(cpu=True, strict=True).prepare(keyed)
    prepared: Any = accelerator.prepare_optimizer(keyed)  # type: ignore[arg-type]
    before = model.weight.detach().clone()
    accelerator.backward(0.1 * prepared_model(torch.ones(2, 3)).mean())
    prepared.step("first")
    assert not torch.equal(model.weight, before)
    assert not prepared.step_was_skipped


@pytest.mark.parametrize("thing", [3, "text", object(), nn.Linear, [1], len, DuckScheduler()])
def test_an_unknown_object_comes_back_and_is_told_once(
    thing: object, caplog: pytest.LogCaptureFixture
) -> None:
    """As in 1.15: scripts prepare tokenizers, datasets and loaders of other libraries."""
    accelerator = Accelerator()
    model, *_ = parts()
    assert accelerator.prepare(model, thing)[1] is thing
    assert accelerator.prepare(thing) is thing
    (record,) = [record for record in caplog.records if "gives back" in record.message]
    assert f"a {type(thing).__name__} as it is" in record.message
    assert ("every process sees all" in record.message) == hasattr(thing, "__iter__")
    assert accelerator._schedulers == []


def test_an_unknown_object_is_refused_in_strict_mode_and_nothing_is_changed() -> None:
    accelerator = Accelerator(strict=True)
    model, *_ = parts()
    with pytest.raises(PrepareError, match="a list cannot be prepared"):
        accelerator.prepare(model, [1])
    assert accelerator._models == []


def test_a_scheduler_of_another_class_is_prepared_by_name() -> None:
    accelerator, schedule = Accelerator(), DuckScheduler()
    prepared = accelerator.prepare_scheduler(schedule)
    assert prepared.scheduler is schedule
    assert accelerator._schedulers == [prepared]


def test_preparing_nothing_is_an_error() -> None:
    with pytest.raises(PrepareError, match="given nothing"):
        Accelerator().prepare()  # pyright: ignore[reportCallIssue]
    with pytest.raises(PrepareError, match="1 entries for 2 objects"):
        Accelerator().prepare(*parts()[:2], device_placement=[True])


def test_a_model_without_weights_is_refused_by_name() -> None:
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with pytest.raises(PrepareError, match=r"4 tensors of the model have no values, the first is 0\.weight"):
        Accelerator(cpu=True).prepare(model)


def test_a_plan_says_what_prepare_would_do_and_does_nothing() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    model, optimizer, schedule = parts()
    plan = str(accelerator.plan(model, optimizer, schedule))
    assert "precision: " in plan
    assert "torch.bfloat16" in plan
    assert not model._forward_hooks
    assert accelerator._models == []


def test_half_precision_computes_inside_and_gives_float32() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    seen: list[torch.dtype] = []
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    forward = model.forward
    model = accelerator.prepare(model)
    assert model.forward == forward, "the user's forward is not replaced"
    assert model(torch.ones(1, 2)).dtype == torch.float32
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(nn.Sequential(nn.Linear(2, 2))))):
        twin(torch.ones(1, 2))
    assert seen[0] == torch.bfloat16
    with accelerator.autocast():
        assert torch.is_autocast_enabled("cpu")
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert not torch.is_autocast_enabled("cpu")
    assert accelerator.native_amp


def test_autocast_is_left_when_the_forward_raises() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("broken")

    model = Accelerator(mixed_precision="bf16").prepare(Broken())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            model(torch.ones(1, 1))
        assert not torch.is_autocast_enabled("cpu")


def test_autocast_ends_after_a_forward_that_ctrl_c_interrupts() -> None:
    """Torch calls no hook then, and the process would compute in bfloat16 from there on."""

    class Stopped(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if is_interrupted:
                raise KeyboardInterrupt
            return super().forward(x)

    accelerator = Accelerator(mixed_precision="bf16")
    model, x = accelerator.prepare(Stopped(2, 2)), torch.ones(1, 2)
    outer = accelerator.prepare(nn.Sequential(nn.Linear(2, 2), model))

    def again() -> None:
        nonlocal is_interrupted
        is_interrupted = False
        assert model(x).dtype == torch.float32

    for go_on in (again, lambda: accelerator.unwrap_model(model), lambda: Accelerator()):
        is_interrupted = True
        with pytest.raises(KeyboardInterrupt):
            outer(x)
        go_on()
        assert not torch.is_autocast_enabled("cpu")
        assert nn.Linear(2, 2)(x).dtype == torch.float32


def test_hooks_from_before_prepare_run_outside_of_autocast() -> None:
    seen: list[Any] = []
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    model.register_forward_hook(
        lambda module, args, output: seen.extend((output.dtype, torch.is_autocast_enabled("cpu")))
    )
    Accelerator(mixed_precision="bf16").prepare(model)(torch.ones(1, 2))
    assert seen == [False, torch.float32, False]


def test_autocast_goes_on_in_a_forward_that_makes_an_accelerator() -> None:
    class Gathers(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Accelerator()
            seen.append(super().forward(x).dtype)
            return x

    seen: list[torch.dtype] = []
    Accelerator(mixed_precision="bf16").prepare(Gathers(2, 2))(torch.ones(1, 2))
    assert seen == [torch.bfloat16]


def test_options_of_autocast_do_not_turn_it_on_without_mixed_precision() -> None:
    with Accelerator().autocast(AutocastKwargs(cache_enabled=False)):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float32


def test_an_output_with_a_field_that_is_not_set_comes_out() -> None:
    @dataclass
    class Output:
        logits: torch.Tensor
        loss: torch.Tensor = field(init=False)

    class Head(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return Output(super().forward(x))

    output = Accelerator(mixed_precision="bf16").prepare(Head(2, 2))(torch.ones(1, 2))
    assert output.logits.dtype == torch.float32
    assert not hasattr(output, "loss")


def test_a_copy_of_a_prepared_model_keeps_its_precision() -> None:
    model = Accelerator(mixed_precision="bf16").prepare(nn.Linear(2, 2))
    assert len(copy.deepcopy(model)._forward_hooks) == 1
    thawed = pickle.loads(pickle.dumps(model))
    assert thawed(torch.ones(1, 2)).dtype == torch.float32


@pytest.mark.parametrize("read", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_of_an_optimizer_with_a_schedule_steps_itself(read: Callable[[Any], Any]) -> None:
    """Torch's schedule had given the wrapper a ``step`` that steps the original, and that no pickle takes."""
    model = nn.Linear(1, 1, bias=False)
    original = Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    torch.optim.lr_scheduler.StepLR(original, 1)
    copied = read(original)
    (weight,) = copied.param_groups[0]["params"]
    before, weight.grad = weight.item(), torch.ones(1, 1)
    copied.step()
    assert weight.item() == pytest.approx(before - 1)


def test_a_copy_of_an_optimizer_steps_with_unscaled_gradients_once_it_is_prepared() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    optimizers = accelerator.prepare(*(torch.optim.SGD(m.parameters(), lr=1.0) for m in models))
    accelerator.backward(sum(model(torch.ones(1, 1)).sum() for model in models))
    optimizers[0].step()
    copied_model, copied = copy.deepcopy((models[0], optimizers[0]))  # in the middle of an iteration
    other = models[1].weight.item()
    optimizers[1].step()
    assert models[1].weight.item() == pytest.approx(other - 1, rel=1e-3), "a copy changes no step"
    copied_model.zero_grad()
    accelerator.backward(copied_model(torch.ones(1, 1)).sum())
    before = copied_model.weight.item()
    with pytest.raises(PrepareError, match="scaled no loss") as error:
        copied.step()
    assert "accelerator.prepare(optimizer)" in error.value.fix
    assert accelerator.prepare(copied) is copied
    copied.step()
    assert copied_model.weight.item() == pytest.approx(before - 1, rel=1e-3)


def test_a_skipped_step_is_seen_and_the_schedule_waits() -> None:
    """B6."""
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    model, optimizer, schedule = accelerator.prepare(*cast("list[Any]", parts()))
    for step, factor in enumerate([1.0, float("inf"), 1.0]):
        before = model.weight.detach().clone()
        accelerator.backward(model(torch.ones(2, 3)).square().mean() * factor)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        assert accelerator.optimizer_step_was_skipped == (step == 1)
        assert torch.equal(before, model.weight) == (step == 1)
    assert schedule.get_last_lr() == [0.1 / 3]


@pytest.mark.parametrize("clear", ["optimizer", "optimizer, to zeros", "model"])
def test_gradients_are_unscaled_anew_after_a_step_that_the_loop_leaves_out(clear: str) -> None:
    """A loop that clips, and leaves a step with a large norm out."""
    handlers: list[Any] = [GradScalerKwargs(init_scale=1024.0)]
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=handlers)
    model, optimizer = accelerator.prepare(*cast("list[Any]", parts()[:2]))
    norms = []
    for factor in (1.0, float("inf"), 1.0):
        accelerator.backward(model(torch.ones(2, 3)).square().mean() * factor)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 1e9).item())
        if clear == "model":
            model.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=clear == "optimizer")
    assert norms[2] == norms[0] < 100
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 512.0, "the overflow lowers the scale"


@pytest.mark.parametrize("is_assigned", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_reading_the_loss_scale_between_two_steps_changes_no_step(clips: bool, is_assigned: bool) -> None:
    handlers: list[Any] = [GradScalerKwargs(init_scale=8.0, growth_interval=1)]
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=handlers)
    if is_assigned:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    prepared: list[Any] = [accelerator.prepare(*cast("list[Any]", parts()[:2])) for _ in range(2)]
    (first, first_optimizer), (second, second_optimizer) = prepared
    first.load_state_dict(second.state_dict())
    scales: list[float] = []
    for _ in range(2):
        accelerator.backward(sum(model(torch.ones(2, 3)).square().mean() for model in (first, second)))
        if clips:
            accelerator.clip_grad_norm_([*first.parameters(), *second.parameters()], 1e9)
        for optimizer in (first_optimizer, second_optimizer):
            optimizer.step()
            assert accelerator.scaler is not None
            state = accelerator.scaler.state_dict()
            assert state["scale"] == accelerator.scaler.get_scale()
            scales.append(state["scale"])
        assert torch.equal(first.weight, second.weight)
    # A scaler of torch's own shows what it has: the scale of the gradients that wait.
    assert scales == ([8.0, 16.0, 16.0, 32.0] if is_assigned else [16.0, 16.0, 32.0, 32.0])


def test_a_scaler_that_the_program_keeps_has_the_scale_after_each_step() -> None:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    model, optimizer = accelerator.prepare(*cast("list[Any]", parts()[:2]))
    scaler, scales = accelerator.scaler, []
    assert scaler is not None
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale(model(torch.ones(2, 3)).square().mean() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales == [1024.0, 512.0, 512.0]
    assert accelerator.scaler.get_scale() == 512.0
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 5})
    scaler.scale(torch.ones(()))
    assert scaler.state_dict()["_growth_tracker"] == 5


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("steps", [False, True])
def test_the_scaler_takes_a_prepared_optimizer(steps: bool, fused: bool) -> None:
    """A loop of torch's own calls, all or in part."""
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0, fused=fused))
    scaler = accelerator.scaler
    assert scaler is not None
    for factor in (1.0, float("inf"), 1.0):
        before = model.weight.detach().clone()
        scaler.scale(model(torch.ones(1, 3)).sum() * factor).backward()
        scaler.unscale_(optimizer)
        if steps:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        assert accelerator.optimizer_step_was_skipped == (factor != 1)
        optimizer.zero_grad()
        torch.testing.assert_close(model.weight, before - float(factor == 1))
    assert scaler.get_scale() == 4.0


def test_a_scaler_is_used_by_hand_inside_of_a_window() -> None:
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
    model = nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    scaler, before = accelerator.scaler, model.weight.detach().clone()
    assert scaler is not None
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 3)).sum())
            scaler.step(optimizer)
            scaler.update()
    torch.testing.assert_close(model.weight, before - 1.0)


def test_two_optimizers_share_one_scaler() -> None:
    """Gradients of the second must not be unscaled twice, whatever the order of clips and steps."""
    torch.manual_seed(0)
    models = [nn.Linear(3, 1), nn.Linear(3, 1)]
    start = [m.weight.detach().clone() for m in models]
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=256.0)])
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in models]
    a, b, first, second = accelerator.prepare(*models, *optimizers)
    for model in (a, b):
        accelerator.backward(model(torch.ones(1, 3)).sum())
    for model in (a, b):
        accelerator.clip_grad_norm_(model.parameters(), 100.0)
    first.step()
    second.step()
    for model, before in zip((a, b), start, strict=True):
        assert torch.allclose(before - model.weight, torch.ones(1, 3), atol=1e-3)


def test_unscaling_goes_with_a_scaled_backward() -> None:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    model, optimizer = accelerator.prepare(*cast("list[Any]", parts()[:2]))
    accelerator.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(PrepareError, match="without a scaled backward since its last step"):
        optimizer.step()
    accelerator.backward(model(torch.ones(2, 3)).sum())
    optimizer.zero_grad()
    before = model.weight.detach().clone()
    accelerator.unscale_gradients()  # of nothing
    accelerator.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    torch.testing.assert_close(model.weight, before - 0.2)


def test_a_program_that_never_scales_a_loss_steps_on_a_cpu() -> None:
    """The trainer of coqui calls ``loss.backward()`` in ``optimize``; 1.x has no scaler on a CPU."""
    accelerator = Accelerator(mixed_precision="fp16")
    model, optimizer = accelerator.prepare(*cast("list[Any]", parts()[:2]))
    before = model.weight.detach().clone()
    with pytest.warns(UserWarning, match="fp16 without a loss scale"):
        optimizer.step()  # without a gradient
    model(torch.ones(2, 3)).sum().backward()
    assert accelerator.clip_grad_norm_(model.parameters(), 100.0) < 10.0
    with pytest.warns(UserWarning, match="fp16 without a loss scale"):
        optimizer.step()
    torch.testing.assert_close(model.weight, before - 0.2)
    assert not accelerator.optimizer_step_was_skipped


def test_gradients_that_are_unscaled_in_part_are_refused() -> None:
    """A loop that counts by itself and clips in every micro-batch; a backward of another model is fine."""
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    prepared: list[Any] = [accelerator.prepare(*cast("list[Any]", parts()[:2])) for _ in range(2)]
    (model, optimizer), (other, other_optimizer) = prepared
    x, before = torch.ones(2, 3), model.weight.detach().clone()

    def accumulate_and_clip(of: nn.Module, *more: nn.Module) -> None:
        accelerator.backward(sum(each(x).sum() for each in (of, *more)))
        accelerator.clip_grad_norm_(of.parameters(), 1e9)

    accumulate_and_clip(model)
    for _ in range(2):  # the second is without a step in between, and zeros
        accumulate_and_clip(other)
        other_optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    torch.testing.assert_close(model.weight, before - 0.2)
    optimizer.zero_grad()
    accumulate_and_clip(model)
    with pytest.raises(PrepareError, match="SGD of 2 parameters that are unscaled in part"):
        accumulate_and_clip(model)
    with pytest.raises(PrepareError, match="unscaled in part"):
        optimizer.step()
    optimizer.zero_grad()
    accumulate_and_clip(model)
    accelerator.backward(other(x).sum() + model(x).sum(), inputs=list(other.parameters()))
    optimizer.step()
    torch.testing.assert_close(model.weight, before - 0.4)


def test_optimizers_step_at_different_rates() -> None:
    """Both are clipped, and the gradients of the second wait over steps and updates of the scale."""
    handlers: list[Any] = [GradScalerKwargs(init_scale=8.0, growth_interval=1)]
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=handlers)
    models = [nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)]
    before = [model.weight.detach().clone() for model in models]
    rates = [torch.optim.SGD(model.parameters(), lr=0.125) for model in models]
    first, second, fast, slow = accelerator.prepare(*models, *rates)
    x, both = torch.ones(1, 3), [*first.parameters(), *second.parameters()]
    accelerator.backward(first(x).sum() + second(x).sum())
    for step in range(3):
        accelerator.clip_grad_norm_(both, 1e9)
        fast.step()
        with pytest.raises(PrepareError, match="without a scaled backward since its last step"):
            fast.step()
        fast.zero_grad()
        assert accelerator.scaler.get_scale() == 16.0 * 2**step  # type: ignore[union-attr]
        accelerator.backward(first(x).sum())
    slow.step()
    fast.step()
    torch.testing.assert_close(first.weight, before[0] - 0.5)
    torch.testing.assert_close(second.weight, before[1] - 0.125)


@pytest.mark.parametrize("num_items", [None, 1])
@pytest.mark.parametrize("kind", ["fp16", "assigned", "by hand"])
def test_the_scale_may_change_between_the_steps_of_two_optimizers(kind: str, num_items: int | None) -> None:
    """Each window ends with the discriminator's step, before the generator's last backward."""
    handlers: list[Any] = [GradScalerKwargs(init_scale=64.0, growth_interval=1)]
    steps = 1 if kind == "by hand" else 4
    accelerator = Accelerator(
        mixed_precision="fp16", kwargs_handlers=handlers, gradient_accumulation_steps=steps
    )
    if kind == "assigned":
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    nets = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=1.0) for net in nets]
    prepared: list[Any] = [*accelerator.prepare(*nets, *optimizers)]
    generator, discriminator, generator_optimizer, discriminator_optimizer = prepared
    before = [net.weight.detach().clone() for net in nets]
    x, scales = torch.ones(1, 1), list[float]()
    for step in range(8):
        overflow = float("inf") if step == 3 else 1.0
        with accelerator.accumulate(generator, discriminator):
            for model, optimizer, factor in (
                (discriminator, discriminator_optimizer, overflow),
                (generator, generator_optimizer, 1.0),
            ):
                accelerator.backward(model(x).sum() * factor, num_items=num_items)
                if kind != "by hand" or step % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
        assert accelerator.scaler is not None
        scales.append(accelerator.scaler.get_scale())
    per_window = 4.0 if kind == "by hand" and num_items is None else 1.0
    torch.testing.assert_close(generator.weight, before[0] - 2 * per_window)
    torch.testing.assert_close(discriminator.weight, before[1] - per_window)
    assert len(set(scales)) > 1


@pytest.mark.parametrize("is_assigned", [False, True])
def test_a_training_that_was_left_before_its_step_stops_no_other(is_assigned: bool) -> None:
    """A notebook prepares anew after Ctrl-C; the overflow of the next training lowers its scale."""
    handlers: list[Any] = [GradScalerKwargs(init_scale=64.0)]
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=handlers)
    if is_assigned:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for is_left in (True, False):
        model, optimizer = accelerator.prepare(*cast("list[Any]", parts()[:2]))
        for factor in (float("inf"), 1.0, 1.0):
            before = model.weight.detach().clone()
            accelerator.backward(model(torch.ones(2, 3)).sum() * factor)
            accelerator.clip_grad_norm_(model.parameters(), 1e9)
            if is_left:
                break
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(model.weight, before - (0.2 if factor == 1 else 0.0))
    assert accelerator.scaler is not None
    assert accelerator.scaler.get_scale() == 32.0


class FailingSGD(torch.optim.SGD):
    """Its step fails as often as it is told."""

    failures = 0

    def step(self, closure: Any = None) -> Any:
        if self.failures:
            self.failures -= 1
            raise MemoryError
        return super().step()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_gradients_after_a_step_that_failed_are_unscaled(clips: bool, fused: bool) -> None:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, FailingSGD(model.parameters(), lr=1.0, fused=fused))
    before = model.weight.detach().clone()
    for failures in (1, 0):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        if clips:
            accelerator.clip_grad_norm_(model.parameters(), 9.0)
        optimizer.optimizer.failures = failures
        if failures:
            with pytest.raises(MemoryError):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.weight, before - 1)


@pytest.mark.parametrize("frees", [False, True])
def test_optimizers_that_wait_for_their_step_are_forgotten_with_what_was_prepared(frees: bool) -> None:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    models: list[weakref.ref[nn.Module]] = []

    def train() -> float:
        """Overflow once, and leave gradients that are clipped and wait for their step."""
        assert all(model() is None for model in models)
        model, optimizer = accelerator.prepare(*cast("list[Any]", parts()[:2]))
        models.append(weakref.ref(model))
        for factor in (float("inf"), 1.0):
            optimizer.zero_grad()
            accelerator.backward(model(torch.ones(2, 3)).square().mean() * factor)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
            assert (norm < 100) == (factor == 1)
        if frees and len(models) == 1:
            accelerator.free_memory()
        elif len(models) == 1:
            raise MemoryError
        return accelerator.scaler.get_scale()  # type: ignore[union-attr]

    if frees:
        assert [train(), train()] == [512.0, 256.0]
    else:
        assert find_executable_batch_size(lambda size: train(), starting_batch_size=10)() == 512.0


def test_a_strict_run_refuses_float16_weights_with_their_names() -> None:
    with pytest.raises(PrepareError, match="float16 already: weight, bias"):
        Accelerator(mixed_precision="fp16", strict=True).prepare(nn.Linear(2, 2).half())


def test_steps_wait_for_the_end_of_the_window() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, schedule = accelerator.prepare(*cast("list[Any]", parts()))
    moved = []
    for _ in range(4):
        before = model.weight.detach().clone()
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 3)).sum())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        moved.append(not torch.equal(before, model.weight))
    assert moved == [False, True, False, True]
    assert schedule.get_last_lr() == [pytest.approx(0.1 / 3)]


@pytest.mark.parametrize("steps", ["4", 4.0, np.int64(4), np.float64(4), torch.tensor(4)])
def test_a_whole_number_of_another_type_is_one(steps: Any) -> None:
    """From a command line without ``type=int``, or by a division."""
    told = Accelerator(gradient_accumulation_steps=steps).gradient_accumulation_steps
    assert (told, type(told)) == (4, int)
    assert type(GradientAccumulationPlugin(num_steps=steps).num_steps) is int


def test_the_launchers_accumulation_counts_before_the_scripts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert Accelerator().gradient_accumulation_steps == 4
    assert Accelerator(gradient_accumulation_steps=2).gradient_accumulation_steps == 4
    plugin = GradientAccumulationPlugin(num_steps=3)
    assert Accelerator(gradient_accumulation_plugin=plugin).gradient_accumulation_steps == 3


class Unknown(KwargsHandler):
    pass


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"mixed_precision": "fp61"}, "fp16"),
        ({"mixed_precision": 16}, "mixed_precision"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps of Accelerator is 0"),
        ({"parallelism_config": 1}, "parallelism_config of Accelerator is 1"),
        ({"kwargs_handlers": [Unknown()]}, "Unknown is not a kwargs handler"),
        ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, "two AutocastKwargs"),
        (
            {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(3)},
            "given twice",
        ),
    ],
)
def test_wrong_arguments_are_said_in_the_users_words(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(SettingError) as error:
        Accelerator(**arguments)  # type: ignore[arg-type]
    assert text in str(error.value)


@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize("argument", [None, False, True])
def test_a_configuration_counts_before_the_argument_split_batches(
    argument: bool | None, configured: bool
) -> None:
    """As in 1.15, where the trainers of imagen-pytorch pass both; there without a word."""
    options: dict[str, Any] = {
        "split_batches": argument,
        "dataloader_config": DataLoaderConfiguration(split_batches=configured),
    }
    is_decided = argument in (None, configured)
    text = f"split_batches={argument} .* was not applied: dataloader_config has split_batches={configured}"
    accelerator = Accelerator(**options)
    assert accelerator.split_batches is configured
    with nullcontext() if is_decided else pytest.warns(UserWarning, match=text):
        accelerator.prepare(nn.Linear(1, 1))
    strict = Accelerator(strict=True, **options)
    with nullcontext() if is_decided else pytest.raises(SettingError, match=text):
        strict.prepare(nn.Linear(1, 1))


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf61")
    with pytest.raises(SettingError) as error:
        Accelerator()
    assert "ACCELERATE_MIXED_PRECISION" in str(error.value)
    assert "'bf16'" in str(error.value)


def test_an_engine_that_cannot_work_here_never_trains_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its library, or without the devices that it is made for."""
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    with pytest.raises(AccelerateError) as error:
        Accelerator(cpu=True)
    assert type(error.value).__name__ in ("DeviceError", "MissingExtraError")


def test_two_devices_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    with pytest.raises(AccelerateError) as error:
        PartialState(cpu=True)
    assert "ACCELERATE_TORCH_DEVICE" in str(error.value)
    assert "fix:" in str(error.value)


def test_an_unknown_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cdua")
    with pytest.raises(AccelerateError) as error:
        PartialState()
    assert "cdua" in str(error.value)
    assert "cuda" in str(error.value)


def test_the_state_is_empty_until_something_opens_the_world() -> None:
    assert PartialState._shared_state == {}
    with pytest.raises(ValueError, match="no Accelerator yet"):
        AcceleratorState()
    accelerator = Accelerator(mixed_precision="bf16")
    assert PartialState._shared_state != {}
    assert AcceleratorState().mixed_precision == "bf16"
    assert AcceleratorState().distributed_type == "NO"
    assert AcceleratorState().num_processes == accelerator.num_processes == 1
    assert getattr(AcceleratorState(), "fsdp_plugin", None) is None
    assert GradientState() is accelerator.gradient_state
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == {}
    with pytest.raises(WorldError, match="no open world"):
        _ = accelerator.state.device


def test_a_state_takes_the_arguments_clients_always_give() -> None:
    from datetime import timedelta

    state = PartialState(cpu=True, backend=None, timeout=timedelta(seconds=9), _use_sagemaker_dp=True)
    assert (state.num_processes, state.device.type, state.use_distributed) == (1, "cpu", False)
    state.distributed_type = "MULTI_GPU"
    assert PartialState().distributed_type == "MULTI_GPU"


def test_decorators_and_blocks_run_once_on_one_process() -> None:
    accelerator = Accelerator()
    calls: list[str] = []

    @accelerator.on_main_process
    def main() -> int:
        """kept"""
        calls.append("main")
        return 1

    @accelerator.on_process(process_index=1)
    def other() -> int:
        calls.append("a lone process is every process")
        return 2

    assert (main(), other(), main.__doc__) == (1, 2, "kept")
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        calls.append("first")
    assert calls == ["main", "a lone process is every process", "first"]
    accelerator.set_trigger()
    assert (accelerator.check_trigger(), accelerator.check_trigger()) == (True, False)


def test_a_checkpoint_brings_everything_back(tmp_path: Path) -> None:
    def run(
        accelerator: Accelerator, model: nn.Module, optimizer: object, schedule: object, steps: int
    ) -> None:
        for _ in range(steps):
            accelerator.backward(model(torch.randn(2, 3)).square().mean())
            optimizer.step()  # type: ignore[attr-defined]
            schedule.step()  # type: ignore[attr-defined]
            optimizer.zero_grad()  # type: ignore[attr-defined]

    def fresh() -> tuple[Accelerator, tuple[object, ...]]:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        accelerator = Accelerator()
        return accelerator, accelerator.prepare(model, optimizer, schedule)

    accelerator, (model, optimizer, schedule) = fresh()
    run(accelerator, model, optimizer, schedule, 3)
    accelerator.save_state(f"{tmp_path}/here")
    run(accelerator, model, optimizer, schedule, 3)
    expected = [p.detach().clone() for p in model.parameters()], schedule.get_last_lr()

    accelerator, (model, optimizer, schedule) = fresh()
    accelerator.load_state(f"{tmp_path}/here")
    run(accelerator, model, optimizer, schedule, 3)
    assert all(torch.equal(a, b) for a, b in zip(expected[0], model.parameters(), strict=True))
    assert schedule.get_last_lr() == expected[1]


def test_a_checkpoint_keeps_plain_values_of_the_script(tmp_path: Path) -> None:
    """They come back; what is no plain value is named, and nothing is saved."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 1))
    accelerator.save_state(tmp_path / "a", metadata={"epoch": 3, "best": 0.5})
    assert accelerator.load_state(tmp_path / "a").metadata == {"epoch": 3, "best": 0.5}
    with pytest.raises(CheckpointError, match=r"metadata\['loss'\] is a Tensor"):
        accelerator.save_state(tmp_path / "a", metadata={"loss": torch.ones(())})
    assert accelerator.load_state(tmp_path / "a").metadata == {"epoch": 3, "best": 0.5}


def test_an_argument_that_no_loading_takes_is_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.save_state(tmp_path / "a", safe_serialization=False)
    with pytest.raises(SettingError, match="load_state was given assign, which the strategy 'single' does"):
        accelerator.load_state(tmp_path / "a", assign=True)
    assert accelerator.load_state(tmp_path / "a", strict=False, map_location="cpu").missing == ()
    assert not model.weight.is_meta


def test_an_argument_of_another_strategys_save_is_ignored_as_in_1x_and_told_once(tmp_path: Path) -> None:
    """A program for DeepSpeed must not lose its training at the first checkpoint without it."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    with pytest.warns(UserWarning, match="save_state was given exclude_frozen_parameters, total_limit,"):
        accelerator.save_state(tmp_path / "a", exclude_frozen_parameters=True, total_limit=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.save_state(tmp_path / "b", total_limit=3)
        accelerator.load_state(tmp_path / "b")
    strict = Accelerator(cpu=True, strict=True)
    with pytest.raises(SettingError, match="save_state was given total_limit, which the strategy 'single'"):
        strict.save_state(tmp_path / "c", total_limit=3)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["a", "b"]


def test_a_limit_of_checkpoints_that_are_not_numbered_is_told_once(tmp_path: Path) -> None:
    """``total_limit`` counts numbered checkpoints; one that the program names is never removed."""
    limited = ProjectConfiguration(str(tmp_path), total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=limited)
    with pytest.warns(UserWarning, match="total_limit removes no checkpoint that is given a name"):
        accelerator.save_state(tmp_path / "a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.save_state(tmp_path / "b")
    strict = Accelerator(cpu=True, strict=True, project_config=limited)
    with pytest.raises(SettingError, match="automatic_checkpoint_naming=True"):
        strict.save_state(tmp_path / "c")
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["a", "b"]


def test_save_hooks_may_keep_models_out(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1))
    seen: list[object] = []

    def save(models: list[nn.Module], weights: list[object], folder: str) -> None:
        seen.append((models[0] is model, len(weights)))
        weights.pop()

    def load(models: list[nn.Module], folder: str) -> None:
        seen.append(models.pop() is model)

    accelerator.register_save_state_pre_hook(save)
    handle = accelerator.register_load_state_pre_hook(load)
    path = accelerator.save_state(f"{tmp_path}/a")
    assert not list(path.glob("model*"))
    accelerator.load_state(path)
    handle.remove()
    assert seen == [(True, 1), True]


def test_random_numbers_after_a_resume_follow_those_of_a_save_hook(tmp_path: Path) -> None:
    """The hooks of diffusers' scripts build a model to save an average, which draws its first weights."""
    accelerator = Accelerator()

    def build_model(*_: object) -> None:
        nn.Linear(3, 3)

    accelerator.register_save_state_pre_hook(build_model)
    path = accelerator.save_state(f"{tmp_path}/a")
    drawn = torch.rand(4)
    accelerator.load_state(path)
    assert torch.equal(torch.rand(4), drawn)


def test_objects_without_a_state_cannot_be_registered() -> None:
    with pytest.raises(PrepareError, match="cannot be checkpointed: int"):
        Accelerator().register_for_checkpointing(3)


def test_memory_is_freed_of_everything_prepared() -> None:
    accelerator = Accelerator()
    model, optimizer, _ = accelerator.prepare(*parts())
    model, optimizer = accelerator.free_memory(model, optimizer)
    assert (model, optimizer, accelerator._models, accelerator._schedulers) == (None, None, [], [])


def test_a_lone_process_may_train_with_handlers_of_other_worlds() -> None:
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    assert accelerator.prepare(nn.Linear(1, 1))(torch.ones(1, 1)).shape == (1, 1)
    assert accelerator.ddp_handler.find_unused_parameters, "what was given can be read"
    assert Accelerator().ddp_handler is None


def test_a_profile_leaves_a_trace_per_rank(tmp_path: Path) -> None:
    handler = ProfileKwargs(activities=["cpu"], output_trace_dir=f"{tmp_path}/traces")
    accelerator = Accelerator(kwargs_handlers=[handler])
    with accelerator.profile() as profiler:
        torch.ones(3, 3) @ torch.ones(3, 3)
    assert any("mm" in event.key for event in profiler.key_averages())
    trace = json.loads((tmp_path / "traces" / "profile_0.json").read_text())
    assert trace["traceEvents"]


@pytest.mark.parametrize("regional", [False, True])
def test_models_are_compiled_in_place(regional: bool) -> None:
    """D9: names stay, and there is nothing to unwrap."""
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
    accelerator = Accelerator(dynamo_plugin=plugin)
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(3, 3) for _ in range(3)])
    model = nn.Sequential(nn.ModuleList([plain])[0], nn.Linear(3, 1))
    expected = model(torch.ones(2, 3))
    assert "torch.compile" in str(accelerator.plan(model))
    prepared = accelerator.prepare(model)
    assert prepared is model
    compiled = [m for m in model.modules() if m._compiled_call_impl is not None]
    assert compiled, "something was compiled"
    assert torch.equal(prepared(torch.ones(2, 3)), expected)
    assert not any("_orig_mod" in name for name in accelerator.get_state_dict(prepared))


@pytest.mark.parametrize("prepares", [False, True])
def test_the_state_of_a_model_that_the_user_compiled_has_its_own_names(prepares: bool) -> None:
    """As a whole, and a layer of it."""
    names = {"0.weight", "0.bias", "1.weight", "1.bias"}
    whole = torch.compile(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), backend="eager")
    layer = nn.Sequential(torch.compile(nn.Linear(3, 3), backend="eager"), nn.Linear(3, 1))  # type: ignore[arg-type]
    for model in (whole, layer):
        assert set(model.state_dict()) != names  # type: ignore[union-attr]
        accelerator = Accelerator()
        kept: Any = accelerator.prepare(model) if prepares else model
        assert accelerator.get_state_dict(kept).keys() == names


def test_the_launchers_compiler_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    assert Accelerator().prepare(nn.Linear(1, 1))._compiled_call_impl is not None
    with pytest.raises(SettingError, match="given twice"):
        Accelerator(dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin())


def test_saves_and_loads_are_logged_where_1_x_logs_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Scripts show or hide these lines by the names of two loggers."""
    accelerator = Accelerator(cpu=True)
    linear = nn.Linear(2, 1)
    model, _ = accelerator.prepare(linear, torch.optim.SGD(linear.parameters(), lr=0.1))
    caplog.set_level(logging.INFO, "accelerate")
    path = accelerator.save_state(tmp_path / "a")
    accelerator.load_state(path)
    accelerator.save_model(model, tmp_path / "b")
    logged = [(record.name.removeprefix("accelerate."), record.getMessage()) for record in caplog.records]
    assert logged == [
        ("accelerator", f"[RANK 0] saving a checkpoint in {path}"),
        ("checkpointing", f"[RANK 0] saved models (Linear) in {path}/model.safetensors"),
        ("checkpointing", f"[RANK 0] saved optimizers (SGD) in {path}/optimizer.bin"),
        ("checkpointing", f"[RANK 0] saved rng (random states) in {path}/random_states_0.pkl"),
        ("accelerator", f"[RANK 0] loading the checkpoint {path}"),
        ("checkpointing", "[RANK 0] loaded model 0 (Linear)"),
        ("checkpointing", "[RANK 0] loaded optimizer 0 (SGD)"),
        ("checkpointing", "[RANK 0] loaded random states of rank 0 (random states)"),
        ("accelerator", f"[RANK 0] exported weights to {tmp_path}/b: model.safetensors"),
    ]
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_compiled_models_in_float32_use_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in 1.15, where the device has it; the plan says so."""
    allowed: list[bool] = []
    processor = "accelerate.device.cpu.Cpu"
    monkeypatch.setattr(f"{processor}.has_tf32", True)
    monkeypatch.setattr(f"{processor}.allow_tf32", lambda device: allowed.append(True))
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    assert "TF32" in str(accelerator.plan(torch.nn.Linear(2, 2)))
    accelerator.prepare(torch.nn.Linear(2, 2))
    assert allowed == [True]
    AcceleratorState._reset_state()
    other = Accelerator(cpu=True, dynamo_backend="eager", mixed_precision="bf16")
    assert "TF32" not in str(other.plan(torch.nn.Linear(2, 2)))
    other.prepare(torch.nn.Linear(2, 2))
    assert allowed == [True]


@pytest.mark.parametrize(("bound", "expected"), [({"gloo"}, torch.device("cpu")), ({"nccl"}, None)])
def test_nccl_opens_its_communicator_on_the_device_of_the_process(
    monkeypatch: pytest.MonkeyPatch, bound: set[str], expected: torch.device | None
) -> None:
    """Else the first collective opens it, and a barrier guesses the device."""

    class OpenedError(Exception):
        pass

    def refuse(**arguments: object) -> None:
        raise OpenedError(arguments)

    monkeypatch.setattr("accelerate.device.cpu.Cpu.bound_backends", bound)
    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    place = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "a"}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(OpenedError) as error:
        PartialState(cpu=True)
    assert error.value.args[0].get("device_id") == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("trackers", [1]), ("log_with", ["x"]), ("step", 7), ("device_placement", False), ("_models", [1])],
)
def test_attributes_that_components_hold_can_be_patched(name: str, value: Any) -> None:
    accelerator = Accelerator(cpu=True)
    before = getattr(accelerator, name)
    with mock.patch.object(accelerator, name, value):
        assert getattr(accelerator, name) == value
    assert getattr(accelerator, name) == before
