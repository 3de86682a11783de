"""The place of a rank in a process group that the program has opened itself.

The group says rank and world size. Where no launcher tells the rest, each rank writes its host into the
key-value store of the group, and reads those of the others. ``LOCAL_RANK`` counts wherever it is set.
"""

from __future__ import annotations

from typing import Any

from accelerate.core.errors import WorldError, list_first
from accelerate.world import clusters
from accelerate.world.network import is_loopback
from accelerate.world.peers import process_namespace


def locate_rank(env: clusters.Env, rank: int, size: int, *, waits: bool = True) -> clusters.ClusterRankInfo:
    """Return the place of a rank of the group.

    Args:
        env: the environment.
        rank, size: of the group.
        waits: for the hosts of all ranks, where no launcher tells the place; otherwise all ranks are taken to
            share this machine.

    Raises:
        WorldError: the environment contradicts itself, or a rank has not come within the group's timeout.
    """
    scheduler, torchrun = clusters.find_scheduler(env), clusters.TorchrunEnvironment(env)
    is_told = torchrun.detect(env) and clusters.read_number(env, *torchrun.local_size_names) is not None
    if scheduler is not None and size > 1 and not scheduler.is_inherited():
        is_told |= (scheduler.rank, scheduler.size) == (rank, size)
    if is_told and (cluster := clusters.detect(env)) is not None:
        return cluster
    hosts = _gather_hosts(rank, size) if waits else [""] * size
    neighbours = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    machines = list(dict.fromkeys(hosts))
    local_rank = clusters.read_number(env, "LOCAL_RANK")
    return clusters.ClusterRankInfo(
        "the environment",
        rank,
        size,
        local_rank=neighbours.index(rank) if local_rank is None else local_rank,
        local_size=len(neighbours),
        node=machines.index(hosts[rank]),
        nodes=len(machines),
        address="",
        port=0,
        hides_devices=scheduler is not None,
    )


def _gather_hosts(rank: int, size: int) -> list[str]:
    """Return the host of each rank; all alike, without a wait, where the store is at a loopback address."""
    import torch.distributed as dist

    store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    if size == 1 or store is None or dist.get_backend() == "fake":
        return [""] * size
    hosts = dist.distributed_c10d.PrefixStore("accelerate/hosts", store)
    hosts.set(str(rank), process_namespace())
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if is_loopback(str(getattr(store, "host", ""))):
        return [""] * size
    try:
        return [host.decode() for host in hosts.multi_get([*map(str, range(size))])]  # waits for all of them
    except RuntimeError as error:  # torch's DistStoreError
        missing = [str(each) for each in range(size) if not hosts.check([str(each)])]
        raise WorldError(
            f"{len(missing)} of {size} ranks of the process group have not come: {list_first(missing)}",
            why="a rank asks all others for their hosts, where no launcher tells which share its machine",
            fix="create the Accelerator or PartialState on all ranks, or set RANK, WORLD_SIZE, LOCAL_RANK "
            "and LOCAL_WORLD_SIZE for each",
        ) from error
