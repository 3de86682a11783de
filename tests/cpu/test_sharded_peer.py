"""Sharded trainings travel to and from the public package, in parts and whole; needs ``make bench-peer``.

The public package does not shard on a CPU by itself: there the model is sharded by torch, and its functions
save and load it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu.test_checkpoint_peer import NEEDS_PEER, PEER
from tests.support.environment import clean
from tests.support.torch_versions import is_torch

pytestmark = NEEDS_PEER

SCRIPT = """
import sys, torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import (
    load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
)

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.mid = nn.Linear(4, 5)
        self.back = nn.Linear(5, 4)
        self.head.weight = self.embed.weight
    def forward(self, x):
        return self.head(self.back(self.mid(self.embed(x))))

def step(i):
    loss = model(torch.tensor([i, 3, 5])).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()

who, what, folder, kind = sys.argv[1:]
torch.manual_seed(1 if what == "save" else 2)
model = Tied()
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin if who == "ours" else None)
if who == "ours":
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
else:
    Accelerator.is_fsdp2 = property(lambda self: True)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
if what == "save":
    for i in range(3):
        step(i)
    save_fsdp_model(plugin, accelerator, model, folder)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
else:
    load_fsdp_model(plugin, accelerator, model, folder)
    load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
sys.stdout.write(f"RESULT {[step(i) for i in range(3, 6)]}\\n")
sys.stdout.flush()
accelerator.wait_for_everyone()
accelerator.end_training()  # a group that is left open can end its process with an abort
"""


def run(who: str, what: str, folder: Path, kind: str) -> list[str]:
    """The losses after a save or a load, of two processes."""
    python = sys.executable if who == "ours" else str(PEER)
    script = folder.with_name("script.py")
    script.write_text(SCRIPT)
    start = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    done = subprocess.run(
        [*start, who, what, str(folder), kind], env=clean(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("RESULT")]


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize(("writer", "reader"), [("theirs", "ours"), ("ours", "theirs")])
def test_sharded_trainings_travel_in_both_directions(
    tmp_path: Path, writer: str, reader: str, kind: str
) -> None:
    if kind == "SHARDED_STATE_DICT" and reader == "theirs" and is_torch(">=2.14"):
        pytest.skip("the torch beside the public package cannot read what this one writes")
    folder = tmp_path / "c"
    folder.mkdir()
    report = run(writer, "save", folder, kind)
    assert len(set(report)) == 1
    assert run(reader, "load", folder, kind) == report
