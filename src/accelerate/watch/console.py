"""Progress and consoles by rich, shown by one process of each machine.

The module ``accelerate.utils.rich`` shows these, and only when ``ACCELERATE_ENABLE_RICH`` is set, as in 1.x.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate.core import environ
from accelerate.core.errors import AccelerateError
from accelerate.watch.place import place

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

T = TypeVar("T")


class RichDisabledError(AccelerateError, ModuleNotFoundError):
    """The module is there only when its variable is set."""


def require() -> None:
    """Refuses when the variable is not set.

    Raises:
        RichDisabledError: it is not.
    """
    if not environ.flag("ACCELERATE_ENABLE_RICH"):
        raise RichDisabledError(
            "accelerate.utils.rich is switched off",
            why="programs that ask is_rich_available() must opt in",
            fix="set ACCELERATE_ENABLE_RICH=1",
        )


def console(*, main_process_only: bool = True, **options: Any) -> Console:
    """A ``rich.console.Console`` that is quiet on all processes but the first of each machine.

    Args:
        main_process_only: False lets every process write.
        options: arguments of the class; ``quiet=True`` makes it quiet everywhere.
    """
    from rich.console import Console

    if main_process_only and place()[1] != 0:
        options["quiet"] = True
    return Console(**options)


def progress(*columns: str | ProgressColumn, main_process_only: bool = True, **options: Any) -> Progress:
    """A ``rich.progress.Progress`` that is shown by one process of each machine.

    Args:
        columns: what its lines show; rich's own choice when none is given.
        main_process_only: False shows it on every process.
        options: arguments of the class; ``disable=True`` hides it everywhere.
    """
    from rich.progress import Progress

    if main_process_only and place()[1] != 0:
        options["disable"] = True
    return Progress(*columns, **options)


def track(
    sequence: Iterable[T], description: str = "Working...", *, main_process_only: bool = True, **options: Any
) -> Iterable[T]:
    """``rich.progress.track``, shown by one process of each machine.

    Args:
        sequence: what is iterated over, on every process.
        description: the text beside the bar.
        main_process_only: False shows it on every process.
        options: arguments of that function; ``disable=True`` hides it everywhere.
    """
    from rich.progress import track as tracked

    if main_process_only and place()[1] != 0:
        options["disable"] = True
    return tracked(sequence, description, **options)
