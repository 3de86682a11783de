"""The prepared scheduler: advances with the optimizer, ``num_processes`` steps at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate.facade.gradient import GradientState
from accelerate.world import collective


class AcceleratedScheduler:
    """Stands before the user's learning rate scheduler.

    Its length is taken to be counted in batches of the unsharded loader, of which one step consumes one per
    process; so each optimizer step advances it by the number of processes.

    Args:
        scheduler: the user's.
        optimizers: the prepared optimizer or optimizers it follows.
        step_with_optimizer: False advances once at every call, whatever the optimizer did.
        split_batches: the loader's batch is that of all processes, so each step advances once.
    """

    def __init__(
        self, scheduler: Any, optimizers: Any, step_with_optimizer: bool = True, split_batches: bool = False
    ) -> None:
        self.scheduler = scheduler
        self.optimizers: Sequence[Any] = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
        self.step_with_optimizer, self.split_batches = step_with_optimizer, split_batches
        self.gradient_state = GradientState()
        self._total_steps: int | None = getattr(scheduler, "total_steps", None)

    def bind(self, gradients: GradientState) -> AcceleratedScheduler:
        """Ties it to one ``Accelerator``; returns itself."""
        self.gradient_state = gradients
        return self

    def __getattr__(self, name: str) -> Any:
        if name in ("scheduler", "__setstate__"):
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advances, if the optimizer did."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        if self.split_batches or collective.size() == 1:
            self._advance(*args, **kwargs)
            return
        for _ in range(collective.size()):
            self._advance(*args, **kwargs)

    def _advance(self, *args: Any, **kwargs: Any) -> None:
        # A one-cycle schedule raises when it is stepped past its end.
        total = self._total_steps
        if total is None or self.scheduler._step_count <= total:
            self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """The inner scheduler's."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> list[float]:
        """The inner scheduler's."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> None:
        """The inner scheduler's."""
        self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The inner scheduler's."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads into the inner scheduler."""
        self.scheduler.load_state_dict(state_dict)
