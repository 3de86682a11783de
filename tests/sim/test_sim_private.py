"""What other libraries do behind the public calls to a model that is dispatched to an accelerator.

As in ``tests/clients/test_big_private.py`` for hooks that compute on the CPU; here weights really move.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from accelerate import cpu_offload, cpu_offload_with_hook, disk_offload, dispatch_model
from accelerate.hooks import (
    AlignDevicesHook,
    CpuOffload,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accelerate.utils import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    named_module_tensors,
    set_module_tensor_to_device,
)

CPU, META = torch.device("cpu"), torch.device("meta")
SIM: Any = "sim:0"  # a string: this file is also read by processes that do not have the device
PLACES = {"first": 0, "middle": "disk", "last": "cpu"}


class Net(nn.Module):
    """Three layers of width 4; the middle one has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(torch.relu(self.first(x))))


X = torch.arange(8.0).reshape(2, 4)


@pytest.fixture(autouse=True)
def _empty_devices() -> Generator[None]:
    yield
    gc.collect()
    assert [torch.sim.memory_allocated(device) for device in range(2)] == [0, 0]


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


def out(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(X.to("sim")).cpu()


def same(model: Any, expected: nn.Module | None = None) -> bool:
    return torch.allclose(out(model), (expected or net())(X))


def stored(folder: Path) -> dict[str, dict[str, str]]:
    """The weights in one safetensors file, and the index that transformers makes of it."""
    state, file = net().state_dict(), str(folder / "model.safetensors")
    save_file(state, file)
    return {
        name: {
            "safetensors_file": file,
            "weight_name": name,
            "dtype": str(value.dtype).removeprefix("torch."),
        }
        for name, value in state.items()
    }


def dispatched(folder: Path) -> Any:
    """On a device, in a safetensors file, and in memory; as transformers leaves it."""
    model, index = net(), stored(folder)
    for name in ("weight", "bias"):
        set_module_tensor_to_device(model.middle, name, "meta")
    return dispatch_model(model, PLACES, offload_dir=str(folder), offload_index=index)


def test_what_is_seen_of_a_dispatched_model(tmp_path: Path) -> None:
    model = dispatched(tmp_path)
    assert model.hf_device_map == PLACES
    disk, host = model.middle._hf_hook, model.last._hf_hook
    for hook in (disk, host):
        assert isinstance(hook, AlignDevicesHook)
        assert hook.offload is True
        assert str(hook.execution_device) in ("0", SIM)
        assert isinstance(hook.weights_map, PrefixedDataset)
        assert isinstance(hook.weights_map.dataset, OffloadedWeightsLoader)
    assert disk.original_devices["weight"] == META
    assert host.original_devices["weight"] == CPU
    loader = disk.weights_map.dataset
    assert loader.index["middle.weight"]["safetensors_file"] == str(tmp_path / "model.safetensors")
    assert {"middle.weight", "last.bias"} <= set(loader.all_keys)
    assert torch.equal(loader.state_dict["last.bias"], net().last.bias)
    assert torch.equal(disk.weights_map["weight"].cpu(), net().middle.weight)
    assert torch.equal(dict(loader)["middle.bias"].cpu(), net().middle.bias)
    assert (model.middle.weight.device, model.last.weight.device) == (META, META)
    assert same(model)
    assert (model.middle.weight.device, model.last.weight.device) == (META, META)


def test_a_dispatched_model_does_not_move(tmp_path: Path) -> None:
    model = dispatched(tmp_path)
    with pytest.raises(RuntimeError, match="the model cannot be moved"):
        model.to("cpu")
    remove_hook_from_submodules(model)
    assert not {"to", "cuda", "forward"} & set(model.__dict__)
    for module in model.modules():
        assert not hasattr(module, "_hf_hook")
        assert not hasattr(module, "_old_forward")


def test_a_model_on_one_device() -> None:
    model = dispatch_model(net(), {"": 0})
    assert model.hf_device_map == {"": 0}
    assert same(model)
    forced = dispatch_model(net(), {"": "sim:1"}, force_hooks=True)
    assert forced._hf_hook.execution_device in (1, "sim:1", torch.device("sim:1"))
    assert same(forced)  # the input is brought there, and the output back


@pytest.mark.parametrize("layer", ["middle", "last"])
def test_hooks_are_called_by_hand(layer: str, tmp_path: Path) -> None:
    """diffusers, transformers and peft bring weights in, use them, and send them away."""
    model = dispatched(tmp_path)
    module = getattr(model, layer)
    hook = module._hf_hook
    hook.pre_forward(module)
    assert module.weight.device.type == "sim"
    assert torch.equal(module.weight.cpu(), getattr(net(), layer).weight)
    hook.post_forward(module, torch.tensor([]))
    assert module.weight.device == META
    hook.pre_forward(module)
    hook.post_forward(module, ())
    assert module.weight.device == META
    assert same(model)


@pytest.mark.parametrize("layer", ["middle", "last"])
def test_a_merge_gives_the_hook_new_weights(layer: str, tmp_path: Path) -> None:
    """peft: in by the hook, changed, a new map in memory, out by the hook."""
    model, expected = dispatched(tmp_path), net()
    module = getattr(model, layer)
    assert same(model)
    hook = module._hf_hook
    hook.pre_forward(module)
    module.weight.data += 1.0
    hook.weights_map = {name: tensor.to("cpu") for name, tensor in named_module_tensors(module)}
    hook.post_forward(module, torch.tensor([]))
    assert module.weight.device == META
    getattr(expected, layer).weight.data += 1.0
    assert same(model, expected)
    assert same(model, expected)


def bottom(hook: Any) -> dict[str, torch.Tensor]:
    """The dict of full names in which compressed-tensors finds the values."""
    dataset = hook.weights_map.dataset
    assert isinstance(dataset, OffloadedWeightsLoader | dict)
    return dataset if isinstance(dataset, dict) else dataset.state_dict


def test_values_are_replaced_in_the_map() -> None:
    """compressed-tensors: another value for an offloaded weight, at the bottom of the chain of maps."""
    model, expected = cpu_offload(net(), SIM), net()
    assert same(model)
    values = bottom(model.last._hf_hook)
    values["last.bias"] = torch.full((4,), 7.0)
    expected.last.bias.data.fill_(7.0)
    assert same(model, expected)
    values["last.bias"].fill_(9.0)
    expected.last.bias.data.fill_(9.0)
    assert same(model, expected)


@pytest.mark.parametrize("kind", ["new", "cast", "transposed"])
def test_values_of_an_entry_of_the_map_are_assigned(kind: str) -> None:
    """AMD Quark: ``weights_map[name].data`` is set to the quantized values of a layer."""
    model, expected = cpu_offload(net(), SIM), net()
    assert same(model)
    weight: Any = model.last._hf_hook.weights_map["weight"]
    weight.data = {
        "new": torch.eye(4),
        "cast": torch.eye(4, dtype=torch.float64),
        "transposed": weight.data.t(),
    }[kind]
    expected.last.weight.data = weight.data.float().clone()
    assert same(model, expected)
    assert torch.equal(model.last._hf_hook.weights_map["weight"], expected.last.weight)
    weight.data = torch.zeros(1, 4)
    with pytest.raises(RuntimeError, match=r"last\.weight have the shape \[1, 4\]"):
        out(model)
    weight.data = torch.zeros(4, 4)
    assert torch.equal(out(model), net().last.bias.expand(2, 4))


def test_values_of_another_dtype_are_put_in_the_map() -> None:
    """They are copied in the dtype of the weight, as they are when the layer runs."""
    model, expected = dispatch_model(net(), {"first": 0, "middle": 0, "last": "cpu"}), net()
    hook: Any = model.last._hf_hook
    assert hook.tied_params_map == {}  # compressed-tensors expects one
    value = torch.full((4, 4), 1 / 3, dtype=torch.float16)
    bottom(hook)["last.weight"] = value
    expected.last.weight.data.copy_(value)
    assert same(model, expected)
    with pytest.raises(RuntimeError, match=r"cannot become torch\.float32 of shape \[4, 2\]"):
        bottom(hook)["last.weight"] = torch.zeros(4, 2)
    with pytest.raises(RuntimeError, match=r"cannot become torch\.int8"):
        bottom(hook)["last.weight"] = torch.zeros(4, 4, dtype=torch.int8)
    assert same(model, expected)


def test_a_value_is_changed_while_the_layer_is_here() -> None:
    """compressed-tensors, when it calibrates: in the forward of a layer, in place."""
    model, expected = cpu_offload(net(), SIM), net()

    def calibrate(module: Any, _: Any) -> None:
        module.bias.data.add_(1.0)

    handle = model.last.register_forward_pre_hook(calibrate)
    out(model)
    handle.remove()
    expected.last.bias.data.add_(1.0)
    assert same(model, expected)


def test_a_hook_is_let_go_without_loading_again() -> None:
    """compressed-tensors sets ``offload`` to False before it removes a hook: weights stay where they are."""
    model, expected = cpu_offload(net(), SIM), net()
    assert same(model)
    hook: Any = model.last._hf_hook
    hook.pre_forward(model.last)
    model.last.weight.data += 1.0
    hook.offload = False
    remove_hook_from_module(model.last)
    assert model.last.weight.device.type == "sim"
    expected.last.weight.data += 1.0
    assert torch.equal(model.last.weight.cpu(), expected.last.weight)
    assert same(model, expected)


@pytest.mark.parametrize("layer", ["middle", "last"])
def test_a_hook_is_let_go_while_its_weights_are_elsewhere(layer: str, tmp_path: Path) -> None:
    model = dispatched(tmp_path)
    module = getattr(model, layer)
    module._hf_hook.offload = False
    remove_hook_from_module(module)
    assert module.weight.device == META
    assert same(model)


class Counting(AlignDevicesHook):
    """Counts the forwards of a module."""

    calls = 0

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        type(self).calls += 1
        return args, kwargs


@pytest.mark.parametrize("homes", [{"": "cpu"}, {"": 0}, {"0": 0, "1": 1}])
@pytest.mark.parametrize("how", ["old forward", "hook", "method"])
def test_what_clients_set_inside_of_a_block_is_called(how: str, homes: Any, monkeypatch: Any) -> None:
    """The forward, the hook or its methods of a module that its block brings to the device."""
    monkeypatch.setattr(Counting, "calls", 0)
    model = nn.Sequential(nn.Sequential(net()), nn.Linear(4, 4)).eval().requires_grad_(False)
    expected = model[1](net()(X) * 2) if how == "old forward" else model(X)
    dispatch_model(model, homes, main_device=SIM, force_hooks=True)
    layer: Any = model[0][0].last
    counting, hook, old = Counting(), layer._hf_hook, layer._old_forward
    # DeepCompressor and TensorRT-Edge-LLM know a dispatched layer by these.
    assert isinstance(layer.forward, functools.partial)
    assert layer.forward.__wrapped__ is old
    assert inspect.signature(layer.forward) == inspect.signature(net().last.forward)
    if how == "old forward":
        layer._old_forward = lambda x: old(counting.pre_forward(layer, x)[0][0]) * 2
    elif how == "hook":
        layer._hf_hook = SequentialHook(hook, counting)
    else:
        before = hook.pre_forward
        hook.pre_forward = lambda module, x: before(module, *counting.pre_forward(module, x)[0])
    assert torch.allclose(out(model), expected)
    assert Counting.calls == 1


@pytest.mark.parametrize(
    "places", [{"first": 0, "middle": 0, "last": 1}, {"first": 0, "middle": 1, "last": "cpu"}]
)
@pytest.mark.parametrize("how", ["removed", "detached"])
def test_hooks_put_back_bring_inputs_and_weights(how: str, places: Any) -> None:
    """compressed-tensors removes hooks and adds them again; msmodelslim detaches and initializes them."""
    model = dispatch_model(net(), places, main_device=SIM)
    hooks: dict[nn.Module, Any] = {
        module: module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook")
    }
    for module, hook in hooks.items():
        if how == "removed":
            remove_hook_from_module(module)
        else:
            hook.detach_hook(module)
    for module, hook in hooks.items():
        if how == "removed":
            add_hook_to_module(module, hook)
        else:
            hook.init_hook(module)
    with torch.no_grad():
        for x in (X, X.to(SIM)):
            assert torch.allclose(model(x).cpu(), net()(X))
            assert model(x).device == x.device


@pytest.mark.parametrize("where", ["host", "disk"])
def test_hooks_are_set_aside_and_put_back(where: str, tmp_path: Path) -> None:
    """compressed-tensors takes all hooks off for a while."""
    model = net()
    if where == "host":
        cpu_offload(model, SIM)
    else:
        disk_offload(model, str(tmp_path), execution_device=SIM)
    assert same(model)
    hooks = {module: module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook")}
    for module in hooks:
        remove_hook_from_module(module)
    assert {p.device for p in model.parameters()} <= {CPU, META}
    for module, hook in hooks.items():
        add_hook_to_module(module, hook)
    assert same(model)


def test_hooks_are_taken_off_and_the_model_is_dispatched_otherwise(tmp_path: Path) -> None:
    """E7; peft does so when it loads an adapter."""
    model = dispatched(tmp_path)
    assert same(model)
    remove_hook_from_submodules(model)
    assert model.last.weight.device == CPU
    places = {"first": "disk", "middle": 1, "last": 0}
    again = dispatch_model(model, places, offload_dir=str(tmp_path), offload_index=stored(tmp_path))
    assert same(again)
    assert again.middle.weight.device == torch.device("sim:1")


def test_the_same_hook_moves_to_another_module(tmp_path: Path) -> None:
    """transformers, when it resizes an embedding."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(8, 4), nn.Linear(4, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.words(ids))

    torch.manual_seed(0)
    model, ids = Words().requires_grad_(False), torch.tensor([1, 5])
    right = model(ids)
    cpu_offload(model, SIM)
    assert torch.allclose(model(ids.to("sim")).cpu(), right)
    old = model.words
    new = nn.Embedding(6, 4).requires_grad_(False)
    new.weight.data = old.weight.data[:6].cpu().clone()
    add_hook_to_module(new, old._hf_hook)
    model.words = new
    assert torch.allclose(model(ids.to("sim")).cpu(), right)
    assert torch.allclose(model(ids.to("sim")).cpu(), right)


def test_a_copy_of_a_hooked_module_gets_a_hook_of_its_own(tmp_path: Path) -> None:
    """peft, for a module that is trained whole: the class by its name, the attributes by their names."""
    import accelerate.hooks

    model = dispatched(tmp_path)
    for layer in (model.middle, model.last):
        twin = copy.deepcopy(layer)
        old = twin._hf_hook
        kind = getattr(accelerate.hooks, type(old).__name__)
        names = inspect.signature(kind.__init__).parameters
        new = kind(**{name: value for name, value in old.__dict__.items() if name in names})
        remove_hook_from_module(twin)
        add_hook_to_module(twin, new)
        with torch.no_grad():
            assert torch.allclose(twin(X.to("sim")).cpu(), net().get_submodule(_name(model, layer))(X))
    assert same(model)


def _name(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, each in model.named_modules() if each is module)


def test_a_hook_of_another_class_beside_ours(tmp_path: Path) -> None:
    class Counting:
        no_grad = False
        count = 0

        def init_hook(self, module: nn.Module) -> nn.Module:
            return module

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            self.count += 1
            return args, kwargs

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output

        def detach_hook(self, module: nn.Module) -> nn.Module:
            return module

    model, hook = dispatched(tmp_path), Counting()
    add_hook_to_module(model.last, hook, append=True)  # pyright: ignore[reportArgumentType]
    assert isinstance(model.last._hf_hook, SequentialHook)
    assert isinstance(model.last._hf_hook.hooks[0], AlignDevicesHook)
    assert same(model)
    assert hook.count == 1


def test_a_layer_is_replaced_after_dispatch(tmp_path: Path) -> None:
    """E7: auto-round replaces a layer by one of its own, in memory."""
    model = dispatched(tmp_path)
    assert same(model)
    for name in ("middle", "last"):
        layer = copy.deepcopy(getattr(net(), name))
        setattr(model, name, layer)
        assert same(model), name


def test_a_model_computes_elsewhere_from_now_on() -> None:
    """auto-round assigns ``execution_device``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    right = model(X)
    cpu_offload(model, SIM)
    assert torch.allclose(out(model), right)
    for module in model.modules():
        if hasattr(module, "_hf_hook"):
            module._hf_hook.execution_device = torch.device("sim:1")
    assert torch.allclose(model(X.to("sim:1")).cpu(), right)


def test_a_parameter_is_added_to_an_offloaded_layer() -> None:
    """compressed-tensors: registered, told to the records of the hook, and put on meta."""

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * getattr(self, "scale", 1.0)

    model = net()
    model.last.__class__ = Scaled
    cpu_offload(model, SIM)
    assert same(model)
    layer: Any = model.last
    hook = layer._hf_hook
    layer.register_parameter("scale", nn.Parameter(torch.full((4,), 2.0), requires_grad=False))
    hook.original_devices["scale"] = CPU
    bottom(hook)["last.scale"] = layer.scale.data
    if isinstance(hook.weights_map.dataset, OffloadedWeightsLoader):
        hook.weights_map.dataset.all_keys.append("last.scale")
    if hook.tied_params_map is not None:
        hook.tied_params_map[hook.weights_map["scale"].data_ptr()] = {}
    set_module_tensor_to_device(layer, "scale", "meta")
    assert torch.allclose(out(model), net()(X) * 2)
    assert layer.scale.device == META


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_blocks_are_checkpointed(reentrant: bool) -> None:
    """Activations inside a block are not kept for backward, and the weights are not either."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(4)
            )

        def forward(self, x: torch.Tensor, again: bool) -> torch.Tensor:
            for part in self.parts:
                x = x + (checkpoint(part, x, use_reentrant=reentrant) if again else part(x))
            return x

    torch.manual_seed(0)
    plain = Deep().requires_grad_(False)
    model, seen, kept = cpu_offload(copy.deepcopy(plain), SIM), [], []
    for one, device, again in ((plain, "cpu", False), (model, "sim", False), (model, "sim", True)):
        x = torch.ones(128, 8, device=device, requires_grad=True)
        y = one(x, again).sum()
        kept.append(torch.sim.memory_allocated(0))
        y.backward()
        assert x.grad is not None
        seen.append(x.grad.cpu())
        del x, y
    assert kept[2] < kept[1] / 3
    assert torch.allclose(seen[1], seen[0])
    assert torch.allclose(seen[2], seen[0])


def test_a_chain_of_models() -> None:
    """diffusers and transformers' Bark: the hook of a model sends the one before it away."""
    one, two = net(), net()
    _, first = cpu_offload_with_hook(one, SIM)
    _, second = cpu_offload_with_hook(two, SIM, prev_module_hook=first)
    assert isinstance(second.hook, CpuOffload)
    assert second.hook.prev_module_hook is first
    assert same(one)
    assert one.first.weight.device.type == "sim"
    assert same(two)
    assert one.first.weight.device == CPU
    assert two.first.weight.device.type == "sim"
    second.offload()
    assert two.first.weight.device == CPU
    second.remove()
    assert not hasattr(two, "_hf_hook")


def test_all_weights_of_an_offloaded_model(tmp_path: Path) -> None:
    """llmcompressor takes this name from ``accelerate.accelerator``."""
    from accelerate.accelerator import get_state_dict_offloaded_model

    state = get_state_dict_offloaded_model(dispatched(tmp_path))
    assert state.keys() == net().state_dict().keys()
    for name, value in net().state_dict().items():
        assert state[name].device == CPU
        assert torch.equal(state[name], value)
