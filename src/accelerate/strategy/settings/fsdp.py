"""What one says about sharding: the launcher's flags, their variables and file keys."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate.core.frozen import frozen
from accelerate.core.setting import setting

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
STATES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")


def _numbers(names: Sequence[str]) -> dict[str, str]:
    """Files may say a name by its number, counted from 1."""
    return {str(number): name for number, name in enumerate(names, 1)}


@frozen
class FSDPSwitch:
    """Whether this strategy trains. In files the type of the group says so: ``distributed_type: FSDP``."""

    __topic__ = "Sharding"
    __distributed_type__ = "FSDP"

    use_fsdp: bool = setting(
        False, in_file=False, help="shard parameters, gradients and optimizer state over the processes"
    )


@frozen
class FSDPSettings:
    """Options of sharded training; see ``FullyShardedDataParallelPlugin``."""

    __topic__ = "Sharding"
    __section__ = "fsdp_config"
    __prefix__ = "fsdp_"
    __switch__ = "use_fsdp"

    fsdp_version: int | None = setting(
        None,
        variable="FSDP_VERSION",
        choices=(1, 2),
        help="2, the default, is torch's fully_shard; 1 its class FullyShardedDataParallel",
        question="Which version?",
    )
    fsdp_reshard_after_forward: bool | str | None = setting(
        None,
        switch=False,
        variable="FSDP_RESHARD_AFTER_FORWARD",
        help="free whole parameters after the forward and gather them again in the backward (true); "
        "false takes more memory and less traffic",
        question="Free whole parameters after the forward? true or false",
    )
    fsdp_auto_wrap_policy: str | None = setting(
        None,
        variable="FSDP_AUTO_WRAP_POLICY",
        choices=POLICIES,
        help="which parts of a model are gathered by themselves: layers by class, parts by size, or none",
        question="How is the model cut into parts?",
    )
    fsdp_transformer_layer_cls_to_wrap: str | tuple[str, ...] | None = setting(
        None,
        variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
        help="class names of the layers, with commas; by default those that the model names itself",
        question="Class names of the layers?",
        when={"fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP",)},
    )
    fsdp_min_num_params: int | None = setting(
        None,
        variable="FSDP_MIN_NUM_PARAMS",
        help="parameters of a part, if parts are cut by size",
        question="How many parameters has a part at least?",
        when={"fsdp_auto_wrap_policy": ("SIZE_BASED_WRAP",)},
    )
    fsdp_offload_params: bool | None = setting(
        None,
        switch=False,
        variable="FSDP_OFFLOAD_PARAMS",
        help="keep parameters, gradients and optimizer state in the memory of the host",
        question="Keep parameters in the memory of the host?",
    )
    fsdp_state_dict_type: str | None = setting(
        None,
        variable="FSDP_STATE_DICT_TYPE",
        choices=STATES,
        aliases=_numbers(STATES),
        help="checkpoints hold SHARDED_STATE_DICT, a part per process, or FULL_STATE_DICT; in version 1 also "
        "LOCAL_STATE_DICT",
        question="What do checkpoints hold?",
    )
    fsdp_cpu_ram_efficient_loading: bool | None = setting(
        None,
        switch=False,
        variable="FSDP_CPU_RAM_EFFICIENT_LOADING",
        help="only rank 0 reads the weights of a pretrained model; the others get their parts from it",
        question="Read pretrained weights on rank 0 only?",
    )
    fsdp_activation_checkpointing: bool | None = setting(
        None,
        switch=False,
        variable="FSDP_ACTIVATION_CHECKPOINTING",
        help="compute the activations of each wrapped part again in the backward",
        question="Compute activations again in the backward?",
    )
    fsdp_activation_checkpointing_offload: bool | None = setting(
        None,
        switch=False,
        variable="FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
        help="keep what is left of activations in the memory of the host",
    )
    fsdp_ignored_modules: str | None = setting(
        None,
        flag=None,
        variable="FSDP_IGNORED_MODULES",
        help="a regular expression: frozen modules of these names stay whole on every process",
    )
    fsdp_replicate_size: int | None = setting(
        None,
        variable="FSDP_REPLICATE_SIZE",
        help="copies of the shards under HYBRID_SHARD; by default one for each machine",
    )
    # Of version 1, and what they are in version 2: see the plugin.
    fsdp_sharding_strategy: str | None = setting(
        None,
        variable="FSDP_SHARDING_STRATEGY",
        choices=STRATEGIES,
        # Torch writes a line before the name of what it may change.
        aliases={**_numbers(STRATEGIES), "_hybrid_shard_zero2": "HYBRID_SHARD_ZERO2"},
        help="of version 1: who has which parameters when; see fsdp_reshard_after_forward",
    )
    fsdp_backward_prefetch: str | None = setting(
        None,
        variable="FSDP_BACKWARD_PREFETCH",
        choices=PREFETCHES,
        aliases=_numbers(PREFETCHES),
        help="of version 1: gather the next part before or after the gradients of this one, or not ahead",
    )
    fsdp_forward_prefetch: bool | None = setting(
        None,
        switch=False,
        variable="FSDP_FORWARD_PREFETCH",
        help="of version 1: gather the next part while one computes",
    )
    fsdp_use_orig_params: bool | None = setting(
        None,
        switch=False,
        variable="FSDP_USE_ORIG_PARAMS",
        help="of version 1: keep the user's own parameters (true); always so in version 2",
    )
    fsdp_sync_module_states: bool | None = setting(
        None,
        switch=False,
        variable="FSDP_SYNC_MODULE_STATES",
        help="of version 1: begin with the weights of rank 0 (true); always so in version 2",
    )


PLUGIN = (FSDPSwitch, FSDPSettings)
