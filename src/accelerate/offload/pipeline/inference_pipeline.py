"""Running a pipeline: one stage on each process, and the chunks of a batch sent through them.

The inputs of rank 0 count. It tells the others their shapes, so that all have the same plan, and whatever it
refuses is refused on every rank. A schedule is for one shape of a chunk and is kept for the next call.

A stage that fails still receives and sends all chunks of the batch: one that is left over would be taken for
one of the next batch. A flag goes with each chunk and says whether a stage has failed.
"""

from __future__ import annotations

import inspect
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from accelerate.core import tree
from accelerate.core.errors import AccelerateError, PeerError, PrepareError, SettingError
from accelerate.offload.pipeline.inference_stages import (
    InferenceStage,
    TracedForward,
    keep_weights,
    named_tensors,
)
from accelerate.stages import split
from accelerate.stages.split import TensorLeafIndex, flatten_tree, unflatten_tree
from accelerate.world import collective
from accelerate.world.world import World

T = TypeVar("T")

_MAX_SCHEDULES = 16  # that are kept: each has a stage, traced for its shapes
# Set on an error that some ranks raise when all chunks went through; other errors before are raised by all.
AFTER_BATCH = "_after_batch"
_FLAG = torch.empty(1, dtype=torch.uint8, device="meta")


@dataclass(frozen=True)
class StageComputeTiming:
    """The interval in which a stage computed a chunk.

    Attributes:
        stage, chunk: which.
        begin, end: seconds of this machine's clock, which only differences mean something of.
    """

    stage: int
    chunk: int
    begin: float
    end: float


@dataclass(frozen=True)
class PipelineInputSignature:
    """The structure and shapes of a call's inputs: equal ones can use one schedule.

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

    def make_inputs(self, rows: int) -> list[torch.Tensor]:
        """Return meta tensors like those of a chunk of ``rows``."""
        return [
            torch.empty((rows, *shape) if batched else shape, dtype=dtype, device="meta")
            for (shape, dtype), batched in zip(self.metas, self.batched, strict=True)
        ]


@dataclass(frozen=True)
class ResultLayout:
    """The structure of a model's result.

    Attributes:
        form: with its tensors left out.
        per_row: of each tensor, how long its dimension 0 is for one sample; 0: not of the batch.
    """

    form: Any
    per_row: list[int]


def run_collectively(action: Callable[[], T]) -> T:
    """Return the result of ``action``; an error on one rank is raised on every rank."""
    error: AccelerateError | None = None
    value: Any = None
    try:
        value = action()
    except AccelerateError as raised:
        error = raised
    for rank, refused in enumerate(collective.compare_objects(error, "prepare_pippy")):
        if refused is not None:
            refused.failed_rank = rank if error is None else None
            raise refused
    return value


def no_result_error() -> PeerError:
    """Return the error of a rank whose own stage has not failed."""
    return PeerError(
        "the pipeline has no result for this batch",
        why="a stage on another rank failed, which raises its error there",
    )


class _StageForward:
    """The forward of a stage for the chunks of one batch, and what it leaves for the end of the batch."""

    def __init__(self, stage: InferenceStage, world: World) -> None:
        self.stage, self.outputs, self.world = stage.module, stage.outputs, world
        self.error: Exception | None = None
        self.failed: list[torch.Tensor] = []
        self.results: list[tuple[torch.Tensor, ...]] = []
        self.clock: list[tuple[float, float]] | None = None

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run one chunk; return what is to be sent. The last tensor says whether a stage has failed."""
        begin = self._read_clock()
        tensors, failed = tensors[:-1], tensors[-1]
        outputs = ()
        if self.error is None:
            try:
                outputs = self.stage(*tensors)
            except Exception as error:  # noqa: BLE001 - raised when all chunks went through
                self.error = error
        if self.clock is not None:
            self.clock.append((begin, self._read_clock()))
        if not self.world.is_last:
            if self.error is None:
                return *outputs, failed
            unset = [torch.zeros_like(meta, device=self.world.device) for meta in self.outputs]
            return *unset, torch.ones_like(failed)
        self.results.append(outputs)
        self.failed.append(failed)
        return ()

    def raise_error(self) -> None:
        """Raise what failed in this stage."""
        if self.error is not None:
            text = f"{type(self.error).__name__}: {self.error}"
            raise RuntimeError(f"stage {self.world.rank} of the pipeline failed: {text}") from self.error

    def raise_peer_error(self) -> None:
        """Raise on the last rank if a stage before it failed; it waits for the device."""
        if torch.cat(self.failed).any():
            raise no_result_error()

    def clear(self) -> None:
        """Drop what a batch has left."""
        self.results, self.failed, self.error = [], [], None

    def _read_clock(self) -> float:
        if self.clock is not None and self.world.device.type != "cpu":
            self.world.hardware.synchronize()
        return time.perf_counter()


class InferenceSchedule:
    """This rank's stage for chunks of one shape, run in the order of GPipe: one chunk after the other.

    Args:
        stage: with its weights, on the world's device.
        result: what the model gives.
        rows: of a chunk.
        chunks: how many a batch is cut into.
    """

    def __init__(
        self,
        stage: InferenceStage,
        result: ResultLayout,
        shapes: PipelineInputSignature,
        rows: int,
        chunks: int,
        world: World,
    ) -> None:
        self.result, self.shapes, self.rows, self.chunks = result, shapes, rows, chunks
        self.inputs, self.world = stage.inputs, world
        self.worker = _StageForward(stage, world)

    def run(self, tensors: Sequence[torch.Tensor], size: int, *, clock: bool = False) -> Any:
        """Run a batch; return the result on the last rank, None on the others.

        Args:
            tensors: of the whole batch, on rank 0.
            size: how many samples of the batch are real.
            clock: keep when each chunk began and ended.
        """
        self.worker.clock = [] if clock else None
        whole: list[torch.Tensor] = []
        if self.world.rank == 0:
            placed = [tensor.to(self.world.device) for tensor in tensors]
            whole = [
                split.padded_rows(tensor, 0, self.rows * self.chunks) if batched else tensor
                for tensor, batched in zip(placed, self.shapes.batched, strict=True)
            ]
        try:
            with torch.no_grad():
                self._run_chunks(whole)
            try:
                return self._take_result(size)
            except Exception as error:
                vars(error)[AFTER_BATCH] = True
                raise
        finally:
            # Nothing of a batch stays when its call ends.
            self.worker.clear()

    def _run_chunks(self, whole: Sequence[torch.Tensor]) -> None:
        """Receive the inputs of each chunk, run it, and send its outputs while the next one runs."""
        rank, device = self.world.rank, self.world.device
        sent: list[torch.Tensor] = []  # their memory is read until all sends are over
        sends: list[dist.Work] = []
        for chunk in range(self.chunks):
            if rank == 0:
                rows = slice(chunk * self.rows, (chunk + 1) * self.rows)
                pairs = zip(whole, self.shapes.batched, strict=True)
                inputs = [tensor[rows] if batched else tensor for tensor, batched in pairs]
                inputs.append(torch.zeros_like(_FLAG, device=device))
            else:
                inputs = [torch.empty_like(meta, device=device) for meta in (*self.inputs, _FLAG)]
                for work in split.start_transfers(dist.P2POp(dist.irecv, each, rank - 1) for each in inputs):
                    work.wait()
            outputs = self.worker.forward(*inputs)
            sent += outputs
            sends += split.start_transfers(dist.P2POp(dist.isend, each, rank + 1) for each in outputs)
        for work in sends:
            work.wait()

    def _take_result(self, size: int) -> Any:
        self.worker.raise_error()
        if not self.world.is_last:
            return None
        try:
            return self._join_results(size)
        finally:
            # Results of zeros that a failed stage sent may not be joinable: its failure is the cause.
            self.worker.raise_peer_error()

    def _join_results(self, size: int) -> Any:
        leaves = zip(self.result.per_row, zip(*self.worker.results, strict=True), strict=True)
        joined = [
            torch.cat(parts)[: size * each] if each else self._take_common(parts) for each, parts in leaves
        ]
        return unflatten_tree(self.result.form, joined)

    def _take_common(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the value that is equal in all chunks."""
        if all(torch.equal(part, parts[0]) for part in parts[1:]):
            return parts[0].clone()
        raise PrepareError(
            f"a tensor of the result has the shape {tuple(parts[0].shape)} for any batch, "
            "and differs between the chunks of this one",
            why="only values for each sample can be put in a row again",
            fix="compute sums and means over the batch (such as a loss) outside of the model",
        )


class InferencePipeline:
    """A model for pipeline-parallel inference: this rank runs one of its stages, and keeps its weights only.

    Args:
        model: whole, in host memory.
        split_points: as ``prepare_pippy`` takes them.
        no_split: class names of modules that ``"auto"`` does not open.
        num_chunks: how many a batch is cut into; None takes the number of processes.

    Attributes:
        points: the names of the first module of every stage but the first, once they are known.

    Raises:
        UnknownNameError: a split point is no module of the model.
        PrepareError: the split points do not fit the processes, or a weight has no values.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        split_points: str | list[str] | None,
        no_split: list[str],
        num_chunks: int | None,
    ) -> None:
        self.model, self.world, self.forward, self.no_split = model, world, model.forward, no_split
        self.chunks = world.size if num_chunks is None else num_chunks
        self.is_auto = split_points is None or split_points == "auto"
        if isinstance(split_points, str) and not self.is_auto:
            split_points = [split_points]
        self.points: list[str] = []
        if not self.is_auto:
            self.points = split.check_split_points(model, split_points or [], world.size)
        takes = inspect.signature(model.forward).parameters
        self.cache_options = {"use_cache": False} if "use_cache" in takes else {}
        self.own_weights: frozenset[str] | None = None
        # The last used comes last, on all ranks alike.
        self.schedules: list[tuple[bytes, InferenceSchedule]] = []
        self.shared: dict[str, torch.Size] = {}
        for name, tensor in model.named_parameters():
            if tensor.device.type == "meta":
                raise PrepareError(
                    f"the weight {name!r} has no values",
                    why="it is on the meta device, or offloaded",
                    fix="load the model into host memory before prepare_pippy",
                )

    def plan_example(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Build the stages for an example, and drop the weights of the other ranks' stages.

        Raises:
            PrepareError: there is no example, or the model cannot be traced or has too few blocks.
            SettingError: the number of chunks is less than 1.
        """
        if self.chunks < 1:
            raise SettingError(f"num_chunks is {self.chunks}, but it is at least 1", fix="leave it out")
        form, tensors = flatten_tree((args, kwargs), "the example argument ")
        if not tensors:
            raise PrepareError(
                "prepare_pippy was given no example",
                why="the shapes of what goes from stage to stage are learned from one",
                fix="prepare_pippy(model, example_args=(input,))",
            )
        shapes, size = collective.broadcast_object(self.measure_call(form, tensors), 0, "prepare_pippy")
        self.find_schedule(shapes, size)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch of rank 0's inputs; return the result on the last rank, None on the others.

        Raises:
            PrepareError: on every rank, if the inputs cannot be cut into chunks.
        """
        return self._run(args, kwargs)[0]

    def timeline(self, *args: Any, **kwargs: Any) -> list[StageComputeTiming]:
        """Run a batch and return when each stage computed each chunk, on all ranks; called by all.

        The clocks of several machines are not compared.
        """
        _, plan = self._run(args, kwargs, clock=True)
        timings = [
            StageComputeTiming(self.world.rank, chunk, begin, end)
            for chunk, (begin, end) in enumerate(plan.worker.clock or [])
        ]
        return [interval for stage in collective.all_gather_object(timings, "timeline") for interval in stage]

    def _run(self, args: Any, kwargs: Any, *, clock: bool = False) -> tuple[Any, InferenceSchedule]:
        tensors: list[torch.Tensor] = []
        call_info: tuple[PipelineInputSignature, int] | AccelerateError | None = None
        if self.world.rank == 0:
            try:
                form, tensors = flatten_tree((args, kwargs), "the argument ")
                call_info = self.measure_call(form, tensors)
            except AccelerateError as error:
                call_info = error  # raised below, on every rank
        call_info = collective.broadcast_object(call_info, 0, "a pipeline's forward")
        if isinstance(call_info, AccelerateError):
            raise call_info
        assert call_info is not None
        plan = self.find_schedule(*call_info)
        return plan.run(tensors, call_info[1], clock=clock), plan

    def measure_call(self, form: Any, tensors: Sequence[torch.Tensor]) -> tuple[PipelineInputSignature, int]:
        """Return the shapes of a call, and its batch size.

        A tensor whose first dimension is as long as the batch is cut into chunks. One that was seen before
        with another batch, in the very same shape, is not: it is a table that happens to be as long.

        Raises:
            PrepareError: no tensor has a first dimension, or it is 0.
        """
        size = split.batch_size(tensors)
        paths = [path for path, leaf in tree.iterate_leaves(form) if isinstance(leaf, TensorLeafIndex)]
        batched = tuple(
            tensor.dim() > 0 and tensor.shape[0] == size and self.shared.get(path) != tensor.shape
            for path, tensor in zip(paths, tensors, strict=True)
        )
        leaves = zip(paths, tensors, batched, strict=True)
        self.shared.update({path: tensor.shape for path, tensor, cut in leaves if not cut})
        metas = tuple(
            (tuple(tensor.shape)[1 if cut else 0 :], tensor.dtype)
            for tensor, cut in zip(tensors, batched, strict=True)
        )
        return PipelineInputSignature(form, metas, batched, self.model.training), size

    def find_schedule(self, shapes: PipelineInputSignature, size: int) -> InferenceSchedule:
        """Return the schedule for a batch: an existing one that is at most twice too large, or a new one."""
        rows, key = -(-size // self.chunks), pickle.dumps(shapes)
        fitting = [
            plan for saved_key, plan in self.schedules if saved_key == key and rows <= plan.rows <= 2 * rows
        ]
        if fitting:
            plan = min(fitting, key=lambda plan: plan.rows)
        else:
            stage, result = run_collectively(lambda: self._build_stage(shapes, rows))
            if self.own_weights is None:
                self.own_weights = stage.weights
                keep_weights(self.model, stage.weights, self.world.device)
            stage.load_weights(named_tensors(self.model))
            plan = InferenceSchedule(stage, result, shapes, rows, self.chunks, self.world)
        others = [(saved_key, other) for saved_key, other in self.schedules if other is not plan]
        self.schedules = [*others[1 - _MAX_SCHEDULES :], (key, plan)]
        return plan

    def _build_stage(self, shapes: PipelineInputSignature, rows: int) -> tuple[InferenceStage, ResultLayout]:
        """Trace this rank's stage for inputs of these shapes, and the layout of the model's result."""

        def call(flat: Sequence[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
            args, kwargs = unflatten_tree(shapes.form, flat)
            # A cache of keys and values would be spread over the stages, and is of no use to one forward.
            return flatten_tree(self.forward(*args, **(self.cache_options | kwargs)), "the result")

        traced = TracedForward(self.model, call, shapes.make_inputs, rows, self.world.device)
        if self.is_auto and not self.points:
            size = self.world.size
            blocks = split.list_blocks(self.model, self.no_split, size, traced.computing_modules)
            self.points = [blocks[index].name for index in split.find_even_cuts(blocks, size)]
        stage = traced.build_stage(self.points, self.world.rank)
        dropped_weights = stage.weights - self.own_weights if self.own_weights is not None else ()
        if dropped_weights:
            raise PrepareError(
                f"this call uses the weight {min(dropped_weights)!r} in stage {self.world.rank}",
                why="the example did not, so this process has let go of it",
                fix="give prepare_pippy an example that calls the model in the same way",
            )
        return stage, ResultLayout(traced.output_form, traced.per_row)
