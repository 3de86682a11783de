"""Weights brought in for a forward and dropped after it, on the CPU (TRAPS E1, E6, E7, E12, E13)."""

from __future__ import annotations

import copy
import inspect
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import accelerate
from accelerate.hooks import (
    AlignDevicesHook,
    CpuOffload,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accelerate.utils import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    align_module_device,
    offload_state_dict,
    set_module_tensor_to_device,
)
from tests.support.offloaded import is_offloaded, offload_fails

CPU = torch.device("cpu")
META = torch.device("meta")


class Net(nn.Module):
    """Uses weights in all the ways that hooks on modules do not see."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.inner = nn.Linear(8, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.randn(8))
        self.register_buffer("table", torch.randn(8))
        self.register_buffer("angles", torch.randn(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x) * self.scale + self.table + self.angles
        h = F.linear(h, self.inner.weight, self.inner.bias)  # not the child's own forward
        h = F.conv1d(h.mT, self.conv.weight, self.conv.bias, padding=1)
        return self.norm(h).mT @ self.embed.weight.T  # the embedding as head


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


X = torch.tensor([[1, 2, 3], [4, 5, 9]])


def offload(net: nn.Module, **options: Any) -> None:
    attach_align_device_hook_on_blocks(net, execution_device="cpu", offload=True, **options)


def devices_of(module: nn.Module) -> set[str]:
    return {tensor.device.type for tensor in module.parameters()}


def linear(*, device: Any = None, offload: bool = True, **options: Any) -> Any:
    hook = AlignDevicesHook("cpu", offload=offload, **options)
    return add_hook_to_module(nn.Linear(2, 2, device=device), hook)


def hook_of(module: nn.Module) -> Any:
    return vars(module)["_hf_hook"]


def values_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


# -------------------------------------------------------------------------------- right results


@pytest.mark.parametrize("device", ["cpu", "cpu:0", CPU])
@pytest.mark.parametrize("buffers", [False, True])
def test_an_offloaded_model_gives_what_it_gave(net: Net, device: Any, buffers: bool) -> None:
    """E1; on 1.15 the CPU as the executing device fails."""
    expected = net(X)
    attach_align_device_hook_on_blocks(net, execution_device=device, offload=True, offload_buffers=buffers)
    for _ in range(2):
        assert devices_of(net) == {"meta"}
        assert torch.equal(net(X), expected)
    assert net.table.device.type == ("meta" if buffers else "cpu")
    assert net.angles.device.type == "cpu"


@pytest.mark.parametrize("kind", ["folder", "checkpoint"])
def test_a_model_in_files_gives_what_it_gave(net: Net, tmp_path: Path, kind: str) -> None:
    """E1: from an offload folder, and from a checkpoint that is mapped where it is."""
    expected = net(X)
    if kind == "folder":
        offload_state_dict(tmp_path, net.state_dict())
        weights = OffloadedWeightsLoader(save_folder=tmp_path)
    else:
        file = tmp_path / "model.safetensors"
        save_file(net.state_dict(), file)
        weights = OffloadedWeightsLoader(index={n: {"safetensors_file": str(file)} for n in net.state_dict()})
    angles = net.angles
    net.to("meta")
    net.angles = angles
    offload(net, weights_map=weights, offload_buffers=True)
    assert torch.equal(net(X), expected)
    assert devices_of(net) == {"meta"}
    assert hook_of(net.inner).original_devices == {"weight": META, "bias": META}
    assert all(torch.equal(value, weights[name]) for name, value in net.state_dict().items())


def test_a_class_whose_weights_come_in_together(net: Net) -> None:
    expected = net(X)
    seen: list[set[str]] = []
    net.norm.register_forward_hook(lambda *_: seen.append(devices_of(net)))
    offload(net, preload_module_classes=["Net"])
    assert [name for name, module in net.named_modules() if hasattr(module, "_hf_hook")] == [""]
    assert torch.equal(net(X), expected)
    assert seen == [{"cpu"}]
    assert devices_of(net) == {"meta"}


def test_a_compiled_model_gives_what_it_gave(net: Net) -> None:
    """E1, E8: the compiler is told to leave what moves weights alone."""
    expected = net(X)
    offload(net)
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="aot_eager")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        # torch says so of this one patch release of Python, for any model.
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)
        for _ in range(2):
            torch.testing.assert_close(compiled(X), expected)
    assert devices_of(net) == {"meta"}


def test_blocks_that_come_in_whole_are_compiled_whole() -> None:
    """E8: at most one graph break for each block."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    torch._dynamo.reset()
    model = nn.Sequential(Block(), Block(), Block())
    expected = model(torch.ones(1, 4))
    attach_align_device_hook(model, "cpu", offload=True, preload_module_classes=["Block"])
    graphs: list[int] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(len([node for node in graph.graph.nodes if node.op.startswith("call")]))
        return graph.forward

    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend=count)(torch.ones(1, 4)), expected)
    assert sum(graphs) in (4, 12)  # one graph serves the three of them, or each has its own
    assert len(graphs) in (1, 3)


def test_gradients_reach_the_inputs(net: Net) -> None:
    layer = nn.Linear(2, 2)
    x = torch.ones(1, 2, requires_grad=True)
    layer(x).sum().backward()
    expected, x.grad = x.grad, None
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True))
    layer(x).sum().backward()
    assert torch.equal(x.grad, expected)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_forward_in_any_mode_is_followed_by_one_in_any_other(net: Net, mode: Any) -> None:
    expected = net(X)
    offload(net)
    for each in (mode, torch.enable_grad, torch.inference_mode):
        with each():
            torch.testing.assert_close(net(X), expected, check_layout=False)


# -------------------------------------------------------------------------------- what clients see


def test_attributes_are_the_constructors() -> None:
    """Clients rebuild a hook from its ``__dict__``, filtered by the names of the constructor's parameters."""
    given: dict[str, Any] = {
        "execution_device": "cpu",
        "offload": True,
        "io_same_device": True,
        "weights_map": {"weight": torch.ones(2, 2), "bias": torch.ones(2)},
        "offload_buffers": True,
        "place_submodules": True,
        "skip_keys": ["cache"],
        "tied_params_map": {1: {}},
    }
    hook = AlignDevicesHook(**given)
    assert {name: value for name, value in vars(hook).items() if name in given} == given
    known = inspect.signature(AlignDevicesHook.__init__).parameters
    again = getattr(accelerate.hooks, type(hook).__name__)(
        **{k: v for k, v in vars(hook).items() if k in known}
    )
    assert {name: getattr(again, name) for name in given} == given
    assert (hook.input_device, hook.param_original_devices, hook.buffer_original_devices) == (None, {}, {})
    assert hook.tied_params_names == set()
    assert not hasattr(hook, "original_devices")
    assert not hasattr(hook_of(linear(offload=False)), "original_devices")


def test_an_offloaded_module_tells_where_its_weights_are() -> None:
    layer = linear()
    assert hook_of(layer).original_devices == {"weight": CPU, "bias": CPU}
    assert torch.equal(hook_of(layer).weights_map["weight"], layer.weight)


def test_hooks_called_by_hand() -> None:
    """transformers, peft and diffusers do so, without inputs and without the module's forward."""
    layer = linear()
    hook = hook_of(layer)
    assert hook.pre_forward(layer) == ((), {})
    assert layer.weight.device == CPU
    assert hook.post_forward(layer, ()) == ()
    assert layer.weight.device == META
    hook.pre_forward(layer)  # diffusers never calls the other one
    hook.pre_forward(layer)
    layer(torch.ones(1, 2))
    assert layer.weight.device == META
    hook.post_forward(layer, torch.tensor([]))
    assert layer.weight.device == META


def test_weights_that_a_client_replaces_while_they_are_here() -> None:
    """peft merges adapters so: in, change, a new map, out."""
    layer = linear()
    hook = hook_of(layer)
    x = torch.ones(1, 2)
    before = layer(x)
    hook.pre_forward(layer)
    layer.weight.data = layer.weight.data + 1
    hook.weights_map = {name: value.to("cpu") for name, value in layer.named_parameters()}
    hook.post_forward(layer, torch.tensor([]))
    assert layer.weight.device == META
    assert torch.allclose(layer(x), before + 2)
    assert torch.equal(layer.weight, hook.weights_map["weight"])


def test_a_new_map_between_two_forwards() -> None:
    layer = linear()
    hook_of(layer).weights_map = {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}
    assert layer(torch.ones(1, 2)).tolist() == [[2, 2]]
    assert torch.equal(layer.weight, torch.ones(2, 2))


def test_a_client_that_offloads_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """compressed-tensors replaces ``init_hook``, and leaves plain meta tensors."""
    monkeypatch.setattr(AlignDevicesHook, "init_hook", lambda _, module: module)
    layer: Any = nn.Linear(2, 2, device="meta")
    values = {"a.weight": torch.ones(2, 2), "a.bias": torch.zeros(2)}
    hook = AlignDevicesHook("cpu", offload=True, weights_map=PrefixedDataset(values, "a."))
    hook.original_devices = {"weight": CPU, "bias": CPU}
    add_hook_to_module(layer, hook)
    assert layer(torch.ones(1, 2)).tolist() == [[2, 2]]
    assert is_offloaded(layer.weight)
    hook.offload = False
    remove_hook_from_module(layer)
    assert layer.weight.device == META


def test_a_client_that_takes_over_offloaded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """compressed-tensors takes hooks off, updates weights, and adds its own hooks without ``init_hook``."""
    layer = linear()
    hook = hook_of(layer)
    hook.offload = False
    remove_hook_from_module(layer)
    assert layer.weight.device == META
    monkeypatch.setattr(AlignDevicesHook, "init_hook", lambda _, module: module)
    values = {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True, weights_map=values))
    assert layer(torch.ones(1, 2)).tolist() == [[2, 2]]
    assert torch.equal(layer.weight, torch.ones(2, 2))


class OwnPreForward(AlignDevicesHook):
    """As programs write it: values from the map, inputs to the device, and their device is remembered."""

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.input_device = torch.device("cpu")
        assert self.weights_map is not None
        for name, value in self.weights_map.items():
            set_module_tensor_to_device(module, name, "cpu", value=value)
        return args, kwargs


class Countdown(nn.Linear):
    """Calls itself: the inner forward ends while the outer one computes."""

    def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
        inner = self(x, depth - 1) if depth else x
        return super().forward(inner)


class Counting(AlignDevicesHook):
    calls = 0

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.calls += 1
        return super().pre_forward(module, *args, **kwargs)


def test_a_subclass_that_goes_on_to_pre_forward_keeps_values_in_nested_forwards() -> None:
    layer: Any = Countdown(2, 2)
    expected, hook = layer(torch.ones(1, 2)), Counting("cpu", offload=True)
    add_hook_to_module(layer, hook)
    torch.testing.assert_close(layer(torch.ones(1, 2)), expected)
    assert hook.calls == 2
    assert layer.weight.device == META


def test_a_subclass_that_puts_values_in_by_itself() -> None:
    layer: Any = nn.Linear(2, 2)
    expected = layer(torch.ones(1, 2))
    hook = OwnPreForward("cpu", offload=True, io_same_device=True)
    add_hook_to_module(layer, hook)
    for _ in range(2):
        torch.testing.assert_close(layer(torch.ones(1, 2)), expected)
        assert layer.weight.device == layer.bias.device == META


def test_a_meta_tensor_without_values_is_an_error() -> None:
    with offload_fails(match="weight cannot be offloaded: it has no values"):
        add_hook_to_module(
            nn.Linear(2, 2, device="meta"), AlignDevicesHook("cpu", offload=True, weights_map={})
        )
    layer = linear()
    layer.weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    hook_of(layer).weights_map = {}
    with offload_fails(match="weight cannot be brought in"):
        layer(torch.ones(1, 2))
    assert layer.bias.device == META


def test_a_hook_moves_to_a_new_module_with_that_ones_values() -> None:
    """transformers moves the hook of an embedding to the larger one that replaces it."""
    old: Any = nn.Embedding(3, 2)
    hook = AlignDevicesHook("cpu", offload=True)
    add_hook_to_module(old, hook)
    new: Any = nn.Embedding(5, 2)
    expected = new.weight.clone()
    add_hook_to_module(new, hook)
    assert torch.equal(new(torch.arange(5)), expected)
    assert torch.equal(hook.weights_map["weight"], expected)  # pyright: ignore[reportOptionalSubscript]
    assert new.weight.device == META


# -------------------------------------------------------------------------------- in and out


def test_buffers_and_weights_that_change_in_a_forward_keep_the_change() -> None:
    norm: Any = nn.BatchNorm1d(2)
    expected = copy.deepcopy(norm)
    add_hook_to_module(norm, AlignDevicesHook("cpu", offload=True, offload_buffers=True))
    for x in torch.randn(3, 4, 2):
        norm(x)
        expected(x)
    assert norm.running_mean.device == META
    assert norm.num_batches_tracked.tolist() == 3
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in norm.state_dict().items())


def test_a_parameter_that_somebody_puts_in_stays() -> None:
    layer = linear()
    hook_of(layer).pre_forward(layer)
    mine = layer.weight = nn.Parameter(torch.ones(2, 2))
    hook_of(layer).post_forward(layer, ())
    assert layer.weight is mine
    assert layer.bias.device == META
    layer(torch.ones(1, 2))
    assert layer.weight is mine


def test_what_is_here_already_is_not_loaded_nor_dropped() -> None:
    layer = linear()
    here = nn.Parameter(torch.ones(2, 2))
    layer._parameters["weight"] = here
    assert layer(torch.ones(1, 2)).shape == (1, 2)
    assert layer.weight is here


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_module_gets_its_weights() -> None:
    """TorchScript's tables of tensors are no dicts."""
    layer: Any = torch.jit.script(nn.Linear(2, 2))
    x = torch.ones(1, 2)
    expected = layer(x)
    attach_align_device_hook(layer, "cpu", offload=True)
    for _ in range(2):
        assert layer.weight.device == META
        torch.testing.assert_close(layer(x), expected)


def test_tied_weights_come_in_once(net: Net) -> None:
    first: Any = nn.Linear(2, 2, bias=False)
    second: Any = nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    ties: dict[int, dict[torch.device, torch.Tensor]] = {first.weight.data_ptr(): {}}
    values = {"weight": first.weight.detach()}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = first.weight
            self.second = second

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.weight.device == CPU
            seen.append(self.weight)
            return self.second(x)

    seen: list[torch.Tensor] = []
    outer = Outer()
    for module in (outer, second):
        hook = AlignDevicesHook("cpu", offload=True, weights_map=values, tied_params_map=ties)
        add_hook_to_module(module, hook)
        assert hook.tied_params_names == {"weight"}
    own = vars(second)["_old_forward"]
    vars(second)["_old_forward"] = lambda x: (seen.append(second.weight), own(x))[1]
    outer(torch.ones(1, 2))
    assert seen[0] is seen[1]
    assert list(ties.values()) == [{}]


# -------------------------------------------------------------------------------- off and on again


def test_removal_gives_the_parameters_back(net: Net) -> None:
    """E7: those that lay in memory are the very ones."""
    expected, before = net(X), dict(net.named_parameters())
    offload(net)
    net(X)
    remove_hook_from_submodules(net)
    assert all(before[name] is tensor for name, tensor in net.named_parameters())
    assert torch.equal(net(X), expected)


@torch.no_grad()
def test_a_recurrent_layer_computes_with_the_weights_that_are_here() -> None:
    """It has a list of its weights beside the parameters."""
    layer, x = nn.GRU(4, 4), torch.randn(3, 2, 4)
    expected = layer(x)[0]
    attach_align_device_hook(layer, execution_device="cpu", offload=True)
    assert all(torch.equal(layer(x)[0], expected) for _ in range(3))
    with align_module_device(layer):
        assert torch.equal(nn.GRU.forward(layer, x)[0], expected)
    remove_hook_from_submodules(layer)
    assert torch.equal(layer(x)[0], expected)


def test_removal_leaves_weights_in_files_where_they_are(net: Net, tmp_path: Path) -> None:
    """They stay on meta, as peft expects, and are right all the same."""
    expected = net(X)
    offload_state_dict(tmp_path, net.state_dict())
    angles, table = net.angles, net.table
    net.to("meta")
    net.angles, net.table = angles, table
    weights = OffloadedWeightsLoader(save_folder=tmp_path)
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        net.norm._buffers[name[5:]] = weights[name]
    offload(net, weights_map=weights)
    remove_hook_from_submodules(net)
    assert devices_of(net) == {"meta"}
    assert torch.equal(net(X), expected)


def test_another_plan_after_the_first(net: Net, tmp_path: Path) -> None:
    """E7: memory, then files, then not at all."""
    expected, values = net(X), values_of(net)
    offload(net)
    remove_hook_from_submodules(net)
    offload_state_dict(tmp_path, values)
    offload(net, weights_map=OffloadedWeightsLoader(save_folder=tmp_path))
    assert torch.equal(net(X), expected)
    remove_hook_from_submodules(net)
    attach_execution_device_hook(net, "cpu")
    assert torch.equal(net(X), expected)
    assert devices_of(net) == {"cpu"}


def test_hooks_over_hooks(net: Net) -> None:
    """E7: a second plan without the first one's removal."""
    expected = net(X)
    offload(net)
    offload(net)
    assert isinstance(hook_of(net.inner), SequentialHook)
    assert torch.equal(net(X), expected)
    assert devices_of(net) == {"meta"}
    remove_hook_from_submodules(net)
    assert devices_of(net) == {"cpu"}
    assert torch.equal(net(X), expected)


def test_a_replaced_submodule_is_the_one_that_runs(net: Net) -> None:
    """E7: its own values, hooked or not."""
    offload(net)
    new = nn.Linear(8, 8)
    reference = copy.deepcopy(net)
    remove_hook_from_submodules(reference)
    reference.inner = new
    expected = reference(X)
    net.inner, old = copy.deepcopy(new), net.inner
    assert torch.equal(net(X), expected)
    add_hook_to_module(net.inner, vars(old)["_hf_hook"])
    assert torch.equal(net(X), expected)
    assert net.inner.weight.device == META


# -------------------------------------------------------------------------------- copies


def test_copies_are_independent(net: Net) -> None:
    """E6."""
    offload(net)
    expected = net(X)
    twin = copy.deepcopy(net)
    twin.load_state_dict({name: value * 0 for name, value in net.state_dict().items()})
    assert torch.equal(net(X), expected)
    assert not torch.equal(twin(X), expected)
    remove_hook_from_submodules(twin)
    assert devices_of(twin) == {"cpu"}
    assert torch.count_nonzero(twin.inner.weight) == 0


def test_a_state_dict_goes_through_an_offloaded_model(net: Net) -> None:
    """E6."""
    values = {name: torch.rand_like(v) if v.dim() else v for name, v in values_of(net).items()}
    offload(net)
    net.load_state_dict(values)
    other = Net().eval()
    other.load_state_dict(values)
    other.angles = net.angles
    assert torch.equal(net(X), other(X))
    assert all(torch.equal(value, values[name]) for name, value in net.state_dict().items())


# -------------------------------------------------------------------------------- errors, threads


def test_an_error_in_the_middle_leaves_everything_as_it_was(net: Net) -> None:
    """E12."""
    expected = net(X)
    offload(net)

    def fail(*_: Any) -> None:
        assert net.scale.device == CPU
        raise MemoryError("in the middle")

    handle = net.norm.register_forward_hook(fail)
    with pytest.raises(MemoryError):
        net(X)
    assert devices_of(net) == {"meta"}
    handle.remove()
    assert torch.equal(net(X), expected)
    assert devices_of(net) == {"meta"}


def test_a_weight_that_cannot_be_read_leaves_the_others_out(tmp_path: Path) -> None:
    """E12."""
    layer: Any = nn.Linear(2, 2)
    offload_state_dict(tmp_path, layer.state_dict())
    (tmp_path / "bias.dat").unlink()
    layer.to("meta")
    hook = AlignDevicesHook("cpu", offload=True, weights_map=OffloadedWeightsLoader(save_folder=tmp_path))
    add_hook_to_module(layer, hook)
    with offload_fails(match=r"bias\.dat are gone"):
        layer(torch.ones(1, 2))
    assert devices_of(layer) == {"meta"}


def test_a_module_may_call_itself() -> None:
    """E13: the inner call must not take the weights from the outer one."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
            inner = self(x, depth - 1) if depth else x
            assert not is_offloaded(self.weight)
            return inner + self.weight

    deep: Any = add_hook_to_module(Deep(), AlignDevicesHook("cpu", offload=True, io_same_device=True))
    assert deep(torch.zeros(2), 3).tolist() == [4, 4]
    assert devices_of(deep) == {"meta"}
    assert hook_of(deep)._running_input_devices() == []


def test_two_threads_use_one_offloaded_model(net: Net) -> None:
    """E13."""
    expected = net(X)
    offload(net, preload_module_classes=None)
    results: list[torch.Tensor] = []

    def run() -> None:
        with torch.no_grad():
            results.extend(net(X) for _ in range(20))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    assert all(torch.equal(result, expected) for result in results)
    assert devices_of(net) == {"meta"}


def test_a_thread_that_ends_leaves_the_weights_to_the_other() -> None:
    """E13."""
    inside, go = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, wait: bool) -> bool:
            if wait:
                inside.set()
                assert go.wait(60)
            return is_offloaded(self.weight)

    slow = add_hook_to_module(Slow(), AlignDevicesHook("cpu", offload=True))
    offloaded: list[bool] = []
    thread = threading.Thread(target=lambda: offloaded.append(slow(True)))
    thread.start()
    assert inside.wait(60)
    assert slow(False) is False
    go.set()
    thread.join()
    assert offloaded == [False]
    assert devices_of(slow) == {"meta"}


# -------------------------------------------------------------------------------- inputs and outputs


def test_inputs_that_are_here_are_the_very_same() -> None:
    class Same(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

    same = add_hook_to_module(Same(), AlignDevicesHook("cpu", io_same_device=True))
    x, y = torch.ones(2), torch.ones(2)
    args, kwargs = same(x, 3, None, y=y)
    assert args[0] is x
    assert kwargs["y"] is y


def test_a_list_that_a_module_fills_is_the_callers() -> None:
    class Filling(nn.Module):
        def forward(self, x: Any, seen: list[Any], cache: dict[str, Any]) -> Any:
            seen.append(x)
            cache["x"] = [x]
            return x

    filling = add_hook_to_module(Filling(), AlignDevicesHook("cpu", io_same_device=True))
    seen: list[Any] = []
    cache: dict[str, Any] = {"y": torch.ones(1)}
    x = torch.ones(2)
    assert filling(x, seen, cache=cache) is x
    assert seen == [x]
    assert list(cache) == ["y", "x"]


def test_objects_that_can_move_move() -> None:
    class Batch:
        device = "cpu"

        def to(self, device: Any) -> Any:
            self.device = str(device)
            return self

    def first(values: Any) -> Any:
        return add_hook_to_module(nn.Identity(), AlignDevicesHook("meta"))(values)

    assert first(Batch()).device == "meta"
    assert first({"a": [Batch()]})["a"][0].device == "meta"
    assert first((torch.ones(1), 3))[0].device == META


def test_named_inputs_can_stay_where_they_are() -> None:
    class Same(nn.Module):
        def forward(self, x: Any, cache: Any) -> Any:
            return x.device.type, cache.device.type

    hook = AlignDevicesHook("meta", skip_keys=["cache"])
    assert add_hook_to_module(Same(), hook)(torch.ones(1), cache=torch.ones(1)) == ("meta", "cpu")


def test_outputs_come_back_only_if_asked() -> None:
    x = torch.ones(1)
    for asked, device in ((False, "meta"), (True, "cpu")):
        hook = AlignDevicesHook("meta", io_same_device=False)
        layer = add_hook_to_module(nn.Identity(), hook)
        hook.io_same_device = asked  # transformers sets it afterwards
        if asked:
            with pytest.raises(NotImplementedError):  # there is nothing to copy from meta
                layer(x)
            assert hook.input_device == CPU
        else:
            assert layer(x).device.type == device


def test_blocks_get_hooks_by_their_own_rules(net: Net) -> None:
    offloaded = {"embed": True, "inner": False, "conv": True, "norm": False, "scale": False}
    attach_align_device_hook_on_blocks(
        net, execution_device=dict.fromkeys(offloaded, "cpu"), offload=offloaded, weights_map=net.state_dict()
    )
    hooks = {name: hook_of(module) for name, module in net.named_modules() if hasattr(module, "_hf_hook")}
    assert {name: hook.offload for name, hook in hooks.items()} == {
        "": False, "embed": True, "inner": False, "conv": True, "norm": False,
    }  # fmt: skip
    assert {name for name, hook in hooks.items() if hook.io_same_device} == {""}
    assert hooks["embed"].weights_map.prefix == "embed."


def test_a_module_that_has_a_hook_keeps_it(net: Net) -> None:
    mine = ModelHook()
    add_hook_to_module(net.inner, mine)
    attach_execution_device_hook(net, "cpu")
    assert hook_of(net.inner) is mine
    assert isinstance(hook_of(net.conv), AlignDevicesHook)
    attach_align_device_hook(net, "cpu", offload=True)
    assert hook_of(net.inner).hooks[0] is mine


def test_a_whole_model_waits_on_the_cpu() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    hook = CpuOffload("cpu:0")
    handle = UserCpuOffloadHook(first, hook)
    add_hook_to_module(first, hook)
    other = CpuOffload(CPU, prev_module_hook=handle)
    add_hook_to_module(second, other)
    assert (hook.execution_device, other.prev_module_hook) == ("cpu:0", handle)
    called: list[bool] = []
    hook.init_hook = lambda module: (called.append(True), module)[1]  # pyright: ignore[reportAttributeAccessIssue]
    second(first(torch.ones(1, 2)))
    assert called == [True]
    handle.offload()
    assert (handle.model, handle.hook, called) == (first, hook, [True, True])
    handle.remove()
    assert not hasattr(first, "_hf_hook")
