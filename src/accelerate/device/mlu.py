"""Cambricon MLUs."""

from __future__ import annotations

from types import MappingProxyType

from accelerate.device.base import Device


class Mlu(Device):
    """Cambricon, through torch_mlu. Not run on one (the package is the vendor's): tested with a fake.

    Source: DeepSpeed at ca2090b, ``accelerator/mlu_accelerator.py`` (cncl, MLU_VISIBLE_DEVICES, inductor);
    Cambricon's Kubernetes device plug-in (/dev/cambricon_dev0 ... beside /dev/cambricon_ctl).
    """

    type = "mlu"
    backend = "cncl"
    visible_variable = "MLU_VISIBLE_DEVICES"
    distributed_type = "MULTI_MLU"
    priority = 90
    extension = "torch_mlu"
    node_patterns = ("dev/cambricon_dev[0-9]*",)
    check_environment = MappingProxyType({"PYTORCH_CNDEV_BASED_MLU_CHECK": "1"})  # asks CNDEV
    out_of_memory_messages = ("MLU out of memory",)


PLUGIN: Device = Mlu()
