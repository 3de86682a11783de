"""The collectives of ``Accelerator``: gather, reduce, pad, metrics, and a flag."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from accelerate.facade.gradient_state import GradientState
from accelerate.facade.join import join_uneven_inputs
from accelerate.facade.metrics import gather_for_metrics
from accelerate.facade.processes import ProcessMixin
from accelerate.strategy.base import Strategy
from accelerate.world import collective


class CollectivesMixin(ProcessMixin):
    """Collectives over trees of tensors. All ranks must call each of them."""

    strategy: Strategy
    gradient_state: GradientState
    _dataloaders: list[Any]
    _trigger = False

    def gather(self, tensor: Any) -> Any:
        """All-gather tensors: concatenated along dimension 0 in rank order; see ``collective.gather``."""
        return collective.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather and leaves out the samples that only filled the last step: each counts once, in order.

        Args:
            input_data: a tree of tensors with one row per sample, or a list of any objects, one per sample,
                or a dict of such; see ``facade.metrics``.
            use_gather_object: treat it as objects.
        """
        loader = self.gradient_state.active_dataloader
        share = getattr(loader, "data_shard", None) or self.strategy.data_shard
        if share.count == self.strategy.data_shard.count < self.world.size and not use_gather_object:
            input_data = self.strategy.merge_model_parallel(input_data)
        return gather_for_metrics(
            input_data,
            loader,
            as_objects=use_gather_object,
            counts_samples=share.counts_samples,
            all_ranks_count=share.count == self.world.size,
        )

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Return a context for a loop whose ranks may have different numbers of batches.

        Args:
            joinables: prepared models.
            even_batches: replaces the option of the prepared loaders inside the block.

        Raises:
            PrepareError: a model is not replicated.
        """
        if not self.use_distributed:
            return nullcontext()
        return join_uneven_inputs(joinables, self._dataloaders, even_batches)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """All-reduce tensors: the element-wise sum or mean over ranks, times ``scale``."""
        return collective.reduce(tensor, reduction, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Pad tensors along ``dim`` to the greatest length on any rank."""
        return collective.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Set this rank's flag, for ``check_trigger`` on all ranks."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Return whether any rank has set its flag, and clear it."""
        raised = any(collective.all_gather_object(self._trigger))
        if raised:
            self._trigger = False
        return raised
