"""The runner of a pipelined model: plans and runs its calls.

Every call begins with a check between the stages: equal shapes, modes and values, or the same error on all.
"""

# torch's schedules are partly untyped: what is unknown is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from accelerate.core.errors import PrepareError, list_first, warn_user
from accelerate.stages.split import batch_size, flatten_tree
from accelerate.strategy.parallelism.pipeline.forward_trace import (
    BlockOutputKey,
    FakeTensorModel,
    PipelineForwardTrace,
)
from accelerate.strategy.parallelism.pipeline.gpipe import GPipeCall
from accelerate.strategy.parallelism.pipeline.micro_batches import (
    CallCheck,
    PipelineBatch,
    PipelineExecutionPlan,
    cast_floats,
    plain_numbers,
    without_numbers,
)
from accelerate.strategy.parallelism.pipeline.one_f_one_b import OneFOneBCall, check_loss
from accelerate.strategy.parallelism.pipeline.stage import StageForward, StageSharedParam
from accelerate.strategy.sharding.grads import mixed_precision_dtypes

if TYPE_CHECKING:
    from accelerate.strategy.parallelism.pipeline.model_split import StageAssignment
    from accelerate.strategy.parallelism.strategy import MeshDimension

torch_c: Any = torch._C
_PLANS = 16  # that are kept: each has memory for what it receives


class MicroBatchTiming(NamedTuple):
    """The time of one micro-batch in one stage.

    Attributes:
        kind: ``"forward"`` or ``"backward"``.
        begin, end: seconds of this machine's clock, which only differences mean something of.
    """

    kind: str
    stage: int
    chunk: int
    begin: float
    end: float


def _refuse_recomputation() -> None:
    """Refuse ``torch.utils.checkpoint`` around a call: each stage would compute again at another time."""
    top_hooks: Any = getattr(torch_c._autograd, "_top_saved_tensors_default_hooks", None)  # torch >= 2.8
    hooks = top_hooks(False) if top_hooks else None
    if hooks and hooks[0].__qualname__.startswith("_checkpoint_hook."):
        raise PrepareError(
            "torch.utils.checkpoint around the call of a pipeline",
            why="stages compute again when their own backward begins, and would wait for each other",
            fix="checkpoint the blocks inside of the model",
        )


class PipelinedModel:
    """The first base class of a pipelined model: its calls go to the ``PipelineParallelRunner``."""

    _runner: Any

    @contextmanager
    def pipeline_timeline(self) -> Iterator[list[MicroBatchTiming]]:
        """Record when each stage works on each micro-batch inside; all processes have the list at the end.

        Entered by all processes. On an accelerator it waits for the device after every chunk. The clocks of
        several machines are not compared.
        """
        runner: PipelineParallelRunner = self._runner
        runner.timings, timeline = [], list[MicroBatchTiming]()
        try:
            yield timeline
            parts: list[Any] = [None] * runner.processes
            dist.all_gather_object(parts, runner.timings, group=runner.group)
            timeline += [timing for part in parts for timing in part]
        finally:
            runner.timings = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch through all stages."""
        return self._runner.call_model(super().__call__, args, kwargs)  # type: ignore[misc]


class PipelineParallelRunner:
    """Runs the calls of one pipelined model.

    Args:
        model: as the user made it.
        cut: the stage of each block.
        options: a ``PipelineParallelConfig``.
        group: the processes that have its stages, in their order.
        device: of this process.
        other_dimensions: the dimensions of the mesh beside the stages.

    Attributes:
        pp_rank: the rank of this process in the pipeline; ``stages`` are the stages that it has.
        shared: weights that several processes hold.
        timings: if a list, the times of all work are put there.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: StageAssignment,
        options: Any,
        group: Any,
        device: torch.device,
        other_dimensions: Sequence[MeshDimension],
    ) -> None:
        self.other_dimensions = other_dimensions
        self.cut, self.options, self.group, self.device = cut, options, group, device
        self.pp_rank, self.processes = dist.get_rank(group), dist.get_world_size(group)
        self.stages = list(range(self.pp_rank, cut.count, self.processes))
        self._call_check = CallCheck(group, device)
        self.shadow = FakeTensorModel(model, list(cut.stage_of), device)
        self.model: Any = None
        self.names: Any = None
        self.shared: list[StageSharedParam] = []
        self.plans: dict[str, PipelineExecutionPlan] = {}
        self.active_forward: StageForward | None = None
        self.timings: list[MicroBatchTiming] | None = None
        self._model_call: Callable[..., Any] | None = None
        self.zero_gradients = False
        self._has_warned_of_numbers = False
        # A KV cache would be spread over the stages.
        takes = inspect.signature(model.forward).parameters
        self.no_cache_kwargs = {"use_cache": False} if "use_cache" in takes else {}

    @property
    def has_last_stage(self) -> bool:
        """Return whether this process has the last stage."""
        return self.pp_rank == self.processes - 1

    def broadcast_from_last(self, value: torch.Tensor) -> None:
        """Broadcast a tensor in place from the process with the last stage."""
        dist.broadcast(value, dist.get_global_rank(self.group, self.processes - 1), group=self.group)

    # --- hooks of modules

    def call_block(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call of a block, inside a micro-batch or by itself."""
        if self.active_forward is not None:
            return self.active_forward.call_block(name, run, args, kwargs)
        if self.cut.stage_of[name] not in self.stages:
            raise PrepareError(
                f"{name} was called, and is on stage {self.cut.stage_of[name]} of the pipeline",
                why=f"this process has the weights of stage {self.pp_rank} only",
                fix="call the prepared model itself: all stages take part in that",
            )
        return run(*args, **kwargs)

    def expose_stage_outputs(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Add the stage's outputs to the model's output, so that later forward hooks (FSDP2) see them."""
        run = self.active_forward
        if run is None:
            return None
        if run.outer_weights is not None:
            # Here weights are whole, and the graph leads to them.
            weights = (module._parameters[label] for module, _, label in self.shadow.outer_weights)
            run.outer_weights += [weight.clone() for weight in weights if weight is not None]
        return output, [*(run.kept[value] for value in sorted(run.kept)), *(run.outer_weights or ())]

    # --- a call

    def call_model(self, model_call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the user's call of the model and return its result."""
        if self.active_forward is not None:
            return model_call(*args, **kwargs)
        self._model_call = model_call
        try:
            _refuse_recomputation()
            runs_1f1b = self.options.schedule != "gpipe" and torch.is_grad_enabled() and self.model.training
            has_loss_fn = self.options.schedule != "gpipe" and self.options.loss_fn is not None
            target = kwargs.pop("target", None) if has_loss_fn else None
            batch = self._make_batch(args, self.no_cache_kwargs | kwargs, target)
            plan = self._plan_for(batch, whole=not runs_1f1b)
            with ExitStack() as stack:
                for other in self.other_dimensions:
                    stack.enter_context(other.call_context(self.model, args, kwargs))
                return (OneFOneBCall if runs_1f1b else GPipeCall)(self, plan, batch).run()
        finally:
            self._model_call = None

    def _make_batch(self, args: Any, kwargs: Any, target: Any) -> PipelineBatch:
        goal = {} if target is None else {"target": target}
        form, tensors = flatten_tree((args, kwargs, goal), "the argument ")
        metas = [(tuple(t.shape), str(t.dtype), t.requires_grad) for t in tensors]
        description = repr((form, metas, self.model.training, torch.is_grad_enabled(), self._autocast()))
        self._call_check.check(description, tensors)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise PrepareError(
                "a pipeline was called with an argument that needs a gradient",
                why="its gradient is known to some stages only: what has computed it would train on their "
                "processes and not on the others",
                fix="make what computes it a part of the model, or give its detach()",
            )
        size = batch_size(tensors)
        placed = [tensor.to(self.device) for tensor in tensors]
        batched = tuple(t.dim() > 0 and t.shape[0] == size for t in tensors)
        return PipelineBatch(form, placed, size, -(-size // self.options.num_microbatches), batched)

    def _autocast(self) -> tuple[bool, str]:
        kind = self.device.type
        return torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))

    def _plan_for(self, batch: PipelineBatch, *, whole: bool) -> PipelineExecutionPlan:
        metas = [(tuple(t.shape), str(t.dtype)) for t in batch.tensors]
        modes = self.model.training, torch.is_grad_enabled(), self._autocast(), whole, batch.rows
        key = repr((batch.form, metas, modes))
        if key not in self.plans:
            if len(self.plans) >= _PLANS:
                self.plans.pop(next(iter(self.plans)))
            plan = self.plans[key] = self._make_plan(batch, whole)
            plan.numbers = plain_numbers(batch.form)
            plan.family = repr((without_numbers(batch.form), metas, modes))
            self._free_buffers_like(plan)
        return self.plans[key]

    def _free_buffers_like(self, new: PipelineExecutionPlan) -> None:
        """Free the memory of plans that differ from a new one in plain numbers only; warn of a third one."""
        others = [p for p in self.plans.values() if p is not new and p.family == new.family]
        for plan in others:
            plan.idle_schedules.clear()
        if len(others) < 2 or self._has_warned_of_numbers:
            return
        self._has_warned_of_numbers = True
        names = [n for n, number in new.numbers.items() if any(p.numbers[n] != number for p in others)]
        if self.pp_rank == 0:
            warn_user(
                f"{list_first(names)} of a pipeline's call is another number in each call, and for each the "
                "forward is traced anew, which takes seconds in a large model. Give it as a tensor: "
                "torch.tensor(number)"
            )

    def _make_plan(self, batch: PipelineBatch, whole: bool) -> PipelineExecutionPlan:
        part = self._trace_forward(batch.chunk(0))
        missing = set(range(self.cut.count)) - {call.stage for call in part.calls}
        if missing:
            stage = min(missing)
            raise PrepareError(
                f"stage {stage} of the pipeline computes nothing in this forward",
                why=f"none of its modules is called: {', '.join(self.cut.blocks(stage)[:4])}",
                fix="give PipelineParallelConfig(split_points=[...])",
            )
        if not whole:
            check_loss(self.options, part.result, batch)
            return PipelineExecutionPlan(part)
        full = self._trace_forward(batch.all_samples())
        if [c.block for c in part.calls] != [
            c.block for c in full.calls
        ] or part.result_inputs != full.result_inputs:
            raise PrepareError(
                "the forward takes another way for a part of a batch than for all of it",
                fix="PipelineParallelConfig(num_microbatches=1)",
            )
        return PipelineExecutionPlan(
            part, full, [self._rows_per_sample(part, full, value, batch) for value in part.result_inputs]
        )

    def _trace_forward(self, given: Any) -> PipelineForwardTrace:
        args, kwargs = self.cast(given)
        dtype = mixed_precision_dtypes(self.model)[0]
        with ExitStack() as stack:
            for other in self.other_dimensions:
                stack.enter_context(other.trace_context(self.model, lambda: self.shadow.is_inside_block))
            return self.shadow.trace(self.cut.stage_of, self.cut.count, args, kwargs, dtype)

    def _rows_per_sample(
        self,
        part: PipelineForwardTrace,
        full: PipelineForwardTrace,
        value: BlockOutputKey,
        batch: PipelineBatch,
    ) -> int:
        part_shape, full_shape = part.meta(value).shape, full.meta(value).shape
        if batch.rows == batch.size:
            return 0
        each = part_shape[0] // batch.rows if part_shape else 0
        if (
            each
            and part_shape[1:] == full_shape[1:]
            and (part_shape[0], full_shape[0]) == (each * batch.rows, each * batch.size)
        ):
            return each
        raise PrepareError(
            f"{part.calls[value.call].block} gives a tensor of shape {part_shape} for {batch.rows} samples "
            f"and of {full_shape} for {batch.size}, which the result depends on",
            why="the micro-batches of a pipeline are put in a row again along dimension 0",
            fix="PipelineParallelConfig(num_microbatches=1), or compute sums and means over the batch after "
            "the last layer",
        )

    def cast(self, given: Any) -> tuple[Any, Any]:
        """Cast (args, kwargs) to the dtype in which sharded weights compute, as the model itself does."""
        dtype, casts, _ = mixed_precision_dtypes(self.model)
        return given[:2] if dtype is None or not casts else cast_floats(given[:2], dtype)

    # --- chunks

    def run_chunk(
        self,
        trace: PipelineForwardTrace,
        stage: int,
        args: Any,
        received: Sequence[torch.Tensor],
        wanted: Sequence[BlockOutputKey],
        *,
        result: bool = False,
        outer_weights: list[torch.Tensor] | None = None,
    ) -> Any:
        """Run one micro-batch in one stage; return (the forward's result, the stage's outputs)."""
        assert self._model_call is not None
        # torch before 2.12 receives all with gradients.
        inputs = {
            value: tensor if trace.meta(value).requires_grad else tensor.detach()
            for value, tensor in zip(trace.stage_inputs(stage), received, strict=True)
        }
        run = StageForward(trace, stage, inputs, wanted, self.shadow.make_fake, result=result)
        run.outer_weights = outer_weights
        self.active_forward = run
        try:
            output, _ = self._model_call(*args[0], **args[1])
        finally:
            self.active_forward = None
        outputs = run.stage_outputs(wanted)
        if any(
            t.requires_grad and not trace.meta(v).requires_grad for v, t in zip(wanted, outputs, strict=True)
        ):
            raise self._unfrozen_error(stage)
        return output, outputs

    def _unfrozen_error(self, stage: int) -> PrepareError:
        frozen = {name for name, weight in self.shadow.weights.items() if not weight.requires_grad}
        unfrozen = [name for name, p in self.model.named_parameters() if p.requires_grad and name in frozen]
        names = ", ".join(unfrozen[:3]) + (f" and {len(unfrozen) - 3} more" if len(unfrozen) > 3 else "")
        return PrepareError(
            f"requires_grad of {names or f'what stage {stage} computes'} was changed after prepare",
            why="the stages of a pipeline have agreed on which activations have gradients: no other stage "
            "would send one back",
            fix="set requires_grad before prepare, or prepare the model and its optimizer anew",
        )

    @contextmanager
    def record_timing(self, kind: str, stage: int, chunk: int) -> Iterator[None]:
        """Record the time of a micro-batch."""
        if self.timings is None:
            yield
            return
        begin = time.perf_counter()
        yield
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()
        self.timings.append(MicroBatchTiming(kind, stage, chunk, begin, time.perf_counter()))
