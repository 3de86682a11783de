"""Settings of the world: the launcher's flags, their environment variables and file keys.

In a file of their own, so that help texts need not import what opens process groups.
"""

from __future__ import annotations

from accelerate.core.frozen_dataclass import frozen_dataclass
from accelerate.core.setting import setting


@frozen_dataclass
class ProcessDeviceSettings:
    """Settings of the devices that the processes run on."""

    __topic__ = "Hardware"
    __common__ = ("use_cpu",)

    use_cpu: bool = setting(
        False,
        flag="--cpu",
        help="use the CPU even if there is an accelerator",
        question="Train on the CPU only?",
    )
    debug: bool = setting(
        False,
        variable="ACCELERATE_DEBUG_MODE",
        help="check the shapes of every collective on all ranks before it runs",
    )
    enable_cpu_affinity: bool = setting(
        False,
        variable="ACCELERATE_CPU_AFFINITY",
        help="bind each process to the cores next to its device (Linux only)",
    )
