"""Not built yet: asked for, it refuses instead of training in another way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from accelerate.core import environ
from accelerate.strategy.base import Bundle, Request, Step, Strategy


class DeepSpeed(Strategy):
    """Claims its variable, so that no run silently trains by another strategy."""

    name: ClassVar[str] = "deepspeed"
    priority: ClassVar[int] = 10
    planned: ClassVar[str] = (
        "ZeRO 1 to 3 by the DeepSpeed engine "
        "will come with the sharded strategies; until then train with data parallelism"
    )

    @classmethod
    def claims(cls, request: Request) -> bool:
        """When the launcher's variable says so."""
        return environ.flag("ACCELERATE_USE_DEEPSPEED")

    def steps(self, bundle: Bundle) -> Iterator[Step]:
        """Never reached: ``check`` refuses."""
        return iter(())


PLUGIN = DeepSpeed
