"""Access to files: errors in the user's words, digests, and files that are durable when they are closed.

The digest of a file is taken while it is written: the XXH3 digest (128 bits) over those of its 64 MiB pieces,
in order, as hex, so several threads can check one file. It finds what disks, networks and hands damage; it is
not a signature. Source: Collet, "xxHash", https://xxhash.com.

Files are written in large blocks that go to the disk past the page cache, where the system can do that. A
checkpoint that went through the page cache would push out what training reads, and its flush at the end would
wait for all of it. So a full block goes to the disk at once, by another thread, while the next is filled.
Where a file system refuses this, blocks are written as usual.
"""

from __future__ import annotations

import errno
import hashlib
import io
import mmap
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import xxhash
from safetensors import SafetensorError

from accelerate.core.errors import CheckpointError
from accelerate.core.pickle_scan import DAMAGE_ERRORS, refuse_special_file
from accelerate.core.units import show_bytes

_FIXES = {
    errno.ENOSPC: "free some space, or lower total_limit; the last committed checkpoint is untouched",
    errno.EDQUOT: "free some of the quota, or lower total_limit; the last committed checkpoint is untouched",
    errno.EFBIG: "the file system or a limit of the process (ulimit -f) does not allow files of this size",
    errno.EROFS: "choose a folder on a file system that can be written",
    errno.EACCES: "choose a folder that this user may write, or change its permissions",
    errno.EPERM: "choose a folder that this user may write, or change its permissions",
    errno.EIO: "the device reports a fault: save to another one",
}


class CheckpointNotFoundError(CheckpointError, ValueError, FileNotFoundError):
    """There is no checkpoint where one was looked for.

    Version 1.15 raises a ValueError where the folder is missing, a FileNotFoundError where it is empty.
    """


class CheckpointExistsError(CheckpointError, ValueError):
    """A checkpoint would be overwritten by automatic naming (a ValueError likewise)."""


class MissingFileError(CheckpointError, FileNotFoundError):
    """A file is not there (a FileNotFoundError, as torch and safetensors raise it)."""


class FileAccessError(CheckpointError, OSError):
    """The system refuses to read or write a file (an OSError likewise)."""


class NoTensorsError(CheckpointError, ValueError):
    """Something else than a dict of tensors was to be saved as safetensors (a ValueError, as there)."""


class CodeInFileError(CheckpointError, pickle.UnpicklingError):
    """A file would run code (an UnpicklingError, as ``torch.load`` raises it)."""


@contextmanager
def file_errors(action: str, path: Path) -> Generator[None]:
    """Turn the failures of reading or writing one file into a CheckpointError that names it.

    torch reports a full disk or a torn archive as RuntimeError, safetensors as SafetensorError; the unpickler
    of a damaged file raises anything. To read a pipe or a device would wait or never end: they are refused.
    """
    if "\0" in str(path):
        raise CheckpointError(f"cannot {action} {str(path)!r}", why="no path may have a NUL character")
    if action == "read":
        refuse_special_file(path)
    handled = sys.exc_info()[1]
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, SafetensorError, *DAMAGE_ERRORS) as error:
        failure: BaseException | None = error
        if action == "write" and not isinstance(error, OSError) and error.__context__ is not handled:
            failure = error.__context__  # torch closes its archive after a failed write: another error
        if not isinstance(failure, OSError):
            raise CheckpointError(f"cannot {action} {path}", why=_first_line(error)) from error
        if action == "read" and path.exists() and not os.access(path, os.R_OK):
            # Safetensors says of such a file that it is not there.
            failure = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        place = failure.filename if isinstance(failure.filename, str) else str(path)
        inner = f": {place}" if place.startswith(f"{path}{os.sep}") else ""  # of a folder
        reason = f"{failure.strerror or failure}{inner} (on {socket.gethostname()})"
        kind = MissingFileError if isinstance(failure, FileNotFoundError) else FileAccessError
        is_forbidden = action == "read" and failure.errno in (errno.EACCES, errno.EPERM)
        fix = "let this user read it" if is_forbidden else _fix(failure.errno, path)
        refusal = kind(f"cannot {action} {path}", why=reason, fix=fix)
        refusal.errno, refusal.filename = failure.errno, failure.filename
        raise refusal from error


@contextmanager
def remote_errors(action: str, place: str) -> Generator[None]:
    """Turn every failure of a remote store into a CheckpointError that names the URL.

    Each driver has exceptions of its own, of which many derive from nothing but Exception.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        reason = f"{_first_line(error)} (on {socket.gethostname()})"
        raise CheckpointError(
            f"cannot {action} {place}", why=reason, fix=_remote_fix(error, place)
        ) from error


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing.

    Raises:
        CheckpointError: it cannot be made.
    """
    with file_errors("make the folder", path):
        path.mkdir(parents=True, exist_ok=True)


def _remote_fix(error: Exception, place: str) -> str:
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.ENOSPC and "://" not in place:
        return _fix(code, Path(place)) + "; TMPDIR says where fetched files lie"
    if code == errno.ENOSPC:
        return "free some space there, and in the folder for temporary files (TMPDIR)"
    if isinstance(error, PermissionError):
        return "look at the credentials: they must allow to list, read, write and delete there"
    if isinstance(error, FileNotFoundError):
        return "look for a typing error, and whether the bucket or folder above exists"
    if isinstance(error, ConnectionError | TimeoutError):
        return "look at the connection and the address of the store, then do it again"
    return ""


def _fix(code: int | None, path: Path) -> str:
    text = _FIXES.get(code or 0, "")
    if code == errno.ENOSPC:
        import psutil

        folder = next((p for p in path.parents if p.exists()), Path.cwd())
        text = f"{show_bytes(psutil.disk_usage(str(folder)).free)} are free there; {text}"
    return text


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if sys.platform != "win32":
    import fcntl


HASH = "xxh3_128"
PIECE = 64 * 2**20
HASHING = f"{HASH}, pieces of {PIECE} bytes"
_CHUNK = 2**20  # of reading: it stays in the cache of a core until it is hashed
_SLICE = 2**19  # of writing: how long other threads of Python may have to wait
BLOCK = 4 * 2**20
_WRITERS = 2
_HAS_PWRITE = hasattr(os, "pwrite")
_HASHES: dict[str, Callable[..., Any]] = {HASH: xxhash.xxh3_128, "sha256": hashlib.sha256}


@dataclass(frozen=True)
class FileRecord:
    """Size and digest of one durable file.

    Attributes:
        size: bytes.
        digest: see above.
        rank: the rank that wrote it.
    """

    size: int
    digest: str
    rank: int = 0


def file_digest(path: Path, hashing: str = HASHING, threads: int | None = None) -> str:
    """Return the digest of a file; see ``file_digests``."""
    return file_digests([path], hashing, threads)[0]


def file_digests(
    paths: Sequence[Path],
    hashing: str = HASHING,
    threads: int | None = None,
    on_read: Callable[[int], object] | None = None,
) -> list[str]:
    """Return the digest of each file, computed by several threads.

    The pieces of all files are shared out, so one large file keeps all threads busy, and so do many small
    ones.

    Args:
        paths: the files.
        hashing: how, as a manifest states it.
        threads: how many hash; all cores when None.
        on_read: called with the bytes of each piece that is done, by several threads.

    Raises:
        OSError: a file cannot be read.
    """
    new = _HASHES[hashing.partition(",")[0]]
    counts = [max(1, -(-path.stat().st_size // PIECE)) for path in paths]
    pieces = [(path, index) for path, count in zip(paths, counts, strict=True) for index in range(count)]
    workers = min(len(pieces), threads or usable_cores())
    if workers <= 1:
        piece_digests = iter([_piece(path, index, new(), on_read) for path, index in pieces])
    else:
        with ThreadPoolExecutor(workers, "digest") as pool:
            piece_digests = iter(
                list(pool.map(lambda piece: _piece(piece[0], piece[1], new(), on_read), pieces))
            )
    return [new(b"".join(islice(piece_digests, count))).hexdigest() for count in counts]


class FileDamage(NamedTuple):
    """A file that is not as it was saved.

    Attributes:
        name: of the file.
        size: bytes that it has; None if it is missing.
        why: what was expected, and what it has.
    """

    name: str
    size: int | None
    why: str

    @property
    def state(self) -> str:
        """In a word, for errors."""
        return "missing" if self.size is None else "damaged"


def find_damage(
    folder: Path,
    records: Mapping[str, FileRecord],
    hashing: str,
    on_read: Callable[[int], object] | None = None,
) -> Iterator[FileDamage]:
    """Compare files with their records; all sizes first, then the digests.

    Args:
        folder: where they are.
        records: by name.
        hashing, on_read: see ``file_digests``.

    Raises:
        CheckpointError: a file cannot be read.
    """
    whole: dict[str, Path] = {}
    for name, record in records.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            yield FileDamage(name, None, f"rank {record.rank} saved it with {record.size} bytes")
        elif size != record.size:
            yield FileDamage(name, size, f"it has {size} bytes, expected {record.size}")
        else:
            whole[name] = path
    with file_errors("read", folder):
        digests = file_digests(list(whole.values()), hashing, on_read=on_read)
    for name, digest in zip(whole, digests, strict=True):
        if digest != (expected := records[name].digest):
            yield FileDamage(name, records[name].size, f"its digest is {digest}, expected {expected}")


def usable_cores() -> int:
    """Return the number of threads that can run at once in this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


def _piece(path: Path, index: int, state: Any, on_read: Callable[[int], object] | None) -> bytes:
    remaining, buffer = PIECE, memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        file.seek(index * PIECE)
        while remaining > 0:
            count = file.readinto(buffer[: min(remaining, _CHUNK)])
            if not count:
                break
            state.update(buffer[:count])
            remaining -= count
    if on_read is not None:
        on_read(PIECE - remaining)
    return state.digest()


@dataclass
class Digester:
    """A digest over bytes that come one after the other.

    Attributes:
        size: bytes so far.
    """

    size: int = 0
    _pieces: list[bytes] = field(default_factory=list)
    _piece: Any = field(default_factory=xxhash.xxh3_128)

    def update(self, data: memoryview) -> None:
        """Take the next bytes."""
        while data:
            room = PIECE - self.size % PIECE
            self._piece.update(data[:room])
            self.size += min(room, len(data))
            data = data[room:]
            if self.size % PIECE == 0:
                self._pieces.append(self._piece.digest())
                self._piece.reset()

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""
        last = [self._piece.digest()] if self.size % PIECE or not self._pieces else []
        return xxhash.xxh3_128(b"".join([*self._pieces, *last])).hexdigest()


class DurableFile(io.RawIOBase):
    """A new file that knows its digest; bytes can only be added at its end.

    Errors of the system come as OSError from any method: a failure to write may show at a later call.

    Attributes:
        digester: of what is written so far.
    """

    def __init__(self, path: Path) -> None:
        self.digester = Digester()
        self._block: mmap.mmap | None = None
        self._free: list[mmap.mmap] = []
        self._running: list[tuple[Future[None], mmap.mmap]] = []
        self._writers: ThreadPoolExecutor | None = None
        self._is_direct = False
        self._lock = threading.Lock()
        self._handle = -1
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
        self._handle = os.open(path, flags, 0o666)

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.digester.size

    def write(self, data: Any, /) -> int:
        """Write all of ``data``; return its number of bytes."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            if self._block is None:
                if len(self._running) > _WRITERS:
                    future, block = self._running.pop(0)
                    future.result()
                    self._free.append(block)
                # A page-aligned block that no thread writes any more.
                self._block = self._free.pop() if self._free else mmap.mmap(-1, BLOCK)
            start = self.digester.size % BLOCK
            count = min(len(view) - done, BLOCK - start, _SLICE)
            copied = memoryview(self._block)[start : start + count]
            copied[:] = view[done : done + count]
            self.digester.update(copied)
            done += count
            if start + count == BLOCK:
                self._send(self._block)
                self._block = None
        return done

    def _send(self, block: mmap.mmap) -> None:
        if self._writers is None:
            self._writers = ThreadPoolExecutor(_WRITERS, "write")
            self._is_direct = self._set_direct(True)
        self._running.append(
            (self._writers.submit(self._write, memoryview(block), self.digester.size - BLOCK), block)
        )

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
                if _HAS_PWRITE:
                    done = os.pwrite(self._handle, data, at)
                else:
                    with self._lock:
                        os.lseek(self._handle, at, os.SEEK_SET)
                        done = os.write(self._handle, data)
            except OSError as error:
                if error.errno != errno.EINVAL or refused:
                    raise
                refused, self._is_direct = True, self._set_direct(False)  # its units are larger than a page
                continue
            data, at = data[done:], at + done

    def sync(self) -> None:
        """Wait until all of it is on the disk; nothing can be written afterwards."""
        running, self._running = self._running, []
        for future, _ in running:
            future.result()
        if self._is_direct:
            self._is_direct = self._set_direct(False)
        if self._block is not None:
            count = self.digester.size % BLOCK
            self._write(memoryview(self._block)[:count], self.digester.size - count)
            self._block = None
        os.fsync(self._handle)

    def close(self) -> None:
        """Close the file; what was not synced may be lost."""
        if self._writers is not None:
            self._writers.shutdown(cancel_futures=True)
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        super().close()
