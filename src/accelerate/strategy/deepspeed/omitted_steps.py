"""Steps that a program leaves to ``backward``, as under Accelerate 1.x: noticed before weights are used."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn


class OmittedStepWatch:
    """Offers the step of complete gradients to its owner, before the next forward, save or load of DeepSpeed.

    Args:
        engine: the ``DeepSpeedEngine``.
        is_frozen: returns whether parameters that train are frozen now.

    Attributes:
        owner: a weak reference to the function that takes a step which is left out; its argument names the
            call that shows it.
        backwards: the number of complete backwards since gradients were used or cleared.
        ends_window: one of them came after a backward that the program had declared incomplete.
        has_read_norm: the program has asked for the norm of gradients, after a backward: it may clip them.
        is_over: the program has called ``optimizer.step()``, and leaves no step out.
    """

    def __init__(self, engine: Any, is_frozen: Callable[[], bool]) -> None:
        self.module: nn.Module = engine.module
        self.owner: Callable[[], Callable[[str], None] | None] = lambda: None
        self.backwards, self.ends_window = 0, False
        self.has_read_norm, self.is_over = False, False
        self._is_frozen, self._hook = is_frozen, None
        # A load would otherwise be followed by a step with gradients of the weights before it.
        for name in ("save_checkpoint", "save_16bit_model", "load_checkpoint"):
            setattr(engine, name, self._offer_before(getattr(engine, name)))

    def note_complete_backward(self, *, ends_window: bool) -> None:
        """Count a complete backward, and watch for a forward.

        Not during a backward, in which a checkpointed forward runs again.
        """
        self.backwards += 1
        self.ends_window |= ends_window
        if self.is_over:
            return

        def before_forward(module: nn.Module, _: Any) -> None:
            # The reference model may be the trained one, whose adapters are off, and frozen, for so long.
            is_reference = not torch.is_grad_enabled() and self._is_frozen()
            if module is not self.module or is_reference:  # a copy of the module has the hook too
                return
            self.pause()
            with torch.inference_mode(False):  # the optimizer state that is made in it could not be changed
                self._offer("the next forward")

        # Before the hook by which stage 3 all-gathers.
        self._hook = self.module.register_forward_pre_hook(before_forward, prepend=True)

    def pause(self) -> None:
        """Watch no forward until the next complete backward."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def reset(self) -> None:
        """Forget the backwards, whose gradients were used or cleared."""
        self.pause()
        self.backwards, self.ends_window = 0, False

    def _offer(self, signal: str) -> None:
        if (take_step := self.owner()) is not None:
            take_step(signal)

    def _offer_before(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call_after_step(*args: Any, **kwargs: Any) -> Any:
            self._offer(f"{method.__name__}()")
            return method(*args, **kwargs)

        return call_after_step
