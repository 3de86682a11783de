"""Gradients of FSDP1 models: accumulated gradients, norms, zero backwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from accelerate.strategy.fsdp1.flat_parameter_layout import FlatParam, FlatSlot
from accelerate.strategy.fsdp1.model_state_dict import FSDP1WrappedModel
from accelerate.strategy.protocol.gradient_sync import GradientPiece, clip_sharded_norm, whole_piece
from accelerate.strategy.sharding.full_state import distribute
from accelerate.strategy.sharding.grads import local_grad, sharded_pieces, shards_by_groups


def optimizer_parameters(wrapped_model: FSDP1WrappedModel) -> list[torch.Tensor]:
    """Return the parameters that optimizers hold, whatever the modules hold between forward and backward."""
    parameters = {p: None for unit in wrapped_model.flat_params for p in unit.parameters}
    wrapped = {name for unit in wrapped_model.flat_params for slot in unit.slots for name in slot.names}
    parameters.update({p: None for name, p in wrapped_model.parameters() if name not in wrapped})
    return list(parameters)


def local_gradients(flat_params: Iterable[FlatParam], wanted: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients accumulated on this rank for ``wanted``; in-place changes take effect."""
    left = dict.fromkeys(wanted)
    gradients: list[torch.Tensor] = []
    for unit in flat_params:
        parameters = unit.parameters
        hit = [p in left for p in parameters]
        if not any(hit):
            continue
        for parameter in parameters:
            left.pop(parameter, None)
        # A flat gradient has values for frozen parameters too, which nobody uses.
        trained = [is_hit and p.requires_grad for is_hit, p in zip(hit, parameters, strict=True)]
        for gradient in unit.gradients():
            if all(trained):
                gradients.append(gradient)
            else:
                pairs = zip(trained, unit.slots, strict=True)
                gradients += [_param_grad(unit, slot, gradient) for is_trained, slot in pairs if is_trained]
    return gradients + [local_grad(p.grad) for p in left if p.grad is not None]


def _param_grad(unit: FlatParam, slot: FlatSlot, gradient: torch.Tensor) -> torch.Tensor:
    """Return the part of one parameter in a flat gradient, which is sharded or unsharded."""
    whole = gradient.shape == unit.flat._unpadded_unsharded_size
    return unit.view_param(slot, gradient) if whole else unit.local_piece(slot, gradient)


def gradient_pieces(wrapped_model: FSDP1WrappedModel, ranks: int) -> dict[str, list[GradientPiece]]:
    """Return this rank's pieces of the open gradients, sharded or not reduced yet; see ``OpenGradients``."""
    pieces: dict[str, list[GradientPiece]] = {}
    in_units = set[str]()
    for unit in wrapped_model.flat_params:
        in_units.update(name for slot in unit.slots for name in slot.names)
        for gradient, slot in product(unit.gradients(), unit.slots):
            part = _param_grad(unit, slot, gradient)
            held = pieces.setdefault(slot.names[0], [])
            if gradient.shape == unit.flat._unpadded_unsharded_size:
                held.append(whole_piece(part, ranks))
            elif part.numel():
                start = unit.local_range(slot)[0]
                held.append(GradientPiece(part.detach(), tuple(slot.shape), (start,), 0))
    for name, parameter in wrapped_model.parameters():
        if name not in in_units and parameter.grad is not None:
            pieces[name] = sharded_pieces(parameter.grad, ranks)
    return {name: held for name, held in pieces.items() if held}


@torch.no_grad()
def load_gradients(wrapped_model: FSDP1WrappedModel, gradients: Mapping[str, torch.Tensor]) -> None:
    """Keep this rank's shard of unsharded, reduced gradients: the next reduction adds to it."""
    in_units = set[str]()
    for unit in wrapped_model.flat_params:
        in_units.update(name for slot in unit.slots for name in slot.names)
        saved_gradients = [
            (slot, gradients[n]) for slot in unit.slots for n in slot.names[:1] if n in gradients
        ]
        if not saved_gradients:
            continue
        values = unit.local_values()
        local = torch.zeros_like(values)
        for slot, whole in saved_gradients:
            low, high = unit.local_range(slot)
            unit.local_piece(slot, local).copy_(whole.reshape(-1)[low:high])
        unit.flat.grad = local
        if unit.uses_orig_params:
            for slot, parameter in zip(unit.slots, unit.parameters, strict=True):
                piece = unit.local_piece(slot, local)
                parameter.grad = piece.view(parameter.shape) if piece.numel() else None
    for name, parameter in wrapped_model.parameters():
        if name not in in_units and name in gradients:
            whole = gradients[name].to(parameter.device, parameter.dtype, copy=True)
            parameter.grad = distribute(whole, parameter) if isinstance(parameter, DTensor) else whole


def clear_gradients(flat_params: Iterable[FlatParam], wanted: Iterable[torch.Tensor]) -> None:
    """Clear the gradients of ``wanted``, also unreduced ones that an optimizer does not see."""
    left = set(wanted)
    for unit in flat_params:
        if left.issuperset(p for p in unit.parameters if p.requires_grad):
            unit.clear_gradients()


@torch.no_grad()
def clip_norm(
    flat_params: Iterable[FlatParam],
    wanted: Iterable[torch.Tensor],
    limit: float,
    p: float,
    device: torch.device,
) -> torch.Tensor:
    """Scale gradients so that their global norm is at most ``limit``; return the norm before.

    Sharded gradients are summed over the ranks, others count once. All ranks all-reduce one number, also
    those that have no element of a parameter; the norm is equal on all ranks.

    Args:
        flat_params: the flat parameters of all models.
        wanted: the parameters.
        limit, p, device: those of ``clip_sharded_norm``.
    """
    owner = {p: unit for unit in flat_params for p in unit.parameters}
    cut: list[torch.Tensor] = []
    counted: list[torch.Tensor] = []
    other: list[torch.Tensor] = []
    groups: list[Any] = []
    for parameter in dict.fromkeys(wanted):
        unit = owner.get(parameter)
        if unit is not None and unit.is_sharded:
            groups = [unit.handle.process_group]
            if (grad := parameter.grad) is not None:
                cut.append(grad)
                # A flat gradient ends in zeros, which are the smallest elements.
                is_padded = p < 0 and not unit.uses_orig_params
                counted += [unit.local_piece(slot, grad) for slot in unit.slots] if is_padded else [grad]
        elif parameter.grad is not None:
            other.append(parameter.grad)
    parts = [(groups, counted), *shards_by_groups(other)]
    return clip_sharded_norm(parts, [*cut, *map(local_grad, other)], limit, p, device)


def reached_parameters(flat_params: Iterable[FlatParam], leaves: set[torch.Tensor]) -> set[torch.Tensor]:
    """Return the leaves of a graph, with the parameters in the flat ones among them."""
    return leaves.union(*(unit.parameters for unit in flat_params if unit.flat in leaves))
