"""Trackers: the libraries that log the metrics of a run. A file of this folder is a tracker.

TRACKERS               the registry of the files
tracker_classes()      every class by name, with those that users registered
choose_trackers(...)   the names and trackers that ``log_with=`` selects
make_trackers(...)     the trackers of one run, not started
start_run(...)         begins one; finish_runs(...) ends some, and the end of the script those that are left
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import cache
from typing import Any, TypeVar

from accelerate.core.errors import MissingExtraError, SettingError, UnknownNameError
from accelerate.core.registry import Registry
from accelerate.track.base import GeneralTracker, missing_attributes

TRACKERS: Registry[type[GeneralTracker]] = Registry("tracker", "accelerate.track", "accelerate.trackers")
# The name that selects every installed tracker.
ALL = "all"
# The trackers with an open run, and the process that started them.
_open: list[GeneralTracker] = []
_owner = os.getpid()
Class = TypeVar("Class", bound=type[GeneralTracker])


@cache
def tracker_classes() -> dict[str, type[GeneralTracker]]:
    """Return every tracker class by its name. A class added to this dict is known from then on."""
    return {name: TRACKERS.get(name) for name in TRACKERS.names()}


def register_tracker_class(tracker_class: Class) -> Class:
    """Register a tracker class by its ``name``, for ``log_with="name"``.

    Raises:
        SettingError: it is not a tracker class, or lacks an attribute that every tracker has.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise SettingError(
            f"{tracker_class!r} is not a class of trackers",
            fix="derive it from accelerate.tracking.GeneralTracker, and register the class itself",
        )
    if missing := missing_attributes(tracker_class):
        raise SettingError(
            f"the tracker {tracker_class.__name__} has no {', '.join(missing)}",
            fix="define them in the class",
        )
    before = tracker_classes().get(tracker_class.name, tracker_class)
    if before is not tracker_class:
        warnings.warn(
            f"log_with={tracker_class.name!r} means {tracker_class.__name__} now, not {before.__name__}",
            stacklevel=2,
        )
    tracker_classes()[tracker_class.name] = tracker_class
    return tracker_class


def available_trackers(logging_dir: object = None) -> list[str]:
    """Return names of installed trackers; without ``logging_dir`` only of those that need no folder."""
    return [
        name
        for name, cls in tracker_classes().items()
        if cls.is_available() and (logging_dir is not None or not cls.requires_logging_directory)
    ]


def choose_trackers(
    log_with: Any, logging_dir: object = None, missing: list[MissingExtraError] | None = None
) -> list[str | GeneralTracker]:
    """Return the names and trackers that ``log_with`` selects, each once, in the given order.

    Args:
        log_with: None, a name, a tracker, or several of them; ``"all"`` selects every usable one
            but ``"jsonl"``, which no script of Accelerate 1.x expects.
        logging_dir: the folder for logs.
        missing: takes the errors of trackers whose package is not installed; these are left out.

    Raises:
        UnknownNameError: there is no such tracker.
        MissingExtraError: a package is not installed, and ``missing`` is None.
        SettingError: a tracker needs a folder, or an item is neither a name nor a tracker.
    """
    requested = log_with if isinstance(log_with, list | tuple) else [] if log_with is None else [log_with]
    chosen: list[str | GeneralTracker] = []
    for each in requested:
        if isinstance(each, GeneralTracker):
            chosen += [] if any(each is other for other in chosen) else [each]
            continue
        if not isinstance(each, str):
            raise SettingError(
                f"log_with={each!r} is neither a tracker nor the name of one",
                why=f"names: {', '.join([*tracker_classes(), ALL])}",
                fix="give a name, or an object of a class derived from GeneralTracker",
            )
        name = str(each)
        if name == ALL:
            usable = [each for each in available_trackers(logging_dir) if tracker_classes()[each].in_all]
            chosen += [each for each in usable if each not in chosen]
            continue
        if name not in tracker_classes():
            raise UnknownNameError("tracker", name, [*tracker_classes(), ALL], where="in log_with")
        try:
            tracker_classes()[name].check(logging_dir)
        except MissingExtraError as error:
            if missing is None:
                raise
            missing.append(error)
            continue
        chosen += [] if name in chosen else [name]
    return chosen


def make_trackers(
    chosen: Iterable[str | GeneralTracker],
    project_name: str,
    logging_dir: str | os.PathLike[str] | None,
    options: Mapping[str, Mapping[str, Any]],
) -> list[GeneralTracker]:
    """Make the trackers of a run; nothing is started.

    Args:
        chosen: the result of ``choose_trackers``. A tracker object is used as it is.
        project_name: first argument of each class.
        logging_dir: second argument of classes that require it.
        options: more arguments, by the tracker's name.
    """
    trackers: list[GeneralTracker] = []
    for each in chosen:
        if isinstance(each, GeneralTracker):
            trackers.append(each)
            continue
        cls = tracker_classes()[each]
        folder = (logging_dir,) if cls.requires_logging_directory else ()
        trackers.append(cls(project_name, *folder, **options.get(each, {})))  # type: ignore[call-arg]
    return trackers


# --- open runs: each is finished, also when a script fails or forgets to end it


def is_open(tracker: GeneralTracker) -> bool:
    """Return True when the tracker was started here and is not finished."""
    return any(tracker is run for run in _open)


def open_trackers() -> list[GeneralTracker]:
    """Return the trackers that were started here and are not finished."""
    return list(_open)


def start_run(tracker: GeneralTracker) -> None:
    """Begin a run; do nothing if it has begun."""
    global _owner
    if is_open(tracker):
        return
    tracker.start()
    _open.append(tracker)
    _owner = os.getpid()
    # Exit handlers run in reverse order. Registered again after each start, it runs before the library's own.
    atexit.unregister(_finish_at_exit)
    atexit.register(_finish_at_exit)


def finish_runs(
    trackers: Iterable[GeneralTracker], others: Iterable[GeneralTracker] = (), has_failed: bool = False
) -> None:
    """End the open runs among ``trackers``: all of them, also when one raises; then raise its error.

    Args:
        trackers: those that ``start_run`` began.
        others: those that are ended whoever began them.
        has_failed: the script ends by an error.
    """
    # The stack calls the last one pushed first.
    with ExitStack() as stack:
        for tracker in [*filter(is_open, trackers), *others][::-1]:
            if has_failed and isinstance(tracker, GeneralTracker):  # a program may have added another object
                tracker.failed = True
            _open[:] = [run for run in _open if run is not tracker]
            stack.callback(tracker.finish)


def _finish_at_exit() -> None:
    if os.getpid() != _owner:  # a fork of the process that started the runs
        return
    # The interpreter sets last_value when it has printed the error that ends the script; an interactive
    # one, which has a prompt, after every error.
    finish_runs(list(_open), has_failed=hasattr(sys, "last_value") and not hasattr(sys, "ps1"))
