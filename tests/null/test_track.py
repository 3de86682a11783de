"""``log_with``, trackers of users, and the end of runs that a script does not end."""

from __future__ import annotations

import argparse
import errno
import json
import os
import subprocess
import sys
import textwrap
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from accelerate import Accelerator, track
from accelerate.core.errors import SettingError, UnknownNameError
from accelerate.track import base
from accelerate.track.protocol import json_lines
from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    CometMLTracker,
    GeneralTracker,
    JSONLTracker,
    filter_trackers,
    get_available_trackers,
    on_main_process,
    register_tracker_class,
)
from accelerate.utils import LoggerType, ProjectConfiguration
from tests.support.environment import clean
from tests.support.packages import pretend_installed


class Own(GeneralTracker):
    """A tracker as users write it: it remembers what it was asked."""

    name = "own"
    requires_logging_directory = False

    def __init__(self, run_name: str = "mine", **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self.kwargs = run_name, kwargs
        self.asked: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.asked

    def start(self) -> None:
        self.asked.append("start")

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.asked.append(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.asked.append((values, step, kwargs))

    def finish(self) -> None:
        self.asked.append("finish")


class Second(Own):
    name = "second"

    def finish(self) -> None:
        super().finish()
        raise ConnectionError("the server is gone")


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    known = dict(track.tracker_classes())
    yield
    track._open.clear()
    track.tracker_classes().clear()
    track.tracker_classes().update(known)


def accelerator(log_with: Any, folder: Path | None = None) -> Accelerator:
    return Accelerator(cpu=True, log_with=log_with, project_dir=None if folder is None else str(folder))


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# --- log_with


def test_names_members_and_trackers_are_kept_in_order_and_once(tmp_path: Path) -> None:
    own = Own()
    acc = accelerator(["jsonl", own, LoggerType("jsonl"), own], tmp_path)
    assert acc.log_with == ["jsonl", own]
    assert acc.log_with[0] is LoggerType("jsonl")
    assert accelerator(LoggerType("jsonl"), tmp_path).log_with == ["jsonl"]
    assert accelerator(own).log_with == [own]
    assert accelerator(None).log_with == accelerator([]).log_with == []


def test_a_name_that_does_not_exist_is_an_error_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'tensorboard'"):
        accelerator("tensorbord")
    with pytest.raises(UnknownNameError, match=r"known: .*all"):
        accelerator(["nothing like it"])
    with pytest.raises(SettingError, match="neither a tracker nor the name of one"):
        accelerator(JSONLTracker)


def test_all_are_those_that_are_installed_and_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_installed(monkeypatch, lambda module: module == "torch")
    assert accelerator("all").log_with == []
    acc = accelerator(["all", Own()], tmp_path)
    assert (acc.log_with[:-1], get_available_trackers()) == ([], ["jsonl"])
    assert capsys.readouterr().err == ""
    acc.init_trackers("run")
    assert capsys.readouterr().err == 'log_with="all": own\n'
    acc.end_training()
    assert list(tmp_path.iterdir()) == []
    assert accelerator(["all", "jsonl"], tmp_path).log_with == ["jsonl"]
    with pytest.warns(
        UserWarning, match=r"(?s)'wandb', and is left out: nothing is logged.*pip install wandb"
    ):
        assert accelerator(["jsonl", "wandb"], tmp_path).log_with == ["jsonl"]


def test_public_functions_answer_as_the_constructor(tmp_path: Path) -> None:
    assert filter_trackers(["jsonl"], tmp_path) == ["jsonl"]
    assert filter_trackers(None) == []
    with pytest.raises(SettingError, match="needs a folder"):
        filter_trackers("jsonl")
    assert "jsonl" in get_available_trackers()
    assert LOGGER_TYPE_TO_CLASS["jsonl"] is JSONLTracker
    assert set(LOGGER_TYPE_TO_CLASS) == {member.value for member in LoggerType} - {"all"}


def test_what_a_program_assigns_before_init_trackers_counts(tmp_path: Path) -> None:
    acc = accelerator("jsonl", tmp_path / "first")
    acc.project_configuration.logging_dir = str(tmp_path / "second")
    acc.init_trackers("run")
    acc.project_configuration = ProjectConfiguration(
        str(tmp_path / "third"), automatic_checkpoint_naming=True
    )
    assert acc.project_dir == acc.logging_dir == str(tmp_path / "third")
    acc.init_trackers("run")
    assert acc.save_state() == tmp_path / "third" / "checkpoints" / "checkpoint_0"
    acc.project_configuration.logging_dir = str(tmp_path / "fourth")
    own = Own()
    acc.log_with = [LoggerType("jsonl"), own]
    acc.init_trackers("run")
    acc.end_training()
    assert own.asked == ["start", "finish"]
    written = [str(file.parent.relative_to(tmp_path)) for file in sorted(tmp_path.rglob("run.jsonl"))]
    assert written == ["fourth", "second", "third"]
    acc.project_configuration = ProjectConfiguration()
    with pytest.raises(SettingError, match="needs a folder"):
        acc.init_trackers("run")


# --- trackers that users write


def test_an_object_is_used_as_it_is() -> None:
    own = Own("given")
    acc = accelerator(own)
    assert own.asked == []
    acc.init_trackers("ignored", config={"lr": 1, "path": Path("a")})
    acc.log({"loss": 0.5}, step=torch.tensor(3), log_kwargs={"own": {"k": 2}})
    acc.log({"loss": 0.25})
    assert type(own.asked[2][1]) is int, "no library takes a tensor as a step"
    assert acc.trackers == [own]
    assert acc.get_tracker("own") is own
    assert acc.get_tracker("own", unwrap=True) is own.asked
    acc.end_training()
    acc.end_training()
    assert acc.get_tracker("own") is own
    config = {"lr": 1, "path": Path("a")}
    assert own.asked == ["start", config, ({"loss": 0.5}, 3, {"k": 2}), ({"loss": 0.25}, None, {}), "finish"]


def test_a_registered_class_is_made_for_the_run(tmp_path: Path) -> None:
    class WithFolder(Own):
        name = "with_folder"
        requires_logging_directory = True

        def __init__(self, run_name: str, logging_dir: str, **kwargs: Any) -> None:
            super().__init__(run_name, logging_dir=logging_dir, **kwargs)

    assert register_tracker_class(WithFolder) is WithFolder
    register_tracker_class(WithFolder)
    acc = accelerator("with_folder", tmp_path)
    acc.init_trackers("run", init_kwargs={"with_folder": {"z": 1}})
    (tracker,) = acc.trackers
    assert (tracker.run_name, tracker.kwargs) == ("run", {"logging_dir": str(tmp_path), "z": 1})  # type: ignore[attr-defined]


def test_a_class_is_checked_when_it_is_registered() -> None:
    with pytest.raises(SettingError, match="not a class of trackers"):
        register_tracker_class(int)  # type: ignore[type-var]
    with pytest.raises(SettingError, match="has no name, requires_logging_directory, tracker"):
        register_tracker_class(GeneralTracker)

    class Other(Own):
        name = "jsonl"

    with pytest.warns(UserWarning, match="means Other now, not JSONLTracker"):
        register_tracker_class(Other)
    assert LOGGER_TYPE_TO_CLASS["jsonl"] is Other


def test_a_class_without_its_three_attributes_cannot_be_made() -> None:
    class Bare(GeneralTracker):
        name = "bare"

    with pytest.raises(NotImplementedError, match="requires_logging_directory, tracker"):
        Bare()
    with pytest.raises(NotImplementedError):
        GeneralTracker()
    assert GeneralTracker(_blank=True).log({"a": 1}) is None


def test_trackers_that_a_program_adds_are_started_logged_to_and_ended_as_in_1x(tmp_path: Path) -> None:
    @dataclass
    class Foreign:  # no GeneralTracker, and not hashable
        __slots__ = ("asked",)
        asked: list[Any]
        name = "foreign"

        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            self.asked.append((values, step, kwargs))

        def finish(self) -> None:
            self.asked.append("finish")

    own, never_started, foreign = Own(), Own(), Foreign([])
    acc = accelerator("jsonl", tmp_path)
    acc.trackers.append(own)
    acc.init_trackers("run", config={"lr": 1})
    acc.init_trackers("again")
    acc.trackers += [never_started, foreign]  # type: ignore[list-item]
    assert acc.get_tracker("own") is own
    assert acc.get_tracker("jsonl") is acc.trackers[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        acc.log({"a": 1}, log_kwargs={"foreign": {"k": 2}})

    def fail() -> None:
        try:
            raise RuntimeError("the training")
        finally:
            acc.end_training()

    with pytest.raises(RuntimeError, match="the training"):
        fail()
    acc.end_training()
    assert own.asked == ["start", {"lr": 1}, ({"a": 1}, None, {}), "finish"]
    assert (own.failed, never_started.failed) == (True, True)
    assert never_started.asked == [({"a": 1}, None, {}), "finish"]
    assert foreign.asked == [({"a": 1}, None, {"k": 2}), "finish"]
    assert track.open_trackers() == []


# --- options and order


def test_options_that_no_tracker_takes_are_ignored_as_in_1x_and_told_once(tmp_path: Path) -> None:
    """Programs give the options of their one tracker without its name: ``init_kwargs={"entity": "team"}``."""
    own = Own()
    acc = accelerator(["jsonl", own], tmp_path)
    options = {"entity": "team", "tensor_board": {}, "own": {"z": 1}, "wandb": {"mode": "offline"}}
    with pytest.warns(UserWarning, match="; this is ignored") as told:
        acc.init_trackers("run", init_kwargs=options)
    assert [str(each.message).partition("; this is ignored. ")[::2] for each in told] == [
        ("unknown tracker 'entity' in init_kwargs", "did you mean {'jsonl': {'entity': ...}}?"),
        ("unknown tracker 'tensor_board' in init_kwargs", "did you mean 'tensorboard'?"),
        (
            "init_kwargs has options for 'own', which is already made",
            "give them to the constructor of the tracker",
        ),
    ]
    with pytest.warns(UserWarning, match="in log_kwargs"):
        acc.log({"a": 1}, log_kwargs={"wandbb": {}, "wandb": {"commit": False}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        acc.log({"a": 1}, log_kwargs={"wandbb": {}})
        acc.init_trackers("run", init_kwargs=options)
    assert own.asked == ["start", *[({"a": 1}, None, {})] * 2]


def test_options_that_no_tracker_takes_are_errors_in_a_strict_run() -> None:
    acc = Accelerator(cpu=True, log_with=Own(), strict=True)
    with pytest.raises(UnknownNameError, match=r"in init_kwargs(.|\n)*did you mean 'tensorboard'"):
        acc.init_trackers("run", init_kwargs={"tensor_board": {}})
    with pytest.raises(SettingError, match="already made"):
        acc.init_trackers("run", init_kwargs={"own": {"z": 1}})
    assert acc.trackers == []
    acc.init_trackers("run", init_kwargs={"wandb": {"entity": "team"}})
    with pytest.raises(UnknownNameError, match="in log_kwargs"):
        acc.log({"a": 1}, log_kwargs={"wandbb": {}})


def test_logging_to_no_open_run_is_said_once(tmp_path: Path) -> None:
    acc = accelerator("jsonl", tmp_path)
    with pytest.warns(UserWarning, match="call init_trackers"):
        acc.log({"a": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        acc.log({"a": 1})
    with pytest.raises(SettingError, match="init_trackers"):
        acc.get_tracker("jsonl")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        silent = accelerator(None)
        silent.init_trackers("run", {"a": 1})
        silent.log({"a": 1})
        silent.get_tracker("anything").log_images({})
        silent.end_training()


def test_an_unknown_tracker_cannot_be_got() -> None:
    acc = accelerator(Own())
    acc.init_trackers("run")
    with pytest.raises(ValueError, match="unknown tracker 'jsonl'"):
        acc.get_tracker("jsonl")


def test_a_second_init_ends_runs_and_keeps_the_users_objects(tmp_path: Path) -> None:
    own = Own()
    acc = accelerator(["jsonl", own], tmp_path)
    acc.init_trackers("one")
    acc.log({"a": 1})
    acc.init_trackers("two", config={"b": 2})
    acc.log({"a": 2})
    acc.end_training()
    assert [*map(_kind, lines(tmp_path / "one.jsonl"))] == ["start", "values", "end"]
    assert [*map(_kind, lines(tmp_path / "two.jsonl"))] == ["start", "config", "values", "end"]
    assert own.asked == ["start", ({"a": 1}, None, {}), {"b": 2}, ({"a": 2}, None, {}), "finish"]


def _kind(line: dict[str, Any]) -> str:
    return next(key for key in ("start", "config", "values", "table", "end") if key in line)


@pytest.mark.parametrize("mode", [None, "offline"])
def test_comet_without_an_account_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, mode: str | None
) -> None:
    """Also to a user who sets the mode as it is set for other trackers: comet_ml reads no such variable."""

    def start(**options: Any) -> None:
        raise ValueError("Comet.ml requires an API key. Please provide as the first argument")

    module = types.ModuleType("comet_ml")
    module.start = start  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comet_ml", module)
    if mode:
        monkeypatch.setenv("COMET_MODE", mode)
    with pytest.raises(SettingError) as caught:
        CometMLTracker("project").start()
    assert "export COMET_START_ONLINE=false" in str(caught.value)
    assert ("no variable COMET_MODE" in str(caught.value)) == bool(mode)


@pytest.mark.parametrize(
    ("tracker", "said", "typed"),
    [
        ("wandb", "No API key configured. Use `wandb login` to log in.", "export WANDB_MODE=offline"),
        ("swanlab", "online mode: no TTY is available for interactive login.", "export SWANLAB_MODE=offline"),
        ("clearml", "It seems ClearML is not configured on this machine!", "export CLEARML_OFFLINE_MODE=1"),
    ],
)
def test_a_tracker_without_an_account_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, tracker: str, said: str, typed: str
) -> None:
    """The words are those that each library was seen to say; another error of it stays as it is."""

    def begin(**_: Any) -> None:
        raise RuntimeError(said)

    module = types.ModuleType(tracker)
    module.init = begin  # type: ignore[attr-defined]
    module.Task = types.SimpleNamespace(init=begin, current_task=lambda: None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, tracker, module)
    with pytest.raises(SettingError, match="no API key") as caught:
        track.TRACKERS.get(tracker)("run").start()
    assert typed in str(caught.value)
    said = "the disk is full"
    with pytest.raises(RuntimeError, match="the disk is full"):
        track.TRACKERS.get(tracker)("run").start()


def test_every_run_is_ended_whatever_one_raises() -> None:
    first, second, third = Second(), Own(), Second()
    acc = accelerator([first, second, third])
    acc.init_trackers("run")
    destroyed: list[bool] = []
    acc.state.destroy_process_group = lambda *_: destroyed.append(True)  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        acc.end_training()
    assert [each.asked[-1] for each in (first, second, third)] == ["finish"] * 3
    assert destroyed == [True]
    acc.end_training()
    assert [each.asked.count("finish") for each in (first, second, third)] == [1, 1, 1]


def test_a_run_that_is_ended_by_a_failing_training_is_failed() -> None:
    own = Own()
    acc = accelerator([own])
    acc.init_trackers("run")

    def train() -> None:
        try:
            raise ValueError("bad row")
        finally:
            acc.end_training()

    with pytest.raises(ValueError, match="bad row"):
        train()
    assert own.failed


def test_a_tracker_that_fails_does_not_keep_a_job_from_being_resumed() -> None:
    acc = accelerator([Second()])
    acc.init_trackers("run")
    with pytest.warns(UserWarning, match="ConnectionError"), pytest.raises(SystemExit) as ended:
        acc.exit_to_resume()
    assert ended.value.code == 75


def test_what_started_before_an_error_is_still_ended() -> None:
    class Broken(Own):
        def start(self) -> None:
            raise ConnectionError("no server")

    own = Own()
    acc = accelerator([own, Broken()])
    with pytest.raises(ConnectionError):
        acc.init_trackers("run")
    assert acc.trackers == [own]
    acc.end_training()
    assert own.asked == ["start", "finish"]


def test_several_accelerators_have_runs_of_their_own(tmp_path: Path) -> None:
    one, two = accelerator("jsonl", tmp_path), accelerator("jsonl", tmp_path)
    one.init_trackers("one")
    two.init_trackers("two")
    one.log({"a": 1})
    one.end_training()
    two.log({"a": 2})
    two.end_training()
    assert [_kind(line) for line in lines(tmp_path / "two.jsonl")] == ["start", "values", "end"]


class Weather(Own):
    """A tracker whose server comes and goes."""

    name = "weather"
    down = False

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        if self.down:
            raise ConnectionError("the server is gone")
        super().log(values, step, **kwargs)


def test_a_training_outlives_its_tracker(tmp_path: Path) -> None:
    weather = Weather()
    acc = accelerator([weather, "jsonl"], tmp_path)
    acc.init_trackers("run")
    acc.log({"a": 0})
    weather.down = True
    with pytest.warns(UserWarning, match="weather failed to log(.|\n)*ConnectionError: the server is gone"):
        acc.log({"a": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        acc.log({"a": 2})
        weather.down = False
        acc.log({"a": 3})
    with pytest.warns(UserWarning, match=r"weather has lost what 2 calls of log\(\) gave it"):
        acc.end_training()
    assert weather.asked == ["start", ({"a": 0}, None, {}), ({"a": 3}, None, {}), "finish"]
    values = [line["values"]["a"] for line in lines(tmp_path / "run.jsonl") if "values" in line]
    assert values == [0, 1, 2, 3]


def test_the_first_call_and_wrong_options_are_errors(tmp_path: Path) -> None:
    weather = Weather()
    weather.down = True
    acc = accelerator([weather, "jsonl"], tmp_path)
    acc.init_trackers("run")
    with pytest.raises(ConnectionError):
        acc.log({"a": 0})
    weather.down = False
    acc.log({"a": 0})
    with pytest.raises(SettingError, match="no options"):
        acc.log({"a": 1}, log_kwargs={"jsonl": {"b": 2}})


# --- the end of a script

SCRIPT = """
import os, sys
from accelerate import track
from accelerate.track.jsonl import JSONLTracker

for name in ("one", "two"):
    tracker = JSONLTracker(name, sys.argv[1])
    track.start_run(tracker)
    tracker.log({"a": 1})
"""


@pytest.mark.parametrize(
    ("ending", "end", "code"),
    [
        ("", "finished", 0),
        ("sys.exit(3)", "finished", 3),
        ("raise ValueError('no data')", "failed", 1),
        ("sys.ps1, sys.last_value = '>>>', ValueError()", "finished", 0),
        ("track.finish_runs([tracker])", "finished", 0),
        ("if os.fork() == 0:\n    sys.exit()\nos.wait()", "finished", 0),
    ],
)
def test_a_script_that_ends_no_run_leaves_ended_runs(
    tmp_path: Path, ending: str, end: str, code: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + textwrap.dedent(ending), str(tmp_path)],
        env=clean(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    for name in ("one", "two"):
        assert [line.get("end") for line in lines(tmp_path / f"{name}.jsonl")] == [None, None, end]


# --- the file of lines


def test_a_file_holds_whatever_is_given(tmp_path: Path) -> None:
    tracker = JSONLTracker("deep/run", tmp_path)
    with pytest.raises(SettingError, match=r"call start\(\) first"):
        tracker.log({"a": 1})
    tracker.start()
    tracker.log({"nan": float("nan"), "inf": [float("-inf")], "t": torch.ones(1), "text": "a\nb"}, step=2)
    tracker.log_table("scores", columns=["a"], data=[[np.float32(1)]])
    tracker.log({"half": "\ud800", (1, 2): np.float64("inf"), "none": None, "null": Path("a")})
    tracker.finish()
    tracker.finish()
    _, first, table, rare, end = lines(tmp_path / "deep" / "run.jsonl")
    assert first["values"] == {"nan": "NaN", "inf": ["-Infinity"], "t": 1.0, "text": "a\nb"}
    assert first["step"] == 2
    assert (table["table"], table["columns"], table["rows"]) == ("scores", ["a"], [[1.0]])
    assert rare["values"] == {"half": "\ud800", "(1, 2)": "Infinity", "none": None, "null": "a"}
    assert end["end"] == "finished"
    tracker.start()
    tracker.finish()
    assert len(lines(tmp_path / "deep" / "run.jsonl")) == 7


def test_what_was_logged_is_in_the_file_at_once(tmp_path: Path) -> None:
    tracker = JSONLTracker("run", tmp_path)
    tracker.start()
    tracker.log({"a": 1})
    assert lines(tmp_path / "run.jsonl")[-1]["values"] == {"a": 1}


class WindowsLocks:
    """The lock of a byte as Windows has it: by the position in the file, for the open file that asked."""

    LK_UNLCK, LK_NBLCK = 0, 2

    def __init__(self) -> None:
        self.locked: set[int] = set()

    def locking(self, file: int, mode: int, count: int) -> None:
        place, status = os.lseek(file, 0, os.SEEK_CUR), os.fstat(file)
        assert place > status.st_size + 2**30, "nobody may read a byte that is locked"
        if mode == self.LK_UNLCK:
            self.locked.remove(status.st_ino)
        elif status.st_ino in self.locked:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        else:
            self.locked.add(status.st_ino)


@pytest.mark.parametrize("system", [sys.platform, "win32"])
def test_a_second_run_of_a_name_takes_a_file_of_its_own_while_the_first_writes(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if system != sys.platform:
        monkeypatch.setattr(json_lines, "sys", SimpleNamespace(platform=system))
        monkeypatch.setattr(json_lines, "msvcrt", WindowsLocks(), raising=False)
    first, second = JSONLTracker("deep/run", tmp_path), JSONLTracker("deep/run", tmp_path)
    first.start()
    with pytest.warns(
        UserWarning, match=r"another run writes .*run\.jsonl now: this one writes .*run-2\.jsonl"
    ):
        second.start()
    first.log({"a": 1})
    second.log({"a": 2})
    first.finish()
    second.finish()
    assert lines(tmp_path / "deep/run.jsonl")[1]["values"] == {"a": 1}
    assert lines(tmp_path / "deep/run-2.jsonl")[1]["values"] == {"a": 2}
    third = JSONLTracker("deep/run", tmp_path)
    third.start()
    third.finish()
    assert third.path == tmp_path / "deep/run.jsonl"


def test_a_worker_that_was_forked_keeps_no_file_locked(tmp_path: Path) -> None:
    tracker = JSONLTracker("run", tmp_path)
    tracker.start()
    stay, leave = os.pipe()
    if (child := os.fork()) == 0:
        os.close(leave)
        os.read(stay, 1)
        os._exit(0)
    tracker.finish()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker.start()
    tracker.finish()
    os.close(leave)
    os.waitpid(child, 0)
    os.close(stay)


def test_a_run_after_one_that_was_killed_in_a_line_begins_a_new_line(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text('{"time": 1, "start": "run"}\n{"time": 2, "val')
    tracker = JSONLTracker("run", tmp_path)
    tracker.start()
    tracker.finish()
    text = (tmp_path / "run.jsonl").read_text().splitlines()
    assert text[1] == '{"time": 2, "val'
    assert [_kind(json.loads(line)) for line in text[2:]] == ["start", "end"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is full")
def test_a_full_disk_is_said_and_the_training_goes_on(tmp_path: Path) -> None:
    acc = accelerator("jsonl", tmp_path)
    acc.init_trackers("run")
    acc.log({"a": 1})
    (tracker,) = acc.trackers
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, tracker._file._file)  # type: ignore[attr-defined]
    os.close(full)
    with pytest.warns(UserWarning, match="No space left(.|\n)*free some space"):
        acc.log({"a": 2})
    with pytest.warns(UserWarning, match="lost what 1 call"), pytest.raises(OSError, match="No space left"):
        acc.end_training()
    assert lines(tmp_path / "run.jsonl")[-1]["values"] == {"a": 1}


LIMITED = """
import resource, sys
from accelerate.track.jsonl import JSONLTracker

tracker = JSONLTracker("run", sys.argv[1])
tracker.start()
resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
for value in range(100):
    tracker.log({"a": value})
"""


def test_a_line_that_does_not_fit_is_not_left_half_written(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(command, env=clean(), capture_output=True, text=True, timeout=60, check=False)
    assert "TrackerFileError: cannot write" in done.stderr
    written = lines(tmp_path / "run.jsonl")
    assert [_kind(line) for line in written] == ["start", *["values"] * (len(written) - 1)]
    assert len(written) > 1


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(OSError, match=r"cannot write .*run\.jsonl(.|\n)*give another project_dir="):
        JSONLTracker("run", tmp_path / "logs").start()


def test_a_file_is_recorded_with_its_size(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"1234")
    tracker = JSONLTracker("run", tmp_path)
    tracker.start()
    tracker.log_artifact(str(tmp_path / "w.bin"), "best")
    tracker.finish()
    record = lines(tmp_path / "run.jsonl")[1]
    assert {**record, "time": 0} == {
        "time": 0,
        "artifact": str(tmp_path / "w.bin"),
        "bytes": 4,
        "folder": "best",
    }


def test_logging_without_a_world_reads_the_environment_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(base, "is_main_process", lambda: asked.append(1) or True)
    monkeypatch.setattr(base, "current", lambda: None)
    tracker = JSONLTracker("run", tmp_path)
    tracker.start()
    for value in range(5):
        tracker.log({"a": value})
    tracker.finish()
    assert len(asked) == 1
    assert len(lines(tmp_path / "run.jsonl")) == 7


# --- values


def test_configurations_become_plain_and_flat() -> None:
    class Count(int):
        """A subclass of a plain type."""

    nested = {"a": {"b": {"c": 1}, "d": []}, 3: None, "e": {}, "f": Count(4), "g": (1, {"h": Path("i")})}
    assert base.to_json_types(nested) == {
        "a": {"b": {"c": 1}, "d": []},
        "3": None,
        "e": {},
        "f": 4,
        "g": [1, {"h": "i"}],
    }
    assert type(base.to_json_types(nested)["f"]) is int
    assert base.flatten_config(nested) == {
        "a.b.c": 1,
        "a.d": "[]",
        "3": "None",
        "e": "{}",
        "f": 4,
        "g": "[1, {'h': 'i'}]",
    }


def test_a_configuration_may_be_a_namespace_or_hold_dataclasses() -> None:
    @dataclass
    class Part:
        width: int = 3
        dtype: torch.dtype = torch.float16

    given = argparse.Namespace(lr=0.5, part=Part(), kind=Part)
    assert base.to_json_types(given) == {
        "lr": 0.5,
        "part": {"width": 3, "dtype": "torch.float16"},
        "kind": str(Part),
    }
    assert base.flatten_config(given)["part.width"] == 3


def test_arrays_tensors_and_ranges_of_a_configuration_are_lists(tmp_path: Path) -> None:
    tracker = JSONLTracker("run", tmp_path)
    tracker.start()
    config = {
        "weights": torch.tensor([0.5, 2.0], dtype=torch.bfloat16),
        "classes": np.array([[0, 1], [2, 3]]),
        "epochs": range(2),
        "large": torch.zeros(1001),
        "meta": torch.zeros(2, device="meta"),
    }
    tracker.store_init_configuration(config)
    tracker.log({"recall": torch.tensor([0.25, 0.5])})
    tracker.finish()
    _, stored, logged, _ = lines(tracker.tracker)
    assert stored["config"] | {"large": "", "meta": ""} == {
        "weights": [0.5, 2.0],
        "classes": [[0, 1], [2, 3]],
        "epochs": [0, 1],
        "large": "",
        "meta": "",
    }
    assert stored["config"]["large"].startswith("tensor([")
    assert stored["config"]["meta"].startswith("tensor(")
    assert logged["values"] == {"recall": [0.25, 0.5]}
    assert base.flatten_config(config)["weights"] == "[0.5, 2.0]"


def test_a_configuration_may_be_any_object_with_attributes(tmp_path: Path) -> None:
    class Args:
        def __init__(self) -> None:
            self.lr = 0.5

    tracker = JSONLTracker("run", tmp_path)
    tracker.start()
    tracker.store_init_configuration(Args())  # type: ignore[arg-type]
    tracker.finish()
    assert '"config":{"lr":0.5}' in tracker.tracker.read_text()
    assert base.flatten_config(Args()) == {"lr": 0.5}
    with pytest.raises(TypeError, match=r"(?s)for the trackers is a str.*vars\(args\)"):
        base.flatten_config("lr=0.5")


def test_only_what_holds_one_number_is_a_number() -> None:
    assert base.unwrap_scalars({"a": torch.tensor(2), "b": {"c": np.array([[3.5]])}}) == {
        "a": 2,
        "b": {"c": 3.5},
    }
    several = torch.ones(2)
    assert base.unwrap_scalars({"a": several})["a"] is several
    assert base.unwrap_scalar(None) is None


def test_a_blank_tracker_takes_any_call() -> None:
    blank: Any = base.BlankTracker()
    assert isinstance(blank, GeneralTracker)
    blank.writer.add_image("a", 1)
    blank["hparams"] = {"a": 1}
    blank.log({"a": 1}, step=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        blank.log_images({"a": 1})
        blank.log_table("a")
        blank.log_figure(None, "a.png")
        blank.log_artifact("a")
        blank.log_artifacts("a")
        GeneralTracker(_blank=True).log_images({"a": 1})
    assert not blank.run.id
    assert list(blank.rows) == []
    assert not hasattr(blank, "__deepcopy__")
    assert blank["a"].b is not None
