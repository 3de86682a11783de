"""The default process group: its back ends, its interruption, and a client of its key-value store.

Once it is interrupted, threads that wait in a collective of torch get an error at once. A collective which
one rank will never join ends at its timeout, half an hour later. NCCL can abort it. Gloo cannot, but its
connections are sockets of this process, and an operation whose connection is closed fails. The group is of no
use afterwards: ``world.renew_group`` opens another one.
"""

from __future__ import annotations

import copy
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from accelerate.core.errors import CollectiveError

_FD_FOLDER = "/proc/self/fd"  # on Linux only; elsewhere waits in gloo cannot be interrupted
_TASK_FOLDER = "/proc/self/task"  # likewise: the threads of this process

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

# More than any world needs: programs that look at every possible descriptor would take long.
MAX_OPEN_FILES = 1 << 20

_group_sockets: set[str] = set()


def raise_open_file_limit() -> None:
    """Raise the soft limit of open files of this process to the hard one, or as far as the system lets it.

    A gloo group has two sockets for each other rank, and many systems allow 1,024 files only.
    """
    try:
        import resource
    except ImportError:  # on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # RLIM_INFINITY is -1 in Python.
    target = MAX_OPEN_FILES if hard < 0 else min(hard, MAX_OPEN_FILES)
    while 0 <= soft < target:
        # macOS names no hard limit, and refuses more than its sysctl kern.maxfilesperproc.
        with suppress(ValueError):  # EINVAL
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
            return
        target //= 2


def group_backends(group: Any) -> list[Any]:
    """Return the back ends of a process group, each once."""
    return list({id(each): each for each in map(group._get_backend, group._device_types)}.values())


def backend_timeouts(backends: list[Any]) -> list[timedelta]:
    """Return the timeouts of the back ends that have one; each keeps it in options of its own class."""
    limits: list[timedelta | None] = []
    for each in backends:
        try:
            limit = each.options._timeout
        except (AttributeError, RuntimeError):  # one of others has no options; torch 2.15 raises the latter
            limit = None
        limits.append(limit)
    return [limit for limit in limits if limit is not None]


def await_native_threads(limit: float = 1.0) -> None:
    """Wait until every thread that Python did not start is asleep; called last before the interpreter ends.

    A worker thread of gloo drops the tensors of a collective after it has woken the caller. If those are the
    last references, it needs the GIL, and a thread that asks for the GIL of an interpreter that ends aborts
    the process (``terminate called without an active exception``). Destroying the group joins its workers
    only if nothing else holds the group; the reducer of a ``DistributedDataParallel`` does.

    Args:
        limit: longest wait in seconds: a pool of threads may spin.
    """
    if not os.path.isdir(_TASK_FOLDER):
        return
    until, quiet_passes = time.monotonic() + limit, 0
    # A worker that waits for the GIL sleeps, too: it gets the GIL between the two passes.
    while quiet_passes < 2 and time.monotonic() < until:
        quiet_passes = 0 if _has_running_native_thread() else quiet_passes + 1
        time.sleep(0.0005)


def _has_running_native_thread() -> bool:
    from_python = {thread.native_id for thread in threading.enumerate()}
    for task in os.listdir(_TASK_FOLDER):
        if int(task) in from_python:
            continue
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            stat = Path(_TASK_FOLDER, task, "stat").read_text()
            # "tid (name) state ...": the name may contain spaces and parentheses.
            if stat.rpartition(")")[2].split()[0] == "R":
                return True
    return False


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


# --- its key-value store

_PREFIX = "accelerate"
# Seconds after which a read is made again; the store of a large world, or of a busy machine, may be slow.
REQUEST_TIMEOUT = 5.0
MAX_KEYS = 256  # of one request
LARGE_WORLD = 32  # ranks; in larger worlds each asks less often, so that the load of the store stays the same
WAIT_SLICE = 0.25  # seconds between two calls of the check of a wait
_timeout_lock = threading.Lock()  # of stores that cannot be cloned: who sets it restores it before the next
# Worlds opened one after the other may share a store; every rank opens the same number of them.
_client_count = 0


@dataclass
class StoreConnection:
    """The connection of this process to a store. Its threads share it: no request waits for another rank.

    It is another one than the store's own, in which a thread may wait for a key. At rank 0 a connection is a
    file descriptor, and for torch a question for the name of the other end.
    """

    clone: Any = None
    is_lost: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class StoreClient:
    """Reads and writes short texts in the store that all ranks share.

    A request that the store answers late is made again. The store is lost when its connection breaks.

    Args:
        store: the store of the process group.
        size: ranks that use it.
        connection: one that this process has to the store already; a new one waits long for a host that is
            gone.

    Attributes:
        store: the store under this client's prefix, for torch.
        group_store: the store of the process group, without a prefix.
        pace: how many times rarer than in a small world a rank asks the store while it waits.
    """

    def __init__(self, store: Any, size: int = 1, connection: StoreConnection | None = None) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        global _client_count
        _client_count += 1
        self._prefix = f"{_PREFIX}/{_client_count}"
        self.group_store = store
        self.store: Any = PrefixStore(self._prefix, store)
        self.pace = max(1.0, size / LARGE_WORLD)
        self.connection = connection or StoreConnection()

    @property
    def is_lost(self) -> bool:
        """True once the store does not answer any more: the process that hosts it is gone."""
        return self.connection.is_lost

    def open_prefix(self, prefix: str) -> StoreClient:
        """Return a client of the same store under a prefix of this one's."""
        from torch.distributed.distributed_c10d import PrefixStore

        other = copy.copy(self)
        other._prefix, other.store = f"{self._prefix}/{prefix}", PrefixStore(prefix, self.store)
        return other

    def _request(self, method: str, *arguments: Any) -> Any:
        """Return what the store answers; None where it answers too late or is lost."""
        from torch.distributed import DistStoreError  # pyright: ignore[reportPrivateImportUsage] - documented
        from torch.distributed.distributed_c10d import PrefixStore

        connection = self.connection
        if connection.is_lost:
            return None
        timeout = timedelta(seconds=REQUEST_TIMEOUT)
        try:
            if not hasattr(self.group_store, "clone"):  # torch before 2.10; others wait in this very store
                with _timeout_lock:
                    before = self.store.timeout
                    self.store.set_timeout(timeout)
                    try:
                        return getattr(self.store, method)(*arguments)
                    finally:
                        self.store.set_timeout(before)
            with connection.lock:
                if connection.clone is None:
                    connection.clone = self.group_store.clone()
                    connection.clone.set_timeout(timeout)
            return getattr(PrefixStore(self._prefix, connection.clone), method)(*arguments)
        except RuntimeError as error:  # torch's DistNetworkError and DistStoreError, by version
            # Only reads have a timeout; after one the connection is whole, and the store has answered since.
            is_late = isinstance(error, DistStoreError) and "timeout" in str(error).lower()
            connection.is_lost = connection.is_lost or not is_late
            return None

    def put(self, key: str, text: str) -> None:
        """Set a key."""
        self._request("set", key, text)

    def delete(self, key: str) -> None:
        """Delete a key."""
        self._request("delete_key", key)

    def has(self, *keys: str) -> bool:
        """Return True if all keys are set."""
        return bool(self._request("check", list(keys)))

    def get(self, key: str) -> str | None:
        """Return the text of a key, None if it is not set."""
        while self.has(key):  # again, where the answer was late or the key was deleted meanwhile
            value = self._request("get", key)
            if value is not None:
                return value.decode()
        return None

    def add(self, key: str) -> int | None:
        """Add one to a counter and return it; None if the store is lost."""
        return self._request("add", key, 1)

    def put_if_absent(self, key: str, text: str) -> str | None:
        """Set a key unless it is set; return the text that it has, None if the store is lost."""
        value = self._request("compare_set", key, "", text)
        return None if value is None else value.decode()

    def read(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the texts of those keys that are set."""
        if len(keys) > MAX_KEYS:
            chunks = (keys[start : start + MAX_KEYS] for start in range(0, len(keys), MAX_KEYS))
            return {key: text for chunk in chunks for key, text in self.read(chunk).items()}
        while keys and self.has(*keys):
            values = self._request("multi_get", list(keys))
            if values is not None:
                return {key: text.decode() for key, text in zip(keys, values, strict=True)}
        half = len(keys) // 2
        return self.read(keys[:half]) | self.read(keys[half:]) if half else {}

    def find_missing(self, keys: Sequence[str]) -> list[str]:
        """Return those keys that are not set, in order; few requests where few are missing."""
        if not keys or (len(keys) <= MAX_KEYS and self.has(*keys)):
            return []
        half = len(keys) // 2
        return [*self.find_missing(keys[:half]), *self.find_missing(keys[half:])] if half else list(keys)

    def wait(
        self,
        keys: Sequence[str],
        seconds: float,
        check: Callable[[], None] | None = None,
        longest_pause: float | None = None,
    ) -> bool:
        """Wait until all keys are set; return False after ``seconds`` or if the store is lost.

        Args:
            keys: to wait for.
            seconds: how long.
            check: called several times a second; raises if the wait cannot end.
            longest_pause: up to which the pauses between requests grow with the time waited, in seconds; 0.05
                times ``pace`` if None.
        """
        longest_pause = 0.05 * self.pace if longest_pause is None else longest_pause
        until, pause = time.monotonic() + seconds, 0.0005 * self.pace
        for start in range(0, len(keys), MAX_KEYS):
            while not self.has(*keys[start : start + MAX_KEYS]):
                resume = min(time.monotonic() + pause, until)
                while (rest := resume - time.monotonic()) > 0:
                    time.sleep(min(rest, WAIT_SLICE))
                    if check is not None:
                        check()
                if self.connection.is_lost or time.monotonic() >= until:
                    return False
                pause = min(pause * 2, longest_pause)
        return True
