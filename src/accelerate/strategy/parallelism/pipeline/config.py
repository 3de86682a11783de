"""``PipelineParallelConfig``: the options of pipeline parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from accelerate.core.argument_checks import check_arguments
from accelerate.core.errors import SettingError, UnknownNameError
from accelerate.core.value_types import PositiveInt

SCHEDULES = ("gpipe", "1f1b", "interleaved")


@check_arguments
@dataclass
class PipelineParallelConfig:
    """Pipeline options: ``ParallelismConfig(pp_size=2, pp_handler=PipelineParallelConfig(...))``.

    Attributes:
        num_microbatches: the number of micro-batches of a batch; None takes twice as many as stages.
            More of them leave smaller bubbles, and each is smaller.
        schedule: ``"gpipe"``: all micro-batches forward, then all backward; the loss may be anything,
            anywhere.
            ``"1f1b"``: forwards and backwards alternate, which keeps fewer activations; the loss must be in
            the model, or ``loss_fn``. ``"interleaved"``: the same with several stages on each process.
        split_points: names of the first module of every stage but the first; ``"auto"`` makes the stages even
            in bytes.
        no_split_module_classes: class names of modules that ``"auto"`` does not open; None takes what the
            model itself says (``_no_split_modules``).
        on_all_stages: names of small modules that every process has: those that several stages call, or whose
            weights are used outside of them.
        stages_per_process: stages on each process, for ``"interleaved"``.
        loss_fn: for ``"1f1b"`` and a model that gives outputs: takes them and the keyword ``target`` of the
            call, gives the mean loss. The call gives the loss.
        items: for the same schedules: takes the arguments of the model for one chunk, gives how many items
            its loss is the mean of, where chunks differ in that.
    """

    num_microbatches: PositiveInt | None = None
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "gpipe"
    split_points: str | list[str] = "auto"
    no_split_module_classes: list[str] | None = None
    on_all_stages: list[str] = field(default_factory=list)
    stages_per_process: PositiveInt = 1
    loss_fn: Callable[..., Any] | None = None
    items: Callable[..., Any] | None = None

    def settle(self, processes: int) -> None:
        """Fill in defaults, and refuse options that do not go together.

        Args:
            processes: how many have the stages of one model.

        Raises:
            UnknownNameError: there is no such schedule.
            SettingError: too few chunks or stages.
        """
        if self.schedule not in SCHEDULES:
            raise UnknownNameError("schedule", self.schedule, SCHEDULES)
        if isinstance(self.split_points, str) and self.split_points != "auto":
            self.split_points = [self.split_points]
        if self.schedule == "interleaved" and self.stages_per_process == 1:
            self.stages_per_process = 2
        if self.schedule != "interleaved" and self.stages_per_process != 1:
            raise SettingError(
                f"stages_per_process={self.stages_per_process} with schedule={self.schedule!r}",
                why="with it each process has one stage",
                fix="schedule='interleaved', or leave stages_per_process out",
            )
        stages = processes * self.stages_per_process
        if self.num_microbatches is None:
            self.num_microbatches = 2 * stages
        least = 1 if self.schedule == "gpipe" else stages
        if self.num_microbatches < least:
            raise SettingError(
                f"num_microbatches={self.num_microbatches} is too few for {stages} stages and "
                f"schedule={self.schedule!r}",
                fix=f"give {least} or more",
            )
        if self.schedule == "interleaved" and self.num_microbatches % processes:
            raise SettingError(
                f"num_microbatches={self.num_microbatches} is no multiple of the {processes} processes",
                why="an interleaved schedule sends one chunk for each process before the next stage begins",
                fix=f"num_microbatches={-(-self.num_microbatches // processes) * processes}",
            )
