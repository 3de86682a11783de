"""The stack of prepared loaders in iteration, with the innermost one the current one; their attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, ClassVar
from weakref import ReferenceType, WeakSet, ref

from accelerate.data.batches import FetchedBatch
from accelerate.data.position import Epoch, LoaderPosition


class ActiveLoaders:
    """A stack of weak references to the loaders in iteration.

    Attributes:
        run_pending: called between two batches, and at the end of an epoch; that of a device that is lazy.
    """

    _living: ClassVar[WeakSet[ActiveLoaders]] = WeakSet()
    newest: ClassVar[ActiveLoaders]  # that of the newest ``GradientState``

    def __init__(self) -> None:
        self._living.add(self)
        self.run_pending: Callable[[], None] | None = None
        self._stack: list[ReferenceType[Any]] = []
        self.clock: int = 0  # counts batches
        # Called with a loader that begins an epoch, or is requested for its next batch, before anything of
        # that is drawn or read.
        self.on_request: Callable[[Any], None] | None = None

    def add(self, loader: Any) -> None:
        """Add a loader that begins an epoch."""
        self._stack.append(ref(loader))

    def touch(self, loader: Any) -> None:
        """Make a loader that yields a batch the innermost one: loops inside its own are over."""
        self.clock += 1
        loader.yielded_at = loader.yielded_at[1], self.clock
        if not self._stack or self._stack[-1]() is not loader:
            self.remove(loader)
            self._stack.append(ref(loader))
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

    @classmethod
    def innermost_of_process(cls) -> Any | None:
        """Return the innermost loader of any ``Accelerator``; None unless one alone has a loop."""
        innermost = [loader for stack in cls._living if (loader := stack.innermost) is not None]
        return innermost[0] if len(innermost) == 1 else None

    def find_closing(self, innermost: Any) -> Any:
        """Return the loader whose last batch closes a window: of several that train in turn, that begun last.

        A loader takes turns with the innermost one if it has yielded since that one's batch before; another
        one may be left and alive.
        """
        if len(self._stack) < 2:
            return innermost
        active: list[Any] = [item() for item in self._stack]
        in_turn = [
            loader
            for loader in active
            if getattr(loader, "trains", False) and loader.yielded_at[1] > innermost.yielded_at[0]
        ]
        return max(in_turn, key=lambda loader: loader.begun_at, default=innermost)

    @property
    def references(self) -> list[Any]:
        """All loaders in iteration, the outermost first, after a leading None."""
        return [None, *(item() for item in self._stack)]


# The stack before there is an Accelerator.
UNOWNED = ActiveLoaders.newest = ActiveLoaders()


class _NewestActiveLoadersDescriptor:
    """The descriptor ``active`` of a loader that no ``Accelerator`` prepared: it is that of the newest."""

    def __get__(self, loader: Any, owner: type | None = None) -> ActiveLoaders:
        return ActiveLoaders.newest


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
        trains: whether there were any in this epoch.
        begun_at: when the epoch began, and
        yielded_at: when the batch before the current one was given, and that one; by ``ActiveLoaders.clock``.
    """

    end_of_dataloader: bool = False
    remainder: int = -1
    real: int | None = None
    batch_samples: int | None = None
    has_fillers: bool = False
    micro_steps: int = 0
    trains: bool = False
    begun_at: int = 0
    yielded_at: tuple[int, int] = 0, 0
    active: ActiveLoaders = _NewestActiveLoadersDescriptor()  # type: ignore[assignment]
    position: LoaderPosition
    records_loader_state: bool = False  # see ``Epoch``
    keeps_torch_numbers: bool = False  # see ``Epoch``
    gradient_state: Any = None  # that of the Accelerator that prepared it
    # Batches since the last accumulation step, and their samples; the same before the steps in ``_pace``.
    _given: tuple[int, int] = 0, 0
    _pace: tuple[int, int, int] = 0, 1, 0  # steps, batches, samples; 0 samples: unknown

    def __getstate__(self) -> dict[str, Any]:
        # A copy is in no iteration; its own ones count for the Accelerator of the original.
        return {name: value for name, value in vars(self).items() if name != "active"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.gradient_state is not None:
            self.active = self.gradient_state.loaders

    def reset(self) -> None:
        """Reset the attributes before an epoch."""
        self.end_of_dataloader = False
        self.remainder = -1
        self.real, self.batch_samples, self.has_fillers = None, None, False

    def show_batch(self, fetched: FetchedBatch) -> None:
        """Set the attributes for the batch that is given to the loop next."""
        self.real, self.batch_samples, self.has_fillers = fetched.real, fetched.size, fetched.remainder != 0
        self.end_of_dataloader = fetched.last
        if fetched.last:
            self.remainder = fetched.remainder
        if self.micro_steps:
            self._pace, self._given, self.micro_steps = (self.micro_steps, *self._given), (0, 0), 0
        self._given = self._given[0] + 1, self._given[1] + (fetched.size or 0)

    @property
    def _has_equal_batches(self) -> bool:
        """True where all processes have batches of the same size in each step."""
        return True

    @property
    def expected_micro_steps(self) -> int:
        """The least number of ``micro_steps`` for the batches since the last one; 0 before there was one.

        A loop takes a number of steps for each batch, or one for each so many samples, or as many as before
        after it has left a batch out: where these do not agree, the smallest number counts, so that a window
        is closed rather than left open. Batches of several ranks may differ in size, and their windows close
        together: then samples do not count.
        """
        (steps, batches_before, samples_before), (batches, samples) = self._pace, self._given
        expected = min(steps, -(-steps * batches // max(1, batches_before)))
        if samples and samples_before and self._has_equal_batches:
            expected = min(expected, -(-steps * samples // samples_before))
        return expected

    def time_fetches(self, batches: Iterator[FetchedBatch], samples: int) -> Iterator[FetchedBatch]:
        """Return the batches; the record of a run replaces this by one that measures how long each took.

        Args:
            batches: of one epoch.
            samples: of a batch that does not tell, of all processes.
        """
        return batches

    def begin(self) -> None:
        """Begin an epoch, and compute the real samples of its last step.

        Inside of another epoch of this loader, the attributes are kept for the rest of that.
        """
        epoch: Epoch | None = getattr(self, "position", _NO_POSITION).current
        if epoch is not None:
            epoch.loader, epoch.backwards_before = self, self._count_backwards()
            epoch.records_loader_state = self.records_loader_state
            epoch.keeps_torch_numbers = self.keeps_torch_numbers
            if epoch.outer is not None:
                _keep_shown(epoch.outer)
        self.reset()
        if not getattr(self, "_drop_last", True):
            own: Any = self
            with suppress(AttributeError, TypeError, NotImplementedError):  # a stream without a length
                samples = getattr(own, "total_dataset_length", None)
                self.remainder = (len(own.dataset) if samples is None else samples) % own.total_batch_size
        self.trains, self.begun_at = False, self.active.clock
        self.active.add(self)

    def resume(self, epoch: Epoch) -> None:
        """Go on with an epoch after another one of this loader, or of a twin, that began later.

        Or after a checkpoint was loaded inside of the loop: the loop goes on with its own epoch.
        """
        position, current = self.position, self.position.current
        position.current = epoch
        if current is None:
            position.iteration = max(position.iteration, epoch.number)
            return
        if current.active:
            _keep_shown(current)
        for loader, shown in epoch.shown:
            vars(loader).update(shown)
        self.active.add(self)

    def end(self) -> None:
        """Take the loader out of those in iteration."""
        self.active.remove(self)

    def end_epoch(self, epoch: Epoch) -> None:
        """End an epoch, complete or broken off.

        A training epoch of this loader that it was inside of goes on. Only training tells an evaluation in
        the middle of an epoch from an iterator that was left after a look at the first batch, and is alive.
        """
        current = self.position.current
        goes_on = current is not None and current is not epoch and current.active
        if not (goes_on and current.loader is self):  # type: ignore[union-attr]
            self.end()
        outer, epoch.loader, epoch.shown = epoch.outer, None, []
        if goes_on or outer is None or not outer.active:
            return
        for loader, shown in outer.shown:
            if loader is not self:
                vars(loader).update(shown)
        if outer.backwards_before < epoch.backwards_before == self._count_backwards():
            outer.loader.resume(outer)

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
    "trains",
    "_given",
    "_pace",
)


def _keep_shown(epoch: Epoch) -> None:
    """Keep in an epoch what its loader says of the batch in hand, and the one that a twin was made of."""
    loaders = epoch.loader, getattr(epoch.loader, "_original", None)
    epoch.shown = [
        (each, {name: getattr(each, name) for name in _SHOWN}) for each in loaders if each is not None
    ]


_NO_POSITION = LoaderPosition()  # a class of a client may have none
