"""New files in large blocks that go to the disk past the page cache, where the system can do that.

A checkpoint that went through the page cache would push out what training reads, and its flush at the end
would wait for all of it. So a full block goes to the disk at once, by another thread, while the next is
filled. Where a file system refuses this, blocks are written as usual.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

if sys.platform != "win32":
    import fcntl

BLOCK = 4 * 2**20
_WRITERS = 2
_HAS_PWRITE = hasattr(os, "pwrite")


class DirectIOAppendFile:
    """A new file; bytes can only be added at its end. Errors of the system come as OSError from any method.

    Attributes:
        size: how many bytes were added.
    """

    def __init__(self, path: Path) -> None:
        self.size = 0
        self._block: mmap.mmap | None = None
        self._free: list[mmap.mmap] = []
        self._running: list[tuple[Future[None], mmap.mmap]] = []
        self._writers: ThreadPoolExecutor | None = None
        self._is_direct = False
        self._lock = threading.Lock()
        self._handle = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o666
        )

    def add(self, data: memoryview) -> memoryview:
        """Copy as many of the next bytes as fit into the block; return the copy."""
        if self._block is None:
            self._block = self._fresh()
        start = self.size % BLOCK
        count = min(len(data), BLOCK - start)
        copy = memoryview(self._block)[start : start + count]
        copy[:] = data[:count]
        self.size += count
        if start + count == BLOCK:
            self._send(self._block)
            self._block = None
        return copy

    def _fresh(self) -> mmap.mmap:
        """Return a page-aligned block that no thread writes any more."""
        if len(self._running) > _WRITERS:
            future, block = self._running.pop(0)
            future.result()
            self._free.append(block)
        return self._free.pop() if self._free else mmap.mmap(-1, BLOCK)

    def _send(self, block: mmap.mmap) -> None:
        if self._writers is None:
            self._writers = ThreadPoolExecutor(_WRITERS, "write")
            self._is_direct = self._set_direct(True)
        self._running.append((self._writers.submit(self._write, memoryview(block), self.size - BLOCK), block))

    def _set_direct(self, wanted: bool) -> bool:
        """Switch ``O_DIRECT`` on or off; return whether it is on now."""
        flag = getattr(os, "O_DIRECT", 0)
        if sys.platform == "win32" or not flag:
            return False
        flags = fcntl.fcntl(self._handle, fcntl.F_GETFL) & ~flag
        try:
            fcntl.fcntl(self._handle, fcntl.F_SETFL, flags | (flag if wanted else 0))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return wanted

    def _write(self, data: memoryview, at: int) -> None:
        refused = False
        while data:
            try:
                done = self._put(data, at)
            except OSError as error:
                if error.errno != errno.EINVAL or refused:
                    raise
                refused, self._is_direct = True, self._set_direct(False)  # its units are larger than a page
                continue
            data, at = data[done:], at + done

    def _put(self, data: memoryview, at: int) -> int:
        if _HAS_PWRITE:
            return os.pwrite(self._handle, data, at)
        with self._lock:
            os.lseek(self._handle, at, os.SEEK_SET)
            return os.write(self._handle, data)

    def sync(self) -> None:
        """Wait until all of it is on the disk; nothing may be added afterwards."""
        running, self._running = self._running, []
        for future, _ in running:
            future.result()
        if self._is_direct:
            self._is_direct = self._set_direct(False)
        if self._block is not None:
            count = self.size % BLOCK
            self._write(memoryview(self._block)[:count], self.size - count)
            self._block = None
        os.fsync(self._handle)

    def close(self) -> None:
        """Close the file; what was not synced may be lost."""
        if self._writers is not None:
            self._writers.shutdown(cancel_futures=True)
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
