"""What one dimension of a mesh does to models and batches: a file of this folder holds one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from accelerate.core.effects import Effect
from accelerate.strategy.base import Bundle, Step
from accelerate.world.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accelerate.strategy.parallelism.config import ParallelismConfig

Nothing = Generator[None]


class Dimension:
    """One dimension of a mesh, with more than one process.

    Attributes:
        name: of the dimension in the mesh.
        spreads: its processes hold different parts of parameters.
        strategy: the one that shards parameters after it.
    """

    name: ClassVar[str]
    spreads: ClassVar[bool] = False
    strategy: Any

    def __init__(self, config: ParallelismConfig, mesh: DeviceMesh, world: World) -> None:
        """
        Args:
            config: all sizes, and the options of each dimension.
            mesh: the whole mesh; ``mesh[name]`` is this dimension.
            world: the processes.
        """
        self.config, self.mesh, self.world = config, mesh, world

    def check(self) -> None:
        """Refuses, with the reason, what cannot work here.

        Raises:
            SettingError, WorldError, NotBuiltError: by what is wrong.
        """

    def effects(self) -> Iterator[Effect]:
        """What became of the options that only it has."""
        return iter(())

    def steps(self, bundle: Bundle) -> Iterator[Step]:
        """What is done to a bundle before parameters are sharded over the data. Changes nothing by itself."""
        return iter(())

    def follow(self, renewed: Mapping[int, tuple[Any, Any]], optimizers: list[Any]) -> None:
        """Makes optimizers hold new parameters, also those that are prepared later.

        Args:
            renewed: (old, new) by ``id`` of the old one.
            optimizers: those of the bundle.
        """
        self.strategy._follow(renewed, optimizers)

    def cuts(self, loader: Any) -> bool:
        """Whether ``own_part`` is for the batches of ``loader``, before prepare."""
        return True

    def apart(self, loader: Any) -> bool:
        """Whether the processes of this dimension read different data of ``loader``, before prepare."""
        return False

    def joined(self, values: Any) -> Any:
        """What its processes have computed, as one of them would have computed it alone."""
        return values

    def elsewhere(self, model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
        """See ``Strategy``."""
        return frozenset(), frozenset()

    def made_for(self, optimizer: Optimizer) -> list[list[str]] | None:
        """See ``Strategy``."""
        return None

    def counted(self) -> Iterable[torch.Tensor]:
        """Parameters that another process of this dimension has as well, and counts in a norm."""
        return ()

    def whole(self, model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """A model's state out of what its processes have; on the first of them, the others get nothing.

        Called by the processes that have gathered what is sharded, at the first place of other dimensions.
        """
        return state

    def own(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool) -> Mapping[str, Any]:
        """What this process takes of a whole state."""
        return state

    def whole_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """The same as ``whole`` of an optimizer."""
        return state

    def own_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The same as ``own`` of an optimizer."""
        return state

    def backward_zero(self, loss: torch.Tensor) -> bool:
        """Runs a backward to which ``loss`` adds nothing, where that is special here; whether it did."""
        return False

    def own_part(self, batch: Any) -> Any:
        """What this process computes of a batch that is on its device."""
        return batch

    def chunked(self, whole: torch.Tensor, rows: torch.Tensor) -> None:
        """``rows`` are some rows of ``whole``, a tensor of a batch: what is known of it holds for them."""

    def called(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """A call of ``model``, which is cut into stages, begins.

        Raises:
            PrepareError: what would otherwise come up in one stage, while others wait for it.
        """

    def rehearsal(self, model: nn.Module, inside: Callable[[], bool]) -> AbstractContextManager[None]:
        """Around a forward of ``model`` without values and hooks, that finds what stages send each other.

        Args:
            model: which is cut into stages.
            inside: whether a module that a stage has runs just now, not the code between those.
        """
        return nullcontext()

    def sequences(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], kept: set[torch.Tensor]
    ) -> AbstractContextManager[None]:
        """Around forward and backward of whole sequences, which are cut for the time of it.

        Args:
            buffers: tensors with whole sequences, cut in place.
            dims: the dimension of each that counts tokens.
            kept: those that need not be whole again afterwards.
        """
        return nullcontext()

    def adapted(self, loader: Any, model: nn.Module) -> Any:
        """A loader of whole sequences as one of parts."""
        return loader
