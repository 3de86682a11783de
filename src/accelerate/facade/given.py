"""The kwargs handlers that an ``Accelerator`` was given, by the names under which scripts look for them."""

from __future__ import annotations

from typing import Any

from accelerate.facade.enums import FP8BackendType
from accelerate.precision.autocast import AutocastKwargs
from accelerate.precision.fp16 import GradScalerKwargs
from accelerate.strategy.base import Strategy
from accelerate.watch.profile import ProfileKwargs
from accelerate.world.stop import PreemptionKwargs
from accelerate.world.world import InitProcessGroupKwargs


class Given:
    """What was given in ``kwargs_handlers``; None stands for nothing given."""

    handlers: dict[type, Any]
    strategy: Strategy

    @property
    def autocast_handler(self) -> Any:
        """Options of autocast."""
        return self.handlers.get(AutocastKwargs)

    @property
    def scaler_handler(self) -> Any:
        """Options of the gradient scaler."""
        return self.handlers.get(GradScalerKwargs)

    @property
    def init_handler(self) -> Any:
        """Options of the group of processes."""
        return self.handlers.get(InitProcessGroupKwargs)

    @property
    def profile_handler(self) -> Any:
        """Options of the profiler."""
        return self.handlers.get(ProfileKwargs)

    @property
    def preemption_handler(self) -> Any:
        """Options of stopping before the job ends."""
        return self.handlers.get(PreemptionKwargs)

    @property
    def ddp_handler(self) -> Any:
        """Options of the replicas made by the next ``prepare``, given or not."""
        return self.strategy.handler

    @ddp_handler.setter
    def ddp_handler(self, value: Any) -> None:
        self.strategy.handler = value

    # --- 8-bit floats: refused until they come, so that nothing of them is ever in use

    @property
    def fp8_enabled(self) -> bool:
        """Whether matrix products are computed in 8-bit floats."""
        return False

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in 8-bit floats."""
        return FP8BackendType.NO

    @property
    def has_fp8_handler(self) -> bool:
        """Whether a recipe of 8-bit training was given."""
        return self.fp8_recipe_handler is not None

    @property
    def fp8_recipe_handler(self) -> Any:
        """The recipe of 8-bit training, of whatever library."""
        return None
