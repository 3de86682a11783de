"""Failure reports derived from the statuses of the ranks: pure functions."""

from __future__ import annotations

import _thread
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from unittest.mock import Mock

import pytest

from accelerate.checkpoint import save_lock
from accelerate.core.errors import UNKNOWN_RANK, CollectiveError, PeerError, find_failed_rank
from accelerate.world import peers
from accelerate.world.rank_failure_report import (
    FailureReport,
    RankStatus,
    deadlock_report,
    ended_rank_report,
    find_deadlock,
    split_by_progress,
    timeout_report,
)
from accelerate.world.watchdog import Watchdog
from tests.support.store_load import own_store

IN_SAVE = RankStatus(exchanges=3, doing="save_state at train.py:12", calls=4, at="train.py:12")
IN_BACKWARD = RankStatus(exchanges=2, inside="backward at train.py:10", calls=5, at="train.py:10")
WORKING = RankStatus(exchanges=2, calls=4, at="train.py:9")
ENDED = RankStatus(exchanges=2, calls=4, ended=True)


@pytest.mark.parametrize("me", [0, 1])
def test_a_rank_in_an_exchange_and_one_in_a_wait_of_torch_wait_for_each_other(me: int) -> None:
    report = find_deadlock(me, 2, {0: IN_SAVE, 1: IN_BACKWARD})
    assert report is not None
    assert "save_state at train.py:12 was reached by 1 of 2 ranks" in report.what
    assert "rank 1 is in backward at train.py:10" in report.why


def test_an_exchange_that_a_rank_ended_without_is_named() -> None:
    report = find_deadlock(0, 3, {0: IN_SAVE, 1: IN_SAVE, 2: ENDED})
    assert report is not None
    assert report.what == "save_state at train.py:12 was reached by 2 of 3 ranks"
    assert "rank 2 has ended" in report.why


@pytest.mark.parametrize(
    "other",
    [
        WORKING,  # it may still come
        RankStatus(exchanges=2, inside="backward at train.py:10", calls=4),  # its backward waits for nobody
        RankStatus(exchanges=3, ended=True),  # it took part, and has ended since
        RankStatus(exchanges=3, doing="save_state at train.py:12"),
    ],
)
def test_what_is_not_certain_is_no_mismatch(other: RankStatus) -> None:
    assert find_deadlock(0, 2, {0: IN_SAVE, 1: other}) is None
    assert find_deadlock(0, 2, {0: IN_SAVE}) is None


def test_a_message_of_rank_0_may_be_on_its_way() -> None:
    """Whoever waits for it is in no collective, however many it has begun; it waits for rank 0 alone."""
    place = "a transfer of a batch from rank 0 at train.py:9"
    reading = RankStatus(exchanges=2, inside=place, calls=5, waits=True, awaited=(0, 1, 2))
    for me in (0, 1):
        assert find_deadlock(me, 2, {0: IN_SAVE, 1: reading}) is None
    assert find_deadlock(1, 3, {0: WORKING, 1: reading, 2: ENDED}) is None
    assert split_by_progress(1, 3, {0: WORKING, 1: reading, 2: IN_BACKWARD}) == ([0], [2])


@pytest.mark.parametrize("me", [0, 1])
def test_stages_of_a_pipeline_wait_for_a_slow_rank(me: int) -> None:
    """They make different numbers of collectives: a rank that computes may free both."""
    assert find_deadlock(me, 3, {0: IN_SAVE, 1: IN_BACKWARD, 2: WORKING}) is None


def test_a_rank_in_a_wait_of_torch_learns_that_its_peer_has_ended() -> None:
    report = find_deadlock(0, 2, {0: IN_BACKWARD, 1: ENDED})
    assert report is not None
    assert report.what == "backward at train.py:10 was reached by 1 of 2 ranks"


def test_who_waits_in_a_group_that_is_not_counted_waits_for_those_in_no_collective() -> None:
    """G11: the stages of a pipeline make different numbers of collectives."""
    waiting = RankStatus(exchanges=2, inside="all_gather at train.py:10", calls=4, waits=True)
    assert split_by_progress(0, 3, {0: waiting, 1: WORKING, 2: waiting}) == ([1], [2])
    computing = RankStatus(exchanges=2, inside="backward at train.py:10", calls=4)
    assert split_by_progress(0, 3, {0: computing, 1: WORKING, 2: computing}) == ([], [2])


def test_ranks_in_different_collectives_of_torch_wait_for_each_other() -> None:
    """One rank left out a clip_grad_norm_ under FSDP: all had begun as many, and none was named."""
    clips = RankStatus(exchanges=2, inside="all_reduce at train.py:10", calls=9, waits=True)
    goes_on = RankStatus(exchanges=2, inside="a forward of the model at train.py:9", calls=9, waits=True)
    assert split_by_progress(0, 3, {0: clips, 1: goes_on, 2: clips}) == ([1], [2])
    assert split_by_progress(1, 3, {0: clips, 1: goes_on, 2: clips}) == ([0, 2], [])
    assert split_by_progress(0, 2, {0: clips, 1: clips}) == ([], [1])


def test_a_rank_that_has_ended_is_named_where_collectives_are_not_counted() -> None:
    """G11: the connections of the stages of a pipeline break when one of them ends."""
    waiting = RankStatus(exchanges=2, inside="all_gather at train.py:10", calls=2, waits=True)
    assert ended_rank_report(0, 3, {0: waiting, 1: WORKING, 2: waiting}) is None
    assert find_deadlock(0, 3, {0: waiting, 1: ENDED, 2: waiting}) is None
    report = ended_rank_report(0, 3, {0: waiting, 1: ENDED, 2: waiting})
    assert report is not None
    assert report.what == "rank 1 has ended while rank 0 was in all_gather at train.py:10"
    assert "rank 2 is in all_gather at train.py:10" in report.why


def test_a_deadlock_is_reported_where_no_rank_that_was_read_is_in_an_exchange() -> None:
    """Of a large world a rank reads a part, and that need not hold the rank that has left an attempt."""
    for status, words in ((IN_BACKWARD, "backward at train.py:10"), (WORKING, "a collective")):
        report = deadlock_report(0, 64, {0: status, 1: replace(status, calls=1)})
        assert f"{words} was reached by 1 of 64 ranks" in report.what
        assert "rank 1 is" in report.why


def test_a_back_end_that_counts_no_collectives_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise RuntimeError("Backend ucc does not yet support sequence numbers.")

    monkeypatch.delattr(sys, "last_value", raising=False)  # of a test before
    store = own_store()
    peers.PeerProcesses(store, 1, 0).announce_opening(2)
    store.put("ended/1", "")
    watch = Watchdog(0, 2, 30.0, store, [refuse, lambda: 3])
    watch.thread.start()
    watch.shut_down()
    assert RankStatus.from_json(store.get("at/0") or "").calls == 3


def test_a_rank_ends_after_all_have_opened_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short script: gloo failed in a rank that was still connecting to one that had ended."""
    monkeypatch.delattr(sys, "last_value", raising=False)  # of a test before
    store = own_store()
    watch = Watchdog(1, 3, 30.0, store)
    watch.thread.start()
    ending = Thread(target=watch.shut_down)
    ending.start()
    peers.PeerProcesses(store, 0, 0).announce_opening(3)
    ending.join(0.3)
    assert ending.is_alive()
    assert not store.has("ended/1")
    peers.PeerProcesses(store, 2, 0).announce_opening(3)
    ending.join(1.0)  # less than it waits for a rank that never opens the group
    assert not ending.is_alive()
    assert store.has("ended/1")


def test_a_rank_ends_after_all_have_opened_its_other_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a large broadcast too: the source and who has it are done before the others are connected."""
    monkeypatch.delattr(sys, "last_value", raising=False)  # of a test before
    store = own_store()
    watch, peer = Watchdog(1, 2, 30.0, store), peers.PeerProcesses(store, 0, 0)
    watch.thread.start()
    peer.announce_opening(2)
    watch.processes.announce_opening(2, "transfers")
    ending = Thread(target=watch.shut_down)
    ending.start()
    ending.join(0.3)
    assert ending.is_alive()
    peer.announce_opening(2, "transfers")
    ending.join(1.0)
    assert not ending.is_alive()


def test_processes_are_looked_up_on_their_own_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines may have one host name, and the first namespace of every kernel has one number."""
    monkeypatch.setattr(peers, "BOOT_ID_FILE", tmp_path / "boot_id")
    uncached = peers.process_namespace.__wrapped__
    for room in (peers, save_lock):
        monkeypatch.setattr(room, "process_namespace", uncached)
    ended = subprocess.Popen(["true"])
    ended.wait()
    store, lock_hosts = own_store(), set[str]()
    for rank, boot in enumerate(("another machine", "this machine")):
        peers.BOOT_ID_FILE.write_text(boot)
        with monkeypatch.context() as patched:
            patched.setattr(os, "getpid", lambda: ended.pid)
            peers.PeerProcesses(store, rank, 0).publish()
        lock_hosts.add(save_lock.LockOwner.current("save").host)
    assert peers.PeerProcesses(store, 2, 0).find_gone([0, 1]) == (1, ended.pid)
    assert len(lock_hosts) == 2


def test_a_timeout_says_who_did_not_come() -> None:
    report = timeout_report(0, 3, {0: IN_SAVE, 1: WORKING}, 5.0)
    assert report.what == "save_state at train.py:12 was reached by 1 of 3 ranks within 5 s"
    assert "rank 1 is at train.py:9" in report.why
    assert "rank 2 is silent" in report.why


def raised_by(rank: int, call: Callable[[], object]) -> FailureReport:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return FailureReport.from_exception(rank, caught.value)


def test_a_consequence_reports_the_rank_that_failed_whatever_the_user_made_of_it() -> None:
    """G12: also when rank 1 raises an error of its own while it handles that of rank 0."""
    cause = raised_by(0, lambda: int("x"))
    assert cause.what.startswith("rank 0 failed: ValueError")

    def consequence() -> None:
        raise cause.error(1)

    def handle(how: str) -> None:
        try:
            consequence()
        except CollectiveError as error:
            if how == "from":
                raise KeyError("no data") from error
            if how == "none":
                raise KeyError("no data") from None
            raise KeyError("no data")  # noqa: B904

    for call in (consequence, *(lambda how=how: handle(how) for how in ("from", "none", "while"))):
        assert raised_by(1, call) == cause

    def afterwards() -> None:
        with suppress(KeyError):
            handle("while")
        raise KeyError("another")

    assert raised_by(1, afterwards).what == "rank 1 failed: KeyError: 'another'"


def test_a_rank_that_is_gone_is_no_failure_of_whoever_noticed() -> None:
    gone = FailureReport(1, "gather was left", lost_rank=UNKNOWN_RANK)
    for here in (0, 1):
        error = gone.error(here)
        assert type(error) is PeerError
        assert find_failed_rank(error) == UNKNOWN_RANK
    assert find_failed_rank(FailureReport(1, "the ranks differ").error(0)) is None


def test_reports_and_their_errors_travel() -> None:
    report = FailureReport(1, "rank 1 failed: ValueError: no", traceback="Traceback ...\nValueError: no\n")
    assert FailureReport.from_json(report.to_json()) == report
    error = report.error(0)
    assert type(error) is PeerError
    assert str(error).endswith("Traceback ...\nValueError: no")
    twin = pickle.loads(pickle.dumps(error))
    assert str(twin) == str(error)
    assert find_failed_rank(twin) == find_failed_rank(error) == 1
    assert type(report.error(1)) is CollectiveError


def test_ranks_stand_still_only_while_all_wait_and_none_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """C8: a rank that computes, has gone on or has not been read may free the others."""
    now = 0.0
    monkeypatch.setattr(peers.time, "monotonic", lambda: now)
    statuses = peers.PeerStatuses(Mock(), 0, 3, 1.0)
    left = RankStatus(exchanges=3, doing="find_executable_batch_size at train.py:12")
    waiting = RankStatus(exchanges=2, inside="recv at train.py:10", calls=4, waits=True)
    for reading, expected in (
        ({1: waiting}, 0),  # rank 2 has not been read
        ({1: waiting, 2: left}, 1),
        ({0: WORKING, 1: waiting}, 2),
        ({1: waiting, 2: replace(left, exchanges=4)}, 0),
        ({1: waiting, 2: left}, 0),
        ({1: waiting, 2: left}, 1),
        ({1: IN_BACKWARD, 2: left}, 0),  # a backward may compute
        ({1: waiting, 2: left}, 0),
    ):
        now += 1
        assert statuses.measure_standstill(reading) == expected, (now, reading)


def test_a_shown_stack_begins_with_the_script() -> None:
    runner = str(Path(peers.__file__).parents[1] / "launch" / "accelerate_rank.py")

    def load_rows(reached: Event, resumed: Event) -> None:
        reached.set()
        resumed.wait(10)

    for file in (runner, "train.py"):
        events = Event(), Event()
        names: dict[str, Callable[..., None]] = {}
        exec(compile("def run(script, *events):\n    script(*events)\n", file, "exec"), names)
        thread = _thread.start_new_thread(names["run"], (load_rows, *events))
        assert events[0].wait(10)
        text = peers.format_thread(thread)
        events[1].set()
        assert "in load_rows\n" in text
        assert (file in text) is (file == "train.py")


def test_the_process_that_is_gone_is_noticed_among_many_of_a_machine() -> None:
    store, last = own_store(), 12
    processes = peers.PeerProcesses(store, 0, 0)
    processes.publish()
    place = (store.get("process/0") or "").partition(" ")[2]
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    for rank in range(1, last + 1):
        store.put(f"process/{rank}", f"{ended.pid if rank == last else os.getpid()} {place}")
    assert processes.find_gone(range(1, last)) is None
    assert processes.find_gone(range(1, last + 1)) == (last, ended.pid)
