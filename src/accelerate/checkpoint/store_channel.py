"""The channel of a save in the background: the ranks exchange values through the group's store.

The collectives of the training run in another thread at the same time, and a second user would get their
messages. A save needs few and short messages: every rank writes its value to the store, and rank 0 writes all
of them as one answer. Each rank also writes heartbeats, so the others notice a rank that was killed.
"""

from __future__ import annotations

import base64
import pickle
import threading
import time
from types import TracebackType
from typing import Any

from accelerate.checkpoint.rank_group import CheckpointPeerError
from accelerate.world import watchdog
from accelerate.world.watchdog import Watchdog

HEARTBEAT = 2.0  # seconds between heartbeats; more in large worlds
DEAD_AFTER = 60.0  # seconds without a heartbeat after which a rank counts as dead
LINGER = 10.0  # seconds that rank 0 waits at most until the others have read its last answer
_SLICE = 0.5  # seconds between checks of the heartbeats


def open_channel(rank: int, size: int, id: str) -> CheckpointStoreChannel | None:
    """Open the channel of one save; return None where the ranks share no store."""
    watch = watchdog.current()
    return None if watch is None else CheckpointStoreChannel(watch, rank, size, id)


class CheckpointStoreChannel:
    """Exchanges among the ranks of one save; entered and left by the thread that saves.

    Args:
        watch: what this process knows of the others.
        rank, size: this process among them.
        id: of the save.
    """

    def __init__(self, watch: Watchdog, rank: int, size: int, id: str) -> None:
        self.rank, self.size, self.timeout = rank, size, watch.timeout
        self._store, self._heartbeat_store = (
            watch.store.open_prefix(f"save/{id}"),
            watch.store.open_prefix(f"save/{id}"),
        )
        self._round = 0
        self._last_heartbeats: dict[int, tuple[str, float]] = {}
        self._closing = threading.Event()
        self._heartbeat_thread = threading.Thread(
            target=self._send_heartbeats, name="accelerate-save-alive", daemon=True
        )

    def __enter__(self) -> CheckpointStoreChannel:
        self._heartbeat_thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._heartbeat_thread.join()
        if error is not None:
            self._store.put(f"ended/{self.rank}", str(error).partition("\n")[0])
        elif self.rank > 0:
            self._store.put(f"left/{self.rank}", "")
        else:
            # The store may be this process's, which may end now: the others still read the last answer.
            self._store.wait([f"left/{rank}" for rank in range(1, self.size)], LINGER)

    def _send_heartbeats(self) -> None:
        pause, count = HEARTBEAT * max(1.0, self.size / watchdog.LARGE_WORLD), 0
        while not self._heartbeat_store.is_lost:
            self._heartbeat_store.put(f"alive/{self.rank}", str(count := count + 1))
            if self._closing.wait(pause):
                return

    def all_gather(self, action: str, value: Any) -> list[Any]:
        """Return one picklable value per rank, in rank order, on every rank.

        Raises:
            CheckpointPeerError: a rank has ended, was killed, or did not come within the timeout.
        """
        self._round += 1
        answer = f"{self._round}/all"
        if self.rank > 0:
            self._store.put(f"{self._round}/{self.rank}", _encode(value))
            self._wait_for_keys(action, {answer: 0})
            return self._answer(action, answer)
        keys = {f"{self._round}/{rank}": rank for rank in range(1, self.size)}
        try:
            self._wait_for_keys(action, keys)
        except CheckpointPeerError as error:
            self._store.put(answer, _encode(error))
            raise
        messages = self._store.read(list(keys))
        self._refuse_lost(action)
        self._store.put(answer, _encode([value, *(_decode(messages[key]) for key in keys)]))
        # All have written this round's value, so all have read the answer of the round before.
        for stale in (f"{self._round - 1}/all", *keys):
            self._store.delete(stale)
        return self._answer(action, answer)

    def _answer(self, action: str, key: str) -> list[Any]:
        text = self._store.get(key)
        self._refuse_lost(action)
        assert text is not None
        answer = _decode(text)
        if isinstance(answer, CheckpointPeerError):
            raise answer
        return answer

    def _wait_for_keys(self, action: str, rank_of_key: dict[str, int]) -> None:
        """Wait until all keys are in the store; each is written by the rank it maps to."""
        started_at = time.monotonic()
        while not self._store.wait(list(rank_of_key), _SLICE):
            self._refuse_lost(action)
            missing = [rank for message_key, rank in rank_of_key.items() if not self._store.has(message_key)]
            ended = self._store.read([f"ended/{rank}" for rank in missing]) if missing else {}
            for key, reason in ended.items():
                raise _peer_error(action, f"{key.replace('ended/', 'rank ')} has given up: {reason}")
            silent = [rank for rank in missing if self._is_silent(rank, started_at)]
            if silent:
                raise _peer_error(action, f"rank {silent[0]} is gone: it was killed, or does not answer")
            if missing and time.monotonic() - started_at > self.timeout:
                raise _peer_error(action, f"rank {missing[0]} was not ready within {self.timeout:g} s")

    def _is_silent(self, rank: int, started_at: float) -> bool:
        sign, since = self._store.get(f"alive/{rank}") or "", time.monotonic()
        if rank not in self._last_heartbeats or self._last_heartbeats[rank][0] != sign:
            self._last_heartbeats[rank] = sign, since
        return since - max(started_at, self._last_heartbeats[rank][1]) > DEAD_AFTER

    def _refuse_lost(self, action: str) -> None:
        if self._store.is_lost:
            raise _peer_error(
                action, "rank 0, or the launcher, is gone: the store of the group does not answer"
            )


def _peer_error(action: str, why: str) -> CheckpointPeerError:
    return CheckpointPeerError(
        f"could not {action} in the background",
        why=why,
        fix="the first error in the output of the ranks says more; the checkpoint before is as it was",
    )


def _encode(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)).decode()


def _decode(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))
