"""Batch sizes and logs of two processes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate import PartialState
from accelerate.logging import get_logger
from accelerate.utils import find_executable_batch_size
from tests.support.ranks import RanksError, RankServer, same_on_all
from tests.support.watchdog import speed_up_watchdog


def search(full_above: list[int], wrong_on: int | None, ends: bool = False) -> tuple[int, list[int]]:
    rank = PartialState(cpu=True).process_index
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=20)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if rank == wrong_on:
            raise KeyError("no such column")
        if batch_size > full_above[rank]:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if ends:
            PartialState().destroy_process_group()
        return batch_size

    return train(), tried


def test_all_ranks_end_with_the_same_batch_size(ranks: RankServer) -> None:
    """C8: one rank's memory is smaller than the other's."""
    first, second = ranks(2, search, [100, 15], None)
    assert first == second == (14, [20, 18, 16, 14])


def test_the_function_may_end_the_training(ranks: RankServer) -> None:
    assert ranks(2, search, [20, 20], None, True) == [(20, [20])] * 2


def test_another_error_ends_the_search_on_all_ranks(ranks: RankServer) -> None:
    """C8, C3: the rank that has room must not wait for the one that failed."""
    first, second = ranks.outcomes(2, search, [100, 100], 1, grace=30)
    assert (second.status, second.kind) == ("raised", "KeyError")
    assert first.status == "raised", first
    assert "rank 1 failed" in first.message


def search_with_function_of_sizes(sizes: list[int]) -> tuple[int, list[int]]:
    """Rank 0 has no room for 16 samples, rank 1 none for 8; ``sizes`` are given one after the other."""
    rank, left = PartialState(cpu=True).process_index, iter(sizes)
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=16, reduce_batch_size_fn=lambda: next(left))
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size == (16, 8)[rank]:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return batch_size

    return train(), tried


def test_a_function_may_hold_the_size_while_the_full_rank_changes(ranks: RankServer) -> None:
    assert ranks(2, search_with_function_of_sizes, [8, 4]) == [(4, [16, 8, 4])] * 2


def test_a_size_that_does_not_shrink_ends_the_search_on_all_ranks(ranks: RankServer) -> None:
    """C3: the other rank is told which error ended it, and does not wait for the one that is gone."""
    with pytest.raises(RanksError) as caught:
        ranks(2, search_with_function_of_sizes, [8, 8])
    first, second = caught.value.outcomes
    assert (second.status, second.kind) == ("raised", "SettingError")
    assert first.message.startswith("rank 1 failed while the batch size was searched"), first
    assert "reduce_batch_size_fn gave 8 after a batch of 8" in first.message


def leave_others_behind(where: str, strategy: str) -> list[Any]:
    """Rank 1 runs out of memory in its second batch, while the others wait for it."""
    import torch
    import torch.distributed as dist

    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin

    speed_up_watchdog()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=int(strategy[-1])) if "fsdp" in strategy else None
    sizes = {"hsdp": {"dp_replicate_size": 2, "dp_shard_size": 2}, "cp": {"cp_size": 2}}.get(strategy)
    mesh = None if sizes is None else ParallelismConfig(**sizes)
    accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=mesh, cpu=True)
    torch.manual_seed(0)
    around = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    outer, outer_optimizer = accelerator.prepare(around, torch.optim.SGD(around.parameters(), lr=0.1))
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=20)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        plain = torch.nn.Linear(2, 3)
        model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        for batch in range(3):
            rows = torch.ones(batch_size, 2) * (accelerator.process_index + 1)
            out = (outer(rows) + model(rows)).sum()
            if accelerator.process_index == 1 and batch_size > 15 and batch == 1:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            if where == "backward":
                accelerator.backward(out)
            elif where == "gather":
                accelerator.gather(out.detach())
                accelerator.backward(out)
            elif where == "torch":
                dist.all_reduce(out.detach())
                accelerator.backward(out)
            for each in (optimizer, outer_optimizer):
                each.step()
                each.zero_grad()
        return batch_size

    size = train()
    weights = [p.detach().sum().item() for p in outer.parameters()]
    return [size, tried, weights, accelerator.gather(torch.ones(1)).tolist()]


@pytest.mark.parametrize(("where", "world"), [("backward", 2), ("backward", 3), ("gather", 2), ("torch", 2)])
def test_ranks_that_wait_for_a_full_one_leave_the_attempt_with_it(
    ranks: RankServer, where: str, world: int
) -> None:
    """C8: the usual case. They train on, with one process group, and with equal replicas."""
    size, tried, _, ones = same_on_all(ranks(world, leave_others_behind, where, "ddp"))
    assert (size, tried, ones) == (14, [20, 18, 16, 14], [1.0] * world)


@pytest.mark.parametrize(("strategy", "world"), [("fsdp1", 2), ("fsdp2", 2), ("hsdp", 4), ("cp", 2)])
def test_a_model_that_ranks_share_ends_the_search_with_the_size_to_start_with(
    ranks: RankServer, strategy: str, world: int
) -> None:
    """C8: also where they wait in a group of their own, which ends with the process of the full rank."""
    with pytest.raises(RanksError) as caught:
        ranks(world, leave_others_behind, "backward", strategy, grace=30)
    log = caught.value.outcomes[1].output
    assert "the memory of rank 1 is full with batches of 20; it waits until the others have ended" in log
    for rank, outcome in enumerate(caught.value.outcomes):
        if world == 2 or rank == 1:
            assert outcome.kind == "CollectiveError"
            assert "the memory of rank 1 is full with batches of 20" in outcome.message
            assert "starting_batch_size=18" in outcome.message
        else:
            # A rank that looks after another one has ended with the verdict reports that one.
            assert outcome.kind in ("CollectiveError", "PeerError"), outcome.message
            assert "find_executable_batch_size" in outcome.message


class Numbers(IterableDataset[torch.Tensor]):
    """A stream, which rank 0 reads for all."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(72.0).view(-1, 1))


def leave_others_behind_in_a_stream() -> list[Any]:
    """Rank 1 runs out of memory in its third batch, while the others wait for it in backward."""
    from accelerate import Accelerator

    speed_up_watchdog()
    accelerator = Accelerator(cpu=True)
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        model, seen = torch.nn.Linear(1, 1), 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer, loader = accelerator.prepare(
            model, optimizer, DataLoader(Numbers(), batch_size=batch_size)
        )
        for number, batch in enumerate(loader):
            if batch_size > 6 and accelerator.process_index == 1 and number == 2:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
            seen += len(batch)
        return seen

    return [train(), tried, accelerator.gather(torch.ones(1)).tolist()]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_read_a_stream_leave_the_attempt_too(ranks: RankServer, world: int) -> None:
    """Each attempt that ends so has another process group, and so have its batches."""
    seen, tried, ones = same_on_all(ranks(world, leave_others_behind_in_a_stream))
    assert (seen, tried, ones) == (72 // world, [8, 7, 6], [1.0] * world)


def record_attempts() -> list[Any]:
    """Return the state at the start of each attempt; on rank 1 the memory holds 10 samples."""
    import random

    import torch

    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    kept = accelerator.prepare(torch.nn.Linear(1, 1))
    attempts: list[Any] = []

    @find_executable_batch_size(starting_batch_size=16, reduce_batch_size_fn=lambda: sizes.pop(0))
    def train(batch_size: int) -> int:
        state = accelerator._models, accelerator._optimizers, accelerator.step, accelerator.sync_gradients
        attempts.append((batch_size, [len(s) if isinstance(s, list) else s for s in state], random.random()))
        model = torch.nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=torch.rand(()).item())
        )
        attempts.append(optimizer.param_groups[0]["lr"])
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(batch_size, 1)).sum())
        if accelerator.process_index == 1 and batch_size > 10:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return batch_size

    sizes = [12, 8]
    assert train() == 8
    assert accelerator._models[0] is kept
    assert len(accelerator._models) == 2
    return attempts


def test_each_attempt_begins_as_the_first_did(ranks: RankServer) -> None:
    """C8: prepared objects, counters and RNG state are restored after a failed attempt, on all ranks."""
    for attempts in ranks(2, record_attempts):
        starts, rates = attempts[::2], attempts[1::2]
        assert [start[0] for start in starts] == [16, 12, 8]
        assert starts[0][1] == [1, 0, 0, True]
        assert {repr(start[1:]) for start in starts} == {repr(starts[0][1:])}
        assert len(set(rates)) == 1


def log_in_turn() -> list[str]:
    state = PartialState(cpu=True)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(f"{record.filename} {record.getMessage()}")
    logger = get_logger("turn", log_level="INFO" if state.is_main_process else "ERROR")
    logger.logger.addHandler(handler)
    logger.warning("everyone in turn", in_order=True)
    logger.error("only main")
    logger.error("all", main_process_only=False)
    return records


def test_ranks_log_in_turn_whatever_their_levels(ranks: RankServer) -> None:
    first, second = ranks(2, log_in_turn)
    assert first == [
        f"test_watch_ranks.py [RANK 0] {text}" for text in ("everyone in turn", "only main", "all")
    ]
    assert second == ["test_watch_ranks.py [RANK 1] all"]
