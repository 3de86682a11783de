"""The trackers whose run is open. Each of them is finished, also when a script fails or forgets to end.

What a library registers at exit itself comes later than this: exit handlers run in reverse order, and the one
here is registered anew after each start.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterable
from contextlib import ExitStack

from accelerate.track.base import GeneralTracker

_open: list[GeneralTracker] = []
_owner = os.getpid()


def is_open(tracker: GeneralTracker) -> bool:
    """Whether it was started here and not finished yet."""
    return any(tracker is known for known in _open)


def start(tracker: GeneralTracker) -> None:
    """Begins a run; nothing if it has begun."""
    global _owner
    if is_open(tracker):
        return
    tracker.start()
    _open.append(tracker)
    _owner = os.getpid()
    atexit.unregister(_finish_at_exit)
    atexit.register(_finish_at_exit)


def finish(trackers: Iterable[GeneralTracker]) -> None:
    """Ends the runs that are open. Every one is ended, whatever another raises; then the error goes on."""
    # The stack calls the last one pushed first.
    with ExitStack() as stack:
        for tracker in [known for known in trackers if is_open(known)][::-1]:
            _open[:] = [known for known in _open if known is not tracker]
            stack.callback(tracker.finish)


def _finish_at_exit() -> None:
    if os.getpid() != _owner:  # a fork of the process that started them
        return
    for tracker in _open:
        # The interpreter sets it when it has printed the error that ends the script; an interactive one,
        # which has a prompt, after every error.
        tracker.failed = hasattr(sys, "last_value") and not hasattr(sys, "ps1")
    finish(list(_open))
