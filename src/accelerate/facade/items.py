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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate.core.errors import PrepareError
from accelerate.facade.gradient import GradientState
from accelerate.precision.base import Precision
from accelerate.strategy.base import Strategy
from accelerate.world import collective

_Mark = tuple[torch.Tensor, int]


@dataclass
class Part:
    """What is counted as one: a model, or models that share parameters, or parameters of no prepared model.

    Attributes:
        models: the prepared models.
        parameters: all of theirs, each once.
        strategy: knows their gradients.
        items: of this process, since the gradients were cleared.
        factor: what the gradients were scaled by when they were complete; None while they are not.
        counted: a weighted backward has reached it since its gradients were cleared.
    """

    models: list[nn.Module]
    parameters: dict[torch.Tensor, None]
    strategy: Strategy
    items: float = 0.0
    factor: float | None = None
    counted: bool = False

    def trains(self) -> bool:
        """Whether any parameter asks for a gradient now."""
        return any(parameter.requires_grad for parameter in self.parameters)

    def marks(self) -> list[_Mark]:
        """The gradients as they are; compared later, they tell whether a backward has reached this part."""
        return [(grad, grad._version) for grad in self.strategy.gradients(self.parameters)]

    def reached(self, before: Sequence[_Mark]) -> bool:
        """Whether a gradient has changed since ``before``."""
        after = self.marks()
        return len(before) != len(after) or any(
            grad is not old or version != was
            for (old, was), (grad, version) in zip(before, after, strict=True)
        )

    def clear(self) -> bool:
        """Whether there is no gradient, or none but zeros."""
        return not self.strategy.holds(self.models, self.parameters)

    def scale(self, factor: float) -> None:
        """Multiplies the gradients, in place."""
        if factor != 1.0 and not self.strategy.rescale(self.models, factor):
            scale_gradients(self.strategy.gradients(self.parameters), factor)

    def reset(self) -> None:
        """The gradients were used or cleared."""
        self.items, self.factor, self.counted = 0.0, None, False


def scale_gradients(gradients: Iterable[torch.Tensor], factor: float) -> None:
    """Multiplies ``gradients`` by ``factor``, in place; any types, devices and layouts."""
    kinds: dict[Any, list[torch.Tensor]] = {}
    for grad in gradients:
        if grad.layout is torch.strided:
            kinds.setdefault((grad.device, grad.dtype, type(grad)), []).append(grad)
        else:
            grad.mul_(factor)
    for grads in kinds.values():
        torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]


class Items:
    """Counts the items of one ``Accelerator``'s windows."""

    def __init__(self, gradients: GradientState, strategy: Strategy, precision: Precision) -> None:
        self.gradients, self.strategy, self.precision = gradients, strategy, precision
        self.parts: list[Part] = []
        self.reference, self.next_reference = 0.0, 0.0
        self._known: tuple[int, int] = (0, 0)

    def know(self, models: Sequence[nn.Module], optimizers: Sequence[Any]) -> None:
        """Tells what is prepared; before every backward."""
        if self._known != (len(models), len(optimizers)):
            self._known = (len(models), len(optimizers))
            counted = {p: part for part in self.parts if part.counted for p in part.parameters}
            self.parts = _parts(models, optimizers, self.strategy)
            for part in self.parts:
                old = next((counted[p] for p in part.parameters if p in counted), None)
                if old is not None:
                    part.items, part.factor, part.counted = old.items, old.factor, True

    def used(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients of an optimizer were used, or cleared.

        Raises:
            PrepareError: items were counted for them, and no backward completed them.
        """
        held = set(self.strategy.held(optimizer))
        for part in self.parts:
            if part.counted and not held.isdisjoint(part.parameters):
                part.reset()

    def check_complete(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses a step with gradients that are weighted and not complete.

        Raises:
            PrepareError: they are.
        """
        held = set(self.strategy.held(optimizer))
        for part in self.parts:
            if part.counted and part.factor is None and not held.isdisjoint(part.parameters):
                raise PrepareError(
                    "optimizer.step() with gradients that are weighted by items and not complete",
                    why="the last micro-batch of the window ran no backward through these parameters, so "
                    "they were neither reduced over the processes nor divided by the items",
                    fix="call accelerator.backward(loss, num_items=...) for them in every micro-batch, with "
                    "0 items if there is nothing to learn from",
                )

    def refuse_plain(self) -> None:
        """Refuses a backward without items while counted gradients wait for their step.

        Raises:
            PrepareError: there are some.
        """
        if any(part.counted and not part.clear() for part in self.parts):
            raise _mixed()

    def backward(self, loss: torch.Tensor, num_items: Any, micro_batches: int, **kwargs: Any) -> None:
        """The weighted backward; see ``Accelerator.backward``.

        Args:
            loss: mean over the items, not scaled by the precision.
            num_items: how many items of this process it is the mean of.
            micro_batches: how many such calls a window is expected to have.
            kwargs: arguments of ``loss.backward``.
        """
        items = _checked(num_items)
        if self.strategy.trains_apart and self.strategy.replicas > 1:
            raise PrepareError(
                "backward(num_items=...) while the processes train apart",
                why="gradients are not reduced there, so there is no mean over the items of all processes",
                fix="leave num_items out inside of LocalSGD and DiLoCo",
            )
        live = [part for part in self.parts if part.trains()]
        if not live:
            raise PrepareError(
                "backward(num_items=...) before anything was prepared",
                why="the gradients of prepared models are scaled by the items of all processes",
                fix="model, optimizer = accelerator.prepare(model, optimizer)",
            )
        if self.gradients.uncounted and not all(part.clear() for part in live):
            raise _mixed()
        self._reopen()
        self._refer(items, micro_batches)
        finished = [part for part in self.parts if part.factor is not None]
        for part in finished:
            part.scale(1.0 / (part.factor or 1.0))
        reached = self._run(live, loss, items, kwargs)
        for part in reached:
            part.items, part.counted = part.items + items, True
        complete = [part for part in reached if self._synchronises(part)]
        for part in finished:
            if part not in complete:
                part.scale(part.factor or 1.0)
        if complete:
            self._finish(complete)

    def _reopen(self) -> None:
        """Parts whose gradients were cleared by somebody else begin again."""
        for part in self.parts:
            if part.counted and part.factor is not None and part.clear():
                part.reset()

    def _refer(self, items: float, micro_batches: int) -> None:
        """Settles the reference of a window at its first backward; the very first one asks all processes."""
        if any(part.counted for part in self.parts):
            return
        if self.next_reference == 0.0:
            self.next_reference = _near(self._sum([items])[0] / self.strategy.replicas * micro_batches)
        self.reference = self.next_reference

    def _run(self, live: list[Part], loss: torch.Tensor, items: float, kwargs: dict[str, Any]) -> list[Part]:
        """Runs the backward; the parts that it has reached."""
        if items == 0:
            return self._run_empty(live, loss)
        alone, share = len(live) == 1, loss * (items / self.reference)
        if self.strategy.owns_step:
            # Its gradients are not seen here; the graph, which a backward uses up, tells.
            below = set() if alone else self.strategy.reached(loss)
            self.strategy.backward(share, **kwargs)
            return live if alone else [part for part in live if not below.isdisjoint(part.parameters)]
        before = [] if alone else [part.marks() for part in live]
        self.strategy.backward(self.precision.scale(share), **kwargs)
        return live if alone else [p for p, marks in zip(live, before, strict=True) if p.reached(marks)]

    def _run_empty(self, live: list[Part], loss: torch.Tensor) -> list[Part]:
        """A backward that adds zero: the loss, a mean over nothing, is not touched.

        Only where gradients synchronise there is something to do: other processes wait for this one's.
        """
        below = self.strategy.reached(loss)
        reached = [part for part in live if not below.isdisjoint(part.parameters)]
        reached = reached or (live if len(live) == 1 else [])
        if not reached:
            raise PrepareError(
                "backward(loss, num_items=0) of a loss that belongs to no prepared model",
                why="there are several models, and the graph of the loss does not say which it is for",
                fix="compute the loss from the model's outputs also when there are no items",
            )
        if not self.strategy.owns_precision:
            # A scaler that has never seen a loss cannot unscale.
            self.precision.scale(loss.detach().new_zeros(()))
        # Where parameters are gathered in the backward, others wait for it in every micro-batch.
        waited = [part for part in reached if self.strategy.shards or self._synchronises(part)]
        if waited:
            models = [model for part in waited for model in part.models]
            trained = [p for part in waited for p in part.parameters if p.requires_grad]
            self.strategy.backward_zero(models, trained, below, loss)
        return reached

    def _synchronises(self, part: Part) -> bool:
        return self.gradients.sync_gradients and all(map(self.strategy.synchronises, part.models))

    def _finish(self, parts: list[Part]) -> None:
        """Divides complete gradients by the items of all processes."""
        totals = self._sum([part.items for part in parts])
        for part, total in zip(parts, totals, strict=True):
            part.factor = self.strategy.replicas * self.reference / total if total else 1.0
            part.scale(part.factor)
        if any(totals):
            self.next_reference = _near(max(totals) / self.strategy.replicas)

    def _sum(self, counts: list[float]) -> list[float]:
        if self.strategy.replicas == 1:
            return counts
        # Every device adds up float32: whole numbers are exact to 16 million, and good to 7 digits beyond.
        mine = torch.tensor(counts, dtype=torch.float32, device=self.strategy.world.device)
        # Processes with the very same loss have counted the same items.
        return [total / self.strategy.peers for total in collective.reduce(mine, "sum").tolist()]


def _near(items: float) -> float:
    """The power of two nearest to ``items``; 1 for none."""
    return 2.0 ** round(math.log2(items)) if items > 0 else 1.0


def _checked(num_items: Any) -> float:
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


def _mixed() -> PrepareError:
    return PrepareError(
        "backward was called with num_items and without it for gradients of one optimizer step",
        why="some gradients would be divided by the items of all processes and others by the micro-batches",
        fix="give num_items in every call, or in none, until optimizer.step() or zero_grad()",
    )


def _parts(models: Sequence[nn.Module], optimizers: Sequence[Any], strategy: Strategy) -> list[Part]:
    """The models, those that share parameters as one; and what else is optimized."""
    parts: list[Part] = []
    for model in models:
        new = Part([model], dict.fromkeys(strategy.parameters(model)), strategy)
        for part in [p for p in parts if not p.parameters.keys().isdisjoint(new.parameters)]:
            parts.remove(part)
            new = Part(part.models + new.models, {**part.parameters, **new.parameters}, strategy)
        parts.append(new)
    held = {p: None for o in optimizers for p in strategy.held(getattr(o, "optimizer", o))}
    rest = {p: None for p in held if not any(p in part.parameters for part in parts)}
    return [*parts, *([Part([], rest, strategy)] if rest else [])]
