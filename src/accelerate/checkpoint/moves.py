"""From torch files of one tensor each to where its numbers belong, without a copy in between.

Where a torch file holds the numbers is looked up first (``Files.find``), which reads some hundred bytes of it
and changes nothing; ``Moves.run`` then reads all of them, in large parts by several threads.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from accelerate.checkpoint import pickles
from accelerate.checkpoint.digest import cores
from accelerate.checkpoint.errors import file_errors
from accelerate.checkpoint.reading import PART, memory, plain, read_at, read_part

_ZIP = b"PK\x03\x04"


class Slice(io.RawIOBase):
    """A part of an open file as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self.name = file.name
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Goes to a position, as files do."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        """The position."""
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fills ``buffer``, or as much of it as the part has; returns how much."""
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        got = read_at(self._file.fileno(), view, self._offset + self._at)
        self._at += got
        return got


@dataclass(frozen=True)
class Source:
    """A torch file inside a file.

    Attributes:
        path: the file.
        offset, length: of the torch file, in bytes.
    """

    path: Path
    offset: int
    length: int


@dataclass(frozen=True)
class Found:
    """The numbers of a tensor.

    Attributes:
        path: the file they are in.
        start: of the tensor's storage, in bytes.
        like: the tensor, without its numbers (on the meta device).
    """

    path: Path
    start: int
    like: torch.Tensor


class Files:
    """Looks into torch files. What many of them say alike is unpickled once."""

    def __init__(self) -> None:
        self._said: dict[bytes, Any] = {}

    def find(self, source: Source) -> Found | None:
        """Where the numbers lie, if it is a plain tensor in the order of bytes of this machine.

        Raises:
            CheckpointError: the file is damaged, or would run code.
        """
        with file_errors("read", source.path), source.path.open("rb", buffering=0) as file:
            part = cast(BinaryIO, Slice(file, source.offset, source.length))
            if part.read(len(_ZIP)) != _ZIP:
                return None  # of torch before 1.6
            part.seek(0)
            reader: Any = torch._C.PyTorchFileReader(part)
            if not reader.has_record("data/0") or reader.has_record("data/1") or _other_order(reader):
                return None
            said = reader.get_record("data.pkl")
            if said not in self._said:
                part.seek(0)
                self._said[said] = pickles.read(part, "meta")
            like = self._said[said]
            if type(like) is not torch.Tensor or like.layout is not torch.strided:
                return None
            start = source.offset + reader.get_record_offset("data/0")
        return Found(source.path, start, like)


def _other_order(reader: Any) -> bool:
    return reader.has_record("byteorder") and reader.get_record("byteorder").decode() != sys.byteorder


@dataclass
class Moves:
    """What is to be read to where; nothing is before ``run``.

    Attributes:
        straight: (file, position, memory that it fills).
        other: functions that read what cannot be read straight.
        touched: tensors that get new values.
    """

    straight: list[tuple[Path, int, memoryview]] = field(default_factory=list)
    other: list[Callable[[], None]] = field(default_factory=list)
    touched: list[torch.Tensor] = field(default_factory=list)

    def add(self, found: Found, source: torch.Tensor, target: torch.Tensor) -> bool:
        """Fills ``target`` straight from a file, if that gives the same bytes; else returns False.

        Args:
            found: where the numbers lie.
            source: a view of ``found.like``: which of them.
            target: of its shape.
        """
        fits = plain(target) and source.is_contiguous() and target.dtype == source.dtype
        if not fits or source.is_conj() or source.is_neg() or source.is_quantized:
            return False
        at = found.start + int(source.storage_offset()) * source.element_size()
        view = memory(target)
        for first in range(0, len(view), PART):
            self.straight.append((found.path, at + first, view[first : first + PART]))
        self.touched.append(target)
        return True

    def run(self) -> None:
        """Reads everything.

        Raises:
            CheckpointError: a file cannot be read.
        """
        if len(self.straight) > 1:
            with ThreadPoolExecutor(cores(), "read") as pool:
                for _ in pool.map(_read, self.straight):
                    pass
        else:
            for job in self.straight:
                _read(job)
        for function in self.other:
            function()
        for tensor in self.touched:
            torch.autograd.graph.increment_version(tensor)


def _read(job: tuple[Path, int, memoryview]) -> None:
    path, at, view = job
    with file_errors("read", path):
        read_part(path, at, view)
