"""The part of the strategy protocol about states: models and optimizers as checkpoints see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn


class StateIO:
    """The state methods of a strategy; by default each process has the full state."""

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's full state dict, by the names that checkpoints use."""
        return model.state_dict()

    def load_model(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Load what ``model_state`` returned; the result lists missing and unexpected names."""
        return model.load_state_dict(state, strict=strict)

    def check_materialized(self, model: nn.Module) -> None:
        """Refuse to save a prepared model that has no values yet; each rank checks its own part.

        Raises:
            PrepareError: with the names of what is empty.
        """

    @property
    def saves_sharded(self) -> bool:
        """True if checkpoints are sharded by default; only where the strategy ``shards_params``."""
        return False

    def model_checkpoint_view(self, model: nn.Module) -> Any:
        """Return the model as sharded checkpoints see it: a module with the user's names.

        A sharded parameter is a ``DTensor``, or a stand-in of one where only names and shapes count.
        """
        return self.unwrap(model)

    def optimizer_checkpoint_view(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the optimizer as sharded checkpoints see it, over ``model_checkpoint_view``'s parameters."""
        return optimizer

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]
    ) -> dict[str, Any]:
        """Return the optimizer's full state, as its ``state_dict`` would be in one process; collective.

        It is complete on rank 0; other ranks may get less.

        Args:
            optimizer: the user's own.
            models: the prepared models, whose parameters it has.
        """
        return optimizer.state_dict()

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load what ``optimizer_state`` returned; every rank passes the full state, and keeps its shard."""
        optimizer.load_state_dict(dict(state))

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module."""
        return model
