"""The window loop on one process: real sizes, early ends, wrong uses, positions."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate import Accelerator
from accelerate.core.errors import PrepareError
from accelerate.data_loader import DataLoaderStateMixin, prepare_data_loader
from accelerate.utils import GradientAccumulationPlugin, find_executable_batch_size


class Stream(IterableDataset[torch.Tensor]):
    """Numbers from 0; it has no length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(float(self.count)))


def line(**options: Any) -> tuple[Accelerator, nn.Module, Any]:
    """A model y = w * x, whose gradient is the mean of the inputs of a window."""
    accelerator = Accelerator(**options)
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    return accelerator, model, optimizer


def numbers(count: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(float(count))), batch_size=1)


def value(batch: Any) -> torch.Tensor:
    return (batch[0] if isinstance(batch, list) else batch).view(-1, 1)


def walked(accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any, n: int) -> list[Any]:
    """Per window: the inputs, the flags inside, and the gradient."""
    found = []
    for window in accelerator.windows(loader, n):
        inputs, flags = [], ""
        for batch in window:
            accelerator.backward(model(value(batch)).sum())
            inputs.append(float(value(batch)))
            flags += "T" if accelerator.sync_gradients else "F"
            before = model.weight.grad.clone()  # type: ignore[union-attr]
            if not accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1e-9)
                optimizer.step()
                optimizer.zero_grad()
                assert torch.equal(before, model.weight.grad)  # type: ignore[arg-type]
        assert accelerator.sync_gradients
        found.append((inputs, flags, round(float(model.weight.grad), 5)))  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", ["map", "stream", "list", "skipped"])
def test_a_loss_is_divided_by_the_micro_batches_that_there_are(kind: str, steps: int) -> None:
    """B2: the last window of 5 in windows of 4 divides by 1; whatever gradient_accumulation_steps says."""
    accelerator, model, optimizer = line(gradient_accumulation_steps=steps)
    if kind == "list":
        loader: Any = list(torch.arange(5.0))
    elif kind == "skipped":
        loader = accelerator.skip_first_batches(accelerator.prepare(numbers(7)), 2)
    else:
        loader = accelerator.prepare(numbers(5) if kind == "map" else DataLoader(Stream(5), batch_size=1))
    first = 2.0 if kind == "skipped" else 0.0
    full, rest = [first + i for i in range(4)], [first + 4]
    expected = [(full, "FFFT", first + 1.5), (rest, "T", first + 4)]
    for _ in range(1 if kind == "skipped" else 2):
        assert walked(accelerator, model, optimizer, loader, 4) == expected
    if kind != "stream":
        assert len(accelerator.windows(loader, 4)) == 2


@pytest.mark.parametrize(("count", "n"), [(1, 4), (4, 4), (7, 4), (6, 3), (3, 1), (11, 8)])
def test_every_window_has_the_mean_of_its_own(count: int, n: int) -> None:
    accelerator, model, optimizer = line()
    loader = accelerator.prepare(numbers(count))
    found = walked(accelerator, model, optimizer, loader, n)
    assert [x for inputs, *_ in found for x in inputs] == list(map(float, range(count)))
    for inputs, flags, gradient in found:
        assert flags == "F" * (len(inputs) - 1) + "T"
        assert gradient == pytest.approx(sum(inputs) / len(inputs), abs=1e-5)


def test_no_number_given_takes_the_accumulation_steps() -> None:
    accelerator, *_ = line(gradient_accumulation_steps=3)
    assert [len(list(window)) for window in accelerator.windows(accelerator.prepare(numbers(7)))] == [3, 3, 1]


def test_nothing_is_read_ahead() -> None:
    """Between windows the loader stands where the last micro-batch was; its end is known in it."""
    accelerator, *_ = line()
    loader = accelerator.prepare(numbers(6))
    seen = []
    for window in accelerator.windows(loader, 3):
        for batch in window:
            gathered = accelerator.gather_for_metrics(batch[0])
            seen.append((int(gathered), accelerator.gradient_state.end_of_dataloader))
        assert accelerator.gradient_state.active_dataloader is loader
    assert seen == [(i, i == 5) for i in range(6)]
    assert accelerator.gradient_state.active_dataloader is None
    assert loader.iteration == 1


def test_a_loop_inside_a_window_changes_nothing() -> None:
    """B4: an evaluation in the middle of a window, whole and broken off."""
    accelerator, model, optimizer = line()
    loader, evaluation = accelerator.prepare(numbers(4), numbers(3))
    for window in accelerator.windows(loader, 4):
        for count, batch in enumerate(window):
            seen = []
            for other in evaluation:
                seen.append(int(accelerator.gather_for_metrics(other[0])))
                if count % 2:
                    break
            assert seen == ([0] if count % 2 else [0, 1, 2])
            accelerator.backward(model(value(batch)).sum())
            assert accelerator.sync_gradients == (count == 3)
        assert float(model.weight.grad) == 1.5  # type: ignore[arg-type]
        optimizer.step()


def test_a_pass_over_the_loader_before_a_window_is_begun_does_not_close_it() -> None:
    """An evaluation on the training data at step 0, as in nanoGPT, ends with the loader's last batch."""
    accelerator, model, optimizer = line()
    loader = accelerator.prepare(numbers(5))
    sizes = []
    for window in accelerator.windows(loader, 2):
        if not sizes:
            assert len(list(loader)) == 5
        sizes.append(sum(accelerator.backward(model(value(batch)).sum()) is None for batch in window))
        optimizer.zero_grad()
    assert sizes == [2, 2, 1]


def test_leaving_a_loop_after_a_whole_window_is_fine() -> None:
    accelerator, model, optimizer = line()
    loader = accelerator.prepare(numbers(9))
    for window in accelerator.windows(loader, 2):
        for count, batch in enumerate(window, 1):
            accelerator.backward(model(value(batch)).sum())
            if count == 2:
                break
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.gradient_state.end_of_dataloader:
            break
    assert len(walked(accelerator, model, optimizer, loader, 4)) == 3


def test_a_window_that_was_left_early_must_be_dropped() -> None:
    accelerator, model, optimizer = line(gradient_accumulation_steps=2)
    loader = accelerator.prepare(numbers(8))

    def leave() -> None:
        for window in accelerator.windows(loader, 4):
            for batch in window:
                accelerator.backward(model(value(batch) + 1).sum())
                break
            break

    leave()
    said = "a window that was left in micro-batch 1 of 4"
    for use in (optimizer.step, lambda: list(accelerator.windows(loader, 4)), lambda: enter(accelerator)):
        with pytest.raises(PrepareError, match=said) as error:
            use()
        assert "optimizer.zero_grad()" in error.value.fix
    optimizer.zero_grad()
    assert model.weight.grad is None
    assert walked(accelerator, model, optimizer, loader, 8) == [(list(map(float, range(8))), "FFFFFFFT", 3.5)]
    leave()
    accelerator.free_memory()
    model, optimizer, loader = accelerator.prepare(model, optimizer.optimizer, loader)
    model.zero_grad()
    accelerator.backward(model(torch.ones(1, 1)).sum(), num_items=1)
    optimizer.step()


def enter(accelerator: Accelerator) -> None:
    with accelerator.accumulate():
        pass


def test_an_exception_leaves_nothing_behind() -> None:
    accelerator, model, optimizer = line()
    loader = accelerator.prepare(numbers(4))

    def fail() -> None:
        for window in accelerator.windows(loader, 2):
            for batch in window:
                accelerator.backward(model(value(batch)).sum())
                raise KeyError("in the loop")

    with pytest.raises(KeyError):  # which keeps the traceback
        fail()
    assert accelerator.sync_gradients
    assert accelerator.gradient_state.active_dataloader is None
    optimizer.zero_grad()
    assert len(walked(accelerator, model, optimizer, loader, 2)) == 2


def test_two_loaders_may_take_turns() -> None:
    accelerator, model, optimizer = line()
    one, two = accelerator.prepare(numbers(4), numbers(6))
    found = []
    for windows in zip(accelerator.windows(one, 2), accelerator.windows(two, 3), strict=True):
        for window in windows:
            for batch in window:
                accelerator.backward(model(value(batch)).sum())
            found.append(float(model.weight.grad))  # type: ignore[arg-type]
            optimizer.step()
            optimizer.zero_grad()
    assert found == [0.5, 1.0, 2.5, 4.0]


def test_windows_of_two_accelerators_do_not_meet() -> None:
    outer, inner = line(), line()
    loaders = outer[0].prepare(numbers(2)), inner[0].prepare(numbers(3))
    for window in outer[0].windows(loaders[0], 2):
        for batch in window:
            assert [f for _, f, _ in walked(*inner, loaders[1], 2)] == ["FT", "T"]
            outer[0].backward(outer[1](value(batch)).sum())
        assert float(outer[1].weight.grad) == 0.5  # type: ignore[arg-type]


def wrong_uses() -> dict[str, Any]:
    def nested(a: Accelerator, loader: Any) -> None:
        for window in a.windows(loader, 2):
            for _ in window:
                for other in a.windows([torch.ones(1)], 1):
                    list(other)

    def twice(a: Accelerator, loader: Any) -> None:
        for window in a.windows(loader, 2):
            list(window)
            list(window)

    def inside(a: Accelerator, loader: Any) -> None:
        for window in a.windows(loader, 2):
            for _ in window:
                enter(a)

    def unread(a: Accelerator, loader: Any) -> None:
        list(a.windows(loader, 2))

    return {
        "inside another one": nested,
        "can be iterated once": twice,
        "accumulate() inside a window": inside,
        "was not iterated": unread,
        "a window of 0": lambda a, loader: a.windows(loader, 0),
        "a window of 2.0": lambda a, loader: a.windows(loader, 2.0),
        "end of a enumerate cannot be known": lambda a, loader: a.windows(enumerate(loader), 2),
        "said 3 batches and ended after 2": lambda a, loader: [list(w) for w in a.windows(Liar(), 4)],
    }


class Liar:
    """Says it has more batches than it gives."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(2))


@pytest.mark.parametrize("text", wrong_uses())
def test_a_wrong_use_is_said(text: str) -> None:
    accelerator, *_ = line()
    loader = accelerator.prepare(numbers(4))
    with pytest.raises(PrepareError) as error:
        wrong_uses()[text](accelerator, loader)
    assert text in str(error.value)


def test_weights_may_be_given_in_windows() -> None:
    """The divisor, which a program may show, is then not used."""
    accelerator, model, optimizer = line()
    loader = accelerator.prepare(numbers(5))
    found = []
    for window in accelerator.windows(loader, 3):
        for batch in window:
            assert window.divisor in (2, 3)
            accelerator.backward(model(value(batch)).sum(), num_items=value(batch).sum())
        found.append(float(model.weight.grad))  # type: ignore[arg-type]
        optimizer.step()
        optimizer.zero_grad()
    assert found == pytest.approx([(1 + 4) / 3, (9 + 16) / 7])


def test_weights_count_for_the_models_of_the_present_fold() -> None:
    accelerator = Accelerator(cpu=True)
    for _ in range(2):
        model = nn.Linear(1, 1, bias=False)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        accelerator.backward(model(torch.ones(100, 1)).mean(), num_items=100)
        assert model.weight.grad == 1.0
        gone = weakref.ref(model)
        del model, _
        accelerator.free_memory()
        assert gone() is None


@pytest.mark.parametrize("items", [None, 2])
def test_a_retry_with_a_smaller_batch_begins_with_what_the_accelerator_held(items: int | None) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(kept := nn.Linear(1, 1))
    handle = accelerator.register_load_state_pre_hook(print)
    models: list[weakref.ref[nn.Module]] = []

    @find_executable_batch_size(starting_batch_size=3)
    def train(batch_size: int) -> float:
        assert all(model() is None for model in models)
        assert accelerator._custom_objects == [kept]
        assert len(accelerator._load_model_state_pre_hook) > len(accelerator._save_model_state_pre_hook) == 0
        assert not accelerator.gradient_state.has_unweighted_grads
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loader, model, _ = accelerator.prepare(numbers(8), model, optimizer)
        models.append(weakref.ref(model))
        accelerator.register_for_checkpointing(nn.Linear(1, 1))
        accelerator.register_save_state_pre_hook(print)
        for window in accelerator.windows(loader, 4):
            for batch in window:
                accelerator.backward(model(value(batch)).mean(), num_items=items)
                if batch_size == 3:
                    raise MemoryError
            break
        return model.weight.grad.item()  # type: ignore[union-attr]

    assert train() == (0 + 1 + 2 + 3) / 4
    handle.remove()
    assert not accelerator._load_model_state_pre_hook


def test_each_micro_batch_may_synchronise() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    accelerator, model, optimizer = line(gradient_accumulation_plugin=plugin)
    loader = accelerator.prepare(numbers(4))
    assert [row[1:] for row in walked(accelerator, model, optimizer, loader, 4)] == [("FFFT", 1.5)]


# ---------------------------------------------------------------- saved in the middle

COUNT, STEPS, SAVED = 10, 4, (1, 3, 6, 9)


def windowed(how: str, folder: Path | None = None, begin: int = 0) -> list[float]:
    """Weights after each step of ten batches; saves after some, or resumes after ``begin``."""
    accumulates = {} if how == "by hand" else {"gradient_accumulation_steps": STEPS}
    accelerator = Accelerator(cpu=True, **accumulates)
    torch.manual_seed(0 if not begin else 1)
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    if begin:
        accelerator.load_state(str(folder))
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(float(begin), COUNT)), batch_size=1))
    number, weights = begin, []

    def train(batch: Any) -> None:
        nonlocal number
        number += 1
        items = {"num_items": number % 3} if "items" in how else {}
        accelerator.backward((model(value(batch)) - 1).square().mean(), **items)
        is_last = number % STEPS == 0 or number == COUNT
        if how != "by hand" or is_last:
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients if how != "by hand" else is_last:
            weights.append(model.weight.item())
        if folder is not None and not begin and number in SAVED:
            accelerator.save_state(f"{folder}-{number}")

    if "windows" in how:
        for window in accelerator.windows(loader, STEPS):
            for batch in window:
                train(batch)
        return weights
    for batch in loader:
        with accelerator.accumulate(model) if accumulates else nullcontext():
            train(batch)
    return weights


@pytest.mark.parametrize("how", ["accumulate", "accumulate, items", "windows", "windows, items", "by hand"])
def test_a_window_that_was_saved_open_goes_on(tmp_path: Path, how: str) -> None:
    """G2: to the bit, also in the shorter window at the end."""
    whole = windowed(how)
    assert windowed(how, tmp_path / "c") == whole
    assert len(whole) == 3
    for begin in SAVED:
        assert windowed(how, Path(f"{tmp_path}/c-{begin}"), begin) == whole[begin // STEPS :]


def test_a_loaded_checkpoint_ends_the_window_that_is_open(tmp_path: Path) -> None:
    """Its gradients are not those of the checkpoint."""
    accelerator, model, optimizer = line(gradient_accumulation_steps=2, cpu=True)
    accelerator.save_state(str(tmp_path / "c"))
    assert not list((tmp_path / "c").glob("open_gradients*"))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
    accelerator.load_state(str(tmp_path / "c"))
    assert model.weight.grad is None
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
    assert model.weight.grad.tolist() == [[0.5]]  # type: ignore[union-attr]


@pytest.mark.parametrize(("steps", "is_first", "gradient"), [(2, True, 0.5), (2, False, 0.0), (1, True, 1.0)])
def test_gradients_that_zero_grad_drops_in_an_open_window_are_told(
    steps: int, is_first: bool, gradient: float
) -> None:
    """Before the last backward of a window it drops those of the others, as in 1.x."""
    accelerator, model, optimizer = line(gradient_accumulation_steps=steps)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(4):
            with accelerator.accumulate(model):
                if is_first:
                    optimizer.zero_grad(set_to_none=False)
                accelerator.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                if not is_first:
                    optimizer.zero_grad(set_to_none=False)
    told = [str(w.message) for w in heard if "drops the gradients of the others, of 2" in str(w.message)]
    assert len(told) == (steps == 2 and is_first)
    assert model.weight.grad.tolist() == [[gradient]]  # type: ignore[union-attr]


@pytest.mark.parametrize("copied", ["accelerator", "loader", "optimizer"])
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_leaves_the_windows_as_they_were(how: Callable[[Any], Any], copied: str) -> None:
    """scikit-learn clones estimators that have an Accelerator; the last window was then never closed."""
    accelerator = Accelerator(gradient_accumulation_steps=3)
    optimizer, loader = accelerator.prepare(
        torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1),
        DataLoader(range(4), 1),  # type: ignore[arg-type]
    )
    objects = {"accelerator": accelerator, "loader": loader, "optimizer": optimizer}

    def closings(loader: Any) -> list[bool]:
        flags = []
        for _ in loader:
            with accelerator.accumulate():
                flags.append(accelerator.sync_gradients)
        return flags

    assert closings(loader) == [False, False, True, True]
    twin = how(objects[copied])
    assert closings(loader) == [False, False, True, True]
    if copied == "loader":
        assert closings(twin) == [False, False, True, True]
    assert twin is not objects[copied]
    for _ in loader:
        assert closings(how(loader)) == [False, False, True, True]
        how(accelerator)


def test_the_gradient_state_does_not_outlive_its_loader() -> None:
    """1.15 keeps a loader that a loop left early: it stays active, and is the one of the next loops."""
    accelerator, *_ = line()
    state, outer, inner = accelerator.gradient_state, *accelerator.prepare(numbers(5), numbers(3))

    def seen() -> tuple[Any, bool, int, bool]:
        return state.active_dataloader, state.in_dataloader, state.remainder, state.end_of_dataloader

    nothing = (None, False, -1, False)
    for _ in outer:
        for _ in inner:
            assert seen()[0] is inner
            break
        assert seen()[0] is outer
        break
    assert seen() == nothing
    batches = iter(outer)
    next(batches)
    assert seen()[:2] == (outer, True)
    del batches
    assert seen() == nothing
    gone = weakref.ref(outer)
    accelerator.free_memory()
    del outer, _
    gc.collect()
    assert gone() is None


def synced(accelerator: Accelerator, model: nn.Module, times: int = 1) -> list[bool]:
    """Whether each of so many micro-batches closes a window."""
    flags: list[bool] = []
    for _ in range(times):
        with accelerator.accumulate(model):
            flags.append(accelerator.sync_gradients)
    return flags


def test_a_shorter_last_batch_that_is_cut_closes_its_window() -> None:
    accelerator, model, _ = line(gradient_accumulation_steps=4)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.ones(40, 1)), batch_size=16))
    flags = [synced(accelerator, model, len(batch.split(4))) for (batch,) in loader]
    assert flags == [[False, False, False, True], [False, False, False, True], [False, True]]


def test_a_shorter_last_batch_with_as_many_micro_batches_closes_at_the_last() -> None:
    """At the first as well, as 1.15 does at all: nothing tells whether there is another one."""
    accelerator, model, _ = line(gradient_accumulation_steps=4)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.ones(12, 1)), batch_size=8))
    flags = [synced(accelerator, model, 2) for _ in loader]
    assert flags == [[False, False], [True, True]]


@pytest.mark.parametrize("at_once", [2, 4])
def test_batches_that_are_fetched_ahead_close_the_last_window(at_once: int) -> None:
    accelerator, model, _ = line(gradient_accumulation_steps=4)
    batches, left = iter(accelerator.prepare(numbers(6))), 6
    flags: list[bool] = []
    while left:
        count = min(at_once, left)
        window = [next(batches) for _ in range(count)]
        flags += synced(accelerator, model, len(window))
        left -= count
    assert flags == [False, False, False, True, False, True]


@pytest.mark.parametrize("left_out", [(8,), (3, 7, 8)])
def test_a_loop_that_leaves_batches_out_closes_the_last_window(left_out: tuple[int, ...]) -> None:
    accelerator, model, _ = line(gradient_accumulation_steps=4)
    loader = accelerator.prepare(numbers(10))
    flags = [synced(accelerator, model)[0] for place, _ in enumerate(loader) if place not in left_out]
    assert flags == [step in (3, 7, len(flags) - 1) for step in range(len(flags))]


class OwnLoop(DataLoaderStateMixin):
    """A loader of a program, of the class that prepared loaders have in common."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.dataset, self._drop_last = loader, loader.dataset, False
        self.total_batch_size = loader.batch_size

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        for index, batch in enumerate(self.loader):
            self.end_of_dataloader = index == len(self.loader) - 1
            yield batch
        self.end()


@pytest.mark.parametrize("make", [prepare_data_loader, OwnLoop])
def test_a_loader_that_no_accelerator_prepared_closes_the_last_window(make: Callable[[Any], Any]) -> None:
    """It counts for the newest one, as ``GradientState()`` does."""
    loader = make(DataLoader(torch.arange(6.0), batch_size=4))
    accelerator, model, _ = line(gradient_accumulation_steps=4)
    state, seen = accelerator.gradient_state, []
    for batch in loader:
        flag = synced(accelerator, model)[0]
        seen.append(
            (flag, state.end_of_dataloader, state.remainder, accelerator.gather_for_metrics(batch).tolist())
        )
    assert seen == [(False, False, 2, [0, 1, 2, 3]), (True, True, 2, [4, 5])]
    assert not state.in_dataloader


def test_loaders_that_train_in_turn_close_one_window_at_their_end() -> None:
    """B4"""
    accelerator, model, _ = line(gradient_accumulation_steps=2)
    loaders = [iter(loader) for loader in accelerator.prepare(numbers(5), numbers(5))]
    flags = [synced(accelerator, model)[0] for _ in range(5) for each in loaders if next(each) is not None]
    assert flags == [False, True] * 5


def test_a_loader_that_was_left_in_the_middle_does_not_hold_a_window_open() -> None:
    accelerator, model, _ = line(gradient_accumulation_steps=4)
    loader, other = accelerator.prepare(numbers(6), numbers(6))
    batches, left = iter(loader), iter(other)
    next(batches)
    flags = synced(accelerator, model)
    next(left)
    flags += synced(accelerator, model)
    for _ in batches:
        flags += synced(accelerator, model)
    assert flags == [False, False, False, True, False, False, True]


@pytest.mark.parametrize("first", [False, True], ids=["after the backward", "before the backward"])
@pytest.mark.parametrize("leave", [False, True])
@pytest.mark.parametrize("skipped", [0, 1])
def test_a_pass_inside_of_an_epoch_leaves_its_windows_alone(skipped: int, leave: bool, first: bool) -> None:
    """A loader of ``skip_first_batches`` shows its batches on the other one: they closed windows there."""
    accelerator, model, _ = line(gradient_accumulation_steps=4)
    loader = accelerator.prepare(numbers(6))

    def evaluate(place: int) -> None:
        batches = zip(accelerator.skip_first_batches(loader, skipped), range(2 if leave else 9), strict=False)
        assert place not in (0, 2, 5) or len(list(batches)) == (2 if leave else 6 - skipped)

    for resumed, expected in (0, "FFFTFT"), (1, "FFFTT"):
        flags = ""
        for place, batch in enumerate(accelerator.skip_first_batches(loader, resumed)):
            if first:
                evaluate(place)
            with accelerator.accumulate(model):
                accelerator.backward(model(value(batch)).sum())
                flags += "FT"[accelerator.sync_gradients]
            if not first:
                evaluate(place)
        assert flags == expected
