"""The record of a run, for ``accelerate report``: each rank writes its steps to a file of its own."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from accelerate import track
from accelerate.core.user_warning import warn_user
from accelerate.data.position import FetchedBatch
from accelerate.track.base import GeneralTracker, to_json_types
from accelerate.track.protocol.json_lines import JSONLinesFile, TrackerFileError
from accelerate.world.world import World


class RunRecorder(GeneralTracker):
    """Appends the steps of one rank to ``folder/rank_N.jsonl``; the ranks exchange nothing for it.

    Beside the records of ``accelerate.tracking.JSONLTracker``:

        {"environment": {title: {name: value}}}                  rank 0, once
        {"optimizer_step": n, "seconds": s, "data_wait": s, "samples": n, "memory": bytes, "lr": [...]}
        {"checkpoint": path, "seconds": s, "bytes": n, "step": n}    rank 0

    ``seconds`` are from the end of the step before, ``data_wait`` those of them in which the loop waited for
    a batch of a prepared loader. ``samples`` are those of all ranks. ``memory`` is the most that was
    allocated on the device; of a CPU, the most that the process had resident. No step waits for a device.

    Args:
        folder: of the run; on several machines without a shared file system, each has its own.
        world: the ranks, and the device of this one.
    """

    name = "record"
    requires_logging_directory = True
    main_process_only = False

    def __init__(self, folder: Path, world: World) -> None:
        super().__init__()
        self.run_name = f"rank_{world.rank}"
        self._file = JSONLinesFile(folder / f"{self.run_name}.jsonl")
        self._world = world
        self._optimizer: Any = None
        self._step = 0
        self._samples = 0
        self._waited = 0.0
        self._step_end = 0.0
        self._peak: int | None = None
        self._next_lookup = 0.0
        self._has_failed = False

    def start(self) -> None:
        """Open the file; on rank 0, write what the run stands on."""
        self._file.open()
        self._write(start=self.run_name)
        if self._world.rank == 0:
            self._write(environment={"Environment": self._environment()})

    @property
    def tracker(self) -> Path:
        """The file."""
        return self._file.path

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the configuration; what JSON has no type for is written as text."""
        self._write(config=to_json_types(values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write what the script logs."""
        self._write(step=step, values=values)

    def finish(self) -> None:
        """Close the file."""
        if self._file.is_open:
            self._write(end="failed" if self.failed else "finished")
            self._file.close()

    def _environment(self) -> dict[str, Any]:
        return {
            "command": " ".join(sys.argv),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "platform": platform.platform(),
            "processes": self._world.size,
            "device": str(self._world.device),
        }

    def watch(self, kind: str, item: Any) -> None:
        """Begin to record a prepared loader, or the first optimizer, whose steps are counted."""
        if kind == "loader" and hasattr(item, "time_fetches"):
            item.time_fetches = self._time_fetches
        elif kind == "optimizer" and self._optimizer is None:
            self._optimizer = item.optimizer
            register = getattr(self._optimizer, "register_step_post_hook", None)
            if register is not None:  # an engine's optimizer, or one that is no torch.optim.Optimizer
                register(lambda *_: self._record_step())

    def _time_fetches(self, batches: Iterator[FetchedBatch], samples: int) -> Iterator[FetchedBatch]:
        """Yield the batches; ``samples`` is of a batch of all ranks that does not tell."""
        while True:
            start = time.perf_counter()
            self._step_end = self._step_end or start  # the first step begins with its batch
            fetched = next(batches, None)
            self._waited += time.perf_counter() - start
            if fetched is None:
                return
            self._samples += samples if fetched.samples is None else fetched.samples
            yield fetched

    def _record_step(self) -> None:
        now = time.perf_counter()
        self._step += 1
        rates = [
            float(group["lr"]) for group in self._optimizer.param_groups if _is_host_number(group.get("lr"))
        ]
        self._write(
            optimizer_step=self._step,
            seconds=now - (self._step_end or now),
            data_wait=self._waited,
            samples=self._samples,
            memory=self._peak_memory(now),
            lr=rates,
        )
        self._step_end, self._waited, self._samples = time.perf_counter(), 0.0, 0

    def _peak_memory(self, now: float) -> int | None:
        """Return the peak, looked up once in a second: a lookup on a CPU takes longer than a small step."""
        if now >= self._next_lookup:
            self._next_lookup, self._peak = now + 1, self._world.hardware.max_memory_allocated()
        return self._peak

    def _write(self, **record: Any) -> None:
        """Write a line; a disk that is full ends the record, not the training."""
        if self._has_failed:
            return
        try:
            self._file.write(**record)
        except TrackerFileError as error:
            self._has_failed = True
            warn_user(f"the run is not recorded any more, and the training goes on: {error}")

    def record_checkpoint(self, path: Path | str, seconds: float) -> None:
        """Write one save; of a save in the background, ``seconds`` are those that the training waited."""
        if self._world.rank == 0:
            files = list(os.walk(path)) if isinstance(path, Path) else []
            size = sum(os.path.getsize(Path(folder, name)) for folder, _, names in files for name in names)
            self._write(checkpoint=str(path), seconds=seconds, bytes=size or None, step=self._step)


def _is_host_number(value: Any) -> bool:
    """Return whether a learning rate can be read without waiting for a device."""
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.device.type == "cpu")


def start_recorder(folder: str, world: World) -> RunRecorder:
    """Return the recorder of this process, open; several ``Accelerator`` of a process share one.

    Raises:
        TrackerFileError: its file cannot be made.
    """
    for tracker in track.open_trackers():
        if isinstance(tracker, RunRecorder):
            return tracker
    recorder = RunRecorder(Path(folder), world)
    track.start_run(recorder)
    return recorder
