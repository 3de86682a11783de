"""Wrappers of Megatron-LM's optimizer and scheduler, under the names of the public package."""

from __future__ import annotations

from typing import Any

from accelerate.facade.optimizer import AcceleratedOptimizer
from accelerate.facade.scheduler import AcceleratedScheduler


class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """The wrapper of an optimizer that steps inside Megatron-LM.

    The one that ``prepare`` gives takes Megatron-LM's step. One that was made by hand has no model:
    ``step`` and ``zero_grad`` do nothing.

    Args:
        optimizer: the user's, or Megatron-LM's.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear Megatron-LM's gradients, unless they are being accumulated."""
        if self._strategy is not None:
            super().zero_grad(set_to_none)

    def step(self) -> None:  # type: ignore[override]
        """Take Megatron-LM's step, unless gradients are being accumulated."""
        if self._strategy is not None:
            super().step()

    @property
    def step_was_skipped(self) -> bool:
        """Return whether the last step was not taken because a gradient was not finite."""
        return bool(getattr(self.optimizer, "skipped_iter", False))


class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """The wrapper of a scheduler that advances inside Megatron-LM: ``step`` does nothing.

    Args:
        scheduler: Megatron-LM's.
        optimizers: its prepared optimizers.
    """

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: Megatron-LM advances the schedule."""
