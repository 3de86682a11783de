"""The arithmetic of ``reduce``: dtypes in which no sum over ranks overflows, means of integers, gradients."""

from __future__ import annotations

import torch

from accelerate.core.errors import PrepareError


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are combined: no sum over ranks overflows in it."""
    if dtype.is_complex:
        return torch.promote_types(dtype, torch.complex64)
    if dtype.is_floating_point:
        return dtype if dtype.itemsize >= 4 else torch.float32
    return torch.int64


def total_dtype(dtype: torch.dtype, reduction: str) -> torch.dtype:
    """Return the dtype of a total that all ranks read alike, whatever default dtype each has."""
    return torch.float64 if reduction == "mean" and dtype == torch.int64 else accumulation_dtype(dtype)


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
