"""Progress bars: one per machine, not one per process."""

from __future__ import annotations

from typing import Any

from accelerate.core.errors import SettingError
from accelerate.watch.process_rank import get_rank_info


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
