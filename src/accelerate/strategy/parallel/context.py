"""Context parallelism: each process has the queries of its tokens, and sees the keys of all.

Keys and values are gathered before each attention, and their gradients go back to where they came from. A
causal query sees only keys before it, so a process computes attention of each run of its tokens over the keys
up to its end: no mask is made, and all processes have the same work.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from accelerate.core.errors import NotBuiltError
from accelerate.strategy.parallel.attention import Exchange, gather
from accelerate.strategy.parallel.context_cut import join
from accelerate.strategy.parallel.context_sequences import Sequences


class Keys(Exchange):
    """Gathers keys and values."""

    def exchanged(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        causal: bool,
        more: dict[str, Any],
    ) -> torch.Tensor:
        """Attention of own queries over all keys, run by run where it is causal."""
        keys, values = self._all(key, value)
        if not causal:
            return F.scaled_dot_product_attention(query, keys, values, mask, dropout, **more)
        found, done = self.queries(query.shape[-2]), 0
        results: list[torch.Tensor] = []
        for start, stop in found:
            part = query.narrow(-2, done, stop - start)
            bias: Any = causal_lower_right(stop - start, stop)
            results.append(
                F.scaled_dot_product_attention(
                    part, keys[..., :stop, :], values[..., :stop, :], bias, dropout, **more
                )
            )
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


class Context(Sequences):
    """The dimension ``cp``."""

    name: ClassVar[str] = "cp"
    what: ClassVar[str] = "context parallelism"
    balanced: ClassVar[bool] = True

    def made(self) -> Exchange:
        """One that gathers keys."""
        return Keys(self.size, self.place, self.group, self.balanced)

    def check(self) -> None:
        """Refuses keys that go around a ring.

        Raises:
            NotBuiltError: they are asked for.
        """
        if self.handler.cp_comm_strategy == "alltoall":
            raise NotBuiltError(
                "cp_comm_strategy='alltoall' is not built",
                why="keys that go around a ring need torch's own ring attention, which does not run on a CPU "
                "and was never run on several accelerators here",
                fix='cp_comm_strategy="allgather", which gives the same numbers',
            )
