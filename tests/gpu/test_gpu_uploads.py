"""Weights that are loaded onto a device through pinned blocks have the values of their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import init_empty_weights, load_checkpoint_in_model
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
