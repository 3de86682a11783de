"""transformers' Trainer on sequences that two processes share gives the numbers of one process."""

from __future__ import annotations

import pytest

from accelerate.utils import is_deepspeed_available
from tests.clients.probe import run_jobs_on_ranks
from tests.support.ranks import RankServer

pytest.importorskip("transformers", reason="the client needs Python 3.11")
pytestmark = pytest.mark.timeout(240)

CLIENT = "tests.clients.trainer_sequences"
# What the rank server imports once.
PRELOAD = ("transformers.trainer", CLIENT)
JOBS = ["keys", "keys_in_windows"]
if is_deepspeed_available():
    JOBS.append("heads")  # the client asks that library for the group


def test_it_trains_and_evaluates_as_alone(ranks: RankServer) -> None:
    """Losses that are logged, norms, rates, and the loss of an evaluation, which is no sum over processes."""
    alone, shared = (run_jobs_on_ranks(ranks, size, CLIENT, *JOBS) for size in (1, 2))
    for job in JOBS:
        assert alone[job].keys() == shared[job].keys()
        for what, value in alone[job].items():
            assert shared[job][what] == pytest.approx(value, abs=1e-5), (job, what)
