"""What became of the options of version 1, seen on torch's records of the wrapped parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from accelerate.core.effects import Effect, Option
from accelerate.strategy.fsdp1.wrap import sharded
from accelerate.strategy.sharding.effects import NOTHING, loads_on_rank_0, options, recomputed, wrapped
from accelerate.strategy.sharding.plugin import FullyShardedDataParallelPlugin

# "No" asks for nothing, but where "yes" is what is done otherwise.
_YES = ("fsdp_use_orig_params", "fsdp_sync_module_states")
# Field of torch's wrapper, by the option that it follows.
_FIELDS = {
    "fsdp_forward_prefetch": "forward_prefetch",
    "fsdp_use_orig_params": "_use_orig_params",
    "limit_all_gathers": "limit_all_gathers",
}


def effects(
    switch: Iterable[Option], plugin: FullyShardedDataParallelPlugin, models: Sequence[nn.Module]
) -> Iterator[Effect]:
    """What became of the switch and of each option of the plugin.

    Args:
        switch: by what sharding was asked for.
        plugin: how to wrap.
        models: those that were wrapped.
    """
    for option in switch:
        if option.value is not True:  # the plugin itself
            continue
        parts = sum(1 for model in models for part in sharded(model) if part._handle is not None)
        yield option.applied(f"{parts} parts are wrapped") if models else option.pending(NOTHING)
    for option in options(plugin, _YES):
        look = _LOOK.get(option.name)
        if option.name == "fsdp_reshard_after_forward" and plugin._found.value.fsdp_sharding_strategy:
            yield option.failed("sharding_strategy says it in version 1", matters=False)
        elif look is None and option.name not in _FIELDS:
            yield option.applied()
        elif not models:
            yield option.pending(NOTHING)
        else:
            yield (look or _field)(option, plugin, models)


Look = Callable[[Option, FullyShardedDataParallelPlugin, Sequence[nn.Module]], Effect]


def _parts(models: Sequence[nn.Module]) -> list[Any]:
    return [part for model in models for part in sharded(model)]


def _field(option: Option, plugin: FullyShardedDataParallelPlugin, models: Sequence[nn.Module]) -> Effect:
    here = {getattr(part, _FIELDS[option.name]) for part in _parts(models)}
    return option.seen("" if here == {option.value} else f"the parts have {here}")


def _shared(option: Option, plugin: FullyShardedDataParallelPlugin, models: Sequence[nn.Module]) -> Effect:
    here = {part.sharding_strategy.name.lstrip("_") for part in _parts(models)}
    wanted = plugin.sharding_strategy.name.lstrip("_")
    if here == {wanted}:
        return option.applied()
    if plugin.hybrid:
        return option.applied(f"there is one copy of the shards, which is {' and '.join(sorted(here))}")
    return option.failed(f"the parts have {' and '.join(sorted(here))}")


def _ahead(option: Option, plugin: FullyShardedDataParallelPlugin, models: Sequence[nn.Module]) -> Effect:
    here = {part.backward_prefetch for part in _parts(models)}
    return option.seen("" if here == {plugin.backward_prefetch} else f"the parts have {here}")


def _wrapped(option: Option, plugin: FullyShardedDataParallelPlugin, models: Sequence[nn.Module]) -> Effect:
    return wrapped(option, len(_parts(models)) - len(models))


def _offloaded(option: Option, plugin: FullyShardedDataParallelPlugin, models: Sequence[nn.Module]) -> Effect:
    parts = [part for part in _parts(models) if part._handle is not None]
    if all(part.compute_device.type == "cpu" for part in parts):
        return option.applied("the processes compute on the host, where parameters lie anyway")
    there = [part for part in parts if part._handle.flat_param._local_shard.device.type == "cpu"]
    return option.counted(len(there), len(parts), "parts lie on the host", "others are on the device")


def _synced(option: Option, plugin: FullyShardedDataParallelPlugin, models: Sequence[nn.Module]) -> Effect:
    if option.value:
        return option.applied()
    return option.applied("the weights of all ranks were found to be equal")


def _saved(option: Option, plugin: FullyShardedDataParallelPlugin, models: Sequence[nn.Module]) -> Effect:
    if "LOCAL" not in str(option.value).upper():
        return option.applied()
    return option.applied(
        "save_fsdp_model writes what each rank has; save_state writes parts that any number of ranks reads"
    )


_LOOK: dict[str, Look] = {
    "fsdp_sharding_strategy": _shared,
    "fsdp_backward_prefetch": _ahead,
    "fsdp_auto_wrap_policy": _wrapped,
    "fsdp_offload_params": _offloaded,
    "fsdp_activation_checkpointing": lambda option, _, models: recomputed(option, models),
    "fsdp_sync_module_states": _synced,
    "fsdp_cpu_ram_efficient_loading": lambda option, _, models: loads_on_rank_0(option, models),
    "fsdp_state_dict_type": _saved,
}
