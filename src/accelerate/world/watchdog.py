"""The watchdog of the ranks: ends waits that cannot end, with the same error on every rank.

A rank that waits long publishes its status in the key-value store of the group and reads the statuses of the
other ranks. A background thread with its own store connection does that; the waiting thread only checks the
result. Three things end a wait: another rank failed (its ``sys.excepthook`` stored the traceback), another
rank has ended, or two ranks are deadlocked in different collectives. The first rank that notices writes the
report, and all ranks raise the same error.

A rank inside a wait of torch itself (a backward, a forward under FSDP) is noticed by its stack, which stays
the same. It is freed when its peers end, and then shows the stored report. Where collectives are queued on a
device, a rank waits in what reads the device next, such as ``item()``: one that stays at one instruction, and
has begun more collectives than another, logs which rank has begun the fewest.

Whoever waits long asks the ranks that it waits for where they are, and logs their stacks. While no rank
waits, each watchdog makes one store request per poll interval; while they wait, each makes a few, whatever
the size of the world (``peers.py``).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from types import TracebackType
from typing import Any

from accelerate.core.errors import CollectiveError, explain_error
from accelerate.world.call_site import (
    BlockingCall,
    CallSite,
    blocking_call,
    find_call_site,
    outward,
    torch_prefixes,
    waiting_place,
)
from accelerate.world.peers import PeerProcesses, PeerStatuses, log_wait, write_stack_on_signal
from accelerate.world.process_group import (
    LARGE_WORLD,
    StoreClient,
    backend_timeouts,
    group_backends,
    interrupt_group,
    is_disconnect,
)
from accelerate.world.rank_failure_report import (
    FailureReport,
    RankStatus,
    deadlock_report,
    ended_rank_report,
    find_deadlock,
    gone_process_report,
    lost_peer_report,
    lost_store_report,
    timeout_report,
)

POLL_INTERVAL = 0.5  # seconds between polls of the store; more in large worlds
MAX_WAIT_POLL = 30.0  # ... of a rank that waits in a large world
WAIT_REPORT_DELAY = 1.5  # seconds in one collective until a rank publishes that it waits
TORCH_WAIT_DELAY = 5.0  # ... in one call of torch, which may compute that long
HINT_DELAY = 10.0  # seconds until it also logs a warning
EXIT_GRACE = 2.0  # seconds that rank 0, which may host the store, waits for the others to read it
OPENING_GRACE = 30.0  # ... that a rank which ends waits for those that still open a group with it
DIAGNOSIS_TIMEOUT = 3.0  # seconds to find out which rank closed a connection
DIAGNOSIS_INTERVAL = 0.1  # seconds between polls meanwhile; up to ten times that in large worlds
REPORT_TIMEOUT = 10.0  # seconds in which the rank that writes the report of a large world does so

_current: Watchdog | None = None
_hooks_installed = False


def current() -> Watchdog | None:
    """Return the watchdog of this process; None in a world of one or in a forked process."""
    return _current


def start(
    rank: int,
    size: int,
    timeout: timedelta | None,
    met: PeerProcesses | None = None,
    *,
    opening_grace: float = EXIT_GRACE,
) -> None:
    """Start the watchdog; called when a world of several processes opens.

    Args:
        rank, size: rank of this process and world size.
        timeout: longest wait of a collective of this package; None takes the group's.
        met: the processes that have met in the store of the group, if this package let them meet.
        opening_grace: seconds that a rank which ends waits until all have opened the group.
    """
    global _current, _hooks_installed
    import torch.distributed as dist

    store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    if store is None or dist.get_backend() == "fake":
        return  # no store to communicate through
    backends = group_backends(dist.group.WORLD)
    if timeout is None:
        timeout = min(backend_timeouts(backends), default=timedelta(minutes=30))
    counters = [each._get_sequence_number_for_group for each in backends]
    if _current is not None and _current.store.group_store is store:
        # The world was closed by ``forget``, and its group is still open.
        _current.timeout = timeout.total_seconds()
        return
    if _current is not None:
        shut_down()
    client = StoreClient(store, size, met and met.store.connection)
    _current = Watchdog(rank, size, timeout.total_seconds(), client, counters, met and met.known)
    _current.group, _current.opening_grace = dist.group.WORLD, opening_grace
    # Early: a rank that never calls a collective of this package may wait for others in torch.
    _current.thread.start()
    if not _hooks_installed:
        _hooks_installed = True
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=_forget_in_child)
        atexit.register(shut_down)
    if not isinstance(sys.excepthook, _WatchdogExceptHook):
        sys.excepthook = _WatchdogExceptHook(sys.excepthook)


def shut_down() -> None:
    """Announce that this process makes no more collectives; called before the group is destroyed."""
    global _current
    watch, _current = _current, None
    if watch is not None:
        watch.shut_down()
    if isinstance(sys.excepthook, _WatchdogExceptHook):
        # The previous hook is that of torch's process group, which removes its own with the group.
        sys.excepthook = sys.excepthook.previous


def _forget_in_child() -> None:
    """Drop the watchdog in a forked process (a loader's worker): its thread stayed with the parent."""
    global _current
    _current = None
    write_stack_on_signal()


@dataclass
class _WatchdogExceptHook:
    """A ``sys.excepthook`` that announces the error which ends this process to the other ranks."""

    previous: Callable[..., Any]

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        watch = _current
        if watch is None:
            self.previous(kind, error, trace)
            return
        shown = watch.explain(error)
        self.previous(type(shown), shown, shown.__traceback__)
        watch.announce_failure(shown)


class Watchdog:
    """Watches over the waits of this rank, and publishes its status to the others.

    Attributes:
        exchange_count: exchanges of the control channel that this process began.
        active_call: the collective that it is in: operation and line of user code; None outside.
        earlier_call_sites: rows for error texts: a call that the ranks made from different lines; or empty.
        report: why no collective can end any more, once that is known.
        was_interrupted: a rank has left the attempt that the ranks make together (``DEPARTURES``) while this
            one was in a collective of torch; the default group is closed.
        group: the default process group.
        opening_grace: seconds that this rank, when it ends, waits until all have opened the groups.
        shutdown_actions: called when the watchdog stops.
        poll_actions: called by the thread at each poll while some rank waits long.
        thread: the one that polls.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timeout: float,
        store: StoreClient,
        counters: Sequence[Callable[[], int]] = (),
        known: dict[int, tuple[int, str]] | None = None,
    ) -> None:
        self.rank, self.size, self.timeout, self.store = rank, size, timeout, store
        self.exchange_count = 0
        self.active_call: tuple[str, CallSite] | None = None
        self.earlier_call_sites = ""
        self.report: FailureReport | None = None
        self.was_interrupted = False
        self.caller_thread = threading.get_ident()
        self.poll_interval = POLL_INTERVAL * store.pace
        # In a large world the others may not have written where they are before the second poll of a wait.
        self._hint_delay = HINT_DELAY if size <= LARGE_WORLD else max(HINT_DELAY, 2 * self.poll_interval)
        self.peers = PeerStatuses(store, rank, size, self.poll_interval)
        self._stop_event = threading.Event()
        self._report_event = threading.Event()
        self._poll_lock = threading.Lock()
        self._counters, self._known_processes = list(counters), known
        self.group: object = None
        self.opening_grace = OPENING_GRACE
        self._other_groups, self._interrupted_at = set[str](), 0.0
        self.shutdown_actions: list[Callable[[], None]] = []
        self.poll_actions: list[Callable[[], object]] = []
        self._last_activity: object = None
        self._waits_since, self._hint_logged, self._inside = time.monotonic(), False, ""
        self._torch_call = BlockingCall()
        self._alarm_raised = self._failure_announced = self._has_failed = self._has_ended = False
        self.thread = threading.Thread(target=self._run, name="accelerate-watchdog", daemon=True)

    @cached_property
    def processes(self) -> PeerProcesses:
        """The processes of the other ranks."""
        return PeerProcesses(self.store, self.rank, self.caller_thread, self._known_processes)

    def use_group(self, group: Any) -> None:
        """Watch a new default process group, which replaces one that was interrupted."""
        import torch.distributed as dist

        self._counters = [each._get_sequence_number_for_group for each in group_backends(group)]
        self._other_groups, self.group, self.was_interrupted = set[str](), group, False
        # ``start`` knows by it that this watchdog is the group's.
        self.store.group_store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]

    def track_group(self, group: Any) -> None:
        """Count the collectives of one more group; all ranks must start the same number of them."""
        if group.group_name not in {getattr(self.group, "group_name", None), *self._other_groups}:
            self._other_groups.add(group.group_name)
            self._counters += [each._get_sequence_number_for_group for each in group_backends(group)]

    # --- called by the working thread

    def explain_disconnect(self, error: BaseException) -> CollectiveError:
        """Return the error for a connection that broke in a collective: the rank that failed, if known."""
        report = self._diagnose()
        if report is None:
            place = self._own_status().place or "a collective"
            report = self._publish_report(lost_peer_report(self.rank, place, error))
        return report.error(self.rank)

    def check_wait(self, until: float) -> None:
        """Raise if a wait cannot end: a rank failed, or ``time.monotonic()`` is past ``until``."""
        if self.report is not None:
            raise self.report.error(self.rank)
        if time.monotonic() > until:
            self._poll_peers(waiting=True)
            raise self.write_report(self._timeout_report).error(self.rank)

    def check_store_wait(self, until: float) -> None:
        """Raise if a wait for a key of the store cannot end; see ``check_wait``."""
        self.check_wait(until)
        if self.store.is_lost:
            raise self.explain_disconnect(ConnectionError("no store"))

    def find_ahead(self, ranks: Sequence[int]) -> tuple[list[int], dict[int, RankStatus]]:
        """Return those of ``ranks`` that have begun a collective which this one has not, or have ended.

        Those that wait for a message which this one has not sent count, too. Also returns the statuses of
        the others that wait in torch, where groups of the user are not counted. Others publish where they are
        at their next poll, so a rank may be found only when asked for again.

        Raises:
            CollectiveError: a rank has failed, or the process of one of them, on this machine, is gone.
        """
        self.raise_alarm()
        own, statuses = self._own_status(), self.peers.read(ranks)
        text = self.store.get("report")
        if text is not None:
            raise self._accept_report(FailureReport.from_json(text)).error(self.rank)
        owes = self.peers.owes
        ahead = [rank for rank, each in statuses.items() if each.is_ahead_of(own) or owes(rank, each)]
        lost = self._find_lost_rank([rank for rank in ranks if rank not in ahead], own.place)
        if lost is not None:
            raise self._publish_report(lost).error(self.rank)
        return ahead, {rank: each for rank, each in statuses.items() if each.waits and rank not in ahead}

    def _timeout_report(self, statuses: dict[int, RankStatus]) -> FailureReport:
        return timeout_report(self.rank, self.size, statuses, self.timeout)

    def explain(self, error: BaseException) -> BaseException:
        """Return the error to show in place of torch's: about a peer that failed, or about wrong use."""
        if not is_disconnect(error):
            return explain_error(error)
        self._inside, self._has_failed = waiting_place(error), True
        report = self._diagnose() or self._explain_torch_error(error)
        if report is None or (report.traceback and report.rank == self.rank):
            return error
        return report.error(self.rank).with_traceback(error.__traceback__)

    def _explain_torch_error(self, error: BaseException) -> FailureReport | None:
        """Report an error of torch about a peer of which nothing is known."""
        text = str(error)
        if "NCCL" in text or "nccl" in text:
            return None  # it may be a mistake of this rank
        if "Timed out" in text:
            return self.write_report(self._timeout_report)
        statuses = {**self.peers.seen, self.rank: self._own_status()}
        ended = ended_rank_report(self.rank, self.size, statuses)
        return self._publish_report(ended or lost_peer_report(self.rank, self._inside, error))

    def announce_failure(self, error: BaseException) -> None:
        """Store the error that ends this process. Rank 0 waits a moment, since it may host the store."""
        if self._failure_announced:
            return
        self._failure_announced = True
        if self.report is None or not isinstance(error, CollectiveError):
            self._publish_report(FailureReport.from_exception(self.rank, error))
        if self.rank == 0 and not isinstance(error, KeyboardInterrupt):
            self._wait_for_peers("heard")

    def shut_down(self) -> None:
        """Announce the end of this process or of its world, and stop the watchdog."""
        raised = sys.exc_info()[1]  # where a ``finally`` of the program closes the world
        error = getattr(sys, "last_value", None) or (raised if isinstance(raised, Exception) else None)
        if error is not None:
            self.announce_failure(error)
        elif not self.store.is_lost:
            self.processes.await_opening(self.opening_grace)
            self._has_ended = True
            self.store.put(f"at/{self.rank}", self._own_status().to_json())
            self.store.put("alarm", "")
            self.store.put(f"ended/{self.rank}", "")
            self.store.put(f"heard/{self.rank}", "")
            if self.rank == 0:
                self._wait_for_peers("ended")
        self.stop()

    def stop(self) -> None:
        """Stop the thread and drop the reference to the group, so that destroying it frees it."""
        self._stop_event.set()
        # The thread must not be inside torch while the interpreter shuts down.
        self.thread.join(10.0)
        for action in self.shutdown_actions:
            action()
        self.shutdown_actions, self.poll_actions, self._counters, self.group = [], [], [], None

    def _wait_for_peers(self, key: str) -> None:
        self.store.wait([f"{key}/{rank}" for rank in range(self.size) if rank != self.rank], EXIT_GRACE)

    def _diagnose(self) -> FailureReport | None:
        """Find out why a connection broke; wait a little for the reports of the other ranks."""
        self.raise_alarm()
        until = time.monotonic() + DIAGNOSIS_TIMEOUT
        while self.report is None and not self.store.is_lost and time.monotonic() < until:
            self._poll_peers(waiting=True)
            self._report_event.wait(DIAGNOSIS_INTERVAL * min(10.0, self.store.pace))
        if self.report is None and self.store.is_lost:
            # Rank 0 may have announced its end before it took the store with it.
            own = self._own_status()
            self.report = find_deadlock(self.rank, self.size, {**self.peers.seen, self.rank: own})
            if self.report is None:
                return self._publish_report(lost_store_report(self.rank, own.place or "a collective"))
        return self.report

    # --- the watchdog thread

    def _run(self) -> None:
        self.processes.publish()
        self.processes.announce_opening(self.size)
        pause = self.poll_interval
        while not self._stop_event.wait(pause) and not self.store.is_lost:
            pause = self.next_pause(self.poll(), pause)

    def next_pause(self, waiting: bool, pause: float) -> float:
        """Return the seconds to the next poll, after a pause of ``pause``: more and more in a long wait."""
        is_patient = waiting and self.size > LARGE_WORLD
        return min(MAX_WAIT_POLL, pause * 1.5) if is_patient else self.poll_interval

    def poll(self) -> bool:
        """Do what the thread does once in each interval; return whether this rank waits for others."""
        waited = self._measure_wait()
        is_long = waited >= (WAIT_REPORT_DELAY if self.active_call else TORCH_WAIT_DELAY)
        waiting = is_long and bool(self.active_call or self._inside)
        if is_long:
            self.raise_alarm()
        self._alarm_raised = self._alarm_raised or self.store.has("alarm")
        if self._alarm_raised:
            # Not otherwise: who asks a device in another thread disturbs the capture of a CUDA graph.
            for action in self.poll_actions:
                action()
        if self._alarm_raised and self.report is None:
            self._poll_peers(waiting)
            self.processes.answer()
        if is_long and self.report is not None and self.report.interrupts and not self.was_interrupted:
            self._interrupt()
        if waited >= self._hint_delay and not self._hint_logged:
            self._hint_logged = True
            log_wait(self.processes, self.peers, self._own_status(), waited)
        return waiting

    def _measure_wait(self) -> float:
        """Return the seconds in the present collective, of this package or torch, or at one instruction."""
        if self._has_failed:
            return 0.0  # what it was in stays
        frame = sys._current_frames().get(self.caller_thread)  # pyright: ignore[reportPrivateUsage]
        doing, counts = self.active_call, (self.exchange_count, self._count_torch_calls())
        # The same instruction of the same call, and no collective begun since: inside a call that waits.
        instruction = None if doing or frame is None else (id(frame), frame.f_lasti)
        now, activity = time.monotonic(), (doing, *counts, instruction)
        if activity != self._last_activity:
            self._last_activity, self._waits_since, self._hint_logged = activity, now, False
            self._inside = ""
        elif doing is None:
            self._torch_call = call = blocking_call(outward(frame))
            self._inside = f"{call.name} at {find_call_site(frame, torch_prefixes())}" if call.name else ""
        # Before its first collective on torch's groups a rank waits for none that is queued.
        return now - self._waits_since if doing or self._inside or (frame and counts[1]) else 0.0

    def raise_alarm(self) -> None:
        """Let all ranks publish where they are."""
        if not self._alarm_raised:
            self._alarm_raised = True
            self.store.put("alarm", "")

    def _poll_peers(self, waiting: bool) -> None:
        """Publish the status of this rank, and read whether a rank failed, ended or is deadlocked."""
        with self._poll_lock:
            status = self._own_status()
            self.peers.publish(status)
            text = self.store.get("report")
            if text is not None:
                self._accept_report(FailureReport.from_json(text))
                return
            if status.has_departed and waiting:
                self.store.put("left", status.to_json())
            is_stuck = self._is_left_alone(status) and not self._interrupt()
            if is_stuck or waiting or status.inside or self.size <= LARGE_WORLD:
                report = self._find_report(status, waiting, is_stuck)
                if report is not None:
                    self._publish_report(report)

    def _find_report(self, status: RankStatus, waiting: bool, is_stuck: bool) -> FailureReport | None:
        """Return the report for a wait that cannot end; None without one, or while another rank writes it."""

        def judge(statuses: dict[int, RankStatus]) -> FailureReport | None:
            statuses[self.rank] = status
            report = find_deadlock(self.rank, self.size, statuses)
            is_last = (
                status.has_departed and waiting and self.peers.measure_standstill(statuses) >= HINT_DELAY
            )
            if report is None and (is_stuck or is_last):
                report = deadlock_report(self.rank, self.size, statuses)
            return report

        statuses = self.peers.read_window()
        report = judge(statuses)
        if report is not None and self.size > LARGE_WORLD:
            if not self.peers.is_settled or not self.peers.claim("report"):
                return None
            return judge(self.peers.read_all())
        if report is None and waiting:
            window = self.peers.window
            behind = [rank for rank in window if rank not in statuses or statuses[rank].is_behind(status)]
            report = self._find_lost_rank(behind, status.place)
        return report

    def _find_lost_rank(self, ranks: Sequence[int], place: str) -> FailureReport | None:
        """Report a rank of this machine whose process is gone, of those which this one waits for.

        It has no connection that would break before the control channel is open.
        """
        gone = self.processes.find_gone(ranks)
        return None if gone is None else gone_process_report(self.rank, place, *gone)

    def _is_left_alone(self, status: RankStatus) -> bool:
        """Return whether a rank has left the attempt, and this one began a collective of torch without it."""
        text = self.store.get("left")
        left = None if text is None else RankStatus.from_json(text)
        return left is not None and status.exchanges < left.exchanges and status.calls > left.calls

    def _interrupt(self) -> bool:
        """Close the default group; return False where that ends no wait.

        The group stays as it is, or this rank goes on waiting, for it is in a collective of another group.
        """
        if self.was_interrupted:
            still_waits = bool(self._other_groups) and self._waits_since <= self._interrupted_at
            return not still_waits or time.monotonic() - self._interrupted_at < DIAGNOSIS_TIMEOUT
        self.was_interrupted = interrupt_group(self.group, self.store.group_store)
        self._interrupted_at = time.monotonic()
        return self.was_interrupted

    def _publish_report(self, report: FailureReport) -> FailureReport:
        """Publish a report; return the first one that any rank has written."""
        if self.earlier_call_sites and not report.traceback:
            report = replace(report, why=report.why + self.earlier_call_sites)
        winner = self.store.put_if_absent("report", report.to_json())
        return self._accept_report(report if winner is None else FailureReport.from_json(winner))

    def write_report(self, make: Callable[[dict[int, RankStatus]], FailureReport]) -> FailureReport:
        """Publish the report that is made of the statuses of all ranks, unless another rank has or does."""
        while self.report is None:
            if self.peers.claim("report"):
                self._publish_report(make({**self.peers.read_all(), self.rank: self._own_status()}))
            elif self.store.wait(["report"], REPORT_TIMEOUT):
                self._accept_report(FailureReport.from_json(self.store.get("report") or "{}"))
        return self.report

    def _accept_report(self, report: FailureReport) -> FailureReport:
        if self.report is None:
            self.report = report
            self.store.put("alarm", "")
            self.store.put(f"heard/{self.rank}", "")
            self._report_event.set()
        return self.report

    def _own_status(self) -> RankStatus:
        doing = self.active_call
        frame = sys._current_frames().get(self.caller_thread)  # pyright: ignore[reportPrivateUsage]
        site = str(find_call_site(frame, torch_prefixes()))
        status = RankStatus(self.exchange_count, "", self._count_torch_calls(), "", site, self._has_ended)
        if self._has_ended:
            return status
        if doing:
            return replace(status, doing=f"{doing[0]} at {doing[1]}")
        waits = bool(self._inside) and self._torch_call.only_waits
        return replace(status, inside=self._inside, waits=waits, awaited=self.peers.awaited_message)

    def _count_torch_calls(self) -> int:
        """Count the collectives that this process has started on torch's groups."""
        return sum(map(_sequence_number, self._counters))


def _sequence_number(counter: Callable[[], int]) -> int:
    try:
        return counter()
    except RuntimeError:  # the back end has none, on all ranks
        return 0
