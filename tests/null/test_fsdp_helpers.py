"""Parts of FSDP in one process: which processes share, how a tensor was sharded, blocks that fail."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.fsdp.wrap import always_wrap_policy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.core.errors import SettingError
from accelerate.facade.runtime import choose_strategy
from accelerate.strategy.base import StrategyRequest
from accelerate.strategy.protocol.gradient_sync import GradientPiece, GradientSync, join_pieces
from accelerate.strategy.sharding.activation_checkpointing import (
    checkpoint_activations,
    offload_inputs,
    offloads_inputs,
)
from accelerate.strategy.sharding.sharding_layout import find_units
from accelerate.world.shard_boxes import local_shard, shard_boxes, shard_mesh_dims, shards_of_ranks
from accelerate.world.world import World


def grid(size: int, nodes: int, **options: Any) -> tuple[int, int]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
    chosen: Any = choose_strategy(StrategyRequest(World.fake(size, nodes=nodes), (plugin,)))
    return chosen._mesh_shape


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (1, 8)),
        ({"sharding_strategy": "FULL_SHARD"}, (1, 8)),
        ({"sharding_strategy": "HYBRID_SHARD"}, (2, 4)),
        ({"sharding_strategy": "_HYBRID_SHARD_ZERO2", "replicate_size": 4}, (4, 2)),
        ({"sharding_strategy": "HYBRID_SHARD", "replicate_size": 8}, (8, 1)),
    ],
)
def test_replicas_are_one_on_each_machine_or_as_many_as_asked(
    options: dict[str, Any], expected: tuple[int, int]
) -> None:
    """Eight processes on two machines; one process for each copy is right in version 2."""
    assert grid(8, 2, **options) == expected


def test_replicas_that_do_not_divide_the_processes_are_refused_before_any_mesh() -> None:
    with pytest.raises(SettingError, match="3 replicas, and 8 processes"):
        grid(8, 2, sharding_strategy="HYBRID_SHARD", replicate_size=3)


def test_the_last_cut_is_undone_first() -> None:
    """A strided dimension cut what the later ones had cut before."""
    strided = _StridedShard(0, split_factor=2)
    assert shard_mesh_dims((Shard(0), Shard(1))) == [0, 1]
    assert shard_mesh_dims((Replicate(), Shard(0))) == [1]
    assert shard_mesh_dims((Replicate(), strided, Shard(0))) == [2, 1]
    assert shard_mesh_dims((strided, strided)) == [1, 0]
    assert shard_mesh_dims((strided, Shard(1))) == [0, 1]


class Mesh:
    """A mesh as one of its ranks sees it."""

    def __init__(self, sizes: tuple[int, ...], place: tuple[int, ...]) -> None:
        self.sizes, self.place = sizes, place

    def size(self, axis: int = 0) -> int:
        return self.sizes[axis]

    def get_local_rank(self, axis: int = 0) -> int:
        return self.place[axis]


def dtensors(shape: tuple[int, ...], sizes: tuple[int, ...], placements: tuple[Any, ...]) -> list[Any]:
    """Return what each rank of a mesh knows of its shard."""
    places = product(*map(range, sizes))
    return [
        SimpleNamespace(device_mesh=Mesh(sizes, place), placements=placements, shape=shape)
        for place in places
    ]


def by_torch(value: torch.Tensor, like: Any) -> torch.Tensor:
    """Return a shard by torch's own rule, one mesh dimension after another."""
    for axis, placement in enumerate(like.placements):
        if hasattr(placement, "dim"):
            size, rank = like.device_mesh.size(axis), like.device_mesh.get_local_rank(axis)
            value = placement._split_tensor(value, size, with_padding=False)[0][rank]
    return value


FUSED: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "gate and up of experts": ((1, 2), (Shard(0), _StridedShard(1, split_factor=2))),
    "the same over shards": ((2, 2), (Shard(0), _StridedShard(1, split_factor=2))),
    "over replicas": ((2, 2), (Replicate(), _StridedShard(1, split_factor=2))),
    "the last dimension": ((2, 3), (Shard(0), _StridedShard(2, split_factor=2))),
    "tensor parallel alone": ((2,), (_StridedShard(1, split_factor=2),)),
    "three parts": ((4,), (_StridedShard(1, split_factor=3),)),
    "fused last in the mesh": ((2, 2), (Shard(1), _StridedShard(1, split_factor=2))),
    "FSDP over rows": ((2, 2), (_StridedShard(1, split_factor=2), Shard(1))),
}


@pytest.mark.parametrize("case", FUSED)
def test_a_rank_holds_what_torch_gives_it(case: str) -> None:
    sizes, placements = FUSED[case]
    value = torch.arange(4 * 24 * 12.0).view(4, 24, 12)
    filled, pieces = torch.zeros_like(value), list[GradientPiece]()
    every = dtensors(tuple(value.shape), sizes, placements)
    for like in every:
        shard = local_shard(value, like)
        assert torch.equal(shard, by_torch(value, like))
        boxes = shard_boxes(like)
        for box in boxes:
            filled[box.slices] = shard[box.local_slices]
        pieces.append(GradientPiece(shard, tuple(value.shape), boxes[0].offsets, 1, tuple(map(tuple, boxes))))
        assert sum(torch.Size(box.sizes).numel() for box in boxes) == shard.numel()
    assert torch.equal(filled, value)
    copies = sum(piece.values.numel() for piece in pieces) // value.numel()
    assert torch.equal(join_pieces(pieces), value * copies)
    reduced = [GradientPiece(p.values, p.shape, p.offsets, 0, p.boxes) for p in pieces]
    assert torch.equal(join_pieces(reduced), value)
    if len(sizes) == 1:
        shards = shards_of_ranks(value, every[0])
        assert all(map(torch.equal, shards, (local_shard(value, like) for like in every)))


@pytest.mark.parametrize("rows", [3, 5, 9, 10])
def test_what_tensor_parallelism_has_sharded_is_sharded_further(rows: int) -> None:
    """FSDP's strided shard is one box, uneven too: a chunk of the chunk of this tensor parallel rank."""
    value = torch.arange(rows * 2.0).view(rows, 2)
    for like in dtensors((rows, 2), (4, 2), (_StridedShard(0, split_factor=2), Shard(0))):
        data, tensor = like.device_mesh.place
        own: list[torch.Tensor] = [*value.chunk(2)[tensor].chunk(4), *[value[:0]] * 4]
        assert torch.equal(local_shard(value, like), own[data])
        boxes = shard_boxes(like) if own[data].numel() else []
        assert [box.sizes for box in boxes] == [tuple(own[data].shape)] * bool(own[data].numel())
        assert all(torch.equal(value[box.slices], own[data]) for box in boxes)


def test_a_fused_weight_may_be_sharded_further_along_the_same_dimension() -> None:
    """Each rank then has a contiguous part of the rows that its tensor parallel rank holds."""
    value = torch.arange(16.0).view(16, 1)
    placements = _StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2)
    held = [local_shard(value, like).flatten().tolist() for like in dtensors((16, 1), (2, 2), placements)]
    assert held == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.broken = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.broken:
            raise ValueError("in the block")
        return y


def test_a_block_that_fails_leaves_no_hook_behind() -> None:
    """E12: what is saved afterwards is saved as ever, and the block works again."""
    block = Fails()
    checkpoint_activations(block, [block], offload=True)
    assert offloads_inputs(block)
    rows = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(ValueError, match="in the block"):
        block(rows)
    assert not [name for name in vars(block) if name.startswith("_accelerate")]
    block.broken = False
    block(rows).sum().backward()
    assert rows.grad is not None
    assert torch.allclose(rows.grad, block.inner.weight.sum(0).expand(2, 3))


def test_hooks_of_a_block_that_is_computed_again_see_its_first_inputs() -> None:
    """What a hook has changed was changed once more in the backward: the gradients were those of others."""
    rows, gradients = torch.randn(2, 3), []
    for again in (False, True):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        block.register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))
        if again:
            checkpoint_activations(block, [block], offload=True)
        block(rows).sum().backward()
        gradients.append(block[0].weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_two_backwards_compute_a_block_again_twice() -> None:
    """torch's own context stops the second one with an AttributeError."""
    block = nn.Linear(3, 3)
    checkpoint_activations(block, [block])
    out = block(torch.randn(2, 3))
    weights = [*block.parameters()]
    once = torch.autograd.grad(out.sum(), weights, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), weights), once)


def test_what_attention_computes_with_is_in_its_unit() -> None:
    """It does not call its layers, so that nothing all-gathers them, and nothing reduces their gradients."""
    block = nn.TransformerEncoderLayer(8, 2, 8)
    units = find_units(nn.Sequential(block), always_wrap_policy, set())
    assert {block.self_attn, block.linear1} <= set(units)
    assert block.self_attn.out_proj not in units


def test_clipping_values_of_no_gradient() -> None:
    """Other ranks may hold all of them."""
    GradientSync().clip_value([nn.Parameter(torch.ones(2))], 0.1)


def test_inputs_stay_where_nothing_is_computed_again() -> None:
    """Without gradients there is no backward to keep them for."""
    block = Fails()
    block.broken = False
    offload_inputs(block)
    checkpoint(block)
    with torch.no_grad():
        assert block(torch.ones(1, 3)).shape == (1, 3)
    assert not [name for name in vars(block) if name.startswith("_accelerate")]


class Cached(nn.Module):
    """A model that keeps what its block computes, unless it is told not to; ``Wrapped`` knows no cache."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, use_cache: bool = True) -> tuple[torch.Tensor, bool]:
        return self.block(x), use_cache


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Cached()

    def forward(self, x: torch.Tensor, *by_place: bool) -> tuple[torch.Tensor, bool]:
        return self.model(x, *by_place)


def test_a_wrapped_model_makes_no_cache_while_blocks_are_computed_again() -> None:
    """The keys and values of a block were in the cache of a PEFT model twice, and its backward failed."""
    model = Wrapped()
    checkpoint_activations(model, [model.model.block])
    rows = torch.ones(1, 3)
    assert model(rows)[1] is False
    assert model(rows, True)[1] is False
    with torch.no_grad():
        assert model(rows)[1] is True
    assert model.eval()(rows)[1] is True


@pytest.mark.parametrize(("kind", "is_sharded"), [("FULL_STATE_DICT", False), ("SHARDED_STATE_DICT", True)])
def test_the_launcher_says_how_a_mesh_is_saved(
    kind: str, is_sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``fsdp_state_dict_type`` of a file does beside ``parallelism_config``."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", kind)
    request = StrategyRequest(World.fake(2), parallelism=ParallelismConfig(dp_shard_size=2))
    chosen: Any = choose_strategy(request)
    assert (chosen.plugin.state_dict_type.name, chosen.saves_sharded) == (kind, is_sharded)
