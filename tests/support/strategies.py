"""All strategies, the one that is chosen for a fake world, and what FSDP says about a plugin and a model."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accelerate.core.option_report import OptionStatus
from accelerate.facade.option_report import unused_options
from accelerate.facade.runtime import choose_strategy
from accelerate.strategy import STRATEGIES
from accelerate.strategy.base import Strategy, StrategyRequest
from accelerate.strategy.sharding.fsdp2_options import option_statuses
from accelerate.strategy.sharding.sharding_layout import find_units
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.world.world import World


def chosen(size: int, *plugins: Any, nodes: int = 1, **asked: Any) -> Strategy:
    """The strategy of a training with these plugins on ``size`` processes of ``nodes`` machines."""
    return choose_strategy(StrategyRequest(World.fake(size, nodes=nodes), plugins=plugins, **asked))


def unused(strategy: Strategy) -> list[OptionStatus]:
    """What was asked for and does nothing under the strategy that was chosen."""
    return [effect for effect in unused_options(strategy.request, strategy) if effect.matters]


def fsdp_statuses(plugin: FullyShardedDataParallelPlugin) -> list[OptionStatus]:
    """What FSDP2 says about each option of a plugin before there is a model."""
    return list(option_statuses((), plugin, []))


def fsdp_unit_names(model: nn.Module, plugin: FullyShardedDataParallelPlugin) -> list[str]:
    """The names of the modules of which each is an FSDP unit."""
    names = {module: name for name, module in model.named_modules()}
    return [names[block] for block in find_units(model, plugin.policy_for(model), set())]


def strategy_names() -> list[str]:
    """Return the names of all strategies, ``"single"`` and ``"ddp"`` among them."""
    return list(STRATEGIES.names())


def added_strategy(name: str, strategy: type) -> AbstractContextManager[None]:
    """Let accelerators choose among one strategy more, for the length of a ``with`` block."""
    return STRATEGIES.add(name, strategy)


@contextmanager
def xla_over_gloo() -> Iterator[list[int]]:
    """Train by the strategy of PyTorch/XLA on CPUs; yield how many gradients each of its all-reduces had.

    The fake stands where torch_xla would be called. It sums over gloo, at once, what XLA would record.
    """

    def all_reduce(kind: str, tensors: list[torch.Tensor], scale: float = 1.0) -> None:
        assert kind == "sum"
        calls.append(len(tensors))
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor.mul_(scale)

    calls: list[int] = []
    fake = types.ModuleType("torch_xla.core.xla_model")
    fake.REDUCE_SUM, fake.all_reduce = "sum", all_reduce  # type: ignore[attr-defined]
    loaders = types.ModuleType("torch_xla.distributed.parallel_loader")
    loaders.MpDeviceLoader = type("MpDeviceLoader", (), {})  # type: ignore[attr-defined]
    kind = STRATEGIES.get("xla")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, fake.__name__, fake)
        patch.setitem(sys.modules, loaders.__name__, loaders)
        patch.setattr(STRATEGIES.get("xla_spmd"), "selection", kind.selection)  # the subclass keeps its own
        patch.setattr(kind, "selection", replace(kind.selection, device_type="cpu", min_world_size=2))
        yield calls


@contextmanager
def spmd_on_machines(machines: int) -> Iterator[None]:
    """Choose SPMD of PyTorch/XLA on this CPU, with a fake runtime that spans so many machines."""
    runtime, spmd = (types.ModuleType(f"torch_xla.{name}") for name in ("runtime", "distributed.spmd"))
    vars(runtime).update(is_spmd=lambda: True, process_count=lambda: machines)
    mesh = types.SimpleNamespace(axis_names=("fsdp",), shape=lambda: {"fsdp": 4 * machines})
    vars(spmd).update(get_global_mesh=lambda: mesh)
    kind = STRATEGIES.get("xla_spmd")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, runtime.__name__, runtime)
        patch.setitem(sys.modules, spmd.__name__, spmd)
        patch.setattr(kind, "selection", replace(kind.selection, device_type="cpu"))
        yield
