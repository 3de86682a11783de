"""All-reduced means of many tensors, in few collectives."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch

from accelerate.world import collective
from accelerate.world import world as worlds

logger = logging.getLogger(__name__)

# The most bytes of one all-reduce, so that its flat buffer stays small.
BUCKET_BYTES = 256 * 2**20
_HALVES = (torch.float16, torch.bfloat16)


def iterate_means(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each tensor with its mean over the ranks; the tensors themselves are not changed.

    A mean has the tensor's shape and dtype; for 16-bit floats it is float32, since a sum of 16-bit weights
    loses the progress of a few steps. Integers and booleans have no mean: they get rank 0's value. A
    collective call: all ranks pass tensors of the same shapes and dtypes, in the same order.

    Args:
        tensors: tensors of any shapes, dtypes and devices.
    """
    for bucket in _split_into_buckets(tensors):
        wire = torch.float32 if bucket[0].dtype in _HALVES else bucket[0].dtype
        flat = torch.cat([tensor.detach().reshape(-1).to(_wire_device(tensor), wire) for tensor in bucket])
        has_mean = wire.is_floating_point or wire.is_complex
        flat = collective.reduce(flat, "mean") if has_mean else collective.broadcast(flat)
        parts = flat.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            yield tensor, part.view(tensor.shape).to(tensor.device)


@torch.no_grad()
def average_in_place(tensors: Iterable[torch.Tensor]) -> None:
    """Replace tensors, in place, by their means over the ranks (see ``iterate_means``)."""
    for tensor, mean in iterate_means(tensors):
        tensor.copy_(mean)


def _wire_device(tensor: torch.Tensor) -> torch.device:
    """Return the device of the collective: a process group of devices may not support CPU tensors."""
    world = worlds.current()
    return tensor.device if world is None or world.size == 1 else world.device


def _split_into_buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield buckets of tensors of one dtype; the order depends on shapes and dtypes alone."""
    nonempty = [tensor for tensor in tensors if tensor.numel()]
    for _, same in groupby(sorted(nonempty, key=lambda each: str(each.dtype)), key=lambda each: each.dtype):
        bucket: list[torch.Tensor] = []
        size = 0
        for tensor in same:
            if bucket and size + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


def sync_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Make optimizer state (moments, counters) equal on all ranks: averaged, its options from rank 0.

    Copies of a model that step with different moments drift apart even when their gradients are equal. State
    that only some ranks have, because a parameter had no gradient on the others, is dropped on all.
    """
    options = [
        {key: value for key, value in group.items() if _is_option(key, value)} for group in _groups(optimizer)
    ]
    for group, values in zip(_groups(optimizer), collective.broadcast_object(options), strict=True):
        group.update(values)
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: Mapping[torch.Tensor, dict[str, Any]] = optimizer.state
    local_shapes = [_describe_state(state.get(parameter, {})) for parameter in owned]
    shapes_by_rank: list[list[Any]] = collective.all_gather_object(local_shapes)
    same = [all(shape == shapes[0] for shape in shapes) for shapes in zip(*shapes_by_rank, strict=True)]
    for parameter, is_same in zip(owned, same, strict=True):
        if not is_same:
            optimizer.state.pop(parameter, None)
    num_dropped = same.count(False)
    if num_dropped and collective.rank() == 0:
        logger.warning(
            "the optimizer's state of %d parameters differs in kind between ranks: dropped", num_dropped
        )
    tables = [state[parameter] for parameter in owned if parameter in state]
    average_in_place(value for table in tables for _, value in sorted(table.items()) if _is_tensor(value))
    plain = [{key: value for key, value in table.items() if not _is_tensor(value)} for table in tables]
    if any(plain):
        for table, values in zip(tables, collective.broadcast_object(plain), strict=True):
            table.update(values)


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return optimizer.param_groups


def _is_option(key: str, value: Any) -> bool:
    """Return True for learning rates and the like: a step skipped on one rank delays its schedule there."""
    return key != "params" and not _is_tensor(value)


def _describe_state(state: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (key, tuple(value.shape), str(value.dtype)) if _is_tensor(value) else (key,)
        for key, value in sorted(state.items())
    ]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
