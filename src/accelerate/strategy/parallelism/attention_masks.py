"""Masks of transformers' models on a part of their sequences.

Those models make a mask of the tokens they are given, which are a part here. So they are told of the whole
padding, and their library's function for masks, which is looked up by name, is asked for the rows of this
process over all keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelerate.strategy.parallelism.attention import ACTIVE, Exchange

_ours: set[int] = set()


def applies(model: nn.Module) -> bool:
    """Whether ``model`` has a part that asks its library for masks."""
    found = (getattr(module, "config", None) for module in model.modules())
    return any(hasattr(config, "_attn_implementation") for config in found)


def register() -> None:
    """Puts a function before the library's own, which is asked in all other cases."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    original = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    if id(original) in _ours:
        return

    def mask(*args: Any, **kwargs: Any) -> Any:
        exchange = ACTIVE.exchange
        return original(*args, **kwargs) if exchange is None else _rows(exchange, original, kwargs)

    _ours.add(id(mask))
    AttentionMaskInterface.register("sdpa", mask)


def _rows(exchange: Exchange, original: Any, given: dict[str, Any]) -> torch.Tensor | None:
    """The rows of this process over all keys; None where torch's ``is_causal``, or nothing, says the same."""
    own = given["q_length"]
    total = own * exchange.size
    options = {**given, "kv_length": total, "kv_offset": 0, "q_offset": 0}
    documents = exchange.documents
    if documents is None:
        # One row tells whether the library would leave the mask out.
        if original(**{**options, "q_length": 1}) is None:
            return None
    else:
        options["mask_function"] = _within(documents, given["mask_function"])
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    parts = [original(**{**options, "q_length": b - a, "q_offset": a}) for a, b in exchange.queries(own)]
    return torch.cat(parts, -2) if len(parts) > 1 else parts[0]


def _within(documents: torch.Tensor, inner: Any) -> Any:
    def same(row: Any, head: Any, query: Any, key: Any) -> Any:
        return inner(row, head, query, key) & (documents[row, query] == documents[row, key])

    return same


def told(exchange: Exchange, own: int, kwargs: dict[str, Any], cached: bool) -> dict[str, Any]:
    """The arguments of a forward with the padding of whole sequences, and the exchange with the documents.

    The library takes tokens whose positions do not follow each other for several documents in a row, unless
    there is a mask; a run from the tail looks like one. So there is always a mask.

    Args:
        own: tokens of this process.
        kwargs: keyword arguments of the model.
        cached: it keeps keys for later; then the library knows of one document only.
    """
    mask, positions, total = kwargs.get("attention_mask"), kwargs.get("position_ids"), own * exchange.size
    exchange.documents = None
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1] == own:
        mask = exchange.whole(mask, 1)
    if mask is None:
        tokens = kwargs.get("input_ids")
        tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            return kwargs
        if isinstance(positions, torch.Tensor) and positions.dim() == 2 and not cached:
            exchange.documents = documents(exchange.whole(positions.expand(tokens.shape[0], -1), 1))
        mask = torch.ones(tokens.shape[0], total, dtype=torch.bool, device=tokens.device)
    return {**kwargs, "attention_mask": mask}


def documents(positions: torch.Tensor) -> torch.Tensor | None:
    """The number of each token's document, of whole rows of positions; None where each row is one."""
    begins = positions.diff(dim=1) != 1
    if not bool(begins.any()):
        return None
    return nn.functional.pad(begins.cumsum(1), (1, 0))
