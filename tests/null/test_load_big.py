"""Loading models that are mapped from their files: memory, bytes written, bad files (E2, E3, E11)."""

from __future__ import annotations

import copy
import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model, utils
from accelerate.core.errors import (
    CheckpointError,
    DeviceError,
    PrepareError,
    SettingError,
    UnknownNameError,
)
from accelerate.hooks import ModelHook, add_hook_to_module
from tests.support.long_run import long_run_param
from tests.support.torch_versions import is_torch
from tests.support.weights import misfit, write_weights


class Net(nn.Module):
    """RoPE-like frequencies, counters of batches, blocks, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("frequencies", 1.0 / 100 ** (torch.arange(8) / 8), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) * self.frequencies
        for block in self.blocks:
            hidden = torch.relu(block(hidden))
        return self.head(self.norm(hidden))


def empty() -> Net:
    with init_empty_weights():
        return Net().eval()


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


TOKENS = torch.arange(12)
MAPS: list[Any] = [
    None,
    {"": "cpu"},
    {"": "disk"},
    {
        "embed": "cpu",
        "blocks": "disk",
        "blocks.1": "cpu",
        "norm": "disk",
        "head": "disk",
        "frequencies": "cpu",
    },
    {"": torch.device("cpu", 0)},
    "auto",
    "balanced",
    "balanced_low_0",
    "sequential",
]


@pytest.mark.parametrize("device_map", MAPS, ids=str)
@pytest.mark.parametrize("safe", [True, False])
def test_every_map_computes_the_same_and_writes_nothing(
    tmp_path: Path, net: Net, device_map: Any, safe: bool
) -> None:
    """E3, E11: with mapped files, on the CPU no hook is called and nothing is written.

    Torch 2.6 does not tell where in a file of pickles a tensor lies: what is on disk is written anew.
    """
    write_weights(net.state_dict(), tmp_path / "w", max_shard_size=600, safe_serialization=safe)
    offload = tmp_path / "offload"
    model = load_checkpoint_and_dispatch(empty(), tmp_path / "w", device_map, offload_folder=offload)
    torch.testing.assert_close(model(TOKENS), net(TOKENS), rtol=0, atol=0)
    assert model.head.weight is model.embed.weight  # pyright: ignore
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert not offload.exists() or (is_torch("<2.7") and not safe)
    assert not any(module._hf_hook.offload for module in model.modules() if hasattr(module, "_hf_hook"))
    if isinstance(device_map, dict):
        assert model.hf_device_map == device_map


def test_weights_are_views_of_the_file_until_they_are_written(tmp_path: Path, net: Net) -> None:
    """They can be trained, copied and saved; the file never changes."""
    (name,) = write_weights(net.state_dict(), tmp_path)
    before = (tmp_path / name).read_bytes()
    model = empty()
    load_checkpoint_in_model(model, tmp_path)
    weight: Any = model.blocks[0].weight
    twin = copy.deepcopy(model)
    with torch.no_grad():
        weight.mul_(2)
    first: Any = net.blocks[0]
    torch.testing.assert_close(weight, 2 * first.weight)
    torch.testing.assert_close(twin.blocks[0].weight, net.blocks[0].weight)
    assert (tmp_path / name).read_bytes() == before
    again = empty()
    load_checkpoint_in_model(again, tmp_path)
    torch.testing.assert_close(dict(again.state_dict()), dict(net.state_dict()))
    pointers = {p.untyped_storage().data_ptr() for p in again.parameters()}
    assert len(pointers) == len(list(again.parameters()))  # nobody takes them for tied


@pytest.mark.parametrize("safe", [True, False])
def test_a_model_can_be_saved_over_the_file_that_it_is_mapped_from(
    tmp_path: Path, net: Net, safe: bool
) -> None:
    """Savers here replace files by renaming, so the mapping stays what it was."""
    write_weights(net.state_dict(), tmp_path, safe_serialization=safe)
    model = empty()
    load_checkpoint_in_model(model, tmp_path)
    with torch.no_grad():
        model.blocks[1].weight.add_(1)  # pyright: ignore
    write_weights(model.state_dict(), tmp_path, safe_serialization=safe)
    again = empty()
    load_checkpoint_in_model(again, tmp_path)
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()))
    second: Any = net.blocks[1]
    torch.testing.assert_close(again.blocks[1].weight, second.weight + 1)
    file = next(p for p in tmp_path.iterdir() if p.suffix in (".safetensors", ".bin"))
    utils.save(again.state_dict(), file, safe_serialization=safe)
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()))


def test_a_model_with_memory_keeps_it(tmp_path: Path, net: Net) -> None:
    """In place, as ``load_state_dict`` does it: optimizers and views stay right."""
    write_weights(net.state_dict(), tmp_path)
    model = Net()
    pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
    load_checkpoint_in_model(model, tmp_path, {"": "cpu"})
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == pointers
    torch.testing.assert_close(dict(model.state_dict()), dict(net.state_dict()))


def test_other_dtypes_on_disk_are_written_once(tmp_path: Path, net: Net) -> None:
    """Weights of another dtype must be written, for which there must be a folder."""
    write_weights(net.state_dict(), tmp_path / "w")
    places = {"": "cpu", "blocks": "disk"}
    with pytest.raises(SettingError, match=r"blocks\.0\.weight.*no folder") as caught:
        load_checkpoint_in_model(empty(), tmp_path / "w", places, dtype="bf16")  # pyright: ignore
    assert "offload_folder" in caught.value.fix
    offload = tmp_path / "offload"
    model = empty()
    load_checkpoint_and_dispatch(model, tmp_path / "w", places, offload_folder=offload, dtype=torch.bfloat16)  # pyright: ignore
    assert sorted(p.name for p in offload.glob("*.dat"))[0] == "blocks.0.bias.dat"
    assert json.loads((offload / "index.json").read_text())["blocks.0.weight"]["dtype"] == "bfloat16"
    expected = dict(copy.deepcopy(net).bfloat16().named_parameters())
    torch.testing.assert_close(dict(model.named_parameters()), expected, rtol=0, atol=0)


def test_old_torch_files_on_disk_are_written_once(tmp_path: Path, net: Net) -> None:
    """Files of torch before 1.6 cannot be mapped."""
    path = tmp_path / "pytorch_model.bin"
    torch.save(dict(net.state_dict()), path, _use_new_zipfile_serialization=False)
    with pytest.raises(SettingError, match="no folder"):
        load_checkpoint_in_model(empty(), path, {"": "disk"})
    model = load_checkpoint_and_dispatch(empty(), path, {"": "disk"}, offload_folder=tmp_path / "o")
    torch.testing.assert_close(model(TOKENS), net(TOKENS))
    assert (tmp_path / "o" / "embed.weight.dat").stat().st_size == 12 * 8 * 4


def test_the_index_of_an_offload_folder_is_written_once_also_after_an_error(
    tmp_path: Path, net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_weights(net.state_dict(), tmp_path / "w")
    offload = tmp_path / "offload"
    (offload / "blocks.2.weight.dat").mkdir(parents=True)
    replace, written = Path.replace, list[Path]()
    monkeypatch.setattr(Path, "replace", lambda path, to: (written.append(to), replace(path, to))[1])
    with pytest.raises(RuntimeError, match=r"blocks\.2\.weight"):
        load_checkpoint_in_model(empty(), tmp_path / "w", {"": "disk"}, offload, dtype="bf16")
    index = json.loads((offload / "index.json").read_text())
    files = {path.name for path in offload.glob("*.dat") if path.is_file()}
    assert {f"{name}.dat" for name in index} == files
    assert len(index) > 1
    assert written.count(offload / "index.json") == 1


def test_an_offload_folder_that_cannot_be_written_is_named(tmp_path: Path, net: Net) -> None:
    write_weights(net.state_dict(), tmp_path / "w")
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="offload folder"):
        load_checkpoint_in_model(empty(), tmp_path / "w", {"": "disk"}, tmp_path / "file" / "o", dtype="bf16")


# ------------------------------------------------------------------------------------------- what is refused


def save_shards(tmp_path: Path, net: Net) -> tuple[Path, list[Path]]:
    files = write_weights(net.state_dict(), tmp_path, max_shard_size=300)
    return tmp_path, [tmp_path / file for file in files]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def no_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 2**40) + b"{}")


def no_bytes(path: Path) -> None:
    path.write_bytes(b"")


def other_shape(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"shape":[', b'"shape":[3,', 1))


@pytest.mark.parametrize("spoil", [truncate, no_header, no_bytes, other_shape, Path.unlink])
@pytest.mark.parametrize("device_map", [None, {"": "disk"}, "auto"], ids=str)
def test_a_bad_shard_is_named_before_anything_is_loaded(
    tmp_path: Path, net: Net, spoil: Any, device_map: Any
) -> None:
    """E2: missing, cut, or not what it says; the model is as it was."""
    folder, files = save_shards(tmp_path, net)
    spoil(files[-1])
    model = empty()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint_and_dispatch(model, folder, device_map)
    assert files[-1].name in str(caught.value)
    assert all(p.is_meta for p in model.parameters())


def test_an_index_that_names_a_missing_file_or_tensor(tmp_path: Path, net: Net) -> None:
    folder, files = save_shards(tmp_path, net)
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"]["embed.weight"] = "elsewhere.safetensors"
    index.write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=r"elsewhere\.safetensors is missing"):
        load_checkpoint_in_model(empty(), folder)
    table["weight_map"]["embed.weight"] = files[-1].name
    table["weight_map"]["nowhere"] = files[-1].name
    index.write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match="does not hold"):
        load_checkpoint_in_model(empty(), folder)


REFUSED: list[tuple[Any, type[Exception], str]] = [
    ({"embed": "cpu"}, SettingError, r"device_map does not say where blocks\.0\.weight"),
    ({"blocsk": "disk"}, SettingError, r"the model has no 'blocsk' \(did you mean 'blocks'\?\)"),
    ({"": "gpu"}, DeviceError, "unknown device 'gpu'"),
    ({"": "meta"}, SettingError, "meta"),
    ({"": "cuda:9"}, DeviceError, "cuda"),
    ("automatic", UnknownNameError, "auto"),
]


@pytest.mark.parametrize(("device_map", "error", "text"), REFUSED, ids=str)
def test_a_map_that_does_not_fit_is_refused_before_anything_is_loaded(
    tmp_path: Path, net: Net, device_map: Any, error: type[Exception], text: str
) -> None:
    """E5: names the module or the device."""
    write_weights(net.state_dict(), tmp_path)
    model = empty()
    with pytest.raises(error) as caught:
        load_checkpoint_and_dispatch(model, tmp_path, device_map)
    assert re.search(text, str(caught.value)), str(caught.value)
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("load", [load_checkpoint_in_model, load_checkpoint_and_dispatch])
def test_names_in_a_map_that_the_model_lacks_are_told(tmp_path: Path, net: Net, load: Any) -> None:
    write_weights(net.state_dict(), tmp_path)
    model = empty()
    with pytest.warns(UserWarning, match=r"no 'blocsk', 'vision' \(did you mean 'blocks'\?\)"):
        load(model, tmp_path, device_map={"": "cpu", "blocsk": "disk", "vision": "disk"})
    torch.testing.assert_close(model.state_dict(), net.state_dict())


def test_a_model_with_hooks_is_refused(tmp_path: Path, net: Net) -> None:
    write_weights(net.state_dict(), tmp_path)
    model = empty()
    add_hook_to_module(model.head, ModelHook())
    with pytest.raises(PrepareError, match="dispatched already"):
        load_checkpoint_and_dispatch(model, tmp_path, {"": "cpu"})


@pytest.mark.parametrize("device_map", [None, {"": "disk"}, "auto"], ids=str)
def test_a_layer_that_no_file_holds_has_its_own_values_or_is_an_error(
    tmp_path: Path, net: Net, device_map: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """E2: never meta where it is to run, never silent."""
    state = {name: value for name, value in net.state_dict().items() if "blocks.2" not in name}
    write_weights(state, tmp_path / "w")
    model: Any = empty()
    if device_map is not None:
        with misfit(match=r"missing: blocks\.2\.weight, blocks\.2\.bias") as caught:
            load_checkpoint_and_dispatch(model, tmp_path / "w", device_map)
        assert "give what is missing values before this call" in caught.value.fix
        assert all(p.is_meta for p in model.parameters()), "nothing was read"
    model.blocks[2] = net.blocks[2]
    load_checkpoint_and_dispatch(model, tmp_path / "w", device_map, offload_folder=tmp_path / "o")
    assert "missing, left as they are: blocks.2.weight, blocks.2.bias" in caplog.text
    torch.testing.assert_close(model(TOKENS), net(TOKENS))


def test_a_model_that_can_tie_its_weights_is_asked(tmp_path: Path, net: Net) -> None:
    """D6: a tied weight is in the file once, and the model has not been tied yet."""

    class LateNet(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 12, bias=False)

        def tie_weights(self) -> None:
            self.head.weight = self.embed.weight

    write_weights(net.state_dict(), tmp_path)
    with init_empty_weights():
        model = LateNet().eval()
    assert load_checkpoint_in_model(model, tmp_path).missing == ()
    torch.testing.assert_close(model(TOKENS), net(TOKENS))


# --------------------------------------------------------------------------------------------- quantised


class TwoParts(torch.Tensor):
    """A tensor made of two."""

    whole_numbers: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> TwoParts:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)  # pyright: ignore

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.whole_numbers, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole_numbers", "scale"], None

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return "TwoParts"

    def whole(self) -> torch.Tensor:
        return self.whole_numbers * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            return cls(args[0].whole_numbers, args[0].scale)
        raise NotImplementedError(func)


class Int8(nn.Module):
    """A linear layer in 8 bits, whose scales are no parameters, as libraries of quantisation have them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4, dtype=torch.float16), requires_grad=False)
        self.scale: torch.Tensor | None = None
        self.form = ""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:  # pyright: ignore
        super()._load_from_state_dict(state_dict, prefix, *args)
        unexpected = args[3]
        self.scale = state_dict[f"{prefix}SCB"]
        self.form = str(int(state_dict[f"{prefix}weight_format"]))
        for name in (f"{prefix}SCB", f"{prefix}weight_format"):
            unexpected.remove(name)


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"": "disk"}], ids=str)
def test_modules_read_their_own_scales(
    tmp_path: Path, device_map: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys beside parameters belong to their module; nothing of the file is lost, and nothing is said."""
    state = {
        "0.weight": torch.arange(16, dtype=torch.int8).view(4, 4),
        "0.SCB": torch.rand(4),
        "0.weight_format": torch.tensor(2, dtype=torch.uint8),
        "1.weight": torch.rand(2, 4),
        "1.bias": torch.rand(2),
    }
    save_file(state, tmp_path / "model.safetensors")
    with init_empty_weights():
        model = nn.Sequential(Int8(), nn.Linear(4, 2))
    assert load_checkpoint_in_model(model, tmp_path, device_map) == ((), ())
    layer: Any = model[0]
    assert layer.weight.dtype is torch.int8
    assert not layer.weight.requires_grad
    torch.testing.assert_close(layer.weight.data, state["0.weight"])
    torch.testing.assert_close(layer.scale, state["0.SCB"])
    assert layer.form == "2"
    assert not caplog.text


def test_scales_without_a_module_that_reads_them_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"weight": torch.rand(2, 2), "bias": torch.rand(2), "SCB": torch.rand(2)}
    save_file(state, tmp_path / "model.safetensors")
    with init_empty_weights():
        model = nn.Linear(2, 2)
    assert load_checkpoint_in_model(model, tmp_path).unexpected == ("SCB",)
    assert "unused: SCB" in caplog.text
    save_file({**state, "weight": torch.ones(2, 2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with misfit() as caught:
        load_checkpoint_in_model(model, tmp_path)
    assert "weight is of torch.int8, in the model of torch.float32" in str(caught.value)


def test_tensors_of_a_class_of_their_own_arrive_as_such(tmp_path: Path) -> None:
    """Weights as torchao saves them: tensors made of several, in torch files."""
    value = TwoParts(torch.arange(4, dtype=torch.int8).view(2, 2), torch.tensor(0.5))
    torch.save({"weight": value, "bias": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with init_empty_weights():
        model = nn.Linear(2, 2)
    with torch.serialization.safe_globals([TwoParts]):
        load_checkpoint_in_model(model, tmp_path)
    assert type(model.weight.data) is TwoParts
    torch.testing.assert_close(model.weight.whole(), value.whole())  # pyright: ignore


# ---------------------------------------------------------------------------------------------- the hub


def test_a_model_of_the_hub_is_found_in_its_cache(
    tmp_path: Path, net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, from what was fetched before."""
    import huggingface_hub

    asked: list[str] = []

    def snapshot_download(name: str, **_: Any) -> str:
        asked.append(name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    write_weights(net.state_dict(), tmp_path)
    model = empty()
    load_checkpoint_in_model(model, "somebody/net")
    assert asked == ["somebody/net"]
    torch.testing.assert_close(model(TOKENS), net(TOKENS))


def test_a_model_that_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot_download(name: str, **_: Any) -> str:
        raise LocalEntryNotFoundError("not in the cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match="no file or folder here, and no model that the hub gives"):
        load_checkpoint_in_model(empty(), "somebody/net")


# ---------------------------------------------------------------------------------------------- memory

MEMORY = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from accelerate import init_empty_weights, load_checkpoint_and_dispatch

def field(file, name):
    (line,) = [row for row in Path(file).read_text().splitlines() if row.startswith(name + ":")]
    return int(line.split()[1])

def anonymous():
    return field("/proc/self/status", "RssAnon") * 1024

class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    peak = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, anonymous())
        return out

place, folder, dtype = sys.argv[1:4]
def make(count):
    with init_empty_weights():
        return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(count)))
x = torch.ones(1, 2048, dtype=getattr(torch, dtype))
with torch.no_grad(), Watch():
    load_checkpoint_and_dispatch(make(1), folder + "/small", {"": place}, dtype=dtype)(x)
before, out = anonymous(), field("/proc/self/io", "wchar")
with torch.no_grad(), Watch() as watch:
    model = load_checkpoint_and_dispatch(make(8), folder + "/big", {"": place}, dtype=dtype)
    loaded = anonymous()
    model(x)
print(json.dumps([watch.peak - before, loaded - before, field("/proc/self/io", "wchar") - out]))
"""


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="looks at /proc")
@pytest.mark.parametrize(
    ("place", "dtype"), [("cpu", "float32"), ("disk", "float32"), long_run_param("cpu", "float16")]
)
def test_memory_and_bytes_written(tmp_path: Path, place: str, dtype: str) -> None:
    """E11: 128 MiB in shards of 32 are mapped: no memory, nothing written. A cast has one tensor besides."""
    layers = [nn.utils.skip_init(nn.Linear, 2048, 2048, bias=False) for _ in range(8)]
    write_weights(nn.Sequential(*layers).state_dict(), tmp_path / "big", max_shard_size=2**25)
    write_weights(nn.Sequential(layers[0]).state_dict(), tmp_path / "small")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, place, str(tmp_path), dtype], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    peak, loaded, written = json.loads(done.stdout)
    model = 0 if dtype == "float32" else 64 * 2**20
    assert peak - model < 24 * 2**20
    assert loaded - model < 16 * 2**20
    assert written < 1000
