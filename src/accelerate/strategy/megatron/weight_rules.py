"""Rules that map tensors of the user's model to the tensors of Megatron-LM, and back.

Megatron-LM joins what it computes together (queries, keys and values; the two halves of a gated layer), and
each process of a tensor parallel group has one part. A rule cuts whole tensors into the parts of all
processes, and joins such parts to whole tensors. Both apply to weights, gradients and optimizer state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
        transposed: see ``Rule``.
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
