"""Sharding over meshes: copies of shards, a part of a greater mesh, parameters that are divided already."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from accelerate.core.errors import PrepareError
from tests.cpu.test_fsdp2 import prepared
from tests.support.long_run import long_run_param
from tests.support.numbers import close
from tests.support.ranks import RanksError, RankServer, same_on_all
from tests.support.sharded_models import adamw, batches, loss_of, plain, share, tiny, whole

HYBRID: dict[str, Any] = {
    "fsdp_version": 2,
    "auto_wrap_policy": "transformer_based_wrap",
    "sharding_strategy": "HYBRID_SHARD",
    "replicate_size": 2,
}


@pytest.mark.parametrize("window", [1, long_run_param(4)])
def test_hsdp_replicas_train_to_the_numbers_of_one_process(ranks: RankServer, window: int) -> None:
    """B7: two copies of two shards; the norm counts every element once."""
    close(same_on_all(ranks(4, prepared, HYBRID, window)), plain(window), 1e-5)


def test_shard_groups_of_one_process_train_to_the_numbers_of_one_process(ranks: RankServer) -> None:
    """B7: gradients of the copies are reduced all the same."""
    ways = {**HYBRID, "sharding_strategy": "_HYBRID_SHARD_ZERO2"}
    close(same_on_all(ranks(2, prepared, ways, 1)), plain(1), 1e-5)


def of_copies(size: int, **options: Any) -> tuple[Any, Any, Any]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    chosen = HYBRID if size == 4 else {"auto_wrap_policy": "transformer_based_wrap"}
    plugin = FullyShardedDataParallelPlugin(**{"fsdp_version": 2, **chosen}, **options)
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = tiny(accelerator.process_index)
    return accelerator, *accelerator.prepare(model, adamw(model))


def step(accelerator: Any, model: Any, optimizer: Any, words: torch.Tensor) -> None:
    mine = share(words, accelerator.process_index, accelerator.num_processes)
    accelerator.backward(loss_of(model, mine))
    optimizer.step()
    optimizer.zero_grad()


def saved(folder: str) -> tuple[Any, ...]:
    """Return the facts of the mesh; saves after two steps and takes two more."""
    accelerator, model, optimizer = of_copies(4)
    first, second, third, fourth = batches(4)
    for words in (first, second):
        step(accelerator, model, optimizer, words)
    accelerator.save_state(folder)
    state = accelerator.get_state_dict(model)
    for words in (third, fourth):
        step(accelerator, model, optimizer, words)
    mesh = accelerator.torch_device_mesh
    placed = [str(p) for p in model.embed.weight.placements]
    return mesh.mesh_dim_names, tuple(mesh.shape), placed, sorted(state), whole(model)


def resumed(folder: str) -> dict[str, torch.Tensor]:
    accelerator, model, optimizer = of_copies(2)
    accelerator.load_state(folder)
    for words in list(batches(4))[2:]:
        step(accelerator, model, optimizer, words)
    return whole(model)


def test_what_four_processes_of_hsdp_save_two_of_fsdp_load(ranks: RankServer, tmp_path: Path) -> None:
    """A4, D6: save on 4, load on 2."""
    found = ranks(4, saved, str(tmp_path / "state"))
    names, shape, placed, _, weights = found[0]
    assert (names, shape, placed) == (("dp_replicate", "dp_shard"), (2, 2), ["R", "S(0)"])
    assert [bool(each[3]) for each in found] == [True, False, False, False]
    after = same_on_all(ranks(2, resumed, str(tmp_path / "state")))
    for name, value in weights.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-5)


def uneven() -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**{**HYBRID, "replicate_size": 3}))


def test_replicas_that_do_not_divide_the_processes_are_refused(ranks: RankServer) -> None:
    with pytest.raises(RanksError, match="3 replicas, and 2 processes") as caught:
        ranks(2, uneven)
    assert caught.value.causing_kinds() == {"SettingError"}


def moved_average() -> dict[str, torch.Tensor]:
    """Move a reference model, sharded by torch's function alone, halfway to the prepared one."""
    from torch.distributed.fsdp import fully_shard

    _, model, _ = of_copies(2)
    reference = tiny(0)
    for parameter in reference.parameters():
        nn.init.zeros_(parameter)
    fully_shard(reference)
    for old, new in zip(reference.parameters(), model.parameters(), strict=True):
        old.data.mul_(0.5).add_(new.data, alpha=0.5)
    return whole(reference)


def test_a_model_that_the_user_shards_combines_with_the_prepared_one(ranks: RankServer) -> None:
    """Both have torch's default mesh: a reference model follows the trained one, as in trl."""
    half = same_on_all(ranks(2, moved_average))
    for name, value in whole(tiny()).items():
        torch.testing.assert_close(half[name], value / 2)


# --- every placement


PLACED = ("S0 R", "R S1", "S0 S1", "S0 S0", "R R", "strided S0", "R P", "S0 P", "S0 fused", "R fused")


def placements(text: str) -> list[Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    kinds = {
        "S0": Shard(0), "S1": Shard(1), "R": Replicate(), "P": Partial(),
        "strided": _StridedShard(0, split_factor=2), "fused": _StridedShard(1, split_factor=3),
    }  # fmt: skip
    return [kinds[word] for word in text.split()]


def every_placement() -> dict[str, Any]:
    """Gradients with each placement: norms, clamped values, and parts of whole tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    from accelerate import PartialState
    from accelerate.strategy.sharding.full_state import distribute, gather_to_host
    from accelerate.strategy.sharding.grads import clip_norm, clip_value
    from accelerate.world.shard_boxes import local_shard

    PartialState()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    chance = torch.Generator().manual_seed(0)
    values = {text: torch.randn(8, 6, generator=chance) for text in PLACED}
    plain_value = torch.randn(5, generator=chance)

    def gradients() -> list[Any]:
        """Return gradients like those of parameters."""
        made = [SimpleNamespace(grad=plain_value.clone())]
        for text, value in values.items():
            kinds = placements(text)
            here = [Replicate() if isinstance(kind, Partial) else kind for kind in kinds]
            grad: Any = distribute_tensor(value.clone(), mesh, here)
            if here != kinds:
                # Two summands, 3 and -2 times the value.
                factor = (3.0, -2.0)[mesh.get_local_rank("tp")]
                grad = DTensor.from_local(grad.to_local() * factor, mesh, kinds, run_check=False)
            made.append(SimpleNamespace(grad=grad))
        return made

    def joined(held: list[Any]) -> torch.Tensor:
        return torch.cat([getattr(h.grad, "full_tensor", h.grad.clone)().flatten() for h in held])

    true = torch.cat([value.flatten() for value in (plain_value, *values.values())])
    found: dict[str, Any] = {"parts": True, "odd": True}
    for p in (1.0, 2.0, math.inf):
        held = gradients()
        norm = clip_norm(held, 0.5, p, torch.device("cpu"))
        ratio = norm / torch.linalg.vector_norm(true, p)
        found[str(p)] = ratio.item(), torch.linalg.vector_norm(joined(held), p).item()
    held = gradients()
    clip_value(held, 0.3)
    found["clamped"] = torch.allclose(joined(held), true.clamp(-0.3, 0.3), atol=1e-6)
    for rows in (8, 5, 3):
        for text in PLACED:
            if "P" in text or ("strided" in text and rows != 8):
                continue
            value = torch.randn(rows, 6, generator=chance)
            like = distribute_tensor(value, mesh, placements(text))
            found["parts"] &= torch.equal(local_shard(value, like), like.to_local())
            kept = gather_to_host(distribute(value, like), True)
            found["odd"] &= torch.equal(kept, value)
    return found


def test_every_placement_counts_once(ranks: RankServer) -> None:
    """B7, PAINS 48: norms, clamping, parts and wholes of what is cut, copied, summed, or cut twice."""
    found = same_on_all(ranks(4, every_placement))
    assert found["parts"]
    assert found["odd"]
    assert found["clamped"]
    for p in ("1.0", "2.0", "inf"):
        ratio, after = found[p]
        assert ratio == pytest.approx(1, abs=1e-5)
        assert after == pytest.approx(0.5, abs=1e-5)


# --- a part of a greater mesh, and layers that are divided already


def divided() -> dict[str, Any]:
    """Two processes share layers, and two of these pairs share parameters: four steps, and states."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.strategy.sharding.fsdp2_sharder import Sharder, remap_optimizer_params
    from accelerate.strategy.sharding.full_state import (
        load_model,
        load_optimizer,
        model_state,
        optimizer_state,
    )
    from accelerate.strategy.sharding.grads import clip_norm
    from accelerate.strategy.sharding.sharding_layout import plan_layout

    state = PartialState()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")
    # Others than rank 0 begin with other weights, but for layers: whoever divides these makes them equal.
    model = tiny(0)
    before = dict(model.named_parameters())
    optimizer = adamw(model)
    plan: dict[str, Any] = {
        f"layers.{n}.{name}": style
        for n in range(2)
        for name, style in (("up", ColwiseParallel()), ("down", RowwiseParallel()))
    }
    parallelize_module(model, mesh["tp"], plan)
    renewed = {id(old): (old, model.get_parameter(name)) for name, old in before.items()}
    remap_optimizer_params(
        {key: pair for key, pair in renewed.items() if pair[0] is not pair[1]}, [optimizer]
    )
    with torch.no_grad():
        for parameter in model.parameters():
            here = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if mesh.get_local_rank("dp_shard"):
                here.fill_(7.0)
            elif not isinstance(parameter, DTensor) and mesh.get_local_rank("tp"):
                here.fill_(9.0)
    sharder = Sharder(mesh["dp_shard"], plugin, torch.device("cpu"), (mesh["tp"],))
    sharder.shard(model, plan_layout(model, plugin, "no"), [optimizer], {})
    norms = []

    def step(words: torch.Tensor) -> None:
        mine = share(words, mesh.get_local_rank("dp_shard"), 2)
        loss_of(model, mine).backward()
        norms.append(clip_norm(model.parameters(), 0.5, 2.0, torch.device("cpu")).item())
        optimizer.step()
        optimizer.zero_grad()

    first, second, third, fourth = batches(4)
    step(first)
    step(second)
    main = state.process_index == 0
    kept = [model_state(model, main), optimizer_state(optimizer, main)]
    torch.distributed.broadcast_object_list(kept)
    step(third)
    step(fourth)
    weights = {name: value.clone() for name, value in model_state(model, True).items()}
    # Back to where it was, and on.
    load_model(model, kept[0], strict=True)
    load_optimizer(optimizer, kept[1])
    del norms[2:]
    step(third)
    step(fourth)
    again = model_state(model, True)
    named: Any = model.named_parameters()
    placed = {name: str(tuple(p.placements)) for name, p in named}
    same = all(torch.equal(again[name], value) for name, value in weights.items())
    return {"norms": norms, "weights": weights, "same": same, "placed": placed}


def test_divided_layers_are_cut_further(ranks: RankServer) -> None:
    """PAINS 48: layers over two processes, parameters over two of these pairs; states of both, and back."""
    found = same_on_all(ranks(4, divided))
    model = tiny()
    optimizer = adamw(model)
    norms = []
    for words in batches(4):
        loss_of(model, words).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    assert found["norms"] == pytest.approx(norms, abs=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-5)
    assert found["same"]
    assert "_S" in found["placed"]["layers.0.up.weight"] or "Strided" in found["placed"]["layers.0.up.weight"]


class Experts(nn.Module):
    """Two experts of a program that shards them over the ranks, and averages their gradients itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        if isinstance(weight, DTensor):
            ranks = weight.device_mesh.size()
            sums = [Partial("sum")] * weight.device_mesh.ndim  # torch 2.6 sums for "avg" too
            weight = weight.full_tensor(grad_placements=sums)
            if weight.requires_grad:
                weight.register_hook(lambda gradient: gradient / ranks)
        return x @ weight[0] @ weight[1]


def overflow_of_experts(parallelism: bool) -> tuple[int, float]:
    """Skipped steps, and the scale, where one rank alone sees a gradient that is not finite."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import GradScalerKwargs

    accelerator: Any = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
        parallelism_config=ParallelismConfig(dp_shard_size=4) if parallelism else None,
        kwargs_handlers=[GradScalerKwargs(init_scale=2.0**10)],
    )
    model: Any = nn.Sequential(Experts(), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "ep"))
    weight = distribute_tensor(model[0].weight.detach(), mesh, [Replicate(), Shard(0)])
    model[0].weight = nn.Parameter(weight)
    accelerator.state.fsdp_plugin.ignored_modules = [model[0]]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    if accelerator.process_index == 3:
        model[1].weight.grad.to_local().fill_(float("inf"))
    optimizer.step()
    return optimizer.skipped_steps, accelerator.scaler.get_scale()


@pytest.mark.parametrize("parallelism", [False, True])
def test_an_overflow_of_one_rank_beside_experts_is_that_of_all(ranks: RankServer, parallelism: bool) -> None:
    """Torch would reduce it along the dimension that shards the first gradient, that of the experts."""
    assert ranks(4, overflow_of_experts, parallelism) == [(1, 2.0**9)] * 4


def train_mixture(version: int, kind: str, folder: str) -> list[float]:
    """The greatest difference to one plain process: of norms, of weights, and of those after a load."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), Experts(), nn.Linear(4, 1))
    one_process = copy.deepcopy(model)
    mesh, rank = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), accelerator.process_index
    experts = model[1]
    experts.weight = nn.Parameter(distribute_tensor(experts.weight.detach(), mesh, [Shard(0)]))
    accelerator.state.fsdp_plugin.ignored_modules = [experts]  # type: ignore[attr-defined]
    model, optimizer = accelerator.prepare(model, adamw(model))
    plain_optimizer, differences = adamw(one_process), list[float]()
    rows = torch.randn(3, 2, 2, 3, 4)  # windows, micro-batches, ranks

    def train(window: torch.Tensor, save: bool) -> float:
        for micro, parts in enumerate(window):
            mine = parts[rank, : 1 + micro + rank]  # each time another number of rows
            with accelerator.accumulate(model):
                accelerator.backward(model(mine).square().mean(), num_items=len(mine))
                if save and not micro:
                    accelerator.save_state(folder)
                    accelerator.load_state(folder)
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        return norm.item()

    for window in rows[:2]:
        used = torch.cat([window[m, r, : 1 + m + r] for m in (0, 1) for r in (0, 1)])
        one_process(used).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(one_process.parameters(), 0.1)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        differences.append(abs(train(window, save=True) - norm.item()))
    accelerator.save_state(folder)

    def distance() -> float:
        state, expected = accelerator.get_state_dict(model), one_process.state_dict()
        return max((float((state[n] - expected[n]).abs().max()) for n in state), default=0.0)

    differences.append(distance())
    train(rows[2], save=False)
    accelerator.load_state(folder)
    differences.append(distance())
    with pytest.raises(PrepareError, match="DTensors in ignored modules"):
        accelerator.backward(model(rows[0, 0, 0]).mean(), num_items=0)
    empty = DTensor.from_local(torch.empty(1, 4, 4, device="meta"), mesh, [Shard(0)], run_check=False)
    experts.weight = nn.Parameter(empty)
    with pytest.raises(PrepareError, match="DTensors on the meta device"):
        accelerator.prepare(nn.Sequential(nn.Linear(4, 4), experts))
    return differences


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.parametrize("version", [1, 2])
def test_experts_that_a_program_shards_train_beside_fsdp(
    ranks: RankServer, tmp_path: Path, version: int, kind: str
) -> None:
    """fms-acceleration shards them over a mesh of its own, and puts them into ``ignored_modules``."""
    for differences in ranks(2, train_mixture, version, kind, str(tmp_path / "state")):
        assert max(differences) < 1e-5, differences
