"""A plain text file: one line of JSON for each record. Needs no package."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from accelerate.core.errors import AccelerateError, SettingError
from accelerate.core.user_warning import warn_user
from accelerate.track.base import GeneralTracker, on_main_process, to_json_types
from accelerate.track.protocol.media import to_table

if sys.platform != "win32":
    import fcntl

_FIXES = {
    errno.ENOSPC: "free some space on the disk",
    errno.EDQUOT: "free some of your quota",
    errno.EACCES: "give another project_dir=, or the right to write there",
    errno.EROFS: "give another project_dir=: this file system is read-only",
}
# Errors of file systems without locks: there, two runs of one name at one time share the file.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


class TrackerFileError(AccelerateError, OSError):
    """The file of a run cannot be written."""


class JSONLTracker(GeneralTracker):
    """Appends to ``logging_dir/run_name.jsonl``. Run here: no package is needed.

    Each line is an object with ``time`` (seconds since 1970) and one of:

        {"start": run_name}          a run begins; several runs of one name follow each other
        {"config": {...}}            its hyperparameters
        {"step": n, "values": {...}} what was logged; ``step`` is null without one
        {"table": name, "columns": [...], "rows": [[...], ...], "step": n}
        {"artifact": path, "bytes": n, "folder": name}   a file, which stays where it is
        {"end": "finished"}          or "failed"; a run that was killed has none

    A line is given to the system when the call returns, by one write, so that a crash loses none. The
    numbers that JSON does not have are the texts "NaN", "Infinity" and "-Infinity", as protocol buffers write
    them. While another run writes the file, a run takes ``run_name-2.jsonl``, and says so.

    Online: nothing is sent.
    Offline: always.
    Files: ``logging_dir/run_name.jsonl``.
    Resume: a run of the same name appends.

    Args:
        run_name: name of the file; may contain folders.
        logging_dir: where it lies.
    """

    name = "jsonl"
    requires_logging_directory = True
    # Nobody has installed it, so a script that starts all trackers gets no files of it.
    in_all = False

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self.run_name = run_name
        self.path = Path(logging_dir, f"{run_name}.jsonl")
        self._file: int | None = None

    @property
    def tracker(self) -> Path:
        """The file."""
        return self.path

    @on_main_process
    def start(self) -> None:
        """Open the file.

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
        self._write(start=self.run_name)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write the configuration; what JSON has no type for is written as text."""
        self._write(config=to_json_types(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write one line.

        Raises:
            SettingError: there are ``kwargs``: a file has no options.
            TrackerFileError: the disk is full, or gone. The lines before stay whole.
        """
        self.refuse_options("log", kwargs)
        self._write(step=step, values=values)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a table, given by its rows or as a data frame.

        Raises:
            SettingError: there are ``kwargs``: a file has no options.
        """
        self.refuse_options("log_table", kwargs)
        table = to_table(table_name, columns, data, dataframe)
        self._write(step=step, table=table_name, columns=table.columns, rows=table.rows)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Write the path and the size of a file, which is not copied."""
        path = os.path.abspath(local_path)
        self._write(artifact=path, bytes=os.path.getsize(path), folder=artifact_path)

    @on_main_process
    def finish(self) -> None:
        """Close the file."""
        if self._file is None:
            return
        try:
            self._write(end="failed" if self.failed else "finished")
        finally:
            file, self._file = self._file, None
            _set_lock(file, locked=False)
            os.close(file)

    def _write(self, **record: Any) -> None:
        if self._file is None:
            raise SettingError(f"the run {self.run_name!r} is not open", fix="call start() first")
        line = _encode({"time": time.time(), **record}).encode() + b"\n"
        try:
            written = os.write(self._file, line)
            if written < len(line):  # the disk is full: what is in the file stays whole lines
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._file_error(error) from error

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
    except BlockingIOError:
        os.close(file)
        return None
    return file


def _set_lock(file: int, locked: bool) -> None:
    """Lock or unlock an open file. Closing it does not unlock it while a forked worker has it open."""
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if locked else fcntl.LOCK_UN)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise


def _ends_with_newline(file: int) -> bool:
    size = os.fstat(file).st_size
    if size > 0:
        os.lseek(file, size - 1, os.SEEK_SET)
    return size == 0 or os.read(file, 1) == b"\n"


def _encode(record: dict[str, Any]) -> str:
    """Return one line of JSON; numbers that are not finite become text."""
    try:
        return _ENCODER.encode(record)
    except (ValueError, TypeError):  # NaN or infinity somewhere; a key that JSON does not have
        return _ENCODER.encode(_finite(to_json_types(record)))


_ENCODER = json.JSONEncoder(allow_nan=False, default=to_json_types)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


PLUGIN = JSONLTracker
