"""The options of parallelism over a device mesh: fields of ``ParallelismConfig`` and of the options of one
dimension, and settings of the launcher.

A section of a file with any key asks for it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from accelerate.core.setting import setting
from accelerate.core.value_types import Count, PositiveInt, frozen_dataclass, mutable_dataclass


@frozen_dataclass
class UseParallelismConfigSetting:
    """The switch for a device mesh of several dimensions."""

    __topic__ = "Degrees of parallelism"
    __common__ = ("use_parallelism_config",)

    use_parallelism_config: bool = setting(
        False, help="use a device mesh: data, tensor, context and sequence parallel"
    )


class _MeshSection:
    """The place of the settings in files."""

    __section__ = "parallelism_config"
    __prefix__ = "parallelism_config_"
    __variables__ = ""


_SIZE: dict[str, Any] = {"default": None, "fallback": 1}  # of a dimension


@mutable_dataclass
class MeshSettings(_MeshSection):
    """The sizes of the mesh dimensions in the order of ``ParallelismConfig``; plain fields are for code."""

    dp_replicate_size: Count | None = setting(
        **_SIZE, help="data parallel replicas of the model", question="Data parallel replicas?"
    )
    dp_shard_size: Count | None = setting(
        **_SIZE,
        help="processes that shard each replica, on different data",
        question="Data parallel shards of each replica (FSDP)?",
    )
    tp_size: Count | None = setting(**_SIZE, help="tensor parallel size", question="Tensor parallel size?")
    cp_size: Count | None = setting(
        **_SIZE,
        help="context parallel size: processes that shard each sequence, with attention over all keys",
        question="Context parallel size?",
    )
    cp_backend: Any = setting(
        None, help="the back end of context parallelism", type=str, choices=("torch",), fallback="torch"
    )
    sp_size: Count | None = setting(
        **_SIZE,
        help="sequence parallel size (Ulysses): processes that shard each sequence, and heads in attention",
    )
    sp_backend: Any = setting(
        None,
        help="the back end of sequence parallelism",
        type=str,
        choices=("deepspeed",),
        fallback="deepspeed",
    )
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None
    pp_size: Count | None = setting(
        **_SIZE, help="pipeline parallel size", question="Pipeline parallel size?"
    )
    pp_handler: Any = None


@mutable_dataclass
class ContextParallelSettings(_MeshSection):
    """The options of context parallelism."""

    cp_comm_strategy: str | None = setting(
        None,
        help="how keys and values are exchanged: gathered from all, or around a ring",
        choices=("allgather", "alltoall"),
        fallback="allgather",
    )


@mutable_dataclass
class SequenceParallelSettings(_MeshSection):
    """The options of Ulysses sequence parallelism."""

    sp_seq_length: PositiveInt | None = setting(
        None, help="tokens of every sequence, where they are equally long"
    )
    sp_seq_length_is_variable: bool | None = setting(
        None, switch=False, fallback=True, help="whether sequences differ in length"
    )
    sp_attn_implementation: str | None = setting(
        None, help="how attention is computed, by its name in transformers"
    )


@mutable_dataclass
class ParallelismSettings(SequenceParallelSettings, ContextParallelSettings, MeshSettings):
    """The sizes of the mesh dimensions, and the options of each dimension."""

    __topic__ = "Degrees of parallelism"
    __switch__ = "use_parallelism_config"
    __asks__ = "use_parallelism_config"
    __first__: ClassVar[tuple[str, ...]] = (
        *("dp_replicate_size", "dp_shard_size", "tp_size", "pp_size"),
        *("cp_size", "cp_backend", "cp_comm_strategy", "sp_size", "sp_backend"),
    )


PLUGIN = (UseParallelismConfigSetting, ParallelismSettings)
