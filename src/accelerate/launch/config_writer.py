"""Writing configuration files: whole or not at all, and a change of one key leaves the rest as it stands."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate.core.errors import SettingError
from accelerate.launch.config_files import KeyPath, apply_changes


def write_file(path: Path, text: str) -> None:
    """Put ``text`` into a file: a reader sees the old file or the new one, never a part.

    A pipe or a device, such as ``/dev/stdout``, is written to.

    Raises:
        SettingError: it cannot be written; what was there is still there.
    """
    # A link stays one: what it points to is what is written.
    target = path.resolve()
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        number, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(number, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, _file_mode(target))
            os.replace(temporary, target)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise SettingError(
            f"the configuration file {path} cannot be written",
            why=str(error),
            fix="name another place with --config_file",
        ) from error


def _file_mode(target: Path) -> int:
    """The permissions of the file that is replaced, else those of any new file."""
    if target.exists():
        return target.stat().st_mode & 0o7777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def copy_to_backup(path: Path) -> Path:
    """Copy a file beside itself, under a name that is free, and return the copy."""
    names = (path.with_name(f"{path.name}.bak{number or ''}") for number in range(1000))
    free = next(name for name in names if not name.exists())
    write_file(free, path.read_text(encoding="utf-8"))
    return free


def format_config(values: Mapping[str, Any], path: Path) -> str:
    """The text of a configuration file: YAML, or JSON if the name ends in ``.json``."""
    if path.suffix == ".json":
        return json.dumps(values, indent=2) + "\n"
    import yaml

    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)


def find_changes(old: Mapping[Any, Any], new: Mapping[str, Any]) -> dict[KeyPath, Any]:
    """The changes, by path of two keys at most, that make ``new`` of ``old``."""
    changes: dict[KeyPath, Any] = {(key,): None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict) and value:
            inner = find_changes(before, value)
            changes.update({(key, *keys): changed for keys, changed in inner.items() if len(keys) == 1})
        elif key not in old or type(before) is not type(value) or before != value:
            changes[(key,)] = value
    return changes


def edit_yaml(text: str, changes: Mapping[KeyPath, Any]) -> str | None:
    """YAML text with some keys changed and everything else, comments too, as it stood.

    Args:
        text: valid YAML, a table of keys.
        changes: new values by path; None takes a key out.

    Returns:
        The new text; None where it is laid out in a way that cannot be changed line by line.
    """
    import yaml

    old = yaml.safe_load(text) or {}
    new = text if text.endswith("\n") or not text else f"{text}\n"
    for keys, value in changes.items():
        changed = _edit_key(new, keys, value)
        if changed is None:
            return None
        new = changed
    try:
        same = yaml.safe_load(new) == apply_changes(old, changes)
    except yaml.YAMLError:
        return None
    return new if same else None


def _edit_key(text: str, keys: KeyPath, value: Any) -> str | None:
    import yaml

    node = yaml.compose(text, yaml.SafeLoader)
    if node is None:
        return text + _yaml_lines(keys, value)
    name, table, lines = node, node, text.splitlines(keepends=True)
    for depth, key in enumerate(keys):
        if table.id != "mapping" or table.flow_style:
            return None
        pair = next((pair for pair in table.value if pair[0].value == key), None)
        if pair is None:
            if value is None:
                return text
            indent = " " * table.start_mark.column
            at = _last_line(table)
            new = "".join(
                indent + line for line in _yaml_lines(keys[depth:], value).splitlines(keepends=True)
            )
            return "".join([*lines[:at], new, *lines[at:]])
        name, table = pair
    first, last = name.start_mark.line, _last_line(table)
    if value is None:
        return "".join([*lines[:first], *lines[max(last, first + 1) :]])
    if table.id != "scalar" or isinstance(value, dict | list):
        indent = " " * name.start_mark.column
        new = "".join(indent + line for line in _yaml_lines(keys[-1:], value).splitlines(keepends=True))
        return "".join([*lines[:first], new, *lines[max(last, first + 1) :]])
    scalar = _yaml_lines(("x",), value).removeprefix("x:").strip()
    start, end = table.start_mark.index, table.end_mark.index
    return f"{text[:start]}{'' if text[start - 1 : start].isspace() else ' '}{scalar}{text[end:]}"


def _last_line(node: Any) -> int:
    """The number of the line behind the last one that a node takes, comments behind it left out."""
    children: Sequence[Any] = ()
    if node.id == "mapping" and not node.flow_style:
        children = [value for _, value in node.value]
    elif node.id == "sequence" and not node.flow_style:
        children = node.value
    if children:
        return _last_line(children[-1])
    mark = node.end_mark
    # A block scalar ends at the beginning of the next line, any other node within its last one.
    return mark.line if mark.column == 0 and mark.index else mark.line + 1


def _yaml_lines(keys: KeyPath, value: Any) -> str:
    """``a:`` and below it ``  b: value``."""
    import yaml

    for key in reversed(keys):
        value = {key: value}
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
