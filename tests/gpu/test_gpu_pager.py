"""Weights brought to a real accelerator: streams that overlap, memory that is used again, nothing wrong."""

from __future__ import annotations

import copy
import gc
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.core.errors import OffloadError
from accelerate.device.base import Device
from accelerate.hooks import remove_hook_from_submodules
from accelerate.offload.dispatch import offload_stats
from accelerate.offload.dispatch_hook import hook_of

WIDTH, LAYERS = 1024, 12


@pytest.fixture(autouse=True)
def _nothing_is_left(device: Device) -> Generator[None]:
    gc.collect()
    before = device.memory_allocated(0)
    yield
    gc.collect()
    device.synchronize(0)
    # Libraries keep workspaces of their own from the first product on.
    assert (device.memory_allocated(0) or 0) - (before or 0) <= 64 * 2**20


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.up(x))
        if self.fails:
            raise ArithmeticError("in the middle")
        return x + self.down(y)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def built() -> Net:
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


def offloaded(model: nn.Module, kind: str, device: Device, folder: Path) -> nn.Module:
    where = device.torch_device(0)
    return cpu_offload(model, where) if kind == "cpu" else disk_offload(model, folder, where)


def many_rows(device: Device) -> int:
    """So many that a block computes for longer than it is copied; the simulated device, a CPU, needs few."""
    return 64 if device.type == "sim" else 4096


def run_on(device: Device, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the whole model gives on the device."""
    there = copy.deepcopy(model).to(device.torch_device(0))
    return there(x.to(device.torch_device(0))).cpu()


kinds = pytest.mark.parametrize("kind", ["cpu", "disk"])


@kinds
@pytest.mark.parametrize("many", [False, True], ids=["one row", "many rows"])
def test_an_offloaded_model_gives_what_it_gives_on_the_device(
    kind: str, many: bool, device: Device, tmp_path: Path
) -> None:
    """Copies ahead of the computation and behind it: bit-equal, in many forwards without waiting."""
    model, x = built(), torch.randn(many_rows(device) if many else 1, WIDTH)
    expected = run_on(device, model, x)
    offloaded(model, kind, device, tmp_path)
    here = x.to(device.torch_device(0))
    with torch.no_grad():
        found = [model(here) for _ in range(10)]  # the program runs ahead of the device
        assert all(torch.equal(each.cpu(), expected) for each in found)


@kinds
def test_two_blocks_are_there_at_a_time(kind: str, device: Device, tmp_path: Path) -> None:
    """Also when the program runs far ahead of the device."""
    model, x = built(), torch.randn(many_rows(device), WIDTH)
    block = sum(p.nbytes for p in model.layers[0].parameters())
    whole = sum(p.nbytes for p in model.parameters())
    _limit_blocks(model, kind, device, tmp_path)
    here = x.to(device.torch_device(0))
    with torch.no_grad():
        model(here)
        device.synchronize(0)
        device.reset_peak_memory(0)
        before = device.memory_allocated(0) or 0
        for _ in range(5):
            model(here)
        device.synchronize(0)
    # A layer has its input and output, both results of its linear layers, and relu's: 11 times the input.
    activations = 12 * here.nbytes
    assert (device.max_memory_allocated(0) or 0) - before <= 2 * block + activations + 2**22 < whole


def _limit_blocks(model: nn.Module, kind: str, device: Device, folder: Path) -> None:
    """A layer is a block, though there is room for more."""
    from accelerate.offload import dispatch_steps

    before, dispatch_steps.BLOCK = dispatch_steps.BLOCK, sum(p.nbytes for p in model.layers[0].parameters())
    try:
        offloaded(model, kind, device, folder)
    finally:
        dispatch_steps.BLOCK = before


@kinds
def test_copies_overlap_with_the_computation(kind: str, device: Device, tmp_path: Path) -> None:
    """All blocks but the first are asked for ahead, and the host's memory is pinned where that helps."""
    model, x = built(), torch.randn(8, WIDTH)
    _limit_blocks(model, kind, device, tmp_path)
    with torch.no_grad():
        model(x)
        stats = offload_stats(model)
        assert stats is not None
        stats.reset()
        model(x)
    ahead = LAYERS + 1 if device.pins_memory else 0
    assert (stats.blocks, stats.copies, stats.prefetched) == (LAYERS + 2, LAYERS + 2, ahead)
    assert stats.bytes_copied >= sum(p.source.nbytes for p in model.parameters())
    assert stats.wait_seconds > 0
    hook = hook_of(model)
    assert hook is not None
    assert hook._pager is not None
    pages = [page for block in hook._pager.blocks for page in block.pages]
    if kind == "cpu" and device.pins_memory:
        assert all(page.host is not None and page.host.is_pinned() for page in pages)


def test_the_users_own_stream_is_obeyed(device: Device) -> None:
    model, x = built(), torch.randn(64, WIDTH)
    expected = run_on(device, model, x)
    stream = device.stream(0)
    if stream is None:
        pytest.skip("the device has no streams")
    cpu_offload(model, device.torch_device(0))
    with torch.no_grad(), device.use_stream(stream):
        found = [model(x.to(device.torch_device(0))) for _ in range(3)]
    device.synchronize(0)
    assert all(torch.equal(each.cpu(), expected) for each in found)


@kinds
def test_a_block_that_raises_leaves_nothing_behind(kind: str, device: Device, tmp_path: Path) -> None:
    """E12"""
    model, x = built(), torch.randn(8, WIDTH)
    expected = run_on(device, model, x)
    offloaded(model, kind, device, tmp_path)
    model.layers[3].fails = True
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                model(x)
        model.layers[3].fails = False
        assert torch.equal(model(x), expected)


class Adapted(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


@kinds
def test_adapters_train_on_an_offloaded_base(kind: str, device: Device, tmp_path: Path) -> None:
    plain, x = built(), torch.randn(8, WIDTH)
    for place, layer in enumerate(plain.layers):
        plain.layers[place] = Adapted(layer)
    model = offloaded(copy.deepcopy(plain), kind, device, tmp_path)
    plain.to(device.torch_device(0))
    losses: list[list[float]] = []
    for net in (plain, model):
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=1e-3)
        losses.append([])
        for _ in range(3):
            loss = net(x.to(device.torch_device(0))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_what_does_not_fit_beside_the_rest_is_loaded_late(device: Device) -> None:
    """With room for one block and not for two, blocks are copied when they are needed; the model runs."""
    if not hasattr(device.module, "set_per_process_memory_fraction"):
        pytest.skip("the device's memory cannot be limited")
    model, x = built(), torch.randn(8, WIDTH)
    expected = run_on(device, model, x)
    block = sum(p.nbytes for p in model.layers[0].parameters())
    _limit_blocks(model, "cpu", device, Path())
    # Workspaces of the tests before may lie in large segments, beside which there is room for a block.
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
    device.empty_cache()
    with torch.no_grad():
        model(x)
    device.empty_cache()
    stats = offload_stats(model)
    assert stats is not None
    stats.reset()
    # Of a block with what the allocator rounds up, and segments of 2 MiB for small tensors.
    limit = device.module.memory_reserved(0) + int(1.2 * block) + 4 * 2**20
    device.module.set_per_process_memory_fraction(limit / device.get_memory_info(0)[1])
    try:
        with torch.no_grad():
            assert torch.equal(model(x), expected)
    finally:
        device.module.set_per_process_memory_fraction(1.0)
    assert stats.blocks == stats.copies == LAYERS + 2
    assert stats.prefetched < LAYERS // 2


def test_memory_and_disk_beside_what_stays(device: Device, tmp_path: Path) -> None:
    model, x = built(), torch.randn(8, WIDTH)
    expected = run_on(device, model, x)
    places: dict[str, Any] = {"": 0, "layers.2": "cpu", "layers.5": "disk", "layers.6": "cpu", "out": "disk"}
    dispatch_model(model, places, offload_dir=tmp_path)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    with pytest.raises(RuntimeError, match="the model cannot be moved"):
        model.to("cpu")
    remove_hook_from_submodules(model)
    model.cpu()
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_training_what_is_offloaded_is_refused(device: Device) -> None:
    model = cpu_offload(built().requires_grad_(), device.torch_device(0))
    with pytest.raises(OffloadError, match="is offloaded, and cannot be trained"):
        model(torch.randn(2, WIDTH)).sum().backward()
    gc.collect()
