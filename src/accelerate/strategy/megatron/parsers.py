"""Parsers from a model's configuration to Megatron-LM's arguments, by model type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from accelerate.core.errors import UnknownNameError

Parser = Callable[[Any, Any, Any], None]

MODEL_CONFIGS_TO_MEGATRON_PARSERS: dict[str, Parser] = {}


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[Parser], Parser]:
    """Register ``function(plugin, model, batch_data)`` as the parser of a model type; a decorator.

    Args:
        model_type: as the model's configuration says it.
    """

    def register(parser: Parser) -> Parser:
        MODEL_CONFIGS_TO_MEGATRON_PARSERS[model_type] = parser
        return parser

    return register


def add_model_args(plugin: Any, model: Any, batch_data: Any) -> None:
    """Add the arguments of ``model`` to ``plugin.megatron_lm_default_args``.

    Args:
        plugin: the ``MegatronLMPlugin``.
        model: a model with a ``config`` of transformers.
        batch_data: a batch that tells lengths; None takes the configuration's.

    Raises:
        UnknownNameError: there is no parser for such models (a ValueError).
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in MODEL_CONFIGS_TO_MEGATRON_PARSERS:
        raise UnknownNameError(
            "model for Megatron-LM",
            str(kind),
            MODEL_CONFIGS_TO_MEGATRON_PARSERS,
            why="add_model_config_to_megatron_parser(kind) adds one; known: "
            + ", ".join(MODEL_CONFIGS_TO_MEGATRON_PARSERS),
        )
    MODEL_CONFIGS_TO_MEGATRON_PARSERS[kind](plugin, model, batch_data)


def _row_length(batch: Any, name: str, otherwise: int) -> int:
    """Return the tokens of a row in a batch."""
    if not isinstance(batch, Mapping) or name not in batch:
        return otherwise
    return int(batch[name].shape[1])


def _add_sequence_model_args(
    plugin: Any, config: Any, batch: Any, configured: int | None, length: int, **more: Any
) -> None:
    """Add the arguments that all models of one sequence share.

    Args:
        plugin: gets the arguments, and its ``seq_length`` if it has none.
        config: with transformers' usual names.
        batch: tells the length of a row.
        configured: another field of the plugin that says the length.
        length: the longest that the model knows.
        more: further arguments.
    """
    if plugin.seq_length is None:
        plugin.seq_length = configured if configured is not None else _row_length(batch, "input_ids", length)
    plugin.megatron_lm_default_args.update(
        {
            "seq_length": plugin.seq_length,
            "num_layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "num_attention_heads": config.num_attention_heads,
            "max_position_embeddings": length,
            "orig_vocab_size": config.vocab_size,
            "model_return_dict": bool(config.return_dict),
            **more,
        }
    )


@add_model_config_to_megatron_parser("megatron-bert")
def parse_bert_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Add the arguments of an encoder, with the number of labels where the model classifies."""
    config, name = model.config, type(model).__name__.lower()
    more: dict[str, Any] = {"model_type_name": "bert", "pretraining_flag": "pretraining" in name}
    if not more["pretraining_flag"]:
        more["num_labels"] = config.num_labels
    length = config.max_position_embeddings
    _add_sequence_model_args(
        megatron_lm_plugin, config, batch_data, megatron_lm_plugin.encoder_seq_length, length, **more
    )


@add_model_config_to_megatron_parser("gpt2")
def parse_gpt2_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Add the arguments of a decoder."""
    _add_decoder_args(megatron_lm_plugin, model.config, batch_data, "GPT2BPETokenizer")


@add_model_config_to_megatron_parser("llama")
def parse_llama_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Add the arguments of a decoder."""
    _add_decoder_args(megatron_lm_plugin, model.config, batch_data, "Llama2Tokenizer")


def _add_decoder_args(plugin: Any, config: Any, batch: Any, tokenizer: str, **more: Any) -> None:
    more |= {
        "model_type_name": "gpt",
        "pretraining_flag": True,
        "tokenizer_type": tokenizer,
        "return_logits": plugin.return_logits,
    }
    _add_sequence_model_args(
        plugin, config, batch, plugin.decoder_seq_length, config.max_position_embeddings, **more
    )


@add_model_config_to_megatron_parser("glm4_moe")
def parse_glm4_moe_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Add the arguments of a mixture-of-experts decoder."""
    config = model.config
    rotation: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    part = rotation.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0))
    more = {
        "num_query_groups": config.num_key_value_heads,
        "ffn_hidden_size": config.intermediate_size,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "num_experts": config.n_routed_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rotary_base": rotation.get("rope_theta", getattr(config, "rope_theta", 10000)),
        "rotary_percent": part,
        "norm_epsilon": config.rms_norm_eps,
    }
    _add_decoder_args(megatron_lm_plugin, config, batch_data, "HuggingFaceTokenizer", **more)


@add_model_config_to_megatron_parser("t5")
def parse_t5_config(megatron_lm_plugin: Any, model: Any, batch_data: Any) -> None:
    """Add the arguments of an encoder-decoder; without ``n_positions`` the longest sequence is 1024."""
    plugin, config = megatron_lm_plugin, model.config
    longest = getattr(config, "n_positions", None) or 1024
    if plugin.encoder_seq_length is None:
        plugin.encoder_seq_length = _row_length(batch_data, "input_ids", longest)
    if plugin.decoder_seq_length is None:
        plugin.decoder_seq_length = _row_length(batch_data, "labels", longest)
    plugin.megatron_lm_default_args.update(
        {
            "encoder_seq_length": plugin.encoder_seq_length,
            "decoder_seq_length": plugin.decoder_seq_length,
            "model_type_name": "t5",
            "num_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "num_attention_heads": config.num_attention_heads,
            "max_position_embeddings": longest,
            "pretraining_flag": True,
            "orig_vocab_size": config.vocab_size,
            "model_return_dict": bool(config.return_dict),
        }
    )
