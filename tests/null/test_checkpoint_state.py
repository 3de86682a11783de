"""Round trips, file names and the refusals of saving and loading, in one process."""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import subprocess
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from accelerate import (
    Accelerator,
    checkpointing,
    disk_offload,
    dispatch_model,
    load_checkpoint_in_model,
    utils,
)
from accelerate.checkpoint import load, save, torch_files
from accelerate.checkpoint.file_access import CheckpointNotFoundError
from accelerate.checkpoint.layout import CheckpointContents, StatefulAdapter
from accelerate.checkpoint.rank_group import CheckpointRankGroup
from accelerate.core.errors import AccelerateError, CheckpointError
from accelerate.utils import ProjectConfiguration
from accelerate.world import rng


class Counter:
    """An object of the user without tensors."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "best": (0.5, "epoch 3")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Loader(Counter):
    """A loader whose position is a plain number."""

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 1, "samples": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["samples"]


class TiedEmbedding(nn.Module):
    """Input and output embedding are one parameter."""

    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        if tie:
            self.head.weight = self.embed.weight


def training(seed: int = 0, steps: int = 0) -> CheckpointContents:
    """Everything a training has, after some steps from a seed."""
    rng.set_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 3], gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7, growth_interval=2)
    parts = CheckpointContents(
        [model], [optimizer], [scheduler], scaler, [Counter(seed)], [Loader(seed)], rng=True
    )
    train(parts, steps)
    return parts


def train(parts: CheckpointContents, steps: int) -> list[float]:
    """Steps whose losses depend on every part: data from three generators, dropout, scaler, schedule."""
    model, optimizer, scheduler = parts.models[0], parts.optimizers[0], parts.schedulers[0]
    losses = []
    for _ in range(steps):
        inputs = torch.randn(8, 3) + random.random() + np.random.rand()
        loss = model(inputs).square().mean() + parts.custom[0].count
        parts.scaler.scale(loss).backward()
        parts.scaler.step(optimizer)
        parts.scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        parts.custom[0].count += 1
        parts.loaders[0].count += 8
        parts.step += 1
        losses.append(loss.item())
    return losses


def all_states(parts: CheckpointContents) -> dict[str, Any]:
    """The state of all parts, to compare."""
    return {
        "model": parts.models[0].state_dict(),
        "optimizer": parts.optimizers[0].state_dict(),
        "scheduler": parts.schedulers[0].state_dict(),
        "scaler": parts.scaler.state_dict(),
        "custom": parts.custom[0].count,
        "position": parts.loaders[0].count,
    }


def assert_same(one: Any, two: Any) -> None:
    torch.testing.assert_close(one, two, rtol=0, atol=0)


@pytest.mark.parametrize("safe", [True, False])
def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path, safe: bool) -> None:
    """D7, D8, D11: model, optimizer, schedule, scaler, random draws, positions and own objects, bit-equal."""
    straight = training(steps=3)
    expected = train(straight, 3)

    first = training(steps=3)
    path = save.save(first, tmp_path / "c", safe_serialization=safe)
    resumed = training(seed=7, steps=1)
    loaded = load.load(resumed, path)
    resumed.step = loaded.step
    assert train(resumed, 3) == expected
    assert resumed.step == 6
    assert_same(all_states(resumed), all_states(straight))


def test_the_files_are_those_of_the_public_format(tmp_path: Path) -> None:
    parts = training(steps=2)
    second, third = nn.Linear(2, 2), nn.Linear(1, 1)
    parts.models += [second, third]
    parts.optimizers += [torch.optim.SGD(second.parameters(), lr=1.0)]
    parts.custom += [Counter(5)]
    path = save.save(parts, tmp_path / "c")
    assert path == tmp_path / "c"
    assert sorted(os.listdir(path)) == [
        "custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl", "manifest.json", "model.safetensors",
        "model_1.safetensors", "model_2.safetensors", "optimizer.bin", "optimizer_1.bin",
        "random_states_0.pkl", "scaler.pt", "scheduler.bin",
    ]  # fmt: skip
    with safe_open(path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert_same(load_file(path / "model_1.safetensors"), dict(second.state_dict()))
    plain = torch.load(path / "optimizer.bin", weights_only=True)
    assert_same(plain, parts.optimizers[0].state_dict())
    assert torch.load(path / "custom_checkpoint_1.pkl")["count"] == 5
    random_states = torch_files.read(path / "random_states_0.pkl")
    assert {"step", "random_state", "numpy_random_seed", "torch_manual_seed"} <= random_states.keys()
    assert random_states["step"] == 2

    path = save.save(parts, tmp_path / "c", safe_serialization=False)
    assert {"pytorch_model.bin", "pytorch_model_1.bin"} < set(os.listdir(path))
    assert not list(path.glob("*.safetensors"))
    weights = torch.load(path / "pytorch_model.bin", weights_only=True)
    assert type(weights) is OrderedDict
    assert_same(dict(weights), dict(parts.models[0].state_dict()))


def test_the_manifest_says_what_is_there(tmp_path: Path) -> None:
    parts = training(steps=2)
    parts.metadata = {"epoch": 3, "best": float("inf"), "shape": (1, 2)}
    path = save.save(parts, tmp_path / "c")
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == 1
    assert manifest["step"] == 2
    assert manifest["world_size"] == 1
    assert manifest["strategy"] == "single"
    assert manifest["loaders"] == [{"epoch": 1, "samples": 16}]
    assert manifest["library"].startswith("accelerate ")
    assert set(manifest["files"]) == set(os.listdir(path)) - {"manifest.json"}
    for name, record in manifest["files"].items():
        assert record["size"] == (path / name).stat().st_size
        assert len(record["digest"]) == 32
    model = manifest["parts"]["models"][0]
    assert model["kind"] == "Sequential"
    assert model["tensors"]["0.weight"] == ["float32", [4, 3]]
    loaded = load.load(training(), path)
    assert loaded.metadata == {"epoch": 3, "best": float("inf"), "shape": [1, 2]}
    assert (loaded.step, loaded.world_size, loaded.iteration, loaded.notes) == (2, 1, None, ())


def test_only_what_is_asked_for_is_loaded(tmp_path: Path) -> None:
    parts = training(steps=2)
    path = save.save(parts, tmp_path / "c")
    fresh = training(seed=1)
    model_only = CheckpointContents(models=fresh.models, custom=[Counter()])
    load.load(model_only, path)
    assert_same(fresh.models[0].state_dict(), parts.models[0].state_dict())
    assert fresh.optimizers[0].state_dict()["state"] == {}


def test_nothing_is_saved_as_an_empty_but_complete_checkpoint(tmp_path: Path) -> None:
    path = save.save(CheckpointContents(metadata={"epoch": 1}), tmp_path / "c")
    assert load.load(CheckpointContents(), path).metadata == {"epoch": 1}


# ---------------------------------------------------------------- tied and wrapped models


@pytest.mark.parametrize("safe", [True, False])
def test_tied_weights_come_back_tied(tmp_path: Path, safe: bool) -> None:
    """D6: one tensor in the file, an alias in the manifest, one parameter after loading."""
    model = TiedEmbedding()
    path = save.save(CheckpointContents([model]), tmp_path / "c", safe_serialization=safe)
    if safe:
        assert sorted(load_file(path / "model.safetensors")) == ["body.bias", "body.weight", "embed.weight"]
        with safe_open(path / "model.safetensors", framework="pt") as file:
            assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
        manifest = json.loads((path / "manifest.json").read_text())
        assert manifest["parts"]["models"][0]["aliases"] == {"head.weight": "embed.weight"}
    fresh = TiedEmbedding()
    loaded = load.load(CheckpointContents([fresh]), path)
    assert loaded.notes == ()
    assert fresh.head.weight is fresh.embed.weight
    assert_same(fresh.state_dict(), model.state_dict())


def test_tied_weights_fill_a_model_that_is_not_tied_and_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """D6."""
    model = TiedEmbedding()
    path = save.save(CheckpointContents([model]), tmp_path / "c")
    apart = TiedEmbedding(tie=False)
    loaded = load.load(CheckpointContents([apart]), path)
    assert_same(apart.head.weight, model.embed.weight)
    assert "head.weight tied to embed.weight" in loaded.notes[0]
    assert "head.weight tied to embed.weight" in caplog.text


def test_tied_weights_without_an_alias_table_follow_the_model(tmp_path: Path) -> None:
    """D6: a file of the public package drops the tied name and says nothing."""
    model, fresh = TiedEmbedding(), TiedEmbedding()
    path = save.save(CheckpointContents([model]), tmp_path / "c")
    (path / "manifest.json").unlink()
    from safetensors.torch import save_file

    weights = {n: t for n, t in model.state_dict().items() if n != "embed.weight"}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    load.load(CheckpointContents([fresh]), path)
    assert fresh.head.weight is fresh.embed.weight
    assert_same(fresh.state_dict(), model.state_dict())


def test_views_that_overlap_are_saved_each(tmp_path: Path) -> None:
    big = torch.arange(12.0).reshape(3, 4)
    views = {"all": big, "row": big[1], "column": big[:, 2], "again": big, "turned": big.t()}
    saved: dict[str, torch.Tensor] = {}
    part = StatefulAdapter("views", lambda: views, saved.update)
    path = save.save(CheckpointContents([part]), tmp_path / "c")
    assert sorted(load_file(path / "model.safetensors")) == ["all", "column", "row", "turned"]
    load.load(CheckpointContents([part]), path)
    assert_same({k: v.clone() for k, v in saved.items()}, {k: v.clone() for k, v in views.items()})


def test_a_compiled_model_is_saved_by_its_own_names(tmp_path: Path) -> None:
    """D9: no ``_orig_mod`` in the file, whole or regional; loads compiled and uncompiled."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    names = set(model.state_dict())
    regional = nn.Sequential(torch.compile(nn.Linear(2, 2)), nn.Linear(2, 1))
    regional.load_state_dict({n.replace("0.", "0._orig_mod.", 1): t for n, t in model.state_dict().items()})
    whole = torch.compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    assert all("_orig_mod" in n for n in whole.state_dict())
    path = save.save(CheckpointContents([regional]), tmp_path / "c")
    assert set(load_file(path / "model.safetensors")) == names
    for target in (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), whole):
        load.load(CheckpointContents([target]), path)
        assert_same(list(target.parameters()), list(model.parameters()))


def test_names_under_a_wrapper_fit_the_bare_model_and_back(tmp_path: Path) -> None:
    model, bare = nn.Linear(2, 2), nn.Linear(2, 2)
    wrapped = nn.Module()
    wrapped.add_module("module", model)
    load.load(CheckpointContents([bare]), save.save(CheckpointContents([wrapped]), tmp_path / "wrapped"))
    assert_same(bare.state_dict(), model.state_dict())
    other = nn.Module()
    other.add_module("module", nn.Linear(2, 2))
    load.load(CheckpointContents([other]), save.save(CheckpointContents([bare]), tmp_path / "bare"))
    assert_same(other.get_submodule("module").state_dict(), model.state_dict())


def test_a_model_with_a_part_called_module_keeps_its_names(tmp_path: Path) -> None:
    model = nn.ModuleDict({"module": nn.Linear(1, 1), "other": nn.Linear(1, 1)})
    fresh = nn.ModuleDict({"module": nn.Linear(1, 1), "other": nn.Linear(1, 1)})
    path = save.save(CheckpointContents([model]), tmp_path / "c")
    assert "module.weight" in load_file(path / "model.safetensors")
    load.load(CheckpointContents([fresh]), path)
    assert_same(fresh.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool]
)
def test_every_dtype_and_shape_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = {
        "x": torch.ones(2, 3).to(dtype),
        "scalar": torch.ones(()).to(dtype),
        "empty": torch.empty(0, 3).to(dtype),
    }
    back: dict[str, torch.Tensor] = {}
    part = StatefulAdapter("x", lambda: saved, back.update)
    load.load(CheckpointContents([part]), save.save(CheckpointContents([part]), tmp_path / "c"))
    assert {n: (t.dtype, t.shape) for n, t in back.items()} == {
        n: (t.dtype, t.shape) for n, t in saved.items()
    }
    assert all(torch.equal(back[n].float(), saved[n].float()) for n in saved)


# ---------------------------------------------------------------- hooks, own files, folders


def test_a_save_hook_writes_files_and_takes_models_out(tmp_path: Path) -> None:
    first, second = nn.Linear(1, 1), nn.Linear(2, 2)

    def hook(weights: list[dict[str, Any]], folder: Path) -> None:
        (folder / "unet").mkdir()
        (folder / "unet" / "config.json").write_text("{}")
        assert len(weights) == 2
        weights.pop(0)

    path = save.save(CheckpointContents([first, second]), tmp_path / "c", before=hook)
    assert sorted(os.listdir(path)) == ["manifest.json", "model.safetensors", "unet"]
    assert load_file(path / "model.safetensors")["weight"].shape == (2, 2)
    manifest = json.loads((path / "manifest.json").read_text())
    assert "unet/config.json" in manifest["files"]

    parts = CheckpointContents([nn.Linear(1, 1), nn.Linear(2, 2)])
    seen: list[Path] = []

    def load_hook(folder: Path, manifest: Any) -> None:
        seen.append(folder)
        parts.models.pop(0)

    load.load(parts, path, before=load_hook)
    assert seen == [path]
    assert_same(parts.models[0].state_dict(), second.state_dict())

    (path / "unet" / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"unet/config.json is damaged"):
        load.load(CheckpointContents([second]), path)


class Engine:
    """A part that writes a folder of its own."""

    name = "engine"

    def __init__(self, value: str = "") -> None:
        self.value = value

    def save(self, folder: Path) -> list[str]:
        (folder / "pytorch_model" / "deep").mkdir(parents=True)
        (folder / "pytorch_model" / "deep" / "rank0.pt").write_text(self.value)
        return ["pytorch_model/deep/rank0.pt"]

    def load(self, folder: Path) -> None:
        self.value = (folder / "pytorch_model" / "deep" / "rank0.pt").read_text()


def test_a_part_may_write_files_of_its_own(tmp_path: Path) -> None:
    path = save.save(CheckpointContents(own_files=[Engine("weights")]), tmp_path / "c")
    fresh = Engine()
    load.load(CheckpointContents(own_files=[fresh]), path)
    assert fresh.value == "weights"
    (path / "pytorch_model" / "deep" / "rank0.pt").write_text("Weights")
    with pytest.raises(CheckpointError, match=r"rank0.pt is damaged"):
        load.load(CheckpointContents(own_files=[fresh]), path)


def test_saving_over_a_checkpoint_replaces_it_and_keeps_what_is_not_its_own(tmp_path: Path) -> None:
    target = tmp_path / "out"
    first = training(steps=1)
    save.save(first, target, safe_serialization=False)
    (target / "notes.txt").write_text("mine")
    for folder in ("logs", "scheduler"):  # the second is of a pipeline of diffusers
        (target / folder).mkdir()
        (target / folder / "events").write_text("mine too")
    second = training(steps=2)
    second.custom = []
    save.save(second, target)
    assert (target / "notes.txt").read_text() == "mine"
    for folder in ("logs", "scheduler"):
        assert (target / folder / "events").read_text() == "mine too"
    assert not (target / "pytorch_model.bin").exists()
    assert not (target / "custom_checkpoint_0.pkl").exists()
    assert os.listdir(tmp_path) == ["out"]
    fresh = training(seed=4)
    fresh.custom = []
    assert load.load(fresh, target).step == 2


def test_an_existing_empty_folder_a_link_and_a_tilde_are_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "empty").mkdir()
    assert save.save(training(), "~/empty") == tmp_path / "empty"
    (tmp_path / "link").symlink_to("empty")
    assert save.save(training(steps=1), tmp_path / "link") == tmp_path / "link"
    assert (tmp_path / "link").is_symlink()
    assert load.load(training(), "~/link").step == 1
    assert os.listdir(tmp_path / "empty") == os.listdir(tmp_path / "link")
    monkeypatch.chdir(tmp_path)
    assert save.save(training(), "here") == Path("here")
    assert load.load(training(), "here").path == tmp_path / "here"


def test_the_current_directory_is_saved_to_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run" / "below").mkdir(parents=True)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    monkeypatch.chdir(tmp_path / "run" / "below")
    before = os.stat(tmp_path / "run").st_ino
    save.save(training(steps=1), "..", safe_serialization=False)
    save.save(training(steps=2), "..")
    assert os.stat(tmp_path / "run").st_ino == before
    assert os.listdir(tmp_path) == ["run"]
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    names = os.listdir(tmp_path / "run")
    assert "model.safetensors" in names
    assert "pytorch_model.bin" not in names
    assert not [name for name in names if name.startswith(".")]
    assert load.load(training(), "..").step == 2


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root mounts file systems")
def test_a_mounted_volume_is_saved_to_in_place(tmp_path: Path) -> None:
    """The folder above, in which a rename would be made, belongs to the container."""
    (tmp_path / "volume").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(tmp_path / "volume")]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this container may not mount")
    try:
        for steps in (1, 2):
            save.save(training(steps=steps), tmp_path / "volume")
            assert load.load(training(), tmp_path / "volume").step == steps
        assert os.listdir(tmp_path) == ["volume"]
        assert not [name for name in os.listdir(tmp_path / "volume") if name.startswith(".")]
    finally:
        subprocess.run(["umount", str(tmp_path / "volume")], check=True)


def test_a_folder_in_one_that_cannot_be_written_is_saved_to_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``/scratch/me`` belongs to the user, ``/scratch`` does not."""
    (tmp_path / "mine").mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and access(path, mode))
    before = os.stat(tmp_path / "mine").st_ino
    save.save(training(), tmp_path / "mine")
    assert os.stat(tmp_path / "mine").st_ino == before
    assert load.load(training(), tmp_path / "mine").step == 0


def test_a_file_and_the_root_of_the_file_system_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="it is a file"):
        save.save(training(), tmp_path / "file")
    with pytest.raises(CheckpointError, match="root of the file system"):
        save.save(training(), "/")
    assert (tmp_path / "file").read_text() == "mine"
    assert os.listdir(tmp_path) == ["file"]


def test_no_folder_is_a_value_error_as_in_the_public_package(tmp_path: Path) -> None:
    for call in (save.save, load.load):
        with pytest.raises(ValueError, match="no folder is given"):
            call(training())
    (tmp_path / "neighbour").mkdir()
    with pytest.raises(ValueError, match=r"(?s)there is no folder .*gone.*neighbour"):
        load.load(training(), tmp_path / "gone")
    for epoch in (3, 12):
        save.save(training(), tmp_path / "run" / f"epoch_{epoch}")
    for number in range(20):
        (tmp_path / "run" / f"a{number}").touch()
    newest = tmp_path / "run" / "epoch_12"
    for name, hint in (("epohc_12", "did you mean"), ("best", "the newest checkpoint there is")):
        with pytest.raises(CheckpointNotFoundError) as caught:
            load.load(training(), tmp_path / "run" / name)
        assert "run holds: epoch_12, epoch_3, a0," in caught.value.why
        assert caught.value.why.endswith(" and 10 more")
        assert caught.value.fix.startswith(f"{hint} {newest}")
    with pytest.raises(
        CheckpointNotFoundError, match=r"(?s)not a checkpoint.*newest checkpoint is .*epoch_12"
    ):
        load.load(training(), tmp_path / "run")


# ---------------------------------------------------------------- damage and absence


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        data[len(data) // 2] ^= 1
        overwrite_in_place(path, data)


def overwrite_in_place(path: Path, data: bytes) -> None:
    """What a disk damages keeps its time; a newer file counts as written anew by a program."""
    saved_at = path.stat().st_mtime_ns
    path.write_bytes(data)
    os.utime(path, ns=(saved_at, saved_at))


@pytest.mark.parametrize("how", ["missing", "truncated", "empty", "flipped"])
@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "optimizer.bin", "scheduler.bin", "scaler.pt", "random_states_0.pkl",
     "custom_checkpoint_0.pkl", "manifest.json"],
)  # fmt: skip
def test_any_damage_is_an_error_that_names_the_file_and_changes_nothing(
    tmp_path: Path, name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """D2; but random states may be left out, as under 1.15, which says nothing."""
    path = save.save(training(steps=2), tmp_path / "c")
    damage(path / name, how)
    fresh = training(seed=3)
    before = all_states(fresh)
    draws = torch.get_rng_state()
    if (name, how) == ("random_states_0.pkl", "missing"):
        assert load.load(fresh, path).step == 2
        assert "lacks, and leaves as they are: random_states_0.pkl (random states of rank 0)" in caplog.text
        assert torch.equal(torch.get_rng_state(), draws)
        return
    if (name, how) == ("manifest.json", "missing"):
        fresh.loaders = []  # positions are in the manifest: what is left is a folder of the public format
        assert load.load(fresh, path).manifest is None
        return
    with pytest.raises(CheckpointError, match=name):
        load.load(fresh, path)
    assert_same(all_states(fresh), before)
    assert torch.equal(torch.get_rng_state(), draws)


@pytest.mark.parametrize("size", [1, 5000])
def test_a_changed_number_of_the_weights_is_found_whichever_file_is_the_largest(
    tmp_path: Path, size: int
) -> None:
    """D2: torch's own files have checksums; a file of safetensors has none, and loads as it is."""
    weights = torch.nn.Linear(size, 1)
    path = save.save(CheckpointContents(models=[weights]), tmp_path / "c")
    sizes = {file.stat().st_size: file.name for file in path.iterdir()}
    assert (sizes[max(sizes)] == "model.safetensors") == (size > 1)
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    overwrite_in_place(file, data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load.load(CheckpointContents(models=[weights]), path)


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_weights_that_a_program_writes_anew_into_a_checkpoint_are_loaded(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Scripts call ``save_pretrained`` with the folder of ``save_state``, and 1.x resumes from it."""
    from safetensors.torch import save_file

    accelerator, model, file = Accelerator(), TiedEmbedding(), tmp_path / "model.safetensors"
    accelerator.prepare(model)
    accelerator.save_state(tmp_path)
    saved = (tmp_path / "manifest.json").stat().st_mtime_ns
    weights = {**dict(model.body.state_dict(prefix="body.")), name: torch.full((10, 4), 2.0)}

    def write(newer: int = 10**9, size: int | None = None, **more: torch.Tensor) -> None:
        save_file({**weights, **more}, file, {"format": "pt"})
        os.truncate(file, size or file.stat().st_size)
        os.utime(file, ns=(saved + newer, saved + newer))

    write()
    accelerator.load_state(tmp_path)
    assert model.head.weight.unique().tolist() == model.embed.weight.unique().tolist() == [2.0]
    text = "model.safetensors was written anew after save_state; loaded without verification"
    assert [record.levelname for record in caplog.records if text in record.message] == ["WARNING"]
    # But not what is torn, as old as the save, or of another model.
    for change, why in (
        ({"size": 300}, "damaged.*has 300 bytes, expected"),
        ({"newer": 0}, "damaged.*(its digest|bytes, expected)"),
        ({"other": torch.ones(1)}, "Unexpected key"),
    ):
        write(**change)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=f"(?s){why}"):
            accelerator.load_state(tmp_path)
    write()
    with pytest.raises(CheckpointError, match=r"(?s)damaged.*delete manifest\.json"):
        Accelerator(strict=True).load_state(tmp_path)
    # As in 1.x, weights of safetensors come before others.
    torch_file = accelerator.save_state(tmp_path / "torch", safe_serialization=False)
    file.rename(torch_file / file.name)
    accelerator.load_state(torch_file)
    assert "model.safetensors was written after save_state; loaded without" in caplog.text


def test_the_manifest_of_files_that_a_program_has_replaced_can_be_deleted(tmp_path: Path) -> None:
    """The error of a file other than weights says so."""
    accelerator, model = Accelerator(), torch.nn.Linear(2, 1, bias=False)
    _, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.save_state(tmp_path)
    optimizer.param_groups[0]["lr"] = 0.3
    accelerator.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    with pytest.raises(CheckpointError, match=r"optimizer\.bin is damaged") as error:
        accelerator.load_state(tmp_path)
    assert error.value.fix is not None
    assert "delete manifest.json" in error.value.fix
    (tmp_path / "manifest.json").unlink()
    optimizer.param_groups[0]["lr"] = 0.1
    accelerator.load_state(tmp_path)
    assert optimizer.param_groups[0]["lr"] == 0.3


def test_a_truncated_file_is_told_by_its_size(tmp_path: Path) -> None:
    path = save.save(training(steps=2), tmp_path / "c")
    damage(path / "optimizer.bin", "truncated")
    with pytest.raises(CheckpointError, match=r"optimizer.bin has \d+ bytes, expected \d+"):
        load.load(training(), path)


def test_every_byte_of_the_manifest_is_guarded(tmp_path: Path) -> None:
    path = save.save(CheckpointContents(metadata={"epoch": 3}), tmp_path / "c")
    file = path / "manifest.json"
    whole = file.read_bytes()
    for place in range(0, len(whole), 7):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        if json_or_none(file) == json.loads(whole):
            continue  # white space
        with pytest.raises(CheckpointError, match=r"manifest.json"):
            load.load(CheckpointContents(), path)


def json_or_none(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except ValueError:
        return None


def test_a_part_that_was_not_saved_is_an_error_or_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = training(steps=2)
    saved.schedulers, saved.loaders, saved.rng, saved.scaler = [], [], False, None
    path = save.save(saved, tmp_path / "c")
    fresh = training(seed=2)
    with pytest.raises(
        CheckpointError, match=r"(?s)scheduler.bin is missing.*scheduler 0 \(MultiStepLR\).*strict=False"
    ):
        load.load(fresh, path)
    scheduler = fresh.schedulers[0].state_dict()
    caplog.set_level(logging.INFO)
    loaded = load.load(fresh, path, strict=False)
    assert [entry.partition(" ")[0] for entry in loaded.missing] == [
        "scheduler.bin", "scaler.pt", "manifest.json", "random_states_0.pkl",
    ]  # fmt: skip
    assert "scheduler.bin (scheduler 0 (MultiStepLR))" in caplog.text
    logged = [line.partition("loaded ")[2] for line in caplog.messages if "RANK 0] loaded " in line]
    assert logged == ["model 0 (Sequential)", "optimizer 0 (AdamW)", "registered object 0 (Counter)"]
    assert fresh.schedulers[0].state_dict() == scheduler
    assert_same(fresh.models[0].state_dict(), saved.models[0].state_dict())


def test_the_number_of_registered_objects_must_match(tmp_path: Path) -> None:
    """A RuntimeError, as in the public package."""
    path = save.save(training(), tmp_path / "c")
    fresh = training()
    fresh.custom.append(Counter())
    with pytest.raises(RuntimeError, match=r"holds 1 registered object\(s\), but 2 are registered"):
        load.load(fresh, path)
    assert load.load(fresh, path, strict=False).missing == (
        "custom_checkpoint_1.pkl (registered object 1 (Counter))",
    )


def test_a_model_that_does_not_fit_is_named(tmp_path: Path) -> None:
    path = save.save(CheckpointContents([nn.Linear(2, 2)]), tmp_path / "c")
    with pytest.raises(
        CheckpointError, match=r"(?s)could not load model 0 \(Linear\).*size mismatch for weight"
    ):
        load.load(CheckpointContents([nn.Linear(3, 2)]), path)
    with pytest.raises(CheckpointError, match=r"(?s)model 0 \(Sequential\).*Missing key"):
        load.load(CheckpointContents([nn.Sequential(nn.Linear(2, 2))]), path)
    wider = nn.Linear(2, 2)
    wider.extra = nn.Parameter(torch.zeros(1))
    with pytest.raises(CheckpointError, match="extra"):
        load.load(CheckpointContents([wider]), path)
    load.load(CheckpointContents([wider]), path, model_kwargs={"strict": False})


class Strict(Counter):
    """An object that looks at its state while it takes it over."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        if self.count > 100:
            raise ValueError("more than 100 phases")


def prepared_run(change: str = "") -> tuple[Accelerator, Any]:
    """(accelerator, all its state) after a step; ``change`` makes it another run than the saved one."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(len(change))
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1, bias=change != "bias"))
    if change == "shape":
        model[0] = nn.Linear(3, 4, bias=False)
        model[0].bias = nn.Parameter(torch.zeros(1))
    weights, biases = [model[0].weight, model[1].weight], [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": weights}, {"params": biases}] if change == "groups" else [*weights, *biases]
    groups = groups[::-1] if change == "order" else groups
    kind = {"sgd": torch.optim.SGD, "adamax": torch.optim.Adamax}.get(change, torch.optim.AdamW)
    optimizer = kind(groups, lr=0.1)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    if change == "schedule":
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    first, second = Counter(1), Strict(1000 if not change else 1)
    prepared = accelerator.prepare(model, optimizer, scheduler)
    accelerator.register_for_checkpointing(first, *([] if change == "fewer" else [second]))
    accelerator.backward(prepared[0](torch.ones(2, 3)).sum())
    prepared[1].step()
    prepared[2].step()
    return accelerator, lambda: copy.deepcopy(
        (*(each.state_dict() for each in prepared), first.count, second.count, torch.get_rng_state())
    )


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("groups", "groups"),
        ("sgd", r"state of AdamW \(.*betas.*\), and the optimizer is SGD \(.*momentum"),
        ("bias", "1.bias"),
        ("shape", r"0.bias.*\(4,\).*\(1,\)"),
        ("schedule", "lr_lambdas"),
        ("fewer", "registered"),
        ("refused", "more than 100 phases"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(
    tmp_path: Path, change: str, text: str, sharded: bool
) -> None:
    """G8: groups, parameters, another optimizer or schedule, and an object that refuses at the end."""
    prepared_run()[0].save_state(str(tmp_path / "c"), sharded=sharded)
    accelerator, states = prepared_run(change)
    before = states()
    with pytest.raises(CheckpointError, match="(?s)" + text.replace("state of AdamW", "state of .*")):
        accelerator.load_state(str(tmp_path / "c"))
    assert_same(states(), before)


class Unwilling(Counter):
    """An object that refuses every state, its own too."""

    def __init__(self, count: int, error: Exception) -> None:
        super().__init__(count)
        self.error = error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise self.error


@pytest.mark.parametrize("error", [ValueError("never"), AssertionError("never")], ids=repr)
def test_the_others_are_taken_back_if_an_object_refuses_its_own_state_too(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """G8: the schedule, the scaler, the position in the data and the other objects."""

    def run(saves: bool) -> tuple[Accelerator, Any]:
        accelerator = Accelerator(cpu=True, mixed_precision="fp16")
        model: Any = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(range(8), batch_size=2)  # type: ignore[arg-type]
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
        first, last = Counter(), Counter()
        accelerator.register_for_checkpointing(first, Unwilling(0, error), last)
        if saves:
            next(iter(loader))
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            scheduler.step()
            first.count = last.count = 5
            accelerator.scaler.update(128.0)  # type: ignore[union-attr]
            accelerator.save_state(str(tmp_path / "c"))
        parts = (model, optimizer, scheduler, accelerator.scaler)
        return accelerator, lambda: copy.deepcopy(
            (*(each.state_dict() for each in parts), first.count, last.count, [b.tolist() for b in loader])
        )

    run(saves=True)
    accelerator, states = run(saves=False)
    before = states()
    accelerator, states = run(saves=False)
    with pytest.raises((CheckpointError, AssertionError), match="never"):
        accelerator.load_state(str(tmp_path / "c"))
    after = states()
    assert_same(after[1:], before[1:])
    assert ("could not take back: load registered object 1" in caplog.text) is isinstance(error, ValueError)


class Progress:
    """An object whose attributes are set when it is loaded, or when a training begins."""

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def test_a_registered_object_needs_no_state_before_it_is_loaded(tmp_path: Path) -> None:
    """accel-hydra's ``Trainer`` registers itself, and has a step only then."""
    saved, fresh = Progress(), Progress()
    saved.step = 3
    for each in (saved, fresh):
        accelerator = Accelerator()
        accelerator.register_for_checkpointing(each)
        if each is saved:
            accelerator.save_state(str(tmp_path / "c"))
    accelerator.load_state(str(tmp_path / "c"))
    assert fresh.step == 3


class Recorder:
    """An object that takes its state apart, adds to what it has, and may write into others."""

    def __init__(self, write: Callable[[torch.Tensor], Any]) -> None:
        self.write, self.losses = write, list[float]()

    def state_dict(self) -> dict[str, Any]:
        return {"losses": [0.5], "weight": torch.full((1, 1), 3.0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses += state.pop("losses")
        self.write(state.pop("weight"))


@pytest.mark.parametrize("kind", ["none", "read", "data", "parameter", "foreach", "assign", "options"])
def test_a_registered_object_is_loaded_twice_only_where_it_writes_into_others(
    tmp_path: Path, kind: str
) -> None:
    """What it writes is there after the load, as in 1.15; a second load adds its list again."""
    accelerator = Accelerator(cpu=True)
    model: Any = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    @torch.no_grad()
    def write(weight: torch.Tensor) -> None:
        if kind == "read":
            weight.copy_(model.weight)
        elif kind == "data":
            model.weight.data.copy_(weight)
        elif kind == "parameter":
            model.weight.mul_(0).add_(weight)
        elif kind == "foreach":
            torch._foreach_copy_([model.weight], [weight])
        elif kind == "assign":
            model.weight.data = weight.clone()
        elif kind == "options":
            optimizer.param_groups[0]["lr"] = weight.item()

    recorder = Recorder(write)
    accelerator.register_for_checkpointing(recorder)
    accelerator.save_state(tmp_path / "c")
    weight = model.weight.item()
    accelerator.load_state(tmp_path / "c")
    is_writer = kind not in ("none", "read")
    assert recorder.losses == [0.5] * (1 + is_writer)
    assert (model.weight.item() == 3.0) == (is_writer and kind != "options")
    assert (model.weight.item() == weight) == (not is_writer or kind == "options")
    assert optimizer.param_groups[0]["lr"] == (3.0 if kind == "options" else 0.1)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_that_lacks_a_parameter_changes_nothing(tmp_path: Path, sharded: bool) -> None:
    """G8."""
    prepared_run("bias")[0].save_state(str(tmp_path / "c"), sharded=sharded)
    accelerator, states = prepared_run()
    before = states()
    with pytest.raises(CheckpointError, match=r"1\.bias"):
        accelerator.load_state(str(tmp_path / "c"))
    assert_same(states(), before)


@pytest.mark.parametrize(
    ("change", "text"), [("adamax", "state of AdamW"), ("order", "exp_avg of its param")]
)
def test_a_state_of_another_optimizer_is_refused_although_options_agree(
    tmp_path: Path, change: str, text: str
) -> None:
    prepared_run()[0].save_state(str(tmp_path / "c"))
    with pytest.raises(CheckpointError, match=text):
        prepared_run(change)[0].load_state(str(tmp_path / "c"))


def test_the_state_of_another_kind_of_schedule_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """torch's schedules take any values: the rest of the training would follow none of the two."""
    prepared_run()[0].save_state(str(tmp_path / "c"))
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for schedule in (
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
        torch.optim.lr_scheduler.StepLR(optimizer, 2),
    ):
        caplog.clear()
        accelerator.free_memory()
        accelerator.prepare(schedule)
        accelerator.load_state(str(tmp_path / "c"), strict=False)
        words = "takes the state of another kind of schedule: it has no T_max, eta_min, and holds gamma"
        assert (words in caplog.text) is isinstance(schedule, torch.optim.lr_scheduler.CosineAnnealingLR)


def test_what_is_missing_in_a_model_may_be_left_as_it_is(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2, bias=False))
    accelerator.save_state(str(tmp_path / "c"))
    other = Accelerator(cpu=True)
    model = other.prepare(nn.Linear(2, 2))
    bias = model.bias.tolist()
    with pytest.raises(CheckpointError, match="bias"):
        other.load_state(str(tmp_path / "c"))
    assert other.load_state(str(tmp_path / "c"), strict=False).missing == ("bias (in model.safetensors)",)
    assert model.bias.tolist() == bias


class Renamed(nn.Linear):
    """Takes states of its older self, and says no to others while it loads."""

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        if f"{prefix}w" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}w")
        super()._load_from_state_dict(state, prefix, *args)


def test_a_model_that_converts_older_states_is_tried_and_taken_back(tmp_path: Path) -> None:
    old = nn.Module()
    old.w, old.bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    path = save.save(CheckpointContents([old]), tmp_path / "c")
    model = Renamed(2, 2)
    load.load(CheckpointContents([model]), path)
    assert model.weight.tolist() == [[1, 1], [1, 1]]
    del old.bias
    path = save.save(CheckpointContents([old]), tmp_path / "c")
    model.weight.data.fill_(5)
    with pytest.raises(CheckpointError, match="bias"):
        load.load(CheckpointContents([model]), path)
    assert model.weight.tolist() == [[5, 5], [5, 5]]


def test_a_path_with_a_nul_character_is_named(tmp_path: Path) -> None:
    """Not Python's words, which name no path; nothing is written."""
    path = str(tmp_path / "a\0b")
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    calls = [
        lambda: accelerator.save_state(path),
        lambda: accelerator.load_state(path),
        lambda: accelerator.save_model(model, path),
        lambda: accelerator.save({"weight": torch.ones(1)}, path),
        lambda: utils.load(path),
        lambda: utils.load_state_dict(path),
        lambda: load_checkpoint_in_model(nn.Linear(1, 1), path),
        lambda: checkpointing.save_custom_state(Counter(), path),
        lambda: checkpointing.load_custom_state(Counter(), path),
    ]
    others = [
        lambda: disk_offload(nn.Linear(1, 1), path),
        lambda: dispatch_model(nn.Linear(1, 1), {"": "disk"}, offload_dir=path),
        lambda: utils.write_basic_config(save_location=path),
        lambda: Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path).init_trackers("a\0b"),
    ]
    for call in (*calls, *others):
        kind = AccelerateError if call in others else CheckpointError
        with pytest.raises(kind, match=r"a(\\x00|\x00)b"):
            call()
    assert os.listdir(tmp_path) == []


def test_an_object_without_state_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """D8."""
    with pytest.raises(CheckpointError, match=r"registered object 1 cannot be saved: it is a object"):
        save.save(CheckpointContents(custom=[Counter(), object()]), tmp_path / "c")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("metadata", "text"),
    [({"a": {"b": [1, torch.ones(1)]}}, r"metadata\['a'\]\['b'\]\[1\] is a Tensor"),
     ({"loss": np.float64(0.5)}, r"metadata\['loss'\] is a float64"),
     ({"table": {1: 2}}, r"metadata\['table'\] is a dict with keys that are not text")],
)  # fmt: skip
def test_metadata_that_would_change_on_the_way_is_refused(
    tmp_path: Path, metadata: dict[str, Any], text: str
) -> None:
    with pytest.raises(CheckpointError, match=text):
        save.save(CheckpointContents(metadata=metadata), tmp_path / "c")
    assert os.listdir(tmp_path) == []


def test_a_state_that_safetensors_cannot_hold_is_named(tmp_path: Path) -> None:
    odd = StatefulAdapter("odd", lambda: {"x": torch.ones(1), "extra": [1, 2]}, dict)
    with pytest.raises(
        CheckpointError, match=r"(?s)extra in a model's state is a list.*safe_serialization=False"
    ):
        save.save(CheckpointContents([odd]), tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"weight has no data to save"):
        save.save(CheckpointContents([nn.Linear(1, 1, device="meta")]), tmp_path / "c")
    assert os.listdir(tmp_path) == []


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.putenv, ("ACCELERATE_TRAP", "sprung")


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    path = save.save(training(steps=1), tmp_path / "c")
    (path / "manifest.json").unlink()
    torch.save({"state": Trap()}, path / "optimizer.bin")
    fresh = training()
    fresh.loaders = []
    with pytest.raises(CheckpointError, match=r"(?s)optimizer.bin.*could run code.*putenv.*weights_only"):
        load.load(fresh, path)


class UnknownClass(SimpleNamespace):
    """A class that no list of plain classes knows."""


def test_load_kwargs_override(tmp_path: Path) -> None:
    class Plain:
        got: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {"set": UnknownClass(a=1)}

        def load_state_dict(self, value: Any) -> None:
            self.got = value

    plain = Plain()
    path = save.save(CheckpointContents(schedulers=[plain]), tmp_path / "c")
    with pytest.raises(CheckpointError, match="UnknownClass"):
        load.load(CheckpointContents(schedulers=[plain]), path)
    load.load(CheckpointContents(schedulers=[plain]), path, load_kwargs={"weights_only": False})
    assert plain.got == {"set": UnknownClass(a=1)}


def test_map_location_reaches_torch_files(tmp_path: Path) -> None:
    holder: dict[str, torch.Tensor] = {}
    part = StatefulAdapter("x", lambda: {"t": torch.ones(2)}, holder.update)
    path = save.save(CheckpointContents(optimizers=[part]), tmp_path / "c")
    load.load(CheckpointContents(optimizers=[part]), path, map_location="meta")
    assert holder["t"].device.type == "meta"
    load.load(
        CheckpointContents(optimizers=[part]),
        path,
        load_kwargs={"map_location": "cpu"},
        map_location="meta",
    )
    assert holder["t"].device.type == "cpu"
    model = nn.Linear(2, 2)
    save.save(CheckpointContents([model]), path, safe_serialization=False)
    load.load(CheckpointContents([model]), path, load_kwargs={"map_location": "cpu", "mmap": False})
    save.save(CheckpointContents(optimizers=[part]), path)
    load.load(CheckpointContents(optimizers=[part]), path, map_location="on_device")
    assert holder["t"].device.type == "cpu"


def test_states_of_optimizers_alone_are_loaded_to_the_device_of_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in 1.15, whose registered objects get tensors on the host; on any number of ranks."""
    places: dict[str, str] = {}

    def part(name: str, keeps_shard: bool = False) -> StatefulAdapter:
        def load_state_dict(state: dict[str, torch.Tensor]) -> None:
            places[name] = state["t"].device.type

        return StatefulAdapter(name, lambda: {"t": torch.ones(2)}, load_state_dict, keeps_shard=keeps_shard)

    names = ("optimizers", "shards", "schedulers", "custom", "stateful_loaders")
    contents = CheckpointContents(**{name: [part(name)] for name in names if name != "shards"})
    contents.optimizers.append(part("shards", keeps_shard=True))
    path = save.save(contents, tmp_path / "c")
    monkeypatch.setattr(load.worlds, "current", lambda: SimpleNamespace(device=torch.device("meta")))
    two = CheckpointRankGroup(size=2, channel=lambda outcome, merge: merge([outcome, outcome]))
    for ranks, location, expected in (
        (CheckpointRankGroup(), None, ["cpu"] * 5),
        (two, None, ["meta", "cpu", "cpu", "cpu", "cpu"]),
        (two, "on_device", ["meta"] * 5),
        (two, "cpu", ["cpu"] * 5),
    ):
        with patch.object(torch, "load", wraps=torch.load) as read:
            load.load(contents, path, ranks=ranks, map_location=location)
        assert [places[name] for name in names] == expected
        assert [call.kwargs["mmap"] for call in read.call_args_list] == [False, True, False, False, False]


# ---------------------------------------------------------------- other writers, other worlds


def public_checkpoint(folder: Path, parts: CheckpointContents, ranks: int = 1) -> Path:
    """A folder as the public package writes it: the same files, no manifest."""
    path = save.save(parts, folder)
    (path / "manifest.json").unlink()
    for rank in range(1, ranks):
        (path / f"random_states_{rank}.pkl").write_bytes((path / "random_states_0.pkl").read_bytes())
    return path


def test_a_checkpoint_of_the_public_package_loads_by_name_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = training(steps=3)
    path = public_checkpoint(tmp_path / "c", saved)
    fresh = training(seed=5)
    loaded = load.load(fresh, path)
    assert loaded.step == 3
    assert loaded.manifest is None
    assert "has no manifest" in caplog.text
    assert "position of loader 0" in loaded.notes[0]
    fresh.loaders[0].count = saved.loaders[0].count
    assert_same(all_states(fresh), all_states(saved))


@pytest.mark.parametrize("manifest", [True, False])
def test_a_rank_without_random_states_gets_derived_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, manifest: bool
) -> None:
    """More processes than saved: the same numbers on every load, others on every rank; said in one line."""
    path = save.save(training(steps=1), tmp_path / "c")
    if not manifest:
        (path / "manifest.json").unlink()

    def draws(rank: int, size: int) -> tuple[float, float, float]:
        torch.manual_seed(99)
        reader_ranks = CheckpointRankGroup(rank, size)
        from accelerate.checkpoint.state_reader import TrainingStateReader
        from accelerate.checkpoint.storage import LocalCheckpointStorage, read_manifest

        parts = CheckpointContents(rng=True)
        manifest = read_manifest(LocalCheckpointStorage(path.parent), path.name)
        reader = TrainingStateReader(path, manifest, reader_ranks)
        reader.read(parts)
        reader.finish(parts)
        assert len(reader.notes) == (1 if size > 1 else 0)
        return torch.rand(()).item(), random.random(), np.random.rand()

    every = [draws(rank, 3) for rank in range(3)]
    assert every == [draws(rank, 3) for rank in range(3)]
    assert len(set(every)) == 3
    assert every[0] == draws(0, 1)  # rank 0 has its own


def test_a_gap_in_the_ranks_is_missing_not_derived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """D2: a rank's file that should be there and is not."""
    from accelerate.checkpoint.state_reader import TrainingStateReader

    path = public_checkpoint(tmp_path / "c", training(steps=1), ranks=3)
    (path / "random_states_1.pkl").unlink()
    reader = TrainingStateReader(path, None, CheckpointRankGroup(1, 3))
    reader.read(CheckpointContents(rng=True))
    assert reader.steps == []
    assert "random_states_1.pkl is missing: the random states of rank 1 stay as they are" in caplog.text


def test_no_hook_is_left_in_the_logger(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A save and a load of the same objects in the same world only tell that they save and load."""
    caplog.set_level(logging.DEBUG)
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    for _ in range(2):
        save.save(training(), project=project)
    load.load(training(), project=project)
    records = [record for record in caplog.records if record.name.startswith("accelerate")]
    texts = [record.getMessage() for record in records]
    assert [text for text in texts if "removed" in text] == [
        "[RANK 0] removed checkpoint_0: total_limit is 1"
    ]
    assert {(record.name, record.levelno) for record in records} == {
        ("accelerate.accelerator", logging.INFO),
        ("accelerate.checkpointing", logging.INFO),
    }


class WholeOptimizer:
    """An optimizer that is not torch's, whose state is saved whole."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.param_groups = [{"params": parameters, "lr": 0.1}]

    def step(self) -> None:
        """Does nothing."""

    def zero_grad(self) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, float]:
        return {"lr": 0.1}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.param_groups[0]["lr"] = state["lr"]


def test_the_manifest_lists_optimizers_by_their_index(tmp_path: Path) -> None:
    """Of any mixture of sharded and whole ones: who fetches only the first n goes by it."""
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 1)
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(parameters, lr=0.1), WholeOptimizer(parameters)]
    accelerator.prepare(model, optimizers[0])
    accelerator.prepare_optimizer(optimizers[1])
    accelerator.save_state(tmp_path / "c", sharded=True)
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    files = [entry["file"] for entry in manifest["parts"]["optimizers"]]
    assert len(files) == 2
    assert "optimizer_1" in files[1], files


class Converting(nn.Module):
    """A module whose first version has saved a tenth of its weight."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *more: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 10
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *more)


@pytest.mark.parametrize("compiled", ["", "saved", "loaded"])
def test_torch_files_keep_the_versions_of_modules(tmp_path: Path, compiled: str) -> None:
    """Without them a module converts what it has saved itself, as if it were old."""
    path = tmp_path / "c"
    models: list[Any] = [nn.Sequential(Converting()) for _ in range(2)]
    for model, when in zip(models, ("saved", "loaded"), strict=True):
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(torch.compile(model, backend="eager") if compiled == when else model)
        if when == "saved":
            accelerator.save_state(path, safe_serialization=False)
        accelerator.load_state(path)
        assert model[0].weight.tolist() == [1.0, 1.0]
    saved: Any = torch.load(path / "pytorch_model.bin", weights_only=True)
    assert saved._metadata["0"] == {"version": 2}
