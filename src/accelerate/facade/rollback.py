"""What an ``Accelerator`` puts back when an attempt with too large a batch has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_LISTS = ("_models", "_optimizers", "_schedulers", "_dataloaders")


def remember(accelerator: Any) -> Callable[[], None]:
    """A function that gives ``accelerator`` back what it has prepared and counted now."""
    lists = {name: list(getattr(accelerator, name)) for name in _LISTS}
    gradients, trigger = accelerator.gradient_state, accelerator._trigger
    counted = gradients.step, gradients.sync_gradients

    def put_back() -> None:
        for name, items in lists.items():
            setattr(accelerator, name, list(items))
        gradients.step, gradients.sync_gradients = counted
        accelerator._trigger = trigger

    return put_back
