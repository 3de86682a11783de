"""The prepared scheduler: advances with the optimizer, ``num_processes`` steps at a time."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from accelerate.core.errors import PrepareError
from accelerate.facade.gradient import GradientState
from accelerate.world import collective


class AcceleratedScheduler:
    """Stands before the user's learning rate scheduler.

    Its length is taken to be counted in batches of the unsharded loader, of which one step consumes one per
    process; so each optimizer step advances it by the number of processes. One that goes by a metric
    (``ReduceLROnPlateau``) counts evaluations, and advances by 1.

    Args:
        scheduler: the user's.
        optimizers: the prepared optimizer or optimizers it follows.
        step_with_optimizer: False advances once at every call, whatever the optimizer did.
        split_batches: the loader's batch is that of all processes, so each step advances once, as it does
            with ``GradientAccumulationPlugin(step_scheduler_once=True)``.
    """

    def __init__(
        self, scheduler: Any, optimizers: Any, step_with_optimizer: bool = True, split_batches: bool = False
    ) -> None:
        self.scheduler = scheduler
        self.optimizers: Sequence[Any] = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
        self.step_with_optimizer, self.split_batches = step_with_optimizer, split_batches
        self.gradient_state = GradientState()
        self._total_steps: int | None = getattr(scheduler, "total_steps", None)
        self._by_metric = isinstance(scheduler, ReduceLROnPlateau)
        self._overrun = Overrun(scheduler)
        # Into how many the data are shared out; None: as many as there are processes.
        self._parts: int | None = None

    def bind(self, gradients: GradientState, parts: int | None = None) -> AcceleratedScheduler:
        """Ties it to one ``Accelerator``, whose data are shared out into so many parts; returns itself."""
        self.gradient_state, self._parts = gradients, parts
        return self

    def follow(self, optimizer: Any) -> None:
        """Follows a prepared optimizer, if it is the one the user's scheduler was made for."""
        made_for = getattr(self.scheduler, "optimizer", None)
        if made_for is optimizer.optimizer or (made_for is not None and not self.optimizers):
            self.optimizers = [optimizer]

    def __getattr__(self, name: str) -> Any:
        if name in ("scheduler", "__setstate__"):
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advances, if the optimizer did.

        Raises:
            PrepareError: the optimizer was never prepared, so what it does is not known.
        """
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            return
        if not self.optimizers:
            raise _without_optimizer()
        if self._by_metric:
            self.scheduler.step(*args, **kwargs)
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        once = self.split_batches or self.gradient_state.plugin_kwargs.get("step_scheduler_once", False)
        processes = 1 if once else self._parts or collective.size()
        if processes > 1:
            self._overrun.watch(self.optimizers, processes)
        for _ in range(processes):
            self._advance(*args, **kwargs)

    def _advance(self, *args: Any, **kwargs: Any) -> None:
        # A one-cycle schedule raises when it is stepped past its end.
        total = self._total_steps
        if total is None or self.scheduler._step_count <= total:
            self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """The inner scheduler's."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> list[float]:
        """The inner scheduler's."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> None:
        """The inner scheduler's."""
        self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The inner scheduler's."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads into the inner scheduler."""
        self.scheduler.load_state_dict(state_dict)


class Overrun:
    """Announces, once and on the main process, that training goes on after the end of a schedule.

    The usual reason: its length is the number of optimizer steps, and it advances by one per process.

    Args:
        scheduler: the user's.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.end = scheduler, end_of(scheduler)
        self.zeros, self.announced = 0, False

    def watch(self, optimizers: Sequence[Any], processes: int) -> None:
        """Looks at the step that the optimizer has just taken, before the schedule advances."""
        if self.announced:
            return
        epoch = getattr(self.scheduler, "last_epoch", 0)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        # A rate that is a tensor may live on a device, and asking would wait for it.
        plain = [rate for group in groups if isinstance(rate := group["lr"], float | int)]
        zero = epoch > 0 and bool(plain) and max(plain) <= 0
        self.zeros = self.zeros + 1 if zero else 0
        if self.end is not None and epoch >= self.end:
            self._announce(f"has {self.end} steps and was at step {epoch}", processes)
        elif plain and min(plain) < 0:
            self._announce(f"gave a learning rate of {min(plain):.3g} at its step {epoch}", processes)
        elif self.zeros > 1:
            self._announce(f"gives a learning rate of 0 since its step {epoch - processes}", processes)

    def _announce(self, what: str, processes: int) -> None:
        self.announced = True
        if collective.rank() == 0:
            warnings.warn(
                f"the schedule {type(self.scheduler).__name__} {what} when the optimizer stepped: each "
                f"optimizer step advances it by {processes}, one for each process. If its length counts "
                "optimizer steps, use Accelerator(gradient_accumulation_plugin="
                "GradientAccumulationPlugin(step_scheduler_once=True)); otherwise count the batches of the "
                "loader before prepare",
                stacklevel=4,
            )


def end_of(scheduler: Any) -> int | None:
    """After how many steps a schedule has nothing more to say; None where that is not known.

    A warm-up ends too, and training goes on at the rate it has reached: that is no end.
    """
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        last = end_of(scheduler._schedulers[-1])
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


def _without_optimizer() -> PrepareError:
    return PrepareError(
        "scheduler.step() of a prepared scheduler whose optimizer was not prepared",
        why="it advances when the optimizer steps, and that is not known here",
        fix="optimizer, scheduler = accelerator.prepare(optimizer, scheduler), in any order, or "
        "Accelerator(step_scheduler_with_optimizer=False)",
    )
