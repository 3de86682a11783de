"""Buffers that change in training are those of rank 0 on all ranks: in evaluation, and in a resumed run."""

from __future__ import annotations

import copy
import logging
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.long_run import select_cases
from tests.support.ranks import RankServer, same_on_all
from tests.support.torch_versions import is_torch

# What the rank server imports once for this module.
PRELOAD = ("deepspeed.runtime.zero.muon.muon_optimizer", "transformers.integrations.deepspeed")
WIDTH = 4


class Layer(nn.Module):
    """Statistics that BatchNorm keeps, a moving mean that the output depends on, and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("ones", torch.ones(WIDTH))
        self.register_buffer("cache", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x * self.get_buffer("ones") + self.down(torch.tanh(self.up(x))))
        if self.training:
            with torch.no_grad():
                self.mean += 0.1 * (y.square().mean(0) - self.mean)
                self.seen += 1
                self.cache += x.sum()
        return y + self.mean


class Net(nn.Module):
    _no_split_modules = ("Layer",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def accelerator_of(said: dict[str, Any]) -> Any:
    from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.utils import PipelineParallelConfig, TorchTensorParallelConfig

    more: dict[str, Any] = {}
    if "zero" in said:
        more["deepspeed_plugin"] = DeepSpeedPlugin(zero_stage=said["zero"])
    elif "fsdp" in said:
        more["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=said["fsdp"], auto_wrap_policy=said.get("policy", "transformer_based_wrap")
        )
    elif said:
        plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
        handlers: dict[str, Any] = {
            "tp_size": {"tp_handler": TorchTensorParallelConfig(plan=plan)},
            "pp_size": {"pp_handler": PipelineParallelConfig(num_microbatches=2)},
        }
        chosen = {key: value for name in said for key, value in handlers.get(name, {}).items()}
        more["parallelism_config"] = ParallelismConfig(**said, **chosen)
    return Accelerator(cpu=True, gradient_accumulation_steps=2, **more)


def rows(accelerator: Any, step: int) -> torch.Tensor:
    """Other samples for each data parallel rank; other positions of them where sequences are sharded."""
    sizes = accelerator.parallelism_config
    is_sequence_sharded = sizes is not None and max(sizes.cp_size, sizes.sp_size) > 1
    index = accelerator.process_index if is_sequence_sharded else accelerator.strategy.data_shard.index
    chance = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(8, WIDTH, generator=chance) * (1 + index)


def train(accelerator: Any, model: Any, optimizer: Any, steps: range) -> None:
    model.train()
    for step in steps:
        with accelerator.accumulate(model):
            accelerator.backward(model(rows(accelerator, step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def evaluate(model: Any) -> list[float]:
    model.eval()
    with torch.no_grad():
        return [model(torch.ones(4, WIDTH)).sum().item() for _ in range(2)]


def made(said: dict[str, Any]) -> tuple[Any, Any, Any]:
    accelerator = accelerator_of(said)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return accelerator, model, optimizer


def run(said: dict[str, Any], folder: str) -> tuple[list[list[float]], list[list[float]]]:
    """Values in the middle of a window, at a save and at the end; those of the resumed run."""
    accelerator, model, optimizer = made(said)
    whole = []
    for steps in range(3), range(3, 4), range(4, 6):
        train(accelerator, model, optimizer, steps)
        if steps.stop == 4:
            accelerator.save_state(folder)
        whole.append(evaluate(model))
    accelerator, model, optimizer = made(said)
    accelerator.load_state(folder)
    rest = [evaluate(model)]
    train(accelerator, model, optimizer, range(4, 6))
    return whole, [*rest, evaluate(model)]


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {}),
    "fsdp1": (2, {"fsdp": 1}),
    "fsdp2": (2, {"fsdp": 2}),
    "replicas": (2, {"dp_replicate_size": 2}),
    "hsdp": (4, {"dp_replicate_size": 2, "dp_shard_size": 2}),
    "tp x shards": (4, {"tp_size": 2, "dp_shard_size": 2}),
    "cp": (2, {"cp_size": 2}),
    "sp x shards": (4, {"sp_size": 2, "dp_shard_size": 2}),
    "pp x replicas": (4, {"pp_size": 2, "dp_replicate_size": 2}),
    "ZeRO 2": (2, {"zero": 2}),
    "ZeRO 3": (2, {"zero": 3}),
}


@pytest.mark.parametrize("way", WAYS)
def test_evaluation_and_a_resumed_run_are_equal(ranks: RankServer, way: str, tmp_path: Path) -> None:
    """G1: one value on all ranks, also between the micro-batches of a window, and bit-equal resume."""
    size, said = WAYS[way]
    whole, resumed = same_on_all(ranks(size, run, said, str(tmp_path / "state")))
    assert resumed == whole[1:]
    assert len({value for pair in whole for value in pair}) == 3, "the model trains between evaluations"


class ScaledInput(nn.Module):
    """A moving size of the inputs, which differs by rank, and by which the output is divided."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, 1)
        self.register_buffer("size", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.size += 0.1 * (x.abs().mean() - self.size)
        return self.linear(x) / self.size


def run_saved_in_a_window(
    said: dict[str, Any], folder: str, evaluates: bool
) -> tuple[list[float], list[float]]:
    """Save after three micro-batches of eight, of which every second steps; the values of both runs."""

    def begin() -> tuple[Any, Any, Any]:
        accelerator = accelerator_of(said)
        net = ScaledInput()
        return accelerator, *accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def go_on(run: tuple[Any, Any, Any]) -> list[float]:
        found = evaluate(run[1]) if evaluates else []
        train(*run, range(3, 8))
        weights = run[0].get_state_dict(run[1])
        return [*found, *evaluate(run[1]), *(weights["linear.weight"].flatten().tolist() if weights else ())]

    run = begin()
    train(*run, range(3))
    run[0].save_state(folder)
    whole = go_on(run)
    run = begin()
    run[0].load_state(folder)
    return whole, go_on(run)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("said", [{}, {"fsdp": 2, "policy": None}], ids=str)
def test_a_window_that_was_saved_open_goes_on_with_its_buffers(
    ranks: RankServer, said: dict[str, Any], evaluates: bool, tmp_path: Path
) -> None:
    """G1, G2: under DDP each rank has buffers of its own until the window ends, or until an evaluation."""
    for whole, resumed in ranks(2, run_saved_in_a_window, said, str(tmp_path / "state"), evaluates):
        if said and is_torch(">=2.15"):  # there each rank gets the mean of all, and not its own gradient
            assert whole == pytest.approx(resumed, rel=1e-5)
        else:
            assert whole == resumed


class LateMean(nn.Module):
    """A moving mean that begins to move in the fifth forward of the training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, 1)
        self.register_buffer("mean", torch.zeros(()))
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.forwards += 1
            if self.forwards > 4:
                with torch.no_grad():
                    self.mean += 0.1 * (x.mean() - self.mean)
        return self.linear(x) + self.mean


def run_late(said: dict[str, Any], folder: str, evaluates: bool) -> tuple[list[float], list[float]]:
    """Save after six forwards, and evaluate then or not; the values of the run and of the resumed one."""

    def begin(forwards: int) -> tuple[Any, Any, Any]:
        accelerator = accelerator_of(said)
        net = LateMean()
        net.forwards = forwards
        return accelerator, *accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def go_on(run: tuple[Any, Any, Any]) -> list[float]:
        found = evaluate(run[1]) if evaluates else []
        train(*run, range(6, 9))
        return [*found, *evaluate(run[1])]

    run = begin(0)
    train(*run, range(6))  # the mean moves in forwards 5 and 6
    run[0].save_state(folder)
    whole = go_on(run)
    run = begin(6)
    run[0].load_state(folder)
    return whole, go_on(run)


LATE = [("fsdp1", False), ("fsdp2", True), ("ZeRO 2", True), ("ZeRO 3", False)]


@pytest.mark.parametrize(
    ("way", "evaluates"),
    select_cases(product(("fsdp1", "fsdp2", "hsdp", "ZeRO 2", "ZeRO 3"), (False, True)), LATE),
)
def test_a_buffer_that_begins_to_change_late_is_that_of_rank_0(
    ranks: RankServer, way: str, evaluates: bool, tmp_path: Path
) -> None:
    """G1: from the next checkpoint on, in the run that goes on and in a resumed one."""
    size, said = WAYS[way]
    said = said | {"policy": None} if "fsdp" in said else said
    whole, resumed = same_on_all(ranks(size, run_late, said, str(tmp_path), evaluates))
    assert whole == resumed
    assert len(set(whole)) == 1 + evaluates


def evaluate_alone() -> float:
    """Rank 0 evaluates a model with constants on the weights that all have gathered, after each step."""
    import deepspeed

    accelerator = accelerator_of({"zero": 3})
    net = nn.Linear(WIDTH, 1)
    net.register_buffer("table", torch.ones(3))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    user = accelerator.unwrap_model(model)
    for step in range(4):
        train(accelerator, model, optimizer, range(step, step + 1))
        with deepspeed.zero.GatheredParameters(list(user.parameters())):
            if accelerator.is_main_process:
                evaluate(user)
    train(accelerator, model, optimizer, range(4, 6))
    return evaluate(model)[0]


def test_a_rank_evaluates_alone_where_buffers_are_constant(ranks: RankServer) -> None:
    """Before an evaluation the ranks agree on nothing that has not changed."""
    same_on_all(ranks(2, evaluate_alone))


def cost() -> dict[str, Any]:
    """What is sent by the training of three models, and what is said of it."""
    accelerator = accelerator_of({"fsdp": 2, "policy": None})
    sent: list[int] = []
    broadcast = dist.broadcast

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return broadcast(tensor, *args, **kwargs)

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accelerate").addHandler(handler)
    constant = nn.Linear(WIDTH, 1)
    constant.register_buffer("table", torch.ones(1000))
    found: dict[str, Any] = {}
    for name, user in {"none": nn.Linear(WIDTH, 1), "constant": constant, "changing": Net()}.items():
        model = accelerator.prepare(user)
        dist.broadcast, before = counted, len(sent)
        for step in range(5):
            accelerator.backward(model(rows(accelerator, step)).square().mean())
        found["caches"] = [part.cache.item() for part in model.modules() if hasattr(part, "cache")]
        evaluate(model)
        model.train()
        accelerator.backward(model(rows(accelerator, 5)).square().mean())
        dist.broadcast, found[name] = broadcast, sent[before:]
    found["said"] = said
    return found


def test_changing_buffers_are_one_broadcast_and_others_none(ranks: RankServer) -> None:
    first, second = ranks(2, cost)
    # Of each layer: two statistics, their counter, the mean, a counter and the constants beside them.
    state = 2 * (4 * WIDTH * 4 + 2 * 8)
    assert first["none"] == first["constant"] == []
    # Before forwards 2 to 5 and the first evaluation; nothing has changed before the next training forward.
    assert first["changing"] == second["changing"] == [state] * 5
    assert first["caches"] != second["caches"], "what is not persistent is each rank's own"
    assert second["said"] == []
    (note,) = first["said"]
    assert "the buffers of layers.0, layers.0.norm, layers.1 and 1 more modules change in training" in note


def keep_apart() -> list[float]:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    handler = DistributedDataParallelKwargs(broadcast_buffers=False)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    train(accelerator, model, optimizer, range(4))
    return evaluate(model)


def test_each_rank_keeps_its_own_under_ddp_if_asked_to(ranks: RankServer) -> None:
    first, second = ranks(2, keep_apart)
    assert first[0] == first[1] != second[0] == second[1]


def used() -> tuple[list[float], list[bool]]:
    """Two forwards before a backward, and layers that begin to train late, one after the other."""
    accelerator = accelerator_of({"fsdp": 2})
    net = Net()
    for layer in net.layers:
        layer.eval()
    model = accelerator.prepare(net)
    values, untouched = [], []
    step = 0
    for trained, count in (model.head, 1), (model.layers[1], 5), (model, 2):
        untouched.append(not model.layers[0].seen.item())
        trained.train()
        for _ in range(count):
            first, second = model(rows(accelerator, step)), model(rows(accelerator, step + 1))
            accelerator.backward((first + second).square().mean())
            step += 1
        modes = [module.training for module in model.modules()]
        values += evaluate(model)
        for module, mode in zip(model.modules(), modes, strict=True):
            module.training = mode
    return values, untouched


def test_forwards_before_one_backward_and_layers_that_thaw(ranks: RankServer) -> None:
    values, untouched = same_on_all(ranks(2, used))
    assert values[::2] == values[1::2]
    assert untouched == [True] * 3


def copied() -> list[float]:
    accelerator = accelerator_of({"zero": 1})
    net = Net()
    with torch.no_grad():
        net.layers[0].mean += accelerator.process_index  # made of other random numbers
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    values = evaluate(model)
    train(accelerator, model, optimizer, range(2))
    if accelerator.is_main_process:
        average = copy.deepcopy(accelerator.unwrap_model(model))
        evaluate(average)  # no rank waits for a copy
    return values + evaluate(model)


def test_all_begin_with_the_buffers_of_rank_0_and_copies_are_plain(ranks: RankServer) -> None:
    values = same_on_all(ranks(2, copied))
    assert values[0] == values[1] != values[2] == values[3]
