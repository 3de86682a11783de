"""Flags, keys and values that are promised and not built yet: asked for, they are refused in words.

One table. Whoever builds a part declares its settings next to its own code and takes its row out of here; a
test holds the table against the promised flags, so that none is ever silently ignored. The names are those of
the public command line and of the configuration files, which is why they may stand here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate.core.errors import NotBuiltError, UnknownNameError
from accelerate.launch.files import ConfigFile

ANY = "*"


@dataclass(frozen=True)
class Part:
    """One part that will come.

    Attributes:
        plan: what will come.
        switches: flags that stand alone, blank-separated.
        flags: flags that take a value.
        section: its table in configuration files; every key of it is also a flag, with ``prefix``.
        prefix: what a key inside the section may or may not carry.
        keys: the keys of the section, without the prefix.
        old_keys: keys that only files have.
        top_keys: its keys at the top level of a file.
        values: setting -> its values that ask for this part.
        neutral: flag or key -> values that ask for nothing here, blank-separated; ``*`` for any.
    """

    plan: str
    switches: str = ""
    flags: str = ""
    section: str = ""
    prefix: str = ""
    keys: str = ""
    old_keys: str = ""
    top_keys: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, str] = field(default_factory=dict)


PARTS: tuple[Part, ...] = ()

_NOTHING = ("", "no", "none", "false", "[]", "{}")


def switches() -> dict[str, Part]:
    """Flags that stand alone, by name."""
    return {name: part for part in PARTS for name in part.switches.split()}


def flags() -> dict[str, Part]:
    """Flags that take a value, by name."""
    named = {name: part for part in PARTS for name in part.flags.split()}
    keyed = {part.prefix + key: part for part in PARTS for key in part.keys.split()}
    return {name: part for name, part in (named | keyed).items() if name not in switches()}


def top_keys() -> dict[str, Part]:
    """Keys of the top level of a configuration file; the sections are among them."""
    found = {key: part for part in PARTS for key in part.top_keys.split()}
    return found | {part.section: part for part in PARTS if part.section}


def refuse_flags(given: Mapping[str, Any]) -> None:
    """Refuses the flags that ask for something not built yet; ``given``: name -> value, None for "not given".

    Raises:
        NotBuiltError: there is one.
    """
    known = flags() | switches()
    for name, value in given.items():
        # A switch that was typed asks, whatever it is called; a value may say "nothing".
        if name in known and value is not None and not _is_neutral(known[name], name, value, typed=True):
            raise _refusal(f"--{name}", known[name])


def refuse_keys(file: ConfigFile) -> None:
    """Refuses the keys of a file that ask for something not built yet; checks their spelling first.

    Raises:
        UnknownNameError: a section has a key that it will never have.
        NotBuiltError: a key asks for something.
    """
    for key, part in top_keys().items():
        if key == part.section:
            _check_section(file, part)
        elif key in file.values and not _is_neutral(part, key, file.values[key]):
            raise _refusal(f"{file.at(key)}: {key}", part)


def refuse_values(given: Iterable[tuple[str, str, Any]]) -> None:
    """Refuses values that ask for something not built yet; ``given``: (setting, where it stands, value).

    Raises:
        NotBuiltError: there is one.
    """
    for name, where, value in given:
        for part in PARTS:
            if str(value).lower() in part.values.get(name, "").lower().split():
                raise _refusal(f"{value} ({where})", part)


def values(name: str) -> tuple[str, ...]:
    """The values of a setting that will come, in order."""
    return tuple(value for part in PARTS for value in part.values.get(name, "").split())


def _check_section(file: ConfigFile, part: Part) -> None:
    table = file.section(part.section)
    known = {part.prefix + key for key in f"{part.keys} {part.old_keys}".split()}
    for key in table:
        if str(key) not in known and part.prefix + str(key) not in known:
            where = f"in {file.at(part.section, str(key))}"
            raise UnknownNameError(f"key of {part.section}", str(key), known, where=where)
    for key, value in table.items():
        if not _is_neutral(part, str(key), value):
            raise _refusal(f"{file.at(part.section, str(key))}: {part.section}.{key}", part)


def _is_neutral(part: Part, name: str, value: Any, *, typed: bool = False) -> bool:
    allowed = part.neutral.get(name, "").split()
    if allowed == [ANY] or str(value).lower() in allowed:
        return True
    return not typed and str(value).lower() in _NOTHING


def _refusal(what: str, part: Part) -> NotBuiltError:
    return NotBuiltError(f"{what} is not built yet", why=part.plan, fix="leave it out")
