"""A checkpoint of the public package loads here, and ours loads there; needs ``make bench-peer``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environment import ROOT, clean
from tests.support.long_run import LONG_RUN

PEER = ROOT / ".venv-peer" / "bin" / "python"
NEEDS_PEER = [
    pytest.mark.skipif(not LONG_RUN, reason="runs in `make test-all`"),
    pytest.mark.skipif(not PEER.exists(), reason="the public package is not installed: make bench-peer"),
]
pytestmark = NEEDS_PEER

SCRIPT = """
import sys, torch
from torch import nn
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

class Counter:
    count = 0
    def state_dict(self):
        return {"count": self.count, "mixed": [1, "x", (2.0, None)]}
    def load_state_dict(self, state):
        self.count = state["count"]

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, x):
        return self.head(self.embed(x))

what, folder = sys.argv[1:]
project = ProjectConfiguration(folder)
accelerator = Accelerator(cpu=True, project_config=project)
set_seed(1 if what == "save" else 2)
model = Tied()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.5)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
counter = Counter()
accelerator.register_for_checkpointing(counter)
big = nn.Sequential(*[nn.Linear(20, 20) for _ in range(5)])
for form in ("safe", "plain"):
    if what == "save":
        for _ in range(4):
            loss = model(torch.randint(10, (8,))).square().mean()
            accelerator.backward(loss)
            optimizer.step(); scheduler.step(); optimizer.zero_grad()
            counter.count += 1
        accelerator.save_state(f"{folder}/{form}", safe_serialization=form == "safe")
        accelerator.save_model(big, f"{folder}/{form}-export", "3KB", safe_serialization=form == "safe")
    else:
        accelerator.load_state(f"{folder}/{form}")
    states = optimizer.state_dict()["state"].values()
    moments = [value.sum().item() for state in states for value in state.values()]
    print("RESULT", form, model.embed.weight.sum().item(), model.head.weight is model.embed.weight, moments,
          scheduler.get_last_lr(), counter.count, torch.rand(()).item())
"""


def run(python: Path | str, what: str, folder: Path) -> list[str]:
    """Return what the script reports under one of the two packages, saving or loading in both formats."""
    command = [str(python), "-c", SCRIPT, what, str(folder)]
    done = subprocess.run(command, env=clean(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("RESULT")]


@pytest.fixture(scope="module")
def saved_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[str]]]:
    """Per package: a folder it has saved in, and what it reported."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("ours", "theirs")}
    pythons = {"ours": sys.executable, "theirs": PEER}
    return {name: (folder, run(pythons[name], "save", folder)) for name, folder in folders.items()}


@pytest.mark.parametrize(("writer", "reader"), [("theirs", sys.executable), ("ours", PEER)])
def test_checkpoints_travel_in_both_directions(
    saved_folders: dict[str, tuple[Path, list[str]]], writer: str, reader: Path | str
) -> None:
    folder, report = saved_folders[writer]
    assert len(report) == 2
    assert run(reader, "load", folder) == report


@pytest.mark.parametrize("form", ["safe", "plain"])
def test_exported_shards_are_named_and_indexed_alike(
    saved_folders: dict[str, tuple[Path, list[str]]], form: str
) -> None:
    def list_files(name: str) -> dict[str, str | int]:
        files = (saved_folders[name][0] / f"{form}-export").iterdir()
        # Torch files name their members after themselves or not, so their sizes may differ by a little.
        return {p.name: p.read_text() if p.suffix == ".json" else p.stat().st_size // 1024 for p in files}

    assert list_files("ours") == list_files("theirs")
    assert len(list_files("ours")) == 6
