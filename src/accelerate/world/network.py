"""Routes from this machine to others: its address on the way to a host, and an address's interface."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import closing

# Nobody has it (RFC 5737): the route to it is the default route. Datagrams: nothing is sent.
_ANY_OTHER_HOST = "192.0.2.1"


def find_routes(host: str, port: int) -> Iterator[tuple[str, str]]:
    """Yield (own address, address) for each address of a host that can be reached. Nothing is sent."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except socket.gaierror:
        return
    for family, kind, protocol, _, target in infos:
        with closing(socket.socket(family, kind, protocol)) as end:
            if end.connect_ex(target) == 0:
                yield str(end.getsockname()[0]), str(target[0])


def find_local_address(host: str, port: int) -> str | None:
    """Return the address of this machine on its way to another one; None when there is no way."""
    return next((local for local, _ in find_routes(host, port)), None)


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def find_interface(address: str) -> str | None:
    """Return the network interface of this machine that has an address; None without one."""
    import psutil

    interfaces = psutil.net_if_addrs().items()
    return next((name for name, ends in interfaces if any(end.address == address for end in ends)), None)


def find_rank_interface(main_address: str) -> str | None:
    """Return the network interface by which this machine reaches the others of a job, or None.

    It is that of the route to ``main_address``. The machine of rank 0 may know itself by a loopback address
    only, as Debian's installer writes it into ``/etc/hosts``: there it is that of the default route.
    """
    local = find_local_address(main_address, 1)
    if local is not None and is_loopback(local):
        local = find_local_address(_ANY_OTHER_HOST, 1)
    return None if local is None or is_loopback(local) else find_interface(local)
