"""A device that counts calls instead of computing: it tests the use of devices without hardware.

Tensors live on torch's meta device: shapes and types are right and there is no data.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from accelerate.device.base import Device, DeviceProbeHost

if TYPE_CHECKING:
    import torch


class FakeTestDevice(Device):
    """A fake device: never detected, selected by name. ``calls`` counts every call.

    Args:
        size: how many devices there are.
        capacity: total bytes of each; ``allocate`` takes some.
    """

    type = "meta"
    backend = "fake"
    distributed_type = "MULTI_GPU"
    dtypes = frozenset({"bf16", "fp16", "fp8"})
    rng_key = "torch_null_manual_seed"

    def __init__(self, size: int = 1, capacity: int = 2**30) -> None:
        super().__init__()
        self.size, self.capacity = size, capacity
        self.calls: Counter[str] = Counter()
        self.used_bytes: Counter[int] = Counter()
        self.peak_bytes: Counter[int] = Counter()
        self._current = 0
        self._seeds: dict[int, int] = {}

    @property
    def module(self) -> Any:
        """None: torch has no module for this device, and no call needs one."""
        return None

    def is_available(self) -> bool:
        return self.size > 0

    def count(self) -> int:
        return self.size

    def probe_count(self, machine: DeviceProbeHost | None = None) -> int:
        """Return 0: it is not an accelerator."""
        return 0

    def name(self, index: int | None = None) -> str:
        return "null"

    def supports(self, dtype: str) -> bool:
        return dtype in ("no", "fp32", *self.dtypes)

    def group_backend(self) -> str:
        return self.backend

    def torch_device(self, index: int | None = None) -> torch.device:
        import torch

        return torch.device("meta")

    def bind(self, index: int) -> torch.device:
        self._check_index(index)
        self.calls["bind"] += 1
        self._current = index
        return self.torch_device(index)

    def current(self) -> int:
        return self._current

    def synchronize(self, index: int | None = None) -> None:
        self.calls["synchronize"] += 1

    def stream(self, index: int | None = None) -> Any:
        self.calls["stream"] += 1
        return None

    def get_rng_state(self, index: int | None = None) -> Any:
        import torch

        self.calls["get_rng_state"] += 1
        return torch.tensor([self._seeds.get(self._index_or_current(index), 0)], dtype=torch.int64).view(
            torch.uint8
        )

    def set_rng_state(self, state: Any, index: int | None = None) -> None:
        import torch

        self.calls["set_rng_state"] += 1
        self._seeds[self._index_or_current(index)] = int(state.view(torch.int64).item())

    def seed(self, seed: int) -> None:
        self.calls["seed"] += 1
        self._seeds = dict.fromkeys(range(self.size), seed)

    def allocate(self, size: int, index: int | None = None) -> None:
        """Allocate (or, negative, free) ``size`` bytes of a device.

        Raises:
            torch.OutOfMemoryError: they do not fit.
        """
        import torch

        device = self._index_or_current(index)
        if self.used_bytes[device] + size > self.capacity:
            raise torch.OutOfMemoryError(f"null device {device}: out of memory, {size} bytes wanted")
        self.used_bytes[device] += size
        self.peak_bytes[device] = max(self.peak_bytes[device], self.used_bytes[device])

    def get_memory_info(self, index: int | None = None) -> tuple[int, int]:
        return self.capacity - self.used_bytes[self._index_or_current(index)], self.capacity

    def memory_allocated(self, index: int | None = None) -> int | None:
        return self.used_bytes[self._index_or_current(index)]

    def max_memory_allocated(self, index: int | None = None) -> int | None:
        return self.peak_bytes[self._index_or_current(index)]

    def reset_peak_memory(self, index: int | None = None) -> bool:
        self.peak_bytes[self._index_or_current(index)] = self.used_bytes[self._index_or_current(index)]
        return True

    def empty_cache(self) -> None:
        self.calls["empty_cache"] += 1


PLUGIN: Device = FakeTestDevice()
