"""LocalSGD: every rank trains locally, and parameters are averaged every few steps.

Source: Stich 2019, "Local SGD Converges Fast and Communicates Little" (arXiv:1805.09767), algorithm 1.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from accelerate.outer.bucketed_averaging import average_in_place
from accelerate.outer.local_training import LocalSGDContext


class LocalSGD(LocalSGDContext):
    """Every rank takes ``local_sgd_steps`` local steps; then parameters are averaged.

        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
            for batch in loader:
                with accelerator.accumulate(model):
                    ...
                    optimizer.step()
                    optimizer.zero_grad()
                local_sgd.step()

    Trainable parameters and floating point buffers are averaged; integer buffers become those of
    rank 0. Frozen parameters are not sent. On one process this does nothing.

    Args:
        accelerator: the ``Accelerator`` that has prepared the model and its optimizers.
        model: the prepared model.
        local_sgd_steps: optimizer steps between two averages.
        enabled: False turns it off, so that gradients are all-reduced in every step.

    Raises:
        SettingError, PrepareError: see ``LocalSGDContext``.
    """

    def __init__(
        self, accelerator: Any, model: nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        several = enabled and accelerator.use_distributed
        super().__init__(accelerator, model, local_sgd_steps, several, "local_sgd_steps")
        self.local_sgd_steps = local_sgd_steps

    def _combine_copies(self) -> None:
        self._sync_and_avg_model_params()

    def _sync_and_avg_model_params(self) -> None:
        """Average parameters and buffers now; a collective call."""
        average_in_place(self._trainable_parameters().values())
        self._average_buffers()
