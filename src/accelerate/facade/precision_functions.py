"""Mixed precision by hand: the autocast context, and the gradient scaler that a user makes and assigns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accelerate import device as devices
from accelerate.core.errors import FeatureNotBuiltError, PrepareError
from accelerate.facade.enums import DistributedType
from accelerate.facade.state import AcceleratorState
from accelerate.precision import PRECISIONS
from accelerate.precision.autocast import AutocastKwargs, autocast
from accelerate.precision.fp16 import LossScaling
from accelerate.strategy.base import Strategy
from accelerate.world import world as worlds


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return the context of a forward pass in the newest ``Accelerator``'s precision.

    Args:
        native_amp: False gives a context that does nothing.
        autocast_kwargs: options of ``torch.autocast``.

    Raises:
        ValueError: there is no ``Accelerator`` or ``AcceleratorState`` yet.
    """
    state = AcceleratorState()
    if not native_amp:
        return nullcontext()
    hardware = devices.get(state.device.type)
    if state.mixed_precision == "no" and autocast_kwargs is not None:
        return autocast(hardware, None, autocast_kwargs)
    return PRECISIONS.get(state.mixed_precision)(hardware).forward_context(autocast_kwargs)


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a gradient scaler for this process's device.

    Args:
        distributed_type: how the model is trained; None for one process or data parallelism.
        kwargs: arguments of ``torch.amp.GradScaler``.

    Raises:
        FeatureNotBuiltError: ``distributed_type`` shards gradients.
    """
    replicated = {DistributedType.NO, *(device.distributed_type for device in devices.DEVICES)}
    if distributed_type is not None and distributed_type not in replicated:
        raise FeatureNotBuiltError(
            f"a gradient scaler for {DistributedType(distributed_type).value} is not built yet",
            why="it has to agree on overflows over shards, and comes with the strategy",
        )
    world = worlds.current()
    return torch.amp.GradScaler((world.hardware if world else devices.detect()).type, **kwargs)


def make_loss_scaling(
    scaler: torch.amp.GradScaler | None, strategy: Strategy, updates_at_once: Callable[[], bool]
) -> LossScaling | None:
    """Return the loss scaling by a scaler that the user assigned to an ``Accelerator``; None for None.

    Args:
        scaler: the scaler.
        strategy: the one that runs backward.
        updates_at_once: tells whether the scale is updated after each step of an optimizer.

    Raises:
        PrepareError: it is no ``torch.amp.GradScaler``, or losses are scaled elsewhere.
    """
    if scaler is None:
        return None
    if not isinstance(scaler, torch.amp.GradScaler):
        raise PrepareError(
            f"accelerator.scaler = {type(scaler).__name__}: it is no gradient scaler",
            why="steps and checkpoints need the methods of torch's",
            fix="assign a torch.amp.GradScaler, an object of a class derived from it, or None",
        )
    if strategy.owns_step and scaler.is_enabled():
        raise PrepareError(
            f"accelerator.scaler = {type(scaler).__name__} under {strategy.name}",
            why=f"{strategy.name} scales losses and steps by itself, so that this scaler would never be used",
            fix="use its own options for loss scaling",
        )
    scaling = LossScaling(scaler, updates_at_once)
    scaling.set_overflow_sync(strategy.flag_reduction())
    return scaling
