"""The base class of a mesh dimension: tensor, context, sequence or pipeline parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from accelerate.core.option_report import OptionStatus
from accelerate.strategy.base import PrepareBundle, PrepareStep
from accelerate.world.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accelerate.strategy.parallelism.config import ParallelismConfig


class MeshDimension:
    """One dimension of a device mesh, with more than one process.

    Attributes:
        name: its name in the mesh.
        shards_params: its processes hold different shards of parameters.
        strategy: the strategy that shards parameters over the remaining dimensions.
    """

    name: ClassVar[str]
    shards_params: ClassVar[bool] = False
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
        """Refuse, with the reason, what cannot work here.

        Raises:
            SettingError, WorldError, FeatureNotBuiltError: by what is wrong.
        """

    def option_statuses(self) -> Iterator[OptionStatus]:
        """Yield the status of the options that only this dimension reads."""
        return iter(())

    def prepare_steps(self, bundle: PrepareBundle) -> Iterator[PrepareStep]:
        """Yield the steps that change a bundle before FSDP shards it; they are applied later."""
        return iter(())

    def remap_optimizer_params(self, replaced: Mapping[int, tuple[Any, Any]], optimizers: list[Any]) -> None:
        """Replace parameters in optimizers, also in those that are prepared later.

        Args:
            replaced: (old, new) by ``id`` of the old one.
            optimizers: the optimizers of the bundle.
        """
        self.strategy._remap_optimizers(replaced, optimizers)

    def shards_loader(self, loader: Any) -> bool:
        """Return whether ``slice_batch`` applies to the batches of ``loader``, which is not prepared yet."""
        return True

    def reads_own_data(self, loader: Any) -> bool:
        """Return whether the processes of this dimension read different samples of ``loader``."""
        return False

    def merge_outputs(self, values: Any) -> Any:
        """Merge the outputs of its processes to what one process would have computed alone."""
        return values

    def partial_state_names(self, model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
        """See ``Strategy``."""
        return frozenset(), frozenset()

    def original_group_names(self, optimizer: Optimizer) -> list[list[str]] | None:
        """See ``Strategy``."""
        return None

    def duplicate_params(self) -> Iterable[torch.Tensor]:
        """Return the parameters that another process of this dimension holds too, and counts in a norm."""
        return ()

    def gather_state(self, model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """Gather a model's state on the first process of this dimension; the others get nothing.

        Called by the processes that have gathered the sharded parameters, at rank 0 of the other dimensions.
        """
        return state

    def select_state(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool) -> Mapping[str, Any]:
        """Select the part of a full state that this process loads."""
        return state

    def gather_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Gather an optimizer's state, as ``gather_state`` does for a model."""
        return state

    def select_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Select the part of an optimizer's full state that this process loads."""
        return state

    def backward_zero(self, loss: torch.Tensor) -> bool:
        """Run a backward with zero gradients if this dimension does it its own way; return whether."""
        return False

    def slice_batch(self, batch: Any) -> Any:
        """Return this process's part of a batch that is on its device."""
        return batch

    def register_chunk(self, whole: torch.Tensor, rows: torch.Tensor) -> None:
        """Record that ``rows`` are rows of ``whole``, a tensor of a batch: a micro-batch of it."""

    def check_call(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Check a call of ``model``, which is split into pipeline stages.

        Raises:
            PrepareError: for an error that would otherwise occur in one stage while others wait for it.
        """

    def trace_context(self, model: nn.Module, inside: Callable[[], bool]) -> AbstractContextManager[None]:
        """Return a context around the tracing forward of ``model``, on fake tensors and without hooks.

        Args:
            model: a model that is split into pipeline stages.
            inside: returns whether a module of a stage runs just now, not the code between the modules.
        """
        return nullcontext()

    def shard_sequences(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], kept: set[torch.Tensor]
    ) -> AbstractContextManager[None]:
        """Return a context around forward and backward, in which full sequences are sharded.

        Args:
            buffers: tensors with full sequences, sharded in place.
            dims: the sequence dimension of each.
            kept: buffers that are not restored afterwards.
        """
        return nullcontext()

    def adapt_loader(self, loader: Any, model: nn.Module) -> Any:
        """Wrap a loader of full sequences as a loader of sequence shards."""
        return loader
