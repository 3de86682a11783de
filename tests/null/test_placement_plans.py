"""Placement: the invariants of every plan on random models, and what is refused.

Trap E4: scalars beside submodules, tight budgets, blocks that stay whole, ties across devices. Trap E5:
budgets that are too small, absent, or no sizes.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import nn

from accelerate.core.errors import SettingError, UnknownNameError
from accelerate.offload.module_sizes import ModuleNode, WeightSize, build_module_tree, split_into_units
from accelerate.offload.placement import CPU, DISK, ModelPlacement
from accelerate.offload.placement_planner import PlacementRules, plan_placement
from accelerate.utils import find_tied_parameters
from tests.support.long_run import hypothesis_settings

KINDS = ("Linear", "Block", "List")


# --- random models: made from a seed, because drawn piece by piece most of them would be empty ------------


def random_model(chance: random.Random) -> ModuleNode:
    """A tree of depth 0 to 3 with weights and buffers of 0 to 50 bytes on every level, some weights tied."""
    ties = [chance.randint(1, 50) for _ in range(chance.randint(0, 3))]

    def weights(name: str) -> Iterator[WeightSize]:
        for number in range(chance.choice((0, 0, 1, 1, 2, 3))):
            full = f"{name}.w{number}" if name else f"w{number}"
            which = chance.randint(0, 12)
            if which < len(ties):
                yield WeightSize(full, ties[which], which, False)
            else:
                yield WeightSize(
                    full, chance.choice((0, 1, chance.randint(0, 50))), full, chance.random() < 0.25
                )

    def part(name: str, depth: int) -> ModuleNode:
        count = chance.randint(1, 5) if depth and chance.random() < 0.9 else 0
        below = [part(f"{name}.{n}" if name else str(n), depth - 1) for n in range(count)]
        return ModuleNode(name, chance.choice(KINDS), tuple(weights(name)), tuple(below))

    return part("", chance.choice((0, 1, 2, 2, 3, 3)))


def random_rules(chance: random.Random, tree: ModuleNode, budgets: Mapping[Any, int]) -> PlacementRules:
    closed = frozenset(chance.sample(KINDS, chance.choice((0, 0, 1))))
    found = split_into_units(tree, closed)
    names = sorted({unit.name for unit in found} & {part.name for part in tree.walk()})
    return PlacementRules(
        closed,
        offload_buffers=chance.random() < 0.5,
        fill=chance.random() < 0.3,
        reserve={device: chance.randint(1, 20) for device in budgets if chance.random() < 0.2},
        cache={name: chance.randint(1, 20) for name in names if chance.random() < 0.1},
    )


@st.composite
def questions(draw: st.DrawFn) -> tuple[ModuleNode, dict[Any, int], PlacementRules]:
    """A model, budgets of about its size, and rules."""
    chance = random.Random(draw(st.integers(0, 2**48)))
    tree = random_model(chance)
    total = distinct(list(tree.all_weights()))
    budgets: dict[Any, int] = {n: int(total * chance.random()) for n in range(chance.randint(0, 3))}
    if chance.random() < 0.8:
        budgets["cpu"] = int(total * chance.choice((0.3, 1, 2)) * chance.random())
    if chance.random() < 0.1:
        budgets["disk"] = int(total * chance.random())
    return tree, budgets, random_rules(chance, tree, budgets)


MODELS = st.integers(0, 2**48).map(lambda seed: random_model(random.Random(seed)))


def home_of(name: str, device_map: Mapping[str, Any]) -> list[Any]:
    """The devices that a map gives a tensor."""
    return [device for key, device in device_map.items() if not key or f"{name}.".startswith(f"{key}.")]


def distinct(weights: list[WeightSize]) -> int:
    return sum({weight.tie: weight.size for weight in weights}.values())


@hypothesis_settings(150, in_long_run=600)
@given(questions())
def test_every_plan_keeps_the_invariants(question: tuple[ModuleNode, dict[Any, int], PlacementRules]) -> None:
    tree, budgets, rules = question
    found = split_into_units(tree, rules.no_split, rules.cache)
    try:
        plan = plan_placement(tree, budgets, rules)
    except SettingError as error:
        event(f"refused: {error.what[:10]}")
        return  # tested below
    event(f"executor {plan.executor}")
    homes = {weight.name: home_of(weight.name, plan.device_map) for weight in tree.all_weights()}
    assert all(len(each) == 1 for each in homes.values()), "one home for every tensor"
    assert list(plan.homes) == [unit.name for unit in found]
    assert {name: each[0] for name, each in homes.items()} == {
        weight.name: plan.homes[unit.name] for unit in found for weight in unit.weights
    }
    ties: dict[Any, set[Any]] = {}
    for weight in tree.all_weights():
        ties.setdefault(weight.tie, set()).update(homes[weight.name])
    assert all(len(each) == 1 for each in ties.values()), "one home for tied weights"
    for part in tree.walk():
        if part.name and part.kind in rules.no_split:
            assert len({homes[weight.name][0] for weight in part.all_weights()}) <= 1, "a block stays whole"
    _check_budgets(plan, tree, found, budgets, rules)
    str(plan)


def _check_budgets(
    plan: ModelPlacement, tree: ModuleNode, found: list[Any], budgets: dict[Any, int], rules: PlacementRules
) -> None:
    """Adds up, apart from the plan's own accounts, what a device has to hold at the worst moment."""
    limits = {DISK: math.inf, **budgets}
    away = plan.offloaded
    stays = away and not rules.offload_buffers and plan.executor is not None
    for device, limit in limits.items():
        weights = [w for unit in found if plan.homes[unit.name] == device for w in unit.weights]
        if stays and device in (CPU, DISK) and device != plan.executor:
            weights = [weight for weight in weights if not weight.buffer]
        need = distinct(weights)
        computes = {
            unit.name: plan.executor if unit.name in away else plan.homes[unit.name] for unit in found
        }
        need += sum(unit.cache for unit in found if computes[unit.name] == device)
        if device == plan.executor:
            moved = [unit for unit in found if unit.name in away]
            need += distinct([w for unit in moved for w in unit.weights if w.buffer]) if stays else 0
            if device != CPU:
                need += max((distinct(list(unit.weights)) for unit in moved), default=0)
        used = any(plan.homes[unit.name] == device for unit in found if unit.weights)
        reserve = rules.reserve.get(device, 0)
        assert need <= limit - (reserve if used and need else 0), f"{device} is asked for {need} of {limit}"
        if need:
            assert plan.budgets[device].used <= limit


@hypothesis_settings(50, in_long_run=200)
@given(MODELS)
def test_a_model_that_fits_a_device_is_on_it(tree: ModuleNode):
    size = distinct(list(tree.all_weights()))
    if size:
        plan = plan_placement(tree, {0: size, "cpu": 1000})
        assert set(plan.homes.values()) == {0}
        assert plan.executor is None


@hypothesis_settings(50, in_long_run=200)
@given(MODELS, st.lists(st.integers(0, 400), min_size=1, max_size=3))
def test_more_memory_never_stores_more(tree: ModuleNode, accelerators: list[int]):
    budgets = dict(enumerate(accelerators)) | {"cpu": 10**6}
    try:
        few = plan_placement(tree, budgets)
    except SettingError:
        return
    total = sum({weight.tie: weight.size for weight in tree.all_weights()}.values())
    many = plan_placement(tree, budgets | {0: total + 1})
    assert not many.offloaded
    assert set(few.offloaded.values()) <= {CPU}


# --- what a plan looks like --------------------------------------------------------------------------------


def layers(*sizes: int, kind: str = "Linear") -> ModuleNode:
    """A chain of layers of these sizes, called "0", "1", ..."""
    parts = [
        ModuleNode(str(n), kind, (WeightSize(f"{n}.weight", size, n, False),), ())
        for n, size in enumerate(sizes)
    ]
    return ModuleNode("", "Chain", (), tuple(parts))


def test_room_for_the_largest_block_is_kept_while_more_is_to_come():
    assert plan_placement(layers(64, 72, 100), {0: 200, 1: 200}).device_map == {"0": 0, "1": 1, "2": 1}
    plan = plan_placement(layers(64, 72, 100), {0: 172, "cpu": 1000})
    assert plan.device_map == {"0": 0, "1": "cpu", "2": "cpu"}
    assert (plan.executor, plan.budgets[0].block_buffer) == (0, 100)


def test_nothing_is_stored_elsewhere_for_the_sake_of_that_room():
    """1.15 keeps it always, and sends the last layers to the CPU although all fit."""
    assert plan_placement(layers(64, 72, 100), {0: 236, "cpu": 1000}).device_map == {"": 0}
    assert plan_placement(layers(64, 72, 100), {0: 136, 1: 100, "cpu": 1000}).device_map == {
        "0": 0,
        "1": 0,
        "2": 1,
    }
    # Only out of order does everything fit: 2 beside 0.
    assert plan_placement(layers(50, 90, 40), {0: 90, 1: 90, "cpu": 9}).device_map == {"0": 0, "1": 1, "2": 0}


def test_a_first_layer_that_is_too_big_does_not_end_the_filling_of_a_device():
    """PAINS 16: a big first layer blocks small ones."""
    plan = plan_placement(layers(500, 50, 50, 300), {0: 120, 1: 820, "cpu": 0})
    assert plan.device_map == {"0": 1, "1": 0, "2": 0, "3": 1}


def test_the_disk_is_the_last_resort():
    plan = plan_placement(layers(100, 100, 100, 100), {0: 200, "cpu": 200})
    assert plan.device_map == {"0": 0, "1": "cpu", "2": "cpu", "3": "disk"}
    assert plan.why["1"] == "0 is full"
    assert plan.why["3"] == "0 and cpu are full"
    assert plan_placement(layers(100, 100), {0: 200}).device_map == {"": 0}
    assert plan_placement(layers(100, 100, 100), {0: 200}).device_map == {"0": 0, "1": "disk", "2": "disk"}


def test_the_executor_is_an_accelerator_that_has_the_room():
    """1.15 sends the first three to device 1, which then has no room for the fourth."""
    plan = plan_placement(layers(100, 300, 300, 300), {0: 200, 1: 700, "cpu": 1000})
    assert plan.device_map == {"0": 1, "1": 1, "2": "cpu", "3": "cpu"}
    assert (plan.executor, plan.budgets[1].unused) == (1, 0)
    assert [note[:15] for note in plan.notes] == ["nothing is on 0"]


def test_smaller_blocks_are_looked_for_when_asked():
    tree = layers(176, 80, 160)
    plain = plan_placement(tree, {0: 256, "cpu": 1000})
    assert plain.device_map == {"": "cpu"}
    assert plain.notes[0].startswith("nothing is on 0, of insufficient memory")
    assert plan_placement(tree, {0: 256, "cpu": 1000}, PlacementRules(fill=True)).device_map == {
        "0": "cpu",
        "1": 0,
        "2": "cpu",
    }


def test_a_tie_brings_distant_parts_together():
    head = ModuleNode("9", "Linear", (WeightSize("9.weight", 100, 0, False),), ())
    tree = layers(100, 30, 30)
    tree = tree._replace(children=(*tree.children, head))
    plan = plan_placement(tree, {0: 190, "cpu": 1000})
    assert plan.homes == {"0": 0, "1": 0, "2": 0, "9": 0}
    assert plan.tied == (("0.weight", "9.weight"),)
    assert plan.why == {"9": "tied to 0"}
    assert plan.sizes == {"0": 100, "1": 30, "2": 30, "9": 0}


def test_what_holds_nothing_goes_with_its_neighbours():
    tree = layers(100, 0, 100, 0)
    assert plan_placement(tree, {0: 100, 1: 100}).device_map == {"0": 0, "1": 0, "2": 1, "3": 1}
    assert plan_placement(layers(0, 100), {"cpu": 1000}).device_map == {"": "cpu"}
    assert plan_placement(layers(0, 0), {0: 10}).device_map == {"": 0}


def test_buffers_of_stored_modules_stay_on_the_executor_unless_told_otherwise():
    def block(number: int) -> ModuleNode:
        weights = (
            WeightSize(f"{number}.w", 100, number, False),
            WeightSize(f"{number}.b", 40, f"b{number}", True),
        )
        return ModuleNode(str(number), "Block", weights, ())

    tree = ModuleNode("", "Chain", (), tuple(block(number) for number in range(4)))
    plan = plan_placement(tree, {0: 400, "cpu": 1000})
    assert plan.device_map == {"0": 0, "1": "cpu", "2": "cpu", "3": "cpu"}
    assert plan.budgets[0].pinned == 120
    assert plan.budgets["cpu"].weights == 300
    plan = plan_placement(tree, {0: 420, "cpu": 1000}, PlacementRules(offload_buffers=True))
    assert plan.device_map == {"0": 0, "1": 0, "2": "cpu", "3": "cpu"}
    assert plan.budgets[0].pinned == 0


def test_caches_lie_where_a_block_is_computed():
    """PAINS 15: activations, keys and values count."""
    rules = PlacementRules(cache={"0": 50, "1": 50, "2": 50}, reserve={0: 30})
    plan = plan_placement(layers(100, 100, 100), {0: 480, "cpu": 1000}, rules)
    assert (plan.device_map, plan.budgets[0].used) == ({"": 0}, 480)
    plan = plan_placement(layers(100, 100, 100), {0: 479, "cpu": 1000}, rules)
    assert plan.device_map == {"0": 0, "1": "cpu", "2": "cpu"}
    assert (plan.budgets[0].cache, plan.budgets[0].block_buffer, plan.budgets[0].reserve) == (150, 100, 30)


def test_the_plan_is_a_table():
    head = ModuleNode("9", "Linear", (WeightSize("9.weight", 100 * 10**6, 0, False),), ())
    tree = layers(*[100 * 10**6] * 4)
    tree = tree._replace(children=(*tree.children, head))
    text = str(plan_placement(tree, {0: "350MB", "cpu": "100GB"}, PlacementRules(reserve={0: 1})))
    assert text == TABLE, text


TABLE = """\
modules      device  weights    why
0 ... 1 (2)  0       200.00 MB
2 ... 3 (2)  cpu     200.00 MB  0 is full

device  budget     weights    activations  for the largest block  left
0       350.00 MB  200.00 MB  1 bytes      100.00 MB              50.00 MB
cpu     100.00 GB  200.00 MB  -            -                      99.80 GB
disk    no limit   -          -            -                      no limit
tied: 0.weight = 9.weight"""


def test_a_plan_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan_placement(layers(1), {0: 1}).executor = 1


# --- what is refused (E5) ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budgets", "said"),
    [
        ({0: 90, "cpu": 1000}, "device 0 may hold 90 bytes, less than the largest block 2"),
        ({0: 0, "cpu": 0}, "every budget is 0"),
        ({}, "no budget was given"),
        ({0: -1}, "cannot be negative"),
        ({0: "ten"}, "'ten' is not a size"),
        ({0: None}, "is no size"),
        ({-1: 10}, "-1 is no device"),
        ({"": 10}, "'' is no device"),
        ({"cpu": 100, "disk": 100}, "2 fits nowhere"),
        ({0: 100, "cpu": 0, "disk": 50}, "fits nowhere"),
    ],
)
def test_budgets_that_cannot_work_are_refused(budgets, said):
    with pytest.raises(SettingError, match=said):
        plan_placement(layers(64, 72, 100), budgets)


def test_a_block_that_must_stay_whole_has_to_fit():
    inner = layers(60, 60, kind="Linear")._replace(name="block", kind="Block")
    tree = ModuleNode("", "Model", (), (inner,))
    assert plan_placement(tree, {0: 100, 1: 100, "cpu": 1000}).executor is None
    with pytest.raises(SettingError, match=r"less than the largest block block \(120 bytes\)"):
        plan_placement(tree, {0: 100, 1: 100, "cpu": 1000}, PlacementRules(frozenset({"Block"})))


def test_a_reserve_that_leaves_nothing_is_refused():
    with pytest.raises(SettingError, match="100 bytes of it are reserved"):
        plan_placement(layers(10), {0: 100, "cpu": 1000}, PlacementRules(reserve={0: 100}))
    with pytest.raises(SettingError, match="a reserve is asked of 3"):
        plan_placement(layers(10), {0: 100}, PlacementRules(reserve={3: 1}))
    with pytest.raises(SettingError, match="not there: nothing"):
        plan_placement(layers(10), {0: 100}, PlacementRules(cache={"nothing": 1}))


def test_an_unknown_class_is_noted():
    plan = plan_placement(layers(1), {0: 10}, PlacementRules(frozenset({"Linaer", "Linear"})))
    assert plan.notes == ("no module is of the class 'Linaer'; did you mean 'Linear'?",)
    assert not isinstance(plan, UnknownNameError)


# --- the tree of a real model


def test_a_module_that_is_used_twice_is_in_the_tree_twice() -> None:
    shared = nn.Linear(2, 2)
    tree = build_module_tree(nn.Sequential(shared, nn.ReLU(), shared))
    assert [weight.name for weight in tree.all_weights()] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_what_a_model_says_it_will_tie_is_tied() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model.all_tied_weights_keys = {"head.weight": "embed.weight", "gone.weight": "embed.weight"}
    ties = {weight.name: weight.tie for weight in build_module_tree(model).all_weights()}
    assert ties["head.weight"] == ties["embed.weight"]
    assert find_tied_parameters(model) == []
