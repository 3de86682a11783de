"""Errors of files in the user's words."""

from __future__ import annotations

import errno
import os
import pickle
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

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
