"""Not built yet: asked for, it refuses instead of training in another way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from accelerate.core import environ
from accelerate.strategy.base import Bundle, Request, Step, Strategy


class Megatron(Strategy):
    """Claims its variable, so that no run silently trains by another strategy."""

    name: ClassVar[str] = "megatron"
    priority: ClassVar[int] = 10
    planned: ClassVar[str] = (
        "tensor and pipeline parallel training by Megatron-Core "
        "will come with the sharded strategies; until then train with data parallelism"
    )
    instead: ClassVar[str] = (
        "leave out --use_megatron_lm, or call the engine in the script, which finds what was "
        "asked in its variables"
    )

    @classmethod
    def claims(cls, request: Request) -> bool:
        """When the launcher's variable says so."""
        return environ.flag("ACCELERATE_USE_MEGATRON_LM")

    def steps(self, bundle: Bundle) -> Iterator[Step]:
        """Never reached: ``check`` refuses."""
        return iter(())


PLUGIN = Megatron
