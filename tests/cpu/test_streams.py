"""Streams in training: what fills, what is told of it, and loaders of other libraries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from tests.support.ranks import RankServer, same_on_all


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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dispatch", [True, False])
@pytest.mark.parametrize(("count", "batch"), [(1, 1), (5, 1), (5, 4), (8, 2)])
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
