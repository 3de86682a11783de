"""Failure reports derived from the statuses of the ranks: pure functions."""

from __future__ import annotations

import pickle

import pytest

from accelerate.core.errors import CollectiveError, PeerError
from accelerate.world.rank_failure_report import FailureReport, RankStatus, find_deadlock, timeout_report

IN_SAVE = RankStatus(letters=3, doing="save_state at train.py:12", calls=4, at="train.py:12")
IN_BACKWARD = RankStatus(letters=2, inside="backward at train.py:10", calls=5, at="train.py:10")
WORKING = RankStatus(letters=2, calls=4, at="train.py:9")
ENDED = RankStatus(letters=2, calls=4, ended=True)


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
        RankStatus(letters=2, inside="backward at train.py:10", calls=4),  # its backward waits for nobody
        RankStatus(letters=3, ended=True),  # it took part, and has ended since
        RankStatus(letters=3, doing="save_state at train.py:12"),
    ],
)
def test_what_is_not_certain_is_no_mismatch(other: RankStatus) -> None:
    assert find_deadlock(0, 2, {0: IN_SAVE, 1: other}) is None
    assert find_deadlock(0, 2, {0: IN_SAVE}) is None


def test_a_rank_in_a_wait_of_torch_learns_that_its_peer_has_ended() -> None:
    report = find_deadlock(0, 2, {0: IN_BACKWARD, 1: ENDED})
    assert report is not None
    assert report.what == "backward at train.py:10 was reached by 1 of 2 ranks"


def test_a_timeout_says_who_did_not_come() -> None:
    report = timeout_report(0, 3, {0: IN_SAVE, 1: WORKING}, 5.0)
    assert report.what == "save_state at train.py:12 was reached by 1 of 3 ranks within 5 s"
    assert "rank 1 is at train.py:9" in report.why
    assert "rank 2 is silent" in report.why


def test_reports_and_their_errors_travel() -> None:
    report = FailureReport(1, "rank 1 failed: ValueError: no", traceback="Traceback ...\nValueError: no\n")
    assert FailureReport.from_json(report.to_json()) == report
    error = report.error(0)
    assert type(error) is PeerError
    assert str(error).endswith("Traceback ...\nValueError: no")
    twin = pickle.loads(pickle.dumps(error))
    assert str(twin) == str(error)
    assert type(report.error(1)) is CollectiveError
