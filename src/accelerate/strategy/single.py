"""One process: the bundle stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from accelerate.strategy.base import Bundle, Request, Step, Strategy
from accelerate.world.world import World


class Single(Strategy):
    """One process on one device."""

    name: ClassVar[str] = "single"
    replicates: ClassVar[bool] = True

    @classmethod
    def claims(cls, request: Request) -> bool:
        """A world of one process."""
        return request.world.size == 1

    @classmethod
    def distributed_type(cls, world: World) -> str:
        """Nothing is distributed."""
        return "NO"

    def steps(self, bundle: Bundle) -> Iterator[Step]:
        """None."""
        return iter(())


PLUGIN = Single
