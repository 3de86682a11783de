"""Law 6: ``prepare`` is pure: it makes no iterator, draws no random number, starts and patches nothing."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy
import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from tests.support.ranks import RankServer, same_on_all


class Counted(Dataset[torch.Tensor]):
    """Counts how often it is read."""

    reads = 0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        Counted.reads += 1
        return torch.full((3,), float(index))


class CountedSampler(RandomSampler):
    """Counts how often it is asked for an order."""

    iterators = 0

    def __iter__(self) -> Any:
        CountedSampler.iterators += 1
        return super().__iter__()


class CountedLoader(DataLoader[Any]):
    """Counts how often an iterator is made."""

    iterators = 0

    def __iter__(self) -> Any:
        CountedLoader.iterators += 1
        return super().__iter__()


class Model(nn.Module):
    """With a method and an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.mine = "mine"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def own_method(self) -> str:
        return self.mine


def random_states() -> list[Any]:
    return [random.getstate(), repr(numpy.random.get_state(legacy=False)), torch.get_rng_state().tolist()]


def processes_and_threads() -> tuple[list[int], list[str], int]:
    """Children, Python's threads by name, and the number of all threads."""
    children = sorted(child.pid for child in psutil.Process().children(recursive=True))
    return children, sorted(t.name for t in threading.enumerate()), psutil.Process().num_threads()


def prepare_everything(precision: str, options: dict[str, Any]) -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    data = Counted()
    generator = torch.Generator().manual_seed(3)
    sampler = CountedSampler(data, generator=generator)
    loader = CountedLoader(data, batch_size=2, sampler=sampler, num_workers=2, persistent_workers=True)
    shuffled = CountedLoader(data, batch_size=2, shuffle=True)
    configuration = DataLoaderConfiguration(**options)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, dataloader_config=configuration)
    # The first thread of a kind that torch or the group of processes needs is not prepare's doing.
    nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    before = random_states(), generator.get_state().tolist(), processes_and_threads()
    prepared = accelerator.prepare(model, optimizer, schedule, loader, shuffled)
    after = random_states(), generator.get_state().tolist(), processes_and_threads()
    module = accelerator.unwrap_model(prepared[0])
    return {
        "random states": before[0] == after[0],
        "the loader's generator": before[1] == after[1],
        "processes": before[2][0] == after[2][0],
        "threads": before[2][1:] == after[2][1:],
        "iterators": CountedLoader.iterators == CountedSampler.iterators == Counted.reads == 0,
        "the same model": module is model,
        "its class's forward": type(module).forward is Model.forward and "forward" not in vars(module),
        "its method and class": prepared[0].own_method() == "mine" and isinstance(prepared[0], Model),
        "loaders are loaders": all(isinstance(item, DataLoader) for item in prepared[3:]),
    }


def prepare_on_one_rank_alone(alone: int) -> tuple[list[int], list[int]]:
    """Prepare what has nothing to replicate, then meet twice: an exchange more or less would mix them up."""
    from accelerate import Accelerator
    from accelerate.utils import gather_object

    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    if rank == alone:
        optimizer = torch.optim.SGD(Model().parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        accelerator.prepare(DataLoader(Counted(), batch_size=2, shuffle=True), optimizer, schedule)
    return accelerator.gather(torch.tensor([rank])).tolist(), gather_object([rank])


def plan_twice() -> list[bool]:
    """``plan`` says what prepare would do, and changes even less."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Model()
    loader = CountedLoader(Counted(), batch_size=2, shuffle=True)
    before = random_states(), dict(vars(model)), set(vars(loader)), len(model._forward_pre_hooks)
    first, second = str(accelerator.plan(model, loader)), str(accelerator.plan(model, loader))
    after = random_states(), dict(vars(model)), set(vars(loader)), len(model._forward_pre_hooks)
    return [before == after, first == second, bool(first)]


NAMES = ("use_seedable_sampler", "split_batches", "dispatch_batches", "shard")
OPTIONS: list[dict[str, Any]] = [{}, *({name: True} for name in NAMES)]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "default")
@pytest.mark.parametrize("n", [1, 2])
def test_prepare_changes_nothing_around_it(ranks: RankServer, n: int, options: dict[str, Any]) -> None:
    """A13: prepare() has no side effect."""
    facts = same_on_all(ranks(n, prepare_everything, "no", options))
    assert [name for name, holds in facts.items() if not holds] == []


@pytest.mark.parametrize("n", [1, 2])
def test_prepare_in_mixed_precision_patches_no_forward(ranks: RankServer, n: int) -> None:
    """A13: prepare() has no side effect, with autocast either."""
    facts = same_on_all(ranks(n, prepare_everything, "bf16", {}))
    assert [name for name, holds in facts.items() if not holds] == []


@pytest.mark.parametrize("alone", [0, 1])
def test_preparing_loaders_and_optimizers_needs_no_other_rank(ranks: RankServer, alone: int) -> None:
    """A13: no collective."""
    assert ranks(2, prepare_on_one_rank_alone, alone, timeout=30) == [([0, 1], [0, 1])] * 2


def test_a_plan_can_be_made_any_number_of_times(ranks: RankServer) -> None:
    assert ranks(1, plan_twice) == [[True, True, True]]
