"""The rollback of an ``Accelerator`` after a batch size that did not fit into memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_PREPARED_LISTS = ("_models", "_optimizers", "_schedulers", "_dataloaders")


def capture_rollback(accelerator: Any) -> Callable[[], None]:
    """Return a function that restores the present prepared objects and counters of ``accelerator``."""
    lists = {name: list(getattr(accelerator, name)) for name in _PREPARED_LISTS}
    gradients, trigger = accelerator.gradient_state, accelerator._trigger
    counted = gradients.step, gradients.sync_gradients

    def restore() -> None:
        for name, items in lists.items():
            setattr(accelerator, name, list(items))
        gradients.step, gradients.sync_gradients = counted
        accelerator._trigger = trigger

    return restore
