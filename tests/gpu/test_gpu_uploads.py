"""Weights that are loaded onto a device through pinned blocks have the values of their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import Accelerator, init_empty_weights, load_checkpoint_in_model
from tests.support import sim

SIZE = 256 if sim.autoloaded() else 5000  # a matrix of 100 MB takes two blocks


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE), nn.Linear(SIZE, 3))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as saved", "converted"])
@pytest.mark.parametrize("is_empty", [True, False], ids=["new", "in place"])
def test_weights_have_the_values_of_the_file(
    device: Any, tmp_path: Path, dtype: torch.dtype | None, is_empty: bool
) -> None:
    """While the device computes, so that memory of tensors is used again that it still reads."""
    torch.manual_seed(0)
    net, path = make_net(), tmp_path / "model.safetensors"
    save_file(net.state_dict(), path)
    for _ in range(3):
        with init_empty_weights(include_buffers=is_empty):
            model = make_net()
        if not is_empty:
            model = model.to_empty(device=device.type)
        busy = torch.ones(SIZE, SIZE, device=device.type)
        results = [busy @ busy for _ in range(20)]
        expected = results[-1][0, 0].clone()
        del results, busy
        load_checkpoint_in_model(model, path, {"": f"{device.type}:0"} if is_empty else None, dtype=dtype)
        for name, value in net.state_dict().items():
            told = model.state_dict()[name]
            assert told.device.type == device.type
            assert torch.equal(told.cpu(), value.to(dtype or value.dtype)), name
        assert expected.item() == SIZE


@pytest.mark.parametrize("map_location", [None, "on_device"])
def test_a_training_goes_on_with_the_weights_and_moments_of_its_checkpoint(
    tmp_path: Path, map_location: str | None
) -> None:
    """Twice, since the second load finds moments to fill; the step before each may still be computing."""
    torch.manual_seed(0)
    accelerator = Accelerator()
    net = make_net()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3))

    def train_step() -> list[torch.Tensor]:
        accelerator.backward(model(torch.ones(2, SIZE, device=accelerator.device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        moments = (value for state in optimizer.state.values() for value in state.values())
        return [*model.parameters(), *moments]

    saved = [value.detach().cpu().clone() for value in train_step()]
    folder = accelerator.save_state(tmp_path / "state")
    after = [value.detach().cpu().clone() for value in train_step()]
    for _ in range(2):
        accelerator.load_state(folder, map_location=map_location)
        moments = (value for state in optimizer.state.values() for value in state.values())
        for value, wanted in zip([*model.parameters(), *moments], saved, strict=True):
            assert torch.equal(value.cpu(), wanted)
        for value, wanted in zip(train_step(), after, strict=True):
            torch.testing.assert_close(value.detach().cpu(), wanted, rtol=1e-4, atol=1e-6)
