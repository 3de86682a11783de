"""Loaders that rank 0 reads for all: what may travel, and how a loop ends when something goes wrong."""

from __future__ import annotations

import contextlib
import gc
import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset

from accelerate.core.errors import CollectiveError, PrepareError, SettingError
from tests.support.command import launch
from tests.support.ranks import RankServer, same_on_all
from tests.support.watchdog import record_early_hints


class Stream(IterableDataset[Any]):
    """Gives the items of a list, and notes in which process it is read."""

    def __init__(self, items: Any, fails_at: int | None = None) -> None:
        self.items, self.fails_at = items, fails_at
        self.reads = 0

    def __iter__(self) -> Iterator[Any]:
        for place, item in enumerate(self.items):
            if place == self.fails_at:
                raise ValueError(f"sample {place} is broken")
            self.reads += 1
            yield item


def accelerator_of(**options: Any) -> Any:
    from accelerate import Accelerator, DataLoaderConfiguration

    return Accelerator(dataloader_config=DataLoaderConfiguration(**options))


def collate(samples: list[Any]) -> list[Any]:
    return samples


# --- what may travel


class Pair(NamedTuple):
    ids: torch.Tensor
    names: list[str]


@dataclass
class Example:
    x: torch.Tensor
    note: str | None


def anything() -> list[Any]:
    grad = torch.ones(2, requires_grad=True)
    shared = torch.arange(3)
    return [
        {"ids": torch.arange(5), "mask": torch.ones(5, dtype=torch.bool), "text": "five"},
        Pair(torch.rand(2, 3, generator=torch.Generator().manual_seed(0)), ["a", "b"]),
        [Example(torch.tensor(1.5, dtype=torch.bfloat16), None), Example(torch.empty(0, 4), "empty")],
        (1, 2.5, None, "text", b"bytes", {"set", "of"}, 1j, range(3)),
        {"complex": torch.tensor([1 + 2j]), "int8": torch.tensor([-1], dtype=torch.int8)},
        [shared, shared, grad, torch.arange(12).view(3, 4).T, torch.ones(1).expand(4)],
        torch.zeros(300_000),
        torch.ones(100).to_sparse(),
        [],
        "last",
    ]


def traveled() -> list[Any]:
    accelerator = accelerator_of()
    loader = accelerator.prepare(DataLoader(Stream(anything()), batch_size=1, collate_fn=collate))
    found = [batch[0] for batch in loader]
    if accelerator.process_index == 1:
        tied, other, grad = found[2][:3]
        assert tied is other, "what was one object is one"
        assert grad.requires_grad
    return [type(loader).__name__, loader.dataset.reads, found]


def equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        dense = [t.to_dense() if t.is_sparse else t for t in (one, two)]
        return one.dtype == two.dtype and one.layout == two.layout and torch.equal(*dense)
    if isinstance(one, dict):
        return type(one) is type(two) and all(equal(one[key], two[key]) for key in one | two)
    if isinstance(one, list | tuple):
        return type(one) is type(two) and len(one) == len(two) and all(map(equal, one, two))
    if isinstance(one, Example):
        return one.note == two.note and equal(one.x, two.x)
    return bool(one == two)


def test_batches_of_any_kind_travel(ranks: RankServer) -> None:
    """A9: variable lengths, texts, nested lists, any picklable object; only rank 0 reads."""
    first, second = ranks(2, traveled)
    assert first[0] == second[0] == "DataLoaderDispatcher"
    assert (first[1], second[1]) == (len(anything()), 0)
    given = [item for pair in zip(first[2], second[2], strict=True) for item in pair]
    assert all(equal(one, two) for one, two in zip(given, anything(), strict=True)), given


def default_collated() -> list[Any]:
    """The same with settings as they are, and samples that do not fit together in one tensor."""
    accelerator = accelerator_of()
    samples = [{"ids": torch.arange(length), "words": ["w"] * length} for length in (3, 1, 5, 2, 4)]
    loader = accelerator.prepare(DataLoader(Stream(samples), batch_size=1))
    return [[batch["ids"].shape[-1], len(batch["words"])] for batch in loader]


def test_variable_lengths_work_with_default_settings(ranks: RankServer) -> None:
    assert ranks(2, default_collated) == [[[3, 3], [5, 5], [4, 4]], [[1, 1], [2, 2], [3, 3]]]


def kept_one() -> list[int]:
    """Bytes of memory behind the tensors of a batch that came from rank 0."""
    accelerator = accelerator_of()
    sizes = {"big": 50_000, "part": 20_000, "small": 1}
    samples = [{name: torch.zeros(size) for name, size in sizes.items()} for _ in range(2)]
    loader = accelerator.prepare(DataLoader(Stream(samples), batch_size=1))
    (batch,) = list(loader)
    return [tensor.untyped_storage().nbytes() for tensor in batch.values()]


def test_keeping_a_small_tensor_does_not_keep_the_batch(ranks: RankServer) -> None:
    big, part, small = ranks(2, kept_one)[1]
    assert big == part, "the message, which is pinned where that helps, is not copied"
    assert small <= 64


def data_pipe(workers: int) -> list[list[int]]:
    """Two epochs of a data pipe that shuffles, and shares its samples among workers."""
    from torch.utils.data.datapipes.iter import IterableWrapper

    accelerator = accelerator_of()
    torch.manual_seed(5)
    pipe = IterableWrapper(list(range(14))).shuffle(buffer_size=20).sharding_filter()
    options = {"batch_size": 2, "shuffle": True, "num_workers": workers, "persistent_workers": workers > 0}
    loaders = [accelerator.prepare(DataLoader(pipe, **options)) for _ in range(2)]
    return [
        [row for batch in loader for row in accelerator.gather_for_metrics(batch).tolist()]
        for loader in [loaders[0], *loaders]
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_pipe_is_shuffled_and_read_once(ranks: RankServer, workers: int) -> None:
    first, second, third = same_on_all(ranks(2, data_pipe, workers))
    assert sorted(first) == sorted(second) == sorted(third) == list(range(14))
    assert first != second
    assert first != sorted(first)


def stream_that_counts(prepare_again: bool) -> list[list[int]]:
    """Two passes over a stream whose attribute counts the reads of rank 0, through two loaders."""
    accelerator, stream = accelerator_of(), Stream(range(8))
    loader = accelerator.prepare(DataLoader(stream, batch_size=1))
    if prepare_again:
        first, second = loader, accelerator.prepare(DataLoader(stream, batch_size=2))
    else:
        first, second = accelerator.skip_first_batches(loader, 2), loader
    return [[row for batch in each for row in accelerator.gather(batch).tolist()] for each in (first, second)]


@pytest.mark.parametrize("prepare_again", [False, True], ids=["resumed", "prepared again"])
def test_a_stream_that_counts_its_reads_is_read_again(ranks: RankServer, prepare_again: bool) -> None:
    first, second = same_on_all(ranks(2, stream_that_counts, prepare_again))
    assert (first, second) == ([*range(0 if prepare_again else 4, 8)], [*range(8)])


def loader_of_another(kind: str, by_hand: bool) -> tuple[bool, bool, list[int]]:
    from accelerate.data_loader import prepare_data_loader

    user = DataLoader(Stream(range(6)) if kind == "stream" else list(range(6)), batch_size=1)
    first = accelerator_of()
    loader = prepare_data_loader(user, dispatch_batches=kind == "stream") if by_hand else first.prepare(user)
    accelerator = accelerator_of()
    again = accelerator.prepare(loader)
    rows: list[int] = []
    for batch in again:
        is_active = accelerator.gradient_state.active_dataloader is again
        rows += accelerator.gather_for_metrics(batch).tolist()
    return again is loader, is_active, rows


@pytest.mark.parametrize("by_hand", [False, True], ids=["by an Accelerator", "by the function"])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_loader_that_is_prepared_counts_for_a_second_accelerator(
    ranks: RankServer, kind: str, by_hand: bool
) -> None:
    """It is not sharded or dispatched once more."""
    assert same_on_all(ranks(2, loader_of_another, kind, by_hand)) == (True, True, [*range(6)])


# --- how a loop ends


def failing(at: int, workers: int, style: str) -> list[Any]:
    accelerator = accelerator_of(dispatch_batches=True)
    data: Any = Stream(range(12), fails_at=at) if style == "stream" else Broken(at)
    loader = accelerator.prepare(DataLoader(data, batch_size=2, num_workers=workers))
    taken: list[int] = []
    with pytest.raises(ValueError, match="is broken") as caught:
        taken.extend(row for batch in loader for row in batch.tolist())
    cause = caught.value.__cause__
    again = accelerator.prepare(DataLoader(TensorDataset(torch.arange(4)), batch_size=2))
    rest = [row for (batch,) in again for row in batch.tolist()]
    return [taken, type(cause).__name__, str(cause), rest]


class Broken(Dataset[int]):
    def __init__(self, at: int) -> None:
        self.at = at

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == self.at:
            raise ValueError(f"sample {index} is broken")
        return index


@pytest.mark.parametrize(
    ("at", "workers", "style"), [(0, 0, "stream"), (9, 0, "stream"), (9, 1, "stream"), (5, 0, "map")]
)
def test_an_error_of_the_data_is_raised_on_every_rank(
    ranks: RankServer, at: int, workers: int, style: str
) -> None:
    """Rank 0's error, by its class and text, with its traceback; and the next loop works."""
    first, second = ranks(2, failing, at, workers, style)
    assert second[1] == "PeerError"
    assert "rank 0 failed to read" in second[2]
    assert "Traceback" in second[2]
    assert (first[3], second[3]) == ([0, 1], [2, 3])


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("this cannot be pickled")


def unsendable() -> str:
    accelerator = accelerator_of()
    loader = accelerator.prepare(
        DataLoader(Stream([Unpicklable(), Unpicklable()]), batch_size=1, collate_fn=collate)
    )
    with pytest.raises(PrepareError) as caught:
        list(loader)
    return caught.value.what


def test_what_cannot_be_pickled_is_said_on_every_rank(ranks: RankServer) -> None:
    assert (
        same_on_all(ranks(2, unsendable))
        == "a batch cannot be sent to other processes: this cannot be pickled"
    )


def broken_off() -> list[Any]:
    """Loops that are left in many places, nested and repeated; what is in flight never mixes.

    Most batches of the inner loop are too large for the buffer after the one before: two messages each.
    """
    accelerator = accelerator_of()
    before = {thread.name for thread in threading.enumerate()}
    growing = [
        torch.full((int(50_000 * 1.5 ** min(step, 9)),), 100 + step, dtype=torch.uint8) for step in range(30)
    ]
    outer, inner = accelerator.prepare(
        DataLoader(Stream(torch.arange(20)), batch_size=2),
        DataLoader(Stream(growing), batch_size=1),
    )
    found: list[Any] = []
    for stop in (0, 1, 2, 4, 9):
        rows: list[int] = []
        for step, batch in enumerate(outer):
            rows += batch.tolist()
            for place, item in enumerate(inner):
                rows += item[:, 0].tolist()
                if place == step % 3:
                    break
            if step == stop:
                break
        found.append(rows)
    held = iter(outer)
    found.append([next(held).tolist(), [batch.tolist() for batch in outer][-1], next(held).tolist()])
    return [found, sorted({thread.name for thread in threading.enumerate()} - before)]


def test_loops_may_be_left_nested_and_held_open(ranks: RankServer) -> None:
    (first, threads), (second, _) = ranks(2, broken_off)
    inner = {0: [0], 1: [0, 2], 2: [0, 2, 4]}
    for rank, found in enumerate((first, second)):
        for stop, rows in zip((0, 1, 2, 4, 4), found, strict=False):
            expected: list[int] = []
            for step in range(stop + 1):
                expected += [4 * step + 2 * rank, 4 * step + 2 * rank + 1]
                expected += [100 + place + rank for place in inner[step % 3]]
            assert rows == expected
        assert found[5] == [
            [2 * rank, 2 * rank + 1],
            [16 + 2 * rank, 17 + 2 * rank],
            [4 + 2 * rank, 5 + 2 * rank],
        ]
    assert threads == [], "no thread of ours is left"


def left_often() -> list[int]:
    """Return the number of messages that are kept after many loops."""
    accelerator = accelerator_of()
    loader = accelerator.prepare(DataLoader(Stream(range(40)), batch_size=1))
    for _ in range(50):
        next(iter(loader))
    whole = sum(1 for _ in loader)
    return [whole, sum(type(each).__name__ == "_PendingTransfer" for each in gc.get_objects())]


def test_loops_that_are_left_keep_no_messages(ranks: RankServer) -> None:
    for whole, kept in ranks(3, left_often):
        assert whole == 14
        assert kept <= 12


def slow_read() -> list[str]:
    """Return the hints of a loop in which rank 0 reads for a while."""
    hints = record_early_hints()
    accelerator = accelerator_of()

    def items() -> Iterator[int]:
        yield from range(8)
        time.sleep(2)
        yield from range(8)

    assert sum(1 for _ in accelerator.prepare(DataLoader(Stream(items()), batch_size=1))) == 8
    return hints


def test_ranks_that_wait_for_a_batch_say_where_rank_0_is(ranks: RankServer) -> None:
    first, second = ranks(2, slow_read)
    assert not first
    assert " in a transfer of a batch from rank 0 at test_dispatch.py:" in second[0]
    assert ": rank 0 is at test_dispatch.py:" in second[0]
    assert "time.sleep(2)" in second[0], "its stack"


def left_by_rank_0() -> str:
    accelerator = accelerator_of()
    loader = accelerator.prepare(DataLoader(Stream(range(40)), batch_size=1))
    steps = 0
    try:
        for _ in loader:
            steps += 1
            if accelerator.process_index == 0 and steps == 3:
                break
    except CollectiveError as error:
        return error.what
    return f"left after {steps}"


def test_a_rank_that_goes_on_alone_is_told(ranks: RankServer) -> None:
    first, second = ranks(2, left_by_rank_0)
    assert first == "left after 3"
    assert second.startswith("rank 0 left its loop over DataLoader(")


APART = """
import time
import accelerate.data.batch_channel
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

accelerate.data.batch_channel._DRAIN_TIMEOUT = 0.2
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
rows = [torch.full(({size},), float(row)) for row in range({rows})]
steps = 0
for batch in accelerator.prepare(DataLoader(rows, batch_size=1)):
    steps += 1
    if accelerator.process_index == {slow}:
        time.sleep({pause})
    if steps == {stop}:
        break
print(f"steps: {{steps}}\\n", end="", flush=True)
"""


@pytest.mark.parametrize(
    "loop",
    [
        {"size": 1, "rows": 40, "slow": 0, "pause": 0.7, "stop": 2},  # the main process leaves the loop last
        {"size": 3_000_000, "rows": 8, "slow": 1, "pause": 1.3, "stop": 0},  # what a socket does not hold
    ],
    ids=["left", "complete"],
)
def test_no_rank_ends_before_a_slower_one_has_its_batches(loop: dict[str, float]) -> None:
    """It gave up after 20 s: its interpreter aborted, or the other's batch could not be sent."""
    steps = loop["stop"] or loop["rows"] // 2
    code, stdout, stderr, _ = launch("--cpu", "--num_processes", "2", script_text=APART.format(**loop))
    assert (code, stdout.count(f"steps: {steps}")) == (0, 2), stderr
    assert "Traceback" not in stderr, stderr


def two_loaders_in_other_order() -> str:
    accelerator = accelerator_of()
    one, two = accelerator.prepare(
        DataLoader(Stream(range(8)), batch_size=1), DataLoader(Stream(range(8)), batch_size=2)
    )
    for loader in (one, two):
        loader.before_first_use = None  # that check would find it first
    mine = one if accelerator.process_index == 0 else two
    try:
        next(iter(mine))
    except CollectiveError as error:
        return error.what
    return "not seen"


def test_ranks_that_iterate_different_loaders_are_told(ranks: RankServer) -> None:
    first, second = ranks(2, two_loaders_in_other_order)
    assert first == "not seen"
    assert second.startswith("rank 0 iterates another loader than rank 1")


def dies(delay: float) -> str:
    import os

    accelerator = accelerator_of()
    loader = accelerator.prepare(DataLoader(Stream(range(40)), batch_size=1))
    try:
        for step, _ in enumerate(loader):
            if accelerator.process_index == 0 and step == 2:
                os._exit(3)
            time.sleep(0.05 if accelerator.process_index == 0 else delay)
    except CollectiveError as error:
        return error.what
    return "not seen"


@pytest.mark.parametrize("delay", [0.05, 0.8], ids=["while it waits", "before it asks"])
def test_nobody_waits_for_a_dead_rank_0(ranks: RankServer, delay: float) -> None:
    outcome = ranks.outcomes(2, dies, delay, timeout=50, grace=40)[1]
    assert outcome.status == "returned", str(outcome)
    assert "rank 0" in pickle.loads(outcome.value or b"")


def ends_inside() -> None:
    """The program ends in the middle of a loop, with batches under way."""
    accelerator = accelerator_of()
    loader = accelerator.prepare(DataLoader(Stream(torch.zeros(50, 1000)), batch_size=4, num_workers=1))
    iterator = iter(loader)
    next(iterator)
    globals()["kept"] = iterator


def test_a_program_may_end_in_the_middle(ranks: RankServer) -> None:
    assert [outcome.status for outcome in ranks.outcomes(2, ends_inside)] == ["returned"] * 2


# --- empty and short data


MODES = [
    {"dispatch_batches": False},
    {"dispatch_batches": True},
    {"dispatch_batches": True, "split_batches": True},
    {"dispatch_batches": False, "split_batches": True},
]


def shorter_than_the_world(options: dict[str, Any]) -> list[Any]:
    accelerator = accelerator_of(**options)
    found: list[Any] = []
    for count in (0, 1, 2):
        for data in (Stream(torch.arange(count)), TensorDataset(torch.arange(count))):
            loader = accelerator.prepare(DataLoader(data, batch_size=accelerator.num_processes))
            steps = [
                accelerator.gather_for_metrics(
                    batch if isinstance(batch, torch.Tensor) else batch[0]
                ).tolist()
                for batch in loader
            ]
            found.append(steps)
    return found


@pytest.mark.parametrize("options", MODES, ids=str)
def test_empty_data_and_data_shorter_than_the_world(ranks: RankServer, options: dict[str, Any]) -> None:
    """A14: no hang; an empty loader gives no batch, on every rank."""
    found = same_on_all(ranks(3, shorter_than_the_world, options))
    assert found == [[], [], [[0]], [[0]], [[0, 1]], [[0, 1]]]


class TensorBatches(BatchSampler):
    """Batches of indices that are tensors."""

    def __init__(self) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(7).split(3))

    def __len__(self) -> int:
        return 3


def dispatched_tensor_batches(options: dict[str, Any]) -> list[Any]:
    accelerator = accelerator_of(dispatch_batches=True, **options)
    loader = accelerator.prepare(DataLoader(range(7), batch_sampler=TensorBatches()))
    return [accelerator.gather_for_metrics(batch).tolist() for batch in loader]


@pytest.mark.parametrize("options", [{}, {"split_batches": True}], ids=str)
def test_batches_of_indices_may_be_tensors(ranks: RankServer, options: dict[str, Any]) -> None:
    """Also the last step, which is divided anew."""
    found = same_on_all(ranks(2, dispatched_tensor_batches, options))
    assert [index for step in found for index in step] == list(range(7))


def empty_on_one_rank() -> str:
    accelerator = accelerator_of(dispatch_batches=False)
    data = TensorDataset(torch.arange(4 * accelerator.process_index))
    loader = accelerator.prepare(DataLoader(data, batch_size=1))
    try:
        list(loader)
    except CollectiveError as error:
        return str(error)
    return ""


def test_data_that_is_empty_on_one_rank_is_told(ranks: RankServer) -> None:
    """A14: by the rank that comes later, since these data are read without any exchange."""
    (text,) = filter(None, ranks(2, empty_on_one_rank))
    assert "its length differs" in text
    assert "rank 0: 0" in text
    assert "rank 1: 4" in text
    assert "shard=False" in text


# --- cutting collated batches


class Whole(DataLoader[Any]):
    """A loader that changes the batches it gives, and has an attribute of its own."""

    mine = "mine"

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield {"x": batch, "names": [f"row {int(row)}" for row in batch], "extra": None, "scale": 2.0}


def cut(count: int, even: bool) -> list[Any]:
    accelerator = accelerator_of(dispatch_batches=True, split_batches=True, even_batches=even)
    loader = accelerator.prepare(Whole(Stream(torch.arange(count)), batch_size=4))
    return [[batch["x"].tolist(), batch["names"], batch["scale"], loader.real] for batch in loader]


def test_a_loader_that_makes_its_batches_itself_is_cut_by_rows(ranks: RankServer) -> None:
    first, second = ranks(2, cut, 7, True)
    assert [step[0] for step in first] == [[0, 1], [4, 5]]
    assert [step[0] for step in second] == [[2, 3], [6, 4]]
    assert second[1] == [[6, 4], ["row 6", "row 4"], 2.0, 1]
    first, second = ranks(2, cut, 7, False)
    assert [step[0] for step in second] == [[2, 3], [6]]


def sliced(split: bool) -> list[Any]:
    accelerator = accelerator_of(dispatch_batches=True, split_batches=split)
    calls: list[Any] = []

    def by_hand(batch: Any, part: slice, process_index: int, num_processes: int) -> Any:
        calls.append((part.start, part.stop, process_index, num_processes))
        return batch[part] * 10

    loader = accelerator.prepare_data_loader(
        DataLoader(Stream(torch.arange(9)), batch_size=2), slice_fn_for_dispatch=by_hand
    )
    return [[batch.tolist() for batch in loader], calls]


def test_the_users_slice_function_cuts(ranks: RankServer) -> None:
    (first, calls), (second, none) = ranks(2, sliced, False)
    assert first == [[0, 10], [40, 50], [80]]
    assert second == [[20, 30], [60, 70], [0]]
    assert calls[:2] == [(0, 2, 0, 2), (2, 4, 1, 2)]
    assert none == []
    (first, _), (second, _) = ranks(2, sliced, True)
    assert (first[0], second[0]) == ([0], [10])


def equals_rest_after_skip(kind: str) -> list[bool]:
    """Whether the last steps after a skip are those of the whole epoch, with its fillers."""
    accelerator = accelerator_of(dispatch_batches=True)

    def cut(batch: Any, part: slice, **ranks: int) -> Any:
        return batch[part]

    size, cutter = (None, None) if kind == "single items" else (1, cut)
    own = DataLoader(Stream(torch.arange(4, 11)), batch_size=size)
    loader = accelerator.prepare_data_loader(own, slice_fn_for_dispatch=cutter)
    whole = [batch.tolist() for batch in loader]
    rests = [list(accelerator.skip_first_batches(loader, count)) for count in (1, 2)]
    return [[batch.tolist() for batch in rest] == whole[-len(rest) :] for rest in rests]


@pytest.mark.parametrize("kind", ["single items", "a slice function"])
def test_fillers_come_from_the_begin_of_the_epoch_also_after_a_skip(ranks: RankServer, kind: str) -> None:
    assert ranks(3, equals_rest_after_skip, kind) == [[True, True]] * 3


def resumed_by_state(step: int) -> list[list[Any]]:
    """The epoch, the rest of it after a step by each rank's own state, and the next one."""
    from accelerate import Accelerator, DataLoaderConfiguration

    options = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(dataloader_config=options, rng_types=["torch"])

    def prepared() -> Any:
        return accelerator.prepare(DataLoader(Stream(torch.arange(12)), batch_size=3))

    loader, whole, state = prepared(), list[Any](), dict[str, Any]()
    for number, batch in enumerate(loader, 1):
        whole.append(batch.tolist())
        state = loader.state_dict() if number == step else state
    loader = prepared()
    loader.load_state_dict(state)
    rest = [batch.tolist() for batch in accelerator.skip_first_batches(loader, None)]
    return [whole, rest, [batch.tolist() for batch in loader]]


@pytest.mark.parametrize("step", [1, 2])
def test_ranks_that_receive_know_from_their_own_state_where_they_are(ranks: RankServer, step: int) -> None:
    """No rank waits for batches of a complete epoch, or synchronizes random numbers alone."""
    for whole, rest, later in ranks(2, resumed_by_state, step):
        assert (rest, later) == (whole[step:], whole)


class EmptyStream(Stream):
    """What ranks that read nothing hold: a dataset of another class."""


def rows_of_one_item(style: str) -> list[Any]:
    accelerator = accelerator_of(dispatch_batches=True, split_batches=True)
    items: Any = Stream(torch.arange(3)) if style == "stream" else range(3)
    if style == "stream" and not accelerator.is_main_process:
        items = EmptyStream([])
    own = DataLoader(items, batch_size=1, collate_fn=lambda group: torch.tensor([group[0], group[0] + 10]))
    return [batch.tolist() for batch in accelerator.prepare(own)]


@pytest.mark.parametrize("style", ["stream", "map"])
def test_one_item_may_be_the_batch_of_all_ranks(ranks: RankServer, style: str) -> None:
    """trl's AsyncGRPO: one item is read at a time, and its collate function makes a row for each."""
    first, second = ranks(2, rows_of_one_item, style)
    assert first == [[0], [1], [2]]
    assert second == [[10], [11], [12]]


class Odd:
    """A batch without a first dimension."""


def uncut(kind: str) -> str:
    batch = {
        "object": Odd(),
        "scalar": {"x": torch.ones(4), "total": torch.tensor(3.0)},
        "other": {"x": torch.ones(4), "mask": torch.ones(2, 4)},
        "list": {"x": torch.ones(4), "names": ["a", "b"]},
        "empty": torch.ones(0, 4),
        "empty indices": [],
    }[kind]
    accelerator = accelerator_of(dispatch_batches=True, split_batches=True)
    own = DataLoader(Stream([batch, batch]), batch_size=None)
    if kind == "empty indices":
        own = DataLoader(range(4), batch_sampler=[batch])  # type: ignore[arg-type]
    loader = accelerator.prepare(own)
    with pytest.raises(PrepareError) as caught:
        list(loader)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("object", "a batch of type Odd cannot be split"),
        ("scalar", "batch['total'] has shape ()"),
        ("other", "batch['mask'] has shape (2, 4)"),
        ("list", "batch['names'] has 2 items"),
        ("empty", "a batch without samples"),
        ("empty indices", "a batch without samples"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_told_on_every_rank(ranks: RankServer, kind: str, text: str) -> None:
    found = same_on_all(ranks(2, uncut, kind))
    assert text in found
    assert "slice_fn_for_dispatch" in found


# --- what stays the user's


class Epochs(BatchSampler):
    """Batches of changing size, by epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[self.epoch, 1, 2], [3], [4, 5], [6, 7, 8]])

    def __len__(self) -> int:
        return 4

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Mine(DataLoader[Any]):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.note = "mine"

    def hello(self) -> str:
        return self.note


def kept(dispatch: bool) -> list[Any]:
    accelerator = accelerator_of(dispatch_batches=dispatch)
    sampler = Epochs()
    user = Mine(TensorDataset(torch.arange(9)), batch_sampler=sampler)
    loader = accelerator.prepare(user)
    rows: list[Any] = []
    for epoch in (0, 7):
        loader.set_epoch(epoch)
        rows.append([accelerator.gather_for_metrics(batch).tolist() for (batch,) in loader])
    shown = loader.batch_sampler
    inner = getattr(shown, "batch_sampler", shown)
    same = loader.dataset is user.dataset and inner is sampler and loader.collate_fn is user.collate_fn
    return [rows, loader.note, loader.hello(), same, len(loader), isinstance(loader, DataLoader)]


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_the_users_loader_stays_what_it_is(ranks: RankServer, n: int, dispatch: bool) -> None:
    """A12: class, attributes, batch sampler with changing sizes, set_epoch."""
    rows, note, hello, same, length, loader = same_on_all(ranks(n, kept, dispatch))
    flat = [[row for step in epoch for row in step] for epoch in rows]
    assert flat == [[0, 1, 2, 3, 4, 5, 6, 7, 8], [7, 1, 2, 3, 4, 5, 6, 7, 8]]
    assert (note, hello, same, length, loader) == ("mine", "mine", True, 4 // n, True)


def shown() -> list[Any]:
    accelerator = accelerator_of()
    user = Mine(Stream(torch.arange(9)), batch_size=2)
    loader = accelerator.prepare(user)
    list(loader)
    return [
        loader.dataset is user.dataset,
        loader.collate_fn is user.collate_fn,
        loader.batch_size,
        loader.note,
        loader.total_batch_size,
    ]


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_stays_what_it_is(ranks: RankServer, n: int) -> None:
    assert same_on_all(ranks(n, shown)) == [True, True, 2, "mine", 2 * n]


def skipped() -> list[Any]:
    accelerator = accelerator_of(dispatch_batches=True)
    loaders = accelerator.prepare(
        DataLoader(Stream(torch.arange(9)), batch_size=2),
        DataLoader(TensorDataset(torch.arange(9)), batch_size=2),
    )
    rests = [accelerator.skip_first_batches(loader, 1) for loader in loaders]
    return [[(b if isinstance(b, torch.Tensor) else b[0]).tolist() for b in rest] for rest in rests]


def test_skipping_leaves_out_steps(ranks: RankServer) -> None:
    assert ranks(2, skipped) == [[[[4, 5], [8]]] * 2, [[[6, 7], [0]]] * 2]


def trained(dispatch: bool, style: str) -> list[float]:
    accelerator = accelerator_of(dispatch_batches=dispatch)
    torch.manual_seed(0)
    x = torch.randn(24, 3)
    data: Any = Stream(x) if style == "stream" else x
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    losses: list[float] = []
    for batch in loader:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


@pytest.mark.parametrize("style", ["stream", "map"])
def test_training_is_that_of_a_sharded_loader(ranks: RankServer, style: str) -> None:
    """Law 7 for data: who reads does not change the numbers."""
    assert ranks(2, trained, True, style) == ranks(2, trained, False, style)


def contradicting() -> str:
    accelerator = accelerator_of(dispatch_batches=True, shard=False)
    with pytest.raises(SettingError) as caught:
        accelerator.prepare(DataLoader(Stream([1]), batch_size=1))
    with contextlib.suppress(PrepareError):
        accelerator_of(split_batches=True, dispatch_batches=True).prepare(
            DataLoader(Stream([1]), batch_size=3)
        )
        raise AssertionError("an odd batch was split")
    return caught.value.what


def under_default_device(device: str | None, folder: str) -> list[Any]:
    """Orders, batches, sums and random numbers of a program that has set a default device."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    rows: Any = TensorDataset(torch.arange(10.0).view(10, 1))
    layer, batch = nn.Linear(1, 1), torch.ones(2)
    seen: list[Any] = []
    torch.set_default_device(device)
    try:
        for options in {}, {"use_seedable_sampler": True}, {"dispatch_batches": True}:
            set_seed(3)
            accelerator = accelerator_of(**options)
            for loader in (
                DataLoader(rows, batch_size=2, shuffle=True),
                DataLoader(rows, shuffle=True, generator=torch.Generator().manual_seed(4)),
                DataLoader(rows, sampler=torch.utils.data.RandomSampler(rows, replacement=True)),
            ):
                batches = accelerator.prepare(loader)
                for _ in range(2):
                    seen.extend(value.flatten().tolist() for x in batches for value in x)
        accelerator = Accelerator()
        model, _ = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
        accelerator.backward(model(batch[:, None]).sum())
        for options in {}, {"sharded": True}, {"safe_serialization": False}, {"async_save": True}:
            accelerator.save_state(f"{folder}/{device}", **options)
            drawn = torch.rand(2, device="cpu").tolist()
            accelerator.load_state(f"{folder}/{device}")
            assert torch.rand(2, device="cpu").tolist() == drawn
            seen.append(drawn)
        seen += [accelerator.reduce(batch, kind).tolist() for kind in ("sum", "mean")]
        seen.append(accelerator.gather(batch).tolist())
    finally:
        torch.set_default_device(None)
    return seen


def test_a_default_device_of_torch_does_not_count(ranks: RankServer, tmp_path: Path) -> None:
    """Orders, buffers and random numbers are made on the host, where they are read."""
    expected = ranks(2, under_default_device, None, str(tmp_path))
    assert ranks(2, under_default_device, "meta", str(tmp_path)) == expected


def test_options_that_contradict_each_other_are_refused(ranks: RankServer) -> None:
    text = "shard=False and dispatch_batches=True contradict each other"
    assert same_on_all(ranks(2, contradicting)) == text
