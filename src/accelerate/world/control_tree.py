"""The control tree: every rank learns what all ranks say, in at most 2 log2(world size) messages of a rank.

Rank r has the children r + 1, r + 2, r + 4, ... of a binomial tree, so each subtree is a range of ranks. On
the way up a rank joins what its children say with what it says itself: equal headers of neighbours become one
run. Rank 0 sends the runs down again. Where all ranks agree that is a single one, however large the world is;
where they do not, the table of ranks for the error has come with the same messages.

The connections are plain TCP sockets, since a wait of gloo that ends early closes its connections. Each wait
is cut into slices, so that one that cannot end is noticed (``watchdog.py``). A save in the background has a
tree of its own (``checkpoint/rank_group.py``).
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakSet

from accelerate.world.network import LOOPBACK, is_loopback
from accelerate.world.process_group import WAIT_SLICE, StoreClient

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 5.0  # seconds until the parent is tried again
_READ_SIZE = 1 << 12
_FRAME = struct.Struct("<QII")  # bytes that follow, runs, 1 if rank 0 has merged the values
_RUN = struct.Struct("<II")  # ranks, bytes of their header
_GREETING = struct.Struct("<32sI")  # token of the parent, rank of the child


class HeaderRun(NamedTuple):
    """Neighbouring ranks that sent equal headers."""

    ranks: int
    header: bytes


class TreeMessage(NamedTuple):
    """The messages of a range of ranks.

    Attributes:
        runs: their headers, in rank order.
        values: their values, in rank order, or what rank 0 has made of those of all ranks.
        is_merged: rank 0 has merged the values.
    """

    runs: Sequence[HeaderRun]
    values: bytearray
    is_merged: bool = False

    def encode(self) -> bytes:
        """Return the bytes of a frame."""
        parts: list[Any] = [b""]
        for count, header in self.runs:
            parts += (_RUN.pack(count, len(header)), header)
        parts.append(self.values)
        parts[0] = _FRAME.pack(sum(map(len, parts)), len(self.runs), self.is_merged)
        return b"".join(parts)

    @staticmethod
    def decode(frame: bytes | bytearray) -> TreeMessage:
        """Parse the bytes of a frame."""
        _, count, is_merged = _FRAME.unpack_from(frame)
        start, runs = _FRAME.size, list[HeaderRun]()
        for _ in range(count):
            ranks, length = _RUN.unpack_from(frame, start)
            start += _RUN.size + length
            runs.append(HeaderRun(ranks, bytes(frame[start - length : start])))
        # Its own memory, aligned and writable: tensors view it.
        return TreeMessage(runs, bytearray(memoryview(frame)[start:]), bool(is_merged))


# Makes of the messages of all ranks what rank 0 sends down.
TreeMessageMerger = Callable[[TreeMessage], TreeMessage]


class LostNeighbourError(ConnectionError):
    """The connection to the parent or to a child broke.

    Attributes:
        rank: of that neighbour.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class _Connection:
    """A connection to the parent or to a child; at most one frame is on its way in each direction.

    An exception inside of ``send`` or ``receive`` leaves it whole: the next call goes on.

    Attributes:
        rank: the one at the other end.
        unsent: the rest of the frame that ``send`` sends.
    """

    def __init__(self, endpoint: socket.socket, rank: int, dead_after: float) -> None:
        self._socket, self.rank = endpoint, rank
        _connections.add(self)
        if dead_after:
            endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            idle, interval = max(1, round(dead_after / 2)), max(1, round(dead_after / 10))
            # By system; one that has none of them keeps its own limits, of hours.
            limits = {"KEEPIDLE": idle, "KEEPALIVE": idle, "KEEPINTVL": interval, "KEEPCNT": 5}
            for name, limit in limits.items():
                if hasattr(socket, f"TCP_{name}"):
                    endpoint.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), limit)
        endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Timeouts of the system: one system call for each message, where Python's own poll first.
        endpoint.settimeout(None)
        wait = struct.pack("ll", 0, int(WAIT_SLICE * 1e6))
        endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
        endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        self.unsent = memoryview(b"")
        self._received, self._filled, self._size = bytearray(_READ_SIZE), 0, _FRAME.size

    def send(self, check: Callable[[], None]) -> None:
        """Send what is unsent; call ``check`` after each slice of the wait."""
        while self.unsent:
            try:
                count = self._socket.send(self.unsent)
            except BlockingIOError:
                count = 0
            except OSError as error:
                raise LostNeighbourError(str(error), self.rank) from error
            if not count:  # outside of the handler: it is not the cause of what ``check`` raises
                check()
            self.unsent = self.unsent[count:]

    def receive(self, check: Callable[[], None]) -> bytearray:
        """Return a frame; call ``check`` after each slice of the wait."""
        while self._filled < self._size:
            try:
                count = self._socket.recv_into(memoryview(self._received)[self._filled :])
            except BlockingIOError:
                count = -1
            except OSError as error:
                raise LostNeighbourError(str(error), self.rank) from error
            if count < 0:
                check()
                continue
            if not count:
                raise LostNeighbourError("connection closed by peer", self.rank)
            self._filled += count
            if self._size == _FRAME.size <= self._filled:
                self._size += _FRAME.unpack_from(self._received)[0]
                self._received += bytes(max(0, self._size - len(self._received)))
        frame = self._received
        del frame[self._size :]
        self._received, self._filled, self._size = bytearray(_READ_SIZE), 0, _FRAME.size
        return frame

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


_connections = WeakSet[_Connection]()


def _close_in_child() -> None:
    """Close the sockets of a forked process: they would hide from the others that its parent has ended."""
    for connection in list(_connections):
        connection.close()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_close_in_child)


@dataclass
class _ExchangeProgress:
    """How far an exchange is.

    Attributes:
        merge: applied on rank 0.
        received: the messages of this rank and of its children so far.
        is_sent_up: the message to the parent is on its way.
        answer: the frame that came from rank 0.
        answered: children that have it.
    """

    merge: TreeMessageMerger | None
    received: list[TreeMessage]
    is_sent_up: bool = False
    answer: bytes | bytearray = b""
    answered: int = 0


class ControlTree:
    """The connections of this rank to its parent and children in the tree of all ranks.

    Args:
        rank, size: this rank, and the world size.
        dead_after: seconds after which a machine that does not answer is gone; by default the system knows.

    Attributes:
        parent_rank: the rank of the parent; None on rank 0.
        child_ranks: the ranks of the children, ascending.
        message_count: messages that this rank has sent or received.
        address_key: where the children find the address of this rank, until the tree is open.
        is_open: all neighbours are connected.
    """

    def __init__(self, rank: int, size: int, dead_after: float = 0.0) -> None:
        self.rank, self.size, self._dead_after = rank, size, dead_after
        self.parent_rank = rank & (rank - 1) if rank else None
        lowest_bit = rank & -rank if rank else size
        steps = [1 << bit for bit in range(size.bit_length()) if 1 << bit < lowest_bit]
        self.child_ranks = [rank + step for step in steps if rank + step < size]
        self.message_count, self.address_key = 0, f"tree/{rank}"
        self._parent: _Connection | None = None
        self._children: list[_Connection] = []
        self._unfinished: _ExchangeProgress | None = None
        self.is_open = False

    def exchange(
        self,
        header: bytes,
        values: bytearray,
        merge: TreeMessageMerger | None,
        check: Callable[[], None],
    ) -> TreeMessage:
        """Return the messages of all ranks, as rank 0 has merged them.

        An exception leaves the exchange unfinished, and the next one ends it first.

        Args:
            header, values: the message of this rank.
            merge: applied on rank 0 to the message of all.
            check: called after each slice of a wait; raises if the wait cannot end.

        Raises:
            OSError: a connection broke.
        """
        begun = _ExchangeProgress(merge, [TreeMessage([HeaderRun(1, header)], values)])
        for state in (self._unfinished, begun):
            if state is None:
                continue
            self._unfinished = state
            for child in self._children[len(state.received) - 1 :]:
                state.received.append(TreeMessage.decode(child.receive(check)))
                self.message_count += 1
            if not state.is_sent_up:
                runs: list[HeaderRun] = []
                for message in state.received:
                    for run in message.runs:
                        if runs and runs[-1].header == run.header:
                            runs[-1] = HeaderRun(runs[-1].ranks + run.ranks, run.header)
                        else:
                            runs.append(run)
                message = TreeMessage(runs, bytearray().join([each.values for each in state.received]))
                if self._parent is None:
                    state.answer = (state.merge(message) if state.merge else message).encode()
                else:
                    self._parent.unsent = memoryview(message.encode())
                state.is_sent_up = True
            if self._parent is not None and not state.answer:
                self._parent.send(check)
                state.answer = self._parent.receive(check)
                self.message_count += 2
            # The largest subtree first.
            for child in self._children[::-1][state.answered :]:
                child.unsent = child.unsent or memoryview(state.answer)
                child.send(check)
                state.answered += 1
                self.message_count += 1
        self._unfinished = None
        return TreeMessage.decode(begun.answer)

    # --- connections

    @property
    def awaited_ranks(self) -> range:
        """The ranks below the child that an exchange waits for; none while it waits for its parent."""
        state = self._unfinished
        child = None if state is None else next(iter(self.child_ranks[len(state.received) - 1 :]), None)
        return range(0) if child is None else range(child, min(2 * child - self.rank, self.size))

    def open(self, store: StoreClient, check: Callable[[], None]) -> None:
        """Connect to the parent and the children; every rank calls it.

        Args:
            store: all ranks publish their addresses in it.
            check: called several times a second; raises if the wait for a rank or the store cannot end.
        """
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        store_host, host = _find_route(store.group_store, socket.AF_UNSPEC if is_dual else family)
        token, self._children = secrets.token_hex(16), []
        with (
            socket.create_server(("", 0), family=family, dualstack_ipv6=is_dual) as listener,
            selectors.DefaultSelector() as selector,
        ):
            if self.child_ranks:
                store.put(self.address_key, json.dumps([token, host, listener.getsockname()[1]]))
            if self.parent_rank is not None:
                self._parent = self._connect(store, store_host, self.parent_rank, check)
            listener.settimeout(WAIT_SLICE)
            selector.register(listener, selectors.EVENT_READ, (listener, bytearray()))
            while len(self._children) < len(self.child_ranks):
                if not (ready := selector.select(WAIT_SLICE)):
                    check()
                for endpoint, greeting in [key.data for key, _ in ready]:
                    # A greeting may come late and in pieces: its sender takes itself to be connected.
                    try:
                        if endpoint is listener:
                            child, _ = listener.accept()
                            selector.register(child, selectors.EVENT_READ, (child, bytearray()))
                            continue
                        part = endpoint.recv(_GREETING.size - len(greeting))
                    except (TimeoutError, ConnectionError):  # it has gone again
                        part = b""
                    greeting += part
                    if endpoint is listener or (part and len(greeting) < _GREETING.size):
                        continue
                    selector.unregister(endpoint)
                    shown, rank = _GREETING.unpack(greeting.ljust(_GREETING.size))
                    if rank in self.child_ranks and secrets.compare_digest(shown, token.encode()):
                        self._children.append(_Connection(endpoint, rank, self._dead_after))
                    else:
                        endpoint.close()
            for key in list(selector.get_map().values()):  # of others than children
                key.data[0].close()
        self._children.sort(key=attrgetter("rank"))
        self.is_open = True

    def _connect(
        self, store: StoreClient, store_host: str, rank: int, check: Callable[[], None]
    ) -> _Connection:
        """Connect to the parent, once it has published where."""
        key = f"tree/{rank}"
        while (published := store.get(key)) is None:
            store.wait([key], CONNECT_TIMEOUT, check)
        token, host, port = json.loads(published)
        # The machine of rank 0 may know itself by a loopback address only.
        host = store_host if is_loopback(host) else host
        while True:
            try:
                endpoint = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT)
                endpoint.sendall(_GREETING.pack(token.encode(), self.rank))
                return _Connection(endpoint, rank, self._dead_after)
            except OSError as error:
                logger.debug("rank %d does not answer at %s:%d: %s", rank, host, port, error)
            check()
            time.sleep(WAIT_SLICE)

    def close(self) -> None:
        """Close the connections."""
        for each in (*self._children, *([self._parent] if self._parent else [])):
            each.close()
        self._parent, self._children, self.is_open = None, [], False


def _find_route(store: Any, family: int) -> tuple[str, str]:
    """Return the host of the group's store, and the address of this machine on the route to it.

    Names have addresses of IPv6 also for a kernel without it: the family is that of those to be taken.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = str(getattr(store, "host", socket.gethostname()))
    try:
        first_family, kind, _, _, target = socket.getaddrinfo(host, None, family, socket.SOCK_DGRAM)[0]
    except (socket.gaierror, UnicodeError):
        return LOOPBACK, LOOPBACK  # a store without a host, on a machine whose own name nobody knows
    with socket.socket(first_family, kind) as probe:
        probe.connect((target[0], 9, *target[2:]))  # sends nothing
        return host, str(probe.getsockname()[0])
