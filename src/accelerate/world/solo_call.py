"""Calls that all ranks make together or rank 0 alone: ``if accelerator.is_main_process: save_state(...)``.

Each rank that makes such a call says so in the store. Rank 0 waits for the others. A rank that does not come
is elsewhere once it has begun a collective that rank 0 has not begun: the all-reduce of the next backward, or
a collective of this package. Then rank 0 goes on alone.
"""

from __future__ import annotations

import inspect
import time

from accelerate.core.errors import CollectiveError
from accelerate.world import watchdog
from accelerate.world.call_site import CallSite, find_call_site

_CHECK_INTERVAL = 0.25  # seconds between looks at where the missing ranks are


def is_solo_call(operation: str) -> bool:
    """Return whether rank 0 makes this call alone; a rank that makes it too gets the same answer.

    Args:
        operation: the call, for errors: ``"save_state"``.

    Raises:
        CollectiveError: rank 0 is elsewhere, a rank failed, or the timeout of the group passed.
    """
    global _detector
    watch = watchdog.current()
    if watch is None:
        return False
    if _detector is None or _detector.watchdog is not watch:
        _detector = SoloCallDetector(watch)
    return _detector.is_solo(operation, find_call_site(inspect.currentframe()))


class SoloCallDetector:
    """Finds out which ranks make a call that rank 0 may make alone.

    Args:
        watch: the watchdog of this rank; its store carries the answers.
    """

    def __init__(self, watch: watchdog.Watchdog) -> None:
        self.watchdog, self.rank, self.size = watch, watch.rank, watch.size
        self._store = watch.store.open_prefix("solo_call")
        self._joint_calls = 0
        # Of this rank; rank 0 counts them for each rank that made a call without all the others.
        self._own_calls = 0
        self._extra_calls: dict[int, int] = {}

    def is_solo(self, operation: str, site: CallSite) -> bool:
        """Return whether not all ranks make this call."""
        # The exchanges are counted by calls that all ranks make, so this one is not.
        self.watchdog.active_call = operation, site
        try:
            return self._wait_for_peers() if self.rank == 0 else self._wait_for_rank0(operation)
        finally:
            self.watchdog.active_call = None

    def _wait_for_peers(self) -> bool:
        keys = {f"at/{rank}/{self._next_call(rank)}": rank for rank in range(1, self.size)}
        until = time.monotonic() + self.watchdog.timeout
        # Rank 0 alone asks for all, so its intervals do not grow as much as those of the others.
        interval, missing_keys = _CHECK_INTERVAL * min(10.0, self._store.pace), list(keys)
        while not self._store.wait(missing_keys, interval):
            self.watchdog.check_store_wait(until)
            missing_keys = self._store.find_missing(missing_keys)
            missing = [keys[key] for key in missing_keys]
            if missing and len(self.watchdog.find_ahead(missing)) == len(missing):
                arrived = [rank for rank in keys.values() if rank not in missing]
                for rank in arrived:
                    self._store.put(f"solo/{rank}/{self._next_call(rank)}", "")
                    self._extra_calls[rank] = self._extra_calls.get(rank, 0) + 1
                return True
        self._store.put(f"joint/{self._joint_calls}", "")
        # Every rank has read the answer before, since it has made this call.
        self._store.delete(f"joint/{self._joint_calls - 1}")
        self._joint_calls += 1
        return False

    def _wait_for_rank0(self, operation: str) -> bool:
        own = f"{self.rank}/{self._own_calls}"
        joint, solo = f"joint/{self._joint_calls}", f"solo/{own}"
        self._store.put(f"at/{own}", "")
        self._own_calls += 1
        until = time.monotonic() + self.watchdog.timeout
        interval = _CHECK_INTERVAL * self._store.pace
        try:
            while not self._store.wait([joint], interval, lambda: self.watchdog.check_wait(until)):
                # Rank 0 answers before it goes on, so look where it is first.
                is_ahead = bool(self.watchdog.find_ahead([0]))
                if self._store.has(solo):
                    self._store.delete(solo)
                    return True
                if is_ahead and not self._store.has(joint):
                    raise CollectiveError(
                        f"rank {self.rank} called {operation}, rank 0 did not",
                        why=self.watchdog.peers.describe([0]),
                        fix="call it on every rank, or under `if accelerator.is_main_process`",
                    )
                self.watchdog.check_store_wait(until)
        finally:
            self._store.delete(f"at/{own}")
        self._joint_calls += 1
        return False

    def _next_call(self, rank: int) -> int:
        return self._joint_calls + self._extra_calls.get(rank, 0)


_detector: SoloCallDetector | None = None
