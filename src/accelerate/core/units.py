"""Parsing of byte sizes, and formatting of byte sizes, durations and counts."""

from __future__ import annotations

import math
import re

from accelerate.core.errors import SettingError

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


def show_bytes(size: float) -> str:
    """Format bytes: ``1610612736`` -> ``"1.50 GB"`` (powers of 1024, as memory tools print them)."""
    return _format_bytes(size, 1024)


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
    return _format_bytes(size, 1000)


def _format_bytes(size: float, base: int) -> str:
    amount = float(size)
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if abs(amount) < base or unit == "TB":
            return f"{int(amount)} bytes" if unit == "bytes" else f"{amount:.2f} {unit}"
        amount /= base
    raise AssertionError


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
