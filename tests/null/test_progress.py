"""Bars of loading, saving and merging: on a terminal, by one rank, and not under ``--quiet``."""

from __future__ import annotations

import os
import pty
import sys
import threading
from pathlib import Path

import pytest

from tests.support.command import launch_variables
from tests.support.packages import is_installed
from tests.support.ranks import NO_LAUNCHER, RankServer

# Everything here is over in less time than a bar waits for.
PRELUDE = "import accelerate.core.units as progress\nprogress.DELAY = 0\n"
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
FETCH = """
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
accelerator.prepare(torch.nn.Linear(64, 64))
accelerator.save_state("memory://store/state")
accelerator.load_state("memory://store/state")
"""
ESTIMATE = """
import json
from accelerate.cli.main import run
config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 16}
json.dump({**config, "architectures": ["GPT2LMHeadModel"]}, open("config.json", "w"))
assert run(["estimate-memory", ".", "--training", "--batch", "1", "--length", "8"]) == 0
"""
MERGE = """
import torch
from torch.distributed.checkpoint import save
from accelerate.cli.main import run
save({"model": {"weight": torch.ones(64, 64)}}, checkpoint_id="parts", no_dist=True)
assert run(["merge-weights", "parts", "merged", *FLAGS]) == 0
"""


def show_on_terminal(folder: str, script: str) -> str:
    """Run a script on this rank with a terminal as stderr; return what it wrote there."""
    os.chdir(folder)
    leader, follower = pty.openpty()
    log = os.dup(2)
    os.dup2(follower, 2)
    os.close(follower)
    output = bytearray()

    def read() -> None:
        try:
            while chunk := os.read(leader, 65536):
                output.extend(chunk)
        except OSError:  # Linux: the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        exec(compile(PRELUDE + script, "script.py", "exec"), {"__name__": "__main__"})
    finally:
        sys.stderr.flush()
        os.dup2(log, 2)
        reader.join()
    return output.decode()


@pytest.mark.parametrize(
    ("script", "bars"),
    [
        (LOAD, ["loading weights"]),
        (
            SAVE,
            ["saving weights", "saving the checkpoint", "verifying the checkpoint", "loading the checkpoint"],
        ),
        (FETCH, ["fetching the checkpoint"]),
        pytest.param(
            ESTIMATE,
            ["tracing "],
            marks=pytest.mark.skipif(
                not is_installed("transformers"), reason="transformers is not installed"
            ),
        ),
        ("FLAGS = []" + MERGE, ["merging weights"]),
    ],
    ids=["load", "save", "fetch", "estimate", "merge"],
)
def test_a_terminal_shows_a_bar_and_quiet_shows_none(
    ranks: RankServer, tmp_path: Path, script: str, bars: list[str]
) -> None:
    (shown,) = ranks(1, show_on_terminal, str(tmp_path), script, env=NO_LAUNCHER)
    assert all(bar in shown for bar in bars)
    quiet = {**NO_LAUNCHER, "ACCELERATE_QUIET": "1"}
    (shown,) = ranks(1, show_on_terminal, str(tmp_path), script, env=quiet)
    assert not any(bar in shown for bar in bars)


def test_quiet_of_the_command(ranks: RankServer, tmp_path: Path) -> None:
    script = "FLAGS = ['--quiet']" + MERGE
    assert "merging" not in ranks(1, show_on_terminal, str(tmp_path), script, env=NO_LAUNCHER)[0]


def test_of_several_ranks_only_the_first_shows_a_bar(ranks: RankServer, tmp_path: Path) -> None:
    second = {**NO_LAUNCHER, "RANK": "1"}
    assert "loading weights" not in ranks(1, show_on_terminal, str(tmp_path), LOAD, env=second)[0]


def show_in_pipe(folder: str) -> None:
    os.chdir(folder)
    exec(compile(PRELUDE + LOAD, "script.py", "exec"), {"__name__": "__main__"})


def test_a_pipe_has_no_bar(ranks: RankServer, tmp_path: Path) -> None:
    (outcome,) = ranks.outcomes(1, show_in_pipe, str(tmp_path), env=NO_LAUNCHER)
    assert outcome.status == "returned"
    assert "loading" not in outcome.output


def test_launch_hands_quiet_on(ranks: RankServer, tmp_path: Path) -> None:
    for flags, is_shown in (((), True), (("--quiet",), False)):
        variables = launch_variables("--cpu", *flags)
        (shown,) = ranks(1, show_on_terminal, str(tmp_path), LOAD, env=variables)
        assert ("loading weights" in shown) is is_shown
