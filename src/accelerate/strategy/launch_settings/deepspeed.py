"""The options of DeepSpeed: fields of ``DeepSpeedPlugin``, and settings of the launcher.

An option is declared here, with its key in DeepSpeed's own configuration. A script reads the given values in
their variables, also one that calls DeepSpeed itself. Defaults are not passed on: they would look like the
user's choice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from accelerate.core import environ
from accelerate.core.setting import SettingOrigin, declared_settings, setting
from accelerate.core.value_types import (
    FilledPath,
    NonNegativeNumber,
    PositiveInt,
    frozen_dataclass,
    mutable_dataclass,
)
from accelerate.strategy.deepspeed import config_tree

Origins = Callable[[str], tuple[SettingOrigin, ...]]
# Of options of the launcher for several machines.
_SEVERAL_MACHINES: dict[str, Any] = {
    "default": None,
    "variable": None,
    "when": {"num_machines": range(2, 10_000)},
}
DEVICES = ("none", "cpu", "nvme")
LAUNCHERS = ("pdsh", "standard", "openmpi", "mvapich", "mpich", "impi", "nossh", "slurm")


# The keys of DeepSpeed's own configuration, of its top level and of zero_optimization; those of the tables in
# there with the table's name before. Configuration files in use have some of them in the section
# deepspeed_config, where nobody reads them. Left out are those that are near a setting and
# change the training, so that they are taken for slips, as stage. The tables offload_optimizer and
# offload_param are read, in launch/config_files.py.
# Source: https://www.deepspeed.ai/docs/config-json/
_JSON_KEYS = """
activation_checkpointing aio allgather_bucket_size allgather_partitions amp autotuning bf16 bfloat16
checkpoint comet comms_logger communication_data_type compile compression_training contiguous_gradients
csv_monitor curriculum_learning data_efficiency data_types disable_allgather dump_state elastic_checkpoint
elasticity flops_profiler fp16 grad_hooks gradient_predivide_factor graph_harvesting hybrid_engine
ignore_unused_parameters load_from_fp32_weights memory_breakdown memory_efficient_linear
mics_hierarchical_params_gather mics_shard_size nebula offload_optimizer_buffer_count
offload_optimizer_fast_init offload_optimizer_pin_memory offload_optimizer_pipeline_read
offload_optimizer_pipeline_write offload_optimizer_ratio offload_param_buffer_count offload_param_buffer_size
offload_param_max_in_cpu offload_param_pin_memory optimizer overlap_comm override_module_apply pipeline
prescale_gradients reduce_bucket_size reduce_scatter round_robin_gradients scheduler
seq_parallel_communication_data_type sparse_attention sparse_gradients
stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold
stage3_module_granularity_threshold stage3_param_persistence_threshold stage3_prefetch_bucket_size
steps_per_print sub_group_size tensor_parallel tensorboard timers torch_autocast train_batch_size
train_micro_batch_size_per_gpu wall_clock_breakdown wandb zero_allow_untested_optimizer
zero_force_ds_cpu_optimizer zero_hpz_partition_size zero_optimization zero_quantized_gradients
zero_quantized_nontrainable_weights zero_quantized_weights
"""
_JSON_KEY_REASON = (
    "it is a key of DeepSpeed's own configuration; to use it, write it into DeepSpeed's JSON file and name "
    "that here, deepspeed_config_file: ds.json"
)


def _option(help: str, *, key: str = "", absent: Any = None, **more: Any) -> Any:
    """Declare an option.

    Args:
        help: one line.
        key: its path in DeepSpeed's own configuration, by which it is set, compared and read back.
        absent: the meaning of a missing key there.
        more: arguments of ``setting``.
    """
    return setting(None, switch=False, help=help, details={"key": key, "absent": absent}, **more)


@frozen_dataclass
class UseDeepSpeedSetting:
    """The switch for DeepSpeed; in files it is ``distributed_type: DEEPSPEED``."""

    __topic__ = "DeepSpeed"
    __distributed_type__ = "DEEPSPEED"
    __common__ = ("use_deepspeed",)

    use_deepspeed: bool = setting(False, in_file=False, help="train by DeepSpeed")


@mutable_dataclass
class DeepSpeedOptions:
    """The options of DeepSpeed in the order of the plugin's constructor; plain fields are for code only."""

    __topic__ = "DeepSpeed"
    __section__ = "deepspeed_config"
    __variables__ = "ACCELERATE_DEEPSPEED_"
    __switch__ = "use_deepspeed"
    __elsewhere__: ClassVar[tuple[str, ...]] = ("gradient_accumulation_steps",)
    __first__: ClassVar[tuple[str, ...]] = (
        *("hf_ds_config", "zero_stage", "offload_optimizer_device", "offload_param_device"),
        *("offload_optimizer_nvme_path", "offload_param_nvme_path"),
    )

    hf_ds_config: Any = _option(
        "DeepSpeed's own JSON file; flags that contradict it are an error",
        name="deepspeed_config_file",
        type=str,
        variable="ACCELERATE_DEEPSPEED_CONFIG_FILE",
        question="DeepSpeed's JSON file? (empty: none)",
    )
    gradient_accumulation_steps: PositiveInt | Literal["auto"] | None = None
    gradient_clipping: Any = _option(
        "the largest norm of all gradients together; auto takes what clip_grad_norm_ says",
        type=NonNegativeNumber | Literal["auto"],
        fallback="auto",
        key="gradient_clipping",
        variable="ACCELERATE_GRADIENT_CLIPPING",
        question="Gradient clipping by norm? (empty: none)",
        when={"deepspeed_config_file": (None,)},
    )
    zero_stage: int | None = _option(
        "what is sharded: 1 optimizer state, 2 gradients too, 3 parameters too",
        choices=(0, 1, 2, 3),
        fallback=2,
        key="zero_optimization.stage",
        absent=0,
        question="ZeRO stage?",
        when={"deepspeed_config_file": (None,)},
    )
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = _option(
        "where optimizer state is offloaded to",
        choices=DEVICES,
        fallback="none",
        key="zero_optimization.offload_optimizer.device",
        absent="none",
        question="Offload of optimizer state?",
        when={"deepspeed_config_file": (None,)},
    )
    offload_param_device: str | None = _option(
        "where parameters are offloaded to (stage 3)",
        choices=DEVICES,
        fallback="none",
        key="zero_optimization.offload_param.device",
        absent="none",
        question="Offload of parameters?",
        when={"zero_stage": (3,)},
    )
    offload_optimizer_nvme_path: str | None = _option(
        "the folder of optimizer state that is offloaded to NVMe",
        fallback="none",
        key="zero_optimization.offload_optimizer.nvme_path",
        question="NVMe folder of optimizer state?",
        when={"offload_optimizer_device": ("nvme",)},
    )
    offload_param_nvme_path: str | None = _option(
        "the folder of parameters that are offloaded to NVMe",
        fallback="none",
        key="zero_optimization.offload_param.nvme_path",
        question="NVMe folder of parameters?",
        when={"offload_param_device": ("nvme",)},
    )
    zero3_init_flag: bool | None = _option(
        "shard models of libraries while they are made (stage 3, by default there)",
        variable="ACCELERATE_DEEPSPEED_ZERO3_INIT",
        question="Shard models at construction (zero.Init)?",
        when={"zero_stage": (3,)},
    )
    zero3_save_16bit_model: bool | None = _option(
        "gather 16-bit weights when a model is saved (stage 3); false makes get_state_dict refuse",
        fallback=False,
        key="zero_optimization.stage3_gather_16bit_weights_on_model_save",
        absent=False,
        question="Gather 16-bit weights of ZeRO-3 when a model is saved?",
        when={"zero_stage": (3,)},
    )
    transformer_moe_cls_names: Any = _option(
        "class names of layers with experts, with commas",
        name="deepspeed_moe_layer_cls_names",
        type=str | tuple[str, ...],
        variable="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
        question="Class names of MoE layers? (empty: none)",
    )


# setting -> (its path in DeepSpeed's own configuration, the meaning of a missing key there)
COUNTERPARTS: dict[str, tuple[str, Any]] = {
    **{
        row.name: (row.details["key"], row.details["absent"])
        for row in declared_settings(DeepSpeedOptions)
        if row.details["key"]
    },
    "gradient_accumulation_steps": ("gradient_accumulation_steps", None),
}


@mutable_dataclass
class DeepSpeedSettings(DeepSpeedOptions):
    """The options of DeepSpeed, and of its own launcher for several machines."""

    __without_effect__: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(_JSON_KEYS.split(), _JSON_KEY_REASON),
        # Not a slip for gradient_clipping, to which it is near.
        "gradient_checkpointing": "DeepSpeed has no such option; the script turns it on, as by "
        "model.gradient_checkpointing_enable()",
    }

    deepspeed_multinode_launcher: str | None = setting(
        **_SEVERAL_MACHINES,
        choices=LAUNCHERS,
        help="what starts the other machines: DeepSpeed's own launcher by pdsh (the default), MPI, "
        "a scheduler or without ssh; standard: this launcher, once on each",
        question="Multi-node launcher?",
    )
    deepspeed_hostfile: FilledPath | None = setting(
        **_SEVERAL_MACHINES,
        help="a file with a line per machine, like 'worker-1 slots=8'",
        question="DeepSpeed hostfile?",
    )
    deepspeed_inclusion_filter: str | None = setting(
        **_SEVERAL_MACHINES,
        help="machines and devices of the hostfile to use, like worker-1@worker-2:0,2",
        question="Inclusion filter of its machines? (empty: all)",
    )
    deepspeed_exclusion_filter: str | None = setting(
        **_SEVERAL_MACHINES,
        help="machines and devices of the hostfile to leave out, like worker-2:0",
        question="Exclusion filter of its machines? (empty: none)",
    )

    @staticmethod
    def check(origins: Origins) -> None:
        """Refuse a DeepSpeed file that is missing or contradicts other settings, and NVMe without a folder.

        Raises:
            SettingError: it is; names both places of a contradiction.
        """
        source = origins("deepspeed_config_file")[0]
        if _is_empty(source.value):
            for target in ("optimizer", "param"):
                device, path = (origins(f"offload_{target}_{part}")[0] for part in ("device", "nvme_path"))
                if device.value == "nvme" and _is_empty(path.value):
                    raise config_tree.missing_nvme_folder(device.where)
            return
        config = config_tree.read_config(str(source.value), source.where)
        file = f"{source.where} ({source.value})"
        for name, (key, absent) in COUNTERPARTS.items():
            given, configured = origins(name)[0], config_tree.get_key(config, key, absent)
            # "auto" leaves it to us, and so does what is not there.
            silent = given.source == "default" or "auto" in (given.value, configured) or configured is None
            if not silent and not config_tree.is_same(given.value, configured):
                raise config_tree.contradiction(f"{given.where} is {given.value}", key, configured, file)
        given = origins("mixed_precision")[0]
        is_silent = given.source == "default" or given.value is None
        for kind in () if is_silent else ("fp16", "bf16"):
            enabled = config_tree.get_key(config, f"{kind}.enabled", "auto")
            if isinstance(enabled, bool) and enabled != (given.value == kind):
                claim = f"{given.where} is {given.value}"
                raise config_tree.contradiction(claim, f"{kind}.enabled", enabled, file)

    @staticmethod
    def launch_variables(origins: Origins) -> Mapping[str, str]:
        """Return more variables: the fields that a configuration file gave, and ``PYTHONPATH``.

        DeepSpeed starts processes in ways that do not put the working folder on Python's path.
        """
        names = [row.name for row in declared_settings(DeepSpeedSettings)]
        names += ["gradient_accumulation_steps", "mixed_precision"]
        fields = (name for name in names if any(origin.source == "file" for origin in origins(name)))
        paths = [*filter(None, (environ.get("PYTHONPATH") or "").split(os.pathsep))]
        working_folder = str(Path.cwd())
        return {
            "ACCELERATE_CONFIG_DS_FIELDS": ",".join(fields),
            "PYTHONPATH": os.pathsep.join(paths if working_folder in paths else [*paths, working_folder]),
        }


def _is_empty(value: object) -> bool:
    return value is None or str(value).lower() == "none"


PLUGIN = (UseDeepSpeedSetting, DeepSpeedSettings)
