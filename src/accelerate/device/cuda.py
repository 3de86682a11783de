"""NVIDIA GPUs, and AMD GPUs under ROCm, which torch presents as the same type."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import MappingProxyType
from typing import cast

from accelerate.core import environ
from accelerate.device.base import Device, DeviceProbeHost, count_visible
from accelerate.device.gpu_counts import count_amd, count_by_driver

logger = logging.getLogger(__name__)

# Dense products on tensor cores, accumulated in float32, without sparsity. Sources: NVIDIA, data sheets of
# H200, H100 (SXM, PCIe, NVL), A100, V100, L40S, L4, A10 and T4, where the larger numbers are with sparsity.
_TFLOPS = {
    "H200 NVL": {"bf16": 835.5, "fp16": 835.5},
    "H200": {"bf16": 989.4, "fp16": 989.4},
    "H100 PCIe": {"bf16": 756.5, "fp16": 756.5},
    "H100 NVL": {"bf16": 835.5, "fp16": 835.5},
    "H100 80GB HBM3": {"bf16": 989.4, "fp16": 989.4},
    "A100": {"bf16": 312.0, "fp16": 312.0},
    "V100-SXM2": {"fp16": 125.0},
    "V100-PCIE": {"fp16": 112.0},
    "L40S": {"bf16": 362.05, "fp16": 362.05},
    "L4": {"bf16": 121.0, "fp16": 121.0},
    "A10": {"bf16": 125.0, "fp16": 125.0},
    "T4": {"fp16": 65.0},
}


class Cuda(Device):
    """CUDA and ROCm. Run on one H200 with torch 2.11, in November 2026; several cards, ROCm, WSL: with fakes.

    Source: torch 2.13, ``torch/cuda``; NVIDIA driver README, "the /proc/driver/nvidia filesystem"; Linux
    drivers/gpu/drm/amd/amdkfd/kfd_topology.c; Microsoft, "GPU accelerated ML training in WSL".
    """

    type = "cuda"
    backend = "nccl"
    visible_variable = "CUDA_VISIBLE_DEVICES"
    distributed_type = "MULTI_GPU"
    priority = 40
    is_most_common = True
    fallbacks = ("gloo",)
    bound_backends = frozenset({"nccl"})  # torch: init_process_group, "device_id"
    pins_memory = True
    dtypes = frozenset({"bf16", "fp16", "fp8"})
    node_patterns = ("dev/nvidia[0-9]*",)
    check_environment = MappingProxyType({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"})  # asks NVML
    # cuDNN has no plan for a batch that is too large, and says only that it is not supported.
    out_of_memory_messages = (
        "CUDA out of memory",
        "HIP out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_NOT_SUPPORTED",
    )
    peak_flops = MappingProxyType(
        {name: {kind: value * 1e12 for kind, value in peaks.items()} for name, peaks in _TFLOPS.items()}
    )

    def probe_count(self, machine: DeviceProbeHost | None = None) -> int:
        machine = machine or DeviceProbeHost()
        if machine.build().get("hip"):
            # HIP counts the devices that ROCR leaves visible; CUDA's variable works where HIP's is unset.
            visible_to_hip = count_visible(count_amd(machine), machine.env.get("ROCR_VISIBLE_DEVICES"))
            name = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in machine.env else "CUDA_VISIBLE_DEVICES"
            return count_visible(visible_to_hip, machine.env.get(name))
        return super().probe_count(machine) if machine.build().get("cuda") else 0

    def count_physical(self, machine: DeviceProbeHost) -> int:
        nodes = super().count_physical(machine)
        if nodes:
            return nodes
        # The nodes are made at first use; until then the driver lists its cards here.
        cards = len(list(machine.root.glob("proc/driver/nvidia/gpus/*")))
        if cards:
            return cards
        # WSL shows one paravirtual adapter, and Windows nothing; a Jetson has one card.
        if machine.exists("dev/dxg"):
            return count_by_driver(machine.root / "usr/lib/wsl/lib", "libcuda.so.1", "libnvidia-ml.so.1")
        if "SYSTEMROOT" in machine.env:
            return count_by_driver(Path(machine.env["SYSTEMROOT"], "System32"), "nvcuda.dll", "nvml.dll")
        return int(machine.exists("dev/nvhost-gpu") or machine.exists("dev/nvgpu/igpu0"))

    def find_peak_flops(self, dtype: str, index: int | None = None) -> float | None:
        """Return the peak of dense products; None of a slice of a card (MIG)."""
        return None if "MIG" in self.name(index) else super().find_peak_flops(dtype, index)

    def supports(self, dtype: str) -> bool:
        if dtype != "fp8":
            return super().supports(dtype)
        import torch

        if torch.version.hip:
            # The CDNA3 and CDNA4 families and RDNA4 have fp8 matrix units.
            arch = str(self.module.get_device_properties(self._index_or_current(None)).gcnArchName)
            return arch.startswith(("gfx94", "gfx95", "gfx12"))
        return self.module.get_device_capability(self._index_or_current(None)) >= (8, 9)

    def get_memory_info(self, index: int | None = None) -> tuple[int, int]:
        index = self._index_or_current(index)
        # The runtime answers through a context on the card, which takes some 500 MB of it.
        used = None if index == self.current() else self._ask_driver(index)
        if used is None:
            return super().get_memory_info(index)
        total = int(self.module.get_device_properties(index).total_memory)
        return min(max(0, total - used) + self.cached_memory(index), total), total

    def empty_host_cache(self) -> None:
        # Not for all devices: torch 2.13 reads a null pointer where a back end has no allocator of this kind.
        empty = self._accelerator("empty_host_cache")
        if empty is not None:
            empty()

    def _ask_driver(self, index: int) -> int | None:
        """Return the bytes in use as NVML or AMD SMI tells them; None where neither does."""
        ask = getattr(self.module, "device_memory_used", None)
        if ask is None:
            return None
        # Its errors are no RuntimeErrors; torch has imported it where it is there.
        of_nvml = cast("type[Exception]", getattr(sys.modules.get("pynvml"), "NVMLError", ImportError))
        try:
            return int(ask(index))
        except (ImportError, RuntimeError, of_nvml) as error:
            logger.debug("the memory of card %d is asked of the CUDA runtime: %s", index, error)
            return None

    @property
    def has_tf32(self) -> bool:
        import torch

        capability = self.module.get_device_capability(self._index_or_current(None))
        return not torch.version.hip and capability >= (8, 0)

    def allow_tf32(self) -> None:
        import torch

        # The newer name of the same switch, "none" as long as nobody has set it. TorchInductor reads the
        # older one, which torch refuses to tell once both were set.
        if getattr(torch.backends.cuda.matmul, "fp32_precision", "none") == "none":
            torch.backends.cuda.matmul.allow_tf32 = True

    def make_deterministic(self) -> None:
        import torch

        # cuBLAS reads it when it starts; without it, matrix products raise in deterministic mode.
        if environ.get("CUBLAS_WORKSPACE_CONFIG") is None:
            environ.set_variables({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
        torch.backends.cudnn.benchmark = False


PLUGIN: Device = Cuda()
