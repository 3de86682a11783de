"""Whole states out of parts, and parts out of whole states: models and optimizers by their ordinary names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from accelerate.core.errors import PrepareError


def part_of(value: torch.Tensor, like: Any) -> torch.Tensor:
    """This process's part of a whole tensor, a view where it can be one.

    Args:
        value: the whole tensor.
        like: a distributed tensor of the same shape; it says how things are cut.
    """
    mesh = like.device_mesh
    for axis, placement in enumerate(like.placements):
        if placement.is_shard():
            chunks = value.chunk(mesh.size(axis), placement.dim)
            place = mesh.get_local_rank(axis)
            # Fewer rows than processes: the last ones have none.
            empty = value.narrow(placement.dim, value.shape[placement.dim], 0)
            value = chunks[place] if place < len(chunks) else empty
    return value


def distributed(value: Any, like: Any) -> Any:
    """A whole tensor of a parameter's state as a distributed one beside the parameter; others stay.

    A tensor of another shape (a factored moment, say) is kept whole on every process; a scalar counts steps.
    """
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or value.dim() == 0:
        return value
    if value.shape == like.shape:
        # A copy: a part of a file that is mapped into memory must not stay tied to the file. It rests where
        # the parameter does, which may be the host.
        mine: Any = torch.empty_like(like.detach(), dtype=value.dtype)
        mine.to_local().copy_(part_of(value, like))
        return mine
    mesh = like.device_mesh
    return DTensor.from_local(value.clone(), mesh, [Replicate()] * mesh.ndim, run_check=False)


def gathered(value: Any, keep: bool) -> Any:
    """The whole tensor on the host where ``keep``, else None; a collective of all processes."""
    if isinstance(value, DTensor):
        # Parts that rest on the host travel over the device.
        moved = value if value.to_local().device.type == value.device_mesh.device_type else _back(value)
        whole = moved.full_tensor()
        return whole.detach().cpu() if keep else None
    if isinstance(value, torch.Tensor):
        # A copy: training goes on in the tensor itself.
        return value.detach().to("cpu", copy=True) if keep else None
    return value


def _back(value: DTensor) -> DTensor:
    local = value.to_local().to(value.device_mesh.device_type)
    return DTensor.from_local(
        local,
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


@torch.no_grad()
def model_state(model: nn.Module, keep: bool) -> dict[str, Any]:
    """The model's full state with the user's names, on the host; empty where not ``keep``.

    A parameter with several names is one tensor under all of them. All processes must call it.
    """
    found: dict[str, Any] = {}
    seen: dict[int, Any] = {}
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if id(value) not in seen:
            seen[id(value)] = gathered(value, keep)
        if keep:
            found[name] = seen[id(value)]
    return found


@torch.no_grad()
def load_model(model: nn.Module, state: Mapping[str, Any], *, strict: bool) -> Any:
    """Loads a full state, which every process gives; each takes its part.

    Returns:
        What torch's ``load_state_dict`` returns: missing and unexpected names.
    """
    own = model.state_dict()
    parts: dict[str, Any] = {}
    for name, value in state.items():
        mine = own.get(name)
        if isinstance(mine, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            if value.shape != mine.shape:
                raise RuntimeError(
                    f"size mismatch for {name}: the state has shape {tuple(value.shape)}, the model "
                    f"{tuple(mine.shape)}"
                )
            value = distributed(value, mine) if value.dim() else value
        parts[name] = value
    return model.load_state_dict(parts, strict=strict)


@torch.no_grad()
def optimizer_state(optimizer: Optimizer, keep: bool) -> dict[str, Any]:
    """The optimizer's full state as one process would have it, on the host; empty where not ``keep``."""
    own = optimizer.state_dict()
    states: dict[Any, dict[str, Any]] = {}
    for index in own["state"]:
        values = own["state"][index]
        states[index] = {name: gathered(values[name], keep) for name in values}
    return {**own, "state": states} if keep else {}


@torch.no_grad()
def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads a full state, which every process gives; each takes its part.

    Raises:
        PrepareError: it is of another number of parameters.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved = [index for group in state["param_groups"] for index in group["params"]]
    if len(saved) != len(parameters):
        raise PrepareError(
            f"the state is of an optimizer of {len(saved)} parameters, and this one has {len(parameters)}"
        )
    states: dict[Any, Any] = dict(state["state"])
    for index, parameter in zip(saved, parameters, strict=True):
        if index in states and isinstance(parameter, DTensor):
            states[index] = {name: distributed(v, parameter) for name, v in states[index].items()}
    optimizer.load_state_dict({**state, "state": states})
