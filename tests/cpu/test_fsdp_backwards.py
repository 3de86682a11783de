"""Backwards under FSDP beside the usual one: through gradients, twice, and past units that nothing used."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

from tests.support.numbers import same
from tests.support.ranks import RankServer, same_on_all
from tests.support.watchdog import shown_error

WRAPPED: dict[str, Any] = {
    "auto_wrap_policy": "transformer_based_wrap",
    "transformer_cls_names_to_wrap": ["Block"],
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Two blocks, of which the second may be left out, a head, and a parameter without elements."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(4, 2)
        self.empty, self.used = nn.Parameter(torch.empty(0, 4)), blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[: self.used]:
            x = block(x)
        return self.head(x) + self.empty.sum()


def rows() -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


def penalize(model: Any, x: torch.Tensor, backward: Callable[..., None]) -> None:
    """A gradient penalty; before the step follows the graph of a gradient that is dropped."""
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    backward(out.square().mean() + slope.square().mean())
    torch.autograd.grad(model(x).square().sum(), x, create_graph=True)


def backward_twice(model: Any, x: torch.Tensor, backward: Callable[..., None]) -> None:
    out = model(x)
    backward(out.square().mean(), retain_graph=True)
    backward(out.sin().mean())


def train(step: Callable[..., None], blocks: int, window: int, **options: Any) -> dict[str, torch.Tensor]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(**{**WRAPPED, **options})
    accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=window)
    model = Net(blocks)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rank = accelerator.process_index
    for _ in range(2 * window):
        with accelerator.accumulate(model):
            step(model, rows()[2 * rank : 2 * rank + 2], accelerator.backward)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.get_state_dict(model)


def expected(step: Callable[..., None], blocks: int = 2) -> dict[str, torch.Tensor]:
    model = Net(blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model, rows(), torch.Tensor.backward)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_gradient_penalty_trains_as_in_one_process(ranks: RankServer, strategy: str) -> None:
    """The second backward computes with the parameters of the first, which torch frees."""
    ours = ranks(2, train_penalty, strategy)[0]
    same(ours, expected(penalize), 1e-5)


def train_penalty(strategy: str) -> dict[str, torch.Tensor]:
    return train(penalize, 2, 1, fsdp_version=2, sharding_strategy=strategy)


def penalize_tensor_parallel() -> None:
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import TorchTensorParallelConfig

    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    config = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(plan=plan))
    accelerator = Accelerator(parallelism_config=config)
    model = Net()
    del model.empty
    model.empty = torch.zeros(())  # type: ignore[assignment]
    model = accelerator.prepare(model)
    with pytest.raises(RuntimeError, match="setStorage") as caught:
        penalize(model, rows(), accelerator.backward)
    assert "A gradient penalty" in str(shown_error(caught.value))


def test_a_gradient_penalty_beside_tensor_parallelism_is_no_wrong_number(ranks: RankServer) -> None:
    """torch's DTensor differentiates no collective of a backward."""
    ranks(2, penalize_tensor_parallel)


def penalize_freed(version: int, window: int) -> None:
    with pytest.raises(RuntimeError, match="setStorage") as caught:
        train(penalize, 2, window, fsdp_version=version)
    assert "A gradient penalty" in str(shown_error(caught.value))


@pytest.mark.parametrize(("version", "window"), [(1, 1), (2, 2)])
def test_a_gradient_penalty_whose_parameters_are_freed_is_named(
    ranks: RankServer, version: int, window: int
) -> None:
    """torch speaks of the storage of a tensor."""
    ranks(2, penalize_freed, version, window)


def refuse(step: Callable[..., None], strategy: str) -> str:
    from accelerate.core.errors import PrepareError

    with pytest.raises(PrepareError) as caught:
        train(step, 2, 1, fsdp_version=1, sharding_strategy=strategy)
    return str(caught.value)


@pytest.mark.parametrize(
    ("step", "strategy"),
    [(penalize, "NO_SHARD"), (backward_twice, "NO_SHARD"), (backward_twice, "FULL_SHARD")],
)
def test_fsdp1_refuses_a_second_backward_of_a_forward(
    ranks: RankServer, step: Callable[..., None], strategy: str
) -> None:
    """It reduces gradients in the first one alone: replicas drifted apart, without a word."""
    assert "a second backward through one forward" in same_on_all(ranks(2, refuse, step, strategy))


def recompute_all(model: Any, x: torch.Tensor, backward: Callable[..., None]) -> None:
    backward(checkpoint(model, x, use_reentrant=False).square().mean())


def recompute_ahead(strategy: str) -> dict[str, torch.Tensor]:
    options = {"fsdp_version": 1, "sharding_strategy": strategy, "forward_prefetch": True}
    return train(recompute_all, 2, 1, **options)


@pytest.mark.parametrize("strategy", ["NO_SHARD", "FULL_SHARD"])
def test_a_recomputed_model_reduces_with_forward_prefetch(ranks: RankServer, strategy: str) -> None:
    """Without shards torch lost gradients of FSDP1, without a word."""
    same(ranks(2, recompute_ahead, strategy)[0], expected(recompute_all), 1e-5)


class Recomputed(nn.Module):
    """A net that calls one block twice, which a reentrant checkpoint computes again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.head = Block(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = x + checkpoint(self.block, x, use_reentrant=True)
        return self.head(x)


def train_recomputed() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The state of two steps, and that of one process."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    accelerator, alone = Accelerator(fsdp_plugin=plugin), Recomputed()
    model, optimizer = accelerator.prepare(
        shared := Recomputed(), torch.optim.SGD(shared.parameters(), lr=0.1)
    )
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    rank = slice(2 * accelerator.process_index, 2 * accelerator.process_index + 2)
    for _ in range(2):
        accelerator.backward(model(rows()[rank]).square().mean())
        alone(rows()).square().mean().backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    return accelerator.get_state_dict(model), alone.state_dict()


def test_a_block_that_a_reentrant_checkpoint_computes_twice_is_reduced_twice(ranks: RankServer) -> None:
    """torch dropped the gradients of its first call, without a word."""
    same(*ranks(2, train_recomputed)[0], 1e-5)


def use_bf16() -> dict[str, torch.Tensor]:
    policy = {"param_dtype": "bf16", "reduce_dtype": "fp32", "output_dtype": "fp32"}
    return train(lambda model, x, backward: backward(model(x).square().mean()), 1, 2,
                 fsdp_version=2, mixed_precision_policy=policy)  # fmt: skip


def test_a_unit_that_no_forward_has_used_waits_for_its_window(ranks: RankServer) -> None:
    """In a micro-batch that reduces nothing torch asks it for unsharded parameters."""
    ours = ranks(2, use_bf16)[0]
    same(ours, expected(lambda model, x, backward: backward(model(x).square().mean()), 1), 2e-2)


def thaw_blocks(micro_batches: int) -> Callable[..., None]:
    """Return a step that trains the blocks after so many micro-batches."""
    calls = count()

    def step(model: Any, x: torch.Tensor, backward: Callable[..., None]) -> None:
        model.blocks.requires_grad_(next(calls) >= micro_batches)
        backward(model(x).square().mean())

    return step


def train_thawed() -> dict[str, torch.Tensor]:
    options = {"fsdp_version": 1, "sharding_strategy": "NO_SHARD", "use_orig_params": True}
    return train(thaw_blocks(2), 2, 2, **options, auto_wrap_policy="no_wrap")


def test_a_window_without_shards_keeps_the_gradients_of_what_was_frozen_before(ranks: RankServer) -> None:
    """FSDP1 notes which gradients were cleared, and dropped those that the next window accumulated first."""
    same(ranks(2, train_thawed)[0], expected(thaw_blocks(1)), 1e-5)


def freeze_hooked() -> dict[str, Any]:
    """The gradients of a parameter with a hook that is frozen in the first forward alone."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = Net()
    model.head.weight.register_hook(lambda gradient: gradient * 0)
    model = accelerator.prepare(model)
    for trains in (False, True):
        model.head.weight.requires_grad_(trains)
        accelerator.backward(model(rows()).square().mean())
    gradient: Any = model.head.weight.grad
    return {"weight": gradient.full_tensor()}


def test_a_hook_of_a_parameter_that_is_frozen_first_is_called_later(ranks: RankServer) -> None:
    """torch registers no hook on what does not train."""
    same(same_on_all(ranks(2, freeze_hooked)), {"weight": torch.zeros(2, 4)}, 0.0)


def call_with_other_weights(options: dict[str, Any]) -> list[str]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    said = []
    for after_a_forward in (True, False):
        model: Any = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**options)).prepare(Net())
        if after_a_forward:
            model(rows()).sum().backward()
        weights = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
        try:
            with torch.no_grad():
                torch.func.functional_call(model, weights, (rows(),))
        except ValueError as error:
            said.append(str(error).splitlines()[0])
    return said


@pytest.mark.parametrize(
    "options", [{"fsdp_version": 2}, {"fsdp_version": 1, "sharding_strategy": "SHARD_GRAD_OP"}]
)
def test_a_functional_call_with_other_weights_is_refused(ranks: RankServer, options: dict[str, Any]) -> None:
    said = same_on_all(ranks(2, call_with_other_weights, options))
    assert ["functional_call was given another" in line for line in said] == [True, True]


def call_with_own_weights() -> float:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**WRAPPED))
    model: Any = accelerator.prepare(Net())
    out = torch.func.functional_call(model, dict(model.named_parameters()), (rows(),))
    accelerator.backward(out.sum())
    return float(accelerator.clip_grad_norm_(model.parameters(), 1e9))


def test_a_functional_call_with_the_weights_of_the_model_trains(ranks: RankServer) -> None:
    plain = Net()
    plain(rows()).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    assert same_on_all(ranks(2, call_with_own_weights)) == pytest.approx(float(norm), rel=1e-5)
