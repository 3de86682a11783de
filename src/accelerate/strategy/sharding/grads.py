"""Gradients of sharded parameters: what is kept back while accumulating, norms, clipping, zero backwards.

Between the micro-batches of a window torch keeps whole gradients at its own whole parameters, out of sight of
``parameter.grad``. It has no public name for them, so this file looks at the state of its modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


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
    parameters: Iterable[torch.Tensor], limit: float, p: float, device: torch.device
) -> torch.Tensor:
    """Scales gradients so that their global norm is at most ``limit``; the norm before, equal on all ranks.

    Args:
        parameters: sharded or not; those that are not count once.
        limit: the greatest norm.
        p: of the p-norm; ``inf`` takes the greatest value.
        device: where processes exchange values.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return torch.zeros((), device=device)
    meshes: dict[Any, list[torch.Tensor]] = {}
    for grad in grads:
        meshes.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(local(grad))
    powers = [_power(mesh, found, float(p), device) for mesh, found in meshes.items()]
    total = torch.stack(powers)
    norm = total.max() if p == float("inf") else total.sum() ** (1.0 / p)
    # As torch does it: 1e-6 keeps the division defined.
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for found in _alike(part for parts in meshes.values() for part in parts):
        torch._foreach_mul_(found, scale.to(found[0].device))  # pyright: ignore[reportPrivateImportUsage]
    return norm


def _power(mesh: Any, parts: Sequence[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """The sum of p-th powers (the maximum for ``inf``) of the gradients that are cut over ``mesh``."""
    norms = [torch.linalg.vector_norm(part, p, dtype=torch.float32) for part in parts if part.numel()]
    mine = torch.stack([n.to(device) for n in norms]) if norms else torch.zeros(1, device=device)
    greatest = p == float("inf")
    value = mine.max() if greatest else (mine**p).sum()
    if mesh is not None:
        operation = dist.ReduceOp.MAX if greatest else dist.ReduceOp.SUM
        dist.all_reduce(value, operation, group=mesh.get_group())
    return value


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
            local(parameter.grad).clamp_(-limit, limit)
