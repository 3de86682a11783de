"""Ulysses sequence parallelism: around attention, processes exchange tokens for heads.

Between attentions each process has a part of the tokens and all heads; for attention, all tokens and a part
of the heads. Any attention that is computed head by head works unchanged.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv:2309.14509).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from accelerate.core import packages, tree
from accelerate.core.errors import PrepareError
from accelerate.strategy.parallelism.attention import Call, Exchange
from accelerate.strategy.parallelism.context_cut import Run
from accelerate.strategy.parallelism.context_sequences import Sequences


def spread(parts: Sequence[torch.Tensor], size: int, group: Any) -> list[torch.Tensor]:
    """From (rows, heads, own tokens, width) to (rows, heads / size, all tokens, width); by one exchange."""
    rows, _, own, width = parts[0].shape
    counts = [part.shape[1] // size for part in parts]
    split = [part.reshape(rows, size, count, own, width) for part, count in zip(parts, counts, strict=True)]
    sent = torch.cat(split, 2).transpose(0, 1)
    # (from whom = which tokens, rows, heads, tokens, width)
    got = _exchange(sent, group).permute(1, 2, 0, 3, 4)
    whole = got.reshape(rows, sum(counts), size * own, width)
    return list(whole.split(counts, 1))


def collect(part: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    """From (rows, heads / size, all tokens, width) to (rows, heads, own tokens, width)."""
    rows, heads, total, width = part.shape
    sent = part.reshape(rows, heads, size, total // size, width).permute(2, 0, 1, 3, 4)
    # (from whom = which heads, rows, heads, tokens, width)
    got = _exchange(sent, group).transpose(0, 1)
    return got.reshape(rows, size * heads, total // size, width)


def _exchange(parts: torch.Tensor, group: Any) -> torch.Tensor:
    """Sends each slice of dimension 0 to its process; with gradients."""
    import torch.distributed._functional_collectives as collectives

    return collectives.all_to_all_single_autograd(parts.contiguous(), None, None, group)


class Heads(Exchange):
    """Exchanges tokens for heads."""

    def exchanged(self, call: Call) -> torch.Tensor:
        """Attention of all tokens, of some heads.

        Raises:
            PrepareError: the processes do not divide the heads.
        """
        query, key, value, mask = call.query, call.key, call.value, call.mask
        if query.dim() != 4 or query.shape[1] % self.size:
            heads = query.shape[1] if query.dim() == 4 else 1
            raise PrepareError(
                f"attention of {heads} heads cannot be shared by sp_size={self.size} processes",
                why=f"each computes some heads of all tokens, and {self.size} does not divide {heads}",
                fix="set sp_size to a divisor of the heads, or take cp_size, which does not share heads",
            )
        if query.shape[1] != key.shape[1] and key.shape[1] % self.size:
            key, value = (self._repeated(part, query.shape[1]) for part in (key, value))
        if query.shape[-1] == value.shape[-1]:
            q, k, v = spread((query, key, value), self.size, self.group)
        else:
            (q, k), (v,) = (spread(p, self.size, self.group) for p in ((query, key), (value,)))
        if mask is not None and mask.dim() > 2 and mask.shape[-3] == query.shape[1] > 1:
            mask = mask.chunk(self.size, -3)[self.place]
        return collect(call.on(q, k, v, mask, call.causal), self.size, self.group)

    def _repeated(self, part: torch.Tensor, heads: int) -> torch.Tensor:
        """Heads of keys that several heads of queries share, as often as processes need them."""
        wanted = self.size if self.size % part.shape[1] == 0 else heads
        return part.repeat_interleave(wanted // part.shape[1], 1)

    def rows(self, mask: torch.Tensor, own: int) -> torch.Tensor:
        """Those of all queries."""
        return self.whole(mask, -2) if mask.shape[-2] == own else mask

    def queries(self, own: int) -> tuple[Run, ...]:
        """All: attention of some heads is over whole sequences."""
        return ((0, own * self.size),)


class Ulysses(Sequences):
    """The dimension ``sp``."""

    name: ClassVar[str] = "sp"
    what: ClassVar[str] = "sequence parallelism"
    balanced: ClassVar[bool] = False

    @property
    def kind(self) -> type[Exchange]:
        """One that gives tokens for heads."""
        return Heads

    def check(self) -> None:
        """Refuses attention by other names than torch's.

        Raises:
            PrepareError: it is asked for.
        """
        super().check()
        asked = self.handler.sp_attn_implementation
        if asked not in (None, "sdpa"):
            raise PrepareError(
                f"sp_attn_implementation={asked!r} does not go with {self.what}",
                why="torch's scaled_dot_product_attention is what processes exchange heads around",
                fix='sp_attn_implementation="sdpa", or leave it out',
            )

    def apart(self, loader: Any) -> bool:
        """Where nothing cuts them, each process computes sequences of its own."""
        return not self.cuts(loader)

    def own_part(self, batch: Any) -> Any:
        """This process's part of whole sequences.

        Raises:
            PrepareError: they are not as long as ``sp_seq_length`` says.
        """
        wanted = None if self.handler.sp_seq_length_is_variable else self.handler.sp_seq_length
        found = batch.get("input_ids") if tree.is_mapping(batch) else None
        if wanted is not None and isinstance(found, torch.Tensor) and found.shape[1] != wanted:
            raise PrepareError(
                f"sequences of {found.shape[1]} tokens, and sp_seq_length={wanted}",
                fix="leave sp_seq_length_is_variable out, if they differ",
            )
        return super().own_part(batch)

    def adapted(self, loader: Any, model: nn.Module) -> Any:
        """A loader whose batches are parts; itself if it gives parts already."""
        share = getattr(loader, "data_share", None)
        if isinstance(loader, Parts) or share is None or share.count == self.config.data_parallel_size:
            return loader
        if packages.installed("deepspeed"):
            groups: Any = import_module("deepspeed.utils.groups")
            groups.mpu = groups.mpu or _Known(self.group)
        return Parts(loader, self)


class _Known:
    """The processes of a sequence, where transformers' Trainer looks for them to average its loss.

    It asks that library, whichever way sequences are shared.
    """

    def __init__(self, group: Any) -> None:
        self.group = group

    def get_sequence_parallel_group(self) -> Any:
        """The group."""
        return self.group


class Parts:
    """Batches of all processes of a sequence, one after another, cut for all of them.

    Each process reads other samples. For every batch that it has read, all of them compute that of the first
    together, then that of the second: there are ``sp_size`` times as many batches. Everything else is the
    loader's.
    """

    def __init__(self, loader: Any, dimension: Ulysses) -> None:
        self.dl, self._dimension = loader, dimension

    def __getattr__(self, name: str) -> Any:
        if name in ("dl", "_dimension"):
            raise AttributeError(name)
        return getattr(self.dl, name)

    def __len__(self) -> int:
        return len(self.dl) * self._dimension.size

    def __iter__(self) -> Iterator[Any]:
        waiting: deque[Any] = deque()
        for batch in self.dl:
            waiting += self._all(batch)
            while waiting:
                yield self._dimension.own_part(waiting.popleft())

    def _all(self, batch: Any) -> list[Any]:
        """The batches of all processes, on this one's device."""
        device = self._dimension.world.device
        there: list[Any] = [None] * self._dimension.size
        dist.all_gather_object(there, tree.map_tree(_host, batch), group=self._dimension.group)
        return [tree.map_tree(lambda leaf: _on(leaf, device), other) for other in there]


def _host(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf


def _on(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf
