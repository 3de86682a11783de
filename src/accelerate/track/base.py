"""The tracker protocol: a thin adapter that sends the metrics of one run to a library.

A tracker is made without starting anything, begins its run in ``start`` and ends it in ``finish``. Each file
of this folder is a tracker; users derive their own from ``GeneralTracker``.
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

from accelerate.core import packages
from accelerate.core.errors import MissingExtraError, SettingError
from accelerate.world.world import get_rank_info

F = TypeVar("F", bound=Callable[..., Any])


class UnfinishedTrackerError(SettingError, NotImplementedError):
    """A tracker class lacks an attribute that every tracker has."""


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

    def refuse(self, key: str, value: object) -> None:
        """Warn, once for a key, that the library cannot log a value and that it is left out."""
        refused = self.__dict__.setdefault("_refused", set())
        if key not in refused:
            refused.add(key)
            kind = type(value).__name__
            warnings.warn(f"{self.name} cannot log {key!r}: a {kind} is left out", stacklevel=2)


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


def on_main_process(function: F) -> F:
    """Decorate a tracker's method: it runs on rank 0 only, unless ``main_process_only`` is False."""

    @functools.wraps(function)
    def wrapper(self: GeneralTracker, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs) if not self.main_process_only or is_main_process() else None

    return wrapper  # type: ignore[return-value]


# --- conversion of values for libraries

# What a logged value is to a library that has a call of its own for each; the first that fits.
_VALUE_KINDS: tuple[tuple[str, Any], ...] = (("text", str), ("mapping", Mapping), ("number", (int, float)))


def unwrap_scalar(value: Any) -> Any:
    """Return the number of a one-element tensor or array; any other value unchanged."""
    item = getattr(value, "item", None)
    return item() if callable(item) and math.prod(getattr(value, "shape", (0,))) == 1 else value


def unwrap_scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with one-element tensors and arrays as numbers, also in nested mappings."""
    return {
        key: unwrap_scalars(value) if isinstance(value, Mapping) else unwrap_scalar(value)
        for key, value in values.items()
    }


def to_json_types(value: Any) -> Any:
    """Convert a configuration to the types of JSON: other values, such as paths and dtypes, become text.

    Namespaces and dataclasses become dicts of their fields.
    """
    value = unwrap_scalar(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, argparse.Namespace | types.SimpleNamespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(key): to_json_types(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json_types(each) for each in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    return next((kind(value) for kind in (int, float) if isinstance(value, kind)), str(value))


def flatten_config(values: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a configuration: ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``; lists become text."""
    flat: dict[str, Any] = {}
    for key, value in to_json_types(values).items():
        if isinstance(value, dict) and value:
            flat |= flatten_config(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat


class ProjectTracker(GeneralTracker):
    """The base of trackers whose library begins a run by ``init(project=...)`` and returns the run.

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
        """The library's object of the run."""
        return self.run

    @on_main_process
    def start(self) -> None:
        """Begin the run."""
        library: Any = importlib.import_module(self.packages[0])
        self.run: Any = library.init(project=self.run_name, **self.init_kwargs)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration with its nesting."""
        self.run.config.update(to_json_types(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log all values that the library supports; ``kwargs`` go to the run's ``log``."""
        self.run.log(unwrap_scalars(values), step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run.finish()
