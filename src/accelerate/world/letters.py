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
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from accelerate.core.errors import CollectiveError
from accelerate.world import together
from accelerate.world.paths import one_way
from accelerate.world.report import SAME_CALLS
from accelerate.world.sites import Site, here

# Text for people; operation, structure, kind of body, bytes of description, bytes of values. The description
# comes next, so that all on which the ranks mostly agree is compared at once.
_TEXT = 104
_HEAD = struct.Struct(f"<{_TEXT}sIIIIq")
HEAD = _HEAD.size
ALIGNED = 16
SMALLEST = 4096
# Values above, times half the ranks, travel by themselves: copying them into letters would cost more.
LARGEST = 1 << 20
# Up to so many ranks send letters to each other directly, in one step; more pass them on in a ring.
DIRECT = 8
WASTE = 1 << 17  # bytes sent in vain by small letters in a row, after which all get smaller
FORMS = 256  # kept at a time
SLICE = timedelta(seconds=0.25)
# What a program calls by itself: ranks that do so from other lines may have left out a call.
ALIKE = frozenset(
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
    """

    room: int
    lengths: Sequence[int]
    amounts: Sequence[int]
    trees: Sequence[int]
    same: bool
    carried: bool
    inbox: bytearray

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


class Sheet:
    """A letter to write and the letters to read.

    Attributes:
        outbox, inbox: the memory; the outbox has a copy for each rank when letters go directly.
        out, tensor: the same as tensors, one row per letter.
    """

    def __init__(self, room: int, size: int) -> None:
        self.direct = size <= DIRECT
        self.outbox, self.inbox = bytearray(room * (size if self.direct else 1)), bytearray(room * size)
        self.out = torch.frombuffer(self.outbox, dtype=torch.uint8).view(-1, room)
        self.tensor = torch.frombuffer(self.inbox, dtype=torch.uint8).view(size, room)
        self._copies = self.copies(room)

    def copies(self, needed: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The beginnings of the copies, and that of the letter itself."""
        return (self.out[1:, :needed], self.out[:1, :needed]) if self.direct else None

    def copy(self) -> None:
        """Makes the copies from the letter."""
        if self._copies is not None:
            self._copies[0].copy_(self._copies[1])

    def start(self, group: Any) -> Any:
        """Begins the transfer."""
        if self.direct:
            return group.alltoall_base(self.tensor, self.out, [], [])
        return group._allgather_base(self.tensor, self.out)


class Form:
    """What all letters about tensors of the same dtypes and shapes have in common, ready to be used again.

    Attributes:
        begin: a letter from its operation to the end of its description.
        slots: where the values go, one view per tensor with its dtype and shape.
        parts: where the ranks' values are, for each tensor one such view per rank.
        needed: bytes of the letter.
    """

    def __init__(
        self, office: Office, operation: str, tree: int, description: bytes, tensors: Sequence[torch.Tensor]
    ) -> None:
        self.operation, self.tree, self.description, self.room = operation, tree, description, office.room
        amount = sum(aligned(tensor.nbytes) for tensor in tensors)
        self.needed = body_start(len(description)) + amount
        self.sheet = office.sheet(self.room)
        outbox, inbox = self.sheet.outbox, self.sheet.inbox
        code = digest(operation)
        self.begin = bytearray(_HEAD.pack(b"", code, tree, 0, len(description), amount)[_TEXT:] + description)
        end, room = HEAD + len(description), self.room
        others = [rank for rank in range(office.size) if rank != office.rank]
        self.cuts = [slice(rank * room, rank * room + end) for rank in others]
        self.slots: list[torch.Tensor] = []
        self.parts: list[tuple[torch.Tensor, ...]] = []
        start = body_start(len(description))
        with torch.inference_mode(False):  # they live on after the mode of this call
            for tensor in tensors:
                self.slots.append(_view(outbox, start, tensor))
                self.parts.append(tuple(_view(inbox, r * room + start, tensor) for r in range(office.size)))
                start += aligned(tensor.nbytes)
            self.copies = self.sheet.copies(self.needed)


def _view(memory: bytearray, start: int, like: torch.Tensor) -> torch.Tensor:
    count = like.numel()
    if count == 0:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    return torch.frombuffer(memory, dtype=like.dtype, count=count, offset=start).view(like.shape)


class Office:
    """The letters of one world. One exchange at a time, by whichever thread."""

    def __init__(self, watch: together.Watch) -> None:
        self.watch, self.rank, self.size = watch, watch.rank, watch.size
        self.lock = threading.RLock()
        self.room = SMALLEST
        self.forms: dict[Any, Form | None] = {}
        self._written: tuple[Form, Site] | None = None
        self._wasted, self._larger = 0, False
        self._group: Any = None
        self._sheets: dict[int, Sheet] = {}
        watch.at_end(self.close)

    def close(self) -> None:
        """Ends the group and its threads.

        One that lets go of a tensor needs the interpreter for it, and aborts the process when that has begun
        to end.
        """
        global _office
        self._group = None
        if _office is self:
            _office = None

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
        sent: bool = False,
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
            sent: the letters of this exchange are there already.

        Raises:
            CollectiveError: the ranks are in different operations, one failed, or one did not come in time.
        """
        site = here()
        if not sent:
            self._enter(label or operation, site)
        code, text, room = digest(operation), _shown(label or operation, site), self.room
        length, kind = len(description), int(any_size)
        self._written = None
        while True:
            sheet = self.sheet(room)
            outbox, inbox = sheet.outbox, sheet.inbox
            if not sent:
                _HEAD.pack_into(outbox, 0, text, code, tree, kind, length, amount)
                if HEAD + length <= room:
                    outbox[HEAD : HEAD + length] = description
                if 0 < amount <= room - body_start(length):
                    fill(outbox, body_start(length))
                sheet.copy()
                self._run(sheet.start)
            sent = False
            heads = [_HEAD.unpack_from(inbox, rank * room) for rank in range(self.size)]
            texts, codes, trees, kinds, lengths, amounts = zip(*heads, strict=True)
            if set(codes) != {code} or set(kinds) != {kind}:
                self.watch.doing = None
                raise _different(texts)
            if operation in ALIKE and len(set(texts)) > 1:
                self._check_places(operation, site, texts)
            needed, carried = _needed(lengths, amounts, any_size)
            if needed <= room:
                break
            room = _rounded(needed)
        self.watch.doing = None
        self._remember(needed)
        same = len(set(trees)) == 1
        if same:
            first = inbox[HEAD : HEAD + lengths[0]]
            same = all(inbox[r * room + HEAD : r * room + HEAD + n] == first for r, n in enumerate(lengths))
        return Mail(room, lengths, amounts, trees, same, carried, inbox)

    def _check_places(self, operation: str, site: Site, texts: Sequence[bytes]) -> None:
        """The ranks call one operation from several lines: a rank may have left out a call."""
        begin = f"{operation} at {site}".rpartition(":")[0] + ":"
        shown = [_read(text) for text in texts]
        numbers = [text.removeprefix(begin) for text in shown]
        if not all(number.isdecimal() for number in numbers):
            return  # in other files
        if one_way(site.file, frozenset(map(int, numbers))):
            self.watch.doing = None
            raise _different(texts, f"the ranks called {operation} in different places")

    def repeat(self, form: Form, tensors: Sequence[torch.Tensor]) -> bool:
        """Sends a letter by a form; whether all ranks sent the same form, so that their values are in it.

        Otherwise the letters are there, and ``exchange`` with ``sent`` reads them.
        """
        site = here()
        self._enter(form.operation, site)
        if self._written != (form, site):
            outbox = form.sheet.outbox
            outbox[:_TEXT] = _shown(form.operation, site).ljust(_TEXT, b"\0")
            outbox[_TEXT : _TEXT + len(form.begin)] = form.begin
            self._written = form, site
        for slot, tensor in zip(form.slots, tensors, strict=True):
            slot.copy_(tensor)
        if form.copies is not None:
            form.copies[0].copy_(form.copies[1])
        self._run(form.sheet.start)
        inbox, begin = form.sheet.inbox, form.sheet.outbox[: _TEXT + len(form.begin)]
        for cut in form.cuts:
            if inbox[cut] != begin:
                return False
        self.watch.doing = None
        if self.room != SMALLEST or self._larger:
            self._remember(form.needed)
        return True

    def _enter(self, operation: str, site: Site) -> None:
        watch = self.watch
        if watch.report is not None:
            raise watch.report.error(self.rank)
        watch.letters += 1
        watch.doing = operation, site

    def _remember(self, needed: int) -> None:
        """Chooses the size of the next letters: larger after two large ones, smaller after small ones.

        A letter that turns out too small costs one more exchange; they shrink when the space in vain has cost
        about as much.
        """
        was_larger, self._larger = self._larger, needed > self.room
        if self._larger:
            if was_larger and needed <= 2 * LARGEST:
                self._resize(needed)
        elif needed * 2 > self.room or self.room == SMALLEST:
            self._wasted = 0
        else:
            self._wasted += self.room - needed
            if self._wasted >= WASTE:
                self._resize(needed)

    def _resize(self, needed: int) -> None:
        self.room, self._wasted, self._larger = _rounded(needed), 0, False
        self._sheets = {room: sheet for room, sheet in self._sheets.items() if room == self.room}
        self.forms.clear()

    def sheet(self, room: int) -> Sheet:
        """A letter to write and letters to read, of ``room`` bytes each."""
        sheet = self._sheets.get(room)
        if sheet is None:
            with torch.inference_mode(False):  # it lives on after the mode of this call
                sheet = Sheet(room, self.size)
            if room <= 2 * LARGEST:
                self._sheets[room] = sheet
        return sheet

    def form(self, key: Any, make: Callable[[], Form | None]) -> Form | None:
        """The form that is kept under ``key``; made when the key comes for the second time."""
        form = self.forms.get(key, self)
        if form is self or (form is not None and form.sheet is not self._sheets.get(self.room)):
            if len(self.forms) >= FORMS:
                self.forms.clear()
            self.forms[key] = None
            return None
        if form is None:
            form = self.forms[key] = make()
        return form  # type: ignore[return-value]

    def fits(self, needed: int) -> bool:
        """Whether values of all ranks go into letters of the present size."""
        return needed <= self.room and needed * self.size <= 2 * LARGEST

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
        self.watch.doing = None

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
        work = None
        try:  # opening the group, too: its store may be gone
            group = self._group or self._own_group()
            work = start(group)
            try:
                work.wait(SLICE)
            except RuntimeError:
                self._go_on(work)
        except CollectiveError:
            self._abandon()
            raise
        except RuntimeError as error:
            self._abandon()
            raise self.watch.torn(error) from error
        except BaseException:
            self._abandon()
            raise

    def _go_on(self, work: Any) -> None:
        """Waits on, in slices, for a transfer that has failed or did not end in the first."""
        until = time.monotonic() + self.watch.timeout - SLICE.total_seconds()
        while True:
            ended = work.is_completed()
            try:
                work.wait(SLICE)
            except RuntimeError:
                if ended:
                    raise
                self._check(until)
            else:
                return

    def _check(self, until: float) -> None:
        report = self.watch.report
        if report is not None:
            raise report.error(self.rank)
        if time.monotonic() > until:
            raise self.watch.too_late()

    def _abandon(self) -> None:
        """Leaves the group as it is. Its destructor would wait for the transfer, which may never end."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))


def _needed(lengths: Sequence[int], amounts: Sequence[int], any_size: bool) -> tuple[int, bool]:
    """Bytes of the letter that all ranks need, and whether it carries the values."""
    described = body_start(max(lengths))
    if min(amounts) == ELSEWHERE:
        return described, False
    whole = max(map(int.__add__, map(body_start, lengths), amounts))
    if whole * len(lengths) <= 2 * LARGEST or any_size:
        return whole, True
    return described, False


def _rounded(needed: int) -> int:
    """A little more than needed, so that values whose size varies a little need no other letters."""
    step = max(ALIGNED, 1 << max(0, (needed - 1).bit_length() - 4))
    return max(SMALLEST, -(-needed // step) * step)


def _read(text: bytes) -> str:
    return text.rstrip(b"\0").decode(errors="replace")


def _different(
    texts: Sequence[bytes], what: str = "the ranks called different collectives"
) -> CollectiveError:
    table = "\n       ".join(f"rank {rank}: {_read(text)}" for rank, text in enumerate(texts))
    return CollectiveError(what, why=table, fix=SAME_CALLS)


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
