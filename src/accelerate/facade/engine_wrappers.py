"""Wrappers of the optimizers, schedulers and engines of DeepSpeed and Megatron-LM, under the names of 1.x."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod

from accelerate.core.errors import warn_user
from accelerate.facade.optimizer import AcceleratedOptimizer
from accelerate.facade.scheduler import AcceleratedScheduler


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """The wrapper of the optimizer that steps inside of a DeepSpeed engine.

    ``param_groups`` and ``state`` hold DeepSpeed's flat float32 parameters.

    Args:
        optimizer: that optimizer.
    """

    _strategy: Any

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.__has_overflow__: bool = hasattr(optimizer, "overflow")
        self._has_warned_of_steps = False

    def bind(self, *args: Any, **kwargs: Any) -> AcceleratedOptimizer:
        """Bind it to one ``Accelerator``, and take the steps that the program leaves out."""
        super().bind(*args, **kwargs)
        self._strategy.set_step_owner(self.optimizer, WeakMethod(self._take_step_before_use))
        return self

    def step(self) -> None:  # type: ignore[override]
        """Take DeepSpeed's step, unless gradients are being accumulated."""
        if self._strategy is not None:
            self._strategy.note_own_step(self.optimizer)
        super().step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients, unless they are being accumulated, or wait for a step that the program omits."""
        self.take_omitted_step("optimizer.zero_grad()")
        # The backwards of other engines say nothing of this one's gradients.
        is_closing = self.gradient_state.last_micro_batch_began_at >= 0
        if self._strategy is not None and (
            (is_closing and self._strategy.has_partial_gradients(self.optimizer)) or self._waiting_backwards()
        ):
            return
        super().zero_grad(set_to_none)

    def train(self) -> None:
        """Call ``train`` of optimizers that have a training mode, and let the model have its weights."""
        self._switch_mode(super().train)

    def eval(self) -> None:
        """Call ``eval`` of optimizers that have an evaluation mode, and let the model have its weights."""
        self._switch_mode(super().eval)

    def _switch_mode(self, switch: Callable[[], None]) -> None:
        strategy: Any = self._strategy
        if strategy is None or not callable(getattr(self.optimizer, "eval", None)):
            switch()
        else:
            strategy.change_weights(self.optimizer, switch)

    def _waiting_backwards(self, models: Sequence[Any] | None = None) -> float:
        """Return how many backwards of ``models`` wait for a step, if no ``step`` was ever called."""
        if self._strategy is None or not self.gradient_state.sync_gradients:
            return 0
        return self._strategy.waiting_backwards(self.optimizer, models)

    def _omits_step(self, models: Sequence[Any] | None) -> bool:
        """Return whether a step is due, and the program has never called ``step``."""
        gradients = self.gradient_state
        return self._waiting_backwards(models) >= (1 if gradients.uses_accumulate else gradients.num_steps)

    def take_omitted_step(self, signal: str, models: Sequence[Any] | None = None) -> None:
        """Take the step of complete gradients for a program that leaves it to ``backward``, as 1.x takes it.

        A program that has ever called ``step`` decides by itself when to: it may accumulate by hand.
        """
        if self._omits_step(models):
            self.warn_of_omitted_step(f"it is taken now, at {signal}")
            super().step()
            # Nothing of the program comes between a backward and its step, which need not wait from now on.
            self.steps_in_backward = not self._strategy.has_read_norm(self.optimizer)

    def _take_step_before_use(self, use: str) -> None:
        # A micro-batch of accumulate() may have several forwards.
        if not (self.gradient_state.uses_accumulate and use == "the next forward"):
            self.take_omitted_step(use)

    def warn_of_omitted_step(self, consequence: str) -> None:
        """Warn once of complete gradients for which the program has never called ``step``."""
        if self._has_warned_of_steps or not self._omits_step(None):
            return
        self._has_warned_of_steps = True
        warn_user(
            f"the gradients of a backward are complete and optimizer.step() was never called: {consequence}. "
            "Accelerate 1.x takes DeepSpeed's step in accelerator.backward(loss), and here optimizer.step() "
            "takes it: call it under DeepSpeed too. Once it was called, no other call steps, and backwards "
            "add up until it; accelerator.accumulate(model) adds them up from the beginning"
        )

    @property
    def step_was_skipped(self) -> bool:
        """Return whether the last step was not taken because a gradient was not finite."""
        if self._strategy is not None:
            return self._strategy.skipped_step(self.optimizer)
        return bool(self.__has_overflow__ and self.optimizer.overflow)  # type: ignore[attr-defined]

    @property
    def skipped_steps(self) -> int:
        """Return how many steps were not taken so, as DeepSpeed counts them."""
        return 0 if self._strategy is None else self._strategy.skipped_steps(self.optimizer)


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """The wrapper of a scheduler that DeepSpeed advances in its step; ``step`` does nothing.

    Args:
        scheduler: DeepSpeed's.
        optimizers: the prepared optimizer that it is for.
    """

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    def step(self) -> None:  # type: ignore[override]
        """Do nothing: DeepSpeed advances the schedule in its step, which a program may omit."""
        self._take_omitted_steps()


class DeepSpeedEngineWrapper:
    """The wrapper of a DeepSpeed engine made by hand: backward, and the step when gradients are complete.

    An ``Accelerator`` shows it as ``deepspeed_engine_wrapped``, and does not use it: there the step is taken
    in ``optimizer.step()``. A program that assigns an object with another ``backward`` has that one called.

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
