"""The CPU: the device where there is no accelerator, and the host of all others."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from accelerate.device.base import Device, DeviceProbeHost, container_limit

if TYPE_CHECKING:
    import torch


class Cpu(Device):
    """The processor and its main memory. Run on Linux with torch 2.6 to 2.15, in November 2026.

    Memory limits of a container are honoured.
    """

    type = "cpu"
    backend = "gloo"
    distributed_type = "MULTI_CPU"
    rng_key = "torch_manual_seed"
    has_index = False  # there is one per machine
    # A step allocates its large tensors from the system and frees them. First writes to small pages then
    # cost more than the arithmetic of many layers; with this variable torch allocates pages of 2 MiB.
    environment = MappingProxyType({"THP_MEM_ALLOC_ENABLE": "1"})
    out_of_memory_messages = (
        "DefaultCPUAllocator: can't allocate memory",
        "DefaultCPUAllocator: not enough memory",
    )

    def is_available(self) -> bool:
        return True

    def count(self) -> int:
        return 1

    def is_initialized(self) -> bool:
        """Return False: forks can use it; torch's module calls it initialized always."""
        return False

    def name(self, index: int | None = None) -> str:
        import platform

        return platform.processor() or platform.machine()

    def supports(self, dtype: str) -> bool:
        return dtype in ("no", "fp32", *self.dtypes)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError) or super().is_out_of_memory(error)

    def bind(self, index: int) -> torch.device:
        """Do nothing: all processes of a machine share its CPU."""
        import torch

        return torch.device(self.type)

    def current(self) -> int:
        return 0

    def synchronize(self, index: int | None = None) -> None:
        """Do nothing: CPU kernels are done when they return."""

    def stream(self, index: int | None = None) -> Any:
        return None

    def get_rng_state(self, index: int | None = None) -> Any:
        import torch

        return torch.get_rng_state()

    def set_rng_state(self, state: Any, index: int | None = None) -> None:
        import torch

        torch.set_rng_state(state)

    def get_rng_state_all(self) -> Any:
        import torch

        return torch.get_rng_state()

    def set_rng_state_all(self, states: Any) -> None:
        import torch

        torch.set_rng_state(states)

    def seed(self, seed: int) -> None:
        import torch

        torch.default_generator.manual_seed(seed)

    def get_memory_info(self, index: int | None = None) -> tuple[int, int]:
        import psutil

        memory = psutil.virtual_memory()
        limit = container_limit()
        if limit is None or limit[1] >= memory.total:
            return int(memory.available), int(memory.total)
        return min(int(memory.available), limit[0]), limit[1]

    def memory_allocated(self, index: int | None = None) -> int | None:
        """Return the resident bytes of this process."""
        import psutil

        return int(psutil.Process().memory_info().rss)

    def max_memory_allocated(self, index: int | None = None) -> int | None:
        status = DeviceProbeHost().read("proc/self/status")
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        if sys.platform == "win32":
            return None
        import resource

        # ru_maxrss is bytes on macOS, kibibytes elsewhere (getrusage(2)).
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def reset_peak_memory(self, index: int | None = None) -> bool:
        try:
            # "5" resets the peak resident size (proc(5), /proc/pid/clear_refs).
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return False
        return True

    def host_memory(self, size: int) -> torch.Tensor:
        """Return fresh pages, huge ones where the system has them: their first write costs a fraction.

        Forked processes do not get them: each side's next write would copy them.
        """
        import torch

        if sys.platform != "linux":
            return super().host_memory(size)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)
        if DeviceProbeHost().exists("sys/kernel/mm/transparent_hugepage"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def empty_cache(self) -> None:
        """Do nothing: the allocator returns memory by itself."""


PLUGIN: Device = Cpu()
