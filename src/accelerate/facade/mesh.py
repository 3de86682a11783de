"""The mesh of an ``Accelerator``: where this process is on each dimension, and sequences that are shared."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from accelerate.core.errors import WorldError
from accelerate.facade.processes import Processes
from accelerate.strategy.base import Strategy


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

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether there is a mesh of named dimensions."""
        return self.strategy.mesh is not None

    def _place(self, dimension: str) -> int:
        mesh = self.strategy.mesh
        if mesh is None:
            raise WorldError(
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
