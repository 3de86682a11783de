"""Files of plug-ins that come and go while a test runs. Importing this loads no registry and no setting."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.core import registry
from accelerate.core.registry import Registry
from accelerate.core.setting import Setting, declared_settings


def rows_of(settings: type[Any]) -> list[Setting]:
    """The settings that a class declares."""
    return list(declared_settings(settings))


def reload_plugins(files: Sequence[str]) -> None:
    """Let every registry look at its folder again, and load these files (``device/x.py``) again."""
    importlib.invalidate_caches()
    rooms = {Path(file).parent.name for file in files}
    for file in files:
        sys.modules.pop(f"accelerate.{file.removesuffix('.py').replace('/', '.')}", None)
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("accelerate.")]
    for found in [value for module in modules for value in vars(module).values()]:
        if isinstance(found, Registry) and found.package.rpartition(".")[2] in rooms:
            vars(found).pop("modules", None)
            for file in files:
                found._loaded.pop(Path(file).stem, None)


@contextmanager
def read_anew(group: str) -> Generator[Registry]:
    """The registry of devices as a new process has it, with the entry points of ``group`` read again."""
    registry._external_groups.cache_clear()
    try:
        yield Registry[Any]("device", "accelerate.device", group, exclude=("base", "machine"))
    finally:
        registry._external_groups.cache_clear()
