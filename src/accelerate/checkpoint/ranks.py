"""How the ranks of a save or load talk: they fail together or go on together."""

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
class Ranks:
    """This process among those that save or load together; by default a process of its own.

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
    def current(cls) -> Ranks:
        """The ranks of the open world."""
        world = worlds.current()
        if world is None:
            return cls()
        return cls(world.rank, world.size, world.local_rank, world.local_size, world.node)

    def writes(self, each_node: bool) -> bool:
        """Whether this rank writes what is the same on all ranks: rank 0, or one rank of each machine."""
        return self.local_rank == 0 if each_node else self.rank == 0

    def together(self, doing: str) -> Together[Any]:
        """A ``with`` block after which either all ranks go on or all raise the same error.

        Args:
            doing: what the block does, for errors: ``"save the checkpoint x"``.
        """
        return Together(self, doing)

    def lead(self, doing: str, function: Callable[[], T]) -> T:
        """What ``function`` returns on rank 0, on every rank; all raise what it raises."""
        with Together[T](self, doing) as shared:
            if self.rank == 0:
                shared.value = function()
        return shared.values[0]

    def exchange(self, doing: str, value: Any) -> list[Any]:
        """One picklable value per rank, in rank order, on every rank.

        Raises:
            ApartError: another rank failed, ended, made another call, or did not come within the timeout.
        """
        if self.size == 1:
            return [value]
        if self.channel is not None:
            return self.channel(doing, value)
        try:
            # A save may only meet a save, a load only a load; their folders may differ.
            return collective.all_objects(value, doing.partition(" ")[0], label=doing)
        except CollectiveError as error:
            raise ApartError.of(error) from error.__cause__


class BackgroundSaveError(CheckpointError):
    """A save in the background failed; every rank knows the same of it."""


class ApartError(CheckpointError, PeerError):
    """A save or load that not all ranks made, or in which one of them was lost."""

    @staticmethod
    def of(error: CollectiveError) -> ApartError:
        """The same text as of what ended the exchange."""
        apart = ApartError(error.what, why=error.why, fix=error.fix)
        apart.traceback = getattr(error, "traceback", "")
        return apart.with_traceback(error.__traceback__)


class Together(Generic[T]):
    """See ``Ranks.together``.

    Attributes:
        value: what this rank tells the others; set inside the block.
        values: what all ranks told, in rank order; there after the block.
    """

    def __init__(self, ranks: Ranks, doing: str) -> None:
        self.ranks, self.doing = ranks, doing
        self.value: T | None = None
        self.values: list[T] = []

    def __enter__(self) -> Together[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # Ctrl-C and exits end this rank at once; the others see it go
        failure = None if error is None else self._described(error)
        every = self.ranks.exchange(self.doing, (failure, self.value))
        failures = [(rank, failed) for rank, (failed, _) in enumerate(every) if failed is not None]
        if failures and self.ranks.size == 1 and failures[0][1] is error:
            return  # it goes on as it is
        if failures:
            raise self._joined(failures) from error
        self.values = [value for _, value in every]

    def _described(self, error: Exception) -> AccelerateError:
        if isinstance(error, AccelerateError):
            return error
        return CheckpointError(f"could not {self.doing}", why=f"{type(error).__name__}: {error}")

    def _joined(self, failures: list[tuple[int, AccelerateError]]) -> AccelerateError:
        rank, first = failures[0]
        if self.ranks.size == 1 or isinstance(first, BackgroundSaveError):
            return first
        text = f"rank {rank} of {self.ranks.size}: {first.what}"
        for other, failure in failures[1:]:
            text += f"\nrank {other} of {self.ranks.size}: {failure.what}"
        twin = copy.copy(first)
        AccelerateError.__init__(twin, text, why=first.why, fix=first.fix)
        return twin
