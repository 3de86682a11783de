"""The settings of Megatron-LM: the launcher's flags, their environment variables and file keys.

Each reader has its own default, which is why the launcher passes on no default.
"""

from __future__ import annotations

from typing import Any

from accelerate.core.frozen_dataclass import frozen_dataclass
from accelerate.core.setting import setting


def _option(name: str, help: str, **more: Any) -> Any:
    return setting(None, switch=False, variable=f"MEGATRON_LM_{name}", help=help, **more)


@frozen_dataclass
class UseMegatronSetting:
    """The switch for Megatron-LM; in files it is ``distributed_type: MEGATRON_LM``."""

    __topic__ = "Megatron-LM"
    __distributed_type__ = "MEGATRON_LM"

    use_megatron_lm: bool = setting(False, in_file=False, help="train by Megatron-LM")


@frozen_dataclass
class MegatronSettings:
    """The options of Megatron-LM."""

    __topic__ = "Megatron-LM"
    __section__ = "megatron_lm_config"
    __prefix__ = "megatron_lm_"
    __switch__ = "use_megatron_lm"

    megatron_lm_tp_degree: int | None = _option(
        "TP_DEGREE",
        "tensor parallel size",
        question="Tensor parallel size?",
    )
    megatron_lm_pp_degree: int | None = _option(
        "PP_DEGREE",
        "pipeline parallel size",
        question="Pipeline parallel size?",
    )
    megatron_lm_num_micro_batches: int | None = _option(
        "NUM_MICRO_BATCHES",
        "micro-batches of a step in the pipeline",
        question="How many micro-batches?",
    )
    megatron_lm_sequence_parallelism: bool | None = _option(
        "SEQUENCE_PARALLELISM",
        "sequence parallelism: shard activations between layers along the sequence",
        question="Use sequence parallelism?",
    )
    megatron_lm_context_parallel_size: int | None = _option("CONTEXT_PARALLEL_SIZE", "context parallel size")
    megatron_lm_expert_model_parallel_size: int | None = _option(
        "EXPERT_MODEL_PARALLEL_SIZE", "expert parallel size"
    )
    megatron_lm_expert_tensor_parallel_size: int | None = _option(
        "EXPERT_TENSOR_PARALLEL_SIZE", "tensor parallel size of the experts"
    )
    megatron_lm_decoder_last_pipeline_num_layers: int | None = _option(
        "DECODER_LAST_PIPELINE_NUM_LAYERS",
        "layers of the last pipeline stage; by default as many as of the others",
    )
    megatron_lm_use_custom_fsdp: bool | None = _option("USE_CUSTOM_FSDP", "Megatron-LM's own sharding")
    megatron_lm_use_distributed_optimizer: bool | None = _option(
        "USE_DISTRIBUTED_OPTIMIZER",
        "shard optimizer state over the data parallel ranks",
        question="Shard optimizer state?",
    )
    megatron_lm_optimizer_cpu_offload: bool | None = _option(
        "OPTIMIZER_CPU_OFFLOAD", "keep optimizer state in the memory of the host"
    )
    megatron_lm_overlap_cpu_optimizer_d2h_h2d: bool | None = _option(
        "OVERLAP_CPU_OPTIMIZER_D2H_H2D", "copy it to and from the host while computing"
    )
    megatron_lm_use_precision_aware_optimizer: bool | None = _option(
        "USE_PRECISION_AWARE_OPTIMIZER", "optimizer state in narrower numbers"
    )
    megatron_lm_no_load_optim: bool | None = _option(
        "NO_LOAD_OPTIM", "leave optimizer state out when a checkpoint is loaded"
    )
    megatron_lm_no_save_optim: bool | None = _option(
        "NO_SAVE_OPTIM", "leave optimizer state out of checkpoints"
    )
    megatron_lm_gradient_clipping: float | None = _option(
        "GRADIENT_CLIPPING",
        "the largest norm of all gradients together; 0: any",
        question="The largest norm of gradients? (empty: any)",
    )
    megatron_lm_recompute_activations: bool | None = _option(
        "RECOMPUTE_ACTIVATIONS",
        "compute activations of attention again in the backward",
        question="Compute activations again in the backward?",
    )
    megatron_lm_recompute_granularity: str | None = _option(
        "RECOMPUTE_GRANULARITY",
        "what is computed again: whole layers, or what takes most memory",
        choices=("full", "selective"),
    )
    megatron_lm_recompute_method: str | None = _option(
        "RECOMPUTE_METHOD",
        "which layers: evenly chosen parts, or the first of each stage",
        choices=("uniform", "block"),
    )
    megatron_lm_recompute_num_layers: int | None = _option(
        "RECOMPUTE_NUM_LAYERS", "layers of a part that is computed again"
    )
    # Today's Megatron-LM has backends by name; the public package asks yes or no.
    megatron_lm_attention_backend: bool | str | None = _option(
        "ATTENTION_BACKEND", "how attention is computed"
    )
    megatron_lm_attention_dropout: float | None = _option("ATTENTION_DROPOUT", "dropout of attention")
    megatron_lm_hidden_dropout: float | None = _option("HIDDEN_DROPOUT", "dropout between layers")
    megatron_lm_attention_softmax_in_fp32: bool | None = _option(
        "ATTENTION_SOFTMAX_IN_FP32", "the softmax of attention in 32 bits"
    )
    megatron_lm_calculate_per_token_loss: bool | None = _option(
        "CALCULATE_PER_TOKEN_LOSS", "the loss is a mean over tokens"
    )
    megatron_lm_eod_mask_loss: bool | None = _option("EOD_MASK_LOSS", "no loss for ends of documents")
    megatron_lm_use_rotary_position_embeddings: bool | None = _option(
        "USE_ROTARY_POSITION_EMBEDDINGS", "positions by rotation"
    )


PLUGIN = (UseMegatronSetting, MegatronSettings)
