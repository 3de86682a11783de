"""The communication of the ranks of a save or load: they fail together or go on together.

A save in the background has a channel of its own, through the group's store. The collectives of the training
run in another thread at the same time, and a second user would get their messages. A save needs few and short
messages: every rank writes its value to the store, and rank 0 writes all of them as one answer. Each rank
also writes heartbeats, so the others notice a rank that was killed.

A save may be a call of all ranks, or of rank 0 alone: ``if accelerator.is_main_process: save_state(...)``.
Each rank that makes such a call says so in the store. Rank 0 waits for the others. A rank that does not come
is elsewhere once it has begun a collective that rank 0 has not begun: the all-reduce of the next backward, or
a collective of this package. Collectives of the user's own groups are not counted: there a rank is elsewhere
once all that do not come have waited for some seconds. Then rank 0 goes on alone.
"""

from __future__ import annotations

import base64
import copy
import inspect
import logging
import pickle
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from types import TracebackType
from typing import Any, TypeVar

from accelerate.checkpoint.file_access import FileRecord
from accelerate.core.errors import (
    AccelerateError,
    CheckpointError,
    CollectiveError,
    PeerError,
    find_failed_rank,
)
from accelerate.world import control_channel, watchdog
from accelerate.world import world as worlds
from accelerate.world.call_site import CallSite, find_call_site
from accelerate.world.watchdog import Watchdog

logger = logging.getLogger(__name__)

HEARTBEAT = 2.0  # seconds between heartbeats; more in large worlds
DEAD_AFTER = 60.0  # seconds without a heartbeat after which a rank counts as dead
LINGER = 10.0  # seconds that rank 0 waits at most until the others have read its last answer
_LONGEST_PAUSE = 1 / 32  # seconds and rank: of all ranks that wait, 32 ask in a second
_CHECK_INTERVAL = 0.25  # seconds between looks at where the ranks are that do not come to a save

_MAX_LINES = 8  # of an error, each of another text
_Failures = dict[str, tuple[list[int], AccelerateError]]  # by text: the ranks that raised it

T = TypeVar("T")


@dataclass
class CollectiveSection:
    """The statuses that ranks exchange at the end of a block, see ``CheckpointRankGroup.collective_section``.

    Attributes:
        value: this rank's value; set inside the block.
        values: the values of all ranks, in rank order, or what rank 0 has made of them; set after the block.
    """

    value: Any = None
    values: Any = None


@dataclass(frozen=True)
class CheckpointRankGroup:
    """The ranks that save or load together, as this rank sees them; by default one process.

    Attributes:
        rank, size: among all.
        local_rank, local_size: among those of this machine.
        node: this machine.
        channel: how values are exchanged, see ``ControlChannel.combine_objects``; the control channel of the
            training when None.
        is_alone: this rank loads by itself, since the ranks do so one after another: nothing is exchanged.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    channel: Callable[[str, Any, Callable[[list[Any]], Any]], Any] | None = field(default=None, compare=False)
    is_alone: bool = False

    @classmethod
    def current(cls, is_alone: bool = False) -> CheckpointRankGroup:
        """Return the ranks of the open world; with ``is_alone`` this rank of them."""
        world = worlds.current()
        if world is None:
            return cls()
        local = (0, 1) if is_alone else (world.local_rank, world.local_size)
        return cls(world.rank, world.size, *local, world.node, is_alone=is_alone)

    def is_writer(self, each_node: bool) -> bool:
        """Return True on the rank that writes replicated states: rank 0, or one rank of each machine."""
        return self.local_rank == 0 if each_node or self.is_alone else self.rank == 0

    def open_channel(self, id: str, target: str) -> CheckpointStoreChannel | None:
        """Open the channel of a save in the background; None for one process, or where no store is shared."""
        if self.size == 1:
            return None
        watch = watchdog.current()
        if watch is None:
            logger.warning("%s is not saved in the background: the ranks share no store", target)
            return None
        return CheckpointStoreChannel(watch, self.rank, self.size, id)

    def log(self, name: str, text: str, *args: Any) -> None:
        """Log progress on rank 0, by the logger ``accelerate.<name>``: those of 1.x, which scripts select."""
        if self.rank == 0:
            logging.getLogger(f"accelerate.{name}").info(f"[RANK 0] {text}", *args)

    @contextmanager
    def collective_section(
        self, action: str, combine: Callable[[list[Any]], Any] = list
    ) -> Generator[CollectiveSection]:
        """Run a block after which either all ranks go on or all raise the same error.

        Args:
            action: what the block does, for errors: ``"save the checkpoint x"``.
            combine: called on rank 0 with the values of all ranks; what it returns goes to all of them. By
                default every rank gets all values.
        """
        section = CollectiveSection()
        error = failure = None

        def merge(outcomes: list[Any]) -> tuple[_Failures, Any]:
            failures: _Failures = {}  # all ranks get them: a text that all of them raise is sent once
            for rank, (failed, _) in enumerate(outcomes):
                if failed is not None:
                    failures.setdefault(failed.what, ([], failed))[0].append(rank)
            try:
                return failures, None if failures else combine([value for _, value in outcomes])
            except Exception as raised:  # noqa: BLE001 - as below
                return {"": ([0], _as_checkpoint_error(raised, action))}, None

        try:
            yield section
        except Exception as raised:  # noqa: BLE001 - all ranks raise it below
            error, failure = raised, _as_checkpoint_error(raised, action)
        # Ctrl-C and exits have ended this rank by now; the others notice it.
        outcome = failure, section.value
        if self.size == 1 or self.is_alone:
            failures, section.values = merge([outcome])
        elif self.channel is not None:
            failures, section.values = self.channel(action, outcome, merge)
        else:
            try:
                # A save may only meet a save, a load only a load; their folders may differ.
                failures, section.values = control_channel.channel().combine_objects(
                    outcome, merge, action.partition(" ")[0], label=action
                )
            except CollectiveError as lost:
                raise CheckpointPeerError.from_collective(lost) from lost.__cause__
        if failures:
            (failed_ranks, first), *_ = failures.values()
            if (self.size == 1 or self.is_alone) and first is error:
                raise first
            combined = self._combine_failures(failures)
            combined.failed_rank = failed_ranks[0] if error is None else find_failed_rank(error)
            # An error of ours that the combined one repeats would be read twice; what it came from, once.
            if isinstance(error, AccelerateError) and error.what == first.what:
                raise combined from error.__cause__
            raise combined from error

    def _combine_failures(self, failures: _Failures) -> AccelerateError:
        groups = list(failures.values())
        first = groups[0][1]
        if self.size == 1 or self.is_alone or isinstance(first, BackgroundSaveError):
            return first
        lines = [
            f"{_name_ranks(ranks)} of {self.size}: {failed.what}" for ranks, failed in groups[:_MAX_LINES]
        ]
        if len(groups) > _MAX_LINES:
            lines.append(f"and {sum(len(ranks) for ranks, _ in groups[_MAX_LINES:])} more ranks")
        combined = copy.copy(first)
        AccelerateError.__init__(combined, "\n".join(lines), why=first.why, fix=first.fix)
        return combined

    def run_on_rank0(self, action: str, function: Callable[[], T]) -> T:
        """Call ``function`` on rank 0; return its result on every rank, or raise its error on every rank."""
        with self.collective_section(action) as section:
            if self.rank == 0:
                section.value = function()
        return section.values[0]


@dataclass(frozen=True)
class WrittenFilesReport:
    """The files that one rank wrote, its machine, and what its shard writers returned, by folder."""

    node: int
    host: str
    files: dict[str, FileRecord]
    shard_infos: dict[str, Any] = field(default_factory=dict)


def saves_alone(operation: str, choose_number: Callable[[], int] = int, turns: int = 0) -> int | None:
    """Return a number of rank 0 if it makes this call alone, else None; a rank that calls gets the same.

    Args:
        operation: the call, for errors: ``"save_state"``.
        choose_number: chooses the number of the checkpoint, on rank 0 where it is alone.
        turns: how many blocks it is in that the ranks run one after another: with any, rank 0 is alone, and
            each rank chooses the number.

    Raises:
        CheckpointPeerError: rank 0 is elsewhere, a rank failed, or the timeout of the group passed.
    """
    global _detector
    if turns:
        return choose_number()
    watch = watchdog.current()
    if watch is None:
        return None
    if _detector is None or _detector.watchdog is not watch:
        _detector = SoloCallDetector(watch)
    try:
        return _detector.solo_number(operation, find_call_site(inspect.currentframe()), choose_number)
    except CollectiveError as error:
        raise CheckpointPeerError.from_collective(error) from error.__cause__


class SoloCallDetector:
    """Finds out which ranks make a call that rank 0 may make alone.

    Args:
        watch: the watchdog of this rank; its store carries the answers.
    """

    def __init__(self, watch: watchdog.Watchdog) -> None:
        self.watchdog, self.rank, self.size = watch, watch.rank, watch.size
        self._store = watch.store.open_prefix("solo_call")
        # In a large world the status of a rank that goes on again may be so old.
        is_large = watch.size > watchdog.LARGE_WORLD
        self._still_delay = watchdog.HINT_DELAY + (watchdog.MAX_WAIT_POLL if is_large else 0.0)
        self._joint_calls = 0
        # By rank, with those that not all ranks made: rank 0 counts those of the others, they their own.
        self._calls = dict.fromkeys([self.rank] if self.rank else range(1, self.size), 0)

    def solo_number(self, operation: str, site: CallSite, choose_number: Callable[[], int]) -> int | None:
        """Return the number of rank 0 if not all ranks make this call, else None."""
        # The exchanges are counted by calls that all ranks make, so this one is not.
        self.watchdog.active_call = operation, site
        try:
            return self._wait_for_rank0(operation) if self.rank else self._wait_for_peers(choose_number)
        finally:
            self.watchdog.active_call = None

    def _wait_for_peers(self, choose_number: Callable[[], int]) -> int | None:
        keys = {f"at/{rank}/{calls}": rank for rank, calls in self._calls.items()}
        until = time.monotonic() + self.watchdog.timeout
        # Rank 0 alone asks for all, so its intervals do not grow as much as those of the others.
        interval, missing_keys = _CHECK_INTERVAL * min(10.0, self._store.pace), list(keys)
        still, still_since = dict[int, Any](), 0.0
        while not self._store.wait(missing_keys, interval):
            self.watchdog.check_store_wait(until)
            missing_keys = self._store.find_missing(missing_keys)
            missing = [keys[key] for key in missing_keys]
            ahead, waiting = self.watchdog.find_ahead(missing)
            if waiting != still:
                still, still_since = waiting, time.monotonic()
            is_still = not still or time.monotonic() - still_since >= self._still_delay
            if missing and len(ahead) + len(still) == len(missing) and is_still:
                number = choose_number()
                for rank in [rank for rank in keys.values() if rank not in missing]:
                    self._store.put(f"solo/{rank}/{self._calls[rank]}", str(number))
                    self._calls[rank] += 1
                return number
        self._store.put(f"joint/{self._joint_calls}", "")
        # Every rank has read the answer before, since it has made this call.
        self._store.delete(f"joint/{self._joint_calls - 1}")
        self._joint_calls += 1
        self._calls = {rank: calls + 1 for rank, calls in self._calls.items()}
        return None

    def _wait_for_rank0(self, operation: str) -> int | None:
        own = f"{self.rank}/{self._calls[self.rank]}"
        joint, solo = f"joint/{self._joint_calls}", f"solo/{own}"
        self._store.put(f"at/{own}", "")
        self._calls[self.rank] += 1
        until = time.monotonic() + self.watchdog.timeout
        interval = _CHECK_INTERVAL * self._store.pace
        try:
            while not self._store.wait([joint], interval, lambda: self.watchdog.check_wait(until)):
                # Rank 0 answers before it goes on, so look where it is first.
                is_ahead = bool(self.watchdog.find_ahead([0])[0])
                number = self._store.get(solo)
                if number is not None:
                    self._store.delete(solo)
                    return int(number)
                if is_ahead and not self._store.has(joint):
                    raise CollectiveError(
                        f"rank {self.rank} called {operation}, rank 0 did not",
                        why=self.watchdog.peers.describe([0]),
                        fix="call it on every rank, or under `if accelerator.is_main_process`",
                    )
                self.watchdog.check_store_wait(until)
        except BaseException:
            self._calls[self.rank] -= 1  # rank 0 has not counted it, and waits for this number next
            raise
        finally:
            self._store.delete(f"at/{own}")
        self._joint_calls += 1
        return None


_detector: SoloCallDetector | None = None


class BackgroundSaveError(CheckpointError):
    """A save in the background failed; every rank raises it."""


class CheckpointPeerError(CheckpointError, PeerError):
    """A save or load that not all ranks called, or in which one of them was lost."""

    @staticmethod
    def from_collective(error: CollectiveError) -> CheckpointPeerError:
        """Return the error with the text of the collective's error."""
        peer_error = CheckpointPeerError(error.what, why=error.why, fix=error.fix)
        peer_error.failed_rank, peer_error.traceback = error.failed_rank, getattr(error, "traceback", "")
        return peer_error.with_traceback(error.__traceback__)


class CheckpointStoreChannel:
    """Exchanges among the ranks of one save; entered and left by the thread that saves.

    Args:
        watch: what this process knows of the others.
        rank, size: this process among them.
        id: of the save.
    """

    def __init__(self, watch: Watchdog, rank: int, size: int, id: str) -> None:
        self.rank, self.size, self.timeout = rank, size, watch.timeout
        self._store = watch.store.open_prefix(f"save/{id}")
        self._pause = min(_LONGEST_PAUSE * size, DEAD_AFTER / 4)
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
        self._store.delete(f"alive/{self.rank}")
        if error is not None:
            reason = str(error).partition("\n")[0]
            self._store.put_if_absent("ended", f"rank {self.rank} has given up: {reason}")
        elif self.rank > 0:
            if self._store.add("left") == self.size - 1:
                self._store.put("all_left", "")
        # The store may be this process's, which may end now: the others still read the last answer.
        elif self._store.wait(["all_left"], LINGER):
            for key in ("left", "all_left", f"{self._round}/all"):
                self._store.delete(key)

    def _send_heartbeats(self) -> None:
        pause, count = get_heartbeat_interval(self.size), 0
        while not self._store.is_lost:
            self._store.put(f"alive/{self.rank}", str(count := count + 1))
            if self._closing.wait(pause):
                return

    def combine(self, action: str, value: Any, combine: Callable[[list[Any]], T]) -> T:
        """Return on every rank what rank 0 makes of one picklable value per rank, in rank order.

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
        self._store.put(answer, _encode(combine([value, *(_decode(messages[key]) for key in keys)])))
        # All have written this round's value, so all have read the answer of the round before.
        for stale in (f"{self._round - 1}/all", *keys):
            self._store.delete(stale)
        return self._answer(action, answer)

    def _answer(self, action: str, key: str) -> Any:
        text = self._store.get(key)
        self._refuse_lost(action)
        assert text is not None
        answer = _decode(text)
        if isinstance(answer, CheckpointPeerError):
            raise answer
        return answer

    def _wait_for_keys(self, action: str, rank_of_key: dict[str, int]) -> None:
        """Wait until all keys are in the store; each is written by the rank it maps to."""
        keys, started_at = list(rank_of_key), time.monotonic()
        # Rank 0 looks at all the others. Where it is gone itself, the store mostly is too.
        interval = min(DEAD_AFTER / 4 * self._store.pace, DEAD_AFTER)
        if self.rank == 0:
            interval = get_heartbeat_interval(self.size)
        looked_at = started_at

        def check() -> None:
            nonlocal looked_at
            if time.monotonic() - looked_at >= interval:
                looked_at = time.monotonic()
                missing = [rank_of_key[key] for key in self._store.find_missing(keys)]
                self._refuse_silent(action, missing, started_at)

        if not self._store.wait(keys, self.timeout, check, self._pause):
            self._refuse_lost(action)
            if missing := self._store.find_missing(keys):
                rank = rank_of_key[missing[0]]
                raise _peer_error(action, f"rank {rank} was not ready within {self.timeout:g} s")

    def _refuse_silent(self, action: str, missing: list[int], started_at: float) -> None:
        """Raise the reason if a rank has ended, or one that is missing shows no heartbeat."""
        reason, now = self._store.get("ended") if missing else None, time.monotonic()
        if reason is not None:
            raise _peer_error(action, reason)
        signs = self._store.read([f"alive/{rank}" for rank in missing])
        for rank in missing:
            sign = signs.get(f"alive/{rank}", "")
            if self._last_heartbeats.setdefault(rank, (sign, now))[0] != sign:
                self._last_heartbeats[rank] = sign, now
            if now - max(started_at, self._last_heartbeats[rank][1]) > DEAD_AFTER:
                raise _peer_error(action, f"rank {rank} is gone: it was killed, or does not answer")

    def _refuse_lost(self, action: str) -> None:
        if self._store.is_lost:
            raise _peer_error(
                action, "rank 0, or the launcher, is gone: the store of the group does not answer"
            )


def _name_ranks(ranks: list[int]) -> str:
    """Return ``"rank 3"`` or ``"ranks 0-5, 8"``."""
    spans = [[rank for _, rank in span] for _, span in groupby(enumerate(ranks), lambda at: at[1] - at[0])]
    names = [f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans]
    shown = ", ".join(names[:_MAX_LINES]) + (", ..." if len(names) > _MAX_LINES else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _as_checkpoint_error(error: Exception, action: str) -> AccelerateError:
    if isinstance(error, AccelerateError):
        return error
    return CheckpointError(f"could not {action}", why=f"{type(error).__name__}: {error}")


def _peer_error(action: str, why: str) -> CheckpointPeerError:
    return CheckpointPeerError(
        f"could not {action} in the background",
        why=why,
        fix="the first error in the output of the ranks says more; the checkpoint before is as it was",
    )


def get_heartbeat_interval(size: int) -> float:
    """Seconds between the heartbeats of a rank of ``size``.

    It grows with the world, so that the store is asked as often, and stays well below the silence after which
    a rank counts as dead.
    """
    return min(HEARTBEAT * max(1.0, size / watchdog.LARGE_WORLD), DEAD_AFTER / 4)


def _encode(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)).decode()


def _decode(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))
