"""Not built yet: asked for, it refuses instead of training in another way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from accelerate.core import environ
from accelerate.strategy.base import Bundle, Request, Step, Strategy


class Parallelism(Strategy):
    """Claims its variable before all others, so that no run silently trains by a part of what was asked."""

    name: ClassVar[str] = "parallelism"
    priority: ClassVar[int] = 20
    planned: ClassVar[str] = (
        "a grid of processes with data, tensor, context and sequence parallel dimensions "
        "will come with the sharded strategies; until then train with data parallelism"
    )
    instead: ClassVar[str] = "leave out --use_parallelism_config; --use_fsdp shards over all processes"

    @classmethod
    def claims(cls, request: Request) -> bool:
        """When the launcher's variable says so."""
        return environ.flag("ACCELERATE_USE_PARALLELISM_CONFIG")

    def steps(self, bundle: Bundle) -> Iterator[Step]:
        """Never reached: ``check`` refuses."""
        return iter(())


PLUGIN = Parallelism
