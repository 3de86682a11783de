"""The memory of a transformer beside its weights, by formulas over its configuration.

Activations that a forward saves for its backward: the formula is that of Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models", section 4.1, written in what the paper adds up, so that
it holds for gated MLPs, fewer heads of keys, fused attention, models without dropout and other widths than 16
bits too. For a block of GPT, with 16 bits, it is the paper's ``s b h (34 + 5 a s / h)``.

Inference, keys and values of each block: ``2 x batch x length x kv_heads x head_size x bytes``; a decoder
that also looks at an encoder has them twice. Activations: what one block makes of its tokens (scores not
kept: fused attention), all of it at once, which is more than a forward ever has; and the scores of the
vocabulary for the last token of each sample, ``batch x vocabulary x (bytes + 4)``, since they are sampled
from in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from accelerate.core.errors import SettingError
from accelerate.core.units import show_count

if TYPE_CHECKING:
    from torch import nn

RECOMPUTE = ("none", "selective", "full")
_GATES = ("gate_proj", "gate_up_proj", "wi_1", "w3", "up_gate_proj")


@dataclass(frozen=True)
class BlockStack:
    """The sizes of a stack of equal blocks, of attention or not, as in Mamba.

    Attributes:
        count: blocks.
        hidden: width of the residual stream.
        vocabulary: of the output head; 0 without one.
    """

    count: int
    hidden: int
    vocabulary: int


@dataclass(frozen=True)
class TransformerShape:
    """The sizes of a stack of equal transformer blocks that the formula needs.

    Attributes:
        count: blocks.
        hidden: width of the residual stream.
        heads, kv_heads, head_size: of attention.
        mlp_width: width of an MLP, summed over the experts that see a token.
        gated: the MLP has a gate, a second projection of that width.
        dropout: masks are kept.
        vocabulary: of the output head; 0 without one.
    """

    count: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_width: int
    gated: bool = False
    dropout: bool = False
    vocabulary: int = 0


def activation_bytes(
    layers: TransformerShape,
    batch: int,
    length: int,
    size: int = 2,
    recompute: str = "none",
    attention: str = "fused",
) -> int:
    """Return the bytes of activations that a forward saves for its backward.

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
    block = tokens * _bytes_per_token(layers, size)
    if scores:
        mask = 1 if layers.dropout else 0
        twice = 2 if layers.dropout else 1  # the outputs of softmax and of dropout
        block += layers.heads * batch * length**2 * (twice * size + mask)
    if recompute == "full":
        saved_bytes = layers.count * tokens * layers.hidden * size + block
    else:
        saved_bytes = layers.count * block
    return saved_bytes + tokens * layers.vocabulary * _bytes_per_logit(size)


def full_recompute_bytes(layers: BlockStack, batch: int, length: int, size: int, kept: int) -> int:
    """Return the bytes with full recomputation (each block's input, and one block), from those without."""
    tokens = batch * length
    head = min(kept, tokens * layers.vocabulary * _bytes_per_logit(size))
    return layers.count * tokens * layers.hidden * size + (kept - head) // layers.count + head


def tensor_parallel_share(layers: TransformerShape, size: int) -> float:
    """Return the fraction of a block's activations that lies inside of attention and MLP.

    Tensor parallelism divides these activations (section 4.2.1 of the paper).
    """
    return _inner_numbers(layers) * size / _bytes_per_token(layers, size)


def _inner_numbers(layers: TransformerShape) -> int:
    """Return the numbers of one token: queries, keys, values, attention output; and those within the MLP."""
    query, key = layers.heads * layers.head_size, layers.kv_heads * layers.head_size
    return 2 * query + 2 * key + (4 if layers.gated else 2) * layers.mlp_width


def _bytes_per_token(layers: TransformerShape, size: int) -> int:
    """Return the bytes that one block saves of one token, scores left out."""
    # The inputs of two norms, of the projections of attention and of the MLP.
    around = 4 * layers.hidden
    masks = 2 * layers.hidden if layers.dropout else 0  # one byte each
    return (around + _inner_numbers(layers)) * size + masks


def _bytes_per_logit(size: int) -> int:
    """Return the bytes for one logit: itself, in float32 for the loss, and the log-softmax output."""
    return (0 if size == 4 else size) + 4 + 4


def block_stack(model: nn.Module) -> BlockStack | None:
    """Read the sizes from a transformers configuration; None where it lacks one of them."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return None
    text = config.get_text_config()
    count, hidden = _config_number(text, "num_hidden_layers"), _config_number(text, "hidden_size")
    head: Any = getattr(model, "get_output_embeddings", None)
    vocabulary = int(getattr(head() if head else None, "out_features", 0) or 0)
    return BlockStack(count, hidden, vocabulary) if count and hidden else None


def transformer_shape(model: nn.Module) -> TransformerShape | None:
    """Read the sizes from a transformers configuration; None where it lacks one of them."""
    stack = block_stack(model)
    config: Any = getattr(model, "config", None)
    text: Any = None if stack is None else config.get_text_config()
    heads = _config_number(text, "num_attention_heads")
    if stack is None or not heads:
        return None
    inner = _config_number(text, "intermediate_size", "n_inner", "ffn_dim", "d_ff") or 4 * stack.hidden
    experts = _config_number(text, "num_experts_per_tok")
    if experts:
        inner = experts * (_config_number(text, "moe_intermediate_size") or inner)
    return TransformerShape(
        stack.count,
        stack.hidden,
        heads,
        _config_number(text, "num_key_value_heads") or heads,
        _config_number(text, "head_dim") or stack.hidden // heads,
        inner,
        gated=any(name.rpartition(".")[2] in _GATES for name, _ in model.named_modules()),
        dropout=any(type(m).__name__ == "Dropout" and getattr(m, "p", 0) > 0 for m in model.modules()),
        vocabulary=stack.vocabulary,
    )


def _config_number(config: Any, *names: str) -> int:
    """Return the first of these that the configuration has as a number; else 0."""
    values: Iterable[Any] = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


# ------------------------------------------------------------------------------------------------ inference


@dataclass(frozen=True)
class InferenceReserve:
    """The bytes of inference beside the weights.

    Attributes:
        cache: name of a block -> keys and values that lie where it is computed.
        working: activations, on every device that computes.
        note: how they were counted, a sentence.
    """

    cache: dict[str, int]
    working: int
    note: str


def reserve_for_inference(model: nn.Module, batch: int, length: int, size: int) -> InferenceReserve:
    """Estimate the memory that a transformers model takes to read or write ``length`` tokens.

    Args:
        model: on any device.
        batch: samples at once.
        length: tokens of each, the prompt and what is generated.
        size: bytes of one number in the forward.

    Raises:
        SettingError: a number is below 1, or the configuration does not tell what is needed.
    """
    if min(batch, length) < 1:
        raise SettingError(f"a batch of {batch} with {length} tokens cannot be planned for")
    layers = transformer_shape(model)
    if layers is None:
        raise SettingError(
            f"the activations of {type(model).__name__} cannot be counted",
            why="it has no configuration that tells its layers, width and heads",
            fix="leave the length out, and give a budget that leaves room for them",
        )
    generates: Any = getattr(model, "can_generate", None)  # token by token: it keeps keys and values
    blocks, times = _cached_blocks(model, layers.count) if callable(generates) and generates() else ([], 0)
    each = times * 2 * batch * length * layers.kv_heads * layers.head_size * size
    working = activation_bytes(replace(layers, count=1, vocabulary=0), batch, length, size)
    working += batch * layers.vocabulary * (size + 4)
    return InferenceReserve(
        dict.fromkeys(blocks, each), working, _describe(layers, batch, length, size, times if blocks else 0)
    )


def _cached_blocks(model: nn.Module, count: int) -> tuple[list[str], int]:
    """Return (names of the blocks that keep keys and values, how many pairs each keeps)."""
    from torch import nn

    lists = [
        name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == count
    ]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    config: Any = getattr(model, "config", None)
    decoders = [name for name in outer if "decoder" in name.split(".")]
    both = bool(getattr(config, "is_encoder_decoder", False)) and bool(decoders)
    names = [f"{name}.{index}" for name in (decoders if both else outer) for index in range(count)]
    if not names:
        raise SettingError(
            f"no list of {count} blocks is found in {type(model).__name__}",
            why="keys and values lie where their block is computed",
            fix="leave the length out, and give a budget that leaves room for them",
        )
    return names, 2 if both else 1


def _describe(layers: TransformerShape, batch: int, length: int, size: int, times: int) -> str:
    tokens = f"{batch} x {length} tokens"
    if not times:
        return f"activations of {tokens} in {size} bytes a number; no keys and values are kept"
    pairs = (
        f"{layers.count} blocks x {times * 2} x {layers.kv_heads} heads x {layers.head_size} x {size} bytes"
    )
    vocabulary = show_count(layers.vocabulary)
    return f"{tokens}: keys and values of {pairs}, activations of one block, and {vocabulary} words"
