"""Any loader configuration, counted sample by sample: by ``gather_for_metrics``, by ``len``, and resumed."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    get_worker_info,
)

from tests.support.long_run import LONG_RUN, hypothesis_settings
from tests.support.ranks import RankServer

DATA = ("map", "stream", "sized stream")
ORDERS = (
    "sequential",
    "shuffled",
    "own generator",
    "random sampler",
    "user's sampler",
    "changing batches",
)


class Numbers(Dataset[Any]):
    """Samples 0, 1, ..."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class NumberStream(IterableDataset[Any]):
    """The same as a stream; workers share it."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        yield from range(self.count) if worker is None else range(worker.id, self.count, worker.num_workers)


class SizedStream(NumberStream):
    """The same with a length."""

    def __len__(self) -> int:
        return self.count


class LazySampler(Sampler[int]):
    """Draws each index when it is requested, from the program's generator."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        left = list(range(self.count))
        while left:
            yield left.pop(int(torch.randint(len(left), ()).item()))


class ChangingBatches(BatchSampler):
    """Batches of 1, 2, 3, 1, 2, ... samples."""

    def __init__(self, count: int) -> None:
        self.count = count

    def batches(self) -> list[list[int]]:
        left, found = list(range(self.count)), list[list[int]]()
        while left:
            size = 1 + len(found) % 3
            found.append(left[:size])
            left = left[size:]
        return found

    def __len__(self) -> int:
        return len(self.batches())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches())


@dataclass(frozen=True)
class LoaderCase:
    """A loader, and the options that it is prepared with.

    Attributes:
        batch: None for a loader that does not collate.
        alike: ranks that read the same samples, by tensor parallelism.
    """

    data: str = "map"
    count: int = 9
    batch: int | None = 2
    order: str = "sequential"
    drop: bool = False
    even: bool = True
    split: bool = False
    dispatch: bool | None = None
    workers: int = 0
    persistent: bool = False
    torchdata: bool = False
    seedable: bool = False
    stateful: bool = False
    alike: int = 1

    def loader(self) -> DataLoader[Any]:
        """Return the loader of the user."""
        kind: type[DataLoader[Any]] = DataLoader
        if self.torchdata:
            from torchdata.stateful_dataloader import StatefulDataLoader

            kind = StatefulDataLoader
        more: dict[str, Any] = {"num_workers": self.workers}
        if self.workers:
            more["persistent_workers"] = self.persistent
        if self.order == "changing batches":
            return kind(Numbers(self.count), batch_sampler=ChangingBatches(self.count), **more)
        more["batch_size"] = self.batch
        if self.batch is not None:
            more["drop_last"] = self.drop
        if self.data != "map":
            return kind((NumberStream if self.data == "stream" else SizedStream)(self.count), **more)
        if self.order == "user's sampler":
            return kind(Numbers(self.count), sampler=LazySampler(self.count), **more)
        if self.order == "random sampler" and self.count:
            return kind(Numbers(self.count), sampler=RandomSampler(range(self.count)), **more)
        if self.order == "own generator":
            more["generator"] = torch.Generator().manual_seed(5)
        return kind(Numbers(self.count), shuffle=self.order != "sequential" and self.count > 0, **more)

    def step(self, world: int) -> int:
        """Return the samples of a step."""
        return (self.batch or 1) * (1 if self.split and self.batch else world // self.alike)

    def complete_samples(self, world: int) -> int:
        """Return how many samples an epoch gives: with ``drop_last`` only those of complete steps."""
        step, workers = self.step(world), max(1, self.workers) if self.data != "map" else 1
        parts = [len(range(worker, self.count, workers)) for worker in range(workers)]
        return sum(part // step * step if self.drop else part for part in parts)


@st.composite
def loader_cases(draw: st.DrawFn, world: int) -> LoaderCase:
    """Any loader with any options; one in six has workers, which take time to start."""
    data = draw(st.sampled_from(DATA))
    order = draw(st.sampled_from(ORDERS)) if data == "map" else "sequential"
    changing = order == "changing batches"
    batch = 2 if changing else draw(st.sampled_from((None, 1, 2, 3, 4, 6)))
    alike = draw(st.sampled_from((1, 1, 1, 2))) if world in (2, 4) else 1
    workers = draw(st.sampled_from((0,) * 10 + (1, 2)))
    return LoaderCase(
        data,
        draw(st.integers(0, 20)),
        batch,
        order,
        drop=batch is not None and not changing and draw(st.booleans()),
        even=draw(st.sampled_from((True, True, False))),
        split=draw(st.sampled_from((False, False, True))),
        dispatch=draw(st.sampled_from((None, True, False))) if alike == 1 else None,
        workers=workers,
        persistent=workers > 0 and draw(st.booleans()),
        torchdata=draw(st.sampled_from((False, False, False, True))),
        seedable=draw(st.sampled_from((False, False, True))),
        stateful=draw(st.booleans()),
        alike=alike,
    )


@dataclass(frozen=True)
class SavedLoader:
    """The position of a loader as text, and the states of the program's generators."""

    position: str
    states: tuple[Any, Any, Any]

    @classmethod
    def of(cls, loader: Any) -> SavedLoader:
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        return cls(json.dumps(loader.position_state()), states)

    def restore_generators(self) -> None:
        torch.set_rng_state(self.states[0])
        random.setstate(self.states[1])
        np.random.set_state(self.states[2])


@dataclass
class EpochLog:
    """What a rank saw in an epoch.

    Attributes:
        real: its samples, batch by batch, as ``loader.real`` counts them.
        gathered: the samples of all ranks, by ``gather_for_metrics``; empty if ranks may differ in steps.
        length: of the loader, None if it has none.
        saved: at the end of the log.
    """

    real: list[list[int]]
    gathered: list[int]
    length: int | None
    saved: SavedLoader | None = None

    @property
    def samples(self) -> list[int]:
        """All real samples of this rank."""
        return [sample for batch in self.real for sample in batch]


def prepare(case: LoaderCase) -> tuple[Any, Any]:
    from accelerate import Accelerator, DataLoaderConfiguration, ParallelismConfig, PartialState

    config = DataLoaderConfiguration(
        split_batches=case.split,
        dispatch_batches=case.dispatch,
        even_batches=case.even,
        use_seedable_sampler=case.seedable,
        data_seed=3 if case.seedable else None,
        use_stateful_dataloader=case.stateful,
    )
    mesh = None
    if case.alike > 1:
        copies = PartialState(cpu=True).num_processes // case.alike
        mesh = ParallelismConfig(dp_replicate_size=copies, tp_size=case.alike)
    accelerator = Accelerator(dataloader_config=config, parallelism_config=mesh, cpu=True)
    return accelerator, accelerator.prepare(case.loader())


def log_epoch(
    accelerator: Any, case: LoaderCase, loader: Any, batches: Any, stop: int | None = None
) -> EpochLog:
    """Iterate ``batches``, the loader or a twin of it; save after ``stop`` batches."""
    log = EpochLog([], [], length_of(batches))
    if stop != 0:
        for batch in batches:
            rows = torch.as_tensor(batch)
            log.real.append(rows.reshape(-1)[: loader.real].tolist())
            if case.even:
                log.gathered += accelerator.gather_for_metrics(rows).reshape(-1).tolist()
            if len(log.real) == stop:
                log.saved = SavedLoader.of(loader)
                break
    log.saved = log.saved or SavedLoader.of(loader)
    return log


def length_of(batches: Any) -> int | None:
    try:
        return len(batches)
    except TypeError:  # a stream, or parts of batches of unknown size
        return None


Outcome = list[EpochLog] | str


def run_case(case: LoaderCase, stop: int | None, saved: list[SavedLoader] | None, reseed: bool) -> Outcome:
    """Run two epochs, or one until ``stop``, or the rest after ``saved`` and another; or say the refusal."""
    from accelerate.core.errors import AccelerateError
    from accelerate.utils import set_seed

    set_seed(7 if saved is None else 8)
    try:
        accelerator, loader = prepare(case)
        first = loader
        if saved is not None:
            loader.load_position(json.loads(saved[0].position))
            if not reseed:
                saved[accelerator.process_index].restore_generators()
            if not case.stateful:
                first = accelerator.skip_first_batches(loader, None)
        logs = [log_epoch(accelerator, case, loader, first, stop)]
        if stop is None:
            logs.append(log_epoch(accelerator, case, loader, loader))
        return logs
    except AccelerateError as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def run_cases(
    jobs: list[tuple[LoaderCase, int | None, list[SavedLoader] | None, bool]],
) -> list[Outcome]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [run_case(*job) for job in jobs]


def is_refused(outcomes: list[Outcome]) -> bool:
    """Return whether a case was refused, for a known reason and on all ranks alike."""
    if not any(isinstance(outcome, str) for outcome in outcomes):
        return False
    reasons = ("samples cannot be split over", "type int cannot be split over")
    assert all(isinstance(outcome, str) and any(r in outcome for r in reasons) for outcome in outcomes), (
        outcomes
    )
    return True


def samples_of(case: LoaderCase, logs: list[EpochLog]) -> list[int]:
    """Return the real samples of all ranks, of ranks that read the same once."""
    return [sample for log in logs[:: case.alike] for sample in log.samples]


def check_epoch(case: LoaderCase, logs: list[EpochLog]) -> None:
    """Every sample counts once: by ``real``, by ``gather_for_metrics``, in order, and ``len`` is exact."""
    world = len(logs)
    samples, count = samples_of(case, logs), case.complete_samples(world)
    assert len(set(samples)) == len(samples) == count, f"{case}: {samples} of {count}"
    assert all(log.gathered == logs[0].gathered for log in logs), case
    if case.even:
        gathered = logs[0].gathered
        assert sorted(gathered) == sorted(samples), f"{case}: gathered {gathered} of {samples}"
        if case.workers < 2 and (case.data != "map" or case.order in ("sequential", "changing batches")):
            assert gathered == sorted(gathered), f"{case}: {gathered}"
    if case.data == "map" or case.workers < 2:  # torch estimates it for the streams of several workers
        lengths = [(log.length, len(log.real)) for log in logs if log.length is not None]
        assert all(length == batches for length, batches in lengths), f"{case}: {lengths}"


def check_counts(cases: list[LoaderCase], results: list[list[Outcome]]) -> list[str]:
    """Check the two epochs of every case; return what was refused."""
    refused: list[str] = []
    for case, outcomes in zip(cases, zip(*results, strict=True), strict=True):
        if is_refused(list(outcomes)):
            refused.append(str(outcomes[0]))
            continue
        for epoch in range(2):
            check_epoch(case, [logs[epoch] for logs in outcomes])  # type: ignore[misc]
    return refused


@st.composite
def worlds_of_cases(draw: st.DrawFn) -> tuple[int, list[LoaderCase]]:
    world = draw(st.integers(1, 4))
    return world, draw(st.lists(loader_cases(world), min_size=6, max_size=6))


@pytest.mark.timeout(7200 if LONG_RUN else 120)
@hypothesis_settings(3, in_long_run=150, shrink=False)
@given(worlds_of_cases())
def test_any_loader_gives_each_sample_once(ranks: RankServer, drawn: tuple[int, list[LoaderCase]]) -> None:
    """C1, A10, A14: on 1 to 4 processes, in two epochs."""
    world, cases = drawn
    check_counts(cases, ranks(world, run_cases, [(case, None, None, False) for case in cases], timeout=120))


@pytest.mark.parametrize("torchdata", [False, True])
def test_a_loader_of_fewer_samples_than_steps_gives_each_once(ranks: RankServer, torchdata: bool) -> None:
    """A10: the batch sampler of torchdata is a class of its own; ``len`` is 0 on ranks without a batch."""
    given = [LoaderCase(count=count, batch=4, torchdata=torchdata) for count in (1, 5, 9)]
    cases = [
        replace(case, order=order, drop=drop, even=even, split=split, stateful=stateful)
        for case in given
        for order in ("sequential", "shuffled", "user's sampler")
        for drop, even in ((False, True), (False, False), (True, False))
        for split in (False, True)
        for stateful in (False, True)
    ]
    if not LONG_RUN:
        cases = cases[torchdata::5]  # any two options meet in all ways
    jobs = [(case, None, None, False) for case in cases]
    assert check_counts(cases, ranks(4, run_cases, jobs, timeout=120)) == []


@pytest.mark.parametrize("dispatch", [True, False])
def test_a_loader_of_nothing_gives_nothing(ranks: RankServer, dispatch: bool) -> None:
    """An empty sampler is false: asked whether it is true, it was not seen, and rank 0 waited for ever."""
    cases = [
        LoaderCase(data, 0, batch, order, torchdata=torchdata, even=even, dispatch=dispatch)
        for data, order in (("map", "sequential"), ("map", "user's sampler"), ("sized stream", "sequential"))
        for batch in (None, 2)
        for torchdata in (False, True)
        for even in (True, False)
    ]
    assert check_counts(cases, ranks(2, run_cases, [(case, None, None, False) for case in cases])) == []


@dataclass(frozen=True)
class ResumeCase:
    """A loader that is saved after ``stop`` batches, and the loader that resumes it."""

    before: LoaderCase
    after: LoaderCase
    stop: int


@st.composite
def resume_cases(draw: st.DrawFn, worlds: tuple[int, int]) -> ResumeCase:
    """The same loader, or other workers, options and batches over the same data and order."""
    before, stop = draw(loader_cases(worlds[0])), draw(st.integers(0, 6))
    after = replace(before, stateful=draw(st.booleans()))
    if worlds[0] != worlds[1] or draw(st.booleans()):
        other = draw(loader_cases(worlds[1]))
        batch = other.batch if None not in (before.batch, other.batch) else before.batch
        workers = (other.workers, other.persistent)
        after = replace(after, batch=batch, workers=workers[0], persistent=workers[1])
        after = replace(after, alike=other.alike, dispatch=other.dispatch, split=other.split)
        if after.order == "changing batches":
            after = replace(after, batch=2)
    return ResumeCase(before, after, stop)


@st.composite
def worlds_of_resumes(draw: st.DrawFn) -> tuple[tuple[int, int], list[ResumeCase]]:
    worlds = draw(
        st.sampled_from(((1, 1), (2, 2), (2, 2), (3, 3), (4, 4), (1, 2), (2, 1), (2, 3), (3, 4), (4, 2)))
    )
    return worlds, draw(st.lists(resume_cases(worlds), min_size=4, max_size=4))


def check_resume(case: ResumeCase, runs: list[list[Outcome]]) -> str:
    """Check one resume of a case; return whether it was ``"equal"``, ``"complete"`` or ``"refused"``.

    Args:
        case: the loaders.
        runs: of each rank: two whole epochs, the part until the save, the rest with the next epoch.
    """
    whole, begun, rest = runs
    if any(map(is_refused, runs)):
        return "refused"
    before: Any = [logs[0] for logs in begun]
    after: Any = [logs[0] for logs in rest]
    following: Any = [logs[1] for logs in rest]
    batches = len(whole[0][0].real)  # type: ignore[union-attr]
    is_over = case.stop >= batches
    if case.stop > batches or (is_over and case.after.stateful):  # an epoch that has ended is not resumed
        after, following = [], after
    seen, left = samples_of(case.before, before), samples_of(case.after, after)
    text = f"{case}: {[log.real for log in before]}, then {[log.real for log in after]}"
    check_epoch(case.after, following)
    if replace(case.before, stateful=False) == replace(case.after, stateful=False) and len(whole) == len(
        rest
    ):
        for rank, (one, two) in enumerate(zip(whole, following, strict=True)):
            assert one[1].real == two.real, f"{text}, epoch 2 {two.real} and not {one[1].real}"  # type: ignore
            part = after[rank].real if after else []
            assert one[0].real[case.stop :] == part, f"{text} and not {one[0].real}"  # type: ignore
        return "equal"
    assert len(set(seen + left)) == len(seen + left), f"repeated: {text}"
    lost = case.before.count - len(seen + left)
    tails = 2 * case.after.step(len(rest)) * max(1, case.before.workers)  # one where the epoch was cut
    assert lost == 0 or (case.before.drop and (is_over or lost < tails)), f"lost {lost}: {text}"
    return "complete"


@pytest.mark.timeout(7200 if LONG_RUN else 120)
@hypothesis_settings(3, in_long_run=150, shrink=False)
@given(worlds_of_resumes())
def test_any_loader_resumes_in_any_other(
    ranks: RankServer, drawn: tuple[tuple[int, int], list[ResumeCase]]
) -> None:
    """A1 to A5, G9: the rest of the epoch, equal where nothing changed; other workers, worlds, options."""
    (before, after), cases = drawn
    resume(ranks, before, after, cases)


def resume(ranks: RankServer, before: int, after: int, cases: list[ResumeCase]) -> list[str]:
    """Run every case in two parts, in new processes, and check it; return what ``check_resume`` does."""
    jobs = [(case.before, stop, None, False) for case in cases for stop in (None, case.stop)]
    first = ranks(before, run_cases, jobs, timeout=120)
    wholes, begun = ([list(found) for found in zip(*(r[k::2] for r in first), strict=True)] for k in (0, 1))
    saved = [None if isinstance(logs[0], str) else [log[0].saved for log in logs] for logs in begun]  # type: ignore
    jobs = [(case.after, None, s, before != after) for case, s in zip(cases, saved, strict=True)]
    rests = [list(found) for found in zip(*ranks(after, run_cases, jobs, timeout=120), strict=True)]
    found = zip(cases, wholes, begun, rests, strict=True)
    return [check_resume(case, [whole, begin, rest]) for case, whole, begin, rest in found]


def test_a_loader_of_torchdata_resumes_with_other_workers(ranks: RankServer) -> None:
    """G9: torchdata's own loader draws another order with workers than without."""
    alone = LoaderCase(order="own generator", torchdata=True, stateful=True)
    cases = [replace(alone, workers=workers) for workers in (0, 2)]
    assert (
        resume(ranks, 1, 1, [ResumeCase(*cases, stop=1), ResumeCase(*cases[::-1], stop=2)])
        == ["complete"] * 2
    )


@pytest.mark.parametrize("order", ["shuffled", "own generator", "random sampler"])
def test_a_loader_of_torchdata_resumes_in_another_way(ranks: RankServer, order: str) -> None:
    """G9: on more processes, dispatched, in other batches; with workers it opens its sampler twice."""
    case = LoaderCase(order=order, torchdata=True)
    options = [{"workers": workers, "stateful": stateful} for workers in (0, 2) for stateful in (True, False)]
    saved = [replace(case, **option) for option in options]
    cases = [
        ResumeCase(before, replace(case, dispatch=dispatch), 1)
        for before in saved
        for dispatch in (None, True)
    ]
    cut = [ResumeCase(before, replace(case, batch=3), 1) for before in saved]
    if not LONG_RUN and order != "own generator":  # every second one, others for each order
        cases, cut = cases[order == "shuffled" :: 2], cut[order != "shuffled" :: 2]
    assert set(resume(ranks, 1, 2, cases)) == {"complete"}
    assert set(resume(ranks, 1, 1, cut)) == {"complete"}


def test_a_loader_of_torchdata_resumes_on_fewer_processes(ranks: RankServer) -> None:
    """G9: its shard is opened after the draw for workers, on one process the sampler is before it."""
    case = LoaderCase(count=18, order="own generator", torchdata=True)
    cases = [
        ResumeCase(before, replace(case, dispatch=dispatch), 2)
        for before in (case, replace(case, workers=2), replace(case, batch=None))
        for dispatch in (None, True)
    ]
    cases[-2:] = [replace(each, after=replace(each.after, batch=None)) for each in cases[-2:]]
    fewer = [cases, cases] if LONG_RUN else [[cases[i] for i in part] for part in ((0, 3, 4), (1, 2, 5))]
    assert set(resume(ranks, 2, 1, fewer[0])) == {"complete"}
    assert set(resume(ranks, 3, 2, fewer[1])) == {"complete"}
    cut = [
        ResumeCase(replace(case, split=split), replace(case, split=not split), 2) for split in (False, True)
    ]
    assert resume(ranks, 2, 2, cut) == ["complete"] * 2


def test_a_sampler_that_draws_for_each_sample_resumes_in_other_batches(ranks: RankServer) -> None:
    """A4: also on fewer processes, and dispatched."""
    lazy = LoaderCase(count=18, order="user's sampler")
    cases = [
        ResumeCase(replace(lazy, batch=b), replace(lazy, batch=c), 3) for b, c in ((1, 6), (1, 2), (2, 1))
    ]
    cases += [replace(case, after=replace(case.after, dispatch=True)) for case in cases]
    assert resume(ranks, 2, 1, cases) == ["complete"] * 6
    assert resume(ranks, 1, 2, cases) == ["complete"] * 6
