"""Ulysses sequence parallelism on two and four processes: the numbers of one, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.core.errors import SettingError
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import is_deepspeed_available
from tests.support.long_run import LONG_RUN
from tests.support.ranks import RankServer
from tests.support.sequences import Jobs, llama, same, shared_all, texts
from tests.support.watchdog import speed_up_watchdog

# What the rank server imports once for this module.
PRELOAD = ("transformers.models.llama.modeling_llama",)

JOBS: Jobs = [
    ("llama", {"sp_size": 2}, 4, 2, False),
    ("gpt2", {"sp_size": 2}, 2, 1, False),
    ("mistral", {"sp_size": 2}, 2, 2, True),
    ("plain", {"sp_size": 2}, 2, 1, False),
]


def test_two_processes_train_to_the_numbers_of_one(ranks: RankServer) -> None:
    """B1, B9: heads of keys that processes divide, and one head of keys for all, windows, padding."""
    same(JOBS, ranks(2, shared_all, JOBS, timeout=100))


@pytest.mark.skipif(not LONG_RUN, reason="law 7 has it in `make test`")
def test_two_pairs_train_to_the_numbers_of_one(ranks: RankServer) -> None:
    jobs: Jobs = [("llama", {"sp_size": 2, "dp_shard_size": 2}, 4, 2, True)]
    same(jobs, ranks(4, shared_all, jobs, timeout=100))


def refused_beside_deepspeed() -> list[str]:
    """What an ``Accelerator`` says to DeepSpeed beside each size that splits a model."""
    from accelerate import DeepSpeedPlugin

    messages = []
    for name in ("tp_size", "cp_size", "pp_size"):
        config = ParallelismConfig(**{name: 2})
        with pytest.raises(SettingError) as refused:
            Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2), parallelism_config=config)
        messages.append(str(refused.value).splitlines()[0])
    return messages


@pytest.mark.skipif(not is_deepspeed_available(), reason="the package deepspeed is not installed")
def test_deepspeed_is_not_dropped_beside_sizes_that_split_a_model(ranks: RankServer) -> None:
    refused = [f"DeepSpeed does not go with {name}_size=2" for name in ("tp", "cp", "pp")]
    assert ranks(2, refused_beside_deepspeed) == [refused] * 2


def full_alone(where: str) -> None:
    """The memory of rank 1 is full with batches of 4: before its second forward, or before its backward."""
    from accelerate.utils import find_executable_batch_size

    speed_up_watchdog()
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(sp_size=2))

    @find_executable_batch_size(starting_batch_size=4, reduce_batch_size_fn=lambda: 2)
    def train(size: int) -> None:
        model, loader = accelerator.prepare(llama(), DataLoader(texts(3), batch_size=size))  # type: ignore[arg-type]
        for step, batch in enumerate(loader):
            is_full = accelerator.process_index == 1 and size > 2 and step == 1
            if is_full and where == "forward":
                raise torch.OutOfMemoryError("simulated")
            loss = model(**batch).loss
            if is_full:
                raise torch.OutOfMemoryError("simulated")
            accelerator.backward(loss)

    train()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_full_memory_ends_the_search(ranks: RankServer, where: str) -> None:
    """C8: the other process waits for heads of the same sequences."""
    outcomes = ranks.outcomes(2, full_alone, where, grace=30, timeout=60)
    assert [outcome.kind for outcome in outcomes] == ["CollectiveError"] * 2, list(map(str, outcomes))
    assert "memory of rank 1 is full with batches of 4" in outcomes[1].message
