"""A device that counts instead of computing: it tests, with no hardware, what is asked of a device.

Tensors live on torch's meta device: shapes and types are right and there is no data.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from accelerate.device.base import Device
from accelerate.device.machine import Machine

if TYPE_CHECKING:
    import torch


class Null(Device):
    """Never detected; asked for by name. ``calls`` counts every call, ``size`` says how many there are.

    Args:
        size: how many devices there are.
        capacity: total bytes of each; free is what ``use`` has not taken.
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
        self.taken: Counter[int] = Counter()
        self.highest: Counter[int] = Counter()
        self._current = 0
        self._seeds: dict[int, int] = {}

    @property
    def module(self) -> Any:
        """None: torch has no module for it, and no call needs one."""
        return None

    def available(self) -> bool:
        return self.size > 0

    def count(self) -> int:
        return self.size

    def probe(self, machine: Machine | None = None) -> int:
        """0: it is no accelerator."""
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
        self._require(index)
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

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def rng(self, index: int | None = None) -> Any:
        import torch

        self.calls["rng"] += 1
        return torch.tensor([self._seeds.get(self._index(index), 0)], dtype=torch.int64).view(torch.uint8)

    def set_rng(self, state: Any, index: int | None = None) -> None:
        import torch

        self.calls["set_rng"] += 1
        self._seeds[self._index(index)] = int(state.view(torch.int64).item())

    def seed(self, seed: int) -> None:
        self.calls["seed"] += 1
        self._seeds = dict.fromkeys(range(self.size), seed)

    def use(self, size: int, index: int | None = None) -> None:
        """Takes (or, negative, gives back) ``size`` bytes of a device.

        Raises:
            torch.OutOfMemoryError: they do not fit.
        """
        import torch

        where = self._index(index)
        if self.taken[where] + size > self.capacity:
            raise torch.OutOfMemoryError(f"null device {where}: out of memory, {size} bytes wanted")
        self.taken[where] += size
        self.highest[where] = max(self.highest[where], self.taken[where])

    def memory(self, index: int | None = None) -> tuple[int, int]:
        return self.capacity - self.taken[self._index(index)], self.capacity

    def allocated(self, index: int | None = None) -> int | None:
        return self.taken[self._index(index)]

    def peak(self, index: int | None = None) -> int | None:
        return self.highest[self._index(index)]

    def reset_peak(self, index: int | None = None) -> bool:
        self.highest[self._index(index)] = self.taken[self._index(index)]
        return True

    def empty_cache(self) -> None:
        self.calls["empty_cache"] += 1


PLUGIN: Device = Null()
