"""The variables of the processes that compute on a device: who sets them, and that the user's word counts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate import PartialState, notebook_launcher
from accelerate import device as devices
from tests.support.command import run
from tests.support.environment import clean

PAGES = "THP_MEM_ALLOC_ENABLE"
MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Programs that write to 64 MiB after they have got their state, and say how much of it lies in large pages.
WRITES = """
import torch
from accelerate import PartialState
PartialState(cpu=True)
kept = torch.empty(2**26, dtype=torch.uint8).fill_(1)
lines = open("/proc/self/smaps_rollup").read().splitlines()
print(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:")))
"""


@pytest.mark.parametrize("name", devices.DEVICES.names())
def test_variables_are_text(name: str) -> None:
    for variable, value in devices.get(name).environment.items():
        assert variable == variable.upper()
        assert isinstance(value, str)


def test_a_process_that_nobody_launched_sets_what_its_device_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PAGES, raising=False)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    PartialState()
    assert PAGES not in os.environ
    PartialState._reset_state()
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE")
    PartialState(cpu=True)
    assert os.environ[PAGES] == "1"


@pytest.mark.parametrize("value", ["0", ""])
def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(PAGES, value)
    PartialState(cpu=True)
    assert os.environ[PAGES] == value


@pytest.mark.parametrize("set_before", [False, True])
def test_the_launcher_hands_it_out(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    set_before: bool,
) -> None:
    """Before torch is loaded: a script may make its model before its Accelerator."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv(PAGES, raising=False)
    if set_before:
        monkeypatch.setenv(PAGES, "0")
    (tmp_path / "train.py").touch()
    assert run(["launch", "--cpu", "--dry-run", "-n", "2", str(tmp_path / "train.py")]) == 0
    assert (PAGES in capsys.readouterr().out) is not set_before


def test_a_function_that_runs_in_this_process_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PAGES, raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert notebook_launcher(os.environ.get, (PAGES,), num_processes=1) == ["1"]
    assert PAGES not in os.environ


@pytest.mark.skipif(
    not MODE.exists() or "[madvise]" not in MODE.read_text(encoding="ascii"),
    reason="this system gives large pages to all, or to none",
)
@pytest.mark.parametrize(("value", "large"), [(None, True), ("0", False)])
def test_tensors_lie_in_large_pages(value: str | None, large: bool) -> None:
    command = [sys.executable, "-c", WRITES]
    done = subprocess.run(
        command, env=clean({PAGES: value}), capture_output=True, text=True, timeout=60, check=True
    )
    assert (int(done.stdout) >= 2**25) is large
