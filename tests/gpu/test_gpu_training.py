"""Law 7 on a device: a training step there is the step of the CPU; precisions hold what they promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, GradScalerKwargs

STEPS = 6


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(STEPS * 8, 16, generator=generator)
    return inputs, inputs[:, :1] * 2 - inputs[:, 1:2]


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))


def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training written in torch alone, on the CPU."""
    net, losses = model(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for inputs, targets in DataLoader(TensorDataset(*samples()), batch_size=8):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, net.state_dict()


def accelerated(precision: str) -> tuple[Accelerator, list[float], dict[str, torch.Tensor]]:
    # A low first scale: the default one overflows at first and skips a step, by design.
    accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=[GradScalerKwargs(init_scale=64.0)])
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(*samples()), batch_size=8)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    losses = []
    for inputs, targets in loader:
        assert inputs.device.type == accelerator.device.type
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return accelerator, losses, accelerator.unwrap_model(net).state_dict()


def test_training_is_equal_to_the_cpus(device: Any) -> None:
    reference, weights = plain()
    accelerator, losses, trained = accelerated("no")
    assert accelerator.device.type == device.type
    assert losses == pytest.approx(reference, rel=1e-3)
    for name, weight in trained.items():
        torch.testing.assert_close(weight.cpu(), weights[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_close_by_and_keeps_its_weights(device: Any, precision: str) -> None:
    if not device.supports(precision):
        pytest.skip(f"{device.name(0)} does not compute in {precision}")
    reference, _ = plain()
    _, losses, trained = accelerated(precision)
    assert losses == pytest.approx(reference, rel=0.05)
    assert losses != reference, "nothing was computed in the lower precision"
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
