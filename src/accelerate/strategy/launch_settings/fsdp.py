"""The options of FSDP: fields of ``FullyShardedDataParallelPlugin``, and settings of the launcher.

An option is declared here. What it means stands in ``strategy/sharding/fsdp2_options.py`` and
``fsdp1_options.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from accelerate.core.setting import SettingOrigin, SettingsWithOrigins, declared_settings, setting
from accelerate.core.value_types import Count, NonNegativeInt, frozen_dataclass, mutable_dataclass

Origins = Callable[[str], tuple[SettingOrigin, ...]]
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
STATES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_SIZE_BASED = "SIZE_BASED_WRAP"
POLICIES = ("TRANSFORMER_BASED_WRAP", _SIZE_BASED, "NO_WRAP")
_LEAST_UNIT_SIZE = 100_000_000  # parameters; the launcher of Accelerate 1.15 has the same default
# The names by their numbers, counted from 1, which files may have.
_BY_NUMBER = {
    names: {str(number): name for number, name in enumerate(names, 1)}
    for names in (STRATEGIES, PREFETCHES, STATES)
}
# An option that is off unless somebody gives it ``true``; its field takes an object too.
_OFF: dict[str, Any] = {"default": None, "type": bool, "switch": False, "fallback": False}
# Options of one version of FSDP alone, which say the version where it is not given.
_FSDP1, _FSDP2 = {"version": 1}, {"version": 2}


@frozen_dataclass
class UseFSDPSetting:
    """The switch for FSDP; in files it is ``distributed_type: FSDP``."""

    __topic__ = "Sharding"
    __distributed_type__ = "FSDP"
    __common__ = ("use_fsdp",)

    use_fsdp: bool = setting(
        False, in_file=False, help="shard parameters, gradients and optimizer state over the processes"
    )


@mutable_dataclass
class FSDPSettings:
    """The options of FSDP in the order of the plugin's constructor; plain fields are for code only."""

    __topic__ = "Sharding"
    __section__ = "fsdp_config"
    __prefix__ = "fsdp_"
    __variables__ = ""
    __switch__ = "use_fsdp"
    # The key that the wizard of Accelerate 1.x wrote until 0.23.
    __old_keys__: ClassVar[Mapping[str, str]] = {"backward_prefetch_policy": "fsdp_backward_prefetch"}
    __first__: ClassVar[tuple[str, ...]] = (
        *("fsdp_version", "reshard_after_forward", "auto_wrap_policy", "transformer_cls_names_to_wrap"),
        *("min_num_params", "cpu_offload", "state_dict_type", "cpu_ram_efficient_loading"),
        *(
            "activation_checkpointing",
            "activation_checkpointing_offload",
            "ignored_modules",
            "replicate_size",
        ),
    )

    fsdp_version: Any = setting(
        None,
        type=int,
        choices=(1, 2),
        fallback=2,
        help="2 is FSDP2 (fully_shard); 1 is FSDP1 (FullyShardedDataParallel), the default where an option "
        "of FSDP1 is given",
        question="FSDP version?",
    )
    sharding_strategy: Any = setting(
        None,
        type=str,
        choices=STRATEGIES,
        # Torch writes an underscore before the name of an unstable member.
        aliases={**_BY_NUMBER[STRATEGIES], "_hybrid_shard_zero2": "HYBRID_SHARD_ZERO2"},
        details=_FSDP1,
        help="of FSDP1: what is sharded; in FSDP2 see fsdp_reshard_after_forward",
    )
    reshard_after_forward: Any = setting(
        None,
        type=bool | str,
        switch=False,
        fallback=True,
        help="free unsharded parameters after the forward and all-gather them again in the backward (true); "
        "false takes more memory and less communication",
        question="Reshard parameters after the forward? true or false",
    )
    backward_prefetch: Any = setting(
        None,
        type=str,
        choices=PREFETCHES,
        aliases=_BY_NUMBER[PREFETCHES],
        fallback="BACKWARD_PRE",
        details=_FSDP1,
        help="all-gather the next unit before or after the gradients of this one, or no prefetch",
    )
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = setting(
        None,
        type=str,
        choices=POLICIES,
        fallback="NO_WRAP",
        help="which modules are FSDP units: layers by class, modules by size, or none",
        question="Auto wrap policy?",
        offered="TRANSFORMER_BASED_WRAP",
    )
    cpu_offload: Any = setting(
        **_OFF,
        name="fsdp_offload_params",
        help="keep parameters, gradients and optimizer state in the memory of the host",
        question="CPU offload of parameters?",
    )
    ignored_modules: Any = setting(
        None,
        type=str,
        flag=None,
        help="a regular expression: frozen modules of these names are not sharded",
    )
    state_dict_type: Any = setting(
        None,
        type=str,
        choices=STATES,
        aliases=_BY_NUMBER[STATES],
        help="checkpoints hold SHARDED_STATE_DICT, a shard per rank, or FULL_STATE_DICT; in FSDP1 also "
        "LOCAL_STATE_DICT",
        question="State dict type of checkpoints?",
    )
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = setting(
        None,
        switch=False,
        fallback=True,
        details=_FSDP1,
        help="of FSDP1: keep the user's own parameters (true), so that frozen ones and several groups of an "
        "optimizer may share a unit; always so in FSDP2",
    )
    param_init_fn: Callable[..., Any] | None = None
    sync_module_states: bool | None = setting(
        None,
        switch=False,
        fallback=True,
        details=_FSDP1,
        help="of FSDP1: begin with the weights of rank 0 (true); false saves the broadcast where all ranks "
        "have read the same weights, which is checked; always true in FSDP2",
    )
    forward_prefetch: Any = setting(
        **_OFF,
        details=_FSDP1,
        help="all-gather the next unit while one computes",
    )
    activation_checkpointing: Any = setting(
        **_OFF,
        help="recompute the activations of each FSDP unit in the backward",
        question="Activation checkpointing?",
    )
    activation_checkpointing_offload: Any = setting(
        **_OFF,
        details=_FSDP2,
        help="keep the checkpointed inputs in the memory of the host",
    )
    cpu_ram_efficient_loading: Any = setting(
        **_OFF,
        help="only rank 0 reads the weights of a pretrained model, and broadcasts them; a job of accelerate "
        "launch has it on unless it is switched off",
        question="Read pretrained weights on rank 0 only (CPU RAM efficient loading)?",
    )
    transformer_cls_names_to_wrap: Any = setting(
        None,
        name="fsdp_transformer_layer_cls_to_wrap",
        type=str | tuple[str, ...],
        variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
        help="class names of the layers, with commas; by default those that the model names itself",
        question="Class names of the transformer layers to wrap?",
        when={"fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP",)},
    )
    min_num_params: NonNegativeInt | None = setting(
        None,
        help="least parameters of an FSDP unit, if units are chosen by size; in a job of "
        "accelerate launch 100000000, unless it is given",
        question="Least number of parameters of a wrapped module?",
        when={"fsdp_auto_wrap_policy": (_SIZE_BASED,)},
    )
    replicate_size: Count | None = setting(
        None,
        help="replicas under HYBRID_SHARD; by default one for each machine",
    )

    @staticmethod
    def launch_variables(origins: Origins) -> Mapping[str, str]:
        """Return the variables of options that have another default in a job of the launcher.

        Libraries read weights on rank 0 only, unless somebody decided it: transformers takes a missing
        variable for false, and each rank would then hold the whole model. Where the ranks are to keep the
        weights that each has read, they all have to read them. Units by size have a least size.
        """
        loading, sync = origins("fsdp_cpu_ram_efficient_loading")[0], origins("fsdp_sync_module_states")[0]
        policy, least = origins("fsdp_auto_wrap_policy")[0], origins("fsdp_min_num_params")[0]
        variables: dict[str, str] = {}
        if loading.source == "default" and sync.value is not False:
            variables["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true"
        if policy.value == _SIZE_BASED and least.source == "default":
            variables["FSDP_MIN_NUM_PARAMS"] = str(_LEAST_UNIT_SIZE)
        return variables


def implied_versions(loaded: SettingsWithOrigins[FSDPSettings]) -> set[int]:
    """Return the versions of FSDP that alone have some of the options that were given.

    1.x has version 1 where none is given. What was written for it may call FSDP1's own functions
    (``FullyShardedDataParallel.state_dict_type``, ``summon_full_params``): where no version is given, it is 1
    if this says 1 and not 2.
    """
    rows = [row for row in declared_settings(FSDPSettings) if loaded.is_given(row.name)]
    versions: set[int] = {row.details["version"] for row in rows if "version" in row.details}
    if (resharding := loaded.value.reshard_after_forward) is not None:
        versions.add(1 if isinstance(resharding, str) else 2)
    return versions | ({1} if loaded.value.state_dict_type == "LOCAL_STATE_DICT" else set())


PLUGIN = (UseFSDPSetting, FSDPSettings)
