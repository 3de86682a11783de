"""The rendezvous of machines, numbered from the start or as they come; used by the agent, which may wait."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from accelerate.core.errors import LaunchError

POLL_SECONDS = 0.05  # seconds between looks for machines that are not there yet


@dataclass
class RendezvousInfo:
    """The store and the numbers of the machines of one attempt.

    Attributes:
        store: keys of this attempt only.
        machine_rank: of this machine, from 0.
        machine_count: how many machines there are.
        address, port: where the ranks' own store is, or will be, if this machine is number 0; port 0: it is
            to be opened.
    """

    store: Any
    machine_rank: int
    machine_count: int
    address: str
    port: int = 0


class StaticRendezvous:
    """Machines that know their numbers, over a store on machine 0. Each attempt has keys of its own.

    Args:
        job: what the launcher said.

    Raises:
        LaunchError: the port is taken, machine 0 is not to be reached, or two machines have one number.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.host, self.port = job, job["host"], job["port"]
        self.machine_rank, self.machine_count, self.join_timeout = (
            job["machine_rank"],
            job["most"],
            job["join"],
        )
        self.attempt = -1
        self.store = _create_tcp_store(
            self.host, self.port, serve=self.machine_rank == 0, seconds=self.join_timeout
        )
        self.store.set_timeout(timedelta(seconds=max(1.0, job["machine_timeout"])))

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for all machines."""
        from torch.distributed.distributed_c10d import PrefixStore

        self.attempt += 1
        store = PrefixStore(f"accelerate/{self.job['id']}/{self.attempt}", self.store)
        if store.add(f"here/{self.machine_rank}", 1) > 1:
            raise LaunchError(
                f"two machines say that they are number {self.machine_rank}",
                why=f"both have met at {self.host}:{self.port}",
                fix="give each its own --machine_rank, from 0",
            )
        missing = list(range(self.machine_count))
        deadline = time.monotonic() + self.join_timeout
        while missing:
            missing = [number for number in missing if not store.check([f"here/{number}"])]
            if missing and time.monotonic() > deadline:
                raise LaunchError(
                    f"machines {', '.join(map(str, missing))} of {self.machine_count} did not come within "
                    f"{self.join_timeout:g} s",
                    why=f"the others wait for them at {self.host}:{self.port}",
                    fix="start the same command on each, with its own --machine_rank",
                )
            time.sleep(POLL_SECONDS if missing else 0)
        # The ranks find nothing of an attempt before: what they leave in a store breaks the next one.
        return RendezvousInfo(
            store, self.machine_rank, self.machine_count, self.host, 0 if self.attempt else self.port
        )

    def num_machines_waiting(self) -> int:
        """The number of machines that want to join: all are there."""
        return 0

    def shutdown(self) -> None:
        """Nothing: the store goes with this process."""


class DynamicRendezvous:
    """Machines that are numbered as they come, by a rendezvous of torch.distributed.elastic.

    Args:
        job: what the launcher said.

    Raises:
        LaunchError: the rendezvous is unknown, or not to be reached.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.host, self.port = job, job["host"], job["port"]
        self.address = find_local_address(self.host, self.port)
        if self.address is None or (_is_loopback(self.address) and not _is_loopback(self.host)):
            self.address = self.host
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError

        try:
            self.handler = self._create_handler(here=is_this_machine(self.host))
        except RendezvousConnectionError as error:
            if not is_this_machine(self.host):
                raise LaunchError(
                    f"nobody answers at {self.host}:{self.port}",
                    why=str(error.__cause__ or error).splitlines()[0],
                    fix="start the machine of that address first, or give another --rdzv_endpoint",
                ) from error
            self.handler = self._create_handler(here=False)  # another launch on this machine was first

    def _create_handler(self, *, here: bool) -> Any:
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

        job = self.job
        defaults: dict[str, Any] = {"read_timeout": int(max(1, job["machine_timeout"]))}
        if job["backend"] == "c10d":
            defaults["is_host"] = here
            # A machine that is lost is forgotten by then, and the others can meet without it.
            defaults["keep_alive_interval"] = int(min(5, max(1, job["machine_timeout"] / 4)))
        conf = {**defaults, "join_timeout": int(job["join"]), **job["conf"]}
        try:
            return get_rendezvous_handler(
                RendezvousParameters(
                    backend=job["backend"],
                    endpoint=f"{self.host}:{self.port}",
                    run_id=job["id"],
                    min_nodes=job["least"],
                    max_nodes=job["most"],
                    local_addr=self.address,
                    **conf,
                )
            )
        except ValueError as error:
            raise LaunchError(
                f"--rdzv_backend {job['backend']} cannot be used as asked", why=str(error)
            ) from error

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for enough machines."""
        info = self.handler.next_rendezvous()
        return RendezvousInfo(info.store, info.rank, info.world_size, self.address or self.host)

    def num_machines_waiting(self) -> int:
        """The number of machines that want to join."""
        waiting: int = self.handler.num_nodes_waiting()
        return waiting

    def shutdown(self) -> None:
        """Tells machines that still wait to join that the job is over."""
        self.handler.shutdown()


def open_store(place: RendezvousInfo, seconds: float) -> Any:
    """The store of the ranks, in this process: it outlives rank 0. None where there is one already."""
    if place.port:
        return None
    store = _create_tcp_store("", 0, serve=True, seconds=seconds)
    place.port = store.port
    return store


def _create_tcp_store(host: str, port: int, *, serve: bool, seconds: float) -> Any:
    from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    try:
        # One that serves listens on all addresses, and need not reach itself by a name that others use.
        address = "127.0.0.1" if serve else host
        return TCPStore(address, port, None, serve, timedelta(seconds=seconds), wait_for_workers=False)
    except DistError as error:
        first = str(error).splitlines()[0]
        if serve:
            raise LaunchError(
                f"port {port} cannot be used on this machine, which is number 0",
                why=first,
                fix="give all machines another --main_process_port",
            ) from error
        raise LaunchError(
            f"machine 0 does not answer at {host}:{port}", why=first, fix="start it, and look at its firewall"
        ) from error


def find_local_address(host: str, port: int) -> str | None:
    """The address of this machine on its way to another one; None when there is no way."""
    return next((local for local, _ in _find_routes(host, port)), None)


def is_this_machine(host: str) -> bool:
    """Return whether a host is this machine: the route to it starts at its own address."""
    return any(
        local == remote or (_is_loopback(local) and _is_loopback(remote))
        for local, remote in _find_routes(host, 1)
    )


def _find_routes(host: str, port: int) -> Iterator[tuple[str, str]]:
    """(own address, address) for each address of a host that can be reached. Datagrams: nothing is sent."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except socket.gaierror:
        return
    for family, kind, protocol, _, target in infos:
        with closing(socket.socket(family, kind, protocol)) as end:
            if end.connect_ex(target) == 0:
                yield str(end.getsockname()[0]), str(target[0])


def _is_loopback(host: str) -> bool:
    """Return whether a name or an address is a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def find_gloo_interface(address: str | None) -> str | None:
    """The network interface that ranks must be told, or None.

    Gloo takes the interface of the host's own name. Where that name does not resolve, or only to the
    loopback, no other machine would reach its ranks: then it is the interface of ``address``.
    """
    local = find_local_address(socket.gethostname(), 1)
    if address is None or _is_loopback(address) or (local is not None and not _is_loopback(local)):
        return None
    import psutil

    those = psutil.net_if_addrs().items()
    return next((name for name, ends in those if any(end.address == address for end in ends)), None)
