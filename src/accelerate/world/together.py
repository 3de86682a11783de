"""Failing together: what the processes know of each other while one of them waits.

A process that waits long for others tells where it is through the key-value store of the group, and reads
where they are. Its watcher does that, a thread with a connection of its own: the waiting thread only looks at
what it found. Three things end a wait: another rank failed (its ``sys.excepthook`` left the traceback in the
store), another rank has ended, or two ranks wait for each other in different places. Whoever finds out first
writes the report, and all raise the same error.

A rank in a wait of torch itself cannot be called back; it is freed when its peers end, and its last words are
then the report's. While no rank waits, a watcher asks the store one question per tick.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any

from accelerate.core.errors import CollectiveError
from accelerate.world.board import Board
from accelerate.world.report import Position, Report, judge, late
from accelerate.world.sites import Site, of

logger = logging.getLogger(__name__)

TICK = 0.5  # seconds between a watcher's looks; more in large worlds
LARGE = 32  # ranks; beyond it looks get rarer, so that the store has the same work
PATIENCE = 1.5  # seconds in one place until a rank says that it waits
HINT = 10.0  # seconds until it also says so to the user
FAREWELL = 2.0  # seconds that rank 0, which may hold the store, stays for the others to read it
INQUEST = 3.0  # seconds to find out who has closed a connection
LONGEST = 20_000  # characters of a traceback

# What torch says when a peer is gone; its classes do not tell this from other errors.
_TORN = (
    "closed by peer",
    "Connection reset",
    "Broken pipe",
    "Connection refused",
    "NCCL",
    "Timed out",
    "ncclRemote",
)

_current: Watch | None = None
_settled = False


def current() -> Watch | None:
    """What this process knows of the others; None in a world of one, or in a forked process."""
    return _current


def begin(rank: int, size: int, timeout: timedelta | None) -> None:
    """Begins to fail together; called when a world of several processes opens.

    Args:
        rank, size: this process among all.
        timeout: longest that a collective of this package may wait; None takes the group's.
    """
    global _current, _settled
    import torch.distributed as dist

    store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    if store is None or dist.get_backend() == "fake":
        return  # nothing to tell each other by
    backends = _backends()
    if timeout is None:
        # Back ends keep their limit in options of their own class; not all have them.
        limits = [getattr(getattr(each, "options", None), "_timeout", None) for each in backends]
        known: list[timedelta] = [limit for limit in limits if limit is not None]
        timeout = min(known, default=timedelta(minutes=30))
    counters = [each._get_sequence_number_for_group for each in backends]
    if _current is not None and _current.board.home is store:
        _current.timeout = timeout.total_seconds()  # the world was forgotten, its group goes on
        return
    end()
    _current = Watch(rank, size, timeout.total_seconds(), Board(store), counters)
    _current.group = dist.group.WORLD
    if not _settled:
        _settled = True
        os.register_at_fork(after_in_child=_forget)
        atexit.register(end)
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


def end() -> None:
    """Tells the others that this process takes part in nothing more; called before the group is destroyed."""
    global _current
    watch, _current = _current, None
    if watch is not None:
        watch.end()
    if isinstance(sys.excepthook, _Hook):
        # Below it is that of torch's group, which takes its own away with the group.
        sys.excepthook = sys.excepthook.before


def _forget() -> None:
    """A forked process, for example a worker of a loader, is no rank; the watcher stayed with its parent."""
    global _current
    _current = None


class _Hook:
    """``sys.excepthook``: an error that ends this process is told to the others."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self.before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        watch = _current
        if watch is None:
            self.before(kind, error, trace)
            return
        shown = watch.explained(error)
        self.before(type(shown), shown, shown.__traceback__)
        watch.failed(shown)


class Watch:
    """One process's knowledge of the others.

    Attributes:
        letters: exchanges that this process began.
        doing: the exchange that it is in: operation and line of the user's code; None outside.
        report: why no exchange can end any more, once that is known.
        group: torch's own group that the processes share.
    """

    def __init__(
        self, rank: int, size: int, timeout: float, board: Board, counters: Sequence[Callable[[], int]] = ()
    ) -> None:
        self.rank, self.size, self.timeout, self.board = rank, size, timeout, board
        self.letters = 0
        self.doing: tuple[str, Site] | None = None
        self.report: Report | None = None
        self.caller = threading.get_ident()
        self.tick = TICK * max(1.0, size / LARGE)
        self._wake, self._stop, self._found = threading.Event(), threading.Event(), threading.Event()
        self._looking = threading.Lock()
        self._counters = list(counters)
        self.group: object = None
        self._last: list[Callable[[], None]] = []
        self._told: Position | None = None
        self._mark: object = None
        self._alarmed = self._failed = False
        # Also for a rank that never gets to a collective of this package: it may wait for others in torch.
        self._thread = threading.Thread(target=self._run, name="accelerate-together", daemon=True)
        self._thread.start()

    def count(self, group: Any) -> None:
        """Counts the collectives of one more group, of which every process begins as many as the others."""
        if group.group_name != getattr(self.group, "group_name", None):
            backends = {id(b): b for b in map(group._get_backend, group._device_types)}
            self._counters += [each._get_sequence_number_for_group for each in backends.values()]

    # --- the thread that works

    def torn(self, error: BaseException) -> CollectiveError:
        """The error for a connection that broke in an exchange: who failed or ended, as far as is known."""
        report = self._inquest()
        if report is None:
            report = self._settled(
                Report(
                    self.rank,
                    f"{self._what()} was left by a process that is gone",
                    why=f"it was killed, or ended without a word ({str(error).partition(chr(10))[0]})",
                    fix="what it printed, and what the system says about its memory, may tell more",
                )
            )
        return report.error(self.rank)

    def too_late(self) -> CollectiveError:
        """The error for an exchange that lasted longer than the timeout."""
        self._look(waiting=True)
        if self.report is None:
            positions = self._positions()
            positions[self.rank] = self._position()
            self._settled(late(self.rank, self.size, positions, self.timeout))
        assert self.report is not None
        return self.report.error(self.rank)

    def explained(self, error: BaseException) -> BaseException:
        """The error to show in place of torch's complaint about a connection, when another rank failed."""
        if not isinstance(error, RuntimeError) or isinstance(error, CollectiveError):
            return error
        if not any(word in str(error) for word in _TORN):
            return error
        report = self._inquest()
        if report is None or (report.traceback and report.rank == self.rank):
            return error
        new = report.error(self.rank)
        new.__cause__ = error
        return new.with_traceback(error.__traceback__)

    def failed(self, error: BaseException) -> None:
        """Tells the others what ends this process. Rank 0 stays a moment, for it may hold the store."""
        if self._failed:
            return
        self._failed = True
        if self.report is None or not isinstance(error, CollectiveError):
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            summary = traceback.format_exception_only(type(error), error)[-1].strip()
            self._settled(Report(self.rank, f"rank {self.rank} failed: {summary}", traceback=text[-LONGEST:]))
        if self.rank == 0 and not isinstance(error, KeyboardInterrupt):
            self._farewell("heard")

    def end(self) -> None:
        """This process ends, or its world closes."""
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.failed(error)
        elif not self.board.lost:
            self.board.put(f"at/{self.rank}", self._position(ended=True).text())
            self.board.put(f"ended/{self.rank}", "")
            self.board.put(f"heard/{self.rank}", "")
            if self.rank == 0:
                self._farewell("ended")
        self.stop()

    def at_end(self, action: Callable[[], None]) -> None:
        """Calls ``action`` when this process takes part in nothing more."""
        self._last.append(action)

    def stop(self) -> None:
        """Ends the watcher, and lets go of the group: whoever destroys it must be the last who knows it."""
        self._stop.set()
        self._wake.set()
        # It must not be inside torch while the interpreter ends.
        self._thread.join(10.0)
        for action in self._last:
            action()
        self._last, self._counters, self.group = [], [], None

    def _farewell(self, key: str) -> None:
        others = [f"{key}/{rank}" for rank in range(self.size) if rank != self.rank]
        self.board.wait(others, FAREWELL)

    def _what(self) -> str:
        doing = self.doing
        return f"{doing[0]} at {doing[1]}" if doing else "a collective"

    def _inquest(self) -> Report | None:
        """Why a connection broke; waits a little for the others to say."""
        self._alarm()
        until = time.monotonic() + INQUEST
        while self.report is None and not self.board.lost and time.monotonic() < until:
            self._look(waiting=True)
            self._found.wait(0.1)
        if self.report is None and self.board.lost:
            return self._settled(
                Report(
                    self.rank,
                    f"rank 0, or the launcher, is gone while rank {self.rank} was in {self._what()}",
                    why="the connection to the store of the group is closed",
                    fix="the first error in the output of the other ranks says why",
                )
            )
        return self.report

    # --- the watcher

    def _run(self) -> None:
        doing, since, hinted = self.doing, time.monotonic(), False
        pause = self.tick
        while not self._stop.is_set():
            self._wake.wait(pause)
            if self._stop.is_set() or self.board.lost:
                return
            now = time.monotonic()
            if self.doing is not doing:
                doing, since, hinted = self.doing, now, False
            waited = now - since if doing is not None else 0.0
            waiting = waited >= PATIENCE
            if waiting:
                self._alarm()
            self._alarmed = self._alarmed or self.board.has("alarm")
            if self._alarmed and self.report is None:
                self._look(waiting)
            if waited >= HINT and not hinted:
                hinted = True
                self._hint(waited)
            # Whoever waits reads what all ranks say: less and less often in a large world.
            pause = self.tick if self.size <= LARGE or not waiting else min(30.0, pause * 1.5)

    def _alarm(self) -> None:
        if not self._alarmed:
            self._alarmed = True
            self.board.put("alarm", "")

    def _look(self, waiting: bool) -> None:
        """Says where this rank is, and reads whether some rank failed, ended or went elsewhere."""
        with self._looking:
            mine = self._position()
            if mine != self._told:
                self._told = mine
                self.board.put(f"at/{self.rank}", mine.text())
            found = self.board.get("report")
            if found is not None:
                self._learn(Report.of(found))
            elif waiting or mine.inside:
                positions = self._positions()
                positions[self.rank] = mine
                report = judge(self.rank, self.size, positions)
                if report is not None:
                    self._settled(report)

    def _settled(self, report: Report) -> Report:
        """The report that counts: the first that any rank has written."""
        winner = self.board.first("report", report.text())
        return self._learn(report if winner is None else Report.of(winner))

    def _learn(self, report: Report) -> Report:
        if self.report is None:
            self.report = report
            self.board.put("alarm", "")
            self.board.put(f"heard/{self.rank}", "")
            self._found.set()
        return self.report

    def _positions(self) -> dict[int, Position]:
        names = {f"at/{rank}": rank for rank in range(self.size) if rank != self.rank}
        return {names[key]: Position.of(text) for key, text in self.board.read(list(names)).items()}

    def _position(self, ended: bool = False) -> Position:
        doing = self.doing
        frame = sys._current_frames().get(self.caller)  # pyright: ignore[reportPrivateUsage]
        place = Position(self.letters, "", self._calls(), "", str(of(frame, _torch())), ended)
        if ended or doing is not None:
            return replace(place, doing="" if ended or doing is None else f"{doing[0]} at {doing[1]}")
        # The same instruction of the same call as at the last look: inside something that waits.
        mark = (id(frame), frame.f_lasti) if frame is not None else None
        inside = _waiting_for(frame) if mark == self._mark else ""
        self._mark = mark
        return replace(place, inside=f"{inside} at {place.at}" if inside else "")

    def _calls(self) -> int:
        """How many collectives of torch's own group this process has begun."""
        return sum(counter() for counter in self._counters)

    def _hint(self, waited: float) -> None:
        positions = self._positions()
        doing = self.doing
        missing = [
            r for r in range(self.size) if r != self.rank and not _is_there(positions.get(r), self.letters)
        ]
        if doing is None or not missing:
            return
        shown = "; ".join(
            f"rank {r} {positions[r].where() if r in positions else 'is silent'}" for r in missing[:8]
        )
        logger.warning(
            "rank %d has waited %.0f s in %s at %s: %s. Every rank must make this call.",
            self.rank, waited, *doing, shown,
        )  # fmt: skip


def _is_there(position: Position | None, letters: int) -> bool:
    return position is not None and position.letters >= letters


def _torch() -> tuple[str, ...]:
    torch = sys.modules["torch"]
    return (os.path.dirname(str(torch.__file__)) + os.sep, threading.__file__)


# Files of torch that may wait for other ranks -> what the user knows it as; empty: the function's own name.
_WAITS = {
    "distributed/distributed_c10d.py": "",
    "distributed/_functional_collectives.py": "an exchange of distributed tensors",
    "nn/parallel/distributed.py": "a forward of the model",
    "autograd/graph.py": "backward",
}


def _waiting_for(frame: Any) -> str:
    """``"backward"``, ``"all_reduce"``: the call of torch that may wait for others; else empty."""
    [folder, _] = _torch()
    found = ""
    while frame is not None and frame.f_code.co_filename.startswith(folder):
        name = _WAITS.get(frame.f_code.co_filename[len(folder) :].replace(os.sep, "/"))
        if name:
            return name
        if name is not None:
            found = frame.f_code.co_name
        frame = frame.f_back
    return found


def _backends() -> list[Any]:
    """The parts of torch's own group, one per library that moves its tensors."""
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    found = [group._get_backend(kind) for kind in group._device_types]
    return list({id(each): each for each in found}.values())
