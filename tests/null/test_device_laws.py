"""One list of laws for all device files: a new file inherits them by being there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import device as devices
from accelerate.utils import DistributedType
from tests.support.devices import FakeModule, install

NAMES = devices.DEVICES.names()
VENDORS = tuple(name for name in NAMES if devices.get(name).priority > 0)
PRECISIONS = {"bf16", "fp16", "fp8"}


@pytest.fixture(params=VENDORS)
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, FakeModule]:
    """Each vendor's device, over a fake of the vendor's module."""
    return devices.get(request.param), install(monkeypatch, request.param)


@pytest.mark.parametrize("name", NAMES)
def test_facts_have_their_types(name: str) -> None:
    device = devices.get(name)
    assert device.type == device.type.lower()
    assert device.type
    assert re.fullmatch(r"[a-z]*", device.backend)
    assert device.visible_variable is None or re.fullmatch(r"[A-Z_]+", device.visible_variable)
    assert device.distributed_type in {member.value for member in DistributedType}
    assert isinstance(device.priority, int)
    assert device.dtypes <= PRECISIONS
    assert device.rng_key
    assert device.out_of_memory_messages
    assert not any(pattern.startswith("/") for pattern in device.node_patterns)


@pytest.mark.parametrize("fact", ["type", "rng_key", "visible_variable", "priority"])
def test_facts_that_tell_devices_apart_are_unique(fact: str) -> None:
    told = [value for name in NAMES if (value := getattr(devices.get(name), fact)) not in (None, 0)]
    assert len(told) == len(set(told))


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_small_and_says_what_was_run(name: str) -> None:
    source = Path(sys.modules[type(devices.get(name)).__module__].__file__ or "").read_text(encoding="utf-8")
    assert source.count("\n") <= 160
    words = type(devices.get(name)).__doc__ or ""
    assert name == "null" or re.search(r"\b[Rr]un\b", words), "the docstring says where the device was run"


def test_no_device_file_imports_torch() -> None:
    script = (
        "import sys; from accelerate import device as d; "
        "list(d.DEVICES); d.probe_devices(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize("name", [name for name in VENDORS if devices.get(name).extension])
def test_a_device_without_its_package_is_absent(name: str) -> None:
    assert not devices.get(name).is_available()
    assert devices.get(name).count() == 0


def test_available_and_count(fake: tuple[Any, FakeModule]) -> None:
    device, module = fake
    assert device.is_available()
    assert device.count() == module.count
    assert isinstance(device.name(), str)


def test_none_of_them_is_none(fake: tuple[Any, FakeModule]) -> None:
    device, module = fake
    module.count = 0
    if isinstance(getattr(module, "kind", None), str):
        module.kind = "CPU"  # type: ignore[attr-defined]
    if device.type != "mps":
        assert not device.is_available()
        assert device.count() == 0


def test_precisions_are_asked_of_the_device(fake: tuple[Any, FakeModule]) -> None:
    device, _ = fake
    assert device.supports("no")
    assert device.supports("fp32")
    assert device.supports("bf16")
    assert not device.supports("int4")
    for name in PRECISIONS - device.dtypes:
        assert not device.supports(name)


def test_bind_makes_a_device_current(fake: tuple[Any, FakeModule]) -> None:
    device, module = fake
    last = module.count - 1
    bound = device.bind(last)
    assert bound.type == device.type
    assert bound.index in (None, last, 0)
    assert device.current() == last
    assert device.torch_device().type == device.type


def test_synchronize_reaches_the_module(fake: tuple[Any, FakeModule]) -> None:
    device, module = fake
    device.synchronize()
    device.synchronize(0)
    assert module.calls["synchronize 0"] == 2


def test_a_stream_is_used_inside_its_context(fake: tuple[Any, FakeModule]) -> None:
    device, module = fake
    stream = device.stream()
    with device.use_stream(stream):
        assert module.streams == ([] if stream is None else [stream])
    assert module.streams == []


def test_generator_state_goes_round(fake: tuple[Any, FakeModule]) -> None:
    device, _ = fake
    device.seed(7)
    kept = device.get_rng_state_all()
    one = device.get_rng_state(0)
    device.seed(8)
    assert not _same(device.get_rng_state(0), one)
    device.set_rng_state(one, 0)
    assert _same(device.get_rng_state(0), one)
    device.seed(9)
    device.set_rng_state_all(kept)
    assert _same(device.get_rng_state(0), one)


def test_states_of_fewer_devices_set_those_they_are_for(fake: tuple[Any, FakeModule]) -> None:
    device, _ = fake
    device.seed(7)
    kept = device.get_rng_state_all()
    if isinstance(kept, list) and len(kept) > 1:
        device.seed(8)
        device.set_rng_state_all(kept[:1])
        assert _same(device.get_rng_state(0), kept[0])
        assert not _same(device.get_rng_state(1), kept[1])


def test_memory_is_told_in_bytes(fake: tuple[Any, FakeModule]) -> None:
    device, module = fake
    free, total = device.get_memory_info(0)
    module.take(2**20)
    # Metal's memory is the machine's own: what other programs leave may be less than what Metal allows.
    assert free - device.get_memory_info(0)[0] == 2**20 or device.type == "mps"
    assert 0 < device.get_memory_info()[0] <= total
    assert device.memory_allocated(0) == 2**20
    module.take(-(2**20))
    assert device.max_memory_allocated(0) in (2**20, None)
    assert device.memory_allocated() == 0
    if device.reset_peak_memory(0):
        assert device.max_memory_allocated(0) == 0


def test_empty_cache_is_asked_of_those_that_have_one(fake: tuple[Any, FakeModule]) -> None:
    device, module = fake
    device.empty_cache()
    has_one = getattr(module, "empty_cache", None) is not None
    assert module.calls["empty_cache"] == int(has_one)


@pytest.mark.parametrize("name", NAMES)
def test_out_of_memory_is_recognised_and_nothing_else(name: str) -> None:
    device = devices.get(name)
    assert device.is_out_of_memory(torch.OutOfMemoryError("full"))
    for text in device.out_of_memory_messages:
        assert device.is_out_of_memory(RuntimeError(f"{text}. Tried to allocate 2.00 GiB"))
        assert not device.is_out_of_memory(ValueError(text))
    assert not device.is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def _same(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    return left == right
