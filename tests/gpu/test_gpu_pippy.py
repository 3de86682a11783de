"""``prepare_pippy`` on two accelerators; run here on simulated ones only (tests/sim/test_sim_pippy.py)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sim.test_sim_pippy import on_accelerators
from tests.support.ranks import RankServer


def test_each_accelerator_holds_its_stage(ranks: RankServer, device: Any) -> None:
    if device.count() < 2:
        pytest.skip(f"two {device.type} devices are needed, and there is one")
    names = [f"{device.type}:0", f"{device.type}:1"]
    found = ranks(2, on_accelerators, device.type, devices=names, timeout=180)
    assert [devices for devices, _ in found] == [{name, "meta"} for name in names]
    assert found[0][1] == ["0.0", "0.1", "1.0", "1.1"]
