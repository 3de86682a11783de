"""transformers' Trainer on layers that two processes share gives the numbers of one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.record import launch

pytest.importorskip("transformers", minversion="5", reason="the client needs Python 3.11")
pytestmark = pytest.mark.timeout(240)

JOBS = ["whole", "loaded"]


def run(size: int) -> dict[str, Any]:
    return launch(Path(sys.executable), size, "tests.clients.trainer_layers", *JOBS)


def test_it_trains_and_writes_as_alone() -> None:
    """B1, PAINS 48: losses, norms, an evaluation that counts each row once, and the model that is written."""
    alone, shared = run(1), run(2)
    for job in JOBS:
        assert alone[job].keys() == shared[job].keys()
        for what, value in alone[job].items():
            assert shared[job][what] == pytest.approx(value, abs=1e-5, rel=1e-6), (job, what)
