"""Addresses and TCP ports of this machine: its routes to others, free ports, and one kept for rank 0."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager

from accelerate.core.errors import LaunchError

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500
# Ports derived from a job's number stay below 32768, where Linux begins to hand out its own.
JOB_PORT_COUNT = 3000
# Nobody has it (RFC 5737): the route to it is the default route. Datagrams: nothing is sent.
_ANY_OTHER_HOST = "192.0.2.1"


def find_routes(host: str, port: int) -> Iterator[tuple[str, str]]:
    """Yield (own address, address) for each address of a host that can be reached. Nothing is sent."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except (socket.gaierror, UnicodeError):  # UnicodeError: no name at all, such as "head..cluster"
        return
    for family, kind, protocol, _, target in infos:
        try:
            end = socket.socket(family, kind, protocol)
        except OSError as error:
            if error.errno == errno.EAFNOSUPPORT:  # names have IPv6 addresses also for a kernel without it
                continue
            raise
        with end:
            if end.connect_ex(target) == 0:
                yield str(end.getsockname()[0]), str(target[0])


def find_local_address(host: str, port: int) -> str | None:
    """Return the address of this machine on its way to another one; None when there is no way."""
    return next((local for local, _ in find_routes(host, port)), None)


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is a loopback address."""
    import ipaddress  # the launcher reads this file too, and compares no addresses

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


# --- ports


def is_port_in_use(port: int | None = None) -> bool:
    """Return True if something on this machine listens on ``port`` (default: 29500).

    It is a snapshot: the answer may be stale when it is read, so whoever needs a port binds it and
    handles the refusal.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((LOOPBACK, DEFAULT_PORT if port is None else port)) == 0


def get_free_port() -> int:
    """Return a free port of this machine, which another process may take any time."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.bind(("", 0))
        return int(holder.getsockname()[1])


class ReservedPort:
    """A TCP port that nobody else gets until this object is closed.

    The socket is bound and never listens. On Linux a second socket may bind the same port as long as both
    allow it and none listens, so rank 0 can listen while the reservation stands; elsewhere the reservation
    ends at once, and the port is merely one that was free a moment ago. Two launches that ask for the same
    port both find it silent before either's rank 0 listens: a name in the abstract socket space, which is
    as wide as the port space and vanishes with its process, tells them apart.

    Args:
        number: the port wanted; 0 for any free one.

    Raises:
        PortInUseError: somebody has it.
    """

    def __init__(self, number: int = 0) -> None:
        self._claim = _claim_port_name(number) if number else None
        try:
            self._socket = _bind_silent_port(number) if number else _bind_port(0, shared=False)
        except OSError as error:
            self.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise PortInUseError(number, error) from error
        self.number: int = self._socket.getsockname()[1]
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform != "linux":
            self._socket.close()

    def close(self) -> None:
        """End the reservation."""
        for resource in (self._claim, getattr(self, "_socket", None)):
            if resource is not None:
                resource.close()


class PortInUseError(LaunchError):
    """The port asked for is taken, or may not be taken by this user."""

    def __init__(self, number: int, error: OSError) -> None:
        super().__init__(
            f"port {number} cannot be used for rank 0",
            why=error.strerror or str(error),
            fix="leave --main_process_port out, and a free one is found",
        )


@contextmanager
def reserve_port(wanted: int, print_line: Callable[[str], None]) -> Generator[ReservedPort]:
    """Provide the port of rank 0 while a job runs: any free one for 0, or where the wanted one is in use."""
    try:
        port = ReservedPort(wanted)
    except PortInUseError as error:
        port = ReservedPort()
        print_line(f"port {wanted} is in use ({error.why}); rank 0 listens on {port.number} instead")
    with closing(port):
        yield port


def _claim_port_name(number: int) -> socket.socket | None:
    if sys.platform != "linux":
        return None
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0accelerate-port-{number}")
    except OSError as error:
        claim.close()
        raise PortInUseError(number, error) from error
    return claim


def _bind_silent_port(number: int) -> socket.socket:
    """Bind a port on which nobody listens; connections of a finished run that linger there do not count."""
    with _bind_port(number, shared=True) as probe:
        probe.listen()
    return _bind_port(number, shared=True)


def _bind_port(number: int, *, shared: bool) -> socket.socket:
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if shared:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", number))
    except OSError:
        holder.close()
        raise
    return holder
