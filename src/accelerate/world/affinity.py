"""CPU affinity: binds a process to the cores next to its device (NUMA).

A process whose threads and memory are on the other socket than its device pays for every copy. Linux says in
sysfs which cores are near a PCI device and which belong to a NUMA node; elsewhere nothing is bound.
Source: Linux Documentation/ABI/testing/sysfs-bus-pci (``local_cpulist``) and sysfs-devices-node.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from typing import TYPE_CHECKING

from accelerate import device as devices
from accelerate.core import environ
from accelerate.core.errors import WorldError
from accelerate.device import DeviceProbeHost
from accelerate.world import world as worlds

if TYPE_CHECKING:
    from accelerate.device.base import Device

logger = logging.getLogger(__name__)


def parse_cpu_list(text: str) -> list[int]:
    """Parse the kernel's list of cores: ``"0-3,8,10-11"`` is ``[0, 1, 2, 3, 8, 10, 11]``."""
    cores: list[int] = []
    for part in text.replace(",", " ").split():
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def near_cores(device: Device, index: int, local_size: int, machine: DeviceProbeHost) -> list[int]:
    """Return the cores that process ``index`` of this machine should use; empty when unknown.

    A process with a PCI device gets the cores near it. Its device has the same index, unless the scheduler
    shows each process its own devices only. Without one, the processes of the machine are dealt out over its
    NUMA nodes, neighbours to the same node.
    """
    if device.type != "cpu":
        address = _pci_address(device, index % (device.count() or 1))
        return parse_cpu_list(machine.read(f"sys/bus/pci/devices/{address}/local_cpulist")) if address else []
    nodes = machine.find_device_nodes("sys/devices/system/node/node*")
    if len(nodes) < 2:
        return []
    nodes.sort(key=lambda path: int(path.name.removeprefix("node")))
    return parse_cpu_list(machine.read(nodes[index * len(nodes) // max(local_size, index + 1)] / "cpulist"))


def _pci_address(device: Device, index: int) -> str:
    """Return the PCI address, ``"0000:3b:00.0"``; empty when torch does not tell it for this device."""
    ask = getattr(device.module, "get_device_properties", None)
    facts = ask(index) if ask else None
    bus = getattr(facts, "pci_bus_id", None)
    if not isinstance(bus, int):
        return ""
    domain, slot = getattr(facts, "pci_domain_id", 0), getattr(facts, "pci_device_id", 0)
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the cores near its device, whatever was bound before.

    Args:
        local_process_index: this process among those of its machine, which is also its device's index.
        verbose: log what is done; None does in debug mode (``ACCELERATE_DEBUG_MODE``).

    Raises:
        WorldError: the index is negative.
    """
    if local_process_index < 0:
        raise WorldError(f"there is no process of index {local_process_index} on this machine")
    if verbose is None:
        verbose = environ.get_flag("ACCELERATE_DEBUG_MODE")
    bind = getattr(os, "sched_setaffinity", None)
    if bind is None:
        logger.warning("this system cannot bind a process to cores: nothing is bound")
        return
    world = worlds.current()
    device = world.hardware if world else devices.detect()
    local_size = world.local_size if world else 1
    near = set(near_cores(device, local_process_index, local_size, DeviceProbeHost()))
    # A container or a scheduler may have taken cores away: only what is allowed already can be bound.
    cores = near & os.sched_getaffinity(0)
    if not cores:
        if device.type != "cpu":
            logger.warning(
                "process %d is not bound to cores: this system does not say which are near its device",
                local_process_index,
            )
        return
    bind(0, cores)
    if verbose:
        logger.info("process %d is bound to the cores %s", local_process_index, sorted(cores))


@lru_cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Call ``override_numa_affinity`` once per process: repeated calls do nothing."""
    override_numa_affinity(local_process_index, verbose)
