"""How rank 0 hands batches to the other ranks: one message per batch, in a process group of its own.

The group is gloo's on the host, so messages never mix with the collectives of training, and gloo's own thread
moves them while Python computes. No thread of ours is needed: a rank asks for its next batch as soon as it
has one, and rank 0 sends a batch as soon as it is read.

A message is one flat block of bytes: a head of int64s, a pickle in which every tensor is replaced by its
place, and the tensors' bytes as they lie in memory. A receiver offers a block that is big enough for all
messages so far; a bigger one is announced by its size first.
"""

from __future__ import annotations

import atexit
import io
import pickle
import sys
import threading
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from accelerate.core.errors import CollectiveError, PrepareError
from accelerate.world import collective
from accelerate.world import world as worlds

# What a message is.
DATA, GROW, END, LEFT, ERROR = range(1, 6)

# kind, bytes of this message (GROW: of the next), bytes of its pickle, oldest loop that rank 0 has not left,
# the loader's mark
_HEAD = 5 * 8
_ALIGN = 64
_FIRST_ROOM = 1 << 16
# Messages for one rank that are sent and not yet taken: rank 0 waits before it sends more.
_UNDER_WAY = 4
# Seconds that rank 0 waits, when it has nothing else to do, for other ranks to take what was sent.
_PATIENCE = 20.0


# --- messages


class _Pickler(pickle.Pickler):
    """Pickles everything but plain tensors, which it collects."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.parts: list[tuple[int, torch.Tensor]] = []
        self.size = 0
        self._known: dict[int, tuple[Any, Any]] = {}

    def persistent_id(self, obj: Any) -> Any:
        """Place, dtype and shape of a plain tensor; None for anything else."""
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.is_quantized:
            return None
        known = self._known.get(id(obj))
        if known is None:
            place = (self.size, obj.dtype, tuple(obj.shape), obj.requires_grad)
            # The object is kept beside its place, since an id may be used again.
            known = self._known[id(obj)] = (obj, place)
            if obj.numel():
                flat = obj.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
                self.parts.append((self.size, flat.view(torch.uint8)))
                self.size += -(-flat.nbytes // _ALIGN) * _ALIGN
        return known[1]


class _Unpickler(pickle.Unpickler):
    """Puts the tensors back, as views of the block or, when small in it, as copies."""

    def __init__(self, file: io.BytesIO, body: torch.Tensor) -> None:
        super().__init__(file)
        self._body = body
        self._made: dict[Any, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        """The tensor at a place."""
        start, dtype, shape, requires_grad = pid
        made = self._made.get(pid)
        if made is None:
            count = torch.Size(shape).numel() * dtype.itemsize
            made = self._body[start : start + count].view(dtype).view(shape) if count else None
            if made is None:
                made = torch.empty(shape, dtype=dtype)
            elif 2 * count < len(self._body):
                # Who keeps one small tensor of a batch does not keep the whole batch in memory.
                made = made.clone()
            self._made[pid] = made.requires_grad_(requires_grad)
        return self._made[pid]


def _head(kind: int, size: int, text: int, settled: int, mark: int) -> torch.Tensor:
    return torch.tensor([kind, size, text, settled, mark]).view(torch.uint8)


def pack(kind: int, value: Any, settled: int = 0, mark: int = 0) -> torch.Tensor:
    """A message as one block of bytes.

    Raises:
        PrepareError: something in ``value`` can neither be sent as a tensor nor be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError) as error:
        raise PrepareError(
            f"a batch cannot be sent to other processes: {error}",
            why="under dispatch_batches=True rank 0 reads for all, and what it reads is pickled",
            fix="give picklable batches, or let every process read: dispatch_batches=False",
        ) from error
    text = file.getbuffer()
    start = -(-(_HEAD + len(text)) // _ALIGN) * _ALIGN
    block = torch.empty(start + pickler.size, dtype=torch.uint8)
    block[:_HEAD] = _head(kind, len(block), len(text), settled, mark)
    block[_HEAD : _HEAD + len(text)] = torch.frombuffer(text, dtype=torch.uint8)
    for place, flat in pickler.parts:
        block[start + place : start + place + len(flat)] = flat
    return block


def unpack(block: torch.Tensor) -> Any:
    """The value of a message."""
    size = int(block[16:24].view(torch.int64))
    start = -(-(_HEAD + size) // _ALIGN) * _ALIGN
    file = io.BytesIO(block[_HEAD : _HEAD + size].numpy().tobytes())
    return _Unpickler(file, block[start:]).load()


# --- the group


class _Sent(NamedTuple):
    """A message under way: gloo reads from it, or writes into it, until it is through.

    Its work is waited for once: a second wait would wait for another message.
    """

    work: Any
    block: torch.Tensor


@dataclass
class _Lane:
    """This process's end of the group.

    Attributes:
        group: the group of processes.
        behind: the default group that was open when it was made.
        serial: number of the next loop over a dispatched loader; all ranks count alike.
        open: loops that rank 0 has not left.
        left: what is under way of loops that were left, by loop.
        unread: words of farewell to ranks that have most likely left as well, and never ask for them.
    """

    group: Any
    behind: Any
    serial: int = 0
    open: set[int] = field(default_factory=lambda: set[int]())
    left: dict[int, list[_Sent]] = field(default_factory=lambda: dict[int, list[_Sent]]())
    unread: list[_Sent] = field(default_factory=lambda: list[_Sent]())

    def settle(self, before: int) -> None:
        """Frees what belongs to loops that both sides have left: those of lower numbers than ``before``."""
        for serial in [number for number in self.left if number < before]:
            for sent in self.left.pop(serial):
                wait(sent.work, "for a loop that was left")

    def flush(self) -> None:
        """At exit: what other ranks still need is on its way; without this process it would be lost."""
        if not hasattr(sys, "last_value"):
            _wait_some_seconds([sent for loop in self.left.values() for sent in loop])
            self.left.clear()


def _wait_some_seconds(sent: list[_Sent]) -> None:
    """Waits until messages are through, but not for ever: a rank that failed never takes them."""

    def waiting() -> None:
        for item in sent:
            with suppress(CollectiveError):  # nobody is there any more who could miss it
                wait(item.work, "at the end of a loop")

    thread = threading.Thread(target=waiting, daemon=True)
    thread.start()
    thread.join(_PATIENCE)


_lane: _Lane | None = None


def lane() -> _Lane:
    """This process's end of the group, which is made when the first loop needs it, on all ranks."""
    global _lane
    behind = dist.group.WORLD
    if _lane is None or _lane.behind is not behind:
        world = worlds.current()
        timeout = None if world is None else world.timeout
        _lane = _Lane(dist.new_group(backend="gloo", timeout=timeout), behind)
        worlds.before_close(_leave)
        atexit.register(_leave)  # before the group is closed, which was registered earlier
    return _lane


def _leave() -> None:
    """Sends off what is under way and lets go of the group: its threads must not outlive the interpreter."""
    global _lane
    left, _lane = _lane, None
    if left is not None:
        left.flush()


def wait(work: Any, what: str) -> None:
    """Waits for a message to be through.

    Raises:
        CollectiveError: the other side is gone, or did not come within the group's timeout.
    """
    try:
        work.wait()
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {collective.rank()} waited in vain {what}",
            why=str(error).splitlines()[0],
            fix="look for the first error of another rank; all ranks must take the same batches of a "
            "loader with dispatch_batches=True",
        ) from error


def _room(size: int) -> int:
    """Room to offer for the message after one of ``size`` bytes: some more, since batches vary."""
    return max(_FIRST_ROOM, size + size // 4)


class Sender:
    """Rank 0's end of one loop.

    Args:
        mark: a number that tells this loader from others.
    """

    def __init__(self, mark: int) -> None:
        self.lane = lane()
        self.serial, self.mark = self.lane.serial, mark
        self.lane.serial += 1
        # The loop before this one may still be on its way; what is older has been taken by all.
        self.lane.settle(self.serial - 1)
        self.lane.open.add(self.serial)
        ranks = range(1, collective.size())
        self._room = dict.fromkeys(ranks, _FIRST_ROOM)
        self._sent = {rank: deque[_Sent]() for rank in ranks}
        self._waiting = set(ranks)

    def pack(self, value: Any) -> torch.Tensor:
        """A batch as a message."""
        return pack(DATA, value, min(self.lane.open), self.mark)

    def send(self, rank: int, block: torch.Tensor) -> None:
        """Gives ``rank`` its next batch."""
        if rank not in self._waiting:
            raise PrepareError(
                f"rank {rank} had no part of an earlier batch, and there are more batches",
                why="a batch in the middle of an epoch has fewer samples than there are processes",
                fix="use even_batches=True, which fills it",
            )
        sent = self._sent[rank]
        while len(sent) >= _UNDER_WAY:
            wait(sent.popleft().work, f"for rank {rank} to take its next batch")
        self._sent[rank] += self._post(rank, block)

    def end(self, rank: int) -> None:
        """Nothing follows for ``rank``."""
        if rank in self._waiting:
            self._waiting.discard(rank)
            self._sent[rank] += self._post(rank, pack(END, None, min(self.lane.open), self.mark))

    def fail(self, error: Exception) -> None:
        """The next batch could not be read: raised on every rank when it would have been its turn."""
        value = _portable(error)
        for rank in sorted(self._waiting):
            self._sent[rank] += self._post(rank, pack(ERROR, value, min(self.lane.open), self.mark))
        self._waiting.clear()

    def drain(self) -> None:
        """Waits until all ranks have taken what was sent, so that this process may end."""
        rest = [item for sent in self._sent.values() for item in sent]
        for sent in self._sent.values():
            sent.clear()
        _wait_some_seconds(rest)

    def close(self) -> None:
        """The loop is over, or was left."""
        for rank in sorted(self._waiting):
            self.lane.unread += self._post(rank, pack(LEFT, None, min(self.lane.open), self.mark))
        self._waiting.clear()
        self.lane.open.discard(self.serial)
        self.lane.left[self.serial] = [item for sent in self._sent.values() for item in sent]

    def _post(self, rank: int, block: torch.Tensor) -> list[_Sent]:
        size = len(block)
        blocks = [block]
        if size > self._room[rank]:
            blocks.insert(0, _head(GROW, size, 0, min(self.lane.open), self.mark))
        self._room[rank] = max(self._room[rank], _room(size))
        try:
            return [_Sent(self.lane.group.send([item], rank, self.serial), item) for item in blocks]
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {rank} is gone: its batch cannot be sent", why=str(error).splitlines()[0]
            ) from error


class Receiver:
    """Another rank's end of one loop: an iterator over what rank 0 sends.

    Args:
        mark: the number that tells this loader from others.
        name: the loader in words, for errors.
        pin: receive into pinned memory.
    """

    def __init__(self, mark: int, name: str, pin: bool = False) -> None:
        self.lane = lane()
        self.serial, self.mark, self.name, self.pin = self.lane.serial, mark, name, pin
        self.lane.serial += 1
        self._room = _FIRST_ROOM
        self._pending: _Sent | None = None
        self._post(self._room)

    def __iter__(self) -> Receiver:
        return self

    def __next__(self) -> Any:
        """The next value.

        Raises:
            CollectiveError: rank 0 left the loop, failed, is gone, or iterates another loader.
        """
        if self._pending is None:
            raise StopIteration
        kind, block = self._take()
        if kind == DATA:
            self._room = max(self._room, _room(len(block)))
            self._post(self._room)
            return unpack(block)
        if kind == END:
            raise StopIteration
        if kind == LEFT:
            raise CollectiveError(
                f"rank 0 left its loop over {self.name}, rank {collective.rank()} did not",
                why="under dispatch_batches=True rank 0 reads for all: all must take the same batches",
                fix="break on all ranks in the same step, or use dispatch_batches=False",
            )
        error, text = unpack(block)
        cause = CollectiveError(f"rank 0 failed to read the next batch of {self.name}", why=text)
        if error is None:
            raise cause
        raise error from cause

    def _take(self) -> tuple[int, torch.Tensor]:
        """Kind and bytes of the next message, without its unused room."""
        assert self._pending is not None
        work, block = self._pending
        wait(work, f"for a batch of {self.name} from rank 0")
        self._pending = None
        kind, size, _, settled, mark = block[:_HEAD].view(torch.int64).tolist()
        self.lane.settle(settled)
        if mark != self.mark:
            raise CollectiveError(
                f"rank 0 iterates another loader than rank {collective.rank()}, which iterates {self.name}",
                why="under dispatch_batches=True every loop takes its batches from rank 0's loop",
                fix="iterate the same loaders in the same order on all ranks",
            )
        if kind == GROW:
            self._post(size)
            return self._take()
        return kind, block[:size]

    def _post(self, room: int) -> None:
        block = torch.empty(room, dtype=torch.uint8, pin_memory=self.pin)
        self._pending = _Sent(self.lane.group.recv([block], 0, self.serial), block)

    def close(self) -> None:
        """The loop is over; what rank 0 may still write into is kept until it has."""
        if self._pending is not None:
            self.lane.left.setdefault(self.serial, []).append(self._pending)
            self._pending = None


def _portable(error: BaseException | None) -> tuple[BaseException | None, str]:
    """An exception as it can be raised elsewhere, or None; and its traceback as text."""
    text = "".join(traceback.format_exception(error)).rstrip()
    try:
        copied = pickle.loads(pickle.dumps(error))
    except (pickle.PicklingError, TypeError, AttributeError, ValueError):
        return None, text
    return (copied if isinstance(copied, Exception) and str(copied) == str(error) else None), text
