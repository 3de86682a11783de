"""transformers' Trainer on four virtual devices of the CPU client, by its own keys for torch_xla's FSDP."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch_xla", exc_type=ImportError)
pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(600)


def train(kind: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.xla.trainer_job", kind, str(folder / kind)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / kind).read_text())


def test_the_trainer_shards_by_its_own_keys(tmp_path: Path) -> None:
    """It asserts that the prepared loader is torch_xla's, and writes there how batches are sharded."""
    expected, sharded = train("cpu", tmp_path), train("fsdp", tmp_path)
    assert len(expected["losses"]) == 4
    assert expected["losses"][3] < expected["losses"][0]
    assert sharded["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    matrices = [text for name, text in sharded["shardings"].items() if "proj" in name]
    assert len(matrices) == 14
    assert all(text.startswith("{devices=[") for text in matrices), matrices
