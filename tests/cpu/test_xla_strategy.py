"""Several processes of PyTorch/XLA, with a fake all-reduce over gloo: the logic, without torch_xla."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.core.errors import WorldError
from tests.support import parity
from tests.support.numbers import Numbers
from tests.support.ranks import RankServer
from tests.support.strategies import spmd_on_machines, xla_over_gloo


def train(window: int) -> tuple[Numbers, list[int], str, str]:
    """(losses, norms, weights) of this rank, the all-reduces, the strategy, and its plan."""
    with xla_over_gloo() as calls:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window)
        model = parity.decoder(seed=accelerator.process_index)
        loader = parity.loader(parity.ROWS // 2)
        objects: Any = (model, parity.adamw(model), loader)
        plan = str(accelerator.plan(*objects))
        model, optimizer, loader = accelerator.prepare(*objects)
        # What transformers asks of a loader for a TPU, and where it writes how SPMD shards batches.
        assert isinstance(loader, sys.modules["torch_xla.distributed.parallel_loader"].MpDeviceLoader)
        assert loader._parallel_loader_kwargs == {}
        losses, norms = [], []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = parity.loss_of(model, batch)
                accelerator.backward(loss)
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                optimizer.zero_grad()
        return (losses, norms, dict(model.state_dict())), calls, accelerator.strategy.name, plan


@pytest.mark.parametrize("window", [1, 2])
def test_processes_train_like_one(ranks: RankServer, window: int) -> None:
    """Law 7: rank 1 begins with other weights; one all-reduce for each step of the optimizer."""
    results = ranks(2, train, window)
    for numbers, calls, name, plan in results:
        assert name == "xla"
        assert "replicate: 2 processes average their gradients after backward" in plan
        parity.close(numbers, parity.plain(window), 1e-5)
        trained = sum(p.requires_grad for p in parity.decoder().parameters())
        assert calls == [trained] * (parity.STEPS // window)


def unused() -> list[list[float]]:
    """The gradients of two layers of which each rank uses one."""
    with xla_over_gloo():
        accelerator = Accelerator(cpu=True)
        layers = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in range(2)])
        model = accelerator.prepare(layers)
        accelerator.backward(model[accelerator.process_index](torch.tensor([[4.0]])).sum())
        return [p.grad.flatten().tolist() for p in model.parameters() if p.grad is not None]


def test_a_parameter_that_one_process_has_not_used_counts_with_zeros(ranks: RankServer) -> None:
    """The graph of the all-reduce is the same on all ranks, or they would wait for each other for ever."""
    assert ranks(2, unused) == [[[2.0], [2.0]]] * 2


def weighted() -> list[float]:
    """The gradient where rank 1 has no items."""
    with xla_over_gloo():
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(1, 1, bias=False)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        items = 2 * (1 - accelerator.process_index)
        rows = torch.full((items, 1), 3.0)
        accelerator.backward(model(rows).mean(), num_items=items)
        return [p.grad.item() for p in model.parameters() if p.grad is not None]


def test_a_process_without_items_takes_part(ranks: RankServer) -> None:
    assert ranks(2, weighted) == [[3.0]] * 2


def test_spmd_over_several_machines_is_refused() -> None:
    """A pod sets no RANK: each machine took itself for a process alone."""
    with spmd_on_machines(1):
        assert Accelerator(cpu=True).strategy.name == "xla_spmd"
    with spmd_on_machines(2), pytest.raises(WorldError, match="over 2 machines"):
        Accelerator(cpu=True)
