"""``accelerate monitor``: what is shown of a recorded run, in a terminal and in a pipe."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from accelerate.cli.main import run
from accelerate.report.monitor import COLUMNS, COMPARED, choose_run, summarize, watch_run
from accelerate.report.run_reader import read_runs

STEPS = 30


def write(path: Path, *records: dict[str, Any], mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return path


def record_rank(
    folder: Path, rank: int, steps: int = STEPS, begin: float = 1000.0, id: str = "", mode: str = "w"
) -> Path:
    """Each step takes 0.1 s; rank 1 works twice as long on its own as the others."""
    step = {"seconds": 0.1, "data_wait": 0.02, "forward": 0.06 if rank == 1 else 0.02}
    records = [
        {"time": begin + 0.1 * n, "optimizer_step": n, "samples": 32, "memory": 2**20 * (rank + 1), **step}
        for n in range(1, steps + 1)
    ]
    logged = {"time": begin + 1, "step": 5, "values": {"accuracy": 0.5, "train_loss": 0.25}}
    path = folder / f"rank_{rank}.jsonl"
    start = {"time": begin, "start": f"rank_{rank}", "run": id}
    return write(path, start, *([logged] if rank == 0 else []), *records, mode=mode)


def test_a_run_is_summed_up_with_its_slowest_rank(tmp_path: Path) -> None:
    for rank in range(3):
        record_rank(tmp_path / "night", rank)
    summary = summarize(choose_run(read_runs([tmp_path])), now=1010.0)
    assert summary.title == "night: not ended"
    assert summary.facts == {
        "lasted": "10.0 s",
        "step": "30",
        "throughput": "320 samples/s",
        "train_loss": "0.25 (step 5)",
        "accuracy": "0.5 (step 5)",
    }
    shown = [dict(zip(COLUMNS, row, strict=True)) for row in summary.rows]
    assert [row["rank"] for row in shown] == ["0", "1", "2"]
    assert shown[1]["waiting for data"] == "20 %"
    assert shown[2]["peak memory"] == "3.00 MB"
    assert shown[0]["last record"] == "7.0 s ago"
    assert summary.slowest == 1
    (note,) = summary.notes
    assert note.startswith("rank 1 is slow: 2.0 x the median of the ranks in 30 steps, the first of them 1")


class LongList(list[float]):
    """Numbers of which a look may read some of the last, and not all."""

    def __iter__(self) -> Iterator[float]:
        raise AssertionError("all were read")

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        assert not isinstance(part, list) or len(part) <= COMPARED
        return part


def test_a_look_at_a_long_run_reads_its_last_steps_alone(tmp_path: Path) -> None:
    for rank in range(2):
        record_rank(tmp_path, rank, COMPARED + 100 * (rank + 1))
    run = choose_run(read_runs([tmp_path]))
    shown = summarize(run, now=1010.0)
    for steps in run.ranks.values():
        for name in ("steps", "times", "seconds", "data_wait", "forward", "memory", "samples", "tokens"):
            setattr(steps, name, LongList(getattr(steps, name)))
    assert summarize(run, now=1010.0) == shown
    assert shown.notes


def test_runs_of_several_sizes_in_one_folder_are_told_apart(tmp_path: Path) -> None:
    """The second one has one process; a rank of the third has begun before the others."""
    launches = {"a": [0, 1], "b": [0], "c": [1, 0]}
    for number, (id, ranks) in enumerate(launches.items()):
        for rank in ranks:
            record_rank(tmp_path, rank, 10 * (number + 1), 1000.0 + 100 * number + rank, id, mode="a")
    steps = [{rank: len(each.steps) for rank, each in sorted(r.ranks.items())} for r in read_runs([tmp_path])]
    assert steps == [{0: 10, 1: 10}, {0: 20}, {0: 30, 1: 30}]


def test_the_newest_run_is_shown(tmp_path: Path) -> None:
    record_rank(tmp_path / "a", 0, begin=2000.0)
    record_rank(tmp_path / "b", 0, begin=1000.0)
    assert choose_run(read_runs([tmp_path])).name == "a"


def test_a_pipe_gets_the_run_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_rank(tmp_path / "night", 0)
    record_rank(tmp_path / "night", 1)
    assert run(["monitor", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].strip() == "night: not ended"
    assert "slowest: rank 1" in text
    assert all(column in text for column in COLUMNS)


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["monitor", str(tmp_path / "nothing")]) == 2
    assert run(["monitor", str(tmp_path)]) == 2
    text = capsys.readouterr().err
    assert "there is no" in text
    assert "accelerate launch --record runs/name" in text


def test_a_run_that_goes_on_is_shown_until_it_ends(tmp_path: Path) -> None:
    path = record_rank(tmp_path, 0)
    output = io.StringIO()
    thread = threading.Thread(
        target=watch_run,
        args=(str(tmp_path), 0.02, Console(file=output, force_terminal=True, width=120)),
        kwargs={"once": False},
    )
    thread.start()
    until = time.monotonic() + 60
    while "samples/s" not in output.getvalue() and time.monotonic() < until:
        time.sleep(0.01)
    step = {"time": 1004, "optimizer_step": 31, "seconds": 0.1, "samples": 32}
    write(path, step, {"time": 1005, "end": "finished"}, mode="a")
    thread.join(60)
    assert not thread.is_alive()
    last = output.getvalue().rpartition("finished")[2]
    assert "not ended" not in last
    assert "31" in last


def test_ctrl_c_ends_it_quietly_in_a_terminal(tmp_path: Path) -> None:
    record_rank(tmp_path, 0)
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "accelerate", "monitor", str(tmp_path)],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    output = b""
    while b"samples/s" not in output:
        output += os.read(leader, 4096)
    process.send_signal(2)
    assert process.wait(60) == 0
    os.close(leader)
    assert b"Traceback" not in output
