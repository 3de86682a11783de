"""How one tensor of the engine is made of tensors of the user's model, and the other way round.

The engine joins what it computes together (queries, keys and values; the two halves of a gated layer), and
each process of a tensor parallel group has one part. A rule cuts whole tensors into the parts of all
processes, and joins such parts to whole tensors. Both go for weights, gradients and what optimizers keep.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensors = Sequence[torch.Tensor]


class Rule:
    """Every process has the whole tensor.

    Args:
        names: of the tensors of the user's model.
        turned: the user's model keeps the matrix as (input, output), the engine as (output, input).
        copy: the engine has this tensor twice; states take the other one.

    Attributes:
        dim: along which it is cut; None where it is not.
    """

    dim: int | None = None

    def __init__(self, *names: str, turned: bool = False, copy: bool = False) -> None:
        self.names, self.turned, self.copy = names, turned, copy

    def cut(self, wholes: Tensors, size: int) -> list[torch.Tensor]:
        """The parts of ``size`` processes."""
        return self._cut([self._turn(whole) for whole in wholes], size)

    def join(self, parts: Tensors) -> list[torch.Tensor]:
        """The whole tensors, in the order of ``names``."""
        return [self._turn(whole) for whole in self._join(parts)]

    def _turn(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.t() if self.turned and whole.dim() == 2 else whole

    def _cut(self, wholes: Tensors, size: int) -> list[torch.Tensor]:
        return [wholes[0]] * size

    def _join(self, parts: Tensors) -> list[torch.Tensor]:
        return [parts[0]]


class Split(Rule):
    """Cut along one dimension."""

    def __init__(self, *names: str, dim: int, turned: bool = False) -> None:
        super().__init__(*names, turned=turned)
        self.dim = self._along = dim

    def _cut(self, wholes: Tensors, size: int) -> list[torch.Tensor]:
        return list(wholes[0].chunk(size, self._along))

    def _join(self, parts: Tensors) -> list[torch.Tensor]:
        return [torch.cat(list(parts), self._along)]


class Words(Rule):
    """Cut along the vocabulary, which is filled up with zeros so that all parts are equal."""

    dim = 0

    def __init__(self, *names: str, words: int, copy: bool = False) -> None:
        super().__init__(*names, copy=copy)
        self.words = words

    def _cut(self, wholes: Tensors, size: int) -> list[torch.Tensor]:
        whole = wholes[0]
        missing = -self.words % size
        filled = torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])]) if missing else whole
        return list(filled.chunk(size))

    def _join(self, parts: Tensors) -> list[torch.Tensor]:
        return [torch.cat(list(parts))[: self.words]]


class Gated(Rule):
    """Two layers of equal size: each process has its part of the one, then its part of the other."""

    dim = 0

    def _cut(self, wholes: Tensors, size: int) -> list[torch.Tensor]:
        pairs = zip(*(whole.chunk(size) for whole in wholes), strict=True)
        return [torch.cat(list(pair)) for pair in pairs]

    def _join(self, parts: Tensors) -> list[torch.Tensor]:
        halves = zip(*(part.chunk(2) for part in parts), strict=True)
        return [torch.cat(list(half)) for half in halves]


class Attention(Rule):
    """Queries, keys and values, group by group: the heads of a group, then its key and its value.

    Args:
        names: of one tensor with all three after one another, or of three.
        groups: how many keys there are.
        heads: how many queries.
        turned: see ``Rule``.
    """

    dim = 0

    def __init__(self, *names: str, groups: int, heads: int, turned: bool = False) -> None:
        super().__init__(*names, turned=turned)
        self.groups, self.shares = groups, (heads // groups, 1, 1)

    def _cut(self, wholes: Tensors, size: int) -> list[torch.Tensor]:
        three = wholes if len(wholes) == 3 else wholes[0].chunk(3)
        rest = three[0].shape[1:]
        grouped = torch.cat([one.reshape(self.groups, -1, *rest) for one in three], 1)
        return [part.reshape(-1, *rest) for part in grouped.chunk(size)]

    def _join(self, parts: Tensors) -> list[torch.Tensor]:
        whole = torch.cat(list(parts))
        rest = whole.shape[1:]
        grouped = whole.reshape(self.groups, -1, *rest)
        width = grouped.shape[1] // sum(self.shares)
        three = grouped.split([width * share for share in self.shares], 1)
        flat = [one.reshape(-1, *rest) for one in three]
        return flat if len(self.names) == 3 else [torch.cat(flat)]
