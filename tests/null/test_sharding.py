"""Which samples each rank sees, without any process: every rank's view is computed here."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing as mp
import os
import pickle
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

from accelerate import PartialState
from accelerate.core.errors import PrepareError
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    SkipDataLoader,
    prepare_data_loader,
    skip_first_batches,
)
from tests.support.long_run import hypothesis_settings


def views(sampler: Any, size: int, split: bool = False, even: bool = True) -> list[list[list[int]]]:
    return [list(BatchSamplerShard(sampler, size, rank, split, even)) for rank in range(size)]


def batches(count: int, batch: int, drop: bool = False) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(count)), batch, drop)


@given(
    count=st.integers(0, 40),
    batch=st.integers(1, 7),
    size=st.integers(1, 5),
    drop=st.booleans(),
)
@hypothesis_settings(75, in_long_run=300)
def test_even_shards_are_the_samples_in_order_with_a_tail_of_first_ones(
    count: int, batch: int, size: int, drop: bool
) -> None:
    sampler = batches(count, batch, drop)
    seen = views(sampler, size)
    steps = {len(view) for view in seen}
    assert len(steps) == 1, "every rank has as many batches"
    assert steps == {len(BatchSamplerShard(sampler, size, rank)) for rank in range(size)}
    # one process keeps the sampler's own batches, several fill the last step
    assert size == 1 or all(len(b) == batch for view in seen for b in view)
    flat = [i for step in zip(*seen, strict=True) for b in step for i in b]
    whole = count // (batch * size) * batch * size
    if size == 1:
        assert flat == list(range(count if not drop else count // batch * batch))
    elif drop:
        assert flat == list(range(whole))
    else:
        assert flat[:count] == list(range(count))
        assert flat[count:] == [i % count for i in range(len(flat) - count)]
        assert len(flat) - count < batch * size


@given(count=st.integers(0, 40), batch=st.integers(1, 7), size=st.integers(1, 5), split=st.booleans())
@hypothesis_settings(50, in_long_run=200)
def test_uneven_shards_hold_every_sample_once(count: int, batch: int, size: int, split: bool) -> None:
    sampler = batches(count, batch * size if split else batch)
    seen = views(sampler, size, split=split, even=False)
    assert sorted(i for view in seen for b in view for i in b) == list(range(count))
    if not split:
        lengths = [len(BatchSamplerShard(sampler, size, rank, even_batches=False)) for rank in range(size)]
        assert lengths == [len(view) for view in seen]


class SizedStream(IterableDataset[int]):
    """Samples 0, 1, ... with a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


@pytest.mark.parametrize("count", range(14))
def test_the_length_of_uneven_parts_of_batches_is_exact(count: int) -> None:
    """A rank that the last batch has nothing for has a batch less."""
    for data in (range(count), SizedStream(count)):
        for rank in range(3):
            loader = prepare_data_loader(
                DataLoader(data, batch_size=6),  # type: ignore[arg-type]
                num_processes=3,
                process_index=rank,
                split_batches=True,
                even_batches=False,
            )
            assert len(loader) == len(list(loader)) == len(range(2 * rank, count, 6))


class Changing(BatchSampler):
    """A user's batch sampler whose batches differ in size."""

    def __init__(self) -> None:
        self.note = "mine"

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2], [3], [4, 5], [6]])

    def __len__(self) -> int:
        return 4


def test_batches_of_changing_size_stay_whole() -> None:
    """A12."""
    seen = views(Changing(), 3)
    assert seen == [[[0, 1, 2], [6]], [[3], [0, 1, 2]], [[4, 5], [3]]]
    assert BatchSamplerShard(Changing(), 3, 0).note == "mine"


def test_batches_of_indices_may_be_tensors() -> None:
    class Tensors(Changing):
        def __iter__(self) -> Iterator[Any]:
            return map(torch.tensor, super().__iter__())

    loader = DataLoader(range(7), batch_sampler=Tensors(), collate_fn=list)
    whole, parts = (
        [
            list(prepare_data_loader(loader, num_processes=2, process_index=rank, split_batches=split))
            for rank in range(2)
        ]
        for split in (False, True)
    )
    assert whole == [[[0, 1, 2], [4, 5]], [[3], [6]]]
    assert parts == [[[0, 1], [3], [4], [6]], [[2, 0], [0], [5], [0]]]


def test_a_short_batch_in_the_middle_loses_nothing() -> None:
    class Ragged(BatchSampler):
        batch_size, drop_last = 2, False

        def __init__(self) -> None: ...

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1], [2], [3, 4], [5, 6]])

        def __len__(self) -> int:
            return 4

    assert views(Ragged(), 2) == [[[0, 1], [3, 4]], [[2], [5, 6]]]


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_longer_than_their_size_lose_nothing(drop_last: bool) -> None:
    """Samplers that pack by tokens say the size that they aim at."""

    class Long(BatchSampler):
        def __init__(self, count: int) -> None:
            self.batch_size, self.drop_last, self.count = 2, drop_last, count

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1, 2, 3], [4], [5, 6, 7], [8, 9, 10]][: self.count])

        def __len__(self) -> int:
            return self.count

    assert views(Long(4), 2) == [[[0, 1, 2, 3], [5, 6, 7]], [[4], [8, 9, 10]]]
    assert views(Long(3), 2)[1][1:] == ([] if drop_last else [[0, 1, 2, 3]])
    first, second = [[0, 1], [4], [5, 6], [8, 9]], [[2, 3], [0], [7, 0], [10, 0]]
    if drop_last:  # without the batch that is too short
        del first[1], second[1]
    assert views(Long(4), 2, split=True) == [first, second]


@pytest.mark.parametrize("split", [False, True])
def test_a_subclass_may_change_the_batches_of_a_shard(split: bool) -> None:
    """As in 1.15, where one of two methods gives them."""

    class Marked(BatchSamplerShard):
        def _iter_with_split(self) -> Iterator[list[Any]]:
            yield from (["split", *batch] for batch in super()._iter_with_split())

        def _iter_with_no_split(self) -> Iterator[list[Any]]:
            yield from (["whole", *batch] for batch in super()._iter_with_no_split())

    batches = BatchSampler(SequentialSampler(range(8)), 4, drop_last=False)
    expected = [["split", 2, 3], ["split", 6, 7]] if split else [["whole", 4, 5, 6, 7]]
    assert list(Marked(batches, 2, 1, split_batches=split)) == expected


def test_a_batch_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(PrepareError, match="batch of 3 samples cannot be split over 2"):
        BatchSamplerShard(batches(6, 3), 2, 0, split_batches=True)


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))

    def __len__(self) -> int:
        return self.count


@given(count=st.integers(0, 30), batch=st.integers(1, 4), size=st.integers(1, 4), drop=st.booleans())
@hypothesis_settings(50, in_long_run=150)
def test_a_stream_is_cut_into_steps_in_order(count: int, batch: int, size: int, drop: bool) -> None:
    shards = [IterableDatasetShard(Stream(count), batch, drop, size, rank) for rank in range(size)]
    seen = [list(shard) for shard in shards]
    assert [len(view) for view in seen] == [len(shard) for shard in shards]
    steps = [[view[i : i + batch] for view in seen] for i in range(0, len(seen[0]), batch)]
    flat = [item for step in steps for part in step for item in part]
    assert flat[:count] == list(range(count))[: len(flat)]
    assert set(flat) <= set(range(count))
    assert drop or len(flat) >= count


def test_what_is_assigned_to_a_shard_is_assigned_to_the_stream() -> None:
    """A worker's init function does so, also with attributes that are new."""
    stream = Stream(4)
    shard: Any = IterableDatasetShard(stream, num_processes=2)
    shard.new, shard.epoch = 3, 2
    assert vars(stream)["new"] == shard.new == 3
    assert shard.epoch == 2
    assert "epoch" not in vars(stream)


def test_a_loader_is_wrapped_and_keeps_its_class_and_attributes() -> None:
    """A12."""

    class Mine(DataLoader[Any]):
        colour = "red"

    data = TensorDataset(torch.arange(10))
    mine = Mine(data, batch_size=2, num_workers=0)
    mine.extra = 7  # type: ignore[attr-defined]
    for size in (1, 2):
        prepared = prepare_data_loader(mine, num_processes=size, process_index=0)
        assert isinstance(prepared, DataLoader)
        assert type(prepared.base_dataloader) is Mine
        assert (prepared.colour, prepared.extra, prepared.dataset) == ("red", 7, data)
        assert prepared.batch_sampler is (mine.batch_sampler if size == 1 else prepared.batch_sampler)
    assert prepared.batch_sampler.batch_sampler is mine.batch_sampler
    assert len(mine) == 5, "the user's loader is as it was"


def test_a_client_may_switch_the_sharding_off_afterwards() -> None:
    prepared = prepare_data_loader(
        DataLoader(TensorDataset(torch.arange(6))), num_processes=2, process_index=1
    )
    prepared.batch_sampler.num_processes, prepared.batch_sampler.process_index = 1, 0
    assert [x.item() for (x,) in prepared] == list(range(6))


def test_a_loader_that_does_not_collate_is_sharded_by_sample() -> None:
    loader = DataLoader(range(5), batch_size=None)  # type: ignore[arg-type]
    seen = [list(prepare_data_loader(loader, num_processes=2, process_index=rank)) for rank in range(2)]
    assert seen == [[0, 2, 4], [1, 3, 0]]


def test_a_loader_that_is_sharded_already_is_kept() -> None:
    """A6 for torch's own sampler."""
    from torch.utils.data.distributed import DistributedSampler

    data = TensorDataset(torch.arange(8))
    own = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, 1, shuffle=False))
    prepared = prepare_data_loader(own, num_processes=2, process_index=1)
    assert [x.tolist() for (x,) in prepared] == [[1, 3], [5, 7]]


class MultiEpochs(DataLoader[Any]):
    """Opens its sampler before ``prepare``, once for all epochs, so that its workers stay."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches = super().__iter__()

    def __iter__(self) -> Any:
        return islice(self.batches, len(self))


@pytest.mark.parametrize("batch_size", [2, None])
def test_a_loader_that_does_not_ask_the_sampler_of_its_shard_is_refused(batch_size: int | None) -> None:
    prepared = prepare_data_loader(
        MultiEpochs(range(8), batch_size=batch_size), num_processes=2, process_index=0
    )
    with pytest.raises(PrepareError, match="shard=False"):
        next(iter(prepared))


def test_the_loader_knows_its_last_batch() -> None:
    loader = DataLoaderShard(TensorDataset(torch.arange(5)), batch_size=2)
    assert [loader.end_of_dataloader for _ in loader] == [False, False, True]
    assert [loader.end_of_dataloader for _ in loader] == [False, False, True]
    assert loader.iteration == 2


class SlowFirst(Dataset[int]):
    """Sample 0 is read after sample 3: the worker of the first batch is overtaken."""

    def __init__(self) -> None:
        self.read = mp.get_context("fork").Event()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 3:
            self.read.set()
        if index == 0:
            assert self.read.wait(60)
        return index


def test_batches_come_in_order_whatever_the_loader_asks_for(caplog: pytest.LogCaptureFixture) -> None:
    """Fillers, the last batch and the position of a checkpoint are told by the order of the batches."""
    options: dict[str, Any] = {"num_workers": 2, "in_order": False, "multiprocessing_context": "fork"}
    own = DataLoader(SlowFirst(), **options)
    for prepared in (prepare_data_loader(own), DataLoaderShard(SlowFirst(), **options)):
        batches = [(batch.item(), prepared.end_of_dataloader) for batch in prepared]
        assert batches == [(0, False), (1, False), (2, False), (3, True)]
    assert caplog.text.count("in_order=False") == 2
    assert not own.in_order, "the user's loader stays"


def test_epochs_reach_samplers_and_datasets() -> None:
    class Told(TensorDataset):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    data = Told(torch.arange(4))
    loader = prepare_data_loader(
        DataLoader(data, shuffle=True),
        num_processes=2,
        process_index=0,
        use_seedable_sampler=True,
        data_seed=3,
    )
    loader.set_epoch(5)
    assert data.epoch == 5
    assert loader.get_sampler().epoch == 5


class Packed(BatchSampler):
    """Keeps its batches until it is told another epoch, as those that pack samples do."""

    told: tuple[int, ...] = ()

    def set_epoch(self, epoch: int) -> None:
        self.told = *self.told, epoch


def test_epochs_reach_a_batch_sampler_of_a_shard() -> None:
    """1.15 tells it of no epoch on several processes: it gave the same batches in all of them."""
    packed = Packed(SequentialSampler(range(8)), 2, False)
    loader = prepare_data_loader(
        DataLoader(range(8), batch_sampler=packed),  # type: ignore[arg-type]
        num_processes=2,
        process_index=0,
    )
    for _ in range(2):
        assert len(list(loader)) == 2
    assert packed.told == (0, 1)


def test_a_seedable_order_is_a_function_of_seed_and_epoch() -> None:
    def orders(epochs: int, start: int = 0) -> list[list[int]]:
        sampler = SeedableRandomSampler(range(20), data_seed=11)
        sampler.set_epoch(start)
        return [list(sampler) for _ in range(epochs)]

    first = orders(4)
    assert first[2:] == orders(2, start=2)
    assert len({tuple(order) for order in first}) == 4
    assert first[0] == list(RandomSampler(range(20), generator=torch.Generator().manual_seed(11)))


class Buckets(Sampler[list[int]]):
    """A batch sampler of a program, which counts its batches."""

    batch_size = 8

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(first, first + 8)) for first in range(0, 96, 8)])

    def __len__(self) -> int:
        return 12


@pytest.mark.parametrize("size", [1, 2])
def test_the_samples_of_a_batch_sampler_are_those_of_the_data(size: int) -> None:
    loader = prepare_data_loader(
        DataLoader(range(96), batch_sampler=Buckets()),  # type: ignore[arg-type]
        num_processes=size,
        process_index=0,
    )
    assert (len(loader), loader.total_dataset_length, loader.total_batch_size) == (12 // size, 96, 8 * size)
    batches = iter(loader)
    next(batches)
    assert loader.remainder == 0


def test_batches_of_indices_that_the_data_get_whole_are_sharded_and_seeded() -> None:
    """Torch's bulk loading, by a batch sampler in the place of the sampler."""

    class Bulk(Dataset[Any]):
        def __getitem__(self, indices: Any) -> Any:
            return torch.tensor(indices)

    sampler = BatchSampler(RandomSampler(range(10)), 4, drop_last=False)
    loaders = [
        prepare_data_loader(
            DataLoader(Bulk(), batch_size=None, sampler=sampler),
            num_processes=2,
            process_index=rank,
            use_seedable_sampler=True,
            data_seed=11,
        )
        for rank in range(2)
    ]
    order = list(SeedableRandomSampler(range(10), data_seed=11))
    filled = [*order, *order[:6]]
    for rank, loader in enumerate(loaders):
        assert (loader.total_batch_size, len(loader), loader.total_dataset_length) == (8, 2, 10)
        rest = skip_first_batches(loader, 1)
        assert len(rest) == 1
        batches = [(batch.tolist(), loader.real) for batch in loader]
        assert batches == [
            (filled[4 * rank :][:4], 4),
            (filled[8 + 4 * rank :][:4], 2 - 2 * rank),
        ]


class Rows(Dataset[Any]):
    """Gives a batch for the list of its indices."""

    def __getitem__(self, indices: Any) -> Any:
        return [*indices]

    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize("is_seedable", [False, True])
def test_batches_of_indices_that_are_collated_one_by_one_stay_whole(is_seedable: bool) -> None:
    """A batch sampler in the place of the sampler, as in torch's bulk loading, with the batch size of 1."""

    def load(count: int, rank: int) -> DataLoader[Any]:
        order = RandomSampler(range(10), generator=torch.Generator().manual_seed(11))
        loader: Any = DataLoader(
            Rows(), sampler=BatchSampler(order, 3, False), collate_fn=lambda rows: rows[0]
        )
        return prepare_data_loader(loader, None, count, rank, use_seedable_sampler=is_seedable, data_seed=11)

    order = list(RandomSampler(range(10), generator=torch.Generator().manual_seed(11)))
    batches = [order[:3], order[3:6], order[6:9], order[9:]]
    assert list(load(1, 0)) == batches
    for rank in range(2):
        loader: Any = load(2, rank)
        assert (loader.total_batch_size, list(loader)) == (2, batches[rank::2])
        loader.set_sampler(range(10))
        assert list(loader) == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9]]][rank]


def test_an_epoch_that_is_broken_off_keeps_its_number_whatever_workers_read_ahead() -> None:
    """They ask for all indices of a short epoch before the first batch."""
    for workers in (0, 2):
        loader = prepare_data_loader(
            DataLoader(range(6), batch_size=2, shuffle=True, num_workers=workers),
            num_processes=1,
            process_index=0,
            use_seedable_sampler=True,
            data_seed=11,
        )
        looked, whole = next(iter(loader)), list(loader)
        assert looked.tolist() == whole[0].tolist()
        loader.set_epoch(0)
        assert [x.tolist() for x in loader] == [x.tolist() for x in whole]
        assert loader.iteration == 1


@pytest.mark.parametrize("skip", [0, 1, 3, 5, 9])
def test_skipping_leaves_out_first_batches_without_reading_them(skip: int) -> None:
    read: list[int] = []

    class Reading(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return super().__getitem__(index)

    plain = DataLoader(Reading(torch.arange(10)), batch_size=2)
    prepared = prepare_data_loader(plain, num_processes=1, process_index=0)
    for loader in (skip_first_batches(plain, skip), skip_first_batches(prepared, skip)):
        read.clear()
        assert [i for (x,) in loader for i in x.tolist()] == list(range(2 * skip, 10))
        assert read == list(range(2 * skip, 10))
        assert len(loader) == max(0, 5 - skip)
    assert [i for (x,) in prepared for i in x.tolist()] == list(range(10)), "the loader itself begins anew"


def test_skipping_in_a_stream_reads_on() -> None:
    loader = skip_first_batches(DataLoader(Stream(5), batch_size=2), 1)
    assert [x.tolist() for x in loader] == [[2, 3], [4]]
    sampler = SkipBatchSampler(batches(7, 2), 2)
    assert (list(sampler), len(sampler), sampler.total_length) == ([[4, 5], [6]], 2, 4)
    prepared = prepare_data_loader(DataLoader(Stream(7), batch_size=2), num_processes=1, process_index=0)
    twice = skip_first_batches(skip_first_batches(prepared, 1), 2)
    assert [x.tolist() for x in twice] == [[6]]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_rest_of_an_unprepared_stream_is_shared_out(workers: int) -> None:
    """Each rank read all of it; workers each read the whole stream here."""
    rest = skip_first_batches(DataLoader(Stream(12), batch_size=2, num_workers=workers), 1)
    rest = skip_first_batches(rest, 3)
    ranks = [prepare_data_loader(rest, num_processes=2, process_index=rank) for rank in range(2)]
    rows = [[i for x in loader for i in x.tolist()] for loader in ranks]
    assert [len(each) for each in rows] == ([8, 8] if workers else [2, 2])
    assert sorted(rows[0] + rows[1]) == sorted(i for x in rest for i in x.tolist())


class RepeatedBatches:
    """A loader of another library around a loader: each batch twice, all else by attribute, as in trl."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return 2 * len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch in self.loader for _ in range(2))


class Endless(IterableDataset[int]):
    """A stream that does not say how long it is."""

    def __iter__(self) -> Iterator[int]:
        yield from range(6)

    def __len__(self) -> int:
        raise NotImplementedError


class EndlessSampler(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        yield from range(6)

    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_length_that_is_not_implemented_is_none(is_stream: bool, drop_last: bool, size: int) -> None:
    order = None if is_stream else EndlessSampler(range(6))
    data: Any = Endless() if is_stream else [*range(6)]
    user = DataLoader(data, batch_size=2, sampler=order, drop_last=drop_last)
    options: dict[str, Any] = {"dispatch_batches": False, "shard": True}
    loader = prepare_data_loader(user, num_processes=size, process_index=0, **options)
    expects_warning = pytest.warns(UserWarning, match="the samples do not fill one of 4 processes")
    with expects_warning if drop_last and size == 4 else contextlib.nullcontext():
        batches = [batch.tolist() for batch in loader]
    filled = {1: [[0, 1], [2, 3], [4, 5]], 2: [[0, 1], [4, 5]], 4: [[0, 1]]}[size]
    assert batches == (filled[:-1] if drop_last and size > 1 else filled)
    assert [batch.tolist() for batch in skip_first_batches(loader, 1)] == batches[1:]


def test_an_object_around_a_loader_skips_what_it_yields_itself() -> None:
    plain = DataLoader(range(5), batch_size=2)  # type: ignore[arg-type]
    for loader in (plain, prepare_data_loader(plain, num_processes=1, process_index=0)):
        rest = skip_first_batches(RepeatedBatches(loader), 3)  # type: ignore[arg-type]
        assert (len(rest), rest.batch_size) == (3, 2)
        assert [[x.tolist() for x in rest] for _ in range(2)] == [[[2, 3], [4], [4]]] * 2


def test_the_rest_of_an_unprepared_stream_has_the_length_of_the_rest() -> None:
    rest = skip_first_batches(DataLoader(Stream(7), batch_size=2), 1)
    assert len(rest) == len(list(rest)) == 3
    rest = skip_first_batches(rest, 2)
    assert len(rest) == len(list(rest)) == 1


@pytest.mark.parametrize("count", [-1, 2.0, torch.tensor(2)])
def test_a_number_of_batches_to_skip_may_be_computed(count: Any) -> None:
    """A script subtracts and divides numbers of steps; less than none is none, as in 1.x."""
    rest = list(range(4 if count > 0 else 0, 7))
    for data in (range(7), Stream(7)):
        plain = DataLoader(data, batch_size=2)  # type: ignore[arg-type]
        for loader in (plain, prepare_data_loader(plain, num_processes=1, process_index=0)):
            assert [i for x in skip_first_batches(loader, count) for i in x.tolist()] == rest


def test_a_loader_that_skips_does_so_in_every_epoch() -> None:
    for kind in (SkipDataLoader, DataLoaderShard, DataLoaderDispatcher):
        loader = kind(range(5), skip_batches=1, batch_size=2)
        assert [[x.tolist() for x in loader] for _ in range(2)] == [[[2, 3], [4]]] * 2


@pytest.mark.parametrize("data", [range(6), Stream(6)])
def test_a_loader_is_copied_inside_of_an_epoch_and_after_it(data: Any) -> None:
    loader = prepare_data_loader(DataLoader(data, batch_size=2), num_processes=1, process_index=0)
    batches = iter(loader)
    next(batches)
    assert [x.tolist() for x in copy.deepcopy(loader)] == [[0, 1], [2, 3], [4, 5]]
    assert [x.tolist() for x in batches] == [[2, 3], [4, 5]]
    again = pickle.loads(pickle.dumps(loader))
    assert [x.tolist() for x in again] == [[0, 1], [2, 3], [4, 5]]


def test_what_cannot_be_prepared_is_refused() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4)))
    with pytest.raises(PrepareError, match="needs all 1 processes"):
        prepare_data_loader(loader, num_processes=2, process_index=0, dispatch_batches=True)
    with pytest.raises(PrepareError, match="a list is not a"):
        prepare_data_loader([1, 2])  # type: ignore[arg-type]


class Numbers(Dataset[int]):
    """Map-style data: the whole, whatever it says about its rank."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 2
        self.items = list(range(16))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> int:
        return self.items[index]


class Printing(Numbers):
    """Prints its rank and the world size."""

    def __getitem__(self, index: int) -> int:
        if index > 1000:
            print(f"[{os.environ['RANK']}/{os.environ['WORLD_SIZE']}] no sample {index}")
            print("rank %s of %s" % (os.environ["RANK"], os.environ["WORLD_SIZE"]))  # noqa: UP031
        return super().__getitem__(index)


class Seeded(Numbers):
    """Seeds a generator by its rank and works on the first rank."""

    def __init__(self) -> None:
        super().__init__()
        seed = 7 * self.world_size + self.rank
        self.generator = torch.Generator().manual_seed(seed)
        self.logger = print if self.rank == 0 else None


class PrintingRank(Numbers):
    """Asks for the rank alone, to print it."""

    def __init__(self) -> None:
        self.items = list(range(16))

    def __getitem__(self, index: int) -> int:
        if index > 1000:
            _print_on_first("no sample", index)
        return super().__getitem__(index)


def _print_on_first(*words: object) -> None:
    if torch.distributed.get_rank() == 0:
        print(f"rank {torch.distributed.get_rank()}", *words)


class Sliced(Numbers):
    """Slices by its attributes in ``__init__``."""

    def __init__(self) -> None:
        super().__init__()
        self.items = list(range(32))[self.rank :: self.world_size]


class Blocks(Numbers):
    """Takes a block whose bounds are variables."""

    def __init__(self) -> None:
        super().__init__()
        each = 32 // self.world_size
        first = each * self.rank
        self.items = list(range(32))[first : first + each]


class Filtered(Numbers):
    """Keeps every second item."""

    def __init__(self) -> None:
        super().__init__()
        self.items = [item for item in range(32) if item % self.world_size == self.rank]


class Striding(Numbers):
    """Asks for the rank when a sample is read."""

    def __init__(self) -> None:
        self.items = list(range(32))

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        rank, count = _rank_and_count()
        return self.items[index * count + rank]


def _rank_and_count() -> tuple[int, int]:
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "2"))


class Handing(Numbers):
    """Hands the rank and the world size to a function."""

    def __init__(self) -> None:
        super().__init__()
        self.items = _take_part(list(range(32)), self.rank, self.world_size)


def _take_part(items: list[int], which: int, of: int) -> list[int]:
    return items[which::of]


class Dialogs(Numbers):
    """Hands both to a function whose name only seems to be that of a log."""

    def __init__(self) -> None:
        super().__init__()
        self.items = LOADERS["dialogs"].read_dialogs(self.rank, self.world_size)


class DialogReader:
    def read_dialogs(self, which: int, of: int) -> list[int]:
        return list(range(32))[which::of]


LOADERS = {"dialogs": DialogReader()}


class RandomIndices(Numbers):
    """Takes its part of an order whose name is that of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        random_indices = torch.arange(32)[self.rank :: self.world_size]
        self.items = random_indices.tolist()


class Narrowed(Numbers):
    """Hands bounds to a method that come from both numbers."""

    def __init__(self) -> None:
        super().__init__()
        each = 32 // self.world_size
        self.items = torch.arange(32).narrow(0, each * self.rank, each).tolist()


class IndexingByRank(PrintingRank):
    """Picks a sample by the rank alone."""

    def __getitem__(self, index: int) -> int:
        return self.items[index + torch.distributed.get_rank()]


def length_of_two(data: Dataset[int]) -> int:
    loader = prepare_data_loader(DataLoader(data, batch_size=2), num_processes=2, process_index=0)
    return len(loader)


@pytest.mark.parametrize("kind", [Numbers, Printing, Seeded, PrintingRank])
def test_data_that_only_mention_their_rank_are_shared_out(kind: type[Numbers]) -> None:
    """A6: each process training on all of it would be as wrong as halving it twice."""
    assert length_of_two(kind()) == 4


@pytest.mark.parametrize(
    "kind", [Sliced, Blocks, Filtered, Striding, Handing, Dialogs, RandomIndices, Narrowed]
)
def test_data_that_pick_samples_by_their_rank_are_kept(kind: type[Numbers]) -> None:
    """A6."""
    assert length_of_two(kind()) == 8


def test_data_that_pick_by_the_rank_alone_must_be_explained() -> None:
    with pytest.raises(PrepareError, match="asks for get_rank"):
        length_of_two(IndexingByRank())


@pytest.mark.parametrize("file", ["<string>", __file__])
def test_code_without_a_source_that_has_both_numbers_is_taken_for_sharded(file: str) -> None:
    """Functions typed into an interpreter cannot be read; the lines at their place may be of other code."""
    source = "def __getitem__(self, index):\n    return print(get_rank(), get_world_size())"
    names: dict[str, Any] = {}
    exec(compile(source, file, "exec"), names)
    typed = type("Typed", (PrintingRank,), {"__getitem__": names["__getitem__"]})
    assert length_of_two(typed()) == 8


class Reader:
    """Shards a stream that holds it."""

    def read(self) -> Iterator[int]:
        rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
        yield from range(rank, 16, count)


def by_node(items: Iterator[int], rank: int = 0, world_size: int = 2) -> Iterator[int]:
    return islice(items, rank, None, world_size)


def by_worker(items: Iterator[int], rank: int = 0, world_size: int = 2) -> Iterator[int]:
    if world_size > 1000:
        raise ValueError(f"rank {rank} of {world_size}")
    return items


class Pipeline(IterableDataset[int]):
    """A stream of stages, as that of WebDataset."""

    def __init__(self, *stages: Any) -> None:
        self.pipeline = [*stages]

    def __iter__(self) -> Iterator[int]:
        return iter(range(16))


@pytest.mark.parametrize(
    ("stages", "is_kept"),
    [
        ([Reader()], True),
        ([by_worker, by_node], True),
        ([partial(by_node)], True),
        ([(Reader().read,)], True),
        ([ChainDataset([Pipeline(by_node)])], True),
        ([by_worker, print, {"a": 1}, "text"], False),
        ([PartialState], False),
    ],
)
def test_streams_that_shard_in_another_object_are_kept(stages: list[Any], is_kept: bool) -> None:
    """A6."""
    stream = Pipeline(*stages)
    loader = prepare_data_loader(DataLoader(stream, batch_size=2), num_processes=2, process_index=0)
    assert (loader.dataset is stream) == is_kept


def test_the_batch_size_of_a_prepared_loader_can_be_assigned() -> None:
    batch_sampler = BatchSampler(SequentialSampler(range(17)), 2, False)
    loader = prepare_data_loader(
        DataLoader(range(17), batch_sampler=batch_sampler),  # type: ignore[arg-type]
        num_processes=2,
        process_index=1,
    )
    list(loader)
    shard: Any = loader.batch_sampler
    shard.batch_size, shard.drop_last = 4, True
    assert (batch_sampler.batch_size, batch_sampler.drop_last) == (4, True)
    assert [batch.tolist() for batch in loader] == [[4, 5, 6, 7], [12, 13, 14, 15]]
    assert (len(loader), loader.total_batch_size) == (2, 8)


def test_a_batch_size_that_cannot_be_split_is_not_assigned() -> None:
    shard = BatchSamplerShard(batches(8, 4), 2, 0, split_batches=True)
    with pytest.raises(PrepareError, match="batch of 3 samples cannot be split over 2"):
        shard.batch_size = 3
    assert shard.batch_size == 4


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_the_collate_function_of_a_prepared_loader_can_be_assigned(count: int, is_stream: bool) -> None:
    data: Any = SizedStream(8) if is_stream else range(8)
    loader = prepare_data_loader(DataLoader(data, batch_size=4), num_processes=count, process_index=0)
    skipped = skip_first_batches(loader, 1)
    assert len(list(loader)) == 2 // count
    for each in (loader, skipped):
        each.collate_fn = sum
        assert each.collate_fn is sum
    assert next(iter(loader)) == 6
    assert list(skipped) == ([22] if count == 1 else [])


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_generators_are_synchronized_where_there_are_any(is_shuffled: bool) -> None:
    loader = prepare_data_loader(
        DataLoader(range(8), batch_size=2, shuffle=is_shuffled),  # type: ignore[arg-type]
        rng_types=["torch", "generator"],
    )
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(8))
