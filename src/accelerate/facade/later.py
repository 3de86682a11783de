"""Methods of the ``Accelerator`` whose room is not built yet. Each says what will come; none does nothing.

Where the answer is known already, because nothing was asked for, it is given.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from accelerate.core.errors import NotBuiltError
from accelerate.facade.processes import Processes

_MESH = "the device mesh with named dimensions will come with the sharded strategies"


def _refuse(name: str, planned: str) -> NoReturn:
    raise NotBuiltError(f"Accelerator.{name} is not built yet", why=planned)


class Later(Processes):
    """What will come."""

    @contextmanager
    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> Generator[None]:
        """Splits sequences under context parallelism; without it, as always today, the block just runs."""
        yield

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Splits sequences under sequence parallelism; without it, as always today, the loader itself."""
        return dl

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether dimensions of parallelism are combined."""
        return False

    @property
    def tensor_parallel_rank(self) -> int:
        """Rank along the tensor parallel dimension."""
        _refuse("tensor_parallel_rank", _MESH)

    @property
    def pipeline_parallel_rank(self) -> int:
        """Rank along the pipeline dimension."""
        _refuse("pipeline_parallel_rank", _MESH)

    @property
    def context_parallel_rank(self) -> int:
        """Rank along the context parallel dimension."""
        _refuse("context_parallel_rank", _MESH)

    @property
    def data_parallel_rank(self) -> int:
        """Rank along the replicated dimension."""
        _refuse("data_parallel_rank", _MESH)

    @property
    def data_parallel_shard_rank(self) -> int:
        """Rank along the sharded dimension."""
        _refuse("data_parallel_shard_rank", _MESH)
