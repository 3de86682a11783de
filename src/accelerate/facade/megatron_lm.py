"""The optimizer and scheduler of an engine that steps by itself, under the public package's names."""

from __future__ import annotations

from typing import Any

from accelerate.facade.optimizer import AcceleratedOptimizer
from accelerate.facade.scheduler import AcceleratedScheduler


class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """Around an optimizer of the engine that steps inside the engine: ``step`` and ``zero_grad`` do nothing.

    ``prepare`` does not make it: there the engine steps when the loop says so.

    Args:
        optimizer: the engine's.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""

    @property
    def step_was_skipped(self) -> bool:
        """What the engine's optimizer says of its last step."""
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
