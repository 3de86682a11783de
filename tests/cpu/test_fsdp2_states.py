"""Whole states of sharded models and optimizers: exactly those of one process, in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import RankServer
from tests.support.sharded_jobs import load_wrong, refuses_wrong_states
from tests.support.sharded_models import Tiny, adamw, batches, loss_of, tiny

LAYERS: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap"}


def optimizer_of(kind: str, model: Tiny) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return adamw(model, amsgrad=kind == "amsgrad")


def prepared(kind: str, seed: int) -> tuple[Any, Any, Any]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**LAYERS))
    model = tiny(seed)
    return accelerator, *accelerator.prepare(model, optimizer_of(kind, model))


def steps(accelerator: Any, model: Any, optimizer: Any, count: int) -> None:
    """The same batch on every rank: the numbers are those of one process, bit for bit."""
    for words in batches(count):
        accelerator.backward(loss_of(model, words))
        optimizer.step()
        optimizer.zero_grad()


def save_after_steps(kind: str, count: int, folder: str) -> tuple[int, int]:
    """Trains ``count`` steps, saves whole states, trains two more steps and saves those weights."""
    accelerator, model, optimizer = prepared(kind, 0)
    steps(accelerator, model, optimizer, count)
    strategy = accelerator.strategy
    weights = strategy.model_state(model)
    state = strategy.optimizer_state(optimizer.optimizer, [model])
    steps(accelerator, model, optimizer, 2)
    after = strategy.model_state(model)
    if accelerator.is_main_process:
        torch.save({"model": weights, "optimizer": state, "after": after}, f"{folder}/whole.pt")
    return len(weights), len(state)


def resume_training(kind: str, folder: str) -> bool:
    """Loads whole states into a fresh sharded model and trains on; whether the weights are those again."""
    file = torch.load(f"{folder}/whole.pt", mmap=True, weights_only=True)
    accelerator, model, optimizer = prepared(kind, 5)
    found = accelerator.strategy.load_model(model, file["model"])
    assert (found.missing_keys, found.unexpected_keys) == ([], [])
    assert model.head.weight is model.embed.weight
    accelerator.strategy.load_optimizer(optimizer.optimizer, [model], file["optimizer"])
    steps(accelerator, model, optimizer, 2)
    after = accelerator.strategy.model_state(model)
    return all(torch.equal(value, file["after"][name]) for name, value in after.items())


@pytest.mark.parametrize(("kind", "count"), [("adamw", 3), ("adamw", 0), ("amsgrad", 2), ("sgd", 2)])
def test_whole_states_go_to_one_process_and_back(
    ranks: RankServer, tmp_path: Path, kind: str, count: int
) -> None:
    """D6: two groups, a frozen parameter, tied weights, an optimizer that has not stepped; bit for bit."""
    assert ranks(2, save_after_steps, kind, count, str(tmp_path))[1] == (0, 0)
    file = torch.load(tmp_path / "whole.pt", weights_only=True)
    model = tiny(9)
    optimizer = optimizer_of(kind, model)
    model.load_state_dict(file["model"])
    optimizer.load_state_dict(file["optimizer"])
    assert set(file["model"]) == set(model.state_dict())
    assert file["model"]["head.weight"].data_ptr() == file["model"]["embed.weight"].data_ptr()

    # It is the state of one process, tensor by tensor.
    other = tiny(0)
    reference = optimizer_of(kind, other)
    for words in batches(count):
        loss_of(other, words).backward()
        reference.step()
        reference.zero_grad()
    theirs = reference.state_dict()
    assert file["optimizer"]["state"].keys() == theirs["state"].keys()
    assert file["optimizer"]["param_groups"] == theirs["param_groups"]
    for index, values in theirs["state"].items():
        for name, value in values.items():
            torch.testing.assert_close(file["optimizer"]["state"][index][name], value, rtol=0, atol=1e-6)

    # One process trains on from it as two do.
    for words in batches(2):
        loss_of(model, words).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(file["after"][name], value, rtol=0, atol=1e-6)
    assert ranks(2, resume_training, kind, str(tmp_path)) == [True, True]


def from_one_process(folder: str) -> bool:
    """A state of one process, loaded and given back: the very bits."""
    file = torch.load(f"{folder}/one.pt", mmap=True, weights_only=True)
    accelerator, model, optimizer = prepared("adamw", 5)
    accelerator.strategy.load_model(model, file["model"])
    accelerator.strategy.load_optimizer(optimizer.optimizer, [model], file["optimizer"])
    weights = accelerator.strategy.model_state(model)
    state = accelerator.strategy.optimizer_state(optimizer.optimizer, [model])
    if not accelerator.is_main_process:
        return True
    assert state["param_groups"] == file["optimizer"]["param_groups"]
    same = [torch.equal(weights[name], value) for name, value in file["model"].items()]
    for index, values in file["optimizer"]["state"].items():
        same += [torch.equal(state["state"][index][name], value) for name, value in values.items()]
        assert all(value.dtype == state["state"][index][name].dtype for name, value in values.items())
    return all(same) and len(same) > 10


def test_a_state_of_one_process_comes_back_bit_for_bit(ranks: RankServer, tmp_path: Path) -> None:
    model = tiny()
    optimizer = adamw(model)
    for words in batches(3):
        loss_of(model, words).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "one.pt")
    assert ranks(2, from_one_process, str(tmp_path)) == [True, True]


def load_unfit(case: str) -> str:
    return load_wrong(*prepared("adamw", 0), case)


def test_a_state_that_does_not_fit_is_refused(ranks: RankServer) -> None:
    refuses_wrong_states(ranks, load_unfit)
