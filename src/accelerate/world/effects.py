"""What became of the options of the world, seen on its device, its group of processes and its cores."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from accelerate.core.effects import Effect, Option, differing, given
from accelerate.core.setting import load
from accelerate.device.machine import Machine
from accelerate.world.affinity import near_cores
from accelerate.world.world import InitProcessGroupKwargs, World, WorldSettings


def effects(
    world: World,
    handler: InitProcessGroupKwargs | None,
    launched: Mapping[str, Option],
    *,
    cpu: bool = False,
) -> Iterator[Effect]:
    """What became of the settings of the world, of its handler, and of what the launcher was asked for.

    Args:
        world: the open one.
        handler: how its group was to be opened.
        launched: options that stayed with the launcher, by name.
        cpu: the script's own argument.
    """
    for option in given(load(WorldSettings, code={"use_cpu": cpu or None})):
        if option.name == "enable_cpu_affinity":
            yield _bound(option, world)
        elif option.name == "debug":
            yield option.seen("" if world.debug else "the world was open already, without it")
        else:
            option = Option("cpu", True, "the argument cpu") if cpu else option
            on_host = world.device.type == "cpu"
            yield option.seen("" if on_host else f"the world was open already, on {world.device}")
    for option in differing(handler):
        yield _of_group(option, world)
    yield from _of_launch(launched, world)


def _bound(option: Option, world: World) -> Effect:
    allowed = getattr(os, "sched_getaffinity", None)
    if allowed is None:
        return option.failed("this system cannot bind a process to cores")
    near = set(
        near_cores(world.hardware, world.device.index or world.local_rank, world.local_size, Machine())
    )
    if not near:
        if world.device.type == "cpu":
            why = "this machine has one NUMA node: no core is nearer than another"
            return option.failed(why, matters=False)
        return option.failed(f"this system does not say which cores are near {world.device}")
    far = len(allowed(0) - near)
    return option.seen(f"the process may run on {far} cores that are not near {world.device}" if far else "")


def _of_group(option: Option, world: World) -> Effect:
    import torch.distributed as dist

    if not world.has_group:
        return option.failed("one process has no group", matters=False)
    if option.name == "timeout":
        found = timeouts(world)
        other = sorted({limit for limit in found if limit != option.value})
        if not found:
            return option.pending(f"the back end {world.backend} does not tell its timeout")
        if other:
            return option.failed(f"the group of processes has {other[0]}; it was open already")
        return option.applied()
    if option.name == "backend":
        joined = dist.get_backend_config().lower()
        named = str(option.value).rpartition(":")[2].lower()
        return option.seen(
            "" if named in joined else f"the group of processes has {joined}; it was open already"
        )
    return option.seen("" if world.owns_group else "the group of processes was open already")


def timeouts(world: World) -> list[timedelta]:
    """How long collectives of the world's group wait, from the back ends that tell it."""
    import torch

    group: Any = torch.distributed.group.WORLD
    found: list[timedelta] = []
    for device in {torch.device("cpu").type, world.device.type}:
        if device in {each.type for each in group._device_types}:
            options = getattr(group._get_backend(torch.device(device)), "options", None)
            found += [limit for limit in (getattr(options, "_timeout", None),) if limit is not None]
    return found


def _of_launch(launched: Mapping[str, Option], world: World) -> Iterator[Effect]:
    option = launched.get("num_processes")
    if option is not None and isinstance(option.value, int):
        yield option.seen("" if world.size == option.value else f"this is one of {world.size} processes")
    option = launched.get("num_cpu_threads_per_process")
    if option is not None:
        import torch

        here = torch.get_num_threads()
        yield option.seen("" if here == option.value else f"torch uses {here}")
    option = launched.get("gpu_ids")
    if option is not None and world.device.type != "cpu" and option.value != "all":
        asked, found = len(str(option.value).split(",")), world.hardware.count()
        yield option.seen("" if asked == found else f"{found} devices are visible")
