"""Single files, the hub's sharded layout, the loose public functions, and the names of the public format."""

from __future__ import annotations

import inspect
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from accelerate.checkpoint import accelerator_state, layout, weight_files
from accelerate.core.errors import CheckpointError
from accelerate.world import rng


def weights(count: int = 4, size: int = 250) -> dict[str, torch.Tensor]:
    return {f"layer.{i}.weight": torch.full((size,), float(i)) for i in range(count)}


def assert_same(one: Any, two: Any) -> None:
    torch.testing.assert_close(one, two, rtol=0, atol=0)


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("safe", [True, False])
def test_small_weights_are_one_file(tmp_path: Path, safe: bool) -> None:
    files = weight_files.save_weights(weights(), tmp_path / "a" / "b", safe_serialization=safe)
    assert files == ["model.safetensors" if safe else "pytorch_model.bin"]
    assert os.listdir(tmp_path / "a" / "b") == files
    assert_same(weight_files.load_state_dict(tmp_path / "a" / "b" / files[0]), weights())


@pytest.mark.parametrize("safe", [True, False])
def test_large_weights_are_shards_with_an_index(tmp_path: Path, safe: bool) -> None:
    files = weight_files.save_weights(weights(), tmp_path, max_shard_size="2KB", safe_serialization=safe)
    pattern = "model-0000{}-of-00002.safetensors" if safe else "pytorch_model-0000{}-of-00002.bin"
    assert files == [pattern.format(1), pattern.format(2)]
    index_name = "model.safetensors.index.json" if safe else "pytorch_model.bin.index.json"
    assert sorted(os.listdir(tmp_path)) == sorted([*files, index_name])
    text = (tmp_path / index_name).read_text()
    index = json.loads(text)
    assert index == {
        "metadata": {"total_size": 4000},
        "weight_map": {f"layer.{i}.weight": files[i // 2] for i in range(4)},
    }
    assert text == json.dumps(index, indent=2, sort_keys=True) + "\n"
    together: dict[str, torch.Tensor] = {}
    for file in files:
        together.update(weight_files.load_state_dict(tmp_path / file))
    assert_same(together, weights())


@pytest.mark.parametrize("safe", [True, False])
def test_what_an_earlier_save_left_is_removed_and_the_rest_stays(tmp_path: Path, safe: bool) -> None:
    """Old shards or an old index would be loaded in place of the new weights."""
    keep = ["config.json", "model_card.safetensors", "my-00001-of-00002.bin"]
    for name in keep:
        (tmp_path / name).write_text("")
    weight_files.save_weights(weights(6), tmp_path, max_shard_size="1KB", safe_serialization=safe)
    shards = weight_files.save_weights(weights(4), tmp_path, max_shard_size="2KB", safe_serialization=safe)
    index = "model.safetensors.index.json" if safe else "pytorch_model.bin.index.json"
    assert sorted(os.listdir(tmp_path)) == sorted([*shards, index, *keep])
    one = weight_files.save_weights(weights(4), tmp_path, safe_serialization=safe)
    assert sorted(os.listdir(tmp_path)) == sorted([*one, *keep])
    again = weight_files.save_weights(weights(4), tmp_path, max_shard_size="2KB", safe_serialization=safe)
    assert sorted(os.listdir(tmp_path)) == sorted([*again, index, *keep])


def test_tied_weights_are_counted_and_written_once(tmp_path: Path) -> None:
    """D6: in shards too, the alias is told beside its tensor."""
    state = weights()
    state["tied.weight"] = state["layer.3.weight"]
    files = weight_files.save_weights(state, tmp_path, max_shard_size="2KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert "tied.weight" not in index["weight_map"]
    assert index["metadata"]["total_size"] == 4000
    with safe_open(tmp_path / files[1], framework="pt") as file:
        assert file.metadata() == {"tied.weight": "layer.3.weight", "format": "pt"}
    with safe_open(tmp_path / files[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_weights_without_data_are_refused_and_the_old_ones_stay(tmp_path: Path) -> None:
    weight_files.save_weights(weights(), tmp_path)
    with pytest.raises(CheckpointError, match="weight has no data to save"):
        weight_files.save_weights(nn.Linear(2, 2, device="meta").state_dict(), tmp_path)
    assert_same(load_file(tmp_path / "model.safetensors"), weights())
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot make the folder"):
        weight_files.save_weights(weights(), tmp_path / "file")


def test_clean_state_dict_names_what_it_leaves_out() -> None:
    shared = torch.arange(6.0)
    state = {"a": shared, "b": shared, "turned": torch.ones(2, 3).t(), "view": shared[2:4]}
    with pytest.warns(UserWarning, match=r"b \(is a\)"):
        cleaned = weight_files.clean_state_dict_for_safetensors(state)
    assert list(cleaned) == ["a", "turned", "view"]
    assert all(tensor.is_contiguous() for tensor in cleaned.values())
    assert cleaned["a"] is not cleaned["view"]
    assert weight_files.id_tensor_storage(cleaned["view"]) != weight_files.id_tensor_storage(cleaned["a"])
    assert weight_files.id_tensor_storage(shared[1:]) == weight_files.id_tensor_storage(shared)


def test_state_dict_files_load_to_the_device_map(tmp_path: Path) -> None:
    weight_files.save_weights(weights(3), tmp_path)
    state = weight_files.load_state_dict(
        tmp_path / "model.safetensors", {"layer": "cpu", "layer.1": "meta", "layer.2": "disk"}
    )
    assert [t.device.type for t in state.values()] == ["cpu", "meta", "cpu"]
    assert weight_files.load_state_dict(tmp_path / "model.safetensors", {"": "meta"})[
        "layer.0.weight"
    ].is_meta


# ---------------------------------------------------------------- save and load


@pytest.mark.parametrize("safe", [True, False])
def test_save_and_load_a_path_and_a_stream(tmp_path: Path, safe: bool) -> None:
    path, stream = tmp_path / "w", io.BytesIO()
    weight_files.save(weights(), path, safe_serialization=safe)
    weight_files.save(weights(), stream, safe_serialization=safe)
    assert os.listdir(tmp_path) == ["w"]
    stream.seek(0)
    if safe:
        assert_same(load_file(path), weights())
        assert stream.getvalue() == path.read_bytes()
    else:
        assert_same(weight_files.load(path), weights())
        assert_same(weight_files.load(stream), weights())
        assert weight_files.load(str(path), map_location="meta")["layer.0.weight"].is_meta


def test_load_takes_numpy_and_refuses_code(tmp_path: Path) -> None:
    weight_files.save({"state": np.random.get_state(), "score": np.float64(0.5)}, tmp_path / "a.bin")
    assert weight_files.load(tmp_path / "a.bin")["score"] == 0.5
    weight_files.save({"model": nn.Linear(1, 1)}, tmp_path / "b.bin")
    with pytest.raises(CheckpointError, match=r"(?s)could run code.*torch.nn.modules.linear.Linear"):
        weight_files.load(tmp_path / "b.bin")
    assert weight_files.load(tmp_path / "b.bin", weights_only=False)["model"].in_features == 1


def test_a_save_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    weight_files.save({"a": 1}, tmp_path / "a.bin")
    with pytest.raises(CheckpointError, match=r"cannot write .*a.bin"):
        weight_files.save({"a": lambda: 1}, tmp_path / "a.bin")
    assert weight_files.load(tmp_path / "a.bin") == {"a": 1}
    assert os.listdir(tmp_path) == ["a.bin"]
    with pytest.raises(CheckpointError, match=r"(?s)cannot write .*No such file or directory"):
        weight_files.save({"a": 1}, tmp_path / "gone" / "a.bin")


# ---------------------------------------------------------------- loose functions


class Counter:
    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "odd": {1, 2}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_the_loose_functions_write_and_read_the_same_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    arguments = ([optimizer], [scheduler], [])
    folder = str(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"old")
    path = accelerator_state.save_accelerator_state(folder, [model.state_dict()], *arguments, 0, 5, scaler)
    accelerator_state.save_accelerator_state(folder, [model.state_dict()], *arguments, 1, 5, scaler)
    accelerator_state.save_custom_state(Counter(), folder, 2)
    assert path == tmp_path
    assert sorted(os.listdir(tmp_path)) == [
        "custom_checkpoint_2.pkl", "model.safetensors", "optimizer.bin", "random_states_0.pkl",
        "random_states_1.pkl", "scaler.pt", "scheduler.bin",
    ]  # fmt: skip
    expected = torch.rand(())
    other = torch.amp.GradScaler("cpu", init_scale=2.0)
    result = accelerator_state.load_accelerator_state(folder, [fresh], *arguments, 1, other, strict=True)
    assert result == {"step": 5}
    assert torch.rand(()) == expected
    assert_same(fresh.state_dict(), model.state_dict())
    assert other.get_scale() == 8.0
    counter = Counter()
    counter.count = 3
    accelerator_state.save_custom_state(counter, folder)
    again = Counter()
    accelerator_state.load_custom_state(again, folder)
    assert again.count == 3
    rng.set_seed(1)


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (accelerator_state.save_accelerator_state,
         "output_dir model_states optimizers schedulers dataloaders process_index step scaler=None "
         "save_on_each_node=False safe_serialization=True"),
        (accelerator_state.load_accelerator_state,
         "input_dir models optimizers schedulers dataloaders process_index scaler=None map_location=None "
         "load_kwargs=None **load_model_func_kwargs"),
        (accelerator_state.save_custom_state, "obj path index=0 save_on_each_node=False"),
        (accelerator_state.load_custom_state, "obj path index=0 load_kwargs=None"),
        (weight_files.save, "obj f save_on_each_node=False safe_serialization=False"),
        (weight_files.load, "f map_location=None **kwargs"),
        (weight_files.load_state_dict, "checkpoint_file device_map=None"),
        (weight_files.clean_state_dict_for_safetensors, "state_dict"),
    ],
)  # fmt: skip
def test_signatures_are_those_of_the_public_api(function: Any, signature: str) -> None:
    parameters = inspect.signature(function).parameters.values()
    shown = []
    for p in parameters:
        name = f"**{p.name}" if p.kind is p.VAR_KEYWORD else p.name
        shown.append(name if p.default is p.empty else f"{name}={p.default}")
    assert " ".join(shown) == signature


def test_the_names_are_those_of_the_public_format() -> None:
    assert [layout.model_file(i, safe=True) for i in (0, 1)] == ["model.safetensors", "model_1.safetensors"]
    assert [layout.model_file(i, safe=False) for i in (0, 2)] == ["pytorch_model.bin", "pytorch_model_2.bin"]
    assert (
        layout.SAFE_WEIGHTS_PATTERN_NAME.format(suffix="-00001-of-00002")
        == "model-00001-of-00002.safetensors"
    )
    assert layout.WEIGHTS_PATTERN_NAME.format(suffix="") == layout.WEIGHTS_NAME == "pytorch_model.bin"
    own = """model.safetensors pytorch_model_fsdp_0 optimizer_0 optimizer_1.bin pytorch_model manifest.json
        random_states_12.pkl scaler.pt dl_state_dict_1.bin sampler.bin"""
    foreign = "model-00001-of-00002.safetensors notes.txt optimizer.txt models logs config.json"
    assert all(map(layout.is_checkpoint_name, own.split()))
    assert not any(map(layout.is_checkpoint_name, foreign.split()))
