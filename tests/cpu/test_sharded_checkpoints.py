"""Checkpoints in parts: under another strategy, on another number of processes, a run goes on as it was."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.support.long_run import LONG_RUN, long_run_param
from tests.support.ranks import RankServer, same_on_all
from tests.support.torch_versions import is_torch

# What the rank server imports once for this module.
PRELOAD = ("peft",)

MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"


class Net(nn.Module):
    """Tied, frozen and odd-sized parameters; buffers that are saved and one that is not."""

    shift: torch.Tensor
    seen: torch.Tensor

    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(5, 7, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor([1.0]))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shift", torch.ones(5), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.norm(self.embed(ids)) + self.frozen(self.shift)
        return self.head(torch.tanh(hidden) * self.scale).square().mean()


def prepare_run(kind: str, seed: int, **options: Any) -> tuple[Any, ...]:
    """(accelerator, model, optimizer, scheduler) of a run that every process takes with the same data."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options) if kind == "fsdp" else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(seed)
    model = Net()
    groups = [
        {"params": [model.embed.weight, model.frozen.weight], "weight_decay": 0.2},
        {"params": [*model.norm.parameters(), model.frozen.bias, model.scale], "lr": 0.01 * (seed + 1)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.03)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def step(run: tuple[Any, ...], number: int) -> float:
    accelerator, model, optimizer, scheduler = run
    loss = model(torch.tensor([number % 7, (3 * number + 1) % 7, 5, 2]))
    accelerator.backward(loss)
    optimizer.step()
    scheduler.scheduler.step()
    optimizer.zero_grad()
    return loss.item()


def part(
    kind: str, first: int, load: str = "", save: str = "", sharded: bool | None = None, steps: int = 3
) -> tuple[list[float], tuple[str, ...]]:
    """Losses of a part of a run, and what the load noted."""
    run = prepare_run(kind, 0 if not load else 1)
    notes = run[0].load_state(load).notes if load else ()
    assert run[1].head.weight is run[1].embed.weight
    losses = [step(run, number) for number in range(first, first + steps)]
    if save:
        run[0].save_state(save, sharded=sharded)
    return losses, notes


def whole() -> list[float]:
    return part("none", 0, steps=9)[0]


@pytest.fixture(scope="module")
def uninterrupted_losses(ranks: RankServer) -> list[float]:
    return ranks(1, whole)[0]


@pytest.mark.parametrize(
    ("first", "second", "third"),
    [
        long_run_param(("ddp", 2, True), ("none", 1, True), ("ddp", 2, None)),
        (("fsdp", 2, None), ("none", 1, True), ("fsdp", 3, None)),
        (("ddp", 2, True), ("fsdp", 2, None), ("ddp", 2, None)),
        (("ddp", 2, False), ("fsdp", 2, False), ("ddp", 2, None)),
        long_run_param(("fsdp", 2, False), ("fsdp", 3, None), ("fsdp", 2, None)),
    ],
    ids=str,
)
def test_a_run_goes_on_under_another_strategy_and_number_of_processes(
    ranks: RankServer, uninterrupted_losses: list[float], tmp_path: Path, first: Any, second: Any, third: Any
) -> None:
    """Also D6: the weights are tied before and after."""
    losses: list[float] = []
    for number, (kind, size, sharded) in enumerate((first, second, third)):
        load, save = (str(tmp_path / f"c{n}") for n in (number - 1, number))
        got = ranks(size, part, kind, 3 * number, load if number else "", save, sharded)
        values_of_ranks = same_on_all([values for values, _ in got])
        if 3 in (first[1], second[1], third[1]):  # a third of three times a number is not always that number
            assert values_of_ranks == pytest.approx(
                uninterrupted_losses[3 * number : 3 * number + 3], rel=1e-5
            )
        else:
            assert values_of_ranks == uninterrupted_losses[3 * number : 3 * number + 3]
        losses += values_of_ranks
        in_parts = (tmp_path / f"c{number}" / MODEL / ".metadata").is_file()
        assert in_parts is (sharded if sharded is not None else kind == "fsdp")
        assert (tmp_path / f"c{number}" / "optimizer.bin").is_file() is not in_parts
    assert len(losses) == 9


# ---------------------------------------------------------------- whole states, two models, compiled models


def two_models(folder: str, seed: int, kind: str, load: bool, **options: Any) -> tuple[list[Any], list[str]]:
    """Weights and moments of two models with an optimizer each, after a save or a load."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, ProjectConfiguration

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if kind == "fsdp" else None
    project = ProjectConfiguration(**options)  # "async_save" makes memory ready after the first step
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, project_config=project)
    torch.manual_seed(seed)
    models: list[Any] = [nn.Linear(3, 5), nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))]
    models[1][1].compile(backend="eager")
    optimizers: list[Any] = [torch.optim.AdamW(model.parameters(), lr=0.1 + seed) for model in models]
    models[0], optimizers[0] = accelerator.prepare(models[0], optimizers[0])
    models[1], optimizers[1] = accelerator.prepare(models[1], optimizers[1])
    if load:
        accelerator.load_state(folder)
    else:
        for _ in range(2):
            loss: Any = sum(model(torch.ones(2, 3)).square().mean() for model in models)
            accelerator.backward(loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state(folder, sharded=True)
        accelerator.wait_for_checkpoint()
    weights = [[whole_of(p) for p in model.parameters()] for model in models]
    states = [o.optimizer.state_dict() for o in optimizers]
    moments = [
        [(key, name, whole_of(s[name])) for key, s in sorted(state["state"].items()) for name in sorted(s)]
        for state in states
    ]
    options_ = [[group["lr"] for group in state["param_groups"]] for state in states]
    return [weights, moments, options_], sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*"))


def whole_of(tensor: Any) -> Any:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().tolist()


@pytest.mark.parametrize("options", [{}, {"async_save": True}], ids=["at once", "in the background"])
def test_two_models_and_two_optimizers_come_back(
    ranks: RankServer, tmp_path: Path, options: dict[str, Any]
) -> None:
    """B8, D8, and D9: the names are those of a model that is not compiled."""
    folder = str(tmp_path / "c")
    saved, files = same_on_all(ranks_of(ranks, 2, folder, 0, "fsdp", False, options))
    folders = [MODEL, "pytorch_model_fsdp_1", OPTIMIZER, "optimizer_1"]
    assert {f"{name}/{file}" for name in folders for file in (".metadata", *SHARDS)} <= set(files)
    others = [("none", 1)] if options else [("ddp", 2), ("fsdp", 3)]
    if LONG_RUN:
        others = [("fsdp", 2), ("ddp", 2), ("none", 1), ("fsdp", 3)]
    for number, (kind, size) in enumerate(others):
        loaded, _ = same_on_all(ranks_of(ranks, size, folder, number + 1, kind, True, {}))
        assert loaded == saved
    from accelerate.utils import merge_fsdp_weights

    merge_fsdp_weights(str(tmp_path / "c" / "pytorch_model_fsdp_1"), str(tmp_path / "merged"))
    assert set(load_file(tmp_path / "merged" / "model.safetensors")) == {
        "0.weight", "0.bias", "1.weight", "1.bias",
    }  # fmt: skip


SHARDS = ("__0_0.distcp", "__1_0.distcp")


def ranks_of(ranks: RankServer, size: int, *args: Any) -> list[Any]:
    return ranks(size, with_options, *args)


def with_options(folder: str, seed: int, kind: str, load: bool, options: dict[str, Any]) -> Any:
    return two_models(folder, seed, kind, load, **options)


# ---------------------------------------------------------------- damage, absence, death


def try_load(folder: str) -> tuple[str, bool]:
    """(what a load says, whether anything changed)."""
    from accelerate.core.errors import CheckpointError

    accelerator, model, _, _ = prepare_run("fsdp", 5)
    before = whole_of(model.embed.weight)
    try:
        accelerator.load_state(folder)
    except CheckpointError as error:
        return str(error), before != whole_of(model.embed.weight)
    return "fine", before != whole_of(model.embed.weight)


@pytest.mark.skipif(not LONG_RUN, reason="runs in `make test-all`")
def test_damage_is_named_on_all_ranks_and_changes_nothing(ranks: RankServer, tmp_path: Path) -> None:
    """D2: a missing, a cut and a changed file of parts."""
    ranks(2, part, "fsdp", 0, "", str(tmp_path / "c"))
    file = tmp_path / "c" / OPTIMIZER / "__1_0.distcp"
    whole = file.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for content in (None, whole[:-1], flipped):
        file.unlink() if content is None else file.write_bytes(content)
        said, changed = same_on_all(ranks(2, try_load, str(tmp_path / "c")))
        assert "__1_0.distcp" in said
        assert not changed
    file.write_bytes(whole)
    assert same_on_all(ranks(2, try_load, str(tmp_path / "c"))) == ("fine", True)


class Phase:
    """A registered object that one rank refuses to load."""

    def __init__(self, number: int, last: int) -> None:
        self.number, self.last = number, last

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]
        if self.number > self.last:
            raise ValueError("this phase is over")


def loads_that_are_refused(kind: str, folder: str) -> list[tuple[str, bool]]:
    """Of a model, an optimizer and an object that do not fit: (what is said, whether anything changed)."""
    from accelerate import Accelerator
    from accelerate.core.errors import CheckpointError
    from accelerate.utils import FullyShardedDataParallelPlugin

    told: list[tuple[str, bool]] = []
    for change in ("", "sgd", "wider", "groups", "phase"):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if kind == "fsdp" else None
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        torch.manual_seed(len(change))
        model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4 if change == "wider" else 2))
        groups: Any = [{"params": [*part.parameters()]} for part in model]
        kind_of_optimizer = torch.optim.SGD if change == "sgd" else torch.optim.AdamW
        optimizer = kind_of_optimizer(groups if change == "groups" else model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        phase = Phase(7 if change else 8, 7 if change == "phase" and accelerator.process_index == 1 else 8)
        accelerator.register_for_checkpointing(phase)
        accelerator.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
        if not change:
            accelerator.save_state(folder)
            continue

        def values(model: Any = model, optimizer: Any = optimizer, phase: Any = phase) -> Any:
            held = [value for state in optimizer.state.values() for value in state.values()]
            tensors = [whole_of(t) for t in (*model.parameters(), *held) if isinstance(t, torch.Tensor)]
            return tensors, phase.number

        before = values()
        try:
            accelerator.load_state(folder)
        except CheckpointError as error:
            told.append((str(error), before != values()))
    return told


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_what_does_not_fit_is_refused_on_all_ranks_and_changes_nothing(
    ranks: RankServer, tmp_path: Path, kind: str
) -> None:
    """G8: also where one rank alone finds out."""
    told = same_on_all(ranks(2, loads_that_are_refused, kind, str(tmp_path / "c")))
    assert [changed for _, changed in told] == [False] * 4
    for (text, _), words in zip(
        told, ("momentum", "1.weight", "group", "rank 1 of 2: could not load registered object"), strict=True
    ):
        assert words in text


def loads_in_place(folder: str) -> bool:
    """Check that parameters and their moments stay where they are in memory, and have the saved values."""
    run = prepare_run("fsdp", 0)
    step(run, 0)
    run[0].save_state(folder)

    def parts() -> list[torch.Tensor]:
        state = run[2].optimizer.state
        held = [state[p][key] for p in state for key in ("exp_avg", "exp_avg_sq")]
        return [tensor.to_local() for tensor in (*run[1].parameters(), *held)]

    saved = [tensor.detach().clone() for tensor in parts()]
    places = [tensor.data_ptr() for tensor in parts()]
    step(run, 1)
    assert any(not torch.equal(new, old) for new, old in zip(parts(), saved, strict=True))
    run[0].load_state(folder)
    assert all(torch.equal(new, old) for new, old in zip(parts(), saved, strict=True))
    if is_torch("<2.10"):  # its FSDP2 pads a shard that is smaller than others anew after a load
        return True
    return places == [tensor.data_ptr() for tensor in parts()]


def test_what_is_there_is_read_into(ranks: RankServer, tmp_path: Path) -> None:
    assert ranks(2, loads_in_place, str(tmp_path / "state")) == [True, True]


def save_on_one(folder: str) -> str:
    from accelerate.core.errors import CheckpointError

    accelerator = prepare_run("fsdp", 0)[0]
    if accelerator.process_index == 0:
        try:
            accelerator.save_state(folder)
        except CheckpointError as error:
            return str(error)
    else:
        try:
            accelerator.wait_for_everyone()
        except Exception as error:  # noqa: BLE001 - told of the same mistake, in the words of a collective
            return str(error)
    return "fine"


def test_a_save_that_one_rank_makes_is_refused(ranks: RankServer, tmp_path: Path) -> None:
    """D3: no hang, and nothing is left."""
    for said in ranks(2, save_on_one, str(tmp_path / "c")):
        assert "save" in said
        assert said != "fine"
    assert not (tmp_path / "c").exists()


def save_and_die(folder: str, victim: int, after: int) -> None:
    """Rank ``victim`` is killed in the middle of writing its parts."""
    run = prepare_run("fsdp", 0)
    step(run, 0)
    written = 0
    write = torch.save

    def deadly(*args: Any, **kwargs: Any) -> None:
        nonlocal written
        written += 1
        if written == after and run[0].process_index == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        write(*args, **kwargs)

    torch.save = deadly
    run[0].save_state(folder)


@pytest.mark.parametrize(("victim", "after"), [long_run_param(0, 30), (1, 8)])
def test_a_rank_that_is_killed_leaves_the_checkpoint_before(
    ranks: RankServer, tmp_path: Path, victim: int, after: int
) -> None:
    """D1: and the next save clears what was left."""
    folder = str(tmp_path / "c")
    ranks(2, part, "fsdp", 0, "", folder)
    before = ranks(2, part, "fsdp", 3, folder)
    ends = ranks.outcomes(2, save_and_die, folder, victim, after, grace=30)
    assert "SIGKILL" in ends[victim].message
    peer = ends[1 - victim]
    assert peer.status == "raised", peer
    assert "gone" in peer.message, peer
    assert ranks(2, part, "fsdp", 3, folder) == before
    ranks(2, part, "fsdp", 0, "", folder)
    assert os.listdir(tmp_path) == ["c"]


# ---------------------------------------------------------------- the functions of transformers' Trainer


def by_functions(folder: str, kind: str, load: bool, itself: bool = False) -> list[float]:
    from accelerate.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer

    run = prepare_run("fsdp", 1 if load else 0, state_dict_type=kind)
    accelerator, model, optimizer, _ = run
    plugin = accelerator.state.fsdp_plugin
    if load:
        inside = (f"{folder}/{MODEL}", f"{folder}/{OPTIMIZER}") if itself else (folder, folder)
        result = load_fsdp_model(plugin, accelerator, model, inside[0], adapter_only=True)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        load_fsdp_optimizer(plugin, accelerator, optimizer, model, inside[1], adapter_only=True)
    else:
        step(run, 0)
        save_fsdp_model(plugin, accelerator, model, folder, adapter_only=True)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    return [step(run, number) for number in (1, 2)]


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_the_functions_of_the_trainer(ranks: RankServer, tmp_path: Path, kind: str) -> None:
    """They load from the folder above or, of parts, from the folder itself."""
    folder = str(tmp_path)
    saved = same_on_all(ranks(2, by_functions, folder, kind, False))
    files = sorted(os.listdir(tmp_path))
    whole_files = ["optimizer.bin", "pytorch_model_fsdp.bin"]
    assert files == ([OPTIMIZER, MODEL] if "SHARDED" in kind else whole_files)
    for itself in (False, True) if "SHARDED" in kind else (False,):
        assert same_on_all(ranks(2, by_functions, folder, kind, True, itself)) == saved
    assert same_on_all(ranks(2, by_functions, folder, kind, False)) == saved  # written over


def by_own_states(folder: str, kind: str) -> tuple[dict[str, bool], list[str]]:
    """Leave a weight out, as programs do that replace the functions behind those of the Trainer."""
    from accelerate.utils import fsdp_utils, load_fsdp_model, save_fsdp_model

    accelerator, model, *_ = prepare_run("fsdp", 0, state_dict_type=kind)
    plugin, before = accelerator.state.fsdp_plugin, accelerator.get_state_dict(model)
    left_out = next(iter(model.state_dict()))
    get_state, set_state = fsdp_utils._get_model_state_dict, fsdp_utils._set_model_state_dict
    calls = []

    def get_some(model: Any, **options: Any) -> dict[str, Any]:
        calls.append("get")
        return {name: value for name, value in get_state(model, **options).items() if name != left_out}

    def set_some(model: Any, state: Any, sd_options: Any, **options: Any) -> Any:
        calls.append("set")
        return set_state(model, state, sd_options=dataclasses.replace(sd_options, strict=False), **options)

    fsdp_utils._get_model_state_dict, fsdp_utils._set_model_state_dict = get_some, set_some
    save_fsdp_model(plugin, accelerator, model, folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    load_fsdp_model(plugin, accelerator, model, folder)
    after = accelerator.get_state_dict(model)
    same = {name: torch.equal(value, before[name]) for name, value in after.items()}
    assert accelerator.process_index or [name for name in same if not same[name]] == [left_out]
    return same, calls


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_states_that_a_program_gives_and_takes(ranks: RankServer, tmp_path: Path, kind: str) -> None:
    (same, calls), (_, others) = ranks(2, by_own_states, str(tmp_path), kind)
    assert len(same) > 2
    assert calls == others == (["get", "get", "set"] if "SHARDED" in kind else ["get", "set"])
    assert os.listdir(tmp_path) == [MODEL if "SHARDED" in kind else "pytorch_model_fsdp.bin"]


def test_the_parts_are_merged_without_processes(ranks: RankServer, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from accelerate.utils import merge_fsdp_weights

    ranks(2, part, "fsdp", 0, "", str(tmp_path / "parts"))
    ranks(2, part, "ddp", 0, "", str(tmp_path / "whole"))
    merge_fsdp_weights(str(tmp_path / "parts"), str(tmp_path / "merged"))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    assert set(merged) == {name.removeprefix("module.") for name in expected} | {"head.weight"}
    assert all(torch.equal(value, merged[name.removeprefix("module.")]) for name, value in expected.items())
