"""transformers' Trainer gives the numbers that it gives on the public package, recorded by record.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from accelerate.utils import is_deepspeed_available
from tests.clients.probe import run_jobs_on_ranks
from tests.clients.record import launch, versions
from tests.support import launch_plans
from tests.support.long_run import LONG_RUN, long_run_param
from tests.support.ranks import NO_LAUNCHER, RankServer

pytest.importorskip("transformers", reason="the client needs Python 3.11")

RECORD = json.loads((Path(__file__).parent / "trainer.json").read_text())
RECORDED = RECORD["results"]
JOBS = sorted(RECORDED["1"])
HERE = Path(sys.executable)
CLIENT = "tests.clients.trainer"
# What the rank server imports once.
PRELOAD = ("deepspeed.runtime.zero.muon.muon_optimizer", "transformers.trainer", CLIENT)
# Our own launcher: no variable of ours, no file. The other one is torchrun.
ACCELERATE = ("-m", "accelerate", "launch", "--cpu", "-n", "2")

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def tolerance() -> Callable[[str], Callable[[str], float]]:
    """How far a number of a job, by its path, may be from the recorded one.

    Another processor adds in another order: each product is rounded by at most eps, and six steps of Adam,
    which divides by small roots, carry that on. A thousand eps of float32 are six times what was seen between
    AVX-512 and SSE; under bfloat16, one eps is four times that for a loss, and eight eps are twice what was
    seen between AVX-512 and AVX2 for the norm of a gradient, and for an output (a loss is a mean):
    on one processor 1.15 gave an output three eps from the recorded one, and this package the same bits as
    1.15. Other versions of the libraries get ten times as much.
    """
    mine = versions(HERE)
    same = all(mine[name] == RECORD["versions"][name] for name in ("torch", "transformers"))
    single, half = torch.finfo(torch.float32).eps, torch.finfo(torch.bfloat16).eps

    def of_job(job: str) -> Callable[[str], float]:
        mean, value = (half, 8 * half) if job == "bf16" else (1000 * single, 1000 * single)
        is_mean = re.compile(r"\.loss\b|\.eval_loss\b")
        return lambda path: (mean if is_mean.search(path) else value) * (1 if same else 10)

    return of_job


@pytest.fixture(scope="module")
def one(ranks: RankServer) -> dict[str, Any]:
    """All jobs in one process."""
    return run_jobs_on_ranks(ranks, 1, CLIENT)


@pytest.fixture(scope="module")
def two(ranks: RankServer) -> dict[str, Any]:
    """All jobs on two processes with torchrun's variables, and none of ours."""
    return run_jobs_on_ranks(ranks, 2, CLIENT)


def differences(
    ours: Any, theirs: Any, tolerance: float | Callable[[str], float], path: str = ""
) -> list[str]:
    """Where two trees of plain values differ; numbers by more than the tolerance, relative above one."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        pairs = [(ours[key], theirs[key], f"{path}.{key}") for key in ours]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = [(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    elif isinstance(ours, float) and isinstance(theirs, float):
        limit = (tolerance(path) if callable(tolerance) else tolerance) * max(1.0, abs(theirs))
        return [] if abs(ours - theirs) <= limit else [f"{path}: {ours} {theirs}"]
    else:
        return [] if ours == theirs else [f"{path}: {ours} {theirs}"]
    return [line for a, b, where in pairs for line in differences(a, b, tolerance, where)]


@pytest.mark.parametrize("job", JOBS)
def test_one_process(
    job: str, one: dict[str, Any], tolerance: Callable[[str], Callable[[str], float]]
) -> None:
    assert differences(one[job], RECORDED["1"][job], tolerance(job)) == []


@pytest.mark.parametrize("job", JOBS)
def test_two_processes(
    job: str, two: dict[str, Any], tolerance: Callable[[str], Callable[[str], float]]
) -> None:
    assert differences(two[job], RECORDED["2"][job], tolerance(job)) == []


def test_two_processes_with_the_variables_of_our_launcher(two: dict[str, Any], ranks: RankServer) -> None:
    planned = launch_plans.plan(launch_plans.request(use_cpu=True, num_processes="2"), "local")
    assert all(command.variables.keys() >= NO_LAUNCHER.keys() for command in planned.commands)
    assert "ACCELERATE_USE_CPU" in planned.variables
    jobs = ("train", "accumulate")
    mine = run_jobs_on_ranks(ranks, 2, CLIENT, *jobs, env=planned.variables)
    assert {job: two[job] for job in jobs} == mine


@pytest.mark.parametrize(
    ("start", "jobs"),
    [long_run_param(ACCELERATE, ("train", "accumulate", "resume")), long_run_param(None, ("train",))],
)
def test_two_processes_of_a_launcher(start: Any, jobs: tuple[str, ...], two: dict[str, Any]) -> None:
    """By our launcher, and by torchrun."""
    mine = launch(HERE, 2, CLIENT, *jobs, start=start)
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


def check_shared_jobs(ranks: RankServer, client: str, *jobs: str) -> None:
    """Compare what jobs of a client give on two processes that share each sample with one process."""
    alone, shared = (run_jobs_on_ranks(ranks, size, client, *jobs) for size in (1, 2))
    for job in jobs:
        assert alone[job].keys() == shared[job].keys()
        for what, value in alone[job].items():
            assert shared[job][what] == pytest.approx(value, abs=1e-5, rel=1e-6), (job, what)


@pytest.mark.skipif(int(version("transformers").split(".")[0]) < 5, reason="DistributedConfig is of 5.0")
def test_layers_that_two_processes_share_train_as_alone(ranks: RankServer) -> None:
    """B1, PAINS 48: losses, norms, an evaluation that counts each row once, and the model that is written."""
    check_shared_jobs(ranks, "tests.clients.trainer_layers", "whole", "loaded")


@pytest.mark.skipif(Version(version("transformers")) < Version("5.24"), reason="as transformers 5.24 shards")
def test_models_that_transformers_shards_train_as_alone(ranks: RankServer) -> None:
    """By FSDP2, and by experts: neither wrapped nor sharded again in ``prepare_model``."""
    check_shared_jobs(ranks, "tests.clients.trainer_layers", "sharded", "experts")


@pytest.mark.skipif(Version(version("transformers")) < Version("5.24"), reason="as transformers 5.24 shards")
def test_models_that_transformers_shards_train_in_loops(ranks: RankServer) -> None:
    """With the strategy of their shards."""
    check_shared_jobs(ranks, "tests.clients.trainer_layers", "looped_in_shards", "looped_in_tensors")


def test_sequences_that_two_processes_share_train_as_alone(ranks: RankServer) -> None:
    """Losses that are logged, norms, rates, and the loss of an evaluation, which is no sum over processes."""
    # transformers asks that library for the group.
    heads = ("heads", "heads_with_zero") if is_deepspeed_available() else ()
    check_shared_jobs(ranks, "tests.clients.trainer_sequences", "keys", "keys_in_windows", *heads)


SENTENCE_TRAINING = """
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
from sentence_transformers.sentence_transformer import losses, modules
from transformers import BertConfig, BertModel, BertTokenizer

with open("vocab.txt", "w") as file:
    file.write("\\n".join("[PAD] [UNK] [CLS] [SEP] [MASK] red green blue".split()))
BertTokenizer("vocab.txt").save_pretrained(".")
sizes = dict(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
BertModel(BertConfig(**sizes)).save_pretrained(".")
model = SentenceTransformer(modules=[modules.Transformer("."), modules.Pooling(8)])
colours = ["red", "green", "blue", "red blue"]
data = Dataset.from_dict({"sentence1": colours, "sentence2": colours[::-1], "score": [1.0, 0.0, 0.5, 0.5]})
arguments = Arguments("out", max_steps=2, use_cpu=True, report_to=[])
trainer = SentenceTransformerTrainer(model, arguments, data, loss=losses.CosineSimilarityLoss(model))
assert trainer.train().global_step == 2
"""


@pytest.mark.skipif(not LONG_RUN, reason="runs in `make test-all`")
def test_sentence_transformers_trains(tmp_path: Path) -> None:
    """It trains only where the home page in the metadata of ``accelerate`` names huggingface: setup.py."""
    pytest.importorskip("sentence_transformers")
    done = subprocess.run(
        [HERE, "-c", SENTENCE_TRAINING], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
