"""Gradients of sharded parameters: what is kept back while accumulating, norms, clipping, zero backwards.

Between the micro-batches of a window torch keeps whole gradients at its own whole parameters, out of sight of
``parameter.grad``. It has no public name for them, so this file looks at the state of its modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from accelerate.strategy.sharding.whole import is_cut


def groups(model: nn.Module) -> Iterator[Any]:
    """Torch's groups of parameters that travel together."""
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            found = getattr(state, "_fsdp_param_groups", None)
            for group in [state._fsdp_param_group] if found is None else found:
                if group is not None and id(group) not in seen:
                    seen.add(id(group))
                    yield group


def reduces(model: nn.Module) -> bool:
    """Whether a backward through ``model`` now reduces gradients."""
    return all(group.reduce_grads for group in groups(model))


def number_formats(model: Any) -> tuple[torch.dtype | None, bool, torch.dtype | None]:
    """In which type whole parameters are gathered, whether inputs are cast to it, and the type of outputs."""
    if not isinstance(model, FSDPModule):
        return None, False, None
    policy = model._get_fsdp_state()._mp_policy
    return policy.param_dtype, policy.cast_forward_inputs, policy.output_dtype


@contextmanager
def backward_of_a_part(model: Any, *, last: bool, sync: bool) -> Iterator[None]:
    """Around one of several backwards that belong together: gradients are reduced in the last one.

    Args:
        model: sharded, or not.
        sync: whether they are reduced at all.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    model.set_requires_gradient_sync(sync and last)
    model.set_is_last_backward(last)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(sync)
        model.set_is_last_backward(True)


def places(models: Iterable[nn.Module]) -> dict[torch.Tensor, Any]:
    """Torch's record of each sharded parameter, by the parameter."""
    return {p.sharded_param: p for m in models for group in groups(m) for p in group.fsdp_params}


def leaf(place: Any) -> torch.Tensor | None:
    """The whole parameter that graphs reach; None before the first forward."""
    return getattr(place, "_unsharded_param", None)


def kept_back(place: Any) -> torch.Tensor | None:
    """The whole gradient that has not been reduced yet."""
    if place.unsharded_accumulated_grad is not None:
        return place.unsharded_accumulated_grad
    whole = leaf(place)
    return None if whole is None else whole.grad


def drop(place: Any) -> None:
    """Forgets what is kept back."""
    place.unsharded_accumulated_grad = None
    whole = leaf(place)
    if whole is not None:
        whole.grad = None


def unreduced(models: Iterable[nn.Module]) -> int:
    """Bytes of whole gradients on this process, which wait for the last micro-batch of a window."""
    total = 0
    for group in (group for model in models for group in groups(model)):
        for place in group.fsdp_params:
            own = place.sharded_param
            if own.requires_grad:
                dtype = group.mp_policy.reduce_dtype or group.mp_policy.param_dtype or own.dtype
                total += place._orig_size.numel() * dtype.itemsize
    return total


@torch.no_grad()
def local(gradient: Any) -> torch.Tensor:
    """The part of a gradient that is here; changing it changes the gradient."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def zero_backward(models: Iterable[nn.Module], loss: torch.Tensor) -> None:
    """Runs the backward of ``loss`` with every gradient zero, whatever the loss is.

    Every gather and reduction takes place, in the order of the other processes. The loss itself may be NaN, a
    mean of nothing: what reaches a parameter is replaced there.
    """
    handles = [
        whole.register_hook(torch.zeros_like)
        for place in places(models).values()
        if (whole := leaf(place)) is not None and whole.requires_grad
    ]
    try:
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def clip_norm(
    parameters: Iterable[torch.Tensor],
    limit: float,
    p: float,
    device: torch.device,
    stages: Sequence[Any] = (),
    elsewhere: Iterable[torch.Tensor] = (),
) -> torch.Tensor:
    """Scales gradients so that their global norm is at most ``limit``; the norm before, equal on all ranks.

    Every element counts once, however many processes have it.

    Args:
        parameters: sharded or not; those that are not count once.
        limit: the greatest norm.
        p: of the p-norm; ``inf`` takes the greatest value.
        device: where processes exchange values.
        stages: groups of processes that have other parameters, whose gradients count too.
        elsewhere: parameters that count on another process of such a group, which has them too.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads and not stages:
        return torch.zeros((), device=device)
    alike: dict[Any, list[torch.Tensor]] = {}
    others = {id(parameter.grad) for parameter in elsewhere}
    for grad in map(_summed, (grad for grad in grads if id(grad) not in others)):
        alike.setdefault(_cut_over(grad), []).append(local(grad))
    powers = [_power(over, found, float(p), device) for over, found in alike.items()]
    total = torch.stack(powers or [torch.zeros((), device=device)])
    total = total.max() if p == float("inf") else total.sum()
    for group in stages:
        dist.all_reduce(total, _operation(p), group=group)
    norm = total if p == float("inf") else total ** (1.0 / p)
    # As torch does it: 1e-6 keeps the division defined.
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for found in _alike(map(local, grads)):
        torch._foreach_mul_(found, scale.to(found[0].device))  # pyright: ignore[reportPrivateImportUsage]
    return norm


def _summed(gradient: Any) -> Any:
    """A gradient of which each process has a summand, as one that all have; others as they are."""
    if not isinstance(gradient, DTensor) or not any(p.is_partial() for p in gradient.placements):
        return gradient
    return gradient.redistribute(
        placements=[Replicate() if p.is_partial() else p for p in gradient.placements]
    )


def _cut_over(gradient: Any) -> tuple[Any, ...]:
    """The mesh of a gradient and those of its dimensions that cut it; along the others all have the same."""
    if not isinstance(gradient, DTensor):
        return ()
    return gradient.device_mesh, *(axis for axis, p in enumerate(gradient.placements) if is_cut(p))


def _power(over: tuple[Any, ...], parts: Sequence[torch.Tensor], p: float, device: torch.device) -> Any:
    """The sum of p-th powers (the maximum for ``inf``) of gradients that are cut ``over`` dimensions."""
    norms = [torch.linalg.vector_norm(part, p, dtype=_width(part)) for part in parts if part.numel()]
    mine = (
        torch.stack([n.to(device, torch.float32) for n in norms]) if norms else torch.zeros(1, device=device)
    )
    value = mine.max() if p == float("inf") else (mine**p).sum()
    for axis in over[1:]:
        dist.all_reduce(value, _operation(p), group=over[0].get_group(axis))
    return value


def _width(part: torch.Tensor) -> torch.dtype:
    return torch.promote_types(part.dtype, torch.float32)


def _operation(p: float) -> Any:
    return dist.ReduceOp.MAX if p == float("inf") else dist.ReduceOp.SUM


def _alike(parts: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one device and type together."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for part in parts:
        if part.numel():
            kinds.setdefault((part.device, part.dtype), []).append(part)
    yield from kinds.values()


@torch.no_grad()
def clip_value(parameters: Iterable[torch.Tensor], limit: float) -> None:
    """Clamps every gradient element to ``[-limit, limit]``."""
    for parameter in parameters:
        if parameter.grad is not None:
            # The sum is clamped, not its summands.
            parameter.grad = _summed(parameter.grad)
            local(parameter.grad).clamp_(-limit, limit)
