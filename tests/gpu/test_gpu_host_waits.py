"""A training step does not wait for the device: CUDA itself tells each time that the host would."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator

WINDOWS, WINDOW = 16, 2
# Buffers that change are looked for in the forwards 1, 2, 4, 8 and 16, and what was seen is read later.
FIRST = 18
# An fp16 step asks once whether the gradients are finite.
ALLOWED = {"no": 0, "bf16": 0, "fp16": 1}


def waits_of_a_training(accelerator: Accelerator) -> list[str]:
    """Train with accumulation, clipping, a schedule and a loader; what CUDA warns of later on."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    pinned = accelerator.device.type == "cuda"
    rows = TensorDataset(torch.randn(WINDOWS * WINDOW * 4, 16))
    loader = DataLoader(rows, batch_size=4, pin_memory=pinned)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    told: list[str] = []
    mode = getattr(torch.cuda, "set_sync_debug_mode", None) if pinned else None
    try:
        for number, (batch,) in enumerate(loader):
            if number == FIRST and mode:
                mode("warn")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).square().mean())
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            told += [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing" in str(w.message)]
    finally:
        if mode:
            mode("default")
    return told


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_step_waits_for_nothing(device: Any, precision: str) -> None:
    if not device.supports(precision):
        pytest.skip(f"{device.name(0)} does not compute in {precision}")
    told = waits_of_a_training(Accelerator(mixed_precision=precision, gradient_accumulation_steps=WINDOW))
    assert len(told) <= ALLOWED[precision] * (WINDOWS - FIRST // WINDOW), told


def test_waits_are_noticed(device: Any) -> None:
    """The check sees what it is to see."""
    if device.type != "cuda":
        pytest.skip("only CUDA tells when the host waits")
    value = torch.ones(1, device=device.torch_device(0))
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchronizing"):
            value.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
