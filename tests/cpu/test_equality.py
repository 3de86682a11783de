"""A run that is saved, ended and gone on with in new processes is the run in one, to the last bit.

``test_resume_ranks.py`` shows it for every kind of loader; here are number formats, overflows, accumulation
and objects of the user, with everything that a training keeps.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.crash import printed
from tests.support.interrupted import COUNT, loader, noise
from tests.support.long_run import select_cases
from tests.support.ranks import RankServer, same_on_all

EPOCHS = 2
Log = list[tuple[Any, ...]]


class Net(nn.Module):
    """With dropout, which draws, and a buffer, which is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 32)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(torch.relu(self.norm(self.inner(x))))).square().mean()


class Average:
    """The average of weights that a user keeps beside the model."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.steps = 0

    def update(self, model: nn.Module) -> None:
        self.steps += 1
        for name, p in model.named_parameters():
            self.weights[name.removeprefix("module.")].lerp_(p.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self.steps = state["weights"], state["steps"]


@dataclass(frozen=True)
class Case:
    """How a run is made.

    Attributes:
        precision: ``"no"``, ``"bf16"`` or ``"fp16"``, which overflows now and then.
        accumulation: micro-batches per step.
        schedule: ``"step"`` or ``"lambda"``.
    """

    precision: str
    accumulation: int
    schedule: str = "step"


class Run:
    """One process of a training."""

    def __init__(self, case: Case, seed: int) -> None:
        from accelerate import Accelerator
        from accelerate.utils import GradScalerKwargs, set_seed

        scaling = GradScalerKwargs(init_scale=2.0**24, growth_interval=2)
        self.accelerator = accelerator = Accelerator(
            cpu=True,
            mixed_precision=case.precision,
            gradient_accumulation_steps=case.accumulation,
            kwargs_handlers=[scaling] if case.precision == "fp16" else [],
        )
        set_seed(seed)  # the model is the same on all ranks, and
        model = Net()
        set_seed(seed, device_specific=True)  # what they draw is not
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if case.schedule == "step":
            schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        else:
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.model, self.optimizer, self.schedule, self.batches = accelerator.prepare(
            model, optimizer, schedule, loader("default", workers=2)
        )
        self.average = Average(model)
        accelerator.register_for_checkpointing(self.average)

    def step(self, rows: list[Any]) -> tuple[Any, ...]:
        """One micro-batch; what happened in it."""
        x = torch.tensor([[index / COUNT, *drawn] for index, drawn in rows])
        with self.accelerator.accumulate(self.model):
            loss = self.model(x)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        skipped = self.accelerator.sync_gradients and self.accelerator.optimizer_step_was_skipped
        if self.accelerator.sync_gradients and not skipped:
            self.average.update(self.accelerator.unwrap_model(self.model))
        rate = self.schedule.get_last_lr()
        return [index for index, _ in rows], printed(x), loss.item(), rate, skipped, noise()

    def train(self, saves: dict[tuple[int, int], str], since: tuple[int, int] = (0, 0)) -> Log:
        """From a micro-batch to the end; saves after those that ``saves`` names, -1 for after the epoch."""
        log: Log = []
        first, done = since
        for epoch in range(first, EPOCHS):
            left = self.accelerator.skip_first_batches(self.batches, done) if done else self.batches
            for number, rows in enumerate(left, done + 1):
                log.append((epoch, number, *self.step(rows)))
                if (epoch, number) in saves:
                    self.accelerator.save_state(saves[epoch, number])
            done = 0
            if (epoch, -1) in saves:
                self.accelerator.save_state(saves[epoch, -1])
        return log

    def everything(self) -> dict[str, str]:
        """A digest of all that the training keeps, and then what it draws next."""
        scaler = self.accelerator.scaler
        values = {
            "model": self.accelerator.get_state_dict(self.model), "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(), "scaler": scaler and scaler.state_dict(),
            "average": self.average.state_dict(), "position": self.batches.state_dict(),
            "draws": (random.random(), np.random.rand(), torch.rand(3), torch.randn(2)),
        }  # fmt: skip
        return {name: printed(value) for name, value in values.items()}


def whole(case: Case, saves: dict[tuple[int, int], str]) -> tuple[Log, dict[str, str]]:
    run = Run(case, 3)
    return run.train(saves), run.everything()


def rest(case: Case, folder: str, since: tuple[int, int]) -> tuple[Log, dict[str, str]]:
    run = Run(case, 77)
    loaded = run.accelerator.load_state(folder)
    assert (loaded.missing, loaded.notes) == ((), ())
    return run.train({}, since), run.everything()


CASES = [
    (1, Case("no", 2), "between"), (1, Case("bf16", 1, "lambda"), "between"), (1, Case("fp16", 1), "inside"),
    (2, Case("no", 1, "lambda"), "between"), (2, Case("no", 2), "inside"), (2, Case("bf16", 1), "inside"),
    (2, Case("bf16", 2), "between"), (2, Case("fp16", 2), "inside"),
]  # fmt: skip
MORE_CASES = [
    (1, Case("no", 1), "inside"), (1, Case("bf16", 2), "inside"),
    (1, Case("fp16", 2, "lambda"), "inside"), (2, Case("fp16", 1), "between"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("size", "case", "where"),
    select_cases([*CASES, *MORE_CASES], CASES),
    ids=[f"{n}-{c.precision}-{c.accumulation}-{w}" for n, c, w in [*CASES, *MORE_CASES]],
)
def test_a_run_in_two_processes_is_the_run_in_one(
    ranks: RankServer, tmp_path: Path, size: int, case: Case, where: str
) -> None:
    """D7, D8, D11, A1, A2, A5: everything, saved in the middle of an epoch or between two."""
    save, since = ((0, 4), (0, 4)) if where == "inside" else ((0, -1), (1, 0))
    folder = str(tmp_path / "c")
    straight = ranks(size, whole, case, {save: folder})
    resumed = ranks(size, rest, case, folder, since)
    for (log, end), (later, end_later) in zip(straight, resumed, strict=True):
        assert len(later) >= 1
        assert later == log[-len(later) :]
        assert later[0][:2] == (since[0], since[1] + 1)
        assert end_later == end
    if case.precision == "fp16":
        skipped = [entry[6] for entry in straight[0][0]]
        before = len(skipped) - len(resumed[0][0])
        assert any(skipped[:before]), "the scale must have changed before the save"
        assert not all(skipped)
    same_on_all([{n: p for n, p in end.items() if n not in ("draws", "model")} for _, end in straight])


def test_saving_changes_nothing(ranks: RankServer, tmp_path: Path) -> None:
    """A3, D11: the run that saves every now and then is the run that never does."""
    case, saves = Case("no", 2), {(0, 2): "a", (0, 4): "b", (0, -1): "c", (1, 2): "a"}
    saving = ranks(2, whole, case, {when: str(tmp_path / name) for when, name in saves.items()})
    assert saving == ranks(2, whole, case, {})


def some(folder: str, since: str, stop: int) -> tuple[list[int], list[float], list[str]]:
    """(real samples, what is drawn before the first, notes of the load) of ``stop`` steps, or to the end."""
    run = Run(Case("no", 1), 3)
    left, notes = run.batches, []
    if since:
        notes = list(run.accelerator.load_state(since).notes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # test_resume_ranks.py hears it
            left = run.accelerator.skip_first_batches(run.batches, None)
    found, drawn = [], noise()
    for number, rows in enumerate(left, 1):
        found += [index for index, _ in rows[: left.real]]
        run.step(rows)
        if number == stop:
            run.accelerator.save_state(folder)
            break
    return found, drawn, notes


def test_two_then_one_then_three_processes_see_each_sample_once(ranks: RankServer, tmp_path: Path) -> None:
    """A4: what is drawn is the same on every load, differs between ranks, and the change is said."""
    a, b, c = (str(tmp_path / name) for name in "abc")
    two = ranks(2, some, a, "", 2)
    (one,) = ranks(1, some, b, a, 2)
    three, again = ranks(3, some, c, b, 99), ranks(3, some, c, b, 99)
    seen = list(chain.from_iterable(found for found, _, _ in [*two, one, *three]))
    assert sorted(seen) == list(range(COUNT))
    assert three == again
    assert len({tuple(drawn) for _, drawn, _ in three}) == 3
    assert one[2] == ["saved by 2 process(es), loaded by 1: random states of rank 1 and above are not used"]
    assert "saved by 1 process(es), loaded by 3" in three[0][2][0]
    assert "are derived from those of rank 0" in three[0][2][0]
