"""The samples that each rank reads, and the part of them that it computes, under model parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


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
    """A capability: ranks hold parts of one model or of one sequence, and read the same samples.

    ``Strategy.data_shard`` and ``Strategy.model_parallel_size`` say how many read the same; these methods
    say what is done with the samples.
    """

    def data_shard_for(self, loader: Any) -> RankDataShard:
        """Return the ``data_shard`` of one loader, before it is prepared."""
        raise NotImplementedError

    def batch_slicer_for(self, loader: Any) -> Callable[[Any], Any] | None:
        """Return what cuts a batch of ``loader`` to what this rank computes; None where it stays whole."""
        raise NotImplementedError

    def merge_model_parallel(self, values: Any) -> Any:
        """Merge the outputs of ranks with the same samples into what one rank would compute; collective."""
        raise NotImplementedError

    def shard_sequences(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], kept: set[torch.Tensor]
    ) -> AbstractContextManager[Any]:
        """Return a context for forward and backward in which whole sequences are sharded (context parallel).

        Args:
            buffers: tensors with whole sequences, sharded in place.
            dims: the dimension of each that counts tokens.
            kept: those that need not be whole again afterwards.
        """
        raise NotImplementedError

    def adapt_loader(self, loader: Any, model: nn.Module) -> Any:
        """Wrap a loader of whole sequences into a loader of this rank's slices."""
        raise NotImplementedError

    def check_compiler(self) -> None:
        """Refuse models that are to be compiled, where they cannot be.

        Raises:
            SettingError: with the reason.
        """
        raise NotImplementedError

    def partial_state_names(self, model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
        """Return the names that this rank lacks, where ranks hold different layers (pipeline parallel).

        Returns:
            Names of its state that this process has not; and those of buffers that it saves, for the first
            process has them not.
        """
        raise NotImplementedError

    def original_group_names(self, optimizer: torch.optim.Optimizer) -> list[list[str]] | None:
        """Return the names in each group as the user made it, where this rank holds only some; else None."""
        raise NotImplementedError
