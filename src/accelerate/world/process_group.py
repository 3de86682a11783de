"""The default process group: its back ends, and its interruption.

Once it is interrupted, threads that wait in a collective of torch get an error at once. A collective which
one rank will never join ends at its timeout, half an hour later. NCCL can abort it. Gloo cannot, but its
connections are sockets of this process, and an operation whose connection is closed fails. The group is of no
use afterwards: ``world.renew_group`` opens another one.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from accelerate.core.errors import CollectiveError

_FD_FOLDER = "/proc/self/fd"  # on Linux only; elsewhere waits in gloo cannot be interrupted

# Texts in torch's errors when a peer is gone; its error classes do not distinguish this from other errors.
_CONNECTION_ERRORS = (
    "closed by peer",
    "Connection reset",
    "Broken pipe",
    "Connection refused",
    "NCCL",
    "Timed out",
    "ncclRemote",
)

_group_sockets: set[str] = set()


def group_backends(group: Any) -> list[Any]:
    """Return the back ends of a process group, each once."""
    return list({id(each): each for each in map(group._get_backend, group._device_types)}.values())


def backend_timeouts(backends: list[Any]) -> list[timedelta]:
    """Return the timeouts of the back ends that have one; each keeps it in options of its own class."""
    limits = [getattr(getattr(each, "options", None), "_timeout", None) for each in backends]
    return [limit for limit in limits if limit is not None]


@contextmanager
def record_connections() -> Generator[None]:
    """Record which sockets a block opens, in which the default process group is made."""
    before = set(_open_sockets().values())
    yield
    _group_sockets.clear()
    _group_sockets.update(set(_open_sockets().values()) - before)


def _open_sockets() -> dict[int, str]:
    """Return the sockets of this process: descriptor -> the kernel's name, which is used once."""
    sockets: dict[int, str] = {}
    for name in os.listdir(_FD_FOLDER) if os.path.isdir(_FD_FOLDER) else ():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            target = os.readlink(f"{_FD_FOLDER}/{name}")
            if target.startswith("socket:"):
                sockets[int(name)] = target
    return sockets


def is_disconnect(error: BaseException | None) -> bool:
    """Return whether an error is torch's about a peer that is gone, or does not answer."""
    if not isinstance(error, RuntimeError) or isinstance(error, CollectiveError):
        return False
    return any(phrase in str(error) for phrase in _CONNECTION_ERRORS)


def interrupt_group(group: Any, store: Any) -> bool:
    """End every collective of the default process group, also those in which other threads wait.

    Returns:
        False where that is not possible: the group was not opened by this package, or not on Linux.

    Args:
        group: the default process group.
        store: its key-value store, whose connections stay.
    """
    if not _group_sockets:
        return False
    for backend in group_backends(group):
        if backend.name() != "gloo":
            backend.abort()
    port = _store_port(store)
    for fd, name in _open_sockets().items():
        if name in _group_sockets:
            _close_connection(fd, lambda own, peer: port not in (own, peer))
    return True


def close_store_connections(store: Any) -> None:
    """Close this process's connections to a key-value store, for whoever waits in them."""
    port = _store_port(store)
    for fd in _open_sockets():
        _close_connection(fd, lambda _, peer: peer == port)


def _close_connection(fd: int, is_meant: Callable[[int, int], bool]) -> None:
    """Close a connection for whoever uses it, if it is meant by its ports, this side's and the other's."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and is_meant(
                connection.getsockname()[1], connection.getpeername()[1]
            ):
                connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        # A socket that listens, or one that was closed meanwhile.
        if error.errno not in (errno.ENOTCONN, errno.EBADF):
            raise


def _store_port(store: Any) -> int | None:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "port", None)
