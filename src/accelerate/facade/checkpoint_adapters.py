"""Adapters from prepared models, optimizers and open accumulation windows to checkpoints.

Gradients of a window that is not complete are kept by each rank: they have not been reduced. Each rank saves
its own. The same ranks get theirs back, to the bit; others get the reduced gradient of all of them, to which
the rest of the window adds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.checkpoint.layout import StatefulAdapter
from accelerate.checkpoint.state_dict_files import describe_optimizer, describe_other_class
from accelerate.core.errors import warn_user
from accelerate.facade.loss_weighting import LossWeighting
from accelerate.facade.optimizer import AcceleratedOptimizer, move_to_device
from accelerate.facade.preparer import PreparedObjects
from accelerate.offload.offloaded_tensor import OffloadedTensor
from accelerate.strategy.base import DataSharding, EngineStrategy
from accelerate.strategy.protocol.gradient_sync import GradientPiece, OpenGradients, join_pieces
from accelerate.world import collective
from accelerate.world.local_tensor_trees import local_tensor

if TYPE_CHECKING:
    from accelerate.checkpoint.layout import ShardedState
    from accelerate.facade.gradient_state import GradientState
    from accelerate.precision.base import Precision
    from accelerate.strategy.base import Strategy


def model_adapter(strategy: Strategy, model: nn.Module) -> StatefulAdapter:
    """Return the adapter that saves and loads a prepared model, full or sharded."""
    if isinstance(strategy, EngineStrategy):
        full_state, sharded_state = strategy.master_state, None
    else:
        full_state = strategy.model_state
        sharded_state = cache(partial(sharded_model_state, strategy, model))
    if "bitsandbytes" in sys.modules:
        from accelerate.offload.quantization.bitsandbytes import accept_saved_states

        accept_saved_states(model)
    return StatefulAdapter(
        type(model).__name__,
        lambda: resolve_offloaded(full_state(model)),
        partial(strategy.load_model, model),
        sharded_state=sharded_state,
        template=partial(state_template, strategy, model) if strategy.shards_params else None,
        check=partial(strategy.check_materialized, model),
        settle=partial(_settle_buffers, model) if next(model.buffers(), None) is not None else None,
        module=strategy.unwrap(model),
    )


def _settle_buffers(model: nn.Module) -> None:
    # Imported only where a save meets buffers: it brings torch's distributed tensors.
    from accelerate.strategy.protocol.replicated_buffers import settle_buffers

    settle_buffers(model)


def state_template(strategy: Strategy, model: nn.Module) -> Mapping[str, Any]:
    """Return a state dict with the names, shapes and ties of the model; its values do not count.

    A name that only other ranks hold (pipeline stages) has the value None.
    """
    if isinstance(strategy, EngineStrategy):
        return strategy.state_template(model)
    remote_names = strategy.partial_state_names(model)[0] if isinstance(strategy, DataSharding) else ()
    # The parameters themselves: DTensors are tied where they are the same object.
    return {**dict.fromkeys(remote_names), **strategy.model_checkpoint_view(model).state_dict(keep_vars=True)}


def registered_adapter(
    strategy: Strategy, item: Any, is_writer: bool, models: Sequence[nn.Module], *, each_node: bool = False
) -> Any:
    """Return what saves and loads an object of ``register_for_checkpointing``.

    Where parameters are sharded, its state may have shards too: an average of the weights has. DTensors are
    gathered into the file, and distributed as those that the object has when it is loaded. Shards in plain
    tensors are saved by rank.
    """
    if not strategy.shards_params:
        return item
    if isinstance(item, torch.optim.Optimizer):
        from accelerate.facade.optimizer import AcceleratedOptimizer

        inner = item.optimizer if isinstance(item, AcceleratedOptimizer) else item
        return optimizer_adapter(strategy, inner, models, is_registered=True)
    from accelerate.checkpoint.registered_objects import gather_rank_shards, gather_rank_states
    from accelerate.strategy.sharding.full_state import distribute_leaves, gather_leaves

    name = type(item).__name__

    def holds_stage(model: nn.Module) -> bool:
        return isinstance(strategy, DataSharding) and bool(strategy.partial_state_names(model)[0])

    def state_dict() -> Any:
        values = (each.detach() for model in models for each in model.parameters())
        shapes = {local_tensor(each).shape for each in values}
        is_pipelined = strategy.model_parallel_size > 1 and any(
            collective.compare_objects(any(map(holds_stage, models)), f"the state of {name}")
        )
        state = gather_leaves(item.state_dict(), is_writer or is_pipelined)
        if is_pipelined:
            return gather_rank_states(state, name, each_node=each_node)
        return gather_rank_shards(state, shapes, name, each_node=each_node)

    def load_state_dict(state: Any, **options: Any) -> Any:
        own: Any = {}
        with suppress(AttributeError, LookupError):  # it may have no state before it is loaded
            own = item.state_dict()
        return item.load_state_dict(distribute_leaves(state, own), **options)

    return StatefulAdapter(name, state_dict, load_state_dict, module=item)


def resolve_offloaded(state: Any) -> Any:
    """Replace offloaded weights in a state dict by those in memory or mapped files; nothing is copied."""
    for name, value in state.items():
        if isinstance(value, OffloadedTensor):
            state[name] = value.source.host_tensor().detach()
    return state


def position_adapter(loader: Any) -> StatefulAdapter:
    """Return the adapter of a loader's position, which a loader of torchdata has beside its state."""
    return StatefulAdapter(type(loader).__name__, loader.position_state, loader.load_position)


def rank_position_adapter(loader: Any) -> StatefulAdapter:
    """Return the adapter of a loader's position on each rank, where each keeps data of its own.

    A rank that has saved none has the position of rank 0, which is loaded before.
    """

    def load_state_dict(states: Sequence[Any], rank: int) -> None:
        if rank < len(states):
            loader.load_state_dict(states[rank])

    return StatefulAdapter(type(loader).__name__, loader.state_dict, load_state_dict)


def state_tensors(
    strategy: Strategy, models: Iterable[nn.Module], optimizers: Iterable[AcceleratedOptimizer]
) -> list[torch.Tensor]:
    """Return the tensors of this rank that a checkpoint of models and optimizers has."""
    views = map(strategy.model_checkpoint_view, models)
    weights = (tensor for view in views for tensor in view.state_dict().values())
    # One that steps through optimizers of its own may have no state.
    kept = (getattr(each.optimizer, "state", {}) for each in optimizers)
    states = (state for of_params in kept for state in of_params.values())
    moments = (value for state in states for value in state.values())
    return [each for each in chain(weights, moments) if isinstance(each, torch.Tensor)]


def optimizer_adapter(
    strategy: Strategy, optimizer: Any, models: Sequence[nn.Module], *, is_registered: bool = False
) -> Any:
    """Return the adapter of a prepared optimizer; one that is not torch's is saved as it is.

    Args:
        strategy: how it trains.
        optimizer: the prepared optimizer, or one of torch that the user has registered.
        models: all prepared models.
        is_registered: the user has registered it; its state is saved full.
    """
    inner = optimizer if is_registered else optimizer.optimizer
    if not isinstance(inner, torch.optim.Optimizer):
        return optimizer
    return StatefulAdapter(
        type(inner).__name__,
        partial(strategy.optimizer_state, inner, models),
        partial(load_optimizer_state, strategy, inner, models),
        sharded_state=cache(partial(sharded_optimizer_state, strategy, inner, models))
        if not (is_registered or isinstance(strategy, EngineStrategy))
        else None,
        compare=partial(compare_optimizer_state, strategy, inner, models),
        optimizer=inner,
        keeps_shard=strategy.shards_params and not isinstance(strategy, EngineStrategy),
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
    groups = state.get("param_groups", ())  # an optimizer of others may have a layout of its own
    if any(isinstance(key, str) for group in groups for key in group["params"]):
        from accelerate.checkpoint.sharded_state import optimizer_state_by_index

        view = strategy.optimizer_checkpoint_view(optimizer)
        state = optimizer_state_by_index(
            view, [strategy.model_checkpoint_view(model) for model in models], state
        )
    strategy.load_optimizer(optimizer, models, state)
    # Torch casts the state of parameters only: not other state, and not tensors of groups.
    for key, value in getattr(optimizer, "state", {}).items():
        if not isinstance(key, torch.Tensor):
            optimizer.state[key] = move_to_device(value, strategy.world.device)
    for group in getattr(optimizer, "param_groups", ()):
        for name, value in group.items():
            if isinstance(value, torch.Tensor) and group["params"]:
                group[name] = value.to(group["params"][0].device)


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


@dataclass(eq=False)
class OpenWindow:
    """Saves and restores the open window of an ``Accelerator``, on each rank.

    Attributes:
        gradients, strategy, precision: gradient accumulation, strategy and precision of the run.
        prepared: the models and optimizers that are trained.
    """

    gradients: GradientState
    strategy: Strategy
    precision: Precision
    prepared: PreparedObjects

    @property
    def is_open(self) -> bool:
        """Return whether a backward has run for a step that is to come.

        A loop that accumulates without ``accumulate()`` and ``windows()`` says so by its backwards alone.
        """
        gradients = self.gradients
        weighting = gradients.loss_weighting
        weighted = weighting is not None and any(group.is_weighted for group in weighting.groups)
        if not (gradients.has_unweighted_grads or weighted):
            return False
        counts = gradients.num_steps > 1 or gradients.step > 0 or gradients.window is not None
        return not gradients.sync_gradients or not counts

    @property
    def _has_readable_gradients(self) -> bool:
        return isinstance(self.strategy, OpenGradients) and self.strategy.has_readable_gradients

    def is_saved(self, is_solo: bool = False) -> bool:
        """Return whether there is a window to save; warn where its gradients cannot be saved.

        Args:
            is_solo: the main process saves alone, and has the gradients of its own batches only.
        """
        if not self.is_open:
            return False
        if is_solo:
            warn_user(
                "save_state on the main process alone, in the middle of an accumulation window: the "
                "gradients of its micro-batches so far are not in the checkpoint: each process has its own. "
                "Save after optimizer.step(), where accelerator.sync_gradients is True, or on each process"
            )
            return False
        if not self._has_readable_gradients:
            if self.strategy.world.rank > 0:
                return False
            warn_user(
                "save_state in the middle of an accumulation window: the gradients of its micro-batches so "
                f"far are not in the checkpoint, since the strategy {self.strategy.name!r} keeps them in "
                "buffers of its own. A run that is resumed from it goes on without them. Save after "
                "optimizer.step(), where accelerator.sync_gradients is True"
            )
            return False
        return True

    # --- saving

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's gradients, its own buffers and counts; may be collective."""
        assert isinstance(self.strategy, OpenGradients)
        window, weighting = self.gradients.window, self.gradients.loss_weighting
        count, size = self.gradients.step, self.gradients.num_steps
        if window is not None:
            count, size = window.count, window.n
        self.strategy.window_size = size
        pieces = [self.strategy.gradient_pieces(model) for model in self.prepared.models]
        state: dict[str, Any] = {
            "layout": self.strategy.gradient_layout,
            "models": [{n: [_as_tuple(p) for p in held] for n, held in model.items()} for model in pieces],
            "buffers": [self.strategy.local_buffers(model) for model in self.prepared.models],
            "sync_gradients": self.gradients.sync_gradients,
            "window": None if window is None else (window.count, window.is_loss_divided),
            "micro_batches": (self.strategy.micro_batches or count, size),
            "weighting": None,
        }
        if weighting is not None and any(group.is_weighted for group in weighting.groups):
            state["weighting"] = {
                "ranks": weighting.average_size,
                "shared_by": self.strategy.model_parallel_size,
                "reference": (weighting.reference, weighting.next_reference),
                "groups": [(group.items, group.factor, group.is_weighted) for group in weighting.groups],
            }
        return state

    # --- loading

    def load_state_dict(self, states: Sequence[Mapping[str, Any]], rank: int = 0) -> None:
        """Make the saved window the open one; without saved ones, forget the one that is open.

        Args:
            states: what each rank has saved, empty if no window was open.
            rank: this one.
        """
        gradients = self.gradients
        if self.is_open:
            for optimizer in self.prepared.optimizers:
                self.strategy.zero_grad(optimizer.optimizer, optimizer.optimizer.zero_grad)
        gradients.sync_gradients, gradients.has_unweighted_grads = True, False
        gradients.abandoned_window, gradients.resumed_window = "", None
        for group in gradients.loss_weighting.groups if gradients.loss_weighting is not None else ():
            group.reset()
        if not states:
            return
        if not self._has_readable_gradients:
            if self.strategy.world.rank == 0:
                warn_user(
                    "this checkpoint was saved in the middle of an accumulation window, and the gradients of "
                    f"that window are not loaded, since the strategy {self.strategy.name!r} keeps them in "
                    "buffers of its own: its next step goes without them"
                )
            return
        assert isinstance(self.strategy, OpenGradients)
        own = states[min(rank, len(states) - 1)]
        is_same = bool(own["layout"]) and own["layout"] == self.strategy.gradient_layout
        weighting = own["weighting"]
        scale = 1.0 if weighting is None else self._load_weighting(states, own, is_same)
        for index, model in enumerate(self.prepared.models[: len(own["models"])]):
            if is_same:
                held = own["models"][index].items()
                pieces = {name: [GradientPiece(*piece) for piece in each] for name, each in held}
                self.strategy.restore_pieces(model, pieces)
                # Older checkpoints have none.
                buffers = own["buffers"][index] if "buffers" in own else None
                if buffers is not None:
                    self.strategy.restore_local_buffers(model, buffers)
            else:
                self.strategy.load_gradients(model, JoinedGradients(states, index, scale))
                self.strategy.resume_window(model, *own.get("micro_batches", (0, 1)))
        gradients.sync_gradients, gradients.has_unweighted_grads = own["sync_gradients"], weighting is None
        gradients.resumed_window = own["window"]

    def _load_weighting(
        self, states: Sequence[Mapping[str, Any]], own: Mapping[str, Any], is_same: bool
    ) -> float:
        """Restore the counted items; return the factor for gradients that other ranks have saved."""
        gradients, saved = self.gradients, own["weighting"]
        if gradients.loss_weighting is None:
            gradients.loss_weighting = LossWeighting(gradients, self.strategy, self.precision)
        weighting = gradients.loss_weighting
        weighting.update_prepared(self.prepared.models, self.prepared.optimizers)
        weighting.reference, weighting.next_reference = saved["reference"]
        for index, (group, (items, factor, is_weighted)) in enumerate(
            zip(weighting.groups, saved["groups"], strict=False)
        ):
            if not is_same:
                counted = sum(state["weighting"]["groups"][index][0] for state in states)
                items = counted / saved["shared_by"] / weighting.average_size
            group.items, group.factor, group.is_weighted = items, factor, is_weighted
        # The sum over the ranks counts, of which the reduction takes the mean.
        return saved["ranks"] / weighting.average_size


class JoinedGradients(Mapping[str, Any]):
    """The unsharded, reduced gradients of one model by name, joined from all ranks' pieces at each access."""

    def __init__(self, states: Sequence[Mapping[str, Any]], index: int, scale: float) -> None:
        self._models = [state["models"][index] for state in states]
        self._names = dict.fromkeys(name for model in self._models for name in model)
        self._scale = scale

    def __getitem__(self, name: str) -> Any:
        pieces = (GradientPiece(*piece) for model in self._models for piece in model.get(name, ()))
        return join_pieces(pieces).mul_(self._scale)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Any:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _as_tuple(piece: GradientPiece) -> tuple[Any, ...]:
    return piece.values, piece.shape, piece.offsets, piece.ranks, *([piece.boxes] if piece.boxes else ())
