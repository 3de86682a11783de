"""The choice of devices and of the number of processes on this machine."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import accelerate.device as devices
from accelerate.core.errors import SettingError, UnknownNameError
from accelerate.core.value_types import frozen_dataclass
from accelerate.device import Device, DeviceProbeHost, count_cores
from accelerate.launch.config_files import CPU_GROUP, NOT_DISTRIBUTED, strategy_switches
from accelerate.launch.launch_request import LaunchRequest

# A device, or a MIG instance, by the name that the driver gives it; a beginning that is unique will do.
# Source: CUDA C++ Programming Guide, "CUDA Environment Variables"; MIG User Guide, "CUDA Device Enumeration".
_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z][0-9A-Za-z/-]*")


@frozen_dataclass
class LaunchDeviceSelection:
    """The devices and the number of processes of this machine.

    Attributes:
        device: the type of their devices.
        count: how many of them there are to use; 0 on a CPU, and where no accelerator was found.
        visible: the value of the device's visible variable, None to leave it alone.
        processes: how many processes to start on this machine.
    """

    device: Device
    count: int
    visible: str | None
    processes: int


def allocate_devices(request: LaunchRequest, machine: DeviceProbeHost) -> LaunchDeviceSelection:
    """Choose the devices and the number of processes.

    Raises:
        SettingError: what was asked does not fit the machine; the error names both.
    """
    selection, processes = select_devices(request, machine), request.local_processes.value
    device, count = selection.device, selection.count
    if processes is None and not request.settings.multi_gpu:
        alone = request.distributed_type == NOT_DISTRIBUTED
        # On Windows one process is what can be started.
        processes = 1 if alone or sys.platform == "win32" else max(1, count)
    elif not isinstance(processes, int):
        processes = count_cores(machine) if processes == "cpu" else max(1, count)
    if count and processes > count:
        raise SettingError(
            f"{processes} processes are asked for ({request.local_processes.where}), "
            f"but there are {count} {device.type} devices "
            f"({_describe_device_limit(request, selection, machine)})",
            why="each process needs a device of its own",
            fix=f"start {count}, or use the CPU: accelerate launch --cpu ...",
        )
    return replace(selection, processes=processes)


def select_devices(
    request: LaunchRequest, machine: DeviceProbeHost, processes: int = 1
) -> LaunchDeviceSelection:
    """The devices that were asked for, whatever the number of processes.

    Raises:
        SettingError: it is not there, or a number names none.
    """
    kind = request.distributed_type
    if request.get("use_cpu") or (kind == CPU_GROUP and not request.settings.multi_gpu):
        return LaunchDeviceSelection(devices.get("cpu"), 0, None, processes)
    selected = _device_of_type(request, machine) if kind else None
    device, count = selected or devices.probe_devices(machine)
    if request.settings.multi_gpu and not count:
        raise SettingError(
            f"--multi_gpu insists on accelerators, but {_why_no_accelerator(machine)}",
            fix="leave it out, or use the CPU: accelerate launch --cpu --num_processes 2 ...",
        )
    ids = _parse_device_ids(request, device, device.count_physical(machine)) if count else None
    if ids is None:
        return LaunchDeviceSelection(device, count, None, processes)
    return LaunchDeviceSelection(device, len(ids), ",".join(map(str, ids)), processes)


def _why_no_accelerator(machine: DeviceProbeHost) -> str:
    """Why there is no accelerator: this machine has none, or a variable hides them."""
    for device in devices.accelerators():
        if device.count_physical(machine) and device.visible_devices(machine) is not None:
            return f"{device.visible_variable}={device.visible_devices(machine)} hides those of this machine"
    return "none was found on this machine"


def _device_of_type(request: LaunchRequest, machine: DeviceProbeHost) -> tuple[Device, int] | None:
    """The device that ``distributed_type`` stands for; None where it stands for none in particular.

    Files of 1.x travel between machines: there every such type starts several processes, and each finds its
    device. So another accelerator serves too (``unused_type`` says it).
    """
    origin, kind = request.origin("distributed_type"), request.distributed_type
    devices_by_type: dict[str, list[Device]] = {}
    for device in devices.accelerators():
        devices_by_type.setdefault(device.distributed_type, []).append(device)
    strategies = strategy_switches(request.loaded).values()
    if kind == NOT_DISTRIBUTED or kind in strategies:
        return None
    if kind not in devices_by_type:
        values = (NOT_DISTRIBUTED, CPU_GROUP, *devices_by_type, *strategies)
        raise UnknownNameError("distributed_type", str(origin.value), values, where=f"in {origin.where}")
    for device in devices_by_type[kind]:
        if count := device.probe_count(machine):
            return device, count
    device, count = devices.probe_devices(machine)
    if count and kind.startswith("MULTI_") and device.distributed_type.startswith("MULTI_"):
        return device, count
    raise SettingError(
        f"{origin.where} is {origin.value}, but this machine has no such device",
        fix="use the CPU: accelerate launch --cpu ...; or leave distributed_type out",
    )


def unused_type(request: LaunchRequest, device: Device) -> Iterator[tuple[str, str]]:
    """Yield ``distributed_type`` where it names other devices; see ``LaunchPlan.unused_settings``."""
    kind = request.distributed_type
    if request.names_accelerators and device.type != "cpu" and device.distributed_type != kind:
        yield "distributed_type", f"it is {kind}, but the devices of this machine are of type {device.type}"


def _parse_device_ids(request: LaunchRequest, device: Device, present: int) -> Sequence[int | str] | None:
    """The device numbers or UUIDs asked for; None for all that are visible."""
    origin = request.origin("gpu_ids")
    if origin.value is None or str(origin.value).strip().lower() == "all":
        return None
    parts = [part.strip() for part in str(origin.value).rstrip(", ").split(",")]
    uuids = [part for part in parts if _UUID.fullmatch(part)]
    try:
        ids = [] if uuids == parts else [int(part) for part in parts]
    except ValueError as error:
        raise SettingError(
            f"{origin.where} is {origin.value!r}, which is not a list of device numbers",
            fix="write 'all', or numbers like 0,2, or UUIDs like GPU-8f6c2f5a,GPU-1b2c3d4e",
        ) from error
    if device.visible_variable is None:
        raise SettingError(
            f"{origin.where} cannot be applied: {device.type} devices have no numbers to choose"
        )
    # Where the machine does not tell how many it has, the driver will say what is wrong.
    wrong = [number for number in ids if number < 0 or (present and number >= present)]
    is_repeated = len(set(parts)) < len(parts) or len(set(ids)) < len(ids)
    # Of MIG instances a card has several.
    has_instances = any(uuid.startswith("MIG-") for uuid in uuids)
    if wrong or is_repeated or (present and len(parts) > present and not has_instances):
        raise SettingError(
            f"{origin.where} is {origin.value!r}, but this machine has {present} {device.type} devices",
            why=f"{'' if uuids else f'they are numbered 0 to {present - 1}, and '}each is named once",
        )
    return ids or uuids


def _describe_device_limit(
    request: LaunchRequest, selection: LaunchDeviceSelection, machine: DeviceProbeHost
) -> str:
    if selection.visible is not None:
        return request.origin("gpu_ids").where
    value = selection.device.visible_devices(machine)
    return "on this machine" if value is None else f"{selection.device.visible_variable}={value}"
