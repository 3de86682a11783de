"""Digests and the files that take them: equal however the bytes come, and blind to nothing."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import xxhash

from accelerate.checkpoint import file_access
from accelerate.checkpoint.file_access import DurableFile, file_digest

SIZES = (0, 1, 4095, 4096, 12_288, 12_289, 20_480, 100_001)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces, blocks and slices so small that every file has several."""
    monkeypatch.setattr(file_access, "PIECE", 10_000)
    monkeypatch.setattr(file_access, "_CHUNK", 999)
    monkeypatch.setattr(file_access, "_SLICE", 3000)
    monkeypatch.setattr(file_access, "BLOCK", 4096)


def content(size: int) -> bytes:
    return bytes((i * i + i // 251) % 256 for i in range(size))


def write_digested(path: Path, data: bytes, chunk: int) -> str:
    with DurableFile(path) as file:
        for start in range(0, len(data), chunk):
            part = data[start : start + chunk]
            assert file.write(part) == len(part)
            assert file.tell() == start + len(part)
        file.sync()
        return file.digester.hexdigest()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("chunk", [7, 4096, 10_000, 1_000_000])
def test_the_digest_is_that_of_the_pieces_however_the_bytes_came(
    tmp_path: Path, size: int, chunk: int
) -> None:
    path, data = tmp_path / "file", content(size)
    pieces = [data[start : start + 10_000] for start in range(0, size, 10_000)] or [b""]
    by_hand = xxhash.xxh3_128(b"".join(xxhash.xxh3_128(piece).digest() for piece in pieces)).hexdigest()
    assert write_digested(path, data, chunk) == by_hand
    assert path.read_bytes() == data
    assert {file_digest(path, threads=threads) for threads in (1, 2, 5)} == {by_hand}


def test_many_files_at_once_give_each_its_own_digest(tmp_path: Path) -> None:
    paths = [tmp_path / str(size) for size in SIZES]
    expected = [write_digested(path, content(size), 5000) for path, size in zip(paths, SIZES, strict=True)]
    for threads in (1, 3):
        assert file_access.file_digests(paths, threads=threads) == expected
    assert file_access.file_digests([]) == []


def test_a_flipped_bit_anywhere_changes_the_digest(tmp_path: Path) -> None:
    """D2: first and last byte, and both sides of every border of pieces."""
    path, data = tmp_path / "file", content(35_000)
    whole = write_digested(path, data, 4096)
    for place in (0, 9_999, 10_000, 19_999, 20_000, 29_999, 30_000, 34_999):
        damaged = bytearray(data)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        assert file_digest(path, threads=3) != whole
    path.write_bytes(data[10_000:20_000] + data[:10_000] + data[20_000:])
    assert file_digest(path) != whole


def test_a_file_of_any_type_of_data_is_taken(tmp_path: Path) -> None:
    import numpy as np

    values = np.arange(30_000, dtype=np.float64)
    with DurableFile(tmp_path / "file") as file:
        assert file.write(values.data) == values.nbytes
        file.sync()
    assert (tmp_path / "file").read_bytes() == values.tobytes()


def refuse_blocks(code: int) -> tuple[list[int], object]:
    """A ``pwrite`` that fails for whole blocks, and the flags of the file when it was called."""
    flags: list[int] = []
    real = os.pwrite

    def pwrite(handle: int, data: memoryview, at: int) -> int:
        import fcntl

        flags.append(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT)
        if len(flags) == 1:
            raise OSError(code, os.strerror(code))
        return real(handle, data, at)

    return flags, pwrite


@pytest.mark.skipif(sys.platform != "linux", reason="O_DIRECT is Linux's")
def test_a_file_system_that_refuses_direct_writes_gets_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, pwrite = refuse_blocks(errno.EINVAL)
    monkeypatch.setattr(os, "pwrite", pwrite)
    data = content(50_000)
    write_digested(tmp_path / "file", data, 3000)
    assert (tmp_path / "file").read_bytes() == data
    assert flags[-1] == 0


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pwrite")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_of_a_writing_thread_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """D1: a disk that is full in the middle is never taken for a file that was written."""
    _, pwrite = refuse_blocks(code)
    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        write_digested(tmp_path / "file", content(50_000), 3000)
    assert caught.value.errno == code


def test_without_pwrite_the_file_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = write_digested(tmp_path / "a", content(50_000), 3000)
    monkeypatch.setattr(file_access, "_HAS_PWRITE", False)
    assert write_digested(tmp_path / "b", content(50_000), 3000) == expected == file_digest(tmp_path / "b")


@contextmanager
def small_limit() -> Iterator[None]:
    """Files of this process may have 20,000 bytes; the one to which the tests are logged may have more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_limit_of_the_system_is_an_error(tmp_path: Path) -> None:
    with small_limit(), pytest.raises(OSError, match="File too large"):
        write_digested(tmp_path / "file", content(50_000), 3000)
