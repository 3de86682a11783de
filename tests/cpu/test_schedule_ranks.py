"""Schedules, skipped steps and bad input on several processes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from accelerate.core.errors import PrepareError
from tests.support.ranks import RankServer, same_on_all

PLANNED = 10  # optimizer steps
SCHEDULES: dict[str, Any] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 - step / PLANNED),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=PLANNED),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=PLANNED),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, total_iters=PLANNED),
    "linear": lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=PLANNED),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.CosineAnnealingLR(o, PLANNED - 2)], [2]
    ),
    "to zero": lambda o: lr_scheduler.LambdaLR(o, lambda step: max(0.0, 1 - step / PLANNED)),
    "warm-up": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def rates(kind: str, once: bool | None, window: int, steps: int) -> tuple[list[float], list[str]]:
    """The learning rate of every optimizer step, and what was announced; ``once`` None splits batches."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=window, step_scheduler_once=bool(once))
    accelerator = Accelerator(
        gradient_accumulation_plugin=plugin,
        dataloader_config=DataLoaderConfiguration(split_batches=once is None),
    )
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, SCHEDULES[kind](optimizer))
    found: list[float] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps * window):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).sum() * 0)
                if accelerator.sync_gradients:
                    found.append(round(schedule.get_last_lr()[0], 6))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return found, [str(w.message) for w in caught if "schedule" in str(w.message)]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_rate_of_a_step_is_that_of_one_process(ranks: RankServer, kind: str) -> None:
    """B5: once per optimizer step, GA 1 and 2; also with split batches, which always did."""
    ((alone, said),) = ranks(1, rates, kind, False, 1, PLANNED)
    assert not said
    for once, window in ((True, 1), (True, 2), (None, 1)):
        found = ranks(2, rates, kind, once, window, PLANNED)
        assert [row for row, _ in found] == [alone, alone]
        assert not any(said for _, said in found)


ENDS = {"lambda": "a learning rate of -0.2", "to zero": "learning rate of 0", "warm-up": "", "chained": ""}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_that_runs_past_its_end_is_announced_once(ranks: RankServer, kind: str) -> None:
    """B5: the documented default advances by the number of processes."""
    ((alone, _),) = ranks(1, rates, kind, False, 1, PLANNED)
    (found, said), (same, nothing) = ranks(2, rates, kind, False, 1, PLANNED)
    assert found == same
    assert found[:5] == alone[::2]
    assert nothing == [], "the main process speaks for all"
    expected = ENDS.get(kind, "has 10 steps and was at step 10")
    assert len(said) == (1 if expected else 0)
    for text in said:
        assert expected in text
        assert "step_scheduler_once=True" in text


def planned_for_all_batches(kind: str) -> list[str]:
    """A schedule as long as the loader before prepare: it ends with the epoch, and nothing is announced."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(PLANNED, 1)), batch_size=1)
    schedule = SCHEDULES[kind](optimizer)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for (x,) in loader:
            accelerator.backward(model(x).sum())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return [str(w.message) for w in caught if "schedule" in str(w.message)]


def test_a_schedule_of_the_documented_length_is_not_announced(ranks: RankServer) -> None:
    for kind in ("lambda", "cosine", "one cycle", "to zero"):
        assert same_on_all(ranks(2, planned_for_all_batches, kind)) == []


def by_metric() -> list[float]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    model, optimizer, plateau = accelerator.prepare(model, optimizer, plateau)
    found = []
    for _ in range(8):
        accelerator.backward(model(torch.ones(1, 1)).sum() * 0)
        optimizer.step()
        plateau.step(1.0)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_a_schedule_by_metric_counts_evaluations(ranks: RankServer) -> None:
    """Patience is what the user said, on any number of processes."""
    (alone,) = ranks(1, by_metric)
    assert alone == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25]
    assert same_on_all(ranks(2, by_metric)) == alone


def by_local_metric(coupled: bool) -> tuple[list[float], list[str]]:
    """Rank 0 gets better all the time, and rank 1 faster worse; then both get NaN."""
    from accelerate import Accelerator

    accelerator = Accelerator(step_scheduler_with_optimizer=coupled)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    model, optimizer, plateau = accelerator.prepare(model, optimizer, plateau)
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            optimizer.step()
            metric = torch.tensor(2.0 * step) if accelerator.process_index else torch.tensor(-1.0 * step)
            plateau.step(metrics=metric) if step % 2 else plateau.step(metric)
            found.append(optimizer.param_groups[0]["lr"])
        plateau.step(float("nan"))
    return found, [str(each.message) for each in caught if "metric" in str(each.message)]


@pytest.mark.parametrize("coupled", [True, False])
def test_a_schedule_by_a_local_metric_goes_by_the_mean(ranks: RankServer, coupled: bool) -> None:
    """G5: the learning rate is one, and it is said once that metrics differ."""
    (rates, said), (other, silent) = ranks(2, by_local_metric, coupled)
    assert rates == other == [0.1, 0.05, 0.025, 0.0125]
    assert silent == []
    (note,) = said
    assert "another metric on each process, from -1 to 2: their mean 0.5 counts" in note


def overflow(window: int) -> list[tuple[bool, int, float, bool, float]]:
    """One process alone meets an infinite loss: per step, what everybody sees."""
    from accelerate import Accelerator, GradScalerKwargs

    accelerator = Accelerator(
        mixed_precision="fp16",
        gradient_accumulation_steps=window,
        kwargs_handlers=[GradScalerKwargs(init_scale=256.0)],
    )
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    found = []
    for step in range(4):
        before = model.weight.detach().clone()
        for micro in range(window):
            with accelerator.accumulate(model):
                loss = model(torch.ones(1, 2)).sum()
                # In the first micro-batch, whose gradients do not travel by themselves.
                if step == 1 and micro == 0 and accelerator.process_index == 1:
                    loss = loss * float("inf")
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        moved = not torch.equal(before, model.weight)
        assert accelerator.scaler is not None
        found.append(
            (
                accelerator.optimizer_step_was_skipped,
                optimizer.skipped_steps,
                schedule.get_last_lr()[0],
                moved,
                accelerator.scaler.get_scale(),
            )
        )
    return found


@pytest.mark.parametrize("window", [1, 2])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: RankServer, window: int) -> None:
    """B6."""
    found = same_on_all(ranks(2, overflow, window))
    assert [row[:2] for row in found] == [(False, 0), (True, 1), (False, 1), (False, 1)]
    assert [row[2] for row in found] == [0.1 / 4, 0.1 / 4, 0.1 / 16, 0.1 / 64]
    assert [row[3] for row in found] == [True, False, True, True]
    assert [row[4] for row in found] == [256.0, 128.0, 128.0, 128.0]


def train_after(how: str, folder: str) -> tuple[list[float], list[str]]:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how == "free_memory":
            accelerator.free_memory()
        elif how == "pop":
            accelerator._models.pop()
        for _ in range(4):
            with accelerator.accumulate(model):
                inputs = torch.full((1, 2), 0.01 * (1 + accelerator.process_index))
                accelerator.backward(model(inputs).sum())
                accelerator.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(folder)
    return model.weight.flatten().tolist(), [str(w.message) for w in caught if "prepared" in str(w.message)]


@pytest.mark.parametrize("how", ["free_memory", "pop"])
def test_training_goes_on_with_what_is_forgotten(ranks: RankServer, tmp_path: Path, how: str) -> None:
    """Programs free in the middle of a training, for an evaluation, and go on with what they hold."""
    (kept, said), _ = ranks(2, train_after, "", str(tmp_path / "kept"))
    assert not said
    assert kept[0] < 0.999
    (forgotten, said), (other, nothing) = ranks(2, train_after, how, str(tmp_path / how))
    assert forgotten == other == kept
    assert [text.partition("(")[0] for text in said] == ["save_state"] * (how == "free_memory")
    assert not nothing


def wrong(size: int) -> list[str]:
    """Errors and warnings of wrong uses; nothing waits for another rank."""
    from accelerate import Accelerator

    said = []

    def attempt(function: Any) -> None:
        with pytest.raises(PrepareError) as error:
            function()
        said.append(str(error.value))

    accelerator = Accelerator()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    attempt(accelerator.prepare)
    attempt(lambda: Accelerator(strict=True).prepare(model, "text"))
    attempt(lambda: Accelerator(mixed_precision="fp16", strict=True).prepare(nn.Linear(2, 2).half()))
    attempt(lambda: accelerator.backward(torch.ones(2, requires_grad=True) * 2))
    attempt(lambda: accelerator.backward(torch.ones(2).sum(), num_items=1))
    twice = accelerator.prepare(model, model)
    said.append(str(twice[0] is twice[1]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = Accelerator()
        for _ in range(2):
            plain.backward(nn.Linear(2, 1)(torch.ones(1, 2)).sum())
        alone = accelerator.prepare(optimizer)
        sum(p.sum() for group in alone.param_groups for p in group["params"]).backward()
        alone.step()
    messages = [str(w.message) for w in caught if "belong to no prepared model" in str(w.message)]
    assert len(messages) == (1 if accelerator.is_main_process else 0)
    messages = [str(w.message) for w in caught if "backward() with no prepared model" in str(w.message)]
    assert len(messages) == (1 if accelerator.is_main_process else 0)
    return said


def test_bad_input_is_said_on_every_rank(ranks: RankServer) -> None:
    said = same_on_all(ranks(2, wrong, 2))
    parts = ["given nothing", "a str cannot be", "float16 already", "not a scalar", "before anything was"]
    for text, part in zip(said, [*parts, "True"], strict=True):
        assert part in text
