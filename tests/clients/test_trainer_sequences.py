"""transformers' Trainer on sequences that two processes share gives the numbers of one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from accelerate.core import packages
from tests.clients.record import launch

pytest.importorskip("transformers", reason="the client needs Python 3.11")
pytestmark = pytest.mark.timeout(240)

JOBS = ["keys", "keys_in_windows"]
if packages.installed("deepspeed"):
    JOBS.append("heads")  # the client asks that library for the group


def run(size: int) -> dict[str, Any]:
    return launch(Path(sys.executable), size, "tests.clients.trainer_sequences", *JOBS)


def test_it_trains_and_evaluates_as_alone() -> None:
    """Losses that are logged, norms, rates, and the loss of an evaluation, which is no sum over processes."""
    alone, shared = run(1), run(2)
    for job in JOBS:
        assert alone[job].keys() == shared[job].keys()
        for what, value in alone[job].items():
            assert shared[job][what] == pytest.approx(value, abs=1e-5), (job, what)
