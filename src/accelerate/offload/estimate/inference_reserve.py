"""The memory of inference beside the weights: the KV cache of all tokens, and activations of one block.

Keys and values, of each block: ``2 x batch x length x kv_heads x head_size x bytes``; a decoder that also
looks at an encoder has them twice.

Activations: what one block makes of its tokens (``activation_trace.py``, scores not kept: fused attention),
all of it at once, which is more than a forward ever has; and the scores of the vocabulary for the last token
of each sample, ``batch x vocabulary x (bytes + 4)``, since they are sampled from in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from accelerate.core.errors import SettingError
from accelerate.core.units import show_count
from accelerate.offload.estimate.activation_formula import (
    TransformerShape,
    activation_bytes,
    transformer_shape,
)


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
    blocks, times = _cached_blocks(model, layers.count) if _generates(model) else ([], 0)
    each = times * 2 * batch * length * layers.kv_heads * layers.head_size * size
    working = activation_bytes(replace(layers, count=1, vocabulary=0), batch, length, size)
    working += batch * layers.vocabulary * (size + 4)
    return InferenceReserve(
        dict.fromkeys(blocks, each), working, _describe(layers, batch, length, size, times if blocks else 0)
    )


def _generates(model: nn.Module) -> bool:
    """Return True when the model generates token by token, for which it keeps a KV cache."""
    ask: Any = getattr(model, "can_generate", None)
    return bool(ask()) if callable(ask) else False


def _cached_blocks(model: nn.Module, count: int) -> tuple[list[str], int]:
    """Return (names of the blocks that keep keys and values, how many pairs each keeps)."""
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
