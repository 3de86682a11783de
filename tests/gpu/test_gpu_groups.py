"""Process groups of one accelerator: one rank over two back ends, and two ranks that share the card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from accelerate import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
)
from tests.support.ranks import RankServer

ROWS, STEPS, WINDOW = 8, 3, 2


def samples() -> TensorDataset:
    inputs = torch.randn(ROWS * STEPS * WINDOW, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, :1] * 2 - inputs[:, 1:2])


def network() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))


def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Norms and weights of the same training in torch alone, on the CPU."""
    net, norms = network(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number, (inputs, targets) in enumerate(DataLoader(samples(), batch_size=ROWS), 1):
        (torch.nn.functional.mse_loss(net(inputs), targets) / WINDOW).backward()
        if number % WINDOW == 0:
            norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    return norms, dict(net.state_dict())


def group_options(backend: str | None) -> list[Any]:
    """Settings of a process group with this back end; with the device's own one where torch has no other."""
    has_choice = torch.accelerator.current_accelerator().type == "cuda"  # type: ignore[union-attr]
    return [InitProcessGroupKwargs(backend=backend)] if backend and has_choice else []


def train(kind: str, precision: str, backend: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Norms and weights of a training with accumulation and clipping."""
    more: dict[str, Any] = {}
    if kind == "fsdp2":
        more["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(
        mixed_precision=precision,
        gradient_accumulation_steps=WINDOW,
        kwargs_handlers=[GradScalerKwargs(init_scale=64.0), *group_options(backend)],
        **more,
    )
    net = network()
    loader = DataLoader(samples(), batch_size=ROWS // accelerator.num_processes)
    net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
    norms: list[float] = []
    for inputs, targets in loader:
        with accelerator.accumulate(net):
            loss = torch.nn.functional.mse_loss(net(inputs), targets)
            accelerator.backward(loss, **({"num_items": len(inputs)} if kind == "weighted" else {}))
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(net.parameters(), 0.5)
                assert norm is not None
                norms.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: value.cpu() for name, value in accelerator.get_state_dict(net).items()}
    return norms, weights


def one_rank() -> dict[str, Any]:
    """What collectives of tensors on both sides give on one rank whose group has a back end for each."""
    kind = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
    own = dist.get_default_backend_for_device(kind)
    dist.init_process_group(f"cpu:gloo,{kind}:{own}")
    accelerator = Accelerator()
    host, there = torch.arange(3.0), torch.arange(3.0, device=accelerator.device)
    gathered = accelerator.gather({"host": host, "there": there})
    norms, weights = train("ddp", "no", None)
    return {
        "devices": [gathered["host"].device.type, gathered["there"].device.type],
        "values": [gathered["host"].tolist(), gathered["there"].tolist()],
        "objects": accelerator.gather_for_metrics(["a", "b"], use_gather_object=True),
        "sum": accelerator.reduce(there, "sum").tolist(),
        "training": (norms, weights),
    }


def close(found: list[Any], within: float) -> None:
    """Every rank has the norms of one process, and the first its weights: sharded ones are full there."""
    norms, weights = plain()
    for told, _ in found:
        assert told == pytest.approx(norms, abs=within)
    assert found[0][1].keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(found[0][1][name], weight, rtol=0, atol=within)


def test_one_rank_has_a_back_end_for_the_host_and_one_for_the_device(ranks: RankServer, device: Any) -> None:
    port = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    (found,) = ranks(1, one_rank, devices=[f"{device.type}:0"], env={**port, "MASTER_PORT": 0})
    assert found["devices"] == ["cpu", device.type]
    assert found["values"] == [[0.0, 1.0, 2.0]] * 2
    assert found["objects"] == ["a", "b"]
    assert found["sum"] == [0.0, 1.0, 2.0]
    close([found["training"]], 1e-4)


@pytest.mark.parametrize("kind", ["ddp", "weighted", "fsdp2"])
def test_two_ranks_share_a_card(ranks: RankServer, device: Any, kind: str) -> None:
    """NCCL refuses that, gloo copies through the host."""
    close(ranks(2, train, kind, "no", "gloo", devices=[f"{device.type}:0"] * 2, timeout=100), 1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_two_ranks_share_a_card_in_lower_precision(ranks: RankServer, device: Any, precision: str) -> None:
    if not device.supports(precision):
        pytest.skip(f"{device.name(0)} does not compute in {precision}")
    found = ranks(2, train, "ddp", precision, "gloo", devices=[f"{device.type}:0"] * 2, timeout=100)
    close(found, 0.05)
