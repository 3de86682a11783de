"""The declaration of settings: flag, variable, YAML key, question, help and errors are derived from it.

    @frozen_dataclass
    class JobSettings:
        num_processes: int | None = setting(None, help="how many processes to start on this machine")

declares ``--num_processes`` (and ``--num-processes``), ``ACCELERATE_NUM_PROCESSES`` and the key
``num_processes``. ``load`` fills the class from all sources and records the origin of each value.
Precedence: code > flag > environment > scheduler > file > default. A wrong value is an error whether it
wins or not.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import field
from enum import Enum
from functools import cache
from types import SimpleNamespace
from typing import Any, Generic, Literal, TypeVar, cast, get_args, get_origin

from accelerate.core import environ
from accelerate.core.errors import SettingError, UnknownNameError
from accelerate.core.value_types import UNIONS, convert_to, frozen_dataclass, is_choice, wrong_value

T = TypeVar("T")
SOURCES = ("code", "flag", "environment", "scheduler", "file", "default")


@frozen_dataclass
class Setting:
    """One declared setting and everything that is derived from it.

    Attributes:
        name: its name in files, flags and arguments: the field's, with the prefix of its class.
        field: the field that declares it and holds its value.
        type: the type of its values.
        types: its members if it is a union, else itself alone.
        flags: spellings on the command line, the first is shown in help; empty when there is no flag.
        switch: whether the flag stands alone (``--cpu``) instead of taking a value.
        variable: the environment variable, or None when there is none.
        in_file: whether it may stand in a configuration file.
        section: the nested table of the YAML file it lives in, "" for the top level.
        prefix: the prefix that a key inside the section may omit (``fsdp_``).
        choices: allowed values, empty for any.
        aliases: other spellings of choices: lower-case text -> choice.
        topic: heading of the help.
        question: the wizard's question; empty for none.
        offered: the answer that the wizard offers in a new file, where it is not the default.
        when: the wizard asks only if these settings have one of these values, by name.
        fallback: the value that its reader takes where no source gives one; a launch does not pass it on.
        details: further facts, for the room of the class; ``meant``: texts that are no choice -> the
            choices that an error suggests for them.
    """

    name: str
    field: str
    type: Any
    types: tuple[Any, ...]
    default: Any
    help: str
    flags: tuple[str, ...]
    switch: bool
    is_common: bool
    variable: str | None
    in_file: bool
    section: str
    prefix: str
    choices: tuple[Any, ...]
    aliases: Mapping[str, Any]
    topic: str
    question: str
    offered: Any
    when: Mapping[str, Container[Any]]
    fallback: Any
    details: Mapping[str, Any]

    @property
    def spellings(self) -> tuple[str, ...]:
        """All spellings of the flag: ``--a_b`` is also ``--a-b``."""
        both = ((flag, flag.replace("_", "-")) for flag in self.flags)
        return tuple(dict.fromkeys(spelling for pair in both for spelling in pair))

    @property
    def path(self) -> str:
        """The key as written in a file: ``fsdp_config.fsdp_version``."""
        return f"{self.section}.{self.name}" if self.section else self.name


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    flag: str | None | Literal[True] = True,
    flags: Sequence[str] = (),
    switch: bool = True,
    variable: str | None | Literal[True] = True,
    in_file: bool = True,
    choices: Sequence[Any] = (),
    aliases: Mapping[str, Any] | None = None,
    topic: str = "",
    question: str = "",
    offered: Any = None,
    when: Mapping[str, Container[Any]] | None = None,
    factory: Any = dataclasses.MISSING,
    name: str = "",
    type: Any = None,
    fallback: Any = None,
    details: Mapping[str, Any] | None = None,
) -> Any:
    """Declare a setting as a dataclass field.

    Args:
        default: the value when no source gives one.
        help: one line; its variable and key are added automatically.
        flag: its spelling on the command line; True derives ``--<name>``, None means there is none.
        flags: more spellings (torchrun's own, short ones).
        switch: a yes/no setting's flag stands alone; False makes it take true or false.
        variable: environment variable; True derives ``ACCELERATE_<NAME>`` (see ``declared_settings``), None
            means there is none.
        in_file: whether it may stand in a configuration file.
        choices: allowed values.
        aliases: other spellings of choices: lower-case text -> choice.
        topic: heading of the help; empty takes the class's ``__topic__``.
        question: the wizard's question; empty for none.
        offered: the answer that the wizard offers in a new file, where it is not the default.
        when: the wizard asks only if these settings have one of these values, by name.
        factory: makes the default, for mutable values.
        name: its name where it is not the field's.
        type: the type of its values where the field may hold more than text can say. Of a setting whose
            default is None, None is a value too.
        fallback: what the reader takes where no source gives a value.
        details: further facts, for the room of the class; ``meant``: texts that are no choice -> the
            choices that an error suggests for them.
    """
    metadata = {
        "setting": {
            "help": help,
            "in_file": in_file,
            "aliases": aliases or {},
            "question": question,
            "offered": offered,
            "when": when or {},
            "fallback": fallback,
            "details": details or {},
        },
        "name": name,
        "type": type,
        "flag": flag,
        "flags": tuple(flags),
        "switch": switch,
        "variable": variable,
        "choices": tuple(choices),
        "topic": topic,
    }
    if factory is not dataclasses.MISSING:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


# The types of annotations, by text and module: few different ones occur.
_annotations: dict[tuple[str, str], Any] = {}


@cache
def declared_settings(cls: type) -> tuple[Setting, ...]:
    """Return the settings of a dataclass, in order of declaration.

    A class may set ``__section__`` (its nested YAML table), ``__prefix__`` (of its keys and flags, and of the
    names of its fields, which may leave it out), ``__variables__`` (the beginning of its variables),
    ``__topic__`` (the heading of its flags in help), ``__first__`` (fields that help and questions show
    first) and ``__common__`` (names whose flags the short help shows).
    """
    section: str = getattr(cls, "__section__", "")
    prefix: str = getattr(cls, "__prefix__", "")
    modules = {n: base.__module__ for base in reversed(cls.__mro__) for n in inspect.get_annotations(base)}
    first: tuple[str, ...] = getattr(cls, "__first__", ())
    fields = sorted(dataclasses.fields(cls), key=lambda item: [*first, item.name].index(item.name))
    rows: list[Setting] = []
    for item in fields:
        if not item.metadata.get("setting"):
            continue
        meta = item.metadata
        name = meta["name"] or f"{prefix}{item.name.removeprefix(prefix)}"
        variables: str = getattr(cls, "__variables__", "ACCELERATE_")
        variable = f"{variables}{name.upper()}" if meta["variable"] is True else meta["variable"]
        default = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
        kind: Any = meta["type"] or item.type
        if isinstance(kind, str):
            # typing.get_type_hints compiles each text anew, which takes longer than all else about settings.
            key = kind, modules[item.name]
            if key not in _annotations:
                _annotations[key] = eval(kind, vars(sys.modules[modules[item.name]]))
            kind = _annotations[key]
        kind = kind | None if default is None else kind
        kinds = get_args(kind) if get_origin(kind) in UNIONS else (kind,)
        # int | Literal["auto"] has no choices.
        members = [each for each in kinds if each is not type(None)]
        is_literal = all(get_origin(each) is Literal for each in members)
        choices = tuple(choice for each in members for choice in get_args(each)) if is_literal else ()
        flag = f"--{name}" if meta["flag"] is True else meta["flag"]
        rows.append(
            Setting(
                **meta["setting"],
                name=name,
                field=item.name,
                type=kind,
                types=kinds,
                default=default,
                flags=(*((flag,) if flag else ()), *meta["flags"]),
                is_common=name in getattr(cls, "__common__", ()),
                switch=meta["switch"] and set(kinds) <= {bool, type(None)},
                variable=variable,
                section=section,
                prefix=prefix,
                choices=meta["choices"] or choices,
                topic=meta["topic"] or getattr(cls, "__topic__", ""),
            )
        )
    return tuple(rows)


@frozen_dataclass
class SettingOrigin:
    """The origin of one value.

    Attributes:
        source: one of ``SOURCES``.
        where: in the user's words: ``"--num_processes"``, ``"ACCELERATE_..."``, ``"config.yaml: key"``.
        value: the value after checking.
    """

    source: str
    where: str
    value: Any


@frozen_dataclass
class SettingsWithOrigins(Generic[T]):
    """An instance of a settings class and, per field, every origin of a value, the winner first."""

    value: T
    origins: dict[str, tuple[SettingOrigin, ...]]

    def origin(self, name: str) -> SettingOrigin:
        """Return the origin of the value in use."""
        return self.origins[name][0]

    def is_given(self, name: str) -> bool:
        """Return True when a source gave the value, so that it is not the default."""
        return self.origin(name).source != "default"


def load_settings(
    cls: type[T],
    *,
    code: Mapping[str, Any] | None = None,
    flags: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    scheduler: Mapping[str, SettingOrigin] | None = None,
    file: Mapping[str, Any] | None = None,
    file_name: str = "the configuration file",
    lines: Mapping[str, int] | None = None,
    container: Callable[..., Any] | None = None,
    owner: str = "",
) -> SettingsWithOrigins[T]:
    """Load the settings ``cls`` from all sources; None in ``code`` or ``flags`` means "not given".

    Args:
        cls: a dataclass of settings.
        code: values given in Python, by field name.
        flags: values typed on the command line, by field name (text or typed).
        env: the environment to read; the process's own when None.
        scheduler: values of a scheduler, by field name, each with its variable.
        file: the part of the configuration file that belongs to ``cls`` (its section).
        file_name: how to call that file in errors.
        lines: the line of that file each of these keys stands on, where known.
        container: takes the values by field name, in place of ``cls``.
        owner: the class whose arguments ``code`` holds, for errors.

    Raises:
        SettingError: a value has the wrong type or is not among the choices.
        UnknownNameError: a key of ``file`` is not declared.
    """
    environment = environ.snapshot() if env is None else env
    rows = declared_settings(cls)
    file_values, file_places = _read_section(rows, file, file_name, lines or {}) if file else ({}, {})
    sources: dict[str, Mapping[str, Any]] = {
        "code": code or {},
        "flag": flags or {},
        "environment": {row.name: environment.get(row.variable) or None for row in rows if row.variable},
        "scheduler": {name: each.value for name, each in (scheduler or {}).items()},
        "file": file_values,
    }
    values: dict[str, Any] = {}
    origins: dict[str, tuple[SettingOrigin, ...]] = {}
    of = f" of {owner}" if owner else ""
    for row in rows:
        candidates: list[SettingOrigin] = []
        for source, table in sources.items():
            value = table.get(row.name)
            if value is not None:
                if source == "file":
                    place = file_places[row.name]
                elif scheduler and source == "scheduler":
                    place = scheduler[row.name].where
                else:
                    places = {"code": f"the argument {row.field}{of}", "flag": "".join(row.flags[:1])}
                    place = places.get(source, f"the environment variable {row.variable}")
                text = source in ("flag", "environment", "scheduler")
                value = convert_value(row, value, place, text=text, from_code=source == "code")
                candidates.append(SettingOrigin(source, place, value))
        if row.default is not dataclasses.MISSING:
            candidates.append(SettingOrigin("default", "", row.default))
        if not candidates:
            raise SettingError(f"{row.name} is needed and not given", fix=_suggest_source(row))
        values[row.field] = candidates[0].value
        origins[row.name] = tuple(candidates)
    return SettingsWithOrigins((container or cls)(**values), origins)


def _suggest_source(row: Setting) -> str:
    if row.flags:
        return f"add {row.flags[0]} ..."
    return (
        f"set the variable {row.variable}" if row.variable else f"write {row.path} in the configuration file"
    )


def _read_section(
    rows: Sequence[Setting], table: Mapping[str, Any], file_name: str, lines: Mapping[str, int]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of a section of a file, and the place of each; keys may omit the section's prefix."""
    known = {row.name: row for row in rows if row.in_file}
    section, prefix = (rows[0].section, rows[0].prefix) if rows else ("", "")
    values, places, keys = dict[str, Any](), dict[str, str](), dict[str, str]()
    for key, value in table.items():
        line = lines.get(str(key))
        where = f"{file_name}, line {line}" if line else file_name
        name = key if key in known else f"{prefix}{key}"
        if name not in known:
            raise UnknownNameError(
                f"key of {section}" if section else "key", str(key), known, where=f"in {where}"
            )
        if name in keys:
            raise SettingError(
                f"{file_name} gives {name} twice",
                why=f"{keys[name]!r} and {key!r} are two spellings of it",
                fix="keep one of them",
            )
        keys[name], places[name] = key, f"{where}: {known[name].path}"
        if value != "":
            values[name] = value
    return values, places


def convert_value(row: Setting, value: Any, where: str, *, text: bool, from_code: bool = False) -> Any:
    """Convert ``value`` to the declared type.

    Args:
        row: the setting.
        value: the value of the source.
        where: the source in the user's words.
        text: the source only knows text (flag, variable), so ``"8"`` is a fine whole number.
        from_code: the source is an argument of a constructor, whose name is the field's.

    Raises:
        SettingError: it does not fit; the error says what would.
    """
    fits, result = convert_to(row.type, value, "text" if text else "code" if from_code else "file")
    name = row.field if from_code else row.name
    if not row.choices:
        if fits:
            return result
        raise wrong_value(where, name, row.type, value)
    result = result if fits else value
    if result is None or is_choice(result, row.choices):
        return result
    folded = {str(choice).lower(): choice for choice in row.choices} | dict(row.aliases)
    spelling = "no" if result is False else str(result)  # YAML reads a bare `no` as false
    if spelling.lower() in folded:
        return folded[spelling.lower()]
    choices = [str(choice) for choice in row.choices]
    meant = row.details.get("meant", {}).get(spelling.lower())
    fix = f"did you mean {meant!r}?" if meant else ""
    raise UnknownNameError("value", str(result), choices, where=f"of {name} ({where})", fix=fix)


# ---------------------------------------------------------------- settings that are fields of a public class
#
#     @mutable_dataclass
#     class FSDPSettings:
#         __prefix__ = "fsdp_"
#         min_num_params: int | None = setting(None, help="least parameters of an FSDP unit")
#
#     @describe_fields
#     @dataclass
#     class FullyShardedDataParallelPlugin(FSDPSettings):
#         def __post_init__(self) -> None:
#             self.settings = load_fields(self)
#
# The launcher reads the first class, which imports no torch. The second inherits the fields: its constructor,
# their variables and defaults, and the part of its docstring that explains them follow from the first.


def load_fields(
    instance: object, cls: type[Any] | None = None, *, objects: Mapping[str, Any] | None = None, **code: Any
) -> SettingsWithOrigins[Any]:
    """Load the settings that the fields of ``instance`` are, and write the values into the fields.

    A field that is None takes its variable, then its fallback. A member of an enumeration counts by its name.

    Args:
        instance: an object with such fields.
        cls: the class that declares them; None takes all of the object's own class.
        objects: fields that may hold an object that no text can say, with its type; it stays as it is.
        code: values of settings that count instead of the fields, by name.

    Raises:
        SettingError: a value has the wrong type.
        UnknownNameError: a value is not among the choices.
    """
    declaring: type[Any] = cls or type(instance)
    rows = declared_settings(declaring)
    given: dict[str, Any] = {}
    kept: set[str] = set()
    for row in rows:
        value = code.get(row.name, getattr(instance, row.field))
        if objects and row.field in objects and value is not None and not isinstance(value, str | bool):
            setattr(instance, row.field, _check_object(value, row, objects[row.field], type(instance)))
            kept.add(row.field)
        else:
            if isinstance(value, Enum):
                value = value.name
            given[row.name] = (
                tuple(cast("Collection[Any]", value)) if isinstance(value, set | list) else value
            )
    loaded = load_settings(declaring, code=given, container=SimpleNamespace, owner=type(instance).__name__)
    for row in rows:
        if row.field not in kept:
            value = getattr(loaded.value, row.field)
            setattr(instance, row.field, row.fallback if value is None else value)
    return loaded


def _check_object(value: Any, row: Setting, kind: Any, owner: type[Any]) -> Any:
    kind = kind | row.type
    fits, result = convert_to(kind, value, "code")
    if not fits:
        raise wrong_value(f"the argument {row.field} of {owner.__name__}", row.field, kind, value)
    return result


def describe_fields(cls: type[T]) -> type[T]:
    """Add the fields that are settings to ``Attributes:`` in the docstring of a class."""
    described = "".join(f"    {_describe_field(row)}\n" for row in declared_settings(cls))
    head, section, rest = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    if not section:
        head, raises, rest = head.partition("Raises:\n")
        head, rest = f"{head.rstrip()}\n\n", f"\n{raises}{rest}" if raises else ""
    cls.__doc__ = f"{head}Attributes:\n{described}{rest}"
    return cls


def _describe_field(row: Setting) -> str:
    choices = f": {', '.join(map(str, row.choices))}" if row.choices else ""
    variable = f"``{row.variable}``" if row.variable else ""
    fallback = "" if row.fallback is None else str(row.fallback)
    source = ", ".join(filter(None, (variable, fallback)))
    text = f"{row.field}: {row.help}{choices}{f' ({source})' if source else ''}."
    return textwrap.fill(text, 106, subsequent_indent=" " * 8, break_on_hyphens=False)
