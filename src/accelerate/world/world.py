"""The world: which process this is, among how many, on which device.

One frozen value, opened once per process. What torchrun, a scheduler or our launcher says about the world is
law: ``WORLD_SIZE=2`` gives a group of two processes on any device, the CPU included, or an error.
"""

from __future__ import annotations

import atexit
import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from accelerate import device as devices
from accelerate.core import environ
from accelerate.core.errors import WorldError
from accelerate.core.handler import KwargsHandler
from accelerate.core.setting import load
from accelerate.world import clusters, together
from accelerate.world.settings import WorldSettings

if TYPE_CHECKING:
    import torch

    from accelerate.device.base import Device


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """How the group of processes is opened; passed to ``torch.distributed.init_process_group``.

    Attributes:
        backend: communication backend; None or the default takes the device's own.
        init_method: URL of the rendezvous; None reads address and port from the environment.
        timeout: longest a collective may wait; None takes torch's default of the backend.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass(frozen=True)
class World:
    """One process's view of all processes.

    Attributes:
        rank, size: this process among all.
        local_rank, local_size: this process among those of its machine.
        node, nodes: this machine among all.
        device: where this process computes.
        backend: name of the communication backend, None without a group.
        address, port: where rank 0 listens, None without a group.
        timeout: longest a collective may wait, None for torch's default.
        debug: collectives check shapes first.
        owns_group: the process group was opened here and is destroyed by ``close``.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    device: torch.device
    backend: str | None = None
    address: str | None = None
    port: int | None = None
    timeout: timedelta | None = None
    debug: bool = False
    owns_group: bool = False

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last rank."""
        return self.rank == self.size - 1

    @property
    def has_group(self) -> bool:
        """Whether a process group stands behind it (also true for a launched world of one)."""
        return self.backend is not None

    @property
    def hardware(self) -> Device:
        """What this process knows about its device."""
        return devices.get(self.device.type)

    @staticmethod
    def fake(size: int = 8, rank: int = 0, device: str = "meta", nodes: int = 1) -> World:
        """A world for plans and tests: no process group, no communication."""
        import torch

        local = size // nodes
        return World(
            rank=rank,
            size=size,
            local_rank=rank % local,
            local_size=local,
            node=rank // local,
            nodes=nodes,
            device=torch.device(device),
        )


_current: World | None = None
# Whether the open process group is ours to destroy, also while no world stands on it.
_opened_group = False
# The store of the first group that was opened here, and how many were. Later groups stand on the same store:
# a rank that opens a new one sooner than rank 0 would find the old one under the same address and port.
_store: Any = None
_opened = 0


# What must be done while the ranks can still talk.
_before_close: list[Callable[[], None]] = []


def before_close(action: Callable[[], None]) -> None:
    """Calls ``action`` whenever a world closes, before its group is destroyed."""
    if action not in _before_close:
        _before_close.append(action)


def current() -> World | None:
    """The open world, or None."""
    return _current


def open(
    *,
    cpu: bool | None = None,
    backend: str | None = None,
    timeout: timedelta | None = None,
    **group: Any,
) -> World:
    """Opens the world of this process, or returns the one that is open.

    Args:
        cpu: compute on the CPU; None reads ``ACCELERATE_USE_CPU``.
        backend: communication backend; None takes the device's own.
        timeout: longest a collective may wait, on every group made here; None takes torch's default.
        group: more arguments of ``torch.distributed.init_process_group``.

    Raises:
        WorldError: the environment contradicts itself, or asks for more processes than devices.
    """
    global _current
    settings = load(WorldSettings, code={"use_cpu": cpu or None}).value
    if _current is not None:
        _current = _again(_current, settings, asked_cpu=bool(cpu))
        return _current
    cluster = clusters.detect(environ.snapshot())
    adopted = _adopted_group()
    if adopted is None and cluster is None:
        _current = _alone(settings)
    else:
        _current = _together(cluster, settings, backend, timeout, group, adopted)
    return _current


def _close_at_exit() -> None:
    """A group left open may abort the interpreter, when its threads outlive it.

    After an error only a host group is closed: a device's may wait for peers that are gone.
    """
    on_host = _current is None or _current.device.type == "cpu"
    if on_host or not hasattr(sys, "last_value"):
        close()


def close() -> None:
    """Closes the world; destroys the process group if it was opened here."""
    global _current, _opened_group
    for action in _before_close:
        action()
    together.end()
    if _opened_group and not environ.flag("FORK_LAUNCHED"):
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
    _current, _opened_group = None, False


def forget() -> None:
    """Closes the world but leaves its process group, for the next ``open`` to stand on.

    Some programs start afresh several times in one process. Destroying and opening the group each time would
    be slow, and ranks that are not at the same place would meet the wrong group.
    """
    global _current
    _current = None


def _again(world: World, settings: WorldSettings, *, asked_cpu: bool) -> World:
    """An open world asked for once more: the same, unless another device is wanted by a lone process."""
    if not asked_cpu or world.device.type == "cpu":
        return world
    if world.size > 1:
        raise WorldError(
            f"cpu=True was asked for, but {world.size} processes already work on {world.device}",
            why="the device of a group of processes cannot change while it is open",
            fix="create the first Accelerator or PartialState with cpu=True",
        )
    return dataclasses.replace(world, device=_take(devices.get("cpu"), 0))


def _alone(settings: WorldSettings) -> World:
    device = _device(settings)
    return World(
        rank=0, size=1, local_rank=0, local_size=1, node=0, nodes=1, device=device, debug=settings.debug
    )


def _adopted_group() -> tuple[int, int] | None:
    """(rank, size) of a process group that the user has already opened."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return None


def _together(
    cluster: clusters.Cluster | None,
    settings: WorldSettings,
    backend: str | None,
    timeout: timedelta | None,
    group: Mapping[str, Any],
    adopted: tuple[int, int] | None,
) -> World:
    import torch.distributed as dist

    global _opened_group
    if cluster is None:
        # The user opened the group by hand and no launcher described it: all ranks are taken to be local.
        rank, size = adopted or (0, 1)
        place = {"local_rank": rank, "local_size": size, "node": 0, "nodes": 1}
    else:
        rank, size = cluster.rank, cluster.size
        place = {
            "local_rank": cluster.local_rank,
            "local_size": cluster.local_size,
            "node": cluster.node,
            "nodes": cluster.nodes,
        }
    narrows = cluster is not None and cluster.narrows
    device = _device(settings, place["local_rank"], place["local_size"], narrows)
    if adopted is None:
        assert cluster is not None
        _open_group(cluster, device, backend, timeout, group)
        _opened_group = True
        atexit.register(_close_at_exit)
    elif adopted != (rank, size):
        raise WorldError(
            f"the open process group says rank {adopted[0]} of {adopted[1]}, "
            f"{cluster.name if cluster else 'the environment'} says rank {rank} of {size}"
        )
    elif timeout is not None and _opened_group:
        dist.distributed_c10d._set_pg_timeout(timeout, dist.group.WORLD)  # pyright: ignore[reportPrivateUsage]
    _share_cores(device, place["local_size"])
    if size > 1:
        together.begin(rank, size, timeout)
    return World(
        rank=rank,
        size=size,
        **place,
        device=device,
        backend=_backend_of(device, dist.get_backend()),
        address=cluster.address if cluster else None,
        port=cluster.port if cluster else None,
        timeout=timeout,
        debug=settings.debug,
        owns_group=_opened_group,
    )


def _open_group(
    cluster: clusters.Cluster,
    device: torch.device,
    backend: str | None,
    timeout: timedelta | None,
    group: Mapping[str, Any],
) -> None:
    # torch and every library above it read these names; schedulers use others.
    environ.write(
        {
            "RANK": cluster.rank,
            "WORLD_SIZE": cluster.size,
            "LOCAL_RANK": cluster.local_rank,
            "LOCAL_WORLD_SIZE": cluster.local_size,
            "MASTER_ADDR": cluster.address,
            "MASTER_PORT": cluster.port,
        }
    )
    hardware = devices.get(device.type)
    if backend is None:
        # Host tensors and objects go over gloo whatever the device, so that gathering them needs no copy.
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{hardware.group_backend()}"
    arguments: dict[str, Any] = {"backend": backend, "timeout": timeout, **group}
    _join(cluster, {name: value for name, value in arguments.items() if value is not None})


def _join(cluster: clusters.Cluster, arguments: dict[str, Any]) -> None:
    global _store, _opened
    import torch.distributed as dist

    _opened += 1
    if "init_method" in arguments or "store" in arguments:
        dist.init_process_group(**arguments)
    elif _store is None:
        dist.init_process_group(**arguments)
        _store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    else:
        store = dist.distributed_c10d.PrefixStore(f"accelerate/group/{_opened}", _store)
        dist.init_process_group(store=store, rank=cluster.rank, world_size=cluster.size, **arguments)


def _device(
    settings: WorldSettings, local_rank: int = 0, local_size: int = 1, narrows: bool = False
) -> torch.device:
    """Where this process computes, bound as the current device.

    ``narrows``: the scheduler may show each process only devices of its own, so that fewer are visible than
    processes share the machine. They are shared evenly then, if the machine has enough of them in all.
    """
    fixed = environ.get("ACCELERATE_TORCH_DEVICE")
    if fixed:
        kind, _, index = fixed.partition(":")
        if settings.use_cpu and kind != "cpu":
            raise WorldError(
                f"two devices are asked for: the CPU (--cpu, cpu=True or ACCELERATE_USE_CPU) "
                f"and {fixed} (ACCELERATE_TORCH_DEVICE)",
                fix="keep one of them",
            )
        return _take(devices.get(kind), int(index) if index.isdecimal() else 0)
    hardware = devices.get("cpu") if settings.use_cpu else devices.detect()
    if hardware.type == "cpu":
        return _take(hardware, 0)
    count = hardware.count()
    enough = local_size <= count or (narrows and local_size <= hardware.present(devices.Machine()))
    if not enough:
        raise WorldError(
            f"{local_size} processes share this machine, but it has {count} {hardware.type} device(s)",
            why="each process needs a device of its own",
            fix=f"start {count} process(es) here, or use the CPU: accelerate launch --cpu ...",
        )
    return _take(hardware, local_rank % count)


def _take(hardware: devices.Device, index: int) -> torch.device:
    """Makes a device the current one, in an environment as its processes need it."""
    environ.write(environ.unset(hardware.environment))
    hardware.bind(index)
    return hardware.torch_device(index)


def _backend_of(device: torch.device, joined: str) -> str:
    """The part of ``"cpu:gloo,cuda:nccl"`` that serves ``device``; torch reports the joined name."""
    for part in joined.split(","):
        kind, _, name = part.rpartition(":")
        if not kind or kind == device.type:
            return name
    return joined


def _share_cores(device: torch.device, local_size: int) -> None:
    """Gives each CPU process its part of the cores, unless the user said how many threads."""
    if device.type != "cpu" or local_size == 1 or environ.get("OMP_NUM_THREADS"):
        return
    import psutil
    import torch

    cores = psutil.cpu_count(logical=False) or 1
    torch.set_num_threads(max(1, cores // local_size))
