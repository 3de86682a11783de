"""Asynchronous saves: a checkpoint is written while training goes on, at most one per process.

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

from accelerate.checkpoint.mapped_optimizer_state import MappedOptimizerState
from accelerate.checkpoint.rank_group import BackgroundSaveError, CheckpointRankGroup
from accelerate.checkpoint.storage_urls import Address
from accelerate.core.errors import AccelerateError
from accelerate.world import world as worlds

FAILED = 1  # exit status


class AsyncSave:
    """One save that runs in a thread of its own.

    Args:
        path: the checkpoint, as the user named it.
        finish: writes and commits it.
        within: entered by the thread around ``finish``.
    """

    def __init__(
        self, path: Address | str, finish: Callable[[], None], context: AbstractContextManager[object]
    ) -> None:
        self.path, self._finish, self._context = path, finish, context
        self.error: BaseException | None = None
        # A daemon thread: ``join`` waits for it at the exit, and a second Ctrl-C ends that.
        self._thread = threading.Thread(target=self._run, name="accelerate-save", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        finish, within = self._finish, self._context
        del self._finish, self._context  # frees the copies as soon as they are written
        try:
            with within:
                finish()
        except BaseException as error:  # noqa: BLE001 - it is raised by the next call
            self.error = error

    def join(self) -> None:
        """Wait until the save has ended."""
        self._thread.join()

    def failure(self) -> BackgroundSaveError | None:
        """Return the error of a failed save in the user's words; None if it has not failed."""
        error = self.error
        if error is None:
            return None
        message, reason, fix = f"{type(error).__name__}: {error}", "", ""
        if isinstance(error, AccelerateError):
            message, reason, fix = error.what, error.why, error.fix
        failure = BackgroundSaveError(
            f"saving {self.path} in the background failed: {message}", why=reason, fix=fix
        )
        failure.__cause__ = error
        return failure


_current: AsyncSave | None = None
_failed_at_exit = False


def start(path: Address | str, finish: Callable[[], None], context: AbstractContextManager[object]) -> None:
    """Start a save in the background; the save before must have been waited for."""
    global _current
    assert _current is None
    worlds.add_close_action(join)
    _join_at_exit()
    _current = AsyncSave(path, finish, context)


@cache
def _join_at_exit() -> None:
    """Register ``join`` to run before thread pools and the world are closed.

    The functions of ``atexit`` come after that, and Python has no public name for what comes earlier.
    """
    register = getattr(threading, "_register_atexit", atexit.register)
    register(join)
    atexit.register(_at_exit)


def join() -> None:
    """Wait until nothing is being written; a failure is kept for ``wait``."""
    if _current is not None:
        _current.join()


def wait() -> Address | None:
    """Wait for the save in the background; return its checkpoint once committed, None if there was none.

    Raises:
        BackgroundSaveError: it failed, on all ranks; what was there before is as it was.
        CheckpointError: a file was changed while an optimizer state was still taken from it.
    """
    global _current
    MappedOptimizerState.wait_copied()
    join()
    flight, _current = _current, None
    if flight is None:
        return None
    failure = flight.failure()
    if failure is not None:
        raise failure
    return flight.path


def wait_on_all_ranks(action: str) -> None:
    """Wait for the save in the background on all ranks, before they do something together."""
    with CheckpointRankGroup.current().collective_section(action):
        wait()


def _at_exit() -> None:
    global _current, _failed_at_exit
    join()
    flight, _current = _current, None
    failure = flight.failure() if flight is not None else None
    if failure is not None:
        _failed_at_exit = True
        sys.stderr.write(f"{type(failure).__name__}: {failure}\n")


def _exit_with_failure() -> None:
    """End the process with status 1 after a failure: Python ignores what an ``atexit`` function raises."""
    if _failed_at_exit:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(FAILED)


def _reset_after_fork() -> None:
    """Forget the save in a forked process, for example a data loader's worker, which has no such thread."""
    global _current
    _current = None


# Registered first, so it runs last of this package's.
atexit.register(_exit_with_failure)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
