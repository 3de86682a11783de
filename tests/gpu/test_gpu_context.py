"""Sequences that two accelerators share: the numbers of one CPU process.

Keys are gathered, or heads exchanged, by this package's own exchange around the device's attention. Torch's
ring attention is not used: it needs several accelerators to be tried, and is refused until then.
"""

from __future__ import annotations

from typing import Any

import pytest

from accelerate.device.base import Device
from tests.support.ranks import RankServer
from tests.support.sequences import Jobs, Numbers, alone, close, shared

JOBS: Jobs = [
    ("llama", {"cp_size": 2}, 8, 4, False),
    ("llama", {"cp_size": 2}, 4, 1, True),
    ("mistral", {"sp_size": 2}, 4, 2, True),
    ("plain", {"sp_size": 2}, 4, 1, False),
]


def trained_all(jobs: Jobs, cpu: bool) -> list[Numbers]:
    """Several trainings in one start of processes."""
    return [shared(*job, cpu=cpu) for job in jobs]


def test_two_accelerators_train_to_the_numbers_of_one_process(ranks: RankServer, device: Device) -> None:
    """B1, B9"""
    if device.count() < 2:
        pytest.skip(f"two {device.type} devices are needed, and there is one")
    where = [f"{device.type}:0", f"{device.type}:1"]
    found: Any = ranks(2, trained_all, JOBS, False, devices=where)
    for job, *numbers in zip(JOBS, *found, strict=True):
        kind, _, steps, window, padded = job
        one = alone(kind, steps, window, padded)
        for losses, norms, _ in numbers:
            close((losses, norms, {n: v.cpu() for n, v in numbers[0][2].items()}), one, 1e-4)
