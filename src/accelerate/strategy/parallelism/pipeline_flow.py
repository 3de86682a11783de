"""A schedule of two halves: all chunks forward, the rest over the whole batch, and all chunks backward.

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
from accelerate.strategy.parallelism import pipeline_grads as grads
from accelerate.strategy.parallelism.pipeline_batch import Batch, Plan, as_type
from accelerate.strategy.parallelism.pipeline_plan import Value
from accelerate.strategy.parallelism.pipeline_run import Halves, Run, Worker, carrier, unused


class Flow:
    """One call in the schedule of two halves.

    Args:
        conductor: of the model.
        plan: of calls of this shape.
        batch: of all stages.

    Attributes:
        outputs: what the last stage has computed of each chunk; empty elsewhere.
        loose: weights between the blocks, as the first chunk saw them in the last stage of this process.
    """

    def __init__(self, conductor: Any, plan: Plan, batch: Batch) -> None:
        self.conductor, self.plan = conductor, plan
        self.batch: Batch | None = batch
        self.outputs: list[tuple[torch.Tensor, ...]] = []
        self.loose: list[torch.Tensor] = []
        self.schedules: list[Any] = []
        self.sync = True

    def run(self) -> Any:
        """The result of the call."""
        conductor, plan, batch = self.conductor, self.plan, self.batch
        assert plan.whole is not None
        assert batch is not None
        self.forward()
        tensors, loose = self._on_the_graph([self._everywhere(place) for place in range(len(plan.part.tail))])
        if not any(t.requires_grad for t in (*tensors, *loose)):
            self.done()
        values = dict(zip(plan.whole.tail, tensors, strict=True))
        final = Run(plan.whole, None, values, (), conductor.stand_in)
        args, kwargs = conductor.cast(batch.whole())
        output = conductor.twin.run(final, args, kwargs, loose)
        final.sent(())
        wanted = grads.number_formats(conductor.model)[2]
        return output if wanted is None else as_type(output, wanted)

    def _on_the_graph(self, tail: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(the tail, weights between the blocks), with the stages' backward behind them if there is one."""
        conductor = self.conductor
        loose = [weight.detach() for weight in self.loose]
        wants = [self.plan.part.meta(value).requires_grad for value in self.plan.part.tail]
        if not torch.is_grad_enabled() or not any(wants):
            return tail, loose
        held = [p for p in conductor.model.parameters() if p.requires_grad]
        anchor = torch.zeros((), requires_grad=True)
        # Weights between the blocks get their gradients from one process: the others compute the same.
        own = loose if conductor.last else []
        wants += [weight.requires_grad for weight in self.loose[: len(own)]]
        found = list(_Back.apply(self, len(tail) + len(own), wants, anchor, *tail, *own, *held))
        return found[: len(tail)], found[len(tail) :] or loose

    def _everywhere(self, place: int) -> torch.Tensor:
        """A value of the tail for the whole batch, on all stages."""
        conductor, plan = self.conductor, self.plan
        assert plan.whole is not None
        shape, dtype, _ = plan.whole.meta(plan.part.tail[place])
        if self.outputs:
            parts = [outputs[place].detach() for outputs in self.outputs]
            value = torch.cat(parts)[: shape[0]] if plan.per_row[place] else parts[0]
            value = value.contiguous()
        else:
            value = torch.empty(shape, dtype=dtype, device=conductor.device)
        conductor.from_the_last(value)
        return value

    def forward(self) -> None:
        """All chunks forward, through one stage of this process after the other."""
        idle = self.plan.idle
        self.schedules = idle.pop() if idle else [self._made(stage) for stage in self.conductor.stages]
        for schedule in self.schedules:
            stage = schedule._stage
            stage.submod.run = partial(self._chunk, stage.stage_index)
            stage.around = self._around
            schedule.ahead()

    def _made(self, stage: int) -> Halves:
        conductor, trail = self.conductor, self.plan.part
        outputs = [trail.meta(value) for value in self._wanted(stage)]
        made = carrier(Worker(), trail, stage, outputs, conductor.device, conductor.group)
        trains = unused if torch.is_grad_enabled() else None
        return Halves(made, conductor.options.num_microbatches, loss_fn=trains)

    def _wanted(self, stage: int) -> tuple[Value, ...]:
        trail = self.plan.part
        return trail.tail if stage == trail.stages - 1 else trail.border(stage + 1)

    def _chunk(self, stage: int, chunk: int, received: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        assert self.batch is not None
        args = self.batch.chunk(chunk)
        with self.conductor.timed("forward", stage, chunk):
            wants = chunk == 0 and stage == self.conductor.stages[-1]
            loose = self.loose if wants else None
            wanted = self._wanted(stage)
            _, sent = self.conductor.run(self.plan.part, stage, args, received, wanted, loose=loose)
        if stage == self.plan.part.stages - 1:
            self.outputs.append(sent)
        return sent

    @contextmanager
    def _around(self, chunk: int, stage: int, last: bool) -> Iterator[None]:
        reducing = grads.backward_of_a_part(self.conductor.model, last=last, sync=self.sync)
        with self.conductor.timed("backward", stage, chunk), reducing:
            yield

    def back(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """All chunks backward, from the gradients of the tail.

        Raises:
            PrepareError: for the second time.
        """
        if self.batch is None:
            raise PrepareError(
                "a second backward through one forward of a pipeline",
                why="what the stages kept for it was freed by the first one",
                fix="call the model again, or add up the losses before one backward",
            )
        conductor = self.conductor
        if conductor.zeroed:
            gradients = [None if g is None else torch.zeros_like(g) for g in gradients]
        count = len(self.plan.part.tail)
        cut = [self._cut(gradient, place) for place, gradient in enumerate(gradients[:count])]
        rows = [[parts[chunk] for parts in cut] for chunk in range(conductor.options.num_microbatches)]
        rows[0] += gradients[count:]
        self.sync = grads.reduces(conductor.model)
        with grads.summed(conductor.model, conductor.shared, conductor.group, sync=self.sync):
            for schedule in self.schedules:
                schedule.back(rows, self.loose[: len(gradients) - count])
        self.done()

    def _cut(self, gradient: torch.Tensor | None, place: int) -> list[torch.Tensor | None]:
        assert self.batch is not None
        chunks = self.conductor.options.num_microbatches
        each = self.plan.per_row[place]
        if gradient is None or not each:
            return [gradient, *[None] * (chunks - 1)]
        rows = each * self.batch.rows
        missing = rows * chunks - gradient.shape[0]
        if missing:  # what filled up the batch has no part in the loss
            gradient = torch.cat([gradient, gradient.new_zeros(missing, *gradient.shape[1:])])
        return list(gradient.split(rows))

    def done(self) -> None:
        """Nothing of a batch stays when its work is done."""
        schedules, self.schedules, self.batch, self.outputs, self.loose = self.schedules, [], None, [], []
        for schedule in schedules:
            schedule._stage.clear_runtime_states()
            schedule._stage.submod.run = unused
        self.plan.idle.append(schedules)


class _Back(torch.autograd.Function):
    """The tail of a forward as one node of the graph: its backward is that of all stages."""

    @staticmethod
    def forward(ctx: Any, flow: Flow, count: int, wants: list[bool], *tensors: torch.Tensor) -> Any:
        ctx.flow, ctx.rest = flow, len(tensors)
        ctx.set_materialize_grads(False)
        outputs = tuple(tensor.view_as(tensor) for tensor in tensors[1 : 1 + count])
        ctx.mark_non_differentiable(*(o for o, wanted in zip(outputs, wants, strict=True) if not wanted))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:  # type: ignore[override]
        ctx.flow.back(gradients)
        return (None, None, None, *[None] * ctx.rest)
