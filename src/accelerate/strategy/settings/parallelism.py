"""What one says about degrees of parallelism: the launcher's flags, their variables and file keys.

A section of a file that says anything asks for it. Sizes that nobody gave are 1, by their readers.
"""

from __future__ import annotations

from typing import Any

from accelerate.core.frozen import frozen
from accelerate.core.setting import setting


def _option(name: str, help: str, **more: Any) -> Any:
    return setting(None, switch=False, variable=f"PARALLELISM_CONFIG_{name}", help=help, **more)


@frozen
class ParallelismSwitch:
    """Whether processes are a grid of several dimensions."""

    __topic__ = "Degrees of parallelism"

    use_parallelism_config: bool = setting(
        False, help="processes are a grid: data, tensor, context and sequence parallel"
    )


@frozen
class ParallelismSettings:
    """The sizes of the grid, and how each dimension works."""

    __topic__ = "Degrees of parallelism"
    __section__ = "parallelism_config"
    __prefix__ = "parallelism_config_"
    __switch__ = "use_parallelism_config"
    __asks__ = "use_parallelism_config"

    parallelism_config_dp_replicate_size: int | None = _option(
        "DP_REPLICATE_SIZE",
        "copies of the model that see different data",
        question="How many copies of the model?",
    )
    parallelism_config_dp_shard_size: int | None = _option(
        "DP_SHARD_SIZE",
        "processes that share each copy and see different data",
        question="How many processes share each copy?",
    )
    parallelism_config_tp_size: int | None = _option(
        "TP_SIZE",
        "processes that share each layer",
        question="How many processes share each layer?",
    )
    parallelism_config_pp_size: int | None = _option(
        "PP_SIZE", "stages of layers, one after another", question="How many stages of layers?"
    )
    parallelism_config_cp_size: int | None = _option(
        "CP_SIZE",
        "processes that share each sequence, around a ring",
        question="How many processes share each sequence?",
    )
    parallelism_config_cp_backend: str | None = _option("CP_BACKEND", "what does it", choices=("torch",))
    parallelism_config_cp_comm_strategy: str | None = _option(
        "CP_COMM_STRATEGY", "how keys and values go around", choices=("allgather", "alltoall")
    )
    parallelism_config_sp_size: int | None = _option(
        "SP_SIZE", "processes that share each sequence, head by head"
    )
    parallelism_config_sp_backend: str | None = _option("SP_BACKEND", "what does it", choices=("deepspeed",))
    parallelism_config_sp_seq_length: int | None = _option(
        "SP_SEQ_LENGTH", "tokens of every sequence, where they are equally long"
    )
    parallelism_config_sp_seq_length_is_variable: bool | None = _option(
        "SP_SEQ_LENGTH_IS_VARIABLE", "whether sequences differ in length"
    )
    parallelism_config_sp_attn_implementation: str | None = _option(
        "SP_ATTN_IMPLEMENTATION", "how attention is computed, by its name in transformers"
    )


PLUGIN = (ParallelismSwitch, ParallelismSettings)
