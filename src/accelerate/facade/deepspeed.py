"""What users hold of an engine's optimizer and schedule, by the names of the public package."""

from __future__ import annotations

from typing import Any

from accelerate.facade.optimizer import AcceleratedOptimizer
from accelerate.facade.scheduler import AcceleratedScheduler


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """Stands before the optimizer that steps inside of an engine.

    ``param_groups`` and ``state`` are of the engine's flat float32 vectors.

    Args:
        optimizer: that optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.__has_overflow__ = hasattr(optimizer, "overflow")

    def step(self) -> None:  # type: ignore[override]
        """Takes the engine's step, unless gradients are being accumulated."""
        super().step()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was not taken because a gradient was not finite."""
        known: Any = self._strategy
        if known is not None:
            return known.skipped(self.optimizer)
        return bool(self.__has_overflow__ and self.optimizer.overflow)  # type: ignore[attr-defined]


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """Stands before a schedule that the engine advances in its step; ``step`` has nothing left to do.

    Args:
        scheduler: the engine's.
        optimizers: the prepared optimizer that it is for.
    """

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    def step(self) -> None:  # type: ignore[override]
        """Nothing: the engine did it."""


class DeepSpeedEngineWrapper:
    """Runs the step of an engine that was made by hand: backward, and the step when gradients are complete.

    An ``Accelerator`` does not use it: there the step is taken in ``optimizer.step()``.

    Args:
        engine: DeepSpeed's.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(self, loss: Any, sync_gradients: bool = True, **kwargs: Any) -> None:
        """The backward pass of a loss that the engine divides, and its step with ``sync_gradients``."""
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients in the last step, None before the first."""
        found = self.engine.get_global_grad_norm()
        return found.item() if hasattr(found, "item") else found


def get_active_deepspeed_plugin(state: Any) -> Any:
    """The plugin that the next ``prepare`` goes by.

    Raises:
        ValueError: there is none.
    """
    plugins = state.deepspeed_plugins
    if not plugins:
        raise ValueError("the engine's plugin is asked for, and this Accelerator has none")
    return next(plugin for plugin in plugins.values() if plugin.selected)
