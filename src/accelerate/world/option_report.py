"""Option statuses of the world, read from its device, process group and CPU affinity."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from accelerate.core.option_report import (
    OptionStatus,
    RequestedOption,
    non_default_options,
    requested_options,
)
from accelerate.core.setting import load_settings
from accelerate.device.machine import DeviceProbeHost
from accelerate.world.affinity import near_cores
from accelerate.world.process_group import backend_timeouts, group_backends
from accelerate.world.world import InitProcessGroupKwargs, ProcessDeviceSettings, World


def world_option_statuses(
    world: World,
    handler: InitProcessGroupKwargs | None,
    launched: Mapping[str, RequestedOption],
    *,
    cpu: bool = False,
) -> Iterator[OptionStatus]:
    """Yield the status of each option of the world's settings, of its handler, and of the launcher.

    Args:
        world: the open world.
        handler: the requested arguments of its process group.
        launched: options that only the launcher read, by name.
        cpu: the script's own argument.
    """
    for option in requested_options(load_settings(ProcessDeviceSettings, code={"use_cpu": cpu or None})):
        if option.name == "enable_cpu_affinity":
            yield _affinity_status(option, world)
        elif option.name == "debug":
            yield option.report_unless("" if world.debug else "the world was open already, without it")
        else:
            option = RequestedOption("cpu", True, "the argument cpu") if cpu else option
            on_host = world.device.type == "cpu"
            yield option.report_unless("" if on_host else f"the world was open already, on {world.device}")
    for option in non_default_options(handler):
        yield _group_status(option, world)
    option = launched.get("num_processes")
    if option is not None and isinstance(option.value, int):
        yield option.report_unless(
            "" if world.size == option.value else f"this is one of {world.size} processes"
        )
    option = launched.get("num_cpu_threads_per_process")
    if option is not None:
        import torch

        num_threads = torch.get_num_threads()
        yield option.report_unless("" if num_threads == option.value else f"torch uses {num_threads}")
    option = launched.get("gpu_ids")
    if option is not None and world.device.type != "cpu" and option.value != "all":
        requested, visible = len(str(option.value).split(",")), world.hardware.count()
        yield option.report_unless("" if requested == visible else f"{visible} devices are visible")


def _affinity_status(option: RequestedOption, world: World) -> OptionStatus:
    allowed = getattr(os, "sched_getaffinity", None)
    if allowed is None:
        return option.report_not_applied("this system cannot bind a process to cores")
    near = set(
        near_cores(
            world.hardware, world.device.index or world.local_rank, world.local_size, DeviceProbeHost()
        )
    )
    if not near:
        if world.device.type == "cpu":
            reason = "this machine has one NUMA node: no core is nearer than another"
            return option.report_not_applied(reason, matters=False)
        return option.report_not_applied(f"this system does not say which cores are near {world.device}")
    far = len(allowed(0) - near)
    return option.report_unless(
        f"the process may run on {far} cores that are not near {world.device}" if far else ""
    )


def _group_status(option: RequestedOption, world: World) -> OptionStatus:
    import torch.distributed as dist

    if not world.has_group:
        return option.report_not_applied("one process has no group", matters=False)
    if option.name == "timeout":
        limits = backend_timeouts(group_backends(dist.group.WORLD))
        other = sorted({limit for limit in limits if limit != option.value})
        if not limits:
            return option.report_pending(f"the back end {world.backend} does not tell its timeout")
        if other:
            return option.report_not_applied(f"the group of processes has {other[0]}; it was open already")
        return option.report_applied()
    if option.name == "backend":
        joined = dist.get_backend_config().lower()
        named = str(option.value).rpartition(":")[2].lower()
        return option.report_unless(
            "" if named in joined else f"the group of processes has {joined}; it was open already"
        )
    return option.report_unless("" if world.owns_group else "the group of processes was open already")
