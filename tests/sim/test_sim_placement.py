"""Placements on two devices with little memory: a plan that fits does fit, and what is refused would not.

Traps E4 and E5.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import dispatch_model, infer_auto_device_map
from accelerate.offload.device_maps import device_of
from accelerate.offload.module_sizes import build_module_tree
from accelerate.offload.placement import ModelPlacement
from accelerate.offload.placement_planner import PlacementRules, plan_placement
from accelerate.utils import get_balanced_memory, get_max_memory
from tests.support import sim


@pytest.fixture(autouse=True)
def _empty_devices() -> Generator[None]:
    gc.collect()
    torch.sim.empty_cache()
    yield
    gc.collect()
    torch.sim.empty_cache()
    assert [torch.sim.memory_allocated(device) for device in range(2)] == [0, 0]


@contextmanager
def capacities(budgets: Mapping[Any, int]) -> Generator[None]:
    """Both devices with exactly their budgets."""
    with sim.capacity(budgets[0], 0), sim.capacity(budgets[1], 1):
        yield


class Layer(nn.Module):
    """A block that must stay whole: what it computes is added to what it was given."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = (
            nn.Linear(width, inner),
            nn.Linear(inner, width),
            nn.BatchNorm1d(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.down(self.up(x).relu()))


class Model(nn.Module):
    """Layers of random widths, a head that may be the embedding, a scalar, and a buffer that is not saved."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = random.Random(seed)
        width = chance.choice((16, 32, 64))
        self.embed = nn.Embedding(chance.randint(50, 400), width)
        inner = [chance.choice((1, 2, 4)) * width for _ in range(chance.randint(3, 9))]
        self.layers = nn.ModuleList([Layer(width, each) for each in inner])
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(width, self.embed.num_embeddings, bias=False)
        if chance.random() < 0.5:
            self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.zeros(width), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale + self.shift
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()  # a tied one once
    yield from model.named_buffers()


def moved(model: nn.Module, plan: ModelPlacement) -> list[torch.Tensor]:
    """Copies of all that the plan puts on accelerators, and of what stays there for others."""
    away = plan.offloaded
    found = []
    for name, tensor in tensors(model):
        device = device_of(name, plan.homes)
        if device_of(name, dict.fromkeys(away, True)):
            device = plan.executor if any(name == each for each, _ in model.named_buffers()) else None
        if isinstance(device, int):
            found.append(tensor.detach().to(f"sim:{device}"))
    return found


def test_what_a_plan_says_fits_does_fit() -> None:
    """Weights, buffers, and in turn every block that is stored elsewhere, under the very budgets."""
    brought = sum(_fits(seed) for seed in range(12))
    assert brought > 12, "blocks were stored and brought in"


def _fits(seed: int) -> int:
    """Does what a plan says; the number of blocks that were brought in."""
    chance, model = random.Random(seed), Model(seed)
    total = sum(tensor.nbytes for _, tensor in tensors(model))
    budgets = {0: int(total * chance.uniform(0.6, 0.8)), 1: int(total * chance.uniform(0, 0.3))}
    plan = plan_placement(
        build_module_tree(model), {**budgets, "cpu": total}, PlacementRules(frozenset({"Layer"}))
    )
    away = plan.offloaded if isinstance(plan.executor, int) else {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    torch.sim.empty_cache()
    with capacities(budgets):
        held = moved(model, plan)
        for index in (0, 1):
            assert torch.sim.memory_allocated(index) <= budgets[index] - plan.budgets[index].block_buffer
        for name in away:
            block = [tensor for each, tensor in parameters.items() if f"{each}.".startswith(f"{name}.")]
            assert [tensor.detach().to(f"sim:{plan.executor}") for tensor in block] or name == "shift"
        del held
    return len(away)


def test_a_byte_less_does_not_fit() -> None:
    """The plan is no more careful than it must be: what it uses to the last byte is needed."""
    model = Model(0)
    total = sum(tensor.nbytes for _, tensor in tensors(model))
    plan = plan_placement(build_module_tree(model), {0: total, "cpu": 2 * total})
    assert plan.device_map == {"": 0}
    with capacities({0: total, 1: 0}):
        assert len(moved(model, plan)) == sum(1 for _ in tensors(model))
    gc.collect()
    torch.sim.empty_cache()
    with capacities({0: total - 1, 1: 0}), pytest.raises(torch.OutOfMemoryError):
        moved(model, plan)
    assert plan_placement(build_module_tree(model), {0: total - 1, "cpu": 2 * total}).offloaded


def test_the_cpu_computes_a_model_with_a_block_that_an_accelerator_cannot_hold() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4000), nn.Linear(4000, 64))
    budget = model[1].weight.nbytes
    with pytest.warns(UserWarning, match="nothing is on 0, of insufficient memory"):
        plan = infer_auto_device_map(model, {0: budget, "cpu": 10**9})
    assert plan == {"": "cpu"}
    with capacities({0: budget, 1: 0}):
        dispatch_model(model, {"0": 0, "1": "cpu", "2": "cpu"})
        with pytest.raises(torch.OutOfMemoryError), torch.no_grad():
            model(torch.ones(1, 64))
    del model
    gc.collect()


def test_a_planned_model_runs_within_its_budgets() -> None:
    """Through ``dispatch_model``: the reserve covers what a forward takes beside the weights."""
    torch.manual_seed(0)
    model = Model(3).eval()
    tokens = torch.randint(0, model.embed.num_embeddings, (2,))
    expected = model(tokens)
    total = sum(tensor.nbytes for _, tensor in tensors(model))
    reserve = 64 * 2**10
    # Room to bring the next block while one is computed.
    ahead = max(sum(p.nbytes for p in each.parameters()) for each in (*model.layers, model.embed))
    budgets = {0: total // 2 + reserve + ahead, 1: total // 4 + reserve}
    rules = PlacementRules(frozenset({"Layer"}), reserve={0: reserve + ahead, 1: reserve})
    plan = plan_placement(build_module_tree(model), {**budgets, "cpu": 2 * total}, rules)
    assert {0, "cpu"} <= set(plan.homes.values())
    with capacities(budgets), torch.no_grad():
        dispatch_model(model, plan.device_map)
        torch.testing.assert_close(model(tokens), expected)
        torch.testing.assert_close(model(tokens), expected)
    del model
    gc.collect()


def test_this_machine_is_asked() -> None:
    with capacities({0: 10000, 1: 20000}):
        found = get_max_memory()
        assert {device: found[device] for device in (0, 1)} == {0: 10000, 1: 20000}
        assert list(found) == [0, 1, "cpu"]
        held = torch.ones(1000, device="sim:1")
        assert get_max_memory()[1] == 16000
        del held
    assert get_max_memory({1: "1KB", "cpu": "1GB"}) == {1: 1000, "cpu": 10**9}
    assert get_max_memory({"sim:1": "1KB"}) == {"sim:1": 1000}
    for absent in (2, "sim:2"):
        with pytest.warns(UserWarning, match="and this process sees 2 'sim'"):
            assert get_max_memory({absent: "1KB"}) == {absent: 1000}


def test_automatic_maps_use_both_devices() -> None:
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)])
    size = sum(tensor.nbytes for _, tensor in tensors(model))
    with capacities({0: size, 1: size}):
        assert infer_auto_device_map(model) == {"": 0}
        budgets = get_balanced_memory(model)
        found = infer_auto_device_map(model, budgets)
    assert set(found.values()) == {0, 1}
    assert budgets[1] == size
