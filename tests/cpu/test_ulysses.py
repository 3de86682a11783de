"""Ulysses sequence parallelism on two and four processes: the numbers of one, and refusals."""

from __future__ import annotations

from tests.support.ranks import RankServer
from tests.support.sequences import Jobs, same, shared_all

# What the rank server imports once for this module.
PRELOAD = ("transformers.models.llama.modeling_llama",)

JOBS: Jobs = [
    ("llama", {"sp_size": 2}, 8, 4, False),
    ("llama", {"sp_size": 2}, 4, 1, True),
    ("gpt2", {"sp_size": 2}, 2, 1, False),
    ("mistral", {"sp_size": 2}, 4, 2, True),
    ("plain", {"sp_size": 2}, 4, 1, False),
]


def test_two_processes_train_to_the_numbers_of_one(ranks: RankServer) -> None:
    """B1, B9: heads of keys that processes divide, and one head of keys for all, windows, padding."""
    same(JOBS, ranks(2, shared_all, JOBS, timeout=100))


def test_two_pairs_train_to_the_numbers_of_one(ranks: RankServer) -> None:
    jobs: Jobs = [("llama", {"sp_size": 2, "dp_shard_size": 2}, 8, 4, True)]
    same(jobs, ranks(4, shared_all, jobs, timeout=100))
