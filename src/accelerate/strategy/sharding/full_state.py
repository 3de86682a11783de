"""Full state dicts of sharded models and optimizers: gathering them, and loading them into shards."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from accelerate.core import tree
from accelerate.core.errors import PrepareError
from accelerate.world.shard_boxes import local_shard, shard_mesh_dims


def distribute(value: Any, like: Any) -> Any:
    """Return a tensor of a parameter's optimizer state as a DTensor with the parameter's placements.

    A tensor of another shape (a factored moment, for example) is replicated; a scalar (a step count) stays.
    A DTensor over fewer mesh dimensions (tensor parallel alone) is gathered first.
    """
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if isinstance(value, DTensor):
        if value.device_mesh == like.device_mesh:
            return value
        value = gather_whole(value).to(value.device)
    if value.shape == like.shape:
        # A copy: a tensor mapped from a file must not stay tied to the file. It is stored where the parameter
        # is, which may be the host.
        sharded_value: Any = torch.empty_like(like.detach(), dtype=value.dtype)
        sharded_value.to_local().copy_(local_shard(value, like))
        return sharded_value
    mesh = like.device_mesh
    return DTensor.from_local(value.clone(), mesh, [Replicate()] * mesh.ndim, run_check=False)


def gather_to_host(value: Any, keep: bool) -> Any:
    """Return the unsharded tensor on the host where ``keep``, else None; collective."""
    if isinstance(value, DTensor):
        whole = gather_whole(value)
        # Training goes on in the tensor itself, which is unsharded already where one rank has all of it.
        same = whole.untyped_storage().data_ptr() == value.to_local().untyped_storage().data_ptr()
        return whole.to("cpu", copy=same) if keep else None
    if isinstance(value, torch.Tensor):
        # A copy: training goes on in the tensor itself.
        return value.detach().to("cpu", copy=True) if keep else None
    return value


def gather_leaves(state: Any, keep: bool) -> Any:
    """Return nested data with its DTensors gathered, see ``gather_to_host``; other values stay."""

    def gather(leaf: Any) -> Any:
        return gather_to_host(leaf, keep) if isinstance(leaf, DTensor) else leaf

    return tree.map_tree(gather, state)


def distribute_leaves(state: Any, like: Any) -> Any:
    """Return nested data with the tensors distributed that are DTensors of equal shape in ``like``."""
    shards = {path: leaf for path, leaf in tree.iterate_leaves(like) if isinstance(leaf, DTensor)}
    if not shards:
        return state
    leaves = [
        distribute(leaf, shards[path]) if path in shards and shards[path].shape == leaf.shape else leaf
        for path, leaf in tree.iterate_leaves(state)
    ]
    return tree.replace_leaves(state, iter(leaves))


def gather_whole(value: DTensor) -> torch.Tensor:
    """Return the unsharded tensor, on the device on which its mesh gathers; collective."""
    moved = _to_gathering_device(value)
    # One mesh dimension after another, the last sharded first: torch warns when it has to find that out.
    for axis in reversed(shard_mesh_dims(moved.placements)):
        rest = [Replicate() if a == axis else p for a, p in enumerate(moved.placements)]
        moved = moved.redistribute(placements=rest)
    return moved.full_tensor().detach()


def _to_gathering_device(value: DTensor) -> DTensor:
    """Return the tensor with its shards on the device of its mesh, or on the host if its groups are gloo's.

    A DTensor on an accelerator whose process group is gloo's ends the process when it is gathered (SIGSEGV on
    CUDA with torch 2.11; https://github.com/pytorch/pytorch/pull/132709).
    """
    mesh, local = value.device_mesh, value.to_local()
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    is_gloo = f"{mesh.device_type}:gloo" in dist.get_backend_config(groups[0]).split(",")
    if is_gloo and mesh.device_type != "cpu":
        # A list of groups needs names of the dimensions, and the mesh of FSDP2 has none.
        group = groups if mesh.ndim > 1 else groups[0]
        mesh = DeviceMesh.from_group(group, "cpu", mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
    elif local.device.type == mesh.device_type:
        return value
    return DTensor.from_local(
        local.to(mesh.device_type),
        mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


class RankShardStateDict(OrderedDict[str, Any]):
    """The ``state_dict`` of a sharded model: of each parameter the shard of this rank.

    It can be copied, loaded again, and saved by ``torch.distributed.checkpoint``. A pickle of it would be an
    incomplete model, so pickling is refused until the program has replaced all shards by full tensors.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse_shards()
        full = OrderedDict(self)
        full.__dict__.update(vars(self))
        return full.__reduce_ex__(protocol)

    def items(self) -> Any:
        """Return the items; refused to safetensors, whose own error would not say what is wrong."""
        # There is no other sign that a file is being written: safetensors only asks a mapping for its items.
        caller = sys._getframe(1).f_globals.get("__name__", "")  # pyright: ignore[reportPrivateUsage]
        if caller == "safetensors.torch":
            self._refuse_shards()
        return super().items()

    def _refuse_shards(self) -> None:
        if any(isinstance(value, DTensor) for value in self.values()):
            raise _local_state_error()

    def __copy__(self) -> RankShardStateDict:
        shard_state = RankShardStateDict(self)
        shard_state.__dict__.update(vars(self))
        return shard_state

    def __deepcopy__(self, memo: dict[int, Any]) -> RankShardStateDict:
        shard_state = RankShardStateDict((name, deepcopy(value, memo)) for name, value in self.items())
        shard_state.__dict__.update(deepcopy(self.__dict__, memo))
        return shard_state


def _local_state_error() -> PrepareError:
    return PrepareError(
        "model.state_dict() of a sharded model is no full state dict: it has the shards of one rank",
        why="the shards of the other ranks would be missing in the file",
        fix="call accelerator.save_model(model, folder) on all processes, or save on the main one what "
        "accelerator.get_state_dict(model) gives; for checkpoints accelerator.save_state(folder)",
    )


def mark_shards(module: nn.Module, state: Any, prefix: str, metadata: Any) -> Any:
    """Return a state dict that refuses to be written to a file as if it were full: a hook of torch."""
    if prefix or type(state) is not OrderedDict:
        return None  # inside another model, or into a mapping of the caller's
    shard_state = RankShardStateDict(state)
    shard_state.__dict__.update(vars(state))
    return shard_state


@torch.no_grad()
def model_state(model: nn.Module, keep: bool) -> dict[str, Any]:
    """Return the model's full state dict with the user's names, on the host; empty where not ``keep``.

    A tied parameter is one tensor under all of its names. Collective.
    """
    full_state: dict[str, Any] = {}
    seen: dict[int, Any] = {}
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if id(value) not in seen:
            seen[id(value)] = gather_to_host(value, keep)
        if keep:
            full_state[name] = seen[id(value)]
    return full_state


@torch.no_grad()
def load_model(model: nn.Module, state: Mapping[str, Any], *, strict: bool) -> Any:
    """Load a full state dict that every rank passes; each keeps its shard.

    Returns:
        What torch's ``load_state_dict`` returns: missing and unexpected names.
    """
    targets = model.state_dict()
    parts: dict[str, Any] = {}
    for name, value in state.items():
        target = targets.get(name)
        if isinstance(target, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            if value.shape != target.shape:
                raise RuntimeError(
                    f"size mismatch for {name}: the state has shape {tuple(value.shape)}, the model "
                    f"{tuple(target.shape)}"
                )
            value = distribute(value, target) if value.dim() else value
        parts[name] = value
    return model.load_state_dict(parts, strict=strict)


@torch.no_grad()
def optimizer_state(optimizer: Optimizer, keep: bool) -> dict[str, Any]:
    """Return the optimizer's full state dict, as in one process, on the host; empty where not ``keep``."""
    local_state = optimizer.state_dict()
    states: dict[Any, dict[str, Any]] = {}
    for index in local_state["state"]:
        values = local_state["state"][index]
        states[index] = {name: gather_to_host(values[name], keep) for name in values}
    return {**local_state, "state": states} if keep else {}


def saved_numbers(state: Mapping[str, Any], count: int) -> list[Any]:
    """Return the numbers of the parameters in the state of an optimizer of ``count`` parameters.

    Raises:
        PrepareError: it is of another number of parameters.
    """
    saved = [number for group in state["param_groups"] for number in group["params"]]
    if len(saved) != count:
        raise PrepareError(
            f"the state is of an optimizer of {len(saved)} parameters, and this one has {count}"
        )
    return saved


@torch.no_grad()
def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a full state dict that every rank passes; each keeps its shard.

    Raises:
        PrepareError: it is of another number of parameters.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved = saved_numbers(state, len(parameters))
    states: dict[Any, Any] = dict(state["state"])
    for index, parameter in zip(saved, parameters, strict=True):
        if index in states and isinstance(parameter, DTensor):
            states[index] = {name: distribute(v, parameter) for name, v in states[index].items()}
    optimizer.load_state_dict({**state, "state": states})
