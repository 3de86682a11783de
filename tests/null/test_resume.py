"""A run that was interrupted goes on as if nothing had happened: samples, augmentation, random numbers.

Ranks are computed one after the other in this process; ``tests/cpu/test_resume_ranks.py`` has real ones.
"""

from __future__ import annotations

import gc
import json
import traceback
import tracemalloc
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.core.errors import PrepareError
from accelerate.data.batch_sampler_shard import slicer_for
from accelerate.data.epoch_order import RNGSnapshot
from accelerate.data.loader import make_stateful
from accelerate.data.sample_order import draw, draw_seed, finish, mark_last, single_steps, skip_items
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader, skip_first_batches
from accelerate.utils import set_seed
from tests.support.interrupted import (
    KINDS,
    Augmented,
    Checkpoint,
    collate,
    noise,
    prepared,
    samples,
    seeded,
    train,
)
from tests.support.long_run import LONG_RUN, hypothesis_settings, long_run_param, select_cases

POINTS: list[tuple[int, Any]] = [(0, 0), (1, 0), (1, 1), (1, 3), (1, "last"), (1, -1)]


def interrupted(
    kind: str, workers: int, size: int, rank: int, how: str, persistent: bool = False, points: Any = POINTS
) -> None:
    def new() -> Any:
        return _stateful(prepared(kind, workers, size, rank, persistent), how)

    whole, _ = seeded(lambda: train(new()))
    for epoch, at in points:
        stop = (epoch, len(whole[epoch]) if at == "last" else at)
        before, checkpoint = seeded(lambda stop=stop: train(new(), stop=stop))
        assert checkpoint is not None
        if at == "last" and how in ("plain", "stateful"):
            # Nothing is left of that epoch: a loader that is iterated as it is gives the next one.
            checkpoint = replace(checkpoint, epoch=epoch + 1, step=0)
        after, _ = seeded(lambda c=checkpoint: train(new(), since=c, how=how), seed=99)
        joined = [a + b for a, b in zip(before, after, strict=True)]
        if how == "plain" and at not in (0, -1, "last"):
            # What is stepped over is fetched again, so the random numbers have moved on.
            assert [samples(e) for e in joined][:2] == [samples(e) for e in whole][:2], (kind, stop)
        else:
            assert joined == whole, (kind, stop)


def _stateful(loader: Any, how: str) -> Any:
    loader.use_stateful_dataloader = how == "stateful"
    if how == "stateful" and not hasattr(loader.base_dataloader, "next_iter_state"):
        make_stateful(loader)
    return loader


@pytest.mark.parametrize("how", ["twin", "none", "plain", "stateful"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_goes_on(kind: str, how: str) -> None:
    """A1, A5: in the middle of an epoch, at its ends, before and after; all later epochs."""
    interrupted(kind, 0, 1, 0, how)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_goes_on(kind: str) -> None:
    """A1 on each of two ranks."""
    for rank in range(2):
        interrupted(kind, 0, 2, rank, "twin")


@pytest.mark.parametrize(
    ("kind", "workers"),
    select_cases(
        [(kind, workers) for kind in ("default", "generator", "stream") for workers in (1, 2)],
        [("default", 2), ("generator", 1), ("stream", 2)],
    ),
)
def test_what_workers_read_ahead_does_not_count(kind: str, workers: int) -> None:
    """A2."""
    points = POINTS if LONG_RUN or kind == "default" else POINTS[3:5]
    interrupted(kind, workers, 1, 0, "twin", points=points)


@pytest.mark.parametrize("kind", ["torch", "seedable", "changing", "one by one", "own iteration", "split"])
def test_workers_of_other_loaders(kind: str) -> None:
    """A2, A12."""
    points = [(1, 3), (1, "last")]
    if not LONG_RUN:
        points = points[1:] if kind in ("torch", "split") else points[:1]
    interrupted(kind, 2, 1, 0, "twin", points=points)


@pytest.mark.parametrize(("workers", "size", "how"), [(0, 2, "twin"), (0, 1, "stateful"), (2, 1, "twin")])
@pytest.mark.parametrize("kind", ["torchdata", "torchdata stream"])
def test_torchdatas_own_loader(kind: str, workers: int, size: int, how: str) -> None:
    pytest.importorskip("torchdata")
    points = [(1, 3), (1, "last"), (1, -1)]
    if workers and not LONG_RUN:
        points = points[:1] if kind == "torchdata" else points[1:]
    interrupted(kind, workers, size, size - 1, how, points=points)


@pytest.mark.parametrize("kind", ["default", long_run_param("generator"), "stream"])
def test_workers_that_persist(kind: str) -> None:
    interrupted(kind, 2, 1, 0, "twin", persistent=True, points=[(0, 2), (1, 3), (1, -1)])


@pytest.mark.parametrize("kind", KINDS)
def test_twice_in_one_epoch(kind: str) -> None:
    """A3: offsets add up, and saving again without training changes nothing."""
    whole, _ = seeded(lambda: train(prepared(kind, 0, 1, 0)))
    log, first = seeded(lambda: train(prepared(kind, 0, 1, 0), stop=(1, 2)))
    assert first is not None
    again = prepared(kind, 0, 1, 0)
    again.load_state_dict(json.loads(first.position))
    assert json.loads(json.dumps(again.state_dict())) == json.loads(first.position)
    part, second = seeded(lambda: train(prepared(kind, 0, 1, 0), since=first, stop=(1, 5)), seed=2)
    assert second is not None
    rest, _ = seeded(lambda: train(prepared(kind, 0, 1, 0), since=second), seed=3)
    assert [a + b + c for a, b, c in zip(log, part, rest, strict=True)] == whole


@pytest.mark.parametrize("kind", ["default", "sequential", "torch", "stream"])
def test_an_epoch_that_was_broken_off_before_saving(kind: str) -> None:
    """The checkpoint is made after the loop: skipping goes on inside the epoch all the same."""
    whole, _ = seeded(lambda: train(prepared(kind, 0, 1, 0)))

    def broken() -> Checkpoint:
        loader = prepared(kind, 0, 1, 0)
        for number, _ in enumerate(loader, 1):
            noise()
            if number == 3:
                break
        return Checkpoint(json.dumps(loader.state_dict()), RNGSnapshot.capture(), 0, 3)

    checkpoint = seeded(broken)
    rest, _ = seeded(lambda: train(prepared(kind, 0, 1, 0), since=checkpoint), seed=2)
    assert rest[0] == whole[0][3:]
    assert rest[1:] == whole[1:]


@pytest.mark.parametrize("kind", ["default", "generator", "seedable", "torch", "own iteration", "stream"])
@pytest.mark.parametrize("inside", [True, False])
def test_epochs_that_are_cut_short_go_on_in_new_orders(kind: str, inside: bool) -> None:
    """Saved after the loop, the next loop is a new epoch; saved in it, the next is that epoch again, once."""

    def script(state: Any = None) -> tuple[list[list[Any]], list[Any]]:
        loader = prepared(kind, 0, 1, 0)
        log: list[list[Any]] = []
        saved = []
        if state is not None:
            loader.load_state_dict(json.loads(state[0]))
            state[1].restore()
        for _ in range(4):
            log.append([])
            for number, batch in enumerate(loader, 1):
                log[-1].append((batch, noise()))
                if number == 3 and inside:
                    saved.append((json.dumps(loader.state_dict()), RNGSnapshot.capture()))
                if number == 3:
                    break
            if not inside:
                saved.append((json.dumps(loader.state_dict()), RNGSnapshot.capture()))
        return log, saved

    whole, saved = seeded(script)
    rest, saved_again = seeded(lambda: script(saved[1]), seed=2)
    if inside:
        assert samples(rest[0]) == samples(whole[1])
        assert kind == "seedable" or samples(rest[1]) != samples(rest[0])
    else:
        assert rest[:2] == whole[2:]
    after, _ = seeded(lambda: script(saved_again[0]), seed=3)
    assert inside or after[:3] == rest[1:]


def test_an_epoch_whose_last_batch_was_given_counts() -> None:
    """Its loop may take as many batches as there are, and ask for no other: the next one follows then."""
    loader = prepared("seedable", 0, 1, 0)
    epochs = [[batch for _, batch in zip(range(len(loader)), loader, strict=False)] for _ in range(2)]
    assert loader.iteration == 2
    first, second = ([index for batch in epoch for index, _ in batch] for epoch in epochs)
    assert first != second
    resumed = prepared("seedable", 0, 1, 0)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert samples([(b, 0) for b in loader]) == samples([(b, 0) for b in resumed])


def test_a_checkpoint_that_is_loaded_inside_of_a_loop_is_not_used_up_by_its_end() -> None:
    """The loop had come further than the checkpoint."""
    loader = prepared("default", 0, 1, 0)
    seen: list[Any] = []
    state: Any = None
    for number, batch in enumerate(loader, 1):
        seen.append((batch, 0))
        if number == 2:
            state = json.loads(json.dumps(loader.state_dict()))
        if number == 4:
            loader.load_state_dict(state)
            break
    rest = [(batch, 0) for batch in skip_first_batches(loader, 2)]
    assert samples(rest)[: len(samples(seen[2:]))] == samples(seen[2:])


def test_a_loop_that_goes_on_after_loading_saves_its_own_position(tmp_path: Path) -> None:
    """Weights are rolled back, the batches are not."""
    for loaded, saved in ((3, 5), (20, 25)):  # of the same epoch, and of an earlier one
        accelerator, loader = trained_loader()
        taken: list[int] = []
        for _ in range(2):
            for batch in loader:
                taken.append(int(batch))
                if len(taken) == 2:
                    accelerator.save_state(tmp_path / "back")
                if len(taken) == loaded:
                    accelerator.load_state(tmp_path / "back")
                if len(taken) == saved:
                    accelerator.save_state(tmp_path / "saved")
        assert loader.iteration == 2
        accelerator, again = trained_loader()
        accelerator.load_state(tmp_path / "saved")
        rest = [int(batch) for batch in accelerator.skip_first_batches(again, saved % 16)]
        rest += [int(batch) for batch in again] if saved < 16 else []
        assert (rest, len(taken)) == (taken[saved:], 32), loaded


@pytest.mark.parametrize("kind", ["default", "generator", "stream"])
@pytest.mark.parametrize("inside", [True, False])
def test_at_the_boundary_nothing_is_skipped_but_what_was_given(kind: str, inside: bool) -> None:
    """A5: saved after the last batch, None leaves nothing of that loop; saved after it, the next epoch."""

    def script(state: Any = None) -> tuple[list[list[Any]], Any]:
        loader = prepared(kind, 0, 1, 0)
        log: list[list[Any]] = []
        saved, first = None, 0
        if state is not None:
            loader.load_state_dict(json.loads(state[0]))
            state[1].restore()
            first = 0 if inside else 1
        for epoch in range(first, 3):
            batches = skip_first_batches(loader, None) if state is not None and epoch == first else loader
            log.append([])
            for batch in batches:
                log[-1].append((batch, noise()))
                if inside and saved is None and loader.end_of_dataloader:
                    saved = json.dumps(loader.state_dict()), RNGSnapshot.capture()
            if not inside and saved is None:
                saved = json.dumps(loader.state_dict()), RNGSnapshot.capture()
        return log, saved

    whole, saved = seeded(script)
    rest, _ = seeded(lambda: script(saved), seed=2)
    assert rest == ([[], *whole[1:]] if inside else whole[1:])


def test_a_loop_that_was_broken_off_for_good_does_not_disturb_the_rest() -> None:
    """An evaluation of two batches only, before a checkpoint: the training goes on exactly."""

    def script(loaders: list[Any], state: Any = None) -> tuple[list[Any], Any]:
        training, evaluation = loaders
        log: list[Any] = []
        saved = None
        begin = 0
        if state is not None:
            for loader, position in zip(loaders, json.loads(state[0]), strict=True):
                loader.load_state_dict(position)
            state[1].restore()
            begin = 3
        batches = skip_first_batches(training, begin)
        for step, batch in enumerate(batches, begin + 1):
            log.append((batch, noise()))
            if step in (2, 5):
                for count, (other, *_) in enumerate(evaluation):
                    log.append(other)
                    if count == 1:
                        break
            if step == 3:
                saved = (
                    json.dumps([loader.state_dict() for loader in loaders]),
                    RNGSnapshot.capture(),
                    len(log),
                )
        return [*log, *training], saved

    def both() -> list[Any]:
        return [prepared("default", 0, 1, 0), prepared("sequential", 0, 1, 0)]

    whole, saved = seeded(lambda: script(both()))
    rest, _ = seeded(lambda: script(both(), saved), seed=2)
    assert rest == whole[saved[2] :]


def test_a_generator_that_two_loaders_share() -> None:
    """It has moved on by the time of the checkpoint, and must not go back to where the epoch began."""

    def script(state: Any = None) -> tuple[list[Any], Any]:
        shared = torch.Generator().manual_seed(4)
        training, evaluation = (
            prepare_data_loader(
                DataLoader(Augmented(), batch_size=3, shuffle=True, collate_fn=collate, generator=shared),
                num_processes=1,
            )
            for _ in range(2)
        )
        log: list[Any] = []
        saved, begin = None, 0
        if state is not None:
            training.load_state_dict(json.loads(state[0]))
            evaluation.load_state_dict(json.loads(state[1]))
            state[2].restore()
            begin = 3
        for step, batch in enumerate(skip_first_batches(training, begin), begin + 1):
            log.append(batch)
            if step in (2, 6):
                log += list(evaluation)
            if step == 3:
                positions = [json.dumps(loader.state_dict()) for loader in (training, evaluation)]
                saved = *positions, RNGSnapshot.capture(), len(log)
        return [*log, *evaluation, *training], saved

    whole, saved = seeded(script)
    rest, _ = seeded(lambda: script(saved), seed=2)
    assert rest == whole[saved[3] :]


@pytest.mark.parametrize("kind", ["default", "stream"])
@pytest.mark.parametrize("how", ["to its end", "broken off", "skipping"])
def test_a_loader_and_its_workers_go_when_nobody_holds_them(kind: str, how: str) -> None:
    """Without the garbage collector: workers that are found late write errors into others that start."""
    gc.disable()
    try:
        batches = loader = prepared(kind, 1, 1, 0, persistent=True)
        if how == "skipping":
            batches = skip_first_batches(loader, 2)
        for _ in batches:
            if how == "broken off":
                break
        iterator = loader._indexed[0][1]._iterator
        held = [weakref.ref(item) for item in (batches, loader, iterator)]
        assert iterator is not None
        del batches, loader, iterator
        assert [item() for item in held] == [None] * 3
    finally:
        gc.enable()


def real(loader: Any, batch: Any) -> list[int]:
    """Sample numbers of a batch without fillers."""
    rows = batch if isinstance(batch, list) else [batch]
    return [index for index, *_ in rows[: loader.real]]


def walk(loaders: list[Any], skip: Any = 0, stop: int | None = None) -> tuple[list[list[int]], list[Any]]:
    """The real samples of every rank's epoch, one rank after the other, and their positions at the end."""
    seen: list[list[int]] = []
    states: list[Any] = []
    for loader in loaders:
        mine: list[int] = []
        batches = skip_first_batches(loader, skip) if skip != 0 else loader

        def rank(batches: Any = batches, mine: list[int] = mine) -> None:
            for number, batch in enumerate(batches, 1):
                mine += real(batches, batch)
                if number == stop:
                    break

        seeded(rank)
        seen.append(mine)
        states.append(json.loads(json.dumps(loader.state_dict())))
    return seen, states


WORLDS = ((2, 1), (1, 2), (2, 3), (3, 2))
SHARED_KINDS = [k for k in KINDS if k not in ("owner", "numpy", "python", "replacement")]
KINDS_WITH_WORKERS = ("default", "stream", "own iteration")


@pytest.mark.parametrize(
    ("kind", "before", "after", "workers"),
    [
        *((kind, *world, 0) for kind in SHARED_KINDS for world in WORLDS),
        *select_cases(
            [(kind, *world, 2) for kind in KINDS_WITH_WORKERS for world in WORLDS],
            [("default", 2, 1, 2), ("default", 2, 3, 2), ("stream", 3, 2, 2), ("own iteration", 1, 2, 2)],
        ),
    ],
)
def test_another_number_of_processes_gets_exactly_the_rest(
    kind: str, before: int, after: int, workers: int
) -> None:
    """A4: the order of the remaining samples is the same, whoever gets them."""
    everything = sorted(x for part in walk([prepared(kind, 0, 1, 0)])[0] for x in part)
    given, states = walk([prepared(kind, workers, before, rank) for rank in range(before)], stop=2)
    loaders = [prepared(kind, workers, after, rank) for rank in range(after)]
    for loader in loaders:
        loader.load_state_dict(states[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        rest, _ = walk(loaders, skip=2)
    found = sorted(x for part in given + rest for x in part)
    if kind == "drop_last":
        assert len(set(found)) == len(found)
        assert len(everything) - len(found) <= 3 * max(before, after)
    else:
        assert found == everything


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    select_cases(
        [
            (kind, *workers)
            for kind in ("default", "sequential", "torch", "one by one", "stream", "torchdata stream")
            for workers in ((0, 2), (2, 0), (1, 3))
        ],
        [
            *(("default", 0, 2), ("default", 1, 3), ("sequential", 2, 0), ("torch", 0, 2)),
            *(("one by one", 2, 0), ("stream", 1, 3), ("stream", 2, 0), ("torchdata stream", 0, 2)),
        ],
    ),
)
def test_another_number_of_workers_gets_exactly_the_rest(kind: str, before: int, after: int) -> None:
    """G9: workers do not change the order; the epoch of a stream, whose order they change, keeps its own."""
    whole, _ = walk([prepared(kind, before, 1, 0)])
    given, (state,) = walk([prepared(kind, before, 1, 0)], stop=3)
    loader = prepared(kind, after, 1, 0)
    loader.load_state_dict(state)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        rest, (end,) = walk([loader], skip=None)
    assert given[0] + rest[0] == whole[0]
    assert any(f"{before} worker(s) read" in str(w.message) for w in heard) == ("stream" in kind)
    following, _ = walk([loader])
    assert sorted(following[0]) == sorted(whole[0])
    again = prepared(kind, after, 1, 0)
    again.load_state_dict(end)
    assert walk([again])[0] == following


class Chunks(IterableDataset[Any]):
    """Worker 0 reads 9 samples, worker 1 one."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        assert worker is not None
        yield from ((sample, []) for sample in ((9,) if worker.id else range(9)))


def test_workers_with_parts_of_different_length_resume_only_as_they_were() -> None:
    """How far each has come is known only for the fetches of the checkpoint; else it is said, not guessed."""

    def new(size: int) -> Any:
        loader = DataLoader(Chunks(), batch_size=1, num_workers=2, collate_fn=collate)
        return prepare_data_loader(loader, num_processes=size, process_index=0)

    whole, _ = walk([new(1)])
    given, (state,) = walk([new(1)], stop=6)
    loader = new(1)
    loader.load_state_dict(state)
    assert given[0] + walk([loader], skip=None)[0][0] == whole[0]
    other = new(2)
    other.load_state_dict(state)
    with pytest.warns(UserWarning, match="with steps of 2"):
        rest = skip_first_batches(other, None)
    with pytest.raises(PrepareError, match="fewer samples than the checkpoint counts") as error:
        list(rest)
    # Found by the garbage collector later, with its queues, torch's iterator would wait 10 s for its workers.
    traceback.clear_frames(error.tb)


class Range(IterableDataset[Any]):
    """A part of 0, 1, ..., 15; ``cut_for_worker`` says which, as in torch's documentation."""

    start, end = 0, 16

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.start, self.end))


def cut_for_worker(worker: int) -> None:
    worker_info: Any = get_worker_info()
    stream = worker_info.dataset
    stream.start, stream.end = worker * 8, worker * 8 + 8


def test_workers_that_an_init_function_cuts_resume_in_other_batches() -> None:
    def new(batch_size: int, size: int) -> Any:
        loader = DataLoader(Range(), batch_size, num_workers=2, worker_init_fn=cut_for_worker)
        return prepare_data_loader(loader, num_processes=size, process_index=0)

    for before, after in (((2, 1), (1, 1)), ((1, 2), (2, 1))):
        begun = new(*before)
        given = [next(iter(begun)).tolist()]
        resumed = new(*after)
        resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the processes are others
            rest = [x.tolist() for x in skip_first_batches(resumed, None)]
        given += [[1]] if before[1] == 2 else []  # of the other process
        assert sorted(index for batch in given + rest for index in batch) == list(range(16))


@given(
    count=st.integers(1, 60),
    batch=st.integers(1, 7),
    size=st.integers(1, 4),
    offset=st.integers(0, 70),
    drop=st.booleans(),
    even=st.booleans(),
    split=st.booleans(),
)
@hypothesis_settings(100, in_long_run=400)
def test_the_cut_of_a_known_order_is_that_of_any_sampler(
    count: int, batch: int, size: int, offset: int, drop: bool, even: bool, split: bool
) -> None:
    """The fast way (slices of the order) and the general way (walking the batches) give the same steps."""
    batches = BatchSampler(SequentialSampler(range(count)), batch * size if split else batch, drop)
    for rank in range(size):
        shard = BatchSamplerShard(batches, size, rank, split, even)
        cut = slicer_for(shard)
        assert cut is not None
        offset = min(offset, count)
        fast = list(cut.steps(range(count), offset))
        group = 1 if split else size
        rest, taken, head = skip_items(iter(batches), 0, offset, group)
        if size > 1:
            if offset % (batch * size) == 0:
                assert fast == list(mark_last(shard.steps(rest, taken, head)))
        elif offset % batch == 0:
            assert fast == list(mark_last(single_steps(rest, taken, batch)))


@given(
    count=st.integers(1, 50),
    total=st.one_of(st.none(), st.integers(1, 130)),
    replacement=st.booleans(),
    own=st.booleans(),
)
@hypothesis_settings(50, in_long_run=150)
def test_orders_are_those_of_torchs_own_sampler(
    count: int, total: int | None, replacement: bool, own: bool
) -> None:
    def new() -> RandomSampler:
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(4) if own else None
        return RandomSampler(range(count), replacement, total, generator)

    theirs = new()
    expected = [list(theirs), list(theirs), torch.rand(()).item()]
    ours = new()
    found: list[Any] = []
    for _ in range(2):
        found.append(list(draw(ours, draw_seed(ours))))
        finish(ours)
    assert [[int(i) for i in order] for order in found] + [torch.rand(()).item()] == expected


def test_skipping_costs_neither_time_nor_memory() -> None:
    """No Python number is made of what is skipped: of ten million samples only the permutation is held."""
    loader = prepare_data_loader(DataLoader(range(1_000_000), batch_size=10, shuffle=True), num_processes=1)  # type: ignore[arg-type]
    tracemalloc.start()
    batches = iter(skip_first_batches(loader, 50_000))
    first = next(batches)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(first) == 10
    assert peak < 2_000_000, "tensors are not counted, Python's numbers are"


# ---------------------------------------------------------------- through an Accelerator


def trained_loader(workers: int = 0) -> tuple[Accelerator, Any]:
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    options: Any = {"num_workers": workers, "persistent_workers": workers > 0}
    return accelerator, accelerator.prepare(DataLoader(list(range(16)), 1, shuffle=True, **options))


@pytest.mark.parametrize(("inner_batches", "workers"), [(1, 0), (99, 0), (1, 1), (99, 1)])
def test_a_save_after_a_pass_inside_of_the_epoch_goes_on_with_the_epoch(
    tmp_path: Path, inner_batches: int, workers: int
) -> None:
    """The position is that of the training, and the order of the epochs after it is the same, too."""
    accelerator, loader = trained_loader(workers)
    seen: list[int] = []
    for epoch in range(2):
        for place, batch in enumerate(loader):
            seen.append(int(batch))
            accelerator.backward(torch.ones(1, requires_grad=True).sum())
            if (epoch, place) == (0, 1):
                assert len(list(zip(loader, range(inner_batches), strict=False))) == min(inner_batches, 16)
            if (epoch, place) == (0, 3):
                accelerator.save_state(tmp_path / "saved")
    assert sorted(seen) == sorted([*range(16)] * 2)
    accelerator, loader = trained_loader(workers)
    accelerator.load_state(tmp_path / "saved")
    rest = [int(batch) for batch in accelerator.skip_first_batches(loader, 4)]
    rest += [int(batch) for batch in loader]
    assert rest == seen[4:]


@pytest.mark.parametrize("options", [{}, {"use_seedable_sampler": True}, {"use_stateful_dataloader": True}])
def test_passes_inside_of_a_resumed_epoch_are_those_of_the_run_that_went_on(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    """They give the whole data, in orders of their own, and not what the checkpoint has left."""

    def new() -> tuple[Accelerator, Any]:
        set_seed(0)
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
        return accelerator, accelerator.prepare(DataLoader(list(range(16)), 1, shuffle=True))

    def run(loader: Any, rest: Any, since: int = 0, save: Any = None) -> list[Any]:
        seen: list[Any] = []
        for epoch in range(2):
            for place, batch in enumerate(loader if epoch else rest, 0 if epoch else since):
                seen.append(int(batch))
                if place in (1, 9):
                    seen.append([int(inner) for inner in loader])
                if save and (epoch, place) == (0, 7):
                    save(tmp_path / "saved")
        return seen

    accelerator, loader = new()
    whole = run(loader, loader, save=accelerator.save_state)
    assert all(sorted(inner) == [*range(16)] for inner in whole if isinstance(inner, list))
    accelerator, loader = new()
    accelerator.load_state(tmp_path / "saved")
    assert run(loader, accelerator.skip_first_batches(loader, 8), 8) == whole[9:]
    if options.get("use_stateful_dataloader"):
        accelerator.load_state(tmp_path / "saved")
        assert run(loader, loader, 8) == whole[9:]


class EpochStream(IterableDataset[int]):
    """A stream in an order of the epoch that is set."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from range(100 * self.epoch, 100 * self.epoch + 4)


class Counts(IterableDataset[int]):
    """Gives the numbers of a list, whatever worker asks."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        yield from self.numbers


def test_an_evaluation_loads_the_checkpoint_of_a_training_with_another_loader(tmp_path: Path) -> None:
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    own = torch.Generator().manual_seed(1)
    model, loader = accelerator.prepare(
        torch.nn.Linear(1, 1), DataLoader(list(range(8)), shuffle=True, generator=own)
    )
    list(loader)
    accelerator.save_state(tmp_path / "saved")
    accelerator = Accelerator(cpu=True)
    model_again, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(list(range(4))))
    with pytest.warns(UserWarning, match="1 random generators were saved with it.* hold 0"):
        accelerator.load_state(tmp_path / "saved")
    assert [int(batch) for batch in loader] == [0, 1, 2, 3]
    assert torch.equal(model_again.weight, model.weight)


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("data", [[*range(4)], Counts(range(4))], ids=["list", "another stream"])
def test_an_evaluation_reads_its_data_in_its_own_way(tmp_path: Path, data: Any, stateful: bool) -> None:
    """A position inside of the training's stream, with its workers, is none of other data."""
    options = DataLoaderConfiguration(use_stateful_dataloader=stateful)
    accelerator = Accelerator(cpu=True, dataloader_config=options)
    loader = accelerator.prepare(DataLoader(EpochStream(), batch_size=1, num_workers=2))
    next(iter(loader))
    accelerator.save_state(tmp_path / "saved")
    accelerator = Accelerator(cpu=True, dataloader_config=options)
    loader = accelerator.prepare(DataLoader(data, batch_size=1))
    with pytest.warns(UserWarning, match=r"that of a stream \(EpochStream\), but this loader has "):
        accelerator.load_state(tmp_path / "saved")
    assert [int(batch) for batch in loader] == [0, 1, 2, 3]


def test_nothing_is_skipped_in_the_epoch_after_the_last_batch(tmp_path: Path) -> None:
    """Scripts that skip ``step % len(loader)`` batches do so, and are not warned."""
    accelerator, loader = trained_loader()
    seen: list[int] = []
    for epoch in range(2):
        for place, batch in enumerate(loader):
            seen.append(int(batch))
            if (epoch, place) == (0, 15):
                accelerator.save_state(tmp_path / "saved")
    accelerator.load_state(tmp_path / "saved")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [int(batch) for batch in accelerator.skip_first_batches(loader, 0)] == seen[16:]


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_seedable_order_between_two_epochs_goes_on_under_another_seed(epochs: int) -> None:
    """Without a ``data_seed`` its seed is the one that the program had; one that is given counts."""

    def new(seed: int, data_seed: int | None = None) -> Any:
        set_seed(seed)
        loader = DataLoader(range(8), shuffle=True)
        options: Any = {"num_processes": 1, "process_index": 0, "data_seed": data_seed}
        return prepare_data_loader(loader, use_seedable_sampler=True, **options)

    whole = new(3)
    for _ in range(epochs):
        list(whole)
    state = json.loads(json.dumps(whole.state_dict()))
    following = [int(index) for index in whole]
    for resumed, same in ((new(9), True), (new(9, data_seed=9), False)):
        resumed.load_state_dict(state)
        assert ([int(index) for index in resumed] == following) is same


def test_a_batch_size_that_is_changed_later_counts() -> None:
    """That of a batch sampler of torch on several processes, too."""
    batches = BatchSampler(SequentialSampler(range(8)), 1, drop_last=False)
    shards = [BatchSamplerShard(batches, 2, rank) for rank in range(2)]
    assert [len(shard) for shard in shards] == [4, 4]
    batches.batch_size = 2
    assert [list(shard) for shard in shards] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    batches.batch_size, batches.drop_last = 3, True
    assert [list(shard) for shard in shards] == [[[0, 1, 2]], [[3, 4, 5]]]


class EpochBatches(torch.utils.data.Sampler[list[int]]):
    """Batches of one sample in an order of the epoch that is set."""

    batch_size, drop_last, epoch = 1, False, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter([[index] for index in torch.randperm(6, generator=generator).tolist()])


@pytest.mark.parametrize("kind", ["changing", "lists", "bulk", "default", "stream", "own iteration"])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2)])
def test_more_batches_may_be_left_out_of_the_rest_of_an_epoch(kind: str, before: int, after: int) -> None:
    """Also where the sampler does not say how large they are."""
    _, states = walk([prepared(kind, 0, before, rank) for rank in range(before)], stop=2)

    def rest(further: int) -> list[Any]:
        parts: list[Any] = []
        for rank in range(after):
            loader = prepared(kind, 0, after, rank)
            loader.load_state_dict(states[0])
            batches = skip_first_batches(skip_first_batches(loader, None), further)
            parts.append(seeded(lambda batches=batches: [real(batches, batch) for batch in batches]))
        return parts

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert rest(2) == [part[2:] for part in rest(0)]


@pytest.mark.parametrize("seed", [None, 5])
def test_a_stream_that_is_shuffled_without_a_seed_is_told_of(seed: int | None) -> None:
    """Each run of the program divides and shuffles it in another way."""
    datasets = pytest.importorskip("datasets")

    def loader() -> Any:
        rows = datasets.Dataset.from_dict({"x": range(16)}).to_iterable_dataset(num_shards=4)
        return prepare_data_loader(DataLoader(rows.shuffle(seed=seed, buffer_size=8), batch_size=2))

    first, second = loader(), loader()
    seen, states = [], []
    for batch in first:
        seen.append(batch["x"].tolist())
        states.append(json.loads(json.dumps(first.state_dict())))
    if seed is None:
        with pytest.warns(UserWarning, match=r"give its shuffle\(\) a seed"):
            second.load_state_dict(states[2])
    else:
        second.load_state_dict(states[2])
        assert [batch["x"].tolist() for batch in skip_first_batches(second, None)] == seen[3:]


@pytest.mark.parametrize("processes", [1, 2])
def test_an_epoch_that_a_script_sets_on_its_sampler_counts(processes: int) -> None:
    """F5-TTS resumes so: it skips batches first, and sets the epoch of its batch sampler afterwards."""

    def loader() -> Any:
        base = DataLoader(list(range(6)), batch_sampler=EpochBatches())
        return prepare_data_loader(base, num_processes=processes, process_index=0, even_batches=False)

    def order(epoch: int) -> list[int]:
        sampler = EpochBatches()
        sampler.set_epoch(epoch)
        return [index for (index,) in sampler][::processes]

    uninterrupted, resumed = loader(), loader()
    assert [[int(batch) for batch in uninterrupted] for _ in range(3)] == [order(epoch) for epoch in range(3)]
    rest = skip_first_batches(resumed, 1)
    resumed.batch_sampler.set_epoch(2)
    assert [int(batch) for batch in rest] == order(2)[1:]
    assert [int(batch) for batch in resumed] == order(3)  # the counter goes on from there
    resumed.batch_sampler.set_epoch(6)
    assert [int(batch) for batch in resumed] == order(6)


class RestoredSampler(torch.utils.data.Sampler[int]):
    """Advances by itself and restores its place; another epoch that is set begins at its first sample."""

    def __init__(self, name: str) -> None:
        self.name, self.start = name, 0
        setattr(self, name, 0)

    def set_epoch(self, epoch: int) -> None:
        self.load_state_dict({"epoch": epoch, "start": 0})

    def state_dict(self) -> dict[str, int]:
        return {"epoch": getattr(self, self.name), "start": self.start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        setattr(self, self.name, state["epoch"])
        self.start = state["start"]

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        epoch, start = getattr(self, self.name), self.start
        self.set_epoch(epoch + 1)
        return iter(range(100 * epoch + start, 100 * epoch + 6))


class RestoredStream(RestoredSampler, IterableDataset[int]):
    """The same as a stream."""


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize(
    ("name", "processes", "workers"),
    [("epoch", 1, 0), ("_epoch", 1, 0), ("_epoch", 2, 0), ("_epoch", 2, 2), ("_round", 2, 0)],
)
def test_a_sampler_that_a_script_has_restored_goes_on(
    name: str, processes: int, workers: int, epoch: int
) -> None:
    """That of lerobot keeps its epoch private: its loader set it to 0, whatever it was restored to."""
    seen = []
    for rank in range(processes):
        sampler = RestoredSampler(name)
        sampler.load_state_dict({"epoch": epoch, "start": 2})
        base: Any = DataLoader(range(600), sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
        loader = prepare_data_loader(base, num_processes=processes, process_index=rank)
        seen.append([[int(batch) for batch in loader] for _ in range(3)])
    whole = [[*range(first, first + 6)] for first in range(100 * epoch, 100 * epoch + 300, 100)]
    rest = [whole[0][2:], *whole[1:]]
    assert seen == [[order[rank::processes] for order in rest] for rank in range(processes)]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_stream_that_a_script_has_restored_goes_on_in_its_epoch(processes: int) -> None:
    """A loader that is made later, over the same stream, begins with its own first epoch."""
    stream = RestoredStream("_epoch")
    stream.set_epoch(3)
    loader, other = (
        prepare_data_loader(DataLoader(stream, batch_size=1), None, processes, 0, dispatch_batches=False)
        for _ in range(2)
    )
    assert [int(next(iter(loader))) for _ in range(2)] == [300, 300]  # left early, so again
    orders = [[int(batch) for batch in each] for each in (loader, loader, other)]
    assert [order[0] for order in orders] == [300, 400, 0]


def test_a_position_that_no_loader_takes_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A script that prepares a loader after load_state begins its epoch again."""
    accelerator = Accelerator()
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters())
    loader = accelerator.prepare(net, optimizer, DataLoader(range(8)))[2]  # type: ignore[arg-type]
    for batch in loader:
        if batch == 3:
            accelerator.save_state(tmp_path / "inside")
    accelerator.save_state(tmp_path / "after")
    accelerator.free_memory()
    accelerator.prepare(net, optimizer)
    accelerator.load_state(tmp_path / "after")
    assert "loader" not in caplog.text
    accelerator.load_state(tmp_path / "inside")
    assert "1 loader(s) that were prepared when it was saved are not prepared now" in caplog.text


@pytest.mark.parametrize("processes", [1, 2])
def test_an_epoch_that_a_script_sets_on_its_stream_counts(processes: int) -> None:
    """Also where the stream is in a shard; and what another loader sets on it is not the script's."""
    stream = EpochStream()
    loader, other = (
        prepare_data_loader(
            DataLoader(stream, batch_size=1), num_processes=processes, process_index=0, dispatch_batches=False
        )
        for _ in range(2)
    )

    def first(batches: Any) -> int:
        numbers = [int(batch) for batch in batches]
        return numbers[0]

    assert [first(loader) for _ in range(2)] == [0, 100]
    seen = []
    for epoch in (5, 6):
        stream.set_epoch(epoch)
        seen.append(first(loader))
    assert [*seen, first(loader), first(other)] == [500, 600, 700, 0]
