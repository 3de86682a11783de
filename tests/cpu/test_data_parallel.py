"""Data parallel training through prepare: gradients, data, user's methods, accumulation."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
)

from accelerate.core.errors import PrepareError
from tests.support.ranks import RankServer, same_on_all


class Net(nn.Module):
    """A user's model with a method and an attribute of its own."""

    note = "mine"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(3, 8)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.hidden(x)))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()


def rows_of(rank: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def attributes() -> tuple[object, ...]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    user = Net()
    model = accelerator.prepare(user)
    assert accelerator.prepare(user) is model
    assert accelerator.unwrap_model(model) is user
    # Programs compare the classes of an online and a target network.
    assert type(accelerator.prepare(Net())) is type(model)
    assert type(type(model)()) is Net, "one that a method makes by its class is plain"
    model.note = "set"
    model.eval()
    assert not user.training, "both are one model"
    model.train()
    if accelerator.is_main_process:  # the user's object is plain: one rank alone may use it
        user(torch.ones(2, 3))
    accelerator.backward(model.loss(rows_of(accelerator.process_index)))
    gradient_of_method = model.hidden.weight.grad.flatten().tolist()
    twin = copy.deepcopy(accelerator.unwrap_model(model))
    thawed = pickle.loads(pickle.dumps(model))
    twin(torch.ones(2, 3)).sum().backward()  # a copy is a plain model: no rank waits for it
    optimizer = torch.optim.SGD(user.parameters(), lr=0.1, momentum=0.9)
    optimizer, schedule = accelerator.prepare(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    optimizer.step()
    schedule.step()
    for read in (copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        other, its_schedule = read((optimizer, schedule))
        assert type(other) is type(optimizer)
        assert its_schedule.get_last_lr() == schedule.get_last_lr()
        before, other_param = user.out.bias.tolist(), other.param_groups[0]["params"][-1]
        other_param.grad = torch.ones_like(other_param)
        other.step()
        assert user.out.bias.tolist() == before, "a copy steps parameters of its own"
    return (
        isinstance(model, Net),
        type(model).__name__,
        user.note,
        sorted(model.state_dict()) == sorted(Net().state_dict()),
        type(thawed) is Net and type(twin) is Net and type(copy.deepcopy(model)) is Net,
        gradient_of_method,
    )


def test_the_prepared_model_is_the_users_own(ranks: RankServer) -> None:
    """F13: methods, attributes, class and names stay, and a method that calls forward synchronises."""
    found = same_on_all(ranks(2, attributes))
    assert found[:5] == (True, "Net", "set", True, True)
    alone = Net()
    sum((alone.loss(rows_of(rank)) for rank in range(2)), torch.zeros(())).backward()
    assert alone.hidden.weight.grad is not None
    assert found[5] == pytest.approx((alone.hidden.weight.grad / 2).flatten().tolist(), abs=1e-6)


def prepared_again(knows: str) -> tuple[list[float], list[str], list[float]]:
    """Gradients of a model that is prepared again, by ranks that have prepared it or have a new one."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    net = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False))
    net[0].requires_grad_(False)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    first, optimizer = accelerator.prepare(net, sgd)
    accelerator.backward(first(torch.ones(1, 2)).sum())
    optimizer.step()
    if knows == "freed":
        accelerator.free_memory()
    elif knows == f"rank {1 - accelerator.process_index}":
        net = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False))
        sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net.requires_grad_(True)
    model, optimizer = accelerator.prepare(net, sgd)
    assert (model is first) is (net is accelerator.unwrap_model(first) and knows != "freed")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.zero_grad()
            accelerator.backward(model(torch.full((1, 2), float(accelerator.process_index))).sum())
            gradients = [p.grad.flatten().tolist() for p in model.parameters()]
            optimizer.step()
    return gradients[0], [str(each.message) for each in caught], [p.item() for p in net[1].parameters()]


@pytest.mark.parametrize("knows", ["all ranks", "rank 0", "rank 1", "freed"])
def test_a_module_that_is_prepared_again_is_averaged_with_all_that_trains_now(
    ranks: RankServer, knows: str
) -> None:
    """Ranks with a new module waited for the one that had its own prepared before."""
    (gradient, messages, _) = same_on_all(ranks(2, prepared_again, knows))
    assert any(gradient)
    assert not messages


def trained_copy(kind: str, accumulate: int) -> list[float]:
    """Weights of a copy of a prepared model that learns, while its original rests."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=accumulate)
    net = nn.Linear(3, 1, bias=False)
    nn.init.ones_(net.weight)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(accelerator.process_index):  # a copy of one rank, which is gone before the first average
        dropped = copy.deepcopy(model)
        dropped(torch.ones(2, 3)).sum().backward()
        del dropped
    if kind == "together":
        model, optimizer, accelerator = copy.deepcopy((model, optimizer, accelerator))
    else:
        model.requires_grad_(kind != "unfrozen")
        model = copy.deepcopy(model).requires_grad_(True)
        if kind == "of a copy":
            thawed = pickle.loads(frozen := pickle.dumps(model))
            assert b"accelerate." not in frozen
            assert type(copy.deepcopy(thawed)) is nn.Linear
            outer: Any = copy.deepcopy(nn.Sequential(copy.deepcopy(model)))
            model = outer[0]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if kind == "prepared":
            optimizer = accelerator.prepare(optimizer)
    for index in range(4):
        with accelerator.accumulate(model):
            x = torch.full((2, 3), 0.1 * (index + 3 * accelerator.process_index))
            accelerator.backward(model(x).square().mean())
            if accelerator.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
    frozen = copy.deepcopy(accelerator.prepare(nn.Linear(1, 1))).requires_grad_(False)
    if accelerator.is_main_process:
        frozen(torch.ones(1, 1))  # such an average belongs to one rank
    return model.weight.flatten().tolist()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["prepared", "raw", "together", "of a copy", "unfrozen"])
def test_a_deep_copy_that_trains_averages_its_gradients(
    ranks: RankServer, kind: str, accumulate: int
) -> None:
    """As a deep copy of torch's wrapper does: its copies drifted apart without a word."""
    weights = same_on_all(ranks(2, trained_copy, kind, accumulate))
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    for first in range(0, 4, accumulate):
        steps = [0.1 * (index + 3 * rank) for index in range(first, first + accumulate) for rank in (0, 1)]
        sum((weight.sum() * x).square() for x in steps).div(len(steps)).backward()  # type: ignore[union-attr]
        with torch.no_grad():
            weight -= 0.1 * weight.grad
        weight.grad = None
    assert weights == pytest.approx(weight.tolist(), rel=1e-5)


def pickled_after_training() -> tuple[bool, list[tuple[bool, bool]], bool]:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=3)
    net = nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        DataLoader(range(8), 1),  # type: ignore[arg-type]
    )
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x.float()).sum())
            optimizer.step()
    thawed, its_loader = pickle.loads(pickle.dumps((accelerator, loader)))
    flags = []
    for _ in its_loader:
        with thawed.accumulate():
            flags.append((thawed.sync_gradients, accelerator.gradient_state.end_of_dataloader))
    return thawed._models[0] is not model, flags, thawed.gradient_state is accelerator.gradient_state


def test_an_accelerator_is_pickled_after_it_has_trained(ranks: RankServer) -> None:
    own_models, flags, same_state = same_on_all(ranks(2, pickled_after_training))
    assert own_models
    assert same_state
    assert flags == [(False, False), (False, False), (True, False), (True, True)]


class Owner(Net):
    """A model that has members of these names itself."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Identity()
        self.device = "set by the model"

    def no_sync(self) -> str:
        return "mine"


def members_of_the_wrapper() -> tuple[object, ...]:
    import warnings

    from accelerate import Accelerator

    accelerator = Accelerator()
    user = nn.Linear(1, 1, bias=False)
    model = accelerator.prepare(cast("Any", user))
    x = torch.full((1, 1), float(accelerator.process_index + 1))
    with model.no_sync():
        inside = model.require_backward_grad_sync
        accelerator.backward(model(x).sum())
        local = model.weight.grad.item()
    accelerator.backward(model(x).sum())
    reduced = model.weight.grad.item()
    model.require_backward_grad_sync = False  # as torch's guide to its wrapper sets it
    accelerator.backward(model(x).sum())
    assert model.weight.grad.item() == reduced + accelerator.process_index + 1
    model.require_backward_grad_sync = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert model.module is user
        assert model.module is user
    notes = [str(each.message) for each in caught]
    assert (model.device, model.device_type) == (torch.device("cpu"), "cpu")
    assert model.process_group.size() == 2  # pyright: ignore[reportCallIssue]
    assert not model.static_graph
    assert not hasattr(user, "device")
    owner = accelerator.prepare(Owner())
    assert owner.device == "set by the model"
    assert isinstance(owner.module, nn.Identity)
    assert owner.no_sync() == "mine"
    assert not hasattr(accelerator.unwrap_model(model), "no_sync")
    return inside, local == accelerator.process_index + 1, reduced, len(notes), *notes


def test_what_people_use_of_torchs_wrapper_is_there(ranks: RankServer) -> None:
    """Scripts of 1.x call ``model.no_sync()`` and read ``model.module``."""
    inside, is_local, total, count, note = same_on_all(ranks(2, members_of_the_wrapper))
    assert (inside, is_local, total, count) == (False, True, 3.0, 1)
    assert "Linear.module is the object that was given to prepare" in note


def world_of_two() -> tuple[object, ...]:
    from accelerate import Accelerator, PartialState

    state = PartialState()
    accelerator = Accelerator()
    return (
        state.num_processes,
        accelerator.num_processes,
        str(state.distributed_type),
        state.device.type,
        state.backend,
    )


def test_torchrun_on_a_machine_without_accelerator_is_a_world_of_two(ranks: RankServer) -> None:
    """F2: no variable of ours is set, only torchrun's."""
    assert same_on_all(ranks(2, world_of_two)) == (2, 2, "DistributedType.MULTI_CPU", "cpu", "gloo")


def walk_modules(count: int, batch: int, shuffle: bool, split: bool, even: bool, drop: bool) -> list[object]:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(split_batches=split, even_batches=even)
    )
    torch.manual_seed(100 + accelerator.process_index)  # the ranks' seeds differ on purpose
    data = TensorDataset(torch.arange(count))
    loader = accelerator.prepare(DataLoader(data, batch_size=batch, shuffle=shuffle, drop_last=drop))
    own: list[int] = []
    metric: list[int] = []
    steps = 0
    for (x,) in loader:
        steps += 1
        own += x.tolist()
        if even:
            metric += accelerator.gather_for_metrics(x).tolist()
    return [own, metric, steps, len(loader)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("count", "batch"), [(1, 4), (3, 1), (5, 4), (9, 5), (16, 4), (16, 5)])
def test_every_sample_counts_once_in_metrics(
    ranks: RankServer, count: int, batch: int, shuffle: bool
) -> None:
    """C1 for tensors, and one order for all ranks whatever their seeds."""
    results = ranks(2, walk_modules, count, batch, shuffle, False, True, False)
    metric = same_on_all([result[1] for result in results])
    assert sorted(metric) == list(range(count))
    assert shuffle or metric == list(range(count))
    assert {result[2] for result in results} == {results[0][3]}, "len() is the number of steps"


@pytest.mark.parametrize("split", [False, True])
def test_without_even_batches_nothing_is_repeated(ranks: RankServer, split: bool) -> None:
    results = ranks(2, walk_modules, 11, 4, True, split, False, False)
    assert sorted(results[0][0] + results[1][0]) == list(range(11))
    assert [r[2] for r in results] == [r[3] for r in results]


def test_split_batches_gives_each_rank_its_part_of_every_batch(ranks: RankServer) -> None:
    first, second = ranks(2, walk_modules, 10, 4, False, True, True, False)
    assert first[0] == [0, 1, 4, 5, 8, 9]
    assert second[0] == [2, 3, 6, 7, 0, 1]
    assert first[1] == list(range(10))


def test_dropping_the_last_step_keeps_whole_steps_only(ranks: RankServer) -> None:
    first, second = ranks(2, walk_modules, 11, 2, False, False, True, True)
    assert first[0] == [0, 1, 4, 5]
    assert second[0] == [2, 3, 6, 7]


def empty_batch() -> str:
    from accelerate import Accelerator

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(9)), batch_size=5, drop_last=True))
    with pytest.warns(UserWarning, match="0 batches") as found:
        assert list(loader) == []
    return str(found[0].message)


def test_an_epoch_without_batches_is_said(ranks: RankServer) -> None:
    """A11."""
    assert "9 samples do not fill one" in same_on_all(ranks(2, empty_batch))


def streams(types: list[str] | None) -> tuple[float, float]:
    from accelerate import Accelerator

    accelerator = Accelerator(rng_types=types)
    torch.manual_seed(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(4))))
    before = torch.rand(()).item()
    next(iter(loader))
    return before, torch.rand(()).item()


def test_asked_streams_are_taken_over_from_rank_zero_in_every_epoch(ranks: RankServer) -> None:
    for types, alike in (["torch"], True), (None, False):
        (a, b), (c, d) = ranks(2, streams, types)
        assert a != c
        assert (b == d) == alike


class Words(Dataset[str]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> str:
        return "abcde"[index]


def words() -> list[str]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Words(), batch_size=2))
    return [word for batch in loader for word in accelerator.gather_for_metrics(batch)]


def test_strings_count_once_in_metrics(ranks: RankServer) -> None:
    """C1 for objects."""
    assert same_on_all(ranks(2, words)) == list("abcde")


class UnsizedRows(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class SizedRows(UnsizedRows):
    def __len__(self) -> int:
        return self.count


def streamed(kind: type[UnsizedRows], count: int, split: bool) -> list[int]:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=split))
    loader = accelerator.prepare(DataLoader(kind(count), batch_size=4 if split else 2))
    twice = [[i for x in loader for i in accelerator.gather_for_metrics(x).tolist()] for _ in range(2)]
    assert twice[0] == twice[1]
    return twice[0]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", [SizedRows, UnsizedRows])
@pytest.mark.parametrize("count", [1, 6, 7, 8])
def test_every_sample_of_a_stream_counts_once_in_metrics(
    ranks: RankServer, kind: type[UnsizedRows], count: int, split: bool
) -> None:
    """A10 for evaluation: with and without a length."""
    assert same_on_all(ranks(2, streamed, kind, count, split)) == list(range(count))


class Buckets(BatchSampler):
    """A user's batch sampler whose batches differ in size, over a part of the data."""

    def __init__(self) -> None: ...

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2], [3], [4, 5]])

    def __len__(self) -> int:
        return 3


def sampled(kind: str) -> list[int]:
    from accelerate import Accelerator

    data = TensorDataset(torch.arange(20))
    loader = {
        "batch sampler": lambda: DataLoader(data, batch_sampler=Buckets()),
        "sampler": lambda: DataLoader(data, batch_size=4, sampler=range(6)),
        "workers": lambda: DataLoader(data, batch_size=4, sampler=range(6), num_workers=1),
        "one by one": lambda: DataLoader(data, batch_size=None, sampler=range(6 - 1)),
    }[kind]()
    accelerator = Accelerator()
    loader = accelerator.prepare(loader)
    return [i for (x,) in loader for i in accelerator.gather_for_metrics(x).tolist()]


@pytest.mark.parametrize(
    ("kind", "count"), [("batch sampler", 6), ("sampler", 6), ("workers", 6), ("one by one", 5)]
)
def test_metrics_count_what_the_users_sampler_gives(ranks: RankServer, kind: str, count: int) -> None:
    """C1 for samplers that are shorter than the data and batches that differ in size."""
    assert same_on_all(ranks(2, sampled, kind)) == list(range(count))


def as_alone(shuffle_seed: int) -> list[int]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    torch.manual_seed(shuffle_seed + 7 * accelerator.process_index)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(12)), batch_size=3, shuffle=True))
    return [i for (x,) in loader for i in accelerator.gather_for_metrics(x).tolist()]


def test_the_order_on_two_ranks_is_that_of_rank_zero_alone(ranks: RankServer) -> None:
    """B3 of the mission: 2 x 3 samples a step are those of the loop on one process."""
    assert same_on_all(ranks(2, as_alone, 5)) == ranks(1, as_alone, 5)[0]


class TwoTypes(nn.Module):
    """Trained parameters of two dtypes and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1).double()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.first(x)).double())


def clip_in_window() -> list[tuple[bool, bool, float]]:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = TwoTypes()
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(trained, lr=0.0))
    data = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    share = 4 // accelerator.num_processes
    start = accelerator.process_index * share
    found = []
    for half in data.split(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(half[start : start + share]).square().mean())
            before = [p.grad.clone() for p in trained]
            norm = float(accelerator.clip_grad_norm_(model.parameters(), 1e-3))
            changed = any(not torch.equal(a, p.grad) for a, p in zip(before, trained, strict=True))
            found.append((accelerator.sync_gradients, changed, norm))
            optimizer.step()
            optimizer.zero_grad()
    return found


def test_clipping_waits_for_the_end_of_the_window_and_takes_the_true_norm(ranks: RankServer) -> None:
    """B7: frozen parameters, two dtypes, accumulation; the norm is that of one process."""
    (alone,) = ranks(1, clip_in_window)
    pair = ranks(2, clip_in_window)
    for found in (alone, *pair):
        assert [row[:2] for row in found] == [(False, False), (True, True)]
    assert pair[0][1][2] == pytest.approx(alone[1][2], rel=1e-6)
    assert pair[0][1][2] == pair[1][1][2]


def two_at_once() -> tuple[object, ...]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    plain = Accelerator()
    half = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=3)
    a, b = plain.prepare(nn.Linear(2, 2)), half.prepare(nn.Sequential(nn.Linear(2, 2)))
    inside: list[torch.dtype] = []
    b[0].register_forward_hook(lambda m, i, o: inside.append(o.dtype))
    x = torch.ones(1, 2)
    return (
        a(x).dtype,
        b(x).dtype,
        inside,
        plain.mixed_precision,
        half.mixed_precision,
        plain.gradient_accumulation_steps,
        half.gradient_accumulation_steps,
        AcceleratorState().mixed_precision,
    )


@pytest.mark.parametrize("size", [1, 2])
def test_two_accelerators_of_other_precision_live_together(ranks: RankServer, size: int) -> None:
    """F11."""
    expected = (torch.float32, torch.float32, [torch.bfloat16], "no", "bf16", 1, 3, "bf16")
    assert same_on_all(ranks(size, two_at_once)) == expected


def windows(batches: int, micro: int, steps: int) -> str:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=steps)
    loader, evaluation = accelerator.prepare(
        DataLoader(TensorDataset(torch.arange(batches * accelerator.num_processes)), batch_size=1),
        DataLoader(TensorDataset(torch.arange(6)), batch_size=1),
    )
    pattern = ""
    for _ in loader:
        for _ in range(micro):
            with accelerator.accumulate():
                for _ in evaluation:  # a loop inside the window, broken off
                    break
                pattern += "T" if accelerator.sync_gradients else "F"
    return pattern


@pytest.mark.parametrize(
    ("batches", "micro", "steps", "pattern"),
    [(5, 1, 2, "FTFTT"), (2, 4, 4, "FFFTFFFT"), (3, 1, 1, "TTT"), (3, 2, 4, "FFFTFT")],
)
def test_windows_close_where_they_should(
    ranks: RankServer, batches: int, micro: int, steps: int, pattern: str
) -> None:
    """B3, and B4 for a nested evaluation loop that is broken off."""
    assert same_on_all(ranks(2, windows, batches, micro, steps)) == pattern


def mismatched() -> str:
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = nn.Linear(2, 2)
    model.hf_device_map = {"": "cpu", "head": "disk"}  # type: ignore[assignment]
    with pytest.raises(PrepareError) as error:
        accelerator.prepare(model)
    return error.value.what


def test_a_model_on_two_devices_is_refused_in_a_world_of_two(ranks: RankServer) -> None:
    assert "dispatched over several devices" in same_on_all(ranks(2, mismatched))


def hooked(kind: str, wrapper: str = "no", scale: float = 1.0) -> list[float]:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    hook: Any = {"comm_hook": kind, "comm_wrapper": wrapper}
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**hook)])
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Linear(4, 1))
    accelerator.backward(model(torch.ones(2, 4) * (accelerator.process_index + 1) * scale).sum())
    return model.weight.grad.flatten().tolist()


@pytest.mark.parametrize(("kind", "digits"), [("fp16", 12), ("bf16", 9)])
def test_gradients_may_travel_in_half_precision(ranks: RankServer, kind: str, digits: int) -> None:
    """The format of the hook has no room for the last digit of the gradient."""
    assert same_on_all(ranks(2, hooked, kind, "no", 1 + 2.0**-digits)) == [3.0] * 4


def test_a_wrapper_goes_around_a_hook_in_half_precision(ranks: RankServer) -> None:
    """float16 has three bits more than bfloat16, in which the wrapper rounds."""
    scale = 1 + 2**-9
    assert same_on_all(ranks(2, hooked, "fp16", "no", scale)) == [3.0 * scale] * 4
    assert same_on_all(ranks(2, hooked, "fp16", "bf16", scale)) == [3.0] * 4


def methods_of_the_wrapper() -> list[float]:
    """A hook that scales what is summed, a static graph, and a loop that is longer on rank 1."""
    from torch.distributed.algorithms import Join

    from accelerate import Accelerator

    accelerator = Accelerator()
    rank = accelerator.process_index

    def scale(state, bucket):  # type: ignore[no-untyped-def]  # torch reads the annotations, not as texts
        summed = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
        return summed.then(lambda done: done.value()[0] * state)

    models: list[Any] = [accelerator.prepare(nn.Linear(1, 1, bias=False)) for _ in range(3)]
    models[0].register_comm_hook(0.25, scale)
    models[1]._set_static_graph()
    gradients = []
    for model in models[:2]:
        accelerator.backward(model(torch.full((1, 1), 2.0 * rank + 2)).sum())
        gradients.append(model.weight.grad.item())
    assert models[1].static_graph
    for context in (models[2].join(), Join([models[2]])):
        with context:
            for _ in range(1 + rank):
                accelerator.backward(models[2](torch.ones(1, 1)).sum())
    return gradients


def test_methods_of_torchs_wrapper_act_on_the_prepared_model(ranks: RankServer) -> None:
    """Scripts of 1.x register their own communication hook after ``prepare``."""
    assert same_on_all(ranks(2, methods_of_the_wrapper)) == [1.5, 3.0]


class ModelWithPart(torch.nn.Module):
    """Calls a model that is prepared by itself, as a frozen encoder or a teacher is."""

    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        self.head, self.part, self.seen = torch.nn.Linear(2, 1), (part,), list[bool]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        active = torch.nn.parallel.DistributedDataParallel._active_ddp_module
        hidden = self.part[0](x)
        self.seen.append(torch.nn.parallel.DistributedDataParallel._active_ddp_module is active is not None)
        return self.head(hidden)


def call_nested_models() -> list[bool]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    part = accelerator.prepare(torch.nn.Linear(2, 2))
    model = accelerator.prepare(ModelWithPart(part))
    accelerator.backward(model(torch.ones(3, 2)).sum())
    return model.seen


def test_a_prepared_part_leaves_the_outer_model_active(ranks: RankServer) -> None:
    """torch.compile reads which DDP module is active: its graphs end where buckets do."""
    assert ranks(2, call_nested_models) == [[True], [True]]


class Sampled(Net):
    def sample(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x).square()


def weights_after_forwards_by_name() -> tuple[list[float], str]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    user = Sampled()
    model, optimizer = accelerator.prepare(user, torch.optim.SGD(user.parameters(), lr=0.1))
    x = rows_of(accelerator.process_index)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loss in (lambda: model.forward(x).square(), lambda: model.sample(x)):
            accelerator.backward(loss().mean())
            optimizer.step()
            optimizer.zero_grad()
    return model.hidden.weight.flatten().tolist(), str(inspect.signature(model.forward))


def test_a_forward_that_is_called_by_its_name_reduces_gradients(ranks: RankServer) -> None:
    """As that of torch's wrapper does: ``model.forward(x)``, and a method that calls ``self.forward``."""
    weights, signature = same_on_all(ranks(2, weights_after_forwards_by_name))
    alone = Net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        sum((alone.loss(rows_of(rank)) / 2 for rank in range(2)), torch.zeros(())).backward()
        optimizer.step()
    assert weights == pytest.approx(alone.hidden.weight.flatten().tolist(), abs=1e-6)
    assert signature == "(x: 'torch.Tensor') -> 'torch.Tensor'"


def kept_objects(precision: str) -> list[str]:
    """The kinds of the objects of two trainings that are alive after the second function has ended."""
    from accelerate import Accelerator

    def train() -> list[weakref.ref[Any]]:
        accelerator, model = Accelerator(gradient_accumulation_steps=2, mixed_precision=precision), Net()
        optimizer: Any = torch.optim.Adam(model.parameters())
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        loader: Any = DataLoader(TensorDataset(torch.ones(8, 3)), batch_size=2)
        view, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
        for (x,) in loader:
            with accelerator.accumulate(view):
                accelerator.backward(view(x).sum())
                accelerator.clip_grad_norm_(view.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        kept = accelerator, view, model, optimizer, optimizer.optimizer, scheduler, loader
        return [weakref.ref(item) for item in kept]

    train()  # what is imported at the first use leaves frames behind
    gc.collect()
    gc.disable()
    try:
        return [type(item()).__name__ for item in train() if item() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize(("count", "precision"), [(1, "no"), (2, "no"), (1, "fp16")])
def test_nothing_is_left_of_a_training_without_a_garbage_collection(
    ranks: RankServer, count: int, precision: str
) -> None:
    """As in 1.15 and torch: weights, gradient buckets and workers go with the last variable."""
    assert same_on_all(ranks(count, kept_objects, precision)) == []


def replaced_wrapper() -> list[float]:
    from accelerate import Accelerator

    own = nn.parallel.DistributedDataParallel.__init__

    def init(self: Any, model: nn.Module, device_ids: Any, output_device: Any, **options: Any) -> None:
        assert device_ids is output_device is None
        own(self, model, **options)

    nn.parallel.DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    try:
        accelerator = Accelerator()
        model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    finally:
        nn.parallel.DistributedDataParallel.__init__ = own  # type: ignore[method-assign]
    accelerator.backward(model(torch.full((1, 1), float(accelerator.process_index))).sum())
    return model.weight.grad.flatten().tolist()


def test_a_program_that_replaces_the_wrapper_gets_both_device_arguments(ranks: RankServer) -> None:
    """ms-swift does, to train a model that is spread over the devices of its rank."""
    assert same_on_all(ranks(2, replaced_wrapper)) == [0.5]


def type_of_one() -> tuple[str, str, bool]:
    from accelerate import Accelerator, PartialState

    state = PartialState(cpu=True)
    return str(state.distributed_type), str(Accelerator(cpu=True).distributed_type), state.use_distributed


def test_a_process_that_torchrun_starts_alone_is_of_a_distributed_type(ranks: RankServer) -> None:
    """As in 1.x: transformers' Trainer refuses ``fsdp`` where ``PartialState`` says NO."""
    assert ranks(1, type_of_one) == [("DistributedType.MULTI_CPU", "DistributedType.NO", False)]


def gradient_of_own_rank() -> tuple[str, float]:
    """axolotl sets ``distributed_type`` to NO where it reduces gradients itself."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    accelerator = Accelerator()
    accelerator.state.distributed_type = DistributedType.NO
    model = accelerator.prepare(nn.Linear(1, 1))
    accelerator.backward(model(torch.full((1, 1), float(accelerator.process_index))).sum())
    return accelerator.distributed_type, model.weight.grad.item()


def test_a_program_may_keep_gradients_from_being_reduced(ranks: RankServer) -> None:
    assert ranks(2, gradient_of_own_rank) == [("NO", 0.0), ("NO", 1.0)]


def own_optimizer() -> list[Any]:
    """Each rank trains a model of its own, by other options; rank 0 prepares a second one alone."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.NO
    rank, model = accelerator.process_index, nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + rank), momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = torch.full((1, 1), float(rank))
    model, optimizer = accelerator.prepare(model, optimizer)
    if rank == 0:
        other = nn.Linear(1, 1)
        accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    return [optimizer.param_groups[0]["lr"], optimizer.state[model.weight]["momentum_buffer"].item()]


def test_a_program_that_reduces_gradients_itself_has_an_optimizer_per_rank(ranks: RankServer) -> None:
    assert ranks(2, own_optimizer) == [[0.1, 0.0], [0.2, 1.0]]


def read_on_rank_zero() -> list[int]:
    """Trainers that prune a model evaluate it on rank 0 alone, and put the number back afterwards."""
    from accelerate import Accelerator, DataLoaderConfiguration

    sharing = DataLoaderConfiguration(dispatch_batches=True)
    accelerator = Accelerator(cpu=True, rng_types=["torch"], dataloader_config=sharing)
    data, rows = TensorDataset(torch.arange(4)), list[int]()
    with pytest.warns(UserWarning, match=r"was set to 1: a loader that is prepared now is not sharded"):
        accelerator.state.num_processes = 1
    if accelerator.is_main_process:
        loaders = DataLoader(data, batch_size=2), DataLoader(data, sampler=DistributedSampler(data))
        whole, own = accelerator.prepare(*loaders)
        rows = [row for (batch,) in whole for row in batch.tolist()] + [len(own), whole.total_batch_size]
    accelerator.wait_for_everyone()
    accelerator.state.num_processes = 2
    return rows + [row for (batch,) in accelerator.prepare(DataLoader(data, 2)) for row in batch.tolist()]


def test_rank_zero_alone_reads_a_whole_loader(ranks: RankServer) -> None:
    assert ranks(2, read_on_rank_zero) == [[0, 1, 2, 3, 2, 2, 0, 1], [2, 3]]


def own_answer() -> list[Any]:
    from accelerate import Accelerator

    accelerator: Any = Accelerator()
    model: Any = nn.Linear(2, 1)
    model.hf_device_map = {"a": "cpu", "b": "disk"}
    with pytest.raises(PrepareError, match="dispatched over several devices"):
        accelerator.prepare(model)
    accelerator.verify_device_map = lambda model: False
    prepared = accelerator.prepare(model)
    accelerator.backward(prepared(torch.full((1, 2), float(accelerator.process_index))).sum())
    return [model.weight.grad.tolist(), type(accelerator.prepare_model(nn.Linear(2, 1))).__name__]


def test_a_program_may_say_itself_whether_a_model_is_dispatched(ranks: RankServer) -> None:
    """ms-swift spreads the copies of DDP over devices, and has its own ``verify_device_map``."""
    assert same_on_all(ranks(2, own_answer))[0] == [[0.5, 0.5]]


def names_in_files(folder: str) -> list[list[str]]:
    from safetensors.torch import load_file, save_file

    from accelerate import Accelerator

    accelerator: Any = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 1))
    in_hook = list[str]()
    accelerator.register_save_state_pre_hook(lambda models, weights, output_dir: in_hook.extend(weights[0]))
    accelerator.save_state(f"{folder}/safe")
    accelerator.save_state(f"{folder}/torch", safe_serialization=False)
    in_file = load_file(f"{folder}/safe/model.safetensors")
    of_torch = torch.load(f"{folder}/torch/pytorch_model.bin", weights_only=True)
    if accelerator.is_main_process:  # as other versions have written it
        save_file(
            {f"module.{n}": 2 * value for n, value in in_file.items()}, f"{folder}/old/model.safetensors"
        )
    accelerator.wait_for_everyone()
    before = model.bias.item()
    accelerator.load_state(f"{folder}/old", strict=False)
    assert model.bias.item() == 2 * before
    wrapped = accelerator.get_state_dict(model, unwrap=False)
    own = accelerator.get_state_dict
    accelerator.get_state_dict = lambda model, unwrap=True: {"bias": own(model, unwrap)["bias"]}
    accelerator.save_state(f"{folder}/part")
    in_part = load_file(f"{folder}/part/model.safetensors")
    return [sorted(names) for names in (in_hook[:2], in_file, of_torch, wrapped, in_part)]


def test_a_checkpoint_of_two_ranks_has_the_names_of_the_users_module(
    ranks: RankServer, tmp_path: Path
) -> None:
    """1.15 writes these, and loads no others; files with the prefix of torch's wrapper load here too."""
    (tmp_path / "old").mkdir()
    plain = ["bias", "weight"]
    names = same_on_all(ranks(2, names_in_files, str(tmp_path)))
    assert names == [plain, plain, plain, ["module.bias", "module.weight"], ["bias"]]


class Versioned(nn.Linear):
    """A layer whose state has a version, as those of quantized layers."""

    _version = 2
    versions: tuple[Any, ...] = ()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        self.versions += (local_metadata.get("version"),)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def load_names_of_the_wrapper() -> list[Any]:
    """The state of a layer, and of an average, whose child ``module`` is the user's own."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.swa_utils import AveragedModel

    from accelerate import Accelerator

    accelerator: Any = Accelerator()
    seen: list[Any] = []
    users: list[Any] = [Versioned(2, 1), AveragedModel(Versioned(2, 1))]
    for user in users:
        saved = DistributedDataParallel(copy.deepcopy(user)).state_dict()
        names = list(saved)
        model = accelerator.prepare(user)
        own_states = model.state_dict(), accelerator.get_state_dict(model, unwrap=False)
        for state in (saved, *copy.deepcopy(own_states)):
            with torch.no_grad():
                user.get_parameter(names[-1].removeprefix("module.")).zero_()
            seen.append(bool(model.load_state_dict(state).missing_keys))
            seen.append(all(torch.equal(v, saved[f"module.{n}"]) for n, v in user.state_dict().items()))
        assert list(saved) == names, "the program's own dict stays"
        seen.append(getattr(user, "module", user).versions)
        partly = {name.removeprefix("module."): value for name, value in list(saved.items())[:1]}
        with pytest.raises(RuntimeError, match=r"Unexpected key.*module"):
            model.load_state_dict({**saved, **partly})
    return seen


def test_a_replica_loads_states_by_the_names_of_torchs_wrapper(ranks: RankServer) -> None:
    """Programs for 1.x have saved them; with ``strict=False`` nothing was loaded, without a word."""
    loaded = [False, True] * 3 + [(2, 2, None)]
    assert same_on_all(ranks(2, load_names_of_the_wrapper)) == loaded * 2


def average_loaded(folder: str) -> float:
    from torch.optim.swa_utils import AveragedModel

    from accelerate import Accelerator

    accelerator = Accelerator()
    model: Any = accelerator.prepare(AveragedModel(nn.Linear(1, 1)))
    saved = model.module.weight.item()
    path = accelerator.save_state(f"{folder}/c")
    with torch.no_grad():
        model.module.weight.zero_()
    accelerator.load_state(path)
    assert saved
    return model.module.weight.item() - saved


def test_a_child_called_module_is_no_prefix(ranks: RankServer, tmp_path: Path) -> None:
    """The average of a model has one, and a counter beside it: load_state took it for a wrapper."""
    assert ranks(2, average_loaded, str(tmp_path)) == [0.0, 0.0]


def kept_apart() -> list[float]:
    """A tensor parallel program says that there is one process, so that nobody replicates its shards."""
    from accelerate import Accelerator, DistributedType, PartialState

    accelerator = Accelerator(cpu=True)
    PartialState._shared_state.update({"distributed_type": DistributedType.NO})
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 10.0 * accelerator.process_index)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.full((1, 1), accelerator.process_index + 1.0)).sum())
    optimizer.step()
    return model.weight.flatten().tolist()


def test_a_program_keeps_models_apart(ranks: RankServer) -> None:
    assert ranks(2, kept_apart) == [[-1.0], [8.0]]
