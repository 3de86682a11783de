"""Build Megatron-LM's GPT from the user's configuration, and load the user's weights into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.core.errors import PrepareError, SettingError
from accelerate.strategy.megatron.layout import MegatronLayout
from accelerate.strategy.megatron.model_families import LAYER, MegatronModelFamily, WeightRule
from accelerate.world import collective

if TYPE_CHECKING:
    from accelerate.strategy.megatron.plugin import MegatronLMPlugin


def transformer_config(
    family: MegatronModelFamily,
    config: Any,
    plugin: MegatronLMPlugin,
    layout: MegatronLayout,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """Return Megatron-LM's ``TransformerConfig`` for the user's model and the plugin.

    Raises:
        PrepareError: the model does not divide among the processes.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    values = family.transformer(config)
    _check_divides(values, layout)
    hidden = plugin.explicit_value("hidden_dropout")
    values["hidden_dropout"] = values["hidden_dropout"]() if hidden is None else hidden
    attention = plugin.explicit_value("attention_dropout")
    if attention is not None:
        values["attention_dropout"] = attention
    values |= _recompute_options(plugin)
    values |= {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "sequence_parallel": bool(plugin.sequence_parallelism),
        "num_layers_in_last_pipeline_stage": plugin.decoder_last_pipeline_num_layers,
        "attention_softmax_in_fp32": bool(plugin.attention_softmax_in_fp32),
        "calculate_per_token_loss": plugin.weighs_tokens,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "perform_initialization": False,
        "use_cpu_initialization": device.type == "cpu",
    }
    # Fused kernels want packages of the vendor's, or a device; none changes a result.
    fusions = ("gradient_accumulation_fusion", "bias_dropout_fusion", "masked_softmax_fusion")
    fusions += ("persist_layer_norm", "bias_activation_fusion", "apply_rope_fusion")
    others: dict[str, Any] = {**dict.fromkeys(fusions, False), **_other_arguments(plugin, values)}
    return TransformerConfig(**values, **others)


def _check_divides(values: Mapping[str, Any], layout: MegatronLayout) -> None:
    heads = values["num_attention_heads"]
    counts = {
        "attention heads": (heads, layout.tp),
        "key and value heads": (values.get("num_query_groups", heads), layout.tp),
        "width of the feed-forward layer": (values["ffn_hidden_size"], layout.tp),
    }
    for label, (count, parts) in counts.items():
        if count % parts:
            raise PrepareError(
                f"{parts} processes cannot share the model's {count} {label}",
                why=f"tp_degree is {parts}, and each process has an equal part",
                fix=f"use a tp_degree that divides {count}",
            )


def _recompute_options(plugin: MegatronLMPlugin) -> dict[str, Any]:
    """Return the activation recomputation options; nothing is recomputed unless the user asks."""
    granularity = plugin.explicit_value("recompute_granularity") or (
        "selective" if plugin.recompute_activations else None
    )
    if granularity != "full":
        return {"recompute_granularity": granularity}
    return {
        "recompute_granularity": granularity,
        "recompute_method": plugin.recompute_method,
        "recompute_num_layers": plugin.recompute_num_layers,
    }


def _other_arguments(plugin: MegatronLMPlugin, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``other_megatron_args``, checked against the fields of ``TransformerConfig``.

    Raises:
        SettingError: it has no such field, or ``values`` has it already.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    arguments = dict(plugin.other_megatron_args or {})
    fields = TransformerConfig.__dataclass_fields__
    unknown = sorted(set(arguments) - set(fields))
    if unknown:
        raise SettingError(
            f"Megatron-LM's TransformerConfig does not know {', '.join(unknown)} of other_megatron_args",
            why="the arguments of Megatron-LM's own training script are not those of its library",
        )
    if given := sorted(values.keys() & arguments):
        raise SettingError(
            f"other_megatron_args gives {', '.join(given)} once more",
            why="the user's model, mixed_precision, or a field of MegatronLMPlugin says it already",
            fix="change it there",
        )
    return arguments


def build_gpt(family: MegatronModelFamily, config: Any, settings: Any, layout: MegatronLayout) -> nn.Module:
    """Build this process's shard of Megatron-LM's GPT, uninitialized; keep the program's RNG state."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    arguments = family.model(config)
    # The vocabulary is filled up so that all processes have equal parts.
    vocab_size = arguments.pop("vocab_size")
    with torch.random.fork_rng(devices=[]):
        return GPTModel(
            config=settings,
            transformer_layer_spec=get_gpt_layer_local_spec(normalization=settings.normalization),
            vocab_size=vocab_size + -vocab_size % layout.tp,
            pre_process=layout.pp_rank == 0,
            post_process=layout.pp_rank == layout.pp - 1,
            parallel_output=True,
            **arguments,
        )


def params_with_rules(
    gpt: nn.Module, rules: Mapping[str, WeightRule]
) -> Iterator[tuple[WeightRule, nn.Parameter]]:
    """Yield the parameters of this process's shard, each with its rule."""
    first = next((layer.layer_number - 1 for layer in gpt.decoder.layers), 0)  # type: ignore[union-attr]
    start = LAYER.partition("{")[0]
    for name, parameter in gpt.named_parameters():
        if name.startswith(start):
            number, _, rest = name.removeprefix(start).partition(".")
            name = f"{LAYER.format(int(number) + first)}{rest}"
        yield rules[name], parameter


@torch.no_grad()
def load_weights(
    gpt: nn.Module,
    rules: Mapping[str, WeightRule],
    full_weights: Callable[[str], torch.Tensor],
    layout: MegatronLayout,
) -> None:
    """Load the shard of each process from full weights, one rule after another.

    Args:
        gpt: this process's shard of the model.
        rules: of the whole model, in the same order everywhere.
        full_weights: a whole tensor of the user's model by its name; every process calls it for every name.
        layout: of this process.
    """
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

    params_by_rule = {id(rule): parameter for rule, parameter in params_with_rules(gpt, rules)}
    for rule in rules.values():
        full_tensors = [full_weights(name) for name in rule.names]
        parameter = params_by_rule.get(id(rule))
        if parameter is not None:
            # Megatron-LM marks parts when it draws their values; norms go by the marks.
            if not hasattr(parameter, "tensor_model_parallel") and rule.dim is not None:
                set_tensor_model_parallel_attributes(parameter, True, rule.dim, 1)
            parameter.copy_(rule.shard(full_tensors, layout.tp)[layout.tp_rank])


def rank_zero_weights(model: nn.Module, device: torch.device) -> Callable[[str], torch.Tensor]:
    """Return a collective function that broadcasts a weight of ``model`` by name from rank 0.

    Raises:
        PrepareError: process 0 has them on the meta device.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    is_rank_zero = collective.rank() == 0
    empty = [name for name, value in named.items() if is_rank_zero and value.is_meta]
    if any(collective.compare_objects(bool(empty), "the weights of process 0")):
        raise PrepareError(
            f"process 0 has a {type(model).__name__} without values, on the meta device",
            why="training begins with the weights that process 0 has",
            fix="load the weights on process 0 before prepare",
        )

    def whole(name: str) -> torch.Tensor:
        value = named[name].detach()
        weight = (
            value.to(device, copy=True)
            if is_rank_zero
            else torch.empty(value.shape, dtype=value.dtype, device=device)
        )
        return collective.broadcast(weight)

    return whole


def is_trainable(rule: WeightRule, wanted: Mapping[str, bool]) -> bool:
    """Return whether a Megatron-LM tensor is trained: whether its source parameters are.

    Raises:
        PrepareError: some are, and some are not.
    """
    kinds = {wanted[name] for name in rule.names}
    if len(kinds) > 1:
        raise PrepareError(
            f"some of {', '.join(rule.names)} are frozen, and some are trained",
            why="Megatron-LM has one tensor for all of them",
            fix="freeze all of them, or none",
        )
    return kinds.pop()


def drop_values(model: nn.Module) -> None:
    """Move the user's module to the meta device: Megatron-LM has its values; names and shapes stay."""
    model.to("meta")
    tie: Any = getattr(model, "tie_weights", None)
    if callable(tie):
        tie()


def trainable_names(model: nn.Module) -> dict[str, bool]:
    """Return ``requires_grad`` of the user's parameters, by all their names."""
    return {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}
