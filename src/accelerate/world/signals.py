"""Signal handling for a clean stop, also while the main thread is in C code.

Python runs a handler in the main thread between two instructions, so never during a collective that waits.
But the interpreter writes the signal number into a pipe at once (``signal.set_wakeup_fd``), and a thread can
wait for that. If other code has replaced the wake-up pipe, the handler itself reports the signal, later.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

# Signals that announce the end of a job. Ctrl-C is not one: it ends a job at once.
PREEMPTION_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU")
if sys.platform == "win32":
    PREEMPTION_SIGNALS = ("SIGTERM",)
_WAKE_BYTE = b"\0"  # byte in the pipe: a handler ran; 0 is no signal

_current: SignalHandler | None = None


class SignalHandler:
    """Catches signals in this process; there is one at a time.

    Attributes:
        received: the number of a signal that came, or None.
    """

    def __init__(self) -> None:
        global _current
        self.received: int | None = None
        self._previous_handlers: dict[int, Any] = {}
        self._pipe_counts: Counter[int] = Counter()  # signals read from the pipe
        self._handler_counts: Counter[int] = Counter()  # signals seen by the handler
        self._reported_counts: Counter[int] = Counter()  # signals returned by ``wait``
        self._previous_wakeup_fd = -1
        self._reader, self._writer = os.pipe()
        if hasattr(os, "set_blocking"):  # not on Windows before Python 3.12
            os.set_blocking(self._reader, False)
            os.set_blocking(self._writer, False)
        _current = self

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the caught signals."""
        return tuple(self._previous_handlers)

    def catch(self, numbers: Iterable[int]) -> bool:
        """Catch these signals too; do nothing and return False outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if not self._previous_handlers:
            self._previous_wakeup_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in numbers:
            if number in self._previous_handlers:
                continue
            before = self._previous_handlers[number] = signal.getsignal(number)
            signal.signal(number, self._handle)
            if not callable(before) and hasattr(signal, "siginterrupt"):
                # A save in a library must not see an interrupted system call. A handler of the user may rely
                # on the interruption.
                signal.siginterrupt(number, False)
        return True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread: take no lock, and leave the rest to ``wait``."""
        self._handler_counts[number] += 1
        self.received = number
        self.wake()
        before = self._previous_handlers.get(number)
        if callable(before):
            before(number, frame)

    def wake(self) -> None:
        """Make ``wait`` return."""
        with suppress(BlockingIOError):  # the pipe is full, so ``wait`` returns anyway
            os.write(self._writer, _WAKE_BYTE)

    def wait(self, seconds: float | None) -> list[int]:
        """Return the signals since the last call, each as often as it came; empty after ``seconds``."""
        data = b""
        if sys.platform == "win32":  # nothing waits for a pipe there; the handler counts what comes
            time.sleep(0.05 if seconds is None else min(seconds, 0.05))
        else:
            poll = select.poll()  # select.select takes no descriptor above 1023
            poll.register(self._reader, select.POLLIN)
            if poll.poll(None if seconds is None else 1000 * seconds):
                data = os.read(self._reader, 4096)
        signals = data.replace(_WAKE_BYTE, b"")
        if self._previous_wakeup_fd >= 0 and signals:  # the wake-up pipe of an event loop, for example
            with suppress(BlockingIOError):
                os.write(self._previous_wakeup_fd, signals)
        # A handler installed later by other code replaces this one, unless it calls it.
        handled = [number for number in signals if signal.getsignal(number) == self._handle]
        self._pipe_counts.update(handled)
        new: list[int] = []
        for number in self._previous_handlers:
            count = max(self._pipe_counts[number], self._handler_counts[number])
            new += [number] * (count - self._reported_counts[number])
            self._reported_counts[number] = count
        if new:
            self.received = new[0]
        return new

    def restore_handlers(self) -> None:
        """Restore the previous handlers that other code has not replaced since; main thread only."""
        global _current
        for number, before in self._previous_handlers.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        if self._previous_handlers:
            self._restore_wakeup_fd(self._previous_wakeup_fd)
        self._previous_handlers.clear()
        if _current is self:
            _current = None

    def _restore_wakeup_fd(self, other: int) -> None:
        now = signal.set_wakeup_fd(other)
        if now != self._writer:  # other code has replaced it
            signal.set_wakeup_fd(now)

    def close(self) -> None:
        """Close the pipe, once no thread waits for it."""
        os.close(self._reader)
        os.close(self._writer)

    def reset_in_child(self) -> None:
        """Restore default signal handling in a forked process, and detach it from the parent's pipe.

        Schedulers signal every process of a job. A loader's worker must not die of a user signal, which would
        end the parent's loop with an error, so user signals without a previous handler are ignored.
        """
        self._restore_wakeup_fd(-1)
        for number, before in self._previous_handlers.items():
            user = number in (signal.SIGUSR1, signal.SIGUSR2)
            default = signal.SIG_IGN if user else signal.SIG_DFL
            signal.signal(number, default if before in (None, signal.SIG_DFL) else before)


def _reset_in_child() -> None:
    global _current
    handler, _current = _current, None
    if handler is not None and handler.numbers:
        handler.reset_in_child()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_reset_in_child)
