"""``accelerate test``: what it says of a set-up that works, and that every check can fail."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.check import checks, run
from accelerate.check.checks import CHECKS, CheckOutcome, run_check
from accelerate.cli.test import SUCCESS
from accelerate.utils import is_deepspeed_available
from accelerate.world import collective
from tests.support.command import accelerate, launch
from tests.support.long_run import long_run_param
from tests.support.ranks import NO_LAUNCHER, RankServer
from tests.support.scripts import run_to_exit

NAMES = [name for name, _ in CHECKS]
CHECK_BY_NAME = dict(CHECKS)


def table(stdout: str) -> dict[str, tuple[str, str]]:
    """Return name of a check -> (result, text) from the printed table."""
    lines = stdout.split("what was seen\n")[1].split("\n\n")[0].splitlines()
    return {line[:16].rstrip(): (line[18:26].rstrip(), line[28:]) for line in lines}


# ---------------------------------------------------------------- set-ups that work


@pytest.mark.parametrize("processes", [long_run_param(1), 2])
def test_a_set_up_that_works(tmp_path: Path, processes: int) -> None:
    """F1: the world is as large as was asked; every sample comes once; the table comes from a real launch.

    A file names the set-up, and a flag something more.
    """
    file = tmp_path / "set-up.yaml"
    kind = "MULTI_CPU" if processes > 1 else "NO"
    file.write_text(f"distributed_type: {kind}\nuse_cpu: true\nnum_processes: {processes}\n")
    result = accelerate("test", "--config_file", str(file), "--mixed_precision", "bf16")
    assert result.returncode == 0, result.output
    assert (
        result.stdout.splitlines()[-1]
        == SUCCESS
        == "Test is a success! You are ready for your distributed training!"
    )
    assert result.stdout.startswith("1 process on cpu" if processes == 1 else "2 processes on cpu")
    rows = table(result.stdout)
    assert list(rows) == NAMES
    results = {name: result for name, (result, _) in rows.items()}
    assert results == dict.fromkeys(NAMES, "ok") | ({"speed": "skipped"} if processes == 1 else {})
    assert rows["ranks"] == ("ok", f"{processes} on 1 machine: {', '.join(['cpu'] * processes)}")
    assert rows["precision"][1] == "bf16: a layer gives bfloat16"
    assert not result.survivors()


def test_a_user_may_launch_the_script(ranks: RankServer, tmp_path: Path) -> None:
    """The import path of the script is a promise; programs run it under launchers of their own."""
    script = (
        "import runpy\nrunpy.run_module('accelerate.test_utils.scripts.test_script', run_name='__main__')"
    )
    ((code, output),) = run_to_exit(ranks, 1, script, tmp_path, NO_LAUNCHER)
    assert code == 0, output
    assert list(table(output)) == NAMES


MESH = "ACCELERATE_USE_PARALLELISM_CONFIG"


def run_all_checks() -> dict[str, tuple[str, str]]:
    accelerator = Accelerator()
    outcomes = {name: run_check(check, accelerator) for name, check in CHECKS}
    return {name: (each.result, each.text) for name, each in outcomes.items() if each.result != "ok"}


@pytest.mark.parametrize(
    "env",
    [{"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}]
    + [{MESH: "true", f"PARALLELISM_CONFIG_{kind}_SIZE": "2"} for kind in ("TP", "PP", "CP", "SP")],
    ids=["fsdp2", "tp", "pp", "cp", "sp"],
)
def test_ranks_may_share_a_model_or_read_the_same_samples(ranks: RankServer, env: dict[str, str]) -> None:
    """Samples are counted by data shards. Rank 0 cannot dispatch where several ranks read the same ones."""
    for others in ranks(2, run_all_checks, env=env):
        assert others == {} if MESH not in env else list(others) == ["data, dispatched"], others
        assert all(result == "skipped" for result, _ in others.values())


_BF16: dict[str, Any] = {"bf16": {"enabled": True}, "gradient_clipping": 0.1}
_OPTIMIZER: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}
_SCHEDULER: dict[str, Any] = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}


@pytest.mark.skipif(not is_deepspeed_available(), reason="the package deepspeed is not installed")
@pytest.mark.parametrize(
    ("sections", "skipped"),
    [(_BF16, []), (_OPTIMIZER, ["training", "checkpoint"]), (_SCHEDULER, ["training"])],
    ids=["precision and clipping", "optimizer", "scheduler"],
)
def test_what_a_file_of_an_engine_says_itself_is_no_failure(
    ranks: RankServer, tmp_path: Path, sections: dict[str, Any], skipped: list[str]
) -> None:
    file = tmp_path / "ds.json"
    stage = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 4}
    file.write_text(json.dumps({**stage, **sections}))
    env = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    for others in ranks(2, run_all_checks, env=env):
        assert list(others) == skipped, others
        for result, text in others.values():
            assert (result, "deepspeed configures" in text) == ("skipped", True)


def test_flags_that_name_another_script_are_refused() -> None:
    for flag in ("--module", "--no_python"):
        result = accelerate("test", flag)
        assert result.returncode == 2
        assert flag in result.stderr
        assert not result.stdout


# ---------------------------------------------------------------- every check can fail


def fails(name: str, accelerator: Accelerator | None = None) -> str:
    """Return the text of a check that must fail."""
    outcome = run_check(CHECK_BY_NAME[name], accelerator or Accelerator(cpu=True))
    assert outcome.result == "failed", outcome
    assert "Traceback" in outcome.trace
    return outcome.text


def test_a_world_that_is_not_the_one_that_was_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """F1, F2: a rank that is alone although the launcher told it of two."""
    accelerator = Accelerator(cpu=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert fails("ranks", accelerator) == "WORLD_SIZE is 2, but the world has 1"


def test_collectives_that_give_wrong_values(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Accelerator.gather
    monkeypatch.setattr(
        Accelerator, "gather", lambda self, tree: right(self, {k: v + 1 for k, v in tree.items()})
    )
    assert fails("gather") == "what was gathered is [1, 2, 3], not [0, 1, 2]"
    monkeypatch.setattr(Accelerator, "reduce", lambda self, own, **options: 2 * own)
    assert fails("reduce") == "the sum is [2.0, 0.0], not [1.0, 0.0]"
    monkeypatch.setattr(collective, "broadcast", lambda own, from_process: own + 1)
    assert "what rank 0 sent" in fails("broadcast")
    monkeypatch.setattr(collective, "broadcast_object_list", lambda own: [None, *own])
    assert "what rank 0 sent" in fails("objects")


def test_samples_that_are_missing_or_seen_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """C1, A14: in each of the four ways to read."""
    right = Accelerator.gather_for_metrics
    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "gather_for_metrics", lambda self, rows: right(self, rows)[1:])
        for name in NAMES:
            if name.startswith("data"):
                assert "leaves out" in fails(name)
    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "gather_for_metrics", lambda self, rows: right(self, rows).repeat(2))
        assert fails("data, even") == "epoch 0 counts 12 of 12 samples twice"


def test_an_order_that_is_not_shuffled(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(data: Any, batch_size: int, shuffle: bool) -> DataLoader[Any]:
        return DataLoader(data, batch_size)

    monkeypatch.setattr(checks, "DataLoader", plain)
    assert fails("data, shuffled") == "the order is not shuffled"


def test_a_precision_that_is_not_in_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """F15: it was asked for, and the forward does not know."""
    assert fails("precision", Accelerator(cpu=True, mixed_precision="bf16")) == (
        "the precision in use is bf16, not no"
    )
    Accelerator().state._reset_state(True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setattr(Accelerator, "prepare", lambda self, model: model)
    assert "torch.float32" in fails("precision")


def test_training_that_is_not_that_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Accelerator.backward
    monkeypatch.setattr(Accelerator, "backward", lambda self, loss: right(self, 2 * loss))
    assert "weights differ by" in fails("training")


def test_checkpoints_that_do_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Accelerator.load_state
    monkeypatch.setattr(Accelerator, "load_state", lambda self, folder: None)
    assert "tensors are not what was saved" in fails("checkpoint")

    def draws(self: Accelerator, folder: str) -> None:
        right(self, folder)
        torch.rand(1)

    monkeypatch.setattr(Accelerator, "load_state", draws)
    assert fails("checkpoint") == "random numbers do not go on where they were"


def test_one_process_has_no_speed_to_measure() -> None:
    assert run_check(CHECK_BY_NAME["speed"], Accelerator(cpu=True)) == CheckOutcome(
        "skipped", "one process exchanges nothing"
    )


# ---------------------------------------------------------------- a check fails on one rank

BROKEN = """
from accelerate.check.checks import CHECKS, expect
from accelerate.check.run import main

def value(accelerator):
    expect(accelerator.process_index != 1, "a wrong value")
    return "right"

def early(accelerator):
    if accelerator.process_index == RANK:
        raise KeyError("broken on purpose")
    accelerator.wait_for_everyone()
    return "all came"

main(TABLE, grace=GRACE)
"""


def test_a_wrong_value_on_one_rank_is_shown_with_its_rank_and_the_rest_is_checked(
    ranks: RankServer, tmp_path: Path
) -> None:
    script = BROKEN.replace("TABLE", "[('value', value), *CHECKS[:2]]").replace("GRACE", "30")
    ends = run_to_exit(ranks, 2, script, tmp_path)
    assert [code for code, _ in ends] == [1, 1], ends
    text = "".join(text for _, text in ends)
    rows = table(text)
    assert rows["value"] == ("failed", "rank 1: a wrong value")
    assert [rows[name][0] for name in NAMES[:2]] == ["ok", "ok"]
    assert "value, rank 1:\nTraceback" in text


@pytest.mark.parametrize(("rank", "start"), [(0, "forked"), *map(long_run_param, (0, 1), ("launched",) * 2)])
def test_a_rank_that_fails_does_not_leave_the_others_waiting(
    ranks: RankServer, tmp_path: Path, rank: int, start: str
) -> None:
    """C4: it fails in the middle of a check and goes on; the other waits for it in a collective."""
    script = BROKEN.replace("TABLE", "[CHECKS[0], ('early', early), *CHECKS[1:]]").replace("RANK", str(rank))
    script = script.replace("GRACE", "1")
    if start == "launched":
        result = launch("--cpu", "-n", "2", script_text=script)
        assert (result.returncode, result.survivors()) == (1, []), result.output
        text = result.stdout + result.stderr
    else:
        ends = run_to_exit(ranks, 2, script, tmp_path)
        assert [code for code, _ in ends] == [1, 1], ends
        text = "".join(text for _, text in ends)
    rows = table(text)
    assert rows["ranks"][0] == "ok"
    assert rows["early"][0] == "failed"
    assert f"rank {rank}: KeyError: 'broken on purpose'" in rows["early"][1]
    assert {rows[name][0] for name in NAMES[1:]} == {"skipped"}
    assert f"early, rank {rank}:\nTraceback" in text


class SharedStore:
    """A store that ranks of one process share, with the keys that this rank has asked for."""

    is_lost = False

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts, self.asked = texts, set[str]()

    def put(self, key: str, text: str) -> None:
        self.texts[key] = text

    def has(self, *keys: str) -> bool:
        self.asked |= {*keys}
        return all(key in self.texts for key in keys)

    def get(self, key: str) -> str | None:
        return self.texts.get(key)

    def read(self, keys: list[str]) -> dict[str, str]:
        self.asked |= {*keys}
        return {key: self.texts[key] for key in keys if key in self.texts}

    def wait(self, keys: list[str], seconds: float, check: Any) -> bool:
        while not self.has(*keys):
            time.sleep(0.001)
            check()
        return True


@pytest.mark.parametrize("absent", [None, 0, 5])
def test_rank_0_reads_all_outcomes_and_tells_the_others(
    absent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ranks ask of the store does not grow with the world; without rank 0 they read all once."""
    if absent == 0:
        monkeypatch.setattr(run, "_SUMMARY_SECONDS", 0.1)
    own = {rank: CheckOutcome("failed" if rank == 3 else "ok", f"of rank {rank}") for rank in range(8)}
    texts: dict[str, str] = {}
    states: dict[int, Any] = {}
    for rank in own.keys() - {absent}:
        place = SimpleNamespace(process_index=rank, num_processes=1, is_main_process=rank == 0)
        states[rank] = run.TestCommandState(place, grace=0.2)  # type: ignore[arg-type]
        states[rank].size, states[rank].store = 8, SharedStore(texts)
    with ThreadPoolExecutor(8) as pool:
        calls = {r: pool.submit(states[r].exchange_outcomes, "some", own[r]) for r in states}
    for rank, call in calls.items():
        assert call.result().keys() == states.keys()
        assert {r: each for r, each in call.result().items() if each.result == "failed"} == {3: own[3]}
        if rank and absent != 0:
            assert states[rank].store.asked <= {"check/some/summary", "check/some/failed"}


# Breaks the checks in the processes that the command launches.
SABOTAGE = """
import importlib.util, sys

class Broken:
    def find_spec(self, name, path=None, target=None):
        if name != "accelerate.check.checks":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        right = spec.loader.exec_module
        def exec_module(module):
            right(module)
            def broken(accelerator):
                module.expect(accelerator.process_index != 1, "broken on purpose")
            module.CHECKS = (*module.CHECKS[:1], ("sabotaged", broken))
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Broken())
"""


def test_the_command_names_the_check_that_failed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SABOTAGE)
    result = accelerate("test", "--cpu", "-n", "2", env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 1, result.output
    assert table(result.stdout)["sabotaged"] == ("failed", "rank 1: broken on purpose")
    assert SUCCESS not in result.stdout
    assert result.stderr.splitlines()[-1] == ("Test failed: the table says which checks, and on which ranks.")
