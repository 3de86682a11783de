"""Warnings that point at the line of the user's code which is concerned."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

# Frames of these packages are not the user's: torch wraps ``optimizer.step``, contextlib wraps contexts.
_LIBRARIES = frozenset({"accelerate", "torch", "contextlib"})


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line outside of this package and of torch."""
    level, _ = _user_frame(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
    warnings.warn(message, category, stacklevel=level + 1)


def user_line() -> str:
    """Return the innermost line outside of this package and of torch, as ``file.py:12``."""
    _, frame = _user_frame(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _user_frame(frame: FrameType) -> tuple[int, FrameType]:
    """Return (how many frames it is above ``frame``, counted from 1; the innermost frame of the user)."""
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level, frame
