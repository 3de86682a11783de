"""Shard sequences over processes, and join the shards again: functions of plain tensors.

A process has one or two ranges of neighbouring tokens. With causal attention, late tokens cost more than
early ones; so each process takes a range from the head and its mirror image from the tail, where the length
allows it. Then all have the same work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accelerate.core import tree
from accelerate.core.errors import PrepareError

IGNORED = -100  # a label that no loss counts
TokenRange = tuple[int, int]
# The tokens of a batch, by the first of these keys that it has.
TOKENS = ("input_ids", "inputs_embeds")
LABELS = ("labels", "shift_labels")
MASK = "attention_mask"
# What a model computes its loss from.
_TARGETS = ("labels", "start_positions", "end_positions")


def token_ranges(total: int, size: int, rank: int, balanced: bool) -> tuple[TokenRange, ...]:
    """Return the token ranges ``[start, stop)`` of one rank of ``size``, which divides ``total``."""
    if balanced and total % (2 * size) == 0:
        length = total // (2 * size)
        starts = (rank * length, (2 * size - 1 - rank) * length)
    else:
        length = total // size
        starts = (rank * length,)
    return tuple((start, start + length) for start in starts)


def shard_tokens(tensor: torch.Tensor, dim: int, size: int, rank: int, balanced: bool) -> torch.Tensor:
    """Return the shard of one process, a new tensor.

    Raises:
        PrepareError: ``size`` does not divide the tokens.
    """
    total = tensor.shape[dim]
    check_length(total, size)
    pieces = [tensor.narrow(dim, a, b - a) for a, b in token_ranges(total, size, rank, balanced)]
    return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].clone()


def join_shards(parts: Sequence[torch.Tensor], dim: int, balanced: bool) -> torch.Tensor:
    """Join the shards of all processes, given in rank order, to the full tensor."""
    size = len(parts)
    total = size * parts[0].shape[dim]
    pieces: list[tuple[int, torch.Tensor]] = []
    for rank, part in enumerate(parts):
        ranges = token_ranges(total, size, rank, balanced)
        lengths = [stop - start for start, stop in ranges]
        pieces += zip((start for start, _ in ranges), part.split(lengths, dim), strict=True)
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], dim)


def check_length(total: int, size: int) -> None:
    """Refuse a number of tokens that cannot be sharded.

    Raises:
        PrepareError: ``size`` does not divide ``total``.
    """
    if total % size:
        raise PrepareError(
            f"sequences of {total} tokens cannot be sharded over {size} processes",
            why=f"{total} is no multiple of {size}, and without an attention mask no token can be padding",
            fix=f"pad_to_multiple_of={2 * size} in the collator, or give the batch an attention_mask",
        )


def _check_targets(batch: Mapping[str, Any], dims: Mapping[str, int]) -> None:
    """Refuse targets that are not per token, where nobody has named the keys to shard.

    Raises:
        PrepareError: there are some: models pool a token for them, and every shard would give another one.
    """
    pooled = [name for name in _TARGETS if name not in dims and isinstance(batch.get(name), torch.Tensor)]
    if pooled:
        shapes = ", ".join(f"{name} {tuple(batch[name].shape)}" for name in pooled)
        raise PrepareError(
            f"a batch of sequences to shard has {shapes}, no value for each token",
            why="a model that takes one token of a sequence for all would take another one of every part",
            fix="train it without cp_size and sp_size; if its loss is right on parts, name the keys that are "
            'sharded: cut={"input_ids": 1}',
        )


def shift_labels(labels: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Shift labels along ``dim``: each token gets the label of the next one; the last has none."""
    tokens_last = labels.transpose(dim, -1)
    return torch.nn.functional.pad(tokens_last[..., 1:], (0, 1), value=IGNORED).transpose(dim, -1)


def expand_positions(positions: torch.Tensor, rows: int, dim: int) -> torch.Tensor:
    """Expand positions to (rows, tokens), or to (tokens, rows) where ``dim`` is 0."""
    return positions.expand(rows, -1) if dim else positions[:, None].expand(-1, rows)


@dataclass(frozen=True)
class SequenceSharder:
    """Shards the sequences of batches.

    Attributes:
        size: processes that shard a sequence.
        rank: the rank of this one.
        balanced: whether a process has a range from the head and one from the tail.
        dims: the sequence dimension by key; None detects the keys.
    """

    size: int
    rank: int
    balanced: bool
    dims: Mapping[str, int] | None = None

    @property
    def token_dim(self) -> int:
        """The token dimension of added keys and outputs: 0 where all named keys have their tokens there."""
        return 0 if self.dims and not any(self.dims.values()) else 1

    def has_tokens(self, batch: Any) -> bool:
        """Return whether ``batch`` has tokens by a known name."""
        return tree.is_mapping(batch) and any(name in batch for name in self.dims or TOKENS)

    def __call__(self, batch: Any) -> Any:
        """Return this process's shard of a dict of full sequences.

        ``labels`` are shifted before they are cut, as ``shift_labels``, so that the last token of a part
        learns the first one of the next; ``position_ids`` count from the beginning of the sequence. A mask of
        keys stays whole, since attention is over all keys.

        Raises:
            PrepareError: the tokens cannot be shared, a named key is not there, or a loss is not per token.
        """
        whole = self.add_derived_inputs(batch)
        dims = self._token_dims(whole) if self.dims is None else dict(self.dims)
        if self.dims is None:
            _check_targets(whole, dims)
        dims |= dict.fromkeys(whole.keys() - batch.keys(), self.token_dim)
        absent = sorted(dims.keys() - whole.keys())
        if absent:
            raise PrepareError(
                f"the batch has no {', '.join(absent)}",
                why=f"the keys of sequences are named, and it has: {', '.join(map(str, whole))}",
                fix="name the keys that every batch has in cut={...}",
            )
        parts = {
            name: self.local_shard(value, dims[name]) if name in dims else value
            for name, value in whole.items()
        }
        return tree.make_mapping_like(batch, parts)

    def local_shard(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this process's shard of one tensor."""
        return shard_tokens(tensor, dim, self.size, self.rank, self.balanced)

    def add_derived_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the full batch with padding, positions and shifted labels."""
        whole = dict(batch)
        dims = self.dims or {}
        names = (*(name for name, dim in dims.items() if dim), *dims, *TOKENS)
        name = next((name for name in names if name in whole), "")
        dim = dims.get(name, 1)
        if not isinstance(whole.get(name), torch.Tensor) or whole[name].dim() < 2:
            return whole
        if self.dims is None:
            whole = self._pad_batch(whole, whole[name].shape)
        tokens: torch.Tensor = whole[name]
        labels = whole.get("labels")
        if "shift_labels" not in whole and isinstance(labels, torch.Tensor):
            shifts = labels.shape == tokens.shape[:2]
            whole |= {"shift_labels": shift_labels(labels, self.token_dim)} if shifts else {}
        if whole.get("position_ids") is None:
            positions = torch.arange(tokens.shape[dim], device=tokens.device)
            rows = tokens.shape[1 - self.token_dim]
            whole["position_ids"] = expand_positions(positions, rows, self.token_dim)
        return whole

    def _pad_batch(self, whole: dict[str, Any], shape: torch.Size) -> dict[str, Any]:
        """Pad to a length that can be sharded, where the batch has an attention mask."""
        mask = whole.get(MASK)
        missing = -shape[1] % (self.size * (1 + self.balanced)) if shape[1] % self.size else 0
        if not missing or not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return whole
        for name, value in whole.items():
            if isinstance(value, torch.Tensor) and value.shape[:2] == shape[:2]:
                filler = IGNORED if name in LABELS else 0
                after = (0, 0) * (value.dim() - 2) + (0, missing)
                whole[name] = torch.nn.functional.pad(value, after, value=filler)
        return whole

    def _token_dims(self, whole: Mapping[str, Any]) -> dict[str, int]:
        """Return the sequence dimensions of all tensors with a value for each token."""
        shape = whole[next(name for name in TOKENS if name in whole)].shape
        dims: dict[str, int] = {}
        for name, value in whole.items():
            if not isinstance(value, torch.Tensor):
                continue
            if name == MASK:
                dims |= {name: 2} if value.dim() == 4 and value.shape[2] == shape[1] else {}
            elif value.shape[:2] == shape[:2]:
                dims[name] = 1
            elif name == "position_ids" and value.shape[-1] == shape[1]:
                dims[name] = value.dim() - 1
        return dims
