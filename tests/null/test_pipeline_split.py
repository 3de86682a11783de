"""Where a model is split into stages: evenly, in order, each block once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn

from accelerate.core.errors import PrepareError, UnknownNameError
from accelerate.inference import find_pippy_batch_size, generate_device_map
from accelerate.stages.split import ModelBlock, check_split_points, find_even_cuts, list_blocks


def chain(sizes: list[int]) -> list[ModelBlock]:
    return [ModelBlock(f"b{index}", ((index, size),)) for index, size in enumerate(sizes)]


def stage_sizes(chain: Sequence[ModelBlock], cuts: Sequence[int]) -> list[int]:
    """Bytes of each stage; a weight of two blocks of one stage is there once."""
    stages = [chain[a:b] for a, b in pairwise([0, *cuts, len(chain)])]
    return [sum(dict(weight for block in stage for weight in block.weights).values()) for stage in stages]


def every_division(count: int, stages: int) -> list[tuple[int, ...]]:
    return list(combinations(range(1, count), stages - 1))


@pytest.mark.parametrize("seed", range(60))
def test_no_division_has_a_lighter_heaviest_stage(seed: int) -> None:
    """Against all divisions of random chains, of which some weights are shared."""
    chance = random.Random(seed)
    count = chance.randint(2, 9)
    stages = chance.randint(2, count)
    built = [
        ModelBlock(f"b{i}", tuple((chance.randint(0, 12), 0) for _ in range(chance.randint(0, 3))))
        for i in range(count)
    ]
    size = {identity: chance.choice([0, 1, 3, 10, 100]) for identity in range(13)}
    built = [ModelBlock(b.name, tuple((i, size[i]) for i, _ in b.weights)) for b in built]

    found = find_even_cuts(built, stages)

    costs = {cuts: stage_sizes(built, cuts) for cuts in every_division(count, stages)}
    assert tuple(found) in costs, "increasing, and no stage is empty"
    lightest = min(max(cost) for cost in costs.values())
    mine = stage_sizes(built, found)
    assert max(mine) == lightest
    fitting = [cost for cost in costs.values() if max(cost) == lightest]
    assert sum(s * s for s in mine) == min(sum(s * s for s in cost) for cost in fitting)


def test_stages_that_are_not_the_heaviest_are_even_too() -> None:
    assert find_even_cuts(chain([10, 1, 1, 1, 1]), 3) == [1, 3]


def test_a_large_first_block_does_not_push_the_rest_to_the_last_stage() -> None:
    cuts = find_even_cuts(chain([12, 1, 1, 1, 1]), 3)
    assert stage_sizes(chain([12, 1, 1, 1, 1]), cuts) == [12, 2, 2]


def test_a_chain_of_thousands_is_divided() -> None:
    long = chain([1] * 3000)
    sizes = stage_sizes(long, find_even_cuts(long, 8))
    assert sum(sizes) == 3000
    assert max(sizes) - min(sizes) <= 16


def test_budgets_of_the_stages_are_kept() -> None:
    assert stage_sizes(chain([4, 4, 4, 4]), find_even_cuts(chain([4, 4, 4, 4]), 2, [4, 100])) == [4, 12]
    with pytest.raises(PrepareError, match="cannot be divided into 2 stages within"):
        find_even_cuts(chain([4, 4, 4, 4]), 2, [4, 8])


def test_fewer_blocks_than_stages_is_an_error() -> None:
    with pytest.raises(PrepareError, match="2 blocks for 3 processes"):
        find_even_cuts(chain([1, 1]), 3)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)


class Transformer(nn.Module):
    """An embedding, layers in a list two modules down, a head that is tied."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))
        self.body = nn.Module()
        self.body.embedding = nn.Embedding(10, 4)
        self.body.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.body.embedding.weight


def test_blocks_are_the_layers_and_what_stands_beside_them() -> None:
    model = Transformer()
    found = list_blocks(model)
    assert [block.name for block in found] == [
        "body.embedding", *(f"body.layers.{i}" for i in range(4)), "head"
    ]  # fmt: skip
    tensors = {id(t): t.numel() * 4 for t in model.parameters()}
    together = {identity: size for block in found for identity, size in block.weights}
    assert together == tensors, "every weight once, also that of the model itself and the tied one"


def test_too_few_blocks_are_opened_the_largest_first() -> None:
    found = list_blocks(Transformer(layers=1), at_least=4)
    assert [block.name for block in found] == [
        "body.embedding", "body.layers.0.up", "body.layers.0.down", "head"
    ]  # fmt: skip


def test_classes_that_are_not_split_stay_whole() -> None:
    found = list_blocks(Transformer(layers=2), no_split=["Layer"], at_least=9)
    assert [block.name for block in found] == ["body.embedding", "body.layers.0", "body.layers.1", "head"]


def test_only_modules_that_are_used_count_in_their_order() -> None:
    used = ["head", "body", "body.layers", "body.layers.2", "body.layers.0"]
    assert [b.name for b in list_blocks(Transformer(), used=used)] == [
        "head",
        "body.layers.2",
        "body.layers.0",
    ]


def test_the_device_map_numbers_the_stages() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    assert generate_device_map(model) == {"": 0}
    found = generate_device_map(model, 2)
    assert list(found) == ["0", "1", "2", "3", "4"]
    assert sorted(found.values()) == list(found.values())
    assert generate_device_map(model, 2, max_memory={0: 288, 1: "10KB"}) == {
        "0": 0, "1": 1, "2": 1, "3": 1, "4": 1
    }  # fmt: skip


def test_split_points_of_the_user_are_checked() -> None:
    model = Transformer()
    assert check_split_points(model, ["body.layers.2"], 2) == ["body.layers.2"]
    with pytest.raises(UnknownNameError, match=r"did you mean 'body\.layers\.2'"):
        check_split_points(model, ["body.layer.2"], 2)
    with pytest.raises(PrepareError, match="1 split points make 2 stages, but there are 3 processes"):
        check_split_points(model, ["body.layers.2"], 3)


def test_the_batch_size_is_that_of_the_first_tensor() -> None:
    assert find_pippy_batch_size((1, None, torch.ones(3, 2)), {"x": torch.ones(5)}) == 3
    assert find_pippy_batch_size((), {"x": torch.ones(5)}) == 5
    assert find_pippy_batch_size((), None) is None
