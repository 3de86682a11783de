"""LocalSGD and DiLoCo: what they compute, what they send, how they end and resume."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.core.errors import CheckpointError, PrepareError, SettingError
from accelerate.local_sgd import DiLoCo, LocalSGD
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration, set_seed
from tests.support.long_run import LONG_RUN
from tests.support.ranks import RankServer, same_on_all


class Net(nn.Module):
    """A tied, a frozen and a normalising layer; a buffer of integers and one that is not saved."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.tied(self.first(self.norm(x)).tanh()))


def make_batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def prepare_net(name: str = "Adam", **options: Any) -> tuple[Accelerator, Net, Any]:
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(0)
    model = Net()
    optimizer = getattr(torch.optim, name)([p for p in model.parameters() if p.requires_grad], lr=0.05)
    return accelerator, *accelerator.prepare(model, optimizer)


def take_step(accelerator: Accelerator, model: Net, optimizer: Any, step: int) -> None:
    loss = (model(make_batch(accelerator.process_index, step)) - 1).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def flatten_state(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().double().reshape(-1) for each in model.state_dict().values()])


def train_by_hand(
    ranks: int, steps: int, every: int, outer: tuple[float, float] = (1.0, 0.0)
) -> list[torch.Tensor]:
    """Compute the same on one process: copies, their mean, and the outer step by its formula."""
    torch.manual_seed(0)
    first = Net()
    copies = [Net() for _ in range(ranks)]
    for copy in copies:
        copy.load_state_dict(first.state_dict())
    optimizers = [torch.optim.Adam([p for p in c.parameters() if p.requires_grad], lr=0.05) for c in copies]
    names = [name for name, p in first.named_parameters() if p.requires_grad]
    momentum = {name: torch.zeros_like(first.get_parameter(name)) for name in names}
    lr, mu = outer
    for step in range(steps):
        for rank, (copy, optimizer) in enumerate(zip(copies, optimizers, strict=True)):
            (copy(make_batch(rank, step)) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % every and step + 1 < steps:
            continue
        with torch.no_grad():
            for name in names:
                mean = torch.stack([copy.get_parameter(name) for copy in copies]).mean(0)
                gradient = first.get_parameter(name) - mean
                momentum[name].mul_(mu).add_(gradient)
                first.get_parameter(name).sub_(lr * (gradient + mu * momentum[name]))
                for copy in copies:
                    copy.get_parameter(name).copy_(first.get_parameter(name))
            for name in ("running_mean", "running_var"):
                mean = torch.stack([getattr(copy.norm, name) for copy in copies]).mean(0)
                for copy in copies:
                    getattr(copy.norm, name).copy_(mean)
    return [flatten_state(copy) for copy in copies]


def train(kind: str, steps: int, every: int, **options: Any) -> torch.Tensor:
    accelerator, model, optimizer = prepare_net()
    local = (LocalSGD if kind == "local" else DiLoCo)(accelerator, model, every, **options)
    with local:
        for step in range(steps):
            take_step(accelerator, model, optimizer, step)
            local.step()
    assert local.num_steps == steps
    assert model.tied.weight is model.first.weight
    return flatten_state(model)


@pytest.mark.parametrize(
    ("world", "kind", "steps", "every", "options", "outer"),
    [
        (2, "local", 4, 1, {}, (1.0, 0.0)),
        (3, "local", 5, 2, {}, (1.0, 0.0)),
        (2, "diloco", 4, 1, {"outer_lr": 1.0, "outer_momentum": 0.0}, (1.0, 0.0)),
        (2, "diloco", 7, 3, {}, (0.7, 0.9)),
    ],
)
def test_it_computes_what_the_paper_says(ranks: RankServer, world, kind, steps, every, options, outer):
    """Every step or every few; the last round is at the end, also when it comes early; all copies are one."""
    weights = same_on_all([*ranks(world, train_kind, kind, steps, every, options)])
    expected = train_by_hand(world, steps, every, outer)
    torch.testing.assert_close(weights, expected[0], rtol=1e-5, atol=1e-6)


def train_kind(kind: str, steps: int, every: int, options: dict[str, Any]) -> torch.Tensor:
    return train(kind, steps, every, **options)


# --- communication


def count_sent_bytes() -> int:
    """Return the bytes that this process has written, as the kernel counts them: mostly what gloo sends."""
    return psutil.Process().io_counters().write_chars


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The images and classes of scikit-learn's digits; importing it costs more than training on them."""
    package = find_spec("sklearn")
    assert package is not None
    file = Path(str(package.origin)).parent / "datasets" / "data" / "digits.csv.gz"
    rows = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    return rows[:, :-1] / 16, rows[:, -1].long()


EPOCHS = 8 if LONG_RUN else 4


def train_digits(kind: str) -> dict[str, Any]:
    """Train a small network on the digits; return test accuracy and the bytes this process sent."""
    set_seed(0)
    images, classes = read_digits()
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(images[:1400], classes[:1400]), 16, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    blocks: dict[str, Any] = {
        "ddp": lambda: nullcontext(),
        "local": lambda: LocalSGD(accelerator, model, local_sgd_steps=25),
        "diloco": lambda: DiLoCo(accelerator, model, inner_steps=25),
    }
    before = count_sent_bytes()
    with blocks[kind]() as local:
        for _ in range(EPOCHS):
            for x, y in loader:
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                if local is not None:
                    local.step()
    accelerator.wait_for_everyone()
    bytes_ = count_sent_bytes() - before
    with torch.no_grad():
        right = (model(images[1400:]).argmax(1) == classes[1400:]).float().mean().item()
    weights = sum(each.numel() for each in model.parameters()) * 4
    return {"accuracy": right, "sent": bytes_, "weights": weights}


def train_digits_all_ways() -> dict[str, dict[str, Any]]:
    return {kind: train_digits(kind) for kind in ("ddp", "local", "diloco")}


@pytest.mark.skipif(sys.platform != "linux", reason="the counters are Linux's")
def test_digits_at_a_tenth_of_the_communication(ranks: RankServer) -> None:
    for results in ranks(2, train_digits_all_ways):
        ddp = results["ddp"]
        # A ring of two sends as much as there is, in each of 43 steps of an epoch.
        assert 43 * EPOCHS * ddp["weights"] < ddp["sent"] < 1.1 * 43 * EPOCHS * ddp["weights"]
        assert ddp["accuracy"] > 0.9
        for kind in ("local", "diloco"):
            result = results[kind]
            assert 0 < result["sent"] < ddp["sent"] / 10, kind
            assert result["accuracy"] > ddp["accuracy"] - 0.02, kind


# --- how gradients, buffers and optimizers are treated


def inspect_local_sgd() -> dict[str, Any]:
    state: dict[str, Any] = {}
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator, model, optimizer = prepare_net(gradient_accumulation_plugin=plugin)
    rank = accelerator.process_index
    user_own = accelerator.unwrap_model(model)
    gradients, counts = [], []
    with LocalSGD(accelerator, user_own, local_sgd_steps=2) as local:
        model.cache.fill_(rank)
        model.frozen.weight.data.fill_(rank)
        for step in range(6):
            with accelerator.accumulate(model):
                accelerator.backward(model(make_batch(rank, step)).square().mean())
                gradients.append(model.first.weight.grad.clone())
                optimizer.step()
                optimizer.zero_grad()
            local.step()
            counts.append(local.num_steps)
        apart = flatten_state(model)
        moments = [v.clone() for row in optimizer.state.values() for v in row.values()]
    state["gradients"], state["counts"] = torch.stack(gradients), counts
    state["apart"], state["together"] = apart, flatten_state(model)
    state["moments apart"] = torch.cat([v.reshape(-1) for v in moments])
    state["moments"] = torch.cat([v.reshape(-1) for row in optimizer.state.values() for v in row.values()])
    state["cache"], state["frozen"] = model.cache.item(), model.frozen.weight.mean().item()
    # After the block gradients are averaged again, and the copies stay one.
    model.frozen.weight.data.zero_()
    for step in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(make_batch(rank, step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    state["after"] = flatten_state(model)[: model.first.weight.numel()]
    return state


def test_gradients_stay_local_and_only_what_trains_is_sent(ranks: RankServer) -> None:
    """The user's own object may be given. Steps are counted, not micro-batches: 6 of these are 3 of those."""
    first, second = ranks(2, inspect_local_sgd)
    for index in range(6):
        assert not torch.equal(first["gradients"][index], second["gradients"][index])
    assert first["counts"] == second["counts"] == [0, 1, 1, 2, 2, 3]
    assert not torch.equal(first["apart"], second["apart"])
    assert (first["cache"], second["cache"]) == (0, 1), "a buffer that is not saved is each process's own"
    assert (first["frozen"], second["frozen"]) == (0, 1), "frozen weights are not sent"
    trained = first["together"] != second["together"]
    assert trained.sum() == 16, "all the same but the 16 frozen weights that this test has changed"
    mean = (first["moments apart"] + second["moments apart"]) / 2
    assert not torch.equal(first["moments apart"], second["moments apart"])
    for state in (first, second):
        torch.testing.assert_close(state["moments"], mean)
    assert torch.equal(first["after"], second["after"])


def weigh_inside() -> str:
    accelerator, model, _ = prepare_net()
    with LocalSGD(accelerator, model, local_sgd_steps=2), pytest.raises(PrepareError) as raised:
        accelerator.backward(model(make_batch(0, 0)).square().mean(), num_items=3)
    accelerator.backward(model(make_batch(0, 0)).square().mean(), num_items=3)
    return str(raised.value)


def test_items_of_all_processes_are_refused_inside(ranks: RankServer) -> None:
    assert all("during local training" in text for text in ranks(2, weigh_inside))


def leave_early(kind: str, breaks: bool) -> tuple[torch.Tensor, int, float]:
    """Rank 0 takes 5 steps, rank 1 leaves after 3 and takes part in the rounds that follow."""
    accelerator, model, optimizer = prepare_net("SGD")
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.9))
    local = LocalSGD(accelerator, model, 2) if kind == "local" else DiLoCo(accelerator, model, 2)
    with local:
        for step in range(5 if accelerator.process_index == 0 or breaks else 3):
            take_step(accelerator, model, optimizer, step)
            scheduler.step()
            local.step()
            if accelerator.process_index == 1 and breaks and step == 2:
                break
    return flatten_state(model), local.num_steps, optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(("kind", "breaks"), [("local", True), ("diloco", False)])
def test_who_leaves_early_takes_part_until_all_have_left(ranks: RankServer, kind: str, breaks: bool) -> None:
    first, second = ranks(2, leave_early, kind, breaks, timeout=20)
    same_on_all([first[0], second[0]])
    assert (first[1], second[1]) == (5, 3)
    assert first[2] == second[2]


def raise_inside() -> tuple[str, bool, bool]:
    accelerator, model, optimizer = prepare_net()
    local = LocalSGD(accelerator, model, 10)
    caught = ""
    try:
        with local:
            take_step(accelerator, model, optimizer, 0)
            local.step()
            raise KeyError("no such column")
    except KeyError as error:
        caught = str(error)
    both = accelerator.gather(model.first.weight.detach()[None])
    accelerator.backward(model(make_batch(accelerator.process_index, 1)).square().mean())
    gradients = accelerator.gather(model.first.weight.grad[None])  # averaged again
    return caught, torch.equal(*both), torch.equal(*gradients)


def test_after_an_error_nobody_is_waited_for(ranks: RankServer) -> None:
    assert ranks(2, raise_inside, timeout=20) == [("'no such column'", False, True)] * 2


def scale_apart() -> tuple[list[float], float]:
    """fp16: one process has an overflow, so that loss scales and skipped steps differ inside the block."""
    accelerator, model, optimizer = prepare_net("SGD", mixed_precision="fp16")
    scaler = accelerator.scaler
    assert scaler is not None
    inside: list[float] = []
    with LocalSGD(accelerator, model, 2) as local:
        for step in range(3):
            loss = model(make_batch(0, step)).square().mean()
            bad = step == 1 and accelerator.process_index == 1
            accelerator.backward(loss * (float("inf") if bad else 1.0))
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            inside.append(accelerator.scaler.get_scale())
    return inside, accelerator.scaler.get_scale()


def test_loss_scales_differ_inside_and_agree_after(ranks: RankServer) -> None:
    (first, after), (second, other) = ranks(2, scale_apart)
    assert first == [65536.0] * 3
    assert second == [65536.0, 32768.0, 32768.0]
    assert after == other == 65536.0


def end_with_odd_states() -> list[dict[str, Any]]:
    """States of each kind, made of this rank's number, after a block has ended."""
    accelerator, model, optimizer = prepare_net("SGD")
    rank, inner = accelerator.process_index, optimizer.optimizer
    usual, coded, local, *_ = model.parameters()
    with LocalSGD(accelerator, model, 1):
        inner.state[usual] = {"moment": torch.full((2,), float(rank)), "step": torch.tensor(rank)}
        codes = torch.full((2,), rank, dtype=torch.uint8)
        inner.state[coded] = {"absmax1": torch.full((1,), float(rank)), "state1": codes, "step": rank}
        if rank:
            inner.state[local] = {"moment": torch.zeros(2)}
    states = [inner.state[each] for each in (usual, coded)] + [inner.state.get(local, {})]
    return [{n: torch.as_tensor(value).float().mean().item() for n, value in s.items()} for s in states]


def test_states_with_integers_and_of_some_ranks_alone(ranks: RankServer) -> None:
    """The codes of an 8-bit optimizer are nothing without their scales, which were averaged."""
    assert same_on_all(ranks(2, end_with_odd_states)) == [
        {"moment": 0.5, "step": 0.0},
        {"absmax1": 0.0, "state1": 0.0, "step": 0.0},
        {},
    ]


def reduce_in_half() -> tuple[bool, bool]:
    """A bfloat16 model: the mean of 1 and 1 + 2^-7 is not representable; the anchor keeps it."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1, bias=False).to(torch.bfloat16))
    model.weight.data.fill_(1.0)
    local = DiLoCo(accelerator, model, 1, outer_lr=1.0, outer_momentum=0.0)
    with local:
        model.weight.data.fill_(1.0 + accelerator.process_index * 2**-7)
        local.step()
    anchor = local.state_dict()["anchor"]["weight"]
    return model.weight.dtype == torch.bfloat16, bool((anchor == 1.0 + 2**-8).all())


def test_half_precision_weights_are_averaged_in_float32(ranks: RankServer) -> None:
    assert ranks(2, reduce_in_half) == [(True, True)] * 2


# --- resume


def resume(
    kind: str, folder: str, cut: int, steps: int, machines: int = 1
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """A whole run, and one that saves after ``cut`` steps and goes on in fresh objects."""
    options: dict[str, Any] = {}
    if machines > 1:
        node, local_rank = divmod(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) // machines)
        os.environ.update(GROUP_RANK=str(node), LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE="2")
        folder += str(node)
        options["project_config"] = ProjectConfiguration(save_on_each_node=True)

    def start() -> tuple[Accelerator, Net, Any, Any]:
        accelerator, model, optimizer = prepare_net(**options)
        local = LocalSGD(accelerator, model, 3) if kind == "local" else DiLoCo(accelerator, model, 3)
        accelerator.register_for_checkpointing(local)
        return accelerator, model, optimizer, local

    def go(first: int, last: int, accelerator: Accelerator, model: Net, optimizer: Any, local: Any) -> None:
        for step in range(first, last):
            take_step(accelerator, model, optimizer, step)
            local.step()

    whole = start()
    with whole[-1]:
        go(0, steps, *whole)
    saved = start()
    with saved[-1]:
        go(0, cut, *saved)
        saved[0].save_state(folder)
    fresh = start()
    with torch.no_grad():
        for parameter in fresh[1].parameters():
            parameter.zero_()
    fresh[0].load_state(folder)
    with fresh[-1]:
        go(cut, steps, *fresh)
    return flatten_state(whole[1]), flatten_state(fresh[1]), fresh[-1].num_steps


@pytest.mark.parametrize(("kind", "cut"), [("local", 4), ("diloco", 4), ("diloco", 3)])
def test_resume_is_exact_between_and_within_rounds(
    ranks: RankServer, tmp_path: Path, kind: str, cut: int
) -> None:
    for whole, resumed, steps in ranks(2, resume, kind, str(tmp_path / "saved"), cut, 8):
        assert torch.equal(whole, resumed)
        assert steps == 8


def test_each_machine_may_have_the_copies_of_its_own_processes(ranks: RankServer, tmp_path: Path) -> None:
    for whole, resumed, _ in ranks(4, resume, "diloco", str(tmp_path / "node"), 4, 6, 2):
        assert torch.equal(whole, resumed)
    names = [path.name for path in sorted((tmp_path / "node1").glob("rank_state*"))]
    assert names == ["rank_state_0_2.bin", "rank_state_0_3.bin"]


def test_a_refused_load_takes_back_the_progress_alone(ranks: RankServer, tmp_path: Path) -> None:
    assert ranks(2, refuse_load, str(tmp_path / "saved")) == [(0, 0.0)] * 2


def refuse_load(folder: str) -> tuple[int, float]:
    """Load a checkpoint whose second object is refused; the steps and weights then."""

    class Refusing:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ValueError("not mine")

    accelerator, model, optimizer = prepare_net()
    local = DiLoCo(accelerator, model, 3)
    accelerator.register_for_checkpointing(local, Refusing())
    with local:
        take_step(accelerator, model, optimizer, 0)
        local.step()
        accelerator.save_state(folder)
    local.num_steps = 0
    with torch.no_grad():
        model.first.weight.zero_()
    with pytest.raises(CheckpointError, match="not mine"):
        accelerator.load_state(folder)
    return local.num_steps, model.first.weight.abs().sum().item()


def resume_after_overflow(folder: str) -> list[tuple[list[float], list[float], float]]:
    """A run in which one process skips a step, and one that resumes after it: its rates, its loss scales."""
    runs = []
    for resumes in (False, True):
        accelerator, model, optimizer = prepare_net("SGD", mixed_precision="fp16")
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
        schedule = accelerator.prepare(schedule)
        local = LocalSGD(accelerator, model, 4)
        accelerator.register_for_checkpointing(local)
        rates, scales = [], []
        if resumes:
            accelerator.load_state(folder)
        with local:
            for step in range(2 if resumes else 0, 4):
                loss = model(make_batch(accelerator.process_index, step)).square().mean()
                bad = step == 1 and accelerator.process_index == 1
                accelerator.backward(loss * (float("inf") if bad else 1.0))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                local.step()
                if step > 1:
                    rates += schedule.get_last_lr()
                    scales.append(accelerator.scaler.get_scale())
                elif step == 1:
                    accelerator.save_state(folder)
        runs.append((rates, scales, flatten_state(model).sum().item()))
    return runs


def test_a_loss_scale_and_a_schedule_of_one_rank_are_resumed(ranks: RankServer, tmp_path: Path) -> None:
    for whole, resumed in ranks(2, resume_after_overflow, str(tmp_path / "saved")):
        assert whole == resumed


def load_and_end(folder: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    accelerator, model, _ = prepare_net()
    accelerator.register_for_checkpointing(DiLoCo(accelerator, model, 3))
    accelerator.load_state(folder)
    copies = [torch.load(Path(folder, f"rank_state_0_{rank}.bin")) for rank in range(2)]
    return model.first.weight.detach(), [copy["model"]["first.weight"] for copy in copies]


def test_on_another_number_of_processes_the_replicas_are_averaged(ranks: RankServer, tmp_path: Path) -> None:
    ranks(2, resume, "diloco", str(tmp_path / "saved"), 4, 5)
    weights, copies = load_and_end(str(tmp_path / "saved"))
    assert len(copies) == 2
    assert not torch.equal(*copies)
    torch.testing.assert_close(weights, torch.stack(copies).mean(0))


# --- one process


def test_alone_local_sgd_does_nothing_and_diloco_follows_its_outer_optimizer() -> None:
    accelerator, model, optimizer = prepare_net()
    with LocalSGD(accelerator, model, 1) as local:
        take_step(accelerator, model, optimizer, 0)
        local.step()
    assert (local.enabled, local.num_steps) == (False, 0)
    torch.testing.assert_close(
        train("diloco", 7, 3), train_by_hand(1, 7, 3, (0.7, 0.9))[0], rtol=1e-5, atol=1e-6
    )


def test_disabled_it_does_nothing() -> None:
    accelerator, model, _ = prepare_net()
    before = model.first.weight.clone()
    with DiLoCo(accelerator, model, 1, outer_lr=5.0, enabled=False) as local:
        local.step()
    assert torch.equal(model.first.weight, before)
    state = local.state_dict()
    DiLoCo(accelerator, model, 1).load_state_dict(state)


def test_wrong_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, _ = prepare_net()
    with pytest.raises(SettingError, match="local_sgd_steps is 0"):
        LocalSGD(accelerator, model, 0)
    with pytest.raises(SettingError, match="inner_steps is 2"):
        DiLoCo(accelerator, model, 2.5)
    with pytest.raises(SettingError, match="outer_lr"):
        DiLoCo(accelerator, model, 1, outer_lr=0)
    with pytest.raises(SettingError, match="outer_momentum"):
        DiLoCo(accelerator, model, 1, outer_momentum=1)
    with pytest.raises(PrepareError, match="not prepared"):
        DiLoCo(accelerator, Net(), 1)
    local = DiLoCo(accelerator, model, 1)
    with pytest.raises(PrepareError, match="outside of its block"):
        local.step()
    with local, pytest.raises(PrepareError, match="entered already"):
        local.__enter__()
    monkeypatch.setattr(type(accelerator.strategy), "replicates_model", False)
    with pytest.raises(NotImplementedError, match="does not work with the strategy"):
        DiLoCo(accelerator, model, 1)
    DiLoCo(accelerator, model, 1, enabled=False)


def test_a_parameter_that_begins_to_train_joins_at_the_next_round() -> None:
    accelerator, model, optimizer = prepare_net("SGD")
    local = DiLoCo(accelerator, model, 1)
    with local:
        take_step(accelerator, model, optimizer, 0)
        local.step()
        model.frozen.requires_grad_(True)
        for step in (1, 2):
            take_step(accelerator, model, optimizer, step)
            local.step()
    assert "frozen.weight" in local.state_dict()["anchor"]
