"""Who is where, and what follows from it: pure functions of what the ranks say of themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from accelerate.core.errors import CollectiveError, PeerError

SAME_CALLS = (
    "every rank must make the same collective calls in the same order: look for one under a condition on the "
    "rank (`if accelerator.is_main_process`), or for an error that one rank caught"
)
_SHOWN = 16  # ranks in a table


@dataclass(frozen=True)
class Position:
    """Where a rank is.

    Attributes:
        letters: exchanges of this package that it began.
        doing: the one it is in, ``"gather at train.py:12"``; empty outside.
        calls: collectives of torch's own group that it began.
        inside: the wait of torch that it is in, ``"backward at train.py:20"``; empty outside.
        at: the line that it executes.
        ended: it takes part in nothing more.
    """

    letters: int
    doing: str = ""
    calls: int = 0
    inside: str = ""
    at: str = ""
    ended: bool = False

    def text(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: str) -> Position:
        """From the store."""
        return Position(**json.loads(text))

    def where(self) -> str:
        """For people."""
        if self.ended:
            return "has ended"
        if self.doing or self.inside:
            return f"is in {self.doing or self.inside}"
        return f"is at {self.at}"


@dataclass(frozen=True)
class Report:
    """Why the ranks cannot go on together; ``rank`` found it out, or (with a traceback) failed itself."""

    rank: int
    what: str
    why: str = ""
    fix: str = ""
    traceback: str = ""

    def text(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: str) -> Report:
        """From the store."""
        return Report(**json.loads(text))

    def error(self, here: int) -> CollectiveError:
        """The error to raise on rank ``here``; the same on all but for the rank that failed."""
        if not self.traceback or self.rank == here:
            return CollectiveError(self.what, why=self.why, fix=self.fix)
        error = PeerError(self.what, why=self.why, fix=self.fix)
        error.traceback = self.traceback
        return error


def judge(me: int, size: int, positions: Mapping[int, Position]) -> Report | None:
    """The report when it is certain that rank ``me`` waits in vain, else None.

    A rank has ended without having begun the exchange in which ``me`` waits; or a rank waits inside torch in
    a collective that ``me`` has not begun, while ``me`` waits in an exchange that the other has not begun.
    """
    mine = positions[me]
    for rank, other in positions.items():
        if rank == me:
            continue
        if mine.doing and other.letters < mine.letters:
            if other.ended:
                return _missing(me, size, positions, mine.doing)
            if other.inside and other.calls > mine.calls:
                return _apart(me, size, positions)
        if mine.inside and mine.calls > other.calls:
            if other.ended and other.letters <= mine.letters:
                return _missing(me, size, positions, mine.inside)
            if other.doing and other.letters > mine.letters:
                return _apart(me, size, positions)
    return None


def late(me: int, size: int, positions: Mapping[int, Position], seconds: float) -> Report:
    """The report when ``me`` has waited for as long as it may."""
    mine = positions[me]
    there = _there(me, positions, mine.doing)
    return Report(
        me,
        f"{mine.doing} was reached by {there} of {size} ranks within {seconds:g} s",
        why=table(size, positions),
        fix="make the call on every rank; for a rank that needs longer, "
        "InitProcessGroupKwargs(timeout=timedelta(...))",
    )


def _missing(me: int, size: int, positions: Mapping[int, Position], doing: str) -> Report:
    there = _there(me, positions, doing)
    what = f"{doing} was reached by {there} of {size} ranks"
    return Report(me, what, why=table(size, positions), fix=SAME_CALLS)


def _apart(me: int, size: int, positions: Mapping[int, Position]) -> Report:
    doing = positions[me].doing or next(p.doing for p in positions.values() if p.doing)
    there = _there(me, positions, doing)
    return Report(
        me,
        f"the ranks wait for each other in different places: {doing} was reached by {there} of {size} ranks",
        why=table(size, positions),
        fix=SAME_CALLS,
    )


def _there(me: int, positions: Mapping[int, Position], doing: str) -> int:
    first = next((p for p in positions.values() if doing and p.doing == doing), positions[me])
    if first.doing:
        return sum(p.letters >= first.letters for p in positions.values())
    return sum(bool(p.inside) for p in positions.values())


def table(size: int, positions: Mapping[int, Position]) -> str:
    """One line per rank."""
    rows = [
        f"rank {rank} {positions[rank].where() if rank in positions else 'is silent'}"
        for rank in range(min(size, _SHOWN))
    ]
    return "\n       ".join([*rows, *(["..."] if size > _SHOWN else [])])
