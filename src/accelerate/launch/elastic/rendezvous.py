"""The rendezvous of machines, numbered from the start or as they come; used by the agent, which may wait.

Before they meet, ``check_meeting_point`` looks at the name of machine 0; when they have, ``compare_machines``
looks for versions and devices that differ. Each fault is one sentence with its reason and what to type. Only
what meets imports torch: the launcher asks here too.
"""

from __future__ import annotations

import json
import platform
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from accelerate.core.errors import LaunchError
from accelerate.world.network import find_local_address, find_routes, is_loopback

POLL_SECONDS = 0.05  # seconds between looks for machines that are not there yet
SIGN_SECONDS = 2.0  # seconds without a new sign of a machine after which it is not there
RESOLVE_PAUSE = 0.2  # seconds between looks for a name
DEBIAN_OWN_ADDRESS = "127.0.1.1"  # what Debian's installer writes into /etc/hosts for a machine's own name

MachineFacts = Mapping[str, str]


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
        self.machine_rank, self.machine_count = job["machine_rank"], job["most"]
        self.join_timeout, self.attempt = job["join"], -1
        self.identity = secrets.token_hex(8)  # of this launch
        is_first = self.machine_rank == 0
        self.store = _create_tcp_store(self.host, self.port, serve=is_first, seconds=self.join_timeout)
        self.store.set_timeout(timedelta(seconds=max(1.0, job["machine_timeout"])))

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all machines; a launch that was started again takes the place of the one before it.

        Each machine signs again and again, and the last signs of a launch that was killed grow old. Machine 0
        says who has met.
        """
        from torch.distributed.distributed_c10d import PrefixStore

        self.attempt += 1
        store = PrefixStore(f"accelerate/{self.job['id']}/{self.attempt}", self.store)
        deadline, count, is_own = time.monotonic() + self.join_timeout, 0, True
        signs: dict[int, tuple[bytes, float]] = {}  # of each machine the last one, and when it was new here
        while is_own and not store.check(["met"]):
            count += 1
            store.set(f"here/{self.machine_rank}", f"{self.identity} {count}")
            if self.machine_rank == 0:
                self._count_machines(store, signs)
            if time.monotonic() > deadline:
                missing = json.loads(store.get("missing")) if store.check(["missing"]) else [0]
                raise LaunchError(
                    f"machines {', '.join(map(str, missing))} of {self.machine_count} did not come within "
                    f"{self.join_timeout:g} s",
                    why=f"the others wait for them at {self.host}:{self.port}",
                    fix="start the same command on each, with its own --machine_rank",
                )
            time.sleep(POLL_SECONDS)
            is_own = store.get(f"here/{self.machine_rank}").startswith(self.identity.encode())
        if not is_own or self.identity not in json.loads(store.get("met")):
            raise LaunchError(
                f"two machines say that they are number {self.machine_rank}",
                why=f"both have met at {self.host}:{self.port}",
                fix="give each its own --machine_rank, from 0",
            )
        # The ranks find nothing of an attempt before: what they leave in a store breaks the next one.
        port = 0 if self.attempt else self.port
        return RendezvousInfo(store, self.machine_rank, self.machine_count, self.host, port)

    def _count_machines(self, store: Any, signs: dict[int, tuple[bytes, float]]) -> None:
        """Say who is missing, or who has met."""
        now = time.monotonic()
        for number in range(self.machine_count):
            sign = store.get(f"here/{number}") if store.check([f"here/{number}"]) else b""
            if sign and signs.get(number, (b"", 0.0))[0] != sign:
                signs[number] = sign, now
        missing = [n for n in range(self.machine_count) if n not in signs or now - signs[n][1] > SIGN_SECONDS]
        met = [sign.decode().partition(" ")[0] for sign, _ in signs.values()]
        store.set("missing" if missing else "met", json.dumps(missing or met))

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
        if self.address is None or (is_loopback(self.address) and not is_loopback(self.host)):
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
        if hasattr(getattr(self.handler, "_state_holder", None), "_sanitize"):
            HeartbeatObserver(self.handler._state_holder)

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
        """Wait for enough machines."""
        info = self.handler.next_rendezvous()
        return RendezvousInfo(info.store, info.rank, info.world_size, self.address or self.host)

    def num_machines_waiting(self) -> int:
        """The number of machines that want to join."""
        waiting: int = self.handler.num_nodes_waiting()
        return waiting

    def shutdown(self) -> None:
        """Tell machines that still wait to join that the job is over."""
        self.handler.shutdown()


class HeartbeatObserver:
    """Has a c10d rendezvous judge machines by the clock of this one alone.

    torch writes a heartbeat as the time of the machine that sends it, and compares it with the time of the
    one that reads: a machine whose clock is some seconds behind is dead to the others, which wait for it.
    Here a heartbeat is as old as this machine has seen it unchanged.

    Args:
        holder: the state of the rendezvous, as this machine knows it.
    """

    def __init__(self, holder: Any) -> None:
        self.holder, self.remove_dead_machines = holder, holder._sanitize
        # What each machine wrote, and when it was new here.
        self.last_seen: dict[Any, tuple[datetime, datetime]] = {}
        holder._sanitize = self._sanitize

    def _sanitize(self) -> None:
        state, now = self.holder.state, datetime.now(timezone.utc)
        written = state.last_heartbeats
        for machine, heartbeat in written.items():
            if machine not in self.last_seen or self.last_seen[machine][0] != heartbeat:
                self.last_seen[machine] = (heartbeat, now.replace(tzinfo=heartbeat.tzinfo))
        state.last_heartbeats = {machine: self.last_seen[machine][1] for machine in written}
        self.remove_dead_machines()
        state.last_heartbeats = {machine: written[machine] for machine in state.last_heartbeats}


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


def is_this_machine(host: str) -> bool:
    """Return whether a host is this machine: the route to it starts at its own address."""
    return any(
        local == remote or (is_loopback(local) and is_loopback(remote))
        for local, remote in find_routes(host, 1)
    )


# --- before they meet


def check_meeting_point(host: str, number: int, *, seconds: float, say: Callable[[str], None]) -> None:
    """Look whether this machine knows where the others meet; wait for a name that may only be late.

    Args:
        host: the name or address of machine 0.
        number: of this machine.
        seconds: how long a name may be missing.
        say: prints a line.

    Raises:
        LaunchError: the name does not resolve, or to this machine itself.
    """
    addresses = _resolve_host(host, seconds, say)
    if number == 0:
        if not any(is_this_machine(address) for address in addresses):
            say(
                f"machine 0 is this one, but {host} is {', '.join(addresses)}, which is none of its "
                "addresses; the others must reach it there"
            )
    elif DEBIAN_OWN_ADDRESS in addresses and host != DEBIAN_OWN_ADDRESS:
        raise LaunchError(
            f"{host} is {DEBIAN_OWN_ADDRESS} on this machine, number {number}: "
            "it would look for machine 0 in itself",
            why="a line of its /etc/hosts says so",
            fix=f"remove that line, or give --main_process_ip the address of {host} in the network",
        )


def resolve_addresses(host: str) -> list[str]:
    """The addresses of a name, in order; empty when it does not resolve."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return []
    return list(dict.fromkeys(str(target[0]) for *_, target in infos))


def _resolve_host(host: str, seconds: float, say: Callable[[str], None]) -> list[str]:
    """The addresses of machine 0; in clusters of containers a name may come with its machine."""
    has_announced, deadline = False, time.monotonic() + seconds
    while not (addresses := resolve_addresses(host)):
        if time.monotonic() >= deadline:
            raise LaunchError(
                f"the name {host} of machine 0 does not resolve on this machine",
                why=f"no address was found for it within {seconds:g} s",
                fix="add it to /etc/hosts, or give --main_process_ip an address",
            )
        if not has_announced:
            say(f"the name {host} of machine 0 does not resolve yet; waiting up to {seconds:g} s for it")
        has_announced = True
        time.sleep(RESOLVE_PAUSE)
    return addresses


# --- what they have in common


def machine_facts(device: str, processes: int | None) -> dict[str, str]:
    """Return the facts that must be equal on all machines.

    Args:
        device: the type of the devices of this machine.
        processes: how many of them it uses; None where somebody has said so, on each machine what he wants.
    """
    from importlib import metadata  # slow to import; a launch on one machine does not ask

    counted = {} if processes is None else {"devices": f"{processes} x {device}"}
    return {
        "accelerate": metadata.version("accelerate"),
        "torch": metadata.version("torch").partition("+")[0],
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "device": device,
        **counted,
    }


def compare_machines(machines: Sequence[MachineFacts], hosts: Sequence[str]) -> LaunchError | None:
    """The first difference between machine 0 and another one, as an error; None where there is none.

    Args:
        machines: the facts of each machine, by number.
        hosts: their names.
    """
    first = machines[0]
    for number, facts_of in enumerate(machines[1:], 1):
        both = (name for name in first if name in facts_of)
        for fact in (name for name in both if facts_of[name] != first[name]):
            if fact == "devices":
                reason = "unequal machines wait for each other, and one of them may have lost a device"
                fix = "say how many each of them starts: --nproc_per_node"
            elif fact == "device":
                reason = "ranks on different devices cannot exchange tensors"
                fix = "use --cpu on all, or on none"
            else:
                reason = "ranks of different versions may not understand each other"
                fix = f"install the same {fact} on all machines"
            return LaunchError(
                f"machine {number} ({hosts[number]}) has {_describe_fact(fact, facts_of)}, "
                f"but machine 0 ({hosts[0]}) has {_describe_fact(fact, first)}",
                why=reason,
                fix=fix,
            )
    return None


def _describe_fact(what: str, facts_of: MachineFacts) -> str:
    return f"{facts_of[what]} to use" if what == "devices" else f"{what} {facts_of[what]}"
