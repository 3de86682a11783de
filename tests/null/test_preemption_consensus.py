"""Preemption: the boundary where all ranks stop, in any order of events; and signals, in real processes."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.checkpoint.file_access import CheckpointNotFoundError
from accelerate.core.errors import CheckpointError, SettingError
from accelerate.launch import rank_reports
from accelerate.launch.accelerate_rank import RankErrorFile
from accelerate.launch.rank_reports import GracefulStopRegistration, JobOutcome, ProcessExit
from accelerate.utils import PreemptionKwargs, ProjectConfiguration
from accelerate.world import preemption as stops
from accelerate.world.preemption import PreemptionStepCounter, StopConsensus
from tests.support.command import Running, start
from tests.support.ranks import NO_LAUNCHER, RankServer
from tests.support.scripts import run_to_exit


class FakeStore:
    """A store in a dictionary."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def put(self, key: str, text: str) -> None:
        self.texts[key] = text

    def has(self, *keys: str) -> bool:
        return all(key in self.texts for key in keys)

    def get(self, key: str) -> str | None:
        return self.texts.get(key)

    def put_if_absent(self, key: str, text: str) -> str:
        return self.texts.setdefault(key, text)

    def read(self, keys: Sequence[str]) -> dict[str, str]:
        return {key: self.texts[key] for key in keys if key in self.texts}


class Rank:
    """One rank: its loop, its monitor thread, and its end."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.consensus = StopConsensus(rank, size, store)
        self.rank, self.store = rank, store
        self.stopped_at = self.caught = self.ended = 0

    @property
    def passed_count(self) -> int:
        return self.consensus.step_counter.passed_count

    def step(self) -> None:
        if self.ended or self.stopped_at:
            return
        if self.consensus.step_counter.arrive():
            self.stopped_at = self.passed_count + 1

    def poll(self) -> None:
        if not self.ended:
            self.consensus.poll("SIGTERM" if self.caught else "")

    def end(self, silently: bool) -> None:
        """End the rank; ``silently``: its monitor had no time to withdraw."""
        if self.stopped_at or self.ended:
            return
        if not silently:
            self.consensus.withdraw()
        self.store.put(f"ended/{self.rank}", "")
        self.ended = 1


def run_until_stable(world: list[Rank]) -> None:
    """Run all ranks until nothing changes any more."""
    for _ in range(4 * max(rank.passed_count for rank in world) + 40):
        for rank in world:
            rank.poll()
            rank.step()


ACTS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["step", "poll", "signal"])), max_size=60)


@given(size=st.integers(2, 4), acts=ACTS, first=st.integers(0, 3), together=st.booleans())
def test_all_stop_at_the_same_boundary(
    size: int, acts: list[tuple[int, str]], first: int, together: bool
) -> None:
    """D12: whoever gets the signal, wherever the others are. ``together``: a collective in every step."""
    store = FakeStore()
    world = [Rank(rank, size, store) for rank in range(size)]
    for number, act in acts:
        rank = world[number % size]
        if act == "poll":
            rank.poll()
        elif act == "signal":
            rank.caught = 1
        elif not together or rank.passed_count <= min(each.passed_count for each in world):
            rank.step()
    assert all(rank.caught == 0 for rank in world) <= (not any(rank.stopped_at for rank in world))
    furthest = max(rank.passed_count for rank in world)
    world[first % size].caught = 1
    run_until_stable(world)
    (at,) = {rank.stopped_at for rank in world}
    assert {rank.passed_count for rank in world} == {at - 1}
    assert all(rank.consensus.includes_all_ranks for rank in world)
    assert at > furthest
    run_until_stable(world)
    assert {rank.stopped_at for rank in world} == {at}


@given(
    acts=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["step", "step", "poll", "end", "end silently"])),
        max_size=60,
    )
)
def test_remaining_ranks_agree_without_ended_ranks(acts: list[tuple[int, str]]) -> None:
    store = FakeStore()
    world = [Rank(rank, 3, store) for rank in range(3)]
    with patch.object(stops, "ENDED_CHECK_INTERVAL", -1.0):
        for number, act in acts:
            rank = world[number]
            if act.startswith("end"):
                rank.end(act == "end silently")
            else:
                getattr(rank, act)()
        left = [rank for rank in world if not rank.ended]
        for rank in left:
            rank.caught = 1
        run_until_stable(world)
    assert len({rank.stopped_at for rank in left}) <= 1
    assert all(rank.stopped_at > 0 for rank in left)
    if len(left) < 3:
        assert not any(rank.consensus.includes_all_ranks for rank in left)
    withdrawn = [rank for rank in world if rank.ended and f"stop/{rank.rank}" in store.texts]
    assert all(rank.passed_count < left[0].stopped_at for rank in withdrawn if left)


def test_a_rank_waits_only_between_freeze_and_decision() -> None:
    counter = PreemptionStepCounter()
    assert [counter.arrive(), counter.arrive()] == [False, False]
    assert counter.freeze() == 2
    assert counter.arrive() is None
    assert counter.freeze() == 2
    counter.decide(4)
    assert [counter.arrive() for _ in range(3)] == [False, True, True]
    assert counter.passed_count == 3


# ---------------------------------------------------------------- what is asked for


@pytest.fixture
def heard() -> Iterator[None]:
    """Signals act as before afterwards."""
    yield
    stops.remove_monitor()


@pytest.mark.parametrize(
    "wrong", [{"signals": ("SIGKILL",)}, {"signals": ("SIGINT",)}, {"signals": ()}, {"exit_code": 300}]
)
def test_what_announces_no_end_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="PreemptionKwargs"):
        PreemptionKwargs(**wrong)


def test_saving_by_itself_needs_names() -> None:
    with pytest.raises(SettingError, match="automatic names"):
        Accelerator(kwargs_handlers=[PreemptionKwargs(save_and_exit=True)])


@pytest.mark.usefixtures("heard")
def test_handlers_are_taken_over_and_given_back() -> None:
    """The handler of the program is called too, and comes back."""
    calls: list[int] = []

    def own(number: int, frame: object) -> None:
        calls.append(number)

    before = signal.signal(signal.SIGUSR1, own)
    try:
        accelerator = Accelerator()
        assert signal.getsignal(signal.SIGUSR1) is own  # nobody asked yet
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert not accelerator.should_stop
        signal.raise_signal(signal.SIGUSR1)
        assert accelerator.should_stop
        assert accelerator.should_stop
        assert calls == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        stops.remove_monitor()
        assert signal.getsignal(signal.SIGUSR1) is own
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("heard")
def test_a_handler_arms_at_once_for_its_signals() -> None:
    Accelerator(kwargs_handlers=[PreemptionKwargs(signals=("SIGUSR2",))])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL


@pytest.mark.usefixtures("heard")
def test_the_pipe_of_an_event_loop_goes_on() -> None:
    """Another listener of ``signal.set_wakeup_fd`` hears all signals, and has it back afterwards."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        assert not Accelerator().should_stop
        signal.raise_signal(signal.SIGUSR1)
        assert os.read(reader, 16) == bytes([signal.SIGUSR1])
        stops.remove_monitor()
    finally:
        assert signal.set_wakeup_fd(before) == writer
        os.close(reader)
        os.close(writer)


@pytest.mark.usefixtures("heard")
def test_inside_of_a_window_nothing_stops() -> None:
    """Gradients that have accumulated are not saved: only the end of a window is a place to stop."""
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model = nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters()), DataLoader(TensorDataset(torch.ones(8, 1)))
    )
    assert not accelerator.should_stop
    signal.raise_signal(signal.SIGTERM)
    told = []
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
        told.append(accelerator.should_stop)
    assert told == [False, False, True, False, False, True, False, True]
    inside, after = [], []
    for window in accelerator.windows(loader, 3):
        for (x,) in window:
            accelerator.backward(model(x).sum())
            inside.append(accelerator.should_stop)
        optimizer.step()
        optimizer.zero_grad()
        after.append(accelerator.should_stop)
    assert (inside, after) == ([False] * 8, [True] * 3)


# ---------------------------------------------------------------- processes

ALONE = """
import os, signal, sys
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
accelerator.should_stop
print("ready", flush=True)
"""


def lone(text: str) -> Running:
    """A script without a launcher."""
    running = Running([sys.executable], script_text=ALONE + text)
    running.wait_for("ready", 120)
    return running


def test_a_second_term_ends_a_process_that_is_in_c_code() -> None:
    """D12: the interpreter does not come to run a handler there; nor is the first one lost."""
    running = lone("import ctypes; ctypes.CDLL(None).pause(); [ctypes.CDLL(None).pause() for _ in range(99)]")
    running.signal(signal.SIGTERM)
    while running.process.poll() is None:  # until it counts as a second one
        running.signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            running.process.wait(0.2)
    assert running.wait(120).returncode == 128 + signal.SIGTERM


def terminate_itself() -> None:
    Accelerator(cpu=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)


def test_a_script_that_never_asks_dies_as_always(ranks: RankServer) -> None:
    (outcome,) = ranks.outcomes(1, terminate_itself, env=NO_LAUNCHER)
    assert outcome.message == "killed by SIGTERM"


def test_forked_processes_have_their_own_signals(ranks: RankServer, tmp_path: Path) -> None:
    """A worker that gets a signal does not stop its parent, and a user signal does not end it."""
    text = """
import time
import torch.multiprocessing as mp
def work(pipe):
    assert not accelerator.should_stop
    pipe.send("begun")
    pipe.recv()
ours, theirs = mp.Pipe()
worker = mp.get_context("fork").Process(target=work, args=(theirs,))
worker.start()
ours.recv()
os.kill(worker.pid, signal.SIGUSR1)
ours.send("go")
worker.join()
print("user signal", worker.exitcode)
worker = mp.get_context("fork").Process(target=work, args=(theirs,))
worker.start()
ours.recv()
worker.terminate()
worker.join()
print("term", worker.exitcode)
print("parent", accelerator.should_stop)
"""
    ((code, output),) = run_to_exit(ranks, 1, ALONE + text, tmp_path, NO_LAUNCHER)
    assert code == 0, output
    assert output.splitlines()[-3:] == ["user signal 0", "term -15", "parent False"], output


def test_the_code_for_another_start_is_the_scripts() -> None:
    """Alone the launcher is the script; D12 of a world of one, by a user signal."""
    running = start(
        "--cpu",
        script_text="""
            import time
            from accelerate import Accelerator
            from accelerate.utils import PreemptionKwargs
            accelerator = Accelerator(kwargs_handlers=[PreemptionKwargs(exit_code=85)])
            print("ready", flush=True)
            while not accelerator.should_stop:
                time.sleep(0.01)
            accelerator.exit_to_resume()
        """,
    )
    running.wait_for("ready", 120)
    running.signal(signal.SIGUSR1)
    result = running.wait(120)
    assert result.returncode == 85, result.output
    assert "SIGUSR1: stopping at this step" in result.stderr
    assert "Traceback" not in result.stderr


# ---------------------------------------------------------------- going on


def project(folder: Path) -> ProjectConfiguration:
    return ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)


def resuming(monkeypatch: pytest.MonkeyPatch, wanted: object, folder: Path | None = None) -> Accelerator:
    monkeypatch.setenv("ACCELERATE_RESUME", str(wanted))
    return Accelerator(project_config=project(folder)) if folder else Accelerator()


def test_nothing_is_resumed_unless_asked(tmp_path: Path) -> None:
    accelerator = Accelerator(project_config=project(tmp_path))
    accelerator.save_state()
    assert Accelerator(project_config=project(tmp_path)).resume_from is None


def test_auto_takes_the_newest_complete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = resuming(monkeypatch, "auto", tmp_path)
    assert first.resume_from is None
    first.save_state()
    newest = Path(first.save_state()).resolve()
    (tmp_path / "checkpoints" / ".checkpoint_2.tmp-00ff").mkdir()
    again = resuming(monkeypatch, "auto", tmp_path)
    assert again.resume_from == newest
    assert "checkpoint_2.tmp-00ff" in caplog.text
    again.load_state(again.resume_from)
    assert Path(again.save_state()).name == "checkpoint_2"
    assert again.resume_from == newest  # the choice of the start stays


def test_auto_begins_afresh_after_a_first_save_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoints" / ".checkpoint_0.tmp-00ff").mkdir(parents=True)
    assert resuming(monkeypatch, "auto", tmp_path).resume_from is None
    assert "ignored: .checkpoint_0.tmp-00ff (a save that was interrupted" in caplog.text


def test_auto_does_not_begin_afresh_over_damaged_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Path(Accelerator(project_config=project(tmp_path)).save_state())
    next(file for file in saved.iterdir() if file.name != "manifest.json").write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match="no complete checkpoint"):
        assert resuming(monkeypatch, "auto", tmp_path).resume_from


def test_auto_needs_a_project(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="--resume auto needs automatic names"):
        assert resuming(monkeypatch, "auto").resume_from


def test_a_path_is_a_checkpoint_or_a_folder_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(project_config=project(tmp_path / "run"))
    first, second = (Path(accelerator.save_state()).resolve() for _ in range(2))
    for wanted, expected in (
        (first, first),
        (second.parent, second),
        (tmp_path / "run", second),
    ):
        assert resuming(monkeypatch, wanted).resume_from == expected
    for wrong in (tmp_path / "nothing", tmp_path):
        with pytest.raises(CheckpointNotFoundError, match="no "):
            assert resuming(monkeypatch, wrong).resume_from
    next(file for file in second.iterdir() if file.name != "manifest.json").write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged"):
        assert resuming(monkeypatch, second).resume_from
    assert resuming(monkeypatch, second.parent).resume_from == first


def test_what_lies_behind_a_url_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(
        project_config=ProjectConfiguration(project_dir="memory://resumed", automatic_checkpoint_naming=True)
    )
    saved = accelerator.save_state()
    for wanted in (saved, "memory://resumed/checkpoints", "memory://resumed"):
        again = resuming(monkeypatch, wanted)
        assert again.resume_from == saved
        again.load_state(again.resume_from)


def test_a_script_that_does_not_look_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for reads in (False, True):
        caplog.clear()
        accelerator = resuming(monkeypatch, "auto", tmp_path)
        assert not reads or accelerator.resume_from is None
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.ones(2, 1))))
        assert len(list(loader)) == 2
        assert ("ACCELERATE_RESUME has no effect so far" in caplog.text) is not reads


# ---------------------------------------------------------------- what the launcher makes of it


def test_ends_that_ask_for_another_start(tmp_path: Path) -> None:
    (tmp_path / "armed_7").write_text("75 15 10")
    known: dict[int, GracefulStopRegistration] = {}
    assert rank_reports.read_graceful_stop(tmp_path, 7, known) == GracefulStopRegistration(75, (15, 10))
    assert rank_reports.read_graceful_stop(tmp_path, 8, known) is None
    (tmp_path / "armed_7").unlink()  # by those who clean up
    assert rank_reports.read_graceful_stop(tmp_path, 7, known) == GracefulStopRegistration(75, (15, 10))
    good, again = ProcessExit(0, 0, 1, False), ProcessExit(1, 75, 2, False, resumable=True)
    error = rank_reports.build_job_error(JobOutcome([good, again]), tmp_path)
    assert error is not None
    assert (error.code, "--resume auto" in error.what) == (75, True)
    failed = rank_reports.build_job_error(JobOutcome([again, ProcessExit(0, 3, 1, False)]), tmp_path)
    assert failed is not None
    assert failed.code == 3
    assert (
        rank_reports.build_job_error(JobOutcome([good], signal.SIGTERM, stopped_gracefully=True), tmp_path)
        is None
    )
    killed = rank_reports.build_job_error(
        JobOutcome([ProcessExit(0, -9, 1, False)], signal.SIGTERM), tmp_path
    )
    assert killed is not None
    assert killed.code == 143


def test_leaving_with_that_code_is_no_failure(tmp_path: Path) -> None:
    armed = GracefulStopRegistration(75, (15,))
    assert not rank_reports.has_traceback(tmp_path, 0, armed)
    for said, failed in (
        ("5 75 own sys.exit(75)\n", False),
        ("5 1 own ValueError: x\n", True),
        ("", True),
    ):
        rank_reports.rank_file(tmp_path, 0, "error").write_text(said)
        assert rank_reports.has_traceback(tmp_path, 0, armed) is failed
        assert rank_reports.has_traceback(tmp_path, 0, None)


def test_the_report_of_a_rank_is_seen_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty one would count as a failure, also of a rank that stops to be resumed."""
    file, seen = rank_reports.rank_file(tmp_path, 0, "error"), list[bool]()

    class WatchedError(ValueError):
        def __str__(self) -> str:
            seen.append(file.exists())
            return "no data"

    RankErrorFile(str(file)).write_exception(WatchedError, WatchedError(), None)
    assert seen
    assert not any(seen)
    report = rank_reports.read_error_file(tmp_path, 0)
    assert report is not None
    assert (report.code, report.summary) == (1, "WatchedError: no data")
    assert report.text.endswith("WatchedError: no data\n")
    stop = SystemExit("full")
    RankErrorFile(str(file)).write_exit(stop)
    report = rank_reports.read_error_file(tmp_path, 0)
    assert report is not None
    assert (report.code, report.summary, report.text, stop.code) == (1, "full", "full\n", 1)
    # The folder is gone, and the launcher with it.
    nowhere, stop = RankErrorFile(str(tmp_path / "gone" / "rank_0.error")), SystemExit("full")
    nowhere.write_exit(stop)
    assert stop.code == "full"
    assert capsys.readouterr().err == ""
    nowhere.write_exception(WatchedError, WatchedError(), None)
    assert capsys.readouterr().err.endswith("WatchedError: no data\n")


def test_the_folder_of_ranks_is_kept_from_those_who_clean_up() -> None:
    """``systemd-tmpfiles`` passes over a folder that it cannot lock."""
    import fcntl

    with rank_reports.report_folder() as folder:
        cleaner = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(cleaner)
    assert not folder.exists()


def test_preemption_works_where_few_signals_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows there is no SIGUSR1 and no fork. The modules are loaded anew as they are loaded there."""
    for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU", "siginterrupt"):
        monkeypatch.delattr(signal, name)
    monkeypatch.delattr(os, "register_at_fork")
    modules = []
    for name in ("accelerate.world.signals", "accelerate.world.preemption"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        monkeypatch.setitem(sys.modules, name, module := importlib.util.module_from_spec(spec))
        with monkeypatch.context() as windows:
            windows.setattr(sys, "platform", "win32")
            spec.loader.exec_module(module)
        modules.append(module)
    preemption = modules[1]
    options = preemption.PreemptionKwargs()
    assert options.signals == ("SIGTERM",)
    with pytest.raises(SettingError, match="SIGUSR1 does not"):
        preemption.PreemptionKwargs(signals=("SIGUSR1",))
    before = signal.getsignal(signal.SIGTERM)
    monitor = preemption.install_monitor(options, 1)
    signal.raise_signal(signal.SIGTERM)
    assert monitor.check_boundary()
    preemption.remove_monitor()
    assert signal.getsignal(signal.SIGTERM) == before
