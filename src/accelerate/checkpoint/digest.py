"""Digests of files, taken while they are written or from what is on the disk.

The digest of a file is the XXH3 digest (128 bits) over those of its 64 MiB pieces, in order, as hex: so
several threads can check one file. It finds what disks, networks and hands damage; it is not a signature.
Source: Collet, "xxHash", https://xxhash.com.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from accelerate.checkpoint.direct_io import DirectIOAppendFile

HASH = "xxh3_128"
PIECE = 64 * 2**20
HASHING = f"{HASH}, pieces of {PIECE} bytes"
_CHUNK = 2**20  # of reading: it stays in the cache of a core until it is hashed
_SLICE = 2**19  # of writing: how long other threads of Python may have to wait
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


def file_digests(paths: Sequence[Path], hashing: str = HASHING, threads: int | None = None) -> list[str]:
    """Return the digest of each file, computed by several threads.

    The pieces of all files are shared out, so one large file keeps all threads busy, and so do many small
    ones.

    Args:
        paths: the files.
        hashing: how, as a manifest states it.
        threads: how many hash; all cores when None.

    Raises:
        OSError: a file cannot be read.
    """
    new = _HASHES[hashing.partition(",")[0]]
    counts = [max(1, -(-path.stat().st_size // PIECE)) for path in paths]
    pieces = [(path, index) for path, count in zip(paths, counts, strict=True) for index in range(count)]
    workers = min(len(pieces), threads or usable_cores())
    if workers <= 1:
        piece_digests = iter([_piece(path, index, new()) for path, index in pieces])
    else:
        with ThreadPoolExecutor(workers, "digest") as pool:
            piece_digests = iter(list(pool.map(lambda piece: _piece(piece[0], piece[1], new()), pieces)))
    return [new(b"".join(islice(piece_digests, count))).hexdigest() for count in counts]


def usable_cores() -> int:
    """Return the number of threads that can run at once in this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


def _piece(path: Path, index: int, state: Any) -> bytes:
    remaining, buffer = PIECE, memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        file.seek(index * PIECE)
        while remaining > 0:
            count = file.readinto(buffer[: min(remaining, _CHUNK)])
            if not count:
                break
            state.update(buffer[:count])
            remaining -= count
    return state.digest()


class Digester:
    """A digest over bytes that come one after the other."""

    def __init__(self) -> None:
        self.size = 0
        self._pieces: list[bytes] = []
        self._piece = xxhash.xxh3_128()

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


class DigestingFile(io.RawIOBase):
    """A new file that knows its digest; bytes can only be added at its end.

    Attributes:
        digester: of what is written so far.
    """

    def __init__(self, path: Path) -> None:
        self.digester = Digester()
        self._file = DirectIOAppendFile(path)

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any, /) -> int:
        """Write all of ``data``; return its number of bytes. A failure may show at a later call."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            copied = self._file.add(view[done : done + _SLICE])
            self.digester.update(copied)
            done += len(copied)
        return done

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.digester.size

    def sync(self) -> None:
        """Wait until all of it is on the disk; nothing can be written afterwards."""
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._file.close()
        super().close()
