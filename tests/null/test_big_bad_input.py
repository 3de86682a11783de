"""Wrong input to the functions for models larger than memory: each is told before anything is loaded.

Every case checks the words, that no weight has left the meta device, and that no file has appeared.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate.core.errors import AccelerateError
from accelerate.utils import get_balanced_memory

NAMES = ["0.weight", "0.bias", "1.0.weight", "1.0.bias", "2.weight", "2.bias"]
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
EVERY = {"0": "cpu", "1": "cpu", "2": "cpu"}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 32), nn.ReLU()), nn.Linear(32, 4))


def empty() -> nn.Module:
    with init_empty_weights():
        return model()


def put_index(folder: Path, held: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": held}))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The model in two shards."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    weights = model().state_dict()
    assert list(weights) == NAMES
    save_file({name: weights[name].clone() for name in NAMES[:2]}, folder / FIRST)
    save_file({name: weights[name].clone() for name in NAMES[2:]}, folder / SECOND)
    put_index(folder, {name: FIRST if name in NAMES[:2] else SECOND for name in NAMES})
    return folder


def refused(call: Callable[[], object], words: str, folder: Path, hollow: nn.Module | None = None) -> None:
    """``call`` raises an error of ours that says ``words``, and has done nothing by then."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(AccelerateError, match=words):
        call()
    assert sorted(folder.rglob("*")) == before
    if hollow is not None:
        assert {parameter.device.type for parameter in hollow.parameters()} == {"meta"}


# ---------------------------------------------------------------- files


def without(folder: Path) -> None:
    (folder / SECOND).unlink()


def cut(length: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / SECOND
        file.write_bytes(file.read_bytes()[:length])

    return change


def garbage(folder: Path) -> None:
    (folder / SECOND).write_bytes(b"this was never a file of weights " * 20)


def no_json(folder: Path) -> None:
    (folder / INDEX).write_text("{")


def another_file(folder: Path) -> None:
    put_index(folder, dict.fromkeys(NAMES, "another.safetensors"))


def outside(folder: Path) -> None:
    put_index(folder, dict.fromkeys(NAMES, f"../{folder.name}/{FIRST}"))


def another_tensor(folder: Path) -> None:
    put_index(folder, dict.fromkeys(NAMES, FIRST))


@pytest.mark.parametrize("home", ["cpu", "disk"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without, rf"{SECOND} is missing"),
        (cut(4), rf"cannot read .*{SECOND}"),
        (cut(60), rf"cannot read .*{SECOND}"),
        (cut(-3), rf"cannot read .*{SECOND}"),
        (garbage, rf"cannot read .*{SECOND}"),
        (no_json, rf"cannot read .*{INDEX}"),
        (another_file, r"another\.safetensors is missing"),
        (outside, "outside of the folder"),
        (another_tensor, r"1\.0\.weight"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_damaged_checkpoint(
    checkpoint: Path, tmp_path: Path, damage: Callable[[Path], None], words: str, home: str
) -> None:
    """E2"""
    damage(checkpoint)
    for load in (load_checkpoint_and_dispatch, load_checkpoint_in_model):
        hollow = empty()
        call: Any = load

        def loading(call: Any = call, hollow: nn.Module = hollow) -> object:
            return call(hollow, checkpoint, device_map={"": home}, offload_folder=tmp_path / "offload")

        refused(loading, words, tmp_path, hollow)


@pytest.mark.parametrize(
    ("name", "words"), [("nowhere", "no file or folder"), ("hollow", "it holds: nothing")]
)
def test_a_checkpoint_that_is_not_there(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "hollow").mkdir()
    hollow = empty()
    refused(
        lambda: load_checkpoint_and_dispatch(hollow, tmp_path / name, {"": "cpu"}), words, tmp_path, hollow
    )


def test_a_checkpoint_of_another_model(checkpoint: Path, tmp_path: Path) -> None:
    """E2"""
    with init_empty_weights():
        other = nn.Linear(8, 16)
        wider = nn.Sequential(nn.Linear(9, 16), *list(model())[1:])
    words = r"missing: weight, bias"
    refused(lambda: load_checkpoint_and_dispatch(other, checkpoint, {"": "cpu"}), words, tmp_path, other)
    words = r"0\.weight has the shape \(16, 8\), in the model \(16, 9\)"
    refused(lambda: load_checkpoint_and_dispatch(wider, checkpoint, {"": "cpu"}), words, tmp_path, wider)


# ---------------------------------------------------------------- budgets


MISSPELT = [
    ({"gpu": 100}, "unknown device 'gpu'"),
    ({"cpu": "1XB"}, "'1XB' is not a size"),
    ({"cpu": -1}, "the budget of 'cpu' is -1"),
    ({"cuda:x": 100}, "unknown device 'cuda:x'"),
    ({"cuda:": 100}, "unknown device 'cuda:'"),
    ({"cuda:-1": 100}, "unknown device 'cuda:-1'"),
    ("10GB", "max_memory is '10GB', and no dict"),
    ([("cpu", 1)], "max_memory is .*, and no dict"),
]
TOO_SMALL = [
    ({0: 100, "cpu": 100, "disk": 100}, "the budgets are too small for the model"),
    ({0: 0, "cpu": 0, "disk": 0}, "no device may hold anything"),
]


@pytest.mark.parametrize(("budgets", "words"), [*MISSPELT, *TOO_SMALL])
def test_budgets_that_cannot_be(tmp_path: Path, budgets: Any, words: str) -> None:
    """E5"""
    refused(lambda: infer_auto_device_map(empty(), budgets), words, tmp_path)


@pytest.mark.parametrize(("budgets", "words"), MISSPELT)
def test_budgets_that_cannot_be_balanced(tmp_path: Path, budgets: Any, words: str) -> None:
    refused(lambda: get_balanced_memory(empty(), budgets), words, tmp_path)


# ---------------------------------------------------------------- maps


@pytest.mark.parametrize(
    ("device_map", "words"),
    [
        ({"": "dsik"}, "unknown device 'dsik'"),
        ({"": "gpu"}, "unknown device 'gpu'"),
        ({"": "cuda:99"}, r"cuda:99'?,? (which )?is not here"),
        ({"": 99}, "99"),
        ({"": None}, "no device"),
        ({"": 1.5}, "1.5 is no device"),
        ({"0": "cpu", "1": "cpu", "3": "cpu"}, r"2\.weight, 2\.bias(.|\n)*the model has no '3'"),
        ({"0": "cpu", "1": "disk"}, r"2\.weight, 2\.bias"),
        ({"0": "cpu", "1.1": "cpu", "2": "cpu"}, r"1\.0\.weight"),
        ({}, r"0\.weight"),
    ],
)
def test_maps_that_do_not_fit(checkpoint: Path, tmp_path: Path, device_map: Any, words: str) -> None:
    """E5"""
    hollow, folder = empty(), tmp_path / "offload"
    refused(lambda: dispatch_model(model(), device_map, offload_dir=folder), words, tmp_path)

    def loading() -> object:
        return load_checkpoint_and_dispatch(hollow, checkpoint, device_map, offload_folder=folder)

    refused(loading, words, tmp_path, hollow)


@pytest.mark.parametrize("device_map", ["auto", "cpu", 0, torch.device("cpu"), ["cpu"], {0: "cpu"}])
def test_what_is_no_map(checkpoint: Path, tmp_path: Path, device_map: Any) -> None:
    words = r"device_map is .*, and no dict of names(.|\n)*infer_auto_device_map\(model\)"
    hollow = empty()
    refused(lambda: dispatch_model(model(), device_map), words, tmp_path)
    refused(lambda: load_checkpoint_in_model(hollow, checkpoint, device_map), words, tmp_path, hollow)


def test_the_name_of_a_map_that_is_misspelt(checkpoint: Path, tmp_path: Path) -> None:
    hollow = empty()
    words = "unknown device_map 'atuo'(.|\n)*did you mean 'auto'"
    refused(lambda: load_checkpoint_and_dispatch(hollow, checkpoint, "atuo"), words, tmp_path, hollow)


def test_a_dtype_that_is_none(checkpoint: Path, tmp_path: Path) -> None:
    hollow = empty()

    def loading() -> object:
        return load_checkpoint_and_dispatch(hollow, checkpoint, {"": "cpu"}, dtype="flaot16")

    refused(loading, "'flaot16'", tmp_path, hollow)


# ---------------------------------------------------------------- offload folders


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """A file is in its place, or above it: this holds for every user."""
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        words = rf"{folder} cannot be used as an offload folder"
        on_disk = {**EVERY, "1": "disk"}
        refused(lambda f=folder, m=on_disk: dispatch_model(model(), m, offload_dir=f), words, tmp_path)
        refused(lambda f=folder: disk_offload(model(), f, torch.device("cpu")), words, tmp_path)


def test_a_folder_that_nobody_named(tmp_path: Path) -> None:
    words = r"an offload folder is needed for 1\.0\.weight(.|\n)*offload_dir="
    refused(lambda: dispatch_model(model(), {**EVERY, "1": "disk"}), words, tmp_path)


# ---------------------------------------------------------------- models


def test_weights_that_are_nowhere(tmp_path: Path) -> None:
    """E2"""
    hollow = empty()
    words = r"no values for 0\.weight(.|\n)*load_checkpoint_and_dispatch"
    refused(lambda: dispatch_model(hollow, {"": "cpu"}), words, tmp_path, hollow)
    refused(lambda: disk_offload(hollow, tmp_path / "offload"), words, tmp_path, hollow)
    refused(lambda: cpu_offload(hollow), words, tmp_path, hollow)


def test_a_model_that_has_hooks_is_not_loaded_again(checkpoint: Path, tmp_path: Path) -> None:
    """E7: taking them off is enough."""
    from accelerate.hooks import remove_hook_from_submodules

    dispatched = dispatch_model(model(), EVERY, force_hooks=True)

    def loading() -> object:
        return load_checkpoint_and_dispatch(dispatched, checkpoint, {"": "cpu"})

    refused(loading, r"has been dispatched already(.|\n)*remove_hook_from_submodules", tmp_path)
    remove_hook_from_submodules(dispatched)
    loading()
    x = torch.ones(2, 8)
    assert torch.equal(dispatched(x), model()(x))


def test_the_same_model_may_be_dispatched_another_way(tmp_path: Path) -> None:
    """E7"""
    x = torch.ones(2, 8)
    found = model()
    for number, disk in enumerate("012"):
        found = dispatch_model(found, {**EVERY, disk: "disk"}, offload_dir=tmp_path / str(number))
        assert found.hf_device_map == {**EVERY, disk: "disk"}
        assert torch.equal(found(x), model()(x))


def test_a_checkpoint_is_never_changed_by_training_what_is_mapped_from_it(checkpoint: Path) -> None:
    """Weights on disk are the pages of the file; whoever writes them has pages of his own."""
    before = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    found = load_checkpoint_and_dispatch(empty(), checkpoint, {"": "disk"})
    optimizer = torch.optim.SGD(found.parameters(), lr=0.1)
    found(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert not torch.equal(found.get_parameter("0.bias"), model().get_parameter("0.bias"))
    assert {file.name: file.read_bytes() for file in checkpoint.iterdir()} == before
