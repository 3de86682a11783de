"""The strategies that CONTRIBUTING.md shows, on two processes: they train to the numbers of one (law 7)."""

from __future__ import annotations

import importlib
import os
from itertools import chain
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.laws.test_7_same_loss import EPOCHS, GLOBAL_BATCH, Numbers, close, numbers, parts, raw_loop
from tests.null.test_docs_examples import in_place
from tests.support.ranks import RankServer, same_on_all

EXAMPLES = {
    "averaging": ("AveragingKwargs", "average: 2 processes average gradients after backward"),
    "one_unit": ("OneUnitKwargs", "shard: one unit over 2 processes"),
}


def example_loop(folder: str, example: str, window: int) -> tuple[Numbers, str, str]:
    """The loop of law 7 with the strategy of an example; its file lies below ``folder``."""
    from accelerate import Accelerator

    with in_place(Path(folder) / str(os.getpid())):  # no rank reads a file that another one writes
        handler = EXAMPLES[example][0]
        asked = getattr(importlib.import_module(f"accelerate.strategy.{example}"), handler)()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window, kwargs_handlers=[asked])
        model, optimizer, data = parts()
        if not accelerator.is_main_process:
            model[0].weight.data.add_(1.0)  # the weights of rank 0 count
        loader = DataLoader(data, batch_size=GLOBAL_BATCH // accelerator.num_processes)
        plan = str(accelerator.plan(model))
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for x, y in chain.from_iterable(loader for _ in range(EPOCHS)):
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(accelerator.gather(loss.detach()).mean().item())
        trained = {name: full(value) for name, value in model.state_dict().items()}
        for sharded in (False, True):
            # A checkpoint of a run that goes on is the run again.
            accelerator.save_state(
                f"{folder}/{sharded}", sharded=sharded and accelerator.strategy.shards_params
            )
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            accelerator.load_state(f"{folder}/{sharded}")
            for name, value in model.state_dict().items():
                assert torch.equal(full(value), trained[name]), name
        return numbers(losses, trained), accelerator.strategy.name, plan


def full(value: Any) -> torch.Tensor:
    """A tensor with all its shards."""
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_strategy_of_the_guide_trains_like_one_process(
    ranks: RankServer, tmp_path: Path, example: str, window: int
) -> None:
    (plain,) = ranks(1, raw_loop, "no", window)
    ours, name, plan = same_on_all(ranks(2, example_loop, str(tmp_path), example, window))
    assert name == example
    assert EXAMPLES[example][1] in plan
    close(ours, plain)


def uneven_backwards(folder: str) -> list[list[float]]:
    """Gradients where one rank has no items, and one does not use a layer."""
    from accelerate import Accelerator

    with in_place(Path(folder) / str(os.getpid())):  # no rank reads a file that another one writes
        asked = importlib.import_module("accelerate.strategy.averaging").AveragingKwargs()
        accelerator = Accelerator(cpu=True, kwargs_handlers=[asked])
        model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
        for layer in model:
            nn.init.ones_(layer.weight)
        model = accelerator.prepare(cast("Any", model))
        first = accelerator.is_main_process
        x = torch.full((1, 2), 3.0 if first else float("nan"))
        accelerator.backward(model[0](x).mean(), num_items=2 if first else 0)
        found = [model[0].weight.grad.flatten().tolist()]
        model.zero_grad()
        accelerator.gradient_state.loss_weighting = None
        x = torch.ones(1, 2)
        accelerator.backward((model[0](x) + (model[1](x) if first else 0.0)).sum())
        return [*found, *(layer.weight.grad.flatten().tolist() for layer in model)]


def test_the_mean_of_the_guide_waits_for_every_rank(ranks: RankServer, tmp_path: Path) -> None:
    """A rank without items, or without a gradient for some parameter, takes part."""
    assert same_on_all(ranks(2, uneven_backwards, str(tmp_path))) == [[3.0, 3.0], [1.0, 1.0], [0.5, 0.5]]
