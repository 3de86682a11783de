"""The prepared scheduler: advances with the optimizer, ``num_processes`` steps at a time."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Sequence
from typing import Any

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from accelerate.core.errors import warn_user
from accelerate.facade.gradient_state import GradientState
from accelerate.facade.optimizer import AcceleratedOptimizer
from accelerate.world import collective

_UNPREPARED_OPTIMIZER = (
    "scheduler.step() of a prepared scheduler whose optimizer was not prepared: each call counts as a step, "
    "since whether it stepped is not known. Prepare it too, in any order, or pass "
    "Accelerator(step_scheduler_with_optimizer=False)"
)


class AcceleratedScheduler:
    """The wrapper of the user's learning rate scheduler.

    Its length is taken to be counted in batches of the unsharded loader, of which one step consumes one per
    process; so each optimizer step advances it by the number of processes. One that goes by a metric
    (``ReduceLROnPlateau``) counts evaluations, and advances by 1; the mean of the metric over all processes
    counts, and each of them calls ``step``.

    Args:
        scheduler: the user's.
        optimizers: the prepared optimizer or optimizers it follows.
        step_with_optimizer: False advances once at every call, whatever the optimizer did.
        split_batches: the loader's batch is that of all processes, so each step advances once, as it does
            with ``GradientAccumulationPlugin(step_scheduler_once=True)``.
    """

    step_with_optimizer: bool
    split_batches: bool
    gradient_state: GradientState

    def __init__(
        self, scheduler: Any, optimizers: Any, step_with_optimizer: bool = True, split_batches: bool = False
    ) -> None:
        self.scheduler = scheduler
        self.optimizers: Sequence[Any] = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
        self.step_with_optimizer, self.split_batches = step_with_optimizer, split_batches
        self.gradient_state = GradientState()
        self._is_metric_based = isinstance(scheduler, ReduceLROnPlateau)
        self._metric = _find_metric(scheduler)
        self._has_warned = self._has_warned_unprepared = False
        self._overrun_monitor = ScheduleEndMonitor(scheduler)
        # The number of data shards; None: no Accelerator has bound it, and it is the world size.
        self.data_shards: int | None = None

    def bind(self, gradients: GradientState, data_shards: int | None = None) -> AcceleratedScheduler:
        """Bind it to one ``Accelerator`` with so many data shards; return itself."""
        self.gradient_state, self.data_shards = gradients, data_shards
        return self

    def follow_optimizer(self, optimizer: Any) -> None:
        """Advance with a prepared optimizer, if the user's scheduler was made for it."""
        made_for = getattr(self.scheduler, "optimizer", None)
        if made_for is optimizer.optimizer or (made_for is not None and not self.optimizers):
            self.optimizers = [optimizer]

    def __getattr__(self, name: str) -> Any:
        if name in ("scheduler", "__setstate__"):
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance, if the optimizer did; one that was never prepared counts as having stepped."""
        self._take_omitted_steps()
        count = self._count_advances()
        if count == 0:
            return
        if self._metric is not None:
            args, kwargs = self._agree_on_metric(self._metric, args, kwargs)
        if count > 1:
            self._overrun_monitor.check_step(self.optimizers, count)
        # A one-cycle schedule raises when it is stepped past its end.
        end = getattr(self.scheduler, "total_steps", None) if self.step_with_optimizer else None
        while count and (end is None or getattr(self.scheduler, "_step_count", 0) <= end):
            self.scheduler.step(*args, **kwargs)
            count -= 1

    def _take_omitted_steps(self) -> None:
        for optimizer in self.optimizers:
            if isinstance(optimizer, AcceleratedOptimizer):
                optimizer.take_omitted_step("scheduler.step()")

    def _count_advances(self) -> int:
        """Return how many steps of the schedule are due after what the optimizer did last."""
        state = self.gradient_state
        if not self.step_with_optimizer:
            return 1
        if not state.sync_gradients:
            return 0
        if not self.optimizers and not self._has_warned_unprepared:
            self._has_warned_unprepared = True
            warn_user(_UNPREPARED_OPTIMIZER)
        if self._is_metric_based:
            return 1
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return 0
        is_once = self.split_batches or state.plugin_kwargs.get("step_scheduler_once", False)
        return 1 if is_once else self.data_shards or collective.world_size()

    def _agree_on_metric(
        self, metric: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with the mean of the metric over all processes; collective."""
        if collective.world_size() == 1:
            return args, kwargs
        place, name = metric
        value = args[place] if place < len(args) else kwargs.get(name)
        if value is None:
            return args, kwargs
        values = collective.compare_objects(float(value), f"scheduler.step({name})")
        if all(other == values[0] or (math.isnan(other) and math.isnan(values[0])) for other in values):
            return args, kwargs
        mean = sum(values) / len(values)
        if not self._has_warned and collective.rank() == 0:
            self._has_warned = True
            warn_user(
                f"{type(self.scheduler).__name__}.step() was given another metric on each process, from "
                f"{min(values):.6g} to {max(values):.6g}: their mean {mean:.6g} counts, so that the learning "
                "rate stays one. accelerator.gather_for_metrics gives each the metric of all samples"
            )
        if place < len(args):
            return (*args[:place], mean, *args[place + 1 :]), kwargs
        return args, {**kwargs, name: mean}

    def get_last_lr(self) -> list[float]:
        """Return the last learning rates of the inner scheduler."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> list[float]:
        """Return the learning rates that the inner scheduler computes."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> None:
        """Call ``print_lr`` of the inner scheduler."""
        self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the inner scheduler."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the inner scheduler."""
        self.scheduler.load_state_dict(state_dict)


class ScheduleEndMonitor:
    """Warns, once and on rank 0, when training continues after the end of a schedule.

    The usual reason: its length is the number of optimizer steps, and it advances by one per process.

    Args:
        scheduler: the user's.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.zero_steps, self.has_warned = scheduler, 0, False

    def check_step(self, optimizers: Sequence[Any], processes: int) -> None:
        """Check the step that the optimizer has just taken, before the schedule advances."""
        if self.has_warned:
            return
        # Of another length after load_state of a longer or shorter schedule.
        epoch, length = getattr(self.scheduler, "last_epoch", 0), schedule_length(self.scheduler)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        # A rate that is a tensor may live on a device, and asking would wait for it.
        plain = [rate for group in groups if isinstance(rate := group["lr"], float | int)]
        zero = epoch > 0 and bool(plain) and max(plain) <= 0
        self.zero_steps = self.zero_steps + 1 if zero else 0
        if length is not None and epoch >= length:
            self._warn(f"has {length} steps and was at step {epoch}", processes)
        elif plain and min(plain) < 0:
            self._warn(f"gave a learning rate of {min(plain):.3g} at its step {epoch}", processes)
        elif self.zero_steps > 1:
            self._warn(f"gives a learning rate of 0 since its step {epoch - processes}", processes)

    def _warn(self, what: str, processes: int) -> None:
        self.has_warned = True
        if collective.rank() == 0:
            warnings.warn(
                f"the schedule {type(self.scheduler).__name__} {what} when the optimizer stepped: each "
                f"optimizer step advances it by {processes}, one for each process. If its length counts "
                "optimizer steps, use Accelerator(gradient_accumulation_plugin="
                "GradientAccumulationPlugin(step_scheduler_once=True)); otherwise count the batches of the "
                "loader before prepare",
                stacklevel=4,
            )


def _find_metric(scheduler: Any) -> tuple[int, str] | None:
    """Return position and name of the argument of ``scheduler.step`` that takes a metric, if there is one."""
    step = getattr(scheduler, "step", None)
    try:
        names = list(inspect.signature(step).parameters) if callable(step) else []
    except ValueError:  # a function that tells nothing of itself
        return None
    return next(((place, name) for place, name in enumerate(names) if name in ("metrics", "metric")), None)


def schedule_length(scheduler: Any) -> int | None:
    """Return the number of steps until a schedule ends; None where that is not known.

    A warm-up ends too, and training goes on at the rate it has reached: that is no end.
    """
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        last = schedule_length(scheduler._schedulers[-1])
        return None if last is None else scheduler._milestones[-1] + last
    if isinstance(scheduler, lr_scheduler.OneCycleLR):
        return scheduler.total_steps
    if isinstance(scheduler, lr_scheduler.CosineAnnealingLR):
        return scheduler.T_max
    if isinstance(scheduler, lr_scheduler.PolynomialLR):
        return scheduler.total_iters
    if isinstance(scheduler, lr_scheduler.LinearLR) and scheduler.end_factor < scheduler.start_factor:
        return scheduler.total_iters
    return None
