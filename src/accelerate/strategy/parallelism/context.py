"""Context parallelism: each process has the queries of its tokens, and sees the keys of all.

How they meet is asked for by name. Gathered before each attention, which is here: gradients go back to where
they came from. A causal query sees only keys before it, so a process computes attention of each run of its
tokens over the keys up to its end: no mask is made, and all processes have the same work. Or they go around a
ring, which is a file of its own.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn.attention.bias import causal_lower_right

from accelerate.strategy.parallelism import context_ring
from accelerate.strategy.parallelism.attention import Call, Exchange, gather
from accelerate.strategy.parallelism.context_cut import join
from accelerate.strategy.parallelism.context_sequences import Sequences


class Keys(Exchange):
    """Gathers keys and values."""

    def exchanged(self, call: Call) -> torch.Tensor:
        """Attention of own queries over all keys, run by run where it is causal."""
        keys, values = self._all(call.key, call.value)
        if not call.causal:
            return call.on(call.query, keys, values, call.mask)
        done = 0
        results: list[torch.Tensor] = []
        for start, stop in self.queries(call.query.shape[-2]):
            part = call.query.narrow(-2, done, stop - start)
            bias = causal_lower_right(stop - start, stop)
            results.append(call.on(part, keys[..., :stop, :], values[..., :stop, :], bias))
            done += stop - start
        return torch.cat(results, -2) if len(results) > 1 else results[0]

    def rows(self, mask: torch.Tensor, own: int) -> torch.Tensor:
        """Those of own queries."""
        if mask.shape[-2] == own:
            return mask
        return torch.cat([mask[..., start:stop, :] for start, stop in self.queries(own)], -2)

    def _all(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens, in order; by one exchange where they have one shape."""
        if key.shape == value.shape and key.dtype == value.dtype:
            both = join(gather(torch.stack((key, value)), self.size, self.group), -2, self.balanced)
            return both[0], both[1]
        found = (gather(part.contiguous(), self.size, self.group) for part in (key, value))
        keys, values = (join(parts, -2, self.balanced) for parts in found)
        return keys, values


# How keys and values meet, by the name that ``TorchContextParallelConfig`` takes.
EXCHANGES: dict[str, type[Exchange]] = {"allgather": Keys, "alltoall": context_ring.Ring}


class Context(Sequences):
    """The dimension ``cp``."""

    name: ClassVar[str] = "cp"
    what: ClassVar[str] = "context parallelism"
    balanced: ClassVar[bool] = True

    @property
    def kind(self) -> type[Exchange]:
        """The one that is asked for."""
        return EXCHANGES[self.handler.cp_comm_strategy]

    def check(self) -> None:
        """Refuses a ring where there can be none.

        Raises:
            SettingError: it is asked for, and torch or the device has none.
        """
        super().check()
        if self.kind is context_ring.Ring:
            context_ring.check(self.world.device.type)
