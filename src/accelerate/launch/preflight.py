"""Checks before a job on several machines starts: names, addresses, ports, version differences.

Each fault is one sentence with its reason and what to type. ``check_meeting_point`` looks before
the machines meet, ``compare_machines`` when they have. Nothing here imports torch.
"""

from __future__ import annotations

import ipaddress
import platform
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

from accelerate.core.errors import LaunchError

POLL_SECONDS = 0.2  # seconds between two tries
DEBIAN_OWN_ADDRESS = "127.0.1.1"  # what Debian's installer writes into /etc/hosts for a machine's own name

MachineFacts = Mapping[str, str]


def check_meeting_point(
    host: str,
    port: int,
    number: int,
    *,
    seconds: float,
    say: Callable[[str], None],
    reach: bool = True,
) -> None:
    """Looks whether a machine can meet the others; waits for what may only be late.

    Args:
        host: the name or address of machine 0.
        port: where it listens, or will.
        number: of this machine.
        seconds: how long names and ports may be missing.
        say: prints a line, once for each thing that is waited for.
        reach: whether the port is tried too; machine 0 needs it free, the others need it open.

    Raises:
        LaunchError: the name does not resolve, or to this machine itself; or the port is taken on machine 0,
            or not reached from another one.
    """
    deadline = time.monotonic() + seconds
    addresses = _resolve_host(host, deadline, seconds, say)
    if number == 0:
        if not any(_is_own(address) for address in addresses):
            say(
                f"machine 0 is this one, but {host} is {', '.join(addresses)}, which is none of its "
                "addresses; the others must reach it there"
            )
        if reach:
            _refuse_used_port(port)
        return
    if DEBIAN_OWN_ADDRESS in addresses and not _is_literal(host):
        raise LaunchError(
            f"{host} is {DEBIAN_OWN_ADDRESS} on this machine, number {number}: "
            "it would look for machine 0 in itself",
            why="a line of its /etc/hosts says so",
            fix=f"remove that line, or give --main_process_ip the address of {host} in the network",
        )
    if reach:
        _wait_reachable(host, port, addresses, deadline, seconds, say)


def resolve_addresses(host: str) -> list[str]:
    """The addresses of a name, in order; empty when it does not resolve."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return []
    return list(dict.fromkeys(str(target[0]) for *_, target in infos))


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
                reason, fix = (
                    "ranks on different devices cannot exchange tensors",
                    "use --cpu on all, or on none",
                )
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


def _resolve_host(host: str, deadline: float, seconds: float, say: Callable[[str], None]) -> list[str]:
    """The addresses of machine 0; in clusters of containers a name may come with its machine."""
    has_announced = False
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
        time.sleep(POLL_SECONDS)
    return addresses


def _wait_reachable(
    host: str,
    port: int,
    addresses: Sequence[str],
    deadline: float,
    seconds: float,
    say: Callable[[str], None],
) -> None:
    has_announced = False
    while True:
        try:
            socket.create_connection(
                (host, port), timeout=max(POLL_SECONDS, deadline - time.monotonic())
            ).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise _unreachable_error(host, port, addresses, seconds, error) from error
        if not has_announced:
            say(f"nobody listens at {host}:{port} yet; waiting up to {seconds:g} s for machine 0")
        has_announced = True
        time.sleep(POLL_SECONDS)


def _unreachable_error(
    host: str, port: int, addresses: Sequence[str], seconds: float, error: OSError
) -> LaunchError:
    is_this_machine = all(_is_own(address) for address in addresses)
    place = "which is this machine itself" if is_this_machine else "which is another machine"
    return LaunchError(
        f"port {port} of {host} ({addresses[0]}, {place}) was not reached within {seconds:g} s",
        why=error.strerror or str(error),
        fix="give --main_process_ip the address of machine 0"
        if is_this_machine
        else "start machine 0, and let its firewall pass the port; --main_process_port says another one",
    )


def _refuse_used_port(port: int) -> None:
    with closing(socket.socket()) as probe:
        # Connections of a job that has ended, and linger, do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError as error:
            raise LaunchError(
                f"port {port} cannot be used on this machine, which is number 0",
                why=error.strerror or str(error),
                fix="give all machines another --main_process_port",
            ) from error


def _is_own(address: str) -> bool:
    """Return whether an address belongs to this machine: a socket can be bound to it."""
    try:
        info = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return False
    family, kind, protocol, _, target = info[0]
    with closing(socket.socket(family, kind, protocol)) as end:
        try:
            end.bind(target)
        except OSError:
            return False
    return True


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
