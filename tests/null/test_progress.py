"""Bars of loading, saving and merging: on a terminal, by one rank, and not under ``--quiet``."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

# Everything here is over in less time than a bar waits for.
PRELUDE = "import accelerate.core.progress as progress\nprogress.DELAY = 0\n"
LOAD = """
import torch
from safetensors.torch import save_file
from accelerate import load_checkpoint_in_model
model = torch.nn.Linear(64, 64)
save_file(model.state_dict(), "model.safetensors")
load_checkpoint_in_model(torch.nn.Linear(64, 64), "model.safetensors")
"""
SAVE = """
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(64, 64))
accelerator.save_model(model, "exported")
accelerator.save_state("state")
accelerator.load_state("state")
accelerator.save_model(model, "pickled", safe_serialization=False)
exported = torch.load("pickled/pytorch_model.bin")
assert torch.equal(exported["weight"], accelerator.unwrap_model(model).weight)
"""
MERGE = """
import torch
from torch.distributed.checkpoint import save
from accelerate.cli.main import run
save({"model": {"weight": torch.ones(64, 64)}}, checkpoint_id="parts", no_dist=True)
assert run(["merge-weights", "parts", "merged", *FLAGS]) == 0
"""


def run_in_terminal(folder: Path, script: str, **variables: str) -> str:
    """Run a script whose stderr is a terminal; return what it wrote there."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", **variables}
    command = [sys.executable, "-c", PRELUDE + script]
    process = subprocess.Popen(command, cwd=folder, env=environment, stderr=follower, start_new_session=True)
    os.close(follower)
    output = b""
    try:
        while chunk := os.read(leader, 65536):
            output += chunk
    except OSError:  # Linux: the other end is closed
        pass
    os.close(leader)
    assert process.wait(60) == 0, output.decode()
    return output.decode()


@pytest.mark.parametrize(
    ("script", "bars"),
    [
        (LOAD, ["loading weights"]),
        (
            SAVE,
            ["saving weights", "saving the checkpoint", "verifying the checkpoint", "loading the checkpoint"],
        ),
        ("FLAGS = []" + MERGE, ["merging weights"]),
    ],
    ids=["load", "save", "merge"],
)
def test_a_terminal_shows_a_bar_and_quiet_shows_none(tmp_path: Path, script: str, bars: list[str]) -> None:
    shown = run_in_terminal(tmp_path, script)
    assert all(bar in shown for bar in bars)
    assert not any(bar in run_in_terminal(tmp_path, script, ACCELERATE_QUIET="1") for bar in bars)


def test_quiet_of_the_command(tmp_path: Path) -> None:
    assert "merging" not in run_in_terminal(tmp_path, "FLAGS = ['--quiet']" + MERGE)


def test_of_several_ranks_only_the_first_shows_a_bar(tmp_path: Path) -> None:
    assert "loading weights" not in run_in_terminal(tmp_path, LOAD, RANK="1")


def test_a_pipe_has_no_bar(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PRELUDE + LOAD]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert "loading" not in done.stdout + done.stderr


def test_launch_hands_quiet_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PRELUDE + LOAD)
    launch = "from accelerate.cli.main import run\nrun(['launch', '--cpu', *FLAGS, 'train.py'])"
    assert "loading weights" in run_in_terminal(tmp_path, f"FLAGS = []\n{launch}")
    assert "loading weights" not in run_in_terminal(tmp_path, f"FLAGS = ['--quiet']\n{launch}")
