"""Weights that are mapped from files, sharded on simulated accelerators: no whole weight reaches a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.support.ranks import RankServer

WIDTH, BLOCKS = 256, 6


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))


def loaded(file: str, offload: bool, when: str) -> Any:
    """(greatest memory of the device in weights, where the parts rest, the first weight after a step)."""
    from accelerate import (
        Accelerator,
        FullyShardedDataParallelPlugin,
        init_empty_weights,
        load_checkpoint_in_model,
    )

    options: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap", "cpu_offload": offload}
    plugin = FullyShardedDataParallelPlugin(**options, transformer_cls_names_to_wrap=["Linear"])
    accelerator = Accelerator(fsdp_plugin=plugin)
    with init_empty_weights():
        model: Any = net()
    if when == "before":
        load_checkpoint_in_model(model, file)
    sim: Any = torch.get_device_module("sim")
    sim.reset_peak_memory_stats()
    before = sim.memory_allocated()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if when == "after":
        load_checkpoint_in_model(model, file)
    most = (sim.max_memory_allocated() - before) / (4 * WIDTH**2)
    place = next(model.parameters()).to_local().device.type
    accelerator.backward(model(torch.ones(1, WIDTH, device=accelerator.device)).sum())
    optimizer.step()
    weight = next(model.parameters())
    return most, place, weight.to_local().cpu()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "offloaded"])
def test_each_device_gets_its_part(ranks: RankServer, tmp_path: Path, offload: bool, when: str) -> None:
    file = tmp_path / "model.safetensors"
    model = net()
    save_file(model.state_dict(), file)
    model(torch.ones(1, WIDTH)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    expected = next(model.parameters()).detach().chunk(2)
    for rank, (most, place, weight) in enumerate(ranks(2, loaded, str(file), offload, when)):
        assert place == ("cpu" if offload else "sim")
        assert most <= (0.1 if offload else BLOCKS / 2 + 0.1)
        torch.testing.assert_close(weight, expected[rank], rtol=0, atol=1e-5)
