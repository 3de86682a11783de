"""The harness of the benchmarks: an interrupted run goes on where it was, and loses no sample."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from benchmarks import __main__ as harness
from benchmarks import report
from benchmarks.case import BenchError, Case, Sample, Subject
from benchmarks.cases import wizard
from benchmarks.journal import Journal
from rich.console import Console

from tests.null.test_gpu_run import has_ended

SUBJECTS = [Subject("ours", Path("python")), Subject("peer", Path("peer/python"))]


class Measured:
    """A case that gives 1, 2, 3, ... and can be interrupted or fail at a count."""

    def __init__(self, interrupt: int = -1, fail: int = -1) -> None:
        self.count, self.interrupt, self.fail = 0, interrupt, fail
        self.asked: list[str] = []

    def __call__(self, subject: Subject, quick: bool) -> Sample:
        self.count += 1
        if self.count == self.interrupt:
            raise KeyboardInterrupt
        if self.count == self.fail:
            raise BenchError("it failed")
        self.asked.append(subject.name)
        return Sample(1.0, self.count, self.count, 0.0, {"count": str(self.count)})


def run(case: Case, journal: Journal) -> dict[str, list[Sample] | str]:
    return harness.measure(case, SUBJECTS, False, Console(quiet=True), journal)


def case(measure: Measured, rounds: int = 3, peer_rounds: int = 3) -> Case:
    return Case("a case", "us", "added", None, measure, rounds, peer_rounds)


def test_an_interrupted_run_measures_only_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    first = Measured(interrupt=4)
    with pytest.raises(KeyboardInterrupt):
        run(case(first), Journal(path, ["machine a"]))
    with path.open("a") as file:
        file.write('{"case": "a ca')  # killed while it wrote
    journal = Journal(path, ["machine b"])
    assert journal.about == ["machine a"]
    second = Measured()
    taken = run(case(second), journal)
    assert first.asked + second.asked == ["ours", "peer", "peer", "ours", "ours", "peer", "peer", "ours"]
    assert [len(samples) for samples in taken.values()] == [3, 3]
    again = Measured()
    assert run(case(again), Journal(path, [])) == taken
    assert again.asked == []
    journal.done()
    assert not path.exists()


def test_a_subject_that_failed_is_not_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    taken = run(case(Measured(fail=2)), Journal(path, []))
    assert taken["peer"] == "it failed"
    assert len(taken["ours"]) == 3
    assert run(case(Measured()), Journal(path, [])) == taken


def test_a_run_that_is_not_recorded_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(case(Measured()), Journal(None, []))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("rounds", "peer_rounds"), [(5, 3), (3, 1), (3, 2), (1, 3), (5, 5)])
def test_the_public_package_takes_part_as_often_as_the_case_says(rounds: int, peer_rounds: int) -> None:
    measure = Measured()
    taken = run(case(measure, rounds, peer_rounds), Journal(None, []))
    assert len(taken["ours"]) == rounds
    assert len(taken["peer"]) == min(rounds, peer_rounds)
    assert measure.asked[:2] == ["ours", "peer"]


def test_the_public_package_is_not_measured_against_itself() -> None:
    """Where it is the raw work, a figure of its own would be noise that reads as a gain."""
    measure = Measured()
    against = Case("against it", "s", "ratio", None, measure, 2, raw_is_peer=True)
    taken = run(against, Journal(None, []))
    assert [*taken] == ["ours"]
    assert measure.asked == ["ours"] * 3
    assert report.Row(against, taken["ours"], "").cells()[1:4] == ("1 s", "2.5x [2, 3]", "1x")
    none = report.Row(case(measure), taken["ours"], "1.15.0 has no digests")
    assert none.cells()[3] == "has none"


def test_every_case_is_found_once_and_reads_well_in_a_table() -> None:
    cases = harness.find([])
    titles = [case.title for case in cases]
    assert len({*titles}) == len(titles)
    for found in cases:
        row = report.Row(found, "no figure here", "").cells()
        assert len(row) == len(report.COLUMNS)
        assert row[-1] == "failed"


def test_a_command_over_its_limit_is_killed_with_what_it_started(tmp_path: Path) -> None:
    started = tmp_path / "started"
    child = "import subprocess, pathlib, time; p = subprocess.Popen(['sleep', '9'], start_new_session=True); "
    write = f"pathlib.Path({str(started)!r}).write_text(str(p.pid)); time.sleep(60)"
    with pytest.raises(BenchError, match="took longer than 2 s"):
        Subject("ours", Path(sys.executable)).run([sys.executable, "-c", child + write], timeout=2)
    assert has_ended(int(started.read_text()))


def test_a_wizard_that_ends_without_a_question_fails_its_row_alone() -> None:
    begin = time.monotonic()
    with pytest.raises(BenchError, match="it wrote b'no module"):
        wizard.first_question([sys.executable, "-c", "print('no module'); 1 / 0"])
    assert time.monotonic() - begin < wizard.PATIENCE
