"""Gradients weighted by items: the mean over all tokens of a window, on all processes, exactly.

A micro-batch of k items with the mean loss l adds k * l to the sum that is wanted; the gradient of that sum,
divided by the number of all items, is the gradient of one big batch. Backward runs on ``l * k / reference``.
When the gradients are complete, the items of all processes are added up, and the gradients are scaled in
place by ``processes * reference / items``, since reducing them took the mean over processes. The reference is
a power of two near the items of a window, so gradients have their usual size all the time, which a scaled
float16 loss needs, and dividing by it loses no bit. It is the same on all processes and during a window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.facade.gradient_state import GradientState
from accelerate.precision.base import Precision
from accelerate.strategy.base import EngineStrategy, Strategy
from accelerate.strategy.protocol.gradient_sync import ZeroBackward
from accelerate.world import collective

_GradVersion = tuple[torch.Tensor, int]


@dataclass
class LossWeightedParameterGroup:
    """The parameters weighted together: of a model, of models that share some, or of no prepared model.

    Attributes:
        models: the prepared models.
        parameters: all of theirs, each once.
        strategy: gives their gradients.
        items: number of items of this rank since the gradients were cleared.
        factor: the factor by which complete gradients were scaled; None while they are not complete.
        is_weighted: a weighted backward has changed it since its gradients were cleared.
        clear_items: of the items, those whose complete gradients this rank has not, or not any more; None
            while it has them. A rank may hold no element of the parameters, so all ranks together tell.
    """

    models: list[nn.Module]
    parameters: dict[torch.Tensor, None]
    strategy: Strategy
    items: float = 0.0
    factor: float | None = None
    is_weighted: bool = False
    clear_items: float | None = None

    def is_trained(self) -> bool:
        """Return whether any parameter asks for a gradient now."""
        return any(parameter.requires_grad for parameter in self.parameters)

    def grad_versions(self) -> list[_GradVersion]:
        """Return the gradients with their versions, to tell later whether a backward changed them."""
        return [(grad, grad._version) for grad in self.strategy.gradients(self.parameters)]

    def has_changed(self, before: Sequence[_GradVersion]) -> bool:
        """Return whether a gradient has changed since ``before``."""
        after = self.grad_versions()
        return len(before) != len(after) or any(
            version != was or not (grad is old or _is_same_view(grad, old))
            for (old, was), (grad, version) in zip(before, after, strict=True)
        )

    def is_clear(self) -> bool:
        """Return whether there is no gradient, or none but zeros."""
        if isinstance(self.strategy, EngineStrategy):
            return not self.strategy.has_nonzero_grads(self.models, self.parameters)
        return not any(bool(grad.any()) for grad in self.strategy.gradients(self.parameters))

    def scale_grads(self, factor: float) -> None:
        """Multiply the gradients, in place."""
        if factor == 1.0:
            return
        if isinstance(self.strategy, EngineStrategy) and self.strategy.rescale_gradients(self.models, factor):
            return
        scale_gradients(self.strategy.gradients(self.parameters), factor)

    def reset(self) -> None:
        """Forget items and factor: the gradients were used or cleared."""
        self.items, self.factor, self.is_weighted, self.clear_items = 0.0, None, False, None


def scale_gradients(gradients: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply ``gradients`` by ``factor``, in place; any types, devices and layouts."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for grad in gradients:
        if grad.layout is torch.strided:
            kinds.setdefault((grad.device, grad.dtype, type(grad)), []).append(grad)
        else:
            grad.mul_(factor)
    for grads in kinds.values():
        torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]


class LossWeighting:
    """Weights the losses of one ``Accelerator`` by their numbers of items."""

    def __init__(self, gradients: GradientState, strategy: Strategy, precision: Precision) -> None:
        self.gradients, self.strategy, self.precision = gradients, strategy, precision
        # The number of ranks over which the reduction of a gradient takes the mean.
        self.average_size = strategy.world.size // strategy.model_parallel_size
        self.groups: list[LossWeightedParameterGroup] = []
        self.reference, self.next_reference = 0.0, 0.0
        self._prepared: list[Any] = []

    def update_prepared(self, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
        """Update the groups from the prepared objects; called before every backward."""
        prepared = [*models, *optimizers]
        # By identity: others, of the same number, follow them after free_memory().
        if list(map(id, prepared)) != list(map(id, self._prepared)):
            self._prepared = prepared
            counted = {p: group for group in self.groups if group.is_weighted for p in group.parameters}
            self.groups = _make_groups(models, optimizers, self.strategy)
            for group in self.groups:
                old = next((counted[p] for p in group.parameters if p in counted), None)
                if old is not None:
                    group.items, group.factor, group.is_weighted = old.items, old.factor, True
                    group.clear_items = old.clear_items

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the present groups and their counts."""
        kept = {**vars(self), "groups": [replace(group) for group in self.groups]}
        return lambda: vars(self).update(kept)

    def reset_used(self, optimizer: torch.optim.Optimizer) -> None:
        """Reset the groups of an optimizer, whose gradients were used or cleared."""
        for group in self._weighted_groups(optimizer):
            group.reset()

    def check_complete(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step with gradients that are weighted and not complete.

        Raises:
            PrepareError: they are.
        """
        if any(group.factor is None for group in self._weighted_groups(optimizer)):
            raise PrepareError(
                "optimizer.step() with gradients that are weighted by items and not complete",
                why="the last micro-batch of the window ran no backward through these parameters, so "
                "they were neither reduced over the ranks nor divided by the items",
                fix="call accelerator.backward(loss, num_items=...) for them in every micro-batch, with "
                "0 items if there is nothing to learn from",
            )

    def _weighted_groups(self, optimizer: torch.optim.Optimizer) -> list[LossWeightedParameterGroup]:
        """Return the groups with weighted gradients of parameters that an optimizer changes."""
        params = set(_optimizer_params(self.strategy, optimizer))
        return [
            group for group in self.groups if group.is_weighted and not params.isdisjoint(group.parameters)
        ]

    def refuse_plain(self) -> None:
        """Refuse a backward without items while counted gradients wait for their step.

        Raises:
            PrepareError: there are some.
        """
        if any(group.is_weighted and not group.is_clear() for group in self.groups):
            raise _mixed_weighting_error()

    def backward(self, loss: torch.Tensor, num_items: Any, micro_batches: int, **kwargs: Any) -> None:
        """Run the weighted backward; see ``Accelerator.backward``.

        Args:
            loss: mean over the items, not scaled by the precision.
            num_items: the number of items of this rank that it is the mean of.
            micro_batches: the expected number of such calls in a window.
            kwargs: arguments of ``loss.backward``.
        """
        items = _check_num_items(num_items)
        if self.strategy.local_training and self.average_size > 1:
            raise PrepareError(
                "backward(num_items=...) during local training",
                why="gradients are not all-reduced there, so there is no mean over the items of all ranks",
                fix="leave num_items out inside of LocalSGD and DiLoCo",
            )
        trained_groups = [group for group in self.groups if group.is_trained()]
        if not trained_groups:
            raise PrepareError(
                "backward(num_items=...) before anything was prepared",
                why="the gradients of prepared models are scaled by the items of all processes",
                fix="model, optimizer = accelerator.prepare(model, optimizer)",
            )
        if self.gradients.has_unweighted_grads and not all(group.is_clear() for group in trained_groups):
            raise _mixed_weighting_error()
        self._reset_cleared()
        self._set_reference(items, micro_batches)
        finished = [group for group in self.groups if group.factor is not None]
        for group in finished:
            group.scale_grads(1.0 / (group.factor or 1.0))
        changed = self._run_backward(trained_groups, loss, items, kwargs)
        for group in changed:
            group.items, group.is_weighted = group.items + items, True
        complete = [group for group in changed if self._is_synchronizing(group)]
        for group in finished:
            if group not in complete:
                group.scale_grads(group.factor or 1.0)
        if complete:
            self._divide_by_items(complete)

    def _reset_cleared(self) -> None:
        """Reset the groups whose gradients were cleared without an optimizer, where one rank can tell."""
        for group in self.groups:
            if group.is_weighted and group.factor is not None and group.is_clear():
                if not self.strategy.shards_params:
                    group.reset()
                elif group.clear_items is None:
                    group.clear_items = group.items

    def _set_reference(self, items: float, micro_batches: int) -> None:
        """Set the reference of a window at its first backward; the very first one all-reduces it."""
        if any(group.is_weighted for group in self.groups):
            return
        if self.next_reference == 0.0:
            self.next_reference = _nearest_power_of_two(
                self._sum_over_ranks([items])[0] / self.average_size * micro_batches
            )
        self.reference = self.next_reference

    def _run_backward(
        self,
        trained_groups: list[LossWeightedParameterGroup],
        loss: torch.Tensor,
        items: float,
        kwargs: dict[str, Any],
    ) -> list[LossWeightedParameterGroup]:
        """Run the backward; return the groups whose gradients it changed."""
        if items == 0:
            return self._run_zero_backward(trained_groups, loss)
        is_single, weighted_loss = len(trained_groups) == 1, loss * (items / self.reference)
        sync = self.gradients.sync_gradients
        if self.strategy.owns_step:
            # DeepSpeed's gradients are not visible here; the graph, which a backward frees, tells.
            params_in_graph = set() if is_single else self.strategy.reached_params(loss)
            self.strategy.backward(weighted_loss, sync_gradients=sync, **kwargs)
            if is_single:
                return trained_groups
            return [group for group in trained_groups if not params_in_graph.isdisjoint(group.parameters)]
        # A rank that holds no element of a sharded parameter has no gradient of it that changes.
        is_graph_whole = self.strategy.shards_params and not is_single and "inputs" not in kwargs
        sharded_params = self.strategy.reached_params(loss) if is_graph_whole else set()
        reached_params = None if "inputs" in kwargs else self.strategy.reached_params
        scaled_loss = self.precision.scale(weighted_loss, reached_params)  # may change gradients, too
        before = [] if is_single else [group.grad_versions() for group in trained_groups]
        self.strategy.backward(scaled_loss, sync_gradients=sync, **kwargs)
        if is_single:
            return trained_groups
        return [
            group
            for group, old in zip(trained_groups, before, strict=True)
            if group.has_changed(old) or not sharded_params.isdisjoint(group.parameters)
        ]

    def _run_zero_backward(
        self, trained_groups: list[LossWeightedParameterGroup], loss: torch.Tensor
    ) -> list[LossWeightedParameterGroup]:
        """Run a backward that adds zero: the loss, a mean over nothing, is not used.

        It matters only where gradients are reduced: other ranks wait for this one's.
        """
        params_in_graph = self.strategy.reached_params(loss)
        changed = [group for group in trained_groups if not params_in_graph.isdisjoint(group.parameters)]
        changed = changed or (trained_groups if len(trained_groups) == 1 else [])
        if not changed:
            raise PrepareError(
                "backward(loss, num_items=0) of a loss that belongs to no prepared model",
                why="there are several models, and the graph of the loss does not say which it is for",
                fix="compute the loss from the model's outputs also when there are no items",
            )
        if not self.strategy.owns_step:
            # A scaler that has never seen a loss cannot unscale.
            self.precision.scale(loss.detach().new_zeros(()))
        # Other ranks wait for this one where gradients are reduced, with sync_each_batch in every
        # micro-batch; and always where the backward all-gathers parameters.
        all_wait, reduces = self.strategy.shards_params, self.strategy.reduces_gradients
        awaited_groups = [group for group in changed if all_wait or all(map(reduces, group.models))]
        if awaited_groups:
            models = [model for group in awaited_groups for model in group.models]
            trained = [p for group in awaited_groups for p in group.parameters if p.requires_grad]
            sync = self.gradients.sync_gradients
            self.strategy.backward_zero(ZeroBackward(loss, models, trained, params_in_graph, sync))
        return changed

    def _is_synchronizing(self, group: LossWeightedParameterGroup) -> bool:
        return self.gradients.sync_gradients and all(map(self.strategy.reduces_gradients, group.models))

    def _divide_by_items(self, groups: list[LossWeightedParameterGroup]) -> None:
        """Divide complete gradients by the number of items of all ranks."""
        if self.strategy.shards_params:
            self._drop_cleared_items(groups)
        totals = self._sum_over_ranks([group.items for group in groups])
        for group, total in zip(groups, totals, strict=True):
            group.factor = self.average_size * self.reference / total if total else 1.0
            group.scale_grads(group.factor)
        if any(totals):
            self.next_reference = _nearest_power_of_two(max(totals) / self.average_size)

    def _drop_cleared_items(self, groups: list[LossWeightedParameterGroup]) -> None:
        """Take out the items of earlier complete gradients that no rank has any more."""
        earlier = [group for group in groups if group.factor is not None]
        if not earlier:
            return
        kept = self._sum_over_ranks([float(group.clear_items is None) for group in earlier])
        for group, ranks in zip(earlier, kept, strict=True):
            group.items -= 0.0 if ranks else group.clear_items or 0.0
            group.clear_items = None

    def _sum_over_ranks(self, counts: list[float]) -> list[float]:
        if self.average_size == 1:
            return counts
        # Counts of the host go with one control message; on the device they would wait for the backward.
        local_counts = torch.tensor(counts, dtype=torch.float64, device="cpu")
        totals = collective.reduce(local_counts, "sum").tolist()
        # Model-parallel ranks have the same loss and have counted the same items.
        return [total / self.strategy.model_parallel_size for total in totals]


def _is_same_view(grad: torch.Tensor, old: torch.Tensor) -> bool:
    """Return whether both are views of the same values, as FSDP1 makes of a flat gradient at each call."""
    return type(grad) is type(old) is torch.Tensor and grad.is_set_to(old)


def _nearest_power_of_two(items: float) -> float:
    """Return the power of two nearest to ``items``; 1 for none."""
    return 2.0 ** round(math.log2(items)) if items > 0 else 1.0


def _check_num_items(num_items: Any) -> float:
    if isinstance(num_items, torch.Tensor) and num_items.numel() != 1:
        raise PrepareError(f"num_items is a tensor of {num_items.numel()} elements", fix="num_items.sum()")
    try:
        items = float(num_items)
    except (TypeError, ValueError):
        raise PrepareError(
            f"num_items is a {type(num_items).__name__}", fix="give a number, or a tensor of one"
        ) from None
    if not 0 <= items < math.inf:
        raise PrepareError(f"num_items is {items}", fix="give how many items the loss is the mean of")
    return items


def _mixed_weighting_error() -> PrepareError:
    return PrepareError(
        "backward was called with num_items and without it for gradients of one optimizer step",
        why="some gradients would be divided by the items of all processes and others by the micro-batches",
        fix="give num_items in every call, or in none, until optimizer.step() or zero_grad()",
    )


def _optimizer_params(strategy: Strategy, optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """Return the parameters of prepared models that an optimizer changes."""
    if isinstance(strategy, EngineStrategy):
        return strategy.optimizer_params(optimizer)
    return (p for group in optimizer.param_groups for p in group["params"])


def _make_groups(
    models: Sequence[nn.Module], optimizers: Sequence[Any], strategy: Strategy
) -> list[LossWeightedParameterGroup]:
    """Return a group for each model, one for models that share parameters, and one for other parameters."""
    groups: list[LossWeightedParameterGroup] = []
    for model in models:
        new = LossWeightedParameterGroup([model], dict.fromkeys(strategy.parameters(model)), strategy)
        for group in [p for p in groups if not p.parameters.keys().isdisjoint(new.parameters)]:
            groups.remove(group)
            new = LossWeightedParameterGroup(
                group.models + new.models, {**group.parameters, **new.parameters}, strategy
            )
        groups.append(new)
    params = {p: None for o in optimizers for p in _optimizer_params(strategy, getattr(o, "optimizer", o))}
    rest = {p: None for p in params if not any(p in group.parameters for group in groups)}
    return [*groups, *([LossWeightedParameterGroup([], rest, strategy)] if rest else [])]
