"""Compiled models: names, graphs and numbers, alone and replicated, in windows and in half precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.long_run import long_run_param
from tests.support.ranks import RankServer, same_on_all


class Block(nn.Module):
    """A block of the user's own class: torch does not compile its own modules by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.mix(x)).tanh()


class Net(nn.Module):
    """Repeated blocks and a head, on images (batch, 4, height, width)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList([Block() for _ in range(2)]), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def trained(precision: str, how: str) -> dict[str, Any]:
    """Two optimizer steps of two micro-batches each; ``how``: no, whole or regional compilation."""
    from torch._dynamo.utils import counters

    from accelerate import Accelerator
    from accelerate.utils import TorchDynamoPlugin

    torch._dynamo.reset()
    counters.clear()
    plugin = TorchDynamoPlugin(
        backend="no" if how == "no" else "eager",
        fullgraph=how == "whole",
        use_regional_compilation=how == "regional",
    )
    accelerator = Accelerator(
        mixed_precision=precision, gradient_accumulation_steps=2, dynamo_plugin=plugin, cpu=True
    )
    net: Any = Net()  # torch's annotations know no such call
    user = net.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(user.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(user, optimizer)
    draw = torch.Generator().manual_seed(accelerator.process_index)
    losses = []
    for _ in range(4):
        x = torch.randn(3, 4, 2, 2, generator=draw).contiguous(memory_format=torch.channels_last)
        with accelerator.accumulate(model):
            output = model(x)
            accelerator.backward(output.square().mean())
            losses.append(float(accelerator.reduce(output.square().mean().detach())))
            optimizer.step()
            optimizer.zero_grad()
    copied = copy.deepcopy(accelerator.unwrap_model(model))
    graphs = counters["stats"]["unique_graphs"]
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        user.eval()(x[:1])
    return {
        "uncompiled": counters["stats"]["unique_graphs"] == graphs,
        "losses": losses,
        "weight": user.head.weight.detach().clone(),
        "names": sorted(accelerator.get_state_dict(model)) == sorted(Net().state_dict()),
        "own names": not any("_orig_mod" in name for name, _ in model.named_modules()),
        "unwraps": accelerator.unwrap_model(model) is user and type(copied) is Net,
        "last": all(
            block.mix.weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[union-attr,operator]
            for block in user.blocks
        ),
        "dtype": output.dtype,
        "copy": float((copied.eval()(x) - user.eval()(x)).abs().max()) < 1e-6,
        "breaks": sum(counters["graph_break"].values()),
        "graphs": counters["stats"]["unique_graphs"],
    }


def every_way(precision: str) -> list[dict[str, Any]]:
    return [trained(precision, how) for how in ("no", "whole", "regional")]


@pytest.mark.parametrize(("size", "precision"), [(1, "no"), long_run_param(1, "bf16"), (2, "bf16")])
def test_a_compiled_model_trains_as_it_is(ranks: RankServer, size: int, precision: str) -> None:
    """D9: canonical names, nothing to unwrap; one graph for the whole model, also under autocast."""
    plain, *others = same_on_all(ranks(size, every_way, precision))
    for found in others:
        near = 1e-6 if precision == "no" else 2e-2
        assert found["losses"] == pytest.approx(plain["losses"], rel=near)
        torch.testing.assert_close(found["weight"], plain["weight"], rtol=near, atol=near)
        for fact in ("names", "own names", "unwraps", "last", "copy", "uncompiled"):
            assert found[fact], fact
        assert found["dtype"] == torch.float32
        assert found["breaks"] == 0
        assert found["graphs"] > 0


def compiled_later(how: str) -> tuple[bool, bool, int]:
    """What is inside, its state, and how often a hook ran in a call of one rank alone."""
    from accelerate import Accelerator
    from accelerate.utils import extract_model_from_parallel

    torch._dynamo.reset()
    accelerator = Accelerator(cpu=True)
    user = Net()
    model: Any = accelerator.prepare(user)
    assert extract_model_from_parallel(model) is user
    if how == "in place":
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    x = torch.ones(2, 4, 2, 2) * accelerator.process_index
    accelerator.backward(model(x).mean())
    calls: list[int] = []
    user.register_forward_hook(lambda *_: calls.append(1))
    net = accelerator.unwrap_model(model).eval()
    with torch.no_grad():
        if accelerator.is_main_process:
            net(x)
        user(x)
    accelerator.wait_for_everyone()
    inside = accelerator.unwrap_model(model, keep_torch_compile=False) is user
    kept = getattr(net, "_orig_mod", None) is user if how == "wrapper" else net is user
    return inside and kept, [*accelerator.get_state_dict(model)] == [*SHAPES], len(calls)


@pytest.mark.parametrize("how", ["wrapper", "in place"])
def test_a_model_that_is_compiled_after_prepare_unwraps(ranks: RankServer, how: str) -> None:
    """One rank alone may call it: its buffers were broadcast, and others did not."""
    assert ranks(2, compiled_later, how) == [(True, True, 2), (True, True, 1)]


def syncs_when_compiled(version: int | None) -> tuple[list[bool], dict[str, Any]]:
    """Whether gradients are reduced in the contexts of a model compiled after ``prepare``; and its state."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=version) if version else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    net = Net()
    prepared, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    model: Any = torch.compile(prepared, backend="eager")
    found: list[bool] = []

    def look() -> None:
        found.append(accelerator.strategy.reduces_gradients(prepared))

    with accelerator.no_sync(model):
        look()
        if version is None:  # torch's reducer wants a forward before it
            model(torch.ones(2, 4, 2, 2))
        with accelerator.trigger_sync_in_backward(model):
            look()
    for _ in range(2):
        with accelerator.accumulate(model):
            look()
    for window in accelerator.windows([0, 1], models=model):
        for _ in window:
            look()
    return found, {name: value.shape for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("version", [None, 1])
def test_a_model_that_is_compiled_after_prepare_accumulates(ranks: RankServer, version: int | None) -> None:
    """Its gradients were all-reduced in each micro-batch; under FSDP1 its state was that of one shard."""
    (found, state), (same, _) = ranks(2, syncs_when_compiled, version)
    assert found == same == [False, True] * 3
    assert state == SHAPES


def names_of_a_model_that_the_user_compiled() -> list[bool]:
    """Compiled as a whole, with a compiled part, under data parallelism and both kinds of sharding."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    found: list[bool] = []
    for version in (None, 1, 2):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version) if version else None
        accelerator = Accelerator(fsdp_plugin=plugin, cpu=True)
        net = Net()
        net.blocks[1] = torch.compile(net.blocks[1], backend="eager")  # type: ignore[assignment]
        model = accelerator.prepare(torch.compile(net, backend="eager"))
        state = accelerator.get_state_dict(model)
        found.append({name: value.shape for name, value in state.items()} == SHAPES)
    return found


SHAPES = {name: value.shape for name, value in Net().state_dict().items()}


def test_weights_of_a_model_that_the_user_compiled_keep_their_names(ranks: RankServer) -> None:
    """D9: as in the files of a checkpoint."""
    of_rank_0, _ = ranks(2, names_of_a_model_that_the_user_compiled)  # under sharding it alone has the state
    assert of_rank_0 == [True] * 3
