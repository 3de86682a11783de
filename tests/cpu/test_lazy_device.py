"""A device that records operations: they run where a batch or a step ends."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from tests.support.devices import added_device, device_named


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The CPU as a lazy device; what it was asked for, in order."""
    calls: list[str] = []
    cpu = device_named("cpu")
    monkeypatch.setattr(cpu, "is_lazy", True, raising=False)
    monkeypatch.setattr(cpu, "run_pending", lambda: calls.append("run"), raising=False)
    return calls


def test_pending_operations_run_after_each_batch_and_each_step(runs: list[str]) -> None:
    """Two micro-batches a step: each is a graph of its own, and the step belongs to the second."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(2, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.ones(8, 2), batch_size=2)
    )
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            before = len(runs)
            optimizer.step()
            runs += ["step"] * (len(runs) > before)
            optimizer.zero_grad()
        runs.append("batch")
    assert runs == ["run", "batch", "run", "run", "step", "batch"] * 2 + ["run"]


def test_other_devices_are_asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = device_named("cpu")
    monkeypatch.setattr(cpu, "run_pending", lambda: pytest.fail("not lazy"), raising=False)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(torch.ones(4, 2), batch_size=2)
    )
    for batch in loader:
        accelerator.backward(model(batch).sum())
        optimizer.step()


def test_tied_weights_stay_tied_where_moving_makes_new_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch makes a parameter anew for each module that has it, on devices that cannot take data in place."""
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    with added_device("meta"):
        device = device_named("meta")
        monkeypatch.setattr(device, "bind", lambda index: torch.device("meta"))
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Accelerator().prepare(model, optimizer)
    assert model["embed"].weight.is_meta
    assert model["head"].weight is model["embed"].weight
    assert optimizer.param_groups[0]["params"] == [model["embed"].weight]
