"""Sharded training on two simulated accelerators: also with parameters that rest on the host."""

from __future__ import annotations

import copy
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu.test_fsdp2 import prepared
from tests.support.ignored_options import ignore_sharding_option
from tests.support.numbers import close
from tests.support.ranks import RankServer, same_on_all
from tests.support.sharded_models import adamw, batches, loss_of, plain, tiny, whole

LAYERS: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap"}


def trained(options: dict[str, Any]) -> Any:
    losses, norms, values = prepared(options, 1)
    return losses, norms, {name: value.cpu() for name, value in values.items()}


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "offloaded"])
def test_it_trains_to_the_numbers_of_one_cpu_process(ranks: RankServer, offload: bool) -> None:
    """B7"""
    ours = same_on_all(ranks(2, trained, {**LAYERS, "cpu_offload": offload}))
    close(ours, plain(1), 1e-4)


def states(offload: bool, folder: str) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(**LAYERS, cpu_offload=offload)
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision="no")
    model = tiny()
    optimizer: Any = adamw(model)
    # A step on the host before it is prepared: its moments follow to where the parameters rest.
    loss_of(model, next(batches(1))).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["estimate"] = torch.tensor(2.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    words = next(batches(1)).to(accelerator.device)
    accelerator.backward(loss_of(model, words))
    optimizer.step()
    optimizer.zero_grad()
    place = next(model.parameters()).to_local().device.type
    accelerator.save_state(folder, sharded=True)
    estimates = [optimizer.param_groups[0]["estimate"]]
    optimizer.param_groups[0]["estimate"] = torch.zeros_like(estimates[0])
    accelerator.load_state(folder)
    estimates.append(optimizer.param_groups[0]["estimate"])
    assert [(each.item(), each.device.type) for each in estimates] == [(2.0, place)] * 2
    weights = accelerator.strategy.model_state(model)
    state = accelerator.strategy.optimizer_state(optimizer.optimizer, [model])
    whole_state = accelerator.strategy.world.rank == 0
    if whole_state:
        assert all(value.device.type == "cpu" for value in weights.values())
    told = [weights, state]
    torch.distributed.broadcast_object_list(told)
    accelerator.strategy.load_model(model, told[0])
    accelerator.strategy.load_optimizer(optimizer.optimizer, [model], told[1])
    moments = next(iter(optimizer.state.values()))["exp_avg"].to_local().device.type
    accelerator.backward(loss_of(model, words))
    optimizer.step()
    return place, moments, {name: value.cpu() for name, value in whole(model).items()}


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "offloaded"])
def test_states_rest_where_the_parameters_do(ranks: RankServer, offload: bool, tmp_path: Path) -> None:
    place, moments, values = same_on_all(ranks(2, states, offload, str(tmp_path / "a")))
    assert (place, moments) == (("cpu", "cpu") if offload else ("sim", "sim"))
    model = tiny()
    optimizer = adamw(model)
    for _ in range(3):
        loss_of(model, next(batches(1))).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in whole(model).items():
        torch.testing.assert_close(values[name], value, rtol=0, atol=1e-4)


def gathered_over_gloo(names: tuple[str, ...] | None) -> Any:
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    dist.init_process_group("cpu:gloo,sim:gloo")
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = torch.nn.Linear(1, 2, bias=False, device="sim")
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0], [2.0]]))
    sizes = (1, 2)[-len(names) :] if names else (2,)
    # Sharded by torch's own function, which sends nothing: here gloo carries no tensor of the device.
    model = accelerator.prepare(fully_shard(model, mesh=init_device_mesh("sim", sizes, mesh_dim_names=names)))
    return [(value.device.type, value.tolist()) for value in accelerator.get_state_dict(model).values()]


@pytest.mark.parametrize("names", [None, ("shard",), ("copy", "shard")], ids=["no name", "one", "two"])
def test_shards_of_a_device_are_gathered_on_the_host_where_the_group_is_gloo(
    ranks: RankServer, names: tuple[str, ...] | None
) -> None:
    """Of any mesh: that of FSDP2 has no names, and on CUDA gloo would end the process."""
    assert ranks(2, gathered_over_gloo, names)[0] == [("cpu", [[1.0], [2.0]])]


def peak(blocks: int) -> tuple[int, int, int]:
    """(greatest memory while a model was prepared, memory afterwards, bytes of one block)."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(**LAYERS, transformer_cls_names_to_wrap=["Linear"])
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(blocks)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sim: Any = torch.get_device_module("sim")
    sim.reset_peak_memory_stats()
    model, optimizer = accelerator.prepare(model, optimizer)
    most, block = sim.max_memory_allocated(), 256 * 256 * 4
    # The thread of the last collective lets go of its tensor when it gets to it.
    until = time.monotonic() + 10
    while sim.memory_allocated() > 4.1 * block and time.monotonic() < until:
        time.sleep(0.01)
    return most, sim.memory_allocated(), block


def test_no_process_ever_holds_the_whole_model(ranks: RankServer) -> None:
    """The parts of eight blocks, and at the most three whole blocks besides."""
    for most, after, block in ranks(2, peak, 8):
        assert after <= 4.1 * block
        assert most <= after + 3 * block


def where_they_lie(offload: bool) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(**LAYERS, cpu_offload=True)
    accelerator = Accelerator(fsdp_plugin=plugin)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not offload:
            ignore_sharding_option(patch, "offload")
        accelerator.prepare(tiny())
    return next(e for e in accelerator.effects() if e.option == "fsdp_offload_params").applied


@pytest.mark.parametrize("offload", [True, False])
def test_parameters_on_the_host_are_seen_there(ranks: RankServer, offload: bool) -> None:
    """F15"""
    assert same_on_all(ranks(2, where_they_lie, offload)) is offload


def recomputed(offload: bool) -> tuple[int, float, tuple[bool | None, str]]:
    """(memory between forward and backward, gradient norm, what is said of the option)."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        **LAYERS,
        transformer_cls_names_to_wrap=["Linear"],
        activation_checkpointing=True,
        activation_checkpointing_offload=offload,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sim: Any = torch.get_device_module("sim")
    rows = torch.randn(4096, 64).to(accelerator.device)
    loss = model(rows).square().mean()
    settled = sim.memory_allocated()
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0).item()
    optimizer.step()
    found = {effect.option: (effect.applied, effect.why) for effect in accelerator.effects()}
    return settled, norm, found.get("fsdp_activation_checkpointing_offload", (None, ""))


def test_inputs_of_recomputed_blocks_wait_on_the_host(ranks: RankServer) -> None:
    """The inputs of all blocks but the first, which needs no gradient, leave the device; same numbers."""
    (there, norm, _), *_ = ranks(2, recomputed, False)
    (away, same, said), *_ = ranks(2, recomputed, True)
    rows = 4096 * 64 * 4
    assert there - away > 4 * rows
    assert norm == pytest.approx(same, rel=1e-6)
    assert said == (True, "the inputs of 6 units wait there for the backward")


def copies() -> Any:
    return trained({**LAYERS, "fsdp_version": 2, "sharding_strategy": "HYBRID_SHARD", "replicate_size": 2})


def test_hsdp_replicas_train_to_the_numbers_of_one_cpu_process(ranks: RankServer) -> None:
    """B7: shard groups of one process each."""
    close(same_on_all(ranks(2, copies)), plain(1), 1e-4)


def step_of(model: Any, optimizer: Any, backward: Any) -> None:
    words = torch.ones(4, 4, device=next(model.parameters()).device)
    backward(model(words)[:, 0].square().sum())
    optimizer.step()
    optimizer.zero_grad()


def stages() -> None:
    """A step on the host before it is prepared: the state of a stage follows its parameters."""
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step_of(model, optimizer, torch.Tensor.backward)
    alone = copy.deepcopy(model)
    other = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step_of(alone, other, torch.Tensor.backward)
    accelerator = Accelerator(parallelism_config=ParallelismConfig(pp_size=2))
    model, optimizer = accelerator.prepare(model, optimizer)
    step_of(model, optimizer, accelerator.backward)
    expected = alone.state_dict()
    for name, value in whole(model).items():
        torch.testing.assert_close(value.cpu(), expected[name])


def test_the_state_of_a_pipeline_stage_moves_to_its_device(ranks: RankServer) -> None:
    ranks(2, stages)
