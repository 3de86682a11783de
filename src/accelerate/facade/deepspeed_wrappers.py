"""Wrappers of DeepSpeed's optimizer, scheduler and engine, under the names of the public package."""

from __future__ import annotations

from typing import Any

from accelerate.facade.optimizer import AcceleratedOptimizer
from accelerate.facade.scheduler import AcceleratedScheduler


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """The wrapper of the optimizer that steps inside of a DeepSpeed engine.

    ``param_groups`` and ``state`` hold DeepSpeed's flat float32 parameters.

    Args:
        optimizer: that optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.__has_overflow__: bool = hasattr(optimizer, "overflow")

    def step(self) -> None:  # type: ignore[override]
        """Take DeepSpeed's step, unless gradients are being accumulated."""
        super().step()

    @property
    def step_was_skipped(self) -> bool:
        """Return whether the last step was not taken because a gradient was not finite."""
        strategy: Any = self._strategy
        if strategy is not None:
            return strategy.skipped_step(self.optimizer)
        return bool(self.__has_overflow__ and self.optimizer.overflow)  # type: ignore[attr-defined]


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """The wrapper of a scheduler that DeepSpeed advances in its step; ``step`` does nothing.

    Args:
        scheduler: DeepSpeed's.
        optimizers: the prepared optimizer that it is for.
    """

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    def step(self) -> None:  # type: ignore[override]
        """Do nothing: DeepSpeed advances the schedule."""


class DeepSpeedEngineWrapper:
    """The wrapper of a DeepSpeed engine made by hand: backward, and the step when gradients are complete.

    An ``Accelerator`` shows it as ``deepspeed_engine_wrapped``, and does not use it: there the step is taken
    in ``optimizer.step()``.

    Args:
        engine: the DeepSpeed engine.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(self, loss: Any, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Run the backward pass; DeepSpeed divides the loss, and steps with ``sync_gradients``."""
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> float | None:
        """Return the gradient norm of the last step; None before the first."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if hasattr(norm, "item") else norm


def wrap_first_engine(strategy: Any) -> DeepSpeedEngineWrapper | None:
    """Return a wrapper of the first engine of the strategy ``DeepSpeed``, None if it has made none yet.

    Raises:
        AttributeError: it is another strategy.
    """
    if strategy.name != "deepspeed":
        raise AttributeError("deepspeed_engine_wrapped: this Accelerator does not use DeepSpeed")
    return next((DeepSpeedEngineWrapper(handle.engine) for handle in strategy.engines), None)


def get_active_deepspeed_plugin(state: Any) -> Any:
    """Return the selected DeepSpeed plugin, which the next ``prepare`` uses.

    Raises:
        ValueError: there is none.
    """
    plugins = state.deepspeed_plugins
    if not plugins:
        raise ValueError("no DeepSpeed plugin: this Accelerator does not use DeepSpeed")
    return next(plugin for plugin in plugins.values() if plugin.selected)
