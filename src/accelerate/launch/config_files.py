"""Configuration files: where one may lie, reading it, and saying on which line something stands.

A section may hold more than the settings of one class, or hold them in old words. The class says so:
``__old_keys__`` maps keys of old files to today's, ``__elsewhere__`` names settings of the top level that may
stand in it, ``__without_effect__`` maps keys that are taken out to the reason why they do nothing, and
``__asks__`` is the switch that a section which says anything turns on.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any

from accelerate.core import environ
from accelerate.core.errors import SettingError, nearest
from accelerate.core.setting import declared_settings
from accelerate.core.value_types import convert_to, frozen_dataclass

DEFAULT_NAME = "default_config.yaml"
# Types of the group that name neither accelerators nor a strategy: one process; several on the CPU.
NOT_DISTRIBUTED, CPU_GROUP = "NO", "MULTI_CPU"
# Tables of DeepSpeed's JSON that files in use have in this section, for the options <table>_device and so on.
_OFFLOAD_SECTION, _OFFLOAD_TABLES = "deepspeed_config", ("offload_optimizer", "offload_param")
KeyPath = tuple[str, ...]  # of a key in nested tables


def get_nested(values: Mapping[Any, Any], keys: KeyPath) -> Any:
    """Return the value at a key path; None where there is none."""
    value: Any = values
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def apply_changes(values: Mapping[str, Any], changes: Mapping[KeyPath, Any]) -> dict[str, Any]:
    """A copy of nested tables with these keys changed; None takes one out, and an empty table with it."""
    new = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    for keys, value in changes.items():
        table = new
        for key in keys[:-1]:
            inside = table.get(key)
            table[key] = table = inside if isinstance(inside, dict) else {}
        if value is None:
            table.pop(keys[-1], None)
        else:
            table[keys[-1]] = value
    for keys in changes:
        if len(keys) == 2 and new.get(keys[0]) == {}:
            del new[keys[0]]
    return new


@frozen_dataclass
class ConfigFile:
    """The content of one configuration file.

    Attributes:
        path: the file.
        values: its keys and values as they stand there, old formats made new.
        lines: the line of each key, by path: ``("mixed_precision",)``, ``("fsdp_config", "fsdp_version")``;
            empty for JSON.
        is_explicit: the user named it; otherwise it is the default file.
        problems: a sentence for each thing in it that has no effect. Files of 1.x have such things: a launch
            says them, and refuses them in strict mode.
        leftovers: paths of the keys that were taken out of ``values`` because they have no effect.
    """

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    is_explicit: bool = True
    problems: tuple[str, ...] = ()
    leftovers: tuple[tuple[str, ...], ...] = ()

    def locate(self, *keys: str) -> str:
        """The place of a key in the user's words: ``"config.yaml, line 3"``."""
        line = self.lines.get(keys)
        return f"{self.path}, line {line}" if line else str(self.path)

    def without(self, keys: tuple[str, ...], problem: str) -> ConfigFile:
        """The file without a key, which has no effect for the reason that ``problem`` says."""
        return replace(
            self,
            values=apply_changes(self.values, {keys: None}),
            problems=(*self.problems, problem),
            leftovers=(*self.leftovers, keys),
        )

    def section(self, name: str) -> Mapping[str, Any]:
        """A nested table; empty when absent.

        Raises:
            SettingError: the key holds something else than a table.
        """
        table = self.values.get(name) or {}
        if not isinstance(table, dict):
            raise SettingError(
                f"{self.locate(name)}: {name} is {table!r}, but it is a table of keys",
                fix=f"write the keys of {name} on the lines below it, indented",
            )
        return table

    def section_lines(self, name: str) -> dict[str, int]:
        """The lines of the keys of a section; of the top level for ``""``."""
        depth = 2 if name else 1
        depth_lines = ((keys, line) for keys, line in self.lines.items() if len(keys) == depth)
        return {keys[-1]: line for keys, line in depth_lines if not name or keys[0] == name}


def expand_home(path: str | Path) -> Path:
    """Return a path with a home folder in place of ``~``, which stays where nobody knows that folder.

    ``Path.expanduser`` raises there: in a container without HOME, whose user is in no table of users.
    """
    return Path(os.path.expanduser(path))


def list_names(folder: Path) -> list[str]:
    """Return the names in a folder, for a suggestion; none where it may not be listed, or is not there."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def default_file() -> Path:
    """The file that is used when nobody names one.

    It lies in ``$HF_HOME/accelerate``, else in the user's cache.
    """
    home = environ.get("HF_HOME")
    if home is None:
        cache = environ.get("XDG_CACHE_HOME")
        home = str(Path(cache or "~/.cache", "huggingface"))
    return Path(os.path.expanduser(home), "accelerate", DEFAULT_NAME)


def read_config(path: Path, *, is_explicit: bool = True) -> ConfigFile:
    """Read a YAML file, or a JSON file by its ending.

    Raises:
        SettingError: it is missing, unreadable, not valid, or not a table of keys.
    """
    values, lines, problems = read_raw(path)
    file, notes = ConfigFile(path, upgrade_keys(values), lines, is_explicit), list[str]()
    for old, new, value in _old_keys(values):
        today, place = get_nested(values, new), file.locate(*old)
        # `fp16: false` and `dynamo_backend: NO` ask for nothing.
        is_off = len(old) == 1 and str(value).lower() in ("no", "false")
        if today is None and new[-1].endswith(("_device", "_path")):
            reading = f"read as {new[-1]}: {value}"
            notes.append(f"{place}: {old[-1]} is a table of DeepSpeed's own configuration: {reading}")
        elif today not in (None, "", value) and not is_off:
            notes.append(f"{place}: {old[-1]} has no effect: {'.'.join(new)} is the key for the same by now")
        for keys in (new[:1], new) if old in lines else ():
            lines.setdefault(keys, lines[old])
    return replace(file, problems=(*problems, *notes))


def _old_keys(values: Mapping[Any, Any]) -> Iterator[tuple[KeyPath, KeyPath, Any]]:
    """Yield the path of each key in an old format, that of today's key for the same, and its value there."""
    if isinstance(values.get("fp16"), bool):
        yield ("fp16",), ("mixed_precision",), "fp16" if values["fp16"] else "no"
    table = values.get("dynamo_config", {})
    if values.get("dynamo_backend") not in (None, "") and isinstance(table, dict):
        name = "backend" if "backend" in table else "dynamo_backend"
        yield ("dynamo_backend",), ("dynamo_config", name), values["dynamo_backend"]
    for name in _OFFLOAD_TABLES:
        table = get_nested(values, (_OFFLOAD_SECTION, name))
        for key, value in table.items() if isinstance(table, dict) else ():
            yield (_OFFLOAD_SECTION, name), (_OFFLOAD_SECTION, f"{name}_{key}"), value


def read_raw(path: Path) -> tuple[dict[Any, Any], dict[tuple[str, ...], int], tuple[str, ...]]:
    """(what a file says, as it stands there; the line of each key of its upper two levels; its problems).

    Raises:
        SettingError: as for ``read_config``.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise _missing_file_error(path) from error
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"the configuration file {path} cannot be read", why=str(error)) from error
    problems: list[str] = []
    parse = _parse_json if path.suffix == ".json" else _parse_yaml
    values, lines = parse(path, text, problems)
    if not isinstance(values, dict):
        raise SettingError(
            f"{path} is not a table of keys", why="a configuration file holds lines like 'num_processes: 2'"
        )
    return values, lines, tuple(problems)


class MissingConfigFileError(SettingError, FileNotFoundError):
    """There is no such configuration file."""


def _missing_file_error(path: Path) -> MissingConfigFileError:
    folder = path.parent
    near = nearest(path.name, list_names(folder))
    return MissingConfigFileError(
        f"there is no configuration file {path}",
        why="" if os.path.isdir(folder) else f"there is no folder {folder}",
        fix=f"did you mean {folder / near}?" if near else "",
    )


def _parse_yaml(path: Path, text: str, problems: list[str]) -> tuple[Any, dict[tuple[str, ...], int]]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        node = loader.get_single_node()
        values = {} if node is None else loader.construct_document(node)
        lines = {} if node is None else dict(_key_lines(path, node, loader, problems))
    except SettingError:
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}, line {mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error)
        raise SettingError(f"{place}: this is not valid YAML", why=problem) from error
    except (ValueError, RecursionError) as error:  # a date or number that is none, or nesting without end
        raise SettingError(f"{path}: this is not valid YAML", why=str(error)) from error
    finally:
        loader.dispose()
    return values, lines


def _key_lines(
    path: Path, node: Any, loader: Any, problems: list[str], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], int]]:
    """(path of a key, its line) for two levels; a key that stands twice is a problem, YAML takes the last.

    What a table takes over from others (``<<``) is among its keys by now, with the lines of the others;
    keys of its own win over it.
    """
    if node.id != "mapping" or len(above) == 2:
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        name, line = str(loader.construct_object(key, deep=True)), key.start_mark.line + 1
        is_own_key = node.start_mark.line < line <= node.end_mark.line + 1
        if name in seen and is_own_key and seen[name] > node.start_mark.line:
            problems.append(
                f"{path}, line {line}: the key {name!r} stands twice: line {seen[name]} has no effect"
            )
        if value.id == "scalar" and value.tag.endswith(":int") and ":" in value.value:
            raise SettingError(
                f"{path}, line {line}: {name}: {value.value} is a number of seconds in YAML",
                why="numbers with colons are times of a day",
                fix=f"write {name}: '{value.value}'",
            )
        seen[name] = line
        yield (*above, name), line
        yield from _key_lines(path, value, loader, problems, (*above, name))


def _parse_json(path: Path, text: str, problems: list[str]) -> tuple[Any, dict[tuple[str, ...], int]]:
    import json

    def note_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for key, value in pairs:
            if key in table:
                problems.append(f"{path}: the key {key!r} stands twice: the first has no effect")
            table[key] = value
        return table

    try:
        return json.loads(text or "{}", object_pairs_hook=note_duplicates), {}
    except json.JSONDecodeError as error:
        raise SettingError(f"{path}, line {error.lineno}: this is not valid JSON", why=error.msg) from error
    except RecursionError as error:
        raise SettingError(f"{path}: this is not valid JSON", why=str(error)) from error


def upgrade_keys(values: Mapping[Any, Any]) -> dict[str, Any]:
    """The keys of old formats as today's.

    ``fp16: true`` is ``mixed_precision: fp16``; ``dynamo_backend`` at the top level belongs to
    ``dynamo_config``; the offload tables of DeepSpeed's JSON become keys of their section. Of an old key and
    today's for the same, today's wins. ``num_processes: -1``, ``downcast_bf16: auto`` and empty values say
    nothing.
    """
    new = {str(key): value for key, value in values.items() if value is not None and value != ""}
    if new.get("downcast_bf16") == "auto":
        del new["downcast_bf16"]
    if type(new.get("tee")) is int:  # a number for YAML, but "0:3,1:2" may stand there as well
        new["tee"] = str(new["tee"])
    if new.get("num_processes") == -1:
        del new["num_processes"]
    if new.get("distributed_type") is False:  # a bare NO is YAML's word for false
        new["distributed_type"] = "NO"
    changes: dict[KeyPath, Any] = {}
    for old, today, value in _old_keys(new):
        changes |= {old: None, today: value if get_nested(new, today) is None else get_nested(new, today)}
    return apply_changes(new, changes)


# --- keys that a flag of another name overrules
#
# A flag wins over the key of its own name where settings are loaded (``core/setting.py``). Some say more:
# ``--use_fsdp`` asks for another way of training than ``distributed_type: DEEPSPEED``, ``--multi_gpu`` for
# none of them, and ``--num_machines 1`` for a job in which a machine has no number. A template that is shared
# leaves ``num_processes: "<FILL>"`` to the flag.


def strategy_switches(classes: Iterable[type[Any]]) -> dict[str, str]:
    """Return the switches of the strategies, each with the ``distributed_type`` that asks for it in files."""
    kinds = ((cls, getattr(cls, "__distributed_type__", "")) for cls in classes)
    return {row.name: kind for cls, kind in kinds if kind for row in declared_settings(cls)}


def is_typed(flags: Mapping[str, Any], name: str) -> bool:
    """Return whether a switch was typed, and not as ``false``."""
    value = flags.get(name)
    return value is not None and convert_to(bool, value, "text") == (True, True)


def enabled_switches(
    file: ConfigFile, flags: Mapping[str, Any], env: Mapping[str, str], classes: Collection[type[Any]]
) -> set[str]:
    """Return the switches of strategies that a flag, a variable or the type of the group turns on."""
    kind = str(file.values.get("distributed_type")).upper()
    variables = {row.name: row.variable for cls in classes for row in declared_settings(cls)}
    return {
        switch
        for switch, own_kind in strategy_switches(classes).items()
        if own_kind == kind
        or is_typed(flags, switch)
        or convert_to(bool, env.get(variables[switch] or ""), "text") == (True, True)
    }


def without_overruled_keys(
    file: ConfigFile, flags: Mapping[str, Any], classes: Collection[type[Any]]
) -> ConfigFile:
    """Return the file without the keys that typed flags overrule.

    A type of the group that only names a device stays beside a strategy: it says where to train.
    """
    kind = str(file.values.get("distributed_type")).upper()
    strategies = strategy_switches(classes)
    overruled: set[str] = set()
    if any(is_typed(flags, switch) and kind != strategies[switch] for switch in strategies):
        overruled |= {"distributed_type"} if kind in ("NO", *strategies.values()) else set()
    if is_typed(flags, "multi_gpu"):
        others = (NOT_DISTRIBUTED, CPU_GROUP, *strategies.values())
        overruled |= {"use_cpu"} | ({"distributed_type"} if kind in others else set())
    if str(flags.get("num_machines")) == "1":
        overruled |= {"machine_rank"}
    for row in (row for cls in classes for row in declared_settings(cls)):
        value = file.values.get(row.name)
        is_placeholder = isinstance(value, str) and not convert_to(row.type, value, "file")[0]
        if is_placeholder and flags.get(row.name) is not None and not row.choices:
            overruled.add(row.name)
    if not overruled & file.values.keys():
        return file
    return replace(file, values={key: value for key, value in file.values.items() if key not in overruled})


# --- each setting where its class looks for it


def normalize_sections(file: ConfigFile, classes: Iterable[type[Any]], enabled: Container[str]) -> ConfigFile:
    """The file with each setting where its class looks for it, on the line where it was found.

    Args:
        file: as it was read.
        classes: all classes of settings.
        enabled: the switches of strategies that are on.

    Raises:
        SettingError: something is said twice.
    """
    for cls in classes:
        section: str = getattr(cls, "__section__", "")
        file = _without_unused_keys(file, section, cls, classes)
        if not section or not file.section(section):
            continue
        for old, new in old_section_keys(cls).items():
            if old in file.section(section):
                file = _move_key(file, (section, old), (section, new))
        switch = getattr(cls, "__asks__", "")
        if switch and switch not in file.values:
            file = _replace_values(
                file, {**file.values, switch: True}, {(switch,): file.lines.get((section,))}
            )
        for key in getattr(cls, "__elsewhere__", ()):
            if key not in file.section(section):
                continue
            if cls.__switch__ not in enabled:
                file = _without_leftover_key(file, section, key, cls.__switch__)
                continue
            file = _move_key(file, (section, key), (key,))
            if file.values.get(key) == "auto":  # whoever reads it decides, as when nobody says anything
                file = replace(file, values=apply_changes(file.values, {(key,): None}))
    return file


def _without_leftover_key(file: ConfigFile, section: str, key: str, switch: str) -> ConfigFile:
    """Return the file without a key of a section that nobody asks for.

    Where the section has other keys, a launch says of all together that they have no effect.
    """
    if file.section(section).keys() - {key}:
        return replace(file, values=apply_changes(file.values, {(section, key): None}))
    place = file.locate(section, key)
    return file.without((section,), f"{place}: {section}.{key} has no effect without --{switch}")


def old_section_keys(cls: type[Any]) -> dict[str, str]:
    """Return the keys of old files in the section of a class, with and without its prefix, and today's."""
    old_keys: Mapping[str, str] = getattr(cls, "__old_keys__", {})
    prefix = getattr(cls, "__prefix__", "")
    return {**old_keys, **{prefix + key: new for key, new in old_keys.items()}}


def _without_unused_keys(
    file: ConfigFile, section: str, cls: type[Any], classes: Iterable[type[Any]]
) -> ConfigFile:
    """Return the file without keys that have no effect, in a section also those that nobody has ever read."""
    reasons: dict[str, str] = dict(getattr(cls, "__without_effect__", {}))
    table = file.section(section) if section else file.values
    if section and table:
        prefix = getattr(cls, "__prefix__", "")
        names = {row.name for row in declared_settings(cls) if row.in_file}
        names |= {*reasons, *old_section_keys(cls), *getattr(cls, "__elsewhere__", ())}
        for key in table:
            if isinstance(key, str) and names.isdisjoint((key, f"{prefix}{key}")):
                reasons.update(_unread_reason(file, (section, key), cls, classes))
    for key in [key for key in table if key in reasons]:
        path = (section, key) if section else (key,)
        file = file.without(path, f"{file.locate(*path)}: {key} has no effect: {reasons[key]}")
    return file


def _unread_reason(
    file: ConfigFile, path: tuple[str, str], cls: type[Any], classes: Iterable[type[Any]]
) -> dict[str, str]:
    """Return why an unknown key of a section does nothing, by key; empty where it is a slip for a known one.

    Accelerate 1.x reads past every unknown key of a section, and files in use have some.

    Raises:
        SettingError: it is a setting of another place of the file, or the name of an option in code.
    """
    section, key = path
    prefix = getattr(cls, "__prefix__", "")
    name, rows = key.removeprefix(prefix), [row for row in declared_settings(cls) if row.in_file]
    renamed = {row.field: f"did you mean {row.name!r}?" for row in rows}
    fix = renamed.get(name) or place_of_setting(name, classes) or place_of_setting(key, classes)
    if fix:
        raise SettingError(f"unknown key of {section} {key!r} in {file.locate(*path)}", fix=fix)
    if name in {each.name for each in fields(cls)}:
        return {key: "only the script's code can give it, to its plugin"}
    options = [row.name.removeprefix(prefix) for row in rows]
    if nearest(name, options):
        return {}
    return {key: f"{section} has no such option, and in Accelerate 1.x nothing reads it"}


def place_of_setting(name: str, classes: Iterable[type[Any]]) -> str:
    """Return where a setting is given, for one that stands elsewhere in a file; "" for no setting."""
    for cls in classes:
        for row in declared_settings(cls):
            if row.name == name and row.in_file:
                return f"write {name} " + (f"below {row.section}" if row.section else "at the top level")
            if name in (row.name, *(flag.lstrip("-") for flag in row.flags)):
                if row.in_file:
                    return f"did you mean {row.name!r}?"
                kind = getattr(cls, "__distributed_type__", "MULTI_GPU" if name == "multi_gpu" else "")
                instead = f"write distributed_type: {kind}" if kind else f"add {row.flags[0]} to the command"
                return f"leave it out, and {instead}"
    return ""


def _move_key(file: ConfigFile, old: tuple[str, str], new: tuple[str, ...]) -> ConfigFile:
    if get_nested(file.values, new) is not None:
        raise SettingError(
            f"{file.path} gives {new[-1]} twice",
            why=f"{file.locate(*old)}: {'.'.join(old)}, and {file.locate(*new)}: {'.'.join(new)}",
            fix="keep one of them",
        )
    values = apply_changes(file.values, {old: None, new: get_nested(file.values, old)})
    return _replace_values(file, values, {new: file.lines.get(old)})


def _replace_values(
    file: ConfigFile, values: Mapping[str, Any], lines: Mapping[tuple[str, ...], int | None]
) -> ConfigFile:
    new_lines = {keys: line for keys, line in lines.items() if line is not None}
    return replace(file, values=values, lines={**file.lines, **new_lines})
