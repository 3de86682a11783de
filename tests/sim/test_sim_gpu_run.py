"""``make gpu`` from end to end on the simulated accelerator: no row fails for the first time on a card."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
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
