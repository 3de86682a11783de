"""Gradients of weights that several stages hold: tied ones, and those outside the blocks.

Each stage computes its part of such a gradient; the sum is the gradient. It is taken of what one backward has
added, so that it does not matter how many there are before a step. All holders add in the same order: their
weights stay equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate.strategy.parallelism.pipeline.stage import wait_all
from accelerate.strategy.sharding.grads import (
    fsdp_params,
    local_grad,
    mixed_precision_dtypes,
    partial_backward,
    reduces_gradients,
    unsharded_param,
)

__all__ = [
    "StageSharedParam",
    "mixed_precision_dtypes",
    "partial_backward",
    "reduces_gradients",
    "sum_shared_grads",
    "trainable_params",
]


@dataclass
class StageSharedParam:
    """A parameter that several stages hold.

    Attributes:
        name: its first name in the user's model.
        holders: the places in the pipeline that have it.
        module, label: where it is here; None where it is not.
    """

    name: str
    holders: tuple[int, ...]
    module: nn.Module | None
    label: str

    def optimizer_param(self, model: nn.Module) -> torch.Tensor | None:
        """Return it as optimizers hold it; None where this process does not hold it, or it does not train."""
        if self.module is None:
            return None
        now: Any = self.module._parameters[self.label]
        whole = {unsharded_param(place): p for p, place in fsdp_params([model]).items()}
        param = whole.get(now, now)
        return param if param is not None and param.requires_grad else None


def trainable_params(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters that train, as optimizers hold them."""
    whole = {unsharded_param(place): p for p, place in fsdp_params([model]).items()}
    return [p for p in dict.fromkeys(whole.get(p, p) for p in model.parameters()) if p.requires_grad]


@contextmanager
def sum_shared_grads(
    model: nn.Module, shared: Sequence[StageSharedParam], group: Any, *, sync: bool
) -> Iterator[None]:
    """Sum the gradients that a backward adds to shared parameters over their holders; a context.

    Args:
        sync: False while gradients are kept back elsewhere: there is nothing to be summed yet.
    """
    pairs = [
        (shared_param, p) for shared_param in shared if (p := shared_param.optimizer_param(model)) is not None
    ]
    before = [p.grad for _, p in pairs]
    for _, p in pairs:
        p.grad = None
    yield
    for (shared_param, p), old in zip(pairs, before, strict=True):
        new = p.grad
        if sync:
            if new is None:
                new = torch.zeros_like(p)
            with torch.no_grad():
                _sum_over_holders(local_grad(new), shared_param.holders, group)
        p.grad = old if new is None else new if old is None else old.add_(new)


def _sum_over_holders(mine: torch.Tensor, holders: Sequence[int], group: Any) -> None:
    """Sum a tensor over the holders, in place."""
    rank = dist.get_rank(group)
    parts = {place: mine.clone(memory_format=torch.contiguous_format) for place in holders}
    works = [
        dist.isend(parts[rank], dist.get_global_rank(group, place), group)
        for place in holders
        if place != rank
    ]
    works += [
        dist.irecv(parts[place], dist.get_global_rank(group, place), group)
        for place in holders
        if place != rank
    ]
    wait_all([work for work in works if work is not None])
    total = parts[holders[0]].clone()
    for place in holders[1:]:
        total += parts[place]
    mine.copy_(total)
