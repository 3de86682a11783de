"""Old configuration files as today's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate.cli.options import launch_settings
from accelerate.cli.wizard.config_key_editor import ConfigValueChange, file_value, find_refusal
from accelerate.cli.wizard.questions import all_classes
from accelerate.core.errors import UnknownNameError
from accelerate.core.setting import Setting, convert_value
from accelerate.launch import config_files, config_writer

# What every file of today says, and old ones do not.
_DEFAULT_VALUES: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "enable_cpu_affinity": False,
    "mixed_precision": "no",
    "use_cpu": False,
}


def upgrade_values(values: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    """The values of an old file as a file of today has them: its keys, their prefixes and types.

    Empty tables and lists are left out, and what every file says is filled in.

    Raises:
        SettingError: a value is wrong.
        UnknownNameError: a key is unknown.
    """
    settings_by_path = {row.path: row for row in launch_settings() if row.in_file}
    new: dict[str, Any] = {}
    for key, value in config_files.upgrade_keys(values).items():
        if isinstance(value, dict):
            inside = dict(_upgrade_section(key, value, settings_by_path, path))
            new |= {key: inside} if inside else {}
        elif value not in ([], ""):
            new[key] = _typed_value(settings_by_path[key], value, path) if key in settings_by_path else value
    for name, value in _DEFAULT_VALUES.items():
        new.setdefault(name, value)
    if (new.get("distributed_type"), new["compute_environment"]) == ("NO", "LOCAL_MACHINE"):
        new.setdefault("num_processes", 1)
    return dict(sorted(new.items()))


def _upgrade_section(
    section: str, table: Mapping[Any, Any], known: Mapping[str, Setting], path: Path
) -> Iterator[tuple[str, Any]]:
    prefixes = {row.prefix for row in known.values() if row.section == section} or {""}
    owners = [cls for cls in all_classes() if getattr(cls, "__section__", "") == section]
    old_keys = {old: new for cls in owners for old, new in getattr(cls, "__old_keys__", {}).items()}
    for key, value in table.items():
        key = old_keys.get(str(key), key)
        names = (str(key), *(f"{prefix}{key}" for prefix in sorted(prefixes)))
        row = next((known[f"{section}.{name}"] for name in names if f"{section}.{name}" in known), None)
        if value is not None:
            yield (row.name, _typed_value(row, value, path)) if row else (str(key), value)


def _typed_value(row: Setting, value: Any, path: Path) -> Any:
    return file_value(convert_value(row, value, f"{path}: {row.path}", text=False))


def update_file(path: Path) -> tuple[list[ConfigValueChange], Path | None]:
    """Rewrites a file in today's format; a copy of the old one stays beside it if it was changed.

    Returns:
        What changed, and the copy.

    Raises:
        SettingError: the file is missing, cannot be read, or has a wrong key or value; it stays as it is.
    """
    old = config_files.read_raw(path)[0]
    new = upgrade_values(old, path)
    problem = find_refusal(new, path)
    if isinstance(problem, UnknownNameError):
        raise problem
    changes = list(_list_changes(old, new))
    if not changes:
        return [], None
    copy = config_writer.copy_to_backup(path)
    text = None
    if path.suffix != ".json":
        text = config_writer.edit_yaml(path.read_text(encoding="utf-8"), config_writer.find_changes(old, new))
    config_writer.write_file(path, config_writer.format_config(new, path) if text is None else text)
    return changes, copy


def _list_changes(old: Mapping[Any, Any], new: Mapping[str, Any]) -> Iterator[ConfigValueChange]:
    for keys, value in config_writer.find_changes(old, new).items():
        before: Any = old
        for key in keys:
            before = before.get(key) if isinstance(before, Mapping) else None
        yield ConfigValueChange(".".join(map(str, keys)), before, value)
