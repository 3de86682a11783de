"""The meaning of the FSDP options in FSDP2, torch's ``fully_shard``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from accelerate.core.errors import SettingError
from accelerate.core.setting import SettingsWithOrigins
from accelerate.strategy.launch_settings.fsdp import FSDPSettings
from accelerate.strategy.sharding.parsing import parse_dtype, parse_policy_fields

STATE_DICT_TYPE = "SHARDED_STATE_DICT"
_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")


def apply_settings(plugin: Any, loaded: SettingsWithOrigins[FSDPSettings]) -> None:
    """Set the fields of ``plugin`` from the loaded settings.

    Raises:
        SettingError: an option contradicts another, or has no meaning in FSDP2.
    """
    plugin.reshard_after_forward = _reshard_after_forward(loaded)
    plugin.hybrid = (
        "HYBRID" in (loaded.value.fsdp_sharding_strategy or "") or (loaded.value.fsdp_replicate_size or 1) > 1
    )
    _apply_fsdp1_options(plugin, loaded)
    _apply_activations(plugin, loaded.value)


def _apply_fsdp1_options(plugin: Any, loaded: SettingsWithOrigins[FSDPSettings]) -> None:
    """Map the options of FSDP1, or remember them as ignored for the option report."""
    settings = loaded.value
    prefetch = settings.fsdp_backward_prefetch or "BACKWARD_PRE"
    # Whether units are prefetched, in the forward and in the backward.
    plugin._prefetch_flags = bool(settings.fsdp_forward_prefetch), prefetch == "BACKWARD_PRE"
    ignored = {
        "use_orig_params": settings.fsdp_use_orig_params is False,
        "sync_module_states": settings.fsdp_sync_module_states is False,
        "limit_all_gathers": plugin.limit_all_gathers is False,
    }
    plugin._ignored_options = {name for name, value in ignored.items() if value}
    plugin.sharding_strategy = plugin.backward_prefetch = plugin.use_orig_params = None
    plugin.sync_module_states = plugin.forward_prefetch = None


def _apply_activations(plugin: Any, settings: FSDPSettings) -> None:
    plugin.activation_checkpointing = bool(settings.fsdp_activation_checkpointing)
    plugin.activation_checkpointing_offload = bool(settings.fsdp_activation_checkpointing_offload)
    if plugin.activation_checkpointing_offload and not plugin.activation_checkpointing:
        raise SettingError(
            "activation_checkpointing_offload without activation_checkpointing",
            fix="add activation_checkpointing=True",
        )


def _reshard_after_forward(loaded: SettingsWithOrigins[FSDPSettings]) -> bool:
    """Return whether unsharded parameters are freed after the forward."""
    value = loaded.value.fsdp_reshard_after_forward
    if isinstance(value, str):
        raise SettingError(
            f"reshard_after_forward is {value!r}, a sharding strategy of FSDP1",
            fix="use true, as FULL_SHARD did, or false, as SHARD_GRAD_OP did",
        )
    strategy = loaded.value.fsdp_sharding_strategy
    if strategy is None:
        return value is not False
    if strategy == "NO_SHARD":
        origin = loaded.origin("fsdp_sharding_strategy").where
        raise SettingError(
            f"sharding_strategy NO_SHARD ({origin}) shards nothing",
            fix="leave FSDP out: several processes then train by DDP",
        )
    reshards = strategy in ("FULL_SHARD", "HYBRID_SHARD")
    # Launchers write the default of both: only values that differ from it count as given.
    both = [loaded.origin(f"fsdp_{name}").source for name in ("sharding_strategy", "reshard_after_forward")]
    if value is not None and value != reshards and "environment" not in both:
        raise SettingError(
            f"reshard_after_forward is {value}, but sharding_strategy is {strategy}, which means {reshards}",
            why="sharding_strategy is the option of FSDP1 for the same",
            fix="keep reshard_after_forward",
        )
    return reshards and value is not False


def state_dict_configs(kind: StateDictType) -> tuple[Any, Any]:
    """Return torch's state dict configurations of that type, for models and for optimizers.

    Raises:
        SettingError: there is no such type in FSDP2.
    """
    if kind == StateDictType.LOCAL_STATE_DICT:
        raise SettingError(
            "state_dict_type LOCAL_STATE_DICT is one of FSDP1",
            fix="use SHARDED_STATE_DICT, a shard per rank, or FULL_STATE_DICT",
        )
    if kind == StateDictType.FULL_STATE_DICT:
        return (
            FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
            FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
        )
    return ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)


def parse_offload(value: Any) -> Any:
    """Return torch's offload policy for a truth value, or for FSDP1's object."""
    if isinstance(value, OffloadPolicy):
        return value
    offloads = getattr(value, "offload_params", value)
    return CPUOffloadPolicy() if offloads else OffloadPolicy()


def offloads_params(value: Any) -> bool:
    """Return whether parameters are offloaded to the host."""
    return isinstance(value, CPUOffloadPolicy)


def parse_precision(value: Any, buffer_autocast: bool = False) -> MixedPrecisionPolicy:
    """Return a ``MixedPrecisionPolicy`` for one, for FSDP1's, for a dict of its fields, or for a dtype.

    Raises:
        UnknownNameError: it names a dtype or a field that does not exist.
    """
    if isinstance(value, MixedPrecisionPolicy):
        return value
    if isinstance(value, MixedPrecision):
        return MixedPrecisionPolicy(value.param_dtype, value.reduce_dtype)
    if isinstance(value, Mapping):
        return MixedPrecisionPolicy(**parse_policy_fields(dict(value), _FIELDS))
    dtype = parse_dtype(value)
    return MixedPrecisionPolicy() if dtype == torch.float32 else MixedPrecisionPolicy(dtype, torch.float32)
