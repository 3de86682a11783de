"""The stack of prepared loaders in iteration, with the innermost one the current one; their attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import ReferenceType, ref

from accelerate.data.position import FetchedBatch, LoaderPosition


class ActiveLoaders:
    """A stack of weak references to the loaders in iteration.

    Attributes:
        run_pending: called between two batches, and at the end of an epoch; that of a device that is lazy.
    """

    def __init__(self) -> None:
        self.run_pending: Callable[[], None] | None = None
        self._stack: list[ReferenceType[Any]] = []
        # Called with a loader that begins an epoch, or is requested for its next batch, before anything of
        # that is drawn or read.
        self.on_request: Callable[[Any], None] | None = None

    def add(self, loader: Any) -> None:
        """Add a loader that begins an epoch."""
        self._stack.append(ref(loader))

    def touch(self, loader: Any) -> None:
        """Make a loader that yields a batch the innermost one: loops inside its own are over."""
        if not self._stack or self._stack[-1]() is not loader:
            self.remove(loader)
            self.add(loader)
        elif self.run_pending is not None:
            self.run_pending()

    def remove(self, loader: Any) -> None:
        """Remove a loader whose epoch ended or was broken off."""
        if self.run_pending is not None:
            self.run_pending()
        self._stack = [item for item in self._stack if item() not in (None, loader)]

    @property
    def innermost(self) -> Any | None:
        """The loader of the innermost loop, or None."""
        return self._stack[-1]() if self._stack else None

    @property
    def references(self) -> list[Any]:
        """All loaders in iteration, the outermost first, after a leading None."""
        return [None, *(item() for item in self._stack)]


# The stack of loaders that no Accelerator prepared.
UNOWNED = ActiveLoaders()


class DataLoaderStateMixin:
    """The public attributes of a prepared loader during iteration.

    Attributes:
        end_of_dataloader: the current batch is the last one.
        remainder: real samples of a filled last step, of all ranks; -1 when unknown or when nothing is
            filled.
        real: samples of the current batch of this process that are not fillers; None when unknown, or all.
        batch_samples: samples of that batch with fillers; None when unknown.
        has_fillers: the current step may contain fillers, on some process.
        micro_steps: accumulation steps since the current batch was given.
        micro_steps_before: the same for the batch before, 0 before there was one.
    """

    end_of_dataloader: bool = False
    remainder: int = -1
    real: int | None = None
    batch_samples: int | None = None
    has_fillers: bool = False
    micro_steps: int = 0
    micro_steps_before: int = 0
    active: ActiveLoaders = UNOWNED
    records_loader_state: bool = False  # see ``Epoch``
    keeps_torch_numbers: bool = False  # see ``Epoch``
    gradient_state: Any = None  # that of the Accelerator that prepared it

    def reset(self) -> None:
        """Reset the attributes before an epoch."""
        self.end_of_dataloader = False
        self.remainder = -1
        self.real, self.batch_samples, self.has_fillers = None, None, False

    def show_batch(self, fetched: FetchedBatch) -> None:
        """Set the attributes for the batch that is given to the loop next."""
        self.real, self.batch_samples, self.has_fillers = fetched.real, fetched.size, fetched.remainder != 0
        if fetched.last:
            self.end_of_dataloader, self.remainder = True, fetched.remainder

    def time_fetches(self, batches: Iterator[FetchedBatch], samples: int) -> Iterator[FetchedBatch]:
        """Return the batches; the record of a run replaces this by one that measures how long each took.

        Args:
            batches: of one epoch.
            samples: of a batch that does not tell, of all processes.
        """
        return batches

    def begin(self) -> None:
        """Begin an epoch; inside of a training epoch of this loader, keep its attributes for its rest."""
        epoch, backwards = getattr(self, "position", _NO_POSITION).current, self._count_backwards()
        if epoch is not None:
            outer, epoch.backwards_before = epoch.outer, backwards
            if outer is not None and backwards > outer.backwards_before:
                outer.shown = {name: getattr(self, name) for name in _SHOWN}
        self.reset()
        self.active.add(self)

    def end(self) -> None:
        """End an epoch, complete or broken off.

        A training epoch of this loader that it was inside of goes on. Only training tells an evaluation in
        the middle of an epoch from an iterator that was left after a look at the first batch, and is alive.
        """
        self.active.remove(self)
        position = getattr(self, "position", _NO_POSITION)
        epoch = position.current
        outer = None if epoch is None else epoch.outer
        if epoch is None or outer is None or not (outer.active and outer.shown):
            return
        if self._count_backwards() == epoch.backwards_before:
            position.current = outer
            vars(self).update(outer.shown)
            self.active.add(self)

    def _count_backwards(self) -> int:
        return getattr(self.gradient_state, "backward_count", 0)


# What ``DataLoaderStateMixin`` says of a batch.
_SHOWN = (
    "end_of_dataloader",
    "remainder",
    "real",
    "batch_samples",
    "has_fillers",
    "micro_steps",
    "micro_steps_before",
)
_NO_POSITION = LoaderPosition()  # a class of a client may have none
