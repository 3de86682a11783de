"""The sharder of FSDP2: shards a model in place, unit by unit, with one unsharded unit in memory at a time.

Source: Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel"
(arXiv:2304.11277), and ``torch.distributed.fsdp.fully_shard``, which does the work.

``fully_shard`` gives a model new parameters without the gradient hooks of the old ones; they are moved here.
No graph reaches a sharded parameter: hooks of ``Tensor.register_hook`` have to be on the unsharded one, which
the first forward makes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from accelerate.core.errors import PrepareError, list_first, warn_user
from accelerate.core.torch_internals import accepts, require
from accelerate.strategy.sharding.activation_checkpointing import checkpoint_activations
from accelerate.strategy.sharding.fsdp2_options import NORM_UNITS
from accelerate.strategy.sharding.full_state import distribute, mark_shards
from accelerate.strategy.sharding.grads import (
    UsedParams,
    fsdp_param_groups,
    fsdp_params,
    hook_output,
    make_unsharded,
    unsharded_param,
)
from accelerate.strategy.sharding.initial_weights import (
    InitialWeights,
    InitialWeightsInfo,
    find_unlike_leader,
    is_unwritten,
    materialize_modules,
    weight_marks,
)
from accelerate.strategy.sharding.plugin import FullyShardedDataParallelPlugin
from accelerate.strategy.sharding.sharding_layout import ShardingLayout, model_digest, unequal_models_error
from accelerate.world import collective

require("hooks of parameters")

_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
_FLOATS_ONLY = _VERSION < (2, 12)  # shards floating point dtypes only
# Told to average, gloo of torch 2.8 sums in a reduce-scatter, without an error; that of 2.10 averages.
GLOO_SUMS = _VERSION < (2, 10)
InitFunction = Callable[[nn.Module], None]


@dataclass
class Sharder:
    """Shards models over a device mesh, and remaps optimizers to the new parameters.

    The mesh may be a submesh: ranks outside of it hold other shards of the same parameters (tensor parallel)
    or other parameters (pipeline parallel).

    Attributes:
        mesh: the device mesh: one dimension of shards, or two with replicas (HSDP).
        plugin: the options.
        device: where this rank computes.
        replicated_meshes: more meshes of one dimension, along which parameters are replicated unless they are
            DTensors.
        checkpoints: apply activation checkpointing.
        is_data_parallel: each rank computes from samples of its own, whole ones.
    """

    mesh: DeviceMesh
    plugin: FullyShardedDataParallelPlugin
    device: torch.device
    replicated_meshes: Sequence[DeviceMesh] = ()
    _: KW_ONLY
    checkpoints: bool = False
    is_data_parallel: bool = True

    def shard(
        self,
        model: nn.Module,
        layout: ShardingLayout,
        optimizers: Sequence[Any],
        replaced: MutableMapping[torch.Tensor, torch.Tensor],
    ) -> None:
        """Shard ``model``; afterwards all ranks of the mesh have the weights of its first rank.

        Args:
            model: the model; its parameters may be on the meta device (on the first rank of the mesh too:
                then their values come later), or mapped from files. DTensors are sharded further.
            layout: its layout.
            optimizers: the optimizers that may hold its parameters.
            replaced: gets the new parameters, by the old ones.

        Raises:
            PrepareError: the ranks have other models, or torch is too old.
        """
        plugin, policy = self.plugin, layout.precision or MixedPrecisionPolicy()
        if self.device.type == "cpu" and not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
            raise _old_torch_error("does not compute on a CPU")
        if layout.ignored and not accepts(fully_shard, "ignored_params"):
            raise _old_torch_error("shards every parameter, and some are to be ignored")
        if _FLOATS_ONLY:
            _check_floats(model, layout)
        initialize, values = exchange_model_info(model, plugin.param_init_fn, self.mesh)
        if self.checkpoints and (layout.blocks or plugin.auto_wrap_policy is None):
            checkpoint_activations(model, layout.blocks, bool(plugin.activation_checkpointing_offload))
        options: dict[str, Any] = {"mesh": self.mesh, "offload_policy": plugin.cpu_offload}
        if isinstance(plugin.cpu_offload, CPUOffloadPolicy) and self.device.type == "cpu":
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)  # there is no pinned memory
        if layout.ignored:  # older versions of torch do not have the argument
            options["ignored_params"] = layout.ignored
        # Only the root casts its output: inside the model the next unit expects the compute dtype.
        inner_policy = replace(policy, output_dtype=None)
        norm_policy = replace(inner_policy, param_dtype=None)
        # By default the root is not resharded after the forward: the backward needs it first.
        reshard = {"reshard_after_forward": plugin.reshard_after_forward}
        root_reshard = {} if plugin.reshard_after_forward else reshard
        done: set[nn.Module] = set()
        buffers: Any = WeakIdKeyDictionary()
        make: Any = partial(values.materialize, layout) if values.sources else layout.materialize
        make = partial(make, device=self.device)
        for part in (*layout.norms, *layout.blocks, model):
            modules = [module for module in part.modules() if module not in done]
            done.update(modules)
            before = {(m, n): p for m in modules for n, p in m._parameters.items() if p is not None}
            # A parameter has all of its places in one unit; unsharded ones are freed with the unit.
            unwritten = materialize_modules(modules, (WeakIdKeyDictionary(), buffers), make, initialize)
            self._broadcast_values(modules, values, layout.ignored)
            # The tables and names of the tensors that the broadcast did not fill either.
            left = {id(tensor) for tensor in unwritten if is_unwritten(tensor)}
            tables: Any = [table for m in modules for table in (m._parameters, m._buffers)] if left else ()
            places = [(table, name) for table in tables for name, t in table.items() if id(t) in left]
            waiting = values.pending_params(modules) if values.sources else {}
            if part is model:
                fully_shard(part, mp_policy=policy, **options, **root_reshard)
            elif part in layout.norms:
                # It is small: it stays all-gathered for the backward.
                fully_shard(part, mp_policy=norm_policy, **options, reshard_after_forward=False)
            else:
                fully_shard(part, mp_policy=inner_policy, **options, **reshard)
            if waiting:
                values.fill_params(part, waiting)
            for table, name in places:
                values.expect_later(table[name])
            pairs = [(old, m._parameters[n]) for (m, n), old in before.items()]
            renewed = {id(old): (old, new) for old, new in pairs if new is not None and new is not old}
            remap_optimizer_params(renewed, optimizers)
            replaced.update(renewed.values())
            if any(old._backward_hooks or old._post_accumulate_grad_hooks for old, _ in renewed.values()):
                move_hooks(renewed.values())
                call_hooks_of_unit(part, modules)
            # The unsharded parameters are freed here: nobody holds them any more.
            del before, pairs, renewed
        self._finish(model, layout, replaced)
        if values.sources or initialize is not None:
            values.guard_forward(model)

    def _broadcast_values(
        self, modules: list[nn.Module], values: InitialWeights, ignored: set[nn.Parameter]
    ) -> None:
        """Broadcast the values of a unit from the first rank, but for those that are elsewhere."""
        tensors = [t for m in modules for table in (m._parameters, m._buffers) for t in table.values()]
        for tensor in {id(t): t for t in tensors if t is not None}.values():
            if tensor.is_meta or tensor in values.sources:
                continue
            if isinstance(tensor, DTensor) and tensor in ignored:
                continue  # each rank has another shard, of the program's
            local = tensor.detach()
            if isinstance(local, DTensor):
                local = local.to_local()
            else:
                for mesh in self.replicated_meshes:
                    broadcast_over_mesh(local, mesh)
            broadcast_over_mesh(local, self.mesh)

    def _finish(
        self, model: nn.Module, layout: ShardingLayout, replaced: Mapping[torch.Tensor, torch.Tensor]
    ) -> None:
        """Set how the units of a sharded model run; warn of parameters that modules hold elsewhere."""
        NORM_UNITS.update(layout.norms)
        if GLOO_SUMS:
            average_on_cpu(model, self.device)
        forward, backward = self.plugin._prefetch_flags
        if forward or not backward:
            _set_prefetch(model, forward, backward)
        groups = list(fsdp_param_groups(model))
        params = [p for group in groups for p in group.fsdp_params]
        used = UsedParams(params, self.mesh, layout.upcast, self.is_data_parallel)
        for group in groups:
            group.post_backward = partial(used.post_backward, group, group.post_backward)
            group.wait_for_unshard = partial(make_unsharded, group)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                state: Any = module._get_fsdp_state()
                register = state._register_pre_backward_hook
                if not isinstance(register, partial):  # several modules may be one unit
                    state._register_pre_backward_hook = partial(hook_output, module, state, register)
        model._register_state_dict_hook(mark_shards)
        # A parameter that is held in a list, tuple, set or dict too is the old one there.
        for name, module in model.named_modules():
            for attribute, value in vars(module).items():
                held: Any = value.values() if isinstance(value, dict) else value
                if isinstance(value, dict | list | tuple | set) and any(
                    isinstance(each, nn.Parameter) and each in replaced for each in held
                ):
                    owner = name or type(model).__name__
                    warn_user(
                        f"{owner}.{attribute} holds a parameter that sharding has replaced, so what computes "
                        "with it has the weights of before, which are not trained. Compute with the "
                        "attribute that registers it, as in self.embed.weight"
                    )


def _check_floats(model: nn.Module, layout: ShardingLayout) -> None:
    """Refuse parameters of whole numbers."""
    names = [
        name
        for name, p in model.named_parameters()
        if p not in layout.ignored and not (p.is_floating_point() or p.is_complex())
    ]
    if names:
        raise PrepareError(
            f"FSDP2 of torch {torch.__version__} cannot shard {list_first(names)}",
            why="before torch 2.12 it shards floating point dtypes only",
            fix="pip install 'torch>=2.12', or quantize with bnb_4bit_quant_storage of the compute dtype",
        )


def _old_torch_error(problem: str) -> PrepareError:
    return PrepareError(
        f"FSDP2 of torch {torch.__version__} {problem}",
        why="torch's fully_shard came to it in a later version",
        fix="pip install 'torch>=2.8', or fsdp_version=1",
    )


def average_on_cpu(model: nn.Module, device: torch.device) -> None:
    """Let torch divide the sums of a sharded model's gradients, if it is on the CPU.

    Raises:
        PrepareError: this version of torch cannot.
    """
    if device.type == "cpu" and not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise _old_torch_error("does not compute on a CPU")
    for module in model.modules() if device.type == "cpu" else ():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


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
    own = InitialWeightsInfo(model_digest(model), weight_marks(model), bare)
    infos = collective.compare_objects(own, "prepare(model)")
    if collective.world_size() == 1:  # a dry run: the other ranks are not there, and no values are needed
        return None, InitialWeights(model)
    first = int(mesh.mesh.flatten()[0])
    if len(infos) > 1:
        _refuse_unlike_models(model, initialize, infos, mesh)
    leader = infos[first if len(infos) > 1 else 0]  # one info stands for all ranks
    initializer = initialize if leader.is_bare else None
    values = InitialWeights(model, leader, dict.fromkeys(infos), initialized=initializer is not None)
    return initializer, values


def _refuse_unlike_models(
    model: nn.Module, initialize: InitFunction | None, infos: list[InitialWeightsInfo], mesh: DeviceMesh
) -> None:
    """Refuse models that differ within a mesh, and leaders with and without values; collective."""
    first = int(mesh.mesh.flatten()[0])
    leaders = (
        [first] * len(infos)
        if mesh.size() == len(infos)
        else collective.all_gather_object(first, "the first ranks of the meshes in prepare(model)")
    )
    for rank, leader in enumerate(leaders):
        if infos[rank].digest != infos[leader].digest:
            raise unequal_models_error(model, rank, leader)
    empty = find_unlike_leader(infos, dict.fromkeys(leaders))
    if empty is not None and initialize is None:
        raise PrepareError(
            f"parameters of the {type(model).__name__} are on the meta device on rank {empty}",
            why=f"others get shards of the weights of rank {empty}, and ranks of other meshes have weights",
            fix=f"load the weights on rank {empty} too, or give the plugin a param_init_fn",
        )


def _set_prefetch(model: nn.Module, forward: bool, backward: bool) -> None:
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
    renewed: Mapping[int, tuple[torch.Tensor, torch.Tensor]], optimizers: Sequence[Optimizer]
) -> None:
    """Make optimizers hold the sharded parameters, and shard their state."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for place, old in enumerate(group["params"]):
                if id(old) in renewed:
                    new = renewed[id(old)][1]
                    group["params"][place] = new
                    if old in getattr(optimizer, "state", ()):
                        optimizer.state[new] = _shard_optimizer_state(optimizer.state.pop(old), new)


def _shard_optimizer_state(state: dict[str, Any], parameter: Any) -> dict[str, Any]:
    """Broadcast the optimizer state of one parameter from the first rank, and shard it.

    A parameter that only moved to its device (pipeline parallel) takes its state along; it is sharded later.
    """
    if not isinstance(parameter, DTensor):
        return {
            name: value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() else value
            for name, value in state.items()
        }
    for value in state.values():
        if type(value) is torch.Tensor and value.shape == parameter.shape:
            broadcast_over_mesh(value, parameter.device_mesh)
    return {name: distribute(value, parameter) for name, value in state.items()}


def has_hooks(parameter: torch.Tensor) -> bool:
    """Return whether functions of the user wait for the gradient of a parameter."""
    return _has_own_hooks(parameter) or bool(parameter._post_accumulate_grad_hooks)


def _has_own_hooks(parameter: torch.Tensor) -> bool:
    return any(not _steps_in_backward(hook) for hook in (parameter._backward_hooks or {}).values())


def _steps_in_backward(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is that of LOMO, which updates in it what has a gradient by then.

    Sharded parameters have theirs at the end of the backward, where ``fused_backward`` updates what is left.
    """
    for cell in getattr(hook, "__closure__", None) or ():
        with suppress(ValueError):  # a variable that is not assigned yet
            if callable(getattr(cell.cell_contents, "fused_backward", None)):
                return True
    return False


def move_hooks(replaced: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give new parameters the hooks of the old ones; the handles that the user has remove them still."""
    for old, new in replaced:
        if _has_own_hooks(old):
            new._backward_hooks = old._backward_hooks
        if old._post_accumulate_grad_hooks:
            new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks


def call_hooks_of_unit(unit: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Call the hooks of the sharded parameters of an FSDP unit on the gradients of its unsharded ones.

    They get this rank's gradient before it is reduced, as under DDP.

    Args:
        unit: the unit, sharded; its next forward has the unsharded parameters.
        modules: its modules.
    """
    hooked = [
        (m, n, p) for m in modules for n, p in m._parameters.items() if p is not None and p._backward_hooks
    ]
    hooks_of: list[Any] = [(module, name, sharded._backward_hooks) for module, name, sharded in hooked]
    if not hooked:
        return
    for _, _, sharded in hooked:
        sharded._backward_hooks = None

    def attach(*_: Any) -> None:
        handle.remove()
        for whole, hooks in {module._parameters[name]: hooks for module, name, hooks in hooks_of}.items():
            if whole is not None:
                trains = whole.requires_grad  # one that was frozen since may train later
                whole.requires_grad_(True).register_hook(_caller_of(hooks))
                whole.requires_grad_(trains)

    uncompiled: Any = torch.compiler.disable(attach)
    handle = unit.register_forward_pre_hook(uncompiled)


def call_late_hooks(model: nn.Module) -> None:
    """Call hooks that are registered on the sharded parameters of a model before its first forward, or later.

    The forward has made the unsharded parameters, and the backward is to come.
    """
    for sharded, fsdp_param in fsdp_params([model]).items():
        whole = unsharded_param(fsdp_param)
        if whole is not None and sharded._backward_hooks:
            whole.register_hook(_caller_of(sharded._backward_hooks))
        elif whole is not None:
            sharded._backward_hooks = _LateHooks(whole)


class _LateHooks(OrderedDict[int, Callable[..., Any]]):
    """The hooks of a sharded parameter; the first that is registered makes the unsharded one call all."""

    def __init__(self, whole: torch.Tensor) -> None:
        super().__init__()
        self.whole: torch.Tensor | None = whole

    def __setitem__(self, key: int, hook: Callable[..., Any]) -> None:
        super().__setitem__(key, hook)
        whole, self.whole = self.whole, None
        if whole is not None:
            # The sharded one trains, and the next all-gather would say so here.
            whole.requires_grad_(True).register_hook(_caller_of(self))


def _caller_of(hooks: Mapping[int, Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def call(gradient: Any) -> Any:
        if gradient is None:  # the node of all pipeline stages, which has the gradients by other graphs
            return None
        for hook in tuple(hooks.values()):
            changed = None if _steps_in_backward(hook) else hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    return call
