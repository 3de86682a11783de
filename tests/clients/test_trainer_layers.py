"""transformers' Trainer on layers that two processes share gives the numbers of one process."""

from __future__ import annotations

import pytest

from tests.clients.probe import run_jobs_on_ranks
from tests.support.ranks import RankServer

pytest.importorskip("transformers", minversion="5", reason="the client needs Python 3.11")
pytestmark = pytest.mark.timeout(240)

CLIENT = "tests.clients.trainer_layers"
# What the rank server imports once.
PRELOAD = ("transformers.trainer", CLIENT)
JOBS = ["whole", "loaded"]


def test_it_trains_and_writes_as_alone(ranks: RankServer) -> None:
    """B1, PAINS 48: losses, norms, an evaluation that counts each row once, and the model that is written."""
    alone, shared = (run_jobs_on_ranks(ranks, size, CLIENT, *JOBS) for size in (1, 2))
    for job in JOBS:
        assert alone[job].keys() == shared[job].keys()
        for what, value in alone[job].items():
            assert shared[job][what] == pytest.approx(value, abs=1e-5, rel=1e-6), (job, what)
