"""The device mesh of an ``Accelerator``: its ranks, context parallelism, and the mean loss."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from accelerate.core.errors import PrepareError, WorldError
from accelerate.facade.processes import ProcessMixin
from accelerate.strategy.base import Strategy
from accelerate.world import collective


class DeviceMeshMixin(ProcessMixin):
    """Ranks on the mesh dimensions, and context parallelism."""

    strategy: Strategy

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[Any]:
        """Return a context for forward and backward: ``buffers`` hold this rank's shard of each sequence.

        Without context parallelism the block just runs.

        Args:
            buffers: tensors with full sequences; they are sharded in place.
            buffer_seq_dims: the dimension of each that counts tokens.
            no_restore_buffers: those that need not be restored afterwards.
        """
        return self.strategy.shard_sequences(
            buffers or [], buffer_seq_dims or [], no_restore_buffers or set()
        )

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Return a loader that yields this rank's shard of each sequence; the same without Ulysses."""
        return self.strategy.adapt_loader(dl, model)

    def mean_loss(self, loss: Any, num_items: Any = None) -> torch.Tensor:
        """Return the mean over all items (tokens, samples) of all ranks, to log or to evaluate.

        Processes may have different numbers of items, or none: a mean of nothing, NaN, does not count. The
        same holds for processes with parts of the same sequences. All processes must call it; it costs one
        all-reduce, so evaluate with one call for all batches. ::

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
        losses = _flatten_numbers(loss)
        items = torch.ones_like(losses) if num_items is None else _flatten_numbers(num_items)
        if items.shape != losses.shape:
            raise PrepareError(
                f"mean_loss of {len(losses)} losses with {len(items)} numbers of items",
                fix="give as many: of how many items each loss is the mean",
            )
        # Model-parallel ranks have the same loss: they count alike in both sums.
        total = torch.stack((torch.where(items > 0, losses * items, 0.0).sum(), items.sum()))
        value, count = collective.reduce(total, "sum").tolist()
        return torch.tensor(value / count if count else float("nan"), device=self.device)

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Return whether there is a mesh of named dimensions."""
        return self.strategy.mesh is not None

    def _mesh_rank(self, dimension: str) -> int:
        mesh = self.strategy.mesh
        if mesh is None:
            raise (_MissingDimensionError if dimension in ("pp", "cp") else WorldError)(
                f"there is no mesh dimension {dimension}: there is no device mesh",
                fix="Accelerator(parallelism_config=ParallelismConfig(...)) makes one",
            )
        return mesh.get_local_rank(dimension) if dimension in (mesh.mesh_dim_names or ()) else 0

    @property
    def tensor_parallel_rank(self) -> int:
        """The tensor parallel rank; 0 without tensor parallelism."""
        return self._mesh_rank("tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """The pipeline stage; 0 without pipeline parallelism."""
        return self._mesh_rank("pp")

    @property
    def context_parallel_rank(self) -> int:
        """The context parallel rank; 0 without context parallelism."""
        return self._mesh_rank("cp")

    @property
    def data_parallel_rank(self) -> int:
        """The rank among the replicas of the model; 0 without replicas."""
        return self._mesh_rank("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """The rank among the shards of the parameters; 0 without sharding."""
        return self._mesh_rank("dp_shard")


class _MissingDimensionError(WorldError, NotImplementedError):
    """The error of a mesh dimension that 1.x does not have: programs catch NotImplementedError."""


def _flatten_numbers(values: Any) -> torch.Tensor:
    """Return a number, a tensor, or a list of them as one flat float64 tensor on the host."""
    listed = values if isinstance(values, list | tuple) else [values]
    flat = [torch.as_tensor(value).detach().reshape(-1).cpu().double() for value in listed]
    return torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float64)
