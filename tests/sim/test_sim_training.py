"""Networks on the simulated accelerator: what they compute there is what they compute on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CLOSE = {"rtol": 1e-4, "atol": 1e-5}

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 2)), (4, 8)),
    "dropout": (lambda: nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.4), nn.Linear(16, 2)), (4, 8)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 2, bias=False, padding=1), (2, 4, 5)),
    "conv2d": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        (2, 3, 8, 8),
    ),
    "transposed and grouped": (lambda: nn.ConvTranspose2d(4, 6, 2, groups=2), (2, 4, 5, 5)),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True), (2, 5, 8)),
}


@pytest.mark.parametrize("network", NETWORKS)
def test_outputs_gradients_and_buffers_are_those_of_the_cpu(network: str) -> None:
    make, shape = NETWORKS[network]
    torch.manual_seed(0)
    here, x = make(), torch.randn(shape)
    there = copy.deepcopy(here).to("sim:1")
    results = []
    for model, device in ((here, "cpu"), (there, "sim:1")):
        torch.manual_seed(1)
        out = model(x.to(device))
        assert out.device == torch.device(device)
        out.square().sum().backward()
        results.append([out, *(p.grad for p in model.parameters()), *model.buffers()])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got.cpu(), expected, **CLOSE)
    state = dict(there.named_buffers())
    assert "1.running_mean" not in state or state["1.running_mean"].abs().sum() > 0


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}], ids=["loop", "foreach", "fused"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_training_steps_are_those_of_the_cpu(kind: Any, how: dict[str, bool]) -> None:
    torch.manual_seed(0)
    here = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    there = copy.deepcopy(here).to("sim:0")
    batches = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(4)]
    for model, device in ((here, "cpu"), (there, "sim:0")):
        optimizer = kind(model.parameters(), lr=0.05, **how)
        for x, y in batches:
            optimizer.zero_grad()
            F.mse_loss(model(x.to(device)), y.to(device)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    for expected, got in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(got.cpu(), expected, **CLOSE)


def test_a_model_may_be_dispatched_to_both_devices() -> None:
    torch.manual_seed(0)
    first, second, x = nn.Linear(4, 4), nn.Linear(4, 2), torch.randn(3, 4)
    expected = second(first(x))
    first.to("sim:0")
    second.to("sim:1")
    out = second(first(x.to("sim:0")).to("sim:1"))
    out.sum().backward()
    torch.testing.assert_close(out.cpu(), expected, **CLOSE)
    assert first.weight.grad is not None
    assert first.weight.grad.device == torch.device("sim", 0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations_draw_the_same_dropout(reentrant: bool) -> None:
    x = torch.ones(64, device="sim:1", requires_grad=True)
    out = checkpoint(F.dropout, x, 0.5, use_reentrant=reentrant)
    out.sum().backward()
    assert x.grad is not None
    assert 0 < x.grad.count_nonzero() < 64
    assert torch.equal(x.grad, out.detach())


# -------------------------------------------------------------------------------------- mixed precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_follows_torchs_lists(dtype: torch.dtype) -> None:
    layer, x = nn.Linear(4, 4, device="sim"), torch.ones(2, 4, device="sim")
    with torch.autocast("sim", dtype=dtype):
        y = layer(x)
        seen = [
            y.dtype,
            y.softmax(-1).dtype,
            F.layer_norm(y, (4,)).dtype,
            F.mse_loss(y, x).dtype,
            (y + x).dtype,
        ]
        on_the_host = torch.ones(2, 2) @ torch.ones(2, 2)
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(y, y)
        with torch.autocast("sim", enabled=False):
            assert layer(x).dtype == torch.float32
    assert seen == [dtype, *[torch.float32] * 4]
    assert on_the_host.dtype == torch.float32
    y.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_bfloat16_autocast_computes_what_the_cpu_computes() -> None:
    torch.manual_seed(0)
    here, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(4, 8)
    there = copy.deepcopy(here).to("sim")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = here(x)
    with torch.autocast("sim", dtype=torch.bfloat16):
        got = there(x.to("sim"))
    assert got.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(got.cpu(), expected)


def test_grad_scaler_unscales_and_skips_an_overflow() -> None:
    model = nn.Linear(2, 1, bias=False, device="sim:1")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("sim", init_scale=1024.0)
    before = model.weight.detach().clone()
    x = torch.tensor([[1.0, 2.0]], device="sim:1")

    scaler.scale(model(x).sum()).backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1024.0, 2048.0]]
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(model.weight.detach(), before - x)
    assert scaler.get_scale() == 1024.0

    optimizer.zero_grad()
    scaler.scale(model(x * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(model.weight.detach(), before - x)
    assert scaler.get_scale() == 512.0
    assert scaler.state_dict()["scale"] == 512.0
