"""Profiles by torch.profiler: one trace and one picture of the memory per rank."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.core import packages
from accelerate.core.argument_checks import KwargsHandler, check_arguments
from accelerate.core.errors import MissingExtraError, SettingError, UnknownNameError
from accelerate.core.value_types import NonNegativeInt, PathText

if TYPE_CHECKING:
    from torch.profiler import profile

    from accelerate.device.base import Device

PROFILE_PATTERN_NAME = "profile_{suffix}.json"
MEMORY_PATTERN_NAME = "memory_{suffix}.png"
OPERATORS_PATTERN_NAME = "operators_{suffix}.txt"
OUT_OF_MEMORY_PATTERN_NAME = "out_of_memory_{suffix}.txt"


@check_arguments
@dataclass
class ProfileKwargs(KwargsHandler):
    """Options of ``torch.profiler.profile`` (see there).

    Attributes:
        activities: the activities to record, by the names of ``torch.profiler.ProfilerActivity`` in any case
            (``"cpu"`` and the accelerator's); None records all that torch supports here.
        schedule_option: arguments of ``torch.profiler.schedule``; ``active`` is needed. None records from
            the start to the end.
        on_trace_ready: called with the profiler whenever a recorded cycle is complete.
        output_trace_dir: where ``Accelerator.profile`` writes one Chrome trace per process,
            ``profile_<rank>.json``, when a cycle is complete; a later cycle replaces it. None writes none.
        memory_timeline: beside each trace, ``memory_<rank>.png``: which kinds of tensors fill the memory of
            each device over time. Turns on ``profile_memory``, ``record_shapes`` and ``with_stack``, which
            tell the kinds. Needs matplotlib.
        operator_table: how many rows a table of the costliest operators has, by their own time on the
            accelerator, or on the CPU where nothing ran on one. It is written beside each trace as
            ``operators_<rank>.txt``; without ``output_trace_dir`` rank 0 prints the last complete one at the
            end. 0 makes none.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: PathText | None = None
    memory_timeline: bool = False
    operator_table: NonNegativeInt = 0

    def build(self) -> profile:
        """Return the profiler, not started yet.

        Raises:
            UnknownNameError: torch has no such activity.
            SettingError: a memory timeline is requested without a folder.
            MissingExtraError: the memory timeline needs matplotlib.
        """
        import torch

        pictures = self.memory_timeline
        if pictures:
            self._check_pictures()
        schedule = None if self.schedule_option is None else torch.profiler.schedule(**self.schedule_option)
        return torch.profiler.profile(
            activities=None
            if self.activities is None
            else [_find_activity(name) for name in self.activities],
            schedule=schedule,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes or pictures,
            profile_memory=self.profile_memory or pictures,
            with_stack=self.with_stack or pictures,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )

    def _check_pictures(self) -> None:
        if self.output_trace_dir is None:
            raise SettingError(
                "memory_timeline=True draws a picture, and no folder is given for it",
                fix="ProfileKwargs(memory_timeline=True, output_trace_dir='traces')",
            )
        if not packages.is_installed("matplotlib"):
            raise MissingExtraError("matplotlib", "ProfileKwargs(memory_timeline=True)")


@contextmanager
def record_profile(options: ProfileKwargs, rank: int) -> Generator[profile]:
    """Profile the block, and write the files of ``options`` whenever a cycle is complete.

    A file is complete or absent. Records from before an error in the block are written too.

    Args:
        options: the activities to record and the folder for files.
        rank: the rank of this process, for the names of the files.

    Raises:
        SettingError: ``on_trace_ready`` has exported a trace that this function must export as well.
    """
    profiler = options.build()
    folder, rows = options.output_trace_dir, options.operator_table
    if folder is None and not (rows and rank == 0):
        with profiler:
            yield profiler
        return
    table = ""
    is_complete = ending = False

    def write(ready: profile) -> None:
        nonlocal table, is_complete
        if options.on_trace_ready is not None:
            options.on_trace_ready(ready)
        # A cycle that is cut short by the end of the block does not replace a complete one.
        if ending and is_complete:
            return
        if folder is None:
            table = show_operators(ready, rows)
        else:
            _write_files(ready, Path(folder), rank, options)
        is_complete = True

    profiler.on_trace_ready = write
    with profiler:
        try:
            yield profiler
        finally:
            ending = True
    if not is_complete:
        product = "no table was made" if folder is None else f"no trace was written to {folder}"
        warnings.warn(
            f"{product}: the profile ended before a cycle of schedule_option="
            f"{options.schedule_option} began to record; call profiler.step() after every step",
            stacklevel=4,
        )
    elif folder is None:
        print(f"the costliest operators of rank 0:\n{table}")


def write_holders(
    options: ProfileKwargs, rank: int, hardware: Device, models: Iterable[Any], optimizers: Iterable[Any]
) -> None:
    """Write which tensors hold the memory of a device that is full, and say where on stderr.

    Args:
        options: whose folder the file goes to.
        rank: of this process.
        hardware: the device.
        models, optimizers: whose tensors are named.
    """
    from accelerate.watch.memory_report import describe_holders  # torch

    folder = Path(options.output_trace_dir or ".")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / OUT_OF_MEMORY_PATTERN_NAME.format(suffix=rank)
    text = describe_holders(hardware, models, optimizers)
    write_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))
    print(f"rank {rank} ran out of memory: {path} says which tensors hold it", file=sys.stderr)


def show_operators(profiler: profile, rows: int) -> str:
    """Return a table of the operators that took the most time themselves, without the ones they call.

    Args:
        profiler: whose recording has ended.
        rows: how many operators; the lines below the table say the time of all.
    """
    operators = profiler.key_averages()
    on_device = any(operator.self_device_time_total for operator in operators)
    return operators.table(
        sort_by="self_device_time_total" if on_device else "self_cpu_time_total",
        row_limit=rows,
        max_name_column_width=60,
    )


def _write_files(profiler: profile, folder: Path, rank: int, options: ProfileKwargs) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / PROFILE_PATTERN_NAME.format(suffix=rank), lambda path: _export(profiler, path))
    if options.operator_table:
        text = show_operators(profiler, options.operator_table)
        write_atomically(
            folder / OPERATORS_PATTERN_NAME.format(suffix=rank),
            lambda path: path.write_text(text, encoding="utf-8"),
        )
    if options.memory_timeline:
        from accelerate.watch import memory_report  # numpy and torch: only where a picture is drawn

        lines = memory_report.read_timelines(profiler)
        write_atomically(
            folder / MEMORY_PATTERN_NAME.format(suffix=rank),
            lambda path: memory_report.draw_timelines(lines, path),
        )


def _export(profiler: profile, path: Path) -> None:
    try:
        profiler.export_chrome_trace(str(path))
    except RuntimeError as error:
        if "already saved" not in str(error):
            raise
        raise SettingError(
            "the trace was exported by on_trace_ready, and output_trace_dir exports it too",
            why="torch writes a trace once",
            fix="leave one of the two out",
        ) from error


def write_atomically(path: Path, fill: Callable[[Path], object]) -> None:
    """Write the file at ``path`` under another name, and rename it when it is complete."""
    part = path.with_name(f".{path.name}")
    try:
        fill(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _find_activity(name: str) -> Any:
    from torch.profiler import ProfilerActivity, supported_activities

    activities: dict[str, Any] = {each.lower(): value for each, value in ProfilerActivity.__members__.items()}
    if name.lower() not in activities:
        raise UnknownNameError("profiler activity", name, activities)
    activity = activities[name.lower()]
    if activity not in supported_activities():
        warnings.warn(
            f"the profiler cannot record {name!r} on this machine: it records nothing there", stacklevel=4
        )
    return activity
