"""Statuses of the ranks and the failure reports derived from them: pure functions, no communication."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

from accelerate.core.errors import UNKNOWN_RANK, CollectiveError, PeerError, find_consequence

# Operations by which a rank leaves an attempt that all ranks make together, in whatever they are meanwhile.
DEPARTURES = frozenset({"find_executable_batch_size"})
SAME_CALLS = (
    "every rank must make the same collective calls in the same order: look for one under a condition on the "
    "rank (`if accelerator.is_main_process`), for an error that one rank caught, or for a rank with more "
    "batches than others (`even_batches=False` without `join_uneven_inputs`)"
)
MAX_TRACEBACK = 20_000  # characters of a stored traceback
SYSTEM_KNOWS = "what it printed, and what the system says about its memory, may tell more"
_MAX_ROWS = 16  # ranks in a table
_NEW_ROW = "\n       "  # below the first row, which the error prints after "  why: "


@dataclass(frozen=True)
class RankStatus:
    """The published status of a rank; field names are keys of its JSON text in the store.

    Attributes:
        exchanges: how many exchanges of the control channel it began.
        doing: the collective of this package it is in, ``"gather at train.py:12"``; empty outside.
        calls: how many collectives it began on torch's groups.
        inside: the call of torch it waits in, ``"backward at train.py:20"``; empty outside.
        waits: that call does nothing but communicate; a forward or backward may also compute.
        at: the line of user code it executes.
        ended: it makes no more collectives.
        awaited: the message of rank 0 that it waits for, which is no collective: the number of its default
            process group, of the loop over data, and of the message in it; empty outside.
    """

    exchanges: int
    doing: str = ""
    calls: int = 0
    inside: str = ""
    at: str = ""
    ended: bool = False
    waits: bool = False
    awaited: Sequence[int] = ()

    @property
    def place(self) -> str:
        """Return the call that it is in, empty outside."""
        return self.doing or self.inside

    def is_behind(self, other: RankStatus) -> bool:
        """Return whether it has not begun the call that ``other`` is in."""
        return self.exchanges < other.exchanges if other.doing else self.calls < other.calls

    def is_ahead_of(self, other: RankStatus) -> bool:
        """Return whether it has begun a collective that ``other`` has not, or begins none any more."""
        return self.ended or self.exchanges > other.exchanges or self.calls > other.calls

    @property
    def has_departed(self) -> bool:
        """Return whether it has left an attempt, and waits for the others to leave it too."""
        return self.doing.partition(" at ")[0] in DEPARTURES

    def to_json(self) -> str:
        """Return the JSON text for the store."""
        return json.dumps(asdict(self))

    @staticmethod
    @lru_cache(maxsize=256)
    def from_json(text: str) -> RankStatus:
        """Parse the text of ``to_json``; many ranks write the same one."""
        return RankStatus(**json.loads(text))

    def describe(self) -> str:
        """Return the status in words."""
        if self.ended:
            return "has ended"
        if self.place:
            return f"is in {self.place}"
        return f"is at {self.at}"


@dataclass(frozen=True)
class FailureReport:
    """Why the ranks cannot go on.

    Attributes:
        rank: the rank that noticed it, or (with a traceback) failed itself.
        what, why, fix: the text of the error.
        traceback: that of the rank that failed.
        lost_rank: the rank that is gone without a word, ``UNKNOWN_RANK`` where nobody knows which.
        interrupts: ranks that wait in torch are interrupted, since no peer that ends would free them.
    """

    rank: int
    what: str
    why: str = ""
    fix: str = ""
    traceback: str = ""
    lost_rank: int | None = None
    interrupts: bool = False

    @staticmethod
    def from_exception(rank: int, error: BaseException, what: str = "", why: str = "") -> FailureReport:
        """Report ``error``, raised on ``rank``; one that another rank's failure led to reports that rank.

        Args:
            rank: this rank.
            error: the exception, with its traceback.
            what: replaces ``"rank 1 failed"`` in the text.
            why: the reason why others cannot go on.
        """
        peer = find_consequence(error)
        if isinstance(peer, PeerError) and peer.failed_rank is not None:
            return FailureReport(
                peer.failed_rank, peer.what, peer.why, peer.fix, peer.traceback,
                lost_rank=None if peer.traceback else peer.failed_rank,
            )  # fmt: skip
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        summary = traceback.format_exception_only(type(error), error)[-1].strip()
        text = text[-MAX_TRACEBACK:]
        return FailureReport(rank, f"{what or f'rank {rank} failed'}: {summary}", why, traceback=text)

    def to_json(self) -> str:
        """Return the JSON text for the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> FailureReport:
        """Parse the text of ``to_json``."""
        return FailureReport(**json.loads(text))

    def error(self, here: int) -> CollectiveError:
        """Return the error to raise on rank ``here``: the same on all ranks but the one that failed."""
        failed_rank = self.rank if self.traceback else self.lost_rank
        if failed_rank is None or failed_rank == here:
            return CollectiveError(self.what, why=self.why, fix=self.fix)
        error = PeerError(self.what, why=self.why, fix=self.fix)
        error.failed_rank, error.traceback = failed_rank, self.traceback
        return error


def find_deadlock(me: int, size: int, positions: Mapping[int, RankStatus]) -> FailureReport | None:
    """Return a report if rank ``me`` certainly waits for ever, else None.

    That is: a rank has ended without having begun the collective in which ``me`` waits; or two ranks are
    deadlocked: one waits inside torch in a collective that the other, in the control channel, has not begun.
    Stages of a pipeline begin different numbers, so nobody is deadlocked while a rank computes.
    A rank that has left an attempt waits for others that are interrupted.
    """
    status = positions[me]
    # A message may be on its way, and ends the wait for it.
    all_wait = all((each.place and not each.awaited) or each.ended for each in positions.values())
    for rank, other in positions.items():
        if rank == me:
            continue
        if status.doing and other.exchanges < status.exchanges:
            if other.ended:
                return _unreached_report(me, size, positions, status.doing)
            if other.inside and other.calls > status.calls and all_wait and not status.has_departed:
                return deadlock_report(me, size, positions)
        if status.inside and not status.awaited and status.calls > other.calls:
            if other.ended and other.exchanges <= status.exchanges:
                return _unreached_report(me, size, positions, status.inside)
            if other.doing and other.exchanges > status.exchanges and all_wait and not other.has_departed:
                return deadlock_report(me, size, positions)
    return None


def ended_rank_report(me: int, size: int, positions: Mapping[int, RankStatus]) -> FailureReport | None:
    """Return the report for a connection of rank ``me`` that broke where a rank has ended, else None.

    Not all collectives are counted: the stages of a pipeline make different numbers.
    """
    ended = [rank for rank, other in positions.items() if rank != me and other.ended]
    if not ended:
        return None
    message = f"rank {ended[0]} has ended while rank {me} was in {positions[me].place}"
    return FailureReport(me, message, why=table(size, positions), fix=SAME_CALLS)


def split_by_progress(me: int, size: int, positions: Mapping[int, RankStatus]) -> tuple[list[int], list[int]]:
    """Return the ranks that rank ``me`` waits for, and those of the others that are in a collective."""
    others = [rank for rank in range(size) if rank != me]
    if positions[me].awaited:
        return [0], [r for r in others if r and r in positions and positions[r].place]
    missing = [r for r in others if r not in positions or positions[r].is_behind(positions[me])]
    if not missing and positions[me].waits:
        # In a group whose collectives are not counted, since stages of a pipeline make different numbers.
        missing = [r for r in others if not positions[r].place]
    if not missing and positions[me].waits:
        # They have begun as many collectives as this one, and others: each waits for the other.
        missing = [r for r in others if positions[r].waits and positions[r].inside != positions[me].inside]
    return missing, [r for r in others if r not in missing and positions[r].place]


def describe_stall(me: int, seconds: float, positions: Mapping[int, RankStatus]) -> str:
    """Return the warning about rank ``me``, which stays at one instruction outside of all collectives.

    It names the rank that has begun the fewest collectives of torch; empty if that is none but ``me``.
    """
    own, behind = positions[me], min(positions, key=lambda rank: positions[rank].calls)
    if positions[behind].calls == own.calls:
        return ""
    return (
        f"rank {me} has been at the same instruction, {own.at}, for {seconds:.0f} s, after {own.calls} "
        f"collectives of torch; rank {behind} has begun {positions[behind].calls} of them, the fewest, and "
        f"{positions[behind].describe()}. If the instruction reads the device (item(), synchronize()), it "
        "waits for that rank. Every rank must make the same collective calls."
    )


def timeout_report(me: int, size: int, positions: Mapping[int, RankStatus], seconds: float) -> FailureReport:
    """Return the report for a wait of rank ``me`` that reached the timeout."""
    fix = (
        "make the call on every rank; for a rank that needs longer, "
        "InitProcessGroupKwargs(timeout=timedelta(...))"
    )
    return _unreached_report(
        me, size, positions, positions[me].place, suffix=f" within {seconds:g} s", fix=fix
    )


def deadlock_report(me: int, size: int, positions: Mapping[int, RankStatus]) -> FailureReport:
    """Return the report for ranks that wait for each other."""
    # In a large world not all statuses are read: those read may be in no collective of this package.
    doing = [status.doing for status in (positions[me], *positions.values()) if status.doing]
    place = doing[0] if doing else positions[me].place or "a collective"
    return _unreached_report(
        me, size, positions, place, prefix="the ranks wait for each other in different places: "
    )


def _unreached_report(
    me: int,
    size: int,
    positions: Mapping[int, RankStatus],
    place: str,
    *,
    prefix: str = "",
    suffix: str = "",
    fix: str = SAME_CALLS,
) -> FailureReport:
    """Return the report for a call that only some ranks have reached."""
    first = next((p for p in positions.values() if p.doing == place), positions[me])
    if first.doing:
        count = sum(p.exchanges >= first.exchanges for p in positions.values())
    else:
        count = sum(p.calls >= positions[me].calls for p in positions.values())
    what = f"{prefix}{place} was reached by {count} of {size} ranks{suffix}"
    return FailureReport(me, what, why=table(size, positions), fix=fix)


def lost_peer_report(me: int, place: str, error: BaseException) -> FailureReport:
    """Return the report for a connection that broke in a call, with a peer that has said nothing."""
    return FailureReport(
        me,
        f"{place} was left by a process that is gone",
        why=f"it was killed, or ended without an error message ({str(error).partition(chr(10))[0]})",
        fix=SYSTEM_KNOWS,
        lost_rank=UNKNOWN_RANK,
    )


def lost_store_report(me: int, place: str) -> FailureReport:
    """Return the report for a store of the group that is gone, with the process that hosts it."""
    return FailureReport(
        me,
        f"rank 0, or the launcher, is gone while rank {me} was in {place}",
        why="the connection to the store of the group is closed",
        fix="the first error in the output of the other ranks says why",
        lost_rank=UNKNOWN_RANK,
    )


def gone_process_report(me: int, place: str, rank: int, process: int) -> FailureReport:
    """Return the report for a rank whose process, on this machine, is gone."""
    return FailureReport(
        me,
        f"rank {rank} is gone while rank {me} was in {place}",
        why=f"its process {process} was killed, or ended without a word",
        fix=SYSTEM_KNOWS,
        lost_rank=rank,
    )


def table(size: int, positions: Mapping[int, RankStatus]) -> str:
    """Return a table with one line per rank."""
    rows = describe_ranks(range(min(size, _MAX_ROWS)), positions)
    return _NEW_ROW.join([*rows, *(["..."] if size > _MAX_ROWS else [])])


def describe_ranks(ranks: Iterable[int], positions: Mapping[int, RankStatus]) -> list[str]:
    """Return where each rank is, in words."""
    return [f"rank {r} {positions[r].describe() if r in positions else 'is silent'}" for r in ranks]


def find_difference(descriptions: Sequence[Mapping[str, str]]) -> tuple[str | None, list[str]]:
    """Return the first path about which the ranks disagree, and what each has there.

    Where they disagree about the order alone, that is no path and the paths of each.

    Args:
        descriptions: path -> description of what each rank has, by rank.
    """
    for path in dict.fromkeys(path for description in descriptions for path in description):
        column = [description.get(path, "nothing there") for description in descriptions]
        if len(set(column)) > 1:
            return path, column
    return None, [", ".join(description) for description in descriptions]


def rank_table(rows: Iterable[object]) -> str:
    """Return a table of one text per rank, in rank order."""
    return _NEW_ROW.join(f"rank {rank}: {row}" for rank, row in enumerate(rows))
