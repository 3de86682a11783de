"""What thousands of ranks ask of the store of their group, counted; and a store that answers late."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.long_run import LONG_RUN
from tests.support.store_load import (
    SimulatedWorld,
    explain_lost_peer,
    hosted_store,
    own_store,
    raise_disagreement,
    save_together,
    simulated_world,
    stop_all,
)

SIZE = 4096
SMALL = SIZE if LONG_RUN else SIZE // 2  # where what is asked grows with the ranks as it does in 4,096
ALL = range(SMALL)
SLOW = 17

pytestmark = pytest.mark.timeout(600)  # many ranks on a busy machine


@pytest.fixture(scope="module")
def opened() -> Iterator[SimulatedWorld]:
    """A world that can go on after each test."""
    with simulated_world(SIZE) as world:
        yield world


@pytest.fixture
def world(opened: SimulatedWorld) -> SimulatedWorld:
    opened.store.reset()
    return opened


def most_asked_key(world: SimulatedWorld) -> int:
    """Requests that named the hottest key."""
    return max(world.store.by_key.values())


def test_a_start_asks_little_while_ranks_come_late(world: SimulatedWorld) -> None:
    """Processes, addresses of the tree, and the group of large transfers; each waits 10 s at most.

    A save in the background opens a tree of its own in the same way, and asks for nothing more.
    """
    world.start()
    assert max(world.store.requests.values()) <= 40
    assert max(world.store.keys.values()) <= 40
    assert most_asked_key(world) <= 12 * SIZE


def test_training_asks_as_much_as_in_a_world_of_32(world: SimulatedWorld) -> None:
    """1,000 steps of 0.3 s: 64 requests a second of all ranks together."""
    world.watch_for(300.0)
    assert world.store.total <= 1.1 * 64 * 300
    assert max(world.store.requests.values()) <= 6
    assert world.store.sent == 0


def test_ranks_that_wait_for_a_slow_one_do_not_read_all_others() -> None:
    """Some minutes in one collective."""
    with simulated_world(SMALL) as world:
        world.begin_call([rank for rank in ALL if rank != SLOW])
        world.watch_for(220.0)
        assert world.store.total / 220 <= 0.42 * SMALL  # a second
        assert world.store.keys.total() <= 450 * SMALL
        # None has asked for more than its windows, but the one that logs for whom all wait.
        assert sorted(world.store.keys.values())[-2] <= 600
        assert world.ranks[0].report is None


def test_one_rank_reads_all_others_for_the_hint_and_the_report() -> None:
    """A rank has ended, and all others wait for it: none but the one that writes reads them all."""
    with simulated_world(SMALL) as world:
        world.begin_call([rank for rank in ALL if rank != SLOW])
        world.end(SLOW)
        world.watch_for(200.0)
        whats = {
            watch.report.what for watch in world.ranks if watch.report is not None and watch.rank != SLOW
        }
        assert whats == {f"gather at train.py:12 was reached by {SMALL - 1} of {SMALL} ranks"}
        readers = [rank for rank, keys in world.store.keys.items() if keys >= SMALL]
        assert 1 <= len(readers) <= 2, readers
        assert world.store.keys.total() <= 200 * SMALL


def test_a_lost_rank_is_asked_about_for_a_few_seconds() -> None:
    """All connections break within a moment, and no rank knows more for 3 s: the worst case."""
    with simulated_world(SMALL) as world:
        for watch in world.ranks:
            watch.processes.publish()
        world.store.reset()
        world.begin_call(ALL)
        world.hide("report")
        explain_lost_peer(world, [1, 5, SMALL - 1])
        assert max(world.store.requests.values()) <= 80
        assert max(world.store.keys.values()) <= 400
        world.store.reset()
        world.show("report")
        [said] = explain_lost_peer(world, ALL)
        assert "was left by a process that is gone" in said
        assert max(world.store.requests.values()) <= 8


def test_a_disagreement_is_told_by_three_requests_of_a_rank() -> None:
    with simulated_world(SMALL) as world:
        raise_disagreement(world)
        assert world.store.requests.pop(0) <= 40  # it waits until all have heard of it
        assert max(world.store.requests.values()) <= 3


def test_a_signal_is_agreed_on_by_few_requests() -> None:
    with simulated_world(SMALL) as world:
        stops = stop_all(world, signalled=77, steps=5)
        assert stops == {8}
        assert world.store.total <= 32 * SMALL
        # One rank has read the counts of all.
        assert len([rank for rank, keys in world.store.keys.items() if keys >= SMALL]) == 1
        assert sorted(world.store.keys.values())[-2] <= 64


def test_a_save_asks_little_while_ranks_come_late(world: SimulatedWorld) -> None:
    """They find out that all make the call; the exchanges of the save go over the tree."""
    save_together(world, range(1, SIZE))
    assert max(world.store.requests.values()) <= 24
    world.store.reset()
    save_together(world, range(1))
    assert world.store.total <= 16 * SIZE
    assert world.store.keys.total() <= 80 * SIZE


def test_a_store_that_answers_late_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with hosted_store(request_timeout=0.2) as (client, host):
        client.put("a", "1")
        look, looks = client.has, list[bool]()

        def stall_once(*keys: str) -> bool:
            looks.append(look(*keys))
            if len(looks) == 1:
                os.kill(host, signal.SIGSTOP)
                while Path(f"/proc/{host}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                    time.sleep(0.001)  # it may still answer until then
                threading.Timer(1.0, os.kill, (host, signal.SIGCONT)).start()
            return looks[-1]

        monkeypatch.setattr(client, "has", stall_once)
        for answer in (lambda: client.get("a"), lambda: client.read(["a"])["a"]):
            looks.clear()
            assert answer() == "1"
            assert len(looks) == 2, "it was not asked again"
            assert not client.is_lost
        os.kill(host, signal.SIGKILL)
        while client.get("a") is not None:
            pass
        assert client.is_lost


def test_what_many_keys_miss_is_told() -> None:
    client = own_store()
    keys = [f"key/{number}" for number in range(600)]
    for key in keys[:-1]:
        client.put(key, key)
    assert client.find_missing(keys) == keys[-1:]
    assert list(client.read(keys)) == keys[:-1]
    assert not client.wait(keys, 0.01)
    client.put(keys[-1], "")
    assert client.wait(keys, 0.01)
    assert client.find_missing(keys) == []


def test_a_store_that_cannot_be_cloned_keeps_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before torch 2.10: communicators that open later wait in the same store."""
    monkeypatch.delattr(dist.Store, "clone", raising=False)  # pyright: ignore[reportPrivateImportUsage]
    client = own_store()
    timeout = client.group_store.timeout
    client.put("key", "text")
    assert (client.get("key"), client.get("none"), client.read(["key"])) == ("text", None, {"key": "text"})
    assert client.group_store.timeout == timeout > timedelta(seconds=60)
