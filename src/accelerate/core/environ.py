"""The environment: read in this file and written in this file, nowhere else.

Everything else asks here once and then passes plain values around. ``child`` makes the environment of a
process to be started without touching this one's.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager

TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
FALSE = frozenset({"0", "false", "f", "no", "n", "off"})

# Variables that are a protocol rather than a setting: they describe the run and have no flag or key.
# name -> what it means. Settings declare their own variables next to their own field (core/setting.py),
# schedulers theirs in world/clusters.py, devices and strategies theirs in their own file.
PROTOCOL: dict[str, str] = {
    "ACCELERATE_TORCH_DEVICE": "fixes the torch device of this process, for example 'cpu'",
    "ACCELERATE_LOG_LEVEL": "level of the loggers made by accelerate.logging.get_logger",
    "ACCELERATE_BYPASS_DEVICE_MAP": "true: prepare a model spread over devices under data parallelism",
    "ACCELERATE_INIT_INCLUDE_BUFFERS": "true: init_empty_weights leaves buffers without memory too",
    "ACCELERATE_ASKED": "what the launcher was asked for, and by which flag or line of a file, as JSON",
    "ACCELERATE_STOP_FOLDER": "where a process tells its launcher that it stops in good order when asked",
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
    """A copy of the whole environment."""
    return dict(os.environ)


def get(name: str, default: str | None = None) -> str | None:
    """The value of one variable; an empty value counts as unset."""
    return os.environ.get(name) or default


def first(names: Iterable[str]) -> tuple[str, str] | None:
    """The first of ``names`` that is set, with its value."""
    for name in names:
        value = get(name)
        if value is not None:
            return name, value
    return None


def flag(name: str, default: bool = False) -> bool:
    """A variable read as yes or no (``1 true t yes y on`` / ``0 false f no n off``).

    Raises:
        SettingError: the value is none of these words.
    """
    value = get(name)
    return default if value is None else truth(value, where=f"the environment variable {name}")


def truth(text: str, *, where: str) -> bool:
    """``text`` as yes or no; ``where`` names its source in the error."""
    word = text.strip().lower()
    if word in TRUE:
        return True
    if word in FALSE:
        return False
    from accelerate.core.errors import SettingError

    raise SettingError(
        f"{where} is {text!r}, which is neither yes nor no", fix="use true or false (1/0, yes/no, on/off)"
    )


def unset(values: Mapping[str, str]) -> dict[str, str]:
    """Those of ``values`` whose variables are not set; one that is set to nothing is set."""
    return {name: value for name, value in values.items() if name not in os.environ}


def write(values: Mapping[str, object | None]) -> None:
    """Sets variables of this process; None removes one."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(value)


@contextmanager
def patched(values: Mapping[str, object | None], *, clear: bool = False) -> Generator[None]:
    """Sets variables for the length of a ``with`` block and then puts back what they were before.

    Args:
        values: the variables; None removes one.
        clear: remove all others too. Otherwise they are never touched, since other threads read them.
    """
    before = snapshot()
    gone = dict.fromkeys(before) if clear else {}
    try:
        write({**gone, **values})
        yield
    finally:
        inside = os.environ if clear else values
        write({name: before.get(name) for name in (*inside, *(gone if clear else ()))})


def child(
    values: Mapping[str, object | None], environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of a process to be started: this one's, with ``values`` set or (None) removed.

    Args:
        values: what is set or removed.
        environment: the one to begin with instead of this process's own.
    """
    made = snapshot() if environment is None else dict(environment)
    for name, value in values.items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = str(value)
    return made
