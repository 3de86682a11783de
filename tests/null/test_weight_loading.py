"""``load_checkpoint_in_model``: what arrives, and what is said when it does not (E2)."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from accelerate import (
    Accelerator,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    utils,
)
from accelerate.core.errors import CheckpointError, MissingExtraError, SettingError
from tests.support.numbers import can_be_copied
from tests.support.weights import ODD_TENSORS, misfit, write_checkpoint, write_weights


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


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_child_called_module_is_no_wrapper(tmp_path: Path, prefix: str, compiled: bool) -> None:
    """Its weight, and one that the model itself has by the same name."""
    model = nn.Linear(2, 2)
    model.module = nn.Linear(2, 2)
    weights = {"weight": 1.0, "bias": 2.0, "module.weight": 3.0, "module.bias": 4.0}
    full = {name: torch.full_like(model.state_dict()[name], value) for name, value in weights.items()}
    state_dict = {f"{prefix}{name}": value for name, value in full.items()}
    utils.save(state_dict, tmp_path / "model.safetensors", safe_serialization=True)
    target = torch.compile(model) if compiled else model
    assert load_checkpoint_in_model(target, tmp_path) == ((), ())
    assert {name: value.unique().item() for name, value in model.state_dict().items()} == weights
    with torch.no_grad():
        model.module.weight.zero_()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(target)
    accelerator.load_state(tmp_path, strict=False)  # there are weights alone
    assert {name: value.unique().item() for name, value in model.state_dict().items()} == weights


@pytest.mark.parametrize("make", [TiedNet, hollow])
def test_missing_weights_are_listed_and_stay_as_they_are(
    tmp_path: Path, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """E2: programs may have loaded them already, as lmdeploy, or give them values next, as BAGEL."""
    state_dict = TiedNet().state_dict()
    del state_dict["norm.weight"], state_dict["scale"]
    torch.save({**state_dict, "scales": torch.ones(4)}, tmp_path / "pytorch_model.bin")
    model, scale = make(), torch.tensor([1.0, 2.0, 3.0, 4.0])
    if make is TiedNet:
        model.scale.copy_(scale)
    with misfit(match=r"missing: scale, norm\.weight; not in the model: scales") as caught:
        load_checkpoint_in_model(model, tmp_path, strict=True)
    assert isinstance(caught.value, ValueError | RuntimeError)
    assert not caplog.text
    keys = load_checkpoint_in_model(model, tmp_path)
    assert keys == (("scale", "norm.weight"), ("scales",))
    label = "left as they are" if make is TiedNet else "still on the meta device"
    assert f"missing, {label}: scale, norm.weight" in caplog.text
    assert "unused: scales" in caplog.text
    assert model.scale.is_meta if make is hollow else torch.equal(model.scale, scale)
    assert torch.equal(model.embed.weight, state_dict["embed.weight"])


def test_a_file_that_holds_nothing_of_the_model_is_refused(tmp_path: Path) -> None:
    torch.save({"other.scale": torch.ones(4)}, tmp_path / "pytorch_model.bin")
    with misfit(match=r"missing: .*scale, .*; not in the model: other\.scale") as caught:
        load_checkpoint_in_model(TiedNet(), tmp_path)
    assert caught.value.fix.endswith("allow_missing=True")
    assert len(load_checkpoint_in_model(TiedNet(), tmp_path, allow_missing=True).missing) == 7


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
    with misfit(match=r"missing: norm\.num_batches_tracked"):
        load_checkpoint_and_dispatch(hollow(), tmp_path, {"": "cpu"})
    with misfit(match=r"missing: norm\.num_batches_tracked"):
        load_checkpoint_in_model(TiedNet(), tmp_path, strict=True)


def test_names_that_the_model_does_not_have_are_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """E2: a warning, and with ``strict`` an error."""
    torch.save({**TiedNet().state_dict(), "extra": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert load_checkpoint_in_model(TiedNet(), tmp_path).unexpected == ("extra",)
    assert "unused: extra" in caplog.text
    with misfit(match="not in the model: extra") as error:
        load_checkpoint_in_model(TiedNet(), tmp_path, strict=True)
    assert str(error.value).endswith("strict=False")
    torch.save({"extra": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with misfit(match="missing: .*scale") as error:
        load_checkpoint_in_model(TiedNet(), tmp_path, strict=True)
    assert str(error.value).endswith("strict=False, allow_missing=True")


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


@pytest.mark.parametrize("wanted", ["int8", torch.int8, torch.bool])
def test_a_dtype_of_whole_numbers_is_refused(tmp_path: Path, wanted: Any) -> None:
    """It would make zeros of weights."""
    write_weights(TiedNet().state_dict(), tmp_path)
    for device_map in (None, {"": "cpu"}):
        with pytest.raises(SettingError, match="no floating point dtype"):
            load_checkpoint_in_model(hollow(), tmp_path, device_map=device_map, dtype=wanted)
    model = load_checkpoint_and_dispatch(hollow(), tmp_path, device_map="auto", dtype="bf16")
    assert model.embed.weight.dtype is torch.bfloat16


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
def test_buffers_that_no_file_holds_are_listed_and_must_be_there_at_a_dispatch(
    tmp_path: Path, device_map: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """E3: a buffer that is not saved and was made without data would be garbage; nothing is loaded."""
    write_weights(TiedNet().state_dict(), tmp_path)
    with torch.device("meta"):
        model = TiedNet()
    with misfit(match="on the meta device, and files never hold them: mask") as caught:
        load_checkpoint_and_dispatch(model, tmp_path, device_map, strict=device_map is None)
    assert "init_empty_weights" in caught.value.fix
    assert "model.mask = " in caught.value.fix
    assert model.embed.weight.device.type == "meta"
    load_checkpoint_in_model(model, tmp_path, device_map)
    assert "on the meta device, and files never hold them: mask" in caplog.text


def test_places_without_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file or folder"):
        load_checkpoint_in_model(TiedNet(), tmp_path / "no")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=r"(?s)not a folder with the weights.*notes\.txt"):
        load_checkpoint_in_model(TiedNet(), tmp_path)


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_scalars_of_files_from_before_torch_0_4(tmp_path: Path, device_map: Any) -> None:
    """``load_state_dict`` takes one element for a scalar."""
    model = nn.BatchNorm1d(4)
    torch.save(model.state_dict() | {"num_batches_tracked": torch.tensor([7])}, tmp_path / "weights.bin")
    load_checkpoint_in_model(model, tmp_path / "weights.bin", device_map=device_map, strict=True)
    assert torch.equal(model.num_batches_tracked, torch.tensor(7))


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


def test_shards_in_folders_below_the_index(tmp_path: Path) -> None:
    """A name that several shards hold comes from the one that the index names."""
    state = {name: value for name, value in TiedNet().state_dict().items() if name != "head.weight"}
    old = {name: torch.zeros_like(value) for name, value in state.items()}
    weight_map: dict[str, str] = {}
    for number, name in enumerate(state):
        weight_map[name] = f"sub/{number % 2}/model.safetensors"
    for number in range(2):
        (tmp_path / "sub" / str(number)).mkdir(parents=True)
        own = {name for name, file in weight_map.items() if file == f"sub/{number}/model.safetensors"}
        shard = {name: value if name in own else old[name] for name, value in state.items()}
        save_file(shard, tmp_path / "sub" / str(number) / "model.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    model = hollow()
    load_checkpoint_in_model(model, tmp_path)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())


@pytest.mark.parametrize("file", ["sub/../../away.safetensors", "/away.safetensors", "sub\\a", "C:/a", "."])
def test_an_index_never_leads_out_of_its_folder(tmp_path: Path, file: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CheckpointError, match="outside of the folder"):
        load_checkpoint_in_model(nn.Linear(1, 1), index)


# ------------------------------------------------------------------------- modules that load themselves


class Doubled(nn.Linear):
    """Doubles what it loads, and more where the file says another version."""

    _version = 2

    def _load_from_state_dict(  # pyright: ignore
        self, state_dict: Any, prefix: str, metadata: Any, *args: Any
    ) -> None:
        factor = {2: 2, None: 3}.get(metadata.get("version"), 10)
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * factor
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)


class Renamed(nn.Module):
    """Renames keys of older files, and keeps what was told to its hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2, bias=False)
        self.told: list[Any] = []
        self.register_load_state_dict_pre_hook(self.rename)
        self.register_load_state_dict_post_hook(lambda module, keys: module.told.append(keys.missing_keys))

    @staticmethod
    def rename(module: nn.Module, state_dict: Any, prefix: str, *args: Any) -> None:
        if f"{prefix}old.weight" in state_dict:
            state_dict[f"{prefix}inner.weight"] = state_dict.pop(f"{prefix}old.weight")


class Remembering(nn.Module):
    """Has a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.memory: Any = {"steps": 3, "mean": torch.ones(2)}

    def get_extra_state(self) -> Any:
        return self.memory

    def set_extra_state(self, state: Any) -> None:
        self.memory = state


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("version", [2, 1, None])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_modules_convert_what_they_load(
    tmp_path: Path, device: str, version: int | None, dtype: str | None
) -> None:
    """As by ``load_state_dict``: torch files keep the versions of modules, safetensors files do not."""
    state: Any = nn.Sequential(Doubled(2, 2, bias=False), nn.Linear(2, 2)).state_dict()
    state["0.weight"] = torch.ones(2, 2)
    path = tmp_path / ("m.safetensors" if version is None else "m.bin")
    if version is None:
        save_file(dict(state), path)
    else:
        state._metadata["0"]["version"] = version
        torch.save(state, path)
    with torch.device(device):
        model: Any = nn.Sequential(Doubled(2, 2, bias=False), nn.Linear(2, 2))
    assert load_checkpoint_in_model(model, path, dtype=dtype) == ((), ())
    expected = torch.float32 if dtype is None else torch.bfloat16
    assert {p.dtype for p in model.parameters()} == {expected}
    assert model[0].weight.unique().tolist() == [{2: 2, 1: 10, None: 3}[version]]
    assert model[0].weight.requires_grad
    assert torch.equal(model[1].weight, state["1.weight"].to(expected))


@pytest.mark.parametrize("key", ["old.weight", "inner.weight", "module.inner.weight"])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_hooks_rename_keys_of_other_modules(tmp_path: Path, key: str, device_map: Any) -> None:
    torch.save({key: torch.ones(2, 2)}, tmp_path / "m.bin")
    model = Renamed()
    assert load_checkpoint_in_model(model, tmp_path / "m.bin", device_map) == ((), ())
    assert torch.equal(model.inner.weight, torch.ones(2, 2))
    if device_map is None:
        assert model.told == [[]]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_hooks_dequantize(tmp_path: Path, device: str) -> None:
    """The values that a hook makes count, not those of the file."""

    def dequantize(module: nn.Module, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 0.25

    torch.save({"weight": torch.ones(2, 2, dtype=torch.int8)}, tmp_path / "m.bin")
    with torch.device(device):
        model = nn.Linear(2, 2, bias=False)
    model.register_load_state_dict_pre_hook(dequantize)
    load_checkpoint_in_model(model, tmp_path / "m.bin")
    assert model.weight.dtype is torch.float32
    assert model.weight.unique().tolist() == [0.25]
    assert model.weight.requires_grad


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("key", ["old.weight", "inner.weight", "tied"])
def test_tied_weights_stay_tied_where_a_module_loads_itself(tmp_path: Path, device: str, key: str) -> None:
    torch.save({key: torch.full((2, 2), 3.0)}, tmp_path / "m.bin")
    with torch.device(device):
        model = Renamed()
    model.tied = model.inner.weight
    load_checkpoint_in_model(model, tmp_path / "m.bin", dtype="bf16")
    assert model.tied is model.inner.weight
    assert torch.equal(model.tied, torch.full((2, 2), 3.0, dtype=torch.bfloat16))


def test_a_device_map_that_leaves_hooks_out_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Doubled(2, 2), nn.Linear(2, 2))
    torch.save(model.state_dict(), tmp_path / "m.bin")
    load_checkpoint_in_model(model, tmp_path / "m.bin", {"": "cpu"})
    assert "0: modules with a _load_from_state_dict or hooks of their own" in caplog.text


def test_modules_that_lack_a_weight_are_told(tmp_path: Path) -> None:
    torch.save({"1.weight": torch.ones(2, 2)}, tmp_path / "m.bin")
    with torch.device("meta"):
        model: Any = nn.Sequential(Renamed(), nn.Linear(2, 2, bias=False))
    with misfit(match=r"missing: 0\.inner\.weight"):
        load_checkpoint_in_model(model, tmp_path / "m.bin", strict=True)
    keys = load_checkpoint_in_model(model, tmp_path / "m.bin")
    assert keys.missing == ("0.inner.weight",)
    assert model[0].inner.weight.is_meta
    assert torch.equal(model[1].weight, torch.ones(2, 2))


def test_states_that_are_no_tensors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They go to their module; those of no module are named."""
    saved = nn.Sequential(Remembering())
    torch.save({**saved.state_dict(), "epoch": 3}, tmp_path / "m.bin")
    model: Any = nn.Sequential(Remembering())
    model[0].memory = {}
    assert load_checkpoint_in_model(model, tmp_path / "m.bin").unexpected == ("epoch",)
    assert model[0].memory["steps"] == 3
    assert torch.equal(model[0].memory["mean"], torch.ones(2))
    assert "unused: epoch" in caplog.text
    with misfit(match="not in the model: epoch"):
        load_checkpoint_in_model(model, tmp_path / "m.bin", strict=True)


def test_lazy_layers_get_the_shapes_of_the_file(tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.Linear(2, 3)).state_dict(), tmp_path / "m.bin")
    model = nn.Sequential(nn.LazyLinear(3))
    load_checkpoint_in_model(model, tmp_path / "m.bin")
    assert model(torch.ones(1, 2)).shape == (1, 3)


def test_a_model_with_a_load_state_dict_of_its_own(tmp_path: Path) -> None:
    class Shifted(nn.Linear):
        def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
            return super().load_state_dict({n: v + 1 for n, v in state_dict.items()}, strict, assign)

    torch.save({"weight": torch.ones(1, 1), "bias": torch.ones(1)}, tmp_path / "m.bin")
    model = Shifted(1, 1)
    load_checkpoint_in_model(model, tmp_path / "m.bin")
    assert model.weight.item() == model.bias.item() == 2


# ------------------------------------------------------------------------------------ kinds of tensors


def with_buffers(**buffers: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, value in buffers.items():
        module.register_buffer(name, value)
    return module


COMPLEX = torch.tensor([1 + 2j, 3 - 4j])


def test_views_with_other_signs(tmp_path: Path) -> None:
    """Conjugate and negative views share the memory of the tensor that they are made of."""
    state = {"plain": COMPLEX, "conjugate": COMPLEX.conj(), "negative": (COMPLEX + 1).conj().imag}
    torch.save(state, tmp_path / "m.bin")
    Accelerator(cpu=True).save_model(with_buffers(**state), tmp_path / "s")
    for path in (tmp_path / "m.bin", tmp_path / "s"):
        for device in ("cpu", "meta"):
            empty = {name: torch.zeros_like(value.resolve_conj()) for name, value in state.items()}
            model = with_buffers(**{name: value.to(device) for name, value in empty.items()})
            load_checkpoint_in_model(model, path)
            for name, value in state.items():
                assert torch.equal(model.get_buffer(name), value)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ODD_TENSORS)
def test_a_tensor_of_another_kind_does_not_spoil_its_file(tmp_path: Path, kind: str) -> None:
    torch.save({"a": torch.ones(2, 2), "odd": ODD_TENSORS[kind]()}, tmp_path / "m.bin")
    model = with_buffers(a=torch.zeros(2, 2))
    if torch.serialization.get_unsafe_globals_in_checkpoint(str(tmp_path / "m.bin")):  # nested, torch 2.15
        with pytest.raises(CheckpointError, match=f"_rebuild_{kind}_tensor"):
            load_checkpoint_in_model(model, tmp_path / "m.bin")
        return
    assert load_checkpoint_in_model(model, tmp_path / "m.bin").unexpected == ("odd",)
    assert torch.equal(model.get_buffer("a"), torch.ones(2, 2))


def test_sparse_tensors(tmp_path: Path) -> None:
    torch.save({"a": torch.eye(2).to_sparse()}, tmp_path / "m.bin")
    model = with_buffers(a=torch.zeros(2, 2).to_sparse())
    load_checkpoint_in_model(model, tmp_path / "m.bin")
    assert torch.equal(model.get_buffer("a").to_dense(), torch.eye(2))
    with misfit(match=r"a is torch\.sparse_coo, in the model torch\.strided"):
        load_checkpoint_in_model(with_buffers(a=torch.zeros(2, 2)), tmp_path / "m.bin")
    with pytest.raises(CheckpointError, match="a is a sparse tensor"):
        Accelerator(cpu=True).save_model(model, tmp_path / "s")


def test_a_file_of_a_machine_with_another_byte_order(tmp_path: Path) -> None:
    torch.save({"a": torch.tensor([1.0, 2.0])}, tmp_path / "here.bin")
    with zipfile.ZipFile(tmp_path / "here.bin") as here, zipfile.ZipFile(tmp_path / "m.bin", "w") as there:
        for name in here.namelist():
            data = here.read(name)
            if name.endswith("/byteorder"):
                data = b"big" if sys.byteorder == "little" else b"little"
            elif name.endswith("/data/0"):
                data = torch.tensor([1.0, 2.0]).numpy().byteswap().tobytes()
            there.writestr(name, data)
    model = with_buffers(a=torch.zeros(2))
    load_checkpoint_in_model(model, tmp_path / "m.bin")
    assert model.get_buffer("a").tolist() == [1, 2]


NAMES = ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")
DTYPES = [getattr(torch, name) for name in NAMES if hasattr(torch, name)]


@pytest.mark.parametrize("dtype", filter(can_be_copied, DTYPES), ids=str)
def test_dtypes_of_8_and_4_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.arange(8, dtype=torch.uint8).view(2, 4)
    save_file({"a": value.view(dtype)}, tmp_path / "theirs.safetensors")
    Accelerator(cpu=True).save_model(with_buffers(a=value.view(dtype)), tmp_path)
    read = load_file(tmp_path / "model.safetensors")["a"]
    assert read.dtype == dtype
    assert torch.equal(read.view(torch.uint8), value)
    for file in ("theirs.safetensors", "model.safetensors"):
        model = with_buffers(a=torch.zeros_like(value).view(dtype))
        load_checkpoint_in_model(model, tmp_path / file)
        assert torch.equal(model.get_buffer("a").view(torch.uint8), value)
    if dtype == getattr(torch, "float4_e2m1fn_x2", None):
        with misfit(match="in the model of torch.float32"):
            load_checkpoint_in_model(with_buffers(a=torch.zeros(2, 4)), tmp_path)


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
@pytest.mark.parametrize(
    ("model", "saved", "fits"),
    [
        (torch.int64, torch.tensor([5], dtype=torch.int32), True),
        (torch.int32, torch.tensor([5]), True),
        (torch.int32, torch.tensor([2**40 + 5]), False),
        (torch.uint8, torch.tensor([-1], dtype=torch.int8), False),
        (torch.int64, torch.tensor([2**63], dtype=torch.uint64), False),
        (torch.bool, torch.tensor([1], dtype=torch.uint8), True),
        (torch.bool, torch.tensor([2]), False),
        (torch.int64, torch.tensor([5 + 1j]), False),
    ],
    ids=str,
)
def test_whole_numbers_never_wrap(
    tmp_path: Path, model: torch.dtype, saved: torch.Tensor, fits: bool, device_map: Any
) -> None:
    torch.save({"a": saved}, tmp_path / "m.bin")
    module = with_buffers(a=torch.zeros(1, dtype=model))
    if not fits:
        with misfit():
            load_checkpoint_in_model(module, tmp_path / "m.bin", device_map)
        assert module.get_buffer("a").item() == 0
        return
    load_checkpoint_in_model(module, tmp_path / "m.bin", device_map, dtype="float16")
    assert module.get_buffer("a").dtype == model
    assert module.get_buffer("a").item() == saved.item()


def test_lists_and_dicts_of_parameters(tmp_path: Path) -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.several = nn.ParameterList([nn.Parameter(torch.randn(2)) for _ in range(3)])
            self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(2))})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.several[0] * self.several[1] + self.several[2] * self.named["a"] + x

    net = Lists()
    Accelerator(cpu=True).save_model(net, tmp_path, max_shard_size=8)
    maps: tuple[Any, ...] = ({"": "disk"}, {"several": "disk", "named": "cpu"},
            {"several.0": "disk", "several.1": "cpu", "several.2": "disk", "named.a": "disk"})  # fmt: skip
    for device_map in maps:
        with init_empty_weights():
            model = Lists()
        load_checkpoint_and_dispatch(model, tmp_path, device_map)
        assert torch.equal(model(torch.ones(2)), net(torch.ones(2)))


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
load_checkpoint_in_model(make(10), sys.argv[1])
print(peak() - before)
"""


@pytest.mark.parametrize("safe", [True, False])
def test_there_is_never_a_second_copy_of_the_model(tmp_path: Path, safe: bool) -> None:
    """The peak is the model (80 MiB) and one of its tensors (8 MiB), whatever the size of a shard."""
    layers = [nn.utils.skip_init(nn.Linear, 2048, 1024, bias=False) for _ in range(10)]
    big, small = nn.Sequential(*layers), nn.Sequential(layers[0])
    for name, model in (("big", big), ("small", small)):
        write_weights(model.state_dict(), tmp_path / name, safe_serialization=safe)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "big"), str(tmp_path / "small")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= (80 + 2 * 8 + 16) * 2**20
