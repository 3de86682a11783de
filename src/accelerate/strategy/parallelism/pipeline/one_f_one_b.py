"""The 1F1B schedules of one call: the loss of each micro-batch is computed in the last stage.

The gradients of a call are kept until the backward of its loss, an autograd node that adds them to ``.grad``,
multiplied by the incoming gradient, so that a loss may be scaled, divided or summed.
"""

# torch's schedules are partly untyped: what is unknown is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

from accelerate.core.errors import PrepareError
from accelerate.core.torch_internals import accepts
from accelerate.strategy.parallelism.pipeline.forward_trace import TensorMeta
from accelerate.strategy.parallelism.pipeline.micro_batches import PipelineBatch, PipelineExecutionPlan
from accelerate.strategy.parallelism.pipeline.stage import (
    PipelineStageModule,
    make_stage,
    sum_shared_grads,
    trainable_params,
)
from accelerate.strategy.sharding.grads import partial_backward, reduces_gradients

_IGNORED = -100  # the label that torch's losses ignore


class OneFOneBCall:
    """One call of a pipelined model in a 1F1B schedule: forward, loss and backward.

    Args:
        runner: the runner of the model.
        plan: the plan of calls of this shape.
        batch: the batch, equal on all stages.
    """

    def __init__(self, runner: Any, plan: PipelineExecutionPlan, batch: PipelineBatch) -> None:
        self.runner, self.plan, self.batch = runner, plan, batch
        self.options: Any = runner.options
        self.output: Any = None
        self.value = torch.zeros(())

    def run(self) -> Any:
        """Run the call and return its output, which holds the loss only.

        Raises:
            PrepareError: the batch is not divisible, or its loss is no mean over equal chunks.
        """
        runner, batch, chunks = self.runner, self.batch, self.options.num_microbatches
        if batch.size % chunks:
            raise PrepareError(
                f"a batch of {batch.size} samples is not divisible by {chunks} micro-batches",
                why="the loss is the mean of those of the micro-batches, which must be equally long",
                fix="choose another batch size or num_microbatches, let the loader drop_last, or use "
                "schedule='gpipe', which takes the loss over the whole batch",
            )
        if (
            torch.is_autocast_enabled(runner.device.type)
            and torch.get_autocast_dtype(runner.device.type) == torch.float16
        ):
            raise PrepareError(
                f"schedule={self.options.schedule!r} does not go with fp16",
                why="its backward runs before anybody can scale the loss, and small gradients would vanish",
                fix="use bf16, or schedule='gpipe'",
            )
        self.loss_weights = self._compute_loss_weights()
        params = trainable_params(runner.model)
        computed_grads = self._compute_grads(params)
        value = self.value.to(runner.device)
        runner.broadcast_from_last(value)
        anchor = torch.zeros((), requires_grad=True)
        loss = _LossWithGrads.apply(runner, computed_grads, value, anchor, *params)
        return _loss_output(self.output, loss, self.options.loss_fn is not None)

    def _compute_grads(self, params: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Run the schedule and return (parameter, gradient) pairs of this call alone."""
        runner = self.runner
        before = [p.grad for p in params]
        for p in params:
            p.grad = None
        try:
            with (
                _force_grad_sync(runner.model),
                sum_shared_grads(runner.model, runner.shared, runner.group, sync=True),
            ):
                self._run_schedule()
            return [(p, p.grad) for p in params if p.grad is not None]
        finally:
            for p, old in zip(params, before, strict=True):
                p.grad = old

    def _run_schedule(self) -> None:
        idle = self.plan.idle_schedules
        schedule = idle.pop() if idle else self._make_schedule()
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        for stage in stages:
            stage.backward_context = self._backward_context
            stage.submod.run_chunk = partial(self._run_chunk, stage.stage_index)
        chunks = self.options.num_microbatches
        targets = {"target": torch.arange(chunks, device="cpu")} if self.runner.has_last_stage else {}
        options = {"return_outputs": False} if accepts(type(schedule).step, "return_outputs") else {}
        schedule.step(chunk=torch.arange(chunks, device="cpu"), **options, **targets)
        for stage in stages:
            stage.clear_runtime_states()
        idle.append(schedule)

    def _make_schedule(self) -> Any:
        runner, trace = self.runner, self.plan.chunk_trace
        pipeline_stages: list[Any] = []
        for stage in runner.stages:
            output_keys = trace.stage_inputs(stage + 1) if stage < trace.stages - 1 else ()
            outputs = [trace.meta(v) for v in output_keys] or [TensorMeta((1,), torch.float32, True)]
            pipeline_stages.append(
                make_stage(PipelineStageModule(), trace, stage, outputs, runner.device, runner.group)
            )
        options: dict[str, Any] = {"loss_fn": _identity_loss}
        if accepts(Schedule1F1B, "scale_grads"):
            options["scale_grads"] = False  # as in older versions, which never scaled
        chunks = self.options.num_microbatches
        if len(pipeline_stages) == 1:
            return Schedule1F1B(pipeline_stages[0], chunks, **options)
        return ScheduleInterleaved1F1B(pipeline_stages, chunks, **options)

    @contextmanager
    def _backward_context(self, chunk: int, stage: int, last: bool) -> Iterator[None]:
        reducing = partial_backward(self.runner.model, last=last, sync=True)
        with self.runner.record_timing("backward", stage, chunk), reducing:
            yield

    def _run_chunk(self, stage: int, chunk: int, received: tuple[torch.Tensor, ...]) -> Any:
        runner, trace = self.runner, self.plan.chunk_trace
        last = stage == trace.stages - 1
        output_keys = () if last else trace.stage_inputs(stage + 1)
        args = self.batch.chunk(chunk)
        with runner.record_timing("forward", stage, chunk):
            output, sent = runner.run_chunk(trace, stage, args, received, output_keys, result=last)
            self.output = output
            if not last:
                return sent
            loss_fn = self.options.loss_fn
            loss = _extract_loss(output) if loss_fn is None else loss_fn(output, args[2]["target"])
            weight = self.loss_weights[chunk]
            loss = loss * weight
        if weight:  # a mean of nothing is no number
            self.value = self.value.to(loss.device) + loss.detach().float()  # as other stages expect
        return torch.stack([loss.float()])  # torch 2.6 concatenates them

    def _compute_loss_weights(self) -> list[float]:
        """Return the weight of each micro-batch in the loss.

        Raises:
            PrepareError: micro-batches have different numbers of labels, and ``items`` is not given.
        """
        chunks = self.options.num_microbatches
        counted = [self.batch.chunk(chunk) for chunk in range(chunks)]
        if self.options.items is not None:
            counts = [self.options.items(*args, **kwargs, **goal) for args, kwargs, goal in counted]
            items = torch.stack([torch.as_tensor(count).reshape(()) for count in counts]).tolist()
            return [item / sum(items) if item else 0.0 for item in items]
        for name in ("labels", "target"):
            labels = [{**kwargs, **goal}.get(name) for _, kwargs, goal in counted]
            if all(isinstance(label, torch.Tensor) and not label.is_floating_point() for label in labels):
                _check_labels(labels, self.options.schedule)
        return [1.0 / chunks] * chunks


def check_loss(options: Any, output: Any, batch: PipelineBatch) -> None:
    """Refuse a model that returns no loss, where no ``loss_fn`` computes one.

    Args:
        options: a ``PipelineParallelConfig``.
        output: the model's output, of fake tensors.
        batch: the batch of the call.

    Raises:
        PrepareError: there is none.
    """
    loss = _extract_loss(output)
    inside = isinstance(loss, torch.Tensor) and not loss.dim()
    if not (batch.chunk(0)[2] if options.loss_fn is not None else inside):
        raise PrepareError(
            f"schedule={options.schedule!r} needs the loss inside of the model, and what the model gives, a "
            f"{type(output).__name__}, has none",
            why="backwards begin before the forward of the whole batch has ended",
            fix="give the model its labels, if it takes them; or PipelineParallelConfig(loss_fn=...) and "
            "call model(..., target=labels); or schedule='gpipe', with which the loss may be anywhere",
        )


def _check_labels(labels: Sequence[Any], schedule: str) -> None:
    """Refuse micro-batches with different numbers of labels; causal models ignore the first label."""
    real = [(label[..., begin:] != _IGNORED).sum() for begin in (0, 1) for label in labels]
    numbers = torch.stack(real).tolist()  # the device is waited for once
    for counts in (set(numbers[: len(labels)]), set(numbers[len(labels) :])):
        if len(counts) > 1:
            raise PrepareError(
                f"the micro-batches have {min(counts)} to {max(counts)} labels that count",
                why="the mean of their mean losses is not the mean over all labels",
                fix="PipelineParallelConfig(items=...), a function of the model's arguments that counts what "
                f"the loss is the mean of; or schedule='gpipe' instead of {schedule!r}",
            )


def _identity_loss(output: torch.Tensor, target: Any) -> torch.Tensor:
    return output


def _extract_loss(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    if isinstance(output, tuple | list) and output:
        return output[0]
    return getattr(output, "loss", None)


def _loss_output(output: Any, loss: torch.Tensor, alone: bool) -> Any:
    """Return the loss in the form in which the model returns it."""
    if alone or isinstance(output, torch.Tensor):
        return loss
    if isinstance(output, Mapping):
        make: Any = type(output)
        return make(loss=loss)
    if hasattr(output, "_fields"):  # a named tuple: its first value is the loss
        rest = {name: None for name in output._fields if isinstance(getattr(output, name), torch.Tensor)}
        return output._replace(**{**rest, output._fields[0]: loss})
    if isinstance(output, tuple | list):
        return type(output)([loss])
    names = [f.name for f in fields(output)] if is_dataclass(output) else list(vars(output))
    for name in names:
        if isinstance(getattr(output, name), torch.Tensor):
            object.__setattr__(output, name, None)  # a frozen dataclass too: it is of this call alone
    object.__setattr__(output, "loss", loss)
    return output


@contextmanager
def _force_grad_sync(model: Any) -> Iterator[None]:
    """Reduce sharded gradients in every call: unreduced ones could not be scaled later."""
    quiet = not reduces_gradients(model)
    if quiet:
        model.set_requires_gradient_sync(True)
    try:
        yield
    finally:
        if quiet:
            model.set_requires_gradient_sync(False)


class _LossWithGrads(torch.autograd.Function):
    """A loss whose gradients are computed already; its backward adds them to ``.grad``."""

    @staticmethod
    def forward(
        ctx: Any, runner: Any, computed_grads: Any, value: torch.Tensor, *rest: torch.Tensor
    ) -> torch.Tensor:
        ctx.runner, ctx.computed_grads, ctx.rest = runner, computed_grads, len(rest)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        if ctx.computed_grads is None:
            raise PrepareError(
                "a second backward through one loss of a pipeline",
                why="its gradients were added by the first one",
                fix="call the model again, or multiply the loss",
            )
        with torch.no_grad():
            for parameter, grad in ctx.computed_grads:
                grad = (
                    grad.zero_()
                    if ctx.runner.zero_gradients
                    else grad.mul_(gradient.to(grad.device, grad.dtype))
                )
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        ctx.computed_grads = None
        return (None, None, None, *[None] * ctx.rest)
