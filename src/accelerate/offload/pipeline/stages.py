"""A pipeline that runs: one stage on each process, the chunks of a batch on their way through them.

The inputs of rank 0 count. It tells the others their shapes, so that all have the same plan, and whatever it
refuses is refused on every rank. A plan holds for one shape of a chunk and is kept for the next call.
"""

# torch's schedules are partly untyped: what is unknown is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from accelerate.core import tree
from accelerate.core.errors import AccelerateError, PrepareError
from accelerate.offload.pipeline.graph import Stage
from accelerate.stages import forms
from accelerate.world import collective
from accelerate.world.world import World

T = TypeVar("T")

_PLANS = 16  # that are kept: each has buffers for what it receives


@dataclass(frozen=True)
class Interval:
    """When a stage worked on a chunk.

    Attributes:
        stage, chunk: which.
        begin, end: seconds of this machine's clock, which only differences mean something of.
    """

    stage: int
    chunk: int
    begin: float
    end: float


@dataclass(frozen=True)
class Shapes:
    """What a call brings, without its values: equal ones can run by one plan.

    Attributes:
        form: of (args, kwargs).
        metas: shape and dtype of each tensor, without dimension 0 where it is the batch.
        batched: whether dimension 0 of a tensor is the batch.
        training: whether the model is in training mode.
    """

    form: Any
    metas: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    batched: tuple[bool, ...]
    training: bool

    def inputs(self, rows: int) -> list[torch.Tensor]:
        """Tensors on the meta device like those of a chunk of ``rows``."""
        return [
            torch.empty((rows, *shape) if batched else shape, dtype=dtype, device="meta")
            for (shape, dtype), batched in zip(self.metas, self.batched, strict=True)
        ]


@dataclass(frozen=True)
class Result:
    """What a model gives.

    Attributes:
        form: with its tensors left out.
        per_row: of each tensor, how long its dimension 0 is for one sample; 0: not of the batch.
    """

    form: Any
    per_row: list[int]


def together(action: Callable[[], T]) -> T:
    """What ``action`` gives; if it refuses on one rank, its error is raised on every rank."""
    error: AccelerateError | None = None
    value: Any = None
    try:
        value = action()
    except AccelerateError as raised:
        error = raised
    for refused in collective.all_objects(error, "prepare_pippy"):
        if refused is not None:
            raise refused
    return value


def batch_size(tensors: Sequence[torch.Tensor]) -> int:
    """Length of dimension 0 of the first tensor that has one.

    Raises:
        PrepareError: none has, or it is 0.
    """
    size = next((t.shape[0] for t in tensors if t.dim()), 0)
    if size == 0:
        raise PrepareError(
            "a pipeline was called without a batch",
            why="no tensor among its arguments has a first dimension with something in it",
            fix="call the model with the tensors of at least one sample",
        )
    return size


class _Worker(nn.Module):
    """What torch's schedule calls for each chunk: the stage, with the tensors that all chunks share."""

    def __init__(self, stage: Stage, batched: Sequence[bool], world: World) -> None:
        super().__init__()
        self.stage, self.batched, self.world = stage.module, batched, world
        self.shared: list[torch.Tensor] = []
        self.results: list[tuple[torch.Tensor, ...]] = []
        self.clock: list[tuple[float, float]] | None = None

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One chunk."""
        begin = self._now()
        if self.world.rank == 0:
            mine, shared = iter(tensors), iter(self.shared)
            tensors = tuple(next(mine if batched else shared) for batched in self.batched)
        found = self.stage(*tensors)
        if self.clock is not None:
            self.clock.append((begin, self._now()))
        if not self.world.is_last:
            return found
        self.results.append(found)
        # The schedule joins these; ours are joined in their form.
        return (torch.zeros(1, device=self.world.device),)

    def _now(self) -> float:
        if self.clock is not None and self.world.device.type != "cpu":
            self.world.hardware.synchronize()
        return time.perf_counter()


class Plan:
    """This rank's stage for chunks of one shape, and the schedule that runs it.

    Args:
        stage: with its weights, on the world's device.
        result: what the model gives.
        rows: of a chunk.
        chunks: how many a batch is cut into.
    """

    def __init__(
        self, stage: Stage, result: Result, shapes: Shapes, rows: int, chunks: int, world: World
    ) -> None:
        self.result, self.shapes, self.rows, self.chunks = result, shapes, rows, chunks
        self.world = world
        self.worker = _Worker(stage, shapes.batched, world)
        inputs, outputs = stage.inputs, stage.outputs
        if world.rank == 0:
            inputs = tuple(t for t, batched in zip(inputs, shapes.batched, strict=True) if batched)
        if world.is_last:
            outputs = (torch.empty(1, device="meta"),)
        self.stage = PipelineStage(
            self.worker, world.rank, world.size, world.device, input_args=inputs, output_args=outputs
        )
        self.schedule = ScheduleGPipe(self.stage, n_microbatches=chunks)

    def run(self, tensors: Sequence[torch.Tensor], size: int, *, clock: bool = False) -> Any:
        """The result on the last rank, None on the others.

        Args:
            tensors: of the whole batch, on rank 0.
            size: how many samples of the batch are real.
            clock: keep when each chunk began and ended.
        """
        self.worker.clock = [] if clock else None
        whole: list[torch.Tensor] = []
        if self.world.rank == 0:
            placed = [tensor.to(self.world.device) for tensor in tensors]
            pairs = list(zip(placed, self.shapes.batched, strict=True))
            whole = [_grown(tensor, self.rows * self.chunks) for tensor, batched in pairs if batched]
            self.worker.shared = [tensor for tensor, batched in pairs if not batched]
        try:
            with torch.no_grad():
                self.schedule.step(*whole)
            return self._joined(size) if self.world.is_last else None
        finally:
            # Nothing of a batch stays when its call ends.
            self.stage.clear_runtime_states()
            self.worker.results, self.worker.shared = [], []

    def _joined(self, size: int) -> Any:
        leaves = zip(self.result.per_row, zip(*self.worker.results, strict=True), strict=True)
        joined = [torch.cat(parts)[: size * each] if each else self._common(parts) for each, parts in leaves]
        return forms.put_together(self.result.form, joined)

    def _common(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """What all chunks gave alike."""
        if all(torch.equal(part, parts[0]) for part in parts[1:]):
            return parts[0].clone()
        raise PrepareError(
            f"a tensor of the result has the shape {tuple(parts[0].shape)} for any batch, "
            "and differs between the chunks of this one",
            why="only values for each sample can be put in a row again",
            fix="compute sums and means over the batch (such as a loss) outside of the model",
        )


def _grown(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """A batch made longer by its last sample: a sample that is valid, whatever the values mean."""
    missing = rows - tensor.shape[0]
    return torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])]) if missing else tensor


class Pipeline:
    """A model on several processes.

    Args:
        make: makes this rank's stage and says what the model gives, for some shapes, a number of rows, and a
            batch that has them (on rank 0).
        settle: brings a stage's weights to where they belong.
        chunks: how many a batch is cut into.
        training: says whether the model is in training mode.
    """

    def __init__(
        self,
        make: Callable[[Shapes, int, Sequence[torch.Tensor]], tuple[Stage, Result]],
        settle: Callable[[Stage], None],
        chunks: int,
        world: World,
        training: Callable[[], bool],
    ) -> None:
        self.make, self.settle, self.chunks = make, settle, chunks
        self.world, self.training = world, training
        self.plans: list[tuple[bytes, Plan]] = []  # the last used comes last, on all ranks alike
        self.shared: dict[str, torch.Size] = {}

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a batch; the inputs of rank 0 count. The result on the last rank, None on the others.

        Raises:
            PrepareError: on every rank, if the inputs cannot be cut into chunks.
        """
        return self._run(args, kwargs)[0]

    def timeline(self, *args: Any, **kwargs: Any) -> list[Interval]:
        """Runs a batch and says when each stage worked on each chunk; on all ranks, called by all.

        The clocks of several machines are not compared.
        """
        _, plan = self._run(args, kwargs, clock=True)
        mine = [
            Interval(self.world.rank, chunk, begin, end)
            for chunk, (begin, end) in enumerate(plan.worker.clock or [])
        ]
        return [interval for stage in collective.all_objects(mine, "timeline") for interval in stage]

    def _run(self, args: Any, kwargs: Any, *, clock: bool = False) -> tuple[Any, Plan]:
        tensors: list[torch.Tensor] = []
        told: tuple[Shapes, int] | AccelerateError | None = None
        if self.world.rank == 0:
            try:
                form, tensors = forms.take_apart((args, kwargs), "the argument ")
                told = self.shapes_of(form, tensors)
            except AccelerateError as error:
                told = error  # raised below, on every rank
        told = collective.agree(told, 0, "a pipeline's forward")
        if isinstance(told, AccelerateError):
            raise told
        assert told is not None
        plan = self.plan(*told, tensors)
        return plan.run(tensors, told[1], clock=clock), plan

    def shapes_of(self, form: Any, tensors: Sequence[torch.Tensor]) -> tuple[Shapes, int]:
        """The shapes of a call, and its batch size.

        A tensor whose first dimension is as long as the batch is cut into chunks. One that was seen before
        with another batch, in the very same shape, is not: it is a table that happens to be as long.
        """
        size = batch_size(tensors)
        paths = [path for path, leaf in tree.leaves(form) if isinstance(leaf, forms.Slot)]
        batched = tuple(
            tensor.dim() > 0 and tensor.shape[0] == size and self.shared.get(path) != tensor.shape
            for path, tensor in zip(paths, tensors, strict=True)
        )
        own = zip(paths, tensors, batched, strict=True)
        self.shared.update({path: tensor.shape for path, tensor, cut in own if not cut})
        metas = tuple(
            (tuple(tensor.shape)[1 if cut else 0 :], tensor.dtype)
            for tensor, cut in zip(tensors, batched, strict=True)
        )
        return Shapes(form, metas, batched, self.training()), size

    def plan(self, shapes: Shapes, size: int, tensors: Sequence[torch.Tensor]) -> Plan:
        """The plan for a batch: one that is there and not more than twice too large, or a new one."""
        rows, key = -(-size // self.chunks), pickle.dumps(shapes)
        fitting = [plan for known, plan in self.plans if known == key and rows <= plan.rows <= 2 * rows]
        if fitting:
            plan = min(fitting, key=lambda plan: plan.rows)
        else:
            stage, result = together(lambda: self.make(shapes, rows, tensors))
            self.settle(stage)
            plan = Plan(stage, result, shapes, rows, self.chunks, self.world)
        others = [(known, other) for known, other in self.plans if other is not plan]
        self.plans = [*others[1 - _PLANS :], (key, plan)]
        return plan
