"""Trackers: where the numbers of a run go. A file of this folder is a tracker.

TRACKERS        the registry of the files
classes()       every class by name, with those that users registered
choose(...)     what ``log_with=`` means here
make(...)       the trackers of one run, not started
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

from accelerate.core.errors import SettingError, UnknownNameError
from accelerate.core.registry import Registry
from accelerate.track.base import GeneralTracker, lacking

TRACKERS: Registry[type[GeneralTracker]] = Registry(
    "tracker", "accelerate.track", "accelerate.trackers", exclude=("base", "running")
)
# The word that means every tracker that is installed.
ALL = "all"
Class = TypeVar("Class", bound=type[GeneralTracker])


@cache
def classes() -> dict[str, type[GeneralTracker]]:
    """Every tracker by its name. What is put into this dict is known from then on."""
    return {name: TRACKERS.get(name) for name in TRACKERS.names()}


def register_tracker_class(tracker_class: Class) -> Class:
    """Makes a tracker known by its ``name``, for ``log_with="name"``.

    Raises:
        SettingError: it is no class of trackers, or lacks an attribute that every tracker has.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise SettingError(
            f"{tracker_class!r} is not a class of trackers",
            fix="derive it from accelerate.tracking.GeneralTracker, and register the class itself",
        )
    if missing := lacking(tracker_class):
        raise SettingError(
            f"the tracker {tracker_class.__name__} has no {', '.join(missing)}",
            fix="define them in the class",
        )
    before = classes().get(tracker_class.name, tracker_class)
    if before is not tracker_class:
        warnings.warn(
            f"log_with={tracker_class.name!r} means {tracker_class.__name__} now, not {before.__name__}",
            stacklevel=2,
        )
    classes()[tracker_class.name] = tracker_class
    return tracker_class


def check_name(name: str) -> None:
    """Refuses a name that no tracker has.

    Raises:
        UnknownNameError: the nearest is suggested.
    """
    if name not in classes():
        raise UnknownNameError("tracker", name, [*classes(), ALL])


def available(logging_dir: object = None) -> list[str]:
    """Names of the trackers whose package is installed; those that need a folder only if there is one."""
    return [
        name
        for name, known in classes().items()
        if known.available() and (logging_dir is not None or not known.requires_logging_directory)
    ]


def choose(asked: Any, logging_dir: object = None) -> list[str | GeneralTracker]:
    """What ``log_with=asked`` means: names and trackers, each once, in the order given.

    Args:
        asked: None, a name, a tracker, or several of them; ``"all"`` stands for every one that can be used.
        logging_dir: the folder for logs.

    Raises:
        UnknownNameError: there is no such tracker.
        MissingExtraError: a package is not installed.
        SettingError: a tracker needs a folder, or something given is neither a name nor a tracker.
    """
    given = asked if isinstance(asked, list | tuple) else [] if asked is None else [asked]
    chosen: list[str | GeneralTracker] = []
    for each in given:
        if isinstance(each, GeneralTracker):
            chosen += [] if any(each is known for known in chosen) else [each]
            continue
        if not isinstance(each, str):
            raise SettingError(
                f"log_with={each!r} is neither a tracker nor the name of one",
                why=f"names: {', '.join([*classes(), ALL])}",
                fix="give a name, or an object of a class derived from GeneralTracker",
            )
        name = str(each)
        if name == ALL:
            chosen += [known for known in available(logging_dir) if known not in chosen]
            continue
        check_name(name)
        classes()[name].check(logging_dir)
        chosen += [] if name in chosen else [name]
    return chosen


def make(
    chosen: Iterable[str | GeneralTracker],
    project_name: str,
    logging_dir: str | os.PathLike[str] | None,
    options: Mapping[str, Mapping[str, Any]],
) -> list[GeneralTracker]:
    """The trackers of a run; nothing is started.

    Args:
        chosen: what ``choose`` returned. A tracker stands for itself.
        project_name: first argument of each class.
        logging_dir: second argument of those that require one.
        options: more arguments, by the tracker's name.
    """
    made: list[GeneralTracker] = []
    for each in chosen:
        if isinstance(each, GeneralTracker):
            made.append(each)
            continue
        known = classes()[each]
        folder = (logging_dir,) if known.requires_logging_directory else ()
        made.append(known(project_name, *folder, **options.get(each, {})))  # type: ignore[call-arg]
    return made
