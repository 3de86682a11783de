"""Several dimensions at once: processes that see different data, share parameters, layers, sequences, stages.

The processes are one mesh of named dimensions. Each dimension that shares more than parameters is a file of
the folder ``parallel``; it changes the models first. Then parameters are sharded over the processes that are
left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from accelerate.core.effects import Option, given
from accelerate.core.setting import load
from accelerate.strategy.base import Bundle, Request, Share, Step
from accelerate.strategy.settings.parallelism import ParallelismSwitch
from accelerate.strategy.sharding.strategy import Sharding

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from accelerate.strategy.parallel.base import Dimension
    from accelerate.strategy.parallel.config import ParallelismConfig

# Dimension of the mesh -> the file and class that do it, in the order in which models are changed.
_DIMENSIONS = {
    "pp": ("pipeline", "Pipeline"),
    "tp": ("tensor", "Tensor"),
    "cp": ("context", "Context"),
    "sp": ("ulysses", "Ulysses"),
}


class Parallelism(Sharding):
    """A mesh of processes."""

    name: ClassVar[str] = "parallelism"
    priority: ClassVar[int] = 20

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.config: ParallelismConfig = request.parallelism
        self.config.layout().check(self.world.size)

    @classmethod
    def claims(cls, request: Request) -> bool:
        """Several processes and sizes of dimensions."""
        return request.world.size > 1 and request.parallelism is not None

    @classmethod
    def idle(cls, request: Request) -> str:
        """In a world of one."""
        if request.world.size > 1 or request.parallelism is None:
            return ""
        return "one process is no mesh, so it trains as a single process does"

    @classmethod
    def asked(cls, request: Request) -> Iterator[Option]:
        """The switch, and the sizes."""
        yield from given(load(ParallelismSwitch))

    @cached_property
    def mesh(self) -> DeviceMesh | None:  # type: ignore[override]
        """Made once, by all processes."""
        return self.config.get_device_mesh(self.world.device.type)

    @cached_property
    def dimensions(self) -> list[Dimension]:
        """Those that do more than share parameters."""
        found: list[Dimension] = []
        for name, (file, kind) in _DIMENSIONS.items():
            if self.config._sizes[name] > 1:
                made = getattr(import_module(f"accelerate.strategy.parallel.{file}"), kind)
                found.append(made(self.config, self.mesh, self.world))
        return found

    def check(self) -> None:
        """What each dimension refuses."""
        super().check()
        for dimension in self.dimensions:
            dimension.check()

    # --- who has which data

    @cached_property
    def share(self) -> Share:  # type: ignore[override]
        """By the place along the dimensions of the data."""
        places = self.config.layout().coordinates(self.world.rank)
        index = places["dp_replicate"] * self.config._sizes["dp_shard"] + places["dp_shard"]
        others = sum(places[name] for name in _DIMENSIONS)
        return Share(self.config.data_parallel_size, index, others == 0)

    @property
    def peers(self) -> int:
        """Along the dimensions of layers and stages."""
        return self.config._sizes["tp"] * self.config._sizes["pp"]

    def own_part(self, batch: Any) -> Any:
        """Its part of each sequence."""
        for dimension in self.dimensions:
            batch = dimension.own_part(batch)
        return batch

    def sequences(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], kept: set[torch.Tensor]
    ) -> AbstractContextManager[Any]:
        """Around forward and backward of whole sequences."""
        stack = ExitStack()
        for dimension in self.dimensions:
            stack.enter_context(dimension.sequences(buffers, dims, kept))
        return stack

    def adapted(self, loader: Any, model: nn.Module) -> Any:
        """A loader of whole sequences as one of parts."""
        for dimension in self.dimensions:
            loader = dimension.adapted(loader, model)
        return loader

    # --- prepare

    @cached_property
    def _shard_mesh(self) -> DeviceMesh:
        """Copies of shards in two dimensions; processes that share a sequence share parameters too."""
        assert self.mesh is not None
        return self.mesh[tuple(self.config.fsdp_dim_names)]

    def steps(self, bundle: Bundle) -> Iterator[Step]:
        """Each dimension's, then sharding over the rest."""
        for dimension in self.dimensions:
            yield from dimension.steps(bundle)
        yield from super().steps(bundle)


PLUGIN = Parallelism
