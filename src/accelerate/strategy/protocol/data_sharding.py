"""The part of the strategy protocol about data: which rank reads which samples, and computes which part."""

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

# Entered in every step, so it is made once.
NO_CONTEXT: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class RankDataShard:
    """The part of the data that this process reads.

    Attributes:
        count: the number of parts.
        index: this process's part.
        counts_samples: of the ranks with the same part (tensor or pipeline parallel), this one counts the
            samples where each is counted once.
    """

    count: int
    index: int
    counts_samples: bool = True


class DataSharding:
    """The data methods of a strategy; by default each rank reads its own part and computes all of it."""

    world: World

    @property
    def mesh(self) -> DeviceMesh | None:
        """The device mesh with named dimensions; None where there is only one dimension."""
        return None

    @property
    def data_shard(self) -> RankDataShard:
        """The part of the data that this rank reads; tensor parallel ranks read the same."""
        return RankDataShard(self.world.size, self.world.rank)

    @property
    def model_parallel_size(self) -> int:
        """The number of ranks, with this one, that compute the same loss from the same tokens."""
        return 1

    @property
    def gradient_average_size(self) -> int:
        """The number of ranks over which the reduction of a gradient takes the mean."""
        return self.world.size // self.model_parallel_size

    def data_shard_for(self, loader: Any) -> RankDataShard:
        """Return the ``data_shard`` of one loader, before it is prepared."""
        return self.data_shard

    def batch_slicer_for(self, loader: Any) -> Callable[[Any], Any] | None:
        """Return ``slice_batch`` for ``loader``, before it is prepared; None where batches stay whole."""
        return self.slice_batch

    def merge_model_parallel(self, values: Any) -> Any:
        """Merge the outputs of ranks with the same samples into what one rank would compute; collective."""
        return values

    def slice_batch(self, batch: Any) -> Any:
        """Return the slice of a batch that this rank computes, such as its part of each sequence."""
        return batch

    def shard_sequences(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], kept: set[torch.Tensor]
    ) -> AbstractContextManager[Any]:
        """Return a context for forward and backward in which whole sequences are sharded (context parallel).

        Args:
            buffers: tensors with whole sequences, sharded in place.
            dims: the dimension of each that counts tokens.
            kept: those that need not be whole again afterwards.
        """
        return NO_CONTEXT

    def adapt_loader(self, loader: Any, model: nn.Module) -> Any:
        """Wrap a loader of whole sequences into a loader of this rank's slices."""
        return loader
