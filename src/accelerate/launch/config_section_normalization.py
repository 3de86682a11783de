"""Sections of configuration files that hold more than the settings of one class, or hold them in old words.

A class of settings says so about its section: ``__old_keys__`` maps keys of old files to today's,
``__elsewhere__`` names settings of the top level that may stand in it, and ``__asks__`` is the switch that a
section which says anything turns on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from accelerate.core.errors import SettingError
from accelerate.launch.config_files import ConfigFile


def normalize_sections(file: ConfigFile, classes: Iterable[type[Any]]) -> ConfigFile:
    """The file with each setting where its class looks for it, on the line where it was found.

    Args:
        file: as it was read.
        classes: all classes of settings.

    Raises:
        SettingError: something is said twice.
    """
    for cls in classes:
        section: str = getattr(cls, "__section__", "")
        if not section or not file.section(section):
            continue
        for old, new in _old_keys(cls).items():
            if old in file.section(section):
                file = _move_key(file, (section, old), (section, new))
        switch = getattr(cls, "__asks__", "")
        if switch and switch not in file.values:
            file = _replace_values(
                file, {**file.values, switch: True}, {(switch,): file.lines.get((section,))}
            )
        for key in getattr(cls, "__elsewhere__", ()):
            if key in file.section(section):
                file = _move_key(file, (section, key), (key,))
                if file.values[key] == "auto":  # whoever reads it decides, as when nobody says anything
                    file = replace(file, values={k: v for k, v in file.values.items() if k != key})
    return file


def _old_keys(cls: type[Any]) -> Mapping[str, str]:
    """Old key -> today's, with and without the prefix of the section."""
    old: Mapping[str, str] = getattr(cls, "__old_keys__", {})
    prefix = getattr(cls, "__prefix__", "")
    return {**old, **{prefix + key: new for key, new in old.items()}}


def _move_key(file: ConfigFile, old: tuple[str, str], new: tuple[str, ...]) -> ConfigFile:
    table = dict(file.section(old[0]))
    value = table.pop(old[1])
    values = {**file.values, old[0]: table}
    target = table if len(new) == 2 else values
    if new[-1] in target:
        raise SettingError(
            f"{file.path} gives {new[-1]} twice",
            why=f"{file.locate(*old)}: {'.'.join(old)}, and {file.locate(*new)}: {'.'.join(new)}",
            fix="keep one of them",
        )
    target[new[-1]] = value
    return _replace_values(file, values, {new: file.lines.get(old)})


def _replace_values(
    file: ConfigFile, values: Mapping[str, Any], lines: Mapping[tuple[str, ...], int | None]
) -> ConfigFile:
    new_lines = {keys: line for keys, line in lines.items() if line is not None}
    return replace(file, values=values, lines={**file.lines, **new_lines})
