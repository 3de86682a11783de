"""Attention masks of transformers' models on sequence shards.

Those models make a mask from the tokens they get, which are a shard here. So they get the padding mask of
the full sequences, and the library's mask function, which is looked up by name, is called for this process's
rows over all keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelerate.strategy.parallelism.context.attention import ACTIVE, SequenceShardedAttention

_registered_ids: set[int] = set()


def uses_library_masks(model: nn.Module) -> bool:
    """Return whether a module of ``model`` gets its masks from transformers."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(hasattr(config, "_attn_implementation") for config in configs)


def register_mask_function() -> None:
    """Wrap the library's mask function; outside of sharded forwards the original is called."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    original = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    if id(original) in _registered_ids:
        return

    def mask(*args: Any, **kwargs: Any) -> Any:
        attention = ACTIVE.attention
        return (
            original(*args, **kwargs) if attention is None else _local_mask_rows(attention, original, kwargs)
        )

    _registered_ids.add(id(mask))
    AttentionMaskInterface.register("sdpa", mask)


def _local_mask_rows(
    attention: SequenceShardedAttention, original: Any, given: dict[str, Any]
) -> torch.Tensor | None:
    """Return this process's mask rows over all keys; None where ``is_causal`` or no mask is equivalent."""
    local_length = given["q_length"]
    total = local_length * attention.size
    options = {**given, "kv_length": total, "kv_offset": 0, "q_offset": 0}
    documents = attention.documents
    if documents is None:
        # One row tells whether the library would leave the mask out.
        if original(**{**options, "q_length": 1}) is None:
            return None
    else:
        options["mask_function"] = _same_document(documents, given["mask_function"])
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    parts = [
        original(**{**options, "q_length": b - a, "q_offset": a})
        for a, b in attention.query_ranges(local_length)
    ]
    return torch.cat(parts, -2) if len(parts) > 1 else parts[0]


def _same_document(documents: torch.Tensor, inner: Any) -> Any:
    def same(row: Any, head: Any, query: Any, key: Any) -> Any:
        return inner(row, head, query, key) & (documents[row, query] == documents[row, key])

    return same


def add_mask_kwargs(
    attention: SequenceShardedAttention, own: int, kwargs: dict[str, Any], cached: bool
) -> dict[str, Any]:
    """Return the arguments of a forward with the full padding mask, and set ``attention.documents``.

    The library takes tokens whose positions do not follow each other for several documents in a row, unless
    there is a mask; a run from the tail looks like one. So there is always a mask.

    Args:
        own: the number of local tokens.
        kwargs: keyword arguments of the model.
        cached: the model uses a KV cache; then the library knows one document only.
    """
    mask, positions, total = kwargs.get("attention_mask"), kwargs.get("position_ids"), own * attention.size
    attention.documents = None
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1] == own:
        mask = attention.gather_sequence(mask, 1)
    if mask is None:
        tokens = kwargs.get("input_ids")
        tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            return kwargs
        if isinstance(positions, torch.Tensor) and positions.dim() == 2 and not cached:
            attention.documents = document_ids(
                attention.gather_sequence(positions.expand(tokens.shape[0], -1), 1)
            )
        mask = torch.ones(tokens.shape[0], total, dtype=torch.bool, device=tokens.device)
    return {**kwargs, "attention_mask": mask}


def document_ids(positions: torch.Tensor) -> torch.Tensor | None:
    """Return the document number of each token from full rows of positions; None where each row is one."""
    begins = positions.diff(dim=1) != 1
    if not bool(begins.any()):
        return None
    return nn.functional.pad(begins.cumsum(1), (1, 0))
