"""Models and optimizers as checkpoints see them: whole, or in parts, by the user's names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn


class Written(Protocol):
    """What an engine has written of one model by itself, as one process would have it.

    Attributes:
        index: the number of the model in the checkpoint.
        folder: where it lies.
        shared: names of parameters that are tied, by the name under which they are kept.
        weights: by the names of the user's module; one is read whenever it is asked for.
        shapes: type and shape of each.
        trained: whether there is an optimizer's state.
    """

    index: int
    folder: Path
    shared: Mapping[str, str]
    weights: Mapping[str, torch.Tensor]
    shapes: Mapping[str, tuple[torch.dtype, torch.Size]]
    trained: bool

    def optimizer_state(
        self, names: Sequence[Sequence[Collection[str]]], options: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """The optimizer's state; ``state`` in it is read late.

        Args:
            names: of an optimizer of the same model, the names of each parameter of each group.
            options: those of its groups, for groups that nothing was saved of.
        """
        ...


class HasStates:
    """By default what each process has is whole."""

    def state(self, model: nn.Module) -> dict[str, Any]:
        """The model's full state, by the names that checkpoints use."""
        return model.state_dict()

    def load(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Loads what ``state`` gave; the result lists missing and unexpected names."""
        return model.load_state_dict(state, strict=strict)

    def check_filled(self, model: nn.Module) -> None:
        """Refuses to save a prepared model that has no values yet; each process looks at what it has.

        Raises:
            PrepareError: with the names of what is empty.
        """

    def exact_state(self, model: nn.Module) -> dict[str, Any]:
        """What a checkpoint holds of the model, where it computes with other weights than it trains."""
        return self.state(model)

    def like(self, model: nn.Module) -> Mapping[str, Any]:
        """A state with the names, shapes and ties of the model; its values do not count."""
        return self.as_saved(model).state_dict()

    def own_files(self, models: Sequence[nn.Module], options: Mapping[str, Any]) -> list[Any]:
        """What an engine writes into a checkpoint by itself, for those of ``models`` that it trains.

        Each has ``name``, ``save(folder)`` and ``load(folder)``, says by ``present(folder)`` whether it was
        written there, and has as ``objects`` what it stands for.

        Args:
            models: all prepared models.
            options: more arguments of the save or the load.
        """
        return []

    @classmethod
    def written(cls, folder: Path) -> Sequence[Written]:
        """What its engine has written into a checkpoint by itself, for other strategies and tools to read."""
        return ()

    @property
    def saves_sharded(self) -> bool:
        """Whether checkpoints hold what each process has, unless somebody asks for whole files.

        Only where the strategy ``shards``.
        """
        return False

    def as_saved(self, model: nn.Module) -> Any:
        """The model as checkpoints in parts see it: a module by the user's names.

        What is cut is a distributed tensor, or a stand-in of one where only names and shapes count.
        """
        return self.unwrap(model)

    def elsewhere(self, model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
        """Where processes hold different parts of a model, and not of each parameter.

        Returns:
            Names of its state that this process has not; and those of buffers that it saves, for the first
            process has them not.
        """
        return frozenset(), frozenset()

    def made_for(self, optimizer: torch.optim.Optimizer) -> list[list[str]] | None:
        """The names in each group as it was made, where this process holds some of them only; else None."""
        return None

    def optimizer_as_saved(self, optimizer: torch.optim.Optimizer) -> Any:
        """The optimizer as they see it: of the parameters that ``as_saved`` has."""
        return optimizer

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]
    ) -> dict[str, Any]:
        """The optimizer's full state, as its ``state_dict`` would be in one process.

        All processes must call it. It is complete on process 0; others may get less.

        Args:
            optimizer: the user's own.
            models: the prepared models, whose parameters it has.
        """
        return optimizer.state_dict()

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Loads what ``optimizer_state`` gave; every process gets it whole, and takes its part."""
        optimizer.load_state_dict(dict(state))

    @staticmethod
    def inner(model: Any) -> Any:
        """The module inside of what this strategy, or its library, puts around one; else ``model``."""
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module."""
        return model
