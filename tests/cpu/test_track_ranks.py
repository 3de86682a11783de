"""Trackers of two processes: rank 0 writes, the others have a tracker that does nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, JSONLTracker, on_main_process
from tests.support.ranks import RankServer
from tests.support.scripts import run_to_exit


class CallRecorder(GeneralTracker):
    """A tracker that records the calls on it; ``main_process_only=False`` makes it log on every rank."""

    requires_logging_directory = False

    def __init__(self, name: str, main_process_only: bool) -> None:
        self.name, self.main_process_only = name, main_process_only
        super().__init__()
        self.calls: list[str] = []

    @property
    def tracker(self) -> list[str]:
        return self.calls

    def start(self) -> None:
        self.calls.append("start")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append("log")

    def finish(self) -> None:
        self.calls.append("finish")


class ForeignRecorder:
    """Derived from no class of this package: it has no ``main_process_only``."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @on_main_process
    def log(self, values: dict[str, Any]) -> None:
        self.calls.append("log")


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def error_text(use: Callable[[], object]) -> str:
    """Return the text of the error of a call."""
    with pytest.raises(ValueError, match=r".") as error:
        use()
    return str(error.value)


def run(folder: str) -> dict[str, Any]:
    own, all_ranks = CallRecorder("own", True), CallRecorder("all_ranks", False)
    accelerator = Accelerator(cpu=True, log_with=["jsonl", own, all_ranks], project_dir=folder, strict=True)
    errors = [
        error_text(lambda: accelerator.init_trackers("run", init_kwargs={"jsnl": {}})),
        error_text(lambda: accelerator.init_trackers("run", init_kwargs={"own": {"a": 1}})),
    ]
    added = CallRecorder("added", True)
    accelerator.trackers.append(added)
    accelerator.init_trackers("run", config={"lr": 0.5})
    accelerator.log({"loss": 1.0 + accelerator.process_index}, step=1)
    got: Any = accelerator.get_tracker("jsonl")
    got.log_table("t", columns=["a"], data=[[1]])
    raw: Any = accelerator.get_tracker("jsonl", unwrap=True)
    raw.with_name("other").exists()
    errors.append(error_text(lambda: accelerator.get_tracker("nothing")))
    # Trackers that a script makes itself follow main_process_only.
    by_hand: tuple[Any, ...]
    by_hand = CallRecorder("by_hand", True), CallRecorder("by_hand", False), ForeignRecorder()
    for each in by_hand:
        each.log({"a": 1})
    mine = JSONLTracker(f"rank{accelerator.process_index}", folder)
    mine.main_process_only = False
    mine.start()
    mine.log({"a": 1})
    mine.finish()
    count = len(accelerator.trackers)
    accelerator.end_training()
    return {
        "trackers": count,
        "calls": [own.calls, all_ranks.calls],
        "added": added.calls,
        "by hand": [each.calls for each in by_hand],
        "kind": type(got).__name__,
        "errors": errors,
    }


def test_only_the_main_process_writes(ranks: RankServer, tmp_path: Path) -> None:
    first, second = ranks(2, run, str(tmp_path))
    assert first["trackers"] == 4
    assert first["added"] == ["start", "log", "finish"]
    assert second["added"] == ["finish"]
    assert first["calls"] == [["start", "log", "finish"]] * 2
    assert first["by hand"] == [["log"], ["log"], ["log"]]
    assert first["kind"] == "JSONLTracker"
    assert second["trackers"] == 1, "the one that the program has added on every rank"
    assert second["calls"] == [[], []]
    assert second["by hand"] == [[], ["log"], ["log"]]
    assert second["kind"] == "BlankTracker"
    assert first["errors"] == second["errors"]
    for error, word in zip(first["errors"], ("'jsonl'", "already made", "'nothing'"), strict=True):
        assert word in error
    written = lines(tmp_path / "run.jsonl")
    assert [line["values"] for line in written if "values" in line] == [{"loss": 1.0}]
    assert sum("table" in line for line in written) == 1
    assert sum("end" in line for line in written) == 1
    assert len(lines(tmp_path / "rank1.jsonl")) == 3


def wrong(folder: str) -> str:
    return error_text(lambda: Accelerator(cpu=True, log_with="jsonll", project_dir=folder))


def test_a_wrong_name_is_the_same_error_on_every_rank(ranks: RankServer, tmp_path: Path) -> None:
    first, second = ranks(2, wrong, str(tmp_path))
    assert first == second
    assert "did you mean 'jsonl'?" in first


class Trouble(CallRecorder):
    """Fails in one of its methods, or takes its time to finish."""

    def __init__(self, where: str) -> None:
        super().__init__("trouble", True)
        self.where = where

    def start(self) -> None:
        super().start()
        self._fail("start")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._fail("log")

    def finish(self) -> None:
        super().finish()
        if self.where == "slow finish":
            time.sleep(1.5)
        self._fail("finish")

    def _fail(self, where: str) -> None:
        if self.where == where:
            raise ConnectionError(f"no server in {where}")


def train(where: str) -> str:
    accelerator = Accelerator(cpu=True, log_with=Trouble(where))
    if accelerator.is_main_process:  # as many scripts have it: no collective call may be inside
        accelerator.init_trackers("run")
    for step in range(2):
        accelerator.log({"loss": 1.0}, step=step)
        accelerator.gather(torch.ones(1))
    accelerator.end_training()
    return "done"


@pytest.mark.parametrize("where", ["start", "log"])
def test_a_tracker_that_fails_leaves_no_rank_waiting(ranks: RankServer, where: str) -> None:
    first, second = ranks.outcomes(2, train, where, timeout=40, grace=30)
    assert (first.status, first.kind) == ("raised", "ConnectionError")
    assert second.status == "raised", second
    # Rank 0 holds the store, and may be gone before a slow rank 1 has read there why.
    named = ("rank 0 failed", "rank 0, or the launcher, is gone", "rank 0, or another rank, is gone")
    assert any(text in second.message for text in named), second.traceback


def test_the_others_end_while_the_main_process_still_finishes(ranks: RankServer) -> None:
    assert ranks(2, train, "slow finish", timeout=40) == ["done", "done"]
    first, second = ranks.outcomes(2, train, "finish", timeout=40, grace=30)
    assert (first.status, first.kind) == ("raised", "ConnectionError")
    assert second.status == "returned", second


FAILS = """
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=".")
accelerator.init_trackers("run")
for step in range(3):
    accelerator.log({"loss": accelerator.gather(torch.ones(1)).sum()}, step=step)
    if step == 1:
        raise ValueError("no data")
"""


def test_a_job_that_fails_on_every_rank_ends_its_run(ranks: RankServer, tmp_path: Path) -> None:
    ends = run_to_exit(ranks, 2, FAILS, tmp_path)
    assert [code for code, _ in ends] == [1, 1], ends
    assert all("ValueError: no data" in output for _, output in ends)
    written = lines(tmp_path / "run.jsonl")
    assert [line["values"]["loss"] for line in written if "values" in line] == [2.0, 2.0]
    assert written[-1]["end"] == "failed"
