"""Context parallelism on two and four processes: the numbers of one, and refusals where there can be none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.long_run import long_run_param
from tests.support.ranks import RankServer
from tests.support.sequences import RING, Jobs, same, shared_all
from tests.support.torch_versions import is_torch

HAS_RING = is_torch(">=2.10")

# What the rank server imports once for this module.
PRELOAD = ("transformers.models.llama.modeling_llama",)

# In every second batch one process has no label.
JOBS: Jobs = [
    ("llama", {"cp_size": 2}, 2, 1, True),
    ("gpt2", {"cp_size": 2}, 4, 2, False),
    ("mistral", {"cp_size": 2}, 2, 2, True),
    ("plain", {"cp_size": 2}, 2, 1, False),
    *([("llama", RING, 4, 2, False), ("plain", RING, 2, 1, False)] if HAS_RING else []),
]


def test_two_processes_train_to_the_numbers_of_one(ranks: RankServer) -> None:
    """B1, B9: rotary and learned positions, grouped heads, windows of attention, padding, tied weights.

    Labels are unevenly shared, and in every second batch one process has none.
    """
    same(JOBS, ranks(2, shared_all, JOBS, timeout=100))


@pytest.mark.parametrize(
    "sizes", [long_run_param({"cp_size": 2, "dp_shard_size": 2}), {"cp_size": 2, "dp_replicate_size": 2}]
)
def test_two_pairs_train_to_the_numbers_of_one(ranks: RankServer, sizes: dict[str, Any]) -> None:
    jobs: Jobs = [("llama", sizes, 4, 2, True), ("plain", sizes, 2, 1, False)]
    same(jobs, ranks(4, shared_all, jobs, timeout=100))


@pytest.mark.skipif(not HAS_RING, reason="torch has no ring attention before 2.10; it is refused by name")
def test_keys_go_around_four_processes(ranks: RankServer) -> None:
    """Blocks come from before and from after, by whole parts and by halves; or each has half of the heads."""
    jobs: Jobs = [
        ("gpt2", {**RING, "cp_size": 4}, 4, 2, False),
        ("llama", {**RING, "tp_size": 2}, 2, 1, False),
    ]
    same(jobs, ranks(4, shared_all, jobs, timeout=100))
