"""A world of thousands of simulated ranks around a store that counts requests, on a simulated clock."""

from __future__ import annotations

import heapq
import random
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from accelerate.checkpoint import rank_group
from accelerate.checkpoint.rank_group import SoloCallDetector
from accelerate.core.errors import CollectiveError
from accelerate.world import peers, preemption, process_group, watchdog
from accelerate.world.call_site import CallSite
from accelerate.world.control_channel import ControlChannel
from accelerate.world.control_tree import ControlTree
from accelerate.world.preemption import StopConsensus
from accelerate.world.process_group import StoreClient
from accelerate.world.watchdog import Watchdog

SITE = CallSite("train.py", 12, "main")


class Clock:
    """Stands for the module ``time``: sleeping takes no time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class CountedStore:
    """The texts of a store, and who has asked for how much.

    Attributes:
        clock: the simulated time.
        visible_from: key -> when the clock shows it, of keys that an absent rank sets.
        requests: rank -> requests.
        keys: rank -> keys in its requests.
        by_key: key -> requests that named it.
        sent: bytes of texts read and written.
    """

    clock: Clock
    texts: dict[str, bytes] = field(default_factory=dict)
    visible_from: dict[str, float] = field(default_factory=dict)
    requests: Counter[int] = field(default_factory=Counter)
    keys: Counter[int] = field(default_factory=Counter)
    by_key: Counter[str] = field(default_factory=Counter)
    sent: int = 0

    def reset(self) -> None:
        """Count from here on."""
        self.requests.clear()
        self.keys.clear()
        self.by_key.clear()
        self.sent = 0

    @property
    def total(self) -> int:
        return self.requests.total()

    def is_set(self, key: str) -> bool:
        return key in self.texts and self.visible_from.get(key, 0.0) <= self.clock.now

    def request(self, rank: int, method: str, prefix: str, *arguments: Any) -> Any:
        """Answer as torch's store does."""
        names = arguments[0] if isinstance(arguments[0], list) else [arguments[0]]
        names = [f"{prefix}/{name}" for name in names]
        self.requests[rank] += 1
        self.keys[rank] += len(names)
        self.by_key.update(names)
        (*_, name) = names
        if method == "check":
            return all(map(self.is_set, names))
        if method in ("get", "multi_get"):
            values = [self.texts[each] for each in names]
            self.sent += sum(map(len, values))
            return values if method == "multi_get" else values[0]
        if method == "add":
            self.texts[name] = str(int(self.texts.get(name, b"0")) + arguments[1]).encode()
            return int(self.texts[name])
        if method == "delete_key":
            return self.texts.pop(name, None) is not None
        text = arguments[-1].encode()
        self.sent += len(text)
        if method == "compare_set" and self.is_set(name):
            return self.texts[name]
        assert method in ("set", "compare_set"), method
        self.texts[name] = text
        return text


_NO_STORE = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - nothing is in it


class CountedClient(StoreClient):
    """A client of a ``CountedStore``."""

    def __init__(self, counted: CountedStore, rank: int, size: int) -> None:
        super().__init__(_NO_STORE, size)
        self._prefix, self.counted, self.rank = "test", counted, rank

    def _request(self, method: str, *arguments: Any) -> Any:
        return self.counted.request(self.rank, method, self._prefix, *arguments)


class _Event:
    """The event that a report has come, on the simulated clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.is_set = clock, False

    def set(self) -> None:
        self.is_set = True

    def wait(self, seconds: float) -> bool:
        self.clock.sleep(0.0 if self.is_set else seconds)
        return self.is_set


class SimulatedWorld:
    """The watchdogs of all ranks of a world, polled in turn as their threads would.

    Attributes:
        ranks: the watchdogs.
    """

    def __init__(self, size: int, timeout: float = 1800.0) -> None:
        self.size, self.clock, self.random = size, Clock(), random.Random(1)
        self.store = CountedStore(self.clock)
        self.ranks = [Watchdog(rank, size, timeout, self.client(rank)) for rank in range(size)]
        for watch in self.ranks:
            watch.caller_thread = 0  # its stack is not looked at
            watch._report_event = _Event(self.clock)  # type: ignore[assignment] # pyright: ignore

    def client(self, rank: int) -> StoreClient:
        return CountedClient(self.store, rank, self.size)

    def key(self, name: str) -> str:
        """Return the name that a key has in the store."""
        return f"test/{name}"

    def set_later(self, name: str, seconds: float, text: str = "") -> None:
        """Set a key that can be seen after some time."""
        self.store.texts[self.key(name)] = text.encode()
        self.store.visible_from[self.key(name)] = self.clock.now + seconds

    def hide(self, name: str) -> None:
        """Keep a key from being seen until ``show``."""
        self.store.visible_from[self.key(name)] = float("inf")

    def show(self, name: str) -> None:
        del self.store.visible_from[self.key(name)]

    def end(self, rank: int) -> None:
        """Let a rank end well, as its last words say."""
        self.ranks[rank]._has_ended = True

    def begin_call(self, ranks: range | list[int], operation: str = "gather") -> None:
        """Let ranks begin a collective and wait in it."""
        for rank in ranks:
            self.ranks[rank].exchange_count += 1
            self.ranks[rank].active_call = operation, SITE

    def run_threads(self, seconds: float, poll: Callable[[int], float | None]) -> None:
        """Call ``poll(rank)`` for each rank, at a random time and then after as many seconds as it says."""
        start, end = self.clock.now, self.clock.now + seconds
        first = [(start + self.random.random() * self.ranks[0].poll_interval, r) for r in range(self.size)]
        heapq.heapify(queue := first)
        while queue and queue[0][0] < end:
            now, rank = heapq.heappop(queue)
            self.clock.now = now
            pause = poll(rank)
            if pause is not None:
                heapq.heappush(queue, (now + pause, rank))
        self.clock.now = end

    def watch_for(self, seconds: float) -> None:
        """Let all watchdogs poll for some time."""
        pauses: defaultdict[int, float] = defaultdict(lambda: self.ranks[0].poll_interval)

        def poll(rank: int) -> float:
            pauses[rank] = self.ranks[rank].next_pause(self.ranks[rank].poll(), pauses[rank])
            return pauses[rank]

        self.run_threads(seconds, poll)

    def start(self) -> None:
        """Make the requests of a start: for the processes, the tree, and the group of large transfers."""
        for watch in self.ranks:
            watch.processes.publish()
            watch.processes.announce_opening(self.size)
        for rank in range(self.size):
            tree = ControlTree(rank, self.size)
            if tree.child_ranks:
                watch = self.ranks[rank]
                watch.store.put(f"tree/{rank}", '["", "127.0.0.1", 1]')
                delay = self.random.random() * 10.0
                self.store.visible_from[self.key(f"tree/{rank}")] = self.clock.now + delay
        begin = self.clock.now
        with patch("socket.create_connection"), patch("accelerate.world.control_tree._Connection"):
            for rank in range(1, self.size):
                self.clock.now = begin
                tree = ControlTree(rank, self.size)
                tree._connect(self.ranks[rank].store, "127.0.0.1", tree.parent_rank or 0, lambda: None)
        self.set_later("all_arrived", 10.0)
        begin = self.clock.now
        with patch.object(dist, "ProcessGroupGloo", create=True):
            for watch in self.ranks:
                self.clock.now = begin
                ControlChannel(watch)._open_group()


@contextmanager
def simulated_world(size: int) -> Iterator[SimulatedWorld]:
    """Yield a world whose waits take no time."""
    world = SimulatedWorld(size)
    modules = (watchdog, peers, process_group, preemption, rank_group)
    patches = [patch.object(module, "time", world.clock) for module in modules]
    for each in patches:
        each.start()
    try:
        yield world
    finally:
        for each in patches:
            each.stop()


def stop_all(world: SimulatedWorld, signalled: int, steps: int) -> set[int | None]:
    """Let a rank get a signal while the ranks are some steps apart; return where they stop."""
    ranks = [StopConsensus(watch.rank, world.size, watch.store) for watch in world.ranks]
    for each in ranks:
        for _ in range(steps + each.rank % 3):
            each.step_counter.arrive()

    def poll(rank: int) -> float | None:
        ranks[rank].poll("SIGTERM" if rank == signalled else "")
        if ranks[rank].step_counter.decided.is_set():
            return None
        return preemption.poll_delay(ranks[rank], world.ranks[rank])

    world.run_threads(600.0, poll)
    return {each.step_counter.stop_at for each in ranks}


def save_together(world: SimulatedWorld, ranks: range) -> None:
    """Let ranks call ``save_state`` with the others, which come within 20 s; rank 0 answers then."""
    if 0 in ranks:
        for rank in range(1, world.size):
            world.set_later(f"solo_call/at/{rank}/0", 20.0 * world.random.random())
    else:
        world.set_later("solo_call/joint/0", 20.0)
    begin = world.clock.now
    for rank in ranks:
        world.clock.now = begin
        assert SoloCallDetector(world.ranks[rank]).solo_number("save_state", SITE, int) is None


def explain_lost_peer(world: SimulatedWorld, ranks: range | list[int]) -> set[str]:
    """Let connections of ranks break; return what their errors say."""
    return {str(world.ranks[rank].explain_disconnect(ConnectionError("closed by peer"))) for rank in ranks}


def raise_disagreement(world: SimulatedWorld) -> None:
    """Let all ranks end by an error about each other's calls, which came with the messages of the tree."""
    for watch in world.ranks:
        error = CollectiveError("the ranks called different collectives")
        assert watch.explain(error) is error
        watch.announce_failure(error)


@contextmanager
def hosted_store(request_timeout: float) -> Iterator[tuple[StoreClient, int]]:
    """Yield a client of a store that another process hosts, and that process."""
    script = "import sys, time, torch.distributed as dist\n"
    script += "store = dist.TCPStore('127.0.0.1', 0, None, True, wait_for_workers=False)\n"
    script += "print(store.port, flush=True)\ntime.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout is not None
            port = int(host.stdout.readline())
            store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage] - documented
                "127.0.0.1", port, None, False, wait_for_workers=False
            )
            with patch.object(process_group, "REQUEST_TIMEOUT", request_timeout):
                yield StoreClient(store), host.pid
        finally:
            host.kill()


def own_store() -> StoreClient:
    """Return a client of a store that this process hosts."""
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage] - documented
        "127.0.0.1", 0, None, True, wait_for_workers=False
    )
    return StoreClient(store)
