"""The statuses of the ranks in the store: written by each, read so that the load stays the same in any world.

In a small world a rank that waits reads those of all others. In a large one (``LARGE_WORLD``) it reads a
window of them, and the next one at its next poll; first only its next neighbours, since the others write
where they are when they have seen the alarm. All windows together are the world many times over: whatever
holds up one rank soon holds up nearly all. A rank that needs all statuses, for a report or a hint, claims
that task first: one rank at a time reads them, and the others wait for what it writes. A rank that has
claimed a task and ended before it wrote anything is followed by the next that asks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from accelerate.world.process_group import LARGE_WORLD, StoreClient
from accelerate.world.rank_failure_report import RankStatus, describe_ranks

NEIGHBOURS = 8  # ranks that are watched before all have written their statuses
SETTLING_POLLS = 1.25  # intervals between polls in which all have


class PeerStatuses:
    """Writes the status of this rank and reads those of others.

    Args:
        store: which all ranks share.
        rank, size: of this process and of the world.
        poll_interval: seconds between two polls of a rank that does not wait.

    Attributes:
        seen: the last status of each other rank that this one has read.
        window: the ranks that it watched at the last poll.
    """

    def __init__(self, store: StoreClient, rank: int, size: int, poll_interval: float) -> None:
        self.store, self.rank, self.size, self.poll_interval = store, rank, size, poll_interval
        self.seen: dict[int, RankStatus] = {}
        small = range(size if size <= LARGE_WORLD else 0)
        self.window: Sequence[int] = [each for each in small if each != rank]
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
