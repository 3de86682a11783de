"""A file of records: one line of JSON for each, whole whatever happens to the process."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from accelerate.core.errors import AccelerateError, SettingError, warn_user
from accelerate.track.protocol.logged_values import to_json_types

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_FIXES = {
    errno.ENOSPC: "free some space on the disk",
    errno.EDQUOT: "free some of your quota",
    errno.EACCES: "give another project_dir=, or the right to write there",
    errno.EROFS: "give another project_dir=: this file system is read-only",
}
# Errors of file systems without locks: there, two runs of one name at one time share the file.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
# Windows locks bytes, and nobody else may read them: this one is behind the end of any log.
_LOCKED_BYTE = 2**40


class TrackerFileError(AccelerateError, OSError):
    """The file of a run cannot be written."""


class JSONLinesFile:
    """A file to which one process appends records.

    A line is given to the system when the call returns, by one write, so that a crash loses none. The
    numbers that JSON does not have are the texts "NaN", "Infinity" and "-Infinity", as protocol buffers write
    them. While another run writes the file, this one takes ``name-2.jsonl``, and says so.

    Args:
        path: of the file; its folder is made.

    Attributes:
        path: of the file that is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    def open(self) -> None:
        """Open the file and lock it.

        Raises:
            TrackerFileError: it cannot be made.
        """
        requested = self.path
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            number = 1
            while (file := _open_locked(self.path)) is None:
                number += 1
                self.path = requested.with_name(f"{requested.stem}-{number}{requested.suffix}")
            self._file = file
            if not _ends_with_newline(file):  # a run that was killed in the middle of a line
                os.write(file, b"\n")
        except OSError as error:
            raise self._file_error(error) from error
        if self.path != requested:
            warn_user(f"another run writes {requested} now: this one writes {self.path}")

    @property
    def is_open(self) -> bool:
        """Return whether records can be written."""
        return self._file is not None

    def write(self, **record: Any) -> None:
        """Write one line: the record, and its ``time`` in seconds since 1970.

        Raises:
            SettingError: the file is not open.
            TrackerFileError: the disk is full, or gone. The lines before stay whole.
        """
        if self._file is None:
            raise SettingError(f"the run {self.path.stem!r} is not open", fix="call start() first")
        line = _encode({"time": time.time(), **record})
        try:
            written = os.write(self._file, line)
            if written < len(line):  # the disk is full: what is in the file stays whole lines
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._file_error(error) from error

    def close(self) -> None:
        """Unlock the file and close it."""
        if self._file is not None:
            file, self._file = self._file, None
            _set_lock(file, locked=False)
            os.close(file)

    def _file_error(self, error: OSError) -> TrackerFileError:
        return TrackerFileError(
            f"cannot write {self.path}",
            why=error.strerror or str(error),
            fix=_FIXES.get(error.errno or 0, "give another project_dir="),
        )


def _open_locked(path: Path) -> int | None:
    """Open a file to append to it; return None when another run has it open."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
    try:
        # The lock belongs to the open file and ends with it, also when the process is killed.
        _set_lock(file, locked=True)
    except (BlockingIOError, PermissionError):  # the second one on Windows
        os.close(file)
        return None
    return file


def _set_lock(file: int, locked: bool) -> None:
    """Lock or unlock an open file. Closing it does not unlock it while a forked worker has it open."""
    try:
        if sys.platform == "win32":
            os.lseek(file, _LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(file, msvcrt.LK_NBLCK if locked else msvcrt.LK_UNLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if locked else fcntl.LOCK_UN)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _ends_with_newline(file: int) -> bool:
    size = os.fstat(file).st_size
    if size > 0:
        os.lseek(file, size - 1, os.SEEK_SET)
    return size == 0 or os.read(file, 1) == b"\n"


def _encode(record: dict[str, Any]) -> bytes:
    """Return one line of JSON; numbers that are not finite become text.

    msgspec takes a tenth of the time of ``json``, and writes ``null`` for a number that is not finite, too.
    """
    try:
        line = _ENCODER.encode(record)
    except (ValueError, TypeError):  # a key that JSON does not have, or a text that UTF-8 does not
        line = b""
    if not line or (b"null" in line and line.count(b"null") != [*record.values()].count(None)):
        line = json.dumps(_finite(to_json_types(record)), allow_nan=False).encode()
    return line + b"\n"


def _leaf_to_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        raise TypeError("a key that JSON does not have")
    return to_json_types(value)


_ENCODER = msgspec.json.Encoder(enc_hook=_leaf_to_json)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
