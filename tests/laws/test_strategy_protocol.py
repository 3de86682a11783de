"""The strategy protocol is small enough to read: 45 members, and capabilities found by type."""

from __future__ import annotations

import inspect

from accelerate.strategy import STRATEGIES
from accelerate.strategy.base import (
    BatchPlacement,
    CustomSharding,
    DataSharding,
    EngineStrategy,
    ModuleWrapping,
    Strategy,
    StrategyRequest,
    WrapperNames,
)
from accelerate.strategy.protocol.gradient_sync import ReductionMonitor
from accelerate.strategy.single import SingleProcessStrategy
from accelerate.world.world import World


def members(*kinds: type) -> set[str]:
    """Public members of classes: methods, annotated and plain attributes."""
    annotated = {name for kind in kinds for base in kind.__mro__ for name in inspect.get_annotations(base)}
    return {name for name in annotated.union(*map(dir, kinds)) if not name.startswith("_")}


def test_a_strategy_has_at_most_45_members() -> None:
    of_instances = set(vars(SingleProcessStrategy(StrategyRequest(World.fake(1)))))
    core = members(Strategy) | {name for name in of_instances if not name.startswith("_")}
    assert len(core) <= 45
    assert len(members(DataSharding)) <= 8
    assert len(members(ReductionMonitor)) <= 3
    assert len(members(EngineStrategy) - core) <= 15


def test_only_one_member_has_no_default() -> None:
    assert Strategy.__abstractmethods__ == {"prepare_steps"}


def test_capabilities_are_found_by_type() -> None:
    kinds = {name: STRATEGIES.get(name) for name in STRATEGIES.names()}
    assert {name for name, kind in kinds.items() if issubclass(kind, EngineStrategy)} == {
        "deepspeed",
        "deepspeed_mesh",
        "megatron",
    }
    assert {name for name, kind in kinds.items() if issubclass(kind, DataSharding)} == {
        "deepspeed_mesh",
        "parallelism",
    }
    assert {name for name, kind in kinds.items() if issubclass(kind, ReductionMonitor)} == {
        "ddp",
        "fsdp",
        "fsdp1",
        "parallelism",
    }
    assert {name for name, kind in kinds.items() if issubclass(kind, CustomSharding)} == {
        "fsdp",
        "parallelism",
    }
    assert {name for name, kind in kinds.items() if issubclass(kind, ModuleWrapping)} == {
        "deepspeed",
        "deepspeed_mesh",
        "fsdp1",
    }
    assert {name for name, kind in kinds.items() if issubclass(kind, WrapperNames)} == {"ddp"}
    assert {name for name, kind in kinds.items() if issubclass(kind, BatchPlacement)} == {"xla", "xla_spmd"}
    assert all(kind.owns_step is issubclass(kind, EngineStrategy) for kind in kinds.values())


def test_a_capability_is_whole() -> None:
    for mesh in map(STRATEGIES.get, ("parallelism", "deepspeed_mesh")):
        assert all(getattr(mesh, name) is not getattr(DataSharding, name) for name in members(DataSharding))
