"""The part of the ``Accelerator`` that sends numbers to trackers."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from accelerate import track
from accelerate.core.errors import SettingError, UnknownNameError
from accelerate.facade.enums import LoggerType
from accelerate.facade.processes import Processes
from accelerate.track import running
from accelerate.track.base import BlankTracker, GeneralTracker

Options = Mapping[str, Mapping[str, Any]]


class Tracking(Processes):
    """Starting trackers, logging to all of them, ending them. They live on the main process only.

    Attributes:
        log_with: the trackers that were asked for: names, and objects that the user made.
        trackers: those whose run is open; empty on the other processes.
    """

    log_with: list[Any]
    trackers: list[GeneralTracker]

    @property
    def logging_dir(self) -> str | None:
        """Where trackers write."""
        raise NotImplementedError

    def _start_tracking(self, log_with: Any) -> None:
        """Checks what was asked for, alike on every process; starts nothing."""
        self.log_with = filter_trackers(log_with, self.logging_dir)
        self._takes_all = track.ALL in (log_with if isinstance(log_with, list | tuple) else [log_with])
        self.trackers = []
        self._warned = False

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Begins a run with every tracker of ``log_with``, on the main process.

        Called again, it ends these runs and begins new ones; a tracker that the user made goes on.

        Args:
            project_name: name of the project or the run, as each tracker takes it.
            config: hyperparameters to store with the run.
            init_kwargs: options of single trackers, by name. Those of trackers that are not in use are left.

        Raises:
            UnknownNameError: ``init_kwargs`` names no tracker.
            SettingError: it holds options for a tracker that the user has already made.
        """
        options: Options = init_kwargs or {}
        self._check_options(options, "init_kwargs")
        if not self.is_main_process:
            return
        running.finish(tracker for tracker in self.trackers if not self._is_given(tracker))
        self.trackers = []
        if self._takes_all:
            print(f'log_with="{track.ALL}": {", ".join(_names(self.log_with)) or "none"}', file=sys.stderr)
        for tracker in track.make(self.log_with, project_name, self.logging_dir, options):
            running.start(tracker)
            self.trackers.append(tracker)
        if config is not None:
            for tracker in self.trackers:
                tracker.store_init_configuration(config)

    def _is_given(self, tracker: GeneralTracker) -> bool:
        return any(tracker is given for given in self.log_with)

    def _check_options(self, options: Iterable[str], where: str) -> None:
        own = [each.name for each in self.log_with if isinstance(each, GeneralTracker)]
        for name in map(str, options):
            if name not in own:
                if name not in track.classes():
                    raise UnknownNameError("tracker", name, [*track.classes(), *own], where=f"in {where}")
            elif where == "init_kwargs" and name not in _names(self.log_with, made=False):
                raise SettingError(
                    f"init_kwargs has options for {name!r}, which is already made",
                    fix="give them to the constructor of the tracker",
                )

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Logs to every tracker; does nothing on processes other than the main one.

        Args:
            values: name -> number, or what the trackers in use take. A tensor of one element is its number.
            step: of all of them.
            log_kwargs: options of single trackers, by name.

        Raises:
            UnknownNameError: ``log_kwargs`` names no tracker.
        """
        options: Options = log_kwargs or {}
        if options:
            self._check_options(options, "log_kwargs")
        if self.log_with and not self.trackers and self.is_main_process and not self._warned:
            self._warned = True
            warnings.warn("log() has no effect: no run is open; call init_trackers() first", stacklevel=2)
        for tracker in self.trackers:
            tracker.log(values, step=step, **options.get(tracker.name, {}))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The running tracker of that name, for what ``log`` does not cover.

        On the other processes, and where no trackers were asked for, it is one that does nothing whatever is
        called on it.

        Args:
            name: what ``log_with=`` called it.
            unwrap: give the library's own object of the run.

        Raises:
            UnknownNameError: it was not asked for.
            SettingError: it was, and ``init_trackers`` has not been called.
        """
        names = _names(self.log_with)
        if names and str(name) not in names:
            raise UnknownNameError("tracker", str(name), names, why=f"log_with asked for: {', '.join(names)}")
        if not names or not self.is_main_process:
            return BlankTracker()
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        raise SettingError(f"the tracker {str(name)!r} has not started", fix="call init_trackers() first")

    def _end_tracking(self) -> None:
        """Ends every run, also when one of them raises."""
        ended, self.trackers = self.trackers, []
        running.finish(ended)


def _names(chosen: Iterable[Any], made: bool = True) -> list[str]:
    """Names of what was chosen; ``made``: of the user's own objects too."""
    return [
        each.name if isinstance(each, GeneralTracker) else str(each)
        for each in chosen
        if made or not isinstance(each, GeneralTracker)
    ]


def filter_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None = None) -> list[Any]:
    """What ``log_with`` means here: members of ``LoggerType``, other names, and trackers, each once.

    Args:
        log_with: a name, a tracker, or several; ``"all"`` is every one that is installed and, if it needs a
            folder for logs, has one.
        logging_dir: that folder.

    Raises:
        UnknownNameError: there is no such tracker.
        MissingExtraError: a package is not installed.
        SettingError: a tracker needs a folder, or something given is neither a name nor a tracker.
    """
    chosen = track.choose(log_with, logging_dir)
    return [_member(each) if isinstance(each, str) else each for each in chosen]


def get_available_trackers() -> list[Any]:
    """The trackers whose package is installed, as members of ``LoggerType`` or, of other packages, names."""
    return [_member(name) for name in track.available(logging_dir="")]


def _member(name: str) -> Any:
    return next((member for member in LoggerType if member == name), name)
