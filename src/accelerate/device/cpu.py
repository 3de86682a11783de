"""The CPU: what remains where there is no accelerator, and rank 0's home of everything."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from accelerate.device.base import Device
from accelerate.device.machine import Machine, container_limit

if TYPE_CHECKING:
    import torch


class Cpu(Device):
    """The processor and its main memory. Run on Linux; memory limits of a container are honoured."""

    type = "cpu"
    backend = "gloo"
    distributed_type = "MULTI_CPU"
    rng_key = "torch_manual_seed"
    # A step takes its large tensors from the system and gives them back. First writes to small pages then
    # cost more than the arithmetic of many a layer; torch's allocator asks for pages of 2 MiB if told so.
    environment = MappingProxyType({"THP_MEM_ALLOC_ENABLE": "1"})
    out_of_memory = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")

    def available(self) -> bool:
        return True

    def count(self) -> int:
        return 1

    def probe(self, machine: Machine | None = None) -> int:
        """0: the CPU is no accelerator."""
        return 0

    def name(self, index: int | None = None) -> str:
        import platform

        return platform.processor() or platform.machine()

    def supports(self, dtype: str) -> bool:
        return dtype in ("no", "fp32", *self.dtypes)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError) or super().is_out_of_memory(error)

    def torch_device(self, index: int | None = None) -> torch.device:
        """``torch.device("cpu")`` for every index: there is one CPU per machine."""
        return super().torch_device(None)

    def bind(self, index: int) -> torch.device:
        """Nothing to bind: every process of a machine shares its CPU."""
        return self.torch_device()

    def current(self) -> int:
        return 0

    def synchronize(self, index: int | None = None) -> None:
        """Nothing to wait for: CPU kernels are done when they return."""

    def stream(self, index: int | None = None) -> Any:
        return None

    def rng(self, index: int | None = None) -> Any:
        import torch

        return torch.get_rng_state()

    def set_rng(self, state: Any, index: int | None = None) -> None:
        import torch

        torch.set_rng_state(state)

    def rng_all(self) -> Any:
        return self.rng()

    def set_rng_all(self, states: Any) -> None:
        self.set_rng(states)

    def seed(self, seed: int) -> None:
        import torch

        torch.default_generator.manual_seed(seed)

    def memory(self, index: int | None = None) -> tuple[int, int]:
        import psutil

        memory = psutil.virtual_memory()
        limit = container_limit()
        if limit is None or limit[1] >= memory.total:
            return int(memory.available), int(memory.total)
        return min(int(memory.available), limit[0]), limit[1]

    def allocated(self, index: int | None = None) -> int | None:
        """Resident bytes of this process."""
        import psutil

        return int(psutil.Process().memory_info().rss)

    def peak(self, index: int | None = None) -> int | None:
        status = Machine().read("proc/self/status")
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        if sys.platform == "win32":
            return None
        import resource

        # ru_maxrss is bytes on macOS, kibibytes elsewhere (getrusage(2)).
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def reset_peak(self, index: int | None = None) -> bool:
        try:
            # "5" resets the peak resident size (proc(5), /proc/pid/clear_refs).
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return False
        return True

    def host_memory(self, size: int) -> torch.Tensor:
        """Fresh pages, large ones where the system has them, which cost a fraction when first written to.

        Processes that are forked do not get them: each side's next write would copy them.
        """
        import torch

        if sys.platform != "linux":
            return super().host_memory(size)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)
        if Machine().exists("sys/kernel/mm/transparent_hugepage"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def empty_cache(self) -> None:
        """Nothing to empty: the allocator returns memory by itself."""


PLUGIN: Device = Cpu()
