"""Runs that are interrupted, saved whole, and go on in new processes: equal to the last bit."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
)

from tests.support.interrupted import BATCH, COUNT, Stream, loader, noise
from tests.support.long_run import LONG_RUN, long_run_param, select_cases
from tests.support.ranks import RankServer, same_on_all

EPOCHS, STEP = 3, (1, 2)


class Net(nn.Module):
    """With dropout, so that it draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 8)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(torch.relu(self.inner(x)))).square().mean()


def training(
    kind: str,
    workers: int,
    folder: str,
    save: tuple[int, int] | None,
    since: tuple[int, int] | None,
    how: str,
) -> Any:
    """Samples, losses and weights of a run, of the part of it before ``save`` or after ``since``."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed

    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=kind == "seedable",
            use_stateful_dataloader=how == "stateful",
            dispatch_batches=kind.startswith("dispatched"),
            shard=False if kind.startswith("kept") else "auto",
        )
    )
    kind = kind.removeprefix("dispatched ").removeprefix("kept ")
    set_seed(3 if save or not since else 77, device_specific=True)  # every rank draws other numbers
    model = Net()
    torch.rand(accelerator.process_index)  # it has seeded torch's generator alike
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    made = loader("default" if kind == "seedable" else kind, workers)
    model, optimizer, scheduler, batches = accelerator.prepare(model, optimizer, scheduler, made)
    first, done = since or (0, 0)
    if since is not None:
        accelerator.load_state(folder)
    log: list[Any] = []
    for epoch in range(first, EPOCHS):
        left = batches
        if done and how == "twin":
            left = accelerator.skip_first_batches(batches, done)
        for number, batch in enumerate(left, done + 1):
            done = 0 if how != "twin" else done
            rows = batch if isinstance(batch, list) else [batch]
            x = torch.tensor([[index / COUNT, *drawn[:3]] for index, drawn in rows])
            loss = model(x)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            log.append((epoch, [index for index, _ in rows], loss.item(), noise()))
            if save == (epoch, number):
                accelerator.save_state(folder)
                return log
        done = 0
        if save == (epoch, -1):
            accelerator.save_state(folder)
            return log
    return [*log, [p.tolist() for p in model.parameters()], scheduler.get_last_lr()]


@pytest.mark.parametrize(
    ("size", "kind", "workers", "how", "ends"),
    [
        long_run_param(1, "default", 0, "twin", True),
        long_run_param(1, "stream", 2, "twin", False),
        (2, "default", 0, "twin", True),
        long_run_param(2, "default", 2, "twin", False),
        (2, "default", 2, "stateful", False),
        (2, "seedable", 0, "twin", LONG_RUN),
        (2, "sequential", 2, "twin", False),
        long_run_param(2, "generator", 1, "twin", False),
        long_run_param(2, "numpy", 0, "twin", False),
        (2, "changing", 0, "twin", False),
        (2, "kept numpy", 0, "twin", False),
        (2, "dispatched quiet", 0, "twin", True),
        long_run_param(2, "dispatched default", 0, "twin", False),
        (2, "dispatched default", 2, "twin", False),
        (2, "dispatched stream", 0, "twin", False),
        long_run_param(2, "stream", 0, "twin", True),
        (2, "stream", 2, "twin", False),
    ],
)
def test_a_run_in_two_parts_is_the_run_in_one(
    ranks: RankServer, tmp_path: Path, size: int, kind: str, workers: int, how: str, ends: bool
) -> None:
    """D11, A1, A2: samples, augmentation, dropout, losses, weights and learning rate, on every rank."""
    whole = ranks(size, training, kind, workers, "", None, None, how)
    for save, since in ((STEP, STEP), ((0, -1), (1, 0)))[: 1 + ends]:
        folder = str(tmp_path / f"{save[0]}")
        before = ranks(size, training, kind, workers, folder, save, None, how)
        after = ranks(size, training, kind, workers, folder, None, since, how)
        assert [a + b for a, b in zip(before, after, strict=True)] == whole, save


def seen(kind: str, workers: int, folder: str, stop: int | None, size: int) -> list[int]:
    """Real samples of this rank: until ``stop``, where a checkpoint is made, or from a checkpoint on."""
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=kind == "dispatch"))
    random.seed(accelerator.process_index)
    np.random.seed(accelerator.process_index)
    torch.manual_seed(accelerator.process_index)
    made = loader("default" if kind in ("dispatch", "distributed") else kind, workers)
    if kind == "distributed":
        own = DistributedSampler(made.dataset, accelerator.num_processes, accelerator.process_index)  # type: ignore[arg-type]
        made = DataLoader(made.dataset, made.batch_size, sampler=own, collate_fn=made.collate_fn)
    batches = accelerator.prepare(made)
    left = batches
    if stop is None:
        accelerator.load_state(folder)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            left = accelerator.skip_first_batches(batches, 2)
        text = "under a DistributedSampler only" if kind == "distributed" else "other processes get them"
        assert accelerator.process_index or any(text in str(w.message) for w in heard)
    found: list[int] = []
    for number, batch in enumerate(left, 1):
        rows = batch if isinstance(batch, list) else [batch]
        found += [index for index, _ in rows[: left.real]]
        if number == stop:
            accelerator.save_state(folder)
            return found
    return found


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("distributed", 2, 1),
        ("distributed", 1, 2),
        *select_cases(
            [
                (kind, *worlds)
                for kind in ("default", "torch", "stream", "dispatch")
                for worlds in ((2, 1), (1, 2), (2, 3))
            ],
            [("default", 2, 1), ("torch", 1, 2), ("stream", 2, 3), ("dispatch", 2, 1), ("dispatch", 1, 2)],
        ),
    ],
)
def test_another_number_of_processes_gets_the_rest(
    ranks: RankServer, tmp_path: Path, kind: str, before: int, after: int
) -> None:
    """A4, with real processes that are seeded differently."""
    given = ranks(before, seen, kind, 0, str(tmp_path / "a"), 2, before)
    rest = ranks(after, seen, kind, 0, str(tmp_path / "a"), None, after)
    assert sorted(x for part in [*given, *rest] for x in part) == list(range(COUNT))


class Buckets(Sampler[list[int]]):
    """A batch sampler of a program: batches of two, in order."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[first, first + 1] for first in range(0, 40, 2)])

    def __len__(self) -> int:
        return 20


def lengths(folder: str, skip: int | None, stop: int | None) -> list[tuple[int, int]]:
    """The length of the rest of an epoch, and the number of its batches; after a save, nothing."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    batches = accelerator.prepare(DataLoader(range(40), batch_sampler=Buckets()))  # type: ignore[arg-type]
    for number, _ in enumerate(batches if stop else (), 1):
        if number == stop:
            accelerator.save_state(folder)
            return []
    accelerator.load_state(folder)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")  # another number of processes
        left = accelerator.skip_first_batches(batches, skip)
    return [(len(left), sum(1 for _ in left))]


@pytest.mark.parametrize(("skip", "after"), [(2, 1), (2, 3), (None, 3)])
def test_the_rest_of_an_epoch_has_a_length_on_another_number_of_processes(
    ranks: RankServer, tmp_path: Path, skip: int | None, after: int
) -> None:
    """Of the 20 batches 4 were given."""
    ranks(2, lengths, str(tmp_path / "a"), skip, 2)
    steps = -(-16 // after)
    assert same_on_all(ranks(after, lengths, str(tmp_path / "a"), skip, None)) == [(steps, steps)]


def orders(kind: str, workers: int) -> Any:
    """For two epochs, this rank's samples and what their augmentation drew; ranks are seeded differently."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator()
    set_seed(5 + accelerator.process_index)
    batches = accelerator.prepare(loader(kind, workers))
    return [[row for batch in batches for row in batch[: batches.real]] for _ in range(2)]


@pytest.mark.parametrize(
    "kind", ["default", "torch", "numpy", "owner", "changing", *map(long_run_param, ("python", "sequential"))]
)
def test_the_order_is_one_and_the_augmentation_is_not(ranks: RankServer, kind: str) -> None:
    """A7, A8: ranks with other seeds share one order; ranks, workers, epochs and runs draw as they should."""
    first, second = ranks(2, orders, kind, 2)
    again = ranks(2, orders, kind, 2)
    assert [first, second] == again, "every run draws the same"
    for one, other in zip(first, second, strict=True):
        assert sorted(index for index, _ in one + other) == list(range(COUNT))
    drawn = [tuple(values) for run in (first, second) for epoch in run for _, values in epoch]
    for generator in zip(*drawn, strict=True):
        assert len(set(generator)) == len(generator), "no number is drawn twice"


def streamed() -> Any:
    """A stream that shuffles by the global generators, of which every rank reads its part."""
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    random.seed(accelerator.process_index)
    torch.manual_seed(accelerator.process_index)
    batches = accelerator.prepare(
        torch.utils.data.DataLoader(Stream(), batch_size=BATCH, collate_fn=lambda rows: rows)
    )
    return [index for batch in batches for index, _ in batch[: batches.real]]


def test_a_stream_that_shuffles_by_itself_is_shared_without_loss(ranks: RankServer) -> None:
    """The ranks' seeds differ, and still each sample is seen once."""
    assert sorted(x for part in ranks(2, streamed) for x in part) == list(range(COUNT))


def small() -> Any:
    """Loaders that have too little: what each rank gets, and what it is told."""
    from torch.utils.data import DataLoader

    from accelerate import Accelerator, DataLoaderConfiguration

    found: list[Any] = []
    for even in (True, False):
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=even))
        for count, batch, drop in ((9, 5, True), (1, 4, False), (0, 2, False), (3, 2, True)):
            data = accelerator.prepare(DataLoader(range(count), batch_size=batch, drop_last=drop))  # type: ignore[arg-type]
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                batches = [x.tolist() for x in data]
            accelerator.wait_for_everyone()
            found.append(
                (batches, [str(w.message) for w in heard], data.iteration, len(data) == len(batches))
            )
    return found


def test_too_little_data_hangs_nobody(ranks: RankServer) -> None:
    """A11, A14: no batch at all is said, fewer samples than processes are defined."""
    first, second = ranks(2, small)
    assert [part[2:] for part in first] == [part[2:] for part in second] == [(1, True)] * 8
    assert first[0][0] == second[0][0] == []
    assert "this epoch has 0 batches" in first[0][1][0]
    assert "this epoch has 0 batches" in second[0][1][0]
    assert (first[1][0], second[1][0]) == ([[0, 0, 0, 0]], [[0, 0, 0, 0]])
    assert (first[5][0], second[5][0]) == ([[0]], [])
    assert same_on_all([first[2][0], second[2][0]]) == []


class Drawing:
    """Each sample is its number, with a random number of its worker."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()).item()])


class DrawingStream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (Drawing()[index] for index in range(5))


def random_numbers(kind: str, workers: int, prepares: bool, legacy: bool = True) -> list[Any]:
    """Return what two epochs give, and a global random number after each."""
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(legacy_random_numbers=legacy))
    torch.manual_seed(7)
    data: Any = DrawingStream() if kind == "stream" else Drawing()
    more = {"num_workers": workers, "persistent_workers": workers > 0, "shuffle": kind == "shuffled" or None}
    loader: Any = DataLoader(data, 2, **more)
    loader = accelerator.prepare(loader) if prepares else loader
    return [[[batch.tolist() for batch in loader], torch.rand(()).item()] for _ in range(2)]


class BatchesOfRank:
    """Every second batch of a random sampler, whose generator is seeded by a draw, as 1.x does in prepare."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        self.batches = BatchSampler(RandomSampler(range(12), generator=generator), 2, drop_last=False)
        self.rank = rank

    def __iter__(self) -> Any:
        return (batch for number, batch in enumerate(self.batches) if number % 2 == self.rank)


def random_numbers_of_torch(workers: int) -> list[Any]:
    """Return what ``random_numbers`` returns, of torch's loader over the batches of this rank."""
    from accelerate import PartialState

    rank = PartialState(cpu=True).process_index
    torch.manual_seed(7)
    more = {"num_workers": workers, "persistent_workers": workers > 0}
    loader: Any = DataLoader(Drawing(), batch_sampler=BatchesOfRank(rank), **more)  # type: ignore[arg-type]
    return [[[batch.tolist() for batch in loader], torch.rand(()).item()] for _ in range(2)]


def indices(batches: list[Any]) -> list[list[float]]:
    return [[row[0] for row in batch] for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_random_numbers_of_1x(ranks: RankServer, workers: int) -> None:
    """By an option: of plain torch on one process, and the order that 1.x draws on two."""
    for kind in ("shuffled", "in order", "stream"):
        expected = ranks(1, random_numbers, kind, workers, False)
        assert ranks(1, random_numbers, kind, workers, True) == expected
    parts = ranks(2, random_numbers, "shuffled", workers, True)
    expected = ranks(2, random_numbers_of_torch, workers)
    for rank, epoch in ((0, 0), (0, 1), (1, 0), (1, 1)):
        (batches, after), (raw, raw_after) = parts[rank][epoch], expected[rank][epoch]
        assert indices(batches) == indices(raw)
        assert after == raw_after, "the global random numbers after an epoch"
        if workers == 0:  # workers draw others on each process
            assert batches == raw


def order_of_1x(sampler: str, dispatch: bool | None) -> tuple[list[Any], float]:
    """Return this rank's samples of an epoch, one per step, and a global random number after it."""
    from accelerate import Accelerator, DataLoaderConfiguration

    config = DataLoaderConfiguration(legacy_random_numbers=True, dispatch_batches=dispatch)
    accelerator = Accelerator(dataloader_config=config)
    torch.manual_seed(7)
    kinds = {"shuffled": RandomSampler(range(12)), "subset": SubsetRandomSampler(range(12))}
    loader = accelerator.prepare(DataLoader(range(12), sampler=kinds[sampler]))  # type: ignore[arg-type]
    return [batch.item() for batch in loader], torch.rand(()).item()


def test_which_samplers_1x_seeds(ranks: RankServer) -> None:
    """Each that has an attribute for a generator; none of a loader that rank 0 reads for all."""
    torch.manual_seed(7)
    plain = [batch.item() for batch in DataLoader(range(12), shuffle=True)]  # type: ignore[arg-type]
    assert ranks(2, order_of_1x, "shuffled", True)[0] == (plain[::2], torch.rand(()).item())
    torch.manual_seed(7)
    generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    order = torch.randperm(12, generator=generator).tolist()
    (first, after), (second, _) = ranks(2, order_of_1x, "subset", None)
    assert (first, second) == (order[::2], order[1::2])
    torch.empty((), dtype=torch.int64).random_()  # the seed of the epoch's workers
    assert after == torch.rand(()).item()
