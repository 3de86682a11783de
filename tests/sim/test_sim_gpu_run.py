"""``make gpu`` from end to end on the simulated accelerator: no row fails for the first time on a card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.gpu.rows import all_rows

from tests.support.environment import ROOT

# Most tests of tests/gpu are those of tests/sim under other names; `make test-all` runs all of them here too.
SHORT = ("test-training", "test-host_waits", "test-groups")


def choose_rows() -> list[str]:
    names = [row.name for row in all_rows()]
    everything = bool(os.environ.get("TESTS_ALL"))
    return [name for name in names if everything or name in SHORT or not name.startswith("test-")]


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
