"""Signals that a process catches to stop in good order, heard by a thread while the main thread is in C code.

Python runs a handler in the main thread between two of its instructions: never, in a collective that waits.
But the interpreter writes the signal's number into a pipe at once (``signal.set_wakeup_fd``), and a thread
can wait for that. Where something else has taken the pipe over, the handler itself is heard, later.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

# What announces the end of a job, and nothing else. Ctrl-C ends a job at once, as everywhere.
ANNOUNCE = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU")
_HANDLED = b"\0"  # in the pipe: a handler ran; 0 is no signal

_current: Catcher | None = None
_at_fork = False


class Catcher:
    """The signals that this process catches; there is one at a time.

    Attributes:
        caught: one of them came.
        catches: their numbers.
    """

    def __init__(self) -> None:
        global _current, _at_fork
        self.caught: int | None = None
        self._before: dict[int, Any] = {}
        self._seen: Counter[int] = Counter()  # in the pipe
        self._ran: Counter[int] = Counter()  # by the handler
        self._told: Counter[int] = Counter()  # by ``wait``
        self._other = -1
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        _current = self
        if not _at_fork:
            _at_fork = True
            os.register_at_fork(after_in_child=_leave_child)

    @property
    def catches(self) -> tuple[int, ...]:
        """Numbers of the signals."""
        return tuple(self._before)

    def catch(self, numbers: Iterable[int]) -> bool:
        """Catches these signals too; False, and nothing is done, outside of the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if not self._before:
            self._other = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in numbers:
            if number in self._before:
                continue
            before = self._before[number] = signal.getsignal(number)
            signal.signal(number, self._handle)
            if not callable(before):
                # A save that a signal meets in a library must not see an interrupted call. A handler of the
                # user's own may count on the interruption.
                signal.siginterrupt(number, False)
        return True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread, wherever it is: it takes no lock, and leaves the rest to ``wait``."""
        self._ran[number] += 1
        self.caught = number
        self.wake()
        before = self._before.get(number)
        if callable(before):
            before(number, frame)

    def wake(self) -> None:
        """Lets ``wait`` return."""
        with suppress(BlockingIOError):  # it is full, so it wakes
            os.write(self._writer, _HANDLED)

    def wait(self, seconds: float | None) -> list[int]:
        """The signals that came since the last call, each as often as it came; empty after ``seconds``."""
        ready, _, _ = select.select([self._reader], [], [], seconds)
        data = os.read(self._reader, 4096) if ready else b""
        self._pass_on(data.replace(_HANDLED, b""))
        # A handler that somebody else installed later replaces this one, unless it calls it.
        ours = [number for number in data if number and signal.getsignal(number) == self._handle]
        self._seen.update(ours)
        new: list[int] = []
        for number in self._before:
            count = max(self._seen[number], self._ran[number])
            new += [number] * (count - self._told[number])
            self._told[number] = count
        if new:
            self.caught = new[0]
        return new

    def _pass_on(self, data: bytes) -> None:
        """To whoever listened to the wake-up pipe before: an event loop, say."""
        if self._other >= 0 and data:
            with suppress(BlockingIOError):
                os.write(self._other, data)

    def give_back(self) -> None:
        """Handlers become what they were, where nobody has replaced them since; main thread only."""
        global _current
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        if self._before:
            self._release(self._other)
        self._before.clear()
        if _current is self:
            _current = None

    def _release(self, other: int) -> None:
        now = signal.set_wakeup_fd(other)
        if now != self._writer:  # somebody else has taken it over
            signal.set_wakeup_fd(now)

    def close(self) -> None:
        """Closes the pipe, once no thread waits for it."""
        os.close(self._reader)
        os.close(self._writer)

    def leave_child(self) -> None:
        """In a forked process: its signals are its own, and not written into the parent's pipe.

        Schedulers signal every process of a job. A loader's worker must not die of a user signal, which would
        end the parent's loop with an error; those are ignored where nothing else was asked.
        """
        self._release(-1)
        for number, before in self._before.items():
            user = number in (signal.SIGUSR1, signal.SIGUSR2)
            default = signal.SIG_IGN if user else signal.SIG_DFL
            signal.signal(number, default if before in (None, signal.SIG_DFL) else before)


def _leave_child() -> None:
    global _current
    catcher, _current = _current, None
    if catcher is not None and catcher.catches:
        catcher.leave_child()
