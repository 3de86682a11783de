"""Marks of tensors whose memory is an unmodified part of a mapped file.

Linux has both facts: ``/proc/self/maps`` says which file is mapped at an address, and ``/proc/self/pagemap``
whether a page of a private mapping is still the file's, or a modified copy. On a system without them no
tensor counts as part of a file.

Source: proc_pid_maps(5), and "Examining Process Page Tables" (pagemap.rst) in the documentation of Linux.
"""

from __future__ import annotations

import bisect
import hashlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import torch

_MAPS, _PAGES = Path("/proc/self/maps"), Path("/proc/self/pagemap")
_ENTRY = 8  # bytes for each page in the page map
_DELETED = " (deleted)"


@dataclass(frozen=True)
class _MappedRegion:
    """A region of the address space that maps a file from its byte ``offset`` on."""

    start: int
    end: int
    offset: int
    inode: str
    path: str


class MappedFileFingerprints:
    """The files that are mapped now.

    A tensor has a mark of 8 bytes: equal marks on two ranks mean the same bytes of the same file. Files are
    the same by inode, size and modification time, so also on machines that share them.
    """

    def __init__(self) -> None:
        readable = os.access(_MAPS, os.R_OK) and os.access(_PAGES, os.R_OK)
        self._regions = _parse_regions(_MAPS.read_text()) if readable else []
        self._starts = [region.start for region in self._regions]

    def mark(self, tensor: torch.Tensor) -> bytes:
        """Return the mark of a tensor whose memory is an unmodified part of a file; empty for any other."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
            return b""
        start = tensor.data_ptr()
        end = start + tensor.numel() * tensor.element_size()
        region = self._find_region(start, end)
        if region is None or not os.path.exists(region.path) or _is_modified(start, end):
            return b""
        file = os.stat(region.path)
        place = region.offset + start - region.start
        identity = (region.inode, file.st_ino, file.st_size, file.st_mtime_ns, place, str(tensor.dtype))
        return hashlib.blake2b(repr((identity, tuple(tensor.shape))).encode(), digest_size=8).digest()

    def _find_region(self, start: int, end: int) -> _MappedRegion | None:
        at = bisect.bisect_right(self._starts, start) - 1
        if at < 0 or end > self._regions[at].end:
            return None
        return self._regions[at]


def _parse_regions(text: str) -> list[_MappedRegion]:
    """Return the regions of files that still have their name, by address."""
    regions: list[_MappedRegion] = []
    for line in text.splitlines():
        bounds, _, offset, _, inode, *name = line.split(maxsplit=5)
        if inode == "0" or not name or name[0].endswith(_DELETED):
            continue
        start, end = (int(number, 16) for number in bounds.split("-"))
        regions.append(_MappedRegion(start, end, int(offset, 16), inode, name[0]))
    return regions


def _is_modified(start: int, end: int) -> bool:
    """Return whether a page between two addresses is a modified copy, or cannot be read."""
    first, last = start // mmap.PAGESIZE, -(-end // mmap.PAGESIZE)
    with _PAGES.open("rb", buffering=0) as file:
        file.seek(first * _ENTRY)
        data = file.read((last - first) * _ENTRY)
    if len(data) != (last - first) * _ENTRY:
        return True
    pages = torch.frombuffer(bytearray(data), dtype=torch.int64)
    present = (pages >> 62) & 3 != 0  # in memory, or swapped out
    anonymous = (pages >> 61) & 1 == 0  # no page of a file
    return bool((present & anonymous).any())
