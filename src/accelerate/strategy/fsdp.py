"""FSDP2: every rank holds a shard of parameters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from accelerate.core.option_report import RequestedOption
from accelerate.core.setting import load_settings
from accelerate.strategy.base import StrategyRequest
from accelerate.strategy.launch_settings.fsdp import UseFSDPSetting
from accelerate.strategy.sharding.fsdp2 import FSDP2StrategyBase
from accelerate.strategy.sharding.sharded_strategy import find_plugin, fsdp_options
from accelerate.world.world import World


def _is_requested(request: StrategyRequest) -> bool:
    return find_plugin(request) is not None or load_settings(UseFSDPSetting).value.use_fsdp


class FSDP2Strategy(FSDP2StrategyBase):
    """FSDP2 over all ranks, by torch's ``fully_shard``."""

    name: ClassVar[str] = "fsdp"
    priority: ClassVar[int] = 10

    @classmethod
    def claims(cls, request: StrategyRequest) -> bool:
        """Return whether there are several ranks, and the plugin or the launcher asks for FSDP."""
        return request.world.size > 1 and _is_requested(request)

    @classmethod
    def unused_reason(cls, request: StrategyRequest) -> str:
        """Return why FSDP is not used in a world of one."""
        if request.world.size > 1 or not _is_requested(request):
            return ""
        return "one process has nothing to shard, so it trains as a single process does"

    @classmethod
    def requested_options(cls, request: StrategyRequest) -> Iterator[RequestedOption]:
        """Return the switch and the plugin."""
        return fsdp_options(request)

    @classmethod
    def distributed_type(cls, world: World) -> str:
        """Return ``"FSDP"``, on any device."""
        return "FSDP"


PLUGIN = FSDP2Strategy
