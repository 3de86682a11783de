"""The kwargs handlers of an ``Accelerator``, by the attribute names that scripts use."""

from __future__ import annotations

from typing import Any

from accelerate.facade.enums import FP8BackendType
from accelerate.precision.autocast import AutocastKwargs
from accelerate.precision.fp16 import GradScalerKwargs
from accelerate.strategy.base import Strategy
from accelerate.watch.profile import ProfileKwargs
from accelerate.world.preemption import PreemptionKwargs
from accelerate.world.world import InitProcessGroupKwargs


class HandlerPropertiesMixin:
    """The handlers given in ``kwargs_handlers``; None where none was given."""

    handlers: dict[type, Any]
    strategy: Strategy

    @property
    def autocast_handler(self) -> Any:
        """The options of autocast."""
        return self.handlers.get(AutocastKwargs)

    @property
    def scaler_handler(self) -> Any:
        """The options of the gradient scaler."""
        return self.handlers.get(GradScalerKwargs)

    @property
    def init_handler(self) -> Any:
        """The options of ``init_process_group``."""
        return self.handlers.get(InitProcessGroupKwargs)

    @property
    def profile_handler(self) -> Any:
        """The options of the profiler."""
        return self.handlers.get(ProfileKwargs)

    @property
    def preemption_handler(self) -> Any:
        """The options of preemption."""
        return self.handlers.get(PreemptionKwargs)

    @property
    def ddp_handler(self) -> Any:
        """The options of DDP that the next ``prepare`` uses, given or not."""
        return self.strategy.handler

    @ddp_handler.setter
    def ddp_handler(self, value: Any) -> None:
        self.strategy.handler = value

    # --- FP8: not built yet and refused, so these say that it is off

    @property
    def fp8_enabled(self) -> bool:
        """Return whether matrix products are computed in 8-bit floats."""
        return False

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in 8-bit floats."""
        return FP8BackendType.NO

    @property
    def has_fp8_handler(self) -> bool:
        """Return whether a recipe of 8-bit training was given."""
        return self.fp8_recipe_handler is not None

    @property
    def fp8_recipe_handler(self) -> Any:
        """The recipe of FP8 training, of any library."""
        return None
