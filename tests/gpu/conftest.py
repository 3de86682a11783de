"""The tests of this folder run on a real accelerator; without one they are skipped and say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate import device as devices
from accelerate.device.base import Device

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    # Asked only when one of them was collected: it loads torch.
    if ours and devices.detect().type == "cpu":
        for item in ours:
            item.add_marker(pytest.mark.skip(reason="no accelerator here: torch finds the CPU only"))
    for item in ours:
        item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> Device:
    """The accelerator of this machine."""
    return devices.detect()
