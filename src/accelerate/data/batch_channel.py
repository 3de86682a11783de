"""The channel on which rank 0 sends batches to the other ranks, in a separate gloo group.

There is one message per batch. The messages never mix with the collectives of training, and gloo's own thread
sends them while Python computes. No other thread is needed: a rank posts a receive for its next batch as soon
as it has one, and rank 0 sends a batch as soon as it is read.

A message is one flat buffer of bytes: a header of int64s, a pickle in which every tensor is replaced by its
offset, and the bytes of the tensors. A receive buffer is large enough for all messages so far; a larger
message is announced by a GROW message with its size.
"""

from __future__ import annotations

import atexit
import io
import pickle
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from accelerate.core.errors import CollectiveError, PeerError, PrepareError
from accelerate.world import collective, watchdog
from accelerate.world import world as worlds
from accelerate.world.call_site import waits_for_ranks

# Kinds of messages.
DATA, GROW, END, LEFT, ERROR = range(1, 6)

# kind, bytes of this message (GROW: of the next), bytes of its pickle, the loader's id
_HEADER_SIZE = 4 * 8
_ALIGN = 64
_MIN_BUFFER = 1 << 16
# Messages in flight to one rank; rank 0 waits before it sends more.
_MAX_PENDING = 4
# Seconds that a rank waits at the end for messages in flight before it looks where the other ranks are, ...
_DRAIN_TIMEOUT = 20.0
_LOOK_INTERVAL = 2.0  # ... and between two looks


# --- messages


class _BatchPickler(pickle.Pickler):
    """Pickles everything but plain tensors, which it collects."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.parts: list[tuple[int, torch.Tensor]] = []
        self.size = 0
        self._places: dict[int, tuple[Any, Any]] = {}

    def persistent_id(self, obj: Any) -> Any:
        """Return offset, dtype and shape of a plain tensor; None for anything else."""
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.is_quantized:
            return None
        entry = self._places.get(id(obj))
        if entry is None:
            place = (self.size, obj.dtype, tuple(obj.shape), obj.requires_grad)
            # Keep the object alive, since its id may be reused otherwise.
            entry = self._places[id(obj)] = (obj, place)
            if obj.numel():
                flat = obj.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
                self.parts.append((self.size, flat.view(torch.uint8)))
                self.size += -(-flat.nbytes // _ALIGN) * _ALIGN
        return entry[1]


class _BatchUnpickler(pickle.Unpickler):
    """Restores the tensors as views of the message or, if small in it, as copies."""

    def __init__(self, file: io.BytesIO, body: torch.Tensor) -> None:
        super().__init__(file)
        self._body = body
        self._tensors: dict[Any, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        """Return the tensor at an offset."""
        start, dtype, shape, requires_grad = pid
        tensor = self._tensors.get(pid)
        if tensor is None:
            count = torch.Size(shape).numel() * dtype.itemsize
            tensor = self._body[start : start + count].view(dtype).view(shape) if count else None
            if tensor is None:
                tensor = torch.empty(shape, dtype=dtype, device="cpu")
            elif 16 * count < len(self._body):
                # A reference to one small tensor must not keep the whole batch in memory.
                tensor = tensor.clone()
            self._tensors[pid] = tensor.requires_grad_(requires_grad)
        return self._tensors[pid]


def _pack_header(kind: int, size: int, text: int, loader_id: int) -> torch.Tensor:
    return torch.tensor([kind, size, text, loader_id], device="cpu").view(torch.uint8)


def pack(kind: int, value: Any, loader_id: int = 0) -> torch.Tensor:
    """Serialize a message into one buffer of bytes.

    Raises:
        PrepareError: something in ``value`` can neither be sent as a tensor nor be pickled.
    """
    file = io.BytesIO()
    pickler = _BatchPickler(file)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError) as error:
        raise PrepareError(
            f"a batch cannot be sent to other processes: {error}",
            why="under dispatch_batches=True rank 0 reads for all, and what it reads is pickled",
            fix="give picklable batches, or let every process read: dispatch_batches=False",
        ) from error
    text = file.getbuffer()
    start = -(-(_HEADER_SIZE + len(text)) // _ALIGN) * _ALIGN
    block = torch.empty(start + pickler.size, dtype=torch.uint8, device="cpu")
    block[:_HEADER_SIZE] = _pack_header(kind, len(block), len(text), loader_id)
    block[_HEADER_SIZE : _HEADER_SIZE + len(text)] = torch.frombuffer(text, dtype=torch.uint8)
    for place, flat in pickler.parts:
        block[start + place : start + place + len(flat)] = flat
    return block


def unpack(block: torch.Tensor) -> Any:
    """Deserialize the value of a message."""
    size = int(block[16:24].view(torch.int64))
    start = -(-(_HEADER_SIZE + size) // _ALIGN) * _ALIGN
    file = io.BytesIO(block[_HEADER_SIZE : _HEADER_SIZE + size].numpy().tobytes())
    return _BatchUnpickler(file, block[start:]).load()


# --- the group


class _PendingTransfer(NamedTuple):
    """A message in flight: gloo reads or writes its buffer until the transfer ends.

    Wait for its work only once: a second wait would wait for another message. A wait that times out closes
    the connection.
    """

    work: Any
    block: torch.Tensor

    def finish(self) -> None:
        """Wait until the message of a loop that was left is delivered."""
        with _explain_lost_peer("for a loop that was left"):
            self.work.wait()


@dataclass
class BatchChannel:
    """This process's end of the gloo group for batches.

    Attributes:
        group: the group of processes.
        default_group: the default process group that was open when it was created.
        loop_number: number of the next loop over a dispatched loader; equal on all ranks.
        open_loops: loops that rank 0 has not left, and how many messages it has sent to each rank in them.
        pending: what is in flight of loops that were left, on rank 0 by the loop that was the next one then,
            whose first message tells the others; on those the receivers of loops that have not ended.
        notices: LEFT messages, in the same way. A rank that has left the loop, too, receives them then.
    """

    group: Any
    default_group: Any
    loop_number: int = 0
    open_loops: dict[int, dict[int, int]] = field(default_factory=lambda: dict[int, dict[int, int]]())
    pending: dict[int, list[_PendingTransfer | BatchReceiver]] = field(
        default_factory=lambda: dict[int, list["_PendingTransfer | BatchReceiver"]]()
    )
    notices: dict[int, list[_PendingTransfer]] = field(
        default_factory=lambda: dict[int, list[_PendingTransfer]]()
    )

    def release(self, before: int, open_loops: Iterable[int] = ()) -> None:
        """Finish and free what is in flight of loops before ``before`` that rank 0 has left."""
        for loop_number in [number for number in self.pending if number < before]:
            if loop_number not in open_loops:
                for item in (*self.pending.pop(loop_number), *self.notices.pop(loop_number, ())):
                    item.finish()

    def flush(self) -> None:
        """Wait at exit for messages in flight that other ranks still need."""
        if not hasattr(sys, "last_value"):
            pending = [item for loop in self.pending.values() for item in loop]
            _await_delivery(
                [item.finish if isinstance(item, _PendingTransfer) else item.take_next for item in pending]
            )
            self.pending.clear()

    def owes(self, rank: int, loop_number: int, message: int) -> bool:
        """Return whether rank 0, this process, has not sent ``rank`` the message of that number in a loop."""
        sent = self.open_loops.get(loop_number)
        return loop_number >= self.loop_number or (sent is not None and sent[rank] < message)


def _await_delivery(waits: Sequence[Callable[[], None]]) -> None:
    """Wait until messages are delivered, but not for a rank that has gone on, or failed, and takes none."""

    def wait_all() -> None:
        for wait in waits:
            with suppress(CollectiveError):  # no rank is left that needs the message
                wait()

    thread = threading.Thread(target=wait_all, daemon=True)
    thread.start()
    thread.join(_DRAIN_TIMEOUT)
    watch = watchdog.current()
    others = [rank for rank in range(collective.world_size()) if rank != collective.rank()]
    with suppress(CollectiveError):  # one of them is gone
        while thread.is_alive() and watch is not None and not watch.find_ahead(others)[0]:
            thread.join(_LOOK_INTERVAL)


_channel: BatchChannel | None = None


def channel() -> BatchChannel:
    """Return the channel; the first loop creates its group, on all ranks."""
    global _channel
    default_group = dist.group.WORLD
    if _channel is None or _channel.default_group is not default_group:
        _channel = BatchChannel(_open_group(), default_group)
        if (watch := watchdog.current()) is not None and watch.rank == 0:
            watch.peers.owes_message = _owes_message
        worlds.add_close_action(_close_channel)
        atexit.register(_close_channel)  # runs before the group is closed, since that was registered earlier
    return _channel


@waits_for_ranks("the first batch of a dispatched loader")
def _open_group() -> Any:
    """Open the group for batches, which torch does not know: the default one may be replaced beside it."""
    world, watch = worlds.current(), watchdog.current()
    timeout = None if world is None else world.timeout
    if watch is None or watch.group is not dist.group.WORLD:
        return dist.new_group(backend="gloo", timeout=timeout)
    name = f"batches/{worlds.group_number()}"
    store = dist.distributed_c10d.PrefixStore(name, watch.store.store)
    limit = timeout or dist.distributed_c10d.default_pg_timeout
    group = dist.ProcessGroupGloo(store, watch.rank, watch.size, limit)
    watch.processes.announce_opening(watch.size, name)
    return group


def _owes_message(rank: int, message: Sequence[int]) -> bool:
    """Return whether ``rank`` waits for a message that rank 0, this process, has not sent."""
    group_number, loop_number, number = message
    if _channel is None or group_number != worlds.group_number():
        return False
    return _channel.owes(rank, loop_number, number)


def _close_channel() -> None:
    """Flush the channel and release its group, whose threads must not outlive the interpreter."""
    global _channel
    left, _channel = _channel, None
    if left is not None:
        left.flush()


@contextmanager
def _explain_lost_peer(what: str) -> Generator[None]:
    """Wait inside of the block until a message is delivered.

    Raises:
        PeerError: the other side is gone, or did not come within the group's timeout.
    """
    try:
        yield
    except RuntimeError as error:
        raise PeerError(
            f"rank {collective.rank()} waited in vain {what}",
            why=str(error).splitlines()[0],
            fix="look for the first error of another rank; all ranks must take the same batches of a "
            "loader with dispatch_batches=True",
        ) from error


def _buffer_size(size: int) -> int:
    """Return the receive buffer size after a message of ``size`` bytes: some more, since batches vary."""
    return max(_MIN_BUFFER, size + size // 4)


class BatchSender:
    """The sending end of one loop, on rank 0.

    Args:
        loader_id: a number that identifies this loader.
    """

    def __init__(self, loader_id: int) -> None:
        self.channel = channel()
        self.loop_number, self.loader_id = self.channel.loop_number, loader_id
        self.channel.loop_number += 1
        # Ranks finish a loop that was left when the first message of a later one tells them.
        self.channel.release(self.loop_number)
        ranks = range(1, collective.world_size())
        self._sent = self.channel.open_loops[self.loop_number] = dict.fromkeys(ranks, 0)
        self._buffer_size = dict.fromkeys(ranks, _MIN_BUFFER)
        self._pending = {rank: deque[_PendingTransfer]() for rank in ranks}
        self._active_ranks = set(ranks)

    def pack(self, value: Any) -> torch.Tensor:
        """Serialize a batch as a message."""
        return self._pack(DATA, value)

    def _pack(self, kind: int, value: Any) -> torch.Tensor:
        return pack(kind, ([*self.channel.open_loops], value), self.loader_id)

    def send(self, rank: int, block: torch.Tensor) -> None:
        """Send ``rank`` its next batch."""
        sent = self._pending[rank]
        while len(sent) >= _MAX_PENDING:
            with _explain_lost_peer(f"for rank {rank} to take its next batch"):
                sent.popleft().work.wait()
        self._pending[rank] += self._post(rank, block)

    def end(self, rank: int) -> None:
        """Tell ``rank`` that no batch follows."""
        if rank in self._active_ranks:
            self._active_ranks.discard(rank)
            self._pending[rank] += self._post(rank, self._pack(END, None))

    def fail(self, error: Exception) -> None:
        """Send an error of reading: every rank raises it in place of the next batch."""
        value = _make_portable(error)
        for rank in sorted(self._active_ranks):
            self._pending[rank] += self._post(rank, self._pack(ERROR, value))
        self._active_ranks.clear()

    def drain(self) -> None:
        """Wait until all ranks have received what was sent, so that this process may end."""
        rest = [item for sent in self._pending.values() for item in sent]
        for sent in self._pending.values():
            sent.clear()
        _await_delivery([item.finish for item in rest])

    def close(self) -> None:
        """Close the loop, complete or left."""
        notices = self.channel.notices.setdefault(self.channel.loop_number, [])
        for rank in sorted(self._active_ranks):
            with suppress(CollectiveError):  # it has left the loop before, and ended
                notices += self._post(rank, self._pack(LEFT, None))
        self._active_ranks.clear()
        self.channel.open_loops.pop(self.loop_number, None)
        pending = self.channel.pending.setdefault(self.channel.loop_number, [])
        pending += [item for sent in self._pending.values() for item in sent]

    def _post(self, rank: int, block: torch.Tensor) -> list[_PendingTransfer]:
        size = len(block)
        blocks = [block]
        if size > self._buffer_size[rank]:
            blocks.insert(0, _pack_header(GROW, size, 0, self.loader_id))
        self._buffer_size[rank] = max(self._buffer_size[rank], _buffer_size(size))
        self._sent[rank] += len(blocks)
        try:
            return [
                _PendingTransfer(self.channel.group.send([item], rank, self.loop_number), item)
                for item in blocks
            ]
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {rank} is gone: its batch cannot be sent", why=str(error).splitlines()[0]
            ) from error


class BatchReceiver:
    """The receiving end of one loop, on the other ranks: an iterator over the batches of rank 0.

    Args:
        loader_id: the number that identifies this loader.
        name: the loader in words, for errors.
        pin: receive into pinned memory.
    """

    def __init__(self, loader_id: int, name: str, pin: bool = False) -> None:
        self.channel = channel()
        self.loop_number, self.loader_id, self.name, self.pin = self.channel.loop_number, loader_id, name, pin
        self.channel.loop_number += 1
        self.channel.pending[self.loop_number] = [self]
        self._buffer_size, self._received = _MIN_BUFFER, 0
        self._taken: deque[tuple[int, int, torch.Tensor]] = deque()  # before the loop asks for them
        self._is_closed = False
        self._pending: _PendingTransfer | None = None
        self._post(self._buffer_size)

    def __iter__(self) -> BatchReceiver:
        return self

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            CollectiveError: rank 0 left the loop, failed, is gone, or iterates another loader.
        """
        if self._pending is None and not self._taken:
            raise StopIteration
        kind, loader_id, block = self._taken.popleft() if self._taken else self._receive()
        if loader_id != self.loader_id:
            raise CollectiveError(
                f"rank 0 iterates another loader than rank {collective.rank()}, which iterates {self.name}",
                why="under dispatch_batches=True every loop takes its batches from rank 0's loop",
                fix="iterate the same loaders in the same order on all ranks",
            )
        open_loops, value = unpack(block)
        self.channel.release(self.loop_number, open_loops)
        if kind == DATA:
            return value
        if kind == END:
            raise StopIteration
        if kind == LEFT:
            raise CollectiveError(
                f"rank 0 left its loop over {self.name}, rank {collective.rank()} did not",
                why="under dispatch_batches=True rank 0 reads for all: all must take the same batches",
                fix="break on all ranks in the same step, or use dispatch_batches=False",
            )
        error, text = value
        cause = PeerError(f"rank 0 failed to read the next batch of {self.name}", why=text)
        cause.failed_rank = 0
        if error is None:
            raise cause
        raise error from cause

    @waits_for_ranks("a transfer of a batch from rank 0")
    def _receive(self) -> tuple[int, int, torch.Tensor]:
        """Receive the next message; return its kind, the id of its loader and its bytes without padding."""
        assert self._pending is not None
        work, block = self._pending
        watch = watchdog.current()
        self._received += 1
        if watch is not None:
            watch.peers.awaited_message = worlds.group_number(), self.loop_number, self._received
        try:
            with _explain_lost_peer(f"for a batch of {self.name} from rank 0"):
                work.wait()
        finally:
            if watch is not None:
                watch.peers.awaited_message = ()
        self._pending = None
        kind, size, _, loader_id = block[:_HEADER_SIZE].view(torch.int64).tolist()
        if kind == GROW:
            self._post(size)
            return self._receive()
        if kind == DATA and loader_id == self.loader_id:
            self._buffer_size = max(self._buffer_size, _buffer_size(size))
            self._post(self._buffer_size)
        else:  # nothing follows
            self.channel.pending.pop(self.loop_number, None)
        return kind, loader_id, block[:size]

    def _post(self, buffer_size: int) -> None:
        block = torch.empty(buffer_size, dtype=torch.uint8, device="cpu", pin_memory=self.pin)
        try:
            work = self.channel.group.recv([block], 0, self.loop_number)
        except RuntimeError as error:
            raise PeerError(
                f"rank 0 is gone: no batch of {self.name} can be received", why=str(error).splitlines()[0]
            ) from error
        self._pending = _PendingTransfer(work, block)

    def close(self) -> None:
        """Close the loop; the channel keeps the buffer that rank 0 may still write into."""
        self._is_closed = True
        self._taken.clear()

    def finish(self) -> None:
        """Take all that rank 0 sent before it left the loop: up to the message that says so.

        An iterator that is alive here, and not on rank 0, may ask for it later.
        """
        while self._pending is not None:
            message = self._receive()
            if not self._is_closed:
                self._taken.append(message)

    def take_next(self) -> None:
        """Take the message that is in flight in a loop that was left, and the one that it may announce."""
        if self._is_closed:
            self._receive()


def _make_portable(error: BaseException | None) -> tuple[BaseException | None, str]:
    """Return an exception that can be raised in another process, or None; and its traceback as text."""
    text = "".join(traceback.format_exception(error)).rstrip()
    try:
        copied = pickle.loads(pickle.dumps(error))
    except (pickle.PicklingError, TypeError, AttributeError, ValueError):
        return None, text
    return (copied if isinstance(copied, Exception) and str(copied) == str(error) else None), text
