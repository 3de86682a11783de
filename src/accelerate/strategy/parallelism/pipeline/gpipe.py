"""The GPipe schedule of one call: all micro-batches forward, the outer code over the batch, all backward.

The result of a call is what the user's own model gives. What the stages computed is one node of its graph,
whose backward is theirs.
"""

# torch's schedules are partly untyped: what is unknown is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from accelerate.core.errors import PrepareError
from accelerate.strategy.parallelism.pipeline.forward_trace import BlockOutputKey
from accelerate.strategy.parallelism.pipeline.micro_batches import (
    PipelineBatch,
    PipelineExecutionPlan,
    cast_floats,
)
from accelerate.strategy.parallelism.pipeline.stage import (
    GPipeSchedule,
    PipelineStageModule,
    StageForward,
    make_stage,
    reject_call,
    sum_shared_grads,
)
from accelerate.strategy.sharding.grads import mixed_precision_dtypes, partial_backward, reduces_gradients


class GPipeCall:
    """One call of a pipelined model in the GPipe schedule.

    Args:
        runner: the runner of the model.
        plan: the plan of calls of this shape.
        batch: the batch, equal on all stages.

    Attributes:
        outputs: the last stage's outputs of each micro-batch; empty elsewhere.
        outer_weights: weights outside the blocks, as the first micro-batch saw them in this process's
            last stage.
    """

    def __init__(self, runner: Any, plan: PipelineExecutionPlan, batch: PipelineBatch) -> None:
        self.runner, self.plan = runner, plan
        self.batch: PipelineBatch | None = batch
        self.outputs: list[tuple[torch.Tensor, ...]] = []
        self.outer_weights: list[torch.Tensor] = []
        self.schedule: Any = None
        self.sync = True

    def run(self) -> Any:
        """Run the call and return its result."""
        runner, plan, batch = self.runner, self.plan, self.batch
        assert plan.batch_trace is not None
        assert batch is not None
        self.forward()
        tensors, outer_weights = self._attach_backward(
            [self._broadcast_tail(place) for place in range(len(plan.chunk_trace.result_inputs))]
        )
        if not any(t.requires_grad for t in (*tensors, *outer_weights)):
            self.release()
        values = dict(zip(plan.batch_trace.result_inputs, tensors, strict=True))
        final = StageForward(plan.batch_trace, None, values, (), runner.shadow.make_fake)
        *given, goal = batch.all_samples()
        args, kwargs = runner.cast(given)
        output = runner.shadow.run_outer_code(final, args, kwargs, outer_weights)
        final.stage_outputs(())
        output_dtype = mixed_precision_dtypes(runner.model)[2]
        output = output if output_dtype is None else cast_floats(output, output_dtype)
        # In evaluation a schedule with a loss function gives the loss of a target, as in training.
        return runner.options.loss_fn(output, goal["target"]) if goal else output

    def _attach_backward(
        self, result_inputs: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return (result inputs, outer weights), attached to the stages' backward if there is one."""
        runner = self.runner
        outer_weights = [weight.detach() for weight in self.outer_weights]
        trace = self.plan.chunk_trace
        wants = [trace.meta(value).requires_grad for value in trace.result_inputs]
        # All processes compute the same with outer weights; the last stage takes their gradients.
        wants += [weight.requires_grad for weight in self.outer_weights]
        if not torch.is_grad_enabled() or not any(wants):
            return result_inputs, outer_weights
        trainable = [p for p in runner.model.parameters() if p.requires_grad]
        anchor = torch.zeros((), requires_grad=True)
        attached: Any = _StagesBackward.apply(
            self, len(wants), wants, anchor, *result_inputs, *outer_weights, *trainable
        )
        return list(attached[: len(result_inputs)]), list(attached[len(result_inputs) :])

    def _broadcast_tail(self, place: int) -> torch.Tensor:
        """Broadcast one result input of the full batch from the last stage to all stages."""
        runner, plan = self.runner, self.plan
        assert plan.batch_trace is not None
        shape, dtype, _ = plan.batch_trace.meta(plan.chunk_trace.result_inputs[place])
        if self.outputs:
            parts = [outputs[place].detach() for outputs in self.outputs]
            value = torch.cat(parts)[: shape[0]] if plan.rows_per_sample[place] else parts[0]
            value = value.contiguous()
        else:
            value = torch.empty(shape, dtype=dtype, device=runner.device)
        runner.broadcast_from_last(value)
        return value

    def forward(self) -> None:
        """Run all micro-batches forward."""
        idle = self.plan.idle_schedules
        self.schedule = idle.pop() if idle else self._make_schedule()
        for stage in self.schedule.stages:
            stage.submod.run_chunk = partial(self._run_chunk, stage.stage_index)
            stage.backward_context = self._backward_context
        self.schedule.run_forwards()

    def _make_schedule(self) -> GPipeSchedule:
        runner, trace, stages = self.runner, self.plan.chunk_trace, list[Any]()
        for stage in runner.stages:
            outputs = [trace.meta(value) for value in self._stage_outputs(stage)]
            stages.append(
                make_stage(PipelineStageModule(), trace, stage, outputs, runner.device, runner.group)
            )
        return GPipeSchedule(stages, runner.options.num_microbatches, trains=torch.is_grad_enabled())

    def _stage_outputs(self, stage: int) -> tuple[BlockOutputKey, ...]:
        trace = self.plan.chunk_trace
        return trace.result_inputs if stage == trace.stages - 1 else trace.stage_inputs(stage + 1)

    def _run_chunk(
        self, stage: int, chunk: int, received: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        assert self.batch is not None
        args = self.batch.chunk(chunk)
        with self.runner.record_timing("forward", stage, chunk):
            wants = chunk == 0 and stage == self.runner.stages[-1]
            outer_weights = self.outer_weights if wants else None
            output_keys = self._stage_outputs(stage)
            _, sent = self.runner.run_chunk(
                self.plan.chunk_trace, stage, args, received, output_keys, outer_weights=outer_weights
            )
        if stage < self.plan.chunk_trace.stages - 1:
            return sent
        self.outputs.append(sent)
        return tuple(tensor.detach() for tensor in sent)

    @contextmanager
    def _backward_context(self, chunk: int, stage: int, last: bool) -> Iterator[None]:
        reducing = partial_backward(self.runner.model, last=last, sync=self.sync)
        with self.runner.record_timing("backward", stage, chunk), reducing:
            yield

    def run_backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Run all micro-batches backward, from the gradients of the result inputs.

        Raises:
            PrepareError: for the second time.
        """
        if self.batch is None:
            raise PrepareError(
                "a second backward through one forward of a pipeline",
                why="the activations that the stages saved were freed by the first one",
                fix="call the model again, or add up the losses before one backward",
            )
        runner = self.runner
        if runner.zero_gradients:
            gradients = [None if g is None else torch.zeros_like(g) for g in gradients]
        count = len(self.plan.chunk_trace.result_inputs)
        cut = [self._cut(gradient, place) for place, gradient in enumerate(gradients[:count])]
        rows = [[parts[chunk] for parts in cut] for chunk in range(runner.options.num_microbatches)]
        rows[0] += gradients[count:]
        self.sync = reduces_gradients(runner.model)
        with sum_shared_grads(runner.model, runner.shared, runner.group, sync=self.sync):
            self.schedule.run_backwards(rows, self.outputs, self.outer_weights)
        self.release()

    def _cut(self, gradient: torch.Tensor | None, place: int) -> list[torch.Tensor | None]:
        assert self.batch is not None
        chunks = self.runner.options.num_microbatches
        each = self.plan.rows_per_sample[place]
        if gradient is None or not each:
            return [gradient, *[None] * (chunks - 1)]
        rows = each * self.batch.rows
        missing = rows * chunks - gradient.shape[0]
        if missing:  # what filled up the batch has no part in the loss
            gradient = torch.cat([gradient, gradient.new_zeros(missing, *gradient.shape[1:])])
        return list(gradient.split(rows))

    def release(self) -> None:
        """Release the batch, its activations and its schedules."""
        schedule, self.schedule = self.schedule, None
        self.batch, self.outputs, self.outer_weights = None, [], []
        for stage in schedule.stages:
            stage.clear_runtime_states()
            stage.submod.run_chunk = reject_call
        self.plan.idle_schedules.append(schedule)


class _StagesBackward(torch.autograd.Function):
    """The result inputs of a forward as one autograd node: its backward is that of all stages."""

    @staticmethod
    def forward(ctx: Any, call: GPipeCall, count: int, wants: list[bool], *tensors: torch.Tensor) -> Any:
        ctx.call, ctx.rest = call, len(tensors)
        ctx.set_materialize_grads(False)
        outputs = tuple(tensor.view_as(tensor) for tensor in tensors[1 : 1 + count])
        ctx.mark_non_differentiable(
            *(o for o, wants_grad in zip(outputs, wants, strict=True) if not wants_grad)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:  # type: ignore[override]
        ctx.call.run_backward(gradients)
        return (None, None, None, *[None] * ctx.rest)
