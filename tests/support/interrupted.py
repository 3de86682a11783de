"""A small training script that can be interrupted at any batch, and loaders of every kind for it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from accelerate.data.epoch_order import RNGSnapshot
from accelerate.data_loader import prepare_data_loader, skip_first_batches

COUNT, BATCH = 26, 3


def noise() -> list[float]:
    """Draw as an augmentation or dropout does, from the global generators."""
    return [torch.rand(()).item(), random.random(), float(np.random.rand())]


def collate(samples: list[Any]) -> list[Any]:
    return samples


class Augmented(Dataset[Any]):
    """Each sample is its number and what its augmentation drew."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, list):
            return [self[each] for each in index]
        return index, [0.0] * 3 if self.quiet else noise()


class Lazy(Sampler[int]):
    """Draws an index whenever it is asked for one, from one of the program's generators."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        left = list(range(COUNT))
        while left:
            yield left.pop(self.draw(len(left)))

    def draw(self, limit: int) -> int:
        if self.kind == "torch":
            return int(torch.randint(limit, ()).item())
        return random.randrange(limit) if self.kind == "python" else int(np.random.randint(limit))


class Owner(Sampler[int]):
    """Draws from generators of its own, which go on from epoch to epoch."""

    def __init__(self) -> None:
        self.a, self.b = random.Random(5), np.random.default_rng(6)
        self.c, self.d = np.random.RandomState(7), torch.Generator().manual_seed(8)

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        left = list(range(COUNT))
        self.a.shuffle(left)
        for place, sample in enumerate(left):
            other = place - int((self.b.integers(3) + self.c.randint(3)) * 0)
            yield left[other] if torch.rand((), generator=self.d) < 2 else sample


class Changing(BatchSampler):
    """Batches of changing size, in an order drawn anew for every epoch."""

    def __init__(self) -> None: ...

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(COUNT).tolist()
        while order:
            size = 1 + int(torch.randint(4, ()).item())
            yield order[:size]
            order = order[size:]

    def __len__(self) -> int:
        return COUNT


class Lists(Sampler[Any]):
    """The same batches as a sampler whose items are samples."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(Changing())

    def __len__(self) -> int:
        return COUNT


class Stream(IterableDataset[Any]):
    """A stream shuffled in a small buffer, each sample augmented, all from the program's generators."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        mine = range(COUNT) if info is None else range(info.id, COUNT, info.num_workers)
        buffer: list[int] = []
        for sample in mine:
            buffer.append(sample)
            if len(buffer) == 5:
                yield buffer.pop(random.randrange(5)), noise()
        while buffer:
            yield buffer.pop(int(torch.randint(len(buffer), ()).item())), noise()


class Own(DataLoader[Any]):
    """A loader that iterates in a way of its own."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield [(index, [*drawn, torch.rand(()).item()]) for index, drawn in batch]


def loader(kind: str, workers: int = 0, persistent: bool = False) -> DataLoader[Any]:
    """A loader of one kind over numbers, which it shuffles."""
    data, more = Augmented(kind == "quiet"), {"collate_fn": collate, "num_workers": workers}
    if persistent:
        more["persistent_workers"] = True
    if kind.startswith("torchdata"):
        from torchdata.stateful_dataloader import StatefulDataLoader

        if kind == "torchdata stream":
            return StatefulDataLoader(Stream(), batch_size=BATCH, **more)
        return StatefulDataLoader(data, batch_size=BATCH, shuffle=True, **more)
    if kind == "stream":
        return DataLoader(Stream(), batch_size=BATCH, **more)
    if kind == "stream one by one":
        return DataLoader(Stream(), batch_size=None, **more)
    if kind == "changing":
        return DataLoader(data, batch_sampler=Changing(), **more)
    if kind == "one by one":
        return DataLoader(data, batch_size=None, shuffle=True, **more)
    if kind == "bulk":  # the data get whole batches of indices
        batches = BatchSampler(RandomSampler(data), BATCH, drop_last=False)
        return DataLoader(data, batch_size=None, sampler=batches, **more)
    if kind == "lists":
        return DataLoader(data, batch_size=None, sampler=Lists(), **more)
    if kind in ("torch", "python", "numpy"):
        return DataLoader(data, batch_size=BATCH, sampler=Lazy(kind), **more)
    if kind == "owner":
        return DataLoader(data, batch_size=BATCH, sampler=Owner(), **more)
    if kind == "generator":
        own = torch.Generator().manual_seed(11)
        return DataLoader(data, batch_size=BATCH, shuffle=True, generator=own, **more)
    if kind == "replacement":
        drawn = RandomSampler(data, replacement=True, num_samples=COUNT + 40)
        return DataLoader(data, batch_size=BATCH, sampler=drawn, **more)
    if kind == "twice":
        return DataLoader(data, batch_size=BATCH, sampler=RandomSampler(data, num_samples=2 * COUNT), **more)
    if kind == "own iteration":
        return Own(data, batch_size=BATCH, shuffle=True, **more)
    return DataLoader(
        data, batch_size=BATCH, shuffle=kind != "sequential", drop_last=kind == "drop_last", **more
    )


KINDS = (
    "default", "sequential", "drop_last", "generator", "seedable", "replacement", "twice", "split", "uneven",
    "torch", "python", "numpy", "owner", "changing", "one by one", "bulk", "lists", "own iteration",
    "stream", "stream one by one",
)  # fmt: skip


def prepared(kind: str, workers: int, size: int, rank: int, persistent: bool = False) -> Any:
    """The same, prepared for one rank of several."""
    batch = loader(kind, workers, persistent)
    if kind == "split":
        batch = DataLoader(Augmented(), batch_size=6, shuffle=True, collate_fn=collate, num_workers=workers)
    return prepare_data_loader(
        batch,
        num_processes=size,
        process_index=rank,
        split_batches=kind == "split",
        even_batches=kind != "uneven",
        use_seedable_sampler=kind == "seedable",
        data_seed=17 if kind == "seedable" else None,
    )


@dataclass
class Checkpoint:
    """A checkpoint: the loader's position as text, the global generators, and the loop position."""

    position: str
    random: RNGSnapshot
    epoch: int
    step: int


Log = list[list[Any]]


def train(
    loader: Any,
    epochs: int = 3,
    stop: tuple[int, int] | None = None,
    since: Checkpoint | None = None,
    how: str = "twin",
) -> tuple[Log, Checkpoint | None]:
    """Return what each epoch gave, with what the "model" drew; and a checkpoint, if it was to ``stop``.

    Args:
        loader: a prepared one, new.
        epochs: until this one.
        stop: in this epoch, after so many batches (all of them: in the last one's body), or -1: after the
            epoch, or 0 batches: before it.
        since: go on from there.
        how: ``"twin"`` (skip what was given), ``"none"`` (``skip_first_batches(loader, None)``), ``"plain"``
            (step over the batches in the loop) or ``"stateful"``.
    """
    first, done = 0, 0
    if since is not None:
        loader.load_state_dict(json.loads(since.position))
        since.random.restore()
        first, done = since.epoch, since.step
    log: Log = [[] for _ in range(epochs)]

    def saved(epoch: int, step: int) -> Checkpoint:
        return Checkpoint(json.dumps(loader.state_dict()), RNGSnapshot.capture(), epoch, step)

    for epoch in range(first, epochs):
        if stop == (epoch, 0):
            return log, saved(epoch, 0)
        batches, begin = loader, 0
        if done and how in ("twin", "none"):
            batches, begin = skip_first_batches(loader, done if how == "twin" else None), done
        elif done and how == "stateful":
            begin = done
        for number, batch in enumerate(batches, begin + 1):
            if number <= done:
                continue
            log[epoch].append((batch, noise()))
            if stop == (epoch, number):
                return log, saved(epoch, number)
        done = 0
        if stop == (epoch, -1):
            return log, saved(epoch + 1, 0)
    return log, None


def seeded(script: Callable[[], Any], seed: int = 1) -> Any:
    """Runs it with seeded generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return script()


def samples(log: list[Any]) -> list[int]:
    """The sample numbers of an epoch."""
    found: list[int] = []
    for batch, _ in log:
        found += [index for index, _ in batch] if isinstance(batch, list) else [batch[0]]
    return found
