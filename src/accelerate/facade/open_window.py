"""The open accumulation window in a checkpoint: its gradients, and how far it has come.

Gradients of a window that is not complete are kept by each rank: they have not been reduced. Each rank saves
its own. The same ranks get theirs back, to the bit; others get the reduced gradient of all of them, to which
the rest of the window adds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accelerate.core.user_warning import warn_user
from accelerate.facade.loss_weighting import LossWeighting
from accelerate.facade.prepared_objects import PreparedObjects
from accelerate.facade.runtime import Runtime
from accelerate.strategy.base import GradientPiece, OpenGradients, join_pieces


class OpenWindow:
    """Saves and restores the open window of an ``Accelerator``, on each rank.

    Args:
        runtime: the strategy, precision and gradient accumulation of the run.
        prepared: the models and optimizers that are trained.
    """

    def __init__(self, runtime: Runtime, prepared: PreparedObjects) -> None:
        self.runtime, self.prepared = runtime, prepared
        self.gradients, self.strategy = runtime.gradients, runtime.strategy

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
        if not isinstance(self.strategy, OpenGradients):
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
        """Return this rank's gradients and counts; may be collective."""
        assert isinstance(self.strategy, OpenGradients)
        window, weighting = self.gradients.window, self.gradients.loss_weighting
        pieces = [self.strategy.gradient_pieces(model) for model in self.prepared.models]
        state: dict[str, Any] = {
            "layout": self.strategy.gradient_layout,
            "models": [{n: [_as_tuple(p) for p in held] for n, held in model.items()} for model in pieces],
            "sync_gradients": self.gradients.sync_gradients,
            "window": None if window is None else (window.count, window.is_loss_divided),
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
        self._forget()
        if not states or not isinstance(self.strategy, OpenGradients):
            return
        own = states[min(rank, len(states) - 1)]
        is_same = bool(own["layout"]) and own["layout"] == self.strategy.gradient_layout
        weighting = own["weighting"]
        scale = 1.0 if weighting is None else self._load_weighting(states, own, is_same)
        for index, model in enumerate(self.prepared.models[: len(own["models"])]):
            if is_same:
                held = own["models"][index].items()
                pieces = {name: [GradientPiece(*piece) for piece in each] for name, each in held}
                self.strategy.restore_pieces(model, pieces)
            else:
                self.strategy.load_gradients(model, JoinedGradients(states, index, scale))
        gradients = self.gradients
        gradients.sync_gradients, gradients.has_unweighted_grads = own["sync_gradients"], weighting is None
        gradients.resumed_window = own["window"]

    def _forget(self) -> None:
        gradients = self.gradients
        if self.is_open:
            for optimizer in self.prepared.optimizers:
                self.strategy.zero_grad(optimizer.optimizer, optimizer.optimizer.zero_grad)
        gradients.sync_gradients, gradients.has_unweighted_grads = True, False
        gradients.abandoned_window, gradients.resumed_window = "", None
        for group in gradients.loss_weighting.groups if gradients.loss_weighting is not None else ():
            group.reset()

    def _load_weighting(
        self, states: Sequence[Mapping[str, Any]], own: Mapping[str, Any], is_same: bool
    ) -> float:
        """Restore the counted items; return the factor for gradients that other ranks have saved."""
        gradients, saved = self.gradients, own["weighting"]
        if gradients.loss_weighting is None:
            gradients.loss_weighting = LossWeighting(gradients, self.strategy, self.runtime.precision)
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
    return piece.values, piece.shape, piece.offsets, piece.ranks
