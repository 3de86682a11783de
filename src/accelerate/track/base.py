"""What a tracker is: a thin sink for the numbers of one run.

A tracker is made without starting anything, begins its run in ``start`` and ends it in ``finish``. Each file
of this folder is one; users derive their own from ``GeneralTracker``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import math
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from accelerate.core import environ, packages
from accelerate.core.errors import MissingExtraError, SettingError
from accelerate.world import clusters, world

F = TypeVar("F", bound=Callable[..., Any])


class UnfinishedTrackerError(SettingError, NotImplementedError):
    """A class of trackers lacks a part that every tracker has."""


class GeneralTracker:
    """Base of all trackers.

    A subclass defines ``name``, ``requires_logging_directory`` and ``tracker``, and overrides the methods.
    Its constructor takes the name of the run, then the folder for logs if it requires one, then options.

    Attributes:
        name: what ``log_with=`` and ``get_tracker`` call it.
        requires_logging_directory: whether the constructor's second argument is the folder for logs.
        tracker: the library's own object of the run, for what is not covered here.
        main_process_only: what is decorated with ``on_main_process`` runs on rank 0 only. An ``Accelerator``
            uses trackers on rank 0 whatever this says; it matters where a script makes trackers itself.
        packages: modules of which one must be installed; the first is the one to install.
        failed: set before ``finish`` when the script ends by an error.

    Args:
        _blank: make one that does nothing.

    Raises:
        UnfinishedTrackerError: the class lacks one of the three attributes.
    """

    name: str
    requires_logging_directory: bool
    main_process_only: bool = True
    packages: ClassVar[tuple[str, ...]] = ()
    failed: bool = False

    if TYPE_CHECKING:  # a subclass that lacks it must be told from one that has it

        @property
        def tracker(self) -> Any: ...

    def __init__(self, _blank: bool = False) -> None:
        missing = [] if _blank else lacking(self)
        if missing:
            raise UnfinishedTrackerError(
                f"the tracker {type(self).__name__} has no {', '.join(missing)}",
                why="every tracker says its name, whether it needs a folder, and what it writes with",
                fix=f"define {' and '.join(missing)} in the class",
            )

    def start(self) -> None:
        """Begins the run."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Stores the hyperparameters of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs ``values``, at ``step`` if there is one; ``kwargs`` are the library's own options."""

    def finish(self) -> None:
        """Ends the run; everything logged is written."""

    @classmethod
    def available(cls) -> bool:
        """Whether its package is installed."""
        return not cls.packages or any(map(packages.installed, cls.packages))

    @classmethod
    def check(cls, logging_dir: object) -> None:
        """Refuses what would fail later.

        Raises:
            MissingExtraError: its package is not installed.
            SettingError: it needs a folder and there is none.
        """
        if not cls.available():
            raise MissingExtraError(cls.packages[0], f'log_with="{cls.name}"')
        if cls.requires_logging_directory and logging_dir is None:
            raise SettingError(
                f'log_with="{cls.name}" needs a folder to write to',
                fix='Accelerator(project_dir="logs", ...), or ProjectConfiguration(logging_dir=...)',
            )

    def refuse(self, key: str, value: object) -> None:
        """Says, once for a key, that a value is left out because the library has no way to log it."""
        said = self.__dict__.setdefault("_refused", set())
        if key not in said:
            said.add(key)
            kind = type(value).__name__
            warnings.warn(f"{self.name} cannot log {key!r}: a {kind} is left out", stacklevel=2)


class BlankTracker(GeneralTracker):
    """Stands for a tracker on processes that have none: whatever is called on it does nothing.

    So ``accelerator.get_tracker("name").log_images(...)`` may stand in a script without a branch on ranks.
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
        """Nothing."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False


def lacking(tracker: GeneralTracker | type[GeneralTracker]) -> list[str]:
    """Which of the three attributes that each tracker defines are missing."""
    known = dir(tracker)
    return [name for name in ("name", "requires_logging_directory", "tracker") if name not in known]


def is_main() -> bool:
    """Whether this is rank 0: by the open world, else by what the launcher says, else a lone process."""
    here = world.current() or clusters.detect(environ.snapshot())
    return here is None or here.rank == 0


def on_main_process(function: F) -> F:
    """A decorator for methods of trackers: they run on rank 0 only, unless ``main_process_only`` is False."""

    @functools.wraps(function)
    def guarded(self: GeneralTracker, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs) if not self.main_process_only or is_main() else None

    return guarded  # type: ignore[return-value]


# --- values as libraries take them


def simple(value: Any) -> Any:
    """A tensor or array of one element as the number in it; anything else as it is."""
    item = getattr(value, "item", None)
    return item() if callable(item) and math.prod(getattr(value, "shape", (0,))) == 1 else value


def scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with tensors and arrays of one element as numbers, also one level down."""
    return {
        key: scalars(value) if isinstance(value, Mapping) else simple(value) for key, value in values.items()
    }


def plain(value: Any) -> Any:
    """A configuration in the types of JSON: what is none of them, such as a path or a dtype, as its text.

    Namespaces and dataclasses are dicts of their fields.
    """
    value = simple(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, argparse.Namespace | types.SimpleNamespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    return next((kind(value) for kind in (int, float) if isinstance(value, kind)), str(value))


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """A configuration without nesting: ``{"a": {"b": 1}}`` is ``{"a.b": 1}``; lists are text."""
    found: dict[str, Any] = {}
    for key, value in plain(values).items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return found


class ProjectTracker(GeneralTracker):
    """Base of trackers whose library begins a run by ``init(project=...)`` and gives an object of that run.

    Args:
        run_name: name of the project.
        kwargs: options of the library's ``init``.
    """

    requires_logging_directory = False
    main_process_only = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self.init_kwargs = run_name, kwargs

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Begins the run."""
        library: Any = importlib.import_module(self.packages[0])
        self.run: Any = library.init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Stores the configuration, nested as it is."""
        self.run.config.update(plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs whatever the library takes; ``kwargs`` go to the run's ``log``."""
        self.run.log(scalars(values), step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Ends the run."""
        self.run.finish()
