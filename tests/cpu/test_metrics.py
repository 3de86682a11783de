"""gather_for_metrics: every sample once, in dataset order, whatever the data and the batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    get_worker_info,
)

from accelerate.data_loader import BatchSamplerShard, DataLoaderStateMixin
from tests.support.long_run import LONG_RUN
from tests.support.ranks import RanksError, RankServer, same_on_all


class Map(Dataset[Any]):
    """Samples 0, 1, ... of a kind."""

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self.count, self.make = count, make

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Unsized(IterableDataset[Any]):
    """The same as a stream; workers share it by chunks, so that their order is known."""

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self.count, self.make = count, make

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        own = range(self.count) if worker is None else range(worker.id, self.count, worker.num_workers)
        return map(self.make, own)


class Sized(Unsized):
    """The same with a length."""

    def __len__(self) -> int:
        return self.count


def number(index: int) -> torch.Tensor:
    return torch.tensor([index, 10 * index])


def text(index: int) -> str:
    return f"sample {index}"


def nested(index: int) -> dict[str, Any]:
    return {"id": text(index), "pair": (torch.tensor(index), {"x": torch.tensor([float(index)])})}


def ragged(index: int) -> list[str]:
    return ["a"] * (index % 4) + [str(index)]


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def expected(make: Callable[[int], Any], count: int) -> Any:
    if make is number:
        return torch.stack([number(i) for i in range(count)])
    if make is nested:
        pair = [torch.arange(count), {"x": torch.arange(float(count))[:, None]}]
        return {"id": [text(i) for i in range(count)], "pair": pair}
    return [make(i) for i in range(count)]


def equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(two) and len(one) == len(two) and all(map(equal, one, two))
    return bool(one == two)


def joined(parts: list[Any]) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts)
    if isinstance(first, dict):
        return {key: joined([part[key] for part in parts]) for key in first}
    if isinstance(first, list) and any(isinstance(item, torch.Tensor) for item in first):
        return [joined([part[i] for part in parts]) for i in range(len(first))]
    return [row for part in parts for row in part]


@dataclass(frozen=True)
class Case:
    data: type[Any]
    make: Callable[[int], Any]
    count: int
    batch: int
    workers: int = 0
    even: bool = True
    drop: bool = False

    def loader(self, split: int) -> DataLoader[Any]:
        collate = as_list if self.make is ragged else None
        return DataLoader(
            self.data(self.count, self.make),
            batch_size=self.batch * split,
            num_workers=self.workers,
            drop_last=self.drop,
            collate_fn=collate,
        )


def gathered(case: Case, **options: Any) -> list[Any]:
    from accelerate import Accelerator, DataLoaderConfiguration

    config = DataLoaderConfiguration(even_batches=case.even, **options)
    accelerator = Accelerator(dataloader_config=config)
    split = accelerator.num_processes if options.get("split_batches") else 1
    loader = accelerator.prepare(case.loader(split))
    return [accelerator.gather_for_metrics(batch) for batch in loader]


MODES = {
    "sharded": {"dispatch_batches": False},
    "split": {"dispatch_batches": False, "split_batches": True},
    "dispatched": {"dispatch_batches": True},
    "dispatched, split": {"dispatch_batches": True, "split_batches": True},
}


def wrong(cases: list[Case], options: dict[str, Any]) -> list[str]:
    """The cases whose samples did not come once each and in order."""
    found: list[str] = []
    for case in cases:
        parts = gathered(case, **options)
        if not equal(joined(parts), expected(case.make, case.count)):
            found.append(f"{case}: {parts}")
    return found


GRID = [
    Case(data, make, count, batch)
    for data in (Map, Sized, Unsized)
    for make in (number, text, nested, ragged)
    for count in (1, 3, 5, 9, 16)
    for batch in (1, 4, 5)
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_sample_counts_once_and_in_order(ranks: RankServer, n: int, mode: str) -> None:
    """C1: tensors, texts, nested and ragged samples; map-style, streams with and without a length."""
    cases = GRID[n::7]  # any two values meet in all ways
    if LONG_RUN:
        cases = GRID if n == 2 else GRID[:: n + 1]
    assert same_on_all(ranks(n, wrong, cases, MODES[mode], timeout=120)) == []


WITH_WORKERS = [
    Case(data, number, count, batch, workers=2)
    for data in (Map, Sized, Unsized)
    for count, batch in ((1, 2), (9, 2), (10, 1))
]


def with_workers(cases: list[Case], options: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for case in cases:
        rows = torch.cat(gathered(case, **options))[:, 0].tolist()
        # Two workers read a stream by turns: its order is theirs.
        if sorted(rows) != list(range(case.count)) or (case.data is Map and rows != sorted(rows)):
            found.append(f"{case}: {rows}")
    return found


@pytest.mark.parametrize("mode", MODES)
def test_every_sample_counts_once_with_workers(ranks: RankServer, mode: str) -> None:
    """A10 and C1: workers end at different times, and each fills a step of its own."""
    cases = WITH_WORKERS if LONG_RUN else WITH_WORKERS[list(MODES).index(mode) % 2 :: 2]
    assert same_on_all(ranks(2, with_workers, cases, MODES[mode], timeout=120)) == []


def uneven() -> list[str]:
    """Ragged steps: without even_batches each rank has what there is, and as many steps."""
    from accelerate import Accelerator, DataLoaderConfiguration

    cases = [Case(Map, make, 7, 4, even=False) for make in (number, text)]
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    batches = accelerator.prepare(DataLoader(Map(14, number), batch_size=4))
    # As many rows as a full batch has samples, and no fillers.
    masks = [len(accelerator.gather_for_metrics(torch.ones(4, 2))) for _ in batches]
    different = [] if masks == [8, 8] else [f"{masks} masks"]
    return wrong(cases, {}) + wrong(cases, {"dispatch_batches": True}) + different


def test_rows_of_different_number_are_gathered(ranks: RankServer) -> None:
    assert same_on_all(ranks(2, uneven)) == []


def dropped(options: dict[str, Any]) -> list[list[int]]:
    cases = [Case(data, number, 11, 2, drop=True) for data in (Map, Sized, Unsized)]
    return [torch.cat(gathered(case, **options))[:, 0].tolist() for case in cases]


@pytest.mark.parametrize("mode", MODES)
def test_dropping_the_last_step_drops_it_for_all(ranks: RankServer, mode: str) -> None:
    assert same_on_all(ranks(2, dropped, MODES[mode])) == [list(range(8))] * 3


def loops() -> list[Any]:
    """A training loop with an evaluation inside each window, one broken early, and two loaders by turns."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    train, first, second = accelerator.prepare(
        DataLoader(Map(7, number), batch_size=2),
        DataLoader(Map(5, number), batch_size=2),
        DataLoader(Unsized(3, number), batch_size=2),
    )
    found: list[Any] = []

    def take(batch: torch.Tensor) -> list[int]:
        return accelerator.gather_for_metrics(batch)[:, 0].tolist()

    trained: list[int] = []
    pattern = ""
    for batch in train:
        with accelerator.accumulate():
            pattern += "T" if accelerator.sync_gradients else "F"
            found.append([row for inner in first for row in take(inner)])
            for inner in first:
                found.append(take(inner))
                break
            trained += take(batch)
    by_turns: list[int] = []
    for one, two in zip(first, second, strict=False):
        by_turns += take(two)
        del one
    return [found, trained, pattern, by_turns]


def test_nested_and_interrupted_loops_do_not_disturb_each_other(ranks: RankServer) -> None:
    """B4 and C1: what counts is the loader of the innermost loop."""
    found, trained, pattern, by_turns = same_on_all(ranks(2, loops))
    assert found == [list(range(5)), list(range(4))] * 2
    assert (trained, pattern) == (list(range(7)), "FT")
    assert by_turns == [0, 1, 2]


def objects() -> list[Any]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Map(5, number), batch_size=4))
    found: list[Any] = []
    for batch in loader:
        rows = batch[:, 0].tolist()
        found.append(
            [
                accelerator.gather_for_metrics(
                    [{"id": row, "boxes": torch.ones(row, 4)} for row in rows], True
                ),
                accelerator.gather_for_metrics({"a": [str(r) for r in rows], "b": batch, "c": rows}),
                accelerator.gather_for_metrics((batch, [str(r) for r in rows])),
                accelerator.gather_for_metrics(batch.float().mean()).shape,
                accelerator.gather_for_metrics(tuple(str(r) for r in rows)),
                accelerator.gather_for_metrics([[row] * row for row in rows]),
            ]
        )
    return found


def test_objects_dicts_and_tuples_keep_their_structure(ranks: RankServer) -> None:
    """C1 (nested lists, dicts of different lengths) and C6: one process gives the same types as two."""
    (alone,) = ranks(1, objects)
    (both,) = same_on_all(ranks(2, objects))
    assert (
        [row["id"] for step in alone for row in step[0]] == [row["id"] for row in both[0]] == list(range(5))
    )
    assert [tuple(row["boxes"].shape) for row in both[0]] == [(i, 4) for i in range(5)]
    assert both[1]["a"] == [str(i) for i in range(5)]
    assert both[1]["b"][:, 0].tolist() == both[1]["c"] == list(range(5))
    assert both[2][0].shape == (5, 2)
    assert both[2][1] == both[4] == [str(i) for i in range(5)]
    assert both[5] == [[i] * i for i in range(5)]
    assert both[3] == (2,)
    for step in alone:
        assert type(step.pop(4)) is tuple  # as in 1.15
        assert [type(item) for item in step] == [type(item) for item in (*both[:4], both[5])]


class TrainStats(NamedTuple):
    loss: float
    steps: int


@pytest.mark.parametrize("by_object", [False, True])
def test_an_object_of_one_process_that_is_no_list_comes_back_as_it_is(by_object: bool) -> None:
    """As in 1.15, whose last batch cuts texts and named tuples: a script logs the loss that it gathers."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    values: list[Any] = [3.5, "abc", b"ab", None, {1, 2}, (1.0, 2), (), range(3), iter("a"), np.float32(1)]
    values += [TrainStats(1.5, 2), OptionalOutput, np.array(1.5), (torch.ones(()), "a")]
    shown: Any = {"loss": 1.5, "text": "abc", "names": ["a", "b"], "stats": TrainStats(1.5, 2)}
    for _ in accelerator.prepare(DataLoader(Map(3, torch.tensor), batch_size=2)):
        for value in values:
            assert accelerator.gather_for_metrics(value, by_object) is value
        assert accelerator.gather_for_metrics(shown, by_object) == shown
        output = accelerator.gather_for_metrics(OptionalOutput(torch.ones(2), text="abc"), by_object)
        assert output.text == "abc"


def values_of_batches() -> list[list[float]]:
    """The means of the batches of the last step, as scalars and as single rows, for lengths of the data."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    last: list[list[float]] = []
    for count, batch_size in ((10, 4), (16, 4), (17, 4), (13, 4), (10, 1), (11, 1)):
        last.append([])
        for batch in accelerator.prepare(DataLoader(Map(count, torch.tensor), batch_size)):
            mean = batch.float().mean()
            last[-1] = accelerator.gather_for_metrics(mean).tolist()
            assert accelerator.gather_for_metrics(mean[None]).tolist() == last[-1]
    return last


def test_a_value_of_each_batch_counts_for_as_many_ranks_as_samples_are_left(ranks: RankServer) -> None:
    """Programs stack them over steps, and add them up to divide by: the numbers are those of 1.15."""
    assert same_on_all(ranks(3, values_of_batches)) == [
        [1.5, 5.5, 4.5],
        [13.5, 1.5, 5.5],
        [13.5, 4.75, 4.5],
        [3.75],
        [9.0],
        [9.0, 10.0],
    ]


def items(kind: str) -> list[int]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    batches = [torch.arange(3), torch.arange(3, 5), torch.arange(5, 9)]
    data = {"map": batches, "stream": Unsized(3, batches.__getitem__)}[kind]
    loader = accelerator.prepare(DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return [row for batch in loader for row in accelerator.gather_for_metrics(batch).tolist()]


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_batches_that_the_data_makes_itself_count_once(ranks: RankServer, kind: str) -> None:
    """A12, ``batch_size=None``: an item may be a whole batch of any size."""
    assert same_on_all(ranks(2, items, kind)) == list(range(9))


def test_a_loss_repeated_for_a_full_batch_counts_for_the_samples_of_a_shorter_one() -> None:
    """transformers' Trainer repeats the loss of each step by the batch size, and takes the mean."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    for data in (Map(11, torch.tensor), Unsized(11, torch.tensor)):
        loader = accelerator.prepare(DataLoader(data, batch_size=4))
        for by_object in (False, True):
            rows = [accelerator.gather_for_metrics(torch.ones(()).repeat(4), by_object) for _ in loader]
            assert [row.shape for row in rows] == [(4,), (4,), (3,)]
    outputs: Any = torch.ones(4), (torch.ones(4, 2), None)
    assert accelerator.gather_for_metrics(outputs, True) is outputs
    assert accelerator.gather_for_metrics({"a": outputs[0]}, True)["a"] is outputs[0]
    assert accelerator.gather_for_metrics([*outputs[0]], True) == [1.0] * 4  # an object per sample


def gather_padded() -> list[int]:
    """Samples of outputs that are padded to a full batch; the ranks read unequally many of the last one."""
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    rows: list[int] = []
    for batch in accelerator.prepare(DataLoader(Map(13, torch.tensor), batch_size=4)):
        padded = torch.cat([batch, batch.new_full((4 - len(batch),), -1)])
        rows += accelerator.gather_for_metrics(padded).tolist()
    return rows


def test_an_output_padded_to_a_full_batch_counts_once_on_ranks_without_fillers(ranks: RankServer) -> None:
    assert same_on_all(ranks(2, gather_padded)) == list(range(13))


def test_all_rows_of_a_shorter_batch_without_fillers_count() -> None:
    """As many masks of one image as a full batch has images are no padding."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    masks, names = torch.ones(4, 2), ["mask"] * 4
    for _ in accelerator.prepare(DataLoader(Map(11, torch.tensor), batch_size=4)):
        assert torch.equal(accelerator.gather_for_metrics(masks), masks)
        assert accelerator.gather_for_metrics(names) == names


def test_several_rows_of_a_sample_count_in_a_shorter_batch_too() -> None:
    """As many rows as a full batch has samples are no repeated loss where earlier steps had such rows."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Map(5, torch.tensor), batch_size=2))
    rows = [accelerator.gather_for_metrics(batch.repeat_interleave(2)).tolist() for batch in loader]
    assert rows == [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4]]


@pytest.mark.parametrize("loss_first", [True, False])
def test_a_repeated_loss_counts_for_the_samples_beside_several_rows_of_each(loss_first: bool) -> None:
    """Both have as many rows in a shorter batch: which is which, the steps before tell by their order."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    losses: list[float] = []
    rows: list[int] = []
    for batch in accelerator.prepare(DataLoader(Map(5, torch.tensor), batch_size=2)):
        if not loss_first:
            rows += accelerator.gather_for_metrics(batch.repeat_interleave(2)).tolist()
        losses += accelerator.gather_for_metrics(batch.float().mean().repeat(2)).tolist()
        if loss_first:
            rows += accelerator.gather_for_metrics(batch.repeat_interleave(2)).tolist()
    assert losses == [0.5, 0.5, 2.5, 2.5, 4.0]
    assert rows == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def rows_of_one_step(n: int, dispatch: bool) -> tuple[list[float], list[float]]:
    """The outputs of the only step of an epoch, two rows of each sample, and a repeated loss."""
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    rows: list[float] = []
    losses: list[float] = []
    for batch in accelerator.prepare(DataLoader(Map(n, torch.tensor), batch_size=2)):
        output = (batch[:, None] + torch.arange(2) / 10).flatten()
        rows += accelerator.gather_for_metrics(output).tolist()
        losses += accelerator.gather_for_metrics(torch.ones(()).repeat(2)).tolist()
    return rows, losses


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("count", "dispatch"), [(1, False), (3, False), (3, True)])
def test_several_rows_of_a_sample_count_in_a_short_epoch(
    ranks: RankServer, count: int, dispatch: bool, n: int
) -> None:
    """They are as many as a full batch has samples, and no earlier step tells; a repeated loss is one."""
    rows, losses = same_on_all(ranks(count, rows_of_one_step, n, dispatch))
    assert rows == pytest.approx([sample + part for sample in range(n) for part in (0, 0.1)])
    assert losses == [1.0] * n


def repeated_losses(dispatch: bool) -> list[list[float]]:
    """The losses of the steps of 9 samples, repeated for 4, of which each of two ranks computes 2."""
    from accelerate import Accelerator, DataLoaderConfiguration

    options = DataLoaderConfiguration(dispatch_batches=dispatch, split_batches=True)
    loader = Accelerator(dataloader_config=options).prepare(DataLoader(Map(9, torch.tensor), batch_size=4))
    gather = Accelerator().gather_for_metrics
    return [gather(torch.tensor(float(step)).repeat(4)).tolist() for step, _ in enumerate(loader)]


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_repeated_loss_of_split_batches_counts_for_the_samples(ranks: RankServer, dispatch: bool) -> None:
    """Trainer of transformers repeats it by the batch size of the loader: twice for each sample."""
    losses = same_on_all(ranks(2, repeated_losses, dispatch))
    assert losses == [[0.0] * 8, [1.0] * 8, [2.0] * 2]


def gather_by_another() -> list[list[int]]:
    from accelerate import Accelerator

    loader = Accelerator().prepare(DataLoader(Map(7, torch.tensor), batch_size=2))
    other = Accelerator()
    return [other.gather_for_metrics(batch).tolist() for batch in loader]


def test_a_function_with_an_accelerator_of_its_own_counts_samples_once(ranks: RankServer) -> None:
    assert [row for rows in same_on_all(ranks(2, gather_by_another)) for row in rows] == list(range(7))


def several_rows(every: int, copies: Callable[[int], int], per_sample: str) -> list[list[int]]:
    """Gather the outputs of ``every`` steps, with ``copies`` rows of each sample: as tensor, as objects."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Map(13, torch.tensor), batch_size=2))
    found: list[list[int]] = [[], []]
    kept: list[torch.Tensor] = []
    for step, batch in enumerate(loader, 1):
        counts = [copies(sample) for sample in batch.tolist()]
        kept.append(batch.repeat_interleave(torch.tensor(counts)))
        if step % every == 0 or step == len(loader):
            given: Any = {"unknown": None, "list": counts, "tensor": torch.tensor(counts)}.get(per_sample, 1)
            found[0] += accelerator.gather_for_metrics(torch.cat(kept), rows_per_sample=given).tolist()
            objects = torch.cat(kept).tolist()
            found[1] += accelerator.gather_for_metrics(objects, True, rows_per_sample=given)
            kept = []
    return found


def thrice(sample: int) -> int:
    return 3


def once(sample: int) -> int:
    return 1


def ragged_rows(sample: int) -> int:
    return sample % 3


@pytest.mark.parametrize(
    ("every", "copies", "per_sample"),
    [
        (1, thrice, "unknown"),
        (2, once, "unknown"),
        (3, once, "1"),
        (1, ragged_rows, "list"),
        (1, ragged_rows, "tensor"),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_several_rows_of_a_sample_and_rows_of_several_steps_count_once(
    ranks: RankServer, n: int, every: int, copies: Callable[[int], int], per_sample: str
) -> None:
    """G3: generated sequences, a buffer of steps, boxes; 13 samples do not fill four steps of 2 x 2."""
    whole = [sample for sample in range(13) for _ in range(copies(sample))]
    for found in same_on_all(ranks(n, several_rows, every, copies, per_sample)):
        assert sorted(found) == whole


OUTPUTS: dict[str, tuple[Callable[[list[torch.Tensor]], Any], Any]] = {
    "rows of several steps, or several rows of each sample": (lambda kept: torch.cat(kept), None),
    "the batch may be the second dimension": (lambda kept: kept[-1].T.repeat(3, 1), None),
    "5 is no multiple of 3": (lambda kept: kept[-1].repeat(2, 1)[:5], None),
    "4 is no multiple of 3": (lambda kept: [*"abcd"], None),
    "3 rows are not 2 for each sample": (lambda kept: kept[-1], 2),
    "rows_per_sample has 2 numbers with the sum 3": (lambda kept: kept[-1], [1, 2]),
}


def unknown_rows(reason: str) -> torch.Size:
    """Gather an output whose rows may not be those of samples, at the end of an epoch of two steps."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Map(7, number), batch_size=3))
    make, per_sample = OUTPUTS[reason]
    kept: list[torch.Tensor] = []
    means: list[torch.Tensor] = []
    for batch in loader:
        kept.append(batch)
        means.append(
            accelerator.gather_for_metrics(batch.float().mean()[None])
        )  # of a batch, not of a sample
    for _ in loader:
        if loader.end_of_dataloader and accelerator.process_index == 1:
            accelerator.gather_for_metrics(make(kept), rows_per_sample=per_sample)
    return torch.cat(means).shape


@pytest.mark.parametrize("reason", OUTPUTS)
def test_rows_of_no_known_samples_are_refused(ranks: RankServer, reason: str) -> None:
    """G3: the error says what to pass; nothing is cut at a guess."""
    with pytest.raises(RanksError) as found:
        ranks(2, unknown_rows, reason)
    assert found.value.causing_kinds() == {"PrepareError"}
    assert reason in str(found.value)
    assert "pass rows_per_sample" in str(found.value)


def real_of_the_original(kind: str) -> list[list[int]]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    if kind == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader

        batches = loader = accelerator.prepare(StatefulDataLoader(Map(9, torch.tensor), batch_size=2))
    else:
        loader = accelerator.prepare(DataLoader(Map(9, torch.tensor), batch_size=2))
        batches = accelerator.skip_first_batches(loader, 1)
    return [batch[: loader.real].tolist() for batch in batches]


def test_every_loader_tells_which_rows_are_real(ranks: RankServer) -> None:
    """One with its own iteration; and the original, where a twin of it is iterated."""
    assert ranks(2, real_of_the_original, "torchdata") == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], []]]
    assert ranks(2, real_of_the_original, "twin") == [[[4, 5], [8]], [[6, 7], []]]


def items_of_a_stream() -> list[list[int]]:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    batches = [torch.arange(3), torch.arange(3, 5), torch.arange(5, 9), torch.arange(9, 11)]
    found: list[list[int]] = []
    for items in (batches, [torch.tensor(sample) for sample in range(10)]):
        stream = Unsized(len(items), items.__getitem__)
        loader = accelerator.prepare(DataLoader(stream, batch_size=None))
        found.append([row for item in loader for row in accelerator.gather_for_metrics(item).tolist()])
    return found


@pytest.mark.parametrize("n", [2, 3])
def test_items_of_a_stream_that_every_rank_reads_count_once(ranks: RankServer, n: int) -> None:
    """G3: whole batches, and single samples, from a stream that is not collated."""
    assert same_on_all(ranks(n, items_of_a_stream)) == [list(range(11)), list(range(10))]


# ---------------------------------------------------------------- kinds of outputs


@dataclass
class OptionalOutput:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None
    text: str = ""


def kinds_of_outputs() -> list[Any]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Map(5, number), batch_size=2))
    found: list[Any] = []
    for batch in loader:  # the last step has a filler
        plain = accelerator.gather_for_metrics(OptionalOutput(batch[:, 0]))
        with_text = accelerator.gather_for_metrics(OptionalOutput(batch[:, 0], batch[:, 1], "a"))
        array = accelerator.gather_for_metrics(batch.numpy())
        found = [
            (type(plain).__name__, plain.logits.tolist(), plain.hidden),
            (with_text.logits.tolist(), with_text.hidden.tolist(), with_text.text),
            (type(array).__name__, array.tolist()),
        ]
    return found


def test_dataclasses_with_none_and_arrays_lose_their_fillers(ranks: RankServer) -> None:
    (alone,) = ranks(1, kinds_of_outputs)
    both = same_on_all(ranks(2, kinds_of_outputs))
    assert alone[0] == both[0] == ("OptionalOutput", [4], None)
    assert alone[1][:2] == both[1][:2] == ([4], [40])
    assert alone[2] == both[2] == ("ndarray", [[4, 40]])


# ---------------------------------------------------------------- a loader inside of its own epoch


def evaluate_on_the_training_data(leave: bool) -> list[Any]:
    """Passes over the training loader in the middle of its epoch, and looks at its first batch before it."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    loader = accelerator.prepare(DataLoader(Map(21, number), batch_size=1))
    peek = iter(loader)  # alive, and never read again
    next(peek)
    pattern, ends, rows = "", 0, list[int]()
    for place, batch in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch.float()).mean())
            pattern += "FT"[accelerator.sync_gradients]
        if place in (2, 10) or (place == 3 and not leave):
            inner = zip(loader, range(3 if leave else 99), strict=False)
            ends += sum(accelerator.gradient_state.end_of_dataloader for _ in inner)
            del inner  # the pass is over
        rows += accelerator.gather_for_metrics(batch[:, 0]).tolist()
    return [pattern, ends, rows, accelerator.gradient_state.in_dataloader, loader.iteration]


@pytest.mark.parametrize("leave", [False, True])
def test_a_pass_over_the_loader_inside_of_its_epoch_changes_nothing_of_it(
    ranks: RankServer, leave: bool
) -> None:
    """B4: the last batch of the inner pass is not that of the epoch around it, nor are its fillers."""
    pattern, ends, rows, is_inside, epochs = same_on_all(ranks(2, evaluate_on_the_training_data, leave))
    assert pattern == "FTFTFTFTFTT"
    assert ends == (0 if leave else 3)
    assert rows == list(range(21))
    assert not is_inside
    assert epochs == (1 if leave else 4)


def own_iteration(kind: str, count: int) -> list[Any]:
    """Gather under a ``BatchSamplerShard.__iter__`` of the program's own; rank, batches, gathered, order."""
    from accelerate import Accelerator
    from accelerate.data_loader import BatchSamplerShard

    sharding = BatchSamplerShard.__iter__
    replaced: Any = {
        "whole": lambda shard: iter(shard.batch_sampler),
        "traced": lambda shard: (batch for batch in sharding(shard)),
    }[kind]
    lengths: dict[str, Any] = {}
    if kind == "whole":
        lengths["__len__"] = lambda shard: len(shard.batch_sampler)
    with mock.patch.multiple(BatchSamplerShard, __iter__=replaced, **lengths):
        accelerator = Accelerator()
        torch.manual_seed(accelerator.process_index)  # the order of a random sampler is rank 0's
        data = TensorDataset(torch.arange(count))
        plain = accelerator.prepare(DataLoader(data, batch_size=3))
        batches = [rows.tolist() for (rows,) in plain]
        gathered = [accelerator.gather_for_metrics(rows).tolist() for (rows,) in plain]
        rest = [rows.tolist() for (rows,) in accelerator.skip_first_batches(plain, 1)]
        shuffled = accelerator.prepare(DataLoader(data, batch_size=3, shuffle=True))
        order = [row for (rows,) in shuffled for row in rows.tolist()]
    return [batches, gathered, rest, order]


def test_a_program_that_replaces_the_sharding_gets_what_its_own_iteration_yields(ranks: RankServer) -> None:
    """VILA and its relatives do so: their samplers give each process its part already."""
    first, second = ranks(2, own_iteration, "whole", 8)
    assert first == second
    batches, gathered, rest, order = first
    assert batches == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert gathered == [[0, 1, 2] * 2, [3, 4, 5] * 2, [6, 7] * 2]
    assert rest == batches[1:]
    assert sorted(order) == list(range(8))


def test_fillers_are_dropped_where_a_program_looks_on_at_the_sharding(ranks: RankServer) -> None:
    first, second = ranks(2, own_iteration, "traced", 7)
    assert first[0] == [[0, 1, 2], [6, 0, 1]]
    assert second[0] == [[3, 4, 5], [2, 3, 4]]
    assert first[1] == second[1] == [[0, 1, 2, 3, 4, 5], [6]]
    assert first[2] == [[6, 0, 1]]
    assert set(first[3] + second[3]) == set(range(7))


def own_gather(count: int) -> list[Any]:
    from accelerate import Accelerator

    accelerator: Any = Accelerator()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(count)), batch_size=2))
    gather, calls = accelerator.gather, []

    def first_rank_only(data: Any) -> Any:
        calls.append(data)
        return {name: rows[: len(rows) // 2] for name, rows in gather(data).items()}

    accelerator.gather = first_rank_only
    kept = [accelerator.gather_for_metrics({"rows": rows})["rows"].tolist() for (rows,) in loader]
    names = [accelerator.gather_for_metrics([f"{row}" for row in rows.tolist()]) for (rows,) in loader]
    return [kept, names, len(calls)]


def test_gather_for_metrics_calls_a_gather_that_a_program_has_put_in_place(ranks: RankServer) -> None:
    """As in 1.15: some keep the rows of one process of each tensor parallel group. Objects go past it."""
    kept, names, calls = same_on_all(ranks(2, own_gather, 7))
    assert kept == [[0, 1], [4, 5]]
    assert names == [["0", "1", "2", "3"], ["4", "5", "6"]]
    assert calls == 2


class OwnLoop(DataLoaderStateMixin):
    """A loader of a program, over one that is sharded."""

    def __init__(self, loader: Any, total_batch_size: int) -> None:
        self.loader, self.dataset, self._drop_last = loader, loader.dataset, False
        self.total_batch_size = total_batch_size

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        for index, batch in enumerate(self.loader, 1):
            self.end_of_dataloader = index == len(self.loader)
            yield batch
        self.end()


def texts_of_own_loop(by_object: bool) -> list[Any]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    sampler = BatchSamplerShard(
        BatchSampler(SequentialSampler(range(5)), 2, False), 2, accelerator.process_index
    )
    loader = DataLoader(Map(5, torch.tensor), batch_sampler=sampler)
    seen = []
    for batch in OwnLoop(loader, total_batch_size=4):
        texts, rows = [f"{row}" for row in batch.tolist()], batch.numpy()
        gathered: Any = accelerator.gather_for_metrics({"texts": texts, "rows": rows}, by_object)
        alone = accelerator.gather_for_metrics(texts, by_object)
        seen.append([alone, gathered["texts"], len(gathered["rows"])])
    return seen


@pytest.mark.parametrize("by_object", [False, True])
def test_fillers_of_a_loader_of_a_program_are_no_objects(ranks: RankServer, by_object: bool) -> None:
    """It tells its remainder alone. Objects counted twice, unless they were gathered as such."""
    whole = ["0", "1", "2", "3"]
    assert same_on_all(ranks(2, texts_of_own_loop, by_object)) == [[whole, whole, 4], [["4"], ["4"], 1]]


def own_loaders(n: int) -> list[Any]:
    """The batches and rows of loaders that a program makes itself: prepared by the function, and by hand."""
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderShard, prepare_data_loader

    accelerator, data = Accelerator(cpu=True), torch.arange(n)
    sharded = prepare_data_loader(DataLoader(data, batch_size=2))  # type: ignore[arg-type]
    by_hand = DataLoaderShard(data, batch_size=2)
    seen = [[accelerator.gather_for_metrics(rows).tolist() for rows in each] for each in (sharded, by_hand)]
    prepared = accelerator.prepare(DataLoaderShard(data, batch_size=2))
    return [*seen, [accelerator.gather_for_metrics(rows).tolist() for rows in prepared]]


def test_loaders_that_a_program_makes_itself_count_as_in_their_own_iteration(ranks: RankServer) -> None:
    """A ``DataLoaderShard`` made by hand is read whole by each process, and shared out by ``prepare``."""
    sharded, by_hand, prepared = same_on_all(ranks(2, own_loaders, 6))
    assert sharded == prepared == [[0, 1, 2, 3], [4, 5]]
    assert by_hand == [[0, 1, 0, 1], [2, 3, 2, 3], [4, 5, 4, 5]]
