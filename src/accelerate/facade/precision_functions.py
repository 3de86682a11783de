"""Functions of 1.x for mixed precision by hand: the autocast context and the gradient scaler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accelerate import device as devices
from accelerate.core.errors import FeatureNotBuiltError
from accelerate.facade.enums import DistributedType
from accelerate.facade.state import AcceleratorState
from accelerate.precision import PRECISIONS
from accelerate.precision.autocast import AutocastKwargs
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
