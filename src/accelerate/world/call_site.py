"""The line of user code that called a collective: ``train.py:12``. Cheap enough for every call."""

from __future__ import annotations

import os
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

# Frames of this package and of the standard library's wrappers are not user code.
_PACKAGE_PREFIXES = (str(Path(__file__).parents[1]) + os.sep, "<frozen")
_CONTEXT = "contextlib.py"


class CallSite(NamedTuple):
    """A line of the user's code.

    Attributes:
        file, line: the source position.
        function: name of the function; ``<module>`` at module level.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


# By the code's identity, which the entry keeps alive: hashing the code itself would cost more than the rest.
_cache: dict[tuple[int, int], tuple[CallSite, CodeType]] = {}
_UNKNOWN = CallSite("<unknown>", 0, "")


def find_call_site(frame: FrameType | None, extra_prefixes: tuple[str, ...] = ()) -> CallSite:
    """Return the innermost line of user code at or above a frame; the outermost line if there is none.

    Args:
        frame: the frame to start from.
        extra_prefixes: more folders whose code is not the user's.
    """
    prefixes = _PACKAGE_PREFIXES + extra_prefixes if extra_prefixes else _PACKAGE_PREFIXES
    if frame is None:
        return _UNKNOWN
    while True:
        code, outer = frame.f_code, frame.f_back
        name = code.co_filename
        if outer is None or not (name.startswith(prefixes) or name.endswith(_CONTEXT)):
            break
        frame = outer
    key = id(code), frame.f_lasti
    entry = _cache.get(key)
    if entry is None:
        # A generator of code (a notebook, exec in a loop) must not fill the memory.
        if len(_cache) > 4096:
            _cache.clear()
        entry = _cache[key] = CallSite(code.co_filename, frame.f_lineno, code.co_name), code
    return entry[0]
