"""The steps of ``reduce``: dtypes in which no sum over ranks overflows, means of integers, gradients."""

# torch's signatures are partly untyped: what is unknown here is torch's.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from accelerate.core.errors import PrepareError
from accelerate.world.control_channel import ControlChannel, GatheredControlMessages, align
from accelerate.world.packed_tree import PackedTree


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are combined: no sum over ranks overflows in it."""
    if dtype.is_complex:
        return torch.promote_types(dtype, torch.complex64)
    if dtype.is_floating_point:
        return dtype if dtype.itemsize >= 4 else torch.float32
    return torch.int64


def reduce_stacked(stacked: torch.Tensor, reduction: str) -> torch.Tensor:
    """Combine the values of all ranks, in rank order: the same bits on all ranks and in every run."""
    dtype = accumulation_dtype(stacked.dtype)
    if reduction in ("sum", "mean"):
        if reduction == "mean" and stacked.dtype == torch.int64:
            return rejoin_total(split_by_world_size(stacked, len(stacked)).sum(1), len(stacked))
        return stacked.to(dtype).sum(0, dtype=dtype)
    stacked = stacked.to(dtype)
    return stacked.amax(0) if reduction == "max" else stacked.amin(0)


def split_by_world_size(values: torch.Tensor, world_size: int) -> torch.Tensor:
    """Stack quotients and remainders of int64 values: their sums over ranks do not overflow."""
    quotients = values.div(world_size, rounding_mode="trunc")
    return torch.stack((quotients, values - quotients * world_size))


def rejoin_total(sums: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return the total of int64 values as a float, from the sums of their quotients and remainders."""
    quotient, remainder = sums
    # Not all devices have float64.
    dtype = torch.float64 if sums.device.type == "cpu" else torch.get_default_dtype()
    return quotient.to(dtype) * world_size + remainder


def check_order(leaf: torch.Tensor, reduction: str) -> None:
    """Refuse a maximum or minimum of complex numbers.

    Raises:
        PrepareError: it is one.
    """
    if reduction in ("max", "min") and leaf.is_complex():
        raise PrepareError(
            f"a tensor of {leaf.dtype} cannot go through reduce({reduction})",
            why="complex numbers have no order",
            fix="reduce their absolute values, or torch.view_as_real(tensor)",
        )


def finish_reduction(
    total: torch.Tensor, leaf: torch.Tensor, reduction: str, scale: float, world_size: int
) -> torch.Tensor:
    """Divide for a mean, scale, return to the dtype of the result, and keep the graph of the leaf."""
    combined = total
    if reduction == "mean":
        total = total / world_size
    total = scale_tensor(total, scale)
    is_exact = not (leaf.is_floating_point() or leaf.is_complex())
    if is_exact and reduction == "mean":
        return total.to(torch.get_default_dtype())
    if is_exact and (reduction == "sum" or scale != 1.0):
        return total
    total = total.to(leaf.dtype)
    if not (leaf.requires_grad and torch.is_grad_enabled()):
        return total
    slope = scale / world_size if reduction == "mean" else scale
    if reduction in ("max", "min"):
        slope = slope * (combined == leaf)
    differentiable = leaf * slope
    differentiable.detach().copy_(total)
    return differentiable


def scale_tensor(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the tensor times ``scale``."""
    if scale == 1.0:
        return tensor
    if tensor.is_floating_point() and tensor.itemsize == 1:  # torch does not multiply 8-bit floats
        return (tensor.float() * scale).to(tensor.dtype)
    return tensor * scale


# --- values of all ranks


def reduce_leaves(
    packed: PackedTree, messages: GatheredControlMessages | None, reduction: str
) -> list[torch.Tensor]:
    """Combine the values of all ranks, which agree; without messages they do so on the device."""
    for leaf in packed.leaves:
        check_order(leaf, reduction)
    if messages is None or not messages.inline:
        return [_reduce_large(packed.channel, leaf, reduction) for leaf in packed.leaves]
    if not messages.same:  # scalars of other dtypes, whose leaves are promoted
        by_rank = [packed.rank_values(messages, rank) for rank in range(packed.channel.size)]
        return [
            reduce_stacked(torch.stack([value.to(leaf.dtype) for value in values]), reduction)
            for leaf, *values in zip(packed.leaves, *by_rank, strict=True)
        ]
    if not messages.is_merged:
        return [reduce_stacked(values, reduction) for values in packed.stacked_values(messages)]
    totals, start = list[torch.Tensor](), 0
    for leaf in packed.leaves:
        # All ranks read it alike, whatever default dtype each has.
        is_float = reduction == "mean" and leaf.dtype == torch.int64
        dtype = torch.float64 if is_float else accumulation_dtype(leaf.dtype)
        total = torch.empty(leaf.shape, dtype=dtype, device="cpu")
        totals.append(_view_total(messages.buffer, start, total))
        start += align(total.nbytes)
    return totals


def merge_values(packed: PackedTree, reduction: str, messages: GatheredControlMessages) -> bytearray:
    """Combine the values of all ranks for all of them; nothing where they have no order."""
    if reduction in ("max", "min") and any(leaf.is_complex() for leaf in packed.leaves):
        return bytearray()
    totals = [reduce_stacked(values, reduction) for values in packed.stacked_values(messages)]
    merged, start = bytearray(sum(align(total.nbytes) for total in totals)), 0
    for total in totals:
        _view_total(merged, start, total).copy_(total)
        start += align(total.nbytes)
    return merged


def _view_total(buffer: bytearray, start: int, like: torch.Tensor) -> torch.Tensor:
    if not like.numel():
        return like
    return torch.frombuffer(buffer, dtype=like.dtype, count=like.numel(), offset=start).view(like.shape)


def _reduce_large(channel: ControlChannel, leaf: torch.Tensor, reduction: str) -> torch.Tensor:
    total = leaf.to(accumulation_dtype(leaf.dtype), memory_format=torch.contiguous_format, copy=True)
    if reduction == "mean" and leaf.dtype == torch.int64:
        sums = split_by_world_size(total, channel.size)
        _all_reduce(sums, channel, dist.ReduceOp.SUM)
        return rejoin_total(sums, channel.size)
    if reduction in ("sum", "mean"):
        _all_reduce(total, channel, dist.ReduceOp.SUM)
        return total
    is_nan = total.isnan().to(torch.uint8)  # back ends differ in what a maximum with NaN is
    _all_reduce(total, channel, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.MIN)
    if total.is_floating_point():
        _all_reduce(is_nan, channel, dist.ReduceOp.MAX)
        total.masked_fill_(is_nan.bool(), torch.nan)
    return total


def _all_reduce(tensor: torch.Tensor, channel: ControlChannel, op: Any) -> None:
    """All-reduce a contiguous tensor in place."""
    if tensor.device.type != "cpu":
        dist.all_reduce(tensor, op)
    elif tensor.numel():
        channel.all_reduce(torch.view_as_real(tensor) if tensor.is_complex() else tensor, op, "reduce")
