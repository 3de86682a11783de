"""The run for a machine with an accelerator: rows in processes of their own, limits, results that are kept.

What the rows do is rehearsed in tests/sim/test_sim_gpu_run.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.case import BenchError, Sample, Subject
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import rows
from benchmarks.gpu.fork_server import ForkedSubject, ForkServer
from benchmarks.gpu.results import Results
from benchmarks.gpu.rows import DeviceCase

SAMPLE = Sample(1.0, 2.0, 2.0, 0.0)


@pytest.fixture
def subject(tmp_path: Path) -> Generator[ForkedSubject]:
    """An environment whose server has imported nothing, with one accelerator."""
    subject = ForkedSubject("ours", Path(sys.executable), tmp_path)
    subject.__dict__["server"] = server = ForkServer(subject.python, preloaded=())
    server.deadline = time.monotonic() + 30
    yield subject
    server.close()


def run_python(subject: ForkedSubject, statement: str, processes: int = 1) -> str:
    return subject.run_module("timeit", "-n", "1", "-r", "1", statement, processes=processes)


# ------------------------------------------------------------------------------- processes of a row


def test_each_row_has_processes_of_its_own(subject: ForkedSubject) -> None:
    pids = [int(run_python(subject, "import os; print(os.getpid())").split()[0]) for _ in range(2)]
    assert len({*pids, os.getpid()}) == 3


@pytest.mark.parametrize(("devices", "local"), [(1, "0 1"), (2, "0 2")])
def test_ranks_beyond_the_devices_share_the_first(subject: ForkedSubject, devices: int, local: str) -> None:
    subject.server.devices = devices
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE")
    text = run_python(subject, f"import os; print(*(os.environ[n] for n in {names}))", processes=2)
    assert text.splitlines()[0] == f"{local} 0 2"


def test_a_row_that_raises_ends_in_its_last_words_and_the_next_one_runs(subject: ForkedSubject) -> None:
    with pytest.raises(BenchError, match="exit code 1: ZeroDivisionError: division by zero"):
        run_python(subject, "1/0")
    with pytest.raises(BenchError, match="killed by the system"):
        run_python(subject, "import os; os.kill(os.getpid(), 9)")
    assert run_python(subject, "print(7)").startswith("7")


def test_when_one_rank_fails_the_others_do_not_wait_for_it(
    subject: ForkedSubject,
) -> None:
    waits = "import os, time; time.sleep(60 * int(os.environ['RANK'])); 1/0"
    with pytest.raises(BenchError, match="ZeroDivisionError"):
        run_python(subject, waits, processes=2)


def test_a_row_over_its_limit_is_killed_with_what_it_started(subject: ForkedSubject, tmp_path: Path) -> None:
    run_python(subject, "pass")
    subject.server.deadline = time.monotonic() + 1
    started = tmp_path / "started"
    child = "import subprocess, pathlib, time; p = subprocess.Popen(['sleep', '9'], start_new_session=True); "
    write = f"pathlib.Path({str(started)!r}).write_text(str(p.pid)); time.sleep(60)"
    with pytest.raises(BenchError, match="took longer than 1 s"):
        run_python(subject, child + write)
    assert has_ended(int(started.read_text()))
    subject.server.deadline = time.monotonic() + 30
    assert run_python(subject, "print(7)").startswith("7")


def has_ended(pid: int) -> bool:
    """Return whether a process that was killed is gone; on a busy machine that takes a moment."""
    until = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def test_imports_that_leave_no_fork_the_device_are_given_up(
    subject: ForkedSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def run_module(self: ForkedSubject, module: str) -> str:
        asked.append(tuple(self.server.preloaded))
        if self.server.preloaded:
            raise BenchError("RuntimeError: CUDA error: initialization error")
        return '{"count": 3}'

    subject.server.preloaded = ("torch",)
    monkeypatch.setattr(ForkedSubject, "run_module", run_module)
    assert command.find_facts(subject) == {"count": 3}
    assert asked == [("torch",), ()]
    assert subject.server.devices == 3


# --------------------------------------------------------------------------------------- the results


def case(name: str, measure: Callable[[Subject, bool], Sample], **more: Any) -> DeviceCase:
    return DeviceCase(f"row {name}", "us", "ratio", 3.0, measure, 1, 1, name=name, **more)


def results_of(folder: Path, cases: list[DeviceCase], code: str = "1") -> Results:
    return Results(folder, {"code": code, "device": "a card"}, ["about it"], cases)


def measure(
    folder: Path, cases: list[DeviceCase], *options: str, code: str = "1", peer: bool = False
) -> Results:
    """One run over these rows."""
    args = command.parse_args(list(options))
    args.cases = cases
    subjects = [ForkedSubject(name, Path(sys.executable), folder) for name in ("ours", "peer")[: 1 + peer]]
    results = results_of(folder, cases, code)
    command.Run(subjects, results, args).measure_all()
    return results


class Measured:
    """A row that gives a sample, or raises in its first calls."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors, self.asked = list(errors), 0

    def __call__(self, subject: Subject, quick: bool) -> Sample:
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return SAMPLE


def test_a_failing_row_is_noted_and_the_next_one_is_measured(tmp_path: Path) -> None:
    bad, good = Measured(BenchError("it broke")), Measured()
    results = measure(tmp_path, [case("bad", bad), case("good", good)])
    assert (results.get("bad", "ours"), results.get("good", "ours")) == ("it broke", SAMPLE)
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["rows"]["bad"]["ours"] == "it broke"
    assert written["not_reached"] == {}
    page = (tmp_path / "results.md").read_text()
    assert "| row good | 1 us | 2x [2, 2] |" in page
    assert "row bad, ours: it broke" in page


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    first, second = Measured(), Measured(KeyboardInterrupt())
    cases = [case("first", first), case("second", second)]
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, cases)
    before = json.loads((tmp_path / "results.json").read_text())
    assert before["not_reached"] == {"second": "the run was interrupted"}
    results = measure(tmp_path, cases)
    assert (first.asked, second.asked) == (1, 2)
    assert results.get("second", "ours") == SAMPLE
    assert results.about[-1].startswith("continued at ")


def test_what_failed_is_measured_again_only_when_asked(tmp_path: Path) -> None:
    row = Measured(BenchError("no"), BenchError("no"))
    measure(tmp_path, [case("row", row)])
    measure(tmp_path, [case("row", row)])
    assert row.asked == 1
    measure(tmp_path, [case("row", row)], "--retry")
    assert measure(tmp_path, [case("row", row)], "--retry").get("row", "ours") == SAMPLE
    measure(tmp_path, [case("row", row)], "--retry")
    assert row.asked == 3


def test_rows_of_other_code_are_kept_in_other_files(tmp_path: Path) -> None:
    row = Measured()
    measure(tmp_path, [case("row", row)])
    measure(tmp_path, [case("row", row)], code="2")
    assert row.asked == 2
    assert {path.name for path in tmp_path.iterdir()} == {
        "results.json",
        "results.md",
        "results-1.json",
        "results-1.md",
    }


def test_the_time_of_the_run_ends_it_and_what_is_missing_is_named(tmp_path: Path) -> None:
    row = Measured()
    results = measure(tmp_path, [case("row", row)], "--budget", "0.1")
    assert row.asked == 0
    assert results.not_reached == {"row": "the 0.1 minutes were over"}
    assert "- `row`: the 0.1 minutes were over" in (tmp_path / "results.md").read_text()
    assert measure(tmp_path, [case("row", row)]).not_reached == {}


def test_a_row_that_the_end_of_the_time_cuts_off_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "LEAST", 0.0)

    def cut_off(subject: Subject, quick: bool) -> Sample:
        time.sleep(0.1)
        raise BenchError("took longer than 0 s")

    results = measure(tmp_path, [case("row", cut_off)], "--budget", "0.001")
    assert results.get("row", "ours") is None
    assert results.not_reached == {"row": "the 0.001 minutes were over"}


def test_rows_stand_beside_those_of_the_public_package(tmp_path: Path) -> None:
    asked: list[str] = []

    def ask(subject: Subject, quick: bool) -> Sample:
        asked.append(subject.name)
        return SAMPLE if subject.name == "ours" else replace(SAMPLE, figure=5.0)

    results = measure(tmp_path, [case("both", ask), case("one", ask, peer=False)], peer=True)
    assert asked == ["ours", "peer", "ours"]
    assert results.table()[0].cells()[2:4] == ("2x [2, 2]", "5x [5, 5]")


def test_every_limit_is_that_of_the_row_or_a_lower_one_that_was_asked_for(tmp_path: Path) -> None:
    left: list[float] = []

    def ask(subject: Subject, quick: bool) -> Sample:
        assert isinstance(subject, ForkedSubject)
        left.append(subject.server.deadline - time.monotonic())
        return SAMPLE

    measure(tmp_path, [case("a", ask, limit=50.0), case("b", ask, limit=5.0)], "--limit", "20")
    assert [round(seconds) for seconds in left] == [20, 5]


# ------------------------------------------------------------------------------------------ the rows


def test_rows_have_names_of_their_own_and_the_most_telling_come_first() -> None:
    names = [row.name for row in rows.all_rows()]
    assert len({*names}) == len(names)
    assert len({row.title for row in rows.all_rows()}) == len(names)
    telling = ["test-device", "test-groups", "test-host_waits", "async-save-10", "load-20-cold"]
    telling += ["offload-full", "compile", "step-fp32"]
    assert sorted(telling, key=names.index) == telling
    files = {f"test-{path.stem.removeprefix('test_gpu_')}" for path in rows.TESTS.glob("test_gpu_*.py")}
    assert files <= {*names}


def test_a_report_of_tests_names_what_failed(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    test = '<testcase name="test_b"><failure message="it is 3&#10;more">trace</failure></testcase>'
    suite = '<testsuite tests="3" skipped="1" time="1.5"><testcase name="test_a"/>{}</testsuite>'
    report.write_text(f"<testsuites>{suite.format(test)}</testsuites>")
    with pytest.raises(BenchError, match=r"1 of 3 tests failed: test_b \(it is 3\)"):
        rows.read_report(report)
    report.write_text(f"<testsuites>{suite.format('')}</testsuites>")
    assert rows.read_report(report).facts == {"passed": "2", "skipped": "1"}
    for count, text in ((0, "no test was run"), (2, "all tests were skipped")):
        report.write_text(f'<testsuites><testsuite tests="{count}" skipped="{count}" time="0"/></testsuites>')
        with pytest.raises(BenchError, match=text):
            rows.read_report(report)


def test_a_row_whose_tests_were_all_skipped_says_so(tmp_path: Path) -> None:
    results = measure(tmp_path, [case("one card", Measured(BenchError("all tests were skipped")))])
    assert results.table()[0].cells()[-1] == "skipped"


def test_a_machine_without_an_accelerator_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    assert command.main(["--output", str(tmp_path)]) == 2
    assert signal.getsignal(signal.SIGTERM) is handler
    assert "torch finds no accelerator" in capsys.readouterr().err
