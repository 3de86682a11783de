"""The functions ``is_<device>_available`` and similar checks, under the names of 1.x.

All answers about a device come from the device's own file.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from accelerate import device as devices
from accelerate.core import packages
from accelerate.core.errors import SettingError
from accelerate.core.packages import is_torch_version


def device_checker(type: str) -> Callable[..., bool]:
    """Return a check whether a device of ``type`` can be used; its argument changes nothing."""

    def check(check_device: bool = False) -> bool:
        return devices.get(type).is_available()

    check.__doc__ = f"Return whether a device of type {type!r} can be used by this process."
    return check


def is_cuda_available() -> bool:
    """Return whether a device of type 'cuda' can be used by this process."""
    return devices.get("cuda").is_available()


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Return whether a device of type 'hpu' can be used by this process; the argument changes nothing."""
    return devices.get("hpu").is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether a device of type 'mps' can be used and torch is ``min_version`` or newer."""
    device = devices.get("mps")
    return device.is_available() and is_torch_version(">=", min_version)


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether a device of type 'xla' can be used, and whether it is a TPU or a GPU.

    Raises:
        SettingError: both are asked for.
    """
    if check_is_tpu and check_is_gpu:
        raise SettingError(
            "check_is_tpu and check_is_gpu are both set", why="a process computes on one kind of device"
        )
    device = devices.get("xla")
    if not device.is_available() or not (check_is_tpu or check_is_gpu):
        return device.is_available()
    return ("TPU" in device.name()) == check_is_tpu


def is_habana_gaudi1() -> bool:
    """Return whether the 'hpu' device at hand is a Gaudi of the first generation."""
    device = devices.get("hpu")
    return device.is_available() and device.name() == "GAUDI"


def is_rocm_available() -> bool:
    """Return whether torch was built for ROCm and finds a device."""
    import torch

    device = devices.get("cuda")
    return torch.version.hip is not None and device.is_available()


def check_cuda_fp8_capability() -> bool:
    """Return whether the 'cuda' device at hand computes in 8-bit floats."""
    device = devices.get("cuda")
    return device.supports("fp8") if device.is_available() else False


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether the best device of this machine computes in bfloat16."""
    device, ignored = devices.detect(), devices.get("xla")
    return device.supports("bf16") and not (ignore_tpu and device.type == ignored.type)


def is_fp16_available() -> bool:
    """Return whether the best device of this machine computes in float16."""
    return devices.detect().supports("fp16")


def is_torch_distributed_available() -> bool:
    """Return whether this torch was built with torch.distributed."""
    import torch

    return torch.distributed.is_available()


def is_xccl_available() -> bool:
    """Return whether this torch has the communication backend XCCL."""
    import torch

    return torch.distributed.is_available() and torch.distributed.is_backend_available("xccl")


def _import_attribute(home: str) -> Any:
    """The attribute ``package.module:name`` of another package; None where it is absent."""
    module, _, name = home.partition(":")
    if not packages.is_installed(module.partition(".")[0]) or not packages.is_installed(module):
        return None
    return getattr(import_module(module), name, None)


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return whether bitsandbytes computes on other devices than those of CUDA."""
    return "multi_backend" in (_import_attribute("bitsandbytes:features") or ())


def is_transformer_engine_mxfp8_available() -> bool:
    """Return whether TransformerEngine says that the device computes in MXFP8."""
    check = _import_attribute("transformer_engine.pytorch.fp8:check_mxfp8_support")
    return bool(check and check()[0])


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Return whether a tensor lives on a device of type 'xpu'."""
    wanted = devices.get("xpu").type
    return getattr(getattr(tensor, "device", None), "type", None) == wanted
