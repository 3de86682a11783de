"""Moore Threads GPUs."""

from __future__ import annotations

from accelerate.device.base import Device


class Musa(Device):
    """Moore Threads, through torch_musa. Not run on one (the package is the vendor's): tested with a fake.

    Source: torch_musa at 0068b8a, ``torch_musa/core/memory.py`` and README (mccl); torchada 0.1.14,
    "Features" (MUSA_VISIBLE_DEVICES, inductor); MT container toolkit (/dev/mtgpu.0 ..., and /dev/mtgpu0 ...).
    """

    type = "musa"
    backend = "mccl"
    visible_variable = "MUSA_VISIBLE_DEVICES"
    distributed_type = "MULTI_MUSA"
    priority = 70
    extension = "torch_musa"
    node_patterns = ("dev/mtgpu.[0-9]*", "dev/mtgpu[0-9]*")
    out_of_memory_messages = ("MUSA out of memory",)


PLUGIN: Device = Musa()
