"""The ``TrackerSet`` of an ``Accelerator``: it starts trackers, logs to all of them, and ends them."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from accelerate import track
from accelerate.core.errors import MissingExtraError, SettingError, UnknownNameError, nearest, warn_user
from accelerate.core.value_types import refuse_nul
from accelerate.facade.enums import LoggerType
from accelerate.facade.run_recorder import RunRecorder
from accelerate.track.base import BlankTracker, GeneralTracker, unwrap_scalar

Options = Mapping[str, Mapping[str, Any]]


class TrackerSet:
    """The trackers of a run. They exist on the main process only.

    Args:
        log_with: a name, a ``GeneralTracker``, or several; ``"all"`` is every one whose package is installed.
        logging_dir: the folder for logs; a tracker that needs one is refused where it is None.
        is_main_process: whether this is rank 0.

    Attributes:
        log_with: the requested trackers: names, and objects that the user made.
        missing: errors of those whose package is not installed.
        trackers: those whose run is open; empty on the other processes.
        recorder: of ``accelerate launch --record``; it takes what is logged, with or without trackers.
        strict: options that no tracker takes are an error, not a warning.
    """

    def __init__(
        self, log_with: Any, logging_dir: str | os.PathLike[str] | None, is_main_process: bool
    ) -> None:
        """Check the requested trackers on every rank; start none."""
        self.missing: list[MissingExtraError] = []
        chosen = [] if log_with is None else track.choose_trackers(log_with, logging_dir, self.missing)
        self.log_with = [_logger_type(each) if isinstance(each, str) else each for each in chosen]
        self.trackers: list[GeneralTracker] = []
        self._started: list[GeneralTracker] = []  # those of log_with; a program may add others to trackers
        self._ended: list[GeneralTracker] = []  # a script asks the run for its id or address after its end
        self._is_main = is_main_process
        self._uses_all = track.ALL in (log_with if isinstance(log_with, list | tuple) else [log_with])
        self.recorder: RunRecorder | None = None
        self.strict, self._warnings = False, set[str]()
        self._has_warned_log = False
        # Trackers that have logged once, and how many calls failed after that.
        # By identity and by name: an object of the user's need not be hashable.
        self._logged: set[int] = set()
        self._failures: Counter[str] = Counter()

    def report_missing(self, is_error: bool) -> None:
        """Say on rank 0 which trackers are left out, as 1.x does: scripts name those of their authors.

        Raises:
            MissingExtraError: ``is_error``.
        """
        if is_error:
            raise self.missing[0]
        for error in self.missing if self._is_main else ():
            warn_user(f"{error.what}, and is left out: nothing is logged there. {error.fix}")

    def start(
        self,
        project_name: str,
        config: dict[str, Any] | None,
        options: Options,
        logging_dir: str | os.PathLike[str] | None,
    ) -> None:
        """Begin a run with every tracker of ``log_with``; see ``Accelerator.init_trackers``."""
        # A program may have assigned it, and the folder, since the constructor checked them.
        self.log_with = filter_trackers(self.log_with, logging_dir)
        self._check_options(options, "init_kwargs")
        refuse_nul("project_name", project_name)
        if not self._is_main:
            return
        if self.recorder is not None and config is not None:
            self.recorder.store_init_configuration(config)
        # A tracker that the user made goes on.
        added = _without(self.trackers, [*self._started, *self.log_with])
        track.finish_runs(_without(self.trackers, [*added, *self.log_with]))
        self.trackers, self._started, self._ended = [], [], []
        if self._uses_all:
            print(
                f'log_with="{track.ALL}": {", ".join(_tracker_names(self.log_with)) or "none"}',
                file=sys.stderr,
            )
        self._started = track.make_trackers(self.log_with, project_name, logging_dir, options)
        for tracker in (*added, *self._started):
            track.start_run(tracker)
            self.trackers.append(tracker)
        if config is not None:
            for tracker in self.trackers:
                tracker.store_init_configuration(config)

    def _check_options(self, options: Iterable[str], where: str) -> None:
        """Refuse in a strict run the options that no tracker takes; else warn of each once, and ignore it."""
        names = _tracker_names(self.log_with, include_objects=False)
        added = _without(self.trackers, self._started)
        instance_names = [each.name for each in (*self.log_with, *added) if not isinstance(each, str)]
        known = [*track.tracker_classes(), *instance_names]
        for name in map(str, options):
            error: SettingError
            if name not in known:
                # Programs give the options of their one tracker without its name.
                nested = f"did you mean {{{names[0]!r}: {{{name!r}: ...}}}}?" if names else ""
                fix = "" if nearest(name, known) else nested
                error = UnknownNameError("tracker", name, known, where=f"in {where}", fix=fix)
            elif where == "init_kwargs" and name in instance_names and name not in names:
                error = SettingError(
                    f"init_kwargs has options for {name!r}, which is already made",
                    fix="give them to the constructor of the tracker",
                )
            else:
                continue
            if self.strict:
                raise error
            if self._is_main and error.what not in self._warnings:
                self._warnings.add(error.what)
                warn_user(f"{error.what}; this is ignored. {error.fix}".rstrip())

    def log(self, values: dict[str, Any], step: int | None, options: Options) -> None:
        """Log to every tracker; see ``Accelerator.log``."""
        if options:
            self._check_options(options, "log_kwargs")
        step = unwrap_scalar(step)
        if self.recorder is not None and self._is_main:
            self.recorder.log(values, step)
        if self.log_with and not self.trackers and self._is_main and not self._has_warned_log:
            self._has_warned_log = True
            warn_user("log() has no effect: no run is open; call init_trackers() first")
        for tracker in self.trackers if self._is_main else ():
            try:
                tracker.log(values, step=step, **options.get(tracker.name, {}))
            except SettingError:  # noqa: PERF203 - a function for it is a frame more in each step
                raise
            except Exception as error:
                if id(tracker) not in self._logged:
                    raise  # the first call: something is set up wrongly
                self._count_failure(tracker, error)
            else:
                self._logged.add(id(tracker))

    def _count_failure(self, tracker: GeneralTracker, error: Exception) -> None:
        """Count a call that failed in the middle of a training; warn of the first of each tracker."""
        self._failures[tracker.name] += 1
        if self._failures[tracker.name] == 1:
            text = str(error).strip() or "no message"
            warn_user(
                f"{tracker.name} failed to log, and the training goes on without it; later calls try again. "
                f"{type(error).__name__}: {text}"
            )

    def get(self, name: str, unwrap: bool) -> Any:
        """Return the running tracker of that name; see ``Accelerator.get_tracker``."""
        names = list(dict.fromkeys(_tracker_names([*self.log_with, *self.trackers, *self._ended])))
        if names and str(name) not in names:
            raise UnknownNameError("tracker", str(name), names, why=f"log_with asked for: {', '.join(names)}")
        if not names or not self._is_main:
            return BlankTracker()
        for tracker in (*self.trackers, *self._ended):
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        raise SettingError(f"the tracker {str(name)!r} has not started", fix="call init_trackers() first")

    def finish(self) -> None:
        """End every run, also when one of them raises."""
        ended, self.trackers = self.trackers, []
        self._ended = ended or self._ended
        for name, count in self._failures.items():
            warn_user(f"{name} has lost what {count} call{'s' * (count > 1)} of log() gave it")
        self._failures.clear()
        self._logged.clear()
        # Where a ``finally`` of the program ends the training; an exit ends the runs that are still open.
        has_failed = isinstance(sys.exc_info()[1], Exception)
        added = _without(ended, self._started)
        track.finish_runs(_without(ended, added), added, has_failed)


def _tracker_names(chosen: Iterable[Any], include_objects: bool = True) -> list[str]:
    """Return names of trackers; with ``include_objects``, of the user's own objects too."""
    return [
        str(each) if isinstance(each, str) else each.name
        for each in chosen
        if include_objects or isinstance(each, str)
    ]


def _without(trackers: Iterable[GeneralTracker], others: Iterable[Any]) -> list[GeneralTracker]:
    """Return the trackers that are none of ``others``, by identity."""
    ids = set(map(id, others))
    return [tracker for tracker in trackers if id(tracker) not in ids]


def filter_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None = None) -> list[Any]:
    """Resolve ``log_with``: members of ``LoggerType``, other names, and trackers, each once.

    Args:
        log_with: a name, a tracker, or several; ``"all"`` is every one whose package is installed and, if it
            needs a folder for logs, has one.
        logging_dir: that folder.

    Raises:
        UnknownNameError: there is no such tracker.
        MissingExtraError: a package is not installed.
        SettingError: a tracker needs a folder, or something given is neither a name nor a tracker.
    """
    chosen = track.choose_trackers(log_with, logging_dir)
    return [_logger_type(each) if isinstance(each, str) else each for each in chosen]


def get_available_trackers() -> list[Any]:
    """The trackers whose package is installed, as members of ``LoggerType`` or, of other packages, names."""
    return [_logger_type(name) for name in track.available_trackers(logging_dir="")]


def _logger_type(name: str) -> Any:
    return next((member for member in LoggerType if member == name), name)
