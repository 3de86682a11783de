"""What the options of sharding mean in version 1, torch's class ``FullyShardedDataParallel``."""

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
from accelerate.core.setting import Loaded
from accelerate.strategy.settings.fsdp import FSDPSettings
from accelerate.strategy.sharding.words import dtype, formats, word

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


def settle(plugin: Any, found: Loaded[FSDPSettings]) -> None:
    """Gives the fields of ``plugin`` their values.

    Raises:
        SettingError: an option is one of version 2.
    """
    settings = found.value
    plugin.sharding_strategy = _strategy(found)
    plugin.reshard_after_forward = None
    plugin.hybrid = "HYBRID" in plugin.sharding_strategy.name
    plugin.backward_prefetch = _prefetch(settings.fsdp_backward_prefetch)
    plugin.forward_prefetch = bool(settings.fsdp_forward_prefetch)
    plugin.use_orig_params = settings.fsdp_use_orig_params is not False
    plugin.sync_module_states = settings.fsdp_sync_module_states is not False
    plugin.activation_checkpointing = bool(settings.fsdp_activation_checkpointing)
    plugin.activation_checkpointing_offload = False
    plugin._ignored = set()
    if settings.fsdp_activation_checkpointing_offload:
        raise of_version_2(found, "activation_checkpointing_offload", "leave it out, or use fsdp_version=2")
    if (settings.fsdp_replicate_size or 1) > 1 and not plugin.hybrid:
        raise SettingError(
            f"replicate_size ({found.origin('fsdp_replicate_size').where}) with sharding_strategy "
            f"{plugin.sharding_strategy.name}, which keeps no copies",
            fix="sharding_strategy='HYBRID_SHARD'",
        )
    if settings.fsdp_cpu_ram_efficient_loading and not plugin.sync_module_states:
        raise SettingError(
            "cpu_ram_efficient_loading with sync_module_states=False",
            why="only rank 0 has read the weights, so the others have to get them from it",
            fix="leave sync_module_states out, or make it true",
        )


def of_version_2(found: Loaded[FSDPSettings], option: str, fix: str) -> SettingError:
    """The refusal of an option of the other version."""
    where = found.origin(f"fsdp_{option}").where
    return SettingError(f"{option} ({where}) is an option of version 2, and fsdp_version is 1", fix=fix)


def _strategy(found: Loaded[FSDPSettings]) -> ShardingStrategy:
    """By its name, which may stand at ``reshard_after_forward`` too, as in old files."""
    given, other = found.value.fsdp_sharding_strategy, found.value.fsdp_reshard_after_forward
    if isinstance(other, bool) and not _from_outside(found, given):
        raise of_version_2(
            found,
            "reshard_after_forward",
            f"sharding_strategy={'FULL_SHARD' if other else 'SHARD_GRAD_OP'!r} says it in version 1",
        )
    if given is None:
        given = other if isinstance(other, str) else "FULL_SHARD"
    return _STRATEGIES[word(given, ShardingStrategy, "sharding_strategy")]


def _from_outside(found: Loaded[FSDPSettings], given: Any) -> bool:
    """Launchers write the default of an option that nobody gave, beside the strategy."""
    return given is not None and found.origin("fsdp_reshard_after_forward").source == "environment"


def _prefetch(given: str | None) -> BackwardPrefetch | None:
    if given is None:
        return BackwardPrefetch.BACKWARD_PRE
    return None if given == "NO_PREFETCH" else BackwardPrefetch[given]


def state_configs(kind: StateDictType) -> tuple[Any, Any]:
    """How torch gives states of that type: of models, of optimizers.

    Without an accelerator torch frees whole values while it moves them to the host, where they are already,
    and reads them: the process dies. So they stay where they are there.
    """
    away = torch.accelerator.is_available()
    if kind == StateDictType.FULL_STATE_DICT:
        return (
            FullStateDictConfig(offload_to_cpu=away, rank0_only=True),
            FullOptimStateDictConfig(offload_to_cpu=away, rank0_only=True),
        )
    if kind == StateDictType.LOCAL_STATE_DICT:
        return LocalStateDictConfig(offload_to_cpu=away), LocalOptimStateDictConfig(offload_to_cpu=away)
    return ShardedStateDictConfig(offload_to_cpu=away), ShardedOptimStateDictConfig(offload_to_cpu=away)


def offload(asked: Any) -> CPUOffload:
    """Where parameters rest, as torch takes it; from a truth value, or version 2's object."""
    if isinstance(asked, CPUOffload):
        return asked
    wanted = isinstance(asked, CPUOffloadPolicy) if isinstance(asked, OffloadPolicy) else asked
    return CPUOffload(offload_params=bool(wanted))


def offloads(given: Any) -> bool:
    """Whether parameters rest on the host."""
    return bool(getattr(given, "offload_params", False))


def precision(given: Any, buffer_autocast: bool = False) -> MixedPrecision:
    """A policy from one, from version 2's, from its fields, or from a number format.

    A number format alone computes in it, and reduces gradients and keeps buffers in float32.

    Args:
        given: one of these.
        buffer_autocast: of a number format: buffers have it too.

    Raises:
        UnknownNameError: it names a number format or a field that does not exist.
        SettingError: it has a field of version 2.
    """
    if isinstance(given, MixedPrecision):
        return given
    if isinstance(given, MixedPrecisionPolicy):
        if given.output_dtype is not None:
            raise SettingError(
                "output_dtype in mixed_precision_policy is an option of version 2, and fsdp_version is 1",
                fix="leave it out, or use fsdp_version=2",
            )
        return MixedPrecision(
            given.param_dtype, given.reduce_dtype, cast_forward_inputs=given.cast_forward_inputs
        )
    if isinstance(given, Mapping):
        return MixedPrecision(**formats(dict(given), _FIELDS))
    wanted = dtype(given)
    if wanted == torch.float32:
        return MixedPrecision()
    buffers = wanted if buffer_autocast else None
    return MixedPrecision(param_dtype=wanted, reduce_dtype=torch.float32, buffer_dtype=buffers)
