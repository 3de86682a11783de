"""Gradients of wrapped models: what has accumulated, norms, backwards of zeros."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from accelerate.strategy.fsdp1.flat import Slot, Unit
from accelerate.strategy.fsdp1.record import Record


def parameters(record: Record) -> list[torch.Tensor]:
    """What optimizers hold of a model, whatever stands in its modules between a forward and its backward."""
    found = {p: None for unit in record.units for p in unit.parameters}
    wrapped = {name for unit in record.units for slot in unit.slots for name in slot.names}
    found.update({p: None for name, p in record.parameters() if name not in wrapped})
    return list(found)


def accumulated(records: Iterable[Record], wanted: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What has accumulated here for parameters; changing it changes the gradients."""
    left = dict.fromkeys(wanted)
    found: list[torch.Tensor] = []
    for unit in (unit for record in records for unit in record.units):
        own = unit.parameters
        hit = [p in left for p in own]
        if not any(hit):
            continue
        for parameter in own:
            left.pop(parameter, None)
        gradient = unit.gradient()
        if gradient is None:
            continue
        # A flat gradient has values for frozen parameters too, which nobody uses.
        trained = [asked and p.requires_grad for asked, p in zip(hit, own, strict=True)]
        if all(trained):
            found.append(gradient)
        else:
            pairs = zip(trained, unit.slots, strict=True)
            found += [_of(unit, slot, gradient) for asked, slot in pairs if asked]
    return found + [p.grad for p in left if p.grad is not None]


def _of(unit: Unit, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
    """The part of one parameter in a flat gradient, which is a piece or whole."""
    whole = gradient.shape == unit.flat._unpadded_unsharded_size
    return unit.view(slot, gradient) if whole else unit.piece(slot, gradient)


def drop(records: Iterable[Record], wanted: Iterable[torch.Tensor]) -> None:
    """Forgets what has accumulated for parameters, also where an optimizer does not see it."""
    left = set(wanted)
    for unit in (unit for record in records for unit in record.units):
        own = unit.parameters
        if left.issuperset(p for p in own if p.requires_grad):
            unit.flat.grad = None
            for parameter in own:
                parameter.grad = None


@torch.no_grad()
def clip_norm(
    records: Iterable[Record], wanted: Iterable[torch.Tensor], limit: float, p: float, device: torch.device
) -> torch.Tensor:
    """Scales gradients so that their global norm is at most ``limit``; the norm before, equal on all ranks.

    What is cut counts on every process that shares it, what is not counts once. All processes exchange one
    number, also those that have no element of a parameter here.

    Args:
        records: of the wrapped models.
        wanted: the parameters.
        limit: the greatest norm.
        p: of the p-norm; ``inf`` takes the greatest value.
        device: where processes exchange values.
    """
    owner = {held: unit for record in records for held, unit in record.owner.items()}
    cut: list[torch.Tensor] = []
    other: list[torch.Tensor] = []
    group = None
    for parameter in dict.fromkeys(wanted):
        unit = owner.get(parameter)
        if unit is not None and unit.cut:
            group = unit.handle.process_group
        if parameter.grad is not None:
            (cut if unit is not None and unit.cut else other).append(parameter.grad)
    greatest = p == float("inf")
    total = _power(cut, p, device)
    if group is not None:
        dist.all_reduce(total, dist.ReduceOp.MAX if greatest else dist.ReduceOp.SUM, group=group)
    rest = _power(other, p, device)
    norm = torch.maximum(total, rest) if greatest else (total + rest) ** (1.0 / p)
    # As torch does it: 1e-6 keeps the division defined.
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for gradient in (*cut, *other):
        gradient.mul_(scale.to(gradient.device))
    return norm


def _power(gradients: Iterable[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """The sum of p-th powers, the maximum for ``inf``."""
    norms = [torch.linalg.vector_norm(g, p, dtype=torch.float32).to(device) for g in gradients if g.numel()]
    mine = torch.stack(norms) if norms else torch.zeros(1, device=device)
    return mine.max() if p == float("inf") else (mine**p).sum()


def reached(records: Iterable[Record], found: set[torch.Tensor]) -> set[torch.Tensor]:
    """What a graph reaches, with the parameters in the flat ones that it reaches."""
    more = (unit.parameters for record in records for unit in record.units if unit.flat in found)
    return found.union(*more)


def zero_backward(records: Iterable[Record], loss: torch.Tensor) -> None:
    """Runs the backward of ``loss`` with every gradient zero, whatever the loss is.

    Every gather and reduction takes place, in the order of the other processes. The loss itself may be NaN, a
    mean of nothing: what reaches a parameter is replaced there.
    """
    flats = [unit.flat for record in records for unit in record.units if unit.flat.requires_grad]
    handles = [flat.register_hook(torch.zeros_like) for flat in flats]
    try:
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
