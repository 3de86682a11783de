"""The mesh of an ``Accelerator``: where this process is on each dimension, and sequences that are shared."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from accelerate.core.errors import PrepareError, WorldError
from accelerate.facade.processes import Processes
from accelerate.strategy.base import Strategy
from accelerate.world import collective


class Meshed(Processes):
    """Places on named dimensions."""

    strategy: Strategy

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[Any]:
        """Around forward and backward: ``buffers`` hold this process's part of each sequence inside.

        Where no processes share sequences the block just runs.

        Args:
            buffers: tensors with whole sequences; they are cut in place.
            buffer_seq_dims: the dimension of each that counts tokens.
            no_restore_buffers: those that need not be whole again afterwards.
        """
        return self.strategy.sequences(buffers or [], buffer_seq_dims or [], no_restore_buffers or set())

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """A loader of whole sequences as one of this process's parts; the same where none are shared."""
        return self.strategy.adapted(dl, model)

    def mean_loss(self, loss: Any, num_items: Any = None) -> torch.Tensor:
        """The mean over all items (tokens, samples) of all processes, to log or to evaluate by.

        Processes may have different numbers of items, or none: a mean of nothing, NaN, does not count. The
        same holds for processes with parts of the same sequences. All processes must call it; it costs one
        exchange, so evaluate with one call for all batches. ::

            losses.append(model(**batch).loss), counts.append((batch["shift_labels"] != -100).sum())
            accelerator.mean_loss(losses, counts)

        Args:
            loss: of this process: a mean, or a list or tensor of means.
            num_items: of how many items each is the mean; None counts all alike.

        Returns:
            A scalar in float32 on the device, the same on all processes; NaN where nobody has any item.

        Raises:
            PrepareError: there are more or fewer numbers than losses.
        """
        losses = _numbers(loss)
        items = torch.ones_like(losses) if num_items is None else _numbers(num_items)
        if items.shape != losses.shape:
            raise PrepareError(
                f"mean_loss of {len(losses)} losses with {len(items)} numbers of items",
                fix="give as many: of how many items each loss is the mean",
            )
        # Processes with the very same loss count alike, above and below the line.
        total = torch.stack((torch.where(items > 0, losses * items, 0.0).sum(), items.sum()))
        value, count = collective.reduce(total, "sum").tolist()
        return torch.tensor(value / count if count else float("nan"), device=self.device)

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether there is a mesh of named dimensions."""
        return self.strategy.mesh is not None

    def _place(self, dimension: str) -> int:
        mesh = self.strategy.mesh
        if mesh is None:
            raise (_NotThereError if dimension in ("pp", "cp") else WorldError)(
                f"there is no dimension {dimension}: the processes are no mesh",
                fix="Accelerator(parallelism_config=ParallelismConfig(...)) makes one",
            )
        return mesh.get_local_rank(dimension) if dimension in (mesh.mesh_dim_names or ()) else 0

    @property
    def tensor_parallel_rank(self) -> int:
        """Place among the processes that share each layer; 0 where none do."""
        return self._place("tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """Stage of layers; 0 where there is one."""
        return self._place("pp")

    @property
    def context_parallel_rank(self) -> int:
        """Place among the processes that share each sequence; 0 where none do."""
        return self._place("cp")

    @property
    def data_parallel_rank(self) -> int:
        """Place among the copies of the model; 0 where there is one."""
        return self._place("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Place among the processes that share parameters; 0 where none do."""
        return self._place("dp_shard")


class _NotThereError(WorldError, NotImplementedError):
    """Programs catch a NotImplementedError for these two, which 1.x does not have."""


def _numbers(values: Any) -> torch.Tensor:
    """A number, a tensor, or a list of them as one flat tensor of float64 on the host."""
    listed = values if isinstance(values, list | tuple) else [values]
    flat = [torch.as_tensor(value).detach().reshape(-1).cpu().double() for value in listed]
    return torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float64)
