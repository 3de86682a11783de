"""The save that is written while training goes on: at most one per process.

A thread runs what a synchronous save runs after it has collected the states. Whoever needs it finished calls
``wait``: the next save, a load, the user, the end of the training. A world that closes and an interpreter
that exits let it finish too, also after an error. A failure that nobody heard of by then is printed, and the
process ends with status 1.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - what it registers for the exit must come after ``join``
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache

from accelerate.checkpoint.loan import Loan
from accelerate.checkpoint.places import Address
from accelerate.checkpoint.ranks import BackgroundSaveError, Ranks
from accelerate.core.errors import AccelerateError
from accelerate.world import world as worlds

FAILED = 1  # exit status


class Flight:
    """One save in the background.

    Args:
        path: the checkpoint, as the user named it.
        finish: writes and commits it.
        within: entered by the thread around ``finish``.
    """

    def __init__(
        self, path: Address | str, finish: Callable[[], None], within: AbstractContextManager[object]
    ) -> None:
        self.path, self._finish, self._within = path, finish, within
        self.error: BaseException | None = None
        # A daemon: ``join`` waits for it at the exit, and a second Ctrl-C ends that.
        self._thread = threading.Thread(target=self._run, name="accelerate-save", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        finish, within = self._finish, self._within
        del self._finish, self._within  # with them the copies go as soon as they are written
        try:
            with within:
                finish()
        except BaseException as error:  # noqa: BLE001 - it is raised by the next call
            self.error = error

    def join(self) -> None:
        """Returns when it has ended."""
        self._thread.join()

    def failure(self) -> BackgroundSaveError | None:
        """Why it failed, for the user."""
        error = self.error
        if error is None:
            return None
        what, why, fix = f"{type(error).__name__}: {error}", "", ""
        if isinstance(error, AccelerateError):
            what, why, fix = error.what, error.why, error.fix
        told = BackgroundSaveError(f"saving {self.path} in the background failed: {what}", why=why, fix=fix)
        told.__cause__ = error
        return told


_flight: Flight | None = None
_failed_at_exit = False


def begin(path: Address | str, finish: Callable[[], None], within: AbstractContextManager[object]) -> None:
    """Begins to save in the background; the save before must have been waited for."""
    global _flight
    assert _flight is None
    worlds.before_close(join)
    _join_at_exit()
    _flight = Flight(path, finish, within)


@cache
def _join_at_exit() -> None:
    """Before the pools of threads close, which writing uses, and before the world does.

    The functions of ``atexit`` come after that, and Python has no public name for what comes earlier.
    """
    register = getattr(threading, "_register_atexit", atexit.register)
    register(join)
    atexit.register(_at_exit)


def join() -> None:
    """Returns when nothing is written any more; a failure is kept for ``wait``."""
    if _flight is not None:
        _flight.join()


def wait() -> Address | None:
    """The checkpoint that was written in the background, once it is committed; None if there was none.

    Raises:
        BackgroundSaveError: it failed, on all ranks; what was there before is as it was.
        CheckpointError: a file was changed while an optimizer state was still taken from it.
    """
    global _flight
    Loan.settle()
    join()
    flight, _flight = _flight, None
    if flight is None:
        return None
    failure = flight.failure()
    if failure is not None:
        raise failure
    return flight.path


def settle(doing: str) -> None:
    """Waits for the save in the background on all ranks, before they do something together."""
    with Ranks.current().together(doing):
        wait()


def _at_exit() -> None:
    global _flight, _failed_at_exit
    join()
    flight, _flight = _flight, None
    failure = flight.failure() if flight is not None else None
    if failure is not None:
        _failed_at_exit = True
        sys.stderr.write(f"{type(failure).__name__}: {failure}\n")


def _end() -> None:
    """Says by the exit status that something failed: Python ignores what an ``atexit`` function raises."""
    if _failed_at_exit:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILED)


def _forget() -> None:
    """A forked process, for example a worker of a loader, has not this thread."""
    global _flight
    _flight = None


# Registered first, so it runs last of this package's.
atexit.register(_end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
