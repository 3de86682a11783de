"""Means over ranks of many tensors, in few collectives."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch

from accelerate.world import collective
from accelerate.world import world as worlds

logger = logging.getLogger(__name__)

# One collective carries at most this much, so that the copy it is made of stays small.
BUCKET_BYTES = 256 * 2**20
_HALVES = (torch.float16, torch.bfloat16)


def means(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor with its mean over the ranks; the tensors themselves are not changed.

    A mean has the tensor's shape and type; that of a 16-bit float is float32, since a sum of 16-bit weights
    loses what a few steps have learned. Integers and truths have no mean: theirs is rank 0's value. A
    collective call: all ranks pass tensors of the same shapes and types, in the same order.

    Args:
        tensors: of any shapes, types and devices.
    """
    for bucket in _buckets(tensors):
        wire = torch.float32 if bucket[0].dtype in _HALVES else bucket[0].dtype
        flat = torch.cat([tensor.detach().reshape(-1).to(_device(tensor), wire) for tensor in bucket])
        averaged = wire.is_floating_point or wire.is_complex
        flat = collective.reduce(flat, "mean") if averaged else collective.broadcast(flat)
        parts = flat.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            yield tensor, part.view(tensor.shape).to(tensor.device)


@torch.no_grad()
def average(tensors: Iterable[torch.Tensor]) -> None:
    """Replaces tensors, in place, by their means over the ranks (see ``means``)."""
    for tensor, mean in means(tensors):
        tensor.copy_(mean)


def _device(tensor: torch.Tensor) -> torch.device:
    """Where it travels: a group of devices need not carry tensors of the host."""
    world = worlds.current()
    return tensor.device if world is None or world.size == 1 else world.device


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one type, as many as fit into a bucket; the order depends on shapes and types alone."""
    every = [tensor for tensor in tensors if tensor.numel()]
    for _, same in groupby(sorted(every, key=lambda each: str(each.dtype)), key=lambda each: each.dtype):
        bucket: list[torch.Tensor] = []
        size = 0
        for tensor in same:
            if bucket and size + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


def settle(optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer's state (moments, counters) the same on all ranks: averaged, its options rank 0's.

    Copies of a model that step with different moments drift apart even when their gradients are equal. What
    only some ranks have, because a parameter had no gradient on the others, begins anew on all.
    """
    options = [
        {key: value for key, value in group.items() if _is_option(key, value)} for group in _groups(optimizer)
    ]
    for group, values in zip(_groups(optimizer), collective.agree(options), strict=True):
        group.update(values)
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: Mapping[torch.Tensor, dict[str, Any]] = optimizer.state
    mine = [_shape_of(state.get(parameter, {})) for parameter in owned]
    every: list[list[Any]] = collective.all_objects(mine)
    same = [all(shape == shapes[0] for shape in shapes) for shapes in zip(*every, strict=True)]
    for parameter, agreed in zip(owned, same, strict=True):
        if not agreed:
            optimizer.state.pop(parameter, None)
    lost = same.count(False)
    if lost and collective.rank() == 0:
        logger.warning("the optimizer's state of %d parameters differs in kind between ranks: dropped", lost)
    tables = [state[parameter] for parameter in owned if parameter in state]
    average(value for table in tables for _, value in sorted(table.items()) if _is_tensor(value))
    plain = [{key: value for key, value in table.items() if not _is_tensor(value)} for table in tables]
    if any(plain):
        for table, values in zip(tables, collective.agree(plain), strict=True):
            table.update(values)


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return optimizer.param_groups


def _is_option(key: str, value: Any) -> bool:
    """Learning rates and the like: steps that only one rank skipped have set a schedule back there."""
    return key != "params" and not _is_tensor(value)


def _shape_of(state: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (key, tuple(value.shape), str(value.dtype)) if _is_tensor(value) else (key,)
        for key, value in sorted(state.items())
    ]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
