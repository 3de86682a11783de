"""TPUs, and other devices that PyTorch/XLA drives."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from accelerate.core import environ
from accelerate.core.errors import DeviceError
from accelerate.device.base import Device, DeviceProbeHost

if TYPE_CHECKING:
    import torch

GOOGLE = "0x1ae0"  # the vendor's number on the PCI bus; its network cards have it too
CHIPS = frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})


class Xla(Device):
    """PyTorch/XLA. Not run on a TPU: tested with a fake, and on the CPU client of torch_xla 2.9.

    The runtime gives each process its device, and work is done at a step's end. XLA on the CPU is for
    debugging: it is never detected, ``ACCELERATE_TORCH_DEVICE=xla`` selects it. ``USE_TORCH_XLA=0``
    hides XLA where torch_xla is merely installed. Source: PyTorch/XLA 2.9, "PJRT Runtime" and
    "API guide"; the numbers of the chips: JAX, hardware_utils.py.
    """

    type = "xla"
    backend = "xla"
    visible_variable = "TPU_VISIBLE_CHIPS"
    distributed_type = "XLA"
    priority = 100
    extension = "torch_xla"
    extension_variable = "USE_TORCH_XLA"
    extension_fix = "install the torch_xla of torch's version: pip install torch==2.9.0 torch_xla==2.9.0"
    group_extension = "torch_xla.distributed.xla_backend"
    rng_key = "xm_seed"
    out_of_memory_messages = ("RESOURCE_EXHAUSTED",)
    compile_backend = ""
    starts_ranks = True
    is_lazy = True

    @property
    def module(self) -> Any:
        """``torch_xla.core.xla_model``; torch has no module for this type."""
        self.load_extension()
        return importlib.import_module("torch_xla.core.xla_model")

    @property
    def runtime(self) -> Any:
        self.load_extension()
        return importlib.import_module("torch_xla.runtime")

    def is_usable(self) -> bool:
        return self.runtime.device_type() not in (None, "CPU")

    def count(self) -> int:
        if not self.is_available():
            return 0
        self._refuse_missing_driver()
        return int(self.runtime.addressable_device_count())

    def count_physical(self, machine: DeviceProbeHost) -> int:
        count = 0
        for vendor in machine.root.glob("sys/bus/pci/devices/*/vendor"):
            chip = machine.read(vendor.with_name("device"))
            count += machine.read(vendor) == GOOGLE and chip in CHIPS
        return count

    def name(self, index: int | None = None) -> str:
        return str(self.runtime.device_type())

    def supports(self, dtype: str) -> bool:
        # A TPU multiplies in bfloat16 and has no float16.
        return super().supports(dtype) and (dtype != "fp16" or self.runtime.device_type() != "TPU")

    def torch_device(self, index: int | None = None) -> torch.device:
        self.load_extension()
        return importlib.import_module("torch_xla").device(index)

    def start_ranks(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Fork this process, which must not have touched the runtime: the runtime serves one process."""
        importlib.import_module("torch_xla").launch(function, args=args, start_method="fork")

    def runtime_rank(self) -> Mapping[str, object]:
        """Ask the runtime, if its own launch has placed this process: that starts it, and rules out SPMD."""
        runtime = self.runtime
        if not environ.get("PJRT_LOCAL_PROCESS_RANK") or (size := runtime.world_size()) == 1:
            return {}
        if runtime.addressable_device_count() > 1:
            raise DeviceError(
                "this TPU has several devices in each process",
                why="torch_xla runs a thread for each (v2 and v3), and they would share one rank",
                fix="start one process, or use a TPU from v4 on",
            )
        local = runtime.local_process_count()
        return {
            "RANK": runtime.global_ordinal(),
            "WORLD_SIZE": size,
            "LOCAL_RANK": runtime.local_ordinal(),
            "LOCAL_WORLD_SIZE": local,
            "GROUP_RANK": 0 if size == local else runtime.host_index(),  # ordinals do not tell
            "GROUP_WORLD_SIZE": size // local,
            "MASTER_ADDR": "127.0.0.1" if size == local else runtime.get_master_ip(),
        }

    def bind(self, index: int) -> torch.device:
        """Return the device of this process. The runtime is not asked: SPMD is chosen before it starts."""
        import torch

        self._refuse_missing_driver()
        return torch.device(self.type, 0)

    def _refuse_missing_driver(self) -> None:
        if self.runtime.device_type() != "TPU" or environ.get("TPU_LIBRARY_PATH") or find_spec("libtpu"):
            return
        if not self.count_physical(DeviceProbeHost()):
            raise DeviceError(
                "PyTorch/XLA is to run on a TPU, but this machine has neither a TPU nor its driver, libtpu",
                why="PJRT_DEVICE or another variable of TPUs says so",
                fix="unset PJRT_DEVICE; or, on a TPU, pip install 'torch_xla[tpu]'",
            )

    def current(self) -> int:
        return self.torch_device().index or 0

    def run_pending(self) -> None:
        importlib.import_module("torch_xla").sync()

    def synchronize(self, index: int | None = None) -> None:
        importlib.import_module("torch_xla").sync()
        self.module.wait_device_ops()

    def stream(self, index: int | None = None) -> Any:
        return None

    def get_rng_state(self, index: int | None = None) -> Any:
        """Return a number: XLA's generator is counter-based and its whole state is a seed."""
        return self.module.get_rng_state(self._name(index))

    def set_rng_state(self, state: Any, index: int | None = None) -> None:
        self.module.set_rng_state(int(state), self._name(index))

    def get_rng_state_all(self) -> Any:
        """Return the state of this process's device; a process has one."""
        return self.get_rng_state()

    def set_rng_state_all(self, states: Any) -> None:
        self.set_rng_state(states)

    def seed(self, seed: int) -> None:
        self.module.set_rng_state(seed)

    def get_memory_info(self, index: int | None = None) -> tuple[int, int]:
        facts = self._memory(index)
        if "bytes_limit" in facts:
            return facts["bytes_limit"] - facts["bytes_used"], facts["bytes_limit"]
        return facts["kb_free"] * 1024, facts["kb_total"] * 1024

    def memory_allocated(self, index: int | None = None) -> int | None:
        free, total = self.get_memory_info(index)
        return total - free

    def max_memory_allocated(self, index: int | None = None) -> int | None:
        return self._memory(index).get("peak_bytes_used")

    def reset_peak_memory(self, index: int | None = None) -> bool:
        return False

    def _memory(self, index: int | None) -> dict[str, int]:
        return self.module.get_memory_info(self._name(index))

    def _name(self, index: int | None) -> str:
        return f"xla:{self._index_or_current(index)}"


PLUGIN: Device = Xla()
