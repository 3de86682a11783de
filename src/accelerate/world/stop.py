"""Stopping together: a signal to any rank, and all ranks stop at the same boundary of their loops.

Before a signal nobody communicates. Each rank counts the boundaries that it passes. Then a rank that got the
signal leaves a notice in the key-value store of the group. Every rank has a watcher, a thread with a look at
the store per tick; when it sees the notice it tells how many boundaries its rank has passed, and from then on
the rank waits at the next one. When all have told, each knows the boundary where all stop: the one after the
furthest that any has passed. A rank that waits for others in a collective does not hold this up, since its
watcher tells; and those others still pass every boundary below that one.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from accelerate.core import environ
from accelerate.core.errors import CollectiveError, SettingError
from accelerate.core.handler import KwargsHandler
from accelerate.world import together
from accelerate.world.board import Board
from accelerate.world.signals import ANNOUNCE, Catcher
from accelerate.world.together import LARGE, Watch

logger = logging.getLogger(__name__)

HASTE = 0.02  # seconds between looks while the ranks agree; more in large worlds
SAME = 2.0  # seconds in which another SIGTERM is the same one: sent to all processes, and passed on to each
TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: a temporary failure, try again later
ENDED = 1.0  # seconds between looks for ranks that have ended
_ENDS = "ends"


@dataclass
class PreemptionKwargs(KwargsHandler):
    """What happens when the end of the job is announced by a signal.

    Attributes:
        signals: which signals announce it; of SIGTERM, SIGUSR1, SIGUSR2, SIGHUP and SIGXCPU.
        save_and_exit: at the next step boundary of a training loop, save the state under automatic naming and
            exit; the script needs no line for it. Otherwise `accelerator.should_stop` tells the script.
        exit_code: of `save_and_exit` and of `accelerator.exit_to_resume()`: the job is to be started again.

    Raises:
        SettingError: a signal does not announce the end of a job, or the code is none.
    """

    signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1")
    save_and_exit: bool = False
    exit_code: int = TRY_AGAIN

    def __post_init__(self) -> None:
        unknown = [name for name in self.signals if name not in ANNOUNCE]
        if unknown or not self.signals:
            raise SettingError(
                f"PreemptionKwargs(signals={self.signals!r}): {unknown[0] if unknown else 'none'} does not "
                "announce the end of a job",
                fix=f"use some of {', '.join(ANNOUNCE)}",
            )
        if not 0 <= self.exit_code <= 255:
            raise SettingError(f"PreemptionKwargs(exit_code={self.exit_code})", fix="use 0 to 255")

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the signals."""
        return tuple(signal.Signals[name].value for name in self.signals)


class Boundaries:
    """One rank's part in the agreement: what it has passed, and where it stops. For several threads.

    The rank calls ``arrive``, its watcher ``tell`` and ``decide``.

    Attributes:
        passed: boundaries that the rank has passed.
        told: what it told the others; from then on it passes none before the decision.
        at: the boundary at which all stop, counted from 1.
        decided: set with ``at``.
    """

    def __init__(self) -> None:
        self.passed = 0
        self.told: int | None = None
        self.at: int | None = None
        self.decided = threading.Event()
        self._lock = threading.Lock()

    def arrive(self) -> bool | None:
        """Whether the rank stops at this boundary; None: it waits until that is decided, and asks again."""
        with self._lock:
            if self.at is None:
                if self.told is not None:
                    return None
            elif self.passed + 1 >= self.at:
                return True
            self.passed += 1
            return False

    def tell(self) -> int:
        """How many boundaries the rank has passed; it passes no other one before the decision."""
        with self._lock:
            if self.told is None:
                self.told = self.passed
            return self.told

    def decide(self, at: int) -> None:
        """All stop at the boundary ``at``, which none has passed."""
        with self._lock:
            self.at = at
        self.decided.set()


class Agreement:
    """One rank's way to the boundary at which all stop, over the notices of the ranks. Its watcher looks.

    Args:
        rank, size: this process among all.
        board: where the notices are.

    Attributes:
        boundaries: what the rank has passed, and where it stops.
        asked: the signal and the rank that got it, for people; empty before.
        silent: ranks that were not heard of at the last look for them.
        everybody: all ranks stop at that boundary; otherwise some had ended before the signal.
    """

    def __init__(self, rank: int, size: int, board: Board) -> None:
        self.rank, self.size, self.board = rank, size, board
        self.boundaries = Boundaries()
        self.asked = ""
        self.silent: Sequence[int] = ()
        self.everybody = True
        self._gone: frozenset[int] = frozenset()
        self._looked = 0.0

    def look(self, caught: str) -> None:
        """Does what can be done now. ``caught``: the signal that this process got, or empty."""
        if not self.asked:
            if caught:
                notice = f"{caught} to rank {self.rank}"
                self.asked = self.board.first("stop/asked", notice) or notice
            else:
                self.asked = self.board.get("stop/asked") or ""
            if self.asked:
                self.board.put(f"stop/{self.rank}", str(self.boundaries.tell()))
        if self.asked and not self.boundaries.decided.is_set():
            self._decide()

    def leave(self) -> None:
        """This rank ends: those who go on must neither wait for it nor stop where it did not."""
        self.board.put(f"stop/{self.rank}", f"{self.boundaries.tell()} {_ENDS}")

    def _decide(self) -> None:
        board = self.board
        those = [rank for rank in range(self.size) if rank not in self._gone]
        keys = [f"stop/{rank}" for rank in those]
        if board.has(*keys):
            told = [text.split() for text in board.read(keys).values()]
            if len(told) == len(keys):
                whole = len(told) == self.size and not any(_ENDS in words for words in told)
                decision = f"{max(int(words[0]) for words in told) + 1} {'' if whole else _ENDS}"
                # The first decision is that of all: who had ended, another rank may have seen otherwise.
                decision = board.first("stop/at", decision) or decision
                self.everybody = _ENDS not in decision
                self.boundaries.decide(int(decision.split()[0]))
        elif time.monotonic() - self._looked > ENDED:
            self._looked = time.monotonic()
            self.silent = [rank for rank in those if not board.has(f"stop/{rank}")]
            # A rank that ended in good order before it heard of the signal stops nowhere.
            self._gone |= {rank for rank in self.silent if board.has(f"ended/{rank}")}


class Stop:
    """How this process learns that it is to stop, and agrees with the others where.

    Args:
        watch: what this process knows of the other ranks; None when it is alone.

    Attributes:
        agreement: with the others; None when it is alone.
        stopped: it has stopped at a boundary; the answer stays.
    """

    def __init__(self, watch: Watch | None) -> None:
        self.watch = watch
        self.agreement = None if watch is None else Agreement(watch.rank, watch.size, watch.board)
        self.catcher = Catcher()
        self.stopped = False
        self._since: float | None = None
        self._left = False  # its world was closed
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="accelerate-stop", daemon=True)
        self._thread.start()

    # --- the thread that works

    def boundary(self) -> bool:
        """The rank is at a boundary: whether it stops here, as all do.

        Raises:
            CollectiveError: a rank failed, or did not agree within the timeout.
        """
        if self.stopped:
            return True
        if self.watch is None or self.agreement is None:
            self.stopped = self.catcher.caught is not None
            return self.stopped
        boundaries = self.agreement.boundaries
        stops = boundaries.arrive()
        if stops is None:
            self._wait(self.watch, self.agreement)
            stops = boundaries.arrive()
        if stops:
            self.stopped = True
        return bool(stops)

    def _wait(self, watch: Watch, agreement: Agreement) -> None:
        until = time.monotonic() + watch.timeout
        while not agreement.boundaries.decided.wait(0.1):
            if watch.report is not None:
                raise watch.report.error(watch.rank)
            if watch.board.lost:
                raise watch.torn(ConnectionError("no store"))
            if time.monotonic() > until:
                silent = ", ".join(map(str, agreement.silent)) or "none known"
                raise CollectiveError(
                    f"the ranks did not agree within {watch.timeout:g} s where to stop",
                    why=f"ranks that said nothing: {silent}",
                    fix="read accelerator.should_stop on every rank, equally often; for a rank that needs "
                    "longer, InitProcessGroupKwargs(timeout=timedelta(...))",
                )

    @property
    def everybody(self) -> bool:
        """Whether there are other ranks, and all of them stop at the same boundary."""
        return self.agreement is not None and self.agreement.everybody

    @property
    def reason(self) -> str:
        """``"SIGTERM to rank 1"``."""
        if self.agreement is not None and self.agreement.asked:
            return self.agreement.asked
        return _name(self.catcher.caught)

    def close(self) -> None:
        """Ends the watcher; signals act as before. Main thread only."""
        self._over.set()
        self.catcher.wake()
        # It must not be inside torch while the interpreter ends.
        self._thread.join(10.0)
        self.catcher.give_back()
        if not self._thread.is_alive():
            self.catcher.close()

    # --- the watcher

    def _run(self) -> None:
        while not self._over.is_set():
            for number in self.catcher.wait(self._pause()):
                self._signalled(number)
            if self._agrees():
                self._agree()

    def _agrees(self) -> bool:
        """Whether there is something to agree about, and a way to do it."""
        agreement = self.agreement
        if agreement is None or self._left:
            return False
        return not (agreement.board.lost or agreement.boundaries.decided.is_set())

    def _pause(self) -> float | None:
        if self.watch is None or self.agreement is None or not self._agrees():
            return None
        return HASTE * max(1.0, self.watch.size / LARGE) if self.agreement.asked else self.watch.tick

    def _agree(self) -> None:
        assert self.agreement is not None
        if self._over.is_set() or together.current() is not self.watch:
            self.agreement.leave()
            self._left = True
        else:
            self.agreement.look(_name(self.catcher.caught))

    def _signalled(self, number: int) -> None:
        if number != signal.SIGTERM:
            return
        if self._since is None:
            self._since = time.monotonic()
        elif time.monotonic() - self._since >= SAME:
            # The main thread may be anywhere, also where nothing can be called back.
            os._exit(128 + signal.SIGTERM)


def _name(number: int | None) -> str:
    return "" if number is None else signal.Signals(number).name


_current: Stop | None = None
_settled = False


def current() -> Stop | None:
    """How this process learns that it is to stop; None when nobody asked."""
    return _current


def arm(options: PreemptionKwargs, size: int) -> Stop:
    """From now on the signals announce the end of the job; returns what they are heard by.

    Args:
        options: which signals, and with which code the script will exit.
        size: of the world.
    """
    global _current, _settled
    watch = together.current() if size > 1 else None
    stop = _current
    if stop is None or stop.watch is not watch:
        if stop is not None and threading.current_thread() is threading.main_thread():
            stop.close()
        before, stop = stop, Stop(watch)
        if before is not None:
            stop.stopped, stop.catcher.caught = before.stopped, before.catcher.caught
        _current = stop
    if not _settled:
        _settled = True
        os.register_at_fork(after_in_child=_forget)
        atexit.register(disarm)
    if stop.catcher.catch(options.numbers):
        _say(stop, options.exit_code)
    else:
        warnings.warn(
            "signals are not heard by this process: only the main thread of Python can catch them, and "
            "accelerator.should_stop was first read in another one",
            stacklevel=3,
        )
    return stop


def disarm() -> None:
    """Signals act as before; what was agreed is forgotten."""
    global _current
    stop, _current = _current, None
    if stop is not None:
        stop.close()


def _forget() -> None:
    """A forked process is no rank; the watcher stayed with its parent."""
    global _current
    _current = None


def _say(stop: Stop, code: int) -> None:
    """Tells the launcher which signals this process acts on, and its code when it is to be started again."""
    folder = environ.get("ACCELERATE_STOP_FOLDER")
    if folder is None:
        return
    file = Path(folder, f"armed_{os.getpid()}")
    draft = file.with_suffix(".draft")
    with suppress(FileNotFoundError):  # the launcher is gone, and its folder with it
        draft.write_text(" ".join(map(str, (code, *stop.catcher.catches))), encoding="utf-8")
        draft.replace(file)
