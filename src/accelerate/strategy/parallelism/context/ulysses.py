"""Ulysses sequence parallelism: all-to-all around attention exchanges tokens for heads.

Between attentions each process has a part of the tokens and all heads; for attention, all tokens and a part
of the heads. Any attention that is computed head by head works unchanged.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv:2309.14509).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from accelerate.core import packages, tree
from accelerate.core.errors import PrepareError
from accelerate.strategy.parallelism.context.attention import (
    AttentionCall,
    SequenceShardedAttention,
    is_flash,
)
from accelerate.strategy.parallelism.context.sequence_sharding_base import SequenceParallelMeshDimension
from accelerate.strategy.parallelism.context.sequence_shards import TokenRange


def scatter_heads(parts: Sequence[torch.Tensor], size: int, group: Any) -> list[torch.Tensor]:
    """All-to-all (rows, heads, local tokens, width) to (rows, heads / size, all tokens, width)."""
    rows, _, length, width = parts[0].shape
    counts = [part.shape[1] // size for part in parts]
    split = [
        part.reshape(rows, size, count, length, width) for part, count in zip(parts, counts, strict=True)
    ]
    sent = torch.cat(split, 2).transpose(0, 1)
    # (from whom = which tokens, rows, heads, tokens, width)
    got = _all_to_all(sent, group).permute(1, 2, 0, 3, 4)
    whole = got.reshape(rows, sum(counts), size * length, width)
    return list(whole.split(counts, 1))


def gather_heads(part: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    """All-to-all (rows, heads / size, all tokens, width) to (rows, heads, local tokens, width)."""
    rows, heads, total, width = part.shape
    sent = part.reshape(rows, heads, size, total // size, width).permute(2, 0, 1, 3, 4)
    # (from whom = which heads, rows, heads, tokens, width)
    got = _all_to_all(sent, group).transpose(0, 1)
    return got.reshape(rows, size * heads, total // size, width)


def _all_to_all(parts: torch.Tensor, group: Any) -> torch.Tensor:
    """Send each slice of dimension 0 to its process; with gradients."""
    import torch.distributed._functional_collectives as collectives

    return collectives.all_to_all_single_autograd(parts.contiguous(), None, None, group)


class UlyssesAttention(SequenceShardedAttention):
    """Attention that exchanges tokens for heads."""

    def compute_attention(self, call: AttentionCall) -> torch.Tensor:
        """Compute attention of all tokens for this process's heads.

        Raises:
            PrepareError: the processes do not divide the heads.
        """
        query, key, value, mask = call.query, call.key, call.value, call.mask
        if query.dim() != 4 or query.shape[1] % self.size:
            heads = query.shape[1] if query.dim() == 4 else 1
            raise PrepareError(
                f"attention of {heads} heads cannot be sharded over sp_size={self.size} processes",
                why=f"each computes some heads of all tokens, and {self.size} does not divide {heads}",
                fix="set sp_size to a divisor of the heads, or take cp_size, which does not shard heads",
            )
        if query.shape[1] != key.shape[1] and key.shape[1] % self.size:
            key, value = (self._repeat_heads(part, query.shape[1]) for part in (key, value))
        if query.shape[-1] == value.shape[-1]:
            q, k, v = scatter_heads((query, key, value), self.size, self.group)
        else:
            (q, k), (v,) = (scatter_heads(p, self.size, self.group) for p in ((query, key), (value,)))
        if mask is not None and mask.dim() > 2 and mask.shape[-3] == query.shape[1] > 1:
            mask = mask.chunk(self.size, -3)[self.rank]
        return gather_heads(call.run_kernel(q, k, v, mask, call.causal), self.size, self.group)

    def _repeat_heads(self, part: torch.Tensor, heads: int) -> torch.Tensor:
        """Repeat key heads that several query heads share, as often as the processes need."""
        target_heads = self.size if self.size % part.shape[1] == 0 else heads
        return part.repeat_interleave(target_heads // part.shape[1], 1)

    def select_mask_rows(self, mask: torch.Tensor, own: int) -> torch.Tensor:
        """Return the mask rows of all queries."""
        return self.gather_sequence(mask, -2) if mask.shape[-2] == own else mask

    def query_ranges(self, own: int) -> tuple[TokenRange, ...]:
        """Return the range of all tokens: attention of some heads is over full sequences."""
        return ((0, own * self.size),)


_DIGEST_CHUNK = 1 << 20  # elements that are in float64 at a time


def _digest(buffer: torch.Tensor) -> tuple[Any, ...]:
    """Return the shape, and a sum of each chunk in which each place has another weight."""
    chunks = buffer.reshape(-1).split(_DIGEST_CHUNK)
    weights = torch.linspace(1, 2, len(chunks[0]), dtype=torch.float64, device=buffer.device)
    sums = [weights[: len(chunk)].dot(chunk.double().nan_to_num()) for chunk in chunks]
    return tuple(buffer.shape), torch.stack(sums).tolist()


class UlyssesSequenceParallel(SequenceParallelMeshDimension):
    """The Ulysses sequence parallel dimension, ``sp``."""

    name: ClassVar[str] = "sp"
    title: ClassVar[str] = "sequence parallelism"
    balanced = False
    replaces_flash: ClassVar[bool] = True
    # A loader was prepared that gives each process others, and no block was checked since.
    _has_unchecked_data = False

    @property
    def attention_class(self) -> type[SequenceShardedAttention]:
        """The attention class of Ulysses."""
        return UlyssesAttention

    def check(self) -> None:
        """Refuse attention implementations other than torch's, and flash attention that it replaces.

        Raises:
            PrepareError: it is asked for.
        """
        super().check()
        implementation = self.handler.sp_attn_implementation
        if implementation not in (None, "sdpa") and not is_flash(implementation):
            raise PrepareError(
                f"sp_attn_implementation={implementation!r} does not go with {self.title}",
                why="torch's scaled_dot_product_attention is what processes exchange heads around",
                fix='sp_attn_implementation="sdpa", or leave it out',
            )

    def reads_own_data(self, loader: Any) -> bool:
        """Return whether nothing shards the sequences: each process then reads its own."""
        return not self.shards_loader(loader)

    def batch_slicer_for(self, loader: Any) -> Callable[[Any], Any]:
        """Return the function for batches of ``loader``; note a loader that gives each process others."""
        self._has_unchecked_data |= self.reads_own_data(loader)
        return super().batch_slicer_for(loader)

    @contextmanager
    def shard_sequences(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], kept: set[torch.Tensor]
    ) -> Iterator[None]:
        """Shard full sequences inside the context.

        Raises:
            PrepareError: the processes have different ones, as from a loader whose batches stay whole.
        """
        full = [buffer for buffer in buffers if buffer not in self._shards]
        if self._has_unchecked_data and full and not self.is_left:
            everyone: list[Any] = [None] * self.size
            own = [_digest(buffer.detach()) for buffer in full]
            dist.all_gather_object(everyone, own, group=self.group)
            if any(other != own for other in everyone):
                raise PrepareError(
                    f"the {self.size} processes that share sequences have different ones",
                    why="a loader that is prepared by itself gives each its own: shards of different ones "
                    "would be taken for one",
                    fix="prepare the loader together with the model, or set "
                    "DeepSpeedSequenceParallelConfig(cut=True)",
                )
            # Digests wait for the device: not in every step.
            self._has_unchecked_data = False
        with super().shard_sequences(buffers, dims, kept):
            yield

    def slice_batch(self, batch: Any) -> Any:
        """Return this process's shard of full sequences.

        Raises:
            PrepareError: they are not as long as ``sp_seq_length`` says.
        """
        expected_length = None if self.handler.sp_seq_length_is_variable else self.handler.sp_seq_length
        input_ids = batch.get("input_ids") if tree.is_mapping(batch) else None
        if (
            expected_length is not None
            and isinstance(input_ids, torch.Tensor)
            and input_ids.shape[1] != expected_length
        ):
            raise PrepareError(
                f"sequences of {input_ids.shape[1]} tokens, and sp_seq_length={expected_length}",
                fix="leave sp_seq_length_is_variable out, if they differ",
            )
        return super().slice_batch(batch)

    def adapt_loader(self, loader: Any, model: nn.Module) -> Any:
        """Wrap a loader so that its batches are sequence shards; return it if they are already."""
        share = getattr(loader, "data_shard", None)
        if (
            isinstance(loader, SequenceShardLoader)
            or share is None
            or share.count == self.config.data_parallel_size
        ):
            return loader
        if packages.is_installed("deepspeed"):
            groups: Any = import_module("deepspeed.utils.groups")
            if groups.mpu is None or isinstance(groups.mpu, _TrainerSequenceGroup):
                groups.mpu = _TrainerSequenceGroup(self.group)
        return SequenceShardLoader(loader, self)


class _TrainerSequenceGroup:
    """The sequence parallel group, where transformers' Trainer looks for it to average its loss.

    It asks that library, whichever way sequences are shared. Engines that are made later ask it too: ZeRO is
    over all ranks, as without it.
    """

    def __init__(self, group: Any) -> None:
        self.group = group

    def get_sequence_parallel_group(self) -> Any:
        """Return the group."""
        return self.group

    def get_data_parallel_group(self) -> Any:
        """Return the group of all ranks."""
        return dist.group.WORLD

    def get_data_parallel_group_ranks(self) -> range:
        """Return all ranks."""
        return range(dist.get_world_size())

    def get_data_parallel_world_size(self) -> int:
        """Return the number of all ranks."""
        return dist.get_world_size()

    def get_model_parallel_world_size(self) -> int:
        """Return 1: no model is split."""
        return 1


class SequenceShardLoader:
    """A loader of the batches of all sequence parallel ranks, one after another, sharded for all.

    Each process reads other samples. For every batch that it has read, all of them compute that of the first
    together, then that of the second: there are ``sp_size`` times as many batches. Everything else is the
    loader's.
    """

    def __init__(self, loader: Any, dimension: UlyssesSequenceParallel) -> None:
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
            # Those of all processes, on this one's device.
            batches: list[Any] = [None] * self._dimension.size
            dist.all_gather_object(batches, tree.map_tree(_to_host, batch), group=self._dimension.group)
            waiting += [tree.map_tree(self._to_device, other) for other in batches]
            while waiting:
                yield self._dimension.slice_batch(waiting.popleft())

    def _to_device(self, leaf: Any) -> Any:
        return leaf.to(self._dimension.world.device) if isinstance(leaf, torch.Tensor) else leaf


def _to_host(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf
