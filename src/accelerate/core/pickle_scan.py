"""A look at a pickle before it is unpickled: what building it would cost, and what it would change.

A pickle is a program for a small machine with a stack and a memo. ``scan_pickle`` runs it on the shapes of
objects, so nothing is built, and refuses what no program that saves data writes:

- more opcodes or deeper nesting than data has;
- sharing that multiplies: of forty tuples that each hold the one before twice, the last takes 2**40 steps to
  hash; and calls that each copy one large list take as long;
- a container filled from what a call made, such as ``list(range(10**12))``;
- BUILD, which sets attributes, on anything but an instance that this pickle made itself.

Which classes and functions a pickle may name is decided by the unpickler, not here. ``scan_torch_file`` scans
the pickles in a file of ``torch.save``, and refuses archives that are much larger when unpacked.

Source: CPython, ``Lib/pickletools.py``, which documents every opcode.
"""

from __future__ import annotations

import gc
import mmap
import pickle
import stat
import struct
import zipfile
import zlib
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from accelerate.core.errors import CheckpointError

OPCODES = 10_000_000  # a tensor of a state dict takes about 30
DEPTH = 200
_STEPS_PER_BYTE = 16  # that hashing keys and reading arguments may take, on average
_FREE_STEPS = 2**20
_MOST = 2**62
_UNPACKED = 16  # an archive holds no more than this times its own size; torch.save does not compress
_FREE_BYTES = 2**24
_LEGACY_PICKLES = (
    5  # before torch 1.6: magic number, protocol, system, object, keys of storages; then raw data
)

# [size, depth, kind]: the objects in it, shared ones each time; the levels; and one of the kinds below.
# A kind under zero is a text: ``~kind`` is the position of its opcode.
_Shape = list[int]
_PLAIN, _NAME, _CONTAINER_NAME, _LOOKUP_NAME, _INSTANCE, _HOLDS_INSTANCE = range(6)
_LEAF: _Shape = [1, 0, _PLAIN]
# Constructors that read all of an argument; functions whose results are not the pickle's own.
_CONTAINERS = (
    *(b"list", b"tuple", b"set", b"frozenset", b"dict", b"bytes", b"bytearray"),
    *(b"deque", b"Counter", b"OrderedDict", b"defaultdict", b"Size"),
)
_LOOKUPS = b"_MEM_FORMAT_ENCODING", b"MEM_FORMAT_ENCODING", b"_get_layout", b"encode"
_KIND_OF_NAME = {
    **dict.fromkeys(_CONTAINERS, _CONTAINER_NAME),
    **dict.fromkeys(_LOOKUPS, _LOOKUP_NAME),
}

# By opcode: the bytes after it; the bytes of the length after it, for texts and for others; and for the memo,
# the bytes of the number after it.
_CONSTANT = {
    **dict.fromkeys((pickle.NONE[0], pickle.NEWTRUE[0], pickle.NEWFALSE[0], pickle.EMPTY_TUPLE[0]), 0),
    pickle.BININT1[0]: 1,
    pickle.BININT2[0]: 2,
    pickle.BININT[0]: 4,
    pickle.BINFLOAT[0]: 8,
}
_TEXT = {pickle.SHORT_BINUNICODE[0]: 1, pickle.BINUNICODE[0]: 4, pickle.BINUNICODE8[0]: 8}
_BYTES = {
    pickle.SHORT_BINBYTES[0]: 1,
    pickle.BINBYTES[0]: 4,
    pickle.BINBYTES8[0]: 8,
    pickle.BYTEARRAY8[0]: 8,
    pickle.SHORT_BINSTRING[0]: 1,
    pickle.LONG1[0]: 1,
    pickle.LONG4[0]: 4,
}
_GET = {pickle.BINGET[0]: 1, pickle.LONG_BINGET[0]: 4}
_PUT = {pickle.BINPUT[0]: 1, pickle.LONG_BINPUT[0]: 4}
_NEW = pickle.EMPTY_DICT[0], pickle.EMPTY_LIST[0], pickle.EMPTY_SET[0]
_SKIPPED = {pickle.PROTO[0]: 1, pickle.FRAME[0]: 8}
_STOP, _MEMOIZE, _MARK, _GLOBAL = pickle.STOP[0], pickle.MEMOIZE[0], pickle.MARK[0], pickle.GLOBAL[0]
_MARKED = -1
_LONGEST_NAME = 2**16


# What reading a file raises that is no file of torch, or a damaged one, besides OSError.
DAMAGE_ERRORS: tuple[type[Exception], ...] = (
    *(pickle.PickleError, zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, MemoryError),
    *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, ImportError),
)


class RefusedPickleError(pickle.UnpicklingError):
    """A pickle is not data: building it would take too much, or change what it did not make."""


class DamagedPickleError(RefusedPickleError):
    """A pickle cannot be built by anything: it is damaged, or none at all."""


def scan_pickle(data: bytes | mmap.mmap, start: int = 0, *, opcodes: int | None) -> int:
    """Refuse a pickle that could exhaust time or memory, or change objects of the process.

    Args:
        data: the pickle; protocols 2 to 5, without out-of-band buffers.
        start: the position of its first opcode.
        opcodes: how many it may have; None for any number.

    Returns:
        The position after its last opcode.

    Raises:
        RefusedPickleError: says what it does.
    """
    machine = _Machine(data, start, start)
    try:
        with paused_gc():
            machine.run(opcodes or len(data))
    except (IndexError, KeyError, ValueError, TypeError) as error:
        raise DamagedPickleError(f"it is damaged, at byte {machine.at} of its pickle") from error
    return machine.at


def scan_torch_file(source: Path | IO[bytes]) -> None:
    """Scan the pickles in a file of ``torch.save``, or in a file open for reading, whose position stays.

    Raises:
        RefusedPickleError: says what one of them does, or that the file unpacks to much more than it is.
        OSError, zipfile.BadZipFile: the file cannot be read.
    """
    with source.open("rb") if isinstance(source, Path) else nullcontext(source) as file:
        at, size = file.tell(), file.seek(0, 2)
        file.seek(at)
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                unpacked = sum(member.file_size for member in members)
                if unpacked > _FREE_BYTES + _UNPACKED * size:
                    raise RefusedPickleError(
                        f"it has {size:,} bytes, and would take {unpacked:,} when unpacked"
                    )
                for member in members:
                    if member.filename.endswith("data.pkl"):
                        scan_pickle(archive.read(member), opcodes=OPCODES)
        elif size > at:
            file.seek(at)
            is_path = isinstance(source, Path)
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if is_path else file.read()
            if data[:1] != pickle.PROTO:
                raise DamagedPickleError("it is no file of torch.save, or a damaged one")
            position = 0
            for _ in range(_LEGACY_PICKLES):
                if position < len(data):
                    position = scan_pickle(data, position, opcodes=OPCODES)
        file.seek(at)


def refuse_special_file(path: Path) -> None:
    """Refuse a path that leads to a pipe, a socket or a device; a file, a folder and nothing pass.

    Raises:
        CheckpointError: names the path.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # reading it says why
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise CheckpointError(
            f"cannot read {path}",
            why="it is no file, but a pipe, a socket or a device",
            fix="put the file there, or remove it",
        )


@contextmanager
def paused_gc() -> Generator[None]:
    """Pause Python's garbage collector, which looks at millions of new objects again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass
class _Machine:
    """The stack and memo of a pickle, with shapes for objects.

    Attributes:
        data, start: the pickle, and the position of its first opcode.
        at: the position of the opcode.
        steps: that hashing keys and reading arguments takes.
    """

    data: bytes | mmap.mmap
    start: int
    at: int
    steps: int = 0
    stack: list[_Shape] = field(default_factory=list[_Shape])
    marks: list[int] = field(default_factory=list[int])
    memo: dict[int, _Shape] = field(default_factory=dict[int, _Shape])

    def run(self, most: int) -> None:
        data, stack, marks, memo, at = self.data, self.stack, self.marks, self.memo, self.at
        for _ in range(most + 1):
            code = data[at]
            if code == _MEMOIZE:
                memo[len(memo)] = stack[-1]
                at += 1
            elif code in _CONSTANT:
                stack.append(_LEAF)
                at += 1 + _CONSTANT[code]
            elif code in _GET:
                width = _GET[code]
                stack.append(memo[data[at + 1] if width == 1 else _number(data, at + 1, width)])
                at += 1 + width
            elif code in _NEW:
                stack.append([1, 0, _PLAIN])
                at += 1
            elif code == _MARK:
                marks.append(len(stack))
                at += 1
            elif code in _PUT:
                memo[_number(data, at + 1, _PUT[code])] = stack[-1]
                at += 1 + _PUT[code]
            elif code in _TEXT:
                stack.append([1, 0, ~at])
                at += 1 + _TEXT[code] + _number(data, at + 1, _TEXT[code])
            elif code in _BYTES:
                stack.append(_LEAF)
                at += 1 + _BYTES[code] + _number(data, at + 1, _BYTES[code])
            elif code == _STOP:
                stack.pop()
                break
            elif code in _SKIPPED:
                at += 1 + _SKIPPED[code]
            elif code in _ACTIONS:
                self.at = at
                self._apply(*_ACTIONS[code])
                at += 1
            elif code == _GLOBAL:
                module, name, _ = data[at + 1 : at + _LONGEST_NAME].split(b"\n", 2)
                stack.append([1, 0, _KIND_OF_NAME.get(name, _NAME)])
                at += len(module) + len(name) + 3
            else:
                raise RefusedPickleError(f"Unsupported operand {code}")
        else:
            raise RefusedPickleError(f"its pickle has more than {most:,} opcodes")
        size, self.at = at + 1 - self.start, at + 1
        if self.steps > _FREE_STEPS + _STEPS_PER_BYTE * size:
            raise RefusedPickleError(f"its {size:,} bytes take {self.steps:,} steps to build")

    def _apply(self, count: int, action: str) -> None:
        """Do what an opcode does with the last items of the stack, those since a mark for ``_MARKED``."""
        stack = self.stack
        first = self.marks.pop() if count == _MARKED else len(stack) - count
        if first < 0:
            raise IndexError
        items = stack[first:]
        del stack[first:]
        if action == "call":
            kind = stack[-1][2]
            if kind == _CONTAINER_NAME and items[0][2] in (_HOLDS_INSTANCE, _INSTANCE):
                raise RefusedPickleError("it fills a container from an object, not from items of its own")
            stack[-1] = [1, 0, _PLAIN if kind == _LOOKUP_NAME else _INSTANCE]
        elif action == "build" and stack[-1][2] != _INSTANCE:
            raise RefusedPickleError("it sets attributes of an object that it did not make")
        elif action == "tuple":
            kinds = [item[2] for item in items]
            stack.append([1, 0, _HOLDS_INSTANCE if _INSTANCE in kinds else _PLAIN])
        elif action == "frozenset":
            stack.append([1, 0, _PLAIN])
        elif action == "storage":
            stack.append(_LEAF)
        elif action == "name":
            at = ~items[1][2]
            width = _TEXT[self.data[at]]
            length = _number(self.data, at + 1, width)
            name = self.data[at + 1 + width : at + 1 + width + length]
            stack.append([1, 0, _KIND_OF_NAME.get(name, _NAME)])
        if action not in ("storage", "name", "drop"):
            size, depth, _ = shape = stack[-1]
            for item_size, item_depth, _ in items:
                size += item_size
                if item_depth >= depth:
                    depth = item_depth + 1
            if depth > DEPTH:
                raise RefusedPickleError(f"it is nested more than {DEPTH} levels deep")
            shape[0], shape[1] = min(size, _MOST), depth
        if action not in ("tuple", "fill"):
            self.steps += sum([item[0] for item in (items[::2] if action == "set items" else items)])


def _number(data: bytes | mmap.mmap, at: int, width: int) -> int:
    return int.from_bytes(data[at : at + width], "little")


# opcode -> how many items it takes off the stack, and what it does with them
_ACTIONS: dict[int, tuple[int, str]] = {
    code[0]: (count, action)
    for code, count, action in (
        (pickle.TUPLE, _MARKED, "tuple"),
        (pickle.TUPLE1, 1, "tuple"),
        (pickle.TUPLE2, 2, "tuple"),
        (pickle.TUPLE3, 3, "tuple"),
        (pickle.APPEND, 1, "fill"),
        (pickle.APPENDS, _MARKED, "fill"),
        (pickle.ADDITEMS, _MARKED, "add keys"),
        (pickle.SETITEM, 2, "set items"),
        (pickle.SETITEMS, _MARKED, "set items"),
        (pickle.FROZENSET, _MARKED, "frozenset"),
        (pickle.POP, 1, "drop"),
        (pickle.POP_MARK, _MARKED, "drop"),
        (pickle.STACK_GLOBAL, 2, "name"),
        (pickle.REDUCE, 1, "call"),
        (pickle.NEWOBJ, 1, "call"),
        (pickle.NEWOBJ_EX, 2, "call"),
        (pickle.BUILD, 1, "build"),
        (pickle.BINPERSID, 1, "storage"),
    )
}
