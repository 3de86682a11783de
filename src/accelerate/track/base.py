"""The tracker protocol: a thin adapter that sends the metrics of one run to a library.

A tracker is made without starting anything, begins its run in ``start`` and ends it in ``finish``. Each file
of this folder is a tracker; users derive their own from ``GeneralTracker``.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from accelerate.core import packages
from accelerate.core.errors import MissingExtraError, SettingError, warn_user
from accelerate.track.protocol.logged_values import (
    LoggedTable,
    flatten_config,
    render_figure,
    to_images,
    to_json_config,
    to_json_types,
    to_table,
    unwrap_scalar,
    unwrap_scalars,
)
from accelerate.world.world import current, get_rank_info

__all__ = [
    "BlankTracker",
    "GeneralTracker",
    "LibraryTracker",
    "ProjectTracker",
    "UnfinishedTrackerError",
    "explain_missing_account",
    "flatten_config",
    "is_main_process",
    "missing_attributes",
    "on_main_process",
    "runs_here",
    "to_json_config",
    "to_json_types",
    "unwrap_scalar",
    "unwrap_scalars",
]

F = TypeVar("F", bound=Callable[..., Any])


class UnfinishedTrackerError(SettingError, NotImplementedError):
    """A tracker class lacks an attribute that every tracker has."""


@contextmanager
def explain_missing_account(library: str, words: str, fix: str, why: str = "") -> Generator[None]:
    """Turn a library's error for a missing account into one that says what to type.

    Args:
        library: its name.
        words: some of its own error; other errors stay as they are.
        fix: what to type, with an account and without.
        why: the reason; by default that it sends what is logged.

    Raises:
        SettingError: there is no account.
    """
    try:
        yield
    except Exception as error:
        if words not in str(error):
            raise
        raise SettingError(
            f"{library} has no API key",
            why=why or "it sends what is logged to an account, unless it is told to write a file",
            fix=fix,
        ) from error


class GeneralTracker:
    """The base of all trackers.

    A subclass defines ``name``, ``requires_logging_directory`` and ``tracker``, and overrides the methods.
    Its constructor takes the name of the run, then the folder for logs if it requires one, then options.

    Attributes:
        name: its name for ``log_with=`` and ``get_tracker``.
        requires_logging_directory: whether the constructor's second argument is the folder for logs.
        tracker: the library's own object of the run, for features without a method here.
        main_process_only: methods decorated with ``on_main_process`` run on rank 0 only. An ``Accelerator``
            always uses trackers on rank 0; this matters where a script makes trackers itself.
        packages: modules of which one must be installed; the first is the one to install.
        failed: set before ``finish`` when the script ends by an error.
        in_all: ``log_with="all"`` starts it too.

    Args:
        _blank: make a tracker that does nothing.

    Raises:
        UnfinishedTrackerError: the class lacks one of the three attributes.
    """

    name: str
    requires_logging_directory: bool
    main_process_only: bool = True
    packages: ClassVar[tuple[str, ...]] = ()
    failed: bool = False
    in_all: ClassVar[bool] = True

    if TYPE_CHECKING:  # so that a subclass without it is recognized at run time

        @property
        def tracker(self) -> Any: ...

    def __init__(self, _blank: bool = False) -> None:
        missing = [] if _blank else missing_attributes(self)
        if missing:
            raise UnfinishedTrackerError(
                f"the tracker {type(self).__name__} has no {', '.join(missing)}",
                why="every tracker says its name, whether it needs a folder, and what it writes with",
                fix=f"define {' and '.join(missing)} in the class",
            )

    def start(self) -> None:
        """Begin the run."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the hyperparameters of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log ``values``, at ``step`` if there is one; ``kwargs`` are the library's own options."""

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images, if the library has them.

        Args:
            values: name -> an image or a list of them; ``protocol/logged_values.py`` says what is an image.
            step: of all of them.
            kwargs: the library's own options.
        """
        self.leave_out("images")

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, given by its rows or as a data frame, if the library has tables (``_write_table``).

        Args:
            table_name: its name.
            columns: their names.
            data: the rows.
            dataframe: of pandas or polars, instead of the two.
            step: the step it belongs to.
            kwargs: the library's own options.
        """
        if type(self)._write_table is GeneralTracker._write_table:
            self.leave_out("tables")
        elif runs_here(self):
            self._write_table(table_name, to_table(table_name, columns, data, dataframe), step, **kwargs)

    def _write_table(self, name: str, table: LoggedTable, step: int | None, **kwargs: Any) -> None:
        """Log a table whose rows are as long as its columns; ``kwargs`` go to the library's method."""

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Log a figure of matplotlib, saved with ``save_kwargs``: an image where a library has no figure."""
        if type(self).log_images is GeneralTracker.log_images:
            self.leave_out("figures")
        else:
            self.log_images({artifact_file: render_figure(figure, **save_kwargs)})

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file, in the folder ``artifact_path`` of the run, if the library stores files."""
        self.leave_out("files")

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Store every file below a folder, in the folder ``artifact_path`` of the run."""
        if type(self).log_artifact is GeneralTracker.log_artifact:
            self.leave_out("files")
            return
        for folder, _, files in sorted(os.walk(local_dir)):
            inner = os.path.normpath(os.path.join(artifact_path or "", os.path.relpath(folder, local_dir)))
            for file in sorted(files):
                self.log_artifact(os.path.join(folder, file), None if inner == "." else inner)

    def finish(self) -> None:
        """End the run; everything logged is written."""

    @classmethod
    def is_available(cls) -> bool:
        """Return True when its package is installed."""
        return not cls.packages or any(map(packages.is_installed, cls.packages))

    @classmethod
    def check(cls, logging_dir: object) -> None:
        """Refuse a set-up that would fail later.

        Raises:
            MissingExtraError: its package is not installed.
            SettingError: it needs a folder and there is none.
        """
        if not cls.is_available():
            raise MissingExtraError(cls.packages[0], f'log_with="{cls.name}"')
        if cls.requires_logging_directory and logging_dir is None:
            raise SettingError(
                f'log_with="{cls.name}" needs a folder to write to',
                fix='Accelerator(project_dir="logs", ...), or ProjectConfiguration(logging_dir=...)',
            )

    def log_by_kind(self, values: Mapping[str, Any], **writers: Callable[[str, Any], Any]) -> None:
        """Give each value to the writer of its kind, and refuse those that have none.

        Args:
            values: name -> value; one-element tensors and arrays count as numbers.
            writers: ``number``, ``text`` and ``mapping``, each called with the name and the value.
        """
        for key, value in unwrap_scalars(values).items():
            kind = next((kind for kind, types in _VALUE_KINDS if isinstance(value, types)), "")
            writers.get(kind, self.refuse)(key, value)

    def refuse_options(self, method: str, options: Mapping[str, Any]) -> None:
        """Refuse options of a method that the library gives none.

        Raises:
            SettingError: there are options.
        """
        if options:
            raise SettingError(
                f"options of {self.name}'s {method} are {dict(options)}",
                why="it takes no options",
                fix="leave them out",
            )

    def drop_captions(self, key: str, value: Any) -> list[Any]:
        """Return the contents of images; warn, once, that the library has no captions if there are some."""
        images = to_images(key, value)
        if any(image.caption for image in images):
            self.leave_out("captions of images")
        return [image.content for image in images]

    def refuse(self, key: str, value: object) -> None:
        """Warn, once for a key, that the library cannot log a value and that it is left out."""
        self._warn_once(key, f"{self.name} cannot log {key!r}: a {type(value).__name__} is left out")

    def leave_out(self, kind: str) -> None:
        """Warn, once for a kind (``"images"``), that the library has none and that they are left out."""
        if not missing_attributes(self):  # a blank one leaves out everything
            self._warn_once(f"all {kind}", f"{self.name} has no {kind}: they are left out of {self.name}")

    def _warn_once(self, about: str, message: str) -> None:
        said: set[str] = self.__dict__.setdefault("_said", set())
        if about not in said:
            said.add(about)
            warn_user(message)


class BlankTracker(GeneralTracker):
    """The tracker of ranks that have none: every call on it does nothing.

    So a script may call ``accelerator.get_tracker("name").log_images(...)`` without a branch on ranks.
    """

    def __init__(self) -> None:
        super().__init__(_blank=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return BlankTracker()

    def __call__(self, *args: Any, **kwargs: Any) -> BlankTracker:
        return self

    def __getitem__(self, key: Any) -> BlankTracker:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        """Do nothing."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False


def missing_attributes(tracker: GeneralTracker | type[GeneralTracker]) -> list[str]:
    """Return which of the three attributes of every tracker are missing."""
    attributes = dir(tracker)
    return [name for name in ("name", "requires_logging_directory", "tracker") if name not in attributes]


def is_main_process() -> bool:
    """Return True on rank 0, by the process group, else by the launcher's variables, else always."""
    return get_rank_info()[0] == 0


def runs_here(tracker: GeneralTracker) -> bool:
    """Return True where ``tracker`` logs; without a world the environment is read once in a process."""
    if not getattr(tracker, "main_process_only", False):  # of a class that derives from none of ours
        return True
    world = current()
    if world is not None:
        return world.rank == 0
    process = os.getpid()
    known: tuple[int, bool] = tracker.__dict__.get("_main", (0, False))
    if known[0] != process:
        known = tracker.__dict__["_main"] = (process, is_main_process())
    return known[1]


def on_main_process(function: F) -> F:
    """Decorate a tracker's method: it runs on rank 0 only if ``main_process_only`` is True there."""

    @functools.wraps(function)
    def wrapper(self: GeneralTracker, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs) if runs_here(self) else None

    return wrapper  # type: ignore[return-value]


# What a logged value is to a library that has a call of its own for each; the first that fits.
_VALUE_KINDS: tuple[tuple[str, Any], ...] = (("text", str), ("mapping", Mapping), ("number", (int, float)))


class LibraryTracker(GeneralTracker):
    """The base of trackers that send to an object of a library.

    Args:
        run_name: name of the run, or of the project.
        kwargs: options with which the library begins the run.

    Attributes:
        run_attribute: the attribute that holds the library's object of the run.
    """

    requires_logging_directory = False
    run_attribute: ClassVar[str] = "run"
    run_name: str | None
    init_kwargs: dict[str, Any]

    def __init__(self, run_name: str | None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self.init_kwargs = run_name, kwargs

    @property
    def _library(self) -> Any:
        """The module of the library."""
        return importlib.import_module(self.packages[0])

    @property
    def tracker(self) -> Any:
        """The library's object of the run."""
        return getattr(self, self.run_attribute)


class ProjectTracker(LibraryTracker):
    """The base of trackers whose library begins a run by ``init(project=...)`` and returns the run.

    Args:
        run_name: name of the project.
        kwargs: options of the library's ``init``.

    Attributes:
        missing_account: words of the library's error without an account, and what to type then.
    """

    main_process_only = False
    missing_account: ClassVar[tuple[str, str] | None] = None

    @on_main_process
    def start(self) -> None:
        """Begin the run.

        Raises:
            SettingError: there is no account.
        """
        explained = self.missing_account
        with explain_missing_account(self.packages[0], *explained) if explained else nullcontext():
            self.run: Any = self._library.init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration with its nesting."""
        self.run.config.update(to_json_config(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log all values that the library supports; ``kwargs`` go to the run's ``log``."""
        self.run.log(unwrap_scalars(values), step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images, several under one name; ``kwargs`` go to the run's ``log``."""
        image = self._library.Image
        images = {
            key: [image(content, caption=text or None) for content, text in to_images(key, value)]
            for key, value in values.items()
        }
        self.run.log(images, step=step, **kwargs)

    def _write_table(self, name: str, table: LoggedTable, step: int | None, **kwargs: Any) -> None:
        shown = self._library.Table(columns=table.columns, data=table.rows)
        self.run.log({name: shown}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run.finish()
