"""Forwards and backwards that alternate: the loss is known where the last layer is, chunk by chunk.

The gradients of a call are kept apart. The loss that the call gives is a node of the graph: its backward adds
them to ``.grad``, multiplied by what arrives there, so that a loss may be scaled, divided or added up.
"""

# torch's schedules are partly untyped: what is unknown is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

from accelerate.core.errors import PrepareError
from accelerate.strategy.parallelism import pipeline_grads as grads
from accelerate.strategy.parallelism.pipeline_batch import Batch, Plan
from accelerate.strategy.parallelism.pipeline_plan import Meta
from accelerate.strategy.parallelism.pipeline_run import Worker, carrier

_IGNORED = -100  # the label that torch's losses leave out


class Losses:
    """One call of the model with its loss, forward and backward.

    Args:
        conductor: of the model.
        plan: of calls of this shape.
        batch: of all stages.
    """

    def __init__(self, conductor: Any, plan: Plan, batch: Batch) -> None:
        self.conductor, self.plan, self.batch = conductor, plan, batch
        self.options: Any = conductor.options
        self.output: Any = None
        self.value = torch.zeros(())

    def run(self) -> Any:
        """The result of the call, with the loss alone in it.

        Raises:
            PrepareError: the batch is not divisible, or its loss is no mean over equal chunks.
        """
        conductor, batch, chunks = self.conductor, self.batch, self.options.num_microbatches
        if batch.size % chunks:
            raise PrepareError(
                f"a batch of {batch.size} samples is not divisible by {chunks} micro-batches",
                why="the loss is the mean of those of the micro-batches, which must be equally long",
                fix="choose another batch size or num_microbatches, let the loader drop_last, or use "
                "schedule='gpipe', which takes the loss over the whole batch",
            )
        if (
            torch.is_autocast_enabled(conductor.device.type)
            and torch.get_autocast_dtype(conductor.device.type) == torch.float16
        ):
            raise PrepareError(
                f"schedule={self.options.schedule!r} does not go with fp16",
                why="its backward runs before anybody can scale the loss, and small gradients would vanish",
                fix="use bf16, or schedule='gpipe'",
            )
        self.shares = self._shares()
        trained = grads.trained(conductor.model)
        kept = self._kept(trained)
        value = self.value.to(conductor.device)
        conductor.from_the_last(value)
        anchor = torch.zeros((), requires_grad=True)
        loss = _Kept.apply(conductor, kept, value, anchor, *trained)
        return _with_loss(self.output, loss, self.options.loss_fn is not None)

    def _kept(self, trained: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(parameter, gradient) of this call alone."""
        conductor = self.conductor
        before = [p.grad for p in trained]
        for p in trained:
            p.grad = None
        try:
            with (
                _reducing(conductor.model),
                grads.summed(conductor.model, conductor.shared, conductor.group, sync=True),
            ):
                self._step()
            return [(p, p.grad) for p in trained if p.grad is not None]
        finally:
            for p, old in zip(trained, before, strict=True):
                p.grad = old

    def _step(self) -> None:
        idle = self.plan.idle
        schedule = idle.pop() if idle else self._made()
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        for stage in stages:
            stage.around = self._around
            stage.submod.run = partial(self._chunk, stage.stage_index)
        chunks = self.options.num_microbatches
        targets = {"target": torch.arange(chunks)} if self.conductor.last else {}
        schedule.step(chunk=torch.arange(chunks), return_outputs=False, **targets)
        for stage in stages:
            stage.clear_runtime_states()
        idle.append(schedule)

    def _made(self) -> Any:
        conductor, trail = self.conductor, self.plan.part
        made: list[Any] = []
        for stage in conductor.stages:
            wanted = trail.border(stage + 1) if stage < trail.stages - 1 else ()
            outputs = [trail.meta(v) for v in wanted] or [Meta((), torch.float32, True)]
            made.append(carrier(Worker(), trail, stage, outputs, conductor.device, conductor.group))
        chunks = self.options.num_microbatches
        if len(made) == 1:
            return Schedule1F1B(made[0], chunks, loss_fn=_itself, scale_grads=False)
        return ScheduleInterleaved1F1B(made, chunks, loss_fn=_itself, scale_grads=False)

    @contextmanager
    def _around(self, chunk: int, stage: int, last: bool) -> Iterator[None]:
        reducing = grads.backward_of_a_part(self.conductor.model, last=last, sync=True)
        with self.conductor.timed("backward", stage, chunk), reducing:
            yield

    def _chunk(self, stage: int, chunk: int, received: tuple[torch.Tensor, ...]) -> Any:
        conductor, trail = self.conductor, self.plan.part
        last = stage == trail.stages - 1
        wanted = () if last else trail.border(stage + 1)
        args = self.batch.chunk(chunk)
        with conductor.timed("forward", stage, chunk):
            output, sent = conductor.run(trail, stage, args, received, wanted, result=last)
            self.output = output
            if not last:
                return sent
            loss = self._loss(output, chunk) * self.shares[chunk]
        self.value = self.value.to(loss.device) + loss.detach()
        return loss.float()

    def _loss(self, output: Any, chunk: int) -> torch.Tensor:
        if self.options.loss_fn is not None:
            return self.options.loss_fn(output, self.batch.chunk(chunk)[2]["target"])
        return _loss_in(output)

    def _shares(self) -> list[float]:
        """The share of each chunk in the loss.

        Raises:
            PrepareError: labels say that chunks count differently, and nobody said how.
        """
        chunks = self.options.num_microbatches
        counted = [self.batch.chunk(chunk) for chunk in range(chunks)]
        if self.options.items is not None:
            items = [float(self.options.items(*args, **kwargs, **goal)) for args, kwargs, goal in counted]
            return [item / sum(items) for item in items]
        for name in ("labels", "target"):
            labels = [{**kwargs, **goal}.get(name) for _, kwargs, goal in counted]
            if all(isinstance(found, torch.Tensor) and not found.is_floating_point() for found in labels):
                _check_labels(labels, self.options.schedule)
        return [1.0 / chunks] * chunks


def check_loss(options: Any, output: Any, batch: Batch) -> None:
    """Refuses a model that gives no loss, where nothing else makes one.

    Args:
        options: a ``PipelineParallelConfig``.
        output: what the model gives, without values.
        batch: that of the call.

    Raises:
        PrepareError: there is none.
    """
    found = _loss_in(output)
    inside = isinstance(found, torch.Tensor) and not found.dim()
    if not (batch.chunk(0)[2] if options.loss_fn is not None else inside):
        raise _no_loss(options.schedule, output)


def _check_labels(labels: Sequence[Any], schedule: str) -> None:
    """A model that predicts the next label leaves out the first."""
    for begin in (0, 1):
        counts = {int((found[..., begin:] != _IGNORED).sum()) for found in labels}
        if len(counts) > 1:
            raise PrepareError(
                f"the micro-batches have {min(counts)} to {max(counts)} labels that count",
                why="the mean of their mean losses is not the mean over all labels",
                fix="PipelineParallelConfig(items=...), a function of the model's arguments that counts what "
                f"the loss is the mean of; or schedule='gpipe' instead of {schedule!r}",
            )


def _itself(output: torch.Tensor, target: Any) -> torch.Tensor:
    return output


def _loss_in(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    if isinstance(output, tuple | list) and output:
        return output[0]
    return getattr(output, "loss", None)


def _no_loss(schedule: str, output: Any) -> PrepareError:
    return PrepareError(
        f"schedule={schedule!r} needs the loss inside of the model, and what the model gives, a "
        f"{type(output).__name__}, has none",
        why="backwards begin before the forward of the whole batch has ended",
        fix="give the model its labels, if it takes them; or PipelineParallelConfig(loss_fn=...) and call "
        "model(..., target=labels); or schedule='gpipe', with which the loss may be anywhere",
    )


def _with_loss(output: Any, loss: torch.Tensor, alone: bool) -> Any:
    """What the user gets: the loss, in the form in which the model gives it."""
    if alone or isinstance(output, torch.Tensor):
        return loss
    if isinstance(output, Mapping):
        make: Any = type(output)
        return make(loss=loss)
    if isinstance(output, tuple | list):
        return type(output)([loss])
    for name, value in list(vars(output).items()):
        if isinstance(value, torch.Tensor):
            setattr(output, name, None)
    output.loss = loss
    return output


@contextmanager
def _reducing(model: Any) -> Iterator[None]:
    """Sharded gradients are reduced in every call: what is kept back could not be multiplied later."""
    quiet = not grads.reduces(model)
    if quiet:
        model.set_requires_gradient_sync(True)
    try:
        yield
    finally:
        if quiet:
            model.set_requires_gradient_sync(False)


class _Kept(torch.autograd.Function):
    """A loss whose gradients are there already."""

    @staticmethod
    def forward(
        ctx: Any, conductor: Any, kept: Any, value: torch.Tensor, *rest: torch.Tensor
    ) -> torch.Tensor:
        ctx.conductor, ctx.kept, ctx.rest = conductor, kept, len(rest)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        if ctx.kept is None:
            raise PrepareError(
                "a second backward through one loss of a pipeline",
                why="its gradients were added by the first one",
                fix="call the model again, or multiply the loss",
            )
        with torch.no_grad():
            for parameter, grad in ctx.kept:
                grad = (
                    grad.zero_() if ctx.conductor.zeroed else grad.mul_(gradient.to(grad.device, grad.dtype))
                )
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        ctx.kept = None
        return (None, None, None, *[None] * ctx.rest)
