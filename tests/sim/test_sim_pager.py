"""Weights brought to a device in blocks: what crosses, what is there at once; nothing is ever wrong."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import time
from collections.abc import Callable, Generator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from accelerate import cpu_offload, disk_offload, dispatch_model, load_checkpoint_in_model
from accelerate.core.errors import OffloadError
from accelerate.device.base import Device
from accelerate.hooks import (
    AlignDevicesHook,
    add_hook_to_module,
    attach_align_device_hook,
    remove_hook_from_submodules,
)
from accelerate.offload import pager as pagers
from accelerate.offload.dispatch import offload_stats
from accelerate.offload.dispatch_hook import hook_of
from accelerate.offload.offloaded_tensor import OffloadedTensor
from accelerate.offload.weight_block import HostPageAllocator
from accelerate.utils.modeling import align_module_device
from tests.support import sim
from tests.support.offloaded import is_offloaded

SIM = "sim:0"  # torch knows the type only inside of tests
WIDTH = 64
MiB = 2**20


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Generator[None]:
    """Each test begins with empty devices, and shows when it leaves something on them."""
    for device in range(2):
        torch.sim.reset_peak_memory_stats(device)
    yield
    left, deadline = [1], time.monotonic() + 5
    while any(left) and time.monotonic() < deadline:  # autograd's threads release a failed backward late
        gc.collect()
        left = [torch.sim.memory_allocated(device) for device in range(2)]
    assert left == [0, 0]
    torch.sim.empty_cache()


host = pagers.devices.get("cpu")


class Pinning(Device):
    """The simulated device with pinned memory, streams and the reading thread: the path of a real one."""

    pins_memory = True


def drive(monkeypatch: pytest.MonkeyPatch, hardware: Device) -> None:
    """Let ``hardware`` drive the simulated device."""
    monkeypatch.setattr(pagers.devices, "get", lambda type: hardware if type == "sim" else host)


@pytest.fixture
def _pins_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    drive(monkeypatch, Pinning("sim"))


class Layer(nn.Module):
    """A residual layer; a mistake in it raises in the middle."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.up(x))
        if self.fails:
            raise ArithmeticError("in the middle")
        return x + self.down(y)


class Net(nn.Module):
    """Layers in a row, in the order that ``order`` gives."""

    def __init__(self, layers: int = 6, width: int = WIDTH) -> None:
        super().__init__()
        self.inp = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.out = nn.Linear(width, width)
        self.order = list(range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for place in self.order:
            x = self.layers[place](x)
        return self.out(x)


def built(kind: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


def inputs(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def weights(model: nn.Module) -> int:
    """Bytes of the parameters, each once, as pages hold them."""
    return sum(-(-p.nbytes // 512) * 512 for p in model.parameters())


def offloaded(model: nn.Module, kind: str, folder: Path, **options: Any) -> nn.Module:
    if kind == "cpu":
        return cpu_offload(model, SIM, **options)
    return disk_offload(model, folder, SIM, **options)


kinds = pytest.mark.parametrize("kind", ["cpu", "disk"])


@kinds
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_an_offloaded_model_computes_what_it_did(kind: str, mode: Any, tmp_path: Path) -> None:
    """C3: inputs and outputs stay where the caller is; between forwards nothing is on the device."""
    model, x = built(), inputs()
    expected = model(x)
    model = offloaded(model, kind, tmp_path)
    with mode():
        for _ in range(2):
            y = model(x)
            assert y.device == x.device
            torch.testing.assert_close(y, expected)
            del y
    gc.collect()
    assert torch.sim.memory_allocated(0) == 0


@kinds
def test_each_weight_crosses_once_and_nothing_is_copied_back(kind: str, tmp_path: Path) -> None:
    """Drop, do not copy back; a block of memory is one copy."""
    model, x = built(), inputs()
    total = weights(model)
    offloaded(model, kind, tmp_path)
    with torch.no_grad():
        model(x)
        with sim.traffic() as moved:
            model(x)
    unaligned = sum(p.source.nbytes for p in model.parameters())
    assert moved.to_device_bytes - x.nbytes == (total if kind == "cpu" else unaligned)
    assert (moved.to_host, moved.to_host_bytes) == (1, x.nbytes)  # the output
    if kind == "cpu":
        assert moved.to_device == 1 + 8  # the input, and a copy for each of 6 layers and 2 ends


@pytest.mark.usefixtures("_pins_memory")
def test_two_blocks_are_there_at_a_time() -> None:
    model, x = built(), inputs()
    block = weights(model.layers[0])
    cpu_offload(model, SIM)
    with torch.no_grad():
        model(x)
        torch.sim.reset_peak_memory_stats(0)
        model(x)
    activations = 4 * 4 * x.nbytes
    assert 2 * block <= torch.sim.max_memory_allocated(0) <= 2 * block + activations


def _flatten_in_place(layer: nn.RNNBase) -> None:
    """Move the weights into one storage, as cuDNN does, which counts no change."""
    weights = list(layer.parameters())
    if weights[0].device.type == "sim":
        flat = torch.cat([weight.data.flatten() for weight in weights])
        for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
            weight.data = part.view(weight.shape)


@pytest.mark.usefixtures("_pins_memory")
@kinds
def test_recurrent_layers_are_dropped_and_not_copied_back(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.RNN(WIDTH, WIDTH) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)[0]
            return x

    model, x = built(Recurrent), torch.randn(3, 2, WIDTH)
    expected, block = model(x), weights(model.layers[0])
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", _flatten_in_place)
    offloaded(model, kind, tmp_path)
    layer: Any = model.layers[0]
    held = {str(weight.device) for weight in layer._flat_weights}
    with torch.no_grad():
        for _ in range(2):
            torch.sim.reset_peak_memory_stats(0)
            with sim.traffic() as moved:
                torch.testing.assert_close(model(x), expected)
            assert held | {str(weight.device) for weight in layer._flat_weights} == {"meta"}
            assert torch.sim.max_memory_allocated(0) < 5 * block  # two, and those that are flattened
            assert (moved.to_host, moved.to_host_bytes) == (1, x.nbytes)


@kinds
def test_a_model_four_times_larger_than_the_device_runs(kind: str, tmp_path: Path) -> None:
    model, x = built(lambda: Net(16, 256)), torch.randn(2, 256)
    expected = model(x)
    with sim.capacity(weights(model) // 4):
        offloaded(model, kind, tmp_path)
        torch.testing.assert_close(model(x), expected)
        with torch.no_grad():
            torch.testing.assert_close(model(x), expected)


@pytest.mark.usefixtures("_pins_memory")
def test_a_device_with_room_for_one_block_brings_one_at_a_time() -> None:
    """Prefetched pages are dropped where there is no room for them."""
    model, x = built(lambda: Net(6, 256)), torch.randn(2, 256)
    expected = model(x)
    cpu_offload(model, SIM)
    torch.sim.empty_cache()
    with sim.capacity(int(1.5 * weights_of_block(model))), torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(x), expected)
    stats = offload_stats(model)
    assert stats is not None
    assert stats.copies == stats.blocks, "what found no room is no copy"


def test_full_memory_is_recognized_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has an error for it; MPS and NPUs raise a plain one."""

    class Apple(Pinning):
        out_of_memory_messages = ("backend out of memory",)

    drive(monkeypatch, Apple("sim"))
    model, x, empty, calls = built(), inputs(), torch.empty, itertools.count()
    expected = model(x)
    cpu_offload(model, SIM)

    def allocate(*size: Any, **options: Any) -> torch.Tensor:
        if str(options.get("device")) == SIM and next(calls) % 2 == 0:
            raise RuntimeError("backend out of memory (simulated)")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", allocate)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    assert next(calls) > 2 * len(model.layers)


def weights_of_block(model: nn.Module) -> int:
    return max(page.nbytes for block in pager_of(model).blocks for page in block.pages)


def pager_of(model: nn.Module) -> pagers.Pager:
    hook = hook_of(model)
    assert hook is not None
    assert hook._pager is not None
    return hook._pager


# ------------------------------------------------------------------------------------------------ order


def fetched(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> list[str]:
    """The blocks in the order in which they are asked for, from now on; those asked for late in capitals."""
    seen: list[str] = []
    pager = pager_of(model)
    names = {page: block.name.split(".")[-1] for block in pager.blocks for page in block.pages}
    ahead, fetch = pager._prefetch, pager._fetch_page
    early = [False]

    def asked(block: Any) -> None:
        early[0] = True
        ahead(block)
        early[0] = False

    def got(page: Any) -> Any:
        seen.append(names[page] if early[0] else names[page].upper())
        return fetch(page)

    monkeypatch.setattr(pager, "_prefetch", asked)
    monkeypatch.setattr(pager, "_fetch_page", got)
    return seen


@pytest.mark.usefixtures("_pins_memory")
def test_the_order_is_learned_and_learned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = built(lambda: Net(4)), inputs()
    cpu_offload(model, SIM)
    seen = fetched(monkeypatch, model)

    def run() -> list[str]:
        seen.clear()
        with torch.no_grad():
            model(x)
        return list(seen)

    assert run() == ["INP", "0", "1", "2", "3", "out"]  # as they were defined
    model.order = [2, 0, 3, 1]
    run()
    assert run() == ["INP", "2", "0", "3", "1", "out"]
    model.order = [0, 1, 0, 2]  # one runs twice, another not at all
    run()
    assert run() == ["INP", "0", "1", "0", "2", "out"]


@pytest.mark.usefixtures("_pins_memory")
def test_what_was_asked_for_in_vain_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = built(lambda: Net(4)), inputs()
    cpu_offload(model, SIM)
    with torch.no_grad():
        model(x)
        model.order = [0]
        model(x)
        assert torch.sim.memory_allocated(0) == 0
    assert not pager_of(model).resident


@pytest.mark.usefixtures("_pins_memory")
def test_the_user_is_told_what_it_cost() -> None:
    model = cpu_offload(built(), SIM)
    with torch.no_grad():
        model(inputs())
    stats = offload_stats(model)
    assert stats is not None
    assert (stats.blocks, stats.copies, stats.prefetched, stats.bytes_written_back) == (8, 8, 7, 0)
    assert stats.bytes_copied == sum(page.nbytes for block in pager_of(model).blocks for page in block.pages)
    assert stats.wait_seconds > 0
    assert "in 8 copies for 8 blocks, 7 of them prefetched" in str(stats)
    stats.reset()
    assert stats.blocks == 0


# ------------------------------------------------------------------------------------------------ E1


class Borrowing(nn.Module):
    """Uses weights in every way but the owner's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.layer = Layer()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.gates = nn.ParameterList([nn.Parameter(torch.rand(WIDTH)) for _ in range(2)])
        self.rnn = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) * self.scale + self.embedding.weight[: ids.shape[1]]
        x = F.linear(x, self.plain.weight, self.plain.bias) * self.gates[0] + self.gates[1]
        x = x + x @ self.rnn[0].weight
        x = self.layer(x) + F.linear(x, self.layer.down.weight[:, :WIDTH])
        x = self.attention(x, x, x)[0]
        return F.linear(x, self.embedding.weight)


@kinds
def test_weights_used_outside_of_their_owner_are_right(kind: str, tmp_path: Path) -> None:
    """E1"""
    model, ids = built(Borrowing), torch.tensor([[1, 2, 3]])
    expected = model(ids)
    offloaded(model, kind, tmp_path)
    torch.testing.assert_close(model(ids), expected)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), expected)


class Keeping(nn.Module):
    """Gives out views of its weights, which outlive its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.ModuleList(Positions() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        views = [position(x) for position in self.positions]  # all are brought before the first is used
        return torch.stack(views).sum(0) + x


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(10, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table[: x.shape[0]]


def test_a_view_of_a_weight_outlives_its_block() -> None:
    """Never garbage: memory that somebody looks at is not given to the next block."""
    model, x = built(Keeping), inputs()
    expected = model(x)
    with torch.no_grad():
        torch.testing.assert_close(cpu_offload(model, SIM)(x), expected)


# ------------------------------------------------------------------------------------------------ values


class Counting(nn.Module):
    """Changes its buffers, one by one and anew."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("factor", torch.ones(WIDTH) / 2, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.linear(self.norm(x)) * self.factor


@pytest.mark.parametrize("buffers", [False, True])
def test_buffers_that_change_keep_their_values(buffers: bool) -> None:
    """E3: of batch norms, not saved ones, and those that are replaced."""
    plain, x = nn.Sequential(built(Counting), built(Counting)).train(), inputs()
    model = cpu_offload(copy.deepcopy(plain), SIM, offload_buffers=buffers)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(x), plain(x))
    for (name, mine), own in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(mine.cpu(), own, msg=name)


class Learning(nn.Module):
    """Changes its weight in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.add_(1)
        return x * self.weight


def test_weights_that_are_changed_in_place_go_home() -> None:
    model: Any = nn.Sequential(Learning(), Layer())
    x = inputs()
    cpu_offload(model, SIM)
    with torch.no_grad():
        model(x)
        model(x)
    assert model[0].weight.source.host_tensor().unique().tolist() == [3]
    stats = offload_stats(model)
    assert stats is not None
    assert stats.bytes_written_back == 2 * 4 * WIDTH


@pytest.mark.parametrize("kind", ["block", "hook"])
def test_data_that_a_forward_assigns_stays(kind: str) -> None:
    class Assigning(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.weight.data = self.weight.data.t() + 1
            return super().forward(input)

    plain: Any = nn.Sequential(Assigning(WIDTH, WIDTH), Layer()).requires_grad_(False)
    model: Any = copy.deepcopy(plain)
    if kind == "block":
        cpu_offload(model, SIM)
    else:
        attach_align_device_hook(model, SIM, offload=True)
    for _ in range(3):
        torch.testing.assert_close(model(inputs()).cpu(), plain(inputs()))
    assert is_offloaded(model[0].weight)
    with pytest.raises(OffloadError, match="weight was given the shape"), align_module_device(model[0]):
        model[0].weight.data = torch.ones(1, WIDTH, device=SIM)


@kinds
def test_weights_are_cast_by_assignments_of_their_data(kind: str, tmp_path: Path) -> None:
    """The tutorials of peft cast norms so, before and after a forward, and some programs all weights."""
    plain: Any = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)).requires_grad_(False).half()
    model = offloaded(copy.deepcopy(plain), kind, tmp_path)
    with torch.no_grad():
        for dtype in (torch.float32, torch.float64, torch.float16):
            for net in (plain, model):
                for parameter in net.parameters():
                    parameter.data = parameter.data.to(dtype)
            assert is_offloaded(model[0].weight)
            x = inputs().to(dtype)
            torch.testing.assert_close(model(x).cpu(), plain(x), atol=1e-3, rtol=1e-3)


def test_weights_in_a_file_cannot_be_changed_in_place(tmp_path: Path) -> None:
    """A checkpoint is never written to, and no change is lost in silence."""
    model = nn.Sequential(Learning(), Layer())
    disk_offload(model, tmp_path, SIM)
    with torch.no_grad(), pytest.raises(OffloadError, match=r"0\.weight is offloaded to a file"):
        model(inputs())
    assert not pager_of(model).resident
    assert isinstance(model[0].weight, OffloadedTensor)


def test_layouts_of_tensors_stay() -> None:
    strides: list[Any] = []

    class Conv(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            strides.append(self.weight.stride())
            return super().forward(x)

    plain: Any = Conv(4, 4, 3)  # torch's annotations know no such call
    conv = plain.to(memory_format=torch.channels_last)
    model = nn.Sequential(conv, nn.Conv2d(4, 4, 1))
    before = conv.weight.stride()
    x = torch.randn(1, 4, 8, 8)
    expected = model(x)
    with torch.no_grad():
        torch.testing.assert_close(cpu_offload(model, SIM)(x), expected)
    assert strides == [before, before]


def test_dtypes_share_a_block() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(3, dtype=torch.float64), requires_grad=False)
            self.b = nn.Parameter(torch.randn(5).to(torch.bfloat16), requires_grad=False)
            self.c = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
            self.d = nn.Parameter(torch.arange(3, dtype=torch.int8), requires_grad=False)
            self.e = nn.Parameter(torch.empty(0, 3), requires_grad=False)
            self.f = nn.Parameter(torch.tensor(2.0), requires_grad=False)

        def forward(self, x: torch.Tensor) -> Any:
            return [x * self.f, *(p.clone() for p in self.parameters())]

    model = nn.Sequential(Mixed())
    expected = model(torch.ones(2))
    with sim.traffic() as moved:
        found = cpu_offload(model, SIM)(torch.ones(2))
    assert moved.to_device == 2
    for mine, own in zip(found, expected, strict=True):
        assert torch.equal(mine, own)
        assert mine.dtype == own.dtype


# ------------------------------------------------------------------------------------------------ torch.func


@pytest.mark.parametrize("trained", [False, True])
def test_functions_are_transformed_through_offloaded_weights(trained: bool) -> None:
    plain, x = built(Echo).requires_grad_(trained), inputs()
    model = cpu_offload(copy.deepcopy(plain), SIM)
    for transform in (
        torch.func.vmap,
        torch.func.jacrev,
        lambda f: torch.func.vmap(torch.func.grad(lambda row: f(row).sum())),
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1],
    ):
        torch.testing.assert_close(transform(model)(x).cpu(), transform(plain)(x))
    torch.testing.assert_close(model(x), plain(x))


def test_weights_that_a_functional_call_puts_in_get_their_gradient() -> None:
    plain, x = built(Echo).requires_grad_(False), inputs()
    model = cpu_offload(copy.deepcopy(plain), SIM)
    gradients: list[torch.Tensor] = []
    for net in (plain, model):
        weight = torch.ones(WIDTH, WIDTH, requires_grad=True)
        torch.func.functional_call(net, {"first.weight": weight}, x).sum().backward()
        assert weight.grad is not None
        gradients.append(weight.grad)
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(model(x), plain(x))


# ------------------------------------------------------------------------------------------------ ties


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@kinds
def test_tied_weights_are_loaded_once_and_stay_tied(kind: str, tmp_path: Path) -> None:
    model, ids = built(Tied), torch.tensor([[1, 2, 3]])
    expected = model(ids)
    total = sum(p.nbytes for p in model.parameters())
    offloaded(model, kind, tmp_path)
    assert model.head.weight is model.embedding.weight
    with torch.no_grad():
        model(ids)
        with sim.traffic() as moved:
            torch.testing.assert_close(model(ids), expected)
    assert moved.to_device_bytes - ids.nbytes == (weights(model) if kind == "cpu" else total)
    assert torch.sim.memory_allocated(0) == 0
    remove_hook_from_submodules(model)
    assert model.head.weight is model.embedding.weight
    torch.testing.assert_close(model(ids), expected)


class Echo(nn.Module):
    """Two layers with one weight, which the first one may change before it uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.first.weight = self.second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@torch.no_grad()
def same_changes(model: nn.Module, plain: nn.Module, names: list[str]) -> None:
    """A change of the weight under any of its names counts wherever it is used."""
    for name in names:
        for net in (model, plain):
            net.get_parameter(name).mul_(2)
        torch.testing.assert_close(model(inputs()), plain(inputs()))


def test_a_copied_model_keeps_its_ties() -> None:
    """Its blocks share one page, and its map of weights has their values."""
    plain, names = built(Echo).requires_grad_(False), ["first.weight", "second.weight", "first.weight"]
    model = cpu_offload(copy.deepcopy(plain), SIM)
    twin: Any = copy.deepcopy(model)
    torch.testing.assert_close(twin(inputs()), plain(inputs()))
    same_changes(twin, copy.deepcopy(plain), names)
    torch.testing.assert_close(model(inputs()), plain(inputs()))
    weights = twin.second._hf_hook.weights_map
    torch.testing.assert_close(weights["weight"], 8 * plain.second.weight)
    weights.dataset.state_dict["second.weight"] = plain.first.weight
    torch.testing.assert_close(twin(inputs()), plain(inputs()))


@pytest.mark.parametrize("how", ["stand-in", "parameter"])
def test_weights_that_are_tied_after_dispatching_are_one(how: str) -> None:
    plain: Any = built(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))))
    model: Any = cpu_offload(copy.deepcopy(plain.requires_grad_(False)), SIM)
    with torch.no_grad():
        model(inputs())
    for net in (plain, model):
        weight = net[0].weight if how == "stand-in" else nn.Parameter(torch.eye(WIDTH), requires_grad=False)
        net[0].weight = net[1].weight = weight
    with torch.no_grad():
        torch.testing.assert_close(model(inputs()), plain(inputs()))
    assert model[0].weight is model[1].weight
    same_changes(model, plain, ["0.weight", "1.weight", "0.weight"])


def test_a_module_of_two_parents_gets_a_new_weight() -> None:
    inner = nn.Linear(WIDTH, WIDTH)
    plain: Any = nn.Sequential(*(nn.Sequential(inner, nn.Linear(WIDTH, WIDTH)) for _ in range(2)))
    model: Any = cpu_offload(copy.deepcopy(plain.requires_grad_(False)), SIM)
    with torch.no_grad():
        model(inputs())
    for net in (plain, model):
        net[0][0].weight = nn.Parameter(torch.eye(WIDTH), requires_grad=False)
    with torch.no_grad():
        torch.testing.assert_close(model(inputs()), plain(inputs()))
    same_changes(model, plain, ["0.0.weight", "1.0.weight", "0.0.weight"])


@pytest.mark.usefixtures("_pins_memory")
@pytest.mark.parametrize("how", ["stand-in", "by hand", "assigned"])
def test_a_weight_that_is_changed_after_it_was_prefetched(how: str) -> None:
    """As adapters are merged in the forward of the layer before."""

    class Doubling(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if how == "assigned" and is_offloaded(self.next.weight):
                weight = self.next._hf_hook.weights_map["weight"]
                weight.data = weight.data * 2
            else:
                with align_module_device(self.next) if how == "by hand" else nullcontext():
                    self.next.weight.data *= 2
            return super().forward(input)

    plain: Any = nn.Sequential(Doubling(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
    object.__setattr__(plain[0], "next", plain[1])
    model: Any = copy.deepcopy(plain)
    object.__setattr__(model[0], "next", model[1])
    cpu_offload(model, SIM)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(inputs()), plain(inputs()))


# ------------------------------------------------------------------------------------------------ E12, E13


@kinds
def test_a_block_that_raises_leaves_nothing_behind(kind: str, tmp_path: Path) -> None:
    """E12"""
    model, x = built(), inputs()
    expected = model(x)
    offloaded(model, kind, tmp_path)
    model.layers[2].fails = True
    for mode in (torch.no_grad, torch.enable_grad):
        with mode(), pytest.raises(ArithmeticError):
            model(x)
        gc.collect()
        assert torch.sim.memory_allocated(0) == 0
        assert all(isinstance(p, OffloadedTensor) for p in model.parameters())
    model.layers[2].fails = False
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


def test_a_device_that_is_full_is_torchs_error_and_leaves_nothing_behind() -> None:
    """E12"""
    model, x = built(), inputs()
    expected = model(x)
    cpu_offload(model, SIM)
    torch.sim.empty_cache()
    with sim.capacity(4096), torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        model(x)
    assert torch.sim.memory_allocated(0) == 0
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("backward", [False, True])
def test_two_threads_may_call_the_same_model(backward: bool) -> None:
    """E13"""
    model = built().requires_grad_(False)
    xs = [inputs(rows).requires_grad_(backward) for rows in (2, 5)]
    expected = [model(x).detach() for x in xs]
    gradients = [torch.autograd.grad(model(x).sum(), x)[0] for x in xs] if backward else []
    cpu_offload(model, SIM)
    together, failed = threading.Barrier(2), []

    def call(which: int) -> None:
        try:
            together.wait(30)
            for _ in range(20):
                with torch.set_grad_enabled(backward):
                    y = model(xs[which])
                torch.testing.assert_close(y.detach(), expected[which])
                if backward:
                    torch.testing.assert_close(torch.autograd.grad(y.sum(), xs[which])[0], gradients[which])
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=call, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert torch.sim.memory_allocated(0) == 0


# ------------------------------------------------------------------------------------------------ backward


class Adapted(nn.Module):
    """A frozen layer with a small trained one beside it (LoRA)."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def adapted() -> nn.Module:
    model = Net()
    model.requires_grad_(False)
    for place, layer in enumerate(model.layers):
        model.layers[place] = Adapted(layer)
    return model


@kinds
@pytest.mark.parametrize("checkpointed", [False, True])
def test_adapters_train_on_an_offloaded_base(kind: str, checkpointed: bool, tmp_path: Path) -> None:
    """Gradients flow through weights that were dropped: they are brought again, one block at a time."""
    plain, x = built(adapted), inputs()
    model = offloaded(copy.deepcopy(plain), kind, tmp_path)

    def run(net: nn.Module) -> torch.Tensor:
        if checkpointed:
            return torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)
        return net(x)

    for net in (plain, model):
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            run(net).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    ours = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(ours) == 12
    for name, p in plain.named_parameters():
        if p.requires_grad:
            assert str(ours[name].device) == SIM  # trained weights stay on the device
            torch.testing.assert_close(ours[name].cpu(), p, msg=name)
    assert not pager_of(model).backward_pages


@pytest.mark.parametrize("trained", ["adapters", "base"])
def test_large_adapters_stay_on_the_device_beside_a_larger_base(
    trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model for inference whose weights are all trainable but for a few is offloaded."""
    monkeypatch.setattr("accelerate.offload.dispatch_steps.BLOCK", 1)
    model = built(adapted)
    if trained == "base":
        for p in model.parameters():
            p.requires_grad_(not p.requires_grad)
    cpu_offload(model, SIM)
    places = {str(p.device) for p in model.parameters() if p.requires_grad}
    assert places == {SIM if trained == "adapters" else "meta"}
    assert {str(p.device) for p in model.parameters() if not p.requires_grad} == {"meta"}


@pytest.mark.parametrize("has_index", [True, False])
def test_the_graph_does_not_keep_the_weights(has_index: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between forward and backward the frozen weights are not on the device, on one such as MPS neither."""
    hardware = Device("sim")
    hardware.has_index = has_index
    drive(monkeypatch, hardware)
    model, x = built(adapted), inputs()
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    cpu_offload(model, str(hardware.torch_device(0)))
    loss = model(x).square().mean()
    assert torch.sim.memory_allocated(0) < frozen / 4
    torch.sim.reset_peak_memory_stats(0)
    loss.backward()
    assert torch.sim.max_memory_allocated(0) < frozen / 2


def test_inputs_get_their_gradient() -> None:
    plain = built().requires_grad_(False)
    x, y = inputs().requires_grad_(), inputs().requires_grad_()
    model = cpu_offload(copy.deepcopy(plain), SIM)
    plain(x).sum().backward()
    model(y).sum().backward()
    torch.testing.assert_close(y.grad, x.grad)


def test_training_what_is_offloaded_is_refused_by_name() -> None:
    """A gradient that has nowhere to go is an error, not nothing."""
    model = cpu_offload(built(), SIM)
    with pytest.raises(OffloadError, match="is offloaded, and cannot be trained"):
        model(inputs()).sum().backward()
    gc.collect()


# ------------------------------------------------------------------------------------------------ E6, E7


@kinds
def test_values_of_an_offloaded_model_are_real(kind: str, tmp_path: Path) -> None:
    """E6"""
    model, x = built(), inputs()
    expected, values = model(x), {n: p.detach().clone() for n, p in model.state_dict().items()}
    offloaded(model, kind, tmp_path / "folder")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    for name, value in torch.load(tmp_path / "model.pt").items():
        assert torch.equal(value, values[name])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        torch.testing.assert_close(twin(x), expected)
        if kind == "cpu":
            twin.layers[0].up.weight.zero_()
            assert not torch.allclose(twin(x), expected)
        torch.testing.assert_close(model(x), expected)
    for move in (lambda: model.to("sim:1"), lambda: model.to("sim:1", torch.half), lambda: model.cpu()):
        with pytest.raises(RuntimeError, match="the model cannot be moved"):
            move()
    with pytest.raises(OffloadError, match="cannot be pickled"):
        torch.save(model, tmp_path / "whole.pt")


CASTS: dict[str, Callable[[Any], nn.Module]] = {
    "half": nn.Module.half,
    "to": lambda model: model.to(torch.float16),
    "to dtype": lambda model: model.to(dtype=torch.float16),
    "format": lambda model: model.to(torch.float16, memory_format=torch.channels_last),
}


@kinds
@pytest.mark.parametrize("cast", CASTS)
def test_an_offloaded_model_is_cast(kind: str, cast: str, tmp_path: Path) -> None:
    """diffusers casts a VAE to another dtype and back; what is in files is cast in memory."""
    plain, x = built(), inputs()
    model = offloaded(copy.deepcopy(plain), kind, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))
        assert CASTS[cast](model) is model
        plain = plain.half()
        assert {p.dtype for p in model.parameters()} == {torch.float16}
        assert torch.sim.memory_allocated(0) == 0  # it is not brought to the device as a whole
        torch.testing.assert_close(model(x.half()), plain(x.half()), rtol=1e-2, atol=1e-2)
        for _ in range(3):
            model.half().float()
        torch.testing.assert_close(model(x), plain.float()(x))
        gc.collect()
        assert torch.sim.memory_allocated(0) == 0
        for move in (lambda: model.to_empty(device="cpu"), lambda: model._apply(torch.Tensor.cpu)):
            with pytest.raises(OffloadError, match="cannot be moved"):
                move()
    remove_hook_from_submodules(model)
    torch.testing.assert_close(model(x), plain(x))


def test_weights_of_eight_bits_are_cast_again_and_again() -> None:
    """Torch promotes no such dtype; a wider one in between changes nothing."""
    model: Any = nn.Sequential(nn.Linear(4, 4)).to(torch.float8_e4m3fn).requires_grad_(False)
    expected = copy.deepcopy(model).bfloat16().half()[0].weight
    cpu_offload(model, SIM).bfloat16().half()
    assert torch.equal(model[0].weight.to("cpu"), expected)


@kinds
def test_hooks_can_be_taken_off_and_put_on_again(kind: str, tmp_path: Path) -> None:
    """E7"""
    model, x = built(), inputs()
    expected = model(x)
    plain_attributes = set(vars(model.layers[0].up))
    for other in ("cpu", kind, "disk", kind):
        offloaded(model, other, tmp_path / other)  # over what is there
        with torch.no_grad():
            torch.testing.assert_close(model(x), expected)
    remove_hook_from_submodules(model)
    assert set(vars(model.layers[0].up)) == plain_attributes
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert not any(isinstance(p, OffloadedTensor) for p in model.parameters())
    torch.testing.assert_close(model(x), expected)
    model.to("sim:1")
    torch.testing.assert_close(model(x.to("sim:1")).cpu(), expected)


@pytest.mark.parametrize("places", [None, {"": "cpu", "layers.1": "disk"}])
def test_two_models_share_a_folder(places: dict[str, str] | None, tmp_path: Path) -> None:
    """The second one's files take the names of the first one's, which reads its own until it is gone."""
    x = inputs()

    def offload(model: nn.Module) -> nn.Module:
        if places is None:
            return disk_offload(model, tmp_path, SIM)
        return dispatch_model(model, places, main_device=SIM, offload_dir=tmp_path)

    plain = [built() for _ in range(3)]
    for scale, model in enumerate(plain, 1):
        for parameter in model.parameters():
            parameter.data *= scale
    models = [offload(copy.deepcopy(model)) for model in plain]
    again = offload(copy.deepcopy(plain[2]))  # the same values once more
    with torch.no_grad():
        for model, expected in zip([*models, again], [*plain, plain[2]], strict=True):
            torch.testing.assert_close(model(x), expected(x))
        twin = copy.deepcopy(models[0].layers[1].up)
        torch.testing.assert_close(twin(x).cpu(), plain[0].layers[1].up(x))
        twin = copy.deepcopy(models[0])
        torch.testing.assert_close(twin(x), plain[0](x))
        del models, model, twin
        gc.collect()
        torch.testing.assert_close(again(x), plain[2](x))


@kinds
@pytest.mark.parametrize("which", ["block", "leaf", "wrapped", "added"])
def test_modules_may_be_replaced_after_dispatching(kind: str, which: str, tmp_path: Path) -> None:
    """E7"""
    model, x = built(), inputs()
    offloaded(model, kind, tmp_path)
    with torch.no_grad():
        model(x)
    torch.manual_seed(5)
    plain = built()
    for net in (plain, model):
        torch.manual_seed(6)
        if which == "block":
            net.layers[1] = Layer()
        elif which == "leaf":
            net.layers[1].up = nn.Linear(WIDTH, 4 * WIDTH)
        elif which == "wrapped":
            net.layers[1].up = nn.Sequential(net.layers[1].up, nn.Linear(4 * WIDTH, 4 * WIDTH))
        else:
            net.layers[1] = Adapted(net.layers[1])
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(x), plain(x))
    assert torch.sim.memory_allocated(0) <= 2 * 4 * 4 * WIDTH  # an adapter beside frozen weights stays


def test_parts_may_be_called_by_themselves() -> None:
    model: Any = built()
    x = inputs()
    expected = model.layers[0](x), model.layers[0].up(x)
    cpu_offload(model, SIM)
    with torch.no_grad():
        torch.testing.assert_close(model.layers[0](x.to(SIM)).cpu(), expected[0])
        torch.testing.assert_close(model.layers[0].up(x.to(SIM)).cpu(), expected[1])
        y = model.layers[0].up(x)
    assert str(y.device) == SIM  # only the model itself gives its output back where its input was
    torch.testing.assert_close(y.cpu(), expected[1])


def test_a_resident_part_is_pickled_with_a_plain_hook(tmp_path: Path) -> None:
    model: Any = dispatch_model(built(), {"inp": 0, "layers": "cpu", "out": 0})
    x = inputs().to(SIM)
    torch.save(model.inp, tmp_path / "inp.pt")
    part = torch.load(tmp_path / "inp.pt", weights_only=False)
    assert type(part._hf_hook) is AlignDevicesHook
    with torch.no_grad():
        assert torch.equal(part(x), model.inp(x))


def test_a_part_is_copied_without_its_block() -> None:
    model, x = built(), inputs()
    expected = model.layers[0].up(x)
    cpu_offload(model, SIM)
    twin = copy.deepcopy(model.layers[0].up)
    whole = copy.deepcopy(model)
    assert twin._hf_hook.enclosing_block is None
    assert whole.layers[0].up._hf_hook.enclosing_block.module is whole.layers[0]
    with torch.no_grad():
        torch.testing.assert_close(twin(x).cpu(), expected)
        torch.testing.assert_close(whole(x), model(x))


@pytest.mark.parametrize("kind", ["batch norm", "spectral norm"])
def test_buffers_are_changed_beside_weights_with_gradients(kind: str) -> None:
    """What is changed in place is one buffer, and not the range of bytes that it came in."""

    def net() -> nn.Module:
        middle = nn.BatchNorm1d(8) if kind == "batch norm" else nn.Linear(8, 8)
        model = nn.Sequential(nn.Linear(8, 8), middle, nn.Linear(8, 8))
        if kind == "spectral norm":
            nn.utils.parametrizations.spectral_norm(model[1])
        return model.train()

    plain, x = built(net).train(), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    model = cpu_offload(copy.deepcopy(plain), SIM, offload_buffers=True)
    for _ in range(2):
        torch.testing.assert_close(model(x).detach(), plain(x).detach())
    remove_hook_from_submodules(model)
    for (name, buffer), expected in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, msg=name)


def test_hooks_called_by_hand_bring_the_weights_of_a_module() -> None:
    """Clients materialize without a forward, and set a new map of weights after changing them."""
    model, x = built(), inputs()
    cpu_offload(model, SIM)
    with torch.no_grad():
        model(x)
    leaf = model.layers[0].up
    hook = leaf._hf_hook
    assert type(hook).__name__ == "AlignDevicesHook"
    assert hook.offload
    assert hook.original_devices == {"weight": torch.device("cpu"), "bias": torch.device("cpu")}
    hook.pre_forward(leaf)
    assert str(leaf.weight.device) == SIM
    with torch.no_grad():
        leaf.weight.data = leaf.weight.data * 2
    hook.weights_map = {name: p.to("cpu") for name, p in leaf.named_parameters()}
    hook.post_forward(leaf, torch.tensor([]))
    assert leaf.weight.device.type == "meta"
    plain = built()
    with torch.no_grad():
        plain.layers[0].up.weight.mul_(2)
        torch.testing.assert_close(model(x), plain(x))


# ------------------------------------------------------------------------------------------------ streams


@kinds
def test_the_path_with_streams_and_pinned_memory(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E12, E13: nothing runs later here, but all the calls are made."""
    drive(monkeypatch, Pinning("sim"))
    monkeypatch.setattr(pagers, "MAX_STALL_EVENTS", 8)
    model, x = built(), inputs()
    expected, before = model(x), sim.pinned()
    model.layers[2].fails = True
    offloaded(model, kind, tmp_path)
    with torch.no_grad():
        with pytest.raises(ArithmeticError):
            model(x)
        model.layers[2].fails = False
        for _ in range(3):
            torch.testing.assert_close(model(x), expected)
    assert torch.sim.memory_allocated(0) == 0
    stats = offload_stats(model)
    assert stats is not None
    assert len(stats.stalls) == 8
    assert stats.past_stalls > 0
    assert stats.wait_seconds >= stats.past_stalls
    if kind == "cpu":
        total = sum(page.nbytes for block in pager_of(model).blocks for page in block.pages)
        assert total <= sim.pinned() - before <= 2 * total
    else:
        assert pager_of(model)._reader is not None
    del model, stats
    gc.collect()


@pytest.mark.parametrize(
    ("size", "slabs"),
    [(1.7e9, [2**33, *[2**31] * 3]), (2.0**31, [2**31] * 8), (1000, [4096, 2048, 1024, 1024])],
)
def test_slabs_of_pinned_memory_waste_little(size: float, slabs: list[int]) -> None:
    """Eight pages of 1.7 GB, each in a slab of 2 GiB, would take a quarter more than they hold."""
    sizes: list[int] = []

    class Recording(Pinning):
        def host_memory(self, size: int) -> torch.Tensor:
            sizes.append(size)
            return torch.empty(size, dtype=torch.uint8, device="meta")

    memory = HostPageAllocator(Recording("sim"))
    memory.bytes_left, memory.budget = int(8 * size), 2**40
    regions = [memory.allocate(int(size)) for _ in range(8)]
    assert all(region is not None and region.numel() == int(size) for region in regions)
    assert sizes == slabs


def test_pinned_memory_of_an_earlier_model_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps it for the life of the process, unless it is asked to release it."""
    hardware = Pinning("sim")
    hardware.empty_host_cache = Mock()  # type: ignore[method-assign]
    drive(monkeypatch, hardware)
    model, x = built(), inputs()
    expected = model(x)
    cpu_offload(model, SIM)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    hardware.empty_host_cache.assert_called_once_with()


@pytest.mark.parametrize("local_ranks", [1, 4])
def test_pinned_memory_has_a_budget(local_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the free memory, divided by the processes of the machine; the rest goes through two buffers."""
    drive(monkeypatch, Pinning("sim"))
    for name, value in {"RANK": 0, "WORLD_SIZE": local_ranks, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_ranks))
    model, x = built(), inputs()
    expected = model(x)
    total, before = weights(model), sim.pinned()
    monkeypatch.setattr(type(host), "get_memory_info", lambda self, index=None: (total, 10 * total))
    cpu_offload(model, SIM, preload_module_classes=["Layer"])
    pages = [page for block in pager_of(model).blocks for page in block.pages]
    staged = [page for page in pages if page.host is None]
    assert 0 < sim.pinned() - before <= total // 2 // local_ranks
    assert 0 < len(staged) < len(pages)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(x), expected)
        largest = max(page.nbytes for page in staged)
        assert sim.pinned() - before <= total // 2 // local_ranks + 2 * 2 * largest
        # A weight of a staged page that is changed in place keeps its change.
        name = next(name for name, p in model.named_parameters() if p is staged[0].entries[0].stand_in)
        assert staged[0].entries[0].stand_in.source.host_tensor().is_pinned() is False
        model.get_parameter(name).mul_(2)
        plain = built()
        plain.get_parameter(name).mul_(2)
        torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("again", [False, True])
def test_an_adapter_that_is_added_does_not_pin_the_base_again(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a model that is dispatched again, as peft does for each adapter that it loads."""
    sizes = list[int]()

    class Counting(Pinning):
        def host_memory(self, size: int) -> torch.Tensor:
            sizes.append(size)
            return super().host_memory(size)

    drive(monkeypatch, Counting("sim"))
    plain = built().requires_grad_(False)
    model, x, before = copy.deepcopy(plain), inputs(), sim.pinned()
    cpu_offload(model, SIM)
    base = sum(sizes)
    with torch.no_grad():
        for count in range(1, 4):
            for net in (plain, model):
                for layer in net.layers:
                    layer.register_module(f"adapter{count}", nn.Linear(WIDTH, 2).requires_grad_(False))
            if again:
                cpu_offload(model, SIM)
            torch.testing.assert_close(model(x), plain(x))
            assert sum(sizes) < base + count * base // 8
        model.layers[0].up.weight.mul_(2)
        plain.layers[0].up.weight.mul_(2)
        torch.testing.assert_close(model(x), plain(x))
    remove_hook_from_submodules(model)
    torch.testing.assert_close(model.to("cpu")(x), plain(x))
    del model, net, layer
    gc.collect()
    assert sim.pinned() == before


@kinds
def test_a_system_that_pins_no_memory_copies_from_plain_memory(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(Pinning):
        def host_memory(self, size: int) -> torch.Tensor:
            raise RuntimeError("CUDA error: out of memory")

    drive(monkeypatch, Refusing("sim"))
    model, x = built(), inputs()
    expected = model(x)
    with pytest.warns(UserWarning, match="stay in plain memory") if kind == "cpu" else nullcontext():
        offloaded(model, kind, tmp_path)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(x), expected)
    stats = offload_stats(model)
    assert stats is not None
    assert stats.prefetched > 0


class Retrying(Pinning):
    """A device whose allocator is at its limit from the third block on."""

    blocks = 0

    def allocator_retries(self, index: int | None = None) -> int:
        return max(0, self.blocks - 2)


def test_nothing_is_prefetched_after_the_allocator_had_to_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the forward in which that was; the next one tries again."""
    hardware = Retrying("sim")
    drive(monkeypatch, hardware)
    model, x = built(), inputs()
    expected = model(x)
    cpu_offload(model, SIM, preload_module_classes=["Layer"])
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda *_: setattr(hardware, "blocks", hardware.blocks + 1))
    stats = offload_stats(model)
    assert stats is not None
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
        assert stats.blocks == len(model.layers) + 2
        seen = stats.prefetched
        assert 0 < seen < stats.blocks - 2
        hardware.blocks = 0
        model(x)
        assert stats.prefetched == 2 * seen


@pytest.mark.parametrize("hardware", [Device, Pinning])
def test_a_file_that_is_gone_is_told_when_it_is_needed(
    hardware: type[Device], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(monkeypatch, hardware("sim"))
    model: Any = disk_offload(built(), tmp_path, SIM)
    x = inputs()
    with torch.no_grad():
        model(x)
        (tmp_path / "layers.3.up.weight.dat").unlink()
        with pytest.raises(OffloadError, match="are gone"):
            model(x)
        gc.collect()  # the error holds its frames
        assert torch.sim.memory_allocated(0) == 0
        model.order.remove(3)  # it is prefetched in vain
        model(x)


def test_blocks_respect_classes_that_come_whole() -> None:
    model = built(lambda: Net(4, 256))
    with sim.capacity(weights(model) // 8):
        cpu_offload(model, SIM, preload_module_classes=["Layer"])
        names = [block.name for block in pager_of(model).blocks]
        assert names == ["inp", "layers.0", "layers.1", "layers.2", "layers.3", "out"]
        cpu_offload(model, SIM)
        assert "layers.0.up" in [block.name for block in pager_of(model).blocks]


def test_dispatching_says_where_everything_went() -> None:
    model = built()
    given = {"": "sim:0", "layers.0": "cpu"}
    dispatch_model(model, given)
    assert model.hf_device_map == given
    assert model.hf_device_map is not given


# ------------------------------------------------------------------------- models that lie on the device


MAPS: dict[str, Any] = {"inp": SIM, "layers": "cpu", "out": "disk"}


@pytest.mark.parametrize("kind", ["cpu", "disk", "map"])
def test_what_lies_on_the_device_is_offloaded_from_it(kind: str, tmp_path: Path) -> None:
    """A weight whose home is memory or disk leaves the device that it lies on; in the end it is back."""
    model, x = built(), inputs()
    expected = model(x)
    model.to(SIM)
    if kind == "map":
        dispatch_model(model, MAPS, offload_dir=tmp_path)
    else:
        offloaded(model, kind, tmp_path)
    gc.collect()
    resident = sum(p.nbytes for p in model.inp.parameters()) if kind == "map" else 0
    assert resident <= torch.sim.memory_allocated(0) <= resident + 2 * 512
    assert {p.device.type for p in model.layers.parameters()} == {"meta"}
    assert sorted(tmp_path.glob("out.*.dat")) == [
        tmp_path / f"out.{name}.dat" for name in (() if kind == "cpu" else ("bias", "weight"))
    ]
    with torch.no_grad():
        torch.testing.assert_close(model(x.to(SIM)).cpu(), expected)
    remove_hook_from_submodules(model)
    assert {str(p.device) for p in model.parameters()} == {SIM}
    with torch.no_grad():
        torch.testing.assert_close(model(x.to(SIM)).cpu(), expected)


def test_a_model_that_is_dispatched_again_makes_room_first() -> None:
    """The second map has less on the device: nothing goes back there on the way."""
    model, x = built().to(SIM), inputs()
    cpu_offload(model, SIM)
    gc.collect()
    torch.sim.reset_peak_memory_stats(0)
    dispatch_model(model, {"inp": SIM, "layers": "cpu", "out": "cpu"})
    assert torch.sim.max_memory_allocated(0) < weights(built()) // 2
    with torch.no_grad():
        torch.testing.assert_close(model(x), built()(x))


# -------------------------------------------------------------------------------------- shared modules


class SharedInside(nn.Module):
    """Heads that a decoder has too, as in DETR with refinement of boxes."""

    def __init__(self) -> None:
        super().__init__()
        heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.decoder = Decoder(heads)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads[1](self.decoder(x))


class Decoder(nn.Module):
    def __init__(self, heads: nn.ModuleList) -> None:
        super().__init__()
        self.lin, self.heads = nn.Linear(WIDTH, WIDTH), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads[0](self.lin(x))


@kinds
def test_modules_of_a_block_that_are_used_outside_of_it(kind: str, tmp_path: Path) -> None:
    model, x = built(SharedInside), inputs()
    expected = model(x)
    offloaded(model, kind, tmp_path)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(x), expected)


def test_a_hook_on_a_wrapped_model_replaces_no_block() -> None:
    """peft adds one to the model in its wrapper; adapters that come later still reach the device."""

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    x = inputs()
    model = Wrapper(built()).requires_grad_(False)
    cpu_offload(model, SIM)
    add_hook_to_module(model.inner, AlignDevicesHook(io_same_device=True))
    model.inner.layers[0].up = nn.Linear(WIDTH, 4 * WIDTH)
    plain = built()
    plain.layers[0].up.load_state_dict(model.inner.layers[0].up.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))


# ------------------------------------------------------------------------------------- other values, casts


def test_a_state_dict_comes_before_the_values_of_the_model() -> None:
    model, x = built(), inputs()
    trained = {name: value * 2 for name, value in model.state_dict().items()}
    cpu_offload(model, SIM, state_dict=trained)
    plain = built()
    plain.load_state_dict(trained)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))


def test_buffers_go_back_after_a_cast() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("shift", torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x) + self.shift

    def model_of() -> nn.Module:
        return nn.Sequential(Shifted(), Shifted())

    model, x = built(model_of), inputs()
    cpu_offload(model, SIM)
    model.half()
    with torch.no_grad():
        model(x.half())
    remove_hook_from_submodules(model)
    assert {(t.device.type, t.dtype) for t in model.state_dict().values()} == {("cpu", torch.float16)}
    with torch.no_grad():
        torch.testing.assert_close(model(x.half()), built(model_of).half()(x.half()))


def _halve(model: nn.Module) -> None:
    model.half()


def _replace_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data * 2


def _write_to_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data += 1


@pytest.mark.parametrize("before", ["checkpoint", "folder", "mapped"])
@pytest.mark.parametrize("change", [_halve, _replace_data, _write_to_data])
def test_changed_weights_are_not_dropped_for_their_files(before: str, change: Any, tmp_path: Path) -> None:
    """Torch counts no version for any of these changes."""
    model, plain, x = built(), built(), inputs()
    if before == "checkpoint":
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        load_checkpoint_in_model(model.to("meta"), tmp_path / "model.safetensors", {"": "cpu"})
    elif before == "folder":
        disk_offload(model, tmp_path / "first", SIM)
        remove_hook_from_submodules(model)
    else:
        dispatch_model(model, {"": "disk"}, main_device="cpu", offload_dir=tmp_path / "first")
    change(model)
    change(plain)
    x = x.to(next(plain.parameters()).dtype)
    disk_offload(model, tmp_path / "second", SIM)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))


def test_unchanged_weights_are_not_written_again(tmp_path: Path) -> None:
    model = built()
    disk_offload(model, tmp_path / "first", SIM)
    remove_hook_from_submodules(model)
    disk_offload(model, tmp_path / "second", SIM)
    assert list((tmp_path / "second").glob("*")) == []
