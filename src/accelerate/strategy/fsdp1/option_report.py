"""The option report of FSDP1, read from torch's wrapper modules of the prepared models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from accelerate.core.option_report import OptionStatus, RequestedOption
from accelerate.strategy.fsdp1.wrap import fsdp_modules
from accelerate.strategy.sharding.fsdp2_options import (
    NO_TRAINED_MODEL,
    plugin_options,
    rank0_loading_status,
    recompute_status,
    wrap_status,
)
from accelerate.strategy.sharding.plugin import FullyShardedDataParallelPlugin


def option_statuses(
    switch: Iterable[RequestedOption], plugin: FullyShardedDataParallelPlugin, models: Sequence[nn.Module]
) -> Iterator[OptionStatus]:
    """Return the status of the switch and of each option of the plugin.

    Args:
        switch: the options that ask for FSDP.
        plugin: the other options.
        models: the wrapped models.
    """
    for option in switch:
        if option.value is not True:  # the plugin itself
            continue
        parts = sum(1 for model in models for part in fsdp_modules(model) if part._handle is not None)
        yield (
            option.report_applied(f"{parts} FSDP units are wrapped")
            if models
            else option.report_pending(NO_TRAINED_MODEL)
        )
    for option in plugin_options(plugin):
        look = READ_BACKS.get(option.name)
        if option.name == "fsdp_reshard_after_forward" and plugin._settings.value.sharding_strategy:
            yield option.report_not_applied("sharding_strategy says it in FSDP1", matters=False)
        elif look is None:
            yield option.report_applied()
        elif not models:
            yield option.report_pending(NO_TRAINED_MODEL)
        else:
            yield look(option, plugin, models)


StatusFunction = Callable[
    [RequestedOption, FullyShardedDataParallelPlugin, Sequence[nn.Module]], OptionStatus
]


def _fsdp_units(models: Sequence[nn.Module]) -> list[Any]:
    return [part for model in models for part in fsdp_modules(model)]


def _field_status(
    attribute: str,
    option: RequestedOption,
    plugin: FullyShardedDataParallelPlugin,
    models: Sequence[nn.Module],
) -> OptionStatus:
    """Read back an attribute of torch's wrapper."""
    unit_values = {getattr(part, attribute) for part in _fsdp_units(models)}
    return option.report_unless("" if unit_values == {option.value} else f"the FSDP units have {unit_values}")


def _strategy_status(
    option: RequestedOption, plugin: FullyShardedDataParallelPlugin, models: Sequence[nn.Module]
) -> OptionStatus:
    strategies = {part.sharding_strategy.name.lstrip("_") for part in _fsdp_units(models)}
    configured = plugin.sharding_strategy.name.lstrip("_")
    if strategies == {configured}:
        return option.report_applied()
    if plugin.hybrid:
        return option.report_applied(f"there is one replica, which is {' and '.join(sorted(strategies))}")
    return option.report_not_applied(f"the FSDP units have {' and '.join(sorted(strategies))}")


def _prefetch_status(
    option: RequestedOption, plugin: FullyShardedDataParallelPlugin, models: Sequence[nn.Module]
) -> OptionStatus:
    prefetch_modes = {part.backward_prefetch for part in _fsdp_units(models)}
    return option.report_unless(
        "" if prefetch_modes == {plugin.backward_prefetch} else f"the FSDP units have {prefetch_modes}"
    )


def _wrap_status(
    option: RequestedOption, plugin: FullyShardedDataParallelPlugin, models: Sequence[nn.Module]
) -> OptionStatus:
    return wrap_status(option, len(_fsdp_units(models)) - len(models))


def _offload_status(
    option: RequestedOption, plugin: FullyShardedDataParallelPlugin, models: Sequence[nn.Module]
) -> OptionStatus:
    parts = [part for part in _fsdp_units(models) if part._handle is not None]
    if all(part.compute_device.type == "cpu" for part in parts):
        return option.report_applied("the processes compute on the host, where parameters are anyway")
    host_parts = [part for part in parts if part._handle.flat_param._local_shard.device.type == "cpu"]
    return option.report_count(
        len(host_parts), len(parts), "units are on the host", "others are on the device"
    )


def _sync_status(
    option: RequestedOption, plugin: FullyShardedDataParallelPlugin, models: Sequence[nn.Module]
) -> OptionStatus:
    if option.value:
        return option.report_applied()
    return option.report_applied("the weights of all ranks were found to be equal")


def _state_dict_status(
    option: RequestedOption, plugin: FullyShardedDataParallelPlugin, models: Sequence[nn.Module]
) -> OptionStatus:
    if "LOCAL" not in str(option.value).upper():
        return option.report_applied()
    return option.report_applied(
        "save_fsdp_model writes the shards of each rank; save_state writes shards for any world size"
    )


READ_BACKS: dict[str, StatusFunction] = {
    "fsdp_forward_prefetch": partial(_field_status, "forward_prefetch"),
    "fsdp_use_orig_params": partial(_field_status, "_use_orig_params"),
    "limit_all_gathers": partial(_field_status, "limit_all_gathers"),
    "fsdp_sharding_strategy": _strategy_status,
    "fsdp_backward_prefetch": _prefetch_status,
    "fsdp_auto_wrap_policy": _wrap_status,
    "fsdp_offload_params": _offload_status,
    "fsdp_activation_checkpointing": lambda option, _, models: recompute_status(option, models),
    "fsdp_sync_module_states": _sync_status,
    "fsdp_cpu_ram_efficient_loading": lambda option, _, models: rank0_loading_status(option, models),
    "fsdp_state_dict_type": _state_dict_status,
}
