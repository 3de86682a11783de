"""Strategies whose engine owns the optimizer, its step and the precision: DeepSpeed and Megatron-LM."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from accelerate.strategy.base import Strategy
from accelerate.world.world import World


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
    shapes: Mapping[str, tuple[torch.dtype, torch.Size]]
    has_optimizer_state: bool

    @property
    def weights(self) -> Mapping[str, torch.Tensor]: ...

    def optimizer_state(
        self, names: Sequence[Sequence[Collection[str]]], options: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the optimizer's state dict; its ``state`` is read lazily.

        Args:
            names: of an optimizer of the same model, the names of each parameter of each group.
            options: those of its groups, for groups that nothing was saved of.
        """
        ...


class EarlyPartitioning:
    """A capability: models may be partitioned while they are made, before there is an ``Accelerator``."""

    @classmethod
    def join_world(cls, world: World) -> None:
        """Make the ranks of a world that opens known to its library; called where its switch asks for it."""
        raise NotImplementedError


class EngineStrategy(Strategy):
    """A strategy that replaces the whole bundle in its steps by an engine.

    The engine casts and scales by itself, runs ``optimizer.step``, ``zero_grad``, the schedule and clipping,
    and may have a checkpoint format of its own. The wrappers around the user's objects only pass on to it.

    Attributes:
        wrapper_classes: the classes around its ``"optimizer"`` and ``"scheduler"``, as ``"module:class"``.
    """

    owns_step: ClassVar[bool] = True
    wrapper_classes: ClassVar[Mapping[str, str]] = {}

    def forget(self) -> None:
        """Release everything that was prepared."""

    @property
    def accumulation_steps(self) -> int | None:
        """The micro-batches per step in the engine's own configuration; None if it does not say."""
        return None

    # --- the loop

    def should_divide_loss(self, kwargs: dict[str, Any]) -> bool:
        """Return whether the loss is divided by the number of micro-batches before ``backward(**kwargs)``."""
        return False

    def optimizer_step(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Any:
        """Take one optimizer step; ``step`` runs the user's optimizer through the precision."""
        return step()

    def advances_scheduler(self, scheduler: Any) -> bool:
        """Return whether the step of the engine advances this schedule too."""
        return False

    def optimizer_params(self, optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
        """Return the parameters of prepared models that an optimizer changes."""
        return (p for group in optimizer.param_groups for p in group["params"])

    def has_nonzero_grads(self, models: Iterable[nn.Module], parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether ``parameters``, all those of ``models``, have gradients that are not zero."""
        return any(bool(grad.any()) for grad in self.gradients(parameters))

    def rescale_gradients(self, models: Iterable[nn.Module], factor: float) -> bool:
        """Multiply the gradients of ``models``; return False where the caller multiplies ``gradients``."""
        return False

    def rescale_short_window(self, factor: float) -> None:
        """Multiply accumulated gradients by ``factor``: the next micro-batch closes the window early."""

    # --- states

    def master_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the state for a checkpoint: the master weights, where the compute weights are narrower."""
        return self.model_state(model)

    def state_template(self, model: nn.Module) -> Mapping[str, Any]:
        """Return a state dict with the names, shapes and ties of the model; its values do not count."""
        return self.model_checkpoint_view(model).state_dict()

    def engine_files(self, models: Sequence[nn.Module], options: Mapping[str, Any]) -> list[Any]:
        """Return the writers of the engine's own checkpoint files, one for each of ``models`` that it trains.

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
