"""Hooks that bring weights to a device and drop them: what moves, what comes back, what fits."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Generator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from accelerate.big_modeling import attach_layerwise_casting_hooks, dispatch_model
from accelerate.core.errors import OffloadError
from accelerate.hooks import (
    AlignDevicesHook,
    CpuOffload,
    UserCpuOffloadHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    remove_hook_from_submodules,
)
from accelerate.utils import OffloadedWeightsLoader, offload_state_dict, set_module_tensor_to_device
from accelerate.utils.modeling import align_module_device, check_device_same, get_state_dict_offloaded_model
from tests.support import sim
from tests.support.offloaded import is_offloaded

KiB = 2**10
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _empty_devices() -> Generator[None]:
    gc.collect()
    before = [torch.sim.memory_allocated(device) for device in range(2)]
    yield
    gc.collect()
    assert [torch.sim.memory_allocated(device) for device in range(2)] == before


class Odd(nn.Module):
    """Uses weights in all the ways that hooks on modules do not see."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.inner = nn.Linear(8, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.scale = nn.Parameter(torch.randn(8))
        self.register_buffer("angles", torch.randn(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x) * self.scale + self.angles
        h = F.linear(h, self.inner.weight, self.inner.bias)
        h = F.conv1d(h.mT, self.conv.weight, self.conv.bias, padding=1)
        return h.mT @ self.embed.weight.T


def layers(count: int = 4, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def bytes_of(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in module.parameters())


@pytest.mark.parametrize("device", ["sim", "sim:1", 0])
@pytest.mark.parametrize("home", ["memory", "checkpoint"])
def test_weights_are_right_wherever_they_are_used(device: Any, home: str, tmp_path: Path) -> None:
    """E1: the results are the reference's, and stay on the device of the module."""
    torch.manual_seed(0)
    model, x = Odd(), torch.tensor([[1, 2, 9]])
    expected = model(x)
    weights = None
    if home == "checkpoint":
        file = tmp_path / "model.safetensors"
        save_file(model.state_dict(), file)
        weights = OffloadedWeightsLoader(
            index={n: {"safetensors_file": str(file)} for n in model.state_dict()}
        )
        angles = model.angles
        model.to("meta")
        model.angles = angles
    attach_align_device_hook_on_blocks(model, execution_device=device, offload=True, weights_map=weights)
    with torch.no_grad():
        for _ in range(2):
            result = model(x)
            assert result.device.type == "sim"
            assert torch.allclose(result.cpu(), expected, **CLOSE)
    assert {tensor.device.type for tensor in model.parameters()} == {"meta"}
    remove_hook_from_submodules(model)
    model.to("cpu")
    assert torch.allclose(model(x), expected, **CLOSE)


def test_weights_go_to_the_device_once_and_never_back() -> None:
    model, x = layers(), torch.ones(1, 64, device="sim")
    expected = model.cpu()(x.cpu())
    attach_align_device_hook(model, "sim", offload=True)
    torch.sim.reset_peak_memory_stats()
    before = torch.sim.memory_allocated()
    with torch.no_grad(), sim.traffic() as moved:
        result = model(x)
    assert (moved.to_device, moved.to_device_bytes) == (4, bytes_of(model))
    assert (moved.to_host, moved.between) == (0, 0)
    assert torch.allclose(result.cpu(), expected, **CLOSE)
    assert torch.sim.max_memory_allocated() - before < 1.5 * bytes_of(model) / 4
    assert torch.sim.memory_allocated() - before == result.nbytes or result.nbytes < KiB


def test_a_model_larger_than_the_device_runs() -> None:
    """Whole, it runs out of memory there."""
    model, x = layers(8, 128), torch.ones(1, 128)
    expected = model(x)
    torch.sim.empty_cache()
    with sim.capacity(torch.sim.memory_allocated() + 2 * bytes_of(model) // 8):
        with pytest.raises(torch.OutOfMemoryError):
            layers(8, 128).to("sim")
        gc.collect()
        torch.sim.empty_cache()
        attach_align_device_hook(model, "sim", offload=True)
        with torch.no_grad():
            assert torch.allclose(model(x).cpu(), expected, **CLOSE)


def test_memory_that_runs_out_in_the_middle_is_freed() -> None:
    """E12: the next forward, with room, is right."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4096), nn.Linear(4096, 8)), torch.ones(1, 64)
    expected = model(x)
    attach_align_device_hook(model, "sim", offload=True)
    torch.sim.empty_cache()
    before = torch.sim.memory_allocated()
    with torch.no_grad():
        with sim.capacity(before + 64 * KiB), pytest.raises(torch.OutOfMemoryError):
            model(x)
        gc.collect()
        assert torch.sim.memory_allocated() == before
        assert all(is_offloaded(tensor) for tensor in model.parameters())
        assert torch.allclose(model(x).cpu(), expected, **CLOSE)


def test_weights_that_cannot_be_cast_stay_small() -> None:
    """A device that is full for one forward is not full of wide weights ever after."""
    layer = nn.Linear(64, 64).to("sim:0", torch.float16).requires_grad_(False)
    x = torch.zeros(1, 64, device="sim:0")
    attach_layerwise_casting_hooks(layer, torch.float16, torch.float32)
    torch.sim.empty_cache()
    with sim.capacity(torch.sim.memory_allocated(0) + KiB), pytest.raises(torch.OutOfMemoryError):
        layer(x)
    layer(x)
    assert layer.weight.dtype == layer.bias.dtype == torch.float16


def test_what_a_forward_changes_is_written_back() -> None:
    """Only that, and only where it was changed."""
    norm: Any = nn.BatchNorm1d(4)
    expected = nn.BatchNorm1d(4)
    add_hook_to_module(norm, AlignDevicesHook("sim", offload=True, offload_buffers=True))
    x = torch.randn(8, 4)
    expected(x)
    with torch.no_grad(), sim.traffic() as moved:
        norm(x.to("sim"))
    assert moved.to_host == 3  # mean, variance and the count; weight and bias are dropped
    assert norm.running_mean.device.type == "meta"
    for name, value in norm.state_dict().items():
        assert torch.allclose(value.to("cpu").float(), expected.state_dict()[name].float(), **CLOSE)


def test_tied_weights_are_copied_once() -> None:
    first: Any = nn.Linear(64, 64, bias=False)
    outer: Any = nn.Sequential(first)
    outer.register_parameter("weight", first.weight)
    values = {"weight": first.weight.detach()}
    ties: Any = {first.weight.data_ptr(): {}}
    for module in (outer, first):
        hook = AlignDevicesHook("sim", offload=True, weights_map=values, tied_params_map=ties)
        add_hook_to_module(module, hook)
    with torch.no_grad(), sim.traffic() as moved:
        outer(torch.ones(1, 64, device="sim"))
    assert moved.to_device == 1
    assert list(ties.values()) == [{}]


def test_only_inputs_that_are_elsewhere_move() -> None:
    class Same(nn.Module):
        def forward(self, x: Any, cache: Any, y: Any = None) -> Any:
            return x, cache, y

    here, there = torch.ones(4, device="sim"), torch.ones(4, device="sim:1")
    same = add_hook_to_module(Same(), AlignDevicesHook("sim:0", skip_keys="cache"))
    with sim.traffic() as moved:
        x, cache, y = same(here, cache=here, y=[here, 3])
    assert moved.between == 0
    assert x is cache is y[0] is here
    with sim.traffic() as moved:
        x, cache, y = same(here, cache=there, y=there)
    assert cache is there
    assert (moved.between, y.device) == (1, here.device)
    back = add_hook_to_module(nn.Identity(), AlignDevicesHook("sim:0", io_same_device=True))
    with sim.traffic() as moved:
        assert back(there).device == there.device
    assert moved.between == 2


def test_a_device_without_a_number_is_the_current_one() -> None:
    layer = nn.Linear(2, 2).to("sim:0")
    before = layer.weight
    assert check_device_same("sim", "sim:0")
    assert not check_device_same("sim", "sim:1")
    set_module_tensor_to_device(layer, "weight", "sim")
    assert layer.weight is before
    with torch.sim.device(1):
        assert check_device_same("sim", 1)


def test_the_method_of_a_class_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in SAM 3D: inputs go to where the weights are now, wherever they were dispatched to."""
    model = dispatch_model(layers(), {"": "sim:0"}, force_hooks=True)
    expected, replaced, devices = model(torch.ones(1, 64)), AlignDevicesHook.pre_forward, []

    def pre_forward(self: AlignDevicesHook, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.execution_device = next(module.parameters()).device
        devices.append(self.execution_device)
        return replaced(self, module, *args, **kwargs)

    monkeypatch.setattr(AlignDevicesHook, "pre_forward", pre_forward)
    nn.Module.to(model, "sim:1")
    assert torch.equal(model(torch.ones(1, 64)), expected)
    assert devices == [torch.device("sim:1")] * 5


def test_execution_devices_one_by_one() -> None:
    model, x = layers(2), torch.ones(1, 64)
    expected = model(x)
    for index, layer in enumerate(model):
        attach_execution_device_hook(layer, f"sim:{index}")
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True))
    result = model(x)
    assert [layer.weight.device.index for layer in model] == [0, 1]
    assert result.device.type == "cpu"
    assert torch.allclose(result, expected, **CLOSE)


def test_parameters_are_on_another_device_for_a_while() -> None:
    model: Any = layers(2)
    attach_align_device_hook(model[0], "sim", offload=True)
    expected = [layer.weight.clone().cpu() for layer in model]
    for layer in model:
        with align_module_device(layer, "sim:1"), torch.no_grad():
            assert str(layer.weight.device) == "sim:1"
            layer.weight.mul_(2)
    assert [layer.weight.device.type for layer in model] == ["meta", "cpu"]
    state = get_state_dict_offloaded_model(model)
    assert all(torch.equal(state[f"{i}.weight"], value * 2) for i, value in enumerate(expected))


@pytest.mark.parametrize("how", ["aligned", "by hand"])
def test_data_that_is_written_while_the_weights_are_here_is_kept(how: str, tmp_path: Path) -> None:
    """Torch does not count what is written through ``.data``; in a file it is refused."""
    model: Any = layers(2)
    offload_state_dict(tmp_path, model.state_dict())
    files = OffloadedWeightsLoader(save_folder=tmp_path)
    attach_align_device_hook(model[0], "sim", offload=True)
    attach_align_device_hook(model[1], "sim", offload=True, weights_map=files, module_name="1")
    before = model[0].weight.to("cpu").clone()

    def change(layer: Any, factor: int) -> None:
        hook = vars(layer)["_hf_hook"]
        with align_module_device(layer) if how == "aligned" else nullcontext(hook.pre_forward(layer)):
            layer.weight.data *= factor
        if how == "by hand":
            hook.post_forward(layer, torch.tensor([]))

    change(model[0], 3)
    assert torch.equal(model[0].weight.to("cpu"), 3 * before)
    change(model[1], 1)
    with pytest.raises(OffloadError, match="cannot be changed in place"):
        change(model[1], 3)


@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_a_weight_that_is_cast_while_it_is_here_stays_cast(home: str, tmp_path: Path) -> None:
    """TransformerLens casts models module by module."""
    model: Any = layers(3)
    x = torch.randn(2, model[0].in_features)
    expected = copy.deepcopy(model).bfloat16()(x.bfloat16())
    dispatch_model(model, {"0": "sim", "1": home, "2": home}, offload_dir=tmp_path)
    for layer in model:
        with align_module_device(layer):
            for parameter in layer.parameters():
                parameter.data = parameter.data.bfloat16()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model[2].weight.device.type == "meta"
    assert torch.equal(model(x.bfloat16()), expected)


def test_a_changed_view_of_an_offloaded_weight_is_changed() -> None:
    layer: Any = nn.Embedding(4, 2)
    add_hook_to_module(layer, AlignDevicesHook("sim", offload=True))
    with torch.no_grad():
        layer.weight[1] = 7
        layer.weight.data[2:, 1] = torch.tensor([8.0, 9.0], device="sim")
        result = layer(torch.tensor([1, 2, 3])).cpu()
    assert result[0].tolist() == [7, 7]
    assert result[1:, 1].tolist() == [8, 9]


@pytest.mark.parametrize("kind", ["own", "dict", "loader"])
def test_values_that_a_client_puts_in_are_offloaded_too(kind: str) -> None:
    """``load_state_dict(assign=True)`` and the like leave real tensors on the CPU."""
    model, x = layers(2), torch.ones(1, 64)
    state = model.state_dict()
    maps: dict[str, Any] = {"own": None, "dict": state, "loader": OffloadedWeightsLoader(state_dict=state)}
    attach_align_device_hook(model, "sim", offload=True, weights_map=maps[kind])
    torch.manual_seed(1)
    values = {name: torch.rand(64, 64) for name in state}
    model.load_state_dict(values, assign=True)
    expected = x
    for value in values.values():
        expected = expected @ value.T
    with torch.no_grad():
        for _ in range(2):
            assert torch.allclose(model(x).cpu(), expected, rtol=1e-4)
    assert all(is_offloaded(tensor) for tensor in model.parameters())
    for index, layer in enumerate(model):
        assert torch.equal(vars(layer)["_hf_hook"].weights_map["weight"], values[f"{index}.weight"])


def test_a_weight_as_an_input_comes_to_the_device() -> None:
    """E1: its device says nothing of where outputs are wanted."""
    layer: Any = nn.Linear(4, 4)
    expected = layer.weight @ layer.weight
    add_hook_to_module(layer, AlignDevicesHook("sim", offload=True))
    double = add_hook_to_module(nn.Bilinear(1, 1, 1), AlignDevicesHook("sim", io_same_device=True))
    vars(double)["_old_forward"] = lambda a, b: a @ b
    with torch.no_grad():
        result = double(layer.weight, layer.weight)
    assert result.device.type == "sim"
    assert torch.allclose(result.cpu(), expected, **CLOSE)


def test_whole_models_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[int] = []
    monkeypatch.setattr(torch.sim, "empty_cache", lambda: emptied.append(1))
    first, second, x = layers(1), layers(1), torch.ones(1, 64)
    expected = second(first(x))
    hook = CpuOffload("sim")
    add_hook_to_module(first, hook)
    handle = UserCpuOffloadHook(first, hook)
    add_hook_to_module(second, CpuOffload("sim", prev_module_hook=handle))
    with torch.no_grad():
        for _ in range(2):
            between = first(x)
            assert first[0].weight.device.type == "sim"  # pyright: ignore
            result = second(between)
            second(between)  # nothing is to be moved, so the device is not waited for
            assert [m[0].weight.device.type for m in (first, second)] == ["cpu", "sim"]  # pyright: ignore
    assert torch.allclose(result.cpu(), expected, **CLOSE)
    assert len(emptied) == 2
    UserCpuOffloadHook(second, vars(second)["_hf_hook"]).offload()
    assert second[0].weight.device.type == "cpu"  # pyright: ignore
    assert CpuOffload().execution_device == torch.device("sim")


def test_small_weights_travel_small() -> None:
    model, x = layers(2).to(torch.bfloat16), torch.ones(1, 64, dtype=torch.bfloat16, device="sim")
    attach_align_device_hook(model, "sim", offload=True)
    attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.bfloat16)
    with torch.no_grad(), sim.traffic() as moved:
        model(x)
    assert moved.to_device_bytes == 2 * 64 * 64
    assert moved.to_host == 0


def test_threads_share_what_is_here() -> None:
    """E13."""
    model, x = layers(3), torch.ones(1, 64)
    expected = model(x)
    attach_align_device_hook(model, "sim", offload=True)
    results: list[torch.Tensor] = []

    def run() -> None:
        with torch.no_grad():
            results.extend(model(x).cpu() for _ in range(10))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 30
    assert all(torch.allclose(result, expected, **CLOSE) for result in results)
    assert all(is_offloaded(tensor) for tensor in model.parameters())


@pytest.mark.parametrize("target", ["cpu", "sim:1"])
def test_an_offloaded_model_can_be_moved(target: str) -> None:
    """E6: ``.to()`` brings all of it, and the hooks leave it there."""
    model, x = layers(2), torch.ones(1, 64)
    expected = model(x)
    attach_align_device_hook(model, target, offload=True)
    model.to(target)
    assert {str(tensor.device) for tensor in model.parameters()} == {target}
    with torch.no_grad():
        assert torch.allclose(model(x).cpu(), expected, **CLOSE)
    assert {str(tensor.device) for tensor in model.parameters()} == {target}
