"""``accelerate launch --record``: what each rank writes, and what is drawn of it."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import launch, launch_variables
from tests.support.ranks import RankServer
from tests.support.scripts import run_to_exit

SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=2)
accelerator.init_trackers("script", config={"lr": 0.1})
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
loader = DataLoader(TensorDataset(torch.rand(30, 4)), batch_size=4)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
for epoch in range(2):
    for (batch,) in loader:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.log({"loss": loss.item()}, step=epoch)
accelerator.save_state("checkpoint")
"""


def run(ranks: RankServer, size: int, folder: Path, script: str, *flags: str) -> list[tuple[int, str]]:
    """Run a script as ``accelerate launch FLAGS`` tells it to; return each rank's exit status and output."""
    env = launch_variables("--cpu", "--num_processes", str(size), *flags)
    return run_to_exit(ranks, size, script, folder, env)


def trained(ranks: RankServer, size: int, folder: Path, script: str, *flags: str) -> None:
    ends = run(ranks, size, folder, script, *flags)
    assert [code for code, _ in ends] == [0] * size, ends


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def runs(path: Path) -> list[list[dict[str, Any]]]:
    """The records of each run in the file of a rank."""
    lists: list[list[dict[str, Any]]] = []
    for record in records(path):
        if "start" in record:
            lists.append([])
        lists[-1].append(record)
    return lists


def column(run: list[dict[str, Any]], name: str) -> list[Any]:
    return [record[name] for record in run if name in record]


def test_each_rank_records_its_steps_and_rank_0_what_was_logged(ranks: RankServer, tmp_path: Path) -> None:
    trained(ranks, 2, tmp_path, SCRIPT, "--record", "runs/one")
    folder = tmp_path / "runs" / "one"
    assert sorted(path.name for path in folder.iterdir()) == ["rank_0.jsonl", "rank_1.jsonl"]
    (run,) = runs(folder / "rank_0.jsonl")
    assert len({runs(folder / f"rank_{rank}.jsonl")[0][0]["run"] for rank in (0, 1)}) == 1
    assert (column(run, "end"), column(run, "config")) == (["finished"], [{"lr": 0.1}])
    # 30 samples in steps of 8: 4 batches of each rank and epoch, 2 of them in an optimizer step.
    for rank in (0, 1):
        steps = [each for each in runs(folder / f"rank_{rank}.jsonl")[0] if "optimizer_step" in each]
        assert [each["optimizer_step"] for each in steps] == [1, 2, 3, 4]
        assert [each["samples"] for each in steps] == [16, 14, 16, 14]
        for each in steps:
            assert 0 <= each["data_wait"] < each["data_wait"] + each["forward"] <= each["seconds"]
            assert each["memory"] > 2**20
    assert column(run, "lr")[0] == [pytest.approx(0.1 / 3)]
    assert [record["step"] for record in run if "loss" in record.get("values", {})] == [0, 1]
    (save,) = [record for record in run if "checkpoint" in record]
    assert save["step"] == 4
    assert save["bytes"] == sum(f.stat().st_size for f in (tmp_path / "checkpoint").rglob("*") if f.is_file())
    assert column(run, "environment")[0]["Environment"]["processes"] == 2


TOKENS = """
import torch
from torch.utils.data import DataLoader
from accelerate import Accelerator

class Config:
    def __init__(self):
        self.lr = 0.1

accelerator = Accelerator(mixed_precision="bf16")
accelerator.init_trackers("tokens", config=Config())
model = torch.nn.Embedding(10, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = [{"input_ids": torch.arange(n % 3 + 4)[:4]} for n in range(16)]
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4))
for batch in loader:
    accelerator.backward(model(batch["input_ids"]).mean())
    optimizer.step()
"""


def test_tokens_the_model_and_requested_options_are_recorded(ranks: RankServer, tmp_path: Path) -> None:
    trained(ranks, 2, tmp_path, TOKENS, "--gradient_accumulation_steps", "1", "--record", "runs")
    for rank in (0, 1):
        (run,) = runs(tmp_path / "runs" / f"rank_{rank}.jsonl")
        assert column(run, "tokens") == [16, 16]  # 4 rows of 4 on each rank
    (run,) = runs(tmp_path / "runs" / "rank_0.jsonl")
    assert column(run, "config") == [{"lr": 0.1}]  # of an object, its attributes
    (model,) = column(run, "model")
    assert (model["parameters"], model["trained"], model["format"]) == (40, 40, "bf16")
    assert (model["peak_flops"], model["processes"]) == (None, 2)
    last = column(run, "environment")[-1]
    options = {row["option"]: row for row in last["Requested options"]}
    assert (options["mixed_precision"]["value"], options["mixed_precision"]["effect"]) == ("bf16", "applied")
    settings = {row["setting"]: row for row in last["Settings of the launch"]}
    assert (settings["num_processes"]["value"], settings["num_processes"]["from"]) == (2, "--num_processes")


def test_a_second_launch_into_the_folder_is_a_run_of_its_own_and_a_failed_one_says_so(
    ranks: RankServer, tmp_path: Path
) -> None:
    trained(ranks, 1, tmp_path, SCRIPT, "--record", "runs")
    ((code, _),) = run(ranks, 1, tmp_path, SCRIPT + "raise ValueError('no')\n", "--record", "runs")
    assert code != 0
    first, second = runs(tmp_path / "runs" / "rank_0.jsonl")
    assert column(first, "run") != column(second, "run")
    assert (column(first, "end"), column(second, "end")) == (["finished"], ["failed"])
    assert len(column(first, "optimizer_step")) == len(column(second, "optimizer_step")) > 0
    assert set(column(first, "tokens")) == {None}  # batches without input_ids


def test_a_run_that_is_killed_keeps_its_steps(tmp_path: Path) -> None:
    """As a user launches it: nothing but the launcher and the script takes part."""
    script = SCRIPT + "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    done = launch("--cpu", "--record", "runs", script_text=script, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.output
    (run,) = runs(tmp_path / "runs" / "rank_0.jsonl")
    assert column(run, "end") == []
    assert len(column(run, "optimizer_step")) == 8  # 8 batches, 2 of them in a step, 2 epochs


def test_a_full_disk_ends_the_record_and_not_the_training(ranks: RankServer, tmp_path: Path) -> None:
    limit = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
{SCRIPT.replace('accelerator.save_state("checkpoint")', 'print("trained to the end")')}
"""
    limit = limit.replace(
        "for epoch",
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (1200, {resource.RLIM_INFINITY}))\nfor epoch",
        1,
    )
    ((code, output),) = run(ranks, 1, tmp_path, limit, "--record", "runs")
    assert code == 0, output
    assert "trained to the end" in output
    assert output.count("the run is not recorded any more") == 1
    assert all(isinstance(each, dict) for each in records(tmp_path / "runs" / "rank_0.jsonl"))


def test_nothing_is_written_without_the_flag(ranks: RankServer, tmp_path: Path) -> None:
    trained(ranks, 1, tmp_path, SCRIPT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "script.py"]
