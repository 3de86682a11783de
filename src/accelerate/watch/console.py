"""Progress bars and consoles of rich, shown by one process of each machine.

The module ``accelerate.utils.rich`` shows these, and only when ``ACCELERATE_ENABLE_RICH`` is set, as in 1.x.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate.core import environ
from accelerate.core.errors import AccelerateError
from accelerate.watch.process_rank import get_rank_info

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

T = TypeVar("T")


class RichDisabledError(AccelerateError, ModuleNotFoundError):
    """``accelerate.utils.rich`` was imported without its environment variable."""


def require_rich_enabled() -> None:
    """Refuse the import when ``ACCELERATE_ENABLE_RICH`` is not set.

    Raises:
        RichDisabledError: the variable is not set.
    """
    if not environ.get_flag("ACCELERATE_ENABLE_RICH"):
        raise RichDisabledError(
            "accelerate.utils.rich is switched off",
            why="programs that ask is_rich_available() must opt in",
            fix="set ACCELERATE_ENABLE_RICH=1",
        )


def console(*, main_process_only: bool = True, **options: Any) -> Console:
    """Return a ``rich.console.Console`` that is quiet on all processes but the first of each machine.

    Args:
        main_process_only: False lets every process write.
        options: arguments of the class; ``quiet=True`` makes it quiet everywhere.
    """
    from rich.console import Console

    if main_process_only and get_rank_info()[1] != 0:
        options["quiet"] = True
    return Console(**options)


def progress(*columns: str | ProgressColumn, main_process_only: bool = True, **options: Any) -> Progress:
    """Return a ``rich.progress.Progress`` that is shown by one process of each machine.

    Args:
        columns: the columns of its lines; rich's default when none is given.
        main_process_only: False shows it on every process.
        options: arguments of the class; ``disable=True`` hides it everywhere.
    """
    from rich.progress import Progress

    if main_process_only and get_rank_info()[1] != 0:
        options["disable"] = True
    return Progress(*columns, **options)


def track(
    sequence: Iterable[T], description: str = "Working...", *, main_process_only: bool = True, **options: Any
) -> Iterable[T]:
    """Iterate with the bar of ``rich.progress.track``, shown by one process of each machine.

    Args:
        sequence: the iterable, on every process.
        description: the text beside the bar.
        main_process_only: False shows it on every process.
        options: arguments of that function; ``disable=True`` hides it everywhere.
    """
    from rich.progress import track as rich_track

    if main_process_only and get_rank_info()[1] != 0:
        options["disable"] = True
    return rich_track(sequence, description, **options)
