"""The options of parallelism over a device mesh: fields of ``ParallelismConfig`` and of the options of one
dimension, and settings of the launcher.

A section of a file with any key asks for it.
"""

from __future__ import annotations

from typing import Any

from accelerate.core.frozen_dataclass import frozen_dataclass, mutable_dataclass
from accelerate.core.setting import setting


def _option(help: str, **more: Any) -> Any:
    return setting(None, switch=False, help=help, **more)


@frozen_dataclass
class UseParallelismConfigSetting:
    """The switch for a device mesh of several dimensions."""

    __topic__ = "Degrees of parallelism"

    use_parallelism_config: bool = setting(
        False, help="use a device mesh: data, tensor, context and sequence parallel"
    )


class ParallelismSection:
    """The section of a configuration file."""

    __topic__ = "Degrees of parallelism"
    __section__ = "parallelism_config"
    __prefix__ = "parallelism_config_"
    __variables__ = ""
    __switch__ = "use_parallelism_config"
    __asks__ = "use_parallelism_config"


@mutable_dataclass
class MeshSettings(ParallelismSection):
    """The sizes of the mesh dimensions in the order of ``ParallelismConfig``; plain fields are for code."""

    dp_replicate_size: int | None = _option(
        "data parallel replicas of the model", fallback=1, question="How many replicas of the model?"
    )
    dp_shard_size: int | None = _option(
        "processes that shard each replica, on different data",
        fallback=1,
        question="How many processes shard each replica?",
    )
    tp_size: int | None = _option("tensor parallel size", fallback=1, question="Tensor parallel size?")
    cp_size: int | None = _option(
        "context parallel size: processes that shard each sequence, with attention over all keys",
        fallback=1,
        question="Context parallel size?",
    )
    cp_backend: Any = _option(
        "the back end of context parallelism", type=str, choices=("torch",), fallback="torch"
    )
    sp_size: int | None = _option(
        "sequence parallel size (Ulysses): processes that shard each sequence, and heads in attention",
        fallback=1,
    )
    sp_backend: Any = _option(
        "the back end of sequence parallelism", type=str, choices=("deepspeed",), fallback="deepspeed"
    )
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None
    pp_size: int | None = _option("pipeline parallel size", fallback=1, question="Pipeline parallel size?")
    pp_handler: Any = None


@mutable_dataclass
class ContextParallelSettings(ParallelismSection):
    """The options of context parallelism."""

    cp_comm_strategy: str | None = _option(
        "how keys and values are exchanged: gathered from all, or around a ring",
        choices=("allgather", "alltoall"),
        fallback="allgather",
    )


@mutable_dataclass
class SequenceParallelSettings(ParallelismSection):
    """The options of Ulysses sequence parallelism."""

    sp_seq_length: int | None = _option("tokens of every sequence, where they are equally long")
    sp_seq_length_is_variable: bool | None = _option("whether sequences differ in length", fallback=True)
    sp_attn_implementation: str | None = _option("how attention is computed, by its name in transformers")


@mutable_dataclass
class ParallelismSettings(SequenceParallelSettings, ContextParallelSettings, MeshSettings):
    """The sizes of the mesh dimensions, and the options of each dimension."""

    __first__ = (
        *("dp_replicate_size", "dp_shard_size", "tp_size", "pp_size"),
        *("cp_size", "cp_backend", "cp_comm_strategy", "sp_size", "sp_backend"),
    )


PLUGIN = (UseParallelismConfigSetting, ParallelismSettings)
