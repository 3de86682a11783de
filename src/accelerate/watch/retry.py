"""Trying again with a smaller batch when the memory of a device is full, on all ranks together."""

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


# What an attempt may change besides the memory of devices -> how to remember it, so that it can be put back.
_remembered: weakref.WeakKeyDictionary[Any, Callable[[Any], Undo]] = weakref.WeakKeyDictionary()


def roll_back(owner: Any, remember: Callable[[Any], Undo]) -> None:
    """Has the state of ``owner`` put back after each failed attempt, for as long as it lives.

    Args:
        owner: an object that attempts change.
        remember: called with the owner before an attempt; what it returns puts everything back.
    """
    _remembered[owner] = remember


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether an exception says that the memory of some device is full (or that cuDNN has no plan)."""
    return any(device.is_out_of_memory(exception) for device in devices.DEVICES)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Gives memory that is cached and not in use back to the device.

    Args:
        garbage_collection: first collect Python objects that only refer to each other.
    """
    if garbage_collection:
        gc.collect()
    here = world.current()
    (here.hardware if here else devices.detect()).empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """One None per object, and the device's cache emptied: ``a, b = release_memory(a, b)``.

    The memory is free once the caller's own names hold the Nones; what else refers to an object keeps it.
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
    """Calls ``function(batch_size, ...)`` with smaller and smaller batches until it fits into memory.

    The size that worked is kept for the next call. In a world of several processes every rank must make the
    call: the ranks agree after each attempt, so that all end with the same size. Before the next attempt what
    the failed one did is put back: random states, and what an ``Accelerator`` prepared and counted in it.

    Args:
        function: takes the batch size first; callers leave that argument out. None makes a decorator.
        starting_batch_size: of the first attempt.
        reduce_batch_size_fn: gives the next, smaller size; None takes 0.9 of the last one, rounded down.

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
    search = _Search(function, starting_batch_size, reduce_batch_size_fn)

    @functools.wraps(function)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        search.check(args)
        return search(args, kwargs)

    return decorated


@dataclass
class _Search:
    """The batch size of one decorated function, from call to call."""

    function: Callable[..., Any]
    size: int
    reduce: Callable[[], int] | None

    def check(self, args: tuple[Any, ...]) -> None:
        """The batch size is ours to give."""
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
            undo = _remember()
            with _Attempt() as attempt:
                attempt.result = self.function(self.size, *args, **kwargs)
            last = attempt.error or last
            smaller = self._smaller() if attempt.outcome == "full" else self.size
            every: list[tuple[Outcome, int]] = collective.all_objects(
                (attempt.outcome, smaller), "find_executable_batch_size"
            )
            outcomes: list[Outcome] = [outcome for outcome, _ in every]
            if "failed" in outcomes:
                attempt.give_up(outcomes)
            if "full" not in outcomes:
                return attempt.result
            # The smallest proposal of all ranks: those that had room follow those that had not.
            self.size = min(size for _, size in every)
            attempt.result = None
            for each in undo:
                each()
        raise DeviceError(
            "no batch size fits into memory: not even one sample does",
            fix="use a smaller model or precision, gradient checkpointing, or sharding",
        ) from last

    def _smaller(self) -> int:
        size = int(self.size * 0.9) if self.reduce is None else self.reduce()
        if size >= self.size:
            raise SettingError(
                f"reduce_batch_size_fn gave {size} after a batch of {self.size} did not fit",
                why="a size that does not shrink would be tried for ever",
                fix="return a smaller number",
            )
        return size


def _remember() -> list[Undo]:
    """What puts everything back that an attempt may change."""
    states = rng.capture()
    owners = [remember(owner) for owner, remember in list(_remembered.items())]
    return [*owners, lambda: _restore(states)]


def _restore(states: dict[str, Any]) -> None:
    rng.restore(states)


class _Attempt:
    """One call of the function: how it ended. An error is held until the ranks have agreed."""

    outcome: Outcome = "done"
    result: Any = None
    error: Exception | None = None

    def __enter__(self) -> _Attempt:
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
        """Raises the own error where there is one, else says whose it is."""
        if self.outcome == "failed" and self.error is not None:
            raise self.error
        ranks = ", ".join(str(rank) for rank, outcome in enumerate(outcomes) if outcome == "failed")
        raise CollectiveError(
            f"rank {ranks} failed while the batch size was searched",
            why="an error that has nothing to do with memory; its own message stands there",
        )
