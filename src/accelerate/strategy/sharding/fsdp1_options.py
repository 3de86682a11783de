"""The FSDP options in FSDP1 (``FullyShardedDataParallel``): their meaning, and how they are read back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptimStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictType,
)

from accelerate.core import environ
from accelerate.core.errors import SettingError
from accelerate.core.option_report import OptionStatus, RequestedOption
from accelerate.core.setting import SettingsWithOrigins
from accelerate.strategy.launch_settings.fsdp import FSDPSettings
from accelerate.strategy.sharding import fsdp2_options
from accelerate.strategy.sharding.fsdp2_options import (
    NO_TRAINED_MODEL,
    NORM_UNITS,
    parse_dtype,
    parse_enum_name,
    parse_policy_fields,
    plugin_options,
    recompute_status,
    wrap_status,
)

STATE_DICT_TYPE = "FULL_STATE_DICT"
# The classes of torch for FSDP1 in fields of the plugin.
CLASSES = (CPUOffload, MixedPrecision, StateDictConfig, OptimStateDictConfig)
_FIELDS = (
    "param_dtype",
    "reduce_dtype",
    "buffer_dtype",
    "keep_low_precision_grads",
    "cast_forward_inputs",
    "cast_root_forward_inputs",
)
_STRATEGIES = {member.name.lstrip("_"): member for member in ShardingStrategy}


def apply_settings(plugin: Any, loaded: SettingsWithOrigins[FSDPSettings]) -> None:
    """Set the fields of ``plugin`` from the loaded settings.

    Raises:
        SettingError: an option is one of FSDP2.
    """
    plugin.sharding_strategy = _parse_strategy(loaded)
    plugin.reshard_after_forward = None
    plugin.hybrid = "HYBRID" in plugin.sharding_strategy.name
    prefetch = plugin.backward_prefetch
    plugin.backward_prefetch = None if prefetch == "NO_PREFETCH" else BackwardPrefetch[prefetch]
    if plugin.activation_checkpointing_offload:
        raise fsdp2_option_error(
            loaded, "activation_checkpointing_offload", "leave it out, or use fsdp_version=2"
        )
    if (plugin.replicate_size or 1) > 1 and not plugin.hybrid:
        raise SettingError(
            f"replicate_size ({loaded.origin('fsdp_replicate_size').where}) with sharding_strategy "
            f"{plugin.sharding_strategy.name}, which has no replicas",
            fix="sharding_strategy='HYBRID_SHARD'",
        )
    if plugin.cpu_ram_efficient_loading and not plugin.sync_module_states:
        sync, loading = (
            loaded.origin("fsdp_sync_module_states"),
            loaded.origin("fsdp_cpu_ram_efficient_loading"),
        )
        if sync.source == "code" and loading.source == "environment":
            # The launcher turns it on by default, and code wins; libraries read the variable.
            plugin.cpu_ram_efficient_loading = False
            environ.set_variables({"FSDP_CPU_RAM_EFFICIENT_LOADING": "False"})
            return
        raise SettingError(
            "cpu_ram_efficient_loading with sync_module_states=False",
            why="only rank 0 has read the weights, so the others have to get them from it",
            fix="leave sync_module_states out, or make it true",
        )


def fsdp2_option_error(loaded: SettingsWithOrigins[FSDPSettings], option: str, fix: str) -> SettingError:
    """Return the error for an option of FSDP2."""
    origin = loaded.origin(f"fsdp_{option}").where
    return SettingError(f"{option} ({origin}) is an option of FSDP2, and fsdp_version is 1", fix=fix)


def _parse_strategy(loaded: SettingsWithOrigins[FSDPSettings]) -> ShardingStrategy:
    """Return the strategy of that name, which may stand at ``reshard_after_forward`` too, as in old files.

    A launcher's ``true`` or ``false`` there means the strategy that does so, unless one is named. Code uses
    the words of its version.
    """
    name, value = "sharding_strategy", loaded.value.sharding_strategy
    other = loaded.value.reshard_after_forward
    if isinstance(other, bool) and loaded.origin("fsdp_reshard_after_forward").source == "code":
        raise fsdp2_option_error(
            loaded,
            "reshard_after_forward",
            f"sharding_strategy={'FULL_SHARD' if other else 'SHARD_GRAD_OP'!r} says it in FSDP1",
        )
    if value is None and isinstance(other, str):
        name, value = "reshard_after_forward", other
    elif value is None:
        value = "SHARD_GRAD_OP" if other is False else "FULL_SHARD"
    return _STRATEGIES[parse_enum_name(value, ShardingStrategy, name)]


def state_dict_configs(kind: StateDictType) -> tuple[Any, Any]:
    """Return torch's state dict configurations of that type, for models and for optimizers.

    Without an accelerator torch frees unsharded values while it moves them to the host, where they are
    already, and reads them: the process dies. So ``offload_to_cpu`` is False there.
    """
    offload = torch.accelerator.is_available()
    if kind == StateDictType.LOCAL_STATE_DICT:
        return LocalStateDictConfig(offload_to_cpu=offload), LocalOptimStateDictConfig(offload_to_cpu=offload)
    return fsdp2_options.state_dict_configs(kind, offload=offload)


def parse_offload(value: Any) -> CPUOffload:
    """Return torch's ``CPUOffload`` for a truth value, or for FSDP2's object."""
    if isinstance(value, CPUOffload):
        return value
    offloads = isinstance(value, CPUOffloadPolicy) if isinstance(value, OffloadPolicy) else value
    return CPUOffload(offload_params=bool(offloads))


def parse_precision(value: Any, buffer_autocast: bool = False) -> MixedPrecision:
    """Return a ``MixedPrecision`` for one, for FSDP2's policy, for a dict of its fields, or for a dtype.

    A dtype alone computes in it, and reduces gradients and keeps buffers in float32.

    Args:
        value: one of these.
        buffer_autocast: of a dtype: cast buffers too.

    Raises:
        UnknownNameError: it names a dtype or a field that does not exist.
        SettingError: it has a field of FSDP2.
    """
    if isinstance(value, MixedPrecision):
        return value
    if isinstance(value, MixedPrecisionPolicy):
        if value.output_dtype is not None:
            raise SettingError(
                "output_dtype in mixed_precision_policy is an option of FSDP2, and fsdp_version is 1",
                fix="leave it out, or use fsdp_version=2",
            )
        return MixedPrecision(
            value.param_dtype, value.reduce_dtype, cast_forward_inputs=value.cast_forward_inputs
        )
    if isinstance(value, Mapping):
        return MixedPrecision(**parse_policy_fields(dict(value), _FIELDS))
    dtype = parse_dtype(value)
    if dtype == torch.float32:
        return MixedPrecision()
    buffers = dtype if buffer_autocast else None
    return MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32, buffer_dtype=buffers)


# --- the option report, read from torch's wrapper modules of the prepared models


def option_statuses(
    switch: Iterable[RequestedOption], plugin: Any, models: Sequence[nn.Module]
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
        parts = sum(part._handle is not None for part in _units(models))
        applied = option.report_applied(f"{parts} FSDP units are wrapped")
        yield applied if models else option.report_pending(NO_TRAINED_MODEL)
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


def _units(models: Sequence[nn.Module]) -> list[Any]:
    return [
        part for model in models for part in model.modules() if isinstance(part, FullyShardedDataParallel)
    ]


def _wrap_status(option: RequestedOption, plugin: Any, models: Sequence[nn.Module]) -> OptionStatus:
    chosen = [part for part in _units(models) if part.module not in NORM_UNITS]
    return wrap_status(option, len(chosen) - len(models))


def _strategy_status(option: RequestedOption, plugin: Any, models: Sequence[nn.Module]) -> OptionStatus:
    strategies = {part.sharding_strategy.name.lstrip("_") for part in _units(models)}
    configured = plugin.sharding_strategy.name.lstrip("_")
    if strategies == {configured}:
        return option.report_applied()
    if plugin.hybrid:
        return option.report_applied(f"there is one replica, which is {' and '.join(sorted(strategies))}")
    return option.report_not_applied(f"the FSDP units have {' and '.join(sorted(strategies))}")


def _offload_status(option: RequestedOption, plugin: Any, models: Sequence[nn.Module]) -> OptionStatus:
    parts = [part for part in _units(models) if part._handle is not None]
    if all(part.compute_device.type == "cpu" for part in parts):
        return option.report_applied("the processes compute on the host, where parameters are anyway")
    flats = [part._handle.flat_param for part in parts]
    # Before the first forward the flat parameter itself is the shard.
    host_parts = [flat for flat in flats if getattr(flat, "_local_shard", flat).device.type == "cpu"]
    return option.report_count(
        len(host_parts), len(parts), "units are on the host", "others are on the device"
    )


READ_BACKS: dict[str, Callable[[RequestedOption, Any, Sequence[nn.Module]], OptionStatus]] = {
    "fsdp_sharding_strategy": _strategy_status,
    "fsdp_reshard_after_forward": _strategy_status,
    "fsdp_auto_wrap_policy": _wrap_status,
    "fsdp_offload_params": _offload_status,
    "fsdp_activation_checkpointing": lambda option, _, models: recompute_status(option, models),
    "fsdp_sync_module_states": lambda option, *_: option.report_applied(
        "" if option.value else "the weights of all ranks were found to be equal"
    ),
}
