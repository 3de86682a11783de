"""What became of the options of sharding, seen on torch's records of the sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from accelerate.core import environ
from accelerate.core.effects import Effect, Option, given
from accelerate.strategy.sharding.activations import keeps_on_host
from accelerate.strategy.sharding.formats import formats
from accelerate.strategy.sharding.grads import groups
from accelerate.strategy.sharding.plugin import FullyShardedDataParallelPlugin

_IGNORED = (
    "it is an option of version 1; version 2 always keeps the user's own parameters, and begins with the "
    "weights of rank 0"
)


def effects(
    switch: Iterable[Option],
    plugin: FullyShardedDataParallelPlugin,
    models: Sequence[nn.Module],
    implied: MixedPrecisionPolicy | None = None,
) -> Iterator[Effect]:
    """What became of the switch and of each option of the plugin.

    Args:
        switch: by what sharding was asked for.
        plugin: how to shard.
        models: those that were sharded.
        implied: the number formats that follow from the precision, where the plugin says none.
    """
    for option in switch:
        if option.value is not True:  # the plugin itself
            continue
        yield option.applied(_count(models)) if models else option.pending(NOTHING)
    for option in _options(plugin):
        look = _LOOK.get(option.name)
        if option.name.removeprefix("fsdp_") in plugin._ignored:
            yield option.failed(_IGNORED)
        elif look is None:
            yield option.applied()
        elif not models:
            yield option.pending(NOTHING)
        else:
            yield look(option, models)
    found = formats(models) if implied is not None and plugin.mixed_precision_policy is None else None
    wrong = found.other_than(implied) if found is not None and implied is not None else ""
    if wrong:
        yield Option("mixed_precision", str(implied), "the precision").failed(wrong)


NOTHING = "no model that trains is prepared"


def options(plugin: FullyShardedDataParallelPlugin, yes: Collection[str]) -> Iterator[Option]:
    """Those that were given; what no text can say is an object in a field.

    Args:
        yes: "no" asks for nothing, but where, as in these, "yes" is what is done otherwise.
    """
    named = {option.name: option for option in given(plugin._found)}
    yield from (option for name, option in named.items() if option.value is not False or name in yes)
    where = type(plugin).__name__
    if plugin.offloads and "fsdp_offload_params" not in named:
        yield Option("fsdp_offload_params", True, where)
    if not plugin.limit_all_gathers:
        yield Option("limit_all_gathers", False, where)
    if plugin.auto_wrap_policy is not None and "fsdp_auto_wrap_policy" not in named:
        yield Option("fsdp_auto_wrap_policy", "a policy", where)


def _options(plugin: FullyShardedDataParallelPlugin) -> Iterator[Option]:
    yield from options(plugin, {"fsdp_reshard_after_forward", *(f"fsdp_{name}" for name in plugin._ignored)})
    where = type(plugin).__name__
    if plugin.mixed_precision_policy is not None:
        yield Option("mixed_precision_policy", plugin.mixed_precision_policy, where)
    if plugin._buffers is not None:
        yield Option("buffer_dtype", plugin._buffers, where)


def _parts(models: Sequence[nn.Module]) -> int:
    """Modules that are gathered by themselves, the models left out."""
    return sum(isinstance(part, FSDPModule) for model in models for part in model.modules()) - len(models)


def _count(models: Sequence[nn.Module]) -> str:
    sharded = sum(len(group.fsdp_params) for model in models for group in groups(model))
    return f"{sharded} parameters are sharded"


def wrapped(option: Option, parts: int) -> Effect:
    """How many parts, the model left out, are gathered by themselves."""
    if str(option.value) == "NO_WRAP":
        return option.seen(f"{parts} parts are gathered by themselves" if parts else "")
    if not parts:
        return option.failed("it matches no part of the model, which is gathered as a whole")
    return option.applied(f"{parts} parts are gathered by themselves")


def _wrapped(option: Option, models: Sequence[nn.Module]) -> Effect:
    return wrapped(option, _parts(models))


def _offloaded(option: Option, models: Sequence[nn.Module]) -> Effect:
    records: list[Any] = [p for model in models for group in groups(model) for p in group.fsdp_params]
    there = [p for p in records if p.offload_to_cpu and p.sharded_param.to_local().device.type == "cpu"]
    return option.counted(len(there), len(records), "parameters lie on the host", "others are on the device")


def recomputed(option: Option, models: Sequence[nn.Module]) -> Effect:
    """How many parts compute their activations again."""
    parts = [part for model in models for part in model.modules() if checkpoint.state(part) is not None]
    why = "no part of the model computes its activations again"
    return option.applied(f"{len(parts)} parts") if parts else option.failed(why)


def _on_host(option: Option, models: Sequence[nn.Module]) -> Effect:
    parts = [part for model in models for part in model.modules() if keeps_on_host(part)]
    if not parts:
        return option.failed("no part of the model computes its activations again")
    here = next((p.device.type for model in models for p in model.parameters()), "cpu")
    device = next((group.device.type for model in models for group in groups(model)), here)
    if device == "cpu":
        return option.applied(f"the inputs of {len(parts)} parts are on the host anyway")
    return option.applied(f"the inputs of {len(parts)} parts wait there for the backward")


def _ahead(option: Option, models: Sequence[nn.Module]) -> Effect:
    """In the forward: each part but the last asks for the next."""
    asking = [s for s in _states(models) if s._states_to_forward_prefetch]
    return option.counted(
        len(asking), _parts(models) + len(models), "parts ask for the next", "there is none after them"
    )


def _behind(option: Option, models: Sequence[nn.Module]) -> Effect:
    """In the backward: torch gathers the next part by itself, unless a part names others."""
    own = [state for state in _states(models) if state._states_to_backward_prefetch]
    if str(option.value).upper() in ("1", "BACKWARD_PRE"):
        return option.seen("parts wait for their own backward" if own else "")
    if len(own) < _parts(models) + len(models):
        return option.failed("torch gathers the next part ahead")
    return option.applied("each part is gathered when its own backward begins")


def _states(models: Sequence[nn.Module]) -> list[Any]:
    parts = (part for model in models for part in model.modules() if isinstance(part, FSDPModule))
    return [part._get_fsdp_state() for part in parts]


def _buffers(option: Option, models: Sequence[nn.Module]) -> Effect:
    kept = {b.dtype for model in models for b in model.buffers() if b.is_floating_point()} - {option.value}
    shown = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in kept))
    return option.seen(f"version 2 leaves buffers as they are: {shown}" if kept else "")


def _formats(option: Option, models: Sequence[nn.Module]) -> Effect:
    """The types that are there after a forward, against the policy."""
    found = formats(models)
    if found is None:
        return option.pending("no forward has run")
    wrong = found.other_than(option.value)
    return option.failed(wrong) if wrong else option.applied(str(found))


def _resharded(option: Option, models: Sequence[nn.Module]) -> Effect:
    """Torch never frees the outermost part after the forward: its backward begins at once."""
    inner = [group for model in models for group in groups(model) if group not in _outermost(model)]
    wanted = str(option.value).lower() in ("true", "1", "full_shard", "hybrid_shard", "4")
    other = [group for group in inner if group._reshard_after_forward != wanted]
    what = "keep" if wanted else "free"
    return option.seen(
        f"{len(other)} of {len(inner)} parts {what} whole parameters after the forward" if other else ""
    )


def _spread(option: Option, models: Sequence[nn.Module]) -> Effect:
    """Over which processes: all, or those of each copy."""
    found = _resharded(option, models)
    meshes = {group.mesh_info.mesh for model in models for group in groups(model)}
    if found.failed or not meshes:
        return found
    sizes = {tuple(mesh.shape) for mesh in meshes}
    said = ", ".join(
        f"{shape[0]} copies over {shape[1]} processes each"
        if len(shape) == 2
        else f"over {shape[0]} processes"
        for shape in sizes
    )
    return option.applied(said)


def _copies(option: Option, models: Sequence[nn.Module]) -> Effect:
    sizes = {(1, *group.mesh_info.mesh.shape)[-2] for model in models for group in groups(model)}
    return option.seen("" if sizes == {option.value} else f"there are {sizes} copies")


def _outermost(model: Any) -> list[Any]:
    state = model._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None)
    return [state._fsdp_param_group] if found is None else list(found)


def loads_on_rank_0(option: Option, models: Sequence[nn.Module]) -> Effect:
    """Whether libraries are told."""
    told = environ.flag("FSDP_CPU_RAM_EFFICIENT_LOADING")
    return option.seen("" if told else "libraries that load weights are not told")


_LOOK: dict[str, Callable[[Option, Sequence[nn.Module]], Effect]] = {
    "fsdp_auto_wrap_policy": _wrapped,
    "fsdp_offload_params": _offloaded,
    "fsdp_activation_checkpointing": recomputed,
    "fsdp_activation_checkpointing_offload": _on_host,
    "fsdp_forward_prefetch": _ahead,
    "fsdp_backward_prefetch": _behind,
    "mixed_precision_policy": _formats,
    "buffer_dtype": _buffers,
    "fsdp_replicate_size": _copies,
    "fsdp_reshard_after_forward": _resharded,
    "fsdp_sharding_strategy": _spread,
    "fsdp_cpu_ram_efficient_loading": loads_on_rank_0,
}
