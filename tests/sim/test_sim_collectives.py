"""The collective back end ``simccl``, and torch's data parallelism on top of it."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.nn import functional as F

from tests.support.ranks import RankServer, same_on_all

WORLD = 2
carried = pytest.mark.skipif(
    not hasattr(torch.accelerator, "get_memory_info"), reason="gloo carries fewer before torch 2.10"
)


def open_group() -> tuple[int, torch.device]:
    device = torch.device("sim", int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group("cpu:gloo,sim:simccl")
    return dist.get_rank(), device


def mine(*numbers: float) -> torch.Tensor:
    """Return this rank's input: [rank, rank + 10], or the given numbers."""
    device = torch.device("sim", torch.accelerator.current_device_index())
    return torch.tensor(numbers or (dist.get_rank(), dist.get_rank() + 10), device=device).float()


def room(n: int) -> torch.Tensor:
    return torch.empty_like(mine(*range(n)))


def as_numbers(results: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: [tensor.tolist() for tensor in result] for name, result in results.items()}


def reductions() -> dict[str, list[Any]]:
    open_group()
    results = {name: mine() for name in ("sum", "mean", "largest", "reduce")}
    dist.all_reduce(results["sum"])
    dist.all_reduce(results["mean"], op=dist.ReduceOp.AVG)
    dist.all_reduce(results["largest"], op=dist.ReduceOp.MAX)
    dist.reduce(results["reduce"], dst=0)
    results["scattered"] = room(2)
    dist.reduce_scatter(results["scattered"], [mine(), mine() * 2])
    results["scattered tensor"] = room(1)
    dist.reduce_scatter_tensor(results["scattered tensor"], mine())
    results["scattered mean"] = room(1)
    dist.reduce_scatter_tensor(results["scattered mean"], mine(), op=dist.ReduceOp.AVG)
    group = list(range(WORLD))
    results["coalesced"] = torch.cat(funcol.all_reduce_coalesced([mine(), mine(5)], "sum", group))
    scattered = funcol.reduce_scatter_tensor_coalesced([mine(), mine(3, 4)], "avg", [0, 0], group)
    results["coalesced scattered"] = torch.cat(scattered)
    return as_numbers(results)


@carried
def test_reductions_sum_average_and_scatter(ranks: RankServer) -> None:
    zero, one = ranks(WORLD, reductions)
    everywhere = {"sum": [1, 21], "mean": [0.5, 10.5], "largest": [1, 11], "coalesced": [1, 21, 10]}
    assert {name: zero[name] for name in everywhere} == {name: one[name] for name in everywhere} == everywhere
    assert zero["reduce"] == [1, 21]
    assert (zero["scattered"], one["scattered"]) == ([1, 21], [2, 42])
    assert (zero["scattered tensor"], one["scattered tensor"]) == ([1], [21])
    assert (zero["scattered mean"], one["scattered mean"]) == ([0.5], [10.5])
    assert (zero["coalesced scattered"], one["coalesced scattered"]) == ([0.5, 3], [10.5, 4])


def movements() -> dict[str, list[Any]]:
    rank, _ = open_group()
    results: dict[str, Any] = {"broadcast": mine(), "scatter": room(2), "received": room(2)}
    dist.broadcast(results["broadcast"], src=1)
    dist.scatter(results["scatter"], [mine(1, 2), mine(3, 4)] if rank == 0 else None, src=0)
    results["gather"] = [room(2), room(2)] if rank == 1 else []
    dist.gather(mine(), results["gather"] or None, dst=1)
    results["all_gather"] = [room(2), room(2)]
    dist.all_gather(results["all_gather"], mine())
    results["all_gather tensor"] = room(4)
    dist.all_gather_into_tensor(results["all_gather tensor"], mine())
    group = list(range(WORLD))
    results["coalesced"] = torch.cat(funcol.all_gather_into_tensor_coalesced([mine(), mine(5)], group))
    results["all_to_all"] = [room(1), room(1)]
    dist.all_to_all(results["all_to_all"], list(mine().split(1)))
    results["all_to_all tensor"] = room(3 if rank == 0 else 1)
    sizes = ([1, 2], [1, 1]) if rank == 0 else ([1, 0], [2, 0])
    dist.all_to_all_single(results["all_to_all tensor"], mine(), *sizes)
    if rank == 0:
        dist.send(mine(), dst=1)
        dist.recv(results["received"], src=1)
    else:
        dist.recv(results["received"])  # from anyone
        dist.send(mine(), dst=0)
    dist.barrier()
    return as_numbers(results)


@carried
def test_movements_bring_every_tensor_where_it_belongs(ranks: RankServer) -> None:
    zero, one = ranks(WORLD, movements)
    everywhere = {
        "broadcast": [1, 11],
        "all_gather": [[0, 10], [1, 11]],
        "all_gather tensor": [0, 10, 1, 11],
        "coalesced": [0, 10, 1, 11, 5, 5],
    }
    assert {name: zero[name] for name in everywhere} == {name: one[name] for name in everywhere} == everywhere
    assert (zero["scatter"], one["scatter"]) == ([1, 2], [3, 4])
    assert (zero["gather"], one["gather"]) == ([], [[0, 10], [1, 11]])
    assert (zero["all_to_all"], one["all_to_all"]) == ([[0], [1]], [[10], [11]])
    assert (zero["all_to_all tensor"], one["all_to_all tensor"]) == ([0, 1, 11], [10])
    assert (zero["received"], one["received"]) == ([1, 11], [0, 10])


def asynchronous() -> tuple[list[float], list[float], str]:
    rank, device = open_group()
    x = torch.full((4,), rank + 1.0, device=device)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    future = work.get_future()
    work.wait()
    [result] = future.wait()
    assert result.data_ptr() == x.data_ptr()
    objects: list[Any] = [None] * WORLD
    dist.all_gather_object(objects, {"rank": rank})
    host = torch.ones(1)
    dist.all_reduce(host)  # the same group on the CPU
    return x.tolist(), [o["rank"] for o in objects] + host.tolist(), str(result.device)


def test_work_is_asynchronous_and_speaks_of_device_tensors(ranks: RankServer) -> None:
    zero, one = ranks(WORLD, asynchronous)
    assert zero == ([3.0] * 4, [0, 1, 2.0], "sim:0")
    assert one == ([3.0] * 4, [0, 1, 2.0], "sim:1")


# ----------------------------------------------------------------------------- data parallel training


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 1, generator=generator)


def train(model: nn.Module, device: torch.device, share: slice) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        x, y = batch(step)
        optimizer.zero_grad()
        F.mse_loss(model(x[share].to(device)), y[share].to(device)).backward()
        optimizer.step()


def share(rank: int) -> slice:
    return slice(rank * 8 // WORLD, (rank + 1) * 8 // WORLD)


def replicated() -> dict[str, torch.Tensor]:
    rank, device = open_group()
    model = nn.parallel.DistributedDataParallel(network().to(device), device_ids=[device.index])
    train(model, device, share(rank))
    return {name: value.cpu() for name, value in model.module.state_dict().items()}


def sharded(offload: bool) -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    rank, device = open_group()
    mesh = init_device_mesh("sim", (WORLD,))
    policy = CPUOffloadPolicy(pin_memory=True) if offload else OffloadPolicy()
    model = network().to(device)
    for module in (*model, model):
        if isinstance(module, nn.Linear | nn.Sequential):
            fully_shard(module, mesh=mesh, offload_policy=policy)
    train(model, device, share(rank))
    parameter = next(model.parameters())
    assert parameter.to_local().device == (torch.device("cpu") if offload else device)  # type: ignore[attr-defined]
    return {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def single() -> dict[str, torch.Tensor]:
    """The weights after the same steps on the CPU in one process."""
    model = copy.deepcopy(network())
    train(model, torch.device("cpu"), slice(0, 8))
    return model.state_dict()


def test_ddp_trains_like_one_process_on_the_cpu(ranks: RankServer, single: dict[str, torch.Tensor]) -> None:
    state = same_on_all(ranks(WORLD, replicated))
    torch.testing.assert_close(state, dict(single), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "offloaded"])
def test_fsdp2_trains_like_one_process_on_the_cpu(
    ranks: RankServer, single: dict[str, torch.Tensor], offload: bool
) -> None:
    state = same_on_all(ranks(WORLD, sharded, offload))
    torch.testing.assert_close(state, dict(single), rtol=1e-4, atol=1e-6)
