"""A program that starts afresh several times in one process: its group of processes stays."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import reduce
from tests.support.ranks import RankServer, same_on_all
from tests.support.torch_versions import is_torch


def _again(times: int) -> list[float]:
    """Starts afresh ``times`` times, each rank at its own pace."""
    sums, group = [], None
    for turn in range(times):
        AcceleratorState._reset_state(reset_partial_state=True)
        assert PartialState._shared_state == {}
        state = PartialState(cpu=True, backend=None, timeout=timedelta(seconds=60))
        group = group or dist.group.WORLD
        assert dist.group.WORLD is group
        if state.process_index == turn % 2:
            time.sleep(0.05)
        sums.append(reduce(torch.ones(()) * turn, "sum").item())
    assert state.world.owns_group
    state.destroy_process_group()
    assert not dist.is_initialized()
    return sums


def test_fresh_starts_keep_the_group(ranks: RankServer) -> None:
    assert same_on_all(ranks(2, _again, 6)) == [0, 2, 4, 6, 8, 10]


def _chosen() -> tuple[object, str, int]:
    """Choose the backend in place of ``_prepare_backend``, which a program has replaced."""
    prepare, asked = PartialState._prepare_backend, list[str | None]()

    def prepare_backend(self: PartialState, cpu: bool, sagemaker_dp: bool, backend: str | None) -> Any:
        asked.append(backend)
        return prepare(self, cpu, sagemaker_dp, backend or "cpu:gloo")

    setattr(PartialState, "_prepare_backend", prepare_backend)  # noqa: B010
    state = PartialState(cpu=True)
    return asked[0], dist.get_backend_config(), state.num_processes


def test_a_program_chooses_the_backend(ranks: RankServer) -> None:
    assert same_on_all(ranks(2, _chosen)) == (None, "cpu:gloo", 2)


def _shorter() -> str:
    PartialState(cpu=True, timeout=timedelta(seconds=600))
    PartialState._reset_state()
    state = PartialState(cpu=True, timeout=timedelta(seconds=1))
    dist.barrier()
    if state.process_index == 1:
        time.sleep(3)
        return ""
    try:
        dist.barrier()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.skipif(is_torch("<2.10"), reason="its barrier keeps the timeout of the group")
def test_a_fresh_start_may_wait_less_long(ranks: RankServer) -> None:
    said, _ = ranks(2, _shorter)
    assert "Timed out" in said


def test_forgotten_without_a_group() -> None:
    PartialState(cpu=True)
    PartialState._reset_state()
    assert PartialState._shared_state == {}
    assert PartialState().num_processes == 1


def _watchers() -> list[int]:
    counts = []
    for _ in range(3):
        PartialState._reset_state()
        PartialState(cpu=True)
        counts.append(sum(thread.name == "accelerate-watchdog" for thread in threading.enumerate()))
    return counts


def test_one_watcher_stays_with_the_group(ranks: RankServer) -> None:
    assert same_on_all(ranks(2, _watchers)) == [1, 1, 1]
