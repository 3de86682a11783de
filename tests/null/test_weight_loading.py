"""``load_checkpoint_in_model``: what arrives, and what is said when it does not (E2)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import load_checkpoint_in_model, utils
from accelerate.core.errors import CheckpointError, MissingExtraError, SettingError
from tests.support.weights import misfit, write_checkpoint, write_weights


class TiedNet(nn.Module):
    """An embedding that is the head, batch statistics, and a direct parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("mask", torch.ones(2), persistent=False)


def hollow() -> TiedNet:
    """The same without data; what no file holds is there."""
    with torch.device("meta"):
        model = TiedNet()
    model.mask = torch.ones(2)
    return model


@pytest.fixture(params=["file", "index", "folder", "bin", "bin index", "checkpoint", "bin checkpoint"])
def saved_model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[TiedNet, Path]:
    """A model and its weights, in every layout."""
    model, kind = TiedNet(), request.param
    if "checkpoint" in kind:
        return model, write_checkpoint(model, tmp_path / "c", safe="bin" not in kind)
    limit, safe = (100 if "index" in kind else "5GB"), "bin" not in kind
    files = write_weights(model.state_dict(), tmp_path, max_shard_size=limit, safe_serialization=safe)
    if "index" in kind:
        return model, next(tmp_path.glob("*.index.json"))
    return model, tmp_path if kind == "folder" else tmp_path / files[0]


@pytest.mark.parametrize("make", [TiedNet, hollow])
def test_weights_arrive_from_every_layout(saved_model: tuple[TiedNet, Path], make: Any) -> None:
    """D6, E2: the same values, still tied, and what the user set on parameters stays."""
    model, path = saved_model
    fresh = make()
    before = fresh.embed.weight
    assert load_checkpoint_in_model(fresh, path) == ((), ())
    torch.testing.assert_close(dict(fresh.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    assert fresh.head.weight is fresh.embed.weight
    assert not fresh.scale.requires_grad
    assert fresh.embed.weight.requires_grad
    assert (fresh.embed.weight is before) == (make is TiedNet)


def test_names_of_wrappers_do_not_matter(tmp_path: Path) -> None:
    """D9."""
    model = TiedNet()
    state_dict = {f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    utils.save(state_dict, tmp_path / "m.safetensors", safe_serialization=True)
    fresh = hollow()
    load_checkpoint_in_model(fresh, tmp_path / "m.safetensors")
    torch.testing.assert_close(dict(fresh.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("make", [TiedNet, hollow])
def test_a_missing_weight_is_an_error_that_names_it(tmp_path: Path, make: Any) -> None:
    """E2: it would be random, or stay without data; the model is unchanged."""
    state_dict = TiedNet().state_dict()
    del state_dict["norm.weight"], state_dict["scale"]
    torch.save(state_dict, tmp_path / "pytorch_model.bin")
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with misfit(match=r"missing: scale, norm\.weight") as caught:
        load_checkpoint_in_model(model, tmp_path)
    assert "allow_missing=True" in caught.value.fix
    assert isinstance(caught.value, ValueError | RuntimeError)
    if make is TiedNet:
        torch.testing.assert_close(dict(model.state_dict()), before)


def test_missing_weights_can_be_allowed_and_are_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state_dict = TiedNet().state_dict()
    del state_dict["scale"]
    torch.save(state_dict, tmp_path / "pytorch_model.bin")
    model = TiedNet()
    assert load_checkpoint_in_model(model, tmp_path, allow_missing=True).missing == ("scale",)
    assert "missing, left as they are: scale" in caplog.text


def test_a_missing_buffer_keeps_the_value_it_was_made_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Old files lack counters of batches; a buffer without data is missing like a weight."""
    state_dict = TiedNet().state_dict()
    del state_dict["norm.num_batches_tracked"]
    torch.save(state_dict, tmp_path / "pytorch_model.bin")
    keys = load_checkpoint_in_model(TiedNet(), tmp_path)
    assert keys.missing == ("norm.num_batches_tracked",)
    assert "norm.num_batches_tracked" in caplog.text
    for model, strict in ((hollow(), False), (TiedNet(), True)):
        with misfit(match=r"missing: norm\.num_batches_tracked"):
            load_checkpoint_in_model(model, tmp_path, strict=strict)


def test_names_that_the_model_does_not_have_are_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """E2: a warning, and with ``strict`` an error."""
    torch.save({**TiedNet().state_dict(), "extra": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert load_checkpoint_in_model(TiedNet(), tmp_path).unexpected == ("extra",)
    assert "unused: extra" in caplog.text
    with misfit(match="not in the model: extra"):
        load_checkpoint_in_model(TiedNet(), tmp_path, strict=True)


@pytest.mark.parametrize("make", [TiedNet, hollow])
def test_shapes_and_kinds_that_differ_are_told_with_both(tmp_path: Path, make: Any) -> None:
    """E2: all of them, before anything is read."""
    state_dict = TiedNet().state_dict()
    state_dict["scale"] = torch.ones(5)
    state_dict["norm.weight"] = torch.ones(4, dtype=torch.int64)
    torch.save(state_dict, tmp_path / "pytorch_model.bin")
    with misfit() as caught:
        load_checkpoint_in_model(make(), tmp_path)
    assert "scale has the shape (5,), in the model (4,)" in caught.value.why
    assert "norm.weight is of torch.int64, in the model of torch.float32" in caught.value.why


@pytest.mark.parametrize("make", [TiedNet, hollow])
@pytest.mark.parametrize("wanted", [None, "bf16", "torch.float16", torch.bfloat16])
def test_dtypes(tmp_path: Path, make: Any, wanted: Any) -> None:
    """E2: the model's own unless another is asked for; counters stay whole numbers."""
    half = {n: v.half() if v.is_floating_point() else v for n, v in TiedNet().state_dict().items()}
    torch.save(half, tmp_path / "pytorch_model.bin")
    model = make()
    load_checkpoint_in_model(model, tmp_path, dtype=wanted, keep_in_fp32_modules=["norm"])
    expected = {"bf16": torch.bfloat16, "torch.float16": torch.float16, None: torch.float32}.get(
        wanted, wanted
    )
    assert model.embed.weight.dtype is model.scale.dtype is expected
    assert model.norm.weight.dtype is torch.float32
    assert model.norm.num_batches_tracked.dtype is torch.int64
    assert model.head.weight is model.embed.weight
    torch.testing.assert_close(model.scale, half["scale"].to(expected))


def test_devices_of_a_map(tmp_path: Path) -> None:
    write_weights(TiedNet().state_dict(), tmp_path)
    model = hollow()
    load_checkpoint_in_model(model, tmp_path, device_map={"": "cpu", "norm": torch.device("cpu")})
    assert {value.device.type for value in model.state_dict().values()} == {"cpu"}
    with pytest.raises(SettingError, match="device_map does not say where"):
        load_checkpoint_in_model(hollow(), tmp_path, device_map={"norm": "cpu"})


def test_8_bit_weights_need_their_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_weights(TiedNet().state_dict(), tmp_path)
    monkeypatch.setattr("accelerate.core.packages.is_installed", lambda _: False)
    with pytest.raises(MissingExtraError, match="bitsandbytes"):
        load_checkpoint_in_model(hollow(), tmp_path, offload_8bit_bnb=True)


def test_two_tensors_for_one_weight_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """D6: an untied checkpoint in a tied model loses one of the two: it is said."""
    state_dict = {**TiedNet().state_dict(), "head.weight": torch.zeros(6, 4)}
    torch.save(state_dict, tmp_path / "pytorch_model.bin")
    load_checkpoint_in_model(TiedNet(), tmp_path)
    assert "embed.weight and head.weight differ in the file and are tied in the model" in caplog.text


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"": "disk"}])
def test_buffers_that_no_file_holds_must_be_there(
    tmp_path: Path, device_map: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """E3: a buffer that is not saved and was made without data would be garbage; nothing is loaded."""
    write_weights(TiedNet().state_dict(), tmp_path)
    with torch.device("meta"):
        model = TiedNet()
    with misfit(match="on the meta device, and files never hold them: mask") as caught:
        load_checkpoint_in_model(model, tmp_path, device_map)
    assert "init_empty_weights" in caught.value.fix
    assert "model.mask = " in caught.value.fix
    assert model.embed.weight.device.type == "meta"
    load_checkpoint_in_model(model, tmp_path, device_map, allow_missing=True)
    assert "mask" in caplog.text


def test_places_without_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file or folder"):
        load_checkpoint_in_model(TiedNet(), tmp_path / "no")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=r"(?s)not a folder with the weights.*notes\.txt"):
        load_checkpoint_in_model(TiedNet(), tmp_path)


def test_a_cut_shard_and_one_that_leads_away_are_refused(tmp_path: Path) -> None:
    files = write_weights(TiedNet().state_dict(), tmp_path, max_shard_size=100)
    path = tmp_path / files[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=files[0]):
        load_checkpoint_in_model(hollow(), tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    save_file({"w": torch.ones(1)}, tmp_path.parent / "away.safetensors")
    index.write_text(json.dumps({"weight_map": {"w": "../away.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside of the folder"):
        load_checkpoint_in_model(nn.Linear(1, 1), index)


def test_an_index_that_is_the_table_of_weights_alone(tmp_path: Path) -> None:
    """Some tools write it so."""
    model = TiedNet()
    write_weights(model.state_dict(), tmp_path, max_shard_size=100)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps(json.loads(index.read_text())["weight_map"]))
    for place in (index, tmp_path):
        fresh = hollow()
        load_checkpoint_in_model(fresh, place)
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in fresh.state_dict().items())


MEMORY = """
import resource, sys, torch
from torch import nn
from accelerate import load_checkpoint_in_model

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def make(count):
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(2048, 1024, bias=False) for _ in range(count)))

load_checkpoint_in_model(make(1), sys.argv[2])
before = peak()
load_checkpoint_in_model(make(24), sys.argv[1])
print(peak() - before)
"""


@pytest.mark.parametrize("safe", [True, False])
def test_there_is_never_a_second_copy_of_the_model(tmp_path: Path, safe: bool) -> None:
    """The peak is the model (192 MiB) and one of its tensors (8 MiB), whatever the size of a shard."""
    layers = [nn.Linear(2048, 1024, bias=False) for _ in range(24)]
    big, small = nn.Sequential(*layers), nn.Sequential(layers[0])
    for name, model in (("big", big), ("small", small)):
        write_weights(model.state_dict(), tmp_path / name, safe_serialization=safe)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "big"), str(tmp_path / "small")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= (192 + 2 * 8 + 16) * 2**20
