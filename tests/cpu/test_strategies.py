"""One list of laws for every strategy, and for an engine that owns optimizer, step and precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.core.errors import SettingError
from accelerate.state import AcceleratorState
from tests.support.engine import EnginePlugin, FakeEngineStrategy, unchecked_accelerator
from tests.support.long_run import long_run_param
from tests.support.ranks import RankServer, same_on_all
from tests.support.strategies import added_strategy, strategy_names, xla_over_gloo
from tests.support.worlds import fake_world

# What the rank server imports once for this module.
PRELOAD = ("deepspeed.runtime.zero.muon.muon_optimizer", "transformers.integrations.deepspeed")
# Held to these laws by what they need: tests/cpu/test_megatron.py, and tests/xla on PyTorch/XLA.
OWN = {"megatron", "xla_spmd"}
BUILT = [name for name in strategy_names() if name not in OWN]
SIZES = {"single": 1, "engine": 1}  # every other strategy is for several processes


def zero() -> dict[str, Any]:
    from accelerate import DeepSpeedPlugin

    return {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2)}


# How one asks for those that are not chosen by themselves.
ASKED: dict[str, Callable[[], dict[str, Any]]] = {
    "fsdp": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin()},
    "fsdp1": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1)},
    "parallelism": lambda: {"parallelism_config": ParallelismConfig(dp_shard_size=2)},
    "deepspeed": zero,
    "deepspeed_mesh": lambda: {**zero(), "parallelism_config": ParallelismConfig(dp_shard_size=2)},
}


@contextmanager
def asked(name: str) -> Iterator[dict[str, Any]]:
    """The arguments of an Accelerator that trains by that strategy."""
    if name == "xla":
        with xla_over_gloo():
            yield {}
        return
    if name != "engine":
        yield ASKED.get(name, dict)()
        return
    with added_strategy("engine", FakeEngineStrategy):
        yield {"fsdp_plugin": EnginePlugin()}


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def batch(step: int, share: slice) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(step))[share]


def whole(accelerator: Any, model: nn.Module) -> list[list[float]]:
    """The weights, whatever part of them this process holds."""
    from accelerate.utils import broadcast_object_list

    (state,) = broadcast_object_list([accelerator.get_state_dict(model)])
    return [state[name].flatten().tolist() for name, _ in parts()[0].named_parameters()]


def plain(window: int) -> tuple[list[list[float]], float]:
    model, optimizer, schedule = parts()
    for step in range(6):
        (model(batch(step, slice(None))).square().mean() / window).backward()
        if (step + 1) % window == 0:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return [p.detach().flatten().tolist() for p in model.parameters()], schedule.get_last_lr()[0]


def trained(name: str, window: int, folder: str) -> dict[str, Any]:
    from accelerate import DataLoaderConfiguration

    with asked(name) as arguments:
        accelerator = unchecked_accelerator(
            gradient_accumulation_steps=window,
            dataloader_config=DataLoaderConfiguration(split_batches=True),
            **arguments,
        )
        user, optimizer, schedule = parts()
        before = {n: p.clone() for n, p in user.named_parameters()}
        plan = accelerator.plan(user, optimizer, schedule)
        pure = all(torch.equal(before[n], p) for n, p in user.named_parameters()) and not user._forward_hooks
        model, optimizer, schedule = accelerator.prepare(user, optimizer, schedule)
        size, rank = accelerator.num_processes, accelerator.process_index
        share = slice(rank * 4 // size, (rank + 1) * 4 // size)
        norms = []
        for step in range(6):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch(step, share)).square().mean())
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), float("inf"))))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        weights = whole(accelerator, model)
        path = accelerator.save_state(folder)
        with torch.no_grad():
            for parameter in user.parameters():
                parameter.zero_()
        accelerator.load_state(path)
        again = whole(accelerator, model)
        names = sorted(accelerator.get_state_dict(model))
        return {
            "strategy": accelerator.strategy.name,
            "pure": pure,
            "plan": str(plan),
            "unwraps": accelerator.unwrap_model(model) is user,
            "names": not accelerator.is_main_process or names == sorted(user.state_dict()),
            "weights": weights,
            "rate": schedule.get_last_lr()[0],
            "restored": weights == again,
        }


@pytest.mark.parametrize("window", [long_run_param(1), 3])
@pytest.mark.parametrize("name", [*BUILT, "engine"])
def test_a_strategy_keeps_the_laws(ranks: RankServer, tmp_path: Path, name: str, window: int) -> None:
    """Same numbers as the plain loop, a pure plan, the user's module and names back, a whole checkpoint."""
    found = same_on_all(ranks(SIZES.get(name, 2), trained, name, window, f"{tmp_path}/c"))
    weights, rate = plain(window)
    for ours, theirs in zip(found["weights"], weights, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
    assert found["rate"] == pytest.approx(rate)
    assert found["strategy"] == name
    assert found["pure"]
    assert found["unwraps"]
    assert found["names"]
    assert found["restored"]


def chosen(size: int, **options: Any) -> str:
    """The name of the strategy that a new accelerator has chosen on rank 0 of ``size`` ranks."""
    AcceleratorState._reset_state()
    with fake_world(size, 0):
        return unchecked_accelerator(**options).strategy.name


def test_two_strategies_that_both_claim_are_an_error() -> None:
    class Other(FakeEngineStrategy):
        name = "other"

    with (
        added_strategy("engine", FakeEngineStrategy),
        added_strategy("other", Other),
        pytest.raises(SettingError, match="two strategies are asked for at once"),
    ):
        chosen(2, fsdp_plugin=EnginePlugin())
    with added_strategy("engine", FakeEngineStrategy):
        assert chosen(2, fsdp_plugin=EnginePlugin()) == "engine"
    assert chosen(2) == "ddp"
    assert chosen(1) == "single"
