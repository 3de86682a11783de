"""Devices: one file per device type; the default class works for every type that torch knows.

DEVICES           the registry of the files
get(type)         the device of a type
detect()          the best device of this machine
probe_devices()   the best device and how many there are, without importing torch
"""

from __future__ import annotations

from typing import Any

from accelerate.core.errors import DeviceError, nearest
from accelerate.core.registry import Registry
from accelerate.core.setting import setting
from accelerate.core.value_types import frozen_dataclass
from accelerate.device.base import Device, DeviceProbeHost, count_cores

__all__ = [
    "DEVICES",
    "Device",
    "DeviceProbeHost",
    "ProcessDeviceSettings",
    "accelerators",
    "count_cores",
    "detect",
    "get",
    "probe_devices",
]

DEVICES: Registry[Device] = Registry(
    "device", "accelerate.device", "accelerate.devices", exclude=("base", "gpu_counts")
)


def get(type: str) -> Device:
    """Return the device of a type: its file, else the default ``Device`` if torch knows the type.

    Raises:
        DeviceError: nobody knows the type; the nearest name is suggested.
    """
    if type in DEVICES.names():
        return DEVICES.get(type)
    for device in DEVICES:
        if device.type == type:
            return device
    return _make_default_device(type)


def _make_default_device(type: str) -> Device:
    import torch

    try:
        torch.get_device_module(type)
    except RuntimeError as error:
        near = _device_called(type) or nearest(type, DEVICES.names())
        raise DeviceError(
            f"unknown device {type!r}",
            why=f"torch has no module for it; known: {', '.join(DEVICES.names())}",
            fix=f"did you mean {near!r}?" if near else "import the package that registers it with torch",
        ) from error
    device = Device(type)
    if torch.distributed.is_available():
        device.backend = torch.distributed.Backend.default_device_backend_map.get(type, "")
    return device


def _device_called(name: str) -> str | None:
    """Return the type of the device whose own variables have a name that torch does not use: ``"tpu"``."""
    common = [device for device in DEVICES if device.is_most_common]
    for device in (*common, *accelerators()):
        words = f"{device.distributed_type}_{device.visible_variable}".split("_")
        if name.upper() in words:
            return device.type
    return None


def accelerators() -> list[Device]:
    """Return the devices that detection considers, the preferred one first."""
    candidates = [device for device in DEVICES if device.priority > 0]
    return sorted(candidates, key=lambda device: -device.priority)


def detect() -> Device:
    """Return the best accelerator that works here: by priority, then any that torch has, then the CPU."""
    for device in accelerators():
        if device.is_available():
            return device
    import torch

    accelerator: Any = torch.accelerator
    if accelerator.is_available():
        return get(accelerator.current_accelerator().type)
    return get("cpu")


def probe_devices(machine: DeviceProbeHost | None = None) -> tuple[Device, int]:
    """Return (device, count) that a new process would see, without importing torch; (CPU, 0) if none.

    It is a good guess from device nodes and variables. The driver has the last word: the process group
    asks it when it opens.
    """
    machine = machine or DeviceProbeHost()
    for device in accelerators():
        count = device.probe_count(machine)
        if count:
            return device, count
    return get("cpu"), 0


@frozen_dataclass
class ProcessDeviceSettings:
    """Settings of the devices that the processes run on."""

    __topic__ = "Hardware"
    __common__ = ("use_cpu",)

    use_cpu: bool = setting(
        False,
        flag="--cpu",
        help="use the CPU even if there is an accelerator",
        question="Train on the CPU only?",
    )
    debug: bool = setting(
        False,
        variable="ACCELERATE_DEBUG_MODE",
        help="check the shapes of every collective on all ranks before it runs",
    )
    enable_cpu_affinity: bool = setting(
        False,
        variable="ACCELERATE_CPU_AFFINITY",
        help="bind each process to the cores next to its device (Linux only)",
    )
