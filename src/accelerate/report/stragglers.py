"""Ranks that are slower than the others for many steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# A rank is a straggler when it takes so many times the median of the ranks, for so many steps in a row.
RATIO, STEPS = 1.5, 20


@dataclass
class Straggler:
    """A rank that was slow for ``STEPS`` steps or more in a row.

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
    """Return the ranks that took more than ``RATIO`` times the median for ``STEPS`` steps in a row.

    Of an even number of ranks the median is the smaller of the two in the middle, so that the slower one of
    two ranks can be told.

    Args:
        times: rank -> seconds of each step, the same step at the same place.
    """
    count = min(map(len, times.values()), default=0)
    if len(times) < 2 or count < STEPS:
        return {}
    table = np.array([values[:count] for values in times.values()], dtype=float)
    medians = np.sort(table, axis=0)[(len(table) - 1) // 2]
    stragglers: dict[int, Straggler] = {}
    for rank, row in zip(times, table, strict=True):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], row > RATIO * medians, [0]))))
        runs = [
            (start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if end - start >= STEPS
        ]
        if runs:
            slow = np.concatenate([np.arange(start, end) for start, end in runs])
            ratio = float(np.median(row[slow] / np.maximum(medians[slow], 1e-9)))
            stragglers[rank] = Straggler(int(runs[0][0]), len(slow), ratio)
    return stragglers
