"""The trackers with an open run. Each is finished, also when a script fails or forgets to end.

Exit handlers of the libraries run later than the one here: exit handlers run in reverse order, and the one
here is registered again after each start.
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
    """Return True when the tracker was started here and is not finished."""
    return any(tracker is run for run in _open)


def start(tracker: GeneralTracker) -> None:
    """Begin a run; do nothing if it has begun."""
    global _owner
    if is_open(tracker):
        return
    tracker.start()
    _open.append(tracker)
    _owner = os.getpid()
    atexit.unregister(_finish_at_exit)
    atexit.register(_finish_at_exit)


def finish(trackers: Iterable[GeneralTracker]) -> None:
    """End the open runs among ``trackers``: all of them, also when one raises; then raise its error."""
    # The stack calls the last one pushed first.
    with ExitStack() as stack:
        for tracker in [run for run in trackers if is_open(run)][::-1]:
            _open[:] = [run for run in _open if run is not tracker]
            stack.callback(tracker.finish)


def _finish_at_exit() -> None:
    if os.getpid() != _owner:  # a fork of the process that started the runs
        return
    for tracker in _open:
        # The interpreter sets last_value when it has printed the error that ends the script; an interactive
        # one, which has a prompt, after every error.
        tracker.failed = hasattr(sys, "last_value") and not hasattr(sys, "ps1")
    finish(list(_open))
