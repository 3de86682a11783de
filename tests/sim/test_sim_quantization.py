"""Models in 8 and 4 bits with parts on an accelerator, in memory and on disk."""

from __future__ import annotations

import gc
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.utils import load_and_quantize_model
from accelerate.utils.modeling import has_offloaded_params
from tests.clients.big import library, needs
from tests.null.test_quantization import FORMATS, config, empty, inputs, net
from tests.support.long_run import long_run_param

pytestmark = [needs("bitsandbytes"), pytest.mark.timeout(120)]


@pytest.fixture(autouse=True, scope="module")
def _warm_library() -> None:
    """Let the library make its tables, which stay on each device, and load what it loads at first use."""
    for device in range(2):
        for name in FORMATS:
            model = load_and_quantize_model(net(), config(name), device_map={"": device})
            with torch.no_grad():
                model(inputs().to(f"sim:{device}"))


@pytest.fixture(autouse=True)
def _nothing_is_left(_warm_library: None) -> Generator[None]:
    gc.collect()
    before = allocated()
    yield
    gc.collect()
    assert allocated() == before
    torch.sim.empty_cache()


def allocated() -> list[int]:
    return [torch.sim.memory_allocated(device) for device in range(2)]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    library("safetensors.torch").save_file(net().state_dict(), tmp_path / "model.safetensors")
    return tmp_path


MAPS: dict[str, dict[str, Any]] = {
    "one device": {"": 0},
    "two devices": {"embed": 0, "block": 1, "norm": 0, "shift": 0, "head": 1},
    "memory": {"": 0, "block.0": "cpu"},
    "disk": {"": 0, "block.0": "disk", "norm": "disk"},
}


# By default each format on some maps: 4 bits are slow on a device whose kernels are those of the CPU.
ON_MAPS: dict[str, tuple[str, ...]] = {
    "int8": tuple(MAPS),
    "int8, all columns": tuple(MAPS),
    "nf4": ("memory",),
    "fp4": ("one device",),
    "nf4, double": ("two devices", "disk"),
}


@pytest.mark.parametrize(
    ("name", "places"),
    [
        (name, places) if places in ON_MAPS[name] else long_run_param(name, places)
        for name in FORMATS
        for places in MAPS
    ],
)
def test_quantized_layers_run_where_the_map_puts_them(name: str, places: str, weights: Path) -> None:
    expected = load_and_quantize_model(empty(), config(name), weights, device_map={"": "cpu"})(inputs())
    model = load_and_quantize_model(
        empty(), config(name), weights, device_map=MAPS[places], offload_folder=weights / "folder"
    )
    with torch.no_grad():
        first, second = model(inputs().to("sim:0")).cpu(), model(inputs().to("sim:0")).cpu()
    torch.testing.assert_close(first, expected, rtol=2e-3, atol=2e-3)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("name", "place"), [("int8", "cpu"), ("int8", "disk"), ("nf4", "disk"), long_run_param("nf4", "cpu")]
)
def test_offloaded_layers_leave_nothing_on_the_device(name: str, place: str, weights: Path) -> None:
    """Neither the values that 8-bit layers keep for themselves, nor a copy of those in memory."""
    places: Any = {"": 0, "block": place}
    model: Any = load_and_quantize_model(
        empty(), config(name), weights, device_map=places, offload_folder=weights / "folder"
    )
    with torch.no_grad():
        model(inputs().to("sim:0"))
        gc.collect()
        first = allocated()
        model(inputs().to("sim:0"))
    gc.collect()
    assert allocated() == first
    layer = model.block[0]
    assert has_offloaded_params(layer)
    assert getattr(layer.weight, "CB", None) is None
    if name == "int8":
        assert layer.state.CB is layer.state.SCB is None


@pytest.mark.parametrize(
    "name", [long_run_param(name) if name in ("nf4", "fp4") else name for name in FORMATS]
)
def test_a_model_with_offloaded_layers_is_saved(name: str, weights: Path) -> None:
    model = load_and_quantize_model(empty(), config(name), weights, device_map={"": 0, "block.0": "cpu"})
    with torch.no_grad():
        expected = model(inputs().to("sim:0")).cpu()
    Accelerator().save_model(model, weights / "saved")
    loaded = load_and_quantize_model(empty(), config(name), weights / "saved", device_map={"": 1})
    with torch.no_grad():
        assert torch.equal(loaded(inputs().to("sim:1")).cpu(), expected)
