"""The settings of the parallelism config: the launcher's flags, their environment variables and file keys.

A section of a file with any key asks for it. Sizes default to 1 in their readers.
"""

from __future__ import annotations

from typing import Any

from accelerate.core.frozen_dataclass import frozen_dataclass
from accelerate.core.setting import setting


def _option(name: str, help: str, **more: Any) -> Any:
    return setting(None, switch=False, variable=f"PARALLELISM_CONFIG_{name}", help=help, **more)


@frozen_dataclass
class UseParallelismConfigSetting:
    """The switch for a device mesh of several dimensions."""

    __topic__ = "Degrees of parallelism"

    use_parallelism_config: bool = setting(
        False, help="use a device mesh: data, tensor, context and sequence parallel"
    )


@frozen_dataclass
class ParallelismSettings:
    """The sizes of the mesh dimensions, and the options of each dimension."""

    __topic__ = "Degrees of parallelism"
    __section__ = "parallelism_config"
    __prefix__ = "parallelism_config_"
    __switch__ = "use_parallelism_config"
    __asks__ = "use_parallelism_config"

    parallelism_config_dp_replicate_size: int | None = _option(
        "DP_REPLICATE_SIZE",
        "replicas of the model, on different data",
        question="How many replicas of the model?",
    )
    parallelism_config_dp_shard_size: int | None = _option(
        "DP_SHARD_SIZE",
        "processes that shard each replica, on different data",
        question="How many processes shard each replica?",
    )
    parallelism_config_tp_size: int | None = _option(
        "TP_SIZE",
        "tensor parallel size",
        question="Tensor parallel size?",
    )
    parallelism_config_pp_size: int | None = _option(
        "PP_SIZE", "pipeline parallel size", question="Pipeline parallel size?"
    )
    parallelism_config_cp_size: int | None = _option(
        "CP_SIZE",
        "context parallel size",
        question="Context parallel size?",
    )
    parallelism_config_cp_backend: str | None = _option(
        "CP_BACKEND", "the back end of context parallelism", choices=("torch",)
    )
    parallelism_config_cp_comm_strategy: str | None = _option(
        "CP_COMM_STRATEGY", "how keys and values are exchanged", choices=("allgather", "alltoall")
    )
    parallelism_config_sp_size: int | None = _option("SP_SIZE", "sequence parallel size (Ulysses)")
    parallelism_config_sp_backend: str | None = _option(
        "SP_BACKEND", "the back end of sequence parallelism", choices=("deepspeed",)
    )
    parallelism_config_sp_seq_length: int | None = _option(
        "SP_SEQ_LENGTH", "tokens of every sequence, where they are equally long"
    )
    parallelism_config_sp_seq_length_is_variable: bool | None = _option(
        "SP_SEQ_LENGTH_IS_VARIABLE", "whether sequences differ in length"
    )
    parallelism_config_sp_attn_implementation: str | None = _option(
        "SP_ATTN_IMPLEMENTATION", "how attention is computed, by its name in transformers"
    )


PLUGIN = (UseParallelismConfigSetting, ParallelismSettings)
