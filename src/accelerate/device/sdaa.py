"""Tecorigin SDAA cards."""

from __future__ import annotations

from accelerate.device.base import Device


class Sdaa(Device):
    """Tecorigin, through torch_sdaa. Not run on one (the package is the vendor's): tested with a fake.

    Source: DeepSpeed at ca2090b, ``accelerator/sdaa_accelerator.py`` (tccl, SDAA_VISIBLE_DEVICES, inductor;
    the free memory is not told); Tecorigin ModelZoo, container instructions (/dev/tcaicard0 ...).
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
