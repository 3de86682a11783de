"""Where in the user's code a collective was called: ``train.py:12``. Cheap enough for every call."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

# Frames of this package, and of what it calls through, are not the user's.
_OURS = (str(Path(__file__).parents[1]) + os.sep, "<frozen")
_CONTEXT = "contextlib.py"


class Site(NamedTuple):
    """A line of the user's code.

    Attributes:
        file, line: where.
        function: in which function; ``<module>`` outside of any.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


# By the code's identity, which the entry keeps alive: hashing the code itself would cost more than the rest.
_known: dict[tuple[int, int], tuple[Site, CodeType]] = {}
_NOWHERE = Site("<unknown>", 0, "")


def here() -> Site:
    """The line of the user's code that is being executed in this thread."""
    return of(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]


def of(frame: FrameType | None, beyond: tuple[str, ...] = ()) -> Site:
    """The innermost line of the user's code at or above a frame; the outermost line, when there is no other.

    Args:
        frame: where to begin.
        beyond: folders whose code is not the user's either.
    """
    between = _OURS + beyond if beyond else _OURS
    outermost = frame
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        if not (name.startswith(between) or name.endswith(_CONTEXT)):
            return _site(code, frame)
        outermost, frame = frame, frame.f_back
    return _NOWHERE if outermost is None else _site(outermost.f_code, outermost)


def _site(code: CodeType, frame: FrameType) -> Site:
    key = id(code), frame.f_lasti
    found = _known.get(key)
    if found is None:
        # A generator of code (a notebook, exec in a loop) must not fill the memory.
        if len(_known) > 4096:
            _known.clear()
        found = _known[key] = Site(code.co_filename, frame.f_lineno, code.co_name), code
    return found[0]
