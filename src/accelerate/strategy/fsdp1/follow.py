"""Optimizers follow the parameters that wrapping replaces, with what they keep for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from accelerate.core.errors import PrepareError
from accelerate.strategy.fsdp1.record import Record
from accelerate.strategy.fsdp1.states import Book, Order


def check_groups(optimizer: Optimizer, parts: Iterable[Sequence[torch.Tensor]]) -> None:
    """Refuses groups that flat parameters would lie in only partly.

    Args:
        optimizer: of the user's parameters.
        parts: the parameters of each flat one.

    Raises:
        PrepareError: there is one.
    """
    group = {p: number for number, g in enumerate(optimizer.param_groups) for p in g["params"]}
    for own in parts:
        if len({group.get(p) for p in own}) > 1:
            raise PrepareError(
                f"the {type(optimizer).__name__} has the parameters of one sharded part in several groups, "
                "or only some of them",
                why="with use_orig_params=False the parameters of a part are one parameter",
                fix="use_orig_params=True (FSDP_USE_ORIG_PARAMS=true)",
            )


def catch_up(
    optimizer: Optimizer,
    renewed: Mapping[Any, tuple[Any, Any]],
    records: Sequence[Record],
    orders: MutableMapping[Any, Order],
    *,
    sync: bool,
) -> None:
    """Makes an optimizer hold what took the places of its parameters, and its part of what it kept for them.

    Args:
        optimizer: the user's own.
        renewed: (new parameter, stand-in or None) by the old ones.
        records: of the wrapped models.
        orders: keeps the user's order, where flat parameters took the places.
        sync: its state becomes that of rank 0.
    """
    state = optimizer.state_dict() if _stale(optimizer, renewed, records) else None
    _switch(optimizer, renewed, orders)
    if state is None:
        return
    for values in state["state"].values() if sync else ():
        for value in values.values():
            if isinstance(value, torch.Tensor) and value.dim():
                dist.broadcast(value, src=0)
    Book(optimizer, records, orders.get(optimizer, ())).load(state)


def _stale(optimizer: Optimizer, renewed: Mapping[Any, tuple[Any, Any]], records: Sequence[Record]) -> bool:
    """Whether it keeps something for parameters as they were before."""
    for held, values in optimizer.state.items():
        if held in renewed:
            return True
        record = next((r for r in records if held in r.slot), None)
        if record is None:
            continue
        slot = record.slot[held]
        tensors = [v for v in values.values() if isinstance(v, torch.Tensor)]
        if any(v.shape == slot.shape and v.shape != held.shape for v in tensors):
            return True
    return False


def _switch(
    optimizer: Optimizer, renewed: Mapping[Any, tuple[Any, Any]], orders: MutableMapping[Any, Order]
) -> None:
    before = orders.get(optimizer) or [[(p, None) for p in g["params"]] for g in optimizer.param_groups]
    after = [
        [
            renewed[held] if held in renewed and stand_in is None else (held, stand_in)
            for held, stand_in in group
        ]
        for group in before
    ]
    for held, _ in (pair for group in before for pair in group):
        if held in renewed:
            optimizer.state.pop(held, None)
    for group, pairs in zip(optimizer.param_groups, after, strict=False):
        if any(held in renewed for held in group["params"]):
            group["params"] = list(dict.fromkeys(held for held, _ in pairs))
    if any(stand_in is not None for group in after for _, stand_in in group):
        orders[optimizer] = after
