"""Context parallelism: each process has the queries of its tokens, and attends to the keys of all.

``cp_comm_strategy`` selects how. This file all-gathers keys and values before each attention; their
gradients are reduce-scattered. A causal query sees only keys before it, so a process computes attention of
each range of its tokens over the keys up to its end: no mask is made, and all processes have the same work.
The other way is ring attention, in ``ring_attention.py``.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn.attention.bias import causal_lower_right

from accelerate.strategy.parallelism.context import ring_attention
from accelerate.strategy.parallelism.context.attention import (
    AttentionCall,
    SequenceShardedAttention,
    all_gather_with_grad,
)
from accelerate.strategy.parallelism.context.sequence_sharding_base import SequenceParallelMeshDimension
from accelerate.strategy.parallelism.context.sequence_shards import join_shards


class AllGatherAttention(SequenceShardedAttention):
    """Attention that all-gathers keys and values."""

    def compute_attention(self, call: AttentionCall) -> torch.Tensor:
        """Compute attention of local queries over all keys, range by range where it is causal."""
        keys, values = self._gather_keys_values(call.key, call.value)
        if not call.causal:
            return call.run_kernel(call.query, keys, values, call.mask)
        done = 0
        results: list[torch.Tensor] = []
        for start, stop in self.query_ranges(call.query.shape[-2]):
            part = call.query.narrow(-2, done, stop - start)
            bias = causal_lower_right(stop - start, stop)
            results.append(call.run_kernel(part, keys[..., :stop, :], values[..., :stop, :], bias))
            done += stop - start
        return torch.cat(results, -2) if len(results) > 1 else results[0]

    def select_mask_rows(self, mask: torch.Tensor, own: int) -> torch.Tensor:
        """Select the rows of the local queries."""
        if mask.shape[-2] == own:
            return mask
        return torch.cat([mask[..., start:stop, :] for start, stop in self.query_ranges(own)], -2)

    def _gather_keys_values(
        self, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All-gather keys and values, in sequence order; in one collective where they have one shape."""
        if key.shape == value.shape and key.dtype == value.dtype:
            both = join_shards(
                all_gather_with_grad(torch.stack((key, value)), self.size, self.group), -2, self.balanced
            )
            return both[0], both[1]
        gathered = (all_gather_with_grad(part.contiguous(), self.size, self.group) for part in (key, value))
        keys, values = (join_shards(parts, -2, self.balanced) for parts in gathered)
        return keys, values


# The attention classes by ``TorchContextParallelConfig.cp_comm_strategy``.
ATTENTION_CLASSES: dict[str, type[SequenceShardedAttention]] = {
    "allgather": AllGatherAttention,
    "alltoall": ring_attention.RingAttention,
}


class ContextParallel(SequenceParallelMeshDimension):
    """The context parallel dimension, ``cp``."""

    name: ClassVar[str] = "cp"
    title: ClassVar[str] = "context parallelism"
    balanced: ClassVar[bool] = True

    @property
    def attention_class(self) -> type[SequenceShardedAttention]:
        """The attention class that ``cp_comm_strategy`` selects."""
        return ATTENTION_CLASSES[self.handler.cp_comm_strategy]

    def check(self) -> None:
        """Refuse ring attention where it is not available.

        Raises:
            SettingError: it is asked for, and torch or the device has none.
        """
        super().check()
        if self.attention_class is ring_attention.RingAttention:
            ring_attention.check_ring_support(self.world.device.type)
