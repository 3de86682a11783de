"""The check of checkpoints: a loaded state equals the saved one, bit for bit."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from accelerate.check.base import CheckNotApplicableError, expect
from accelerate.check.training import make_samples, make_tiny_model
from accelerate.facade.accelerator import Accelerator
from accelerate.world import collective


def check_checkpoint(accelerator: Accelerator) -> str:
    """Check that loading restores weights, optimizer state and random numbers."""
    if accelerator.world.nodes > 1:
        raise CheckNotApplicableError("it is not known which folder all machines share")
    # One rank makes the folder and removes it, also when others fail.
    own_folder = tempfile.mkdtemp(prefix="accelerate-test-") if accelerator.is_main_process else ""
    try:
        (folder,) = collective.broadcast_object_list([own_folder])
        count = _save_and_load(Accelerator(), f"{folder}/state")
        accelerator.wait_for_everyone()
    finally:
        if own_folder:
            shutil.rmtree(own_folder)
    return f"{count} tensors of weights and optimizer, and random numbers, bit for bit"


def _save_and_load(accelerator: Accelerator, folder: str) -> int:
    model = make_tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    _step(accelerator, model, optimizer)
    accelerator.save_state(folder)
    saved, drawn = [tensor.clone() for tensor in _tensors(model, optimizer)], torch.rand(3)
    _step(accelerator, model, optimizer)
    now = list(_tensors(model, optimizer))
    expect(any(not torch.equal(a, b) for a, b in zip(saved, now, strict=True)), "a step changes nothing")
    accelerator.load_state(folder)
    now = list(_tensors(model, optimizer))
    wrong = sum(not torch.equal(a, b) for a, b in zip(saved, now, strict=True))
    expect(not wrong, f"{wrong} of {len(saved)} tensors are not what was saved")
    expect(torch.equal(drawn, torch.rand(3)), "random numbers do not go on where they were")
    return len(saved)


def _step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    inputs, targets = (tensor.to(accelerator.device) for tensor in make_samples(4).tensors)
    accelerator.backward(F.mse_loss(model(inputs).float(), targets))
    optimizer.step()
    optimizer.zero_grad()


def _tensors(model: nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield this rank's shard of every tensor."""
    states = (value for state in optimizer.optimizer.state.values() for value in state.values())
    for tensor in (*model.parameters(), *states):
        if isinstance(tensor, torch.Tensor):
            detached: Any = tensor.detach()
            yield detached.to_local() if hasattr(detached, "to_local") else detached
