"""The options of Megatron-LM: fields of ``MegatronLMPlugin``, and settings of the launcher.

An option is declared here; ``strategy/megatron/`` uses it. Those that are refused stand with their reasons in
``plugin.py``.
"""

from __future__ import annotations

from typing import Any, ClassVar

from accelerate.core.setting import setting
from accelerate.core.value_types import Count, NonNegativeNumber, frozen_dataclass, mutable_dataclass


def _option(
    help: str,
    *,
    fallback: Any = None,
    nominal: Any = None,
    argument: str | None = "",
    unread: str = "",
    **more: Any,
) -> Any:
    """Declare an option.

    Args:
        help: one line.
        fallback: the value where no source gives one.
        nominal: the value that the field shows then, where it would change a model that nobody wanted
            changed: it counts only where somebody gives it.
        argument: its name among the arguments of Megatron-LM's training script; empty for its own, None for
            an option that is none of them.
        unread: the reason why Megatron-LM does not read it.
        more: arguments of ``setting``.
    """
    details = {"nominal": nominal, "argument": argument, "unread": unread}
    return setting(None, switch=False, fallback=fallback, help=help, details=details, **more)


@frozen_dataclass
class UseMegatronSetting:
    """The switch for Megatron-LM; in files it is ``distributed_type: MEGATRON_LM``."""

    __topic__ = "Megatron-LM"
    __distributed_type__ = "MEGATRON_LM"
    __common__ = ("use_megatron_lm",)

    use_megatron_lm: bool = setting(False, in_file=False, help="train by Megatron-LM")


@mutable_dataclass
class MegatronSettings:
    """The options of Megatron-LM, in the order of the plugin's constructor."""

    __topic__ = "Megatron-LM"
    __section__ = "megatron_lm_config"
    __prefix__ = "megatron_lm_"
    __variables__ = ""
    __switch__ = "use_megatron_lm"
    __first__: ClassVar[tuple[str, ...]] = (
        *("tp_degree", "pp_degree", "num_micro_batches", "sequence_parallelism"),
        *("use_distributed_optimizer", "gradient_clipping", "recompute_activations"),
    )

    tp_degree: Count = _option(
        "tensor parallel size",
        fallback=1,
        argument="tensor_model_parallel_size",
        question="Tensor parallel size?",
    )
    pp_degree: Count = _option(
        "pipeline parallel size",
        fallback=1,
        argument="pipeline_model_parallel_size",
        question="Pipeline parallel size?",
    )
    use_custom_fsdp: bool = _option("Megatron-LM's own sharding", fallback=False)
    overlap_cpu_optimizer_d2h_h2d: bool = _option(
        "copy optimizer state to and from the host while computing", fallback=False
    )
    no_load_optim: bool = _option("leave optimizer state out when a checkpoint is loaded", fallback=False)
    eod_mask_loss: bool = _option("no loss after the model's end-of-text token", fallback=False)
    no_save_optim: bool = _option("leave optimizer state out of checkpoints", fallback=False)
    optimizer_cpu_offload: bool = _option("keep optimizer state in the memory of the host", fallback=False)
    use_precision_aware_optimizer: bool = _option("optimizer state in narrower numbers", fallback=False)
    decoder_last_pipeline_num_layers: Count | None = _option(
        "layers of the last pipeline stage; by default as many as of the others"
    )
    recompute_granularity: str = _option(
        "what is computed again: whole layers, or what takes most memory",
        nominal="full",
        choices=("full", "selective"),
    )
    recompute_method: str = _option(
        "which layers: evenly chosen parts, or the first of each stage",
        nominal="uniform",
        choices=("uniform", "block"),
    )
    recompute_num_layers: Count = _option("layers of a part that is computed again", nominal=1)
    # Today's Megatron-LM has backends by name; the public package asks yes or no.
    attention_backend: bool = _option(
        "how attention is computed",
        type=bool | str,
        nominal=True,
        unread="attention is that of megatron-core itself, which has no other back ends",
    )
    expert_model_parallel_size: Count = _option("expert parallel size", fallback=1)
    context_parallel_size: Count = _option("context parallel size", nominal=2)
    attention_dropout: NonNegativeNumber = _option(
        "dropout of attention; by default the model's own", nominal=0.0
    )
    hidden_dropout: NonNegativeNumber = _option(
        "dropout between layers; by default the model's own", nominal=0.0
    )
    attention_softmax_in_fp32: bool = _option("the softmax of attention in 32 bits", fallback=True)
    expert_tensor_parallel_size: Count = _option("tensor parallel size of the experts", fallback=1)
    calculate_per_token_loss: bool = _option(
        "the loss is a mean over all tokens of all copies and micro-batches; false: the mean of their means",
        fallback=True,
    )
    use_rotary_position_embeddings: bool = _option(
        "positions by rotation", nominal=True, unread="the model's configuration says how positions are told"
    )
    num_micro_batches: Count = _option(
        "micro-batches of a step in the pipeline", fallback=1, question="Number of micro-batches?"
    )
    gradient_clipping: NonNegativeNumber = _option(
        "the largest norm of all gradients together; 0: any; clip_grad_norm_ in the loop takes its place",
        fallback=1.0,
        argument="clip_grad",
        question="Gradient clipping by norm? (0: none)",
    )
    sequence_parallelism: bool = _option(
        "sequence parallelism: shard activations between layers along the sequence; needs Apex",
        fallback=False,
        argument="sequence_parallel",
        question="Use sequence parallelism?",
    )
    recompute_activations: bool = _option(
        "compute activations of attention again in the backward",
        fallback=False,
        argument=None,
        question="Activation recomputation?",
    )
    use_distributed_optimizer: bool = _option(
        "shard optimizer state over the data parallel ranks",
        fallback=False,
        question="Shard optimizer state (distributed optimizer)?",
    )


PLUGIN = (UseMegatronSetting, MegatronSettings)
