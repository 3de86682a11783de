"""Saving in the background from an accelerator that no file of the package knows."""

from __future__ import annotations

from pathlib import Path

import torch

from accelerate import Accelerator
from tests.support.background_save import release_staging, staging_blocks, staging_size


def test_copies_of_a_device_lie_in_host_memory_of_its_own(tmp_path: Path) -> None:
    """D10: what the device does after the call is not in the checkpoint."""
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(4, 4))
    release_staging()
    saved = {name: value.cpu() for name, value in model.state_dict().items()}
    for number in range(2):
        path = accelerator.save_state(tmp_path / str(number), async_save=True)
        torch.nn.init.zeros_(model.weight)
        assert accelerator.wait_for_checkpoint() == path
        accelerator.load_state(path)
        assert model.weight.device.type == "sim"
        assert torch.equal(model.weight.cpu(), saved["weight"])
    assert set(staging_blocks()) == {"sim", "cpu"}
    accelerator.free_memory()
    assert staging_size() == 0
