"""The records of a run: its numbers, its ranks, which of them are slow, and what it stands on."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# JSON has no such numbers: the tracker writes them as protocol buffers do.
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# A rank is a straggler when it takes so many times the median of the ranks, for so many steps in a row.
SLOW_RATIO, SLOW_STEPS = 1.5, 20


@dataclass
class Series:
    """One logged number over a run.

    Attributes:
        steps: the step of each value; the count of values before it where none was given.
        times: seconds since the run began.
        values: what was logged; may be NaN or infinite.
    """

    steps: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, step: float | None, seconds: float, value: float) -> None:
        """Append one value."""
        self.steps.append(len(self.steps) if step is None else step)
        self.times.append(seconds)
        self.values.append(value)

    def __len__(self) -> int:
        return len(self.values)


@dataclass
class RankSteps:
    """The optimizer steps of one rank, each list as long as the others.

    Attributes:
        steps: the number of each step.
        times: seconds since the run began, at its end.
        seconds: from the end of the step before.
        data_wait: seconds of these in which the training waited for a batch.
        forward: seconds of these from a batch to its backward.
        memory: bytes of the device's memory that were reserved at most; of the process without a device.
        samples: of the batches of the step, of all ranks.
        tokens: this rank's share of those of the step; NaN where the batches have none.
        peak_memory: the largest of ``memory``.
    """

    steps: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    data_wait: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    peak_memory: float = 0.0

    def data_wait_share(self, steps: slice = slice(None)) -> str:
        """Return the share of the time of these steps in which the training waited for data, as a text."""
        waited, total = sum(self.data_wait[steps]), sum(self.seconds[steps])
        return f"{100 * waited / total:.0f} %" if total > 0 else "-"


@dataclass
class RunRecord:
    """One run of a training.

    Attributes:
        name: ``run_name``, with more where several runs that are read together have it.
        path: the file, or the folder of the files of its ranks.
        start: seconds since 1970.
        end: of its last record.
        status: ``finished``, ``failed`` or ``not ended``.
        config: hyperparameters that the script gave.
        series: what the script logged, by name; nested names are joined by ``/``.
        texts: the last text of each name.
        tables: tables by name: columns and rows.
        artifacts: paths and sizes in bytes.
        ranks: the steps of each rank, of a run that was recorded.
        checkpoints: step, path, bytes and seconds of each save, of a run that was recorded.
        events: of ``--check_numerics``: rank, step, what was noticed, where, and samples of the batch.
        environment: versions, devices, settings with their origins, of a run that was recorded.
        models: parameters and format of each prepared model, and the peak of the device in that format.
        run_name: as the tracker or the folder calls it; ``name`` by default.
        bad_lines: how many lines are no record.
        torn_files: files whose last line is not whole: a run was killed in the middle of it.
    """

    name: str
    path: Path
    start: float = 0.0
    end: float = 0.0
    status: str = "not ended"
    config: dict[str, Any] = field(default_factory=dict)
    series: dict[str, Series] = field(default_factory=lambda: defaultdict(Series))
    texts: dict[str, str] = field(default_factory=dict)
    tables: dict[str, tuple[list[Any], list[list[Any]]]] = field(default_factory=dict)
    artifacts: list[dict[str, Any]] = field(default_factory=list)
    ranks: dict[int, RankSteps] = field(default_factory=lambda: defaultdict(RankSteps))
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    models: list[dict[str, Any]] = field(default_factory=list)
    run_name: str = ""
    bad_lines: int = 0
    torn_files: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.run_name = self.run_name or self.name

    @property
    def unreadable(self) -> int:
        """The number of lines that are no record."""
        return self.bad_lines + len(self.torn_files)

    def add(self, record: Mapping[str, Any], rank: int = 0) -> None:
        """Take one record of the file of a rank."""
        time = float(record.get("time", self.end))
        self.start = self.start or time
        self.end = max(self.end, time)
        if "values" in record:
            self._add_values(_by_name(record, "values"), record.get("step"), time - self.start)
        elif "optimizer_step" in record:
            self._add_step(record, rank, time - self.start)
        elif "config" in record:
            self.config |= _by_name(record, "config")
        elif "environment" in record:
            self.environment |= record["environment"] if rank == 0 else {}
        elif "checkpoint" in record:
            self.checkpoints.append(dict(record))
        elif "model" in record:
            self.models.append(record["model"])
        elif "numerics" in record:
            self.events.append({**record, "rank": rank})
        elif "table" in record:
            self.tables[str(record["table"])] = (list(record["columns"]), list(record["rows"]))
        elif "artifact" in record:
            self.artifacts.append(dict(record))
        elif "end" in record and rank == 0:
            self.status = str(record["end"])

    def own_seconds(self, steps: slice = slice(None)) -> dict[int, list[float]]:
        """Return the seconds in which each rank did not wait for others; all of them where that is not known.

        Ranks that exchange gradients take the same time for a step: the fast ones wait for the slow one. All
        ranks are compared by the same time.

        Args:
            steps: the indices of the steps; all of them by default.
        """
        if not all(any(each.forward[steps]) for each in self.ranks.values()):
            return {rank: each.seconds[steps] for rank, each in self.ranks.items()}
        return {
            rank: [wait + own for wait, own in zip(each.data_wait[steps], each.forward[steps], strict=True)]
            for rank, each in self.ranks.items()
        }

    def _add_values(
        self, values: Mapping[str, Any], step: float | None, seconds: float, prefix: str = ""
    ) -> None:
        for key, value in values.items():
            name = f"{prefix}{key}"
            if isinstance(value, Mapping):
                self._add_values(value, step, seconds, f"{name}/")
            elif isinstance(value, int | float):
                self.series[name].add(step, seconds, float(value))
            elif isinstance(value, str) and value in _NOT_FINITE:
                self.series[name].add(step, seconds, _NOT_FINITE[value])
            else:
                self.texts[name] = value if isinstance(value, str) else json.dumps(value)

    def _add_step(self, record: Mapping[str, Any], rank: int, seconds: float) -> None:
        number, get, steps = float(record["optimizer_step"]), record.get, self.ranks[rank]
        tokens = get("tokens")
        steps.steps.append(number)
        steps.times.append(seconds)
        for name in ("seconds", "data_wait", "forward", "memory", "samples"):
            getattr(steps, name).append(get(name) or 0.0)
        steps.peak_memory = max(steps.peak_memory, steps.memory[-1])
        steps.tokens.append(math.nan if tokens is None else tokens)
        for group, rate in enumerate(get("lr", ()) if rank == 0 else ()):
            name = f"learning rate, group {group}" if len(record["lr"]) > 1 else "learning rate"
            self.series[name].add(number, seconds, float(rate))


def _by_name(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the values of a record by their names; a list or a text, which has none, under ``name``."""
    return record[name] if isinstance(record[name], Mapping) else {name: record[name]}


def downsample(x: np.ndarray, y: np.ndarray, count: int) -> np.ndarray:
    """Choose the points of a curve that keep its shape: largest triangle three buckets (LTTB).

    S. Steinarsson, "Downsampling Time Series for Visual Representation", 2013, section 4.2: the first and
    the last point stay; of each bucket between them the one stays that spans the largest triangle with the
    point chosen before and the mean of the next bucket.

    Args:
        x: shape ``(n,)``, ascending.
        y: shape ``(n,)``, finite.
        count: how many points stay, 3 or more.

    Returns:
        Indices, shape ``(min(n, count),)``, ascending.
    """
    if len(x) <= count:
        return np.arange(len(x))
    edges = np.linspace(1, len(x) - 1, count - 1).astype(int)
    chosen = [0]
    for start, end, after in zip(edges[:-1], edges[1:], [*edges[2:], len(x)], strict=True):
        next_x, next_y = x[end:after].mean(), y[end:after].mean()
        last = chosen[-1]
        areas = np.abs(
            (x[last] - next_x) * (y[start:end] - y[last]) - (x[last] - x[start:end]) * (next_y - y[last])
        )
        chosen.append(int(start + areas.argmax()))
    return np.array([*chosen, len(x) - 1])


@dataclass
class Straggler:
    """A rank that was slow for ``SLOW_STEPS`` steps or more in a row.

    Attributes:
        first: index of the first of these steps.
        steps: how many there were in the whole run.
        ratio: its time over the median of the ranks, in the median of these steps.
    """

    first: int
    steps: int
    ratio: float

    def describe(self, first_step: float) -> str:
        """Return what is said of it: ``2.1 x the median of the ranks in 40 steps, the first of them 12``."""
        slow = f"{self.ratio:.1f} x the median of the ranks in {self.steps} steps"
        return f"{slow}, the first of them {first_step:g}"


def find_stragglers(times: Mapping[int, Sequence[float]]) -> dict[int, Straggler]:
    """Return the ranks that took more than ``SLOW_RATIO`` times the median for ``SLOW_STEPS`` steps in a row.

    Of an even number of ranks the median is the smaller of the two in the middle, so that the slower one of
    two ranks can be told.

    Args:
        times: rank -> seconds of each step, the same step at the same place.
    """
    count = min(map(len, times.values()), default=0)
    if len(times) < 2 or count < SLOW_STEPS:
        return {}
    table = np.array([values[:count] for values in times.values()], dtype=float)
    medians = np.sort(table, axis=0)[(len(table) - 1) // 2]
    stragglers: dict[int, Straggler] = {}
    for rank, row in zip(times, table, strict=True):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], row > SLOW_RATIO * medians, [0]))))
        runs = [
            (start, end)
            for start, end in zip(edges[::2], edges[1::2], strict=True)
            if end - start >= SLOW_STEPS
        ]
        if runs:
            slow = np.concatenate([np.arange(start, end) for start, end in runs])
            ratio = float(np.median(row[slow] / np.maximum(medians[slow], 1e-9)))
            stragglers[rank] = Straggler(int(runs[0][0]), len(slow), ratio)
    return stragglers
