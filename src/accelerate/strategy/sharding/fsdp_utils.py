"""The functions of ``accelerate.utils.fsdp_utils`` for a sharded model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accelerate import device as devices
from accelerate.core import environ
from accelerate.core.errors import PrepareError, list_first
from accelerate.strategy.sharding.activation_checkpointing import checkpoint_activations
from accelerate.strategy.sharding.fsdp2_sharder import GLOO_SUMS, average_on_cpu, remap_optimizer_params
from accelerate.strategy.sharding.grads import fsdp_params
from accelerate.strategy.sharding.initial_weights import allocate_shard
from accelerate.strategy.sharding.plugin import FullyShardedDataParallelPlugin
from accelerate.strategy.sharding.sharding_layout import find_units
from accelerate.world import collective
from accelerate.world import world as worlds
from accelerate.world.local_tensor_trees import local_tensor
from accelerate.world.shard_boxes import local_shard

# The parts that torch's wrappers add to names.
_WRAPPER_NAMES = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.|_fsdp_wrapped_module\.")


def enable_fsdp_ram_efficient_loading() -> None:
    """Let libraries read pretrained weights on rank 0 only; sharding broadcasts the others their shards."""
    environ.set_variables({"ACCELERATE_USE_FSDP": "True", "FSDP_CPU_RAM_EFFICIENT_LOADING": "True"})


def disable_fsdp_ram_efficient_loading() -> None:
    """Let libraries read pretrained weights on every rank."""
    environ.set_variables({"FSDP_CPU_RAM_EFFICIENT_LOADING": "False"})


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: FullyShardedDataParallelPlugin, model: nn.Module
) -> Callable[[nn.Module], bool] | None:
    """Return a function that says which modules of ``model`` are FSDP units; None when only the root is."""
    policy = fsdp2_plugin.policy_for(model)
    if policy is None:
        return None
    chosen = set(find_units(model, policy, set()))
    return lambda module: module in chosen


def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """Shard ``model`` in place, as the plugin of ``accelerator`` says.

    Raises:
        PrepareError: the accelerator does not train by FSDP2.
    """
    if not hasattr(accelerator.strategy, "shard"):
        raise PrepareError(
            f"the Accelerator trains by {accelerator.strategy.name}, which shards nothing in place",
            fix="Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, ...)), with two "
            "processes or more",
        )
    accelerator.strategy.shard(model)
    return model


def shard_by(shard: Callable[[Any, nn.Module], nn.Module], accelerator: Any, model: nn.Module) -> nn.Module:
    """Shard ``model`` by a program's own function; optimizers follow its parameters by their names.

    Args:
        shard: takes the place of ``fsdp2_prepare_model``.
        accelerator: an ``Accelerator`` that trains by FSDP2.
        model: a model that is sharded already comes back as it is.
    """
    strategy = accelerator.strategy
    if strategy._is_sharded(model):
        return model
    before = dict(model.named_parameters())
    sharded = shard(accelerator, model)
    if GLOO_SUMS:
        average_on_cpu(sharded, strategy.world.device)
    after = fsdp2_canonicalize_names(dict(sharded.named_parameters()))
    pairs = ((old, after.get(name, old)) for name, old in before.items())
    strategy._remap_optimizers({id(old): (old, new) for old, new in pairs if new is not old}, [])
    strategy._register(sharded)
    return sharded


def fsdp2_apply_ac(accelerator: Any, model: nn.Module) -> nn.Module:
    """Checkpoint the activations of each FSDP unit of ``model``; before sharding."""
    plugin: FullyShardedDataParallelPlugin = accelerator.strategy.plugin
    units = find_units(model, plugin.policy_for(model), set())
    if units or plugin.auto_wrap_policy is None:
        checkpoint_activations(model, units, bool(plugin.activation_checkpointing_offload))
    return model


def fsdp2_canonicalize_names(named_params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters by the user's names, without the parts that torch's wrappers add."""
    return {_WRAPPER_NAMES.sub("", name): value for name, value in named_params.items()}


def fsdp2_switch_optimizer_parameters(optimizer: Optimizer, mapping: Mapping[Any, torch.Tensor]) -> None:
    """Make ``optimizer`` hold new parameters, with its state.

    Args:
        optimizer: any.
        mapping: the new parameters, by the old ones or by the addresses (``data_ptr``) of their data.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    named = {id(old): (old, new) for old, new in mapping.items() if isinstance(old, torch.Tensor)}
    placed = {
        id(p): (p, mapping[p.data_ptr()])
        for p in params
        if not isinstance(p, DTensor) and p.data_ptr() in mapping
    }
    remap_optimizer_params({**placed, **named}, [optimizer])


@torch.no_grad()
def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: dict[str, Any], cpu_offload: bool = False
) -> None:
    """Load a full state dict that rank 0 has into the shards of all ranks; broadcasts one tensor at a time.

    Args:
        accelerator: an ``Accelerator``.
        model: sharded; what is on the meta device gets memory.
        full_sd: the full state dict; only that of rank 0 counts.
        cpu_offload: kept for compatibility; shards stay where the parameters are.

    Raises:
        PrepareError: on all ranks, if a tensor of the model is missing in it, or has another shape.
    """
    device, first = accelerator.device, accelerator.process_index == 0
    state = model.state_dict(keep_vars=True)
    targets = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    error = collective.broadcast_object(_describe_misfit(targets, full_sd) if first else "")
    if error:
        raise PrepareError(
            f"the state does not fit the {type(model).__name__}: {error}",
            why="rank 0 has the state, and the others wait for each tensor of the model",
        )
    by_param = fsdp_params([model])
    for name, target in targets.items():
        whole = torch.empty(target.shape, dtype=target.dtype, device=device)
        if first:
            whole.copy_(full_sd[name])
        dist.broadcast(whole, src=0)
        values = local_shard(whole, target) if isinstance(target, DTensor) else whole
        if target.is_meta and target in by_param:
            allocate_shard(by_param[target], values)
        elif target.is_meta:
            new: Any = torch.empty_like(target, device=device)
            local_tensor(new).copy_(values)
            requires_grad = target.requires_grad
            is_parameter = isinstance(target, nn.Parameter)
            torch.utils.swap_tensors(target, nn.Parameter(new, requires_grad) if is_parameter else new)
        else:
            local_tensor(target).copy_(values)


def _describe_misfit(targets: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> str:
    """Return why a full state dict cannot be loaded into these tensors; nothing if it can."""
    missing = [name for name in targets if name not in state]
    if missing:
        return f"it lacks {list_first(missing)}"
    other = [name for name, target in targets.items() if state[name].shape != target.shape]
    shapes = [f"{n} has the shape {tuple(state[n].shape)}, not {tuple(targets[n].shape)}" for n in other]
    return list_first(shapes) if shapes else ""


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Return torch's own scaler: it supports DTensors, and all ranks skip a step together."""
    return torch.amp.GradScaler(**kwargs)


def get_grad_scaler(distributed_type: str | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a gradient scaler for this process's device.

    Args:
        distributed_type: how the model is trained. Under FSDP the ranks agree on overflows in their shards.
        kwargs: arguments of ``torch.amp.GradScaler``.
    """
    world = worlds.current()
    scaler = ShardedGradScaler if distributed_type == "FSDP" else torch.amp.GradScaler
    return scaler((world.hardware if world else devices.detect()).type, **kwargs)


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: Any
) -> set[nn.Parameter]:
    """Return the parameters of some modules of ``model``, after moving these to ``device``.

    Args:
        modules: the modules, or a regular expression that matches their full names.
        model: the model.
        device: where they go.
    """
    if modules is None:
        return set()
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    return {parameter for module in modules for parameter in module.to(device).parameters()}


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any], model: nn.Module, device: Any
) -> Callable[[nn.Module], nn.Module]:
    """Wrap ``param_init_fn`` for a model with tied parameters: the new parameters are tied again.

    Args:
        param_init_fn: gives one module (not those inside it) parameters with data.
        model: the model.
        device: where the parameters go.
    """
    owners: dict[nn.Parameter, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[parameter] = owners.get(parameter, 0) + 1
    new_params: dict[nn.Parameter, nn.Parameter] = {}

    def initialize(module: nn.Module) -> nn.Module:
        before = dict(module._parameters)
        param_init_fn(module)
        for name, old in before.items():
            new = module._parameters[name]
            if old is not None and new is not None and owners.get(old, 0) > 1:
                module._parameters[name] = new_params.setdefault(old, new)
        return module

    return initialize
