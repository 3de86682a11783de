"""Data that is sharded already: kept and said, or refused; never shared out twice without a word."""

from __future__ import annotations

import logging
import os
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    random_split,
)

from accelerate.core.errors import CollectiveError, PrepareError
from tests.support.ranks import RanksError, RankServer, same_on_all
from tests.support.watchdog import peer_store

PRELOAD = ("datasets", "datasets.distributed")

DATA = TensorDataset(torch.arange(16))


class RankAware(Sampler[int]):
    """Gives its rank's part, and says so by its attributes."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 16, self.world_size))

    def __len__(self) -> int:
        return 16 // self.world_size


class AskingSampler(Sampler[int]):
    """Asks for its rank when it is iterated."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(torch.distributed.get_rank(), 16, torch.distributed.get_world_size()))

    def __len__(self) -> int:
        return 8


class Files(IterableDataset[int]):
    """Reads its own files."""

    def __init__(self, rank: int, world: int) -> None:
        self.files = [f"part-{number}" for number in range(rank, 4, world)]

    def __iter__(self) -> Iterator[int]:
        for name in self.files:
            start = 4 * int(name[-1])
            yield from range(start, start + 4)


class Named(Files):
    """The same with attributes that say it."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self.process_index, self.num_processes = rank, world


class Asking(IterableDataset[int]):
    """A stream that asks for its rank when it is read."""

    def __iter__(self) -> Iterator[int]:
        from accelerate import PartialState

        state = PartialState()
        return iter(range(state.process_index, 16, state.num_processes))


class ByVariables(IterableDataset[int]):
    """The same by the launcher's variables, in a function beside it."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(*_bounds()))


def _bounds() -> tuple[int, int, int]:
    return int(os.environ["RANK"]), 16, int(os.environ["WORLD_SIZE"])


class Holding(IterableDataset[int]):
    """A stream whose rows come from an object that it holds."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def __iter__(self) -> Iterator[int]:
        return self.reader[0][0]() if isinstance(self.reader, list) else self.reader()


def _shard_of_rank() -> Iterator[int]:
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return islice(range(16), rank, None, world_size)


class Seeding(IterableDataset[int]):
    """Asks for the rank alone, to seed by it."""

    def __iter__(self) -> Iterator[int]:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        random_numbers = random.Random(42 + 1337 * rank)
        assert random_numbers.random() < 1
        return iter(range(16))


class Storing(IterableDataset[int]):
    """Stores the rank alone, to print it."""

    def __init__(self) -> None:
        self.rank = torch.distributed.get_rank()

    def __iter__(self) -> Iterator[int]:
        if self.rank > 1000:
            print(f"rank {self.rank}")
        return iter(range(16))


class Picking(Storing):
    """Picks a part by the rank alone."""

    def __iter__(self) -> Iterator[int]:
        return iter((range(8), range(8, 16))[torch.distributed.get_rank()])


class Naming(IterableDataset[int]):
    """Opens the file of its rank."""

    def __iter__(self) -> Iterator[int]:
        name = f"part-{torch.distributed.get_rank()}"
        return iter({"part-0": range(8), "part-1": range(8, 16)}[name])


class OwnPart(IterableDataset[int]):
    """Stores its own part under the name of a number."""

    def __init__(self) -> None:
        rank = torch.distributed.get_rank()
        self.shard = list(range(8 * rank, 8 * rank + 8))

    def __iter__(self) -> Iterator[int]:
        return iter(self.shard)


class Workers(IterableDataset[int]):
    """Shared by workers only: nothing to be recognised."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        return iter(range(16) if info is None else range(info.id, 16, info.num_workers))


SHARDED: dict[str, Callable[[int, int], DataLoader[Any]]] = {
    "DistributedSampler": lambda rank, size: DataLoader(
        DATA, batch_size=2, sampler=DistributedSampler(DATA, size, rank, shuffle=False)
    ),
    "sampler with attributes": lambda rank, size: DataLoader(
        DATA, batch_size=2, sampler=RankAware(rank, size)
    ),
    "sampler that asks": lambda rank, size: DataLoader(DATA, batch_size=2, sampler=AskingSampler()),
    "stream with attributes": lambda rank, size: DataLoader(Named(rank, size), batch_size=2),
    "stream that asks": lambda rank, size: DataLoader(Asking(), batch_size=2),
    "stream that reads variables": lambda rank, size: DataLoader(ByVariables(), batch_size=2),
    "stream with a reader": lambda rank, size: DataLoader(Holding(Asking().__iter__), batch_size=2),
    "stream of stages": lambda rank, size: DataLoader(Holding([(_shard_of_rank,)]), batch_size=2),
}


def rows_of(loader: Any) -> list[int]:
    return [
        row for batch in loader for row in (batch if isinstance(batch, torch.Tensor) else batch[0]).tolist()
    ]


def seen(kind: str, dispatch: bool | None, shard: bool | str) -> list[Any]:
    from accelerate import Accelerator, DataLoaderConfiguration

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accelerate").addHandler(handler)
    config = DataLoaderConfiguration(dispatch_batches=dispatch, shard=shard)
    accelerator = Accelerator(dataloader_config=config)
    loader = SHARDED[kind](accelerator.process_index, accelerator.num_processes)
    prepared = accelerator.prepare(loader)
    return [rows_of(prepared), len(lines), lines, rows_of(prepared)]


@pytest.mark.parametrize("dispatch", [None, False])
@pytest.mark.parametrize("kind", SHARDED)
def test_what_is_sharded_already_is_kept_and_said_once(
    ranks: RankServer, kind: str, dispatch: bool | None
) -> None:
    """A6: every sample is seen, once, on its rank."""
    first, second = ranks(2, seen, kind, dispatch, "auto")
    assert sorted(first[0] + second[0]) == list(range(16))
    assert len(first[0]) == len(second[0]) == 8
    assert first[3] == first[0]
    assert (first[1], second[1]) == (1, 0), "one line, on rank 0"
    assert "is sharded already" in first[2][0]
    assert "shard=True" in first[2][0]


def test_three_ways_to_say_it(ranks: RankServer) -> None:
    kept = ranks(2, seen, "DistributedSampler", None, False)
    assert sorted(kept[0][0] + kept[1][0]) == list(range(16))
    assert kept[0][1] == 0, "who says it need not be told"
    shared = ranks(2, seen, "DistributedSampler", None, True)
    assert len(shared[0][0]) == len(shared[1][0]) == 4, "as asked: a part of its part"


def gather_kept(samples: int, batch_size: int | None, drop_last: bool) -> tuple[list[int], list[Any]]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    data = torch.arange(samples)
    sampler = DistributedSampler(data, shuffle=False)  # type: ignore[arg-type]
    loader = accelerator.prepare(DataLoader(data, batch_size, sampler=sampler, drop_last=drop_last))
    rows, real = [], []
    for batch in loader:
        rows += accelerator.gather_for_metrics(batch).tolist()
        real.append(loader.real)
    return rows, real


@pytest.mark.parametrize(
    ("batch_size", "drop_last"), [(None, False), (1, False), (2, False), (3, False), (3, True)]
)
def test_samples_that_a_distributed_sampler_repeats_count_once(
    ranks: RankServer, batch_size: int | None, drop_last: bool
) -> None:
    (rows, real), (others, real_1) = ranks(2, gather_kept, 7, batch_size, drop_last)
    assert sorted(rows) == list(range(6 if drop_last else 7))
    assert others == rows
    assert batch_size is None or sum(real) + sum(real_1) == len(rows)
    assert sorted(ranks(2, gather_kept, 8, 2, False)[0][0]) == list(range(8))


def alone() -> list[int]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    return [len(rows_of(accelerator.prepare(make(0, 1)))) for make in SHARDED.values() if make is not None][
        :2
    ]


def test_one_process_keeps_all(ranks: RankServer) -> None:
    assert ranks(1, alone) == [[16, 16]]


class Hidden(Sampler[int]):
    """A part of the data that no attribute and no name in the code tells of."""

    def __init__(self, which: int) -> None:
        self.order = lambda: iter(range(8 * which, 8 * which + 8))

    def __iter__(self) -> Iterator[int]:
        return self.order()

    def __len__(self) -> int:
        return 8


REFUSED: dict[str, Callable[[int, int], DataLoader[Any]]] = {
    "files differ": lambda rank, size: DataLoader(Files(rank, size), batch_size=2),
    "lengths differ": lambda rank, size: DataLoader(TensorDataset(torch.arange(8 + rank)), batch_size=2),
    "batch sizes differ": lambda rank, size: DataLoader(DATA, batch_size=8 if rank else 4),
    "orders differ": lambda rank, size: DataLoader(
        DATA, batch_size=2, sampler=list(range(8 * rank, 8 * rank + 8))
    ),
    "tensors differ": lambda rank, size: DataLoader([{"x": torch.tensor([[n, rank]])} for n in range(8)]),  # type: ignore[arg-type]
    "arrays differ": lambda rank, size: DataLoader([(np.array([n, rank]), 0) for n in range(8)]),  # type: ignore[arg-type]
    "random splits differ": lambda rank, size: DataLoader(
        random_split(DATA, [10, 6], torch.Generator().manual_seed(rank))[0], batch_size=2
    ),
    "arrays of indices differ": lambda rank, size: DataLoader(Subset(DATA, np.arange(8) + rank)),  # type: ignore[arg-type]
    "orders differ, unseen": lambda rank, size: DataLoader(DATA, batch_size=2, sampler=Hidden(rank)),
    "known on one rank only": lambda rank, size: DataLoader(
        DATA, batch_size=2, sampler=DistributedSampler(DATA, size if rank else 1, 0)
    ),
}
IN_ORDER = {
    "lengths differ",
    "batch sizes differ",
    "tensors differ",
    "arrays differ",
    "random splits differ",
    "arrays of indices differ",
}


def refused(kind: str, dispatch: bool | None) -> str:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    return error_of(accelerator.prepare(REFUSED[kind](accelerator.process_index, accelerator.num_processes)))


def error_of(loader: Any) -> str:
    """The error of the first batch; or nothing."""
    try:
        next(iter(loader))
    except CollectiveError as error:
        return str(error)
    return ""


def error_on_later_rank(texts: list[str]) -> str:
    """The error of two ranks that read in order: the rank that comes first waits for none, and has none."""
    (text,) = filter(None, texts)
    return text


@pytest.mark.parametrize("dispatch", [None, False, True])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_differs_between_ranks_is_refused(ranks: RankServer, kind: str, dispatch: bool | None) -> None:
    """A6 and A14: found by comparing the ranks, before the first batch; on all where they exchange more."""
    if kind in ("orders differ, unseen", "batch sizes differ") and dispatch:
        pytest.skip("rank 0's order is the only one that is asked for")
    texts = ranks(2, refused, kind, dispatch)
    text = error_on_later_rank(texts) if kind in IN_ORDER and not dispatch else same_on_all(texts)
    assert "rank 0:" in text
    assert "rank 1:" in text
    assert "shard=False" in text


class LocalPart(Dataset[int]):
    """The part of a process by its rank on its machine, of which there is one on each of two machines."""

    def __init__(self, size: int) -> None:
        self.rank, self.world_size = 0, size

    def __len__(self) -> int:
        return 16 // self.world_size

    def __getitem__(self, index: int) -> int:
        return range(self.rank, 16, self.world_size)[index]


def read_local_parts(first: int) -> None:
    """Read data that one rank keeps, and the other one shares out; ``first`` begins."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(LocalPart(accelerator.num_processes), batch_size=2))
    if accelerator.process_index != first:
        time.sleep(0.3)  # either order is refused; this one is nearly always had
    list(loader)
    accelerator.wait_for_everyone()


@pytest.mark.parametrize("first", [0, 1])
def test_data_that_only_some_ranks_keep_are_refused_with_both(ranks: RankServer, first: int) -> None:
    """A6: those that need no other process do not enter the exchange in which the others wait."""
    with pytest.raises(RanksError) as caught:
        ranks(2, read_local_parts, first)
    text = str(caught.value)
    assert "how it is used differs" in text
    assert "rank 0: kept" in text
    assert "rank 1: sharded" in text


def validate_on_rank_0(folder: str) -> tuple[list[Any], list[int]]:
    """Train on two ranks, and validate on the first one alone; what both have, and batches of rank 0."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train, held_out = random_split(range(22), [12, 10], torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    model, optimizer, loader, validation, by_worker = accelerator.prepare(
        model,
        optimizer,
        DataLoader(train, batch_size=2, shuffle=True),
        DataLoader(held_out, batch_size=2),
        DataLoader(held_out, batch_size=2, num_workers=1),
    )
    alone: list[int] = []
    rows: list[list[int]] = []
    for epoch in range(2):
        trained: list[int] = []
        for step, batch in enumerate(loader):
            with accelerator.accumulate(model):
                if step == 1 and accelerator.is_main_process:
                    alone.append(len(next(iter(validation))))
                accelerator.backward(model(batch[:, None] / 22).mean())
                optimizer.step()
                optimizer.zero_grad()
            trained += accelerator.gather_for_metrics(batch).tolist()
        rows.append(sorted(trained))
        if accelerator.is_main_process:
            validation.set_epoch(epoch)
            alone += [len(list(each)) for each in (validation, by_worker)]
    accelerator.save_state(folder)
    accelerator.load_state(folder)
    rows += [
        [row for batch in each for row in accelerator.gather_for_metrics(batch).tolist()]
        for each in (validation, by_worker)
    ]
    weights = [parameter.item() for parameter in model.parameters()]
    return [rows, weights, [*train.indices], [*held_out.indices]], alone


def test_one_rank_alone_reads_data_that_are_in_order(ranks: RankServer, tmp_path: Path) -> None:
    """Validation under ``if accelerator.is_main_process:``; the training goes on as on any rank."""
    results = ranks(2, validate_on_rank_0, str(tmp_path / "saved"))
    rows, _, train, held_out = same_on_all([both for both, _ in results])
    assert rows == [sorted(train)] * 2 + [held_out] * 2
    assert [alone for _, alone in results] == [[2, 3, 3] * 2, []]


class Picture:
    """A sample whose text differs between processes, as that of an object with its address."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"<Picture of process {os.getpid()}>"


class Telling(IterableDataset[int]):
    """A stream that knows where it is read, and by whom."""

    def __init__(self, rank: int) -> None:
        self.host, self._pid, self.verbose, self.started = f"n{rank}", rank, rank == 0, 0.5 + rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(16))


class Tagged(Dataset[int]):
    """Map-style data with a value of its own on each rank."""

    def __init__(self, rank: int) -> None:
        self.tag, self.numbers = f"r{rank}", [rank]

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> int:
        return index


class Counting(Sampler[int]):
    """Gives the order that all ranks have, and holds a number of its own."""

    def __init__(self, rank: int) -> None:
        self.drawn = rank

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        return iter(range(16))


SAME: dict[str, Callable[[int], DataLoader[Any]]] = {
    "stream": lambda rank: DataLoader(Telling(rank), batch_size=2),
    "dataset": lambda rank: DataLoader(Subset(Tagged(rank), range(16)), batch_size=2),
    "sampler": lambda rank: DataLoader(DATA, batch_size=2, sampler=Counting(rank)),
}


def shared_rows(kind: str) -> list[int]:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    return rows_of(accelerator.prepare(SAME[kind](accelerator.process_index)))


@pytest.mark.parametrize("kind", SAME)
def test_what_only_tells_of_the_process_is_no_other_data(ranks: RankServer, kind: str) -> None:
    """A6: a host, a flag of the main process, a time; of a sampler the order is compared."""
    first, second = ranks(2, shared_rows, kind)
    assert sorted(first + second) == list(range(16))


class Copies(Files):
    """Reads a copy of all files that its machine has."""

    def __init__(self, rank: int) -> None:
        self.folder = f"/scratch/n{rank}/data"
        self.files = [f"{self.folder}/part-{number}" for number in range(4)]


def read_copies() -> list[list[int]]:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    stream = Copies(accelerator.process_index)
    one, two = accelerator.prepare(DataLoader(stream), DataLoader(stream.files, collate_fn=numbers_of))  # type: ignore[arg-type]
    return [rows_of(one), rows_of(two)]


def numbers_of(names: list[str]) -> torch.Tensor:
    return torch.tensor([int(name[-1]) for name in names])


def test_machines_may_have_their_copies_in_other_folders(ranks: RankServer) -> None:
    """On one machine, other folders are other data."""
    machines = {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    (stream, rows), (other_stream, other_rows) = ranks(2, read_copies, env=machines)
    assert sorted(stream + other_stream) == [*range(16)]
    assert sorted(rows + other_rows) == [*range(4)]
    with pytest.raises(RanksError, match=r"Copies\.folder differs"):
        ranks(2, read_copies)


class Texts(Dataset[int]):
    """Holds many texts."""

    def __init__(self, count: int) -> None:
        self.texts = [f"text {number} " * 10 for number in range(count)]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> int:
        return index


def measure_comparison() -> int:
    """Bytes that the comparison of the ranks takes at most."""
    from accelerate import Accelerator

    loader = Accelerator().prepare(DataLoader(Texts(40_000)))
    tracemalloc.start()
    next(iter(loader))
    return tracemalloc.get_traced_memory()[1]


def test_comparing_data_in_memory_makes_no_copy_of_them(ranks: RankServer) -> None:
    assert max(ranks(2, measure_comparison)) < 2**20


def pictures(dispatch: bool) -> list[int]:
    from accelerate import Accelerator, DataLoaderConfiguration

    samples = [[Picture(n), np.array([Picture(n)]), torch.tensor(n)] for n in range(8)]

    def numbers(batch: list[Any]) -> torch.Tensor:
        return torch.tensor([picture.number for picture, _, _ in batch])

    loader = DataLoader(samples, batch_size=2, collate_fn=numbers)  # type: ignore[arg-type]
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    return rows_of(Accelerator(dataloader_config=config).prepare(loader))


def share_out(kind: str) -> int:
    from accelerate import Accelerator

    accelerator = Accelerator()
    seed = torch.Generator().manual_seed(accelerator.process_index)
    rows: Any = torch.rand(16, 2, generator=seed)
    loader = DataLoader(rows if kind == "tensor" else rows.numpy(), batch_size=2)
    return len(list(accelerator.prepare(loader)))


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_arrays_that_each_rank_makes_anew_are_not_compared(ranks: RankServer, kind: str) -> None:
    """They are shared out by their numbers, as in 1.15."""
    assert ranks(2, share_out, kind) == [4, 4]


@pytest.mark.parametrize("dispatch", [False, True])
def test_objects_are_shared_out_whatever_their_text_is(ranks: RankServer, dispatch: bool) -> None:
    """A6: the ranks compare what their samples hold, not where they lie in memory."""
    first, second = ranks(2, pictures, dispatch)
    assert sorted(first + second) == list(range(8))


class Ranked(Dataset[int]):
    """Map-style data that store the rank and the world size, and pick no samples by them."""

    def __init__(self, items: Any, rank: int, world: int) -> None:
        self.items, self.rank, self.world_size = items, rank, world

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> int:
        if index > 1000:
            print(f"[{os.environ['RANK']}/{os.environ['WORLD_SIZE']}] no sample {index}")
        item = self.items[index]
        return int(item["x"] if isinstance(item, dict) else item)


class Logging(Ranked):
    """Asks for the rank alone, to print it."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __getitem__(self, index: int) -> int:
        if torch.distributed.get_rank() > 1000:
            print(f"sample {index} on {torch.distributed.get_rank()}")
        return int(self.items[index])


class LoggingSampler(Sampler[int]):
    """Says on the first rank that an epoch begins."""

    def __iter__(self) -> Iterator[int]:
        if torch.distributed.get_rank() == 0:
            print("a new epoch")
        return iter(range(16))

    def __len__(self) -> int:
        return 16


MENTIONED: dict[str, Callable[[int, int], DataLoader[Any]]] = {
    "data that store it": lambda rank, size: DataLoader(Ranked(range(16), rank, size), batch_size=2),
    "data that print it": lambda rank, size: DataLoader(Logging(range(16)), batch_size=2),
    "sampler that asks": lambda rank, size: DataLoader(DATA, batch_size=2, sampler=LoggingSampler()),
}


class RankParts(Dataset[int]):
    """Has an index for each rank's part of each group of samples."""

    def __init__(self, rank: int, world: int) -> None:
        self.groups, self.process_index, self.num_processes = torch.arange(16).split(2 * world), rank, world
        self.count = 0

    def __len__(self) -> int:
        return len(self.groups) * self.num_processes

    def __getitem__(self, index: int) -> torch.Tensor:
        group = self.groups[self.count]
        size = len(group) // self.num_processes
        self.count += 1
        return group[self.process_index * size : (self.process_index + 1) * size]


STORED: dict[str, Callable[[int, int], Any]] = {
    "numbers": lambda rank, size: list(range(rank, 32, size)),
    "tensor": lambda rank, size: torch.arange(rank, 32, size),
    "array": lambda rank, size: np.arange(rank, 32, size),
    "samples": lambda rank, size: [torch.tensor(number) for number in range(rank, 32, size)],
    "subset": lambda rank, size: Subset(range(32), range(rank, 32, size)),  # type: ignore[arg-type]
    "table": lambda rank, size: pytest.importorskip("pandas").Series(range(rank, 32, size)),
    "dataset": lambda rank, size: (
        pytest.importorskip("datasets").Dataset.from_dict({"x": range(32)}).shard(size, rank)
    ),
    "by name": lambda rank, size: {n: torch.tensor(n * size + rank) for n in range(16)},
}


def read_mentioning(kind: str) -> list[Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(MENTIONED[kind](accelerator.process_index, accelerator.num_processes))
    return [len(loader), rows_of(loader)]


@pytest.mark.parametrize("kind", MENTIONED)
def test_data_that_only_mention_the_rank_are_shared_out(ranks: RankServer, kind: str) -> None:
    """A6: not kept, which would train on all of it on every rank, and not refused."""
    first, second = ranks(2, read_mentioning, kind)
    assert (first[0], second[0]) == (4, 4)
    assert sorted(first[1] + second[1]) == list(range(16))


def read_rank_parts() -> list[Any]:
    from accelerate import Accelerator

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accelerate").addHandler(handler)
    accelerator = Accelerator(cpu=True)
    data = RankParts(accelerator.process_index, accelerator.num_processes)
    loader = accelerator.prepare(DataLoader(data, batch_size=1, shuffle=True))
    return [len(loader), [row for batch in loader for row in batch.flatten().tolist()], lines]


def test_data_with_an_index_for_each_rank_are_shared_out(ranks: RankServer) -> None:
    """A6: their length is that of all ranks together; one rank cannot fetch all of it."""
    first, second = ranks(2, read_rank_parts)
    assert (first[0], second[0]) == (4, 4)
    assert sorted(first[1] + second[1]) == list(range(16))
    assert "has an index for the part of each process" in first[2][0]
    assert (len(first[2]), len(second[2])) == (1, 0)


def read_stored(kind: str) -> str:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    rank, size = accelerator.process_index, accelerator.num_processes
    return error_of(
        accelerator.prepare(DataLoader(Ranked(STORED[kind](rank, size), rank, size), batch_size=2))
    )


@pytest.mark.parametrize("kind", STORED)
def test_parts_given_to_data_that_store_the_rank_are_not_halved_again(ranks: RankServer, kind: str) -> None:
    """A6: the ranks compare what such data hold."""
    text = error_on_later_rank(ranks(2, read_stored, kind))
    assert "Ranked.items differs" in text
    assert "shard=False" in text


class Attributes(IterableDataset[int]):
    """A stream with the given attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __iter__(self) -> Iterator[int]:
        return iter(range(16))


UNLIKE: dict[str, Callable[[int], dict[str, Any]]] = {
    "name": lambda rank: {"run": f"run{rank}"},
    "number": lambda rank: {"rank": rank, "count": 16 * rank},
    "rows of rank 0": lambda rank: {"rows": [] if rank else [1, 2, 3]},
    "files of rank 0": lambda rank: {"files": [] if rank else ["a", "b"]},
}


def dispatched_rows(kind: str) -> list[int]:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    stream = Attributes(**UNLIKE[kind](accelerator.process_index))
    return rows_of(accelerator.prepare(DataLoader(stream, batch_size=2)))


@pytest.mark.parametrize("kind", UNLIKE)
def test_streams_that_rank_0_reads_for_all_may_have_other_attributes(ranks: RankServer, kind: str) -> None:
    """Only files of other ranks show that these have shards."""
    first, second = ranks(2, dispatched_rows, kind)
    assert sorted(first + second) == list(range(16))


def assign_to_prepared() -> list[Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, rng_types=["torch", "generator"])  # type: ignore[list-item]
    loader = accelerator.prepare(DataLoader(DATA, batch_size=2))
    loader.batch_sampler.batch_size = 4
    loader.collate_fn = lambda samples: torch.stack([number for (number,) in samples])
    return [batch.tolist() for batch in loader]


def test_batch_size_and_collate_function_are_assigned_to_a_prepared_loader(ranks: RankServer) -> None:
    """The generators are synchronized as well, of which this loader has none."""
    first, second = ranks(2, assign_to_prepared)
    assert first == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert second == [[4, 5, 6, 7], [12, 13, 14, 15]]


def ambiguous(dispatch: bool | None) -> list[Any]:
    from accelerate import Accelerator, DataLoaderConfiguration

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accelerate").addHandler(handler)
    configuration = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = Accelerator(dataloader_config=configuration)
    rows = [rows_of(accelerator.prepare(DataLoader(kind(), batch_size=2))) for kind in (Seeding, Storing)]
    workers = accelerator.prepare(DataLoader(Workers(), batch_size=2))
    errors: list[str] = []
    kinds = (Picking, False), (Naming, False), (Seeding, True), (Storing, True), (OwnPart, False)
    for kind, strict in kinds:
        accelerator = Accelerator(dataloader_config=configuration, strict=strict)
        try:
            rows_of(accelerator.prepare(DataLoader(kind(), batch_size=2)))
        except (PrepareError, CollectiveError) as error:
            errors.append(str(error).partition(": ")[0])
    shared = accelerator.prepare_data_loader(DataLoader(Seeding(), batch_size=2), shard=True)
    return [[*rows, rows_of(shared)], len(rows_of(workers)), errors, lines]


@pytest.mark.parametrize("dispatch", [None, False])
def test_a_stream_that_knows_the_rank_alone_is_shared_out(ranks: RankServer, dispatch: bool | None) -> None:
    """With a note, as 1.x does it; one that picks by the rank, and any in a strict run, is refused."""
    first, second = ranks(2, ambiguous, dispatch)
    for own, other in zip(first[0], second[0], strict=True):
        assert (len(own), sorted(own + other)) == (8, list(range(16)))
    asks = [f"the code of {kind} asks for get_rank" for kind in ("Picking", "Naming", "Seeding")]
    differ = [
        f"the processes do not have the same data in DataLoader({kind}, batch_size=2)"
        for kind in ("Storing", "OwnPart")
    ]
    assert first[1:3] == [8, [*asks, *differ]]
    assert first[1:3] == second[1:3]
    seeding, storing = first[3]
    assert ("process 0 reads for all" if dispatch is None else "each process takes its part") in seeding
    assert "its Storing has rank" in storing
    assert second[3] == []


def prepared_anew() -> int:
    """Return how many keys the store of the group gets while loaders are prepared and iterated."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    store: Any = peer_store().group_store
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    counts: list[int] = []
    for _ in range(11):
        accelerator.wait_for_everyone()
        counts.append(store.num_keys())
        accelerator.wait_for_everyone()
        for shuffle in (False, True):
            list(accelerator.prepare(DataLoader(range(8), shuffle=shuffle)))  # type: ignore[arg-type]
        accelerator.free_memory()
    return counts[-1] - counts[1]


def test_loaders_that_are_prepared_anew_leave_nothing_in_the_store(ranks: RankServer) -> None:
    assert max(ranks(2, prepared_anew)) < 10


def hugging_face_rows(style: str) -> list[Any]:
    """What a rank reads of 16 rows; or the error."""
    datasets = pytest.importorskip("datasets")
    distributed = pytest.importorskip("datasets.distributed")
    from accelerate import Accelerator

    accelerator = Accelerator()
    rank, count = accelerator.process_index, accelerator.num_processes
    columns = {"x": list(range(16)), "label": [0, 1] * 8}
    data = datasets.Dataset.from_dict(columns).with_format("torch")
    if style == "stream":
        data = distributed.split_dataset_by_node(data.to_iterable_dataset(num_shards=4), rank, count)
    elif style == "split":
        data = distributed.split_dataset_by_node(data, rank, count)
    elif style == "subset of a part":
        data = torch.utils.data.Subset(distributed.split_dataset_by_node(data, rank, count), range(8))
    elif style == "uneven parts":
        data = distributed.split_dataset_by_node(data.select(range(15)), rank, count)
    elif style == "padded parts":
        data = data.select([*range(rank, 15, 2), *[0] * rank])
    elif style == "padded parts of some rows":
        data = data.select([*range(rank, 9, 2), *[0] * rank])
    elif style == "part of a shuffled one":
        data = data.shuffle(seed=1).shard(count, rank, contiguous=False)
    elif style == "column with the rank":
        data = data.map(lambda row: {"rank": rank, "z": row["x"] * rank})
    elif style == "another cache":
        data = data.map(lambda row: {"y": row["x"]}, new_fingerprint=f"cache{rank}")
    elif style == "transform":
        data = data.with_transform(lambda rows: {"x": [torch.tensor(x + 0 * rank) for x in rows["x"]]})
    elif style == "shuffled without a seed":
        data = data.shuffle(seed=rank)
    elif style == "selected without a seed":
        data = data.shuffle(seed=rank).select(range(6))
    else:
        data = data.select(range(8 + rank * 4))
    try:
        loader = accelerator.prepare(DataLoader(data, batch_size=2))
        return [row for batch in loader for row in batch["x"].tolist()]
    except CollectiveError as error:
        return [str(error)]


@pytest.mark.parametrize("style", ["stream", "split", "subset of a part", "part of a shuffled one"])
def test_hugging_face_data_that_was_split_is_kept(ranks: RankServer, style: str) -> None:
    first, second = ranks(2, hugging_face_rows, style)
    assert len(first) == len(second) == 8
    assert sorted(first + second) == list(range(16))


def test_parts_of_a_dataset_may_differ_by_a_row(ranks: RankServer) -> None:
    first, second = ranks(2, hugging_face_rows, "uneven parts")
    assert sorted(first + second) == list(range(15))


@pytest.mark.parametrize(("style", "count"), [("padded parts", 15), ("padded parts of some rows", 9)])
def test_parts_of_a_dataset_may_repeat_a_row_to_be_equally_long(
    ranks: RankServer, style: str, count: int
) -> None:
    first, second = ranks(2, hugging_face_rows, style)
    assert len(first) == len(second)
    assert sorted(first + second) == [0, *range(count)]


@pytest.mark.parametrize("style", ["column with the rank", "another cache", "transform"])
def test_another_fingerprint_of_the_same_rows_is_no_split(ranks: RankServer, style: str) -> None:
    """G16."""
    first, second = ranks(2, hugging_face_rows, style)
    assert sorted(first + second) == list(range(16))
    assert first[:4] == [0, 1, 4, 5], "shared out by batches"


def rows_of_files(folder: Path, is_copy: bool) -> list[str]:
    """Paths of 16 files in a folder of this rank; the files of each rank have the same names."""
    import datasets

    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    own = folder / f"cache{rank}"
    own.mkdir()
    for number in range(16):
        (own / f"{number}.txt").write_text(f"{number if is_copy else 16 * rank + number}")
    data = datasets.Dataset.from_dict({"image": [{"path": str(own / f"{n}.txt")} for n in range(16)]})
    loader = accelerator.prepare(DataLoader(data, batch_size=2))
    return [Path(path).read_text() for batch in loader for path in batch["image"]["path"]]


@pytest.mark.parametrize("is_copy", [True, False], ids=["copies of the same", "others of the same names"])
def test_files_that_rows_name_are_compared_by_what_they_hold(
    ranks: RankServer, tmp_path: Path, is_copy: bool
) -> None:
    """G16: each machine has its own cache, or its own part, of files."""
    first, second = ranks(2, rows_of_files, tmp_path, is_copy)
    assert sorted(map(int, first + second)) == list(range(16 if is_copy else 32))


@pytest.mark.parametrize("style", ["shuffled without a seed", "selected without a seed", "of other lengths"])
def test_a_dataset_of_which_the_ranks_have_other_rows_is_refused(ranks: RankServer, style: str) -> None:
    (text,) = same_on_all(ranks(2, hugging_face_rows, style))
    assert "the rows of its Dataset differ" in text
    assert "shuffle()" in text
    assert "shard=False" in text
