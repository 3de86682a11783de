"""Plans of reads from torch files of one tensor each straight into the memory of other tensors.

``TensorLocator.locate`` looks up the position of a tensor in its file first, which reads some hundred bytes
and changes nothing; ``ReadPlan.run`` then reads all tensors, in large chunks by several threads.
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
from accelerate.checkpoint.digest import usable_cores
from accelerate.checkpoint.errors import file_errors
from accelerate.checkpoint.parallel_file_reads import CHUNK, is_plain, memory_of, read_at, read_exactly

_ZIP = b"PK\x03\x04"


class FileRangeReader(io.RawIOBase):
    """A range of an open file as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self.name = file.name
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Set the position; return it."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fill ``buffer``, or as much of it as the range has; return the number of bytes."""
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        got = read_at(self._file.fileno(), view, self._offset + self._at)
        self._at += got
        return got


@dataclass(frozen=True)
class FileSlice:
    """A torch file inside a file.

    Attributes:
        path: the file.
        offset, length: of the torch file, in bytes.
    """

    path: Path
    offset: int
    length: int


@dataclass(frozen=True)
class TensorLocation:
    """The position of a tensor's values in a file.

    Attributes:
        path: the file they are in.
        start: of the tensor's storage, in bytes.
        meta_tensor: the tensor on the meta device.
    """

    path: Path
    start: int
    meta_tensor: torch.Tensor


class TensorLocator:
    """Looks up tensors in torch files; equal pickles of several files are unpickled once."""

    def __init__(self) -> None:
        self._unpickled: dict[bytes, Any] = {}

    def locate(self, source: FileSlice) -> TensorLocation | None:
        """Return the position of a plain tensor in this machine's byte order; None for others.

        Raises:
            CheckpointError: the file is damaged, or would run code.
        """
        with file_errors("read", source.path), source.path.open("rb", buffering=0) as file:
            torch_file = cast(BinaryIO, FileRangeReader(file, source.offset, source.length))
            if torch_file.read(len(_ZIP)) != _ZIP:
                return None  # before torch 1.6
            torch_file.seek(0)
            reader: Any = torch._C.PyTorchFileReader(torch_file)
            if not reader.has_record("data/0") or reader.has_record("data/1") or _has_other_byteorder(reader):
                return None
            pickled = reader.get_record("data.pkl")
            if pickled not in self._unpickled:
                torch_file.seek(0)
                self._unpickled[pickled] = pickles.read(torch_file, "meta")
            like = self._unpickled[pickled]
            if type(like) is not torch.Tensor or like.layout is not torch.strided:
                return None
            start = source.offset + reader.get_record_offset("data/0")
        return TensorLocation(source.path, start, like)


def _has_other_byteorder(reader: Any) -> bool:
    return reader.has_record("byteorder") and reader.get_record("byteorder").decode() != sys.byteorder


@dataclass
class ReadPlan:
    """The reads of a load, and the tensors that they fill; nothing is read before ``run``.

    Attributes:
        direct_reads: (file, position, memory that it fills).
        fallback_reads: functions that read what cannot be read straight.
        written_tensors: tensors that get new values.
    """

    direct_reads: list[tuple[Path, int, memoryview]] = field(default_factory=list)
    fallback_reads: list[Callable[[], None]] = field(default_factory=list)
    written_tensors: list[torch.Tensor] = field(default_factory=list)

    def add(self, location: TensorLocation, source: torch.Tensor, target: torch.Tensor) -> bool:
        """Plan to fill ``target`` straight from a file; return False if that would not give the same bytes.

        Args:
            location: the position of the values.
            source: a view of ``location.meta_tensor``: which of them.
            target: of its shape.
        """
        fits = is_plain(target) and source.is_contiguous() and target.dtype == source.dtype
        if not fits or source.is_conj() or source.is_neg() or source.is_quantized:
            return False
        at = location.start + int(source.storage_offset()) * source.element_size()
        view = memory_of(target)
        for first in range(0, len(view), CHUNK):
            self.direct_reads.append((location.path, at + first, view[first : first + CHUNK]))
        self.written_tensors.append(target)
        return True

    def run(self) -> None:
        """Run all reads.

        Raises:
            CheckpointError: a file cannot be read.
        """
        if len(self.direct_reads) > 1:
            with ThreadPoolExecutor(usable_cores(), "read") as pool:
                for _ in pool.map(_run_read, self.direct_reads):
                    pass
        else:
            for job in self.direct_reads:
                _run_read(job)
        for function in self.fallback_reads:
            function()
        for tensor in self.written_tensors:
            torch.autograd.graph.increment_version(tensor)


def _run_read(job: tuple[Path, int, memoryview]) -> None:
    path, at, view = job
    with file_errors("read", path):
        read_exactly(path, at, view)
