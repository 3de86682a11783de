"""The communication of the ranks of a save or load: they fail together or go on together.

A save in the background has a control tree of its own (``world/control_tree.py``), which its threads open.
The collectives of the training run in another thread at the same time, and a second user would get their
messages. The connections of a rank that was killed break, so its neighbours give up and close theirs.

A save may be a call of all ranks, or of rank 0 alone: ``if accelerator.is_main_process: save_state(...)``.
Each rank that makes such a call says so in the store. Rank 0 waits for the others. A rank that does not come
is elsewhere once it has begun a collective that rank 0 has not begun: the all-reduce of the next backward, or
a collective of this package; or once it waits for a batch that rank 0 reads and has not sent. Collectives of
the user's own groups are not counted: there a rank is elsewhere once all that do not come have waited for
some seconds. Then rank 0 goes on alone.
"""

from __future__ import annotations

import copy
import inspect
import io
import logging
import pickle
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from accelerate.checkpoint.file_access import FileRecord
from accelerate.core.errors import (
    AccelerateError,
    CheckpointError,
    CollectiveError,
    PeerError,
    find_failed_rank,
    name_ranks,
)
from accelerate.world import control_channel, watchdog
from accelerate.world import world as worlds
from accelerate.world.call_site import CallSite, find_call_site
from accelerate.world.control_tree import ControlTree, LostNeighbourError, TreeMessage

logger = logging.getLogger(__name__)

DEAD_AFTER = 60.0  # seconds after which a machine that does not answer, or a rank that never came, is gone
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
    channel: Callable[[Any, Callable[[list[Any]], Any]], Any] | None = field(default=None, compare=False)
    is_alone: bool = False

    @classmethod
    def current(cls, is_alone: bool = False) -> CheckpointRankGroup:
        """Return the ranks of the open world, with ``is_alone`` this rank; without a world this process."""
        world = worlds.current()
        if world is None or world.is_closed:
            return cls()
        local = (0, 1) if is_alone else (world.local_rank, world.local_size)
        return cls(world.rank, world.size, *local, world.node, is_alone=is_alone)

    def is_writer(self, each_node: bool) -> bool:
        """Return True on the rank that writes replicated states: rank 0, or one rank of each machine."""
        return self.local_rank == 0 if each_node or self.is_alone else self.rank == 0

    def open_channel(self, id: str, target: str) -> BackgroundSaveChannel | None:
        """Open the channel of a save in the background; None for one process, or where no store is shared."""
        if self.size == 1:
            return None
        watch = watchdog.current()
        if watch is None:
            logger.warning("%s is not saved in the background: the ranks share no store", target)
            return None
        return BackgroundSaveChannel(watch, id, target)

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
            failures, section.values = self.channel(outcome, merge)
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
            f"{name_ranks(ranks)} of {self.size}: {failed.what}" for ranks, failed in groups[:_MAX_LINES]
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


def saves_alone(operation: str, choose_number: Callable[[], int] = int, in_turn: bool = False) -> int | None:
    """Return a number of rank 0 if it makes this call alone, else None; a rank that calls gets the same.

    In a closed world each rank is alone, and chooses the number itself.

    Args:
        operation: the call, for errors: ``"save_state"``.
        choose_number: chooses the number of the checkpoint, on rank 0 where it is alone.
        in_turn: the ranks make it one after another: rank 0 is alone, and each rank chooses the number.

    Raises:
        CheckpointPeerError: rank 0 is elsewhere, a rank failed, or the timeout of the group passed.
    """
    global _detector
    if in_turn:
        return choose_number()
    watch = watchdog.current()
    if watch is None:
        return None if worlds.is_open() else choose_number()
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


class BackgroundSaveChannel:
    """The exchanges among the ranks of a save in the background; entered and left by the thread that saves.

    Args:
        watch: the watchdog of this rank, whose store the ranks connect by.
        id: of the save.
        target: its checkpoint, for errors.
    """

    def __init__(self, watch: watchdog.Watchdog, id: str, target: str) -> None:
        self.timeout, self.target = watch.timeout, target
        self._store = watch.store.open_prefix(f"save/{id}")
        self._tree = ControlTree(watch.rank, watch.size, DEAD_AFTER)

    def __enter__(self) -> BackgroundSaveChannel:
        started_at = time.monotonic()

        def check() -> None:
            # The ranks have met just before, so their threads start together.
            if time.monotonic() - started_at > min(self.timeout, DEAD_AFTER) or self._store.is_lost:
                raise self._peer_error("a rank is gone: not all have begun to write")

        try:
            self._tree.open(self._store, check)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        self._store.delete(self._tree.address_key)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            reason = str(error).partition("\n")[0]
            self._store.put_if_absent("ended", f"rank {self._tree.rank} has given up: {reason}")
        self._tree.close()

    def combine(self, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Return on every rank what rank 0 makes of one picklable value per rank, in rank order.

        Raises:
            CheckpointPeerError: a rank has ended, was killed, or did not come within the timeout.
        """
        tree, started_at = self._tree, time.monotonic()

        def merge(message: TreeMessage) -> TreeMessage:
            stream = io.BytesIO(message.values)
            return TreeMessage((), _encode(combine([pickle.load(stream) for _ in range(tree.size)])), True)

        def check() -> None:
            if time.monotonic() - started_at > self.timeout:
                late = list(tree.awaited_ranks)
                name = f"{'one of ' if len(late) > 1 else ''}{name_ranks(late)}" if late else "a rank"
                raise self._peer_error(f"{name} was not ready within {self.timeout:g} s")

        try:
            return pickle.loads(tree.exchange(b"", _encode(value), merge, check).values)
        except LostNeighbourError as error:
            raise self._peer_error(f"rank {error.rank} is gone: it was killed, or does not answer") from error

    def _peer_error(self, reason: str) -> CheckpointPeerError:
        """Return the error for a reason, or for the first that a rank has written before it left."""
        written = self._store.put_if_absent("ended", reason)
        if self._store.is_lost:
            written = "rank 0, or the launcher, is gone: the store of the group does not answer"
        return CheckpointPeerError(
            f"could not save {self.target} in the background",
            why=written or reason,
            fix="the first error in the output of the ranks says more; a committed checkpoint is whole",
        )


def _as_checkpoint_error(error: Exception, action: str) -> AccelerateError:
    if isinstance(error, AccelerateError):
        return error
    return CheckpointError(f"could not {action}", why=f"{type(error).__name__}: {error}")


def _encode(value: Any) -> bytearray:
    return bytearray(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
