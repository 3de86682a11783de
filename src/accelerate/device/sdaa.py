"""Tecorigin SDAA cards."""

from __future__ import annotations

from accelerate.device.base import Device


class Sdaa(Device):
    """Tecorigin, through torch_sdaa. Not run on one (the package is the vendor's): tested with a fake.

    Source: Tecorigin ModelZoo, container instructions (/dev/tcaicard0 ...); DeepSpeed's documentation of
    the device (SDAA_VISIBLE_DEVICES, tccl).
    """

    type = "sdaa"
    backend = "tccl"
    visible_variable = "SDAA_VISIBLE_DEVICES"
    distributed_type = "MULTI_SDAA"
    priority = 80
    extension = "torch_sdaa"
    node_patterns = ("dev/tcaicard[0-9]*",)
    out_of_memory_messages = ("SDAA out of memory",)


PLUGIN: Device = Sdaa()
