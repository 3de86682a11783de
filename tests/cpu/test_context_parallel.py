"""Context parallelism on two and four processes: the numbers of one, and refusals where there can be none."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.support.long_run import long_run_param
from tests.support.ranks import RankServer
from tests.support.sequences import CUT, RING, Jobs, same, shared_all
from tests.support.torch_versions import is_torch

HAS_RING = is_torch(">=2.10")

# What the rank server imports once for this module.
PRELOAD = ("transformers.models.llama.modeling_llama",)

# In every second batch one process has no label.
JOBS: Jobs = [
    ("llama", CUT, 2, 1, True),
    ("llama", {"cp_size": 2}, 4, 2, False),
    ("gpt2", CUT, 4, 2, False),
    ("mistral", CUT, 2, 2, True),
    ("plain", CUT, 2, 1, False),
    *([("llama", RING, 4, 2, False), ("plain", RING, 2, 1, False)] if HAS_RING else []),
]


def test_two_processes_train_to_the_numbers_of_one(ranks: RankServer) -> None:
    """B1, B9: rotary and learned positions, grouped heads, windows of attention, padding, tied weights.

    Labels are unevenly shared, and in every second batch one process has none.
    """
    same(JOBS, ranks(2, shared_all, JOBS, timeout=100))


@pytest.mark.parametrize(
    "sizes", [long_run_param({**CUT, "dp_shard_size": 2}), {**CUT, "dp_replicate_size": 2}]
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


def sharded_by_the_program() -> tuple[list[list[str]], list[int], float]:
    """Replace ``_prepare_cp``, as axolotl does, whose own hooks shard each batch."""
    from accelerate import Accelerator
    from accelerate.utils import ParallelismConfig

    contexts: list[list[str]] = []

    def prepare_cp(self: Any, *args: Any) -> tuple[Any, ...]:
        @contextlib.contextmanager
        def context(**given: Any) -> Any:
            contexts.append(sorted(given))
            yield

        self._cp_context = context
        return args

    Accelerator._prepare_cp = prepare_cp
    accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=2))
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    plain = nn.Sequential(nn.Embedding(16, 8), layer)
    rows = [{"input_ids": torch.arange(6) + row} for row in range(4)]
    expected = [plain(row["input_ids"][None]).detach() for row in rows]
    model, loader = accelerator.prepare(plain, DataLoader(rows))
    lengths, difference = [], 0.0
    for batch, logits in zip(loader, expected, strict=True):
        ids = batch["input_ids"]
        with accelerator.maybe_context_parallel([ids], [1], {ids}):
            lengths.append(ids.shape[1])
            difference = max(difference, (model(ids) - logits).abs().max().item())
    return contexts, lengths, difference


def test_sequences_that_the_program_shards_are_left_whole(ranks: RankServer) -> None:
    """Both processes get whole sequences, and attention is torch's."""
    for contexts, lengths, difference in ranks(2, sharded_by_the_program):
        assert contexts == [["buffer_seq_dims", "buffers", "no_restore_buffers"]] * 4
        assert lengths == [6] * 4
        assert difference < 1e-5
