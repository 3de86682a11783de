"""The world: rank, world size and device of this process, and its default process group.

One frozen value, opened once per process. The variables of torchrun, a scheduler or our launcher are binding:
``WORLD_SIZE=2`` gives a group of two processes on any device, the CPU included, or an error.
"""

from __future__ import annotations

import atexit
import dataclasses
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from accelerate import device as devices
from accelerate.core import environ
from accelerate.core.argument_checks import KwargsHandler, check_arguments
from accelerate.core.errors import PeerError, WorldError
from accelerate.core.setting import load_settings
from accelerate.core.value_types import Timeout
from accelerate.device import ProcessDeviceSettings
from accelerate.world import adopted_group, clusters, network, process_group, rendezvous, watchdog

if TYPE_CHECKING:
    import torch

    from accelerate.device.base import Device
    from accelerate.world.peers import PeerProcesses


@check_arguments
@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of ``torch.distributed.init_process_group``.

    Attributes:
        backend: communication backend; None or the default takes the device's own.
        init_method: URL of the rendezvous; None reads address and port from the environment.
        timeout: longest a collective may wait; None takes torch's default of the backend.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: Timeout | None = None


@dataclass(frozen=True)
class World:
    """One process's view of the world.

    Attributes:
        rank, size: rank of this process and world size.
        local_rank, local_size: rank on this machine, and number of processes on it.
        node, nodes: index of this machine, and number of machines.
        device: the device that this process computes on.
        backend: name of the communication backend, None without a group.
        address, port: address that rank 0 listens on, None without a group.
        timeout: longest a collective may wait, None for torch's default.
        debug: collectives check shapes first.
        owns_group: the process group was opened here and is destroyed by ``close``.
        reported: ranks, world size and type that a program has assigned to the states. They say these; with a
            world size of 1 ``prepare`` shards no data and reduces no gradients.
        strategy_type: the distributed type of a strategy that sets up its own communication: the environment
            has chosen it when the world was opened, or the newest ``Accelerator``; None for any other one.
        is_closed: ``close`` has destroyed its process group; what it says can still be read.
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
    reported: dict[str, Any] = field(default_factory=dict[str, Any], init=False, compare=False, repr=False)
    strategy_type: str | None = field(default=None, init=False, compare=False, repr=False)
    is_closed: bool = field(default=False, init=False, compare=False, repr=False)

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """True on the first process of each machine."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """True on the last rank."""
        return self.rank == self.size - 1

    @property
    def has_group(self) -> bool:
        """True if a process group is open (also in a launched world of one)."""
        return self.backend is not None

    @cached_property
    def hardware(self) -> Device:
        """The back end of this process's device type."""
        return devices.get(self.device.type)

    @staticmethod
    def fake(size: int = 8, rank: int = 0, device: str = "meta", nodes: int = 1) -> World:
        """Return a world for dry runs and tests: no process group, no communication."""
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


# What torch 2.13 says when the connection to another rank, or to the store, breaks.
_PEER_IS_GONE = ("reset by peer", "connectFullMesh failed", "likely closed", "closed by peer", "Broken pipe")
_current: World | None = None
# True if the open process group was created here, also while no world uses it.
_owns_group = False
# The store of the first group that was opened here, and the number of groups. Later groups use the same
# store: a rank that opens a new one sooner than rank 0 would find the old one under the same address and
# port.
_store: Any = None
_group_count = 0
# The processes that have met in that store without a launcher.
_met: PeerProcesses | None = None


# The back end and timeout of the group.
_group_arguments: dict[str, Any] = {}
# Object that holds the default process group -> function that makes it use a new one.
_group_users: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def add_group_user(owner: Any, renew: Callable[[Any], None]) -> None:
    """Register ``renew(owner)`` to be called, on all ranks, when the default process group was replaced."""
    _group_users[owner] = renew


# Called while the ranks can still communicate.
_close_actions: list[Callable[[], None]] = []


def add_close_action(action: Callable[[], None]) -> None:
    """Register ``action`` to be called when a world closes, before its group is destroyed."""
    if action not in _close_actions:
        _close_actions.append(action)


def current() -> World | None:
    """Return the open world, or else the one that was closed; None before any, and after ``forget``."""
    return _current


def is_open() -> bool:
    """Return whether a world is open."""
    return _current is not None and not _current.is_closed


def group_number() -> int:
    """Return how many process groups were opened after the first one of this process; alike on all ranks."""
    return _group_count


def get_rank_info() -> tuple[int, int, int]:
    """Return (rank, local rank, world size), also before the world is open.

    They are the process group's, else the launcher's, else those of a single process.
    """
    info = _current or _detect_place()
    return (info.rank, info.local_rank, info.size) if info else (0, 0, 1)


def get_local_size() -> int:
    """Return the number of processes on this machine, also before the world is open."""
    info = _current or _detect_place()
    return info.local_size if info else 1


def _detect_place() -> clusters.ClusterRankInfo | None:
    """Detect the place of this process before the world is open; None for a single process."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        env, rank, size = environ.snapshot(), dist.get_rank(), dist.get_world_size()
        return adopted_group.locate_rank(env, rank, size, waits=False)
    return clusters.detect(environ.snapshot())


def open(
    *,
    cpu: bool | None = None,
    backend: str | None = None,
    timeout: timedelta | None = None,
    **group: Any,
) -> World:
    """Open the world of this process, or return the one that is open.

    Args:
        cpu: compute on the CPU; None reads ``ACCELERATE_USE_CPU``.
        backend: communication backend; None takes the device's own.
        timeout: longest a collective may wait, on every group made here; None takes torch's default.
        group: more arguments of ``torch.distributed.init_process_group``.

    Raises:
        WorldError: the environment contradicts itself, or asks for more processes than devices.
    """
    global _current
    settings = load_settings(ProcessDeviceSettings, code={"use_cpu": cpu or None}).value
    if _current is not None and not _current.is_closed:
        _current = _reuse(_current, settings, asked_cpu=bool(cpu))
        return _current
    import torch.distributed as dist

    env, adopted = environ.snapshot(), None
    if dist.is_available() and dist.is_initialized():
        adopted = dist.get_rank(), dist.get_world_size()
    cluster = clusters.detect(env) if adopted is None else adopted_group.locate_rank(env, *adopted)
    if cluster is None:
        device = _select_device(settings)
        environ.set_variables(devices.get(device.type).runtime_rank())
        cluster = clusters.detect(environ.snapshot())
        if cluster is None:
            _current = World(0, 1, 0, 1, 0, 1, device, debug=settings.debug)
            return _current
    _current = _open_distributed(cluster, settings, backend, timeout, group, adopted)
    return _current


def _close_at_exit() -> None:
    """Close the world at exit: threads of an open group may abort the interpreter.

    After an error only a CPU group is closed: a device's may wait for peers that are gone. In a process of
    multiprocessing that fails none is: its starter may have kept the error, and the other ranks wait for it.
    """
    exiting = sys.exc_info()[1]
    if isinstance(exiting, SystemExit) and exiting.code:
        return
    on_host = _current is None or _current.device.type == "cpu"
    if on_host or not hasattr(sys, "last_value"):
        close()


def close() -> None:
    """Close the world, which stays readable; destroy the process group if it was created here."""
    global _owns_group
    for action in _close_actions:
        action()
    watchdog.shut_down()
    if _owns_group and not environ.get_flag("FORK_LAUNCHED"):
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
    _owns_group = False
    if _current is not None:
        object.__setattr__(_current, "is_closed", True)


def forget() -> None:
    """Close the world but keep its process group for the next ``open``.

    Some programs start afresh several times in one process. Destroying and opening the group each time would
    be slow, and ranks that are not at the same place would meet the wrong group.
    """
    global _current
    _current = None


def _reuse(world: World, settings: ProcessDeviceSettings, *, asked_cpu: bool) -> World:
    """Return the open world, moved to the CPU if a single process asks for that."""
    if not asked_cpu or world.device.type == "cpu":
        return world
    if world.size > 1:
        raise WorldError(
            f"cpu=True was asked for, but {world.size} processes already work on {world.device}",
            why="the device of a group of processes cannot change while it is open",
            fix="create the first Accelerator or PartialState with cpu=True",
        )
    hardware = devices.get("cpu")
    environ.set_variables(hardware.environment, overwrite=False)
    return dataclasses.replace(world, device=hardware.bind(0))


def _open_distributed(
    cluster: clusters.ClusterRankInfo,
    settings: ProcessDeviceSettings,
    backend: str | None,
    timeout: timedelta | None,
    group: Mapping[str, Any],
    adopted: tuple[int, int] | None,
) -> World:
    import multiprocessing.util

    import torch
    import torch.distributed as dist

    global _owns_group
    rank, size, local_size = cluster.rank, cluster.size, cluster.local_size
    device = _select_device(settings, cluster.local_rank, local_size, cluster.hides_devices)
    if (scheduler := clusters.find_scheduler(environ.snapshot())) is not None:
        environ.set_variables(scheduler.mark_task())
    atexit.unregister(process_group.await_native_threads)
    atexit.register(process_group.await_native_threads)  # runs after the group is closed
    if adopted is None:
        _open_group(cluster, device, backend, timeout, group)
        _owns_group = True
        atexit.register(_close_at_exit)
        if multiprocessing.parent_process() is not None:  # which ends without the functions of atexit
            multiprocessing.util.Finalize(None, _close_at_exit, exitpriority=0)
    elif adopted != (rank, size):
        raise WorldError(
            f"the open process group says rank {adopted[0]} of {adopted[1]}, "
            f"{cluster.name} says rank {rank} of {size}"
        )
    elif timeout is not None and _owns_group:
        dist.distributed_c10d._set_pg_timeout(timeout, dist.group.WORLD)  # pyright: ignore[reportPrivateUsage]
    if device.type == "cpu" and local_size > 1 and not environ.get("OMP_NUM_THREADS"):
        # Divide the cores among the processes of the machine; a scheduler may have bound each to its own.
        import psutil

        share = max(1, (psutil.cpu_count(logical=False) or 1) // local_size)
        torch.set_num_threads(min(share, devices.count_cores(devices.DeviceProbeHost(), local_size)))
    if size > 1:
        grace = watchdog.OPENING_GRACE if _owns_group else watchdog.EXIT_GRACE
        watchdog.start(rank, size, timeout, _met if _owns_group else None, opening_grace=grace)
    # "cpu:gloo,cuda:nccl", or one name for all devices
    joined = dist.get_backend()
    backends = {kind: name for kind, _, name in (part.rpartition(":") for part in joined.split(","))}
    return World(
        rank=rank,
        size=size,
        local_rank=cluster.local_rank,
        local_size=local_size,
        node=cluster.node,
        nodes=cluster.nodes,
        device=device,
        backend=backends.get(device.type) or backends.get("", joined),
        address=cluster.address or None,
        port=cluster.port or None,
        timeout=timeout,
        debug=settings.debug,
        owns_group=_owns_group,
    )


def _open_group(
    cluster: clusters.ClusterRankInfo,
    device: torch.device,
    backend: str | None,
    timeout: timedelta | None,
    group: Mapping[str, Any],
) -> None:
    import torch.distributed as dist

    global _store, _met
    # torch and every library above it read these names; schedulers use others.
    environ.set_variables(
        {
            "RANK": cluster.rank,
            "WORLD_SIZE": cluster.size,
            "LOCAL_RANK": cluster.local_rank,
            "LOCAL_WORLD_SIZE": cluster.local_size,
            "MASTER_ADDR": cluster.address,
            "MASTER_PORT": cluster.port,
        }
    )
    hardware, of_device = devices.get(device.type), {}
    if backend is None:
        # Host tensors and objects go over gloo whatever the device, so that gathering them needs no copy.
        name = "gloo" if device.type == "cpu" else hardware.group_backend()
        backend = name if device.type == "cpu" else f"cpu:gloo,{device.type}:{name}"
        of_device = {"device_id": device} if name in hardware.bound_backends else {}
    arguments: dict[str, Any] = {"backend": backend, "timeout": timeout, **of_device, **group}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    meets_here = not arguments.keys() & {"init_method", "store"}
    process_group.raise_open_file_limit()
    if meets_here and cluster.size > cluster.local_size and environ.get("GLOO_SOCKET_IFNAME") is None:
        # Else gloo takes what the name of this machine resolves to, which others may not reach.
        environ.set_variables({"GLOO_SOCKET_IFNAME": network.find_rank_interface(cluster.address)})
    meeting: rendezvous.Rendezvous | None = None
    try:
        if meets_here and _store is not None:
            arguments |= _next_group_store(cluster.rank, cluster.size)
        elif meets_here and cluster.size > 1 and environ.get("TORCHELASTIC_RUN_ID") is None:
            # No launcher watches the ranks: torchrun and this package's have an identity.
            meeting = rendezvous.Rendezvous(cluster, timeout)
            meeting.wait()
            arguments |= meeting.arguments()
            _met = meeting.processes
        with process_group.record_connections(), meeting.watch() if meeting else nullcontext():
            dist.init_process_group(**arguments)
    except RuntimeError as error:
        # A rank that has opened the group may fail and end before the others have.
        if not any(text in str(error) for text in _PEER_IS_GONE):
            raise
        raise PeerError(
            f"rank 0, or another rank, is gone while rank {cluster.rank} was opening the process group",
            why=str(error).splitlines()[0],
            fix="the first error in the output of the other ranks says why",
        ) from error
    if meets_here and _store is None:
        _store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    _group_arguments.clear()
    _group_arguments.update(of_device, backend=backend, timeout=timeout)


def _next_group_store(rank: int, size: int) -> dict[str, Any]:
    """Return the arguments of one more group that meets by the store of the first."""
    import torch.distributed as dist

    global _group_count
    _group_count += 1
    store = dist.distributed_c10d.PrefixStore(f"accelerate/group/{_group_count}", _store)
    return {"store": store, "rank": rank, "world_size": size}


def renew_group() -> None:
    """Replace the default process group after ``interrupt_group``, and what uses it; a collective.

    Raises:
        WorldError: the group was opened by the user, or other groups depend on it.
    """
    import torch.distributed as dist

    watch = watchdog.current()
    other_groups = len(dist.distributed_c10d._world.pg_map) > 1  # pyright: ignore[reportPrivateUsage]
    if _current is None or watch is None or not _owns_group or _store is None or other_groups:
        raise WorldError(
            "the process group cannot be replaced after a collective that one rank never joined",
            why="other groups depend on it" if other_groups else "it was not opened by this package",
        )
    dist.destroy_process_group()
    arguments = {name: value for name, value in _group_arguments.items() if value is not None}
    with process_group.record_connections():
        dist.init_process_group(**arguments, **_next_group_store(_current.rank, _current.size))
    watch.use_group(dist.group.WORLD)
    for owner, renew in list(_group_users.items()):
        renew(owner)


def _select_device(
    settings: ProcessDeviceSettings, local_rank: int = 0, local_size: int = 1, hides_devices: bool = False
) -> torch.device:
    """Select the device of this process and make it the current one.

    ``hides_devices``: the scheduler may show each process only devices of its own, so that fewer are visible
    than processes share the machine. Then it is enough that the machine has enough devices in all.
    """
    fixed = environ.get("ACCELERATE_TORCH_DEVICE")
    if fixed:
        kind, _, number = fixed.partition(":")
        if settings.use_cpu and kind != "cpu":
            raise WorldError(
                f"two devices are asked for: the CPU (--cpu, cpu=True or ACCELERATE_USE_CPU) "
                f"and {fixed} (ACCELERATE_TORCH_DEVICE)",
                fix="keep one of them",
            )
        hardware = devices.get(kind)
        index = int(number) if number.isdecimal() else 0
        if local_rank and not number:
            index = local_rank % (hardware.count() or 1)
    else:
        hardware, index = devices.get("cpu") if settings.use_cpu else devices.detect(), 0
        # A process alone needs one, which it has detected; to count may start the device's runtime. One that
        # starts the processes itself shows each of them its own device alone.
        if hardware.type != "cpu" and local_size > 1 and not hardware.starts_ranks:
            count = hardware.count()
            enough = local_size <= count or (
                hides_devices and local_size <= hardware.count_physical(devices.DeviceProbeHost())
            )
            if not enough:
                raise WorldError(
                    f"{local_size} processes share this machine, but it has {count} {hardware.type} "
                    "device(s)",
                    why="each process needs a device of its own",
                    fix=f"start {count} process(es) here, or use the CPU: accelerate launch --cpu ...",
                )
            index = local_rank % count
    environ.set_variables(hardware.environment, overwrite=False)
    return hardware.bind(index)
