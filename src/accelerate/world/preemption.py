"""Preemption: after a signal to any rank, all ranks stop at the same step boundary of their loops.

Before a signal there is no communication; each rank counts the step boundaries that it passes. A rank that
receives the signal writes a request into the key-value store of the group. Every rank has a monitor thread
that polls the store; when it sees the request, it writes how many boundaries its rank has passed, and from
then on the rank waits at the next boundary. When the counts of all ranks are there, each knows where all
stop: one boundary after the greatest count. A rank that waits in a collective does not delay this, since its
thread writes the count; and the other ranks still pass every boundary below the agreed one.

In a large world the counts are read by the rank that wrote the last of them, or by one at a time when a rank
has ended without any; the others read the decision only.
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
from accelerate.core.argument_checks import KwargsHandler, check_arguments
from accelerate.core.errors import CollectiveError, SettingError
from accelerate.world import watchdog
from accelerate.world.process_group import StoreClient
from accelerate.world.signals import PREEMPTION_SIGNALS, SignalHandler
from accelerate.world.watchdog import LARGE_WORLD, Watchdog

logger = logging.getLogger(__name__)

CONSENSUS_INTERVAL = 0.02  # seconds between polls during the consensus; more in large worlds
# Seconds in which a second SIGTERM counts as the same one, sent to all processes and forwarded to each.
SAME_SIGNAL_WINDOW = 2.0
RETRY_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: a temporary failure, try again later
ENDED_CHECK_INTERVAL = 1.0  # seconds between checks for ranks that have ended
_ENDED = "ends"


@check_arguments
@dataclass
class PreemptionKwargs(KwargsHandler):
    """The reaction to a signal that announces the end of the job.

    Attributes:
        signals: which signals announce it; of SIGTERM, SIGUSR1, SIGUSR2, SIGHUP and SIGXCPU, on Windows
            SIGTERM alone.
        save_and_exit: at the next step boundary of a training loop, save the state under automatic naming and
            exit; the script needs no line for it. Otherwise `accelerator.should_stop` tells the script.
        exit_code: of `save_and_exit` and of `accelerator.exit_to_resume()`: the job is to be started again.

    Raises:
        SettingError: a signal does not announce the end of a job, or the code is none.
    """

    signals: tuple[str, ...] = PREEMPTION_SIGNALS[:2]
    save_and_exit: bool = False
    exit_code: int = RETRY_EXIT_CODE

    def __post_init__(self) -> None:
        unknown = [name for name in self.signals if name not in PREEMPTION_SIGNALS]
        if unknown or not self.signals:
            raise SettingError(
                f"PreemptionKwargs(signals={self.signals!r}): {unknown[0] if unknown else 'none'} does not "
                "announce the end of a job",
                fix=f"use some of {', '.join(PREEMPTION_SIGNALS)}",
            )
        if not 0 <= self.exit_code <= 255:
            raise SettingError(f"PreemptionKwargs(exit_code={self.exit_code})", fix="use 0 to 255")

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the signals."""
        return tuple(signal.Signals[name].value for name in self.signals)


class PreemptionStepCounter:
    """Counts the step boundaries that a rank passes, and holds the one where it stops. Thread-safe.

    The working thread calls ``arrive``, the monitor thread ``freeze`` and ``decide``.

    Attributes:
        passed_count: boundaries that the rank has passed.
        frozen_at: the count that was published; from then on the rank passes none before the decision.
        stop_at: the boundary at which all ranks stop, counted from 1.
        decided: set together with ``stop_at``.
    """

    def __init__(self) -> None:
        self.passed_count = 0
        self.frozen_at: int | None = None
        self.stop_at: int | None = None
        self.decided = threading.Event()
        self._lock = threading.Lock()

    def arrive(self) -> bool | None:
        """Return True to stop at this boundary, False to pass it, None to wait for the decision first."""
        with self._lock:
            if self.stop_at is None:
                if self.frozen_at is not None:
                    return None
            elif self.passed_count + 1 >= self.stop_at:
                return True
            self.passed_count += 1
            return False

    def freeze(self) -> int:
        """Return how many boundaries the rank has passed; it passes no other one before the decision."""
        with self._lock:
            if self.frozen_at is None:
                self.frozen_at = self.passed_count
            return self.frozen_at

    def decide(self, boundary: int) -> None:
        """Set the boundary at which all ranks stop; none has passed it."""
        with self._lock:
            self.stop_at = boundary
        self.decided.set()


class StopConsensus:
    """The consensus of the ranks, over the store, about the boundary at which all stop.

    Args:
        rank, size: rank of this process and world size.
        client: the client of the store.

    Attributes:
        step_counter: boundaries that this rank has passed, and where it stops.
        request: the signal and the rank that received it, in words; empty before.
        silent_ranks: ranks without a published count at the last check.
        includes_all_ranks: all ranks stop at that boundary; False if some had ended before the signal.
    """

    def __init__(self, rank: int, size: int, client: StoreClient) -> None:
        self.rank, self.size, self.store = rank, size, client
        self.step_counter = PreemptionStepCounter()
        self.request = ""
        self.silent_ranks: Sequence[int] = ()
        self.includes_all_ranks = True
        self._ended_ranks: frozenset[int] = frozenset()
        self._last_check = 0.0
        # In large worlds.
        self._is_counted = self._was_last = False
        self._turn, self._last_turn = 0, time.monotonic()

    def poll(self, caught: str) -> None:
        """Advance the consensus by one poll. ``caught``: the signal that this process received, or empty."""
        if not self.request:
            if caught:
                notice = f"{caught} to rank {self.rank}"
                self.request = self.store.put_if_absent("stop/asked", notice) or notice
            else:
                self.request = self.store.get("stop/asked") or ""
            if self.request:
                self._publish_count(str(self.step_counter.freeze()))
        if self.request and not self.step_counter.decided.is_set():
            self._decide()

    def withdraw(self) -> None:
        """Announce that this rank ends: the others neither wait for it nor count on it."""
        self._publish_count(f"{self.step_counter.freeze()} {_ENDED}")
        if self._was_last and self.request:
            self._read_counts()

    def _publish_count(self, text: str) -> None:
        self.store.put(f"stop/{self.rank}", text)
        if self.size > LARGE_WORLD and not self._is_counted:
            self._is_counted = True
            self._was_last = self.store.add("stop/published") == self.size

    def _decide(self) -> None:
        if self.size <= LARGE_WORLD or self._takes_turn():
            self._read_counts()
        elif (decision := self.store.get("stop/at")) is not None:
            self._accept(decision)

    def _takes_turn(self) -> bool:
        """Return whether this rank reads the counts of all ranks now; in a large world one at a time does."""
        if self._was_last:
            self._was_last = False
            return True
        if time.monotonic() - self._last_turn < ENDED_CHECK_INTERVAL * self.store.pace:
            return False
        self._turn, self._last_turn = self._turn + 1, time.monotonic()
        return self.store.put_if_absent(f"stop/turn/{self._turn}", str(self.rank)) == str(self.rank)

    def _accept(self, decision: str) -> None:
        self.includes_all_ranks = _ENDED not in decision
        self.step_counter.decide(int(decision.split()[0]))

    def _read_counts(self) -> None:
        """Decide where all stop, if all counts are there but those of ranks that have ended."""
        client = self.store
        ranks = [rank for rank in range(self.size) if rank not in self._ended_ranks]
        keys = [f"stop/{rank}" for rank in ranks]
        if client.has(*keys):
            counts = [text.split() for text in client.read(keys).values()]
            if len(counts) == len(keys):
                whole = len(counts) == self.size and not any(_ENDED in tokens for tokens in counts)
                decision = f"{max(int(tokens[0]) for tokens in counts) + 1} {'' if whole else _ENDED}"
                # The first decision counts for all: ranks may differ in which others they saw end.
                self._accept(client.put_if_absent("stop/at", decision) or decision)
        elif time.monotonic() - self._last_check > ENDED_CHECK_INTERVAL:
            self._last_check = time.monotonic()
            silent = {f"ended/{rank}": rank for rank in ranks if not client.has(f"stop/{rank}")}
            self.silent_ranks = list(silent.values())
            # A rank that ended normally before it knew of the signal takes no part.
            ended = {silent[key] for key in client.read(list(silent))}
            self._ended_ranks |= ended
            if len(ended) == len(silent):
                self._read_counts()


def poll_delay(consensus: StopConsensus, watch: Watchdog) -> float:
    """Return the seconds between two polls of a rank: shorter once a signal has come."""
    return CONSENSUS_INTERVAL * watch.store.pace if consensus.request else watch.poll_interval


class PreemptionMonitor:
    """Monitors stop signals in a thread, and finds the boundary where all ranks stop.

    Args:
        watch: the watchdog of this process; None in a world of one.

    Attributes:
        consensus: that of the ranks; None in a world of one.
        signal_handler: catches the signals.
        has_stopped: the rank has stopped at a boundary; stays True.
    """

    def __init__(self, watch: Watchdog | None) -> None:
        self.watchdog = watch
        self.consensus = None if watch is None else StopConsensus(watch.rank, watch.size, watch.store)
        self.signal_handler = SignalHandler()
        self.has_stopped = False
        self._first_sigterm: float | None = None
        self._has_withdrawn = False  # the world was closed
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="accelerate-stop", daemon=True)
        self._thread.start()

    # --- called by the working thread

    def check_boundary(self) -> bool:
        """Pass a step boundary; return True if all ranks stop here.

        Raises:
            CollectiveError: a rank failed, or did not agree within the timeout.
        """
        if self.has_stopped:
            return True
        if self.watchdog is None or self.consensus is None:
            self.has_stopped = self.signal_handler.received is not None
            return self.has_stopped
        step_counter = self.consensus.step_counter
        stops = step_counter.arrive()
        if stops is None:
            self._wait(self.watchdog, self.consensus)
            stops = step_counter.arrive()
        self.has_stopped = bool(stops)
        return self.has_stopped

    def _wait(self, watch: Watchdog, consensus: StopConsensus) -> None:
        until = time.monotonic() + watch.timeout
        while not consensus.step_counter.decided.wait(0.1):
            if watch.report is not None:
                raise watch.report.error(watch.rank)
            if watch.store.is_lost:
                raise watch.explain_disconnect(ConnectionError("no store"))
            if time.monotonic() > until:
                silent = ", ".join(map(str, consensus.silent_ranks)) or "none known"
                raise CollectiveError(
                    f"the ranks did not agree within {watch.timeout:g} s where to stop",
                    why=f"ranks without an answer: {silent}",
                    fix="read accelerator.should_stop on every rank, equally often; for a rank that needs "
                    "longer, InitProcessGroupKwargs(timeout=timedelta(...))",
                )

    @property
    def includes_all_ranks(self) -> bool:
        """True if there are other ranks and all of them stop at the same boundary."""
        return self.consensus is not None and self.consensus.includes_all_ranks

    @property
    def reason(self) -> str:
        """The signal in words: ``"SIGTERM to rank 1"``."""
        if self.consensus is not None and self.consensus.request:
            return self.consensus.request
        return _signal_name(self.signal_handler.received)

    def close(self) -> None:
        """Stop the thread and restore the previous signal handlers. Main thread only."""
        self._closing.set()
        self.signal_handler.wake()
        # The thread must not be inside torch while the interpreter shuts down.
        self._thread.join(10.0)
        self.signal_handler.restore_handlers()
        if not self._thread.is_alive():
            self.signal_handler.close()

    # --- the monitor thread

    def _run(self) -> None:
        while not self._closing.is_set():
            consensus = self._open_consensus
            delay = poll_delay(consensus, self.watchdog) if consensus and self.watchdog else None
            self._end_on_second(self.signal_handler.wait(delay))
            consensus = self._open_consensus
            if consensus is None:
                continue
            if self._closing.is_set() or watchdog.current() is not self.watchdog:
                consensus.withdraw()
                self._has_withdrawn = True
            else:
                consensus.poll(_signal_name(self.signal_handler.received))

    @property
    def _open_consensus(self) -> StopConsensus | None:
        """The consensus while it is open and the store is reachable."""
        consensus = self.consensus
        if consensus is None or self._has_withdrawn or consensus.store.is_lost:
            return None
        return None if consensus.step_counter.decided.is_set() else consensus

    def _end_on_second(self, signals: list[int]) -> None:
        """End the process at a second SIGTERM, also while its main thread is in a call that takes long."""
        for _ in range(signals.count(signal.SIGTERM)):
            if self._first_sigterm is None:
                self._first_sigterm = time.monotonic()
            elif time.monotonic() - self._first_sigterm >= SAME_SIGNAL_WINDOW:
                os._exit(128 + signal.SIGTERM)


def _signal_name(number: int | None) -> str:
    return "" if number is None else signal.Signals(number).name


_current: PreemptionMonitor | None = None


def current() -> PreemptionMonitor | None:
    """Return the monitor of this process; None when it was not installed."""
    return _current


def install_monitor(options: PreemptionKwargs, size: int) -> PreemptionMonitor:
    """Start to catch the signals that announce the end of the job; return the monitor.

    Args:
        options: the signals, and the exit code of the script.
        size: world size.
    """
    global _current
    watch = watchdog.current() if size > 1 else None
    stop = _current
    if stop is None or stop.watchdog is not watch:
        if stop is not None and threading.current_thread() is threading.main_thread():
            stop.close()
        before, stop = stop, PreemptionMonitor(watch)
        if before is not None:
            stop.has_stopped = before.has_stopped
            stop.signal_handler.received = before.signal_handler.received
        _current = stop
    atexit.unregister(remove_monitor)
    atexit.register(remove_monitor)
    if stop.signal_handler.catch(options.numbers):
        _announce_to_launcher(stop, options.exit_code)
    else:
        warnings.warn(
            "signals are not caught in this process: only the main thread of Python can catch them, and "
            "accelerator.should_stop was first read in another one",
            stacklevel=3,
        )
    return stop


def remove_monitor() -> None:
    """Remove the monitor: restore the signal handlers and drop the consensus."""
    global _current
    stop, _current = _current, None
    if stop is not None:
        stop.close()


def _forget_in_child() -> None:
    """Drop the monitor in a forked process, which is no rank; the thread stayed with its parent."""
    global _current
    _current = None


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_in_child)


def _announce_to_launcher(stop: PreemptionMonitor, code: int) -> None:
    """Write a file for the launcher: the caught signals, and the exit code that asks for a restart."""
    folder = environ.get("ACCELERATE_STOP_FOLDER")
    if folder is None:
        return
    file = Path(folder, f"armed_{os.getpid()}")
    draft = file.with_suffix(".draft")
    with suppress(FileNotFoundError):  # the launcher is gone, and its folder with it
        draft.write_text(" ".join(map(str, (code, *stop.signal_handler.numbers))), encoding="utf-8")
        draft.replace(file)
