"""Sharded training on two accelerators: the numbers of one CPU process, also with parameters on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate.device.base import Device
from accelerate.strategy.sharding.activation_checkpointing import checkpoint_activations
from tests.cpu.test_fsdp2 import prepared
from tests.support.numbers import close
from tests.support.ranks import RankServer, same_on_all
from tests.support.sharded_models import plain

LAYERS: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap"}


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        LAYERS,
        {**LAYERS, "activation_checkpointing": True, "activation_checkpointing_offload": True},
        {**LAYERS, "cpu_offload": True},
        {**LAYERS, "fsdp_version": 2, "forward_prefetch": True, "backward_prefetch": "NO_PREFETCH"},
        {**LAYERS, "fsdp_version": 2, "sharding_strategy": "HYBRID_SHARD", "replicate_size": 2},
    ],
    ids=["layers", "recomputed", "offloaded", "ahead", "copies"],
)
def test_it_trains_to_the_numbers_of_one_process(
    ranks: RankServer, device: Device, options: dict[str, Any], window: int
) -> None:
    """B7"""
    if device.count() < 2:
        pytest.skip(f"two {device.type} devices are needed, and there is one")
    ours = ranks(2, prepared, options, window, devices=[f"{device.type}:0", f"{device.type}:1"])
    losses, norms = same_on_all([found[:2] for found in ours])
    values = {name: value.cpu() for name, value in ours[0][2].items()}
    close((losses, norms, values), plain(window), 1e-4)


def test_inputs_of_recomputed_blocks_wait_on_the_host(device: Device) -> None:
    """They leave the device between forward and backward; the same gradients, bit for bit."""
    where = device.torch_device(0)

    def held(offload: bool) -> tuple[int, list[torch.Tensor]]:
        torch.manual_seed(0)
        blocks: list[nn.Module] = [nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(6)]
        model = nn.Sequential(*blocks).to(where)
        checkpoint_activations(model, blocks, offload)
        rows = torch.randn(8192, 512, generator=torch.Generator().manual_seed(1)).to(where)
        loss = model(rows).square().mean()
        between = torch.get_device_module(device.type).memory_allocated()
        loss.backward()
        return between, [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    held(False)  # the libraries take their workspaces, for the thread of the backward too
    there, gradients = held(False)
    away, same = held(True)
    assert there - away > 4 * 8192 * 512 * 4
    assert all(map(torch.equal, gradients, same))
