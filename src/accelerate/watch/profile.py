"""What to profile, handed to torch.profiler."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate.core.errors import UnknownNameError
from accelerate.core.handler import KwargsHandler

if TYPE_CHECKING:
    from torch.profiler import profile

PROFILE_PATTERN_NAME = "profile_{suffix}.json"


@dataclass
class ProfileKwargs(KwargsHandler):
    """Options of ``torch.profiler.profile`` (see there).

    Attributes:
        activities: what to record, by the names of ``torch.profiler.ProfilerActivity`` in any case
            (``"cpu"`` and the accelerator's); None records all that this torch supports here.
        schedule_option: arguments of ``torch.profiler.schedule``; ``active`` is needed. None records from
            the start to the end.
        on_trace_ready: called with the profiler whenever a recorded cycle is complete.
        output_trace_dir: where ``Accelerator.profile`` writes one Chrome trace per rank; None writes none.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> profile:
        """The profiler, not started yet.

        Raises:
            UnknownNameError: torch has no such activity.
        """
        import torch

        schedule = None if self.schedule_option is None else torch.profiler.schedule(**self.schedule_option)
        return torch.profiler.profile(
            activities=None if self.activities is None else [_activity(name) for name in self.activities],
            schedule=schedule,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


def _activity(name: str) -> Any:
    from torch.profiler import ProfilerActivity, supported_activities

    known: dict[str, Any] = {each.lower(): value for each, value in ProfilerActivity.__members__.items()}
    if name.lower() not in known:
        raise UnknownNameError("profiler activity", name, known)
    activity = known[name.lower()]
    if activity not in supported_activities():
        warnings.warn(
            f"the profiler cannot record {name!r} on this machine: it records nothing there", stacklevel=4
        )
    return activity
