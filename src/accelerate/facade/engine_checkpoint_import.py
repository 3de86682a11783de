"""Load checkpoints that DeepSpeed or Megatron-LM wrote, for other strategies and for tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.checkpoint.state_dict_files import describe_shapes
from accelerate.core.errors import CheckpointError
from accelerate.facade.checkpoint_adapters import load_optimizer_state, state_template
from accelerate.strategy import STRATEGIES
from accelerate.strategy.base import DataSharding, EngineStrategy

if TYPE_CHECKING:
    from accelerate.checkpoint.model_tensors import LazyTensor
    from accelerate.strategy.base import EngineCheckpoint, Strategy


class EngineStateLoader:
    """Loads one model and its optimizer from a checkpoint of DeepSpeed or Megatron-LM; see ``OwnFiles``.

    Args:
        strategy: the strategy of this run.
        checkpoint: the checkpoint of DeepSpeed or Megatron-LM.
        model: the prepared model.
        optimizer: the prepared optimizer; None leaves its state unread.
        models: all prepared models.
        strict: names that are missing or unexpected are an error.
    """

    def __init__(
        self,
        strategy: Strategy,
        checkpoint: EngineCheckpoint,
        model: nn.Module,
        optimizer: Any,
        models: Sequence[nn.Module],
        strict: bool = True,
    ) -> None:
        self.strategy, self.checkpoint, self.model, self.models = strategy, checkpoint, model, models
        self.strict = strict
        self.optimizer = None if optimizer is None else optimizer.optimizer
        self.name = f"model {checkpoint.index}"
        self.objects = (model, self.optimizer, None)

    def save(self, folder: Path, /) -> list[str]:
        """Refuse to save: the strategy that trains the model saves it."""
        raise CheckpointError(f"{self.name} is saved by the strategy that trains it")

    def compare(self, folder: Path, /) -> str:
        """Return why the saved model does not fit this one."""
        if self.strategy.shards_params:
            own = state_template(self.strategy, self.model)
        else:
            own = self.strategy.unwrap(self.model).state_dict()
        return describe_shapes(self.checkpoint.shapes, own, strict=self.strict)

    def load(self, folder: Path, /) -> None:
        """Load full states on the host of every rank; the strategy keeps the shard of this rank."""
        # An optimizer's state that cannot be read is refused before weights are changed.
        state = self._optimizer_state() if self.checkpoint.has_optimizer_state else None
        self.strategy.load_model(self.model, dict(self.checkpoint.weights), strict=self.strict)
        if self.optimizer is None or state is None:
            return
        state["state"] = {number: dict(values) for number, values in state["state"].items()}
        load_optimizer_state(self.strategy, self.optimizer, self.models, state)

    def _optimizer_state(self) -> dict[str, Any] | None:
        if self.optimizer is None:
            return None
        view = self.strategy.optimizer_checkpoint_view(self.optimizer)
        options = [{k: v for k, v in group.items() if k != "params"} for group in view.param_groups]
        return self.checkpoint.optimizer_state(self._parameter_names(self.optimizer, view), options)

    def _parameter_names(
        self, plain: torch.optim.Optimizer, own: torch.optim.Optimizer
    ) -> list[list[list[str]]]:
        """Return the names of each parameter of each optimizer group."""
        group_names = None
        if isinstance(self.strategy, DataSharding):
            group_names = self.strategy.original_group_names(plain)
        if group_names is not None:
            return [[[name] for name in group] for group in group_names]
        from accelerate.checkpoint.sharded_state import parameter_names

        names = iter(parameter_names(own, [self.strategy.model_checkpoint_view(self.model)]))
        return [[next(names) for _ in group["params"]] for group in own.param_groups]


def engine_state_loaders(
    strategy: Strategy,
    folder: Path,
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    held: set[int],
    strict: bool = True,
) -> Iterator[EngineStateLoader]:
    """Yield a loader for each of ``models`` that DeepSpeed or Megatron-LM wrote into ``folder``.

    Args:
        strategy: the strategy of this run.
        folder: the checkpoint.
        models, optimizers: the prepared ones.
        held: the ``id`` of models and plain optimizers that something else loads.
        strict: see ``EngineStateLoader``.
    """
    if all(id(model) in held for model in models):
        return
    checkpoints = _engine_checkpoints(folder)
    plain = [each for each in optimizers if isinstance(each.optimizer, torch.optim.Optimizer)]
    left = [each for each in plain if id(each.optimizer) not in held]
    for checkpoint in checkpoints:
        if checkpoint.index >= len(models) or id(models[checkpoint.index]) in held:
            continue
        model = models[checkpoint.index]
        model_params = set(strategy.parameters(model))
        of_it = [
            o for o in left if any(p in model_params for group in o.param_groups for p in group["params"])
        ]
        optimizer = next(iter(of_it), left[0] if len(left) == 1 else None)
        left = [each for each in left if each is not optimizer]
        yield EngineStateLoader(strategy, checkpoint, model, optimizer, models, strict)


def engine_weights(folder: Path, model: int = 0) -> tuple[Path, dict[str, LazyTensor]] | None:
    """Return (folder, lazy tensors) of a model that DeepSpeed or Megatron-LM wrote; None if there is none.

    Args:
        folder: a checkpoint, or the folder of DeepSpeed or Megatron-LM in it.
        model: the number of the model.
    """
    from accelerate.checkpoint.model_tensors import LazyTensor

    checkpoint = next((each for each in _engine_checkpoints(folder) if each.index == model), None)
    if checkpoint is None:
        return None
    tensors: dict[str, LazyTensor] = {}
    weights = checkpoint.weights
    for name, (dtype, shape) in checkpoint.shapes.items():
        place = ((checkpoint.tied_names.get(name, name), 0, shape.numel()),)
        tensors[name] = LazyTensor(shape, dtype, place, partial(weights.__getitem__, name))
    return checkpoint.folder, tensors


def _engine_checkpoints(folder: Path) -> list[EngineCheckpoint]:
    if not folder.is_dir():
        return []
    engines = [strategy for strategy in STRATEGIES if issubclass(strategy, EngineStrategy)]
    return [each for engine in engines for each in engine.read_engine_checkpoints(folder)]
