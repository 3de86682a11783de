"""Counts of GPUs without torch, where no device nodes tell: by NVIDIA's driver, and by the kernel for AMD."""

from __future__ import annotations

import re
from pathlib import Path

from accelerate.device.base import DeviceProbeHost


def count_by_driver(folder: Path, driver: str, nvml: str) -> int:
    """Count the cards that NVML knows, which starts no CUDA; one where the driver is there without NVML.

    Source: NVIDIA, NVML API Reference Guide, nvmlInit_v2 and nvmlDeviceGetCount_v2; they return 0 on success.
    """
    if not (folder / driver).exists():
        return 0
    import ctypes

    count = ctypes.c_uint(0)
    try:
        library = ctypes.CDLL(str(folder / nvml))
        failed = library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    except (OSError, AttributeError):  # there is no such library, or it is too old
        return 1
    return 1 if failed else count.value


def count_amd(machine: DeviceProbeHost) -> int:
    """Count the GPUs of the KFD topology (gpu_id 0 is a CPU) whose render node this container has."""
    if not machine.exists("dev/kfd"):
        return 0
    count = 0
    for node in machine.find_device_nodes("sys/class/kfd/kfd/topology/nodes/*"):
        if machine.read(node / "gpu_id") in ("", "0"):
            continue
        minor = re.search(r"^drm_render_minor (\d+)$", machine.read(node / "properties"), re.MULTILINE)
        count += minor is not None and machine.exists(f"dev/dri/renderD{minor[1]}")
    return count
