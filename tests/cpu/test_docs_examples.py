"""The strategy that CONTRIBUTING.md shows, on two processes: it trains to the numbers of one (law 7)."""

from __future__ import annotations

import importlib
from itertools import chain
from pathlib import Path

import pytest
from torch import nn
from torch.utils.data import DataLoader

from tests.laws.test_7_same_loss import EPOCHS, GLOBAL_BATCH, Numbers, close, numbers, parts, raw_loop
from tests.null.test_docs_examples import in_place
from tests.support.ranks import RankServer, same_on_all


def averaged_loop(folder: str, window: int) -> tuple[Numbers, str, str]:
    """The loop of law 7 with the strategy of the example; its file lies below ``folder``."""
    from accelerate import Accelerator

    with in_place(Path(folder) / "here"):
        asked = importlib.import_module("accelerate.strategy.averaging").AveragingKwargs()
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
        return numbers(losses, model.state_dict()), accelerator.strategy.name, plan


@pytest.mark.parametrize("window", [1, 3])
def test_the_strategy_of_the_guide_trains_like_one_process(
    ranks: RankServer, tmp_path: Path, window: int
) -> None:
    (plain,) = ranks(1, raw_loop, "no", window)
    ours, name, plan = same_on_all(ranks(2, averaged_loop, str(tmp_path), window))
    assert name == "averaging"
    assert "average: 2 processes average gradients after backward" in plan
    close(ours, plain)
