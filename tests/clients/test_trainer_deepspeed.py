"""transformers' Trainer with the DeepSpeed engine, on two processes: the numbers that it has without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accelerate.utils import is_deepspeed_available
from tests.clients.probe import run_jobs_on_ranks
from tests.clients.test_trainer import differences
from tests.support.ranks import RankServer

pytest.importorskip("transformers", reason="the client needs Python 3.11")

RECORDED = json.loads((Path(__file__).parent / "trainer.json").read_text())["results"]["2"]
CLIENT = "tests.clients.zero"
# What the rank server imports once.
PRELOAD = ("deepspeed.runtime.zero.muon.muon_optimizer", "transformers.trainer", "tests.clients.trainer")
WITHIN = 1e-4  # the recorded numbers are rounded to few digits by the Trainer's log

pytestmark = [
    pytest.mark.skipif(not is_deepspeed_available(), reason="the package deepspeed is not installed"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def zero(ranks: RankServer) -> dict[str, Any]:
    """All jobs, on two processes."""
    return run_jobs_on_ranks(ranks, 2, CLIENT)


@pytest.mark.parametrize("stage", ["two", "three"])
def test_each_stage_has_the_numbers_of_data_parallelism(zero: dict[str, Any], stage: str) -> None:
    names = ("world", "loss", "grad_norm", "lr", "eval_loss", "shape", "labels", "logits")
    ours, theirs = ({n: each[n] for n in names} for each in (zero[stage], RECORDED["train"]))
    assert differences(ours, theirs, WITHIN) == []
    assert zero[stage]["weights"] == pytest.approx(RECORDED["train"]["weights"], rel=1e-5)


def test_the_trainer_divides_windows_by_itself(zero: dict[str, Any]) -> None:
    names = ("world", "loss", "grad_norm", "lr")
    ours, theirs = ({n: each[n] for n in names} for each in (zero["accumulate"], RECORDED["accumulate"]))
    assert differences(ours, theirs, WITHIN) == []


def test_deepspeed_makes_optimizer_and_schedule(zero: dict[str, Any]) -> None:
    job = zero["engines"]
    assert job["loss"][0] == pytest.approx(RECORDED["train"]["loss"][0], abs=WITHIN)
    assert max(job["loss"][1:]) < job["loss"][0] + 0.01
    # One step of warming up from zero, then down to zero.
    assert job["lr"][0] == 0.0
    assert job["lr"][1:] == sorted(job["lr"][1:], reverse=True)


def test_a_resumed_run_ends_as_the_uninterrupted(zero: dict[str, Any]) -> None:
    whole, again = zero["resume"]["whole"], zero["resume"]["again"]
    assert again["loss"] == whole["loss"]


def test_a_second_training_goes_on(zero: dict[str, Any]) -> None:
    assert len(zero["again"]["three"]) == 5
    assert differences(zero["again"]["three"], zero["again"]["parallel"], WITHIN) == []


def test_models_are_partitioned_while_they_are_loaded(zero: dict[str, Any]) -> None:
    job = zero["pretrained"]
    assert job["partitions"]
    assert job["inside"]
    assert job["same"]
    assert differences(job["loss"], RECORDED["train"]["loss"], WITHIN) == []


def test_models_are_loaded_before_the_trainer(zero: dict[str, Any]) -> None:
    assert differences(zero["loaded_first"]["loss"], RECORDED["train"]["loss"], WITHIN) == []
