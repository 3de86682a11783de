"""Stand-ins at the outermost edge of a device: the module its vendor gives torch, and a machine's files.

A fake module keeps what it is told and counts what is asked, so that a device file is tested for what it
says to the vendor's API and for what it makes of the answers. It computes nothing.
"""

from __future__ import annotations

import sys
import types
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate.device import DEVICES, DeviceProbeHost, get, probe_devices
from accelerate.device.base import Device
from accelerate.device.null import FakeTestDevice

TOTAL = 16 * 2**30


class FakeStream:
    """A stream that keeps which events it was told to record and to wait for."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.waits_for: list[Any] = []

    def record_event(self, event: Any) -> None:
        event.recorded_on = self

    def wait_event(self, event: Any) -> None:
        self.waits_for.append(event)


class FakeModule(types.ModuleType):
    """What a vendor puts at ``torch.<type>``: the functions that CUDA's module made customary."""

    def __init__(self, name: str, count: int = 2) -> None:
        super().__init__(name)
        self.count, self.index = count, 0
        self.calls: Counter[str] = Counter()
        self.states = {index: torch.tensor([index], dtype=torch.uint8) for index in range(count)}
        self.used: Counter[int] = Counter()
        self.highest: Counter[int] = Counter()
        self.seeds: list[int] = []
        self.streams: list[Any] = []
        self.default_streams = [FakeStream(index) for index in range(count)]

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def current_device(self) -> int:
        return self.index

    def set_device(self, index: int) -> None:
        assert 0 <= index < self.count
        self.index = index

    def get_device_name(self, index: int) -> str:
        return f"{self.__name__} card {index}"

    def is_bf16_supported(self) -> bool:
        return True

    def synchronize(self, index: int) -> None:
        self.calls[f"synchronize {index}"] += 1

    def get_rng_state(self, index: int) -> torch.Tensor:
        return self.states[index].clone()

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        self.states[index] = state.clone()

    def manual_seed_all(self, seed: int) -> None:
        self.seeds.append(seed)
        self.states = {index: torch.tensor([seed % 256], dtype=torch.uint8) for index in self.states}

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return TOTAL - self.used[index], TOTAL

    def memory_allocated(self, index: int) -> int:
        return self.used[index]

    def max_memory_allocated(self, index: int) -> int:
        return self.highest[index]

    def reset_peak_memory_stats(self, index: int) -> None:
        self.highest[index] = self.used[index]

    def empty_cache(self) -> None:
        self.calls["empty_cache"] += 1

    def memory_reserved(self, index: int) -> int:
        return self.used[index]

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(total_memory=TOTAL, pci_domain_id=0, pci_bus_id=0x3B + index, pci_device_id=0)

    def Stream(self, device: int) -> FakeStream:
        return FakeStream(device)

    def Event(self, enable_timing: bool = False) -> SimpleNamespace:
        return SimpleNamespace(enable_timing=enable_timing, recorded_on=None)

    def current_stream(self, index: int) -> FakeStream:
        return self.streams[-1] if self.streams else self.default_streams[index]

    @contextmanager
    def stream(self, stream: Any) -> Generator[Any]:
        self.streams.append(stream)
        yield stream
        self.streams.pop()

    def take(self, size: int, index: int = 0) -> None:
        """As if a tensor of ``size`` bytes had been made."""
        self.used[index] += size
        self.highest[index] = max(self.highest[index], self.used[index])


class FakeMetal(FakeModule):
    """``torch.mps``: one device, no index anywhere."""

    def __init__(self) -> None:
        super().__init__("mps", 1)

    # These are functions that real torch.mps has not: using one is an error.
    current_device = set_device = mem_get_info = memory_allocated = max_memory_allocated = None  # type: ignore
    reset_peak_memory_stats = get_device_name = Stream = stream = manual_seed_all = None  # type: ignore
    is_bf16_supported = current_stream = memory_reserved = get_device_properties = None  # type: ignore

    def synchronize(self) -> None:  # type: ignore[override]
        self.calls["synchronize 0"] += 1

    def get_rng_state(self) -> torch.Tensor:  # type: ignore[override]
        return self.states[0].clone()

    def set_rng_state(self, state: torch.Tensor) -> None:  # type: ignore[override]
        self.states[0] = state.clone()

    def manual_seed(self, seed: int) -> None:
        FakeModule.manual_seed_all(self, seed)

    def recommended_max_memory(self) -> int:
        return TOTAL

    def driver_allocated_memory(self) -> int:
        return self.used[0]

    def current_allocated_memory(self) -> int:
        return self.used[0]


class FakeGaudi(FakeModule):
    """``habana_frameworks.torch.hpu``: streams without an index, generators in ``random``, no cache."""

    empty_cache = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__("hpu", 2)
        self.random = SimpleNamespace(
            get_rng_state=lambda: self.states[0].clone(),
            set_rng_state=lambda state: self.states.update({0: state.clone()}),
            manual_seed_all=lambda seed: FakeModule.manual_seed_all(self, seed),
        )

    get_rng_state = set_rng_state = manual_seed_all = None  # type: ignore[assignment]

    def synchronize(self) -> None:  # type: ignore[override]
        self.calls["synchronize 0"] += 1

    def Stream(self) -> FakeStream:  # type: ignore[override]
        return FakeStream(self.index)

    def current_stream(self) -> FakeStream:  # type: ignore[override]
        return super().current_stream(self.index)


class FakeTecorigin(FakeModule):
    """``torch.sdaa``: it tells the size of a card, and not what is free of it."""

    mem_get_info = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__("sdaa")


class FakeXla(FakeModule):
    """``torch_xla.core.xla_model`` and ``torch_xla.runtime`` in one; devices go by name, state is a seed."""

    Stream = Event = current_stream = get_device_properties = memory_reserved = None  # type: ignore

    def __init__(self, kind: str = "TPU") -> None:
        super().__init__("xla", 1)
        self.kind, self.state = kind, 0

    def device_type(self) -> str:
        return self.kind

    def addressable_device_count(self) -> int:
        return self.count

    def device(self, index: int | None = None) -> Any:
        return torch.device("xla", index or 0)

    def sync(self) -> None:
        self.calls["sync"] += 1

    def wait_device_ops(self) -> None:
        self.calls["synchronize 0"] += 1

    def get_rng_state(self, device: str | None = None) -> int:  # type: ignore[override]
        assert device in (None, "xla:0")
        return self.state

    def set_rng_state(self, seed: int, device: str | None = None) -> None:  # type: ignore[override]
        assert device in (None, "xla:0")
        assert type(seed) is int
        self.state = seed

    def get_memory_info(self, device: str) -> dict[str, int]:
        assert device == "xla:0"
        return {"bytes_used": self.used[0], "bytes_limit": TOTAL, "peak_bytes_used": self.highest[0]}


def install(monkeypatch: pytest.MonkeyPatch, name: str) -> FakeModule:
    """Puts a fake of the device file ``name`` where its vendor's package would be, and returns it.

    The extension becomes importable, ``torch.<type>`` exists, and ``torch.device`` takes the type.
    """
    from accelerate import device as devices

    device = devices.get(name)
    makers: dict[str, Any] = {"mps": FakeMetal, "hpu": FakeGaudi, "sdaa": FakeTecorigin, "xla": FakeXla}
    fake: FakeModule = makers[name]() if name in makers else FakeModule(name)
    if name == "hpu":
        experimental = SimpleNamespace(_is_fp16_supported=lambda: True)
        packages: Mapping[str, Any] = {
            "habana_frameworks": types.ModuleType("habana_frameworks"),
            "habana_frameworks.torch": types.ModuleType("habana_frameworks.torch"),
            "habana_frameworks.torch.hpu": fake,
            "habana_frameworks.torch.utils.experimental": experimental,
            "habana_frameworks.torch.distributed.hccl": types.ModuleType("hccl"),
        }
    elif name == "xla":
        monkeypatch.setenv("TPU_LIBRARY_PATH", "/lib/libtpu.so")
        top = types.ModuleType("torch_xla")
        top.device, top.sync = fake.device, fake.sync  # type: ignore[attr-defined]
        packages = {
            "torch_xla": top,
            "torch_xla.core.xla_model": fake,
            "torch_xla.runtime": fake,
            "torch_xla.distributed.xla_backend": types.ModuleType("xla_backend"),
        }
    else:
        monkeypatch.setattr(torch, device.type, fake, raising=False)
        packages = {device.extension: types.ModuleType(device.extension)} if device.extension else {}
    for package, module in packages.items():
        monkeypatch.setitem(sys.modules, package, module)
    if name == "mps":
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: True)
    _teach_torch_device(monkeypatch)
    return fake


def _teach_torch_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.device`` takes types that only a vendor's package registers."""
    real = torch.device

    def device(kind: str, index: int | None = None) -> Any:
        try:
            return real(kind) if index is None else real(kind, index)
        except RuntimeError:
            return SimpleNamespace(type=kind, index=index)

    monkeypatch.setattr(torch, "device", device)


def device_named(name: str) -> Device:
    """The device of that type, as Accelerator uses it."""
    return get(name)


def devices_of(host: DeviceProbeHost) -> tuple[Device, int]:
    """The device that is found on a machine, and how many there are."""
    return probe_devices(host)


def device_types() -> tuple[str, ...]:
    """The types of devices that the package knows."""
    return DEVICES.names()


def vendors_by_rename() -> tuple[str, ...]:
    """The types that torch does not have: their packages give the name to its spare type."""
    return tuple(name for name in DEVICES.names() if get(name).extension and not _has_type(get(name).type))


def _has_type(type: str) -> bool:
    try:
        torch.device(type)
    except RuntimeError:
        return False
    return True


def is_generic(device: Device) -> bool:
    """Whether no file of the package says anything about this type of device."""
    return type(device) is Device


class CountingDevice(FakeTestDevice):
    """Devices that compute nothing, of ``capacity`` bytes each; they keep their last seed."""

    def __init__(self, size: int, capacity: int = 2**30) -> None:
        super().__init__(size)
        self.capacity, self.used_bytes = capacity, Counter[int]()
        self.seeds: list[int] = []

    def seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def allocate(self, size: int, index: int | None = None) -> None:
        """Take ``size`` bytes of a device."""
        self.used_bytes[self._index_or_current(index)] += size

    def get_memory_info(self, index: int | None = None) -> tuple[int, int]:
        return self.capacity - self.used_bytes[self._index_or_current(index)], self.capacity


@contextmanager
def added_device(name: str, priority: int | None = None) -> Generator[None]:
    """A device of another package, known inside the ``with``; with a priority it is also found here."""

    class Own(Device):
        def is_usable(self) -> bool:
            return priority is not None

    Own.type = name
    if priority is not None:
        Own.priority = priority
    with DEVICES.add(name, Own()):
        yield


def pretend_devices(monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> None:
    """Let the search for devices find ``count`` of this kind here, whatever machine it is asked about."""
    monkeypatch.setattr("accelerate.device.probe_devices", lambda machine=None: (Device(kind), count))


def pretend_memory(
    monkeypatch: pytest.MonkeyPatch, size: int, capacity: int, *, as_type: str = ""
) -> CountingDevice:
    """Let there be ``size`` fake devices of ``capacity`` bytes here, which torch calls ``as_type``."""
    device = CountingDevice(size, capacity)
    monkeypatch.setattr("accelerate.device.detect", lambda: device)
    if as_type:
        monkeypatch.setattr(
            FakeTestDevice, "torch_device", lambda self, index=None: torch.device(as_type, index)
        )
    return device


def machine(
    root: Path,
    files: Mapping[str, str] | Iterator[str] | list[str] | tuple[str, ...] = (),
    *,
    env: Mapping[str, str] | None = None,
    build: Mapping[str, str | None] | None = None,
    packages: tuple[str, ...] | None = None,
) -> DeviceProbeHost:
    """A machine that has ``files`` (names, or names with their text) below ``root``.

    Without ``packages`` every vendor's package is installed; ``build`` defaults to a torch for CUDA.
    """
    texts = dict(files) if isinstance(files, Mapping) else dict.fromkeys(files, "")
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return DeviceProbeHost(
        root=root,
        env=env or {},
        build=lambda: {"cuda": "12.8", "hip": None, "xpu": None} if build is None else build,
        has_package=(lambda name: True) if packages is None else packages.__contains__,
    )
