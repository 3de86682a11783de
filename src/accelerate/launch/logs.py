"""The output of each rank: marked with its rank, and kept in a file per rank."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, TextIO

from accelerate.core.errors import LaunchError, SettingError

if TYPE_CHECKING:
    import subprocess

STDOUT, STDERR = 1, 2
_STREAMS = {"0": 0, "1": STDOUT, "2": STDERR, "3": STDOUT | STDERR}


class RankLogSettings:
    """Which output of which rank is marked and logged.

    Args:
        tee: torchrun's notation: 0 none, 1 stdout, 2 stderr, 3 both; or by rank, ``"0:3,1:2"``. None means
            both if there is a folder, else none.
        folder: where the logs go, ``rank_0.log``...; None marks without logging.
        prefix: what stands before each line of a rank.

    Raises:
        SettingError: ``tee`` is not written so.
        LaunchError: the folder cannot be made.
    """

    def __init__(
        self, tee: str | None, folder: str | None, prefix: Callable[[int], str] = "[rank {}] ".format
    ) -> None:
        self.prefix = prefix
        self.default_streams, self.streams_by_rank = _parse_tee(
            tee if tee is not None else "3" if folder else "0"
        )
        self.folder = None if folder is None else Path(folder).expanduser()
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LaunchError(
                    f"the folder {folder} (--log_dir) cannot be made", why=error.strerror or str(error)
                ) from error
            if not os.access(self.folder, os.W_OK):
                raise LaunchError(f"the folder {folder} (--log_dir) cannot be written to")
        self.reader_threads: list[threading.Thread] = []
        self.opened_ranks: set[int] = set()  # by rank; a rank that is started again adds to its log

    @property
    def is_active(self) -> bool:
        """Return whether any output has to pass through the launcher."""
        return bool(self.default_streams) or any(self.streams_by_rank.values())

    def pipes(self, rank: int) -> tuple[int | None, int | None]:
        """(stdout, stderr) to start a rank with."""
        from subprocess import PIPE

        which = self.streams_by_rank.get(rank, self.default_streams)
        return (
            PIPE if which & STDOUT else None,
            PIPE if which & STDERR else None,
        )

    def read(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Begins to read a process's output."""
        if process.stdout is None and process.stderr is None:
            return
        mode = "ab" if rank in self.opened_ranks else "wb"
        self.opened_ranks.add(rank)
        log = None if self.folder is None else (self.folder / f"rank_{rank}.log").open(mode, buffering=0)
        mark = self.prefix(rank).encode()
        for pipe, console in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if pipe is not None:
                pump = threading.Thread(target=_forward_output, args=(pipe, console, log, mark), daemon=True)
                pump.start()
                self.reader_threads.append(pump)

    def finish(self) -> None:
        """Waits for the last lines; a process that a rank left behind may hold a pipe open for ever."""
        for pump in self.reader_threads:
            pump.join(timeout=1.0)


def _parse_tee(tee: str) -> tuple[int, dict[int, int]]:
    try:
        if ":" not in tee:
            return _STREAMS[tee.strip()], {}
        pairs = (part.split(":") for part in tee.split(","))
        return 0, {int(rank): _STREAMS[which.strip()] for rank, which in pairs}
    except (KeyError, ValueError) as error:
        raise SettingError(
            f"--tee is {tee!r}, which says nothing about output",
            fix="write 0 (none), 1 (stdout), 2 (stderr), 3 (both), or by rank: 0:3,1:2",
        ) from error


def _forward_output(pipe: IO[bytes], console: TextIO, log: IO[bytes] | None, mark: bytes) -> None:
    """Passes whole lines on; a carriage return ends a line too, for progress bars."""
    rest = b""
    while chunk := pipe.read1(65536):  # type: ignore[attr-defined]
        lines = (rest + chunk).replace(b"\r\n", b"\n").splitlines(keepends=True)
        rest = b"" if lines[-1].endswith((b"\n", b"\r")) else lines.pop()
        _write_lines(console, mark, lines, log)
    if rest:
        _write_lines(console, mark, [rest + b"\n"], log)
    pipe.close()


def _write_lines(console: TextIO, mark: bytes, lines: list[bytes], log: IO[bytes] | None) -> None:
    if log is not None:
        log.write(b"".join(lines))
    marked = b"".join(mark + line for line in lines)
    if hasattr(console, "buffer"):
        console.buffer.write(marked)
    else:  # a notebook's, which takes text alone
        console.write(marked.decode("utf-8", "replace"))
    console.flush()
