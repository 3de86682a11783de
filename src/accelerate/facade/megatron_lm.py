"""The optimizer and scheduler of an engine that steps by itself, under the public package's names."""

from __future__ import annotations

from typing import Any

from accelerate.facade.optimizer import AcceleratedOptimizer
from accelerate.facade.scheduler import AcceleratedScheduler


class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """Stands before an optimizer that steps inside the engine.

    The one that ``prepare`` gives takes the engine's step. One that was made by hand has no engine:
    ``step`` and ``zero_grad`` do nothing.

    Args:
        optimizer: the user's, or the engine's.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drops the engine's gradients, unless they are being accumulated."""
        if self._strategy is not None:
            super().zero_grad(set_to_none)

    def step(self) -> None:  # type: ignore[override]
        """Takes the engine's step, unless gradients are being accumulated."""
        if self._strategy is not None:
            super().step()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was not taken because a gradient was not finite."""
        return bool(getattr(self.optimizer, "skipped_iter", False))


class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """Around a schedule of the engine that advances inside the engine: ``step`` does nothing.

    Args:
        scheduler: the engine's.
        optimizers: its prepared optimizers.
    """

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""
