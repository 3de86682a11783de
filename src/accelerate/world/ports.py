"""TCP ports for the rendezvous of processes."""

from __future__ import annotations

import socket

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
