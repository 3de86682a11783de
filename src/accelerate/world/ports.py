"""TCP ports for the rendezvous of processes: free ones, and one that is kept for rank 0 until it listens."""

from __future__ import annotations

import errno
import socket
import sys

from accelerate.core.errors import LaunchError

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500
# Ports derived from a job's number stay below 32768, where Linux begins to hand out its own.
JOB_PORT_COUNT = 3000


def is_listening(port: int, host: str = LOOPBACK) -> bool:
    """Return True if something listens on ``host:port``; an unreachable host has no listener.

    It is a snapshot: the answer may be stale when it is read, so whoever needs a port binds it and
    handles the refusal.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


def free_port(host: str = "") -> int:
    """Ask the operating system for a free port.

    ``host`` is the address to bind; empty means all addresses. Another process may take the port any time.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.bind((host, 0))
        return int(holder.getsockname()[1])


def is_port_in_use(port: int | None = None) -> bool:
    """Return True if something on this machine listens on ``port`` (default: 29500)."""
    return is_listening(DEFAULT_PORT if port is None else port)


def get_free_port() -> int:
    """Return a free port of this machine."""
    return free_port()


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
        """Ends the reservation."""
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
    """Binds a port on which nobody listens; connections of a finished run that linger there do not count."""
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
