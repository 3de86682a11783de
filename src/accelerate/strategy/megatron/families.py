"""The models that the engine can train: how their configurations and their weights map, exactly.

A family says what the engine's configuration is, and which of its tensors is made of which of the user's.
What would map only nearly is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.core.frozen import frozen
from accelerate.strategy.megatron.rules import Attention, Gated, Rule, Split, Words

# How the engine names a layer of a number.
LAYER = "decoder.layers.{}."


@frozen
class Family:
    """How models of one kind map.

    Attributes:
        transformer: arguments of the engine's ``TransformerConfig``, of a configuration of transformers.
        model: further arguments of its ``GPTModel``.
        rules: its tensors by their names, with the numbers of layers in the whole model.
    """

    transformer: Callable[[Any], dict[str, Any]]
    model: Callable[[Any], dict[str, Any]]
    rules: Callable[[Any], dict[str, Rule]]


def family_of(model: nn.Module) -> Family:
    """The family of a model.

    Raises:
        PrepareError: there is none, or parts of the model have no place in the engine.
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        raise PrepareError(
            f"Megatron-LM cannot train a {type(model).__name__}",
            why="the engine builds its own GPT and takes over the weights; that is exact for causal language "
            f"models of transformers of the kinds {', '.join(FAMILIES)}",
            fix="give such a model, or train this one with another strategy: ParallelismConfig shares the "
            "layers of any",
        )
    family = FAMILIES[kind]
    wanted = {name for rule in family.rules(config).values() for name in rule.names}
    have = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if wanted - have or have - wanted - {"lm_head.weight"}:
        odd = sorted((wanted - have) | (have - wanted))[:4]
        raise PrepareError(
            f"this {type(model).__name__} is no plain {kind} language model: {', '.join(odd)}",
            why="every weight must have its place in the engine's GPT, and the other way round",
            fix="give the model with its language model head, without adapters",
        )
    return family


def _only(config: Any, **wanted: Any) -> None:
    """Refuses options of a configuration that the engine computes in another way."""
    for name, values in wanted.items():
        allowed = values if isinstance(values, tuple) else (values,)
        if getattr(config, name, allowed[0]) not in allowed:
            raise PrepareError(
                f"Megatron-LM cannot train a {config.model_type} with {name}={getattr(config, name)!r}",
                why=f"the engine computes the same for {name}={' or '.join(map(repr, allowed))} only",
            )


def _dropout(*rates: float) -> float:
    """The one rate that the engine has for all places but attention."""
    if len(set(rates)) > 1:
        raise PrepareError(
            f"the model has dropout rates {sorted(set(rates))}, and the engine one for all layers",
            fix="give them one value in the model's configuration, or MegatronLMPlugin(hidden_dropout=...)",
        )
    return rates[0]


# --- gpt2

_ACTIVATIONS: Mapping[str, Callable[..., Any]] = {
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}


def _gpt2_transformer(config: Any) -> dict[str, Any]:
    _only(
        config,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
        activation_function=tuple(_ACTIVATIONS),
    )
    return {
        "num_layers": config.n_layer,
        "hidden_size": config.n_embd,
        "num_attention_heads": config.n_head,
        "ffn_hidden_size": config.n_inner or 4 * config.n_embd,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "normalization": "LayerNorm",
        "activation_func": _ACTIVATIONS[config.activation_function],
        "add_bias_linear": True,
        "attention_dropout": config.attn_pdrop,
        "hidden_dropout": lambda: _dropout(config.resid_pdrop, config.embd_pdrop),
    }


def _gpt2_model(config: Any) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "max_sequence_length": config.n_positions,
        "position_embedding_type": "learned_absolute",
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
    }


def _gpt2_rules(config: Any) -> dict[str, Rule]:
    words = config.vocab_size
    found: dict[str, Rule] = {
        "embedding.word_embeddings.weight": Words("transformer.wte.weight", words=words),
        "embedding.position_embeddings.weight": Rule("transformer.wpe.weight"),
    }
    for number in range(config.n_layer):
        ours, theirs = LAYER.format(number), f"transformer.h.{number}."
        heads = {"groups": config.n_head, "heads": config.n_head}
        for kind in ("weight", "bias"):
            turned = kind == "weight"
            found[f"{ours}input_layernorm.{kind}"] = Rule(f"{theirs}ln_1.{kind}")
            found[f"{ours}self_attention.linear_qkv.{kind}"] = Attention(
                f"{theirs}attn.c_attn.{kind}", **heads, turned=turned
            )
            found[f"{ours}pre_mlp_layernorm.{kind}"] = Rule(f"{theirs}ln_2.{kind}")
            found[f"{ours}mlp.linear_fc1.{kind}"] = Split(f"{theirs}mlp.c_fc.{kind}", dim=0, turned=turned)
        for place, name in (("self_attention.linear_proj", "attn.c_proj"), ("mlp.linear_fc2", "mlp.c_proj")):
            found[f"{ours}{place}.weight"] = Split(f"{theirs}{name}.weight", dim=1, turned=True)
            found[f"{ours}{place}.bias"] = Rule(f"{theirs}{name}.bias")
    for kind in ("weight", "bias"):
        found[f"decoder.final_layernorm.{kind}"] = Rule(f"transformer.ln_f.{kind}")
    return found | _head(config, "transformer.wte.weight")


# --- llama


def _llama_transformer(config: Any) -> dict[str, Any]:
    _only(config, attention_bias=False, mlp_bias=False, hidden_act="silu", pretraining_tp=1)
    heads = config.num_attention_heads
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "ffn_hidden_size": config.intermediate_size,
        "layernorm_epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "attention_dropout": config.attention_dropout,
        "hidden_dropout": lambda: 0.0,
    }


def _llama_model(config: Any) -> dict[str, Any]:
    found = {
        "vocab_size": config.vocab_size,
        "max_sequence_length": config.max_position_embeddings,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
    }
    return found | _rotation(config)


# What the engine has for a rotation that was stretched as Llama 3.1 does it.
_STRETCHED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _rotation(config: Any) -> dict[str, Any]:
    asked = dict(getattr(config, "rope_parameters", None) or {})
    kind, base = asked.get("rope_type", "default"), asked.get("rope_theta")
    found: dict[str, Any] = {"rotary_base": int(base or getattr(config, "rope_theta", 10000))}
    if base is not None and base != int(base):
        kind = f"a base of {base}"
    elif kind == "llama3" and all(asked.get(name) == value for name, value in _STRETCHED.items()):
        return found | {"rope_scaling": True, "rope_scaling_factor": asked["factor"]}
    if kind != "default":
        raise PrepareError(
            f"Megatron-LM cannot train a {config.model_type} whose rotary positions are {kind}",
            why=f"the engine has plain ones, and those of Llama 3.1 with {_STRETCHED}",
        )
    return found


def _llama_rules(config: Any) -> dict[str, Rule]:
    found: dict[str, Rule] = {
        "embedding.word_embeddings.weight": Words("model.embed_tokens.weight", words=config.vocab_size)
    }
    for number in range(config.num_hidden_layers):
        ours, theirs = LAYER.format(number), f"model.layers.{number}."
        attention = f"{theirs}self_attn."
        found |= {
            f"{ours}input_layernorm.weight": Rule(f"{theirs}input_layernorm.weight"),
            f"{ours}self_attention.linear_qkv.weight": Attention(
                *(f"{attention}{which}_proj.weight" for which in "qkv"),
                groups=config.num_key_value_heads,
                heads=config.num_attention_heads,
            ),
            f"{ours}self_attention.linear_proj.weight": Split(f"{attention}o_proj.weight", dim=1),
            f"{ours}pre_mlp_layernorm.weight": Rule(f"{theirs}post_attention_layernorm.weight"),
            f"{ours}mlp.linear_fc1.weight": Gated(
                f"{theirs}mlp.gate_proj.weight", f"{theirs}mlp.up_proj.weight"
            ),
            f"{ours}mlp.linear_fc2.weight": Split(f"{theirs}mlp.down_proj.weight", dim=1),
        }
    found["decoder.final_layernorm.weight"] = Rule("model.norm.weight")
    return found | _head(config, "model.embed_tokens.weight")


def _head(config: Any, embedding: str) -> dict[str, Rule]:
    """The output layer. Where it is tied, only a last stage that is not the first has it, as a copy."""
    tied = config.tie_word_embeddings
    name = embedding if tied else "lm_head.weight"
    return {"output_layer.weight": Words(name, words=config.vocab_size, copy=tied)}


FAMILIES: dict[str, Family] = {
    "gpt2": Family(_gpt2_transformer, _gpt2_model, _gpt2_rules),
    "llama": Family(_llama_transformer, _llama_model, _llama_rules),
}
