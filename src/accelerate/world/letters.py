"""How every collective of this package travels: as one exchange of letters of equal size.

A letter says what its rank is about (operation, line of the user's code, structure, dtypes, shapes) and
carries the values when they are few. So the ranks find out that they disagree before anything moves that
could not be taken back, and a small collective is a single message to each rank. Values that do not fit
follow in a transfer of their own, after all ranks know that they agree.

Letters travel on a gloo group of their own: nothing of the user's, and nothing that a model does in its
backward, can meet them. It is built with the first exchange, over the store of the group, and needs no order
among other groups. Its waits are cut into slices, so that one that cannot end is noticed (``together.py``).

The size of the letters follows the values that were sent last. All ranks have seen the same letters, so they
choose the same size without asking.
"""

# torch's signatures are partly untyped: what is unknown here is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from accelerate.core.errors import CollectiveError
from accelerate.world import together
from accelerate.world.report import SAME_CALLS
from accelerate.world.sites import Site, here

# Text for people; operation, structure, kind of body, bytes of description, bytes of values. The description
# comes next, so that all on which the ranks mostly agree is compared at once.
_TEXT = 104
_HEAD = struct.Struct(f"<{_TEXT}sIIIIq")
HEAD = _HEAD.size
ALIGNED = 16
SMALLEST = 4096
LARGEST = 1 << 18  # values above travel by themselves: copying them into a letter would cost more
MEMORY = 8  # exchanges whose sizes decide the next letter's
SLICE = timedelta(seconds=0.25)
ELSEWHERE = -1  # amount of values that cannot be in a letter: they are not in host memory


class Mail(NamedTuple):
    """The letters of all ranks, valid until the next exchange.

    Attributes:
        room: bytes of one letter.
        lengths: of each rank, bytes of its description.
        amounts: of each rank, bytes of values; ``ELSEWHERE`` when they are not in host memory.
        trees: of each rank, the digest of its structure.
        same: all ranks described the same values.
        carried: the values are in the letters, each rank's behind its description.
        inbox: all letters.
        tensor: the same memory, shape (ranks, room).
    """

    room: int
    lengths: Sequence[int]
    amounts: Sequence[int]
    trees: Sequence[int]
    same: bool
    carried: bool
    inbox: bytearray
    tensor: torch.Tensor

    def description(self, rank: int) -> bytes:
        """What a rank said of its values."""
        start = rank * self.room + HEAD
        return bytes(self.inbox[start : start + self.lengths[rank]])

    def body(self, rank: int) -> memoryview:
        """A rank's values as bytes."""
        start = rank * self.room + body_start(self.lengths[rank])
        return memoryview(self.inbox)[start : start + self.amounts[rank]]


def aligned(number: int) -> int:
    """The next multiple that fits every dtype."""
    return -(-number // ALIGNED) * ALIGNED


def body_start(length: int) -> int:
    """Where the values begin in a letter with a description of ``length`` bytes."""
    return aligned(HEAD + length)


@lru_cache(maxsize=1024)
def digest(text: str) -> int:
    """A number for a text, the same in every process."""
    return zlib.crc32(text.encode())


@lru_cache(maxsize=1024)
def _shown(operation: str, site: Site) -> bytes:
    text = f"{operation} at {site}".encode()
    return text if len(text) <= _TEXT else text[: _TEXT - 3] + b"..."


class Office:
    """The letters of one world. One exchange at a time, by whichever thread."""

    def __init__(self, watch: together.Watch) -> None:
        self.watch, self.rank, self.size = watch, watch.rank, watch.size
        self.lock = threading.RLock()
        self.room = SMALLEST
        self._group: Any = None
        self._last: deque[int] = deque([0] * MEMORY, MEMORY)
        self._sheets: dict[int, tuple[bytearray, torch.Tensor, bytearray, torch.Tensor]] = {}

    def exchange(
        self,
        operation: str,
        tree: int,
        description: bytes,
        amount: int,
        fill: Callable[[bytearray, int], None],
        *,
        any_size: bool = False,
        label: str = "",
    ) -> Mail:
        """Sends this rank's letter and returns all.

        Args:
            operation: what the ranks do; all must do the same.
            tree: digest of the structure of the values.
            description: dtypes and shapes, or whatever the operation needs to know of each rank.
            amount: bytes of values, ``ELSEWHERE`` when they are not in host memory.
            fill: writes the values into a letter, from an offset on.
            any_size: the values travel in letters however many they are.
            label: what people read in place of the operation; it may differ between ranks.

        Raises:
            CollectiveError: the ranks are in different operations, one failed, or one did not come in time.
        """
        watch, site = self.watch, here()
        if watch.report is not None:
            raise watch.report.error(self.rank)
        watch.enter(label or operation, site)
        code, text, room = digest(operation), _shown(label or operation, site), self.room
        length = len(description)
        start, kind = body_start(length), int(any_size)
        while True:
            outbox, out, inbox, tensor = self._sheet(room)
            _HEAD.pack_into(outbox, 0, text, code, tree, kind, length, amount)
            if HEAD + length <= room:
                outbox[HEAD : HEAD + length] = description
            if 0 < amount <= room - start:
                fill(outbox, start)
            self._run(lambda group, to=tensor, mine=out: group._allgather_base(to, mine))
            same = self._all_same(outbox, inbox, room, length)
            if same:
                lengths, amounts, trees = (length,) * self.size, (amount,) * self.size, (tree,) * self.size
            else:
                heads = [_HEAD.unpack_from(inbox, rank * room) for rank in range(self.size)]
                texts, codes, trees, kinds, lengths, amounts = zip(*heads, strict=True)
                if set(codes) != {code} or set(kinds) != {kind}:
                    watch.leave()
                    raise _different(texts)
            needed, carried = _needed(lengths, amounts, any_size)
            if needed <= room:
                break
            room = _rounded(needed)
        watch.leave()
        self._remember(needed)
        if not same and len(set(trees)) == 1:
            first = inbox[HEAD : HEAD + lengths[0]]
            same = all(inbox[r * room + HEAD : r * room + HEAD + n] == first for r, n in enumerate(lengths))
        return Mail(room, lengths, amounts, trees, same, carried, inbox, tensor)

    def _all_same(self, outbox: bytearray, inbox: bytearray, room: int, length: int) -> bool:
        """Whether all letters begin with what this rank's does, the text apart."""
        end = HEAD + length
        if end > room:
            return False
        mine = outbox[_TEXT:end]
        return all(inbox[r * room + _TEXT : r * room + end] == mine for r in range(self.size))

    def _remember(self, needed: int) -> None:
        """Chooses the size of the next letters: what the last few needed, unless that was exceptional."""
        self._last.append(needed if needed <= 2 * LARGEST else 0)
        self.room = _rounded(max(self._last))
        if len(self._sheets) > 4:
            self._sheets = {room: sheet for room, sheet in self._sheets.items() if room == self.room}

    def _sheet(self, room: int) -> tuple[bytearray, torch.Tensor, bytearray, torch.Tensor]:
        sheet = self._sheets.get(room)
        if sheet is None:
            outbox, inbox = bytearray(room), bytearray(room * self.size)
            with torch.inference_mode(False):  # they live on after the mode of this call
                out = torch.frombuffer(outbox, dtype=torch.uint8)[None]
                tensor = torch.frombuffer(inbox, dtype=torch.uint8).view(self.size, room)
            sheet = outbox, out, inbox, tensor
            if room <= 2 * LARGEST:
                self._sheets[room] = sheet
        return sheet

    # --- transfers of what does not fit

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor, operation: str) -> None:
        """Host bytes of equal number from all ranks, one after the other in ``out``."""
        self._transfer(lambda group: group._allgather_base(out, tensor), operation)

    def all_reduce(self, tensor: torch.Tensor, operation: str) -> None:
        """Sums a host tensor over ranks, in place."""
        self._transfer(lambda group: group.allreduce([tensor]), operation)

    def broadcast(self, tensor: torch.Tensor, source: int, operation: str) -> None:
        """Fills a host tensor with that of rank ``source``."""
        self._transfer(lambda group: group.broadcast(tensor, source), operation)

    def _transfer(self, start: Callable[[Any], Any], operation: str) -> None:
        self.watch.doing = operation, here()
        self._run(start)
        self.watch.leave()

    # --- the group

    def _own_group(self) -> Any:
        if self._group is None:
            watch = self.watch
            board, until = watch.board, time.monotonic() + watch.timeout
            board.put(f"here/{self.rank}", "")
            everyone = [f"here/{rank}" for rank in range(self.size)]
            # Only then: the constructor waits for all ranks, and nothing could call it back.
            while not board.wait(everyone, SLICE.total_seconds()):
                self._check(until)
                if board.lost:
                    raise watch.torn(ConnectionError("no store"))
            # Its own limit is for the case that this process stands still.
            limit = timedelta(seconds=watch.timeout + 30)
            store = dist.distributed_c10d.PrefixStore("letters", board.store)
            self._group = dist.ProcessGroupGloo(store, self.rank, self.size, limit)
        return self._group

    def _run(self, start: Callable[[Any], Any]) -> None:
        """Starts a transfer and waits for its end."""
        watch, group = self.watch, self._group or self._own_group()
        try:
            work = start(group)
            if _done(work):
                return
            until = time.monotonic() + watch.timeout - SLICE.total_seconds()
            while not _done(work):
                self._check(until)
        except CollectiveError:
            self._abandon()
            raise
        except RuntimeError as error:
            self._abandon()
            raise watch.torn(error) from error
        except BaseException:
            self._abandon()
            raise

    def _check(self, until: float) -> None:
        report = self.watch.report
        if report is not None:
            raise report.error(self.rank)
        if time.monotonic() > until:
            raise self.watch.too_late()

    def _abandon(self) -> None:
        """Leaves the group as it is. Its destructor would wait for the transfer, which may never end."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))


def _done(work: Any) -> bool:
    """Waits for a slice of time; whether the transfer has ended.

    Raises:
        RuntimeError: torch's, when it failed.
    """
    failed_or_done = work.is_completed()
    try:
        work.wait(SLICE)
    except RuntimeError:
        if failed_or_done:
            raise
        return False
    return True


def _needed(lengths: Sequence[int], amounts: Sequence[int], any_size: bool) -> tuple[int, bool]:
    """Bytes of the letter that all ranks need, and whether it carries the values."""
    described = body_start(max(lengths))
    if min(amounts) == ELSEWHERE:
        return described, False
    whole = max(map(int.__add__, map(body_start, lengths), amounts))
    if whole <= LARGEST or any_size:
        return whole, True
    return described, False


def _rounded(needed: int) -> int:
    return SMALLEST if needed <= SMALLEST else 1 << (needed - 1).bit_length()


def _different(texts: Sequence[bytes]) -> CollectiveError:
    rows = [text.rstrip(b"\0").decode(errors="replace") for text in texts]
    table = "\n       ".join(f"rank {rank}: {row}" for rank, row in enumerate(rows))
    return CollectiveError("the ranks called different collectives", why=table, fix=SAME_CALLS)


_office: Office | None = None


def office() -> Office:
    """The letters of the open world.

    Raises:
        CollectiveError: this process takes no part in it.
    """
    global _office
    watch = together.current()
    if watch is None:
        raise CollectiveError(
            "this process takes no part in collectives",
            why="it was forked from a rank, or its group has no store to meet by",
            fix="make the call in the process that the launcher started",
        )
    if _office is None or _office.watch is not watch:
        _office = Office(watch)
    return _office
