"""Optimizer states that are memory-mapped from their file at first, and copied to memory soon after.

Filling fresh memory is most of the time that a load takes. A private mapping is there at once; then a thread
lets the kernel copy its pages (``MADV_POPULATE_WRITE``, Linux 5.14), those that training has not written to
yet: what it has written stays. When that is done the file does not matter any more. Should somebody change
the file in place before, the next save, load or wait raises it: no training goes on unnoticed with a state
that changed under it. The disk space of a file that is removed comes back when the state is gone.

Source: madvise(2), "MADV_POPULATE_WRITE"; proc(5), "mountinfo".
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from accelerate.checkpoint import pickles
from accelerate.checkpoint.errors import file_errors
from accelerate.core import tree
from accelerate.core.errors import CheckpointError

LARGE = 64 * 2**20  # bytes; less is read at once
_POPULATE_WRITE = 23
# A network file system that does not answer would end the process when a page is read.
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs"}
_Stamp = tuple[int, int]


class MappedOptimizerState:
    """The optimizer state in a torch file, mapped until its pages are copied.

    Args:
        path: the file.
        kwargs: arguments of ``pickles.read``.
    """

    _open: ClassVar[list[MappedOptimizerState]] = []

    def __init__(self, path: Path, **kwargs: Any) -> None:
        self.path, self.failure = path, ""
        with file_errors("read", path):
            self._file = path.open("rb")  # keeps this file, whatever is renamed to its name
        self._stamp = _stamp(self._file.fileno())
        self._state: Any = pickles.read(path, mmap=True, **kwargs)
        self._thread: threading.Thread | None = None

    def load_into(self, load: Callable[[Any], Any]) -> None:
        """Pass the state to ``load``; a thread copies the pages of the tensors that it keeps."""
        state, self._state = self._state, None
        references = [
            StorageWeakRef(leaf.untyped_storage())
            for _, leaf in tree.iterate_leaves(state)
            if _has_memory(leaf)
        ]
        load(state)
        del state
        # Strong references: memory that was freed meanwhile is not touched.
        storages = [
            storage for ref in references if (storage := torch.UntypedStorage._new_with_weak_ptr(ref.cdata))
        ]
        if not storages:
            self._file.close()
        else:
            MappedOptimizerState._open.append(self)
            self._thread = threading.Thread(
                target=self._copy_pages, args=(storages,), name="accelerate-own", daemon=True
            )
            self._thread.start()

    def _copy_pages(self, storages: list[torch.UntypedStorage]) -> None:
        try:
            for start, size in _page_ranges(storages):
                populate_pages(start, size)
        except OSError as error:
            self.failure = f"its pages cannot be copied: {error.strerror}"
        if _stamp(self._file.fileno()) != self._stamp:
            self.failure = "the file was changed while the state was taken from it"
        self._file.close()

    @classmethod
    def wait_copied(cls) -> None:
        """Wait until the pages of all states are copied.

        Raises:
            CheckpointError: the file of one was changed before.
        """
        while cls._open:
            mapped = cls._open.pop()
            if mapped._thread is not None:
                mapped._thread.join()
            if mapped.failure:
                raise CheckpointError(
                    f"the optimizer state that was loaded from {mapped.path} cannot be trusted",
                    why=mapped.failure,
                    fix="load the checkpoint again, and leave its files alone for some seconds",
                )


def can_map(path: Path, location: Any) -> bool:
    """Return True if a torch file may be mapped: large, on a local disk, for use in host memory."""
    on_host = str(location) == "cpu"
    return on_host and path.stat().st_size >= LARGE and _can_populate() and _file_system(path) in _LOCAL


@cache
def _can_populate() -> bool:
    if sys.platform != "linux":
        return False
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    try:
        populate_pages(address, mmap.PAGESIZE)
    except OSError:
        return False
    return True


def populate_pages(address: int, size: int) -> None:
    """Give this process its own copy of every page of a private mapping.

    Raises:
        OSError: the system does not know this, or memory is short.
    """
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    while function(address, size, _POPULATE_WRITE):
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR):
            raise OSError(code, os.strerror(code))


def _file_system(path: Path) -> str:
    """Return the type of the file system of a file; empty if unknown."""
    device = path.stat().st_dev
    device_numbers = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == device_numbers:
            return after.split()[0]
    return ""


def _stamp(handle: int) -> _Stamp:
    stat = os.fstat(handle)
    return stat.st_mtime_ns, stat.st_size


def _has_memory(leaf: Any) -> bool:
    return (
        isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.untyped_storage().nbytes() > 0
    )


def _page_ranges(storages: Iterable[torch.UntypedStorage]) -> list[tuple[int, int]]:
    """Return (address, bytes) of whole pages; adjacent ranges are merged."""
    page, ranges = mmap.PAGESIZE, list[tuple[int, int]]()
    for start, size in sorted((storage.data_ptr(), storage.nbytes()) for storage in storages):
        first, last = start // page * page, -(-(start + size) // page) * page
        if ranges and first <= sum(ranges[-1]):
            first, last = ranges[-1][0], max(last, sum(ranges.pop()))
        ranges.append((first, last - first))
    return ranges
