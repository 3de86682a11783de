"""The search for a batch size that fits into memory, on all ranks together."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from accelerate import device as devices
from accelerate.core.errors import CollectiveError, DeviceError, PeerError, PrepareError, SettingError
from accelerate.world import collective, rng, watchdog, world
from accelerate.world.control_channel import DepartureError
from accelerate.world.process_group import is_disconnect
from accelerate.world.rank_failure_report import SAME_CALLS, FailureReport, rank_table

_logger = logging.getLogger(__name__)

Undo = Callable[[], object]
# "left": it waited for a rank that had left the attempt.
Outcome = Literal["done", "full", "left", "failed"]
OPERATION = "find_executable_batch_size"


# Object that an attempt may change -> function that captures its state and returns a function to restore it.
_state_captures: weakref.WeakKeyDictionary[Any, Callable[[Any], Undo]] = weakref.WeakKeyDictionary()
_model_sharers: weakref.WeakSet[Any] = weakref.WeakSet()


def restore_after_failure(owner: Any, remember: Callable[[Any], Undo], *, shares_model: bool = False) -> None:
    """Register ``owner``: its state is restored after each failed attempt, for as long as it lives.

    Args:
        owner: an object that attempts change.
        remember: called with the owner before an attempt; returns a function that restores the state.
        shares_model: its ranks hold parts of one model, which cannot move to another process group.
    """
    _state_captures[owner] = remember
    if shares_model:
        _model_sharers.add(owner)


def should_reduce_batch_size(exception: Exception) -> bool:
    """Return True when an exception says that the memory of a device is full (or cuDNN has no plan)."""
    return any(device.is_out_of_memory(exception) for device in devices.DEVICES)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release cached, unused memory to the device, and unused pinned memory to the host.

    Args:
        garbage_collection: first collect Python objects that only refer to each other.
    """
    if garbage_collection:
        gc.collect()
    current = world.current()
    device = current.hardware if current else devices.detect()
    device.empty_cache()
    device.empty_host_cache()


def release_memory(*objects: Any) -> list[Any]:
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
    ranks agree after each attempt, so that all end with the same size; those that wait in backward or in a
    collective for a rank whose memory is full leave the attempt too. Before the next attempt the changes of
    the failed one are undone: RNG states, and the prepared objects and counters of an ``Accelerator``.

    Args:
        function: takes the batch size first; callers leave that argument out. None makes a decorator.
        starting_batch_size: the size of the first attempt.
        reduce_batch_size_fn: returns the next, smaller size; called once on every rank after an attempt that
            did not fit on one of them. None takes 0.9 of the last size, rounded down.

    Raises:
        DeviceError: not even one sample fits.
        CollectiveError: another rank failed for another reason; or its memory is full while this one waits
            for it in a model that the ranks share (FSDP, tensor parallel, ...).
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
            undo, sharers = _capture_state(), list(_model_sharers)
            with _BatchSizeTrial() as attempt:
                attempt.result = self.function(self.size, *args, **kwargs)
            last = attempt.error or last
            smaller = self.size
            if attempt.outcome == "full":
                with attempt:  # its error ends the search on all ranks
                    smaller = self._propose_smaller()
            if attempt.outcome == "full" and sharers and collective.world_size() > 1:
                # At once: on an accelerator the others may wait for it until the timeout.
                _logger.warning(
                    "the memory of rank %d is full with batches of %d; it waits until the others have ended "
                    "this attempt. If they wait for it inside of the model, whose parts the ranks hold, "
                    "start with a smaller batch: find_executable_batch_size(starting_batch_size=%d)",
                    collective.rank(), self.size, smaller,
                )  # fmt: skip
            try:
                trials = attempt.agree(smaller)
            except CollectiveError as error:
                if attempt.outcome != "full" or not sharers or isinstance(error, PeerError):
                    raise
                # Others wait in a collective of the model, which no new process group would end.
                raise _full_memory_error(collective.rank(), self.size, smaller) from error
            attempt.give_up_if_failed(trials)
            if not any(trial.outcome == "full" for trial in trials):
                return attempt.result
            if attempt.outcome != "full" and self.reduce is not None:
                self.reduce()  # it may hold the size itself: it advances on all ranks
            # The smallest proposal of all ranks: ranks with free memory follow those without.
            before, self.size = self.size, min(trial.size for trial in trials)
            attempt.result = None
            for each in undo:
                each()
            if any(trial.lost_group for trial in trials):
                if sharers:  # they hold parts of one model over the closed group
                    full = next(rank for rank, trial in enumerate(trials) if trial.outcome == "full")
                    raise _full_memory_error(full, before, self.size)
                world.renew_group()
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
    return [*owners, lambda: rng.restore(states)]


class _TrialResult(NamedTuple):
    """The result of an attempt on one rank, for the others.

    Attributes:
        outcome: how it ended.
        size: the size that this rank can try next.
        lost_group: the default process group was closed to end a collective.
        failure: the report of an error that has nothing to do with memory.
    """

    outcome: Outcome
    size: int
    lost_group: bool
    failure: FailureReport | None


def _full_memory_error(full: int, size: int, smaller: int) -> CollectiveError:
    """Return the error where the ranks hold parts of one model, and rank ``full`` has no memory left."""
    error = CollectiveError(
        f"the memory of rank {full} is full with batches of {size}, while others wait for it "
        "in a model that the ranks share",
        why="it can leave the attempt only between collectives of the model",
        fix=f"start with a smaller batch: find_executable_batch_size(starting_batch_size={smaller})",
    )
    error.failed_rank = None if full == collective.rank() else full
    return error


def _clear_frames(error: BaseException) -> None:
    """Clear the frames of an error, of its cause, and of the error that it was raised during."""
    errors, seen = [error], set[int]()
    while errors:
        each = errors.pop()
        if id(each) not in seen:  # an error may lead back to itself
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            errors += filter(None, (each.__cause__, each.__context__))


class _BatchSizeTrial:
    """One call of the function and its outcome. An error is held until the ranks have agreed."""

    outcome: Outcome = "done"
    result: Any = None
    error: Exception | None = None

    def __enter__(self) -> _BatchSizeTrial:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = error
        if should_reduce_batch_size(error):
            self.outcome = "full"
        elif self.lost_group or isinstance(error, DepartureError) or is_disconnect(error):
            self.outcome = "left"
        else:
            self.outcome = "failed"
        if self.outcome != "failed":
            # The frames hold the tensors of the attempt: they must be gone before the next one.
            _clear_frames(error)
        return True

    @property
    def lost_group(self) -> bool:
        """Return whether the process group is closed, because this rank waited in torch for one that left."""
        watch = watchdog.current()
        return watch is not None and watch.was_interrupted

    def agree(self, size: int) -> list[_TrialResult]:
        """Return the results of the attempt, one where they are equal; other collectives are left first."""
        failure = None
        if self.outcome == "failed" and self.error is not None:
            what = f"rank {collective.rank()} failed while the batch size was searched"
            failure = FailureReport.from_exception(collective.rank(), self.error, what)
        while True:
            lost_group = self.lost_group or is_disconnect(self.error)
            result = _TrialResult(self.outcome, size, lost_group, failure)
            if not world.is_open():  # the function ends the training itself
                return [result]
            try:
                return collective.compare_objects(result, OPERATION)
            except DepartureError:
                continue

    def give_up_if_failed(self, trials: list[_TrialResult]) -> None:
        """Raise this rank's own error, or that of the first rank that failed."""
        outcomes = [trial.outcome for trial in trials]
        nobody_full = "left" in outcomes and "full" not in outcomes
        if self.error is not None and (
            self.outcome == "failed" or (nobody_full and "failed" not in outcomes)
        ):
            raise self.error
        for trial in trials:
            if trial.failure is not None:
                raise trial.failure.error(collective.rank())
        if nobody_full:
            raise CollectiveError(
                "this rank has ended an attempt of find_executable_batch_size, and others have not",
                why=rank_table(outcomes),
                fix=SAME_CALLS,
            )
