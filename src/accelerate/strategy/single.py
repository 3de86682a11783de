"""The strategy of one process: the bundle stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from accelerate.strategy.base import OpenGradients, PrepareBundle, PrepareStep, Strategy, StrategyRequest
from accelerate.world.world import World


class SingleProcessStrategy(OpenGradients, Strategy):
    """Training of one process on one device."""

    name: ClassVar[str] = "single"
    replicates_model: ClassVar[bool] = True

    @classmethod
    def claims(cls, request: StrategyRequest) -> bool:
        """Return whether the world size is 1."""
        return request.world.size == 1

    @classmethod
    def distributed_type(cls, world: World) -> str:
        """Return ``"NO"``."""
        return "NO"

    def prepare_steps(self, bundle: PrepareBundle) -> Iterator[PrepareStep]:
        """Return no steps."""
        return iter(())


PLUGIN = SingleProcessStrategy
