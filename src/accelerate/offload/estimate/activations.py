"""What a forward of a transformer keeps for its backward: a formula over its configuration.

The formula is that of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models", section 4.1, written in what the paper adds up, so that it holds for gated MLPs, fewer heads of
keys, fused attention, models without dropout and other widths than 16 bits too. For a block of GPT, with 16
bits, it is the paper's ``s b h (34 + 5 a s / h)``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

RECOMPUTE = ("none", "selective", "full")
_GATES = ("gate_proj", "gate_up_proj", "wi_1", "w3", "up_gate_proj")


@dataclass(frozen=True)
class Layers:
    """A stack of equal blocks, as the formula sees it.

    Attributes:
        count: blocks.
        hidden: width of the residual stream.
        heads, kv_heads, head_size: of attention.
        inner: width of an MLP, summed over the experts that see a token.
        gated: the MLP has a gate, a second projection of that width.
        dropout: masks are kept.
        vocabulary: of the output head; 0 without one.
    """

    count: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    gated: bool = False
    dropout: bool = False
    vocabulary: int = 0


def activations(
    layers: Layers,
    batch: int,
    length: int,
    size: int = 2,
    recompute: str = "none",
    attention: str = "fused",
) -> int:
    """Bytes that a forward keeps until its backward.

    Args:
        layers: the model.
        batch: samples.
        length: tokens of each.
        size: bytes of one number in the forward.
        recompute: ``none``; ``selective``: scores are computed again; ``full``: a block keeps its input only,
            and one block at a time has everything.
        attention: ``fused`` never keeps scores (FlashAttention, Dao et al. 2022), ``eager`` does.
    """
    tokens = batch * length
    scores = attention == "eager" and recompute == "none"
    block = tokens * _token(layers, size)
    if scores:
        mask = 1 if layers.dropout else 0
        twice = 2 if layers.dropout else 1  # what softmax gave, and what dropout left of it
        block += layers.heads * batch * length**2 * (twice * size + mask)
    if recompute == "full":
        kept = layers.count * tokens * layers.hidden * size + block
    else:
        kept = layers.count * block
    return kept + tokens * layers.vocabulary * _logit(size)


def recomputed(layers: Layers, batch: int, length: int, size: int, kept: int) -> int:
    """Bytes with full recomputation, from ``kept``, those without: the input of each block, and one block."""
    tokens = batch * length
    head = min(kept, tokens * layers.vocabulary * _logit(size))
    return layers.count * tokens * layers.hidden * size + (kept - head) // layers.count + head


def inside(layers: Layers, size: int) -> float:
    """Which part of what a block keeps of a token lies between the first and the last matrix of its halves.

    Those are the numbers that tensor parallelism divides (section 4.2.1 of the paper).
    """
    return _inside(layers) * size / _token(layers, size)


def _inside(layers: Layers) -> int:
    """Numbers of one token: queries, keys, values, what attention gives; and those within the MLP."""
    query, key = layers.heads * layers.head_size, layers.kv_heads * layers.head_size
    return 2 * query + 2 * key + (4 if layers.gated else 2) * layers.inner


def _token(layers: Layers, size: int) -> int:
    """Bytes that one block keeps of one token, scores left out."""
    # The inputs of two norms, of the projections of attention and of the MLP.
    around = 4 * layers.hidden
    masks = 2 * layers.hidden if layers.dropout else 0  # one byte each
    return (around + _inside(layers)) * size + masks


def _logit(size: int) -> int:
    """Bytes for one number of the output: itself, in float32 for the loss, and what log-softmax gives."""
    return (0 if size == 4 else size) + 4 + 4


def layers_of(model: nn.Module) -> Layers | None:
    """The numbers of a model with a configuration of transformers; None where it lacks one of them."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return None
    text = config.get_text_config()
    count, hidden, heads = (
        _number(text, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    if not (count and hidden and heads):
        return None
    inner = _number(text, "intermediate_size", "n_inner", "ffn_dim", "d_ff") or 4 * hidden
    experts = _number(text, "num_experts_per_tok")
    if experts:
        inner = experts * (_number(text, "moe_intermediate_size") or inner)
    return Layers(
        count,
        hidden,
        heads,
        _number(text, "num_key_value_heads") or heads,
        _number(text, "head_dim") or hidden // heads,
        inner,
        gated=any(name.rpartition(".")[2] in _GATES for name, _ in model.named_modules()),
        dropout=any(_drops(module) for module in model.modules()),
        vocabulary=_outputs(model),
    )


def _number(config: Any, *names: str) -> int:
    """The first of these that the configuration has as a number; else 0."""
    found: Iterable[Any] = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), 0)


def _drops(module: nn.Module) -> bool:
    return type(module).__name__ == "Dropout" and getattr(module, "p", 0) > 0


def _outputs(model: nn.Module) -> int:
    """Numbers that the head gives for a token."""
    find: Any = getattr(model, "get_output_embeddings", None)
    head = find() if find else None
    return int(getattr(head, "out_features", 0) or 0)
