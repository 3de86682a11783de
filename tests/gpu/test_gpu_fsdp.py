"""Sharded training on two accelerators: the numbers of one CPU process, also with parameters on the host."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate.device.base import Device
from tests.cpu.test_fsdp2 import close, plain, prepared
from tests.support.ranks import RankServer, same_on_all

LAYERS: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap"}


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize(
    "options",
    [LAYERS, {**LAYERS, "activation_checkpointing": True}, {**LAYERS, "cpu_offload": True}],
    ids=["layers", "recomputed", "offloaded"],
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
