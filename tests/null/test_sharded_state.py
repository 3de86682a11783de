"""Checkpoints in parts, in one process: names, ties, groups, damage, indexes that would run code, merging."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from accelerate import Accelerator, utils
from accelerate.checkpoint import weight_files
from accelerate.checkpoint.dcp_files import ShardFolderReader, lazy_tensors
from accelerate.checkpoint.layout import CheckpointLoadContext
from accelerate.checkpoint.sharded_state import (
    ShardedModelState,
    ShardedOptimizerState,
    optimizer_state_by_index,
)
from accelerate.cli.main import run
from accelerate.commands.merge import merge_command, merge_command_parser
from accelerate.core.errors import CheckpointError, SettingError
from accelerate.core.torch_internals import accepts
from accelerate.facade import fsdp_checkpoint

dcp: Any = torch.distributed.checkpoint
# Torch 2.6 sees by itself that there is no group of processes.
ALONE = {"no_dist": True} if accepts(dcp.save, "no_dist") else {}


class Net(nn.Module):
    """Ties, buffers of both kinds, and a state that is no tensor."""

    def __init__(self, tie: bool = True, extra: Any = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids)).square().mean()


def save(spread: Any, folder: Path, ranks: int = 1) -> Path:
    """Write a state that is the same on all ranks."""
    plans = [spread.local_plan(rank, ranks)[0] for rank in range(ranks)]
    share = spread.shard_writer(spread.combine_plans(plans), 0, 0)
    folder.mkdir(parents=True)
    own = folder / Path(share.file).name
    with own.open("wb") as file:
        told = share.fill(file)
    (folder / ".metadata").write_bytes(share.build_index([told])[1])
    return folder


def load(spread: Any, folder: Path, **reading: Any) -> CheckpointLoadContext:
    how = CheckpointLoadContext(**reading)
    spread.prepare_load(folder, how)()
    return how


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))


# ---------------------------------------------------------------- models


def test_a_model_comes_back_with_its_ties_and_extra_state(tmp_path: Path) -> None:
    """D6, D8."""
    saved, fresh = Net(extra={"a": [1, 2.5], "b": {"c": "text"}}), Net(extra={})
    folder = save(ShardedModelState(saved), tmp_path / "m")
    load(ShardedModelState(fresh), folder)
    assert equal(saved, fresh)
    assert fresh.head.weight is fresh.embed.weight
    assert fresh.extra == saved.extra


def test_an_extra_state_that_is_a_tensor_may_have_another_length(tmp_path: Path) -> None:
    """That of TransformerEngine is empty before the first forward."""
    trained = torch.arange(9, dtype=torch.uint8)
    folder = save(ShardedModelState(Net(extra=trained)), tmp_path / "m")
    for count in (0, 4, 9):
        fresh = Net(extra=torch.zeros(count, dtype=torch.uint8))
        load(ShardedModelState(fresh), folder)
        assert torch.equal(fresh.extra, trained)


def test_code_of_the_model_may_exchange_values_while_it_is_loaded(tmp_path: Path) -> None:
    def exchange(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        state["0.weight"], state["1.weight"] = state["1.weight"], state["0.weight"]

    models: list[Any] = [nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3)) for _ in range(2)]
    saved, fresh = models
    for model in models:
        model.register_load_state_dict_pre_hook(exchange)
    load(ShardedModelState(fresh), save(ShardedModelState(saved), tmp_path / "m"))
    saved.load_state_dict(saved.state_dict() | {"0.weight": saved[0].weight.clone()})
    assert equal(saved, fresh)


def test_tied_weights_are_written_once_and_torch_reads_both(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(50, 50, bias=False), nn.Linear(50, 50, bias=False))
    model[1].weight = model[0].weight
    folder = save(ShardedModelState(model), tmp_path / "m")
    assert (folder / "__0_0.distcp").stat().st_size < 2 * 50 * 50 * 4
    state = {"model": {"0.weight": torch.zeros(50, 50), "1.weight": torch.zeros(50, 50)}}
    dcp.load(state, checkpoint_id=folder, **ALONE)
    assert torch.equal(state["model"]["0.weight"], model[0].weight)
    assert torch.equal(state["model"]["1.weight"], model[0].weight)


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    saved, fresh = Net(), Net(tie=False)
    dcp.save({"model": saved.state_dict()}, checkpoint_id=tmp_path / "m", **ALONE)
    load(ShardedModelState(fresh), tmp_path / "m")
    assert equal(saved, fresh)


def test_names_stay_under_compilation(tmp_path: Path) -> None:
    """D9: also of parts that are compiled inside a model."""
    saved: Any = Net()
    saved.head = torch.compile(saved.head, backend="eager")
    compiled: Any = torch.compile(saved, backend="eager")
    folder = save(ShardedModelState(compiled), tmp_path / "m")
    assert set(lazy_tensors(folder)) == {"embed.weight", "head.weight", "count"}
    fresh = Net()
    load(ShardedModelState(fresh), folder)
    assert torch.equal(fresh.head.weight, saved.embed.weight)
    other: Any = torch.compile(Net(), backend="eager")
    load(ShardedModelState(other), folder)
    assert torch.equal(other.embed.weight, saved.embed.weight)


def test_a_tie_that_the_model_does_not_have_is_told(tmp_path: Path) -> None:
    folder = save(ShardedModelState(Net()), tmp_path / "m")
    assert "tied to embed.weight" in " ".join(load(ShardedModelState(Net(tie=False)), folder).notes)


def test_what_does_not_fit_is_named_before_anything_changes(tmp_path: Path) -> None:
    folder = save(ShardedModelState(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))), tmp_path / "m")
    other: Any = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"it lacks 2.weight, 2.bias; the model does not have 1.weight"):
        ShardedModelState(other).prepare_load(folder, CheckpointLoadContext())
    how = load(ShardedModelState(other), folder, strict=False)
    assert how.missing == ["2.weight (in m)", "2.bias (in m)"]
    assert len(how.notes) == 2
    assert torch.equal(other[2].weight, before["2.weight"])
    assert not torch.equal(other[0].weight, before["0.weight"])
    with pytest.raises(CheckpointError, match=r"0.weight has the shape \(3, 2\)"):
        ShardedModelState(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))).prepare_load(
            folder, CheckpointLoadContext()
        )


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    empty = nn.Linear(2, 2, device="meta")
    with pytest.raises(CheckpointError, match="has no data to save"):
        ShardedModelState(empty).local_plan(0, 1)
    folder = save(ShardedModelState(nn.Linear(2, 2)), tmp_path / "m")
    with pytest.raises(CheckpointError, match="no memory to be loaded into"):
        ShardedModelState(empty).prepare_load(folder, CheckpointLoadContext())


def test_only_named_tensors_are_saved_and_loaded(tmp_path: Path) -> None:
    saved, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    folder = save(ShardedModelState(saved, {"weight": "short"}), tmp_path / "m")
    assert list(lazy_tensors(folder)) == ["short"]
    load(ShardedModelState(fresh, {"weight": "short"}), folder)
    assert torch.equal(fresh.weight, saved.weight)
    assert not torch.equal(fresh.bias, saved.bias)


# ---------------------------------------------------------------- optimizers


def train_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> torch.optim.Optimizer:
    for _ in range(steps):
        sum(p.square().sum() for p in model.parameters() if p.requires_grad).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def two_groups(model: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    groups = [{"params": [model[0].weight, model[1].bias]}, {"params": [model[1].weight], "lr": lr}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9))


def pair() -> Any:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))


def same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    a, b = one.state_dict(), other.state_dict()
    states = all(
        torch.equal(value, b["state"][key][name])
        for key in a["state"]
        for name, value in a["state"][key].items()
    )
    return states and a["param_groups"] == b["param_groups"] and a["state"].keys() == b["state"].keys()


def test_an_optimizer_comes_back_with_its_groups(tmp_path: Path) -> None:
    model, fresh = pair(), pair()
    optimizer = train_steps(model, two_groups(model))
    optimizer.param_groups[1]["lr"] = 0.025  # as a scheduler does
    folder = save(ShardedOptimizerState(optimizer, [model]), tmp_path / "o")
    loaded = two_groups(fresh, lr=7.0)
    load(ShardedOptimizerState(loaded, [fresh]), folder)
    assert same_state(optimizer, loaded)


def test_a_state_that_was_not_made_is_not_invented(tmp_path: Path) -> None:
    """A fresh optimizer, a frozen parameter, and SGD without momentum."""
    model, fresh = pair(), pair()
    model[0].requires_grad_(False)
    frozen = train_steps(model, torch.optim.AdamW(model.parameters()))
    for name, optimizer in {
        "fresh": torch.optim.AdamW(model.parameters()),
        "frozen": frozen,
        "sgd": train_steps(model, torch.optim.SGD(model.parameters(), 0.1)),
    }.items():
        folder = save(ShardedOptimizerState(optimizer, [model]), tmp_path / name)
        kind: Any = type(optimizer)
        loaded = train_steps(fresh, kind(fresh.parameters(), lr=0.5))
        load(ShardedOptimizerState(loaded, [fresh]), folder)
        assert same_state(optimizer, loaded)
    assert sorted(frozen.state_dict()["state"]) == [2, 3]


def test_parameters_are_found_in_another_order(tmp_path: Path) -> None:
    model, fresh = pair(), pair()
    optimizer = train_steps(model, torch.optim.AdamW(model.parameters()))
    folder = save(ShardedOptimizerState(optimizer, [model]), tmp_path / "o")
    loaded = torch.optim.AdamW(reversed(list(fresh.parameters())))
    load(ShardedOptimizerState(loaded, [fresh]), folder)
    assert torch.equal(loaded.state[fresh[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_two_models_may_share_an_optimizer_and_a_model_may_have_two(tmp_path: Path) -> None:
    models, fresh = [pair(), pair()], [pair(), pair()]
    both = torch.optim.AdamW([p for model in models for p in model.parameters()])
    for model in models:
        train_steps(model, both)
    folder = save(ShardedOptimizerState(both, models), tmp_path / "both")
    loaded = torch.optim.AdamW([p for model in fresh for p in model.parameters()])
    load(ShardedOptimizerState(loaded, fresh), folder)
    assert same_state(both, loaded)
    one = train_steps(models[0], torch.optim.AdamW(models[0][0].parameters()))
    folder = save(ShardedOptimizerState(one, models), tmp_path / "one")
    again = torch.optim.AdamW(fresh[0][0].parameters())
    load(ShardedOptimizerState(again, fresh), folder)
    assert same_state(one, again)


def test_a_parameter_of_no_model_is_refused_in_words() -> None:
    model = pair()
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(5))], 0.1)
    with pytest.raises(CheckpointError, match=r"parameter 4 of the optimizer SGD, of shape \(5,\)") as caught:
        ShardedOptimizerState(optimizer, [model]).local_plan(0, 1)
    assert "save_state(sharded=False)" in str(caught.value)


def test_other_groups_are_refused_or_told(tmp_path: Path) -> None:
    model = pair()
    folder = save(ShardedOptimizerState(train_steps(model, two_groups(model)), [model]), tmp_path / "o")
    one = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointError, match="does not fit group 0 of the optimizer"):
        ShardedOptimizerState(one, [model]).prepare_load(folder, CheckpointLoadContext())
    less = torch.optim.AdamW([model[0].weight, model[1].bias])
    with pytest.raises(CheckpointError, match="holds 2 groups of parameters, and the optimizer 1"):
        ShardedOptimizerState(less, [model]).prepare_load(folder, CheckpointLoadContext())
    how = load(ShardedOptimizerState(one, [model]), folder, strict=False)
    assert how.missing == ["the state of 0.bias (in o)", "the state of 1.weight (in o)"]


def test_a_whole_state_by_names_becomes_one_by_numbers() -> None:
    """State dicts as the public package gathers them."""
    model = pair()
    optimizer = train_steps(model, two_groups(model))
    names = ["0.weight", "1.bias", "1.weight"]
    own = optimizer.state_dict()
    adapter_state = {
        "state": {names[key]: value for key, value in own["state"].items()},
        "param_groups": [
            {**g, "params": [names[i] for i in reversed(g["params"])]} for g in own["param_groups"]
        ],
    }
    again = two_groups(model)
    again.load_state_dict(optimizer_state_by_index(again, [model], adapter_state))
    assert same_state(optimizer, again)
    with pytest.raises(CheckpointError, match=r"does not have 1\.weight"):
        optimizer_state_by_index(torch.optim.AdamW([model[0].weight, model[1].bias]), [model], adapter_state)


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_of_a_model_of_peft_the_adapter_alone_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """With a stand-in for the package, which is not installed for these tests."""

    def adapter_state(model: Any, state_dict: Any, adapter_name: str) -> dict[str, Any]:
        return {n.replace(f".{adapter_name}", ""): v for n, v in state_dict.items() if "lora" in n}

    monkeypatch.setitem(sys.modules, "peft", SimpleNamespace(get_peft_model_state_dict=adapter_state))
    monkeypatch.setattr(fsdp_checkpoint, "is_peft_model", lambda model: True)
    models: list[Any] = [nn.ModuleDict({"base": nn.Linear(2, 2), "lora": nn.ModuleDict()}) for _ in "ab"]
    for model in models:
        model["lora"]["default"] = nn.Linear(2, 1)
        model.active_adapter = "default"
    accelerator: Any = Accelerator(cpu=True)
    plugin = SimpleNamespace(state_dict_type=kind)
    utils.save_fsdp_model(plugin, accelerator, models[0], str(tmp_path), adapter_only=True)
    if kind == "SHARDED_STATE_DICT":
        assert set(lazy_tensors(tmp_path)) == {"lora.weight", "lora.bias"}
    utils.load_fsdp_model(plugin, accelerator, models[1], str(tmp_path), adapter_only=True)
    assert equal(models[0]["lora"], models[1]["lora"])
    assert not torch.equal(models[0]["base"].weight, models[1]["base"].weight)


def test_a_full_optimizer_state_is_mapped_while_it_is_loaded(tmp_path: Path) -> None:
    """Each rank of a machine calls: a copy of the whole state for each of them is more than hosts have."""
    accelerator: Any = Accelerator(cpu=True)
    plugin = SimpleNamespace(state_dict_type="FULL_STATE_DICT")
    model = accelerator.prepare(pair())
    optimizer = train_steps(model, torch.optim.AdamW(model.parameters()))
    utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(tmp_path))
    fresh = torch.optim.AdamW(model.parameters(), lr=0.5)
    with patch.object(torch, "load", wraps=torch.load) as read:
        utils.load_fsdp_optimizer(plugin, accelerator, fresh, model, str(tmp_path))
    assert [call.kwargs["mmap"] for call in read.call_args_list] == [True]
    assert same_state(optimizer, fresh)
    if sys.platform == "linux":  # nothing stays mapped, so the checkpoint may be removed
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()


# ---------------------------------------------------------------- damage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return save(ShardedModelState(nn.Linear(4, 4)), tmp_path / "m")


def test_a_file_is_looked_at_once_for_all_chunks_in_it(tmp_path: Path) -> None:
    """Each rank looks, and on a network file system one server answers all of them."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
    shards = ShardFolderReader(save(ShardedModelState(model), tmp_path / "m"))
    looks: list[str] = []
    stat = Path.stat

    def look(path: Path, **options: Any) -> os.stat_result:
        looks.append(path.name)
        return stat(path, **options)

    with patch.object(Path, "stat", look):
        shards.check_files(shards.paths)
    assert 1 <= looks.count("__0_0.distcp") <= 2
    assert len(shards.paths) == 16


def test_missing_and_cut_files_are_named(folder: Path) -> None:
    """D2, where no manifest tells."""
    file = folder / "__0_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is damaged\n.*has \d+ bytes"):
        ShardedModelState(nn.Linear(4, 4)).prepare_load(folder, CheckpointLoadContext())
    file.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is missing"):
        lazy_tensors(folder)
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="written last"):
        ShardFolderReader(folder)


def change_index(folder: Path, change: Any) -> None:
    path = folder / ".metadata"
    index: Metadata = pickle.loads(path.read_bytes())
    change(index)
    path.write_bytes(pickle.dumps(index))


def test_an_index_that_lacks_a_part_is_refused(folder: Path) -> None:
    change_index(folder, lambda index: index.state_dict_metadata["model.weight"].chunks.clear())
    with pytest.raises(CheckpointError, match="do not make up its shape"):
        lazy_tensors(folder)


def test_an_index_that_says_not_where_is_refused(folder: Path) -> None:
    change_index(folder, lambda index: index.storage_data.pop(MetadataIndex("model.weight", [0, 0])))
    with pytest.raises(CheckpointError, match=r"does not say where model.weight lies"):
        lazy_tensors(folder)


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/b", "..\\x"])
def test_an_index_cannot_lead_out_of_the_folder(folder: Path, path: str) -> None:
    def change(index: Metadata) -> None:
        for info in (index.storage_data or {}).values():
            info.relative_path = path

    change_index(folder, change)
    with pytest.raises(CheckpointError, match="outside of the folder"):
        ShardFolderReader(folder)


class Runs:
    """A pickle that runs code."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_an_index_that_would_run_code_is_refused(folder: Path, tmp_path: Path) -> None:
    hit = tmp_path / "hit"
    change_index(folder, lambda index: setattr(index, "planner_data", Runs(hit)))
    with pytest.raises(CheckpointError, match=r"(?s)could run code.*it names .*touch|getattr"):
        ShardFolderReader(folder)
    assert not hit.exists()
    ShardFolderReader(folder, trusted=True)
    assert hit.exists()


def test_an_object_that_would_run_code_is_refused(tmp_path: Path) -> None:
    hit = tmp_path / "hit"
    folder = save(ShardedModelState(Net(extra=[Runs(hit)])), tmp_path / "m")
    with pytest.raises(CheckpointError, match="could run code"):
        load(ShardedModelState(Net()), folder)
    assert not hit.exists()
    load(ShardedModelState(Net()), folder, trusted=True)
    assert hit.exists()


@pytest.mark.parametrize("content", [b"", b"abc", pickle.dumps({"a": 1}), pickle.dumps(None)])
def test_what_is_no_index_is_refused(folder: Path, content: bytes) -> None:
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError):
        ShardFolderReader(folder)


# ---------------------------------------------------------------- shares


def test_writing_needs_the_objects_no_more(tmp_path: Path) -> None:
    """An asynchronous save puts copies in place of the tensors, and the model goes on changing."""
    model = nn.Linear(3, 3)
    optimizer = train_steps(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    spread = ShardedOptimizerState(optimizer, [model])
    share = spread.shard_writer(spread.combine_plans([spread.local_plan(0, 1)[0]]), 0, 0)
    expected = {key: value["exp_avg"].clone() for key, value in optimizer.state_dict()["state"].items()}
    share.content = [tensor.clone() for tensor in share.content]
    optimizer.param_groups[0]["lr"] = 9.0
    train_steps(model, optimizer)
    with (tmp_path / "__0_0.distcp").open("wb") as file:
        told = share.fill(file)
    (tmp_path / ".metadata").write_bytes(share.build_index([told])[1])
    loaded = torch.optim.AdamW(model.parameters())
    load(ShardedOptimizerState(loaded, [model]), tmp_path)
    assert loaded.param_groups[0]["lr"] == 0.1
    states = loaded.state_dict()["state"]
    assert all(torch.equal(states[key]["exp_avg"], value) for key, value in expected.items())


def test_what_all_have_is_written_once_and_evenly() -> None:
    spreads = [ShardedModelState(nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))) for _ in range(3)]
    plans = [spread.local_plan(rank, len(spreads))[0] for rank, spread in enumerate(spreads)]
    combined = spreads[0].combine_plans(plans)
    shares = [spread.shard_writer(combined, 0, rank) for rank, spread in enumerate(spreads)]
    assert [share.file for share in shares] == [f"pytorch_model_fsdp_0/__{r}_0.distcp" for r in range(3)]
    assert sum(len(share.content) for share in shares) == 12
    assert [sum(t.dim() == 2 for t in share.content) for share in shares] == [2, 2, 2]


def test_a_plan_is_known_until_it_changes() -> None:
    """Later saves exchange an id, not the plans; another number of ranks, or another dtype, plans anew."""
    models = [nn.Linear(2, 2) for _ in range(2)]

    def plan(size: int = 2) -> tuple[list[ShardedModelState], list[Any], list[str]]:
        states = [ShardedModelState(model) for model in models]
        plans = [state.local_plan(rank, size) for rank, state in enumerate(states)]
        return states, [plan for plan, _ in plans], [known_id for _, known_id in plans]

    states, plans, known = plan()
    assert known == ["", ""]
    combined = states[0].combine_plans(plans)
    before = [state.shard_writer(combined, 0, rank) for rank, state in enumerate(states)]
    states, _, known = plan()
    assert known == [combined.id] * 2
    assert plan(size=1)[2] == ["", ""]
    after = [state.shard_writer(None, 0, rank) for rank, state in enumerate(states)]
    for old, new in zip(before, after, strict=True):
        assert [item.index for item in old.items] == [item.index for item in new.items]
        assert (old.index, old.entry.tensors) == (new.index, new.entry.tensors)
    apart = ShardedModelState(models[0], local_training=True)  # another replica is to be written
    assert apart.local_plan(0, 2)[1] == ""
    models[1].half()
    assert plan()[2] == [combined.id, ""]


def test_ranks_that_train_apart_save_those_of_rank_0() -> None:
    spreads = [ShardedModelState(nn.Linear(2, 2), local_training=True) for _ in range(2)]
    plans = [spread.local_plan(rank, len(spreads))[0] for rank, spread in enumerate(spreads)]
    combined = spreads[0].combine_plans(plans)
    shares = [spread.shard_writer(combined, 0, rank) for rank, spread in enumerate(spreads)]
    assert len(shares[0].content) == 2
    assert shares[1].file == ""


def test_buffers_are_those_of_rank_0() -> None:
    """Under data parallelism they differ by rank until the next forward."""
    spreads = [ShardedModelState(nn.BatchNorm1d(2)) for _ in range(2)]
    plans = [spread.local_plan(rank, len(spreads))[0] for rank, spread in enumerate(spreads)]
    assert {item.index.fqn for item in plans[1].items} == {"model.weight", "model.bias"}


def test_parts_that_make_no_whole_are_refused() -> None:
    spread = ShardedModelState(nn.Linear(2, 2))
    plan, _ = spread.local_plan(0, 2)
    entry: Any = next(item for item in plan.items if item.index.fqn == "model.weight")
    object.__setattr__(entry.tensor_data, "size", torch.Size([5, 2]))
    with pytest.raises(CheckpointError, match="do not make a whole"):
        spread.combine_plans([plan, ShardedModelState(nn.Module()).local_plan(0, 2)[0]])


# ---------------------------------------------------------------- merging


def big(tmp_path: Path) -> tuple[nn.Module, Path]:
    model = Net()
    checkpoint = tmp_path / "c"
    save(ShardedModelState(model), checkpoint / "pytorch_model_fsdp_0")
    (checkpoint / "optimizer_0").mkdir()
    return model, checkpoint


def test_merging_gives_what_the_hub_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, checkpoint = big(tmp_path)
    for number, given in enumerate((checkpoint, checkpoint / "pytorch_model_fsdp_0")):
        out = tmp_path / f"out{number}"
        assert run(["merge-weights", str(given), str(out)]) == 0
        size = sum(tensor.nbytes for tensor in load_file(out / "model.safetensors").values())
        told = f"3 tensors, {size} bytes, from {given} in {out}: model.safetensors\n"
        assert capsys.readouterr().out == told
        assert os.listdir(out) == ["model.safetensors"]
        state = load_file(out / "model.safetensors")
        assert set(state) == {"embed.weight", "head.weight", "count"}
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())


def test_merging_into_torch_files(tmp_path: Path) -> None:
    model, checkpoint = big(tmp_path)
    args = merge_command_parser().parse_args([str(checkpoint), str(tmp_path / "o"), "--unsafe_serialization"])
    merge_command(args)
    state = torch.load(tmp_path / "o" / "pytorch_model.bin", weights_only=True)
    assert set(state) == {"embed.weight", "head.weight", "count"}
    assert torch.equal(state["head.weight"], model.state_dict()["embed.weight"])


def test_merging_into_shards_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    folder = save(ShardedModelState(model), tmp_path / "m")
    for safe, stem in ((True, "model"), (False, "pytorch_model")):
        out = tmp_path / stem

        def merge_shards(safe: bool = safe, out: Path = out, limit: int | str = 2 * 8 * 8 * 4) -> list[str]:
            monkeypatch.setattr(weight_files, "LIMIT", limit)
            return weight_files.merge(lazy_tensors, str(folder), str(out), safe).files

        written = merge_shards()
        assert len(written) == 3
        (index,) = out.glob("*.index.json")
        content = json.loads(index.read_text())
        assert content["metadata"]["total_size"] == 5 * 8 * 8 * 4
        assert (
            set(content["weight_map"].values())
            == set(written)
            == {p.name for p in out.iterdir()} - {index.name}
        )
        read: dict[str, torch.Tensor] = {}
        for file in written:
            read |= load_file(out / file) if safe else torch.load(out / file, weights_only=True)
        assert all(torch.equal(read[name], value) for name, value in model.state_dict().items())
        whole = merge_shards(limit="10GB")
        assert [p.name for p in out.iterdir()] == whole  # nothing is left that would be loaded in its place
        merge_shards()
        assert {p.name for p in out.iterdir()} == {*written, index.name}


def test_merging_reads_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(ShardedModelState(pair()), tmp_path / "m")
    reads: list[str] = []
    read = ShardFolderReader.read
    monkeypatch.setattr(ShardFolderReader, "read", lambda self, name: reads.append(name) or read(self, name))
    saved_tensors = lazy_tensors(folder)
    assert reads == []
    assert torch.equal(saved_tensors["1.bias"].read(), saved_tensors["1.bias"].read())
    assert reads == ["model.1.bias"] * 2
    weight_files.merge(lambda _: saved_tensors, str(folder), str(tmp_path / "out"))
    assert len(reads) == 2 + 4


def test_the_checkpoint_is_removed_only_after_and_only_apart(tmp_path: Path) -> None:
    _, checkpoint = big(tmp_path)
    with pytest.raises(SettingError, match="is to be removed"):
        utils.merge_fsdp_weights(str(checkpoint), str(checkpoint / "out"), remove_checkpoint_dir=True)
    with pytest.raises(CheckpointError, match="there is no sharded model"):
        utils.merge_fsdp_weights(
            str(checkpoint / "optimizer_0"), str(tmp_path / "o"), remove_checkpoint_dir=True
        )
    assert (checkpoint / "optimizer_0").exists()
    utils.merge_fsdp_weights(str(checkpoint), str(tmp_path / "o"), remove_checkpoint_dir=True)
    assert not checkpoint.exists()
    assert (tmp_path / "o" / "model.safetensors").is_file()


def test_a_merge_of_what_is_not_sharded_says_what_to_name(tmp_path: Path) -> None:
    _, checkpoint = big(tmp_path / "runs")
    for folder, text in {
        tmp_path / "gone": "there is no folder",
        checkpoint.parent: f"name a checkpoint in it: {checkpoint}",
        checkpoint / "optimizer_0": r"it has no \.metadata",
    }.items():
        with pytest.raises(CheckpointError, match=text):
            utils.merge_fsdp_weights(str(folder), str(tmp_path / "merged"))
    utils.merge_fsdp_weights(str(checkpoint), str(tmp_path / "merged"))
    with pytest.raises(CheckpointError, match=r"it holds model\.safetensors: the model is whole already"):
        utils.merge_fsdp_weights(str(tmp_path / "merged"), str(tmp_path / "again"))


def test_the_parser_may_be_a_part_of_another() -> None:
    parser = argparse.ArgumentParser()
    merge_command_parser(parser.add_subparsers())
    args = parser.parse_args(["merge-weights", "a", "b", "--remove-checkpoint-dir"])
    assert (args.checkpoint_directory, args.output_path, args.remove_checkpoint_dir) == ("a", "b", True)
    assert args.func is merge_command
