"""Checkpoints loaded onto two capped devices, memory and disk: where weights go, and what it takes."""

from __future__ import annotations

import gc
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import (
    Accelerator,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate.core.errors import DeviceError
from accelerate.utils import align_module_device
from accelerate.utils.modeling import get_state_dict_from_offload
from tests.support import sim
from tests.support.offloaded import is_offloaded

KiB = 2**10
WIDTH, LAYERS = 128, 8
BLOCK = 4 * (2 * WIDTH**2 + 2 * WIDTH)


class TwoMatrices(nn.Module):
    """Two matrices, 129 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Blocks, a buffer that no file holds, a head that is the first layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(TwoMatrices() for _ in range(LAYERS))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.first.weight
        self.factor: torch.Tensor
        self.register_buffer("factor", torch.arange(WIDTH) / WIDTH, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x * self.factor)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@pytest.fixture(autouse=True)
def _empty_devices() -> Generator[None]:
    gc.collect()
    torch.sim.empty_cache()
    for device in range(2):
        torch.sim.reset_peak_memory_stats(device)
    yield
    gc.collect()
    assert [torch.sim.memory_allocated(device) for device in range(2)] == [0, 0]


@pytest.fixture
def net(tmp_path: Path) -> Net:
    """A model, whose weights lie in ``tmp_path / "w"`` in several shards."""
    torch.manual_seed(0)
    net = Net().eval()
    Accelerator(cpu=True).save_model(net, tmp_path / "w", max_shard_size=300 * KiB)
    return net


def empty() -> Net:
    with init_empty_weights():
        return Net().eval()


X = torch.randn(4, WIDTH)
FOUR: dict[str, Any] = {
    "first": 0, "head": 0, "norm": 0, "factor": 0, "layers.0": 0, "layers.1": 0, "layers.2": "sim:1",
    "layers.3": 1, "layers.4": "cpu", "layers.5": "disk", "layers.6": "disk", "layers.7": "cpu:0",
}  # fmt: skip
SPREAD: dict[str, Any] = {
    "four kinds of places": FOUR,
    "disk and a device": {"": "disk", "first": 0, "head": 0},
    "one device": {"": 1},
}


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("device_map", SPREAD.values(), ids=SPREAD)
def test_outputs_are_equal_and_nothing_is_written(
    tmp_path: Path, net: Net, device_map: dict[str, Any], safe: bool
) -> None:
    """E1, E3, E11: devices, memory and disk, from both formats."""
    if not safe:
        Accelerator(cpu=True).save_model(net, tmp_path / "bin", safe_serialization=False)
    offload = tmp_path / "offload"
    model = load_checkpoint_and_dispatch(
        empty(), tmp_path / ("w" if safe else "bin"), device_map, offload_folder=offload
    )
    for _ in range(2):
        given = X.to("sim:1") if device_map == {"": 1} else X  # which has no hooks
        torch.testing.assert_close(model(given).cpu(), net(X))
    assert not offload.exists()
    assert model.hf_device_map == device_map
    assert model.head.weight is model.first.weight  # pyright: ignore
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    torch.testing.assert_close(state, dict(net.state_dict()))


def test_what_is_on_disk_is_a_stand_in_over_its_file(tmp_path: Path, net: Net) -> None:
    model: Any = load_checkpoint_and_dispatch(empty(), tmp_path / "w", FOUR)
    weight = model.layers[5].up.weight
    assert is_offloaded(weight)
    assert not weight.source.in_memory
    torch.testing.assert_close(weight.source.host_tensor(), net.layers[5].up.weight.data)  # pyright: ignore
    assert model.layers[0].up.weight.device == torch.device("sim", 0)
    assert model.layers[3].up.weight.device == torch.device("sim", 1)


@pytest.mark.parametrize("is_used", [False, True], ids=["a new folder", "a folder of an older model"])
def test_hooks_have_the_weights_that_stay_in_the_checkpoint(tmp_path: Path, net: Net, is_used: bool) -> None:
    """What clients read through a hook are the values that the forward computes with."""
    if is_used:
        dispatch_model(Net(), {"": 0, "layers": "disk"}, offload_dir=tmp_path / "offload")
    model: Any = load_checkpoint_and_dispatch(
        empty(), tmp_path / "w", {"": 0, "layers": "disk"}, offload_folder=tmp_path / "offload"
    )
    part, expected = model.layers[2].up, net.layers[2].up.weight  # pyright: ignore
    torch.testing.assert_close(part._hf_hook.weights_map["weight"], expected.data)
    assert "layers.2.up.weight" in dict(part._hf_hook.weights_map.dataset)
    for _ in range(2):
        with align_module_device(part):
            torch.testing.assert_close(part.weight.data.cpu(), expected.data)
        state = get_state_dict_from_offload(part, "weight", {"weight": ""})
        torch.testing.assert_close(state["weight"], expected.data)
        torch.testing.assert_close(model(X).cpu(), net(X))


@pytest.mark.parametrize("kind", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_a_plan_fits_devices_that_are_too_small_for_the_model(tmp_path: Path, net: Net, kind: str) -> None:
    """A plan that does not fit would really run out of memory, while loading or while it runs."""
    room = 4 * BLOCK
    limits: dict[int | str, int | str] = {0: room, 1: room, "cpu": 2 * BLOCK}
    with sim.capacity(room + BLOCK // 2), torch.no_grad():
        model = load_checkpoint_and_dispatch(
            empty(), tmp_path / "w", kind, max_memory=limits, no_split_module_classes=["TwoMatrices"]
        )
        peaks = [torch.sim.max_memory_allocated(device) for device in range(2)]
        assert max(peaks) <= room
        torch.testing.assert_close(model(X).cpu(), net(X))
    assert len(set(model.hf_device_map.values())) > 2  # pyright: ignore
    del model


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_loading_takes_no_more_than_the_model_and_a_tensor(
    tmp_path: Path, net: Net, dtype: torch.dtype
) -> None:
    """C2: never two copies; a cast is made before the device sees the tensor."""
    model = empty()
    load_checkpoint_in_model(model, tmp_path / "w", {"": 0}, dtype=dtype)
    held = sum(p.nbytes for p in model.parameters())
    assert torch.sim.max_memory_allocated(0) <= held + 4 * WIDTH**2 + 64 * KiB
    torch.testing.assert_close(model.first.weight.cpu(), net.first.weight.to(dtype))


def test_a_dtype_that_the_file_does_not_have_is_made_when_a_weight_is_loaded(
    tmp_path: Path, net: Net
) -> None:
    """To an accelerator nothing has to be written for it."""
    model: Any = empty()
    model.factor = model.factor.bfloat16()
    places = {"": 0, "layers": "disk"}
    load_checkpoint_and_dispatch(model, tmp_path / "w", places, dtype=torch.bfloat16)  # pyright: ignore
    expected: Any = net.bfloat16()
    expected.factor = expected.factor.bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(model(X.bfloat16()).cpu(), expected(X.bfloat16()), rtol=3e-2, atol=3e-2)
    assert model.layers[0].up.weight.dtype is torch.bfloat16


def test_a_device_that_is_not_here_is_refused(tmp_path: Path, net: Net) -> None:
    """E5: before anything is loaded."""
    for device in (2, "sim:7", torch.device("sim", 3)):
        model = empty()
        with pytest.raises(DeviceError, match="sim"):
            load_checkpoint_and_dispatch(model, tmp_path / "w", {"": device})
        assert all(p.is_meta for p in model.parameters())
