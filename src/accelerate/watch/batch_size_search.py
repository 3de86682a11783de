"""The search for a batch size that fits into memory, on all ranks together."""

from __future__ import annotations

import functools
import gc
import inspect
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NoReturn

from accelerate import device as devices
from accelerate.core.errors import CollectiveError, DeviceError, PrepareError, SettingError
from accelerate.world import collective, rng, world

Undo = Callable[[], None]
Outcome = Literal["done", "full", "failed"]


# Object that an attempt may change -> function that captures its state and returns a function to restore it.
_state_captures: weakref.WeakKeyDictionary[Any, Callable[[Any], Undo]] = weakref.WeakKeyDictionary()


def restore_after_failure(owner: Any, remember: Callable[[Any], Undo]) -> None:
    """Register ``owner``: its state is restored after each failed attempt, for as long as it lives.

    Args:
        owner: an object that attempts change.
        remember: called with the owner before an attempt; returns a function that restores the state.
    """
    _state_captures[owner] = remember


def should_reduce_batch_size(exception: Exception) -> bool:
    """Return True when an exception says that the memory of a device is full (or cuDNN has no plan)."""
    return any(device.is_out_of_memory(exception) for device in devices.DEVICES)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release cached, unused memory to the device.

    Args:
        garbage_collection: first collect Python objects that only refer to each other.
    """
    if garbage_collection:
        gc.collect()
    current = world.current()
    (current.hardware if current else devices.detect()).empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Return one None per object and empty the device's cache: ``a, b = release_memory(a, b)``.

    The memory is free once the caller's names hold the Nones and nothing else refers to the objects.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Call ``function(batch_size, ...)`` with smaller and smaller batches until it fits into memory.

    The next call begins with the size that worked. With several ranks every rank must make the call: the
    ranks agree after each attempt, so that all end with the same size. Before the next attempt the changes
    of the failed one are undone: RNG states, and the prepared objects and counters of an ``Accelerator``.

    Args:
        function: takes the batch size first; callers leave that argument out. None makes a decorator.
        starting_batch_size: the size of the first attempt.
        reduce_batch_size_fn: returns the next, smaller size; None takes 0.9 of the last one, rounded down.

    Raises:
        DeviceError: not even one sample fits.
        CollectiveError: another rank failed for another reason.
        PrepareError: the caller passed the batch size itself.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    search = _BatchSizeSearch(function, starting_batch_size, reduce_batch_size_fn)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        search.check(args)
        return search(args, kwargs)

    return wrapper


@dataclass
class _BatchSizeSearch:
    """The batch size of one decorated function, from call to call."""

    function: Callable[..., Any]
    size: int
    reduce: Callable[[], int] | None

    def check(self, args: tuple[Any, ...]) -> None:
        """Raise PrepareError when the caller passes the batch size."""
        parameters = list(inspect.signature(self.function).parameters.values())
        if any(each.kind is each.VAR_POSITIONAL for each in parameters) or len(args) < len(parameters):
            return
        name = getattr(self.function, "__name__", "the function")
        shown = ", ".join(str(each) for each in parameters[1:])
        raise PrepareError(
            f"{name} was called with {len(args)} arguments, its batch size among them",
            why="find_executable_batch_size gives the batch size",
            fix=f"call {name}({shown})",
        )

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        last: Exception | None = None
        while self.size > 0:
            clear_device_cache(garbage_collection=True)
            undo = _capture_state()
            with _BatchSizeTrial() as attempt:
                attempt.result = self.function(self.size, *args, **kwargs)
            last = attempt.error or last
            smaller = self._propose_smaller() if attempt.outcome == "full" else self.size
            trials: list[tuple[Outcome, int]] = collective.all_gather_object(
                (attempt.outcome, smaller), "find_executable_batch_size"
            )
            outcomes: list[Outcome] = [outcome for outcome, _ in trials]
            if "failed" in outcomes:
                attempt.give_up(outcomes)
            if "full" not in outcomes:
                return attempt.result
            # The smallest proposal of all ranks: ranks with free memory follow those without.
            self.size = min(size for _, size in trials)
            attempt.result = None
            for each in undo:
                each()
        raise DeviceError(
            "no batch size fits into memory: not even one sample does",
            fix="use a smaller model or precision, gradient checkpointing, or sharding",
        ) from last

    def _propose_smaller(self) -> int:
        size = int(self.size * 0.9) if self.reduce is None else self.reduce()
        if size >= self.size:
            raise SettingError(
                f"reduce_batch_size_fn gave {size} after a batch of {self.size} did not fit",
                why="a size that does not shrink would be tried for ever",
                fix="return a smaller number",
            )
        return size


def _capture_state() -> list[Undo]:
    """Return the functions that restore the state an attempt may change."""
    states = rng.capture()
    owners = [remember(owner) for owner, remember in list(_state_captures.items())]
    return [*owners, lambda: _restore(states)]


def _restore(states: dict[str, Any]) -> None:
    rng.restore(states)


class _BatchSizeTrial:
    """One call of the function and its outcome. An error is held until the ranks have agreed."""

    outcome: Outcome = "done"
    result: Any = None
    error: Exception | None = None

    def __enter__(self) -> _BatchSizeTrial:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = error
        self.outcome = "full" if should_reduce_batch_size(error) else "failed"
        if self.outcome == "full":
            # The frames hold the tensors of the attempt: they must be gone before the next one.
            traceback.clear_frames(trace)
        return True

    def give_up(self, outcomes: list[Outcome]) -> NoReturn:
        """Raise this rank's own error, or name the ranks that failed."""
        if self.outcome == "failed" and self.error is not None:
            raise self.error
        ranks = ", ".join(str(rank) for rank, outcome in enumerate(outcomes) if outcome == "failed")
        raise CollectiveError(
            f"rank {ranks} failed while the batch size was searched",
            why="its error has nothing to do with memory; that rank shows the message",
        )
