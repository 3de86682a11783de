"""Adapters from prepared models and optimizers to checkpoints, full or sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.checkpoint.state_comparison import describe_optimizer, describe_other_class
from accelerate.checkpoint.stateful import StatefulAdapter
from accelerate.offload.offloaded_tensor import source_of
from accelerate.strategy.base import DataSharding
from accelerate.strategy.protocol.engine_strategy import EngineStrategy

if TYPE_CHECKING:
    from accelerate.checkpoint.stateful import ShardedState
    from accelerate.strategy.base import Strategy


def model_adapter(strategy: Strategy, model: nn.Module) -> StatefulAdapter:
    """Return the adapter that saves and loads a prepared model, full or sharded."""
    if isinstance(strategy, EngineStrategy):
        full_state, sharded_state = strategy.master_state, None
    else:
        full_state = strategy.model_state
        sharded_state = cache(partial(sharded_model_state, strategy, model))
    return StatefulAdapter(
        type(model).__name__,
        lambda: resolve_offloaded(full_state(model)),
        partial(strategy.load_model, model),
        sharded_state=sharded_state,
        template=partial(state_template, strategy, model) if strategy.shards_params else None,
        check=partial(strategy.check_materialized, model),
        module=strategy.unwrap(model),
    )


def state_template(strategy: Strategy, model: nn.Module) -> Mapping[str, Any]:
    """Return a state dict with the names, shapes and ties of the model; its values do not count.

    A name that only other ranks hold (pipeline stages) has the value None.
    """
    if isinstance(strategy, EngineStrategy):
        return strategy.state_template(model)
    remote_names = strategy.partial_state_names(model)[0] if isinstance(strategy, DataSharding) else ()
    return {**dict.fromkeys(remote_names), **strategy.model_checkpoint_view(model).state_dict()}


def resolve_offloaded(state: Any) -> Any:
    """Replace offloaded weights in a state dict by those in memory or mapped files; nothing is copied."""
    offloaded = {name: source_of(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
    for name, source in offloaded.items():
        if source is not None:
            state[name] = source.host_tensor().detach()
    return state


def position_adapter(loader: Any) -> StatefulAdapter:
    """Return the adapter of a loader's position, which a loader of torchdata has beside its state."""
    return StatefulAdapter(type(loader).__name__, loader.position_state, loader.load_position)


def optimizer_adapter(strategy: Strategy, optimizer: Any, models: Sequence[nn.Module]) -> Any:
    """Return the adapter of a prepared optimizer; one that is not torch's is saved as it is.

    Args:
        strategy: how it trains.
        optimizer: the prepared optimizer.
        models: all prepared models.
    """
    inner = optimizer.optimizer
    if not isinstance(inner, torch.optim.Optimizer):
        return optimizer
    return StatefulAdapter(
        type(inner).__name__,
        partial(strategy.optimizer_state, inner, models),
        partial(load_optimizer_state, strategy, inner, models),
        sharded_state=cache(partial(sharded_optimizer_state, strategy, inner, models))
        if not isinstance(strategy, EngineStrategy)
        else None,
        compare=partial(compare_optimizer_state, strategy, inner, models),
    )


def compare_optimizer_state(
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
    models: Sequence[nn.Module],
    state: Any,
    saved_class: str,
) -> str:
    """Return why a full state dict does not fit an optimizer; empty if nothing speaks against it."""
    view = strategy.optimizer_checkpoint_view(optimizer)
    names = strategy.original_group_names(optimizer) if isinstance(strategy, DataSharding) else None
    if names is None and isinstance(strategy, EngineStrategy):
        return describe_other_class(optimizer, state["param_groups"], saved_class)
    groups = [group["params"] for group in view.param_groups]
    shapes = None if names else [parameter.shape for group in groups for parameter in group]
    sizes = [len(group) for group in names or groups]
    return describe_optimizer(optimizer, sizes, state, saved_class=saved_class, shapes=shapes)


def load_optimizer_state(
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
    models: Sequence[nn.Module],
    state: Mapping[str, Any],
) -> None:
    """Load a full optimizer state dict, keyed by parameter number or by parameter name."""
    if any(isinstance(key, str) for group in state["param_groups"] for key in group["params"]):
        from accelerate.checkpoint.sharded_state import optimizer_state_by_index

        view = strategy.optimizer_checkpoint_view(optimizer)
        state = optimizer_state_by_index(
            view, [strategy.model_checkpoint_view(model) for model in models], state
        )
    strategy.load_optimizer(optimizer, models, state)


# torch.distributed.checkpoint takes most of a second to import: only sharded checkpoints pay for it.
def sharded_model_state(
    strategy: Strategy, model: nn.Module, only: Mapping[str, str] | None = None
) -> ShardedState:
    """Return the sharded state of a model; ``only`` maps the tensors to save to their names in the file."""
    from accelerate.checkpoint.sharded_state import ShardedModelState

    elsewhere, gives = frozenset(), frozenset()
    if isinstance(strategy, DataSharding):
        elsewhere, gives = strategy.partial_state_names(model)
    module = strategy.model_checkpoint_view(model)
    return ShardedModelState(
        module, only, local_training=strategy.local_training, remote_names=elsewhere, saved_buffers=gives
    )


def sharded_optimizer_state(
    strategy: Strategy, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]
) -> ShardedState:
    """Return the sharded state of an optimizer."""
    from accelerate.checkpoint.sharded_state import ShardedOptimizerState

    modules = [strategy.model_checkpoint_view(model) for model in models]
    view = strategy.optimizer_checkpoint_view(optimizer)
    groups = strategy.original_group_names(optimizer) if isinstance(strategy, DataSharding) else None
    return ShardedOptimizerState(view, modules, local_training=strategy.local_training, group_names=groups)
