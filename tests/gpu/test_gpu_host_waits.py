"""A training step does not wait for the device: CUDA itself tells each time that the host would."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from accelerate import Accelerator

WINDOWS, WINDOW = 16, 2
# Buffers that change are looked for in the forwards 1, 2, 4, 8 and 16, and what was seen is read later.
FIRST = 18
# An fp16 step asks once whether the gradients are finite.
ALLOWED = {"no": 0, "bf16": 0, "fp16": 1}
# The mode itself warns that it does not detect all "synchronizing operations" yet.
WAITED = "called a synchronizing"


def waits_of_a_training(accelerator: Accelerator, **options: Any) -> list[str]:
    """Train with accumulation, clipping, a schedule and a loader; what CUDA warns of later on.

    The batches are taken where warnings are recorded, too. ``options`` are those of the loader.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    pinned = accelerator.device.type == "cuda"
    rows = TensorDataset(torch.randn(WINDOWS * WINDOW * 4, 16))
    loader = DataLoader(rows, batch_size=4, pin_memory=pinned, **options)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    mode = getattr(torch.cuda, "set_sync_debug_mode", None) if pinned else None
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number, (batch,) in enumerate(loader):
                if number == FIRST and mode:
                    mode("warn")
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).square().mean())
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
    finally:
        if mode:
            mode("default")
    return [f"{w.filename}:{w.lineno}" for w in caught if WAITED in str(w.message)]


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_step_waits_for_nothing(device: Any, precision: str) -> None:
    if not device.supports(precision):
        pytest.skip(f"{device.name(0)} does not compute in {precision}")
    told = waits_of_a_training(Accelerator(mixed_precision=precision, gradient_accumulation_steps=WINDOW))
    assert len(told) <= ALLOWED[precision] * (WINDOWS - FIRST // WINDOW), told


def test_waits_are_noticed(device: Any) -> None:
    """The check sees what it is to see: a loader that reads a value of the device for each batch."""
    if device.type != "cuda":
        pytest.skip("only CUDA tells when the host waits")
    value = torch.ones(1, device=device.torch_device(0))

    def collate(samples: Any) -> Any:
        value.item()
        return default_collate(samples)

    told = waits_of_a_training(Accelerator(gradient_accumulation_steps=WINDOW), collate_fn=collate)
    assert len(told) >= WINDOWS * WINDOW - FIRST - 2, "one batch is fetched ahead"
