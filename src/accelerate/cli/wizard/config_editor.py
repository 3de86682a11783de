"""Changes of a configuration file: single keys, and all of an old file as today's.

A key is found by any of its spellings and checked by its setting.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.cli.options import SCRIPT_SETTINGS, launch_settings
from accelerate.core import environ
from accelerate.core.errors import AccelerateError, SettingError, UnknownNameError
from accelerate.core.setting import Setting, convert_value
from accelerate.launch import config_files, config_writer
from accelerate.launch.config_files import ConfigFile, KeyPath, get_nested
from accelerate.launch.launch_request import LaunchRequest, build_request, launcher_settings
from accelerate.launch.launcher import check_request, choose_kind

# What every file of today says, and old ones do not.
_DEFAULT_VALUES: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "enable_cpu_affinity": False,
    "mixed_precision": "no",
    "use_cpu": False,
}


def config_path(named: str | None) -> Path:
    """The file to write: the one named by flag or variable, else the default one."""
    path = named or environ.get("ACCELERATE_CONFIG_FILE")
    return config_files.expand_home(path) if path else config_files.default_file()


def find_setting(key: str) -> Setting:
    """The setting of a key: ``fsdp_version``, ``fsdp_config.fsdp_version`` or ``fsdp_config.version``.

    Raises:
        UnknownNameError: there is none; the nearest is suggested.
    """
    rows = [row for row in launch_settings() if row.in_file]
    section, _, name = key.rpartition(".")
    for row in rows:
        if name in (row.name, row.name.removeprefix(row.prefix)) and row.section == section:
            return row
        if not section and name == row.name:
            return row
    spellings = [row.path if section else row.name for row in rows]
    raise UnknownNameError("key", key, spellings, where="in --set")


def parse_pair(pair: str) -> tuple[Setting, Any]:
    """``"key=value"`` as a setting and its checked value; None for ``key=none`` and ``key=``.

    Raises:
        SettingError: it is no pair, or the value does not fit.
        UnknownNameError: there is no such key.
    """
    key, sign, text = pair.partition("=")
    if not sign:
        raise SettingError(f"--set {pair} has no value", fix=f"write --set {key.strip()}=value")
    row, value = find_setting(key.strip()), text.strip()
    if value.lower() in ("", "none", "null"):
        return row, None
    return row, file_value(convert_value(row, value, f"--set {row.name}", text=True))


def file_value(value: Any) -> Any:
    """A value as a file holds it."""
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class ConfigValueChange:
    """One key of a file before and after; None for "not there"."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        if self.new is None:
            return f"{self.key}: taken out (it was {self.old!r})"
        return f"{self.key}: {self.new!r}" + ("" if self.old is None else f" (it was {self.old!r})")


def set_keys(path: Path, pairs: Iterable[str]) -> list[ConfigValueChange]:
    """Change the keys of a file that ``pairs`` name, and leave everything else as it stands.

    Args:
        path: the file; made if there is none.
        pairs: ``"key=value"``, the last one wins.

    Raises:
        SettingError: a pair is wrong, the file cannot be read, or a launch would refuse what it would say.
            The file stays as it is.
    """
    settings = {row.name: (row, value) for row, value in map(parse_pair, pairs)}
    old = config_files.read_raw(path)[0] if os.path.exists(path) else {}
    new = _upgrade_if_old(old)
    changes = {_key_path(new, row): value for row, value in settings.values()}
    new = config_files.apply_changes(new, changes)
    problem = find_refusal(new, path)
    if problem is not None:
        problem.what += "; nothing was written"
        raise problem
    save_config(path, old, new)
    return [
        ConfigValueChange(row.path, get_nested(old, _key_path(old, row)), value)
        for row, value in settings.values()
        if get_nested(old, _key_path(old, row)) != value
    ]


def _upgrade_if_old(values: Mapping[Any, Any]) -> dict[str, Any]:
    """The values as they stand, unless a key of them exists no more: then all of them as today's."""
    new = config_files.upgrade_keys(values)
    return new if new.keys() - values.keys() else {str(key): value for key, value in values.items()}


def _key_path(values: Mapping[Any, Any], row: Setting) -> KeyPath:
    """Return the key path of a setting in a file."""
    if not row.section:
        return (row.name,)
    table = values.get(row.section)
    short = row.name.removeprefix(row.prefix)
    return row.section, short if isinstance(table, dict) and short in table else row.name


def save_config(
    path: Path, old: Mapping[Any, Any], new: Mapping[str, Any], *, keeps_copy: bool = False
) -> Path | None:
    """Write ``new`` over a file that holds ``old``.

    Returns:
        A copy of the file as it was: with ``keeps_copy``, and where its comments could not be kept.
    """
    text = path.read_text(encoding="utf-8") if os.path.exists(path) else ""
    edited_text = None
    if path.suffix != ".json" and not (os.path.exists(path) and config_files.read_raw(path)[2]):
        edited_text = config_writer.edit_yaml(text, config_writer.find_changes(old, new))
    loses_comments = edited_text is None and "#" in text
    copy = config_writer.copy_to_backup(path) if keeps_copy or loses_comments else None
    new_text = config_writer.format_config(new, path) if edited_text is None else edited_text
    config_writer.write_file(path, new_text)
    return copy


def find_refusal(
    values: Mapping[str, Any], path: Path, *, on_this_machine: bool = False
) -> AccelerateError | None:
    """Return the error of ``accelerate launch`` for a file with these values; None if it is valid.

    Args:
        values: those of the file.
        path: the file, for the error.
        on_this_machine: plan the launch too: are its devices, its hostfile and its meeting point there?
    """
    try:
        request = _request_of_file(values, path)
        check_request(request)
        kind = choose_kind(request)
        kind.check(request)
        # SageMaker's needs a script, which a file does not name.
        if on_this_machine and request.settings.compute_environment != "AMAZON_SAGEMAKER":
            kind.plan(request)
    except AccelerateError as error:
        return error
    return None


def _request_of_file(values: Mapping[str, Any], path: Path) -> LaunchRequest:
    file = ConfigFile(path, config_files.upgrade_keys(values))
    # A module, so that nobody looks for a script.
    return build_request(file, {"module": True}, ("module",), SCRIPT_SETTINGS, env={})


def _without_leftovers(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The values without those that have no effect."""
    file = _request_of_file(values, path).file
    assert file is not None
    left = ConfigFile(path, values)
    for keys in file.leftovers:
        if get_nested(values, keys) is not None:
            left = left.without(keys, "")
    return dict(left.values)


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
    classes = (*launcher_settings(), *SCRIPT_SETTINGS)
    owners = [cls for cls in classes if getattr(cls, "__section__", "") == section]
    old_keys = {old: new for cls in owners for old, new in config_files.old_section_keys(cls).items()}
    for key, value in table.items():
        key = old_keys.get(str(key), key)
        names = (str(key), *(f"{prefix}{key}" for prefix in sorted(prefixes)))
        row = next((known[f"{section}.{name}"] for name in names if f"{section}.{name}" in known), None)
        if value is not None:
            yield (row.name, _typed_value(row, value, path)) if row else (str(key), value)


def _typed_value(row: Setting, value: Any, path: Path) -> Any:
    return file_value(convert_value(row, value, f"{path}: {row.path}", text=False))


def update_file(path: Path) -> tuple[list[ConfigValueChange | str], Path | None]:
    """Rewrite a file in today's format; a copy of the old one stays beside it if it was changed.

    What has no effect is taken out: options of a way of training that nothing asks for, keys that stand
    twice.

    Returns:
        What changed, a line each, and the copy.

    Raises:
        SettingError: the file is missing, cannot be read, or has a wrong key or value; it stays as it is.
    """
    old, _, duplicates = config_files.read_raw(path)
    new = upgrade_values(old, path)
    problem = find_refusal(new, path)
    if isinstance(problem, UnknownNameError):
        raise problem
    if problem is None:
        new = upgrade_values(_without_leftovers(new, path), path)
    changes = [*duplicates, *_list_changes(old, new)]
    return changes, save_config(path, old, new, keeps_copy=True) if changes else None


def _list_changes(old: Mapping[Any, Any], new: Mapping[str, Any]) -> Iterator[ConfigValueChange]:
    for keys, value in config_writer.find_changes(old, new).items():
        yield ConfigValueChange(".".join(map(str, keys)), get_nested(old, keys), value)
