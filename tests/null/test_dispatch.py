"""Dispatching on a machine without accelerators: nothing moves, and what is on disk is used where it lies."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import accelerate.big_modeling
import accelerate.hooks
from accelerate import (
    Accelerator,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate import device as devices
from accelerate.core.errors import DeviceError, OffloadError, PrepareError, SettingError, UnknownNameError
from accelerate.hooks import add_hook_to_module, remove_hook_from_submodules
from accelerate.utils import offload_state_dict
from tests.support.offloaded import (
    copies_weights,
    is_dispatched,
    offload_fails,
    offload_to_memory,
    prepare_dispatched,
)
from tests.support.ranks import RankServer

WIDTH = 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("factor", torch.full((WIDTH,), 0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.factor


class Net(nn.Module):
    """Uses weights of its parts itself, and has one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) * self.scale
        for layer in self.layers:
            x = layer(x)
        x = F.linear(x, self.layers[0].down.weight.T)
        return F.linear(x[:, :WIDTH], self.embedding.weight)


IDS = torch.arange(6)
DISK: dict[str, Any] = {"": "cpu", "layers.1": "disk", "embedding": "disk"}


def built() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def index_of(model: nn.Module, file: Path, dtype: str = "float32") -> dict[str, Any]:
    """A checkpoint of a model, and the index of it that transformers makes."""
    values = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(values, file)
    return {
        name: {"safetensors_file": str(file), "weight_name": name, "dtype": dtype}
        for name, value in values.items()
        if value.is_floating_point()
    }


def hooked(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "_hf_hook" in vars(module)]


def written(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_nothing_moves_and_no_hook_is_attached() -> None:
    model = built()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    dispatch_model(model, {"": "cpu:0"})
    dispatch_model(model, {"embedding": "cpu", "scale": "cpu", "layers": "cpu:0"})
    assert model.hf_device_map == {"embedding": "cpu", "scale": "cpu", "layers": "cpu:0"}
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    assert hooked(model) == []
    assert "to" not in vars(model)


def test_what_is_on_disk_is_mapped_from_the_checkpoint(tmp_path: Path) -> None:
    """E1, E3, E11: real parameters without a copy, a move of inputs, or a byte written."""
    model = built()
    expected = model(IDS)
    index = index_of(model, tmp_path / "model.safetensors")
    size = written(tmp_path)
    empty = copy.deepcopy(model)
    for module in empty.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                module._parameters[name] = nn.Parameter(p.to("meta"), requires_grad=p.requires_grad)
    dispatch_model(empty, {"": "disk"}, offload_index=index)
    assert {type(module.forward).__name__ for module in empty.modules()} <= {"InnerForward", "method"}
    assert written(tmp_path) == size
    assert {p.device.type for p in empty.parameters()} == {"cpu"}
    torch.testing.assert_close(empty(IDS), expected)
    with torch.no_grad():
        empty.scale.zero_()  # the file does not change
    again = dispatch_model(copy.deepcopy(model), {"": "disk"}, offload_index=index)
    torch.testing.assert_close(again(IDS), expected)
    assert not copies_weights(again)


def anonymous_memory() -> int:
    """Bytes of this process that are its own, and not pages of files."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024


def four() -> nn.Module:
    """144 MiB. Weights of 32 MiB and more are given back to the system when they are freed (mallopt(3))."""
    return nn.Sequential(*[nn.Linear(3072, 3072, bias=False) for _ in range(4)])


def measured(folder: str) -> dict[str, int]:
    """How much memory such a model takes that is dispatched to disk, with files and without."""
    model = four()
    values = dict(model.state_dict())
    file = Path(folder, "model.safetensors")
    save_file(values, file)
    del values
    index = {n: {"safetensors_file": str(file), "weight_name": n} for n, _ in model.named_parameters()}
    model.to("meta")
    gc.collect()
    before = anonymous_memory()
    dispatch_model(model, {"": "disk"}, offload_index=index)
    with torch.no_grad():
        model(torch.zeros(1, 3072))
    mapped = anonymous_memory() - before
    real = four()
    full = anonymous_memory()
    dispatch_model(real, {"": "disk"}, offload_dir=Path(folder, "offload"))
    gc.collect()
    return {"mapped": mapped, "freed": full - anonymous_memory()}


def test_weights_on_disk_take_no_memory(ranks: RankServer, tmp_path: Path) -> None:
    """E11: mapped ones never do; those that were in memory are written once, and let go."""
    [found] = ranks(1, measured, str(tmp_path))
    assert found["mapped"] < 16 * 2**20
    assert found["freed"] > 128 * 2**20
    assert 144 * 2**20 <= written(tmp_path / "offload") < 145 * 2**20


def test_without_files_the_folder_is_written_once_and_mapped(tmp_path: Path) -> None:
    """E7: also when it is dispatched again, with another map."""
    model = built()
    expected = model(IDS)
    tied = model.embedding.weight
    dispatch_model(model, DISK, offload_dir=tmp_path)
    assert model.embedding.weight is tied  # optimizers and ties keep their parameter
    assert {f.name for f in tmp_path.glob("*.dat")} == {
        "embedding.weight.dat",
        *(f"layers.1.{name}.dat" for name in ("up.weight", "up.bias", "down.weight", "down.bias")),
        *(f"layers.1.norm.{name}.dat" for name in ("weight", "bias")),
    }
    torch.testing.assert_close(model(IDS), expected)
    stamps = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.dat")}
    dispatch_model(model, DISK, offload_dir=tmp_path)
    dispatch_model(model, {**DISK, "layers.2.up": "disk"}, offload_dir=tmp_path)
    assert {file: file.stat().st_mtime_ns for file in stamps} == stamps
    torch.testing.assert_close(model(IDS), expected)
    with torch.no_grad():
        middle: Any = model.layers[1]
        middle.up.weight.mul_(2)  # what was changed in memory is what counts
    changed = model(IDS)
    dispatch_model(model, DISK, offload_dir=tmp_path)
    torch.testing.assert_close(model(IDS), changed)
    assert not torch.allclose(changed, expected)


def write_indexed_file(state: dict[str, torch.Tensor], folder: Path, **others: torch.Tensor) -> Path:
    """Write a file and its index as GPTQModel does, before it calls disk_offload."""
    file = folder / "module.safetensors"
    save_file({**state, **others}, file)
    index = {
        name: {
            "safetensors_file": str(file),
            "weight_name": name,
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": [*value.shape],
        }
        for name, value in state.items()
    }
    (folder / "index.json").write_text(json.dumps(index))
    return file


def test_what_the_folder_has_in_a_file_of_safetensors_is_not_written_again(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    expected, state = model(x), model.state_dict()
    write_indexed_file(state, tmp_path, bias=state["bias"] + 1)
    disk_offload(model, tmp_path, "cpu")
    assert [each.name for each in tmp_path.glob("*.dat")] == ["bias.dat"]  # the file has another
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("offload_buffers", [True, False])
def test_buffers_come_from_the_folder_that_has_the_weights(offload_buffers: bool, tmp_path: Path) -> None:
    plain = built()
    plain.get_buffer("layers.1.norm.running_mean").normal_()
    offload_state_dict(tmp_path, plain.state_dict())
    stamps = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    with init_empty_weights():
        model = Net().eval()
    disk_offload(model, tmp_path, "cpu", offload_buffers=offload_buffers)
    assert torch.equal(model(IDS), plain(IDS))
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == stamps


PLACEMENTS: dict[str, Any] = {
    "disk_offload": lambda model, file: disk_offload(model, file.parent, "cpu", offload_buffers=True),
    "cpu_offload": lambda model, _: cpu_offload(model, "cpu", offload_buffers=True),
    "dispatch_model": lambda model, file: dispatch_model(
        model, DISK, offload_dir=file.parent, offload_buffers=True
    ),
    "load_checkpoint_in_model": lambda model, file: load_checkpoint_in_model(model, file, {"": "cpu"}),
    "load_checkpoint_and_dispatch": lambda model, file: load_checkpoint_and_dispatch(
        model, file, DISK, offload_folder=file.parent, offload_buffers=True
    ),
}


CASES = [(how, made) for how in PLACEMENTS for made in ("before", "in it", "without weights")]
CASES.remove(("cpu_offload", "without weights"))


@pytest.mark.parametrize(("how", "made"), CASES)
def test_weights_placed_in_inference_mode_can_be_trained_later(how: str, made: str, tmp_path: Path) -> None:
    """Those of a model that was made in the mode compute; torch trains none of them."""
    plain: Any = built()
    plain.layers[1].norm.running_mean.normal_()
    file = write_indexed_file(plain.state_dict(), tmp_path)
    with torch.inference_mode(made == "in it"):
        model = copy.deepcopy(plain)
    if made == "without weights":
        with init_empty_weights():
            model = Net().eval()
    with torch.inference_mode():
        PLACEMENTS[how](model, file)
        assert torch.equal(model(IDS), plain(IDS))
    with torch.no_grad():
        assert torch.equal(model(IDS), plain(IDS))
    if made != "in it":
        for each in (plain, model):
            each(IDS).square().mean().backward()
            torch.optim.SGD(each.parameters(), 0.1).step()
        torch.testing.assert_close(dict(model.named_parameters()), dict(plain.named_parameters()))


def test_a_dtype_that_differs_from_the_checkpoint_is_converted(tmp_path: Path) -> None:
    model = built()
    index = index_of(copy.deepcopy(model).half(), tmp_path / "model.safetensors")
    dispatch_model(model, {"": "disk"}, offload_index=index)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.scale, built().scale.half().float())


def test_values_may_come_with_the_call(tmp_path: Path) -> None:
    full = built()
    model = copy.deepcopy(full).to("meta")
    for module, real in zip(model.modules(), full.modules(), strict=True):
        module._buffers.update(real._buffers)
    dispatch_model(model, DISK, state_dict=full.state_dict(), offload_dir=tmp_path)
    torch.testing.assert_close(model(IDS), full(IDS))


def test_values_of_the_call_come_before_those_of_the_model(tmp_path: Path) -> None:
    """Of what is offloaded; what is used in place has its own."""
    trained = {name: value.detach() * 2 for name, value in built().named_parameters()}
    plain = built()
    plain.load_state_dict(trained, strict=False)
    model = cpu_offload(built(), "cpu", state_dict=trained)
    torch.testing.assert_close(model(IDS), plain(IDS))
    model = dispatch_model(built(), {"": "disk"}, state_dict=trained, offload_dir=tmp_path)
    torch.testing.assert_close(model(IDS), plain(IDS))
    model = dispatch_model(built(), {"": "cpu"}, state_dict=trained)
    torch.testing.assert_close(model(IDS), built()(IDS))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_values_of_another_shape_are_refused(device: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    values = {**model.state_dict(), "1.bias": torch.ones(1)}
    model.to(device)
    with pytest.raises(OffloadError, match=r"1\.bias .* shape \[1\]"):
        cpu_offload(model, "cpu", state_dict=values)
    assert hooked(model) == []


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
    assert model[1].weight is model[0].weight
    model = model.to("meta")
    model[1].weight = model[0].weight
    dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
    assert model[1].weight is model[0].weight


def test_a_model_on_disk_is_an_ordinary_model(tmp_path: Path) -> None:
    """E6"""
    model = built()
    values, expected = {n: v.clone() for n, v in model.state_dict().items()}, model(IDS)
    dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        torch.testing.assert_close(twin(IDS), expected)
        for name, value in twin.state_dict().items():
            assert torch.equal(value, values[name])
    assert model.to(torch.float64).scale.dtype == torch.float64
    model.float()(IDS).sum().backward()
    assert model.scale.grad is not None


def test_offloading_to_the_cpu_changes_nothing(tmp_path: Path) -> None:
    model = built()
    expected = model(IDS)
    assert cpu_offload(model, torch.device("cpu:0")) is model
    check_hooks_are_for_show(model)
    disk_offload(model, tmp_path)
    check_hooks_are_for_show(model)
    torch.testing.assert_close(model(IDS), expected)
    assert len(list(tmp_path.glob("*.dat"))) == len(list(model.parameters()))
    remove_hook_from_submodules(model)
    assert hooked(model) == []
    assert not {"to", "cuda", "_apply", "forward", "_old_forward"} & vars(model).keys()
    dispatch_model(model, {"layers": "disk", "": "cpu"}, offload_dir=tmp_path)
    check_hooks_are_for_show(model)
    embedding: Any = model.embedding
    compute = embedding._old_forward
    embedding._old_forward = lambda ids: compute(ids) * 0
    torch.testing.assert_close(model.embedding(IDS), torch.zeros_like(compute(IDS)))


def check_hooks_are_for_show(model: nn.Module) -> None:
    """1.3: clients find ``_hf_hook`` where weights are offloaded; calls do not pass through it.

    modelopt replaces the ``_old_forward`` of such a module, and leaves its ``forward``.
    """
    own = [
        name for name, module in model.named_modules() if [*module.parameters(False), *module.buffers(False)]
    ]
    assert set(hooked(model)) == {"", *own}
    for name in hooked(model):
        module: Any = model.get_submodule(name)
        assert isinstance(module._hf_hook, accelerate.hooks.AlignDevicesHook)
        assert module._hf_hook.execution_device == torch.device("cpu")
        assert not module._hf_hook.offload
        assert module._hf_hook.io_same_device == (name == "")
        assert module._old_forward.__func__ is type(module).forward


def test_hooks_are_attached_if_asked() -> None:
    """1.3: the model itself is hooked, and gives what it gave."""
    model = built()
    expected = model(IDS)
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert {"", "embedding"} <= set(hooked(model))
    hook = model._hf_hook
    assert type(hook).__name__ == "AlignDevicesHook"
    assert isinstance(hook, accelerate.hooks.AlignDevicesHook)
    assert hook.execution_device == torch.device("cpu")
    assert hook.io_same_device
    torch.testing.assert_close(model(IDS), expected)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.scale.zero_()
    torch.testing.assert_close(model(IDS), expected)
    assert not torch.allclose(twin(IDS), expected)
    remove_hook_from_submodules(model)
    assert hooked(model) == []
    assert not {"to", "cuda", "_apply", "forward", "_old_forward"} & vars(model).keys()


def test_hooks_of_others_stay_when_a_model_is_dispatched_again() -> None:
    calls: list[str] = []

    class Mine(accelerate.hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            calls.append("mine")
            return args, kwargs

    model = built()
    add_hook_to_module(model, Mine())
    for _ in range(2):
        dispatch_model(model, {"": "cpu"}, force_hooks=True)
        model(IDS)
        assert is_dispatched(model)
    assert calls == ["mine", "mine"]
    assert len(model._hf_hook.hooks) == 2


def test_two_hundred_layers_cost_nothing() -> None:
    """E9: on one device there is no hook, however the map is written."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(200)])
    dispatch_model(model, {str(place): "cpu" for place in range(200)})
    assert hooked(model) == []
    assert not any("forward" in vars(module) for module in model.modules())


def test_check_device_map_is_called_where_clients_replace_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.1: transformers leaves parameters without a device on purpose, and takes the check away meanwhile."""
    model = built()
    with pytest.raises(SettingError, match="gives no device to scale"):
        dispatch_model(model, {"embedding": "cpu", "layers": "cpu"})
    monkeypatch.setattr(accelerate.big_modeling, "check_device_map", lambda *args: None)
    dispatch_model(model, {"embedding": "cpu", "layers": "cpu"})
    model(IDS)


@pytest.mark.parametrize(
    ("device_map", "error", "words"),
    [
        ({"layer": "cpu"}, SettingError, "the model has no 'layer' (did you mean 'layers'?)"),
        ({"": "gpu"}, UnknownNameError, "unknown device 'gpu'"),
        ({"": -1}, SettingError, "-1 is no device"),
        ({"": "cpu", "layers": "disk"}, PrepareError, "an offload folder is needed for layers.0.up.weight"),
        ({"": "meta"}, SettingError, "cannot put anything on 'meta'"),
    ],
)
def test_a_wrong_map_is_told_before_anything_is_done(device_map: Any, error: Any, words: str) -> None:
    model = built()
    with pytest.raises(error) as raised:
        dispatch_model(model, device_map)
    assert words in str(raised.value)
    assert not hasattr(model, "hf_device_map")


def test_names_in_a_map_that_the_model_lacks_are_told() -> None:
    with pytest.warns(UserWarning, match=r"the model has no 'layer', 'vision' \(did you mean 'layers'\?\)"):
        model = dispatch_model(built(), {"": "cpu", "layer": "cpu", "vision": "disk"})
    assert model.hf_device_map == {"": "cpu", "layer": "cpu", "vision": "disk"}
    model(IDS)


@pytest.mark.skipif(devices.detect().type != "cpu", reason="there is an accelerator")
def test_an_accelerator_that_is_not_here_is_told() -> None:
    for device in (0, "cuda:0"):
        with pytest.raises(DeviceError, match="is not here"):
            dispatch_model(built(), {"": device})


def test_weights_without_values_are_named(tmp_path: Path) -> None:
    with offload_fails(match=r"there are no values for scale, embedding\.weight"):
        dispatch_model(built().to("meta"), {"": "cpu"})
    index = index_of(built(), tmp_path / "model.safetensors")
    del index["layers.1.up.weight"]
    with offload_fails(match=r"no values for layers\.1\.up\.weight"):
        dispatch_model(built().to("meta"), {"": "disk"}, offload_index=index)


def test_files_that_are_gone_are_told_at_once(tmp_path: Path) -> None:
    index = index_of(built(), tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    with offload_fails(match=r"model\.safetensors are gone"):
        dispatch_model(built().to("meta"), {"": "disk"}, offload_index=index)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with offload_fails(match="cannot be used as an offload folder"):
        dispatch_model(built(), {"": "disk"}, offload_dir=blocked)


def test_a_model_waits_on_the_cpu_until_it_runs() -> None:
    model, hook = cpu_offload_with_hook(built(), "cpu")
    model(IDS)
    hook.offload()
    hook.remove()
    assert hooked(model) == []


def test_training_what_is_offloaded_is_refused(tmp_path: Path) -> None:
    """Several processes always refuse; on one CPU process weights are real, and can be trained."""
    model = built()
    dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.end_training()
    offload_to_memory(model, "scale")
    prepare_dispatched(model, processes=1, trained=False)
    with pytest.raises(PrepareError, match="scale is offloaded and cannot be trained"):
        prepare_dispatched(model, processes=1, trained=True)
    with pytest.raises(PrepareError, match="cannot be trained by several processes"):
        prepare_dispatched(model, processes=2, trained=False)
    model.requires_grad_(False)
    prepare_dispatched(model, processes=1, trained=True)


@pytest.mark.parametrize(("bits", "has_cpu_kernels"), [(8, False), (4, True)])
def test_a_quantized_model_with_offloaded_parts_is_only_evaluated(
    bits: int, has_cpu_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in 1.x; an entry of the CPU is left to bitsandbytes where that computes on the CPU."""
    features = types.SimpleNamespace(features={"multi_backend"} if has_cpu_kernels else set())
    monkeypatch.setitem(sys.modules, "bitsandbytes", features)
    monkeypatch.setattr("accelerate.core.packages.is_installed", lambda name: True)
    accelerator = Accelerator(cpu=True)

    def quantized(places: dict[str, Any]) -> nn.Module:
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        model.hf_device_map = places
        setattr(model, f"is_loaded_in_{bits}bit", True)
        return model

    for place in ("disk",) if has_cpu_kernels else ("disk", "cpu"):
        model = quantized({"0": 0, "1": place})
        with pytest.raises(ValueError, match=f"in {bits} bits cannot be trained with 1 on the {place}"):
            accelerator.prepare(model)
        accelerator.prepare_model(model, evaluation_mode=True)
    for places in ({"": 0}, {}, {"0": 0, "1": "cpu"} if has_cpu_kernels else {"": 1}):
        accelerator.prepare(quantized(places))
