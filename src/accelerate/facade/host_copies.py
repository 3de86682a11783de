"""Optimizers that step copies of the parameters on the host: CPUOffloadOptimizer of torchao."""

from __future__ import annotations

from typing import Any

import torch

from accelerate.core.errors import PrepareError
from accelerate.precision.base import Precision
from accelerate.strategy.base import Strategy

# The attribute of such an optimizer that has the copies, by parameter.
HOST_COPIES = "param_d2h_map"


def refresh_host_copies(
    optimizer: Any, versions: dict[torch.Tensor, tuple[int, int]], averages: bool
) -> None:
    """Copy to the host what changed since the optimizer did so.

    Gradients are reduced, clipped or weighted after the backward, and weights are loaded, and broadcast
    by ``prepare``, after the optimizer is made.

    Args:
        optimizer: the user's.
        versions: the address and version of each parameter when it was copied last; empty before.
        averages: several processes average the gradients.

    Raises:
        PrepareError: gradients left the device before they could be averaged: zeros were, in their place.
    """
    copies: dict[torch.Tensor, Any] = getattr(optimizer, HOST_COPIES)
    for event in getattr(optimizer, "queue", {}).values():
        event.synchronize()  # an earlier copy into the same memory
    if (
        averages
        and not versions
        and any(
            copy.grad.count_nonzero() and (p.grad is None or not p.grad.count_nonzero())
            for p, copy in copies.items()
        )
    ):
        raise PrepareError(
            f"{type(optimizer).__name__} with offload_gradients=True on several processes",
            why="each gradient leaves the device before the processes average it",
            fix="leave offload_gradients out",
        )
    with torch.no_grad():
        for p, copy in copies.items():
            if p.grad is not None:
                copy.grad.copy_(p.grad)
            if versions.get(p) != (p.data_ptr(), p._version):
                copy.copy_(p)


def check_host_copies(optimizer: Any, strategy: Strategy, precision: Precision) -> None:
    """Refuse an optimizer that has ``HOST_COPIES`` where the gradients do not reach these.

    Raises:
        PrepareError: parameters are sharded, or losses are scaled.
    """
    name = type(optimizer).__name__
    if strategy.shards_params:
        raise PrepareError(
            f"{name} does not go with {strategy.name}",
            why="it copies gradients when autograd sets them, and those of shards are set afterwards",
            fix="use a plain optimizer and offload the shards: --fsdp_offload_params true",
        )
    if precision.scales_loss:
        raise PrepareError(
            f"{name} does not go with mixed_precision={precision.name!r}",
            why="it copies gradients while they are multiplied by the loss scale",
            fix="use mixed_precision='bf16'",
        )
