"""The control channel: every collective of this package begins with an all-gather of control messages.

A control message says what its rank does (operation, line of the user's code, structure, dtypes, shapes) and
holds the values inline when they are few. So ranks notice a mismatch before any large transfer starts, and a
small collective is a single message to each rank. Values that do not fit follow in a collective of their own
(all-gather, all-reduce or broadcast), after all ranks know that their messages match.

The messages use a separate gloo group: they never mix with the user's collectives or those of a backward
pass. The group is created at the first exchange, over the key-value store of the default process group. Each
wait is cut into slices, so that a wait that cannot end is noticed (``watchdog.py``).

All messages of an exchange have the same size, which follows the values that were sent last. All ranks have
seen the same messages, so they choose the same size without communication.
"""

# torch's signatures are partly untyped: what is unknown here is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
import inspect
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from accelerate.core.errors import CollectiveError
from accelerate.world import watchdog
from accelerate.world.call_site import CallSite, find_call_site
from accelerate.world.rank_failure_report import DEPARTURES, SAME_CALLS, rank_table

# Label for error texts; digests of operation and structure, flag any_size, bytes of the description, bytes of
# the values. The description follows, so that everything that usually matches is compared at once.
_LABEL_SIZE = 104
_HEADER = struct.Struct(f"<{_LABEL_SIZE}sIIIIq")
HEADER_SIZE = _HEADER.size
ALIGNMENT = 16
MIN_MESSAGE_SIZE = 4096
# Larger values (times half the world size) are sent separately: copying them into messages would cost more.
MAX_INLINE_SIZE = 1 << 20
# Up to this world size the exchange is an all-to-all, in one step; above it is a ring all-gather.
MAX_ALLTOALL_RANKS = 8
MAX_WASTED_BYTES = 1 << 17  # unused bytes in a row of messages, after which messages shrink
MAX_CACHED_LAYOUTS = 256
WAIT_SLICE = timedelta(seconds=0.25)
# Called by user code: where ranks call one of these from different lines, one may have skipped a call.
USER_OPERATIONS = frozenset(
    {
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "pad_across_processes",
        "reduce",
        "wait_for_everyone",
    }
)
NOT_ON_HOST = -1  # size of values that are not in host memory, so cannot be inline


_DEPARTURE_CODES = {zlib.crc32(operation.encode()) for operation in DEPARTURES}


class DepartureError(CollectiveError):
    """A rank has left an attempt that all ranks make together, while another was in a collective of it."""


class GatheredControlMessages(NamedTuple):
    """The control messages of all ranks, valid until the next exchange.

    Attributes:
        message_size: bytes of one message.
        description_sizes: bytes of each rank's description.
        value_sizes: bytes of each rank's values; ``NOT_ON_HOST`` when they are not in host memory.
        structures: digest of each rank's tree structure.
        same: the descriptions of all ranks are equal.
        inline: the values are in the messages, each rank's after its description.
        recv_buffer: all messages.
    """

    message_size: int
    description_sizes: Sequence[int]
    value_sizes: Sequence[int]
    structures: Sequence[int]
    same: bool
    inline: bool
    recv_buffer: bytearray

    def description(self, rank: int) -> bytes:
        """Return the bytes that describe a rank's values."""
        start = rank * self.message_size + HEADER_SIZE
        return bytes(self.recv_buffer[start : start + self.description_sizes[rank]])

    def body(self, rank: int) -> memoryview:
        """Return the bytes of a rank's inline values."""
        start = rank * self.message_size + body_start(self.description_sizes[rank])
        return memoryview(self.recv_buffer)[start : start + self.value_sizes[rank]]


def align(number: int) -> int:
    """Round a byte offset up to the alignment of every dtype."""
    return -(-number // ALIGNMENT) * ALIGNMENT


def body_start(length: int) -> int:
    """Return the offset of the values in a message with a description of ``length`` bytes."""
    return -(-(HEADER_SIZE + length) // ALIGNMENT) * ALIGNMENT


@lru_cache(maxsize=1024)
def _encode_label(operation: str, site: CallSite) -> bytes:
    text = f"{operation} at {site}".encode()
    return text if len(text) <= _LABEL_SIZE else text[: _LABEL_SIZE - 3] + b"..."


class ControlMessageBuffers:
    """The send and receive buffers of an exchange.

    Attributes:
        send_buffer, recv_buffer: the memory; for an all-to-all the send buffer has one copy per rank.
        send_rows, recv_rows: the same memory as tensors, one row per message.
    """

    def __init__(self, message_size: int, size: int) -> None:
        self.uses_alltoall = size <= MAX_ALLTOALL_RANKS
        self.send_buffer = bytearray(message_size * (size if self.uses_alltoall else 1))
        self.recv_buffer = bytearray(message_size * size)
        self.send_rows = torch.frombuffer(self.send_buffer, dtype=torch.uint8).view(-1, message_size)
        self.recv_rows = torch.frombuffer(self.recv_buffer, dtype=torch.uint8).view(size, message_size)

    def start(self, group: Any) -> Any:
        """Start the transfer and return its work handle."""
        if self.uses_alltoall:
            return group.alltoall_base(self.recv_rows, self.send_rows, [], [])
        return group._allgather_base(self.recv_rows, self.send_rows)


class ControlMessageLayout:
    """The reusable layout of a control message for one operation with tensors of known dtypes and shapes.

    Attributes:
        prefix: the message from its operation to the end of its description.
        send_views: views of the send buffer, one per tensor with its dtype and shape.
        rank_views: views of the receive buffer: for each tensor, one per rank.
        required_size: bytes of the message.
        peer_prefixes: slices of the receive buffer with the prefixes of the other ranks.
    """

    def __init__(
        self,
        channel: ControlChannel,
        operation: str,
        structure: int,
        description: bytes,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        self.operation, self.structure = operation, structure
        self.description, self.message_size = description, channel.message_size
        value_size = sum(align(tensor.nbytes) for tensor in tensors)
        self.required_size = body_start(len(description)) + value_size
        self.buffers = channel.buffers(self.message_size)
        send_buffer, recv_buffer = self.buffers.send_buffer, self.buffers.recv_buffer
        code = zlib.crc32(operation.encode())
        self.prefix = bytearray(
            _HEADER.pack(b"", code, structure, 0, len(description), value_size)[_LABEL_SIZE:] + description
        )
        end, message_size = HEADER_SIZE + len(description), self.message_size
        others = [rank for rank in range(channel.size) if rank != channel.rank]
        self.peer_prefixes = [slice(rank * message_size, rank * message_size + end) for rank in others]
        self.send_views: list[torch.Tensor] = []
        self.rank_views: list[tuple[torch.Tensor, ...]] = []
        start = body_start(len(description))
        with torch.inference_mode(False):  # they outlive the caller's inference mode
            for tensor in tensors:
                self.send_views.append(_view(send_buffer, start, tensor))
                self.rank_views.append(
                    tuple(_view(recv_buffer, r * message_size + start, tensor) for r in range(channel.size))
                )
                start += align(tensor.nbytes)
            rows = self.buffers.send_rows[:, : self.required_size]
            self.copy_views = (rows[1:], rows[:1]) if self.buffers.uses_alltoall else None


def _view(memory: bytearray, start: int, like: torch.Tensor) -> torch.Tensor:
    count = like.numel()
    if count == 0:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    return torch.frombuffer(memory, dtype=like.dtype, count=count, offset=start).view(like.shape)


class ControlChannel:
    """The control channel of one world. One exchange at a time, by any thread."""

    def __init__(self, watch: watchdog.Watchdog) -> None:
        self.watchdog, self.rank, self.size = watch, watch.rank, watch.size
        self.lock = threading.RLock()
        self.message_size = MIN_MESSAGE_SIZE
        self.layouts: dict[Any, ControlMessageLayout | None] = {}
        self._last_sent: tuple[ControlMessageLayout, CallSite] | None = None
        self._wasted_bytes, self._too_small = 0, False
        self._group: Any = None
        self._buffers: dict[int, ControlMessageBuffers] = {}
        watch.add_shutdown_action(self.close)

    def close(self) -> None:
        """Release the group and its threads.

        A thread that frees a tensor needs the interpreter and aborts the process when that is shutting down.
        """
        global _channel
        self._group = None
        if _channel is self:
            _channel = None

    def exchange(
        self,
        operation: str,
        structure: int,
        description: bytes,
        value_size: int,
        fill: Callable[[bytearray, int], None],
        *,
        any_size: bool = False,
        label: str = "",
        already_sent: bool = False,
    ) -> GatheredControlMessages:
        """All-gather the control messages: send this rank's and return those of all ranks.

        Args:
            operation: name of the collective; it must be the same on all ranks.
            structure: digest of the structure of the values.
            description: dtypes and shapes, or other data that the operation needs from each rank.
            value_size: bytes of values, ``NOT_ON_HOST`` when they are not in host memory.
            fill: writes the values into a message, from an offset on.
            any_size: send the values inline, however large they are.
            label: shown in error texts in place of the operation; it may differ between ranks.
            already_sent: the messages of this exchange are in the receive buffer already.

        Raises:
            CollectiveError: the ranks called different operations, a rank failed, or the timeout passed.
        """
        site = find_call_site(inspect.currentframe())
        if not already_sent:
            self._begin_exchange(label or operation, site)
        code, text = zlib.crc32(operation.encode()), _encode_label(label or operation, site)
        message_size, length, kind = self.message_size, len(description), int(any_size)
        self._last_sent = None
        while True:
            buffers = self.buffers(message_size)
            send_buffer, recv_buffer = buffers.send_buffer, buffers.recv_buffer
            if not already_sent:
                _HEADER.pack_into(send_buffer, 0, text, code, structure, kind, length, value_size)
                if HEADER_SIZE + length <= message_size:
                    send_buffer[HEADER_SIZE : HEADER_SIZE + length] = description
                if 0 < value_size <= message_size - body_start(length):
                    fill(send_buffer, body_start(length))
                if buffers.uses_alltoall:
                    buffers.send_rows[1:].copy_(buffers.send_rows[:1])
                self._run_transfer(buffers.start)
            already_sent = False
            heads = [_HEADER.unpack_from(recv_buffer, rank * message_size) for rank in range(self.size)]
            texts, codes, structures, kinds, description_sizes, value_sizes = zip(*heads, strict=True)
            if set(codes) != {code} or set(kinds) != {kind}:
                self.watchdog.active_call = None
                kind_of_error = DepartureError if _DEPARTURE_CODES & set(codes) else CollectiveError
                raise kind_of_error(
                    "the ranks called different collectives",
                    why=rank_table(map(_decode_label, texts)) + self.watchdog.earlier_call_sites,
                    fix=SAME_CALLS,
                )
            if operation in USER_OPERATIONS:
                self._note_call_sites(texts)
            required_size, inline = _measure_message(description_sizes, value_sizes, any_size)
            if required_size <= message_size:
                break
            message_size = _round_up(required_size)
        self.watchdog.active_call = None
        if max(required_size, self.message_size) > MIN_MESSAGE_SIZE or self._too_small:
            self._adapt_message_size(required_size)
        same = len(set(structures)) == 1
        if same:
            first = recv_buffer[HEADER_SIZE : HEADER_SIZE + description_sizes[0]]
            same = all(
                recv_buffer[r * message_size + HEADER_SIZE : r * message_size + HEADER_SIZE + n] == first
                for r, n in enumerate(description_sizes)
            )
        return GatheredControlMessages(
            message_size, description_sizes, value_sizes, structures, same, inline, recv_buffer
        )

    def _note_call_sites(self, texts: Sequence[bytes]) -> None:
        """Keep the first call that the ranks made from different lines since they were at the same one.

        They may mean it: two branches of a condition on the rank. Or one has skipped a call, and the error
        that follows sooner or later says where that began.
        """
        if len(set(texts)) == 1:
            self.watchdog.earlier_call_sites = ""
        elif not self.watchdog.earlier_call_sites:
            sites = rank_table(map(_decode_label, texts))
            self.watchdog.earlier_call_sites = (
                f"\n  before, they made a call from different lines:\n       {sites}"
            )

    def exchange_cached(self, layout: ControlMessageLayout, tensors: Sequence[torch.Tensor]) -> bool:
        """Send a message with a cached layout; return True if all ranks used it, so it holds all values.

        Otherwise the messages are received, and ``exchange`` with ``already_sent`` reads them.
        """
        site = find_call_site(inspect.currentframe())
        self._begin_exchange(layout.operation, site)
        if self._last_sent != (layout, site):
            send_buffer = layout.buffers.send_buffer
            send_buffer[:_LABEL_SIZE] = _encode_label(layout.operation, site).ljust(_LABEL_SIZE, b"\0")
            send_buffer[_LABEL_SIZE : _LABEL_SIZE + len(layout.prefix)] = layout.prefix
            self._last_sent = layout, site
        for view, tensor in zip(layout.send_views, tensors, strict=True):
            view.copy_(tensor)
        if layout.copy_views is not None:
            layout.copy_views[0].copy_(layout.copy_views[1])
        self._run_transfer(layout.buffers.start)
        recv_buffer = layout.buffers.recv_buffer
        prefix = layout.buffers.send_buffer[: _LABEL_SIZE + len(layout.prefix)]
        for peer_prefix in layout.peer_prefixes:
            if recv_buffer[peer_prefix] != prefix:
                return False
        self.watchdog.active_call, self.watchdog.earlier_call_sites = None, ""
        if self.message_size > MIN_MESSAGE_SIZE or self._too_small:
            self._adapt_message_size(layout.required_size)
        return True

    def _begin_exchange(self, operation: str, site: CallSite) -> None:
        watch = self.watchdog
        if watch.report is not None:
            raise watch.report.error(self.rank)
        watch.exchange_count += 1
        watch.active_call = operation, site

    def _adapt_message_size(self, required_size: int) -> None:
        """Choose the size of the next messages: larger after two large ones, smaller after small ones.

        A message that is too small costs one more exchange; messages shrink when the unused space has cost
        about as much.
        """
        was_larger, self._too_small = self._too_small, required_size > self.message_size
        if self._too_small:
            if was_larger and required_size <= 2 * MAX_INLINE_SIZE:
                self._resize(required_size)
        elif required_size * 2 > self.message_size or self.message_size == MIN_MESSAGE_SIZE:
            self._wasted_bytes = 0
        else:
            self._wasted_bytes += self.message_size - required_size
            if self._wasted_bytes >= MAX_WASTED_BYTES:
                self._resize(required_size)

    def _resize(self, required_size: int) -> None:
        self.message_size, self._wasted_bytes, self._too_small = _round_up(required_size), 0, False
        self._buffers = {
            message_size: buffers
            for message_size, buffers in self._buffers.items()
            if message_size == self.message_size
        }
        self.layouts.clear()

    def buffers(self, message_size: int) -> ControlMessageBuffers:
        """Return buffers for messages of ``message_size`` bytes."""
        buffers = self._buffers.get(message_size)
        if buffers is None:
            with torch.inference_mode(False):  # it outlives the caller's inference mode
                buffers = ControlMessageBuffers(message_size, self.size)
            if message_size <= 2 * MAX_INLINE_SIZE:
                self._buffers[message_size] = buffers
        return buffers

    def layout(
        self, key: Any, make: Callable[[], ControlMessageLayout | None]
    ) -> ControlMessageLayout | None:
        """Return the layout cached under ``key``; it is built when the key is used for the second time."""
        layout = self.layouts.get(key, self)
        if layout is self or (
            layout is not None and layout.buffers is not self._buffers.get(self.message_size)
        ):
            if len(self.layouts) >= MAX_CACHED_LAYOUTS:
                self.layouts.clear()
            self.layouts[key] = None
            return None
        if layout is None:
            layout = self.layouts[key] = make()
        return layout  # type: ignore[return-value]

    def fits_inline(self, required_size: int) -> bool:
        """Return True if the values of all ranks fit into messages of the current size."""
        return required_size <= self.message_size and required_size * self.size <= 2 * MAX_INLINE_SIZE

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

    def _transfer(self, start: Callable[[Any], Any], operation: str) -> None:
        self.watchdog.active_call = operation, find_call_site(inspect.currentframe())
        self._run_transfer(start)
        self.watchdog.active_call = None

    # --- the group

    def _open_group(self) -> Any:
        if self._group is None:
            watch = self.watchdog
            client, until = watch.store, time.monotonic() + watch.timeout
            client.put(f"here/{self.rank}", "")
            everyone = [f"here/{rank}" for rank in range(self.size)]
            # The constructor waits for all ranks and cannot be interrupted, so wait for them here first.
            while not client.wait(everyone, WAIT_SLICE.total_seconds()):
                watch.check_store_wait(until)
            # Gloo's own timeout applies only if this process is stopped.
            limit = timedelta(seconds=watch.timeout + 30)
            store = dist.distributed_c10d.PrefixStore("letters", client.store)
            self._group = dist.ProcessGroupGloo(store, self.rank, self.size, limit)
        return self._group

    def _run_transfer(self, start: Callable[[Any], Any]) -> None:
        """Start a transfer and wait for its end."""
        work = None
        try:  # opening the group can fail too: its store may be gone
            group = self._group or self._open_group()
            work = start(group)
            try:
                work.wait(WAIT_SLICE)
            except RuntimeError:
                self._keep_waiting(work)
        except BaseException as error:
            self._leak_group()
            if isinstance(error, RuntimeError) and not isinstance(error, CollectiveError):
                raise self.watchdog.explain_disconnect(error) from error
            raise

    def _keep_waiting(self, work: Any) -> None:
        """Wait in slices for a transfer that failed or did not end in the first slice."""
        until = time.monotonic() + self.watchdog.timeout - WAIT_SLICE.total_seconds()
        while True:
            ended = work.is_completed()
            try:
                work.wait(WAIT_SLICE)
            except RuntimeError:
                if ended:
                    raise
                self.watchdog.check_wait(until)
            else:
                return

    def _leak_group(self) -> None:
        """Keep the group alive: its destructor would wait for the transfer, which may never end."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))


def _measure_message(
    description_sizes: Sequence[int], value_sizes: Sequence[int], any_size: bool
) -> tuple[int, bool]:
    """Return the message size that all ranks need, and whether the values are inline."""
    described = body_start(max(description_sizes))
    if min(value_sizes) == NOT_ON_HOST:
        return described, False
    whole = max(map(int.__add__, map(body_start, description_sizes), value_sizes))
    if whole * len(description_sizes) <= 2 * MAX_INLINE_SIZE or any_size:
        return whole, True
    return described, False


def _round_up(required_size: int) -> int:
    """Round a size up, so that slightly larger values still fit the same messages."""
    step = max(ALIGNMENT, 1 << max(0, (required_size - 1).bit_length() - 4))
    return max(MIN_MESSAGE_SIZE, -(-required_size // step) * step)


def _decode_label(text: bytes) -> str:
    return text.rstrip(b"\0").decode(errors="replace")


_channel: ControlChannel | None = None


def channel() -> ControlChannel:
    """Return the control channel of the open world.

    Raises:
        CollectiveError: this process is not a rank of it.
    """
    global _channel
    watch = watchdog.current()
    if watch is None:
        raise CollectiveError(
            "this process takes no part in collectives",
            why="it was forked from a rank, or its group has no store to meet by",
            fix="make the call in the process that the launcher started",
        )
    if _channel is None or _channel.watchdog is not watch:
        _channel = ControlChannel(watch)
    return _channel
