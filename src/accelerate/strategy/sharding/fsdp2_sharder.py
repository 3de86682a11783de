"""The sharder of FSDP2: shards a model in place, unit by unit, with one unsharded unit in memory at a time.

Source: Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel"
(arXiv:2304.11277), and ``torch.distributed.fsdp.fully_shard``, which does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accelerate.core.errors import PrepareError
from accelerate.core.torch_internals import accepts
from accelerate.strategy.sharding.activation_offload import disable_cache, offload_inputs
from accelerate.strategy.sharding.fsdp2_options import fully_shard_options
from accelerate.strategy.sharding.fsdp_unit_plan import (
    FSDPShardingPlan,
    model_digest,
    plan_layout,
    unequal_models_error,
)
from accelerate.strategy.sharding.full_state import distribute, guard_state_dict
from accelerate.strategy.sharding.initial_weights import (
    InitialWeights,
    InitialWeightsInfo,
    find_unlike_leader,
    weight_marks,
)
from accelerate.strategy.sharding.plugin import FullyShardedDataParallelPlugin
from accelerate.strategy.sharding.quantized_weight_check import check_packed
from accelerate.world import collective

# Told to average, gloo of torch 2.8 sums in a reduce-scatter, without an error; that of 2.10 averages.
_GLOO_SUMS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10)


def make_layout(
    model: nn.Module, plugin: FullyShardedDataParallelPlugin, precision: MixedPrecisionPolicy | None
) -> FSDPShardingPlan:
    """Return how ``model`` will be sharded; changes nothing.

    Raises:
        SettingError, PrepareError: the model cannot be sharded so.
    """
    layout = plan_layout(model, plugin, precision or MixedPrecisionPolicy())
    check_packed(model, layout.precision.param_dtype)
    return layout


def check_torch(device: torch.device, layout: FSDPShardingPlan) -> None:
    """Refuse what ``fully_shard`` of the installed torch cannot do.

    Raises:
        PrepareError: it cannot compute on a CPU, or leave parameters unsharded.
    """
    problem = ""
    if device.type == "cpu" and not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        problem = f"FSDP2 of torch {torch.__version__} does not compute on a CPU"
    elif layout.ignored and not accepts(fully_shard, "ignored_params"):
        problem = f"FSDP2 of torch {torch.__version__} shards every parameter, and some are to be ignored"
    if problem:
        raise PrepareError(
            problem,
            why="torch's fully_shard came to it in a later version",
            fix="pip install 'torch>=2.8', or fsdp_version=1",
        )


def _average_on_cpu(model: nn.Module) -> None:
    """Let torch divide the sums of gradients by itself."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


class Sharder:
    """Shards models over a device mesh, and remaps optimizers to the new parameters.

    The mesh may be a submesh: ranks outside of it hold other shards of the same parameters (tensor parallel)
    or other parameters (pipeline parallel).

    Args:
        mesh: the device mesh: one dimension of shards, or two with replicas (HSDP).
        plugin: the options.
        device: where this rank computes.
        replicated_meshes: more meshes of one dimension, along which parameters are replicated unless they are
            DTensors.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        plugin: FullyShardedDataParallelPlugin,
        device: torch.device,
        replicated_meshes: Sequence[DeviceMesh] = (),
    ) -> None:
        self.mesh, self.plugin, self.device = mesh, plugin, device
        self.replicated_meshes = tuple(replicated_meshes)

    @property
    def offload(self) -> OffloadPolicy:
        """The offload policy; without an accelerator there is no pinned memory."""
        policy = self.plugin.cpu_offload
        if isinstance(policy, CPUOffloadPolicy) and self.device.type == "cpu":
            return CPUOffloadPolicy(pin_memory=False)
        return policy

    def shard(
        self, model: nn.Module, layout: FSDPShardingPlan, optimizers: Iterable[Any], remap: RemapCallback
    ) -> None:
        """Shard ``model``; afterwards all ranks of the mesh have the weights of its first rank.

        Args:
            model: the model; its parameters may be on the meta device (on the first rank of the mesh too:
                then their values come later), or mapped from files. DTensors are sharded further.
            layout: its layout.
            optimizers: the optimizers that may hold its parameters.
            remap: makes the optimizers hold the new parameters.
        """
        check_torch(self.device, layout)
        # Given only where there are some: older versions of torch do not have the argument.
        ignored: dict[str, Any] = {"ignored_params": layout.ignored} if layout.ignored else {}
        initialize, values = exchange_model_info(model, self.plugin.param_init_fn, self.mesh)
        if self.plugin.activation_checkpointing:
            checkpoint_activations(model, layout.blocks, bool(self.plugin.activation_checkpointing_offload))
        done: set[nn.Module] = set()
        buffers: Any = WeakIdKeyDictionary()
        optimizer_list = list(optimizers)
        for part in (*layout.blocks, model):
            modules = [module for module in part.modules() if module not in done]
            done.update(modules)
            before = {(m, n): p for m in modules for n, p in m._parameters.items() if p is not None}
            # A parameter has all of its places in one unit; unsharded ones are freed with the unit.
            self._materialize(modules, layout, (WeakIdKeyDictionary(), buffers), initialize, values)
            self._broadcast_values(modules, values)
            waiting = values.pending_params(modules)
            fully_shard(
                part,
                mesh=self.mesh,
                mp_policy=_unit_precision(layout.precision, part is model),
                offload_policy=self.offload,
                **ignored,
                **fully_shard_options(self.plugin, root=part is model),
            )
            values.fill_params(part, waiting)
            remap(_replaced_params(before), optimizer_list)
            # The unsharded parameters are freed here: nobody holds them any more.
            del before
        if self.device.type == "cpu" and _GLOO_SUMS:
            _average_on_cpu(model)
        set_prefetch(model, *self.plugin._prefetch_flags)
        guard_state_dict(model)
        values.guard_forward(model)
        verify_sharded(model, layout)

    def _materialize(
        self,
        modules: list[nn.Module],
        layout: FSDPShardingPlan,
        materialized: tuple[Any, Any],
        initialize: InitFunction | None,
        values: InitialWeights,
    ) -> None:
        """Materialize a unit on the device, in its stored dtype; a tied tensor stays one.

        Meta tensors get memory. Some devices cannot swap a tensor's data: a new tensor replaces it, which
        ``materialized`` keeps by the old one.
        """
        for module in modules:
            empty = False
            for table, replacements in zip((module._parameters, module._buffers), materialized, strict=True):
                for name, old in table.items():
                    if old is None:
                        continue
                    empty = empty or old.is_meta
                    if old not in replacements:
                        replacements[old] = self._materialize_tensor(old, layout, values)
                    table[name] = replacements[old]
            if empty and initialize is not None:
                initialize(module)

    def _materialize_tensor(
        self, old: torch.Tensor, layout: FSDPShardingPlan, values: InitialWeights
    ) -> torch.Tensor:
        whole = old in layout.ignored or not isinstance(old, nn.Parameter)
        stand_in = values.make_placeholder(old, layout.storage_dtype(old), self.device, whole=whole)
        return (
            layout.materialize(old, self.device)
            if stand_in is None
            else layout.replace_ignored(old, stand_in)
        )

    def _broadcast_values(self, modules: list[nn.Module], values: InitialWeights) -> None:
        """Broadcast the values of a unit from the first rank."""
        tensors = [t for m in modules for table in (m._parameters, m._buffers) for t in table.values()]
        for tensor in {id(t): t for t in tensors if t is not None and values.is_broadcast(t)}.values():
            if not isinstance(tensor, DTensor):
                for mesh in self.replicated_meshes:
                    broadcast_over_mesh(tensor.data, mesh)
            broadcast_over_mesh(local_tensor(tensor), self.mesh)


InitFunction = Callable[[nn.Module], None]
RemapCallback = Callable[[Mapping[int, tuple[torch.Tensor, torch.Tensor]], list[Optimizer]], None]


def _unit_precision(policy: MixedPrecisionPolicy, root: bool) -> MixedPrecisionPolicy:
    # Only the root casts its output: inside the model the next unit expects the compute dtype.
    if root or policy.output_dtype is None:
        return policy
    return MixedPrecisionPolicy(
        policy.param_dtype, policy.reduce_dtype, cast_forward_inputs=policy.cast_forward_inputs
    )


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a tensor, detached."""
    data = tensor.detach()
    return data.to_local() if isinstance(data, DTensor) else data


def broadcast_over_mesh(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Broadcast a tensor in place from the first rank of ``mesh`` to all its ranks."""
    whole = tensor.contiguous()
    for axis in range(mesh.ndim):
        # Along the outer dimensions only the ranks that broadcast further need the values.
        if all(mesh.get_local_rank(inner) == 0 for inner in range(axis + 1, mesh.ndim)):
            group = mesh.get_group(axis)
            if dist.get_world_size(group) > 1:
                dist.broadcast(whole, src=dist.get_global_rank(group, 0), group=group)
    if whole is not tensor:
        tensor.copy_(whole)


def _replaced_params(
    before: Mapping[tuple[nn.Module, str], torch.Tensor],
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return (old, new) of every replaced parameter, by ``id`` of the old one."""
    pairs = ((old, module._parameters[name]) for (module, name), old in before.items())
    return {id(old): (old, new) for old, new in pairs if new is not None and new is not old}


def exchange_model_info(
    model: nn.Module, initialize: InitFunction | None, mesh: DeviceMesh
) -> tuple[InitFunction | None, InitialWeights]:
    """Exchange the ranks' model info, and refuse models that differ by more than their values.

    Ranks of another mesh may have other parameters (pipeline parallel).

    Args:
        model: the model.
        initialize: fills a module that has no values on the first rank of its mesh.
        mesh: the mesh over which this rank's parameters are sharded.

    Returns:
        (``initialize`` where the first rank has no values either, else None; the source of the weights)

    Raises:
        PrepareError: on all ranks, whichever mesh it is about.
    """
    bare = any(p.is_meta for p in model.parameters())
    first = int(mesh.mesh.flatten()[0])
    answers = collective.all_gather_object(
        (InitialWeightsInfo(model_digest(model), first, weight_marks(model)), bare), "prepare(model)"
    )
    if len(answers) == 1:  # a dry run: the other ranks are not there, and no values are needed
        return None, InitialWeights(model)
    infos: list[InitialWeightsInfo] = [info for info, _ in answers]
    other = [rank for rank, info in enumerate(infos) if info.digest != infos[info.leader].digest]
    if other:
        raise unequal_models_error(model, other[0], infos[other[0]].leader)
    empty = find_unlike_leader(infos)
    if empty is not None and initialize is None:
        raise PrepareError(
            f"parameters of the {type(model).__name__} are on the meta device on rank {empty}",
            why=f"others get shards of the weights of rank {empty}, and ranks of other meshes have weights",
            fix=f"load the weights on rank {empty} too, or give the plugin a param_init_fn",
        )
    initializer = initialize if answers[first][1] else None
    return initializer, InitialWeights(model, infos, collective.rank(), initialized=initializer is not None)


def checkpoint_activations(model: nn.Module, blocks: list[nn.Module], offload: bool = False) -> None:
    """Apply activation checkpointing to each block; names stay as they are.

    Args:
        model: the model around the blocks; ``use_cache`` is turned off while it trains.
        blocks: the blocks; one inside another is left out.
        offload: keep the inputs of each block on the host until the backward.

    Raises:
        PrepareError: there is no block.
    """
    from torch.distributed._composable.checkpoint_activation import checkpoint

    if not blocks:
        raise PrepareError(
            "activation_checkpointing, but no module of the model is wrapped",
            why="the activations of each FSDP unit are computed again in the backward",
            fix="set auto_wrap_policy, for example 'transformer_based_wrap'",
        )
    inside = {part for block in blocks for part in block.modules() if part is not block}
    for block in blocks:
        if block not in inside:
            if offload:
                offload_inputs(block)
            checkpoint(block)
    disable_cache(model)


def set_prefetch(model: nn.Module, forward: bool, backward: bool) -> None:
    """Set which FSDP units are prefetched.

    Torch's default in the forward is implicit prefetching by the device's queue, and in the backward to
    prefetch the unit before the one that computes.

    Args:
        model: the sharded model.
        forward: each unit prefetches the next one before it computes, by the order of the modules.
        backward: torch's default; False all-gathers each unit when its own backward begins.
    """
    units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if forward:
        for unit, following in pairwise(units):
            unit.set_modules_to_forward_prefetch([following])
    if not backward:
        for unit in units:
            # The unit itself is unsharded already: nothing is prefetched.
            unit.set_modules_to_backward_prefetch([unit])


def remap_optimizer_params(
    renewed: Mapping[int, tuple[torch.Tensor, torch.Tensor]], optimizers: list[Optimizer]
) -> None:
    """Make optimizers hold the sharded parameters, and shard their state."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for place, old in enumerate(group["params"]):
                if id(old) in renewed:
                    new = renewed[id(old)][1]
                    group["params"][place] = new
                    if old in optimizer.state:
                        optimizer.state[new] = _shard_optimizer_state(optimizer.state.pop(old), new)


def _shard_optimizer_state(state: dict[str, Any], parameter: Any) -> dict[str, Any]:
    """Broadcast the optimizer state of one parameter from the first rank, and shard it."""
    for value in state.values():
        if type(value) is torch.Tensor and value.shape == parameter.shape:
            broadcast_over_mesh(value, parameter.device_mesh)
    return {name: distribute(value, parameter) for name, value in state.items()}


def verify_sharded(model: nn.Module, layout: FSDPShardingPlan) -> None:
    """Check that every parameter is sharded, and has the planned dtype.

    Raises:
        PrepareError: a parameter is not as planned; an error of this package.
    """
    for name, parameter in model.named_parameters():
        if parameter in layout.ignored:
            continue
        if not isinstance(parameter, DTensor) or layout.upcasts(parameter):
            raise PrepareError(
                f"the parameter {name} was not sharded as planned: it is a {type(parameter).__name__} of "
                f"{parameter.dtype}"
            )


def is_sharded(model: nn.Module) -> bool:
    """Return whether ``model`` as a whole was sharded."""
    return isinstance(model, FSDPModule)
