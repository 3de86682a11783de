"""Checkpoints in parts: under another strategy, on another number of processes, a run goes on as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.ranks import RankServer, same_on_all

MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"


class Net(nn.Module):
    """Tied, frozen and odd-sized parameters; buffers that are saved and one that is not."""

    shift: torch.Tensor
    seen: torch.Tensor

    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(5, 7, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor([1.0]))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shift", torch.ones(5), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.norm(self.embed(ids)) + self.frozen(self.shift)
        return self.head(torch.tanh(hidden) * self.scale).square().mean()


def prepared(kind: str, seed: int, **options: Any) -> tuple[Any, ...]:
    """(accelerator, model, optimizer, scheduler) of a run that every process takes with the same data."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options) if kind == "fsdp" else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(seed)
    model = Net()
    groups = [
        {"params": [model.embed.weight, model.frozen.weight], "weight_decay": 0.2},
        {"params": [*model.norm.parameters(), model.frozen.bias, model.scale], "lr": 0.01 * (seed + 1)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.03)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def step(run: tuple[Any, ...], number: int) -> float:
    accelerator, model, optimizer, scheduler = run
    loss = model(torch.tensor([number % 7, (3 * number + 1) % 7, 5, 2]))
    accelerator.backward(loss)
    optimizer.step()
    scheduler.scheduler.step()
    optimizer.zero_grad()
    return loss.item()


def part(
    kind: str, first: int, load: str = "", save: str = "", sharded: bool | None = None, steps: int = 3
) -> tuple[list[float], tuple[str, ...]]:
    """Losses of a part of a run, and what the load noted."""
    run = prepared(kind, 0 if not load else 1)
    notes = run[0].load_state(load).notes if load else ()
    assert run[1].head.weight is run[1].embed.weight
    losses = [step(run, number) for number in range(first, first + steps)]
    if save:
        run[0].save_state(save, sharded=sharded)
    return losses, notes


def whole() -> list[float]:
    return part("none", 0, steps=9)[0]


@pytest.fixture(scope="module")
def undisturbed(ranks: RankServer) -> list[float]:
    return ranks(1, whole)[0]


@pytest.mark.parametrize(
    ("first", "second", "third"),
    [
        (("ddp", 2, True), ("none", 1, True), ("ddp", 2, None)),
        (("fsdp", 2, None), ("none", 1, True), ("fsdp", 3, None)),
        (("ddp", 2, True), ("fsdp", 2, None), ("ddp", 2, None)),
        (("ddp", 2, False), ("fsdp", 2, False), ("ddp", 2, None)),
        (("fsdp", 2, False), ("fsdp", 3, None), ("fsdp", 2, None)),
    ],
    ids=str,
)
def test_a_run_goes_on_under_another_strategy_and_number_of_processes(
    ranks: RankServer, undisturbed: list[float], tmp_path: Path, first: Any, second: Any, third: Any
) -> None:
    """Also D6: the weights are tied before and after."""
    losses: list[float] = []
    for number, (kind, size, sharded) in enumerate((first, second, third)):
        load, save = (str(tmp_path / f"c{n}") for n in (number - 1, number))
        got = ranks(size, part, kind, 3 * number, load if number else "", save, sharded)
        found = same_on_all([values for values, _ in got])
        if 3 in (first[1], second[1], third[1]):  # a third of three times a number is not always that number
            assert found == pytest.approx(undisturbed[3 * number : 3 * number + 3], rel=1e-5)
        else:
            assert found == undisturbed[3 * number : 3 * number + 3]
        losses += found
        in_parts = (tmp_path / f"c{number}" / MODEL / ".metadata").is_file()
        assert in_parts is (sharded if sharded is not None else kind == "fsdp")
        assert (tmp_path / f"c{number}" / "optimizer.bin").is_file() is not in_parts
    assert len(losses) == 9
