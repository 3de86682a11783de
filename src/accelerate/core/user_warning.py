"""Warnings that point at the line of the user's code which is concerned."""

from __future__ import annotations

import sys
import warnings

# Frames of these packages are not the user's: torch wraps ``optimizer.step``, contextlib wraps contexts.
_LIBRARIES = frozenset({"accelerate", "torch", "contextlib"})


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line outside of this package and of torch."""
    level, frame = 1, sys._getframe(0)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
