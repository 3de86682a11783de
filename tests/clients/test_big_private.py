"""What compressed-tensors, llmcompressor, auto-round, peft and others do to hooks behind the public calls.

Each test does by hand what one of them does (contract, section 1.3); none of them has to be installed.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import accelerate
import accelerate.big_modeling
from accelerate import cpu_offload, cpu_offload_with_hook, disk_offload, dispatch_model
from accelerate.hooks import (
    AlignDevicesHook,
    CpuOffload,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accelerate.utils import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    find_tied_parameters,
    named_module_tensors,
    offload_state_dict,
    set_module_tensor_to_device,
)

CPU, META = torch.device("cpu"), torch.device("meta")
PLACES = {"first": "cpu", "middle": "disk", "last": "cpu"}


class Net(nn.Module):
    """Three layers of width 4; the middle one has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(torch.relu(self.first(x))))


X = torch.arange(8.0).reshape(2, 4)


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def expected() -> torch.Tensor:
    with torch.no_grad():
        return net()(X)


def same(model: Any) -> bool:
    with torch.no_grad():
        return torch.equal(model(X), expected())


def stored(model: nn.Module, folder: Path) -> dict[str, dict[str, str]]:
    """The weights in one safetensors file, and the index that transformers makes of it."""
    from safetensors.torch import save_file

    file = str(folder / "model.safetensors")
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, file)
    return {
        name: {
            "safetensors_file": file,
            "weight_name": name,
            "dtype": str(value.dtype).removeprefix("torch."),
        }
        for name, value in model.state_dict().items()
    }


def offloaded() -> Net:
    """All weights are in memory, kept by hooks; a model that is dispatched to the CPU has no hooks here."""
    model = net()
    attach_align_device_hook(model, execution_device=CPU, offload=True)
    assert model.first.weight.device == META
    return model


def partly(folder: Path) -> Net:
    """The middle layer lies in a safetensors file; so does transformers dispatch."""
    model, index = net(), stored(net(), folder)
    model.requires_grad_(False)
    for name in ("weight", "bias"):
        set_module_tensor_to_device(model.middle, name, "meta")
    weights = OffloadedWeightsLoader(state_dict={}, save_folder=str(folder), index=index)
    layers = ("first", "middle", "last")
    attach_align_device_hook_on_blocks(
        model, execution_device=dict.fromkeys(layers, CPU), weights_map=weights,
        offload={name: name == "middle" for name in layers}, tied_params_map={},
    )  # fmt: skip
    return model


# ----------------------------------------------------------------------------- what can be seen of a hook


def test_a_hooked_module() -> None:
    """sentence-transformers reads these through ``__dict__``."""
    module = nn.Linear(4, 4)
    before = module.forward
    hook = AlignDevicesHook(io_same_device=True)
    assert add_hook_to_module(module, hook) is module
    assert module.__dict__["_hf_hook"] is hook
    assert module._old_forward == before
    assert "forward" in module.__dict__
    assert module.forward.__doc__ == before.__doc__
    assert inspect.signature(module.forward) == inspect.signature(before)
    remove_hook_from_module(module)
    assert not {"_hf_hook", "_old_forward"} & set(module.__dict__)
    assert module.forward == before


def test_the_attributes_are_the_parameters_of_the_constructor() -> None:
    """transformers and peft make a hook anew from its ``__dict__``, by the name of its class."""
    given: dict[str, Any] = {
        "execution_device": CPU, "offload": True, "io_same_device": True, "weights_map": {},
        "offload_buffers": True, "place_submodules": True, "skip_keys": ["cache"], "tied_params_map": {},
    }  # fmt: skip
    old = AlignDevicesHook(**given)
    kind = getattr(accelerate.hooks, type(old).__name__)
    names = inspect.signature(kind.__init__).parameters
    attributes = {name: value for name, value in old.__dict__.items() if name in names}
    assert attributes.keys() == given.keys()
    new = kind(**attributes)
    assert all(getattr(new, name) is value for name, value in given.items())


def test_state_of_a_hook_after_the_forward() -> None:
    hook = AlignDevicesHook(execution_device=CPU, io_same_device=True)
    assert getattr(hook, "place_submodules", True) is False
    assert hook.input_device is None
    module = add_hook_to_module(nn.Linear(4, 4), hook)
    module(X)
    assert hook.input_device == CPU
    assert not hasattr(hook, "original_devices")  # only where something is offloaded
    assert isinstance(hook.param_original_devices, dict)
    assert isinstance(hook.buffer_original_devices, dict)


def test_the_model_knows_its_map_also_on_one_device() -> None:
    model = dispatch_model(net(), {"": "cpu"})
    assert model.hf_device_map == {"": "cpu"}
    assert same(model)
    forced = dispatch_model(net(), {"": "cpu"}, force_hooks=True)
    assert forced.hf_device_map == {"": "cpu"}
    assert hasattr(forced, "_hf_hook")
    assert same(forced)


def test_the_parameters_that_transformers_looks_for() -> None:
    names = inspect.signature(dispatch_model).parameters
    assert {"skip_keys", "force_hooks", "offload_index", "offload_buffers", "state_dict"} <= names.keys()


def test_the_chain_of_maps_of_a_layer_on_disk(tmp_path: Path) -> None:
    """peft looks up the file of a weight; transformers reads it to save it again."""
    model = partly(tmp_path)
    hook = model.middle._hf_hook
    assert isinstance(hook, AlignDevicesHook)
    assert hook.offload is True
    assert hook.original_devices["weight"] == META
    weights = hook.weights_map
    assert isinstance(weights, PrefixedDataset)
    assert weights.prefix == "middle."
    assert isinstance(weights.dataset, OffloadedWeightsLoader)
    assert weights.dataset.index["middle.weight"]["safetensors_file"] == str(tmp_path / "model.safetensors")
    assert "middle.weight" in weights.dataset.all_keys
    assert isinstance(weights.dataset.state_dict, dict)
    assert torch.equal(weights["weight"], net().middle.weight)
    assert torch.equal(dict(weights.dataset)["middle.bias"], net().middle.bias)
    assert model.middle.weight.device == META
    assert same(model)
    assert model.middle.weight.device == META


def test_an_offload_folder_is_read_by_anybody(tmp_path: Path) -> None:
    """One raw file for each weight, and an index."""
    model = net()
    disk_offload(model, str(tmp_path), execution_device=CPU)
    assert json.loads((tmp_path / "index.json").read_text())["last.weight"] == {
        "dtype": "float32",
        "shape": [4, 4],
    }
    assert (tmp_path / "last.weight.dat").read_bytes() == net().last.weight.detach().numpy().tobytes()
    weights = OffloadedWeightsLoader(save_folder=str(tmp_path))
    assert torch.equal(weights["last.weight"], net().last.weight)
    assert same(model)


def test_weights_that_a_parent_uses(tmp_path: Path) -> None:
    """E1: a parent that computes with the weight of its child. There: numbers from memory that nobody set."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.full((4,), 3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.inner.weight) * self.scale

    model = Around()
    with torch.no_grad():
        right = model(X)
        cpu_offload(model, CPU)
        assert torch.equal(model(X), right)
        remove_hook_from_submodules(model)
        disk_offload(model, str(tmp_path), execution_device=CPU)
        assert torch.equal(model(X), right)


# ------------------------------------------------------------------------------- what is done to a hook


def test_a_hook_of_another_class() -> None:
    """diffusers' hooks derive from a class of its own; ``no_grad`` is read at each forward."""

    class Foreign:
        no_grad = False
        seen: list[str]

        def __init__(self) -> None:
            self.seen = []

        def init_hook(self, module: nn.Module) -> nn.Module:
            self.seen.append("init")
            return module

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            return (args[0] + 1, *args[1:]), kwargs

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output * 2

        def detach_hook(self, module: nn.Module) -> nn.Module:
            self.seen.append("detach")
            return module

    class Asked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if torch.is_grad_enabled() else -x

    module, hook = Asked(), Foreign()
    add_hook_to_module(module, hook)  # pyright: ignore[reportArgumentType]
    assert module(torch.ones(1)).tolist() == [4.0]
    hook.no_grad = True
    assert module(torch.ones(1)).tolist() == [-4.0]
    remove_hook_from_module(module, recurse=True)
    assert hook.seen == ["init", "detach"]
    assert module(torch.ones(1)).tolist() == [1.0]


def test_hooks_are_called_by_hand(tmp_path: Path) -> None:
    """peft and diffusers bring weights in, work on them, and send them away."""
    model = partly(tmp_path)
    hook: Any = model.middle._hf_hook
    hook.pre_forward(model.middle)
    assert model.middle.weight.device == CPU
    assert torch.equal(model.middle.weight, net().middle.weight)
    hook.post_forward(model.middle, torch.tensor([]))
    assert model.middle.weight.device == META
    hook.pre_forward(model.middle)
    hook.post_forward(model.middle, ())
    assert model.middle.weight.device == META
    assert same(model)


def test_a_merge_gives_the_hook_new_weights(tmp_path: Path) -> None:
    """peft: in by the hook, changed, a new map in memory, out by the hook."""
    model = partly(tmp_path)
    layer = model.middle
    hook: Any = layer._hf_hook
    hook.pre_forward(layer)
    layer.weight.data += 1.0
    hook.weights_map = {name: tensor.to("cpu") for name, tensor in named_module_tensors(layer)}
    assert META in hook.original_devices.values()
    offload_state_dict(str(tmp_path / "model-merged"), hook.weights_map)
    hook.post_forward(layer, torch.tensor([]))
    assert layer.weight.device == META
    changed = net()
    changed.middle.weight.data += 1.0
    with torch.no_grad():
        assert torch.equal(model(X), changed(X))
        assert torch.equal(model(X), changed(X))
    assert {file.name for file in (tmp_path / "model-merged").iterdir()} > {"index.json", "weight.dat"}
    assert torch.equal(net().middle.weight, partly_weight(tmp_path))  # the checkpoint is as it was


def partly_weight(folder: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")["middle.weight"]


def test_values_are_replaced_in_the_map(tmp_path: Path) -> None:
    """compressed-tensors: a new value for an offloaded weight goes into the mapping at the bottom."""
    model = net()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    loader = OffloadedWeightsLoader(state_dict=state)
    attach_align_device_hook(model, execution_device=CPU, offload=True, weights_map=loader)
    weights = model.last._hf_hook.weights_map
    assert isinstance(weights.dataset, OffloadedWeightsLoader | dict)
    weights.dataset.state_dict[f"{weights.prefix}bias"] = torch.full((4,), 7.0)
    changed = net()
    changed.last.bias.data.fill_(7.0)
    with torch.no_grad():
        assert torch.equal(model(X), changed(X))
    weights.dataset.state_dict[f"{weights.prefix}bias"].fill_(9.0)
    changed.last.bias.data.fill_(9.0)
    with torch.no_grad():
        assert torch.equal(model(X), changed(X))


def test_a_parameter_is_added_to_an_offloaded_layer() -> None:
    """compressed-tensors: registered, told to the hook's three records, and put on meta."""
    model = net()
    state: dict[str, torch.Tensor] = dict(model.state_dict())
    loader = OffloadedWeightsLoader(state_dict=state)
    attach_align_device_hook(
        model, execution_device=CPU, offload=True, weights_map=loader, tied_params_map={}
    )
    layer: Any = model.last
    hook: Any = layer._hf_hook
    layer.register_parameter("scale", nn.Parameter(torch.full((4,), 2.0)))
    hook.original_devices["scale"] = CPU
    hook.weights_map.dataset.state_dict["last.scale"] = layer.scale.data
    hook.weights_map.dataset.all_keys.append("last.scale")
    if hook.tied_params_map is not None:
        hook.tied_params_map[hook.weights_map["scale"].data_ptr()] = {}
    set_module_tensor_to_device(layer, "scale", "meta")
    inner = layer._old_forward
    layer._old_forward = lambda x: inner(x) * layer.scale
    with torch.no_grad():
        assert torch.equal(model(X), expected() * 2)
    assert layer.scale.device == META
    del hook.original_devices["scale"]
    del hook.weights_map.dataset.state_dict["last.scale"]
    hook.weights_map.dataset.all_keys.remove("last.scale")
    del layer.scale
    layer._old_forward = inner
    assert same(model)


def test_a_hook_is_let_go_without_loading_again() -> None:
    """compressed-tensors sets ``offload`` to False before it removes a hook: weights stay where they are."""
    model = offloaded()
    hook: Any = model.first._hf_hook
    hook.pre_forward(model.first)
    model.first.weight.data += 1.0
    hook.offload = False
    remove_hook_from_module(model.first)
    assert model.first.weight.device == CPU
    assert torch.equal(model.first.weight, net().first.weight + 1.0)


@contextmanager
def quiet(devices: Mapping[str, torch.device]) -> Generator[None]:
    """compressed-tensors puts hooks on modules whose weights are offloaded already."""
    original = AlignDevicesHook.init_hook

    def init(self: AlignDevicesHook, module: nn.Module) -> nn.Module:
        self.original_devices = dict(devices)
        return module

    AlignDevicesHook.init_hook = init
    try:
        yield
    finally:
        AlignDevicesHook.init_hook = original


def test_a_hook_is_put_on_without_being_begun() -> None:
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        right = layer(X)
    state = {name: value.detach().clone() for name, value in layer.named_parameters()}
    for name in state:
        setattr(layer, name, nn.Parameter(state[name].to("meta"), requires_grad=False))
    weights = PrefixedDataset(
        OffloadedWeightsLoader(state_dict={f"x.{n}": t for n, t in state.items()}), "x."
    )
    hook = AlignDevicesHook(execution_device=CPU, offload=True, weights_map=weights, tied_params_map={})
    with quiet(dict.fromkeys(state, CPU)):
        add_hook_to_module(layer, hook)
    assert hook.original_devices == dict.fromkeys(state, CPU)
    assert layer.weight.device == META
    assert torch.equal(layer(X), right)
    assert layer.weight.device == META
    remove_hook_from_module(layer)
    assert layer.weight.device == CPU
    assert torch.equal(layer(X), right)


def test_the_same_hook_moves_to_another_module() -> None:
    """transformers, when it replaces an embedding."""
    old = nn.Embedding(8, 4)
    hook = AlignDevicesHook(execution_device=CPU, io_same_device=True)
    add_hook_to_module(old, hook)
    new = nn.Embedding(6, 4)
    new.weight.data = old.weight.data[:6].clone()
    add_hook_to_module(new, old._hf_hook)
    assert new._hf_hook is hook
    ids = torch.tensor([1, 5])
    assert torch.equal(new(ids), old(ids))


def test_settings_of_a_hook_change_in_place() -> None:
    """transformers asks an encoder's hook for outputs where inputs were; auto-round moves execution.

    There: "cpu:0" ends in a TypeError.
    """
    model = offloaded()
    model.first._hf_hook.io_same_device = True
    model.first._hf_hook.execution_device = torch.device("cpu", 0)
    assert same(model)
    assert model.first._hf_hook.input_device == CPU


def test_hooks_are_set_aside_and_put_back() -> None:
    """compressed-tensors takes all hooks off for a while."""
    model = offloaded()
    hooks = {module: module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook")}
    for module in hooks:
        remove_hook_from_module(module)
    assert {p.device for p in model.parameters()} == {CPU}
    assert same(model)
    for module, hook in hooks.items():
        add_hook_to_module(module, hook)
    assert same(model)
    assert {p.device for p in model.parameters()} == {META}


def test_several_hooks_on_one_module() -> None:
    """diffusers looks at the first of ``hooks``."""
    model = offloaded()
    sequence = model.first._hf_hook
    add_hook_to_module(model.first, AlignDevicesHook(io_same_device=True), append=True)
    assert isinstance(model.first._hf_hook, SequentialHook)
    assert isinstance(model.first._hf_hook.hooks, tuple)
    assert isinstance(model.first._hf_hook.hooks[0], type(sequence))
    assert same(model)


def test_a_chain_of_models() -> None:
    """diffusers and transformers' Bark: the hook of a model sends the one before it away."""
    one, two = net(), net()
    _, first = cpu_offload_with_hook(one, CPU)
    _, second = cpu_offload_with_hook(two, CPU, prev_module_hook=first)
    assert isinstance(second.hook, CpuOffload)
    assert second.model is two
    assert second.hook.prev_module_hook is first
    assert second.hook.execution_device == CPU
    assert same(one)
    assert same(two)
    second.offload()
    second.remove()
    assert not hasattr(two, "_hf_hook")


def test_hooks_are_taken_off_to_the_memory_they_came_from(tmp_path: Path) -> None:
    """What was in memory comes back; peft tells what was on disk by its being on meta still."""
    model = net()
    loader = OffloadedWeightsLoader(state_dict=dict(model.state_dict()))
    attach_align_device_hook(model, execution_device=CPU, offload=True, weights_map=loader)
    assert model.last.weight.device == META
    remove_hook_from_submodules(model)
    assert {p.device for p in model.parameters()} == {CPU}
    assert same(model)
    model = partly(tmp_path)
    remove_hook_from_submodules(model)
    assert model.first.weight.device == CPU
    assert model.middle.weight.device == META
    again = dispatch_model(model, PLACES, offload_dir=str(tmp_path), offload_index=stored(net(), tmp_path))
    assert again.hf_device_map == PLACES
    assert same(again)


def test_a_copy_of_a_hooked_module_gets_a_hook_of_its_own(tmp_path: Path) -> None:
    """peft, for a module that is trained whole."""
    model = partly(tmp_path)
    twin = copy.deepcopy(model.middle)
    old = twin._hf_hook
    names = inspect.signature(AlignDevicesHook.__init__).parameters
    new = AlignDevicesHook(**{name: value for name, value in old.__dict__.items() if name in names})
    remove_hook_from_module(twin)
    add_hook_to_module(twin, new)
    with torch.no_grad():
        assert torch.equal(twin(X), net().middle(X))
    assert same(model)


def test_the_check_of_the_map_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers, for maps that leave parameters out on purpose."""
    places = {"first": "cpu", "middle": "cpu"}
    with pytest.raises(ValueError, match=r"last\.weight"):
        dispatch_model(net(), places)
    calls: list[Any] = []
    monkeypatch.setattr(accelerate.big_modeling, "check_device_map", lambda *a, **k: calls.append(a))
    model = dispatch_model(net(), places)
    assert len(calls) == 1
    assert same(model)


def test_the_function_that_attaches_hooks_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ms-swift, by one that does nothing: the weights stay where they were loaded."""
    places, calls = {"first": "cpu", "middle": "cpu", "last": "disk"}, list[dict[str, Any]]()
    with monkeypatch.context() as patch:
        patch.setattr(
            accelerate.big_modeling,
            "attach_align_device_hook_on_blocks",
            lambda model, **options: calls.append(options),
        )
        model = dispatch_model(net(), places, main_device="cpu", offload_dir=tmp_path)
    assert [call["offload"] for call in calls] == [{"first": False, "middle": False, "last": True}]
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    assert model.hf_device_map == places
    assert same(model)
    assert hasattr(dispatch_model(net(), places, main_device="cpu", offload_dir=tmp_path), "_hf_hook")


def test_all_weights_of_an_offloaded_model(tmp_path: Path) -> None:
    """llmcompressor takes this name from ``accelerate.accelerator``."""
    from accelerate.accelerator import get_state_dict_offloaded_model

    state = get_state_dict_offloaded_model(partly(tmp_path))
    assert state.keys() == net().state_dict().keys()
    for name, value in net().state_dict().items():
        assert state[name].device == CPU
        assert torch.equal(state[name], value)


def test_a_layer_is_replaced_after_dispatch(tmp_path: Path) -> None:
    """E7: auto-round replaces a layer by one of its own, and moves weights by hand."""
    model = partly(tmp_path)
    layer = nn.BatchNorm1d(4).eval()
    layer.load_state_dict(net().middle.state_dict())
    model.middle = layer
    assert same(model)
    cpu_offload(model.last, CPU)
    set_module_tensor_to_device(model.first, "weight", "cpu", value=torch.zeros(4, 4))
    assert model.first.weight.abs().sum() == 0
    assert find_tied_parameters(model) == []


def test_tied_weights_are_read_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.words(ids))

    model, ids = Tied(), torch.tensor([3, 5])
    with torch.no_grad():
        right = model(ids)
        model = dispatch_model(model, {"words": "disk", "head": "disk"}, offload_dir=str(tmp_path))
        assert torch.equal(model(ids), right)
        assert torch.equal(model(ids), right)
    assert model.head.weight is model.words.weight
