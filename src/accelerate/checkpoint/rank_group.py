"""The communication of the ranks of a save or load: they fail together or go on together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, TypeVar

from accelerate.core.errors import AccelerateError, CheckpointError, CollectiveError, PeerError
from accelerate.world import collective
from accelerate.world import world as worlds

T = TypeVar("T")


@dataclass(frozen=True)
class CheckpointRankGroup:
    """The ranks that save or load together, as this rank sees them; by default one process.

    Attributes:
        rank, size: among all.
        local_rank, local_size: among those of this machine.
        node: this machine.
        channel: how values are exchanged, (what is done, value) to all values; the collectives of the
            training when None.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    channel: Callable[[str, Any], list[Any]] | None = field(default=None, compare=False)

    @classmethod
    def current(cls) -> CheckpointRankGroup:
        """Return the ranks of the open world."""
        world = worlds.current()
        if world is None:
            return cls()
        return cls(world.rank, world.size, world.local_rank, world.local_size, world.node)

    def is_writer(self, each_node: bool) -> bool:
        """Return True on the rank that writes replicated states: rank 0, or one rank of each machine."""
        return self.local_rank == 0 if each_node else self.rank == 0

    def collective_section(self, action: str) -> CollectiveErrorSection[Any]:
        """Return a ``with`` block after which either all ranks go on or all raise the same error.

        Args:
            action: what the block does, for errors: ``"save the checkpoint x"``.
        """
        return CollectiveErrorSection(self, action)

    def run_on_rank0(self, action: str, function: Callable[[], T]) -> T:
        """Call ``function`` on rank 0; return its result on every rank, or raise its error on every rank."""
        with CollectiveErrorSection[T](self, action) as section:
            if self.rank == 0:
                section.value = function()
        return section.values[0]

    def all_gather(self, action: str, value: Any) -> list[Any]:
        """Return one picklable value per rank, in rank order, on every rank.

        Raises:
            CheckpointPeerError: another rank failed, ended, made another call, or did not come in time.
        """
        if self.size == 1:
            return [value]
        if self.channel is not None:
            return self.channel(action, value)
        try:
            # A save may only meet a save, a load only a load; their folders may differ.
            return collective.all_gather_object(value, action.partition(" ")[0], label=action)
        except CollectiveError as error:
            raise CheckpointPeerError.from_collective(error) from error.__cause__


class BackgroundSaveError(CheckpointError):
    """A save in the background failed; every rank raises it."""


class CheckpointPeerError(CheckpointError, PeerError):
    """A save or load that not all ranks called, or in which one of them was lost."""

    @staticmethod
    def from_collective(error: CollectiveError) -> CheckpointPeerError:
        """Return the error with the text of the collective's error."""
        peer_error = CheckpointPeerError(error.what, why=error.why, fix=error.fix)
        peer_error.traceback = getattr(error, "traceback", "")
        return peer_error.with_traceback(error.__traceback__)


class CollectiveErrorSection(Generic[T]):
    """A block after which all ranks go on or all raise; see ``CheckpointRankGroup.collective_section``.

    Attributes:
        value: this rank's value for the all-gather; set inside the block.
        values: the values of all ranks, in rank order; set after the block.
    """

    def __init__(self, ranks: CheckpointRankGroup, action: str) -> None:
        self.ranks, self.action = ranks, action
        self.value: T | None = None
        self.values: list[T] = []

    def __enter__(self) -> CollectiveErrorSection[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # Ctrl-C and exits end this rank at once; the others notice it
        failure = None if error is None else self._to_package_error(error)
        outcomes = self.ranks.all_gather(self.action, (failure, self.value))
        failures = [(rank, failed) for rank, (failed, _) in enumerate(outcomes) if failed is not None]
        if failures and self.ranks.size == 1 and failures[0][1] is error:
            return  # re-raised unchanged
        if failures:
            raise self._combine_failures(failures) from error
        self.values = [value for _, value in outcomes]

    def _to_package_error(self, error: Exception) -> AccelerateError:
        if isinstance(error, AccelerateError):
            return error
        return CheckpointError(f"could not {self.action}", why=f"{type(error).__name__}: {error}")

    def _combine_failures(self, failures: list[tuple[int, AccelerateError]]) -> AccelerateError:
        rank, first = failures[0]
        if self.ranks.size == 1 or isinstance(first, BackgroundSaveError):
            return first
        text = f"rank {rank} of {self.ranks.size}: {first.what}"
        for other, failure in failures[1:]:
            text += f"\nrank {other} of {self.ranks.size}: {failure.what}"
        combined = copy.copy(first)
        AccelerateError.__init__(combined, text, why=first.why, fix=first.fix)
        return combined
