"""Old configuration files as today's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate.cli.options import rows
from accelerate.cli.wizard.flow import classes
from accelerate.cli.wizard.keys import Change, plain, refusal
from accelerate.core.errors import UnknownNameError
from accelerate.core.setting import Setting, checked
from accelerate.launch import files, writing

# What every file of today says, and old ones do not.
_USUAL: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "enable_cpu_affinity": False,
    "mixed_precision": "no",
    "use_cpu": False,
}


def current(values: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    """The values of an old file as a file of today has them: its keys, their prefixes and types.

    Empty tables and lists are left out, and what every file says is filled in.

    Raises:
        SettingError: a value is wrong.
        UnknownNameError: a key is unknown.
    """
    known = {row.path: row for row in rows() if row.in_file}
    new: dict[str, Any] = {}
    for key, value in files.modern(values).items():
        if isinstance(value, dict):
            inside = dict(_section(key, value, known, path))
            new |= {key: inside} if inside else {}
        elif value not in ([], ""):
            new[key] = _typed(known[key], value, path) if key in known else value
    for name, value in _USUAL.items():
        new.setdefault(name, value)
    if (new.get("distributed_type"), new["compute_environment"]) == ("NO", "LOCAL_MACHINE"):
        new.setdefault("num_processes", 1)
    return dict(sorted(new.items()))


def _section(
    section: str, table: Mapping[Any, Any], known: Mapping[str, Setting], path: Path
) -> Iterator[tuple[str, Any]]:
    prefixes = {row.prefix for row in known.values() if row.section == section} or {""}
    owners = [cls for cls in classes() if getattr(cls, "__section__", "") == section]
    old_keys = {old: new for cls in owners for old, new in getattr(cls, "__old_keys__", {}).items()}
    for key, value in table.items():
        key = old_keys.get(str(key), key)
        names = (str(key), *(f"{prefix}{key}" for prefix in sorted(prefixes)))
        row = next((known[f"{section}.{name}"] for name in names if f"{section}.{name}" in known), None)
        if value is not None:
            yield (row.name, _typed(row, value, path)) if row else (str(key), value)


def _typed(row: Setting, value: Any, path: Path) -> Any:
    return plain(checked(row, value, f"{path}: {row.path}", text=False))


def update(path: Path) -> tuple[list[Change], Path | None]:
    """Rewrites a file in today's format; a copy of the old one stays beside it if it was changed.

    Returns:
        What changed, and the copy.

    Raises:
        SettingError: the file is missing, cannot be read, or has a wrong key or value; it stays as it is.
    """
    old = files.raw(path)[0]
    new = current(old, path)
    problem = refusal(new, path)
    if isinstance(problem, UnknownNameError):
        raise problem
    changes = list(_changes(old, new))
    if not changes:
        return [], None
    copy = writing.backup(path)
    text = None
    if path.suffix != ".json":
        text = writing.edited(path.read_text(encoding="utf-8"), writing.difference(old, new))
    writing.write(path, writing.text_of(new, path) if text is None else text)
    return changes, copy


def _changes(old: Mapping[Any, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    for keys, value in writing.difference(old, new).items():
        before: Any = old
        for key in keys:
            before = before.get(key) if isinstance(before, Mapping) else None
        yield Change(".".join(map(str, keys)), before, value)
