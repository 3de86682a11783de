"""Single files, the hub's sharded layout, the loose public functions, and the names of the public format."""

from __future__ import annotations

import errno
import inspect
import io
import json
import os
import pickle
import resource
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from accelerate import Accelerator, checkpointing, utils
from accelerate.core.errors import CheckpointError
from tests.support.weights import write_weights


def weights(count: int = 4, size: int = 250) -> dict[str, torch.Tensor]:
    return {f"layer.{i}.weight": torch.full((size,), float(i)) for i in range(count)}


def assert_same(one: Any, two: Any) -> None:
    torch.testing.assert_close(one, two, rtol=0, atol=0)


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("safe", [True, False])
def test_small_weights_are_one_file(tmp_path: Path, safe: bool) -> None:
    files = write_weights(weights(), tmp_path / "a" / "b", safe_serialization=safe)
    assert files == ["model.safetensors" if safe else "pytorch_model.bin"]
    assert os.listdir(tmp_path / "a" / "b") == files
    assert_same(utils.load_state_dict(tmp_path / "a" / "b" / files[0]), weights())


@pytest.mark.parametrize("safe", [True, False])
def test_large_weights_are_shards_with_an_index(tmp_path: Path, safe: bool) -> None:
    files = write_weights(weights(), tmp_path, max_shard_size="2KB", safe_serialization=safe)
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
        together.update(utils.load_state_dict(tmp_path / file))
    assert_same(together, weights())
    assert write_weights(weights(), tmp_path, max_shard_size="2kb", safe_serialization=safe) == files


@pytest.mark.parametrize("safe", [True, False])
def test_what_an_earlier_save_left_is_removed_and_the_rest_stays(tmp_path: Path, safe: bool) -> None:
    """Old shards or an old index would be loaded in place of the new weights."""
    keep = ["config.json", "model_card.safetensors", "my-00001-of-00002.bin"]
    for name in keep:
        (tmp_path / name).write_text("")
    write_weights(weights(6), tmp_path, max_shard_size="1KB", safe_serialization=safe)
    shards = write_weights(weights(4), tmp_path, max_shard_size="2KB", safe_serialization=safe)
    index = "model.safetensors.index.json" if safe else "pytorch_model.bin.index.json"
    assert sorted(os.listdir(tmp_path)) == sorted([*shards, index, *keep])
    one = write_weights(weights(4), tmp_path, safe_serialization=safe)
    assert sorted(os.listdir(tmp_path)) == sorted([*one, *keep])
    again = write_weights(weights(4), tmp_path, max_shard_size="2KB", safe_serialization=safe)
    assert sorted(os.listdir(tmp_path)) == sorted([*again, index, *keep])


def test_torch_files_beside_older_safetensors_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both formats may be wanted; loading the folder takes safetensors."""
    write_weights(weights(), tmp_path, safe_serialization=False)
    write_weights(weights(), tmp_path, max_shard_size="2KB")
    assert not caplog.records
    write_weights(weights(), tmp_path, safe_serialization=False)
    assert f"{tmp_path} holds model.safetensors.index.json of another save too" in caplog.text


def test_tied_weights_are_counted_and_written_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """D6: in shards too, the alias is told beside its tensor, and in the log."""
    state = weights()
    state["tied.weight"] = state["layer.3.weight"]
    files = write_weights(state, tmp_path, max_shard_size="2KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert "tied.weight" not in index["weight_map"]
    assert "tied.weight shares memory with layer.3.weight" in caplog.text
    assert index["metadata"]["total_size"] == 4000
    with safe_open(tmp_path / files[1], framework="pt") as file:
        assert file.metadata() == {"tied.weight": "layer.3.weight", "format": "pt"}
    with safe_open(tmp_path / files[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_weights_without_data_are_refused_and_the_old_ones_stay(tmp_path: Path) -> None:
    write_weights(weights(), tmp_path)
    with pytest.raises(CheckpointError, match="weight has no data to save"):
        write_weights(nn.Linear(2, 2, device="meta").state_dict(), tmp_path)
    assert_same(load_file(tmp_path / "model.safetensors"), weights())
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot make the folder"):
        write_weights(weights(), tmp_path / "file")


def test_clean_state_dict_names_what_it_leaves_out() -> None:
    shared = torch.arange(6.0)
    state = {"a": shared, "b": shared, "turned": torch.ones(2, 3).t(), "view": shared[2:4]}
    with pytest.warns(UserWarning, match=r"b \(is a\)"):
        cleaned = utils.clean_state_dict_for_safetensors(state)
    assert list(cleaned) == ["a", "turned", "view"]
    assert all(tensor.is_contiguous() for tensor in cleaned.values())
    assert cleaned["a"] is not cleaned["view"]
    assert utils.id_tensor_storage(cleaned["view"]) != utils.id_tensor_storage(cleaned["a"])
    assert utils.id_tensor_storage(shared[1:]) == utils.id_tensor_storage(shared)


def test_state_dict_files_load_to_the_device_map(tmp_path: Path) -> None:
    write_weights(weights(3), tmp_path)
    state = utils.load_state_dict(
        tmp_path / "model.safetensors", {"layer": "cpu", "layer.1": "meta", "layer.2": "disk"}
    )
    assert [t.device.type for t in state.values()] == ["cpu", "meta", "cpu"]
    assert utils.load_state_dict(tmp_path / "model.safetensors", {"": "meta"})["layer.0.weight"].is_meta


# ---------------------------------------------------------------- save and load


@pytest.mark.parametrize("safe", [True, False])
def test_save_and_load_a_path_and_a_stream(tmp_path: Path, safe: bool) -> None:
    path, stream = tmp_path / "w", io.BytesIO()
    utils.save(weights(), path, safe_serialization=safe)
    utils.save(weights(), stream, safe_serialization=safe)
    assert os.listdir(tmp_path) == ["w"]
    stream.seek(0)
    if safe:
        assert_same(load_file(path), weights())
        assert stream.getvalue() == path.read_bytes()
    else:
        assert_same(utils.load(path), weights())
        assert_same(utils.load(stream), weights())
        assert utils.load(str(path), map_location="meta")["layer.0.weight"].is_meta


class NamedPlace:
    """An ``os.PathLike`` that is no path of pathlib."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


@pytest.mark.parametrize("safe", [True, False])
def test_any_path_of_a_file_is_written_as_torch_writes_it(tmp_path: Path, safe: bool) -> None:
    """Links are followed, modes stay, and a device or pipe is never replaced by a file."""
    for name in ("w", "y" * 255):
        utils.save(weights(), NamedPlace(tmp_path / name), safe_serialization=safe)
    assert sorted(os.listdir(tmp_path)) == ["w", "y" * 255]
    if not safe:
        assert_same(utils.load(NamedPlace(tmp_path / "w")), weights())
    (tmp_path / "w").chmod(0o600)
    (tmp_path / "link").symlink_to("w")
    utils.save(weights(5), tmp_path / "link", safe_serialization=safe)
    assert (tmp_path / "link").is_symlink() is not safe
    assert (tmp_path / "link").stat().st_mode & 0o777 == 0o600
    os.mkfifo(tmp_path / "pipe")
    reader = threading.Thread(target=(tmp_path / "pipe").read_bytes, daemon=True)
    reader.start()
    utils.save({"a": torch.ones(1)}, tmp_path / "pipe", safe_serialization=safe)
    reader.join(timeout=60)
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(OSError, match="Is a directory"):
        utils.save(weights(), tmp_path, safe_serialization=safe)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("through", [utils.save, write_weights])
def test_a_write_that_the_system_refuses_is_told_in_its_words(
    tmp_path: Path, safe: bool, through: Any
) -> None:
    """torch closes its archive after a failed write, and raises another error."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"cannot write .*\n.*File too large") as error:
            through({"large": torch.zeros(5000)}, tmp_path / "w", safe_serialization=safe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.errno == errno.EFBIG
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_load_takes_numpy_and_refuses_code(tmp_path: Path) -> None:
    utils.save({"state": np.random.get_state(), "score": np.float64(0.5)}, tmp_path / "a.bin")
    assert utils.load(tmp_path / "a.bin")["score"] == 0.5
    utils.save({"model": nn.Linear(1, 1)}, tmp_path / "b.bin")
    with pytest.raises(CheckpointError, match=r"(?s)could run code.*torch.nn.modules.linear.Linear"):
        utils.load(tmp_path / "b.bin")
    assert utils.load(tmp_path / "b.bin", weights_only=False)["model"].in_features == 1


@pytest.mark.parametrize("value", [torch.ones(1), [torch.ones(1)], {"a": 1}])
def test_what_safetensors_cannot_hold_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match="tensor") as error:
        utils.save(value, tmp_path / "w.safetensors", safe_serialization=True)
    assert "safe_serialization=False" in str(error.value)
    assert not any(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="a tensor has the name __metadata__"):
        utils.save({"__metadata__": torch.ones(1)}, tmp_path / "w.safetensors", safe_serialization=True)


def test_load_reads_a_safetensors_file(tmp_path: Path) -> None:
    """torch.load does since 2.10."""
    utils.save(weights(), tmp_path / "w.safetensors", safe_serialization=True)
    assert_same(utils.load(tmp_path / "w.safetensors"), weights())
    assert_same(utils.load(str(tmp_path / "w.safetensors"), torch.device("cpu")), weights())


@pytest.mark.parametrize(
    ("map_location", "place"),
    [
        ({"cpu": "meta"}, "meta"),
        ({"cuda:0": "meta"}, "cpu"),
        (lambda storage, tag: storage if tag == "cpu" else None, "cpu"),
        (lambda storage, tag: None, "cpu"),
    ],
)
def test_load_maps_safetensors_as_torch_files(tmp_path: Path, map_location: Any, place: str) -> None:
    for file in ("w.safetensors", "w.bin"):
        utils.save(weights(), tmp_path / file, safe_serialization=file.endswith("s"))
        state = utils.load(tmp_path / file, map_location)
        assert {value.device.type for value in state.values()} == {place}


def test_errors_of_files_are_those_that_python_and_torch_raise(tmp_path: Path) -> None:
    """Programs look for a FileNotFoundError; it is one after it has travelled to another process, too."""
    with pytest.raises(FileNotFoundError) as caught:
        utils.load(tmp_path / "gone.bin")
    assert caught.value.errno == errno.ENOENT
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (type(copied), str(copied)) == (type(caught.value), str(caught.value))
    with pytest.raises(FileNotFoundError):
        utils.load_state_dict(tmp_path / "gone.safetensors")
    with pytest.raises(OSError, match="cannot read"):
        utils.load(tmp_path)
    for kind, folder in ((ValueError, tmp_path / "gone"), (FileNotFoundError, tmp_path)):
        with pytest.raises(kind):
            Accelerator(cpu=True).load_state(folder)
    torch.save(nn.Linear(1, 1), tmp_path / "code.bin")
    with pytest.raises(pickle.UnpicklingError):
        utils.load(tmp_path / "code.bin")


def test_a_file_that_this_user_may_not_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Safetensors calls it missing; the advice is not about writing."""
    monkeypatch.setattr(os, "access", lambda *args: False)
    with pytest.raises(OSError, match=r"Permission denied .*\n.*let this user read it") as error:
        utils.load(tmp_path)
    assert error.value.errno == errno.EACCES


def test_a_damaged_file_is_not_called_one_to_trust(tmp_path: Path) -> None:
    torch.save(weights(), tmp_path / "w.bin")
    content = (tmp_path / "w.bin").read_bytes()
    for part in (content[: len(content) // 2], b"hello world"):
        (tmp_path / "w.bin").write_bytes(part)
        with pytest.raises(CheckpointError, match="or a damaged one") as caught:
            utils.load(tmp_path / "w.bin")
        assert not caught.value.fix


def test_a_save_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    utils.save({"a": 1}, tmp_path / "a.bin")
    with pytest.raises(CheckpointError, match=r"cannot write .*a.bin"):
        utils.save({"a": lambda: 1}, tmp_path / "a.bin")
    assert utils.load(tmp_path / "a.bin") == {"a": 1}
    assert os.listdir(tmp_path) == ["a.bin"]
    with pytest.raises(CheckpointError, match=r"(?s)cannot write .*No such file or directory"):
        utils.save({"a": 1}, tmp_path / "gone" / "a.bin")


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
    path = checkpointing.save_accelerator_state(folder, [model.state_dict()], *arguments, 0, 5, scaler)
    checkpointing.save_accelerator_state(folder, [model.state_dict()], *arguments, 1, 5, scaler)
    checkpointing.save_custom_state(Counter(), folder, 2)
    assert path == tmp_path
    assert sorted(os.listdir(tmp_path)) == [
        "custom_checkpoint_2.pkl", "model.safetensors", "optimizer.bin", "random_states_0.pkl",
        "random_states_1.pkl", "scaler.pt", "scheduler.bin",
    ]  # fmt: skip
    expected = torch.rand(())
    other = torch.amp.GradScaler("cpu", init_scale=2.0)
    result = checkpointing.load_accelerator_state(folder, [fresh], *arguments, 1, other, strict=True)
    assert result == {"step": 5}
    assert torch.rand(()) == expected
    assert_same(fresh.state_dict(), model.state_dict())
    assert other.get_scale() == 8.0
    counter = Counter()
    counter.count = 3
    checkpointing.save_custom_state(counter, folder)
    again = Counter()
    checkpointing.load_custom_state(again, folder)
    assert again.count == 3
    utils.set_seed(1)


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (checkpointing.save_accelerator_state,
         "output_dir model_states optimizers schedulers dataloaders process_index step scaler=None "
         "save_on_each_node=False safe_serialization=True"),
        (checkpointing.load_accelerator_state,
         "input_dir models optimizers schedulers dataloaders process_index scaler=None map_location=None "
         "load_kwargs=None **load_model_func_kwargs"),
        (checkpointing.save_custom_state, "obj path index=0 save_on_each_node=False"),
        (checkpointing.load_custom_state, "obj path index=0 load_kwargs=None"),
        (utils.save, "obj f save_on_each_node=False safe_serialization=False"),
        (utils.load, "f map_location=None **kwargs"),
        (utils.load_state_dict, "checkpoint_file device_map=None"),
        (utils.clean_state_dict_for_safetensors, "state_dict"),
    ],
)  # fmt: skip
def test_signatures_are_those_of_the_public_api(function: Any, signature: str) -> None:
    parameters = inspect.signature(function).parameters.values()
    shown = []
    for p in parameters:
        name = f"**{p.name}" if p.kind is p.VAR_KEYWORD else p.name
        shown.append(name if p.default is p.empty else f"{name}={p.default}")
    assert " ".join(shown) == signature
