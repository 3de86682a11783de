"""What an engine has written into a checkpoint by itself, for other strategies and as weights for tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.core.errors import CheckpointError
from accelerate.facade.parts import load_optimizer
from accelerate.strategy import STRATEGIES

if TYPE_CHECKING:
    from accelerate.checkpoint.lazy import LazyTensor
    from accelerate.strategy.base import Strategy, Written


class Taken:
    """Loads the whole states of one model and its optimizer; a part of a checkpoint, see ``OwnFiles``.

    Args:
        strategy: how they train now.
        written: what there is.
        model: the prepared model.
        optimizer: the prepared optimizer; None leaves its state unread.
        models: all prepared models.
        strict: names that are missing or unexpected are an error.
    """

    def __init__(
        self,
        strategy: Strategy,
        written: Written,
        model: nn.Module,
        optimizer: Any,
        models: Sequence[nn.Module],
        strict: bool = True,
    ) -> None:
        self.strategy, self.written, self.model, self.models = strategy, written, model, models
        self.strict = strict
        self.optimizer = None if optimizer is None else optimizer.optimizer
        self.name = f"model {written.index}"
        self.objects = (model, self.optimizer, None)

    def save(self, folder: Path, /) -> list[str]:
        """It only loads."""
        raise CheckpointError(f"{self.name} is saved by the strategy that trains it")

    def load(self, folder: Path, /) -> None:
        """Every process reads whole states, on the host; each strategy takes its part."""
        self.strategy.load(self.model, dict(self.written.weights), strict=self.strict)
        if self.optimizer is None or not self.written.trained:
            return
        own = self.strategy.optimizer_as_saved(self.optimizer)
        options = [{k: v for k, v in group.items() if k != "params"} for group in own.param_groups]
        state = self.written.optimizer_state(self._names(self.optimizer, own), options)
        state["state"] = {number: dict(kept) for number, kept in state["state"].items()}
        load_optimizer(self.strategy, self.optimizer, self.models, state)

    def _names(self, plain: torch.optim.Optimizer, own: torch.optim.Optimizer) -> list[list[list[str]]]:
        """The names of each parameter of each group."""
        made = self.strategy.made_for(plain)
        if made is not None:
            return [[[name] for name in group] for group in made]
        from accelerate.checkpoint.spread import parameter_names

        names = iter(parameter_names(own, [self.strategy.as_saved(self.model)]))
        return [[next(names) for _ in group["params"]] for group in own.param_groups]


def taken(
    strategy: Strategy,
    folder: Path,
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    held: set[int],
    strict: bool = True,
) -> Iterator[Taken]:
    """Parts for those of ``models`` that an engine has written into ``folder`` by itself.

    Args:
        strategy: how they train now.
        folder: the checkpoint.
        models, optimizers: the prepared ones.
        held: the ``id`` of models and plain optimizers that something else loads.
        strict: see ``Taken``.
    """
    if all(id(model) in held for model in models):
        return
    found = _found(folder)
    plain = [each for each in optimizers if isinstance(each.optimizer, torch.optim.Optimizer)]
    left = [each for each in plain if id(each.optimizer) not in held]
    for written in found:
        if written.index >= len(models) or id(models[written.index]) in held:
            continue
        model = models[written.index]
        mine = set(strategy.parameters(model))
        of_it = [o for o in left if any(p in mine for group in o.param_groups for p in group["params"])]
        optimizer = next(iter(of_it), left[0] if len(left) == 1 else None)
        left = [each for each in left if each is not optimizer]
        yield Taken(strategy, written, model, optimizer, models, strict)


def weights_in(folder: Path, model: int = 0) -> tuple[Path, dict[str, LazyTensor]] | None:
    """(place, tensors) of a model that an engine has written into ``folder``; None if none has.

    Args:
        folder: a checkpoint, or the engine's folder in it.
        model: the number of the model.
    """
    from accelerate.checkpoint.lazy import LazyTensor

    written = next((each for each in _found(folder) if each.index == model), None)
    if written is None:
        return None
    found: dict[str, LazyTensor] = {}
    for name, (dtype, shape) in written.shapes.items():
        place = ((written.shared.get(name, name), 0, shape.numel()),)
        found[name] = LazyTensor(shape, dtype, place, partial(written.weights.__getitem__, name))
    return written.folder, found


def _found(folder: Path) -> list[Written]:
    return [each for known in STRATEGIES for each in known.written(folder)] if folder.is_dir() else []
