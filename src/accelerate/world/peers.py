"""The other ranks: their statuses and stacks, which the store carries, and whether their processes run.

Statuses are written by each rank, and read so that the load of the store stays the same in any world. In a
small world a rank that waits reads those of all others. In a large one (``LARGE_WORLD``) it reads a window of
them, and the next one at its next poll; first only its next neighbours, since the others write where they are
when they have seen the alarm. All windows together are the world many times over: whatever holds up one rank
soon holds up nearly all. A rank that needs all statuses, for a report or a hint, claims that task first: one
rank at a time reads them, and the others wait for what it writes. A rank that has claimed a task and ended
before it wrote anything is followed by the next that asks.

A rank publishes its process once. One that waits for others asks for their stacks; the watchdog thread of
each answers. Whoever does not answer is looked up among the processes of this machine.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import dropwhile
from pathlib import Path

from accelerate.world.call_site import PACKAGE_PREFIXES, outward, torch_prefixes
from accelerate.world.process_group import LARGE_WORLD, StoreClient
from accelerate.world.rank_failure_report import RankStatus, describe_ranks, describe_stall, split_by_progress

logger = logging.getLogger(__name__)

NEIGHBOURS = 8  # ranks that are watched before all have written their statuses
SETTLING_POLLS = 1.25  # intervals between polls in which all have
MAX_STACK = 24  # innermost frames of a shown stack
_STACK_FILE = "accelerate-stack"  # in memory; a forked process writes its stack there
_STACK_SIGNAL = getattr(signal, "SIGRTMAX", 0) - 3  # on Linux; nobody else's
_STACK_TIMEOUT = 0.5  # seconds
_stack_fd = -1
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
MAX_RANKS = 8  # ranks that are asked, or named, at a time
ANSWER_TIMEOUT = 3.0  # seconds that other ranks have to say where they are


class PeerStatuses:
    """Writes the status of this rank and reads those of others.

    Args:
        store: which all ranks share.
        rank, size: of this process and of the world.
        poll_interval: seconds between two polls of a rank that does not wait.

    Attributes:
        seen: the last status of each other rank that this one has read.
        window: the ranks that it watched at the last poll.
        awaited_message: the message of rank 0 that this rank waits for, see ``RankStatus``; empty outside.
        owes_message: on rank 0, where it sends any: returns whether it has not sent a rank such a message.
    """

    def __init__(self, store: StoreClient, rank: int, size: int, poll_interval: float) -> None:
        self.store, self.rank, self.size, self.poll_interval = store, rank, size, poll_interval
        self.seen: dict[int, RankStatus] = {}
        small = range(size if size <= LARGE_WORLD else 0)
        self.window: Sequence[int] = [each for each in small if each != rank]
        self.awaited_message: tuple[int, ...] = ()
        self.owes_message: Callable[[int, Sequence[int]], bool] | None = None
        self._published: RankStatus | None = None
        self._polls = 0
        self._alarm_time: float | None = None
        self._turns: dict[str, int] = {}
        self._still: dict[int, RankStatus] = {}
        self._still_since = 0.0

    def publish(self, status: RankStatus) -> None:
        """Write the status of this rank, if it is another one."""
        if status != self._published:
            self._published = status
            self.store.put(f"at/{self.rank}", status.to_json())

    def read(self, ranks: Sequence[int]) -> dict[int, RankStatus]:
        """Return the statuses of those ranks that have written one."""
        names = {f"at/{rank}": rank for rank in ranks}
        texts = self.store.read(list(names))
        return {names[key]: RankStatus.from_json(text) for key, text in texts.items()}

    def describe(self, ranks: Sequence[int]) -> str:
        """Return where other ranks are, in words."""
        return "; ".join(describe_ranks(ranks, self.read(ranks)))

    def owes(self, rank: int, status: RankStatus) -> bool:
        """Return whether another rank waits for a message that this one has not sent."""
        is_owed = self.owes_message
        return bool(is_owed is not None and status.awaited and is_owed(rank, status.awaited))

    def read_all(self) -> dict[int, RankStatus]:
        """Return the statuses of all other ranks; in a large world after ``claim``."""
        self.seen |= self.read([rank for rank in range(self.size) if rank != self.rank])
        return dict(self.seen)

    def read_window(self) -> dict[int, RankStatus]:
        """Return the statuses of the ranks that this one watches at this poll; all in a small world."""
        if self.size <= LARGE_WORLD:
            return self.read_all()
        if self.is_settled:
            first, count = self.rank + self._polls * LARGE_WORLD, LARGE_WORLD
            self._polls += 1
        else:
            first, count = self.rank, NEIGHBOURS
        self.window = [
            rank for step in range(1, count + 1) if (rank := (first + step) % self.size) != self.rank
        ]
        statuses = self.read(self.window)
        self.seen |= statuses
        return statuses

    @property
    def is_settled(self) -> bool:
        """True once all ranks have had the time to see the alarm and write their statuses."""
        now = time.monotonic()
        if self._alarm_time is None:
            self._alarm_time = now
        return self.size <= LARGE_WORLD or now - self._alarm_time > SETTLING_POLLS * self.poll_interval

    def measure_standstill(self, statuses: Mapping[int, RankStatus]) -> float:
        """Return for how many seconds all other ranks have waited where they are, for ranks that have left.

        Zero as long as one computes, goes on, or has not been read.

        Args:
            statuses: those that were read now; in a large world a part of them.
        """
        now = time.monotonic()
        if not self._still:
            self._still_since = now
        for rank, status in statuses.items():
            if rank == self.rank:
                continue
            is_still = status.waits or status.has_departed
            if not is_still or self._still.setdefault(rank, status) != status:
                self._still = {}
                break
        return now - self._still_since if len(self._still) == self.size - 1 else 0.0

    def claim(self, task: str) -> bool:
        """Return whether this rank does a task that needs all statuses; in a small world each does."""
        if self.size <= LARGE_WORLD:
            return True
        turn = self._turns[task] = self._turns.get(task, -1) + 1
        return self.store.put_if_absent(f"{task}/by/{turn}", str(self.rank)) in (None, str(self.rank))


class PeerProcesses:
    """The processes of the other ranks, as far as this rank knows them.

    Args:
        store: which all ranks share.
        rank: of this process.
        thread: the thread that works, whose stack others ask for.
        known: processes that are known already: those that met before the group was opened.
    """

    def __init__(
        self, store: StoreClient, rank: int, thread: int, known: dict[int, tuple[int, str]] | None = None
    ) -> None:
        self.store, self.rank, self.thread = store, rank, thread
        self._answered_question = ""
        self.known = known or {}
        self._groups = ["default"]

    def publish(self) -> None:
        """Tell the others the process of this rank."""
        self.store.put(f"process/{self.rank}", f"{os.getpid()} {process_namespace()}")

    def announce_opening(self, size: int, group: str = "default") -> None:
        """Tell the others that this rank has opened a group of all ``size`` ranks."""
        if group not in self._groups:
            self._groups.append(group)
        if self.store.add(f"opened/{group}") == size:
            self.store.put(f"all_opened/{group}", "")

    def await_opening(self, seconds: float) -> None:
        """Wait until all ranks have opened the groups, for so many seconds at most.

        A rank that ends closes its connections, and gloo fails in one that is still making them.
        """
        self.store.wait([f"all_opened/{group}" for group in self._groups], seconds)

    def _find(self, ranks: Sequence[int]) -> dict[int, tuple[int, str]]:
        """Return the processes of ranks and where their numbers mean something; (0, "") if unknown."""
        keys = {f"process/{rank}": rank for rank in ranks if rank not in self.known}
        for key, text in (self.store.read(list(keys)) if keys else {}).items():
            pid, _, namespace = text.partition(" ")
            self.known[keys[key]] = int(pid), namespace
        return {rank: self.known.get(rank, (0, "")) for rank in ranks}

    def find_gone(self, ranks: Sequence[int]) -> tuple[int, int] | None:
        """Return a rank whose process, on this machine, is gone, and that process; None without one."""
        for rank, (pid, namespace) in self._find(ranks).items():
            if namespace == process_namespace() and not _process_status(pid):
                return rank, pid
        return None

    def ask(self, ranks: Sequence[int], question: str, seconds: float) -> list[str]:
        """Return where ranks are, by their own stacks; or why one does not answer.

        Args:
            ranks: to ask.
            question: another one each time.
            seconds: to wait for answers.
        """
        self.store.put("question", question)
        keys = {f"answer/{question}/{rank}": rank for rank in ranks[:MAX_RANKS]}
        self.store.wait(list(keys), seconds)
        answers = self.store.read(list(keys))
        return [
            f"rank {rank}, most recent call last:\n{answers[key]}"
            if key in answers
            else f"rank {rank} does not answer{self._describe_silent(rank)}"
            for key, rank in keys.items()
        ]

    def answer(self) -> None:
        """Publish the stack of the working thread, if another rank has asked where this one is."""
        question = self.store.get("question") or ""
        if question != self._answered_question:
            self._answered_question = question
            self.store.put(f"answer/{question}/{self.rank}", format_thread(self.thread))

    def _describe_silent(self, rank: int) -> str:
        pid, namespace = self._find([rank])[rank]
        if not pid:
            return ""
        if namespace != process_namespace():
            return f": process {pid} on {namespace.split()[0]} is stopped or gone"
        status = _process_status(pid)
        if status in ("stopped", "tracing-stop"):
            status = f"stopped (SIGSTOP, Ctrl-Z or a debugger); kill -CONT {pid} lets it go on"
        return f": process {pid} is {status or 'gone'}"


def format_thread(thread: int) -> str:
    """Return the stack of a thread as text; with the child processes, if a data loader waits for them."""
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    if frame is None:
        return "the thread has ended\n"
    stack = traceback.extract_stack(frame)
    # The outermost frames are the launcher's: they run the script.
    of_user = list(dropwhile(lambda each: each.filename.startswith(PACKAGE_PREFIXES), stack))
    lines = traceback.format_list((of_user or stack)[-MAX_STACK:])
    loader_folder = os.path.join(torch_prefixes()[0], "utils", "data")
    if any(each.f_code.co_filename.startswith(loader_folder) for each in outward(frame)):
        import psutil

        children = psutil.Process().children()
        states = (f"{child.pid} ({child.status()})" for child in children)
        lines.append(f"  its loader's workers: {', '.join(states) or 'none'}\n")
        lines += [_child_stack(child.pid) for child in children[:MAX_RANKS]]
    return "".join(lines)


def write_stack_on_signal() -> None:
    """Let this forked process, which may be a loader's worker, show its stack to its parent; on Linux."""
    global _stack_fd
    if _stack_fd >= 0 or not hasattr(os, "memfd_create"):
        return  # a fork of a fork shares the file
    signal.signal(_STACK_SIGNAL, signal.SIG_IGN)  # it would end the process until the next line but one
    _stack_fd = os.memfd_create(_STACK_FILE)
    faulthandler.register(_STACK_SIGNAL, file=_stack_fd, all_threads=False)


def _child_stack(pid: int) -> str:
    """Return the stack of a forked child as text, the innermost frame first; empty where it has none."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # it is gone, or no longer ours
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(entry).startswith(f"/memfd:{_STACK_FILE}"):
                written, until = entry.stat().st_size, time.monotonic() + _STACK_TIMEOUT
                os.kill(pid, _STACK_SIGNAL)
                while entry.stat().st_size == written and time.monotonic() < until:
                    time.sleep(0.01)
                text = entry.read_bytes()[written:].decode(errors="replace")
                shown = "".join(f"    {line}\n" for line in text.splitlines()[1 : MAX_STACK + 1])
                return f"  worker {pid}, most recent call first:\n{shown}" if shown else ""
    return ""


@lru_cache(maxsize=1)
def process_namespace() -> str:
    """Return the host, and on Linux the container and the boot, in which numbers of processes mean the same.

    Two machines may have one name, and the first namespace of every kernel has the same number.
    """
    place = "/proc/self/ns/pid"
    container = os.readlink(place) if os.path.exists(place) else ""
    boot = BOOT_ID_FILE.read_text(encoding="ascii").strip() if BOOT_ID_FILE.exists() else ""
    return f"{socket.gethostname()} {container} {boot}".rstrip()


def _process_status(pid: int) -> str:
    """Return how a process of this machine is, in the words of psutil; empty when it has ended."""
    import psutil

    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return ""
    return "" if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else str(status)


def log_wait(processes: PeerProcesses, peers: PeerStatuses, own: RankStatus, waited: float) -> None:
    """Log for whom this rank waits. The first one that waits asks them for their stacks.

    Args:
        processes, peers: those of the other ranks.
        own: where this rank is.
        waited: seconds that it has been there.
    """
    question = f"{own.exchanges}.{own.calls}"
    if not peers.claim(f"hint/{question}"):
        return  # in a large world one rank does
    statuses = {**peers.read_all(), peers.rank: own}
    if not own.place:
        if stall := describe_stall(peers.rank, waited, statuses):
            logger.warning("%s", stall)
        return
    missing, waiting = split_by_progress(peers.rank, peers.size, statuses)
    if not missing:
        return
    missing = missing[:MAX_RANKS]
    shown = peers.describe(missing)
    waiting += [rank for rank in missing if rank in statuses and statuses[rank].waits]
    is_first = peers.rank < min(waiting, default=peers.size)
    details = processes.ask(missing, f"{peers.rank}.{question}", ANSWER_TIMEOUT) if is_first else []
    logger.warning(
        "rank %d has waited %.0f s in %s: %s. Every rank must make this call.%s",
        peers.rank, waited, own.place, shown, "".join(f"\n{each}" for each in details),
    )  # fmt: skip
