"""Progress bars of tqdm and rich, and rich's console, shown by one process of each machine.

The module ``accelerate.utils.rich`` shows those of rich, and only when ``ACCELERATE_ENABLE_RICH`` is set,
as in 1.x.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate.core import environ
from accelerate.core.errors import AccelerateError, SettingError
from accelerate.world.world import get_rank_info

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


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return ``tqdm.auto.tqdm``, shown by one process of each machine.

    Args:
        args: as for tqdm; the first is the iterable.
        main_process_only: False shows a bar on every process.
        kwargs: as for tqdm; ``disable=True`` hides the bar everywhere.

    Raises:
        SettingError: the first argument is True or False, as in early versions of this function.
    """
    from tqdm.auto import tqdm as bar

    if args and isinstance(args[0], bool):
        raise SettingError(
            f"the first argument of tqdm is {args[0]}, which cannot be iterated over",
            fix=f"tqdm(iterable, main_process_only={args[0]})",
        )
    if main_process_only and get_rank_info()[1] != 0:
        kwargs["disable"] = True
    return bar(*args, **kwargs)


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
