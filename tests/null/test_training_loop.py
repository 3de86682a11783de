"""The loop on one process: options of autocast, fused backward, several Accelerators side by side."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.core.errors import PrepareError, WorldError
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import AutocastKwargs, DynamoBackend, GradScalerKwargs, ParallelismConfig


@pytest.mark.parametrize(("planned", "loaded"), [(10, 30), (30, 10)])
def test_a_loaded_schedule_ends_where_its_own_length_says(planned: int, loaded: int) -> None:
    def schedule_of(steps: int) -> tuple[AcceleratedOptimizer, AcceleratedScheduler]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=steps)
        return Accelerator(cpu=True).prepare(optimizer, schedule)

    _, saved = schedule_of(loaded)
    optimizer, schedule = schedule_of(planned)
    schedule.load_state_dict(saved.state_dict())
    schedule.bind(GradientState(), data_shards=2)  # as on two processes, where overruns are said
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(loaded // 2 + 5):
            optimizer.step()
            schedule.step()
    assert schedule.scheduler.last_epoch == loaded
    assert [f"has {loaded} steps" in str(warning.message) for warning in caught] == [True]


@pytest.mark.parametrize("steps_in_hooks", [True, False])
def test_an_optimizer_that_stands_for_others_is_not_blamed(steps_in_hooks: bool) -> None:
    """transformers' layer-wise optimizers step in the backward; a loop gets one of a dummy tensor."""
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    layers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        layers[parameter].step()
        layers[parameter].zero_grad()

    for parameter in layers:
        if steps_in_hooks:
            parameter.register_post_accumulate_grad_hook(step)
    before = model.weight.detach().clone()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD([torch.randn(1, 1)], lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert torch.equal(model.weight, before) != steps_in_hooks
    said = ["has no gradient for any of its 1 parameters" in str(warning.message) for warning in caught]
    assert said == ([] if steps_in_hooks else [True])


class Both(nn.Module):
    """Gives a matrix product and a sum in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.layer(x)
        return {"y": y, "parts": [y.float().sum(), "text"]}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("upcast", [None, True, False])
def test_outputs_may_stay_as_they_were_computed(precision: str, upcast: bool | None) -> None:
    """F12: float32 by default, as computed by a named option."""
    handlers: Any = [] if upcast is None else [AutocastKwargs(upcast_outputs=upcast)]
    accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=handlers)
    computed = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    expected = computed if upcast is False else torch.float32
    assert ("as computed" in str(accelerator.plan(Both()))) == (upcast is False)
    model = accelerator.prepare(Both())
    output = model(torch.ones(1, 2))
    assert output["y"].dtype == expected
    assert output["parts"][0].dtype == torch.float32
    assert output["parts"][1] == "text"
    accelerator.backward(output["y"].float().sum())
    assert model.layer.weight.grad.dtype == torch.float32


def test_autocast_by_hand_takes_its_own_options() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with accelerator.autocast():
        assert layer(x).dtype == torch.bfloat16
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert layer(x).dtype == torch.float32
    with Accelerator(mixed_precision="no").autocast():
        assert layer(x).dtype == torch.float32


def test_clipping_by_value_sees_true_gradients_and_waits_for_the_window() -> None:
    options: Any = {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=64.0)]}
    accelerator = Accelerator(gradient_accumulation_steps=2, **options)
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    found = []
    for value in (1.0, 5.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), value)).sum())
            accelerator.unscale_gradients()  # nothing happens before the window is complete
            accelerator.clip_grad_value_(model.parameters(), 2.0)
            found.append(float(model.weight.grad))  # type: ignore[arg-type]
            optimizer.step()
    assert found == [64.0 * 1.0 / 2, 2.0]
    assert optimizer.skipped_steps == 0


@pytest.mark.parametrize("watched", [False, True])
def test_the_norm_of_a_clipping_may_be_a_text(watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch takes it, in a micro-batch that only accumulates too, and where gradients are watched."""
    monkeypatch.setenv("ACCELERATE_CHECK_NUMERICS", str(watched))
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Linear(2, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    norms = list[float]()
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.tensor([[3.0, 4.0]])).sum())
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 9.0, norm_type="inf").item())
            optimizer.step()
    assert norms == [2.0, 4.0]


class Lomo(torch.optim.Optimizer):
    """An optimizer in the manner of LOMO: it has no step of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(list(parameters), {})

    def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
        loss.backward()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= lr * parameter.grad
                parameter.grad = None


def test_a_fused_backward_updates_and_leaves_nothing_to_step() -> None:
    accelerator = Accelerator()
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    model, optimizer = accelerator.prepare(model, Lomo(model.parameters()))
    assert accelerator.has_lomo_optimizer
    accelerator.backward(model(torch.ones(1, 2)).sum(), learning_rate=0.5)
    accelerator.lomo_backward(model(torch.ones(1, 2)).sum(), 0.5)
    optimizer.step()  # Lomo itself would raise
    optimizer.zero_grad()
    assert torch.allclose(before - model.weight, torch.ones(1, 2))


def test_a_fused_backward_needs_its_optimizer_and_no_accumulation() -> None:
    model = nn.Linear(2, 1)
    plain = Accelerator()
    plain.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not plain.has_lomo_optimizer
    for use in (plain.lomo_backward, lambda loss, rate: plain.backward(loss, learning_rate=rate)):
        with pytest.raises(PrepareError, match="0 are prepared") as error:
            use(model(torch.ones(1, 2)).sum(), 0.1)
        assert "lomo-optim" in error.value.fix
    several = Accelerator(gradient_accumulation_steps=2)
    several.prepare(model, Lomo(model.parameters()))
    with pytest.raises(PrepareError, match="cannot accumulate"):
        several.backward(model(torch.ones(1, 2)).sum(), learning_rate=0.1)


def test_a_fused_backward_is_not_done_by_halves(tmp_path: Path) -> None:
    """Without a rate, under a loss scale, or clipped: an error or a warning, once."""
    model = nn.Linear(2, 1)
    scaled = Accelerator(mixed_precision="fp16")
    scaled.prepare(model, Lomo(model.parameters()))
    with pytest.raises(PrepareError, match="lomo_backward under mixed_precision='fp16'"):
        scaled.backward(model(torch.ones(1, 2)).sum(), learning_rate=0.1)
    accelerator = Accelerator(mixed_precision="no")
    other = nn.Linear(2, 1)
    optimizer = Lomo(other.parameters())
    vars(optimizer)["exp_avg_sq"] = {"weight": torch.ones(2)}
    model, optimizer = accelerator.prepare(other, optimizer)
    with pytest.raises(PrepareError, match="without a learning rate") as error:
        accelerator.backward(model(torch.ones(1, 2)).sum())
    assert "learning_rate=" in error.value.fix
    accelerator.backward(model(torch.ones(1, 2)).sum(), learning_rate=0.1)
    with pytest.warns(UserWarning, match=r"clip_grad_norm_\(\) does not clip: Lomo"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.warns(UserWarning, match="keeps exp_avg_sq outside of its state_dict"):
        accelerator.save_state(str(tmp_path / "saved"))


def test_an_export_in_training_mode_is_said(tmp_path: Path) -> None:
    schedulefree = pytest.importorskip("schedulefree")
    accelerator = Accelerator()
    model: Any = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, schedulefree.SGDScheduleFree(model.parameters(), lr=0.1))
    optimizer.train()
    with pytest.warns(UserWarning, match="exports the weights that SGDScheduleFree trains at"):
        accelerator.save_model(model, str(tmp_path / "trained"))
    optimizer.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.save_model(model, str(tmp_path / "evaluated"))


def trainer(steps: int, **options: Any) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(gradient_accumulation_steps=steps, **options)
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    loader = DataLoader(TensorDataset(torch.ones(6, 1)), batch_size=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def test_accelerators_of_other_settings_train_in_turns() -> None:
    """F11: three at once, in one loop; each has its own windows, precision, scaler and flags."""
    scaled: Any = {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=8.0)]}
    three = [trainer(1), trainer(2, mixed_precision="bf16"), trainer(3, **scaled)]
    flags = ["", "", ""]
    for batches in zip(*(loader for *_, loader in three), strict=True):
        for place, ((accelerator, model, optimizer, _), (x,)) in enumerate(zip(three, batches, strict=True)):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
            flags[place] += "T" if accelerator.sync_gradients else "F"
    assert flags == ["TTTTTT", "FTFTFT", "FFTFFT"]
    # A third is not exact in float16.
    assert [model.weight.item() for _, model, *_ in three] == [-6.0, -3.0, pytest.approx(-2.0, abs=1e-3)]
    assert [each.mixed_precision for each, *_ in three] == ["no", "bf16", "fp16"]
    assert GradientState() is three[2][0].gradient_state, "the newest"
    assert three[0][0].gradient_state.num_steps == 1
    first = three[0][0]
    first.gradient_accumulation_steps = 4
    assert [each.gradient_accumulation_steps for each, *_ in three] == [4, 2, 3]


def test_an_accelerator_may_follow_another_with_other_settings() -> None:
    """F11: one after the other, after ``end_training`` too."""
    for steps, precision in ((1, "no"), (2, "bf16"), (3, "no")):
        accelerator, model, optimizer, loader = trainer(steps, mixed_precision=precision)
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
        assert model.weight.item() == -6 / steps
        assert GradientState().num_steps == steps
        accelerator.free_memory()
        accelerator.end_training()


def test_a_gradient_state_from_before_the_accelerator_is_its_own() -> None:
    """A program may ask for it first, as for ``PartialState``."""
    state = GradientState()
    accelerator, _, _, loader = trainer(3)
    assert accelerator.gradient_state is state
    assert state.num_steps == 3
    assert [state.end_of_dataloader for _ in loader][-2:] == [False, True]
    assert Accelerator().gradient_state is not state


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_another_accelerator_has_prepared_follows_the_newest(interrupted: bool) -> None:
    """It stepped by the windows of the first, and with gradients that nobody had unscaled."""
    first, model, optimizer, loader = trainer(2)
    schedule = first.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 100))
    if interrupted:
        with first.accumulate(model):
            assert not first.sync_gradients
    second = Accelerator(
        gradient_accumulation_steps=3,
        mixed_precision="fp16",
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[GradScalerKwargs(init_scale=8.0)],
    )
    model, optimizer, schedule, loader = second.prepare(model, optimizer, schedule, loader)
    weights = []
    for (x,) in loader:
        with second.accumulate(model):
            second.backward(model(x).sum())
            if second.sync_gradients:
                second.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        weights.append(model.weight.item())
    assert weights == pytest.approx([0.0, 0.0, -0.5, -0.5, -0.5, -1.0], rel=1e-4)
    assert schedule.last_epoch == 6, "at every call, as the second says"
    made_by_hand = AcceleratedScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1), optimizer, False)
    own_scaler = AcceleratedOptimizer(optimizer.optimizer, scaler=torch.amp.GradScaler("cpu"))
    third = Accelerator()
    assert third.prepare(made_by_hand) is made_by_hand
    assert made_by_hand.gradient_state is third.gradient_state
    assert not made_by_hand.step_with_optimizer
    assert third.prepare(own_scaler).scaler is not None


def test_an_accelerator_that_states_nothing_continues_the_one_before() -> None:
    """As in 1.15: ``Accelerator()`` in a library is another view of the same training."""
    first = Accelerator(cpu=True, mixed_precision="bf16", dynamo_backend="eager")
    second, third = Accelerator(), Accelerator(gradient_accumulation_steps=2)
    assert [each.mixed_precision for each in (second, third)] == ["bf16", "bf16"]
    assert AcceleratorState().dynamo_plugin is first.state.dynamo_plugin
    assert [first.gradient_accumulation_steps, third.gradient_accumulation_steps] == [1, 2]
    own = Accelerator(mixed_precision="no")
    assert (own.mixed_precision, own.state.dynamo_plugin.backend) == ("no", DynamoBackend.NO)
    assert Accelerator().mixed_precision == "no"
    Accelerator(mixed_precision="bf16")
    assert Accelerator().mixed_precision == "no", "that one is gone"
    ended = Accelerator(mixed_precision="bf16")
    ended.end_training()
    assert Accelerator(cpu=True).mixed_precision == "no"


def test_choices_that_failed_are_not_continued() -> None:
    with pytest.raises(WorldError):
        Accelerator(cpu=True, mixed_precision="bf16", parallelism_config=ParallelismConfig(tp_size=2))
    assert Accelerator(cpu=True).mixed_precision == "no"


def test_an_evaluation_left_half_way_and_kept_does_not_hide_the_end_of_the_training_loop() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = nn.Linear(1, 1)
    train, evaluation = (DataLoader(torch.arange(6.0)[:, None]) for _ in range(2))
    model, train, evaluation = accelerator.prepare(model, train, evaluation)
    kept: list[Any] = []
    flags: list[bool] = []
    for step, batch in enumerate(train):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            flags.append(accelerator.sync_gradients)
        if step == 2:
            kept.append(iter(evaluation))
            next(kept[0])
    assert flags == [False, False, False, True, False, True]


def test_a_schedule_of_any_class_may_have_a_number_of_steps() -> None:
    class Ramp:
        total_steps, count = 4, 0

        def step(self) -> None:
            self.count += 1

    accelerator = Accelerator()
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=0.1))
    schedule = accelerator.prepare_scheduler(Ramp())
    for _ in range(3):
        accelerator.backward(weight.sum())
        optimizer.step()
        schedule.step()
    assert schedule.count == 3
