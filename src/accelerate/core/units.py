"""Bytes, durations and counts for people: parsed, formatted, and a bar that shows how many bytes are done."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from accelerate.core import environ
from accelerate.core.errors import SettingError

T = TypeVar("T")
# Seconds after which a bar appears.
DELAY = 1.0
QUIET_VARIABLE = "ACCELERATE_QUIET"

_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d{1,2}(?=\s*[a-zA-Z]))?)\s*([kmgtKMGT]?)([iI]?)([bB]?)\s*")


def parse_bytes(text: str | float) -> int:
    """Parse a size: ``"5GB"`` is 5 x 10^9 bytes, ``"5GiB"`` 5 x 2^30, ``"4Gb"`` gigabits; a number is bytes.

    A number with a unit may have an exponent: ``"1e3MB"``.

    Raises:
        SettingError: the text is not a size.
    """
    if isinstance(text, int | float) and math.isfinite(text):
        return int(text)
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise SettingError(f"{text!r} is not a size", fix="write it like '5GB', '5GiB' or a number of bytes")
    number, prefix, binary, unit = match.groups()
    factor = (_BINARY if binary else _DECIMAL)[prefix.lower()]
    # A lower-case b after a prefix is bits, by the field's convention.
    bits = unit == "b" and not binary and bool(prefix)
    return int(float(number) * factor / (8 if bits else 1))


def show_bytes(size: float, base: int = 1024) -> str:
    """Format bytes: ``1610612736`` -> ``"1.50 GB"`` (powers of 1024, as memory tools print them)."""
    amount = float(size)
    for unit in ("bytes", "KB", "MB", "GB"):
        if abs(amount) < base:
            return f"{int(amount)} bytes" if unit == "bytes" else f"{amount:.2f} {unit}"
        amount /= base
    return f"{amount:.2f} TB"


def convert_bytes(size: float) -> str:
    """Format bytes as Accelerate 1.x does: ``1024`` -> ``"1.0 KB"``, ``1.5`` -> ``"1.5 bytes"``; up to PB."""
    amount = size
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if amount < 1024:
            return f"{round(amount, 2)} {unit}"
        amount /= 1024
    return f"{round(amount, 2)} PB"


def show_decimal_bytes(size: float) -> str:
    """Format bytes as ``parse_bytes`` reads them: ``80000000000`` -> ``"80.00 GB"`` (powers of 1000)."""
    return show_bytes(size, 1000)


def show_seconds(seconds: float) -> str:
    """Format seconds: ``0.00042`` -> ``"420 us"``, ``75`` -> ``"1 min 15 s"``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def show_count(count: float) -> str:
    """Format a count: ``8030261248`` -> ``"8.03B"``."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(count) >= size:
            return f"{count / size:.2f}".rstrip("0").rstrip(".") + letter
    return f"{count:g}"


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
