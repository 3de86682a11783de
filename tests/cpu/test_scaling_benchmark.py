"""The benchmark of many ranks measures what it says, and draws it."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
from benchmarks.case import Sample, Subject
from benchmarks.scaling import __main__ as scaling
from benchmarks.scaling import launches, machines, picture
from benchmarks.scaling import ranks as forked
from benchmarks.scaling.calls import CALLS

from tests.support import hosts
from tests.support.long_run import long_run_param
from tests.support.ranks import RankServer

OURS = Subject("ours", Path(sys.executable))
MEASURED = "reduce of a scalar"


def call_both_ways(name: str) -> None:
    by_hand, ours = CALLS[name].make(2)
    by_hand()
    ours()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_runs_by_hand_and_of_the_library(ranks: RankServer, name: str) -> None:
    """Each checks by itself that both do the same work."""
    ranks(2, call_both_ways, name)


@pytest.mark.parametrize("name", [name if name == MEASURED else long_run_param(name) for name in CALLS])
def test_a_call_is_measured_on_forked_ranks(name: str) -> None:
    sample = forked.measure(name, 2, OURS, quick=True)
    assert sample.base > 0
    assert sample.value > 0


@pytest.mark.skipif(bool(hosts.unable_to_switch()), reason=hosts.unable_to_switch() or "possible here")
@pytest.mark.parametrize("count", [2, long_run_param(4)])
def test_a_slow_network_is_paid_for(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A barrier of four machines waits for two trips at least, and one of two machines for one."""
    monkeypatch.setattr(machines, "MACHINES", count)
    latency = 0.005
    sample = machines.measure(latency, "barrier", count, OURS, quick=True)
    assert min(sample.base, sample.value) > count // 2 * latency * 1e6


def test_a_launch_that_starts_too_few_processes_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Subject, "run", lambda *_, **__: (1.0, "processes: 1"))
    with pytest.raises(launches.BenchError, match="other than 4"):
        launches.measure(4, OURS, True)


def test_curves_are_ratios_to_the_raw_times_of_all_runs(tmp_path: Path) -> None:
    ours, peer = [Sample(100.0, 50.0, 0.5, 0.0)], [Sample(300.0, 600.0, 2.0, 0.0)]
    assert picture.times_of(ours, peer) == {"raw torch": 200.0, "ours": 100.0, "1.15.0": 400.0}
    assert picture.times_of("failed", "failed") == {}
    curves = {name: {"raw torch": {2: 1.0, 32: 9.0}, "ours": {2: 1.0, 32: 2.0}} for name in CALLS}
    picture.draw(curves, "a machine", tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_rows_name_the_call_and_the_number_of_ranks() -> None:
    points = scaling.points([*CALLS, launches.NAME], [2, 8], None)
    titles = [point.case.title for point in points]
    assert len({*titles}) == len(titles) == 2 * (len(CALLS) + 1)
    assert {point.size for point in scaling.points(["barrier"], [2], 500.0)} == {scaling.ON_MACHINES}
    assert isinstance(points[0].case.measure, partial)
