"""What the options of sharding mean in version 2, torch's ``fully_shard``."""

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
from accelerate.core.setting import Loaded
from accelerate.strategy.settings.fsdp import FSDPSettings
from accelerate.strategy.sharding.words import dtype, formats

STATE_DICT_TYPE = "SHARDED_STATE_DICT"
_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")


def settle(plugin: Any, found: Loaded[FSDPSettings]) -> None:
    """Gives the fields of ``plugin`` their values.

    Raises:
        SettingError: an option contradicts another, or has no meaning in this version.
    """
    plugin.reshard_after_forward = _reshards(found)
    plugin.hybrid = (
        "HYBRID" in (found.value.fsdp_sharding_strategy or "") or (found.value.fsdp_replicate_size or 1) > 1
    )
    _settle_version_1(plugin, found)
    _settle_activations(plugin, found.value)


def _settle_version_1(plugin: Any, found: Loaded[FSDPSettings]) -> None:
    """Options without a meaning here: refused if they ask for something else, or reported as ignored."""
    settings = found.value
    ahead = settings.fsdp_backward_prefetch or "BACKWARD_PRE"
    # Whether parts are gathered before they are needed, in the forward and in the backward.
    plugin._ahead = bool(settings.fsdp_forward_prefetch), ahead == "BACKWARD_PRE"
    ignored = {
        "use_orig_params": settings.fsdp_use_orig_params is False,
        "sync_module_states": settings.fsdp_sync_module_states is False,
        "limit_all_gathers": plugin.limit_all_gathers is False,
    }
    plugin._ignored = {name for name, asked in ignored.items() if asked}
    plugin.sharding_strategy = plugin.backward_prefetch = plugin.use_orig_params = None
    plugin.sync_module_states = plugin.forward_prefetch = None


def _settle_activations(plugin: Any, settings: FSDPSettings) -> None:
    plugin.activation_checkpointing = bool(settings.fsdp_activation_checkpointing)
    plugin.activation_checkpointing_offload = bool(settings.fsdp_activation_checkpointing_offload)
    if plugin.activation_checkpointing_offload and not plugin.activation_checkpointing:
        raise SettingError(
            "activation_checkpointing_offload without activation_checkpointing",
            fix="add activation_checkpointing=True",
        )


def _reshards(found: Loaded[FSDPSettings]) -> bool:
    """Whether whole parameters are freed after the forward."""
    given = found.value.fsdp_reshard_after_forward
    if isinstance(given, str):
        raise SettingError(
            f"reshard_after_forward is {given!r}, a sharding strategy of version 1",
            fix="use true, as FULL_SHARD did, or false, as SHARD_GRAD_OP did",
        )
    strategy = found.value.fsdp_sharding_strategy
    if strategy is None:
        return given is not False
    if strategy == "NO_SHARD":
        where = found.origin("fsdp_sharding_strategy").where
        raise SettingError(
            f"sharding_strategy NO_SHARD ({where}) shards nothing",
            fix="leave sharded training out: several processes then train replicas",
        )
    reshards = strategy in ("FULL_SHARD", "HYBRID_SHARD")
    # Launchers write the default of both, whatever was asked: only what differs from it says something.
    both = [found.origin(f"fsdp_{name}").source for name in ("sharding_strategy", "reshard_after_forward")]
    if given is not None and given != reshards and "environment" not in both:
        raise SettingError(
            f"reshard_after_forward is {given}, but sharding_strategy is {strategy}, which means {reshards}",
            why="sharding_strategy is how version 1 says it",
            fix="keep reshard_after_forward",
        )
    return reshards and given is not False


def state_configs(kind: StateDictType) -> tuple[Any, Any]:
    """How torch gives states of that type: of models, of optimizers.

    Raises:
        SettingError: there is no such type in this version.
    """
    if kind == StateDictType.LOCAL_STATE_DICT:
        raise SettingError(
            "state_dict_type LOCAL_STATE_DICT is one of version 1",
            fix="use SHARDED_STATE_DICT, a part per process, or FULL_STATE_DICT",
        )
    if kind == StateDictType.FULL_STATE_DICT:
        return (
            FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
            FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
        )
    return ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)


def offload(asked: Any) -> Any:
    """Where parameters rest, as torch takes it; from a truth value, or version 1's object."""
    if isinstance(asked, OffloadPolicy):
        return asked
    wanted = getattr(asked, "offload_params", asked)
    return CPUOffloadPolicy() if wanted else OffloadPolicy()


def offloads(given: Any) -> bool:
    """Whether parameters rest on the host."""
    return isinstance(given, CPUOffloadPolicy)


def precision(given: Any, buffer_autocast: bool = False) -> MixedPrecisionPolicy:
    """A policy from one, from version 1's, from its fields, or from a number format.

    Raises:
        UnknownNameError: it names a number format or a field that does not exist.
    """
    if isinstance(given, MixedPrecisionPolicy):
        return given
    if isinstance(given, MixedPrecision):
        return MixedPrecisionPolicy(given.param_dtype, given.reduce_dtype)
    if isinstance(given, Mapping):
        return MixedPrecisionPolicy(**formats(dict(given), _FIELDS))
    wanted = dtype(given)
    return MixedPrecisionPolicy() if wanted == torch.float32 else MixedPrecisionPolicy(wanted, torch.float32)
