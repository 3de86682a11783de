"""Which process reads which data, and what it computes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.world.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Entered in every step: made once.
NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class Share:
    """Which part of the data this process has.

    Attributes:
        count: into how many parts they are shared out.
        index: this process's part.
        speaks: of the processes that have the same part, this one counts where samples are counted once.
    """

    count: int
    index: int
    speaks: bool = True


class SharesData:
    """By default each process reads a part of its own, and computes all of it."""

    world: World

    @property
    def mesh(self) -> DeviceMesh | None:
        """The processes as a mesh of named dimensions, where there is more than one dimension."""
        return None

    @property
    def share(self) -> Share:
        """Which part of the data this process reads; processes that share a layer read the same."""
        return Share(self.world.size, self.world.rank)

    @property
    def peers(self) -> int:
        """How many processes, this one too, compute the very same loss: of the same tokens."""
        return 1

    @property
    def replicas(self) -> int:
        """Over how many processes reducing a gradient takes the mean."""
        return self.world.size // self.peers

    def share_of(self, loader: Any) -> Share:
        """The same for one loader, before it is prepared."""
        return self.share

    def part_of(self, loader: Any) -> Callable[[Any], Any] | None:
        """``own_part`` for the batches of ``loader``, before it is prepared; None where they stay whole."""
        return self.own_part

    def joined(self, values: Any) -> Any:
        """What processes with the same samples have computed, as one of them would have computed it alone.

        All processes must call it.
        """
        return values

    def own_part(self, batch: Any) -> Any:
        """What this process computes of a batch that is on its device: its part of each sequence, say."""
        return batch

    def sequences(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], kept: set[torch.Tensor]
    ) -> AbstractContextManager[Any]:
        """Around forward and backward of whole sequences, which are cut where processes share them.

        Args:
            buffers: tensors with whole sequences, cut in place.
            dims: the dimension of each that counts tokens.
            kept: those that need not be whole again afterwards.
        """
        return NOTHING

    def adapted(self, loader: Any, model: nn.Module) -> Any:
        """A loader of whole sequences as one of this process's parts."""
        return loader
