"""A progress bar of long internal work: on a terminal, on rank 0, and where it takes longer than a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from accelerate.core import environ

T = TypeVar("T")
# Seconds after which a bar appears.
DELAY = 1.0
QUIET_VARIABLE = "ACCELERATE_QUIET"


class ProgressBar:
    """A bar over bytes on stderr; a context. It goes when the work is done.

    It does nothing where stderr is no terminal, on another rank than 0, under ``--quiet``
    (``ACCELERATE_QUIET``), and in the first second. Threads may share one.

    Args:
        description: what is done, ``"loading weights"``.
        total: bytes; None where nobody knows how long it takes.
    """

    def __init__(self, description: str, total: int | None) -> None:
        self._description, self._total = description, total
        self._is_shown = (
            total != 0
            and getattr(sys.stderr, "isatty", bool)()
            and environ.get("RANK", "0") == "0"
            and not environ.get_flag(QUIET_VARIABLE)
        )
        self._begin = time.monotonic()
        self._done = 0
        self._bar: Any = None

    def __enter__(self) -> ProgressBar:
        if self._is_shown and self._total is None:
            self._open()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._is_shown = False

    def advance(self, size: int) -> None:
        """Say that so many more bytes are done."""
        if not self._is_shown:
            return
        self._done += size
        if self._bar is not None:
            self._bar.advance(self._task, size)
        elif time.monotonic() - self._begin >= DELAY:
            self._open()

    def count_writes(self, file: T) -> T:
        """Return a file that advances the bar with what is written to it; without a bar, the file itself."""
        return _CountingFile(file, self) if self._is_shown else file  # type: ignore[return-value]

    def count_fill(self, fill: Callable[[Any], T]) -> Callable[[Any], T]:
        """Return a function that writes a file as ``fill`` does, and advances the bar."""
        return lambda file: fill(self.count_writes(file))

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TimeRemainingColumn

        columns = (BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
        shown = (SpinnerColumn(),) if self._total is None else columns
        console = Console(stderr=True)
        self._bar = Progress("{task.description}", *shown, console=console, transient=True)
        self._task = self._bar.add_task(self._description, total=self._total, completed=self._done)
        self._bar.start()


class _CountingFile:
    """A file opened for writing, whose writes advance a bar."""

    def __init__(self, file: Any, bar: ProgressBar) -> None:
        self._file, self._bar = file, bar

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> Any:
        """Write, and advance the bar by the size of the data."""
        written = self._file.write(data)
        self._bar.advance(memoryview(data).nbytes)
        return written
