"""Saving in the background from a device: the copy is made in the order of the device's work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from tests.support import sim
from tests.support.background_save import hold_writes, release_staging, staging_blocks, staging_size

SIZE = 512 if sim.autoloaded() else 4096


def training() -> tuple[Accelerator, torch.nn.Module, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator()
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.BatchNorm1d(SIZE))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator, model, optimizer


def train(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        accelerator.backward(model(torch.randn(8, SIZE, device=accelerator.device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def test_the_checkpoint_has_the_values_at_the_call(
    device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D10: work that the device had not begun at the call is in it, work that was given later is not."""
    go = hold_writes(monkeypatch)
    accelerator, model, optimizer = training()
    release_staging()
    for number in range(2):  # into new memory, and into memory that was used
        go.clear()
        train(accelerator, model, optimizer, 20)
        path = accelerator.save_state(tmp_path / str(number), async_save=True)
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
        train(accelerator, model, optimizer, 20)
        go.set()
        assert accelerator.wait_for_checkpoint() == path
        other, fresh, fresh_optimizer = training()
        other.load_state(path)
        for name, value in fresh.state_dict().items():
            assert value.device.type == device.type
            assert torch.equal(value, expected[name]), name
        for state, moment in zip(fresh_optimizer.state.values(), moments, strict=True):
            assert torch.equal(state["exp_avg"], moment)
    blocks = staging_blocks()[device.type]
    assert all(block.is_pinned() == device.pins_memory for block in blocks)
    accelerator.free_memory()
    assert staging_size() == 0
