"""The conductor of a model that is cut into stages: what a call of the model does.

Every call begins with a word between the stages: the same shapes, modes and values, or the same error on all.
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

from accelerate.core.errors import PrepareError
from accelerate.stages import forms
from accelerate.strategy.parallelism import pipeline_grads as grads
from accelerate.strategy.parallelism.pipeline_batch import Batch, Plan, agree, as_type
from accelerate.strategy.parallelism.pipeline_flow import Flow
from accelerate.strategy.parallelism.pipeline_losses import Losses, check_loss
from accelerate.strategy.parallelism.pipeline_plan import Meta, Trail, Value, fake, fake_mode
from accelerate.strategy.parallelism.pipeline_run import Run
from accelerate.strategy.parallelism.pipeline_twin import Twin

if TYPE_CHECKING:
    from accelerate.strategy.parallelism.base import Dimension
    from accelerate.strategy.parallelism.pipeline_cut import Cut

_PLANS = 16  # that are kept: each has memory for what it receives


class Work(NamedTuple):
    """A stage at work on a chunk.

    Attributes:
        kind: ``"forward"`` or ``"backward"``.
        begin, end: seconds of this machine's clock, which only differences mean something of.
    """

    kind: str
    stage: int
    chunk: int
    begin: float
    end: float


class Pipelined:
    """The first base of the class of a model that is cut into stages."""

    _conductor: Any

    @contextmanager
    def pipeline_timeline(self) -> Iterator[list[Work]]:
        """Writes down when each stage works on each chunk inside; all of them have it at the end.

        Entered by all processes. On an accelerator it waits for the device after every chunk. The clocks of
        several machines are not compared.
        """
        conductor: Conductor = self._conductor
        conductor.clock, found = [], list[Work]()
        try:
            yield found
            parts: list[Any] = [None] * conductor.processes
            dist.all_gather_object(parts, conductor.clock, group=conductor.group)
            found += [work for part in parts for work in part]
        finally:
            conductor.clock = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A batch through all stages."""
        return self._conductor.call(super().__call__, args, kwargs)  # type: ignore[misc]


class Conductor:
    """What conducts the calls of one model.

    Args:
        model: as the user made it.
        cut: which block belongs to which stage.
        options: chunks and schedule.
        group: the processes that have its stages, in their order.
        device: of this process.
        others: the dimensions of the mesh beside the stages.

    Attributes:
        place: this process's among those of the pipeline; ``stages`` are the stages that it has.
        shared: weights that several processes hold.
        clock: if a list, all work is put there.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: Cut,
        options: Any,
        group: Any,
        device: torch.device,
        others: Sequence[Dimension],
    ) -> None:
        self.others = others
        self.cut, self.options, self.group, self.device = cut, options, group, device
        self.place, self.processes = dist.get_rank(group), dist.get_world_size(group)
        self.stages = list(range(self.place, cut.count, self.processes))
        self.mode = fake_mode()
        self.twin = Twin(model, list(cut.stage_of), device, self.mode)
        self.model: Any = None
        self.names: Any = None
        self.shared: list[grads.Shared] = []
        self.plans: dict[str, Plan] = {}
        self.active: Run | None = None
        self.clock: list[Work] | None = None
        self._enter: Callable[..., Any] | None = None
        self.zeroed = False
        # A cache of keys and values would be spread over the stages.
        takes = inspect.signature(model.forward).parameters
        self.uncached = {"use_cache": False} if "use_cache" in takes else {}

    @property
    def last(self) -> bool:
        """Whether this process has the last stage."""
        return self.place == self.processes - 1

    def from_the_last(self, value: torch.Tensor) -> None:
        """Gives all processes what the one with the last stage has, in place."""
        dist.broadcast(value, dist.get_global_rank(self.group, self.processes - 1), group=self.group)

    # --- hooks of modules

    def block(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a block, in a chunk or by itself."""
        if self.active is not None:
            return self.active.block(name, run, args, kwargs)
        if self.cut.stage_of[name] not in self.stages:
            raise PrepareError(
                f"{name} was called, and is on stage {self.cut.stage_of[name]} of the pipeline",
                why=f"this process has the weights of stage {self.place} only",
                fix="call the prepared model itself: all stages take part in that",
            )
        return run(*args, **kwargs)

    def expose(self, module: nn.Module, args: Any, output: Any) -> Any:
        """A forward hook of the model: lets others that come after it see what leaves the stage."""
        run = self.active
        if run is None:
            return None
        if run.loose is not None:
            # Here weights are whole, and the graph leads to them.
            held = (module._parameters[label] for module, _, label in self.twin.loose)
            run.loose += [weight.clone() for weight in held if weight is not None]
        return output, [*(run.kept[value] for value in sorted(run.kept)), *(run.loose or ())]

    # --- a call

    def call(self, enter: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What the user's call of the model gives."""
        if self.active is not None:
            return enter(*args, **kwargs)
        self._enter = enter
        try:
            alternates = self.options.schedule != "gpipe" and torch.is_grad_enabled() and self.model.training
            target = kwargs.pop("target", None) if alternates and self.options.loss_fn is not None else None
            batch = self._batch(args, self.uncached | kwargs, target)
            plan = self._plan(batch, whole=not alternates)
            for other in self.others:
                other.called(self.model, args, kwargs)
            return (Losses if alternates else Flow)(self, plan, batch).run()
        finally:
            self._enter = None

    def _batch(self, args: Any, kwargs: Any, target: Any) -> Batch:
        goal = {} if target is None else {"target": target}
        form, tensors = forms.take_apart((args, kwargs, goal), "the argument ")
        size = next((t.shape[0] for t in tensors if t.dim()), 0)
        metas = [(tuple(t.shape), str(t.dtype), t.requires_grad) for t in tensors]
        said = repr((form, metas, self.model.training, torch.is_grad_enabled(), self._autocast()))
        agree(said, tensors, self.group, self.device)
        if size == 0:
            raise PrepareError(
                "a pipeline was called without a batch",
                why="no tensor among its arguments has a first dimension with something in it",
                fix="call the model with the tensors of at least one sample",
            )
        placed = [tensor.to(self.device) for tensor in tensors]
        batched = tuple(t.dim() > 0 and t.shape[0] == size for t in tensors)
        for tensor, there in zip(tensors, placed, strict=True):
            self._chunked(tensor, there)
        return Batch(form, placed, size, -(-size // self.options.num_microbatches), batched, self._chunked)

    def _chunked(self, whole: torch.Tensor, rows: torch.Tensor) -> None:
        for other in self.others:
            other.chunked(whole, rows)

    def _autocast(self) -> tuple[bool, str]:
        kind = self.device.type
        return torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))

    def _plan(self, batch: Batch, *, whole: bool) -> Plan:
        metas = [(tuple(t.shape), str(t.dtype)) for t in batch.tensors]
        modes = self.model.training, torch.is_grad_enabled(), self._autocast(), whole, batch.rows
        key = repr((batch.form, metas, modes))
        if key not in self.plans:
            if len(self.plans) >= _PLANS:
                self.plans.pop(next(iter(self.plans)))
            self.plans[key] = self._rehearsed(batch, whole)
        return self.plans[key]

    def _rehearsed(self, batch: Batch, whole: bool) -> Plan:
        part = self._trail(batch.chunk(0))
        missing = set(range(self.cut.count)) - {call.stage for call in part.calls}
        if missing:
            raise _idle_stage(self.cut, min(missing))
        if not whole:
            check_loss(self.options, part.result, batch)
            return Plan(part)
        full = self._trail(batch.whole())
        if [c.block for c in part.calls] != [c.block for c in full.calls] or part.tail != full.tail:
            raise PrepareError(
                "the forward takes another way for a part of a batch than for all of it",
                fix="PipelineParallelConfig(num_microbatches=1)",
            )
        return Plan(part, full, [self._per_row(part, full, value, batch) for value in part.tail])

    def _trail(self, given: Any) -> Trail:
        args, kwargs = self.cast(given)
        dtype = grads.number_formats(self.model)[0]
        with ExitStack() as stack:
            for other in self.others:
                stack.enter_context(other.rehearsal(self.model, lambda: self.twin.inside))
            return self.twin.rehearse(self.cut.stage_of, self.cut.count, args, kwargs, dtype)

    def _per_row(self, part: Trail, full: Trail, value: Value, batch: Batch) -> int:
        one, every = part.meta(value).shape, full.meta(value).shape
        if batch.rows == batch.size:
            return 0
        each = one[0] // batch.rows if one else 0
        if each and one[1:] == every[1:] and (one[0], every[0]) == (each * batch.rows, each * batch.size):
            return each
        raise PrepareError(
            f"{part.calls[value.call].block} gives a tensor of shape {one} for {batch.rows} samples and of "
            f"{every} for {batch.size}, which the result depends on",
            why="the micro-batches of a pipeline are put in a row again along dimension 0",
            fix="PipelineParallelConfig(num_microbatches=1), or compute sums and means over the batch after "
            "the last layer",
        )

    def cast(self, given: Any) -> tuple[Any, Any]:
        """(args, kwargs) in the type in which sharded weights compute: the model itself casts them so."""
        dtype, casts, _ = grads.number_formats(self.model)
        return given[:2] if dtype is None or not casts else as_type(given[:2], dtype)

    # --- chunks

    def run(
        self,
        trail: Trail,
        stage: int,
        args: Any,
        received: Sequence[torch.Tensor],
        wanted: Sequence[Value],
        *,
        result: bool = False,
        loose: list[torch.Tensor] | None = None,
    ) -> Any:
        """One chunk in one stage: (the forward's result, the values that leave the stage)."""
        assert self._enter is not None
        inbox = dict(zip(trail.border(stage), received, strict=True))
        run = Run(trail, stage, inbox, wanted, self.stand_in, result=result)
        run.loose = loose
        self.active = run
        try:
            output, _ = self._enter(*args[0], **args[1])
        finally:
            self.active = None
        return output, run.sent(wanted)

    def stand_in(self, meta: Meta) -> torch.Tensor:
        """A tensor without memory for one that another stage computes."""
        return fake(self.mode, meta, self.device)

    @contextmanager
    def timed(self, kind: str, stage: int, chunk: int) -> Iterator[None]:
        """Around a chunk's work."""
        if self.clock is None:
            yield
            return
        begin = time.perf_counter()
        yield
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()
        self.clock.append(Work(kind, stage, chunk, begin, time.perf_counter()))


def _idle_stage(cut: Cut, stage: int) -> PrepareError:
    return PrepareError(
        f"stage {stage} of the pipeline computes nothing in this forward",
        why=f"none of its modules is called: {', '.join(cut.blocks(stage)[:4])}",
        fix="give PipelineParallelConfig(split_points=[...])",
    )
