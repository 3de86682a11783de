"""Calls give what they give on the public package, recorded by record.py; every difference is listed."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.clients.calls import TOGETHER
from tests.clients.differences import LISTED
from tests.clients.probe import run_jobs_on_ranks
from tests.support.ranks import RankServer

RECORDED = json.loads((Path(__file__).parent / "calls.json").read_text())["results"]
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def ours(ranks: RankServer) -> dict[str, Any]:
    """What the calls give here, on one process and on two."""
    module = "tests.clients.calls.__main__"
    return {"1": run_jobs_on_ranks(ranks, 1, module), "2": run_jobs_on_ranks(ranks, 2, module, *TOGETHER)}


NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
# Losses, norms and weights after a few steps in float32, from other kernels; many have four decimals only.
REL, ABS = 1e-4, 1.01e-4


def alike(mine: Any, theirs: Any) -> bool:
    """Equal; an error that the same except clause catches; or the same fields and more of our own.

    Numbers, in tensors too, are equal as far as another processor computes them.
    """
    if mine == theirs:
        return True
    if isinstance(mine, float) and isinstance(theirs, float):
        return math.isclose(mine, theirs, rel_tol=REL, abs_tol=ABS)
    if isinstance(mine, str) and isinstance(theirs, str):
        ours, there = NUMBER.findall(mine), NUMBER.findall(theirs)
        same_text = NUMBER.sub("#", mine) == NUMBER.sub("#", theirs)
        return same_text and all(alike(float(a), float(b)) for a, b in zip(ours, there, strict=True))
    if isinstance(mine, list) and isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(alike, mine, theirs))
    if isinstance(mine, dict) and isinstance(theirs, dict):
        if "raises" in mine or "raises" in theirs:
            return "raises" in mine and theirs.get("raises", [""])[0] in (*mine["raises"], "Exception")
        return all(key in mine and alike(mine[key], theirs[key]) for key in theirs)
    return False


def differences(mine: dict[str, Any], size: str) -> dict[str, str]:
    """By name of the call: what it gives there and here."""
    return {
        f"{job}: {call}": f"there {theirs!r:.150}, here {mine[job].get(call, 'no such call')!r:.150}"
        for job, calls in RECORDED[size].items()
        for call, theirs in calls.items()
        if not alike(mine[job].get(call, "no such call"), theirs)
    }


def test_an_error_is_like_an_error_alone() -> None:
    assert alike({"raises": ["MyError", "ValueError"]}, {"raises": ["ValueError"]})
    assert alike({"raises": ["KeyError"]}, {"raises": ["Exception"]})
    assert not alike({"raises": ["KeyError"]}, {})
    assert not alike({}, {"raises": ["Exception"]})


@pytest.mark.parametrize("size", ["1", "2"])
def test_every_difference_is_listed(size: str, ours: dict[str, Any]) -> None:
    found = differences(ours[size], size)
    unlisted = {call: what for call, what in found.items() if not any(re.fullmatch(p, call) for p in LISTED)}
    assert not unlisted, "\n".join(f"{call}\n    {what}" for call, what in unlisted.items())


def test_the_list_has_no_old_entry(ours: dict[str, Any]) -> None:
    found = {**differences(ours["1"], "1"), **differences(ours["2"], "2")}
    old = [pattern for pattern in LISTED if not any(re.fullmatch(pattern, call) for call in found)]
    assert old == []


def test_the_record_is_of_what_it_says(ours: dict[str, Any]) -> None:
    for size, jobs in RECORDED.items():
        assert jobs.keys() == ours[size].keys()
        calls = {job: sorted(calls) for job, calls in jobs.items() if job != "enums"}
        assert calls == {job: sorted(ours[size][job]) for job in calls}
