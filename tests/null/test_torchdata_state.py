"""``use_stateful_dataloader=True``: torchdata's loader and its state, and states of others."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.core.errors import CheckpointError
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader
from accelerate.state import AcceleratorState
from tests.support.long_run import select_cases

StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

Maker = Callable[[], DataLoader[Any]]


class Numbers(IterableDataset[int]):
    """A stream that its workers share."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(17) if info is None else range(info.id, 17, info.num_workers)


class Cursor(Numbers):
    """A stream with a state of its own: it goes on without reading what it has given."""

    def __init__(self) -> None:
        self.begin, self.reads = 0, 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.begin, 17):
            self.begin, self.reads = number + 1, self.reads + 1
            yield number
        self.begin = 0

    def state_dict(self) -> dict[str, int]:
        return {"begin": self.begin}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.begin = state_dict["begin"]


class Counting(Dataset[Any]):
    """A dataset with a state of its own: it counts what it gave."""

    given = 0

    def __len__(self) -> int:
        return 17

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.given += 1
        return index, self.given

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.given = state_dict["given"]


def prepared(loader: DataLoader[Any], accelerator: Accelerator | None = None) -> Any:
    options = DataLoaderConfiguration(use_stateful_dataloader=True)
    return (accelerator or Accelerator(dataloader_config=options)).prepare(loader)


def plain(batches: Any) -> list[Any]:
    return [torch.stack(b, 1).tolist() if isinstance(b, list) else b.tolist() for b in batches]


def interrupted(loader: Any, after: int = 3) -> tuple[list[Any], Any]:
    """Return all batches of an epoch, and the state after some of them."""
    batches, state = [], None
    for number, batch in enumerate(loader, 1):
        batches += plain([batch])
        if number == after:
            state = copy.deepcopy(loader.state_dict())
    return batches, state


def shuffled(workers: int) -> DataLoader[Any]:
    return DataLoader(range(17), 2, shuffle=True, num_workers=workers)  # type: ignore[arg-type]


def test_the_prepared_loader_is_one_of_torchdata() -> None:
    """With ours: classes, attributes and ``skip_first_batches`` stay; preparing starts and draws nothing."""
    state = torch.get_rng_state()
    loader = prepared(shuffled(0))
    assert isinstance(loader, StatefulDataLoader)
    assert isinstance(loader, DataLoaderShard)
    assert isinstance(loader.base_dataloader, StatefulDataLoader)
    assert loader.base_dataloader._iterator is None
    assert type(loader).__name__ == "DataLoaderShard"
    assert (loader.batch_size, len(loader), loader.num_workers) == (2, 9, 0)
    loader.state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(skip_first_batches(loader, 2), StatefulDataLoader)
    assert isinstance(pickle.loads(pickle.dumps(loader.base_dataloader)), StatefulDataLoader)
    assert not isinstance(Accelerator().prepare(shuffled(0)), StatefulDataLoader)


@pytest.mark.parametrize("kind", [DataLoaderShard, DataLoaderDispatcher, SkipDataLoader])
def test_loaders_that_are_made_by_hand(kind: type[Any]) -> None:
    loader = kind(range(10), use_stateful_dataloader=True, batch_size=2)
    assert isinstance(loader, StatefulDataLoader)
    batches, state = interrupted(loader, 2)
    again = kind(range(10), use_stateful_dataloader=True, batch_size=2)
    again.load_state_dict(state)
    assert plain(again) == batches[2:]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", ["map", "stream"])
def test_the_state_is_that_of_torchdata(data: str, workers: int) -> None:
    """Before, in and after an epoch, but for the position, which lies where the state of a sampler lies."""

    def made(cls: Any) -> Any:
        return cls(Numbers() if data == "stream" else range(17), 2, num_workers=workers)

    def comparable(state: Any) -> Any:
        main = state["_snapshot"]["_main_snapshot"] if workers else state
        main.pop("_index_sampler_state")
        main.pop("_base_seed", None)
        if data == "map":  # that of a loader whose batches are set from outside, as in 1.x
            main.pop("_sampler_iter_state")
        return state

    ours, raw = prepared(made(DataLoader)), made(StatefulDataLoader)
    assert comparable(ours.state_dict()) == comparable(raw.state_dict())
    (first, state), (second, raw_state) = interrupted(ours), interrupted(raw)
    assert first == second
    assert comparable(state) == comparable(raw_state)
    if data == "map":  # at the end, torchdata has asked a stream once more
        assert comparable(ours.state_dict()) == comparable(raw.state_dict())
    assert ours.state_dict()["_iterator_finished"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffled_epoch_goes_on_in_its_order(workers: int) -> None:
    """And the epoch after; a state that is saved again at once is the same."""
    torch.manual_seed(5)
    batches, state = interrupted(prepared(shuffled(workers)))
    torch.manual_seed(6)
    again = prepared(shuffled(workers))
    again.load_state_dict(state)
    assert again.state_dict() == state
    rest, second = interrupted(again, 2)
    assert rest == batches[3:]
    third = prepared(shuffled(workers))
    third.load_state_dict(second)
    assert plain(third) == batches[5:]
    assert len(third) == len(plain(third)) == 9


@pytest.mark.parametrize("workers", [0, 2])
def test_data_with_a_state_of_its_own(workers: int) -> None:
    batches, state = interrupted(prepared(DataLoader(Counting(), 2, num_workers=workers)))
    again = prepared(DataLoader(Counting(), 2, num_workers=workers))
    again.load_state_dict(state)
    assert plain(again) == batches[3:]


def test_a_stream_with_a_state_is_not_read_again() -> None:
    batches, state = interrupted(prepared(DataLoader(Cursor(), 2)))
    stream = Cursor()
    again = prepared(DataLoader(stream, 2))
    again.load_state_dict(state)
    assert plain(again) == batches[3:]
    assert stream.reads == 17 - 6
    assert plain(again) == batches


def test_a_stream_with_a_state_goes_on_in_workers_that_persist() -> None:
    """Also inside of an epoch that goes on in the loader that gave the epoch before."""

    def new() -> Any:
        return prepared(DataLoader(Cursor(), 2, num_workers=2, persistent_workers=True))

    loader, again = new(), new()
    batches, state = interrupted(loader)
    again.load_state_dict(state)
    assert plain(again) == batches[3:]
    again.load_state_dict(state)
    rest, later = interrupted(again, after=2)
    assert rest == batches[3:]
    loader.load_state_dict(later)
    assert plain(loader) == batches[5:]


OWN_LOADERS: dict[str, Callable[[int], Any]] = {
    "map": lambda workers: StatefulDataLoader(range(17), 2, num_workers=workers),
    "shuffled": lambda workers: StatefulDataLoader(range(17), 2, shuffle=True, num_workers=workers),
    "snapshots": lambda workers: StatefulDataLoader(
        range(17), 2, num_workers=workers, snapshot_every_n_steps=2
    ),
    "stream": lambda workers: StatefulDataLoader(Numbers(), 2, num_workers=workers),
    "counting": lambda workers: StatefulDataLoader(Counting(), 2, num_workers=workers),
}


@pytest.mark.parametrize(
    ("kind", "workers"),
    select_cases(
        [(kind, workers) for kind in OWN_LOADERS for workers in (0, 2)],
        [*((kind, 0) for kind in OWN_LOADERS), ("snapshots", 2), ("stream", 2)],
    ),
)
def test_a_state_of_torchdatas_own_loader(kind: str, workers: int) -> None:
    """It is taken as torchdata takes it; the next epoch is whole."""
    made = OWN_LOADERS[kind]
    batches, state = interrupted(made(workers))
    ours = prepared(made(workers))
    ours.load_state_dict(state)
    assert ours.state_dict() == state
    assert plain(ours) == batches[3:]
    assert len(plain(ours)) == 9
    _, state = interrupted(made(workers), 9)
    ours.load_state_dict({**state, "_iterator_finished": True})
    assert len(plain(ours)) == 9


def test_a_count_of_batches_says_that_the_order_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    """Skipping in the loop takes the place of the count, and does not add to it."""
    _, state = interrupted(StatefulDataLoader(range(17), 2))
    loader = prepared(shuffled(0))
    loader.load_state_dict(state)
    assert "does not hold the order" in caplog.text
    assert len(plain(skip_first_batches(loader, 3))) == 6
    assert len(plain(loader)) == 9


@pytest.mark.parametrize("workers", [0, 2])
def test_checkpoints_hold_the_state(tmp_path: Path, workers: int) -> None:
    """Two loaders, under the names of 1.x; without the manifest, and with states of 1.x, they go on too."""
    options = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(dataloader_config=options)

    def new() -> list[Any]:
        accelerator.free_memory()
        made = [DataLoader(range(n), 2, num_workers=workers) for n in (16, 10)]  # type: ignore[arg-type]
        return [accelerator.prepare(loader) for loader in made]

    for loader, steps in zip(new(), (3, 1), strict=True):
        for step, _ in enumerate(loader, 1):
            if step == steps:
                break
    folder = accelerator.save_state(str(tmp_path / "checkpoint"))
    names = ["dl_state_dict.bin", "dl_state_dict_1.bin"]
    assert sorted(path.name for path in Path(folder).glob("dl_state_dict*")) == names

    def rest() -> list[int]:
        loaders = new()
        accelerator.load_state(folder)
        return [plain(loader)[0][0] for loader in loaders]

    assert rest() == [6, 2]
    Path(folder, "manifest.json").unlink()
    assert rest() == [6, 2]
    for name, (size, steps) in zip(names, ((16, 4), (10, 2)), strict=True):
        _, state = interrupted(StatefulDataLoader(range(size), 2, num_workers=workers), steps)
        torch.save(state, Path(folder, name))
    assert rest() == [8, 4]


def test_a_loader_without_the_option_says_what_it_leaves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = prepared(DataLoader(range(6), 2), accelerator := Accelerator())  # type: ignore[arg-type]
    folder = accelerator.save_state(str(tmp_path / "checkpoint"))
    Path(folder, "manifest.json").unlink()
    torch.save(StatefulDataLoader(range(6)).state_dict(), Path(folder, "dl_state_dict.bin"))
    accelerator.load_state(folder)
    assert "use_stateful_dataloader=True" in caplog.text
    assert len(plain(loader)) == 3


def test_a_loader_that_is_not_stateful_says_what_to_type() -> None:
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    state = Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(range(4))).state_dict()
    AcceleratorState._reset_state(reset_partial_state=True)
    loader = Accelerator(cpu=True).prepare(DataLoader(range(4)))
    with pytest.raises(CheckpointError, match="use_stateful_dataloader=True"):
        loader.load_state_dict(state)
