"""``make gpu`` from end to end on the simulated accelerator: no row fails for the first time on a card."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import states, steps
from benchmarks.gpu.rows import all_rows

from tests.support.environment import ROOT
from tests.support.long_run import LONG_RUN

# What only `make test-all` runs: rows that differ from another one by a size or a number format, and those
# files of tests/gpu that take longest, whose tests are those of tests/sim under other names.
IN_LONG_RUN = {
    *("test-context", "test-estimate", "test-pager"),
    *("async-save-40", "load-20-hot", "load-70-hot", "offload-2x", "offload-1x"),
    *("step-bf16", "step-fp16", "step-fp8", "step-bf16-by-hand", "memory-fp16", "memory-fp8"),
}


def choose_rows() -> list[str]:
    names = [row.name for row in all_rows()]
    assert {*names} >= IN_LONG_RUN, "a row has another name now"
    return [name for name in names if LONG_RUN or name not in IN_LONG_RUN]


@pytest.mark.timeout(400)
def test_every_row_runs(tmp_path: Path) -> None:
    chosen = choose_rows()
    only = [word for name in chosen for word in ("--only", name)]
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "sim", "--output", str(tmp_path), *only]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=390, check=False)
    written = json.loads((tmp_path / "results.json").read_text())
    failed = {name: row["ours"] for name, row in written["rows"].items() if isinstance(row["ours"], str)}
    assert not failed, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == 0
    assert list(written["rows"]) == chosen
    assert written["not_reached"] == {}
    page = (tmp_path / "results.md").read_text()
    assert "a rehearsal on the simulated accelerator" in page
    assert all(f"| {row.title} |" in page for row in all_rows() if row.name in chosen)
    assert json.loads((tmp_path / "offload-4x-ours.json").read_text())["traceEvents"]
    assert not (tmp_path / "files").exists(), "large files were left"


def test_a_row_of_memory_has_no_workspaces_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries take memory at their first product and keep it; which loop comes first must not matter."""
    kept: list[torch.Tensor] = []
    linear = torch.nn.Linear.forward

    def forward(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.append(torch.empty(2**20, dtype=torch.uint8, device=x.device))
        return linear(layer, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", forward)
    sample = steps.main("bf16", "memory", 32, 2, 1, "-")
    assert kept
    assert sample.figure == 1.0
    assert sample.base < 1.0, "MB"


@pytest.mark.parametrize("background", [False, True])
def test_the_first_saves_are_not_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, background: bool
) -> None:
    """They write to memory and files that the later ones use again."""
    done: list[float] = []

    def timed(work: Callable[[], object]) -> float:
        work()
        done.append(9.0 if len(done) < 2 else 1.0)
        return done[-1]

    monkeypatch.setattr(states, "timed", timed)
    sample = states.save(tmp_path, 2**20, background, 2)
    assert (sample.base, sample.value, sample.figure, len(done)) == (1.0, 1.0, 1.0, 6)
