"""``--check_numerics``: what is said of losses and gradients that are not finite, and of spikes."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import pickle
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator
from tests.support.ranks import RankServer
from tests.support.watchdog import peer_store

# What the rank server imports once for this module.
PRELOAD = ("deepspeed.runtime.zero.muon.muon_optimizer", "transformers.integrations.deepspeed")
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


class Rows(Dataset[torch.Tensor]):
    """16 rows of 4 numbers; row ``bad`` holds an infinity."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float("inf") if index == self.bad else index / 16)


class Logarithm(nn.Module):
    """NaN where its input is below zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x)


def train(data: Dataset[Any], model: nn.Module, clip: bool = True, batch_size: int = 2) -> list[str]:
    """Train one epoch; return what was warned of."""
    accelerator = Accelerator()
    groups = [{"params": list(layer.parameters())} for layer in model.children() if list(layer.parameters())]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=batch_size))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader:
            accelerator.backward(model(batch).square().mean())
            if clip:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()
    return [str(each.message) for each in caught if "rank" in str(each.message)]


def bad_sample(bad: int | None) -> list[str]:
    torch.manual_seed(0)
    return train(Rows(bad), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))


def bad_module() -> list[str]:
    torch.manual_seed(0)
    first = nn.Linear(4, 4)
    nn.init.constant_(first.weight, -1.0)
    nn.init.constant_(first.bias, 0.5)  # below zero from the rows on whose sum is above 0.5
    return train(Rows(), nn.Sequential(first, Logarithm(), nn.Linear(4, 1)))


def bad_weight() -> list[str]:
    torch.manual_seed(0)
    last = nn.Linear(4, 1)
    nn.init.constant_(last.bias, float("nan"))
    return train(Rows(), nn.Sequential(nn.Linear(4, 4), last))


@pytest.mark.parametrize("environment", [{}, FSDP2], ids=["ddp", "fsdp2"])
def test_a_bad_sample_is_named_with_its_step_and_rank(ranks: RankServer, environment: dict[str, str]) -> None:
    # Steps of 2 x 2 samples: sample 7 is in the batch of rank 1 in step 2.
    outcome = ranks(2, bad_sample, 7, env={"ACCELERATE_CHECK_NUMERICS": "1", **environment})
    first = outcome[1][0]
    assert first.startswith("step 2, rank 1: the loss is ")
    assert "the batch itself holds a value that is not finite; the batch has the samples 6, 7" in first
    # The gradients are averaged: rank 0 sees them too, with finite samples of its own.
    assert outcome[0][0].startswith("step 2, rank 0: the gradient norm of parameter group 0 is nan")


def test_nothing_is_said_of_good_numbers(ranks: RankServer) -> None:
    assert ranks(2, bad_sample, None, env={"ACCELERATE_CHECK_NUMERICS": "1"}) == [[], []]


def test_nothing_is_watched_by_default(ranks: RankServer) -> None:
    assert ranks(2, bad_sample, 7) == [[], []]


def test_the_first_module_is_named(ranks: RankServer) -> None:
    (said,) = ranks(1, bad_module, env={"ACCELERATE_CHECK_NUMERICS": "1"})
    assert "the loss is nan; the first module whose output was not finite is 1 (Logarithm); " in said[0]


def test_a_weight_that_was_bad_before_is_named(ranks: RankServer) -> None:
    (said,) = ranks(1, bad_weight, env={"ACCELERATE_CHECK_NUMERICS": "1"})
    assert "step 1, rank 0" in said[0]
    assert "is 1 (Linear), whose bias is not finite; the batch has the samples 0, 1" in said[0]
    assert len(said) <= 6  # three of the loss, three of the gradients


class Unusual(nn.Module):
    """Outputs whose numbers no kernel compares, or that have none."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        eight_bits = x.detach().to(torch.float8_e4m3fn)
        return {"sparse": x.detach().to_sparse(), "eight bits": eight_bits, "empty": x[:0], "x": x.double()}


class UnusualInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 1), Unusual()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.inner(x)["x"].float())


def unusual_outputs() -> list[str]:
    torch.manual_seed(0)
    return train(Rows(7), UnusualInside())


def test_outputs_that_cannot_be_compared_are_passed_over(ranks: RankServer) -> None:
    (said,) = ranks(1, unusual_outputs, env={"ACCELERATE_CHECK_NUMERICS": "1"})
    assert said[0].startswith("step 4, rank 0: the loss is ")


def record_norms(folder: str, clip: bool) -> tuple[list[list[float]], int]:
    """Return the norms of both groups by plain torch before each step, and how often they were computed."""
    torch.manual_seed(0)
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters())}]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Rows(), batch_size=2))
    calls, measure = [0], accelerator.strategy.clip_norm

    def count(*args: Any) -> torch.Tensor:
        calls[0] += 1
        return measure(*args)

    accelerator.strategy.clip_norm = count  # type: ignore[method-assign]
    norms: list[list[float]] = []
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        groups = optimizer.param_groups
        whole = [[getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in g["params"]] for g in groups]
        norms.append([float(nn.utils.get_total_norm(each)) for each in whole])
        if clip:
            for group in groups:
                accelerator.clip_grad_norm_(group["params"], 1e9)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return norms, calls[0]


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("environment", [{}, FSDP2], ids=["ddp", "fsdp2"])
def test_the_norm_of_each_group_is_recorded_and_not_computed_twice(
    ranks: RankServer, tmp_path: Path, environment: dict[str, str], clip: bool
) -> None:
    settings = {"ACCELERATE_CHECK_NUMERICS": "1", "ACCELERATE_RECORD": str(tmp_path / "run"), **environment}
    norms, calls = ranks(2, record_norms, str(tmp_path), clip, env=settings)[0]
    records = [json.loads(line) for line in (tmp_path / "run" / "rank_0.jsonl").read_text().splitlines()]
    recorded = [list(record["values"].items()) for record in records if "values" in record]
    names = ["gradient norm, group 0", "gradient norm, group 1"]
    assert [[name for name, _ in step] for step in recorded] == [names] * len(norms)
    assert [[value for _, value in step] for step in recorded] == [pytest.approx(each) for each in norms]
    assert calls == 2 * len(norms)  # by the script that clips, else by the watch


def train_compiled(fullgraph: bool) -> list[str]:
    """A compiled model has no graph break by the watch: fullgraph=True raises at one."""
    accelerator = Accelerator()
    torch.manual_seed(0)  # with one bias below zero
    model = nn.Sequential(nn.Linear(4, 4), Logarithm())
    model.compile(backend="eager", fullgraph=fullgraph)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Rows(3), batch_size=2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader:
            accelerator.backward(model(-batch).mean())
            break
    return [str(each.message) for each in caught if "rank" in str(each.message)]


def test_a_compiled_model_stays_one_graph(ranks: RankServer) -> None:
    ((said,),) = ranks(1, train_compiled, True, env={"ACCELERATE_CHECK_NUMERICS": "1"})
    assert "the loss is nan" in said


def compare_pace(slow: int | None) -> list[str]:
    accelerator = Accelerator()
    recorder = accelerator._trackers.recorder
    assert recorder is not None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(80):
            recorder._pace.add(0.2 if accelerator.process_index == slow else 0.1)  # type: ignore[union-attr]
        accelerator.wait_for_everyone()
        for _ in range(40):
            recorder._pace.add(0.1)  # type: ignore[union-attr]
    blocks = [f"{accelerator.process_index}/{block}" for block in range(6)]
    assert peer_store().open_prefix("pace").find_missing(blocks) == blocks[:3], "the store does not grow"
    return [str(each.message) for each in caught if "slow" in str(each.message)]


@pytest.mark.parametrize("slow", [None, 1])
def test_a_slow_rank_is_named_once_on_rank_0(ranks: RankServer, tmp_path: Path, slow: int | None) -> None:
    settings = {"ACCELERATE_CHECK_NUMERICS": "1", "ACCELERATE_RECORD": str(tmp_path)}
    said = ranks(3, compare_pace, slow, env=settings)
    assert said[1:] == [[], []]
    assert len(said[0]) == (slow is not None)
    assert all(
        each.startswith("rank 1 is slow") and "2.0 x the median of the ranks" in each for each in said[0]
    )


def spike(_: int) -> list[str]:
    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x[:, :1]

    class Jump(Rows):
        def __len__(self) -> int:
            return 60

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((4,), 8.0 if 40 <= index < 43 else 1 + 0.01 * (index % 3))

    accelerator = Accelerator()
    model = Losses()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Jump(), batch_size=1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in loader:
            accelerator.backward(model(batch).mean())
            optimizer.step()
    return [str(each.message) for each in caught if "rank" in str(each.message)]


def test_a_spike_is_said_once_with_the_samples(ranks: RankServer) -> None:
    ((said,),) = ranks(1, spike, 0, env={"ACCELERATE_CHECK_NUMERICS": "1"})
    assert said == (
        "step 41, rank 0: the loss is 8, and its median before was 1.01; the batch has the samples 40"
    )


def folds(folder: str) -> tuple[list[int], list[str], bool]:
    """Train two models in turn, another pair in the second fold; a layer of the last model has a bad weight.

    Return the recorded steps, what was said, and whether the models of the first fold are gone.
    """
    accelerator = Accelerator()
    said: list[str] = []
    gone: list[weakref.ref[nn.Module]] = []
    for fold in range(2):
        models = [nn.Sequential(nn.Linear(4, 1)), nn.Sequential(nn.Linear(4, 1))]
        if fold == 1:
            nn.init.constant_(models[1][0].bias, float("nan"))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        *models, first, second = accelerator.prepare(*models, *optimizers)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                for model in models:
                    accelerator.backward(model(torch.ones(2, 4)).square().mean())
                first.step()
                second.step()
        said += [str(each.message) for each in caught if "rank" in str(each.message)]
        accelerator.free_memory()
        gone += [weakref.ref(layer) for model in models for layer in model] if fold == 0 else []
        models, model, optimizers = [], None, []  # the prepared optimizers are kept until the next ones are
    gc.collect()
    accelerator.end_training()
    records = [json.loads(line) for line in Path(folder, "rank_0.jsonl").read_text().splitlines()]
    steps = [record["optimizer_step"] for record in records if "optimizer_step" in record]
    return steps, said, all(layer() is None for layer in gone)


def test_each_fold_has_its_own_models_and_optimizers(ranks: RankServer, tmp_path: Path) -> None:
    settings = {"ACCELERATE_CHECK_NUMERICS": "1", "ACCELERATE_RECORD": str(tmp_path)}
    ((steps, said, is_gone),) = ranks(1, folds, str(tmp_path), env=settings)
    assert steps == [1, 2, 3, 4]
    assert "step 3, rank 0: the loss is nan" in said[0]
    assert "output was not finite is 0 (Linear) of model 1, whose bias is not finite" in said[0]
    assert any("such a gradient here is 0.weight of model 1" in text for text in said)
    assert is_gone


class Depths(Rows):
    """Rows that note how deep the stack is when they are read."""

    depths: list[int]

    def __getitem__(self, index: int) -> torch.Tensor:
        self.depths.append(len(inspect.stack()))
        return super().__getitem__(index)


def loader_of_each_fold() -> tuple[set[int], bool]:
    accelerator, data = Accelerator(), Depths()
    data.depths = []
    loader: Any = DataLoader(data, batch_size=2)
    for _ in range(3):
        loader = accelerator.prepare(loader)
        for _ in loader:
            pass
        accelerator.free_memory()
    return set(data.depths), accelerator._loop._monitor._indices is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize("records", [False, True])
def test_a_loader_that_is_prepared_again_is_watched_once(
    ranks: RankServer, tmp_path: Path, records: bool
) -> None:
    settings = {"ACCELERATE_CHECK_NUMERICS": "1"} | ({"ACCELERATE_RECORD": str(tmp_path)} if records else {})
    ((depths, is_watched),) = ranks(1, loader_of_each_fold, env=settings)
    assert len(depths) == 1
    assert is_watched


def copy_model(_: int) -> tuple[int, bool]:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 2))
    copied = pickle.loads(pickle.dumps(copy.deepcopy(accelerator.unwrap_model(model))))
    copied(torch.full((1, 2), float("nan"))).sum().backward()
    return len(accelerator._loop._monitor._checks), copied.weight.grad is not None  # type: ignore[attr-defined]


def test_a_watched_model_can_be_copied_and_pickled(ranks: RankServer) -> None:
    assert ranks(1, copy_model, 0, env={"ACCELERATE_CHECK_NUMERICS": "1"}) == [(0, True)]


def replace_training(_: int) -> tuple[list[str], int]:
    """Leave one training for another, as in a notebook; return what was said and how many norms are kept."""
    accelerator = Accelerator()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for steps in (1, 15):
            model = nn.Linear(1, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for step in range(steps):
                factor = float("nan") if step == 14 else 1.0
                accelerator.backward(model(torch.ones(1, 1)).sum() * factor)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
    said = [str(each.message) for each in caught if "rank" in str(each.message)]
    return said, len(accelerator._loop._monitor._clipped)  # type: ignore[attr-defined]


@pytest.mark.parametrize("records", [False, True])
def test_steps_are_counted_on_when_the_first_optimizer_steps_no_more(
    ranks: RankServer, tmp_path: Path, records: bool
) -> None:
    """By the 11th step of another one: a critic may step several times for a step of its generator."""
    settings = {"ACCELERATE_CHECK_NUMERICS": "1"} | ({"ACCELERATE_RECORD": str(tmp_path)} if records else {})
    ((said, kept),) = ranks(1, replace_training, 0, env=settings)
    assert said[0].startswith("step 6, rank 0: the loss is nan")
    assert kept == 0
    if records:
        lines = [json.loads(line) for line in (tmp_path / "rank_0.jsonl").read_text().splitlines()]
        assert [line["optimizer_step"] for line in lines if "optimizer_step" in line] == [1, 2, 3, 4, 5, 6]
        assert {line["step"] for line in lines if "numerics" in line} == {6}
