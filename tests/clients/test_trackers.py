"""Trackers with their real library, offline, read back with its own reader (tests/support/tracker_runs.py).

Libraries that are not installed are left out: `make test-trackers` has all of them. The stand-ins of
tests/support/trackers.py are held against the libraries too.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelerate import track
from tests.support.long_run import LONG_RUN, long_run_param
from tests.support.ranks import NO_LAUNCHER, RankServer
from tests.support.scripts import run_as_interpreter
from tests.support.tracker_runs import (
    ABSENT,
    READERS,
    STORED_CONFIG,
    offline_variables,
    run_arguments,
    run_outcome,
    start_run,
)
from tests.support.trackers import LIBRARIES

LOSSES = [1.5, 0.75, 0.25]
# What the rank server imports once.
PRELOAD = ("torch.utils.tensorboard", "tests.support.tracker_runs")
# Trackers whose library has nothing that a fork could inherit: by default their runs are forks.
FORKED = () if LONG_RUN or "TESTS_ALL_TRACKERS" in os.environ else ("jsonl", "tensorboard")
NAMES = track.TRACKERS.names()
ALL_TRACKERS = "TESTS_ALL_TRACKERS" in os.environ
HERE = [name for name in NAMES if track.TRACKERS.get(name).is_available()]
# How a library calls a run that has ended well, and one that has not; the files of the others do not say.
ENDS = {
    "jsonl": ("finished", "failed"),
    "mlflow": ("FINISHED", "FAILED"),
    "swanlab": ("RUN_STATE_FINISHED", "RUN_STATE_CRASHED"),
    "wandb": ("exit code 0", "exit code 1"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder to which the libraries write."""
    monkeypatch.chdir(tmp_path)
    for variable, value in offline_variables(tmp_path).items():
        monkeypatch.setenv(variable, value)
    return tmp_path


@pytest.fixture
def start(folder: Path, ranks: RankServer) -> Callable[..., tuple[str, str]]:
    """``start(name, ending, losses, run_id)`` logs a run in another process: its id and what it wrote."""

    def run(name: str, ending: str, losses: list[float], run_id: str = "") -> tuple[str, str]:
        if name not in FORKED:
            return start_run(name, folder, ending, losses, run_id)
        script = folder / "script.py"
        arguments = run_arguments(name, folder, ending, losses, run_id)
        script.write_text(
            f"import sys\nfrom tests.support.tracker_runs import main\nsys.argv[1:] = {arguments!r}\nmain()\n"
        )
        env = {**NO_LAUNCHER, **offline_variables(folder)}
        (outcome,) = ranks.outcomes(1, run_as_interpreter, str(script), env=env)
        return run_outcome(ending, outcome.output, failed="exit status 1 " in outcome.message)

    return run


def test_libraries_are_installed() -> None:
    absent = sorted(set(NAMES) - set(HERE))
    if ALL_TRACKERS:
        assert not absent
    elif absent:
        pytest.skip(f"not installed, not run: {', '.join(absent)}")


def test_every_tracker_has_a_reader() -> None:
    assert set(READERS) == set(NAMES)


@pytest.mark.parametrize("name", HERE)
def test_every_kind_can_be_read_back_or_is_left_out_by_name(
    name: str, folder: Path, start: Callable[..., tuple[str, str]]
) -> None:
    _, output = start(name, "every kind", LOSSES)
    contents = READERS[name](folder)
    absent = ABSENT.get(name, {})
    assert contents.losses == LOSSES
    assert {key: contents.config[key] for key in STORED_CONFIG} == STORED_CONFIG
    assert contents.note == "some words"
    assert contents.images == (0 if "images" in absent else 3)
    assert contents.file == ("" if "file" in absent else "trained")
    if "table" in absent:
        assert contents.table is None
    else:
        columns, row = contents.table or ([], [])
        assert (columns, [str(each) for each in row]) == (["who", "what"], ["me", "11"])
    assert contents.end == ENDS.get(name, ("", ""))[0]
    for words in absent.values():
        assert words in output
    left_out = re.findall(rf"{name} has no ([\w ]+): they are left out", output)
    assert len(left_out) == len(set(left_out)), "said twice"


@pytest.mark.parametrize(
    "name",
    [long_run_param(name) if name == "tensorboard" and not ALL_TRACKERS else name for name in HERE],
)
def test_a_run_goes_on_in_another_process(
    name: str, folder: Path, start: Callable[..., tuple[str, str]]
) -> None:
    if name == "clearml":
        pytest.skip("clearml resumes with its server only")
    run_id, _ = start(name, "finish", LOSSES[:2])
    assert start(name, "finish", LOSSES[2:], run_id)[0] == run_id
    contents = READERS[name](folder)
    assert contents.losses == LOSSES
    assert {key: contents.config[key] for key in STORED_CONFIG} == STORED_CONFIG


@pytest.mark.parametrize("ending", ["error", "interrupt"])
@pytest.mark.parametrize("name", HERE)
def test_a_run_that_is_broken_off_is_whole(
    name: str, ending: str, folder: Path, start: Callable[..., tuple[str, str]]
) -> None:
    _, output = start(name, ending, LOSSES)
    assert ("ValueError: no data" if ending == "error" else "KeyboardInterrupt") in output
    contents = READERS[name](folder)
    assert contents.losses == LOSSES
    if (name, ending) == ("swanlab", "interrupt"):  # it sees Ctrl-C itself
        assert contents.end == "RUN_STATE_ABORTED"
    else:
        assert contents.end == ENDS.get(name, ("", ""))[1]


@pytest.mark.skipif("comet_ml" not in HERE, reason="comet_ml is not installed")
def test_comet_without_a_key_says_what_to_type(folder: Path) -> None:
    from accelerate import Accelerator

    with pytest.raises(ValueError, match=r"no API key(.|\n)*export COMET_START_ONLINE=false"):
        Accelerator(cpu=True, log_with="comet_ml").init_trackers("run")


# --- the stand-ins

ALIASES = {
    "clearml": {"task": "Task", "logger": "Logger"},
    "comet_ml": {"experiment": "CometExperiment"},
    "swanlab": {"run": "Run", "run.config": "", "table": "echarts.Table"},
    "trackio": {"run": "Run", "run.config": ""},
    "wandb": {"run": "Run", "run.config": "wandb_sdk.wandb_config.Config"},
}


def real(name: str, path: str) -> Any:
    """The function or class of the library that a path of its stand-in means; None for a plain dict's."""
    owner, _, last = path.rpartition(".")
    owner = ALIASES.get(name, {}).get(owner, owner.replace("()", ""))
    if not owner and "." in path:
        return None
    target: Any = importlib.import_module(LIBRARIES[name].home)
    for part in filter(None, [*owner.split("."), last]):
        target = getattr(target, part)
    return target


@pytest.mark.parametrize("name", [name for name in LIBRARIES if name in HERE])
def test_a_stand_in_declares_what_the_library_declares(name: str) -> None:
    wrong = []
    for path, declared in LIBRARIES[name].calls.items():
        function = real(name, path)
        if function is None:
            continue
        known = inspect.signature(function).parameters
        free = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
        space: dict[str, Any] = {}
        exec(f"def stand_in({declared}): ...", space)
        used = inspect.signature(space["stand_in"]).parameters
        wrong += [f"{path}({each})" for each in used if each not in known and not free]
    assert not wrong
