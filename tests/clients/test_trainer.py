"""transformers' Trainer gives the numbers that it gives on the public package, recorded by record.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.record import launch, versions

pytest.importorskip("transformers", reason="the client needs Python 3.11")

RECORD = json.loads((Path(__file__).parent / "trainer.json").read_text())
RECORDED = RECORD["results"]
JOBS = sorted(RECORDED["1"])
HERE = Path(sys.executable)
# Our own launcher: no variable of ours, no file.
ACCELERATE = ("-m", "accelerate", "launch", "--cpu", "-n", "2")

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def tolerance() -> float:
    """How far a number may be from the recorded one: other processors and versions round otherwise."""
    mine = versions(HERE)
    same = all(mine[name] == RECORD["versions"][name] for name in ("torch", "transformers", "cpu"))
    return 1e-6 if same else 1e-3


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    """All jobs in one process."""
    return launch(HERE, 1, "tests.clients.trainer")


@pytest.fixture(scope="module")
def two() -> dict[str, Any]:
    """All jobs under torchrun on two processes, which get none of our variables."""
    return launch(HERE, 2, "tests.clients.trainer")


def differences(ours: Any, theirs: Any, tolerance: float, path: str = "") -> list[str]:
    """Where two trees of plain values differ; numbers by more than ``tolerance``, relative above one."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        pairs = [(ours[key], theirs[key], f"{path}.{key}") for key in ours]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = [(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    elif isinstance(ours, float) and isinstance(theirs, float):
        return [] if abs(ours - theirs) <= tolerance * max(1.0, abs(theirs)) else [f"{path}: {ours} {theirs}"]
    else:
        return [] if ours == theirs else [f"{path}: {ours} {theirs}"]
    return [line for a, b, where in pairs for line in differences(a, b, tolerance, where)]


@pytest.mark.parametrize("job", JOBS)
def test_one_process(job: str, one: dict[str, Any], tolerance: float) -> None:
    assert differences(one[job], RECORDED["1"][job], tolerance) == []


# Jobs whose recorded numbers are not ours on two processes, and why. They are compared otherwise below.
OTHERWISE = {
    "sharded_stream": "there each rank reads shards of its own: one that has fewer samples ends before others"
}


@pytest.mark.parametrize("job", [job for job in JOBS if job not in OTHERWISE])
def test_two_processes_of_torchrun(job: str, two: dict[str, Any], tolerance: float) -> None:
    assert differences(two[job], RECORDED["2"][job], tolerance) == []


def test_a_stream_gives_two_processes_the_batches_of_one(one: dict[str, Any], two: dict[str, Any]) -> None:
    mine, alone = two["sharded_stream"], one["sharded_stream"]
    for what in ("loss", "grad_norm", "weights"):
        assert differences(mine[what], alone[what], 1e-6) == []


def test_two_processes_of_our_launcher(two: dict[str, Any]) -> None:
    jobs = ("train", "accumulate", "resume")
    mine = launch(HERE, 2, "tests.clients.trainer", *jobs, start=ACCELERATE)
    assert {job: two[job] for job in jobs} == mine


@pytest.mark.parametrize("size", [1, 2])
def test_resumed_runs_end_as_the_uninterrupted(size: int, one: dict[str, Any], two: dict[str, Any]) -> None:
    for job in ("resume", "resume_stream"):
        done = (one if size == 1 else two)[job]
        for step in (3, 4):
            again = done[f"from-{step}"]
            assert again["world"] == size
            assert again["loss"] == done["whole"]["loss"]
            assert again["weights"] == done["whole"]["weights"]


def test_every_sample_is_evaluated_once_and_in_order(one: dict[str, Any], two: dict[str, Any]) -> None:
    for job in ("train", "bf16", "iterable"):
        assert one[job]["shape"][0] == two[job]["shape"][0] == 7
        assert one[job]["labels"] == two[job]["labels"]
