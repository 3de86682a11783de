"""Numbers that an optimizer reads of sharded parameters, such as ``p.norm().item()``.

A norm or sum over shards is a partial DTensor. torch gives this rank's summand of it as the number, so that
every rank would step with another one. All ranks step alike: the sum can be formed where the number is read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

_READS = frozenset(
    {
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.__float__,
        torch.Tensor.__int__,
        torch.Tensor.__bool__,
    }
)


class PartialReads(TorchFunctionMode):
    """Inside, numbers that are read of partial DTensors are those over all ranks: a collective.

    Attributes:
        has_read: there was such a number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_read = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, on the sum over all ranks if it reads a partial DTensor."""
        if (
            func in _READS
            and isinstance(args[0], DTensor)
            and any(p.is_partial() for p in args[0].placements)
        ):
            self.has_read = True
            args = (args[0].full_tensor(), *args[1:])
        return func(*args, **(kwargs or {}))
