"""The models that Megatron-LM can train, and the exact mapping of their configurations and weights.

A family says what Megatron-LM's configuration is, and which of its tensors is made of which of the user's.
What would map only nearly is refused.

Megatron-LM joins what it computes together (queries, keys and values; the two halves of a gated layer), and
each process of a tensor parallel group has one part. A ``WeightRule`` cuts whole tensors into the parts of
all processes, and joins such parts to whole tensors. Both apply to weights, gradients and optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.core.value_types import frozen_dataclass

Tensors = Sequence[torch.Tensor]


class WeightRule:
    """The rule of a replicated tensor: every process has all of it.

    Args:
        names: of the tensors of the user's model.
        transposed: the user's model keeps the matrix as (input, output), Megatron-LM as (output, input).
        is_copy: Megatron-LM has this tensor twice; states take the other one.

    Attributes:
        dim: along which it is cut; None where it is not.
    """

    dim: int | None = None

    def __init__(self, *names: str, transposed: bool = False, is_copy: bool = False) -> None:
        self.names, self.transposed, self.is_copy = names, transposed, is_copy

    def shard(self, wholes: Tensors, size: int) -> list[torch.Tensor]:
        """Return the shards of ``size`` processes."""
        return self._shard([self._transpose(whole) for whole in wholes], size)

    def join(self, parts: Tensors) -> list[torch.Tensor]:
        """Join shards to the full tensors, in the order of ``names``."""
        return [self._transpose(whole) for whole in self._join(parts)]

    def _transpose(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.t() if self.transposed and whole.dim() == 2 else whole

    def _shard(self, wholes: Tensors, size: int) -> list[torch.Tensor]:
        return [wholes[0]] * size

    def _join(self, parts: Tensors) -> list[torch.Tensor]:
        return [parts[0]]


class DimShard(WeightRule):
    """A tensor sharded along one dimension."""

    def __init__(self, *names: str, dim: int, transposed: bool = False) -> None:
        super().__init__(*names, transposed=transposed)
        self.dim = self._shard_dim = dim

    def _shard(self, wholes: Tensors, size: int) -> list[torch.Tensor]:
        return list(wholes[0].chunk(size, self._shard_dim))

    def _join(self, parts: Tensors) -> list[torch.Tensor]:
        return [torch.cat(list(parts), self._shard_dim)]


class VocabShardRule(WeightRule):
    """A tensor sharded along the vocabulary, which is padded with zeros so that all shards are equal."""

    dim = 0

    def __init__(self, *names: str, vocab_size: int, is_copy: bool = False) -> None:
        super().__init__(*names, is_copy=is_copy)
        self.vocab_size = vocab_size

    def _shard(self, wholes: Tensors, size: int) -> list[torch.Tensor]:
        whole = wholes[0]
        missing = -self.vocab_size % size
        filled = torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])]) if missing else whole
        return list(filled.chunk(size))

    def _join(self, parts: Tensors) -> list[torch.Tensor]:
        return [torch.cat(list(parts))[: self.vocab_size]]


class GatedMLPShardRule(WeightRule):
    """The gate and up projections of a gated MLP: a shard holds its part of the one, then of the other."""

    dim = 0

    def _shard(self, wholes: Tensors, size: int) -> list[torch.Tensor]:
        pairs = zip(*(whole.chunk(size) for whole in wholes), strict=True)
        return [torch.cat(list(pair)) for pair in pairs]

    def _join(self, parts: Tensors) -> list[torch.Tensor]:
        halves = zip(*(part.chunk(2) for part in parts), strict=True)
        return [torch.cat(list(half)) for half in halves]


class FusedQKVShardRule(WeightRule):
    """The joined QKV projection, group by group: the query heads of a group, then its key and its value.

    Args:
        names: of one tensor with all three after one another, or of three.
        groups: how many keys there are.
        heads: how many queries.
        transposed: see ``WeightRule``.
    """

    dim = 0

    def __init__(self, *names: str, groups: int, heads: int, transposed: bool = False) -> None:
        super().__init__(*names, transposed=transposed)
        self.groups, self.row_shares = groups, (heads // groups, 1, 1)

    def _shard(self, wholes: Tensors, size: int) -> list[torch.Tensor]:
        three = wholes if len(wholes) == 3 else wholes[0].chunk(3)
        rest = three[0].shape[1:]
        grouped = torch.cat([t.reshape(self.groups, -1, *rest) for t in three], 1)
        return [part.reshape(-1, *rest) for part in grouped.chunk(size)]

    def _join(self, parts: Tensors) -> list[torch.Tensor]:
        whole = torch.cat(list(parts))
        rest = whole.shape[1:]
        grouped = whole.reshape(self.groups, -1, *rest)
        width = grouped.shape[1] // sum(self.row_shares)
        three = grouped.split([width * share for share in self.row_shares], 1)
        flat = [t.reshape(-1, *rest) for t in three]
        return flat if len(self.names) == 3 else [torch.cat(flat)]


# The name prefix of a layer in Megatron-LM.
LAYER = "decoder.layers.{}."


@frozen_dataclass
class MegatronModelFamily:
    """The mapping of one kind of model to Megatron-LM.

    Attributes:
        transformer: arguments of Megatron-LM's ``TransformerConfig``, of a configuration of transformers.
        model: further arguments of its ``GPTModel``.
        rules: its tensors by their names, with the numbers of layers in the whole model.
    """

    transformer: Callable[[Any], dict[str, Any]]
    model: Callable[[Any], dict[str, Any]]
    rules: Callable[[Any], dict[str, WeightRule]]


def model_family(model: nn.Module) -> MegatronModelFamily:
    """Return the family of a model.

    Raises:
        PrepareError: there is none, or parts of the model have no place in Megatron-LM.
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        raise PrepareError(
            f"Megatron-LM cannot train a {type(model).__name__}",
            why="Megatron-LM builds its own GPT and copies the weights; that is exact for causal language "
            f"models of transformers of the kinds {', '.join(FAMILIES)}",
            fix="give such a model, or train this one with another strategy: ParallelismConfig shares the "
            "layers of any",
        )
    family = FAMILIES[kind]
    rule_names = {name for rule in family.rules(config).values() for name in rule.names}
    param_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if rule_names - param_names or param_names - rule_names - {"lm_head.weight"}:
        odd = sorted((rule_names - param_names) | (param_names - rule_names))[:4]
        raise PrepareError(
            f"this {type(model).__name__} is no plain {kind} language model: {', '.join(odd)}",
            why="every weight must have its place in Megatron-LM's GPT, and the other way round",
            fix="give the model with its language model head, without adapters",
        )
    return family


def _require_values(config: Any, **wanted: Any) -> None:
    """Refuse configuration values that Megatron-LM computes in another way."""
    for name, values in wanted.items():
        allowed = values if isinstance(values, tuple) else (values,)
        if getattr(config, name, allowed[0]) not in allowed:
            raise PrepareError(
                f"Megatron-LM cannot train a {config.model_type} with {name}={getattr(config, name)!r}",
                why=f"Megatron-LM computes the same for {name}={' or '.join(map(repr, allowed))} only",
            )


def _single_dropout(*rates: float) -> float:
    """Return the one dropout rate that Megatron-LM has for everything but attention."""
    if len(set(rates)) > 1:
        raise PrepareError(
            f"the model has dropout rates {sorted(set(rates))}, and Megatron-LM one for all layers",
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
    _require_values(
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
        "hidden_dropout": lambda: _single_dropout(config.resid_pdrop, config.embd_pdrop),
    }


def _gpt2_model(config: Any) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "max_sequence_length": config.n_positions,
        "position_embedding_type": "learned_absolute",
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
    }


def _gpt2_rules(config: Any) -> dict[str, WeightRule]:
    vocab_size = config.vocab_size
    rules: dict[str, WeightRule] = {
        "embedding.word_embeddings.weight": VocabShardRule("transformer.wte.weight", vocab_size=vocab_size),
        "embedding.position_embeddings.weight": WeightRule("transformer.wpe.weight"),
    }
    for number in range(config.n_layer):
        megatron_prefix, user_prefix = LAYER.format(number), f"transformer.h.{number}."
        heads = {"groups": config.n_head, "heads": config.n_head}
        for kind in ("weight", "bias"):
            transposed = kind == "weight"
            rules[f"{megatron_prefix}input_layernorm.{kind}"] = WeightRule(f"{user_prefix}ln_1.{kind}")
            rules[f"{megatron_prefix}self_attention.linear_qkv.{kind}"] = FusedQKVShardRule(
                f"{user_prefix}attn.c_attn.{kind}", **heads, transposed=transposed
            )
            rules[f"{megatron_prefix}pre_mlp_layernorm.{kind}"] = WeightRule(f"{user_prefix}ln_2.{kind}")
            rules[f"{megatron_prefix}mlp.linear_fc1.{kind}"] = DimShard(
                f"{user_prefix}mlp.c_fc.{kind}", dim=0, transposed=transposed
            )
        for place, name in (("self_attention.linear_proj", "attn.c_proj"), ("mlp.linear_fc2", "mlp.c_proj")):
            rules[f"{megatron_prefix}{place}.weight"] = DimShard(
                f"{user_prefix}{name}.weight", dim=1, transposed=True
            )
            rules[f"{megatron_prefix}{place}.bias"] = WeightRule(f"{user_prefix}{name}.bias")
    for kind in ("weight", "bias"):
        rules[f"decoder.final_layernorm.{kind}"] = WeightRule(f"transformer.ln_f.{kind}")
    return rules | _output_layer_rule(config, "transformer.wte.weight")


# --- llama


def _llama_transformer(config: Any) -> dict[str, Any]:
    _require_values(config, attention_bias=False, mlp_bias=False, hidden_act="silu", pretraining_tp=1)
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
    rules = {
        "vocab_size": config.vocab_size,
        "max_sequence_length": config.max_position_embeddings,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
    }
    return rules | _rope_arguments(config)


# The constants that Megatron-LM has for Llama 3.1's RoPE scaling.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _rope_arguments(config: Any) -> dict[str, Any]:
    # Before version 5 of transformers, scaling and base were two fields, and older files say ``type``.
    rope_config = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope_config.get("rope_type", rope_config.get("type", "default"))
    base = rope_config.get("rope_theta") or getattr(config, "rope_theta", 10000)
    rules: dict[str, Any] = {"rotary_base": int(base)}
    if base != int(base):
        kind = f"a base of {base}"
    elif kind == "llama3" and all(rope_config.get(name) == value for name, value in _LLAMA3_ROPE.items()):
        return rules | {"rope_scaling": True, "rope_scaling_factor": rope_config["factor"]}
    if kind != "default":
        raise PrepareError(
            f"Megatron-LM cannot train a {config.model_type} whose rotary positions are {kind}",
            why=f"Megatron-LM has plain ones, and those of Llama 3.1 with {_LLAMA3_ROPE}",
        )
    return rules


def _llama_rules(config: Any) -> dict[str, WeightRule]:
    rules: dict[str, WeightRule] = {
        "embedding.word_embeddings.weight": VocabShardRule(
            "model.embed_tokens.weight", vocab_size=config.vocab_size
        )
    }
    for number in range(config.num_hidden_layers):
        megatron_prefix, user_prefix = LAYER.format(number), f"model.layers.{number}."
        attention = f"{user_prefix}self_attn."
        rules |= {
            f"{megatron_prefix}input_layernorm.weight": WeightRule(f"{user_prefix}input_layernorm.weight"),
            f"{megatron_prefix}self_attention.linear_qkv.weight": FusedQKVShardRule(
                *(f"{attention}{which}_proj.weight" for which in "qkv"),
                groups=config.num_key_value_heads,
                heads=config.num_attention_heads,
            ),
            f"{megatron_prefix}self_attention.linear_proj.weight": DimShard(
                f"{attention}o_proj.weight", dim=1
            ),
            f"{megatron_prefix}pre_mlp_layernorm.weight": WeightRule(
                f"{user_prefix}post_attention_layernorm.weight"
            ),
            f"{megatron_prefix}mlp.linear_fc1.weight": GatedMLPShardRule(
                f"{user_prefix}mlp.gate_proj.weight", f"{user_prefix}mlp.up_proj.weight"
            ),
            f"{megatron_prefix}mlp.linear_fc2.weight": DimShard(f"{user_prefix}mlp.down_proj.weight", dim=1),
        }
    rules["decoder.final_layernorm.weight"] = WeightRule("model.norm.weight")
    return rules | _output_layer_rule(config, "model.embed_tokens.weight")


def _output_layer_rule(config: Any, embedding: str) -> dict[str, WeightRule]:
    """Return the output layer's rule; if tied, only a last stage that is not the first has it, as a copy."""
    tied = config.tie_word_embeddings
    name = embedding if tied else "lm_head.weight"
    return {"output_layer.weight": VocabShardRule(name, vocab_size=config.vocab_size, is_copy=tied)}


FAMILIES: dict[str, MegatronModelFamily] = {
    "gpt2": MegatronModelFamily(_gpt2_transformer, _gpt2_model, _gpt2_rules),
    "llama": MegatronModelFamily(_llama_transformer, _llama_model, _llama_rules),
}
