"""Intel GPUs."""

from __future__ import annotations

import re

from accelerate.device.base import Device, DeviceProbeHost

INTEL = "0x8086"  # the vendor's number on the PCI bus


class Xpu(Device):
    """Intel GPUs through torch's own module. Not run on one: tested with a fake.

    Source: torch 2.13, ``torch/xpu``; PyTorch documentation, 2026-01, "torch.distributed", "Backends" (xccl);
    oneAPI Level Zero specification, "Programming Guide", "Environment Variables" (ZE_AFFINITY_MASK); Linux
    Documentation/gpu, drm-uapi (render nodes).
    """

    type = "xpu"
    backend = "xccl"
    fallbacks = ("ccl",)
    visible_variable = "ZE_AFFINITY_MASK"
    distributed_type = "MULTI_XPU"
    priority = 30
    out_of_memory_messages = ("XPU out of memory", "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY")

    def probe_count(self, machine: DeviceProbeHost | None = None) -> int:
        machine = machine or DeviceProbeHost()
        # A build of torch for CPUs cannot use them, whatever else is installed.
        return super().probe_count(machine) if machine.build().get("xpu") else 0

    def count_physical(self, machine: DeviceProbeHost) -> int:
        count = 0
        for node in machine.find_device_nodes("dev/dri/renderD*"):
            device = f"sys/class/drm/{node.name}/device"
            if machine.read(f"{device}/vendor") == INTEL:
                # Each tile of a card is a device of its own; drivers that do not list tiles have one.
                count += max(1, len(machine.find_device_nodes(f"{device}/tile*")))
        return count

    def visible_devices(self, machine: DeviceProbeHost) -> str | None:
        """Return the cards of the mask; ``0.0,0.1`` are two tiles, each one device."""
        mask = super().visible_devices(machine)
        if mask is None or "." not in mask:
            return mask
        tiles = [part.strip() for part in mask.split(",")]
        valid_tiles = [tile for tile in tiles if re.fullmatch(r"\d+(\.\d+)?", tile)]
        return ",".join(str(index) for index, _ in enumerate(dict.fromkeys(valid_tiles)))

    def group_backend(self) -> str:
        # Before torch had xccl, a package of Intel's brought ccl.
        if DeviceProbeHost().has_package("oneccl_bindings_for_pytorch"):
            self.load_extension("oneccl_bindings_for_pytorch")
        return super().group_backend()

    def get_memory_info(self, index: int | None = None) -> tuple[int, int]:
        try:
            return super().get_memory_info(index)
        except RuntimeError:
            # Integrated and consumer cards do not report free memory.
            return self._estimate_memory_info(self._index_or_current(index))


PLUGIN: Device = Xpu()
