"""Streams in training: what fills, what is told of it, and loaders of other libraries."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from tests.support.long_run import select_cases
from tests.support.ranks import RankServer, same_on_all

PRELOAD = (
    *("datasets", "datasets.distributed", "datasets.io.generator", "scipy.io"),
    "torchdata.stateful_dataloader",
)


class Stream(IterableDataset[int]):
    """Numbers from ``start`` on; a worker's set-up may change its bounds."""

    def __init__(self, count: int) -> None:
        self.start, self.stop = 0, count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))


def cut(worker: int) -> None:
    """Shard the stream in each worker, as torch's documentation shows."""
    info = get_worker_info()
    assert info is not None
    data: Any = info.dataset
    middle = data.stop // 2
    data.start, data.stop = (0, middle) if worker == 0 else (middle, data.stop)


def taken(count: int, batch: int, options: dict[str, Any], workers: int) -> list[list[int]]:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
    user = DataLoader(Stream(count), batch, num_workers=workers, worker_init_fn=cut if workers else None)
    loader = accelerator.prepare(user)
    rows: list[int] = []
    real: list[int] = []
    for group in loader:
        rows += group.tolist()
        real += group.tolist()[: loader.real]
    return [rows, real]


SIZES = ((1, 1), (5, 1), (5, 4), (8, 2))


@pytest.mark.parametrize(
    ("count", "batch", "dispatch", "workers"),
    select_cases(
        [(*size, dispatch, workers) for size in SIZES for dispatch in (True, False) for workers in (0, 2)],
        [
            *((*size, dispatch, 0) for size in SIZES for dispatch in (True, False)),
            *((*size, dispatch, 2) for size, dispatch in zip(SIZES, (True, False) * 2, strict=True)),
        ],
    ),
)
def test_the_loader_tells_which_rows_are_real(
    ranks: RankServer, count: int, batch: int, dispatch: bool, workers: int
) -> None:
    """A10: fillers make the ranks even, ``loader.real`` tells them; without even_batches there are none."""
    even = ranks(2, taken, count, batch, {"dispatch_batches": dispatch}, workers)
    assert sorted(even[0][1] + even[1][1]) == list(range(count))
    assert len(even[0][0]) == len(even[1][0])
    uneven = ranks(2, taken, count, batch, {"dispatch_batches": dispatch, "even_batches": False}, workers)
    assert sorted(uneven[0][0] + uneven[1][0]) == list(range(count))


def stateful(kind: str, dispatch: bool) -> list[list[int]]:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    data: Any = Stream(9) if kind == "stream" else TensorDataset(torch.arange(9))
    loader = accelerator.prepare(loaders.StatefulDataLoader(data, batch_size=2))
    epochs: list[list[int]] = []
    for _ in range(2):
        parts = [accelerator.gather_for_metrics(batch) for batch in loader]
        epochs.append([row for part in parts for row in (part[0] if kind == "map" else part).tolist()])
    return epochs


@pytest.mark.parametrize("dispatch", [True, False])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_torchdatas_loader_gives_each_sample_once(ranks: RankServer, kind: str, dispatch: bool) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    assert same_on_all(ranks(2, stateful, kind, dispatch)) == [list(range(9))] * 2


def after_a_checkpoint_of_1x(folder: str, workers: int) -> list[list[list[int]]]:
    """Return two epochs after loading the state that 1.x has saved after three batches of rank 0."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    from accelerate import Accelerator, DataLoaderConfiguration

    options = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(dataloader_config=options)
    loader: Any = accelerator.prepare(DataLoader(range(32), 2, num_workers=workers))  # type: ignore[arg-type]
    accelerator.save_state(folder)
    if accelerator.is_main_process:
        batches = [[first, first + 1] for first in range(0, 32, 4)]
        raw = loaders.StatefulDataLoader(range(32), batch_sampler=batches, num_workers=workers)
        for _, _ in zip(range(3), raw, strict=False):
            torch.save(raw.state_dict(), f"{folder}/dl_state_dict.bin")
        Path(folder, "manifest.json").unlink()
        Path(folder, "dl_state_dict_rank1.bin").unlink()
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    return [[batch.tolist() for batch in loader] for _ in range(2)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_checkpoint_of_1x_goes_on_where_it_was(ranks: RankServer, tmp_path: Path, workers: int) -> None:
    """There all processes write one file, which counts batches."""
    pytest.importorskip("torchdata.stateful_dataloader")
    for rank, epochs in enumerate(ranks(2, after_a_checkpoint_of_1x, str(tmp_path / "c"), workers)):
        whole = [[first, first + 1] for first in range(2 * rank, 32, 4)]
        assert epochs == [whole[3:], whole]


def hugging_face(kind: str, dispatch: bool) -> list[int]:
    datasets = pytest.importorskip("datasets")
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    data = datasets.Dataset.from_dict({"x": list(range(9)), "text": [str(i) for i in range(9)]})
    data = data.with_format("torch")
    data = data.to_iterable_dataset() if kind == "stream" else data
    loader = accelerator.prepare(DataLoader(data, batch_size=2))
    found = [accelerator.gather_for_metrics(batch) for batch in loader]
    assert [text for step in found for text in step["text"]] == [str(i) for i in range(9)]
    return [row for step in found for row in step["x"].tolist()]


@pytest.mark.parametrize("dispatch", [True, False])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_hugging_face_datasets_give_each_sample_once(ranks: RankServer, kind: str, dispatch: bool) -> None:
    pytest.importorskip("datasets")
    assert same_on_all(ranks(2, hugging_face, kind, dispatch)) == list(range(9))


NOTE: list[int] = []


def rows_of(parts: list[range]) -> Iterator[dict[str, int]]:
    for part in parts:
        yield from ({"x": number} for number in part)


def read(row: dict[str, int]) -> dict[str, int]:
    NOTE.append(row["x"])
    return row


def in_files(count: int, files: int) -> Any:
    """A stream of numbers in several files; what this process reads is in ``NOTE``."""
    datasets = pytest.importorskip("datasets")
    NOTE.clear()
    parts = [range(file, count, files) for file in range(files)]
    return datasets.IterableDataset.from_generator(rows_of, gen_kwargs={"parts": parts}).map(read)


def by_files(
    count: int, files: int, options: dict[str, Any], workers: int, drop_last: bool = False
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return the rows that this rank reads, is given, and of those the real ones; and the gathered ones."""
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False, **options))
    loader = accelerator.prepare(
        DataLoader(in_files(count, files), 2, num_workers=workers, drop_last=drop_last)
    )
    given: list[int] = []
    real: list[int] = []
    gathered: list[int] = []
    for batch in loader:
        rows = batch["x"].tolist()
        given += rows
        real += rows[: loader.real]
        if options.get("even_batches", True):
            gathered += accelerator.gather_for_metrics(batch["x"]).tolist()
    assert loader.end_of_dataloader or not given
    return list(NOTE), given, real, gathered


@pytest.mark.parametrize("workers", [0, 2])
def test_each_rank_reads_its_files_alone(ranks: RankServer, workers: int) -> None:
    """Files of other lengths, a rank with nothing, and the options; every row counts once."""
    options: dict[str, Any]
    for count, files, options in (
        (19, 4, {}),
        (19, 4, {"split_batches": True}),
        (19, 4, {"even_batches": False}),
        (1, 2, {}),
    ):
        parts = ranks(2, by_files, count, files, options, workers)
        for rank, (read, given, real, gathered) in enumerate(parts):
            if not workers:  # workers note what they read in their own memory
                assert all(number % files % 2 == rank for number in read)
            assert set(real) == {number for number in range(count) if number % files % 2 == rank}
            if "even_batches" not in options:
                assert sorted(gathered) == list(range(count))
                assert len(given) == len(parts[0][1])
        assert sorted(parts[0][2] + parts[1][2]) == list(range(count))


def add_picture(row: dict[str, int]) -> dict[str, Any]:
    return {**row, "picture": bytes(PICTURE)}


PICTURE = 10**6


def send_fillers() -> int:
    """Bytes that this rank sends, as the kernel counts them, where one of four has no row."""
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    loader = accelerator.prepare(DataLoader(in_files(3, 4).map(add_picture), 1))
    before = psutil.Process().io_counters().write_chars
    assert [len(batch["picture"]) for batch in loader] == [1]
    return psutil.Process().io_counters().write_chars - before


@pytest.mark.skipif(sys.platform != "linux", reason="the counters are Linux's")
def test_one_rank_sends_the_batch_that_fills_a_rank_without_rows(ranks: RankServer) -> None:
    assert sum(ranks(4, send_fillers)) < 4 * PICTURE


def test_files_that_cannot_be_divided_are_read_by_all(ranks: RankServer) -> None:
    for read, _, _, gathered in ranks(2, by_files, 9, 3, {}, 0):
        assert sorted(read) == sorted(gathered) == list(range(9))


def test_drop_last_ends_with_the_shortest_part(ranks: RankServer) -> None:
    parts = ranks(2, by_files, 11, 2, {}, 0, True)
    assert [given for _, given, _, _ in parts] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def resumed_by_files(
    state: Any, steps: int, dispatch: bool | None = False, stateful: bool = False, workers: int = 0
) -> tuple[list[int], Any, int]:
    """Return the real rows of some steps after a state, the state then, and how many rows were read."""
    from accelerate import Accelerator, DataLoaderConfiguration

    options = DataLoaderConfiguration(dispatch_batches=dispatch, use_stateful_dataloader=stateful)
    accelerator = Accelerator(dataloader_config=options)
    loader: Any = accelerator.prepare(DataLoader(in_files(23, 4), 2, num_workers=workers))
    batches = loader
    if state is not None:
        loader.load_state_dict(state)
        batches = loader if stateful else accelerator.skip_first_batches(loader, None)
    rows: list[int] = []
    for number, batch in enumerate(batches, 1):
        rows += batch["x"].tolist()[: loader.real]
        if number == steps:
            return rows, loader.state_dict(), len(NOTE)
    return rows, None, len(NOTE)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_is_read_by_files_goes_on(ranks: RankServer, workers: int) -> None:
    """On as many ranks, on one, dispatched, and from those; also twice in an epoch."""
    more = (False, workers)
    whole = [set(rows) for rows, _, _ in ranks(2, resumed_by_files, None, 99, False, *more)]
    first = ranks(2, resumed_by_files, None, 2, False, *more)
    state = first[0][1]
    second = ranks(2, resumed_by_files, state, 1, False, *more)
    third = ranks(2, resumed_by_files, second[0][1], 99, False, *more)
    for rank in range(2):
        rows = [row for part in (first, second, third) for row in part[rank][0]]
        assert len(rows) == len(set(rows))
        assert set(rows) == whole[rank]
    given = {row for rows, _, _ in first for row in rows}
    for world, dispatch in ((1, False), (2, True)):
        rest = ranks(world, resumed_by_files, state, 99, dispatch, *more)
        rows = [row for part, _, _ in rest for row in part]
        assert sorted(rows) == sorted(set(range(23)) - given), (world, dispatch)
    begun = ranks(2, resumed_by_files, None, 2, True, *more)
    rest = ranks(2, resumed_by_files, begun[0][1], 99, False, *more)
    assert sorted(row for part, _, _ in begun + rest for row in part) == list(range(23))


def test_a_stream_with_a_state_is_not_read_again(ranks: RankServer) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")

    first = ranks(2, resumed_by_files, None, 2, False, True)
    rest = [ranks(2, resumed_by_files, first[rank][1], 99, False, True)[rank] for rank in range(2)]
    assert sorted(row for part, _, _ in first + rest for row in part) == list(range(23))
    assert [read for _, _, read in rest] == [12 - 4, 11 - 4]


def shuffled_by_files(seed: int | None, dispatch: bool) -> list[int] | str:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.core.errors import CollectiveError

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    own_seed = accelerator.process_index if seed is None else seed
    data = in_files(16, 4).shuffle(seed=own_seed, buffer_size=4)
    loader = accelerator.prepare(DataLoader(data, 2))
    try:
        return [row for batch in loader for row in accelerator.gather(batch["x"]).tolist()]
    except CollectiveError as error:
        return str(error)


def test_a_stream_that_each_rank_shuffles_in_its_own_way(ranks: RankServer) -> None:
    """Then a file would be read twice, another not at all; rank 0's order counts where it reads for all."""
    assert "the seed of its shuffle()" in same_on_all(ranks(2, shuffled_by_files, None, False))
    assert sorted(same_on_all(ranks(2, shuffled_by_files, 3, False))) == list(range(16))
    assert sorted(same_on_all(ranks(2, shuffled_by_files, None, True))) == list(range(16))


def draws_after_epochs(workers: int) -> list[list[float]]:
    """A random number after each of three epochs: with a prepared loader, and with torch's own."""
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    draws: list[list[float]] = []
    for prepare in (accelerator.prepare, lambda loader: loader):
        loader = prepare(DataLoader(Stream(8), 2, num_workers=workers, persistent_workers=workers > 0))
        torch.manual_seed(accelerator.process_index)
        draws.append([len(list(loader)) * 0 + torch.rand(()).item() for _ in range(3)])
    return draws


@pytest.mark.parametrize("workers", [0, 1])
def test_every_rank_draws_what_its_own_loader_would(ranks: RankServer, workers: int) -> None:
    """Ranks with seeds of their own, as generation has them, go on as in a loop over torch's loader."""
    for prepared, plain in ranks(2, draws_after_epochs, workers):
        assert prepared == plain
