"""A device that computes nothing, for dry runs and for tests without hardware.

Tensors live on torch's meta device: shapes and types are right and there is no data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.device.base import Device

if TYPE_CHECKING:
    import torch


class FakeTestDevice(Device):
    """A fake device: never detected, selected by name.

    Args:
        size: how many devices there are.
    """

    type = "meta"
    backend = "fake"
    distributed_type = "MULTI_GPU"
    dtypes = frozenset({"bf16", "fp16", "fp8"})
    rng_key = "torch_null_manual_seed"

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.size, self._current = size, 0

    @property
    def module(self) -> Any:
        """None: torch has no module for this device, and no call needs one."""
        return None

    def is_available(self) -> bool:
        return self.size > 0

    def count(self) -> int:
        return self.size

    def name(self, index: int | None = None) -> str:
        return "null"

    def group_backend(self) -> str:
        return self.backend

    def torch_device(self, index: int | None = None) -> torch.device:
        import torch

        return torch.device("meta")

    def bind(self, index: int) -> torch.device:
        self._check_index(index)
        self._current = index
        return self.torch_device(index)

    def current(self) -> int:
        return self._current

    def synchronize(self, index: int | None = None) -> None:
        """Wait for nothing."""

    def get_rng_state(self, index: int | None = None) -> Any:
        import torch

        return torch.zeros(8, dtype=torch.uint8)

    def set_rng_state(self, state: Any, index: int | None = None) -> None:
        """Do nothing: it draws no numbers."""

    def seed(self, seed: int) -> None:
        """Do nothing: it draws no numbers."""

    def get_memory_info(self, index: int | None = None) -> tuple[int, int]:
        return 2**30, 2**30


PLUGIN: Device = FakeTestDevice()
