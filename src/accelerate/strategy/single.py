"""The strategy of one process: the bundle stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from accelerate.strategy.base import PrepareBundle, PrepareStep, Strategy
from accelerate.strategy.protocol.gradient_sync import OpenGradients
from accelerate.world.world import World


class SingleProcessStrategy(OpenGradients, Strategy):
    """Training of one process on one device."""

    name: ClassVar[str] = "single"
    priority: ClassVar[int] = -1  # it claims every request, also of several ranks, which another one gets
    replicates_model: ClassVar[bool] = True

    def distributed_type(self, world: World) -> str:
        """Return ``"NO"``."""
        return "NO"

    def prepare_steps(self, bundle: PrepareBundle) -> Iterator[PrepareStep]:
        """Return no steps."""
        return iter(())


PLUGIN = SingleProcessStrategy
