"""One list of laws for all device files: a new file inherits them by being there."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import device as devices
from accelerate.core.errors import DeviceError
from accelerate.utils import DistributedType, TorchDynamoPlugin
from tests.support.devices import FakeModule, install, machine
from tests.support.environment import clean

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
    assert source.count("\n") <= 180
    words = type(devices.get(name)).__doc__ or ""
    assert name == "null" or re.search(r"\b[Rr]un\b", words), "the docstring says where the device was run"


@pytest.mark.parametrize("name", VENDORS)
def test_a_file_says_where_its_facts_come_from(name: str) -> None:
    """A page, and its version, date or commit."""
    words = type(devices.get(name)).__doc__ or ""
    _, _, sources = words.partition("Source:")
    assert re.search(r"\d+\.\d+|\d{4}-\d\d|at [0-9a-f]{7}", sources), sources
    assert re.search(r'"[^"]+"|``[^`]+``', sources), sources


@pytest.mark.parametrize("name", ["cuda", "xpu", "mps"])
def test_a_fake_has_no_function_that_the_real_module_lacks(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """torch carries the modules of these three, with a device or without one."""
    real = getattr(torch, name)
    fake = install(monkeypatch, name)
    offered = {n for n in dir(FakeModule) if not n.startswith("_")} - {"take"}
    assert [n for n in offered if getattr(fake, n, None) is not None and not hasattr(real, n)] == []


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


def test_packages_without_their_drivers_break_nothing(tmp_path: Path) -> None:
    """Each is installed, and its import fails as it does where the driver's libraries are not there."""
    packages = {devices.get(name).extension.partition(".")[0] for name in VENDORS} - {""}
    for number, package in enumerate(sorted(packages)):
        error = ("ImportError", "OSError", "RuntimeError")[number % 3]
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"raise {error}('lib{package}.so: not found')\n")
    script = (
        "import accelerate; from accelerate import device as d; assert d.probe_devices()[0].type == 'cpu'\n"
        "assert d.detect().type == 'cpu'; print(accelerate.Accelerator().device)"
    )
    env = clean({"PYTHONPATH": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "cpu\n"), done.stderr


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


def test_an_event_orders_two_streams_or_there_are_none(fake: tuple[Any, FakeModule]) -> None:
    device, _ = fake
    stream, current = device.stream(), device.current_stream()
    assert (stream is None) == (current is None) == (device.type in ("mps", "xla"))
    event = device.record_event(stream, timed=True)
    device.wait_event(event, current)
    if stream is None:
        assert event is None
    else:
        assert (event.recorded_on, event.enable_timing, current.waits_for) == (stream, True, [event])


def test_its_process_groups_are_the_vendors(
    fake: tuple[Any, FakeModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, _ = fake
    monkeypatch.setattr(torch.distributed, "is_backend_available", {device.backend, "gloo"}.__contains__)
    if device.type == "mps":
        with pytest.raises(DeviceError, match="none is known"):
            device.group_backend()
    else:
        assert device.group_backend() == device.backend


def test_it_is_compiled_by_the_vendors_backend(fake: tuple[Any, FakeModule]) -> None:
    """The default one is warned of where the vendor brings another."""
    device, _ = fake
    if not device.compile_backend:
        assert device.type == "xla"
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TorchDynamoPlugin(backend=device.compile_backend).check_device(device)
    inductor = TorchDynamoPlugin(backend="inductor")
    if device.compile_backend != "inductor":
        with pytest.warns(UserWarning, match=f"pass dynamo_backend='{device.compile_backend}'"):
            inductor.check_device(device)


# Files of two devices, where a node for each is not what counts. A device of Neuron's has two cores.
FILES: dict[str, dict[str, str]] = {
    "neuron": {"dev/neuron0": ""},
    "xpu": {
        "dev/dri/renderD128": "",
        "sys/class/drm/renderD128/device/vendor": "0x8086",
        "dev/dri/renderD129": "",
        "sys/class/drm/renderD129/device/vendor": "0x8086",
    },
    "xla": {
        "sys/bus/pci/devices/0000:00:04.0/vendor": "0x1ae0",
        "sys/bus/pci/devices/0000:00:04.0/device": "0x0063",
        "sys/bus/pci/devices/0000:00:05.0/vendor": "0x1ae0",
        "sys/bus/pci/devices/0000:00:05.0/device": "0x0063",
    },
}


@pytest.mark.parametrize("name", [name for name in VENDORS if devices.get(name).visible_variable])
def test_its_variable_hides_devices_before_torch_is_loaded(tmp_path: Path, name: str) -> None:
    device = devices.get(name)
    variable = device.visible_variable or ""
    nodes = [pattern.replace("[0-9]*", n) for pattern in device.node_patterns[:1] for n in "01"]
    texts = FILES.get(name) or dict.fromkeys(nodes, "")
    build = {"cuda": "12.8", "hip": None, "xpu": "20250000" if name == "xpu" else None}
    for value, count in ((None, 2), ("0", 1), ("0,1", 2), ("", 0)):
        env = {} if value is None else {variable: value}
        assert device.probe_count(machine(tmp_path, texts, env=env, build=build)) == count, value


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
