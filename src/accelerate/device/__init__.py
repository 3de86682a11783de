"""Floor 1: devices. One file per type; the default works for every type torch knows.

DEVICES       the registry of the files
get(type)     the device of a type
detect()      the best device of this machine
probe()       the same and how many, found without importing torch
"""

from __future__ import annotations

from accelerate.core.errors import DeviceError, nearest
from accelerate.core.registry import Registry
from accelerate.device.base import Device
from accelerate.device.machine import Machine

__all__ = ["DEVICES", "Device", "Machine", "accelerators", "detect", "get", "probe"]

DEVICES: Registry[Device] = Registry(
    "device", "accelerate.device", "accelerate.devices", exclude=("base", "machine")
)


def get(type: str) -> Device:
    """The device of a type: its file, else the default ``Device`` if torch knows the type.

    Raises:
        DeviceError: nobody knows the type; the nearest name is suggested.
    """
    if type in DEVICES:
        return DEVICES.get(type)
    for device in DEVICES:
        if device.type == type:
            return device
    return _default(type)


def _default(type: str) -> Device:
    import torch

    try:
        torch.get_device_module(type)
    except RuntimeError as error:
        near = nearest(type, DEVICES.names())
        raise DeviceError(
            f"unknown device {type!r}",
            why=f"torch has no module for it; known: {', '.join(DEVICES.names())}",
            fix=f"did you mean {near!r}?" if near else "import the package that registers it with torch",
        ) from error
    device = Device(type)
    if torch.distributed.is_available():
        device.backend = torch.distributed.Backend.default_device_backend_map.get(type, "")
    return device


def accelerators() -> list[Device]:
    """The devices of the registry that detection considers, the preferred one first."""
    found = [device for device in DEVICES if device.priority > 0]
    return sorted(found, key=lambda device: -device.priority)


def detect() -> Device:
    """The best accelerator that works here: by priority, then any other that torch found, then the CPU."""
    for device in accelerators():
        if device.available():
            return device
    import torch

    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available():
        return get(accelerator.current_accelerator().type)
    return get("cpu")


def probe(machine: Machine | None = None) -> tuple[Device, int]:
    """(device, how many) a new process would find, without importing torch; (CPU, 0) for no accelerator.

    It is a good guess from device nodes and variables. What the driver says counts: the process group
    checks it when it opens.
    """
    machine = machine or Machine()
    for device in accelerators():
        count = device.probe(machine)
        if count:
            return device, count
    return get("cpu"), 0
