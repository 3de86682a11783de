"""Remapping of optimizers to the parameters that FSDP1 wrapping replaces, with their state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from accelerate.core.errors import PrepareError
from accelerate.core.user_warning import warn_user
from accelerate.strategy.fsdp1.model_state_dict import FSDP1WrappedModel
from accelerate.strategy.fsdp1.optimizer_state import FSDP1Optimizer, ParamOrder
from accelerate.world import collective

# Optimizers that compute with whole parameters, by the names of their classes; pieces of one dimension are
# another problem to these, or none that they take.
_NEEDS_MATRICES = frozenset({"LBFGS", "Muon"})
_TAKES_STATISTICS = frozenset(
    {"Adafactor", "AdafactorBigVision", "CAME", "LAMB", "LARS", "Lamb", "Lars", "SM3"}
)


def check_elementwise(optimizer: Any) -> None:
    """Refuse optimizers that cannot step pieces of parameters.

    Raises:
        PrepareError: LBFGS or Muon.
    """
    names = {kind.__name__ for kind in type(optimizer).__mro__} & _NEEDS_MATRICES
    if names:
        raise PrepareError(
            f"{min(names)} cannot train under FSDP1",
            why="it computes with whole parameters, and each rank steps its own piece of them",
            fix="an optimizer that computes element by element (AdamW, SGD, ...), or train under ddp",
        )


def warn_of_statistics(optimizer: Any) -> None:
    """Warn on rank 0 of an optimizer that takes means over a parameter, which are those of a piece here."""
    names = {kind.__name__ for kind in type(optimizer).__mro__} & _TAKES_STATISTICS
    if names and collective.rank() == 0:
        warn_user(
            f"{min(names)} under FSDP1 takes its means over this rank's piece of each parameter, not over "
            "its rows and columns: the run is not that of one process. Train under ddp, or with AdamW"
        )


def check_param_groups(optimizer: Optimizer, parts: Iterable[Sequence[torch.Tensor]]) -> None:
    """Refuse optimizer groups that have only some parameters of a flat one.

    Args:
        optimizer: of the user's parameters.
        parts: the parameters of each flat one.

    Raises:
        PrepareError: there is one.
    """
    group = {p: number for number, g in enumerate(optimizer.param_groups) for p in g["params"]}
    for parameters in parts:
        if len({group.get(p) for p in parameters}) > 1:
            raise PrepareError(
                f"the {type(optimizer).__name__} has the parameters of one FSDP unit in several groups, "
                "or only some of them",
                why="with use_orig_params=False the parameters of a unit are one parameter",
                fix="use_orig_params=True (FSDP_USE_ORIG_PARAMS=true)",
            )


def remap_optimizer(
    optimizer: Optimizer,
    renewed: Mapping[Any, tuple[Any, Any]],
    wrapped_models: Sequence[FSDP1WrappedModel],
    orders: MutableMapping[Any, ParamOrder],
    *,
    sync: bool,
) -> None:
    """Make an optimizer hold the new parameters, and shard its state.

    Args:
        optimizer: the user's own.
        renewed: (new parameter, stand-in or None) by the old ones.
        wrapped_models: the wrapped models.
        orders: keeps the user's order, where flat parameters replace several.
        sync: whether its state becomes that of rank 0.
    """
    state = optimizer.state_dict() if _has_stale_state(optimizer, renewed, wrapped_models) else None
    _replace_params(optimizer, renewed, orders)
    if state is None:
        return
    for values in state["state"].values() if sync else ():
        for value in values.values():
            if isinstance(value, torch.Tensor) and value.dim():
                dist.broadcast(value, src=0)
    FSDP1Optimizer(optimizer, wrapped_models, orders.get(optimizer, ())).load_state(state)


def _has_stale_state(
    optimizer: Optimizer, renewed: Mapping[Any, tuple[Any, Any]], wrapped_models: Sequence[FSDP1WrappedModel]
) -> bool:
    """Return whether it has state for replaced parameters."""
    for param, values in optimizer.state.items():
        if param in renewed:
            return True
        wrapped_model = next((r for r in wrapped_models if param in r.slot_of), None)
        if wrapped_model is None:
            continue
        slot = wrapped_model.slot_of[param]
        tensors = [v for v in values.values() if isinstance(v, torch.Tensor)]
        if any(v.shape == slot.shape and v.shape != param.shape for v in tensors):
            return True
    return False


def _replace_params(
    optimizer: Optimizer, renewed: Mapping[Any, tuple[Any, Any]], orders: MutableMapping[Any, ParamOrder]
) -> None:
    before = orders.get(optimizer) or [[(p, None) for p in g["params"]] for g in optimizer.param_groups]
    after = [
        [
            renewed[param] if param in renewed and stand_in is None else (param, stand_in)
            for param, stand_in in group
        ]
        for group in before
    ]
    for param, _ in (pair for group in before for pair in group):
        if param in renewed:
            optimizer.state.pop(param, None)
    for group, pairs in zip(optimizer.param_groups, after, strict=False):
        if any(param in renewed for param in group["params"]):
            group["params"] = list(dict.fromkeys(param for param, _ in pairs))
    if any(stand_in is not None for group in after for _, stand_in in group):
        orders[optimizer] = after
