"""Cutting sequences into one part for each process, and joining them again: functions of plain tensors.

A process has one or two runs of neighbouring tokens. Where a token sees only those before it, late tokens
cost more than early ones; so each process takes a run from the head and its mirror image from the tail, where
the length allows it. Then all have the same work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accelerate.core import tree
from accelerate.core.errors import PrepareError

IGNORED = -100  # a label that no loss counts
Run = tuple[int, int]
# The tokens of a batch, by the first of these keys that it has.
TOKENS = ("input_ids", "inputs_embeds")
LABELS = ("labels", "shift_labels")
MASK = "attention_mask"


def runs(total: int, size: int, place: int, balanced: bool) -> tuple[Run, ...]:
    """The tokens ``[start, stop)`` of one of ``size`` processes, of ``total`` that ``size`` divides."""
    if balanced and total % (2 * size) == 0:
        length = total // (2 * size)
        starts = (place * length, (2 * size - 1 - place) * length)
    else:
        length = total // size
        starts = (place * length,)
    return tuple((start, start + length) for start in starts)


def cut(tensor: torch.Tensor, dim: int, size: int, place: int, balanced: bool) -> torch.Tensor:
    """The part of one process, a new tensor.

    Raises:
        PrepareError: ``size`` does not divide the tokens.
    """
    total = tensor.shape[dim]
    check_length(total, size)
    found = [tensor.narrow(dim, a, b - a) for a, b in runs(total, size, place, balanced)]
    return torch.cat(found, dim) if len(found) > 1 else found[0].clone()


def join(parts: Sequence[torch.Tensor], dim: int, balanced: bool) -> torch.Tensor:
    """The whole of all parts, in the order of the processes."""
    size = len(parts)
    total = size * parts[0].shape[dim]
    pieces: list[tuple[int, torch.Tensor]] = []
    for place, part in enumerate(parts):
        found = runs(total, size, place, balanced)
        lengths = [stop - start for start, stop in found]
        pieces += zip((start for start, _ in found), part.split(lengths, dim), strict=True)
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], dim)


def check_length(total: int, size: int) -> None:
    """Refuses a number of tokens that cannot be shared.

    Raises:
        PrepareError: ``size`` does not divide ``total``.
    """
    if total % size:
        raise PrepareError(
            f"sequences of {total} tokens cannot be shared by {size} processes",
            why=f"{total} is no multiple of {size}, and without an attention mask no token can be padding",
            fix=f"pad_to_multiple_of={2 * size} in the collator, or give the batch an attention_mask",
        )


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """For each token the label of the next one; the last has none."""
    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED)


@dataclass(frozen=True)
class Cutter:
    """Cuts batches.

    Attributes:
        size: processes that share a sequence.
        place: this one among them.
        balanced: whether a process has a run from the head and one from the tail.
        dims: the dimension that counts tokens, by key; None finds the keys.
    """

    size: int
    place: int
    balanced: bool
    dims: Mapping[str, int] | None = None

    def cuts(self, batch: Any) -> bool:
        """Whether ``batch`` has tokens by a known name."""
        return tree.is_mapping(batch) and any(name in batch for name in self.dims or TOKENS)

    def __call__(self, batch: Any) -> Any:
        """This process's part of a dict of whole sequences.

        ``labels`` are shifted before they are cut, as ``shift_labels``, so that the last token of a part
        learns the first one of the next; ``position_ids`` count from the beginning of the sequence. A mask of
        keys stays whole, since attention is over all keys.

        Raises:
            PrepareError: the tokens cannot be shared, or a named key is not there.
        """
        whole = self.completed(batch)
        dims = self._found(whole) if self.dims is None else dict(self.dims)
        dims |= dict.fromkeys(whole.keys() - batch.keys(), 1)
        absent = sorted(dims.keys() - whole.keys())
        if absent:
            raise PrepareError(
                f"the batch has no {', '.join(absent)}",
                why=f"the keys of sequences are named, and it has: {', '.join(map(str, whole))}",
                fix="name the keys that every batch has in cut={...}",
            )
        parts = {
            name: self.part(value, dims[name]) if name in dims else value for name, value in whole.items()
        }
        return tree.like_mapping(batch, parts)

    def part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This process's part of one tensor."""
        return cut(tensor, dim, self.size, self.place, self.balanced)

    def completed(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The whole batch with padding, positions and shifted labels."""
        whole = dict(batch)
        name = next((name for name in (*(self.dims or ()), *TOKENS) if name in whole), "")
        dim = (self.dims or {}).get(name, 1)
        if not isinstance(whole.get(name), torch.Tensor) or whole[name].dim() < 2:
            return whole
        if self.dims is None:
            whole = self._padded(whole, whole[name].shape)
        tokens: torch.Tensor = whole[name]
        labels = whole.get("labels")
        if "shift_labels" not in whole and isinstance(labels, torch.Tensor):
            whole |= {"shift_labels": shifted(labels)} if labels.shape == tokens.shape[:2] else {}
        if whole.get("position_ids") is None:
            positions = torch.arange(tokens.shape[dim], device=tokens.device)
            whole["position_ids"] = positions.expand(tokens.shape[0], -1)
        return whole

    def _padded(self, whole: dict[str, Any], shape: torch.Size) -> dict[str, Any]:
        """Filled to a length that can be shared, where the batch has a mask that says so."""
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

    def _found(self, whole: Mapping[str, Any]) -> dict[str, int]:
        """Everything that has a value for each token; of masks, those with a row for each."""
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
