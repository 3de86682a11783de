"""How the ranks of a save in the background talk: through the store of the group, beside the training.

The collectives of the training run in another thread at the same time, and a second user would get their
messages. A save needs few and short ones: every rank leaves its value in the store, rank 0 leaves all of them
in one. While it lives, each rank leaves a sign of life as well: so a rank that was killed is missed.
"""

from __future__ import annotations

import base64
import pickle
import threading
import time
from types import TracebackType
from typing import Any

from accelerate.checkpoint.ranks import ApartError
from accelerate.world import together
from accelerate.world.together import Watch

BEAT = 2.0  # seconds between signs of life; more in large worlds
GONE = 60.0  # seconds without one, after which a rank is taken to be dead
FAREWELL = 10.0  # seconds that rank 0 stays at most for the others to read its last answer
_SLICE = 0.5  # seconds between looks at whether the others live


def opened(rank: int, size: int, id: str) -> Mailbox | None:
    """That of one save; None where the ranks share no store."""
    watch = together.current()
    return None if watch is None else Mailbox(watch, rank, size, id)


class Mailbox:
    """Exchanges among the ranks of one save; entered and left by the thread that saves.

    Args:
        watch: what this process knows of the others.
        rank, size: this process among them.
        id: of the save.
    """

    def __init__(self, watch: Watch, rank: int, size: int, id: str) -> None:
        self.rank, self.size, self.timeout = rank, size, watch.timeout
        self._board, self._signs = watch.board.beside(f"save/{id}"), watch.board.beside(f"save/{id}")
        self._round = 0
        self._seen: dict[int, tuple[str, float]] = {}
        self._over = threading.Event()
        self._beater = threading.Thread(target=self._beat, name="accelerate-save-alive", daemon=True)

    def __enter__(self) -> Mailbox:
        self._beater.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._beater.join()
        if error is not None:
            self._board.put(f"ended/{self.rank}", str(error).partition("\n")[0])
        elif self.rank > 0:
            self._board.put(f"left/{self.rank}", "")
        else:
            # The store may be this process's, which may end now: the others still read the last answer.
            self._board.wait([f"left/{rank}" for rank in range(1, self.size)], FAREWELL)

    def _beat(self) -> None:
        pause, count = BEAT * max(1.0, self.size / together.LARGE), 0
        while not self._signs.lost:
            self._signs.put(f"alive/{self.rank}", str(count := count + 1))
            if self._over.wait(pause):
                return

    def exchange(self, doing: str, value: Any) -> list[Any]:
        """One picklable value per rank, in rank order, on every rank.

        Raises:
            ApartError: a rank has ended or was killed, or did not come within the timeout of the group.
        """
        self._round += 1
        answer = f"{self._round}/all"
        if self.rank > 0:
            self._board.put(f"{self._round}/{self.rank}", _text(value))
            self._await(doing, {answer: 0})
            return self._answer(doing, answer)
        letters = {f"{self._round}/{rank}": rank for rank in range(1, self.size)}
        try:
            self._await(doing, letters)
        except ApartError as error:
            self._board.put(answer, _text(error))
            raise
        found = self._board.read(list(letters))
        self._refuse_lost(doing)
        self._board.put(answer, _text([value, *(_value(found[letter]) for letter in letters)]))
        # All have written this letter, so all have read the answer before.
        for stale in (f"{self._round - 1}/all", *letters):
            self._board.drop(stale)
        return self._answer(doing, answer)

    def _answer(self, doing: str, key: str) -> list[Any]:
        text = self._board.get(key)
        self._refuse_lost(doing)
        assert text is not None
        answer = _value(text)
        if isinstance(answer, ApartError):
            raise answer
        return answer

    def _await(self, doing: str, letters: dict[str, int]) -> None:
        """Returns when all of ``letters``, which these ranks write, are there."""
        began = time.monotonic()
        while not self._board.wait(list(letters), _SLICE):
            self._refuse_lost(doing)
            missing = [rank for letter, rank in letters.items() if not self._board.has(letter)]
            ended = self._board.read([f"ended/{rank}" for rank in missing]) if missing else {}
            for key, why in ended.items():
                raise _apart(doing, f"{key.replace('ended/', 'rank ')} has given up: {why}")
            silent = [rank for rank in missing if self._is_silent(rank, began)]
            if silent:
                raise _apart(doing, f"rank {silent[0]} is gone: it was killed, or does not answer")
            if missing and time.monotonic() - began > self.timeout:
                raise _apart(doing, f"rank {missing[0]} was not ready within {self.timeout:g} s")

    def _is_silent(self, rank: int, began: float) -> bool:
        sign, since = self._board.get(f"alive/{rank}") or "", time.monotonic()
        if rank not in self._seen or self._seen[rank][0] != sign:
            self._seen[rank] = sign, since
        return since - max(began, self._seen[rank][1]) > GONE

    def _refuse_lost(self, doing: str) -> None:
        if self._board.lost:
            raise _apart(doing, "rank 0, or the launcher, is gone: the store of the group does not answer")


def _apart(doing: str, why: str) -> ApartError:
    return ApartError(
        f"could not {doing} in the background",
        why=why,
        fix="the first error in the output of the ranks says more; the checkpoint before is as it was",
    )


def _text(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)).decode()


def _value(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))
