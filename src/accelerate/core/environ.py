"""The environment: read in this file and written in this file, nowhere else.

All other modules read variables here once and pass plain values around. ``make_child_environment`` makes
the environment of a process to be started without touching this one's.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, MutableMapping
from contextlib import contextmanager

TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
FALSE = frozenset({"0", "false", "f", "no", "n", "off"})

# Variables that are a protocol rather than a setting: they describe the run and have no flag or key.
# name -> meaning. Settings declare their own variables next to their own field (core/setting.py),
# schedulers theirs in world/clusters.py, devices and strategies theirs in their own file.
PROTOCOL_VARIABLES: dict[str, str] = {
    "ACCELERATE_TORCH_DEVICE": "fixes the torch device of this process, for example 'cpu'",
    "ACCELERATE_LOG_LEVEL": "level of the loggers made by accelerate.logging.get_logger",
    "ACCELERATE_BYPASS_DEVICE_MAP": "true: prepare a model spread over devices under data parallelism",
    "ACCELERATE_INIT_INCLUDE_BUFFERS": "true: init_empty_weights leaves buffers without memory too",
    "ACCELERATE_ASKED": "the options requested of the launcher, each with its flag or file line, as JSON",
    "ACCELERATE_QUIET": "true: no progress bars of loading, saving and estimating; set by launch --quiet",
    "ACCELERATE_OUTER_LAUNCH": "what a launch has set, as JSON, for a launch that its script starts",
    "ACCELERATE_SCHEDULER_TASK": "a scheduler's task and its process, for what that starts and is no task",
    "ACCELERATE_STOP_FOLDER": "where a process tells its launcher that it stops in good order when asked",
    "ACCELERATE_ERROR_FILE": "where the command line leaves its error instead of printing it, as JSON",
    "FORK_LAUNCHED": "true: the process group belongs to a parent and is not destroyed here",
    "RANK": "rank of this process in the world",
    "WORLD_SIZE": "number of processes in the world",
    "LOCAL_RANK": "rank of this process on its machine",
    "LOCAL_WORLD_SIZE": "number of processes on this machine",
    "GROUP_RANK": "rank of this machine",
    "MASTER_ADDR": "address of rank 0",
    "MASTER_PORT": "port of rank 0",
    "OMP_NUM_THREADS": "threads of each process's CPU kernels",
    "HF_HOME": "root of the Hugging Face cache, holds accelerate/default_config.yaml",
    "XDG_CACHE_HOME": "root of the user's cache when HF_HOME is unset",
}


def snapshot() -> dict[str, str]:
    """Return a copy of the whole environment."""
    return dict(os.environ)


def get(name: str, default: str | None = None) -> str | None:
    """Return the value of one variable; an empty value counts as unset."""
    return os.environ.get(name) or default


def get_flag(name: str, default: bool = False) -> bool:
    """Return a variable as a boolean (``1 true t yes y on`` / ``0 false f no n off``).

    Raises:
        SettingError: the value is none of these words.
    """
    value = get(name)
    return default if value is None else parse_bool(value, where=f"the environment variable {name}")


def parse_bool(text: str, *, where: str) -> bool:
    """Return ``text`` as a boolean; ``where`` names its origin in the error."""
    token = text.strip().lower()
    if token in TRUE:
        return True
    if token in FALSE:
        return False
    from accelerate.core.errors import SettingError

    raise SettingError(
        f"{where} is {text!r}, which is neither yes nor no", fix="use true or false (1/0, yes/no, on/off)"
    )


def filter_unset(values: Mapping[str, str]) -> dict[str, str]:
    """Return the part of ``values`` whose variables are not set; an empty variable counts as set."""
    return {name: value for name, value in values.items() if name not in os.environ}


def set_variables(
    values: Mapping[str, object | None],
    environment: MutableMapping[str, str] = os.environ,
    *,
    overwrite: bool = True,
) -> None:
    """Set variables of this process, or of another environment; None removes one.

    Without ``overwrite``, those that are set already stay; an empty variable counts as set.
    """
    for name, value in values.items():
        if name in environment and not overwrite:
            continue
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = str(value)


@contextmanager
def patch_environment(values: Mapping[str, object | None], *, clear: bool = False) -> Generator[None]:
    """Set variables for the length of a ``with`` block and restore them at its end.

    Args:
        values: the variables; None removes one.
        clear: remove all others too. Otherwise they are never touched, since other threads read them.
    """
    before = snapshot()
    removed = dict.fromkeys(before) if clear else {}
    try:
        set_variables({**removed, **values})
        yield
    finally:
        changed = os.environ if clear else values
        set_variables({name: before.get(name) for name in (*changed, *removed)})


def make_child_environment(values: Mapping[str, object | None]) -> dict[str, str]:
    """Return the environment of a process to be started: this one, with ``values`` set or (None) removed."""
    result = snapshot()
    set_variables(values, result)
    return result
