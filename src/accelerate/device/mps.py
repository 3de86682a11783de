"""The GPU of an Apple machine, driven through Metal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.device.base import Device, DeviceProbeHost

if TYPE_CHECKING:
    import torch


class Mps(Device):
    """Metal. Not run on an Apple machine: written against torch's documentation and tested with a fake.

    There is one device, its memory is the machine's own, and torch has no process group for it: several
    processes of one machine are refused unless they are told to compute on the CPU (``--cpu``). Source: torch
    2.13, ``torch/mps``, which has no streams.
    """

    type = "mps"
    distributed_type = "NO"
    priority = 10
    has_index = False
    out_of_memory_messages = ("MPS backend out of memory",)

    def is_usable(self) -> bool:
        import torch

        return bool(torch.backends.mps.is_available())

    def count_physical(self, machine: DeviceProbeHost) -> int:
        # The wheel for Apple silicon always has Metal; Intel Macs have no torch since 2.3.
        return int(machine.exists("System/Library/Frameworks/Metal.framework"))

    def name(self, index: int | None = None) -> str:
        import platform

        return f"Apple {platform.machine()}"

    def supports(self, dtype: str) -> bool:
        import torch

        if dtype == "bf16":
            # Metal has bfloat16 since macOS 14.
            return bool(torch.backends.mps.is_macos_or_newer(14, 0))
        return super().supports(dtype)

    def bind(self, index: int) -> torch.device:
        """Return the one device, which is always current.

        Raises:
            DeviceError: the machine has none.
        """
        self._check_index(0)
        return self.torch_device()

    def current(self) -> int:
        return 0

    def get_memory_info(self, index: int | None = None) -> tuple[int, int]:
        import psutil

        total = int(self.module.recommended_max_memory())
        # Other programs share the same memory: never promise more than the machine has left.
        free = min(total - int(self.module.driver_allocated_memory()), int(psutil.virtual_memory().available))
        return max(0, free), total

    def cached_memory(self, index: int | None = None) -> int:
        """Return 0: what Metal's allocator keeps is not in the free memory."""
        return 0

    def memory_allocated(self, index: int | None = None) -> int | None:
        return int(self.module.current_allocated_memory())

    def max_memory_allocated(self, index: int | None = None) -> int | None:
        """Return None: Metal keeps no record."""
        return None

    def allocator_retries(self, index: int | None = None) -> int | None:
        """Return None: Metal does not count them."""
        return None

    def reset_peak_memory(self, index: int | None = None) -> bool:
        return False


PLUGIN: Device = Mps()
