"""Output of ranks: loggers, and progress bars of tqdm.

By default only the main process logs, and one process of each machine shows a bar.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from accelerate.core import environ
from accelerate.core.errors import AccelerateError, SettingError, UnknownNameError, WorldError
from accelerate.world import world
from accelerate.world.world import get_rank_info

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # Python 3.10 cannot subscribe it

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class MultiProcessAdapter(_Adapter):
    """A logger whose records begin with ``[RANK n]`` and come from the selected ranks.

    Every logging method takes two more keywords:

        main_process_only: only rank 0 logs; True unless ``in_order`` is.
        in_order: all ranks log, one after the other. A collective call: every rank must make it.

    Before the process group is open the rank is the launcher's, or 0.
    """

    def __init__(self, logger: logging.Logger, extra: Any = None) -> None:
        super().__init__(logger, extra)
        self._logged: set[tuple[Any, ...]] = set()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the message with its rank in front."""
        msg, kwargs = super().process(msg, kwargs)
        return f"[RANK {get_rank_info()[0]}] {msg}", kwargs

    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        """Log on the selected ranks (see the class).

        Raises:
            WorldError: ``in_order`` among several processes before their group is open.
        """
        in_order: bool = kwargs.pop("in_order", False)
        main_only: bool = kwargs.pop("main_process_only", not in_order)
        # The record names the caller's line, not this one.
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        if in_order and not main_only:
            self._log_in_rank_order(level, msg, args, kwargs)
        elif self.isEnabledFor(level) and self._should_log(main_only):
            msg, processed = self.process(msg, kwargs)
            self.logger.log(level, msg, *args, **processed)

    @staticmethod
    def _should_log(main_process_only: bool) -> bool:
        return not main_process_only or get_rank_info()[0] == 0

    def _log_in_rank_order(self, level: int, msg: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rank, _, size = get_rank_info()
        if size > 1 and world.current() is None:
            raise WorldError(
                "a log with in_order=True needs all ranks, and their group is not open yet",
                fix="create PartialState() or Accelerator() first",
            )
        from accelerate.world import collective  # it imports torch: loggers are also made without torch

        kwargs["stacklevel"] += 1
        # Every rank enters every barrier, also when its level hides the record: levels may differ by rank.
        for turn in range(size):
            if turn == rank and self.isEnabledFor(level):
                message, processed = self.process(msg, dict(kwargs))
                self.logger.log(level, message, *args, **processed)
            collective.barrier()

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Log a warning once for the same message and arguments."""
        key = (*map(str, args), kwargs.get("main_process_only"))
        if key not in self._logged:
            self._logged.add(key)
            # Up to Python 3.10 the frame of ``warning`` counts too.
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + (1 if sys.version_info >= (3, 11) else 2)
            self.warning(*args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger that by default logs on the main process only.

    Args:
        name: usually ``__name__``.
        log_level: the lowest level to show, for example ``"INFO"``; None takes
            ``ACCELERATE_LOG_LEVEL``, and without that leaves all levels as they are. A level that is given
            is set on the root logger too, so that other libraries follow.

    Raises:
        UnknownNameError: there is no such level.
    """
    logger = logging.getLogger(name)
    level = log_level or environ.get("ACCELERATE_LOG_LEVEL")
    if level is not None:
        if not isinstance(logging.getLevelName(level.upper()), int):
            raise UnknownNameError("log level", level, LEVELS)
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})


# --- bars


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
