"""Wrappers of the optimizers, schedulers and engines of DeepSpeed and Megatron-LM, under the names of 1.x."""

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


def get_active_deepspeed_plugin(state: Any) -> Any:
    """Return the selected DeepSpeed plugin, which the next ``prepare`` uses.

    Raises:
        ValueError: there is none.
    """
    plugins = state.deepspeed_plugins
    if not plugins:
        raise ValueError("no DeepSpeed plugin: this Accelerator does not use DeepSpeed")
    return next(plugin for plugin in plugins.values() if plugin.selected)


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
