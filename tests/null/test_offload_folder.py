"""The offload folder: written whole or not at all, as 1.15 writes it, and read as views of mapped files."""

from __future__ import annotations

import copy
import json
import os
import pickle
import stat
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import init_empty_weights, load_checkpoint_in_model
from accelerate.core.errors import OffloadError
from accelerate.hooks import attach_align_device_hook
from accelerate.utils import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from tests.support.offloaded import offload_fails

STATE = {
    "layer.weight": torch.arange(6.0).reshape(2, 3),
    "layer.half": torch.tensor([1.5, -2.0], dtype=torch.float16),
    "layer.brain": torch.tensor([[1.5], [-3.0]], dtype=torch.bfloat16),
    "eight": torch.tensor([0.5, 448.0]).to(torch.float8_e4m3fn),
    "other_eight": torch.tensor([0.5, 2.0]).to(torch.float8_e5m2),
    "count": torch.tensor(7),
    "scale": torch.tensor(0.25, dtype=torch.bfloat16),
    "mask": torch.tensor([True, False, True]),
    "turned": torch.arange(6, dtype=torch.int16).reshape(2, 3).T,
    "waves": torch.tensor([1 + 2j]),
    "nothing": torch.empty(0, 4),
}
# What 1.15.0 wrote for these: name -> (dtype, shape, bytes in hexadecimal).
RECORDED = {
    "layer.weight": ("float32", [2, 3], "000000000000803f0000004000004040000080400000a040"),
    "layer.half": ("float16", [2], "003e00c0"),
    "layer.brain": ("bfloat16", [2, 1], "c03f40c0"),
    "eight": ("float8_e4m3fn", [2], "307e"),
    "other_eight": ("float8_e5m2", [2], "3840"),
    "count": ("int64", [], "0700000000000000"),
    "scale": ("bfloat16", [], "803e"),
    "mask": ("bool", [3], "010001"),
    "turned": ("int16", [3, 2], "000003000100040002000500"),
    "waves": ("complex64", [1], "0000803f00000040"),
}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = (x.contiguous().reshape(-1).view(torch.uint8) if x.numel() else x for x in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "index.json").read_text())


# ------------------------------------------------------------------------------------------------ the format


def test_every_dtype_is_what_1_15_writes(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, STATE)
    index = index_of(tmp_path)
    for name, (dtype, shape, raw) in RECORDED.items():
        assert index[name] == {"dtype": dtype, "shape": shape}
        assert (tmp_path / f"{name}.dat").read_bytes().hex() == raw, name
    assert (tmp_path / "index.json").read_text() == json.dumps(index, indent=2)
    assert not [name for name in os.listdir(tmp_path) if "tmp" in name]


def test_what_1_15_wrote_is_read(tmp_path: Path) -> None:
    for name, (_, _, raw) in RECORDED.items():
        (tmp_path / f"{name}.dat").write_bytes(bytes.fromhex(raw))
    index = {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape, _) in RECORDED.items()}
    (tmp_path / "index.json").write_text(json.dumps(index, indent=2))
    found = OffloadedWeightsLoader(save_folder=tmp_path)
    assert set(found) == set(RECORDED)
    assert all(same(found[name], STATE[name]) for name in RECORDED)


def test_all_that_is_written_is_read(tmp_path: Path) -> None:
    offload_state_dict(tmp_path / "new" / "folder", STATE)
    found = OffloadedWeightsLoader(save_folder=tmp_path / "new" / "folder")
    assert len(found) == len(STATE)
    assert all(same(found[name], value) for name, value in STATE.items())


def test_an_index_is_filled_and_merged(tmp_path: Path) -> None:
    index = offload_weight(STATE["count"], "count", tmp_path, {"before": {"dtype": "x", "shape": []}})
    assert list(index) == ["before", "count"]
    assert offload_weight(STATE["mask"], "mask", tmp_path) is None
    save_offload_index({"count": index["count"]}, tmp_path)
    save_offload_index({"mask": {"dtype": "bool", "shape": [3]}}, tmp_path)
    assert list(index_of(tmp_path)) == ["count", "mask"]


@pytest.mark.parametrize("empty", [None, {}])
def test_an_empty_index_writes_nothing(tmp_path: Path, empty: Any) -> None:
    save_offload_index(empty, tmp_path)
    assert not os.listdir(tmp_path)


# ------------------------------------------------------------------------------------------------ views


def test_a_weight_is_a_view_of_its_file_that_cannot_change_it(tmp_path: Path) -> None:
    offload_weight(STATE["layer.weight"], "w", tmp_path)
    file = tmp_path / "w.dat"
    view = load_offloaded_weight(file, {"dtype": "float32", "shape": [2, 3]})
    before = file.read_bytes()
    with file.open("r+b") as raw:  # whoever reads a mapped file sees what it holds now
        raw.write(numpy.float32(9).tobytes())
    assert view[0, 0] == 9
    view.add_(1)
    assert file.read_bytes()[4:] == before[4:]


def test_writing_anew_leaves_those_who_have_the_old_one(tmp_path: Path) -> None:
    entry = {"dtype": "float32", "shape": [2, 3]}
    offload_weight(STATE["layer.weight"], "w", tmp_path)
    view = load_offloaded_weight(tmp_path / "w.dat", entry)
    offload_weight(STATE["layer.weight"] + 1, "w", tmp_path)
    assert torch.equal(view, STATE["layer.weight"])
    assert torch.equal(load_offloaded_weight(tmp_path / "w.dat", entry), STATE["layer.weight"] + 1)


def test_two_names_that_are_one_file_are_told(tmp_path: Path) -> None:
    """On a file system that ignores case; one that does not has two files."""
    values = {"layer.W": torch.ones(1), "layer.w": torch.zeros(1)}
    offload_state_dict(tmp_path, values)
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    assert {name: loader[name] for name in loader} == values
    (tmp_path / "layer.w.dat").unlink()
    os.link(tmp_path / "layer.W.dat", tmp_path / "layer.w.dat")
    os.link(tmp_path / "layer.W.dat", tmp_path / "LAYER.w.dat")
    os.link(tmp_path / "layer.W.dat", tmp_path / "LAYER.W.dat")
    with pytest.raises(OffloadError, match=r"layer\.W and layer\.w cannot both be offloaded"):
        offload_weight(torch.zeros(1), "layer.w", tmp_path, {"layer.W": {}})


@pytest.mark.parametrize("how", ["state dict", "weights", "checkpoint"])
def test_a_model_keeps_the_weights_that_it_reads_from_a_folder(how: str, tmp_path: Path) -> None:
    """Who only reads the folder gets what is there, as in 1.15."""
    folder, other = tmp_path / "offload", {name: torch.ones(4, 4) for name in ("0.weight", "1.weight")}
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).requires_grad_(False)
    offload_state_dict(folder, model.state_dict())
    reader, expected = OffloadedWeightsLoader(save_folder=folder), model(torch.ones(1, 4))
    weights = OffloadedWeightsLoader(save_folder=folder)
    attach_align_device_hook(model, "cpu", offload=True, weights_map=weights)

    def write() -> None:
        if how == "state dict":
            offload_state_dict(folder, other)
        elif how == "weights":
            for name, value in other.items():
                offload_weight(value, name, folder, {})
        else:
            torch.save(other, tmp_path / "other.bin", _use_new_zipfile_serialization=False)
            with init_empty_weights():
                twin = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
            load_checkpoint_in_model(twin, tmp_path / "other.bin", {"": "disk"}, folder)

    with pytest.warns(UserWarning, match="keeps those that it has: give each model a folder"):
        write()
    assert torch.equal(model(torch.ones(1, 4)), expected)
    assert torch.equal(reader["0.weight"], other["0.weight"])
    twin = copy.deepcopy(model)
    assert torch.equal(twin(torch.ones(1, 4)), expected)
    assert len({id(vars(layer)["_hf_hook"].weights_map.dataset) for layer in twin}) == 1
    del model, weights, twin
    with warnings.catch_warnings():  # nobody reads the folder any more
        warnings.simplefilter("error")
        offload_weight(torch.zeros(4, 4), "0.weight", folder)


def test_entries_of_checkpoints_are_views_of_the_mapped_checkpoint(tmp_path: Path) -> None:
    """Index entries of transformers and peft; no byte is copied, unless a cast is needed."""
    file = tmp_path / "model.safetensors"
    save_file({"a.weight": STATE["layer.weight"], "b": STATE["layer.half"]}, file)
    index = {
        "weight": {"safetensors_file": str(file), "weight_name": "a.weight", "dtype": "float32"},
        "tied": {"safetensors_file": str(file), "weight_name": "a.weight"},
        "b": {"safetensors_file": str(file), "dtype": "torch.float32"},
    }
    found = OffloadedWeightsLoader(index=index)
    assert torch.equal(found["weight"], STATE["layer.weight"])
    assert found["weight"].data_ptr() == found["weight"].data_ptr() == found["tied"].data_ptr()
    assert same(found["b"], STATE["layer.half"].float())
    assert not found.in_memory("weight")
    assert all(
        same(twin["tied"], found["tied"])
        for twin in (copy.deepcopy(found), pickle.loads(pickle.dumps(found)))
    )


# ------------------------------------------------------------------------------------------------ mappings


def test_memory_comes_before_files(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a": torch.zeros(1), "b": torch.zeros(1)})
    found = OffloadedWeightsLoader(state_dict={"a": torch.ones(1), "c": torch.ones(1)}, save_folder=tmp_path)
    assert found.all_keys == list(found) == ["a", "c", "b"]
    assert {name: value.item() for name, value in found.items()} == {"a": 1, "b": 0, "c": 1}
    assert (found.in_memory("a"), found.in_memory("b")) == (True, False)
    assert "b" in found
    assert found.get("d") is None
    assert OffloadedWeightsLoader(save_folder=tmp_path, device="cpu")["a"].device.type == "cpu"


def test_the_weights_of_one_module() -> None:
    whole = OffloadedWeightsLoader(
        state_dict={"a.w": torch.ones(1), "a.b": torch.ones(2), "b.w": torch.ones(3)}
    )
    part = PrefixedDataset(whole, "a.")
    assert (part.dataset, part.prefix) == (whole, "a.")
    assert list(part) == list(part.keys()) == ["a.w", "a.b"]  # compressed-tensors looks them up in dataset
    assert {name: len(value) for name, value in part.items()} == {"a.w": 1, "a.b": 2}
    assert [len(value) for value in part.values()] == [1, 2]
    assert len(part["w"]) == len(part.dataset[next(iter(part))]) == 1
    assert len(part) == 2
    assert "w" in part
    assert "a.w" not in part
    twin: Any = copy.deepcopy(part)
    assert list(twin.dataset.state_dict) == ["a.w", "a.b"]
    assert twin["w"] is not part["w"]


def test_the_entries_of_submodules() -> None:
    state = dict.fromkeys(["a.w", "a.b.w", "ab.w", "c"], torch.ones(1))
    assert list(extract_submodules_state_dict(state, ["a", "c"])) == ["a.w", "a.b.w", "c"]


# ------------------------------------------------------------------------------------------------ errors


def test_nothing_to_read_from_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to read weights from"):
        OffloadedWeightsLoader()


def test_a_missing_file_is_what_python_calls_it(tmp_path: Path) -> None:
    index: dict[str, Any] = {"w": {"dtype": "float32", "shape": [2]}}
    with pytest.raises(FileNotFoundError, match="index of the offload folder"):
        OffloadedWeightsLoader(save_folder=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"w\.dat are gone"):
        OffloadedWeightsLoader(save_folder=tmp_path, index=index)["w"]


def test_a_weight_without_values_is_not_written(tmp_path: Path) -> None:
    with offload_fails(match="w cannot be offloaded: it has no values"):
        offload_weight(torch.empty(2, device="meta"), "w", tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with offload_fails(match=r"w\.dat cannot be written to the offload folder .*file"):
        offload_state_dict(tmp_path / "file", {"w": torch.zeros(2)})
    with offload_fails(match=r"w\.dat cannot be written to the offload folder .*file"):
        offload_weight(torch.ones(2), "w", tmp_path / "file")
    if os.geteuid() != 0:
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
        with offload_fails(match="PermissionError"):
            offload_weight(torch.ones(2), "w", tmp_path)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offload_weight(torch.ones(2), "w", tmp_path)
    before = (tmp_path / "w.dat").read_bytes()

    def full(self: Path, data: bytes) -> int:
        self.open("wb").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with offload_fails(match="No space left on device"):
        offload_weight(torch.zeros(2), "w", tmp_path)
    assert os.listdir(tmp_path) == ["w.dat"]
    assert (tmp_path / "w.dat").read_bytes() == before


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"w": torch.ones(4)})
    with (tmp_path / "w.dat").open("r+b") as file:
        file.truncate(10)
    with offload_fails(match=r"10 bytes, and \[4\] of torch.float32 are 16"):
        OffloadedWeightsLoader(save_folder=tmp_path)["w"]


def test_files_that_are_gone_are_named(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"w": torch.ones(4)})
    (tmp_path / "w.dat").unlink()
    with offload_fails(match=r"w\.dat are gone"):
        OffloadedWeightsLoader(save_folder=tmp_path)["w"]
    with offload_fails(match=r"shard\.safetensors are gone"):
        OffloadedWeightsLoader(index={"w": {"safetensors_file": str(tmp_path / "shard.safetensors")}})


def test_an_index_that_is_no_index_is_an_error(tmp_path: Path) -> None:
    with offload_fails(match="index of the offload folder"):
        OffloadedWeightsLoader(save_folder=tmp_path)
    (tmp_path / "index.json").write_text('{"w": ')
    with offload_fails(match="JSONDecodeError"):
        save_offload_index({"w": {}}, tmp_path)
    (tmp_path / "index.json").write_text("[]")
    with offload_fails(match="is no index"):
        OffloadedWeightsLoader(save_folder=tmp_path)
    with offload_fails(match="dtype 'float33'"):
        load_offloaded_weight(tmp_path / "w.dat", {"dtype": "float33", "shape": [1]})


def test_a_checkpoint_that_lacks_the_weight_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1)}, file)
    found = OffloadedWeightsLoader(index={"w": {"safetensors_file": str(file), "weight_name": "b"}})
    with offload_fails(match="w cannot be read from"):
        found["w"]
    file.write_bytes(b"\x10")
    broken = OffloadedWeightsLoader(index={"w": {"safetensors_file": str(file)}})
    with offload_fails(match="check that the checkpoint is complete"):
        broken["w"]


def test_a_weight_of_an_unnamed_folder_is_an_error() -> None:
    found = OffloadedWeightsLoader(index={"w": {"dtype": "float32", "shape": [1]}})
    with offload_fails(match="folder that was not named"):
        found["w"]
