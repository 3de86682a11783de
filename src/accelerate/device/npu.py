"""Huawei Ascend NPUs."""

from __future__ import annotations

from accelerate.device.base import Device


class Npu(Device):
    """Ascend, through torch_npu. Not run on one (the package needs the driver): tested with a fake.

    Source: Ascend Extension for PyTorch, "API reference"; CANN documentation, "Environment variables"
    (ASCEND_RT_VISIBLE_DEVICES) and the container guide (/dev/davinci0 ...; numbers may start anywhere).
    """

    type = "npu"
    backend = "hccl"
    visible_variable = "ASCEND_RT_VISIBLE_DEVICES"
    distributed_type = "MULTI_NPU"
    priority = 60
    extension = "torch_npu"
    node_patterns = ("dev/davinci[0-9]*",)
    out_of_memory_messages = ("NPU out of memory",)


PLUGIN: Device = Npu()
