"""The settings of FSDP: the launcher's flags, their environment variables and file keys."""

from __future__ import annotations

from collections.abc import Sequence

from accelerate.core.frozen_dataclass import frozen_dataclass
from accelerate.core.setting import setting

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
STATES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")


def _numbers(names: Sequence[str]) -> dict[str, str]:
    """Return the names by their numbers, counted from 1, which files may have."""
    return {str(number): name for number, name in enumerate(names, 1)}


@frozen_dataclass
class UseFSDPSetting:
    """The switch for FSDP; in files it is ``distributed_type: FSDP``."""

    __topic__ = "Sharding"
    __distributed_type__ = "FSDP"

    use_fsdp: bool = setting(
        False, in_file=False, help="shard parameters, gradients and optimizer state over the processes"
    )


@frozen_dataclass
class FSDPSettings:
    """The options of FSDP; see ``FullyShardedDataParallelPlugin``."""

    __topic__ = "Sharding"
    __section__ = "fsdp_config"
    __prefix__ = "fsdp_"
    __switch__ = "use_fsdp"

    fsdp_version: int | None = setting(
        None,
        variable="FSDP_VERSION",
        choices=(1, 2),
        help="2, the default, is FSDP2 (fully_shard); 1 is FSDP1 (FullyShardedDataParallel)",
        question="Which version?",
    )
    fsdp_reshard_after_forward: bool | str | None = setting(
        None,
        switch=False,
        variable="FSDP_RESHARD_AFTER_FORWARD",
        help="free unsharded parameters after the forward and all-gather them again in the backward (true); "
        "false takes more memory and less communication",
        question="Free unsharded parameters after the forward? true or false",
    )
    fsdp_auto_wrap_policy: str | None = setting(
        None,
        variable="FSDP_AUTO_WRAP_POLICY",
        choices=POLICIES,
        help="which modules are FSDP units: layers by class, modules by size, or none",
        question="Which modules are FSDP units?",
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
        help="least parameters of an FSDP unit, if units are chosen by size",
        question="Least parameters of an FSDP unit?",
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
        help="checkpoints hold SHARDED_STATE_DICT, a shard per rank, or FULL_STATE_DICT; in FSDP1 also "
        "LOCAL_STATE_DICT",
        question="What do checkpoints hold?",
    )
    fsdp_cpu_ram_efficient_loading: bool | None = setting(
        None,
        switch=False,
        variable="FSDP_CPU_RAM_EFFICIENT_LOADING",
        help="only rank 0 reads the weights of a pretrained model, and broadcasts them",
        question="Read pretrained weights on rank 0 only?",
    )
    fsdp_activation_checkpointing: bool | None = setting(
        None,
        switch=False,
        variable="FSDP_ACTIVATION_CHECKPOINTING",
        help="recompute the activations of each FSDP unit in the backward",
        question="Recompute activations in the backward?",
    )
    fsdp_activation_checkpointing_offload: bool | None = setting(
        None,
        switch=False,
        variable="FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
        help="keep the checkpointed inputs in the memory of the host",
    )
    fsdp_ignored_modules: str | None = setting(
        None,
        flag=None,
        variable="FSDP_IGNORED_MODULES",
        help="a regular expression: frozen modules of these names are not sharded",
    )
    fsdp_replicate_size: int | None = setting(
        None,
        variable="FSDP_REPLICATE_SIZE",
        help="replicas under HYBRID_SHARD; by default one for each machine",
    )
    # Options of FSDP1; for their meaning in FSDP2 see the plugin.
    fsdp_sharding_strategy: str | None = setting(
        None,
        variable="FSDP_SHARDING_STRATEGY",
        choices=STRATEGIES,
        # Torch writes an underscore before the name of an unstable member.
        aliases={**_numbers(STRATEGIES), "_hybrid_shard_zero2": "HYBRID_SHARD_ZERO2"},
        help="of FSDP1: what is sharded; in FSDP2 see fsdp_reshard_after_forward",
    )
    fsdp_backward_prefetch: str | None = setting(
        None,
        variable="FSDP_BACKWARD_PREFETCH",
        choices=PREFETCHES,
        aliases=_numbers(PREFETCHES),
        help="of FSDP1: all-gather the next unit before or after the gradients of this one, or no prefetch",
    )
    fsdp_forward_prefetch: bool | None = setting(
        None,
        switch=False,
        variable="FSDP_FORWARD_PREFETCH",
        help="of FSDP1: all-gather the next unit while one computes",
    )
    fsdp_use_orig_params: bool | None = setting(
        None,
        switch=False,
        variable="FSDP_USE_ORIG_PARAMS",
        help="of FSDP1: keep the user's own parameters (true); always so in FSDP2",
    )
    fsdp_sync_module_states: bool | None = setting(
        None,
        switch=False,
        variable="FSDP_SYNC_MODULE_STATES",
        help="of FSDP1: begin with the weights of rank 0 (true); always so in FSDP2",
    )


PLUGIN = (UseFSDPSetting, FSDPSettings)
