"""Huawei Ascend NPUs."""

from __future__ import annotations

from accelerate.device.base import Device


class Npu(Device):
    """Ascend, through torch_npu. Not run on one (the package needs the driver): tested with a fake.

    Source: Ascend Extension for PyTorch 6.0.RC1, "Custom APIs", "Distributed" (hccl); CANN Community 8.3.RC1,
    "Environment variables" (ASCEND_RT_VISIBLE_DEVICES); Rec SDK Torch 7.1.RC1, "Environment variables"
    (/dev/davinci0 ...; in a container the numbers may start anywhere); CANN 9.1.0, "aclrtFloatOverflowMode".
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
