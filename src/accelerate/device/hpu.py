"""Intel Gaudi accelerators (formerly Habana)."""

from __future__ import annotations

import importlib
from typing import Any

from accelerate.device.base import Device


class Hpu(Device):
    """Gaudi, through habana_frameworks. Not run on one (the package is the vendor's): tested with a fake.

    A process drives one Gaudi, which it takes at first use, so the device has no index. Source: Intel Gaudi
    documentation 1.23.0, "Python API (habana_frameworks.torch)", "Distributed Backend Initialization" (hccl)
    and "Multiple Workloads on a Single Docker" (HABANA_VISIBLE_MODULES); DeepSpeed at 0cca539,
    ``accelerator/hpu_accelerator.py`` (hpu_backend; streams and generators without an index, no cache);
    hl-thunk's names of the device nodes (/dev/accel/accel_controlD0 ..., on older kernels /dev/hl0 ...).
    """

    type = "hpu"
    backend = "hccl"
    visible_variable = "HABANA_VISIBLE_MODULES"
    distributed_type = "MULTI_HPU"
    priority = 50
    has_index = False  # a process has one
    dtypes = frozenset({"bf16", "fp16", "fp8"})
    extension = "habana_frameworks.torch"
    group_extension = "habana_frameworks.torch.distributed.hccl"
    # accel nodes are shared with other vendors' accelerators; the control nodes are Gaudi's alone.
    node_patterns = ("dev/accel/accel_controlD[0-9]*", "dev/hl[0-9]*")
    out_of_memory_messages = ("PT_DEVMEM Allocation failed",)
    compile_backend = "hpu_backend"

    @property
    def module(self) -> Any:
        self.load_extension("habana_frameworks.torch.hpu")
        return importlib.import_module("habana_frameworks.torch.hpu")

    def supports(self, dtype: str) -> bool:
        if dtype in ("fp16", "fp8"):
            # The first Gaudi has neither; all later ones have both.
            self.load_extension("habana_frameworks.torch.utils.experimental")
            experimental = importlib.import_module("habana_frameworks.torch.utils.experimental")
            return bool(experimental._is_fp16_supported())
        return super().supports(dtype)

    def stream(self, index: int | None = None) -> Any:
        return self.module.Stream()

    def get_rng_state(self, index: int | None = None) -> Any:
        return self.module.random.get_rng_state()

    def set_rng_state(self, state: Any, index: int | None = None) -> None:
        self.module.random.set_rng_state(state)

    def get_rng_state_all(self) -> Any:
        """Return a list of one: the other devices of the machine belong to other processes."""
        return [self.get_rng_state()]

    def set_rng_state_all(self, states: Any) -> None:
        self.set_rng_state(states[0])

    def seed(self, seed: int) -> None:
        self.module.random.manual_seed_all(seed)


PLUGIN: Device = Hpu()
