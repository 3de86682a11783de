"""Whole states out of parts, and parts out of whole states: models and optimizers by their ordinary names."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from accelerate.core.errors import PrepareError


def is_cut(placement: Any) -> bool:
    """Whether a placement cuts a tensor; torch's own ``is_shard`` leaves out one that was cut in two ways."""
    return getattr(placement, "dim", None) is not None


def part_of(value: torch.Tensor, like: Any) -> torch.Tensor:
    """This process's part of a whole tensor, a view where it can be one.

    Args:
        value: the whole tensor.
        like: a distributed tensor of the same shape; it says how things are cut.
    """
    mesh = like.device_mesh
    for axis in cuts(like.placements):
        dim = like.placements[axis].dim
        chunks = value.chunk(mesh.size(axis), dim)
        place = mesh.get_local_rank(axis)
        # Fewer rows than processes: the last ones have none.
        empty = value.narrow(dim, value.shape[dim], 0)
        value = chunks[place] if place < len(chunks) else empty
    return value


def cuts(placements: Sequence[Any]) -> list[int]:
    """The dimensions of the mesh that cut a tensor, in the order in which it was cut.

    Sharding cuts what tensor parallelism has cut before, though its dimension of the mesh comes first: its
    placement is a strided one then.
    """
    axes = [axis for axis, placement in enumerate(placements) if is_cut(placement)]
    late = [axis for axis in axes if hasattr(placements[axis], "split_factor")]
    return [axis for axis in axes if axis not in late] + late[::-1]


def distributed(value: Any, like: Any) -> Any:
    """A whole tensor of a parameter's state as a distributed one beside the parameter; others stay.

    A tensor of another shape (a factored moment, say) is kept whole on every process; a scalar counts steps.
    What was distributed over fewer dimensions (by tensor parallelism alone) is gathered first.
    """
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if isinstance(value, DTensor):
        if value.device_mesh == like.device_mesh:
            return value
        value = value.full_tensor()
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
        # One dimension after another, the last cut first: torch warns when it has to find that out.
        for axis in reversed(cuts(moved.placements)):
            rest = [Replicate() if a == axis else p for a, p in enumerate(moved.placements)]
            moved = moved.redistribute(placements=rest)
        whole = moved.full_tensor().detach()
        # Training goes on in the tensor itself, which is whole already where one process has all of it.
        same = whole.untyped_storage().data_ptr() == value.to_local().untyped_storage().data_ptr()
        return whole.to("cpu", copy=same) if keep else None
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


class OwnParts(OrderedDict[str, Any]):
    """What ``state_dict`` of a sharded model gives: of each parameter, the part that this process has.

    It can be copied, loaded again, and saved by ``torch.distributed.checkpoint``. In a file of its own it
    would be a model of which the most is missing.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _no_whole()

    def items(self) -> Any:
        """Refused to the library whose own error, about storage, would not say what is wrong."""
        # Nothing else is told that a file is being written: it asks a mapping for its items, and no more.
        caller = sys._getframe(1).f_globals.get("__name__", "")  # pyright: ignore[reportPrivateUsage]
        if caller == "safetensors.torch":
            raise _no_whole()
        return super().items()

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnParts:
        made = OwnParts((name, deepcopy(value, memo)) for name, value in self.items())
        made.__dict__.update(deepcopy(self.__dict__, memo))
        return made


def _no_whole() -> PrepareError:
    return PrepareError(
        "model.state_dict() of a sharded model is no whole state: it has the parts of one process",
        why="what the other processes have would be missing in the file",
        fix="call accelerator.save_model(model, folder) on all processes, or save on the main one what "
        "accelerator.get_state_dict(model) gives; for checkpoints accelerator.save_state(folder)",
    )


def guard(model: nn.Module) -> None:
    """Makes ``model.state_dict()`` refuse to be written to a file as if it were whole."""
    model._register_state_dict_hook(_own_parts)


def _own_parts(module: nn.Module, state: Any, prefix: str, metadata: Any) -> Any:
    if prefix or type(state) is not OrderedDict:
        return None  # inside another model, or into a mapping of the caller's
    made = OwnParts(state)
    made.__dict__.update(vars(state))
    return made


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
