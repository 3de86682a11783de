"""What a checkpoint gets of prepared models and optimizers: whole states and states in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.checkpoint.state import Part
from accelerate.offload.tensor import source_of

if TYPE_CHECKING:
    from accelerate.checkpoint.parts import Spread
    from accelerate.strategy.base import Strategy


def model_part(strategy: Strategy, model: nn.Module) -> Part:
    """A prepared model: whole as its strategy gives it, in parts by the names of the user's module."""
    return Part(
        type(model).__name__,
        lambda: with_values(strategy.exact_state(model)),
        partial(strategy.load, model),
        spread=cache(partial(spread_model, strategy, model)) if strategy.spreads else None,
        like=partial(strategy.like, model) if strategy.shards else None,
        check=partial(strategy.check_filled, model),
    )


def with_values(state: Any) -> Any:
    """A model's state with offloaded weights as they lie in memory or in files; nothing is copied."""
    offloaded = {name: source_of(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
    for name, source in offloaded.items():
        if source is not None:
            state[name] = source.host().detach()
    return state


def optimizer_part(strategy: Strategy, optimizer: Any, models: Sequence[nn.Module]) -> Any:
    """A prepared optimizer; one that is not torch's is saved as it is.

    Args:
        strategy: how it trains.
        optimizer: the prepared optimizer.
        models: all prepared models.
    """
    inner = optimizer.optimizer
    if not isinstance(inner, torch.optim.Optimizer):
        return optimizer
    return Part(
        type(optimizer).__name__,
        partial(strategy.optimizer_state, inner, models),
        partial(load_optimizer, strategy, inner, models),
        spread=cache(partial(spread_optimizer, strategy, inner, models)) if strategy.spreads else None,
    )


def load_optimizer(
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
    models: Sequence[nn.Module],
    state: Mapping[str, Any],
) -> None:
    """Loads a whole state; one that goes by the names of parameters, as the public package writes it, too."""
    if any(isinstance(key, str) for group in state["param_groups"] for key in group["params"]):
        from accelerate.checkpoint.spread import by_number

        own = strategy.optimizer_as_saved(optimizer)
        state = by_number(own, [strategy.as_saved(model) for model in models], state)
    strategy.load_optimizer(optimizer, models, state)


# torch.distributed.checkpoint takes most of a second to import: only who saves or loads parts pays.
def spread_model(strategy: Strategy, model: nn.Module, only: Mapping[str, str] | None = None) -> Spread:
    """The model as it is saved in parts; with ``only``, these of its tensors, by the names that follow."""
    from accelerate.checkpoint.spread import SpreadModel

    elsewhere, gives = strategy.elsewhere(model)
    module = strategy.as_saved(model)
    return SpreadModel(module, only, apart=strategy.trains_apart, elsewhere=elsewhere, gives=gives)


def spread_optimizer(
    strategy: Strategy, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]
) -> Spread:
    """The optimizer as it is saved in parts."""
    from accelerate.checkpoint.spread import SpreadOptimizer

    modules = [strategy.as_saved(model) for model in models]
    own, groups = strategy.optimizer_as_saved(optimizer), strategy.made_for(optimizer)
    return SpreadOptimizer(own, modules, apart=strategy.trains_apart, groups=groups)
