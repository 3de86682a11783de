"""A checkpoint of the public package loads here, and ours loads there; needs ``make bench-peer``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environment import ROOT, clean

PEER = ROOT / ".venv-peer" / "bin" / "python"
pytestmark = pytest.mark.skipif(
    not PEER.exists(), reason="the public package is not installed: make bench-peer"
)

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

what, safe, folder = sys.argv[1], sys.argv[2] == "safe", sys.argv[3]
project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=project)
set_seed(1 if what == "save" else 2)
model = Tied()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.5)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
counter = Counter()
accelerator.register_for_checkpointing(counter)
if what == "save":
    for _ in range(4):
        loss = model(torch.randint(10, (8,))).square().mean()
        accelerator.backward(loss)
        optimizer.step(); scheduler.step(); optimizer.zero_grad()
        counter.count += 1
    accelerator.save_state(safe_serialization=safe)
    draw = torch.rand(()).item()
    big = nn.Sequential(*[nn.Linear(20, 20) for _ in range(5)])
    accelerator.save_model(big, folder + "/export", max_shard_size="3KB", safe_serialization=safe)
else:
    accelerator.load_state()
    draw = torch.rand(()).item()
states = optimizer.state_dict()["state"].values()
moments = [value.sum().item() for state in states for value in state.values()]
print("RESULT", model.embed.weight.sum().item(), model.head.weight is model.embed.weight, moments,
      scheduler.get_last_lr(), counter.count, draw)
"""


def run(python: Path | str, *arguments: str) -> str:
    """What the script reports under one of the two packages."""
    done = subprocess.run(
        [str(python), "-c", SCRIPT, *arguments], env=clean(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    return line


@pytest.mark.parametrize("form", ["safe", "plain"])
@pytest.mark.parametrize("direction", ["theirs to ours", "ours to theirs"])
def test_checkpoints_travel_in_both_directions(tmp_path: Path, direction: str, form: str) -> None:
    pair = (PEER, sys.executable) if direction == "theirs to ours" else (sys.executable, PEER)
    saved = run(pair[0], "save", form, str(tmp_path))
    assert run(pair[1], "load", form, str(tmp_path)) == saved


@pytest.mark.parametrize("form", ["safe", "plain"])
def test_exported_shards_are_named_and_indexed_alike(tmp_path: Path, form: str) -> None:
    listings = []
    for python in (PEER, sys.executable):
        folder = tmp_path / Path(python).parent.parent.name
        run(python, "save", form, str(folder))
        files = sorted((folder / "export").iterdir())
        listings.append(
            {p.name: p.read_text() if p.suffix == ".json" else p.stat().st_size // 64 for p in files}
        )
    assert listings[0] == listings[1]
    assert len(listings[0]) == 6
