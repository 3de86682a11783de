"""The meaning of the FSDP options in FSDP1, torch's class ``FullyShardedDataParallel``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)

from accelerate.core.errors import SettingError
from accelerate.core.setting import SettingsWithOrigins
from accelerate.strategy.launch_settings.fsdp import FSDPSettings
from accelerate.strategy.sharding.parsing import parse_dtype, parse_enum_name, parse_policy_fields

STATE_DICT_TYPE = "FULL_STATE_DICT"
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
    """Return the strategy of that name, which may stand at ``reshard_after_forward`` too, as in old files."""
    value, other = loaded.value.sharding_strategy, loaded.value.reshard_after_forward
    if isinstance(other, bool) and not _came_from_launcher(loaded, value):
        raise fsdp2_option_error(
            loaded,
            "reshard_after_forward",
            f"sharding_strategy={'FULL_SHARD' if other else 'SHARD_GRAD_OP'!r} says it in FSDP1",
        )
    if value is None:
        value = other if isinstance(other, str) else "FULL_SHARD"
    return _STRATEGIES[parse_enum_name(value, ShardingStrategy, "sharding_strategy")]


def _came_from_launcher(loaded: SettingsWithOrigins[FSDPSettings], value: Any) -> bool:
    # Launchers write the default of an option that nobody gave, beside the strategy.
    return value is not None and loaded.origin("fsdp_reshard_after_forward").source == "environment"


def state_dict_configs(kind: StateDictType) -> tuple[Any, Any]:
    """Return torch's state dict configurations of that type, for models and for optimizers.

    Without an accelerator torch frees unsharded values while it moves them to the host, where they are
    already, and reads them: the process dies. So ``offload_to_cpu`` is False there.
    """
    offload = torch.accelerator.is_available()
    if kind == StateDictType.FULL_STATE_DICT:
        return (
            FullStateDictConfig(offload_to_cpu=offload, rank0_only=True),
            FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=True),
        )
    if kind == StateDictType.LOCAL_STATE_DICT:
        return LocalStateDictConfig(offload_to_cpu=offload), LocalOptimStateDictConfig(offload_to_cpu=offload)
    return ShardedStateDictConfig(offload_to_cpu=offload), ShardedOptimStateDictConfig(offload_to_cpu=offload)


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
