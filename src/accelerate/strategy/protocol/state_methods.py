"""The part of the strategy protocol about states: models and optimizers as checkpoints see them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn


class EngineCheckpoint(Protocol):
    """A checkpoint in an engine's own format (DeepSpeed), read as full state dicts.

    Attributes:
        index: the number of the model in the checkpoint.
        folder: the folder of the engine's files.
        tied_names: names of parameters that are tied, by the name under which they are kept.
        weights: by the names of the user's module; one is read whenever it is asked for.
        shapes: dtype and shape of each weight.
        has_optimizer_state: whether there is an optimizer's state.
    """

    index: int
    folder: Path
    tied_names: Mapping[str, str]
    weights: Mapping[str, torch.Tensor]
    shapes: Mapping[str, tuple[torch.dtype, torch.Size]]
    has_optimizer_state: bool

    def optimizer_state(
        self, names: Sequence[Sequence[Collection[str]]], options: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the optimizer's state dict; its ``state`` is read lazily.

        Args:
            names: of an optimizer of the same model, the names of each parameter of each group.
            options: those of its groups, for groups that nothing was saved of.
        """
        ...


class StrategyStateDictBase:
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

    def master_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the state for a checkpoint: the master weights, where the compute weights are narrower."""
        return self.model_state(model)

    def state_template(self, model: nn.Module) -> Mapping[str, Any]:
        """Return a state dict with the names, shapes and ties of the model; its values do not count."""
        return self.model_checkpoint_view(model).state_dict()

    def engine_files(self, models: Sequence[nn.Module], options: Mapping[str, Any]) -> list[Any]:
        """Return the writers of an engine's own checkpoint files, one for each of ``models`` that it trains.

        Each has ``name``, ``save(folder)`` and ``load(folder)``, says by ``present(folder)`` whether it was
        written there, and has as ``objects`` what it stands for.

        Args:
            models: all prepared models.
            options: more arguments of the save or the load.
        """
        return []

    @classmethod
    def read_engine_checkpoints(cls, folder: Path) -> Sequence[EngineCheckpoint]:
        """Return the engine checkpoints in ``folder``, for other strategies and tools to read."""
        return ()

    @property
    def saves_sharded(self) -> bool:
        """True if checkpoints are sharded by default; only where the strategy ``shards_params``."""
        return False

    def model_checkpoint_view(self, model: nn.Module) -> Any:
        """Return the model as sharded checkpoints see it: a module with the user's names.

        A sharded parameter is a ``DTensor``, or a stand-in of one where only names and shapes count.
        """
        return self.unwrap(model)

    def partial_state_names(self, model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
        """Return the names that this rank lacks, where ranks hold different layers (pipeline parallel).

        Returns:
            Names of its state that this process has not; and those of buffers that it saves, for the first
            process has them not.
        """
        return frozenset(), frozenset()

    def original_group_names(self, optimizer: torch.optim.Optimizer) -> list[list[str]] | None:
        """Return the names in each group as the user made it, where this rank holds only some; else None."""
        return None

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

    @staticmethod
    def inner_module(model: Any) -> Any:
        """Return the module inside the wrapper of this strategy or its library; else ``model``."""
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module."""
        return model
