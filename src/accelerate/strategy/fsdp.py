"""Fully sharded data parallel: every process holds a part of parameters, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from accelerate.core.effects import Option
from accelerate.core.setting import load
from accelerate.strategy.base import Request
from accelerate.strategy.settings.fsdp import FSDPSwitch
from accelerate.strategy.sharding.base import asked, plugin_of
from accelerate.strategy.sharding.fsdp2 import Sharding
from accelerate.world.world import World


def _wanted(request: Request) -> bool:
    return plugin_of(request) is not None or load(FSDPSwitch).value.use_fsdp


class FSDP(Sharding):
    """Cut over all processes, by torch's ``fully_shard``."""

    name: ClassVar[str] = "fsdp"
    priority: ClassVar[int] = 10

    @classmethod
    def claims(cls, request: Request) -> bool:
        """Several processes, and the plugin or the launcher's variable; one process has nothing to shard."""
        return request.world.size > 1 and _wanted(request)

    @classmethod
    def idle(cls, request: Request) -> str:
        """In a world of one."""
        if request.world.size > 1 or not _wanted(request):
            return ""
        return "one process has nothing to shard, so it trains as a single process does"

    @classmethod
    def asked(cls, request: Request) -> Iterator[Option]:
        """The switch or the plugin, for one process; else the options are looked at one by one."""
        return asked(request)

    @classmethod
    def distributed_type(cls, world: World) -> str:
        """The contract's name, on any device."""
        return "FSDP"


PLUGIN = FSDP
