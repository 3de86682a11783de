"""The control channel: every collective of this package begins with an agreement of all ranks.

A control message says what its rank does (operation, line of the user's code, structure, dtypes, shapes) and
holds the values inline when they are few. The messages of all ranks meet in a tree (``control_tree.py``), so
ranks notice a mismatch before any large transfer starts, and a small collective ends with the agreement.
Values that do not fit follow in a collective of their own (all-gather, all-reduce or broadcast), after all
ranks know that their messages match. Objects go pickled, and their sizes may differ between ranks.

The large values use a separate gloo group: they never mix with the user's collectives or those of a backward
pass. The group is created by the first of them, over the key-value store of the default process group. Each
wait is cut into slices, so that a wait that cannot end is noticed (``watchdog.py``).
"""

# torch's signatures are partly untyped: what is unknown here is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
import hashlib
import inspect
import pickle
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from accelerate.core.errors import CollectiveError
from accelerate.world import watchdog
from accelerate.world import world as worlds
from accelerate.world.call_site import CallSite, find_call_site
from accelerate.world.control_tree import ControlTree, TreeMessage
from accelerate.world.deferred_agreement import DeferredAgreement
from accelerate.world.process_group import WAIT_SLICE
from accelerate.world.rank_failure_report import DEPARTURES, SAME_CALLS, rank_table

# Label for error texts; digests of operation and structure, kind of values, bytes of the description, bytes
# of the values. The description follows.
_LABEL_SIZE = 104
_HEADER = struct.Struct(f"<{_LABEL_SIZE}sIIIIq")
_ALIGNMENT = 16
NOT_ON_HOST = -1  # size of values that are not in host memory, so cannot be inline
MAX_DESCRIPTION_SIZE = 512  # bytes; of a longer one a digest is sent, unless the ranks disagree
_LENGTH = struct.Struct("<q")
# Bytes of all ranks' values that the tree carries; more follow in a transfer of their own.
MAX_TREE_VALUES = 1 << 18
_WAIT_SLICE = timedelta(seconds=WAIT_SLICE)
# Called by user code: where ranks call one of these from different lines, one may have skipped a call.
USER_OPERATIONS = frozenset(
    {
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "pad_across_processes",
        "reduce(max)",
        "reduce(mean)",
        "reduce(min)",
        "reduce(sum)",
        "wait_for_everyone",
    }
)

T = TypeVar("T")

_DEPARTURE_CODES = {zlib.crc32(operation.encode()) for operation in DEPARTURES}


def align(number: int) -> int:
    """Round a byte offset up to the alignment of every dtype."""
    return -(-number // _ALIGNMENT) * _ALIGNMENT


@lru_cache(maxsize=1024)
def encode_label(operation: str, site: CallSite) -> bytes:
    """Return the label of a call: its operation and the line of the user's code."""
    text = f"{operation} at {site}".encode()
    return text if len(text) <= _LABEL_SIZE else text[: _LABEL_SIZE - 3] + b"..."


def decode_label(text: bytes) -> str:
    """Return the text of a label."""
    return text.rstrip(b"\0").decode(errors="replace")


class ControlMessage(NamedTuple):
    """The message of this rank.

    Attributes:
        label: the operation and the line of the user's code, for error texts.
        code: digest of the operation.
        structure: digest of the structure of the values.
        description: dtypes and shapes, or other data that the operation needs from each rank.
        value_size: bytes of values, ``NOT_ON_HOST`` when they are not in host memory.
        fill: writes the values into a buffer; None where there are none, or
        data: they are these bytes: they go inline, however many they are, and differ between ranks.
        kind: which values are sent, as a number; it must be the same on all ranks.
        source: the only rank that sends its values; None where all do.
    """

    label: bytes
    code: int
    structure: int
    description: bytes
    value_size: int
    fill: Callable[[bytearray], None] | None
    data: bytes | None
    kind: int
    source: int | None

    def encode(self, rank: int, limit: int, *, full: bool = False) -> tuple[bytes, bytearray]:
        """Return the header and the values that a rank sends; ``data`` follows its length.

        Args:
            rank: the rank of this process.
            limit: the most bytes of values that are sent.
            full: send a long description, not its digest.
        """
        description, length = self.description, len(self.description)
        if not full and length > MAX_DESCRIPTION_SIZE:
            description = hashlib.blake2b(description, digest_size=32).digest()
        size = self.value_size if self.data is None else 0
        header = _HEADER.pack(self.label, self.code, self.structure, self.kind, length, size) + description
        if self.source not in (None, rank):
            return header, bytearray()
        if self.data is not None:
            values = bytearray(_LENGTH.pack(self.value_size))
            values += self.data if self.value_size <= limit else b""
            return header, values
        values = bytearray(self.value_size if 0 < self.value_size <= limit else 0)
        if values and self.fill is not None:
            self.fill(values)
        return header, values


class RankHeader(NamedTuple):
    """The header of a rank, decoded."""

    label: bytes
    code: int
    structure: int
    kind: int
    length: int
    value_size: int
    description: bytes


class GatheredControlMessages(NamedTuple):
    """The control messages of all ranks, valid until the next exchange.

    Attributes:
        descriptions: each rank's description.
        structures: digest of each rank's tree structure.
        same: the descriptions of all ranks are equal.
        inline: the values are in the buffer.
        buffer: the values of the ranks, or what rank 0 has merged them to.
        offsets: the place of each rank's values in the buffer; a range where ``same``.
        sizes: bytes of each rank's values.
        is_merged: rank 0 has merged the values.
    """

    descriptions: Sequence[bytes]
    structures: Sequence[int]
    same: bool
    inline: bool
    buffer: bytearray
    offsets: Sequence[int]
    sizes: Sequence[int]
    is_merged: bool = False

    def body(self, rank: int) -> memoryview:
        """Return the bytes of a rank's inline values."""
        start = self.offsets[rank]
        return memoryview(self.buffer)[start : start + self.sizes[rank]]


def decode_headers(answer: TreeMessage) -> list[RankHeader]:
    """Return the headers of all ranks, in rank order."""
    headers: list[RankHeader] = []
    for count, header in answer.runs:
        decoded = RankHeader(*_HEADER.unpack_from(header), description=header[_HEADER.size :])
        headers += [decoded] * count
    return headers


def read_tree(
    message: ControlMessage, answer: TreeMessage, headers: Sequence[RankHeader], size: int, limit: int
) -> GatheredControlMessages:
    """Return the messages of all ranks, as the control tree has brought them.

    Args:
        message: that of this rank.
        answer: what rank 0 has sent.
        headers: those of all ranks; empty where all are equal.
        size: world size.
        limit: the most bytes of values that a rank sent.
    """
    buffer = answer.values
    descriptions: Sequence[bytes] = [each.description for each in headers] or [message.description] * size
    structures = [each.structure for each in headers] or [message.structure]
    sizes: Sequence[int] = [each.value_size for each in headers] or [message.value_size] * size
    same = len(set(structures)) == 1 and len(set(descriptions)) == 1
    senders = range(size) if message.source is None else (message.source,)
    offsets: Sequence[int]
    if message.data is not None and answer.is_merged:
        return GatheredControlMessages(descriptions, structures, same, True, buffer, (), (), True)
    if message.data is not None:
        sizes, offsets, place = [0] * size, [0] * size, 0
        for rank in senders:
            (sizes[rank],) = _LENGTH.unpack_from(buffer, place)
            offsets[rank] = place = place + _LENGTH.size
            place += sizes[rank] if sizes[rank] <= limit else 0
    elif message.source is not None:
        offsets = [0] * size
    elif not headers:
        offsets = range(0, max(1, sizes[0]) * size, max(1, sizes[0]))
    else:
        offsets, place = list[int](), 0
        for count in sizes:
            offsets.append(place)
            place += count if 0 <= count <= limit else 0
    inline = all(0 <= sizes[rank] <= limit for rank in senders)
    return GatheredControlMessages(
        descriptions, structures, same, inline, buffer, offsets, sizes, answer.is_merged
    )


# Makes of the messages of all ranks, which agree and hold the values, the values that the ranks need.
MessageMerger = Callable[[GatheredControlMessages], bytearray]


class DepartureError(CollectiveError):
    """A rank has left an attempt that all ranks make together, while another was in a collective of it."""


class ControlChannel:
    """The control channel of one world. One exchange at a time, by any thread."""

    def __init__(self, watch: watchdog.Watchdog) -> None:
        self.watchdog, self.rank, self.size = watch, watch.rank, watch.size
        self.lock = threading.RLock()
        self.tree = ControlTree(self.rank, self.size)
        self.deferred: DeferredAgreement | None = None  # made by the first call that needs no wait
        self._group: Any = None
        self._has_arrived = False  # the others know that this rank is about to open the group
        watch.shutdown_actions.append(self.close)

    def close(self) -> None:
        """Release the group and its threads.

        A thread that frees a tensor needs the interpreter and aborts the process when that is shutting down.
        """
        global _channel
        self._group = None
        self.tree.close()
        if _channel is self:
            _channel = None

    def exchange(
        self,
        operation: str,
        structure: int = 0,
        description: bytes = b"",
        value_size: int = 0,
        fill: Callable[[bytearray], None] | None = None,
        *,
        data: bytes | None = None,
        source: int | None = None,
        merge: MessageMerger | None = None,
        label: str = "",
    ) -> GatheredControlMessages:
        """All-gather the control messages: send this rank's and return those of all ranks.

        Args:
            operation: name of the collective; it must be the same on all ranks.
            structure: digest of the structure of the values.
            description: dtypes and shapes, or other data that the operation needs from each rank.
            value_size: bytes of values, ``NOT_ON_HOST`` when they are not in host memory.
            fill: writes the values into a buffer.
            data: the values in place of these two; they go inline, however many bytes they are.
            source: the only rank whose values are sent; all ranks pass the same.
            merge: makes of the values of all ranks what the ranks need of them; rank 0 may apply it for all.
                ``data`` goes to rank 0 alone then, which does.
            label: shown in error texts in place of the operation; it may differ between ranks.

        Raises:
            CollectiveError: the ranks called different operations, a rank failed, or the timeout passed.
        """
        site = find_call_site(inspect.currentframe())
        if self.watchdog.report is not None:
            raise self.watchdog.report.error(self.rank)
        self.watchdog.exchange_count += 1
        self.watchdog.active_call = label or operation, site
        message = ControlMessage(
            encode_label(label or operation, site),
            zlib.crc32(operation.encode()),
            structure,
            description,
            value_size if data is None else len(data),
            fill,
            data,
            (data is not None) + (0 if source is None else 2 * (source + 1)),
            source,
        )
        on_rank0 = data is not None and merge is not None
        limit = sys.maxsize if on_rank0 else MAX_TREE_VALUES // (self.size if source is None else 1)

        def merge_values(answer: TreeMessage) -> TreeMessage:
            headers = decode_headers(answer) if len(answer.runs) > 1 else []
            if merge is None or (headers and not on_rank0):
                return answer
            if len({(each.code, each.kind) for each in headers}) > 1:  # an error on every rank
                return TreeMessage(answer.runs, bytearray(), True)
            messages = read_tree(message, answer, headers, self.size, limit)
            return TreeMessage(answer.runs, merge(messages), True) if messages.inline else answer

        watch, headers = self.watchdog, list[RankHeader]()
        until = time.monotonic() + watch.timeout
        if self.deferred is not None:
            self.deferred.settle(lambda: watch.check_wait(until))
        for full in (False, True):
            parts = message.encode(self.rank, limit, full=full)
            try:
                if not self.tree.is_open:
                    self.tree.open(watch.store, lambda: watch.check_store_wait(until))
                answer = self.tree.exchange(*parts, merge and merge_values, lambda: watch.check_wait(until))
            except OSError as error:
                raise watch.explain_disconnect(error) from error
            headers = decode_headers(answer) if len(answer.runs) > 1 else []
            if all(len(each.description) == each.length for each in headers):
                break
        if headers:
            self._check_calls(operation, message, headers)
        elif operation in USER_OPERATIONS:
            self.watchdog.earlier_call_sites = ""
        self.watchdog.active_call = None
        messages = read_tree(message, answer, headers, self.size, limit)
        if data is not None and not messages.inline:
            return self._gather_large_objects(operation, data, source, messages)
        return messages

    def exchange_objects(
        self,
        operation: str,
        value: Any,
        *,
        source: int | None = None,
        merge: MessageMerger | None = None,
        label: str = "",
    ) -> GatheredControlMessages:
        """Exchange pickled values, those of all ranks or of rank ``source``; with ``merge`` rank 0 gets them.

        Raises:
            CollectiveError: a rank's value cannot be pickled; or see ``exchange``.
        """
        exchange = partial(self.exchange, operation, source=source, merge=merge, label=label)
        try:
            data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL) if source in (None, self.rank) else b""
        except Exception as error:
            # User classes may raise anything; the other ranks must not wait.
            why = f"{type(error).__name__}: {error}"[:1000].encode()
            exchange(description=why, data=b"")
            raise
        messages = exchange(data=data)
        problem = next((rank for rank, text in enumerate(messages.descriptions) if text), None)
        if problem is not None:
            raise CollectiveError(
                f"rank {problem} cannot send its object in {operation}",
                why=messages.descriptions[problem].decode(),
            )
        return messages

    def combine_objects(
        self, value: Any, combine: Callable[[list[Any]], T], operation: str, label: str = ""
    ) -> T:
        """Return on every rank what rank 0 makes of one picklable value per rank.

        The values go up the control tree to rank 0, however large they are; no group of
        ``torch.distributed`` is opened for them. A rank receives those of the ranks below it in the tree,
        rank 0 those of all, and the result alone comes down.

        Args:
            value: the value of this rank.
            combine: called on rank 0 with the values in rank order; returns a picklable value. It must not
                raise, since the other ranks wait for it.
            operation: name shown in error texts; it must be the same on all ranks.
            label: shown in error texts in place of the operation; it may differ between ranks.

        Raises:
            CollectiveError: see ``exchange_objects``.
        """

        def merge(messages: GatheredControlMessages) -> bytearray:
            if any(messages.descriptions):
                return bytearray()
            result = combine([pickle.loads(messages.body(rank)) for rank in range(self.size)])
            return bytearray(pickle.dumps(result, pickle.HIGHEST_PROTOCOL))

        with self.lock:
            messages = self.exchange_objects(f"{operation} on rank 0", value, merge=merge, label=label)
            return pickle.loads(messages.buffer)

    def _gather_large_objects(
        self, operation: str, data: bytes, source: int | None, messages: GatheredControlMessages
    ) -> GatheredControlMessages:
        """Transfer bytes which the tree does not carry; all ranks know their sizes."""
        longest = max(messages.sizes)
        send_buffer = bytearray(longest)
        if source in (None, self.rank):
            send_buffer[: len(data)] = data
        row = torch.frombuffer(send_buffer, dtype=torch.uint8)
        if source is not None:
            self.broadcast(row, source, operation)
            return messages._replace(buffer=send_buffer, offsets=[0] * self.size, inline=True)
        buffer = bytearray(longest * self.size)
        self.all_gather(torch.frombuffer(buffer, dtype=torch.uint8), row, operation)
        return messages._replace(buffer=buffer, offsets=range(0, len(buffer), longest), inline=True)

    def _check_calls(self, operation: str, message: ControlMessage, headers: Sequence[RankHeader]) -> None:
        """Raise if the ranks called different collectives, and note calls from different lines."""
        watch, labels = self.watchdog, [each.label for each in headers]
        codes, kinds = {each.code for each in headers}, [each.kind for each in headers]
        if codes != {message.code} or set(kinds) != {message.kind}:
            watch.active_call = None
            what, rows = "the ranks called different collectives", [decode_label(each) for each in labels]
            if len(codes) == 1:
                what = "the ranks broadcast from different ranks"
                rows = [f"from rank {kind // 2 - 1}, {row}" for kind, row in zip(kinds, rows, strict=True)]
            kind_of_error = DepartureError if _DEPARTURE_CODES & codes else CollectiveError
            raise kind_of_error(what, why=rank_table(rows) + watch.earlier_call_sites, fix=SAME_CALLS)
        if operation not in USER_OPERATIONS:
            return
        # The first call from different lines since the ranks were at the same one is kept. They may mean it,
        # in two branches of a condition on the rank. Or one has skipped a call, and the error that follows
        # sooner or later says where that began.
        if len(set(labels)) == 1:
            watch.earlier_call_sites = ""
        elif not watch.earlier_call_sites:
            sites = rank_table(map(decode_label, labels))
            watch.earlier_call_sites = f"\n  before, they made a call from different lines:\n       {sites}"

    # --- collectives for values that do not fit inline

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor, operation: str) -> None:
        """All-gather equally many host bytes of each rank into ``out``, in rank order."""
        self._transfer(lambda group: group._allgather_base(out, tensor), operation)

    def all_reduce(self, tensor: torch.Tensor, op: Any, operation: str) -> None:
        """All-reduce a host tensor by ``op``, a ``torch.distributed.ReduceOp``, in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self._transfer(lambda group: group.allreduce([tensor], options), operation)

    def broadcast(self, tensor: torch.Tensor, source: int, operation: str) -> None:
        """Broadcast a host tensor from rank ``source``, in place."""
        self._transfer(lambda group: group.broadcast(tensor, source), operation)

    # --- the group

    def _open_group(self) -> Any:
        watch = self.watchdog
        client, until = watch.store, time.monotonic() + watch.timeout
        # The constructor waits for all ranks and cannot be interrupted, so wait for them here first.
        if not self._has_arrived:
            self._has_arrived = True
            if client.add("arrived") == self.size:
                client.put("all_arrived", "")
        while not client.wait(["all_arrived"], watch.timeout, lambda: watch.check_store_wait(until)):
            watch.check_store_wait(until)
        # Gloo's own timeout applies only if this process is stopped.
        limit = timedelta(seconds=watch.timeout + 30)
        store = dist.distributed_c10d.PrefixStore("transfers", client.store)
        self._group = dist.ProcessGroupGloo(store, self.rank, self.size, limit)
        watch.processes.announce_opening(self.size, "transfers")  # a broadcast is no barrier
        return self._group

    def _transfer(self, start: Callable[[Any], Any], operation: str) -> None:
        """Start a transfer and wait for its end."""
        self.watchdog.active_call = operation, find_call_site(inspect.currentframe())
        try:  # opening the group can fail too: its store may be gone
            work = start(self._group or self._open_group())
            try:
                work.wait(_WAIT_SLICE)
            except RuntimeError:
                self._keep_waiting(work)
        except BaseException as error:
            # The group stays alive: its destructor would wait for the transfer, which may never end.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
            if isinstance(error, RuntimeError) and not isinstance(error, CollectiveError):
                raise self.watchdog.explain_disconnect(error) from error
            raise
        self.watchdog.active_call = None

    def _keep_waiting(self, work: Any) -> None:
        """Wait in slices for a transfer that failed or did not end in the first slice."""
        until = time.monotonic() + self.watchdog.timeout - WAIT_SLICE
        while True:
            ended = work.is_completed()
            try:
                work.wait(_WAIT_SLICE)
            except RuntimeError:
                if ended:
                    raise
                self.watchdog.check_wait(until)
            else:
                return


_channel: ControlChannel | None = None


def channel() -> ControlChannel:
    """Return the control channel of the open world.

    Raises:
        CollectiveError: this process is not a rank of it.
    """
    global _channel
    watch = watchdog.current()
    if watch is None:
        world = worlds.current()
        if world is not None and world.is_closed:
            raise CollectiveError(
                "the process group is closed",
                why="end_training() or destroy_process_group() was called before",
                fix="make this call before it, on all ranks",
            )
        raise CollectiveError(
            "this process takes no part in collectives",
            why="it was forked from a rank, or its group has no store to meet by",
            fix="make the call in the process that the launcher started",
        )
    if _channel is None or _channel.watchdog is not watch:
        _channel = ControlChannel(watch)
    return _channel
